"""The dichotomy: two prompts are separated at a layer by almost every theta, or by none.

Each pair is decided by random parameters of the same architecture: a distance above what rounding can make is
a witness, and one witness is enough; a pair that no draw separates collides structurally.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

from preimage.collisions import UNEXPLAINED, Structure
from preimage.errors import OptionError, PromptError
from preimage.layers import Layer, LayerSpec, parse_layers
from preimage.models import LanguageModel, require_model
from preimage.models.random_parameters import random_parameters
from preimage.progress import Listener, Progress, reporting, silent
from preimage.prompts import PromptSet
from preimage.states import encode_all
from preimage.theory.analyticity.check import is_analytic
from preimage.theory.dichotomy.families import UNNAMED, Ids, classes, describe
from preimage.theory.dichotomy.witnesses import Separation, measure_separation
from preimage.theory.result import TheoryReport, Verdict

_SEPARATED = "almost every theta separates every pair, at every layer"
_MOST = 640  # prompts; all pairs of a layer are held at once
_CLEAR = 1000.0  # bounds between rounding and the nearest separated pair
_SHOWN = 6  # prompts of a class


def check_dichotomy(
    model: LanguageModel,
    prompts: Sequence[str | Sequence[int]] | PromptSet,
    layers: LayerSpec = "all",
    *,
    draws: int = 3,
    seed: int = 0,
    bos: bool | None = None,
    progress: Listener = silent,
) -> TheoryReport:
    """Which pairs of prompts some theta separates, layer by layer, and why the others must collide.

    ``prompts``: from 2 to 640, texts or token ids. ``draws``: random parameters, from ``seed`` on, that every
    pair is tried on. Cost: ``draws`` float64 models of the same size on the CPU, three passes over the
    prompts each.

    >>> from preimage.models import new_model
    >>> model = new_model("llama", (8, 1, 2), vocabulary=16, max_length=8, device="cpu")
    >>> report = check_dichotomy(model, [[5, 5], [5, 5, 5], [3, 5]], layers=[1], draws=2)
    >>> [(row["family"], row["first"], row["second"]) for row in report.tables["families"]]
    [('constant prompts', [5, 5], [5, 5, 5])]
    """
    require_model(model)
    ids = tuple(dict.fromkeys(encode_all(model, prompts, bos)))
    with reporting(progress) as report:
        known, measured = _measure(model, ids, layers, draws, seed, report)
    return _report("dichotomy", _subject(model, ids, draws, seed), known, measured)


def search_structure(
    model: LanguageModel,
    *,
    vocabulary: int = 3,
    longest: int = 4,
    bos: int | None = None,
    layers: LayerSpec = "all",
    draws: int = 3,
    seed: int = 0,
    progress: Listener = silent,
) -> TheoryReport:
    """All prompts of up to ``longest`` tokens out of ``vocabulary``: which collide, whatever theta is.

    Nothing is assumed about which they are: pairs are told by distance, joined to classes, and each class is
    described by what its prompts share. ``bos`` is put in front of every prompt and is not one of the tokens.
    Token ids mean nothing to random parameters, so the first ones stand for all. Cost: as
    :func:`check_dichotomy` on these prompts, 640 at most.

    >>> from preimage.models import new_model
    >>> model = new_model("llama", (8, 1, 2), vocabulary=16, max_length=8, device="cpu")
    >>> report = search_structure(model, vocabulary=2, longest=2, layers=[1], draws=2)
    >>> [row["description"] for row in report.tables["classes"]]
    ['one token repeated']
    """
    ids = _every_prompt(model, vocabulary, longest, bos)
    with reporting(progress) as report:
        known, measured = _measure(model, ids, layers, draws, seed, report)
    subject = _subject(model, ids, draws, seed) | {"vocabulary": vocabulary, "longest": longest, "bos": bos}
    rows = [row for layer in measured for row in known.classes(layer)]
    return _report("structure", subject, known, measured, {"classes": rows})


def _every_prompt(model: LanguageModel, vocabulary: int, longest: int, bos: int | None) -> tuple[Ids, ...]:
    tokens = [token for token in range(model.vocab_size) if token != bos][:vocabulary]
    start = () if bos is None else (bos,)
    if vocabulary < 1 or longest < 1 or len(tokens) < vocabulary:
        raise OptionError(
            f"vocabulary is {vocabulary}, longest is {longest}.",
            f"Give at least 1 of each, and at most the {model.vocab_size} tokens of the model.",
        )
    if bos is not None and not 0 <= bos < model.vocab_size:
        raise OptionError(f"bos is {bos}.", f"This model's ids are 0..{model.vocab_size - 1}.")
    if model.max_length is not None and longest + len(start) > model.max_length:
        raise OptionError(f"longest is {longest}.", f"This model takes at most {model.max_length} tokens.")
    if sum(vocabulary**length for length in range(1, longest + 1)) > _MOST:
        raise OptionError(
            f"{vocabulary} tokens make too many prompts of up to {longest}.", f"Stay within {_MOST} prompts."
        )
    return tuple((*start, *row) for length in range(1, longest + 1) for row in product(tokens, repeat=length))


def _measure(
    model: LanguageModel, ids: Sequence[Ids], layers: LayerSpec, draws: int, seed: int, progress: Progress
) -> tuple[_KnownFamilies, list[Separation]]:
    if not 2 <= len(ids) <= _MOST:
        raise PromptError(f"{len(ids)} different prompts.", f"Give from 2 to {_MOST}.")
    if draws < 2:
        raise OptionError(f"draws is {draws}.", "Give at least 2: they are compared with one another.")
    wanted = parse_layers(layers, model.n_layers)
    first = random_parameters(model, seed)

    def drawn() -> Iterator[LanguageModel]:
        for draw in range(draws):
            yield random_parameters(model, seed + draw) if draw else first
            progress(draw + 1, draws, "random parameters drawn")

    return _KnownFamilies(first, ids), measure_separation(drawn(), ids, wanted)


def _subject(model: LanguageModel, ids: Sequence[Ids], draws: int, seed: int) -> dict[str, Any]:
    return {
        "model": model.name,
        "analytic": is_analytic(model),
        "architecture": type(model.module).__name__,
        "blocks": model.n_layers,
        "d_model": model.d_model,
        "prompts": len(ids),
        "pairs": len(ids) * (len(ids) - 1) // 2,
        "draws": draws,
        "seed": seed,
    }


class _KnownFamilies:
    """The families of structural collisions that are known, on one set of prompts.

    They are read off random parameters, where no two embeddings are equal.
    """

    def __init__(self, drawn: LanguageModel, ids: Sequence[Ids]) -> None:
        self.ids = ids
        self._structure = Structure(drawn)

    def name(self, pair: tuple[int, int], layer: Layer) -> str:
        """Why a pair must collide, "unnamed" where no known reason says so."""
        first, second = (self.ids[place] for place in pair)
        reason = self._structure.explain(first, second, layer, near=True)
        return UNNAMED if reason == UNEXPLAINED else reason

    def families(self, separation: Separation) -> dict[str, list[tuple[int, int]]]:
        """The structural pairs of a layer by their reason."""
        families: dict[str, list[tuple[int, int]]] = {}
        for pair in separation.structural:
            families.setdefault(self.name(pair, separation.layer), []).append(pair)
        return dict(sorted(families.items()))

    def predicted(self, layer: Layer) -> int:
        """How many pairs a known reason says must collide."""
        keys = Counter(self._structure.key(ids, layer) for ids in self.ids)
        return sum(size * (size - 1) // 2 for size in keys.values())

    def classes(self, separation: Separation) -> list[dict[str, Any]]:
        """The classes of prompts that no draw tells apart, those with one description together."""
        together: dict[tuple[str, str], list[list[int]]] = {}
        groups = classes(len(self.ids), separation.structural)
        for members, words in zip(groups, describe(groups, self.ids), strict=True):
            reasons = {self.name((members[0], other), separation.layer) for other in members[1:]}
            together.setdefault((words, ", ".join(sorted(reasons))), []).append(members)
        return [
            {
                "layer": separation.layer,
                "description": words,
                "known_as": reasons,
                "classes": len(same),
                "prompts": sum(map(len, same)),
                "example": [list(self.ids[place]) for place in same[0][:_SHOWN]],
            }
            for (words, reasons), same in together.items()
        ]


def _report(
    check: str,
    subject: dict[str, Any],
    known: _KnownFamilies,
    measured: Sequence[Separation],
    tables: dict[str, list[dict[str, Any]]] | None = None,
) -> TheoryReport:
    rows, families, unnamed = [], [], []
    analytic = subject["analytic"] is True
    for separation in measured:
        reasons = known.families(separation)
        structural, nameless = len(separation.structural), len(reasons.get(UNNAMED, []))
        rows.append(
            {
                "layer": separation.layer,
                "pairs": subject["pairs"],
                "structural": structural,
                "injective_parameters": "none" if structural else "almost all" if analytic else "some",
                "bound": separation.bound,
                "farthest_structural": _extreme(separation, structural=True),
                "nearest_separated": _extreme(separation, structural=False),
                "shape_noise": separation.shape_noise,
                "disputed": len(separation.disputed),
                "missed": known.predicted(separation.layer) - (structural - nameless),
                "unnamed": nameless,
            }
        )
        for reason, pairs in reasons.items():
            shown = pairs if reason == UNNAMED else pairs[:1]
            listed = [
                {
                    "layer": separation.layer,
                    "first": list(known.ids[first]),
                    "second": list(known.ids[second]),
                    "distance": float(separation.farthest[first, second]),
                }
                for first, second in shown
            ]
            if reason == UNNAMED:
                unnamed += listed
            families.append({**listed[0], "family": reason, "pairs": len(pairs)})
    all_tables = {"layers": rows, "families": families, "unnamed": unnamed, **(tables or {})}
    return TheoryReport(check, subject, _verdicts(rows, analytic), all_tables)


def _extreme(separation: Separation, *, structural: bool) -> float | None:
    """The largest distance of a structural pair, or the smallest of one that is not; None without one."""
    together = separation.farthest <= separation.bound
    values = separation.farthest[(together if structural else ~together).triu(1)]
    if not len(values):
        return None
    return float(values.max() if structural else values.min())


def _verdicts(rows: list[dict[str, Any]], analytic: bool) -> tuple[Verdict, ...]:
    """``analytic``: without it a witness speaks for parameters near it, not for almost all."""
    structural = sum(row["structural"] for row in rows)
    above = sum(row["structural"] for row in rows if row["layer"] != 0)
    disputed, missed, unnamed = (sum(row[key] for row in rows) for key in ("disputed", "missed", "unnamed"))
    noise = [row["shape_noise"] / row["bound"] for row in rows if row["shape_noise"] is not None]
    gaps = [row["nearest_separated"] / row["bound"] for row in rows if row["nearest_separated"] is not None]
    noisiest, narrowest = max(noise, default=None), min(gaps, default=None)
    draws = "That no draw separates a pair is strong evidence, not a proof, that no theta does."
    these = "Only these prompts were looked at."
    few = "The theorem speaks of all theta but a null set; a few draws were made."
    agree = "every draw gives the same answer for every pair"
    explained = "every structural collision has a known reason"
    predicted = "every pair that a known reason predicts collides in every draw"
    longer = f"{these} Longer prompts may collide for other reasons."
    shapes = "the same prompt in another shape stays within the bound on rounding"
    one_shape = "One other shape was tried; the bound's condition is measured in random directions."
    clear = "separated pairs are far above the bound on rounding"
    trained = "What is said of these draws need not hold at trained parameters."
    quiet = None if noisiest is None else noisiest <= 1
    wide = None if narrowest is None else narrowest >= _CLEAR
    witnesses, above_0 = f"{draws} {these}", f"{_SEPARATED} above 0"
    return (
        _almost_all("dichotomy.separated", _SEPARATED, structural, witnesses, analytic),
        _almost_all("dichotomy.separated_above_0", above_0, above, witnesses, analytic),
        Verdict("dichotomy.draws_agree", agree, disputed == 0, float(disputed), 0.0, few),
        Verdict("dichotomy.collisions_explained", explained, unnamed == 0, float(unnamed), 0.0, longer),
        Verdict("dichotomy.predictions_hold", predicted, missed == 0, float(missed), 0.0, these),
        Verdict("dichotomy.shape_noise", shapes, quiet, noisiest, 1.0, one_shape),
        Verdict("dichotomy.clear_of_rounding", clear, wide, narrowest, _CLEAR, trained),
    )


def _almost_all(name: str, statement: str, value: int, not_shown: str, analytic: bool) -> Verdict:
    """Of almost every theta: open where all pairs were separated but the model may not be analytic."""
    if not analytic:
        not_shown += " The model is not known to be analytic: a witness speaks for parameters near it alone."
    holds = value == 0 and (True if analytic else None)
    return Verdict(name, statement, holds, float(value), 0.0, not_shown, descriptive=True)
