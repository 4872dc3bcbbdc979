"""Prompts and token ids that stand in json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from preimage.leak.holdings import Told
from preimage.leak.readers import plain_text
from support.saved_states import NOBODY, TOLD, sparse


def rows_of(path: Path, told: Told = NOBODY) -> list[Any]:
    holding = plain_text.read(path, told)
    assert holding is not None
    assert holding.kind == "plain text"
    return [piece.clear[0].text or piece.clear[0].token_ids for piece in holding.pieces]


ROWS: dict[str, tuple[Any, Any]] = {
    "prompt": ({"prompt": "one"}, "one"),
    "ids": ({"id": 7, "input_ids": [1, 2]}, (1, 2)),
    "a batch of one": ({"token_ids": [[1, 2]]}, (1, 2)),
    "ids as a prompt": ({"prompt": [1, 2]}, (1, 2)),
    "padding": ({"input_ids": [-100, 1, 2, -1]}, (1, 2)),
    "chat": ({"messages": [{"role": "user", "content": "a"}, {"content": [{"text": "b"}]}]}, "a\nb"),
    "training set": ({"conversations": [{"from": "human", "value": "a"}, {"value": "b"}]}, "a\nb"),
    "request": ({"custom_id": "7", "body": {"input": [{"role": "user", "content": "a"}]}}, "a"),
}


@pytest.mark.parametrize(("row", "said"), ROWS.values(), ids=ROWS)
def test_rows_in_the_clear(row: Any, said: Any, tmp_path: Path) -> None:
    (tmp_path / "r.jsonl").write_text(f"{json.dumps(row)}\n\nno json\n{json.dumps(row)}\n[1, 2]\n")
    assert rows_of(tmp_path / "r.jsonl") == [said, said]
    for document in ([row, row], row):
        (tmp_path / "r.json").write_text(json.dumps(document, indent=1))
        assert set(rows_of(tmp_path / "r.json")) == {said}
    (tmp_path / "lines.json").write_text(f"{json.dumps(row)}\n{json.dumps(row)}\n")
    assert rows_of(tmp_path / "lines.json") == [said, said]


SILENT: list[Any] = [
    {"prompt": ""}, {"prompt": 5}, {"ids": ["a"]}, {"messages": "x"}, {"a": 1}, 5, None,
    {"b": {"c": {"d": {"prompt": "too deep"}}}},
]  # fmt: skip


@pytest.mark.parametrize("row", SILENT)
def test_rows_that_say_nothing(row: Any, tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text(json.dumps(row))
    assert plain_text.read(tmp_path / "r.json", NOBODY) is None


def test_ids_of_another_model_are_told_of(tmp_path: Path) -> None:
    (tmp_path / "r.jsonl").write_text('{"prompt": "one", "token_ids": [1, 99999]}\n')
    holding = plain_text.read(tmp_path / "r.jsonl", TOLD)
    assert holding is not None
    assert [one.text for one in holding.pieces[0].clear] == ["one"]
    assert holding.notes[0].startswith("Some rows have ids that the vocabulary has not got")


def test_many_rows_are_counted(tmp_path: Path) -> None:
    with (tmp_path / "r.jsonl").open("w") as file:
        file.writelines(f'{{"prompt": "p{row}"}}\n' for row in range(2500))
    holding = plain_text.read(tmp_path / "r.jsonl", NOBODY)
    assert holding is not None
    assert len(holding.pieces) == 1000
    assert holding.notes == ("1,500 more rows were counted, not read.",)
    assert holding.about.startswith("2,500 rows")


def test_json_that_is_too_large(tmp_path: Path) -> None:
    path = sparse(tmp_path / "r.json", b'[{"conversations": [', 10 << 30)
    holding = plain_text.read(path, NOBODY)
    assert holding is not None
    assert "conversations" in holding.about
    assert plain_text.read(sparse(tmp_path / "s.json", b'{"a": 1', 10 << 30), NOBODY) is None
    with (tmp_path / "l.jsonl").open("w") as file:
        file.write("x" * (40 << 20) + '\n{"prompt": "behind"}\n')
    assert rows_of(tmp_path / "l.jsonl") == ["behind"]
    (tmp_path / "deep.json").write_text('{"a":[' * 3000)
    assert plain_text.read(tmp_path / "deep.json", NOBODY) is None
