"""``preimage leak``: of a model and of files; documents, pages, exit codes, continuing, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import preimage
from preimage.leak.files import read_files
from support.commands import Typed

TEXTS = ("--text", "the cat sat", "--text", "a dog", "--text", "the cats")
HOSTILE = "<script>window.x=1</script>\x1b[31m\u202e{{7*7}}"


@pytest.fixture(autouse=True)
def _no_browser(monkeypatch: pytest.MonkeyPatch) -> None:
    """Printing has tests of its own; here it is as where there is no browser."""
    from preimage.report import printing

    def none(*given: object, **named: object) -> None:
        raise preimage.PreimageError("There is no browser.", "Install one.")

    monkeypatch.setattr(printing, "print_pdf", none)


def test_a_model(document: Any, run: Typed, model: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    given = ["leak", model, *TEXTS, "--layers", "1,2", "--exposures", "float32,int8,noise:400", "--out", out]
    code, found = document(*given)
    assert code == 0
    assert found["command"] == "leak"
    results = found["results"]
    assert results["prompts"] == 3
    table = {(row["exposure"], row["layer"]): row for row in results["table"]}
    assert len(table) == 6
    assert table["float32", "1"]["exact"] == table["float32", "1"]["verified"] == 1.0
    assert all(row["wrong"] == 0 for row in table.values())
    assert found["verdict"]["tone"] == "bad"
    names = {path.name for path in out.iterdir()}
    assert names == {"cells.parquet", "items.jsonl", "leak.html", "record.jsonl", "run.json"}
    page = (out / "leak.html").read_text(encoding="utf-8")
    assert found["verdict"]["headline"].split(":")[0] in page
    assert "sha256" in page
    code, again = document(*given)
    assert (code, again["results"]) == (0, results)


def test_a_model_in_words(run: Typed, model: str) -> None:
    code, out, _ = run("leak", "--model", model, *TEXTS, "--layers", "1", "--exposures", "float32,last")
    assert code == 0
    assert "can be read" in out.splitlines()[0]
    assert "100.0% (100%)" in out
    assert "What to do:" in out


def test_hostile_texts_are_escaped_everywhere(run: Typed, model: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    given = ["leak", model, "--text", HOSTILE, "--layers", "1", "--exposures", "float32", "--out", out]
    code, shown, _ = run(*given)
    assert code == 0
    assert "\x1b" not in shown
    page = (out / "leak.html").read_text(encoding="utf-8")
    assert "<script>window" not in page
    assert "\u202e" not in page


@pytest.fixture
def dump(model: str, tmp_path: Path) -> Path:
    """A folder with states under a hostile name, and prompts in the clear."""
    loaded = preimage.load(model)
    folder = tmp_path / "dump"
    folder.mkdir()
    states = loaded.states(torch.tensor([[3, 4, 5]]), (1,))[1][0]
    save_file({"hidden_states.1": states.contiguous()}, folder / "a\x1b[31m<b>.safetensors")
    (folder / "log.jsonl").write_text(json.dumps({"prompt": HOSTILE}) + "\n")
    return folder


def test_files(document: Any, run: Typed, model: str, dump: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    code, found = document("leak", dump, "--model", model, "--out", out)
    assert code == 0
    prompts = {one["status"]: one for one in found["results"]["prompts"]}
    assert prompts["clear"]["text"] == HOSTILE
    assert prompts["recovered"]["token_ids"] == [3, 4, 5]
    assert {path.name for path in out.iterdir()} == {"leak.html", "leak.json", "prompts.parquet"}
    page = (out / "leak.html").read_text(encoding="utf-8")
    assert "<script>window" not in page
    code, shown, _ = run("leak", dump, "--model", model)
    assert code == 0
    assert "\x1b" not in shown
    assert "in the clear" in shown


def test_files_without_a_model(document: Any, dump: Path) -> None:
    code, found = document("leak", dump)
    assert code == 0
    assert [one["status"] for one in found["results"]["prompts"]] == ["clear"]
    assert found["results"]["model"] is None


def test_files_of_another_model_are_findings(document: Any, model: str, tmp_path: Path) -> None:
    foreign = torch.randn(5, preimage.load(model).d_model, generator=torch.Generator().manual_seed(1))
    save_file({"hidden_states.1": foreign}, tmp_path / "x.safetensors")
    code, found = document("leak", tmp_path / "x.safetensors", "--model", model)
    assert code == 1
    assert [one["status"] for one in found["results"]["prompts"]] == ["not_recovered"]


def test_a_bundle_names_its_model(document: Any, bundle: Path) -> None:
    code, found = document("leak", bundle)
    assert code == 0
    assert {one["status"] for one in found["results"]["prompts"]} == {"clear", "recovered"}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["nothing-of-the-kind/"], "nothing-of-the-kind"),
        (["--model", "MODEL", "--exposures", "sha1"], "sha1"),
        (["--model", "MODEL", "--text", "a", "--layers", "99"], "99"),
        (["--model", "MODEL", "--text", "a", "--layers", "final", "--exposures", "keys"], "none of these"),
        (["--model", "MODEL", "--stored", "fp8"], "--stored"),
        (["DUMP", "--text", "a"], "--text"),
        (["DUMP", "--stored", "int3"], "int3"),
        (["DUMP", "--layers", "one"], "one"),
        (["DUMP", "--rotary", "no"], "--rotary"),
        (["DUMP", "--page", "0"], "--page"),
        (["DUMP", "gpt5"], "gpt5"),
        (["MODEL", "OTHER"], "Several"),
        (["BAD"], "bad.safetensors"),
    ],
)
def test_what_is_wrong_is_refused_in_a_line(
    given: list[str], words: str, run: Typed, model: str, folders: dict[str, Path], dump: Path, tmp_path: Path
) -> None:
    bad = tmp_path / "bad.safetensors"
    bad.write_bytes((10 << 30).to_bytes(8, "little") + b"{")
    names = {"MODEL": model, "OTHER": str(folders["other"]), "DUMP": str(dump), "BAD": str(bad)}
    code, out, err = run("leak", *(names.get(one, one) for one in given))
    assert code == 2
    assert out == ""
    assert len(err.strip().splitlines()) == 1
    assert words in err


def test_the_command_says_what_the_library_says(document: Any, model: str, dump: Path) -> None:
    found = document("leak", dump, "--model", model)[1]["results"]
    ours = json.loads(json.dumps(read_files(dump, preimage.load(model)).to_dict()))
    for one in (*found["prompts"], *ours["prompts"]):
        one["seconds"] = 0
    assert found["prompts"] == ours["prompts"]
