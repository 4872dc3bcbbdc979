"""``measure_leak`` on small models: exposures are read or honestly not, kept, continued, put into words."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from preimage.errors import OptionError, PromptError, RunFolderError
from preimage.leak import LeakAudit, judge, measure_leak
from preimage.leak.audit import default_layers
from preimage.leak.result import LeakCell, PromptRead, Utility
from preimage.leak.utility import measure_utility
from preimage.leak.verdict import break_even
from support.refusing import refused
from support.tiny import tiny

PROMPTS = [[7, 3, 9, 4, 11], [5, 5, 2, 30, 1], [12, 8, 3]]
EXPOSURES = (
    "float32", "bf16", "int8", "int4", "keys", "values:bf16", "noise:1", "cut:75", "every:2", "permuted",
    "rotated", "shuffled", "last", "mean",
)  # fmt: skip


@pytest.fixture(scope="module")
def audit() -> LeakAudit:
    return measure_leak(tiny("llama"), PROMPTS, [1, 2, "final"], exposures=EXPOSURES, search_seconds=1.0)


def test_every_layer_has_the_cells_it_can_have(audit: LeakAudit) -> None:
    assert audit.exposures == EXPOSURES
    assert audit.layers == (1, 2, "final")
    assert audit.at("keys", "final") is None
    assert len(audit.cells) == 3 * len(EXPOSURES) - 2


@pytest.mark.parametrize("spec", ["float32", "keys"])
def test_exact_states_are_read_and_verified(audit: LeakAudit, spec: str) -> None:
    for layer in (1, 2):
        cell = audit.at(spec, layer)
        assert cell is not None
        assert (cell.exact, cell.verified, cell.tokens, cell.tried) == (1.0, 1.0, 1.0, 3)


def test_nothing_is_wrongly_recovered_and_all_are_accounted_for(audit: LeakAudit) -> None:
    for cell in audit.cells:
        assert cell.wrong == 0
        assert cell.tried + cell.untried == 3
        assert bool(cell.why) == bool(cell.untried)
        assert 0 <= cell.exact <= 1
        assert 0 <= cell.tokens <= 1


def test_results_are_saved_and_read_again(audit: LeakAudit, tmp_path: Path) -> None:
    audit.save(tmp_path / "leak.json")
    again = LeakAudit.load(tmp_path / "leak.json")
    assert again.to_dict() == audit.to_dict()
    assert ">100 %</td>" in audit._repr_html_()


def test_a_run_is_continued_and_finished_cells_are_not_done_again(tmp_path: Path) -> None:
    model = tiny("llama")
    seen: list[str] = []

    def stop(done: int, total: int, note: str) -> None:
        seen.append(note)
        if note == "cells read" and done == 2:
            raise KeyboardInterrupt

    def run(**more: object) -> LeakAudit:
        return measure_leak(model, PROMPTS, [1], exposures=EXPOSURES[:4], out=tmp_path / "run", **more)  # type: ignore[arg-type]

    with pytest.raises(KeyboardInterrupt):
        run(progress=stop)
    whole = run()
    times = replace(whole, cells=())
    assert times.prompts == 3
    before = model.forward_tokens
    assert run() == whole
    assert model.forward_tokens == before
    assert (tmp_path / "run" / "cells.parquet").exists()
    refused(RunFolderError, lambda: run(seed=3))


def test_what_cannot_be_is_refused() -> None:
    model = tiny("llama")
    refused(PromptError, lambda: measure_leak(model, []))
    refused(OptionError, lambda: measure_leak(model, PROMPTS, ["final"], exposures=("keys",)))


def test_the_layers_of_the_default_model() -> None:
    assert default_layers(30) == (1, 8, 15, 22, 30, "final")
    assert default_layers(1) == (1, "final")


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
@pytest.mark.parametrize("layer", [0, 1, "final"])
def test_utility_is_that_of_the_models_own_logits(name: str, layer: int | str) -> None:
    """Unchanged states lose nothing; changed ones what plain transformers says (N10's logits)."""
    model = tiny(name)
    ids = torch.tensor([[7, 3, 9, 4], [5, 5, 2, 1]])
    with torch.inference_mode():
        plain = model.module(input_ids=ids).logits.float()
    states = model.states(ids, (layer,))[layer]
    assert torch.allclose(model.logits_from(states, layer).float(), plain, atol=1e-4)
    same = measure_utility(model, ids.tolist(), layer, list(states), list(states))
    assert (same.kl, same.top1_changed, same.perplexity) == (0.0, 0.0, same.perplexity_before)
    loss = torch.nn.functional.cross_entropy(plain[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert same.perplexity_before == pytest.approx(float(loss.exp()), rel=1e-3)
    other = measure_utility(model, ids.tolist(), layer, list(states), list(states.flip(0)))
    assert other.kl > 0


def cell(
    spec: str, tokens: int, untried: int = 0, changed: float = 0.9, *, hurried: bool = False
) -> LeakCell:
    read = PromptRead("likely", 10, tokens, tokens == 10, 0, 0, 0.5, 0.1, 30, hurried)
    return LeakCell(
        spec, spec, 3, (read,), untried, "time" if untried else "", 0.0, 0.1, Utility(1.0, changed, 9.0, 3.0)
    )


def test_the_verdict_says_what_the_table_says(audit: LeakAudit) -> None:
    verdict = judge(audit)
    assert verdict.tone == "bad"
    assert "Every one of the 3 prompts" in verdict.headline
    noisy = replace(audit, cells=(cell("noise:5", 9), cell("noise:50", 6), cell("noise:500", 1)))
    verdict = judge(noisy)
    assert "less than half of the tokens are read from noise:500 on (10.0%)" in " ".join(verdict.findings)
    assert any("destroys what the states are for" in line for line in verdict.advice)
    safe = judge(replace(audit, cells=(cell("last", 0),)))
    assert safe.tone == "good"
    assert "no proof" in " ".join(safe.advice)


def test_settings_that_were_cut_short_are_no_evidence_of_safety() -> None:
    curve = (cell("noise:5", 9), cell("noise:50", 1, untried=2), cell("noise:500", 2))
    found = break_even(curve)
    assert found is not None
    assert found.exposure == "noise:500"
    found = break_even((cell("noise:5", 9), cell("noise:50", 1, hurried=True), cell("noise:500", 2)))
    assert found is not None
    assert found.exposure == "noise:500"


def test_some_prompts_are_looked_at_however_little_time_there_is() -> None:
    specs = ("float32", "int4", "noise:20", "permuted")
    some = [[*range(first, first + 9)] for first in range(1, 21)]
    audit = measure_leak(tiny("llama"), some, [2], exposures=specs, minutes=1e-6)
    counted = {cell.exposure: (cell.tried, cell.untried, cell.why) for cell in audit.cells}
    assert counted.pop("permuted") == (20, 0, ""), "all of them at once, or none"
    assert set(counted.values()) == {(10, 10, "there was no time for them")}
    noisy, exact = audit.at("noise:20", 2), audit.at("float32", 2)
    assert noisy is not None
    assert exact is not None
    assert noisy.hurried, "none of them can be verified, and no time was left"
    assert exact.hurried < 10, "what verifies within a glance is not called hurried"
    assert all(one.status not in ("recovered", "ambiguous") for one in noisy.prompts if one.hurried)
    said = " ".join(judge(audit).not_tried)
    assert f"noise:20 at layer 2: {noisy.hurried} of 20 prompts were not read to the end" in said
    slow = measure_leak(tiny("llama"), some, [2], exposures=("noise:20",), minutes=5.0)
    cell = slow.at("noise:20", 2)
    assert cell is not None
    assert cell.hurried == 0
    assert cell.tokens >= noisy.tokens


def test_shares_are_of_prompts_that_were_read_to_the_end() -> None:
    slow = PromptRead("not_recovered", 10, 4, False, 0, 0, 0.5, 0.1, 30, hurried=True, glanced=True)
    easy = PromptRead("recovered", 10, 10, True, 10, 10, 1.0, 0.1, 30, glanced=True)
    given = [PromptRead("recovered", 10, 10, True, 10, 10, 1.0, 1.0, 90),
             PromptRead("likely", 10, 9, False, 8, 8, 0.9, 1.0, 90)]  # fmt: skip
    one = replace(cell("noise:20", 10), prompts=(*given, easy, slow))
    assert (len(one.sample), one.exact, one.tokens, one.in_haste) == (2, 0.5, 0.95, 0.4)
    assert (one.hurried, one.every, one.tried) == (1, False, 4)
    whole = replace(one, prompts=(given[0], easy))
    assert (len(whole.sample), whole.exact, whole.every) == (2, 1.0, True), "nothing was cut short: all count"
    none = replace(one, prompts=(easy, slow))
    assert (len(none.sample), none.exact, none.tokens) == (2, 0.5, 0.7), "all there is"


def test_what_takes_long_is_read_to_the_end_in_part_and_looked_at_for_the_rest() -> None:
    some = [[*range(first, first + 9)] for first in range(1, 31)]
    audit = measure_leak(tiny("llama"), some, [2], exposures=("noise:20",), minutes=1e-3)
    (found,) = audit.cells
    glanced = [one.glanced for one in found.prompts]
    assert 10 <= found.tried == len(glanced) < 30, "60 ms are too little for all of them"
    assert glanced[-1]
    assert len(found.sample) == (found.tried if all(glanced) else glanced.count(False))
    assert not found.every


def test_the_verdict_says_of_which_prompts_a_share_is(audit: LeakAudit) -> None:
    slow = PromptRead("not_recovered", 10, 6, False, 0, 0, 0.5, 0.1, 30, hurried=True, glanced=True)
    whole = replace(slow, status="likely", right=9, hurried=False, glanced=False)
    both = replace(cell("noise:50", 10), prompts=(whole, whole, slow))
    assert judge(replace(audit, cells=(both,))).headline.endswith(
        "of the 2 prompts that were read to the end."
    )
    short = replace(both, prompts=(slow, slow))
    assert judge(replace(audit, cells=(short,))).headline.endswith("at layer 3, read in haste.")


def test_a_defence_that_was_cut_short_is_not_said_to_fail(audit: LeakAudit) -> None:
    short = replace(audit, cells=(cell("noise:5", 9), cell("noise:500", 1, untried=2)))
    said = " ".join(judge(short).findings)
    assert "too few prompts were read to the end" in said
    assert "leaves 10.0% readable, of the 1 prompts tried" in said
    assert "no setting tried" not in said
    open_ = replace(audit, cells=(cell("noise:5", 9), cell("noise:500", 8, untried=2)))
    assert "no setting tried keeps half of the tokens unread" in " ".join(judge(open_).findings)
