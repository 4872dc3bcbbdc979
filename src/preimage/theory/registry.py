"""The checks of the theory in one place: what each asks, where it is, and how ``verify`` runs it.

A check is added by its function in ``preimage.theory`` and its entry in ``CHECKS``. Quick to import: what
needs torch is loaded when a check is run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from preimage import models, theory
from preimage.theory.result import TheoryReport

SMALL_PROMPTS = ((0, 1, 2, 3, 4, 5), (6, 5, 3, 2, 1, 0), (3, 3, 1, 6))
_PROMPTS = (*SMALL_PROMPTS, (5, 5, 5), (5, 5, 5, 5, 5))  # rotary positions cannot tell the last two apart
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
    "optimiser.every_step": "A step with 1/eta an eigenvalue of the Hessian is singular.",
    "optimiser.whole_map": "So is the map from the first parameters to the last.",
}


class Case(NamedTuple):
    """One run of a check, and what the theory denies there: from verdicts' ids to the words of denials."""

    run: Callable[[], TheoryReport]
    denied: Mapping[str, str] = {}


@dataclass(frozen=True)
class Check:
    """One check; its key in ``CHECKS`` is the ``check`` of its reports.

    ``function`` is its name in ``preimage.theory``, ``asks`` the question in one line. ``prompts``: whether
    it is asked of given prompts. ``tables``: those a reader needs beside the verdicts. ``cases``: how
    ``verify`` runs it, given a small model, one smaller still (optimisers are followed on that) and a seed.
    """

    function: str
    asks: str
    prompts: bool
    tables: tuple[str, ...] = ()
    cases: Callable[[models.LanguageModel, models.LanguageModel, int], Iterable[Case]] | None = None

    def __call__(self, *args: Any, **options: Any) -> TheoryReport:
        """Run it."""
        report: TheoryReport = getattr(theory, self.function)(*args, **options)
        return report


def _structure(model: models.LanguageModel, _: models.LanguageModel, seed: int) -> Iterator[Case]:
    from preimage.theory.analyticity.check import positional_scheme

    for bos in (None, _BOS):
        denied = {"dichotomy.separated": _LAST_TOKEN}
        if bos is None and positional_scheme(model) == "rotary":
            denied["dichotomy.separated_above_0"] = _NO_BOS
        yield Case(partial(CHECKS["structure"], model, bos=bos, seed=seed), denied)


def _optimiser(_: models.LanguageModel, followed: models.LanguageModel, seed: int) -> Iterator[Case]:
    check = partial(CHECKS["optimiser"], followed, SMALL_PROMPTS)
    for name, options in _OPTIMISERS.items():
        yield Case(partial(check, optimiser=name, steps=_STEPS, **options))

    def worst() -> TheoryReport:
        """One step of gradient descent at one over the Hessian's largest eigenvalue."""
        (row,) = check(steps=1).tables["steps"]
        return check(steps=1, learning_rate=1 / row["largest_eigenvalue"])

    yield Case(worst, _SINGULAR)


CHECKS: dict[str, Check] = {
    "analyticity": Check(
        "check_analyticity",
        "Is every block real-analytic in its parameters? Which modules break it?",
        prompts=False,
        tables=("breaks", "structure"),
        cases=lambda model, _, seed: [Case(lambda: CHECKS["analyticity"](model))],
    ),
    "dichotomy": Check(
        "check_dichotomy",
        "Which prompts do almost all parameters separate, and which none?",
        prompts=True,
        tables=("families",),
    ),
    "structure": Check(
        "search_structure",
        "The same of all short prompts: which collide, whatever the parameters are?",
        prompts=False,
        tables=("classes",),
        cases=_structure,
    ),
    "symmetry": Check(
        "check_symmetry",
        "Do states, margins and collisions stay where the weights move along the symmetry group?",
        prompts=True,
        cases=lambda model, _, seed: [Case(lambda: CHECKS["symmetry"](model, _PROMPTS, seed=seed))],
    ),
    "optimiser": Check(
        "check_optimiser",
        "Is any training step singular, or the map from the first parameters to the last?",
        prompts=True,
        tables=("map", "eigenvalues"),
        cases=_optimiser,
    ),
    "discriminant": Check(
        "distance_to_collision",
        "How far are the parameters from some at which two prompts collide?",
        prompts=True,
        tables=("distance", "layers", "merged"),
        cases=lambda model, _, seed: [
            Case(lambda: CHECKS["discriminant"](model, *SMALL_PROMPTS[::2], learning_rate=1e-5))
        ],
    ),
}
