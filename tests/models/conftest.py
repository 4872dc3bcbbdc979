"""Models on disk, made once and copied for each test; a cache of one's own; a mark that code was run."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.folders import VOCABULARY, make_folder, make_tokenizer
from support.gguf_files import write_gguf
from support.tiny import build


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PREIMAGE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("made") / "tiny")


@pytest.fixture
def folder(made_once: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made_once, tmp_path / "tiny")


@pytest.fixture(scope="module")
def gguf_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    module = build("llama", vocab_size=VOCABULARY, tie_word_embeddings=False)
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    return write_gguf(path, module, make_tokenizer(adds_bos=False))


@pytest.fixture
def gguf_file(gguf_once: Path, tmp_path: Path) -> Path:
    return shutil.copy(gguf_once, tmp_path / "tiny.gguf")


@pytest.fixture
def mark(tmp_path: Path) -> Iterator[Path]:
    """Appears only if somebody opened a pickle or ran the code of a model."""
    yield tmp_path / "mark"
    assert not (tmp_path / "mark").exists()
