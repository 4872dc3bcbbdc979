"""Text, jsonl and parquet files as sources, and sources that are no file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from preimage.errors import PromptError
from preimage.prompts.windows import cut
from support.prompting import VOCAB, collect, one
from support.refusing import refused


def test_text_file_is_a_prompt_a_line(tokenizer, tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_bytes("\ufefffirst line\r\n\n  \n second \u2028 line \nfirst line\nlast".encode())
    prompts = collect(path, tokenizer)
    texts = [tokenizer.decode(ids) for ids in prompts]
    assert texts == ["first line", " second \u2028 line ", "last"]
    assert prompts.duplicates_removed == 1
    assert prompts.source == str(path)
    assert collect(str(path), tokenizer) == prompts
    assert collect(path, tokenizer, count=2).ids == prompts.ids[:2]


def test_text_file_with_a_length_is_one_document(tokenizer, tmp_path):
    path = tmp_path / "book.TXT"
    text = "\n".join(f"line {k}" for k in range(40))
    path.write_text(text)
    prompts = collect(path, tokenizer, length=7)
    expected = cut(one(text, tokenizer), 7, None)
    assert sorted(prompts) == sorted(set(expected))


def test_text_file_is_read_only_as_far_as_needed(tokenizer, tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_bytes(b"good\n\xff\n")
    assert len(collect(path, tokenizer, count=1)) == 1
    error = refused(PromptError, lambda: collect(path, tokenizer))
    assert f"{path}, line 2" in error.message
    assert "0xff" in error.message
    assert str(path) in refused(PromptError, lambda: collect(path, tokenizer, length=2)).message


def test_jsonl_takes_every_form(tokenizer, tmp_path):
    path = tmp_path / "prompts.jsonl"
    lines = [
        {"text": "one", "ids": [9]},
        {"token_ids": [1, 2]},
        {"ids": [3]},
        {"input_ids": [4]},
        "two",
        [5, 6],
    ]
    path.write_text("\n\n".join(map(json.dumps, lines)))
    prompts = collect(path, tokenizer)
    text = [one("one", tokenizer), one("two", tokenizer)]
    assert prompts.ids == (text[0], (1, 2), (3,), (4,), text[1], (5, 6))


@pytest.mark.parametrize(
    "line",
    [
        "{",
        '{"words": "x"}',
        "7",
        "null",
        '{"text": null}',
        '{"text": ""}',
        '{"ids": []}',
        '{"ids": [1, true]}',
        '{"ids": [1.5]}',
        '{"ids": [600]}',
        '"\\ud800"',
        "[" * 100_000,
        "[" + "9" * 5000 + "]",
        "[NaN]",
    ],
)
def test_a_malformed_json_line_is_named(tokenizer, tmp_path, line):
    path = tmp_path / "prompts.jsonl"
    path.write_text('"good"\n' + line + "\n")
    error = refused(PromptError, lambda: collect(path, tokenizer))
    assert error.message.startswith(f"{path}, line 2 ")


def test_parquet_text_and_ids(tokenizer, tmp_path):
    path = tmp_path / "prompts.parquet"
    pq.write_table(pa.table({"n": [1, 2, 3, 4], "text": ["one", "", None, "two"]}), path)
    assert collect(path, tokenizer).ids == (one("one", tokenizer), one("two", tokenizer))
    pq.write_table(pa.table({"input_ids": [[1, 2], [], [3]]}), path)
    assert collect(path).ids == ((1, 2), (3,))


def test_parquet_is_streamed(tmp_path):
    path = tmp_path / "prompts.parquet"
    rows = [[k % VOCAB, k // VOCAB] for k in range(5000)]
    pq.write_table(pa.table({"token_ids": [*rows, [-1]]}), path, row_group_size=1000)
    assert len(collect(path, count=4000)) == 4000  # the bad row at the end is never met
    assert "row 5000" in refused(PromptError, lambda: collect(path)).message


def test_parquet_errors(tokenizer, tmp_path):
    path = tmp_path / "prompts.parquet"
    pq.write_table(pa.table({"words": ["one"]}), path)
    assert "words" in refused(PromptError, lambda: collect(path, tokenizer)).message
    pq.write_table(pa.table({"text": [7]}), path)
    assert "row 0" in refused(PromptError, lambda: collect(path, tokenizer)).message
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), path)
    assert "no prompts" in refused(PromptError, lambda: collect(path, tokenizer)).message
    pq.write_table(pa.table({"text": ["word " * 99] * 99}), path)
    whole = path.read_bytes()
    for broken in (b"", b"PAR1", whole[: len(whole) // 2], whole[:40] + b"\0" * 40 + whole[80:]):
        path.write_bytes(broken)
        assert str(path) in refused(PromptError, lambda: collect(path, tokenizer)).message


def test_sources_that_are_no_file(tokenizer, tmp_path):
    (tmp_path / "table.csv").write_text("x")
    (tmp_path / "empty.txt").write_text("\n \n")
    folder = tmp_path / "folder.txt"
    folder.mkdir()
    for source, word in [
        (tmp_path / "missing.txt", "does not exist"),
        (folder, "is a folder"),
        (tmp_path / "table.csv", "'.csv'"),
        (tmp_path / "empty.txt", "no prompts"),
        ("/dev/null", "no ordinary file"),
        ("What is the capital of France?", "does not exist"),
        ("~nobody-of-this-name/x.txt", "does not exist"),
        ("nul\0.txt", ".txt"),
    ]:
        assert word in refused(PromptError, lambda source=source: collect(source)).message
    with pytest.raises(PromptError, match="is not a file name") as caught:
        collect("long " * 5000)
    assert type(caught.value) is PromptError
    assert caught.value.hint
    assert len(caught.value.message) < 500  # but not with its hint, which lists every source
    assert "\n" not in str(caught.value)
    hint = refused(PromptError, lambda: collect("Just text.", tokenizer)).hint
    assert "['text']" in hint


def test_a_file_that_cannot_be_opened_is_named(tokenizer, tmp_path, monkeypatch):
    def refuse(*_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    path = tmp_path / "prompts.txt"
    path.write_text("text")
    monkeypatch.setattr(Path, "open", refuse)
    monkeypatch.setattr(Path, "read_bytes", refuse)
    for length in (None, 1):
        error = refused(PromptError, lambda n=length: collect(path, tokenizer, length=n))
        assert "Permission denied" in error.message


def test_home_is_expanded(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "prompts.txt").write_text("text")
    assert len(collect("~/prompts.txt", tokenizer)) == 1
