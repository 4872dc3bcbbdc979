"""The datasets library as a source."""

from __future__ import annotations

import json
import socket
import sys
from typing import Any

import pytest

from preimage.errors import MissingExtraError, PromptError
from preimage.prompts.streams import parse_stream
from support.prompting import collect
from support.refusing import refused


@pytest.fixture
def folder(tmp_path):
    """A local dataset; the colon in its name is on purpose."""
    folder = tmp_path / "my:data"
    folder.mkdir()
    rows = [{"text": "one", "other": "uno"}, {"text": "", "other": "x"}, {"text": "two"}]
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "test.jsonl").write_text('{"text": "three"}')
    return folder


def test_datasets_are_streamed_from_a_folder(tokenizer, folder, monkeypatch):
    def refuse(*_: Any) -> None:
        raise AssertionError("a local folder needs no network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    prompts = collect(f"datasets:{folder}", tokenizer)
    assert [tokenizer.decode(ids) for ids in prompts] == ["one", "two"]
    assert prompts.source == f"datasets:{folder}"
    for rest, expected in [(":test", "three"), (":train:other", "uno"), ("::other", "uno")]:
        [ids] = collect(f"datasets:{folder}{rest}", tokenizer, count=1)
        assert tokenizer.decode(ids) == expected


def test_datasets_errors(tokenizer, folder, tmp_path):
    for source, word in [
        (f"datasets:{folder}:nosuch", "nosuch"),
        (f"datasets:{folder}:train:nosuch", "no column 'nosuch'"),
        (f"datasets:{folder}:train:text:more", "no folder"),
        (f"datasets:{tmp_path}/missing", "missing"),
        ("datasets:", "no dataset source"),
        ("datasets:a/b:c:d:e", "no dataset source"),
        ("datasets:nobody-at-all/nothing-here", "nobody-at-all/nothing-here"),
    ]:
        error = refused(PromptError, lambda source=source: collect(source, tokenizer))
        assert word in error.message
    (folder / "train.jsonl").write_text('{"words": "x"}')
    (folder / "test.jsonl").unlink()
    assert "words" in refused(PromptError, lambda: collect(f"datasets:{folder}")).message


def test_datasets_not_installed_names_the_extra(monkeypatch, folder):
    monkeypatch.setitem(sys.modules, "datasets", None)
    error = refused(MissingExtraError, lambda: collect(f"datasets:{folder}"))
    assert 'pip install "preimage[data]"' in error.hint


def test_dataset_names_are_taken_apart(folder):
    assert parse_stream("datasets:imdb") == ("imdb", None, "train", None)
    assert parse_stream("datasets:a/b:test:body") == ("a/b", None, "test", "body")
    assert parse_stream("datasets:a/b/en") == ("a/b", "en", "train", None)
    assert parse_stream(f"datasets:{folder}") == (str(folder), None, "train", None)
    assert parse_stream(f"datasets:{folder}:test:t") == (str(folder), None, "test", "t")
