"""Model folders, prompts and the two ways to call a command that its tests share."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import preimage
from preimage.cli import main
from support.commands import Typed
from support.folders import make_folder


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def own_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Noise floors of tiny models stay out of the user's cache."""
    monkeypatch.setenv("PREIMAGE_CACHE", str(cache))
    return cache


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Model folders: the one that is used, another of its shape, and a wider one."""
    root = tmp_path_factory.mktemp("models")
    return {
        "model": make_folder(root / "model"),
        "other": make_folder(root / "other", seed=1),
        "wide": make_folder(root / "wide", hidden_size=64),
    }


@pytest.fixture
def model(folders: dict[str, Path], own_cache: Path) -> str:
    return str(folders["model"])


@pytest.fixture
def bundle(model: str, tmp_path: Path) -> Path:
    states = preimage.capture(preimage.load(model), ["the cat", "a dog"], [1, 2])
    return states.save(tmp_path / "bundle")


@pytest.fixture
def jsonl(tmp_path: Path) -> Callable[..., str]:
    def write(*rows: object) -> str:
        path = tmp_path / "prompts.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return write


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Typed:
    """The exit code of a command, its stdout and its stderr."""

    def call(*argv: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main([str(argument) for argument in argv])
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return code, captured.out, captured.err

    return call


@pytest.fixture
def document(run: Typed) -> Callable[..., tuple[int, dict[str, Any]]]:
    """The exit code of a command, and the one document it prints with --json."""

    def call(*argv: object) -> tuple[int, dict[str, Any]]:
        code, out, _ = run(*argv, "--json")
        found = json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
        assert isinstance(found, dict)
        assert out.isascii()
        assert out.endswith("}\n")
        return code, found

    return call
