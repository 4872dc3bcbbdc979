"""The proposers that come with the package: lens, codebook, prior, and sums of proposers.

A proposer goes from the states of a whole prompt to a ranking of the vocabulary at every position at once.
None of them knows the prefix and none decides anything. The lens is trained, the codebook is fitted in closed
form, the prior is the model's own expectation of the next token.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from preimage.distances import products
from preimage.errors import OptionError
from preimage.inversion.proposers.codebook import fitted_codebook, sample
from preimage.inversion.proposers.features import embedding_features, features_of
from preimage.inversion.proposers.kept_keys import keys_of
from preimage.inversion.proposers.lens import Lens, Observed, Valid
from preimage.inversion.proposers.lens_files import LensInfo, find_lenses, read_lens
from preimage.inversion.proposers.peeling import lowered, lowest_layer
from preimage.inversion.proposers.scores import Keys, Part, Scores
from preimage.inversion.proposers.statistics import Statistics
from preimage.layers import Layer
from preimage.models import LanguageModel, turned_back, without_positions
from preimage.observations import Site, Tap, in_words
from preimage.progress import stage

_WEIGHTS = (0.0, 0.5, 1.0, 2.0, 4.0)  # of the prior, to choose from
_CALIBRATION = 16  # prompts to choose on, half of them text
_CHOSEN_ON = 256  # positions of these
_SAID = 16  # positions of a prompt that say whether it is text
_LIFT_TOKENS = 16384  # tokens carried on to another layer in one pass


@runtime_checkable
class Proposer(Protocol):
    """Scores every token at every position of prompts; ``proposers=`` of an inversion takes such an object.

    ``name`` is what :attr:`Inversion.proposer` says. A poor proposer costs time, never exactness.
    """

    name: str

    def score(self, observed: Observed, valid: Valid) -> Scores:
        """Scores at every position of prompts padded to one length; where not valid, they are ignored."""


class LensProposer:
    """A trained lens: of this layer, of one above it to which the states are carried first, or of a site.

    Keys are turned back to before rotary positions first, as the lens learned them.
    """

    def __init__(self, model: LanguageModel, tap: Tap, lens: Lens, at: Tap, path: Path | None = None) -> None:
        self.name = f"lens-{at._replace(rotary='after') if isinstance(at, Site) else at}"
        self._model, self._tap, self._lens, self._at = model, tap, lens, at
        self._turned = keys_of(model, lens, path)
        self._expected = _head_keys(model) if lens.shape.prior and not isinstance(at, Site) else None

    def score(self, observed: Observed, valid: Valid) -> Scores:
        """Queries from each position and its neighbours, and what the model expects where that counts."""
        with torch.inference_mode():
            seen = self._as_learned(observed)
            with products("tf32"):  # on a GPU; what is proposed is verified in full precision
                queries, belief = self._lens.read(seen, valid)
            parts = [Part(self._turned.turn(queries).flatten(0, 1), (self._turned.keys,))]
            if belief is not None and self._expected is not None and not isinstance(self._at, Site):
                before = state_before(self._model, seen, self._at) * belief[..., None]
                parts.append(Part(before.flatten(0, 1), (self._expected,)))
        return Scores(tuple(parts), observed.shape[1])

    def _as_learned(self, observed: Observed) -> Observed:
        if isinstance(self._tap, Site) or isinstance(self._at, Site):
            return turned_back(self._model, self._tap, observed)
        return _lift(self._model, observed, self._tap, self._at)


class CodebookProposer:
    """A codebook fitted for this layer or site; keys are turned back to before rotary positions first.

    ``features``: of every token, where they are not those of two blocks.
    """

    name = "codebook"

    def __init__(self, model: LanguageModel, tap: Tap, features: Tensor | None = None) -> None:
        features = features_of(model) if features is None else features
        self._model, self._tap = model, tap
        self._codebook = fitted_codebook(model, without_positions(model, tap), features)
        with torch.inference_mode():
            self._books = self._codebook.keys(features)

    def score(self, observed: Observed, valid: Valid) -> Scores:
        """Nearest entries, after what the neighbours say of the context is taken out."""
        with torch.inference_mode():
            observed = turned_back(self._model, self._tap, observed)
            return Scores((self._codebook.part(observed, valid, self._books),), observed.shape[1])


class PeelProposer:
    """States carried down to the lowest layer they can be, and read there by a codebook of embeddings."""

    def __init__(self, model: LanguageModel, layer: int) -> None:
        self._model, self._layer, self._low = model, layer, lowest_layer(model, layer)
        self.name = f"peel-{self._low}"
        self._codebook = CodebookProposer(model, self._low, embedding_features(model))

    def score(self, observed: Observed, valid: Valid) -> Scores:
        """The scores of what they were there."""
        return self._codebook.score(lowered(self._model, observed, self._layer, self._low, valid), valid)


class SumProposer:
    """Two proposers, their scores added."""

    def __init__(self, first: Proposer, second: Proposer) -> None:
        self.name = f"{first.name}+{second.name}"
        self._both = first, second

    def score(self, observed: Observed, valid: Valid) -> Scores:
        """Both in one."""
        parts = [part for proposer in self._both for part in proposer.score(observed, valid).parts]
        return Scores(tuple(parts), observed.shape[1])


class HalfProposer:
    """A proposer for the keys or the values of both."""

    def __init__(self, base: Proposer, width: int, *, first: bool) -> None:
        self.name = base.name
        self._base, self._half = base, slice(None, width) if first else slice(-width, None)

    def score(self, observed: Observed, valid: Valid) -> Scores:
        """The scores of that half."""
        return self._base.score(observed[..., self._half], valid)


class FilledProposer:
    """A proposer for states of which some coordinates were kept: the others are filled in first."""

    def __init__(self, base: Proposer, statistics: Statistics, kept: tuple[int, ...]) -> None:
        self.name = base.name
        self._base, self._statistics, self._kept = base, statistics, kept

    def score(self, observed: Observed, valid: Valid) -> Scores:
        """The scores of the whole states."""
        with torch.inference_mode():
            return self._base.score(self._statistics.filled_in(observed, self._kept), valid)


class PriorProposer:
    """The model's own next-token prediction, alone or on top of another proposer.

    The observed states are carried on through the remaining blocks and the LM head. On top of another
    proposer it counts only for prompts whose first proposals look like text to the model, so that prompts of
    random tokens do not suffer.
    """

    def __init__(self, model: LanguageModel, layer: Layer, base: Proposer | None) -> None:
        keys = _head_keys(model)
        if keys is None:
            raise OptionError(f"{model.name} has no LM head, so it has no prior.", "Leave the prior out.")
        self.name = "prior" if base is None else f"{base.name}+prior"
        self._model, self._layer, self._base = model, layer, base
        self._keys = keys
        if base is not None:
            self._weight, self._threshold = self._calibrate(base)

    def score(self, observed: Observed, valid: Valid) -> Scores:
        """Log-probabilities up to a constant a position; none at the first."""
        with torch.inference_mode():
            before = state_before(self._model, observed, self._layer)
            if self._base is None:
                return self._prior(before)
            base = self._base.score(observed, valid)
            likely = self._likelihood(base, before, valid) > self._threshold
            queries = before * (self._weight * likely[:, None, None])
            return Scores((*base.parts, *self._prior(queries).parts), base.length)

    def _prior(self, before: Tensor) -> Scores:
        return Scores((Part(before.flatten(0, 1), (self._keys,)),), before.shape[1])

    def _likelihood(self, base: Scores, before: Tensor, valid: Tensor) -> Float[Tensor, " prompt"]:
        """The mean log-probability of the first proposals of each prompt, its first position left out.

        Of long prompts some positions say it.
        """
        prior, length = self._prior(before), base.length
        places = torch.arange(1, length, -(-length // _SAID), device=valid.device)
        if not len(places):
            return torch.zeros(len(valid), device=valid.device)
        rows = (length * torch.arange(len(valid), device=valid.device)[:, None] + places).flatten()
        logs = [
            prior.at(some).log_softmax(dim=1).gather(1, base.at(some).argmax(dim=1, keepdim=True))[:, 0]
            for some in rows.split(_SAID)
        ]
        counted = valid[:, places]
        total = (torch.cat(logs).view(counted.shape) * counted).sum(dim=1)
        return total / counted.sum(dim=1).clamp_min(1)

    def _calibrate(self, proposer: Proposer) -> tuple[float, float]:
        """The weight that misses least on text, and the threshold between text and random tokens."""
        if self._model.tokenizer is None:
            return 0.0, torch.inf
        stage("weight of the prior")
        windows = sample(self._model, _CALIBRATION, seed=1).to(self._model.device)
        text = len(windows) // 2
        valid = torch.ones_like(windows, dtype=torch.bool)
        with torch.inference_mode():
            states = self._model.states(windows, (self._layer,))[self._layer]
            base, before = proposer.score(states, valid), state_before(self._model, states, self._layer)
            likely = self._likelihood(base, before, valid)
            one, other = float(likely[:text].median()), float(likely[text:].median())
            if one - other < 1.0:
                return 0.0, torch.inf
            prior = self._prior(before)
            misses = dict.fromkeys(_WEIGHTS, 0)
            rows = torch.arange(text * base.length, device=windows.device)
            rows = rows[rows % base.length > 0]
            for some in rows[:: -(-len(rows) // _CHOSEN_ON)].split(64):
                apart, expected = base.at(some), prior.at(some)
                for weight in _WEIGHTS:
                    wrong = (apart + weight * expected).argmax(dim=1) != windows.flatten()[some]
                    misses[weight] += int(wrong.sum())
        return min(_WEIGHTS, key=lambda weight: misses[weight]), (one + other) / 2


def find_lens_proposer(model: LanguageModel, tap: Tap) -> Proposer:
    """The lens for these weights and this site, or this layer or the nearest above it."""
    lenses = find_lenses(model, tap)
    if not lenses:
        above = "" if isinstance(tap, Site) else " or a layer above it"
        raise OptionError(
            f"There is no lens for {in_words(tap)} of {model.name}{above}.",
            "Train one with `preimage lens train`, or leave the lens out.",
        )
    return lens_proposer(model, tap, lenses)


def lens_proposer(model: LanguageModel, tap: Tap, lenses: Sequence[LensInfo]) -> Proposer:
    """The lenses in these files, scores added."""
    return reduce(SumProposer, [_with_lens(model, tap, info) for info in lenses])


def _with_lens(model: LanguageModel, tap: Tap, info: LensInfo) -> Proposer:
    if isinstance(tap, Site) and info.place != tap.kind:  # of half of what is seen
        half = tap._replace(kind=info.place, rotary=tap.rotary if info.place == "keys" else "after")
        return HalfProposer(_with_lens(model, half, info), model.width(half), first=info.place == "keys")
    return LensProposer(model, tap, read_lens(info.path, model), info.tap, info.path)


def state_before(model: LanguageModel, observed: Observed, layer: Layer) -> Observed:
    """The state before each position, as the LM head sees it; zeros before the first."""
    final = _lift(model, observed, layer, "final").float()
    return torch.nn.functional.pad(final, (0, 0, 1, 0))[:, :-1]


def _head_keys(model: LanguageModel) -> Keys | None:
    """The LM head's matrix as keys, where there is one."""
    table = model.unembedding
    return None if table is None else Keys(table.float(), torch.zeros(len(table), device=table.device))


def _lift(model: LanguageModel, observed: Tensor, layer: Layer, to: Layer) -> Tensor:
    if layer == to:
        return observed
    size = max(1, _LIFT_TOKENS // observed.shape[1])
    return torch.cat([model.lift(part, layer, to) for part in observed.split(size)])
