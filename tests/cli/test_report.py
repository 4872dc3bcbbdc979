"""``preimage report``: where the page goes, what is said, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import preimage
from support.commands import Typed, interrupted

Document = Callable[..., tuple[int, dict[str, Any]]]
GIVEN = ["--prompts", "random", "--count", 8, "--length", 4]


@pytest.fixture
def audit(document: Document, model: str, tmp_path: Path) -> Path:
    code, _ = document("collisions", "--model", model, *GIVEN, "--out", tmp_path / "audit")
    assert code == 0
    return tmp_path / "audit"


def test_the_page_lies_in_the_runs_folder(audit: Path, document: Document, run: Typed) -> None:
    code, said = document("report", audit)
    page = audit / "report.html"
    assert code == 0
    assert said["report"] == str(page)
    assert said["bytes"] == page.stat().st_size < 8_000_000
    assert said["runs"][0]["kind"] == "collisions"
    assert "commit" in said["runs"][0]["by"]
    code, out, _ = run("report", audit)
    assert code == 0
    assert f"Written: {page}" in out
    assert document("collisions", "--model", json.loads((audit / "run.json").read_text())["model"]["name"],
                    *GIVEN, "--out", audit)[0] == 0  # it is still a run's folder  # fmt: skip


def test_several_go_where_one_is(
    audit: Path, document: Document, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    saved = preimage.CollisionAudit.from_dict(json.loads((audit / "run.json").read_text())["results"])
    saved.save(tmp_path / "saved.json")
    code, said = document("report", "audit", "saved.json")
    assert (code, said["report"]) == (0, "report.html")
    assert [one["name"] for one in said["runs"]] == ["audit", "saved"]
    assert "side by side" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_what_json_printed_is_a_run_too(document: Document, model: str, tmp_path: Path) -> None:
    code, printed = document("invert", "--model", model, "--text", "the cat", "--layer", 1)
    assert code == 0
    (tmp_path / "x.json").write_text(json.dumps(printed))
    code, said = document("report", tmp_path / "x.json", "--out", tmp_path / "x.html")
    assert (code, said["runs"][0]["summary"]) == (0, "1 of 1 prompt recovered exactly.")


def test_what_is_finished_of_a_run_is_a_page(run: Typed, model: str, tmp_path: Path) -> None:
    out = tmp_path / "r"
    given = ["collisions", "--model", model, *GIVEN, "--hard-bases", 0, "--out", out]
    assert interrupted("preimage.storage", "Run", "keep", 2, *given)[0] == 130
    before = (out / "items.jsonl").read_bytes() + b'{"key": "half'
    (out / "items.jsonl").write_bytes(before)
    code, stdout, _ = run("report", out, "--out", tmp_path / "r.html")
    assert code == 0
    done = len(before.splitlines()) - 1
    assert 0 < done < 5
    assert f"This run is unfinished: {done} of 5 pieces are finished." in stdout
    assert "This run is unfinished" in (tmp_path / "r.html").read_text(encoding="utf-8")
    assert (out / "items.jsonl").read_bytes() == before, "who reads mends nothing: somebody may be at work"
    (out / "items.jsonl").unlink()
    code, _, stderr = run("report", out)
    assert code == 2
    assert "unfinished run of preimage collisions: 0 pieces" in stderr
    assert not (out / "report.html").exists()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda path: None, "There is no"),
        (lambda path: path.mkdir(), "is not a run folder: it is empty"),
        (lambda path: (path.mkdir(), (path / "a.txt").write_text("x")), "it holds a.txt and no run.json"),
        (lambda path: (path.mkdir(), (path / "run.json").write_text("{")), "cannot be read"),
        (lambda path: (path.mkdir(), (path / "run.json").write_text('{"schema": "preimage/1"}')), "schema"),
        (lambda path: path.write_text("[1]"), "not a json object"),
        (lambda path: path.write_text('{"schema": "preimage/9", "kind": "theory"}'), "not a saved theory"),
        (lambda path: path.write_text('{"schema": "preimage/9", "kind": "x"}'), "holds no result"),
        (lambda path: path.write_text('{"schema": "preimage/7", "kind": "geometry"}'), "has the schema"),
    ],
)  # fmt: skip
def test_what_is_no_run_is_refused(
    make: Callable[[Path], object], said: str, run: Typed, tmp_path: Path
) -> None:
    make(tmp_path / "x.json")
    code, stdout, stderr = run("report", tmp_path / "x.json", "--out", tmp_path / "page.html")
    assert (code, stdout) == (2, "")
    assert said in stderr
    assert len(stderr.splitlines()) == 1
    assert not (tmp_path / "page.html").exists()


def test_a_changed_run_is_refused_by_its_checksum(audit: Path, run: Typed) -> None:
    path = audit / "run.json"
    path.write_text(path.read_text().replace('"prompts": 8', '"prompts": 9', 1))
    code, _, stderr = run("report", audit)
    assert code == 2
    assert "fails its checksum" in stderr


def test_a_page_has_the_name_of_one(audit: Path, run: Typed, tmp_path: Path) -> None:
    code, _, stderr = run("report", audit, "--out", tmp_path / "folder")
    assert code == 2
    assert "which is no page" in stderr
