"""``verify``: every check of the theory on models so small that each can be decided in float64.

The models are a Llama (rotary positions, RMSNorm, gated MLP) and a GPT-2 (learned positions, LayerNorm), both
at random parameters: at those of a fresh model gains are 1 and biases 0, and mistakes would hide behind them.
Where the theory says that something is impossible, that is what is verified.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

from preimage.models import FAMILIES, LanguageModel, new_model
from preimage.models.random_parameters import random_parameters
from preimage.progress import Progress, silent
from preimage.theory.analyticity.check import check_analyticity, positional_scheme
from preimage.theory.dichotomy.check import SEPARATED, SEPARATED_ABOVE, search_structure
from preimage.theory.discriminant.check import distance_to_collision
from preimage.theory.optimiser.check import EVERY_STEP, WHOLE_MAP, check_optimiser
from preimage.theory.result import TheoryReport, Verdict
from preimage.theory.symmetry.check import check_symmetry

Check: TypeAlias = Callable[[], TheoryReport]
Denied: TypeAlias = Mapping[str, str]  # from a verdict's id to the words of its denial
SMALL_PROMPTS = ((0, 1, 2, 3, 4, 5), (6, 5, 3, 2, 1, 0), (3, 3, 1, 6))
_CONSTANT = ((5, 5, 5), (5, 5, 5, 5, 5))  # a pair that rotary positions cannot tell apart
_WIDTH, _BLOCKS, _HEADS, _VOCABULARY, _LENGTH = 4, 2, 2, 8, 8
_FOLLOWED = 1  # blocks of a model that an optimiser is followed on; dense Jacobians are to take a second
_BOS = 7
_STEPS = 2  # the fewest of which the whole map is more than one step
_OPTIMISERS: dict[str, dict[str, Any]] = {
    "gradient-descent": {"learning_rate": 1e-2},
    "heavy-ball": {"learning_rate": 1e-2},
    "adamw": {"learning_rate": 1e-3, "weight_decay": 0.1},
}
_LAST_TOKEN = "no theta separates every pair at every layer: 0 sees the last token and at most its position"
_NO_BOS = "no theta separates every pair above layer 0 where positions are rotary and there is no BOS"
_SINGULAR = {
    EVERY_STEP: "A step with 1/eta an eigenvalue of the Hessian is singular.",
    WHOLE_MAP: "So is the map from the first parameters to the last.",
}


def verify(*, seed: int = 0, progress: Progress = silent) -> tuple[TheoryReport, ...]:
    """Every check on a small Llama and a small GPT-2: each verdict of each report ought to hold.

    ``seed`` is that of the parameters and of every other draw. Cost: about a quarter of a minute of one core.
    """
    checks = [check for family in FAMILIES for check in _checks(family, seed)]
    reports = []
    for done, (check, denied) in enumerate(checks):
        progress(done, len(checks), "checks")
        reports.append(_denying(check(), denied))
    progress(len(checks), len(checks), "checks")
    return tuple(reports)


def small_model(family: str, seed: int = 0, blocks: int = _FOLLOWED) -> LanguageModel:
    """A model of some hundred parameters, drawn at random, in float64 throughout."""
    size = (_WIDTH, blocks, _HEADS)
    fresh = new_model(family, size, vocabulary=_VOCABULARY, max_length=_LENGTH, device="cpu")
    return random_parameters(fresh, seed)


def _checks(family: str, seed: int) -> Iterator[tuple[Check, Denied]]:
    """Every check, and which of its statements the theory denies of this family."""
    model, followed = small_model(family, seed, _BLOCKS), small_model(family, seed)
    yield partial(check_analyticity, model), {}
    rotary = positional_scheme(model) == "rotary"
    for bos in (None, _BOS):
        apart = {SEPARATED_ABOVE: _NO_BOS} if rotary and bos is None else {}
        yield partial(search_structure, model, bos=bos, seed=seed), {SEPARATED: _LAST_TOKEN, **apart}
    yield partial(check_symmetry, model, [*SMALL_PROMPTS, *_CONSTANT], seed=seed), {}
    for name, options in _OPTIMISERS.items():
        yield partial(check_optimiser, followed, SMALL_PROMPTS, optimiser=name, steps=_STEPS, **options), {}
    yield partial(_worst_step, followed), _SINGULAR
    yield partial(distance_to_collision, model, SMALL_PROMPTS[0], SMALL_PROMPTS[2], learning_rate=1e-5), {}


def _worst_step(model: LanguageModel) -> TheoryReport:
    """One step of gradient descent at the worst learning rate: one over the Hessian's largest eigenvalue."""
    step: dict[str, Any] = {"optimiser": "gradient-descent", "steps": 1}
    (row,) = check_optimiser(model, SMALL_PROMPTS, **step).tables["steps"]
    rate = 1 / row["largest_eigenvalue"]
    return check_optimiser(model, SMALL_PROMPTS, **step, learning_rate=rate)


def _denying(report: TheoryReport, denied: Denied) -> TheoryReport:
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
