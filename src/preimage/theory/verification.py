"""``verify``: every check of the theory on models so small that each can be decided in float64.

The models are a Llama (rotary positions, RMSNorm, gated MLP) and a GPT-2 (learned positions, LayerNorm), both
at random parameters: at those of a fresh model gains are 1 and biases 0, and mistakes would hide behind them.
Where the theory says that something is impossible, that is what is verified.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from preimage.models import FAMILIES, LanguageModel, new_model
from preimage.models.random_parameters import random_parameters
from preimage.progress import Listener, reporting, silent
from preimage.theory.registry import CHECKS, Case
from preimage.theory.result import TheoryReport, Verdict

_WIDTH, _BLOCKS, _HEADS, _VOCABULARY, _LENGTH = 4, 2, 2, 8, 8
_FOLLOWED = 1  # blocks of a model that an optimiser is followed on; dense Jacobians are to take a second


def verify(*, seed: int = 0, progress: Listener = silent) -> tuple[TheoryReport, ...]:
    """Every check on a small Llama and a small GPT-2: each verdict of each report ought to hold.

    ``seed`` is that of the parameters and of every other draw. Cost: about a quarter of a minute of one core.
    """
    cases = [case for family in FAMILIES for case in _cases(family, seed)]
    reports = []
    with reporting(progress) as report:
        for done, case in enumerate(cases):
            report(done, len(cases), "checks")
            reports.append(_denying(case.run(), case.denied))
        report(len(cases), len(cases), "checks")
    return tuple(reports)


def small_model(family: str, seed: int = 0, blocks: int = _FOLLOWED) -> LanguageModel:
    """A model of some hundred parameters, drawn at random, in float64 throughout."""
    size = (_WIDTH, blocks, _HEADS)
    fresh = new_model(family, size, vocabulary=_VOCABULARY, max_length=_LENGTH, device="cpu")
    return random_parameters(fresh, seed)


def _cases(family: str, seed: int) -> Iterator[Case]:
    model, followed = small_model(family, seed, _BLOCKS), small_model(family, seed)
    for check in CHECKS.values():
        yield from () if check.cases is None else check.cases(model, followed, seed)


def _denying(report: TheoryReport, denied: Mapping[str, str]) -> TheoryReport:
    """The report with some statements replaced by their denials, and nothing left merely descriptive."""
    unknown = denied.keys() - {verdict.id for verdict in report.verdicts}
    assert not unknown, f"no verdict is {unknown}"

    def answer(verdict: Verdict) -> Verdict:
        if verdict.id not in denied:
            return replace(verdict, descriptive=False)
        holds = None if verdict.holds is None else not verdict.holds
        name = f"{verdict.id}.denied"
        return replace(verdict, id=name, statement=denied[verdict.id], holds=holds, descriptive=False)

    return replace(report, verdicts=tuple(map(answer, report.verdicts)))
