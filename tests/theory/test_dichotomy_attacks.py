"""The dichotomy of the model that was given, with what was put into it."""

from __future__ import annotations

from typing import Any

import preimage
from preimage.theory.dichotomy.checking import SEPARATED_ABOVE, check_dichotomy
from support.attacks import second
from support.tiny import build


def test_silenced_attention_separates_nothing_but_last_tokens() -> None:
    module: Any = build("gpt2")
    for block in module.transformer.h:
        block.attn.register_forward_hook(lambda _m, _a, output: (output[0] * 0.0, *output[1:]))
    pair = [[3, 9, 5, 7], [8, 9, 5, 7]]  # the same last token, at the same position
    report = check_dichotomy(preimage.load(module), pair)
    answers = {found.id: found.holds for found in report.verdicts}
    assert answers[SEPARATED_ABOVE] is False
    assert {row["structural"] for row in report.tables["layers"]} == {1}
    plain = check_dichotomy(preimage.load(build("gpt2")), pair)
    assert {found.id: found.holds for found in plain.verdicts}[SEPARATED_ABOVE] is True


def test_a_witness_of_what_is_not_analytic_speaks_for_its_neighbours_alone() -> None:
    module: Any = build("llama")
    second(module).register_forward_hook(lambda _m, _a, output: output.abs())
    report = check_dichotomy(preimage.load(module), [[3, 9, 5], [8, 4, 1]])
    found = {one.id: one for one in report.verdicts}[SEPARATED_ABOVE]
    assert (found.holds, report.subject["analytic"]) == (None, False)
    assert "not known to be analytic" in found.not_shown
    assert report.tables["layers"][-1]["injective_parameters"] == "some"
