"""A cache of these tests' own, and one bundle for each test to damage."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import preimage
from support.bundles import LAYERS, PROMPTS
from support.tiny import tiny


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREIMAGE_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture(scope="session")
def saved_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "bundle"
    return preimage.capture(tiny("llama"), PROMPTS, LAYERS).save(folder)


@pytest.fixture
def bundle(saved_once: Path, tmp_path: Path) -> Path:
    return shutil.copytree(saved_once, tmp_path / "bundle")
