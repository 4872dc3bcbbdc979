"""Every item of the papers: it runs on a model nobody prepared, and says what the library says."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import preimage
from preimage.cli import main
from preimage.errors import OptionError
from preimage.inversion import Inversion
from preimage.models import LanguageModel, new_model
from preimage.reproduce import ITEMS, PRESETS, Reproduction, Row, Sizes, item_of, reproduce
from preimage.reproduce.inverting import _Runs
from preimage.reproduce.measuring import pearson
from preimage.reproduce.result import spread
from preimage.reproduce.texts import alike_next, layer_of, layers_of, mixed
from preimage.storage import SCHEMA
from support.folders import make_folder
from support.refusing import refused

_TINY: dict[str, Any] = {
    "count": 12,
    "length": 4,
    "source": "random",
    "layers": "all",
    "slow": 2,
    "seconds": 20.0,
}
_OF = {
    "inversion": {"layers": "2", "slow_length": 2, "steps": 5, "count": 10},
    "text": {"layers": "2"},
    "depth": {"count": 3},
    "vocabulary": {"layers": "2", "slow_length": 2, "count": 3},
    "quantised-inversion": {"layers": "2", "count": 3},
    "length": {"length": 8, "count": 10},
    "same-next": {"count": 300, "length": 2},
    "training": {"count": 4, "length": 4, "slow": 2},
}
_UNTRAINED_ELSEWHERE = ("theory", "training")  # which do not use the model, and have tests of their own


@pytest.fixture(scope="module")
def tiny_model() -> LanguageModel:
    return new_model("llama", (16, 3, 2), vocabulary=50, max_length=16, device="cpu", seed=3)


@pytest.fixture(scope="module")
def measured(tiny_model: LanguageModel) -> dict[str, Reproduction]:
    """Every item but the two that train or prove on models of their own."""
    return {
        name: reproduce(tiny_model, name, **{**_TINY, **_OF.get(name, {})})
        for name in ITEMS
        if name not in _UNTRAINED_ELSEWHERE
    }


@pytest.mark.parametrize("name", ITEMS)
def test_an_item_is_whole(name: str) -> None:
    item = item_of(name)
    assert callable(item.measure())
    assert item.paper.startswith("arXiv ")
    assert all(item.sizes(preset).count >= 1 for preset in PRESETS)


@pytest.mark.parametrize("name", [name for name in ITEMS if name not in _UNTRAINED_ELSEWHERE])
def test_an_item_runs_on_a_model_nobody_prepared(measured: dict[str, Reproduction], name: str) -> None:
    found = measured[name]
    assert (found.item, found.paper, found.preset) == (name, ITEMS[name].paper, "small")
    assert found.rows
    assert all(row.measured for row in found.rows if row.values)
    assert found.differs[0].startswith(f"Measured on {found.model['name']}, float32")
    assert found.caveats == ITEMS[name].caveats
    assert Reproduction.from_dict(json.loads(json.dumps(found.to_dict()))) == found
    assert any(row.published for row in found.rows) or name in ("geometry-families",)


def test_distances_are_those_of_the_audit(
    tiny_model: LanguageModel, measured: dict[str, Reproduction]
) -> None:
    prompts = preimage.gather("random", tiny_model, preimage.PromptOptions(count=12, length=4))
    audit = preimage.find_collisions(tiny_model, prompts)
    for row, layer in zip(measured["collisions"].rows, audit.layers, strict=True):
        assert row.what == f"layer {layer.layer}"
        assert row.values["margin"] == layer.spacing.margin
        assert row.values["pairs"] == layer.spacing.pairs == 12 * 11 // 2
        assert row.verdict == "no collision"


def test_every_method_of_the_inversion_table(measured: dict[str, Reproduction]) -> None:
    rows = {row.what: row for row in measured["inversion"].rows}
    exact = ("fast (ours)", "vocabulary matching", "SIPIT, cached", "SIPIT, published cost",
             "BRUTEFORCE, cached", "BRUTEFORCE, published cost")  # fmt: skip
    for name in exact:
        assert rows[name].verdict == "exact", name
        assert rows[name].values["wrong"] == 0
    assert rows["HARDPROMPTS"].published == "6132.59 ± 104.61 s, accuracy 0.00 (GPT-2 small)"
    assert rows["HARDPROMPTS"].values["wrong"] == 0, "what it reads is verified like everything else"
    ours, theirs = (rows[name].values["seconds_a_token"] for name in ("fast (ours)", "SIPIT, published cost"))
    ratio = rows["SIPIT, published cost beside ours"].values["ratio"]
    assert ours is not None
    assert theirs is not None
    assert ratio == pytest.approx(theirs / ours)


def _inversion(**changes: Any) -> Inversion:
    model = new_model("llama", (16, 1, 2), vocabulary=50, max_length=8, device="cpu")
    (found,) = preimage.invert(model, preimage.capture(model, [(1, 2)], [1]), 1)
    return replace(found, **changes)


def test_a_run_that_was_stopped_is_counted_and_not_averaged() -> None:
    ended = _inversion(seconds=2.0)
    stopped = _inversion(status="not_recovered", reason="Stopped: 5 s are over.", seconds=5.0, token_ids=())
    runs = _Runs([ended, stopped], [(1, 2), (1, 2)])
    assert runs.seconds == [2.0]
    assert runs.seconds_a_token == 1.0
    assert runs.values()["ended"] == 1
    assert runs.in_words() == "2 s; 1 of 2 x 2 tokens exact, 1 ended"
    assert _Runs([stopped], [(1, 2)]).seconds_a_token is None
    assert _Runs([stopped], [(1, 2)]).in_words().startswith("none ended; 0 of 1")


def test_a_wrong_claim_is_said() -> None:
    runs = _Runs([_inversion()], [(3, 4)])
    assert runs.wrong == 1
    assert runs.exact == 0


def test_nine_prompts_of_ten_are_natural(tiny_model: LanguageModel, smollm2: LanguageModel) -> None:
    sizes = Sizes(count=20, length=6)
    prompts = mixed(smollm2, sizes)
    natural = list(preimage.gather("default:prose:test", smollm2, preimage.PromptOptions(count=18, length=6)))
    assert len(prompts) == 20
    assert prompts[:18] == natural
    assert len(set(prompts)) == 20
    assert len(mixed(tiny_model, Sizes(count=1, length=4))) == 1


def test_groups_are_of_one_next_token(tiny_model: LanguageModel) -> None:
    groups = alike_next(tiny_model, Sizes(count=40, length=4, source="random"))
    assert sum(map(len, groups.values())) == 40
    for token, prompts in groups.items():
        for ids in prompts:
            logits = tiny_model.module(torch.tensor([ids])).logits[0, -1]
            assert int(logits.argmax()) == token


def test_the_model_names_one_answer(smollm2: LanguageModel) -> None:
    groups = alike_next(smollm2, Sizes(count=12, length=64))
    most = max(groups.values(), key=len)
    assert sum(map(len, groups.values())) == 24
    assert len(most) >= 8, "most sums have the answer 7, and the model knows it"


def test_layers_that_a_model_lacks_are_left_out(tiny_model: LanguageModel) -> None:
    assert layers_of(tiny_model, Sizes(count=1, length=1, layers="1,3,30,final")) == [1, 3, "final"]
    assert layers_of(tiny_model, Sizes(count=1, length=1, layers="15")) == ["final"]
    assert layer_of(tiny_model, Sizes(count=1, length=1, layers="15")) == 2
    assert layer_of(tiny_model, Sizes(count=1, length=1, layers="3")) == 3


def test_statistics() -> None:
    assert spread([]) == ""
    assert spread([2.0]) == "2"
    assert spread([1.0, 2.0, 3.0], "s") == "2 ± 1 s"
    assert pearson([1.0, 2.0], [2.0, 1.0]) is None
    assert pearson([1.0, 1.0, 1.0], [1.0, 2.0, 3.0]) is None
    assert math.isclose(pearson([1.0, 2.0, 4.0], [3.0, 1.0, 2.0]) or 0, -0.3273268353539886)


def test_what_is_written(tmp_path: Path, tiny_model: LanguageModel) -> None:
    found = reproduce(tiny_model, "collisions", **_TINY, out=tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        f"collisions.{end}" for end in ("json", "md", "parquet")
    }
    saved = json.loads((tmp_path / "collisions.json").read_text())
    assert saved["schema"] == SCHEMA
    assert [row["what"] for row in saved["rows"]] == [row.what for row in found.rows]
    page = (tmp_path / "collisions.md").read_text()
    assert page.count("\n| layer") == len(found.rows)
    assert "What differs:" in page
    assert "To be known:" in page


def test_cells_stay_in_their_columns() -> None:
    row = Row("a|b\nc", "<b>", "1", {})
    found = Reproduction("x", "p", "t", "small", {}, {}, (row,), (), (), {}, 0.0, {})
    assert "| a\\|b c | <b> | 1 |  |" in found.markdown()
    assert "&lt;b&gt;" in found._repr_html_()


@pytest.mark.parametrize(
    ("changes", "said"), [({"count": 0}, "count is 0."), ({"length": -1}, "length is -1.")]
)
def test_sizes_that_cannot_be(tiny_model: LanguageModel, changes: dict[str, int], said: str) -> None:
    def action() -> object:
        return reproduce(tiny_model, "collisions", **changes)

    assert said in refused(OptionError, action).message


def test_unknown_names(tiny_model: LanguageModel) -> None:
    assert "no item 'fig'" in refused(OptionError, lambda: reproduce(tiny_model, "fig")).message
    assert "'big'" in refused(OptionError, lambda: reproduce(tiny_model, "depth", "big")).message


def test_the_command_lists_every_item(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "--list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [one["name"] for one in listed["items"]] == list(ITEMS)
    assert main(["reproduce"]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in ITEMS)


def test_the_command_measures_one(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model")
    asked = [
        "reproduce",
        "depth",
        "--model",
        str(folder),
        "--count",
        "2",
        "--length",
        "4",
        "--prompts",
        "random",
    ]
    assert main([*asked, "--layers", "1", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["schema"], document["command"], document["item"]) == (SCHEMA, "reproduce", "depth")
    assert [row["what"] for row in document["rows"]] == ["layer 1"]
    assert document["rows"][0]["values"]["exact"] == 2
    assert main([*asked, "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert "What differs:" in said
    assert "depth.md" in said
    assert (tmp_path / "out" / "depth.json").is_file()


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["reproduce", "nothing"], "There is no item 'nothing'."),
        (["reproduce", "depth", "--list"], "A name and --list were given."),
        (["reproduce", "depth", "--preset", "big"], "Preset 'big' is not known."),
        (["reproduce", "depth", "--count", "0"], "count is 0."),
    ],
)
def test_the_command_refuses(capsys: pytest.CaptureFixture[str], argv: list[str], said: str) -> None:
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert not out
    assert said in err
    assert err.count("\n") == 1


def test_the_function_stays_callable_by_the_name_of_its_room(tiny_model: LanguageModel) -> None:
    assert preimage.reproduce.Sizes is Sizes  # the room
    error = refused(OptionError, lambda: preimage.reproduce(tiny_model, "nothing"))  # its function there
    assert "'nothing'" in str(error)
