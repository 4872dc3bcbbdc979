"""A small model trained on what another one writes, where there is no corpus."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import preimage
from preimage.cli import main
from preimage.errors import OptionError, RunFolderError
from preimage.models import LanguageModel
from preimage.training import lens_text, texts_written_by
from support.folders import make_folder
from support.refusing import refused
from support.tiny import tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("writer") / "model")


@pytest.fixture(scope="module")
def writer(folder: Path) -> LanguageModel:
    return preimage.load(str(folder), device="cpu")


def test_documents_are_what_the_model_writes(writer: LanguageModel) -> None:
    texts = texts_written_by(writer, 100, length=16, seed=4)
    rows = preimage.models.written_by(writer, 7, 16, 4 * 1_000_003 + lens_text._APART, start="random")
    assert rows is not None
    assert writer.tokenizer is not None
    assert texts == [writer.tokenizer.decode(row, skip_special_tokens=True) for row in rows.tolist()]
    assert texts != texts_written_by(writer, 100, length=16, seed=5)


def test_what_was_written_is_kept_and_goes_on(
    writer: LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lens_text, "rows_at_once", lambda model, length: 2)
    whole = texts_written_by(writer, 160, length=16, out=tmp_path / "whole")

    def stop(done: int, total: int, note: str) -> None:
        if done == 64:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        texts_written_by(writer, 160, length=16, out=tmp_path / "stopped", progress=stop)
    before = writer.forward_tokens
    assert texts_written_by(writer, 160, length=16, out=tmp_path / "stopped") == whole
    spent = writer.forward_tokens - before
    assert spent == 6 * 15, "rows 4 to 9, each of one token that is drawn and fifteen that are written"
    assert texts_written_by(writer, 160, length=16, out=tmp_path / "stopped") == whole
    assert writer.forward_tokens - before == spent
    refused(RunFolderError, lambda: texts_written_by(writer, 320, length=16, out=tmp_path / "whole"))


def test_who_cannot_write_is_refused(writer: LanguageModel) -> None:
    assert "no tokenizer" in refused(OptionError, lambda: texts_written_by(tiny("llama"), 10)).message
    with pytest.raises(OptionError, match="tokens is 0"):
        texts_written_by(writer, 0)
    refusal = refused(OptionError, lambda: texts_written_by(writer, 10, out="s3://bucket/text"))
    assert "is an address" in refusal.message


def test_the_command_trains_on_what_a_model_writes(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [
        "trajectory", "--text-from", str(folder), "--text-tokens", "4000", "--size", "8,1,1", "--steps", "2",
        "--checkpoints", "2", "--batch", "2", "--window", "8", "--probes", "4", "--length", "4",
        "--vocabulary", "258", "--out", str(tmp_path / "run"), "--json",
    ]  # fmt: skip
    assert main(asked) == 0
    first = json.loads(capsys.readouterr().out)
    assert {path.name for path in tmp_path.iterdir()} == {"run", "run.text"}
    assert main(asked) == 0
    assert json.loads(capsys.readouterr().out) == first
    trained = preimage.load(str(tmp_path / "run" / "model"), device="cpu")
    assert trained.vocab_size == 258
    assert main([*asked, "--text", "mine.txt"]) == 2
    assert "--text and --text-from" in json.loads(capsys.readouterr().out)["error"]["message"]
