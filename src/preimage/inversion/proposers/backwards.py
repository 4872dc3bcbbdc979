"""Backwards readers: from one vector to every token of the prompt that made it, and to its length.

A state says most about its own token, and something about each token before it. For every slot of a prompt
the vector is modelled as x = B f(token there) + noise, f the model's own token features, and read as a
codebook is: by the whitened distance to each token's entry. The last state has a reader for each distance
back from its position, whatever that is; the mean over positions one for the first slot and one for all
others, for each length. A length is read by the mean of the vectors of its kind. Everything is fitted in
closed form, on short prompts: the default corpus, what the model itself writes, and random tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeAlias
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from preimage.devices import by_device
from preimage.errors import RunFolderError
from preimage.inversion.proposers.codebook import sample, whitening
from preimage.models import LanguageModel, cache_folder, written_by
from preimage.storage import write_tensors

log = logging.getLogger(__name__)

LONGEST_READ = 8  # tokens of the longest prompt that is read
_RECIPE = 1  # raise when the fit changes
_ROWS_PER_FEATURE = 4
_FEWEST_ROWS, _MOST_ROWS = 256, {"cpu": 4096, "cuda": 32768}
_WINDOW = 64  # tokens of a window that short prompts are cut from
_WRITTEN = 3 / 8  # of the prompts fitted on, by the model itself
_BATCH = {"cpu": 2048, "cuda": 65536}  # tokens in one pass
_RIDGE = 0.1
_FREQUENCY = 2.0  # weight of how often a token occurs in text
_UNSEEN = 0.3  # times that a token is counted which does not
_LARGEST = 8.0  # standardised coordinates beyond this are cut
_LARGEST_FILE = 2**27  # bytes of readers that are kept on disk

# Prompts that are fitted on, and those of them that are text.
Drawn: TypeAlias = tuple[Int[Tensor, "prompt position"], Int[Tensor, "some position"] | None]
_drawn: WeakKeyDictionary[LanguageModel, tuple[tuple[object, int], Drawn]] = WeakKeyDictionary()

# What is seen of prompts of one length: the states at every position.
See: TypeAlias = Callable[[Int[Tensor, "prompt position"]], Float[Tensor, "prompt position d"]]


@dataclass(frozen=True)
class Readers:
    """What the vectors of prompts of 1, 2, .. tokens look like, and how each slot's token is read."""

    centre: Float[Tensor, "length d"]
    scale: Float[Tensor, "length d"]
    usual: Float[Tensor, "length d"]  # the mean of standardised vectors
    read: Float[Tensor, "reader d d_features"]
    bias: Float[Tensor, "reader vocabulary"]
    length_read: Float[Tensor, "d length"]
    length_bias: Float[Tensor, " length"]

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt that can be read."""
        return len(self.centre)

    def lengths(self, vector: Float[Tensor, " d"]) -> list[float]:
        """How likely each length is: log-likelihoods up to a constant, of 1, 2, .. tokens."""
        # in the coordinates of the longest: the same for all lengths
        query = _standard(vector.to(self.centre), self.centre[-1], self.scale[-1])
        return (query @ self.length_read + self.length_bias).tolist()

    def slots(
        self,
        vector: Float[Tensor, " d"],
        length: int,
        features: Float[Tensor, "vocabulary d_features"],
        *,
        mean: bool,
    ) -> Float[Tensor, "slot vocabulary"]:
        """The score of every token at every slot of a prompt so long: log-likelihoods up to constants."""
        at = length - 1
        query = _standard(vector.to(self.centre), self.centre[at], self.scale[at]) - self.usual[at]
        readers = [_reader(length, slot, mean) for slot in range(length)]
        return (query @ self.read[readers]) @ features.T + self.bias[readers]


def fit_readers(
    model: LanguageModel, see: See, features: Float[Tensor, "vocabulary d_features"], *, mean: bool
) -> Readers:
    """Run short prompts through the model and solve for every reader."""
    ids, text = _prompts(model, features.shape[1])
    size = max(1, by_device(_BATCH, model.device) // ids.shape[1])
    with torch.inference_mode():
        states = torch.cat([see(part).float() for part in ids.split(size)])
    ids = ids.to(states.device)
    longest = ids.shape[1]
    if mean:
        counts = torch.arange(1, longest + 1, device=states.device)
        states = states.cumsum(dim=1) / counts[:, None]
    centre = states.median(dim=0).values
    spread = (states - centre).abs().median(dim=0).values
    least = (1e-6 * spread.amax(dim=1, keepdim=True)).clamp_min(1e-12)
    scale = 1.5 * torch.maximum(spread, least)
    vectors = _standard(states, centre, scale)
    usual = vectors.mean(dim=0)
    vectors -= usual
    fitted = []
    for pairs in _groups(longest, mean):
        given = features[torch.cat([ids[:, slot] for _, slot in pairs])]
        fitted.append(_solve(given, torch.cat([vectors[:, n - 1] for n, _ in pairs]), features))
    read, bias = (torch.stack(column) for column in zip(*fitted, strict=True))
    if text is not None:
        seen = torch.bincount(text.flatten(), minlength=len(features)).to(bias)
        bias += _FREQUENCY * (seen + _UNSEEN).log()
    lengths = _fit_lengths(_standard(states, centre[-1], scale[-1]))
    return Readers(centre, scale, usual, read, bias, *lengths)


def kept_readers(
    model: LanguageModel, name: str, see: See, features: Float[Tensor, "vocabulary d_features"], *, mean: bool
) -> Readers:
    """Readers from the user's cache, or fitted now and put there under a name."""
    path = _cache_path(model, name)
    with suppress(OSError, SafetensorError, TypeError):  # none there, or none that can be read
        return Readers(**{key: one.to(model.device) for key, one in load_file(path).items()})
    readers = fit_readers(model, see, features, mean=mean)
    tensors = asdict(readers)
    if sum(one.numel() * one.element_size() for one in tensors.values()) <= _LARGEST_FILE:
        try:
            write_tensors(path, tensors)
        except RunFolderError as error:  # a cache that cannot be written costs time, nothing else
            log.warning("the readers could not be cached: %s", error)
    return readers


def _cache_path(model: LanguageModel, name: str) -> Path:
    folder = cache_folder() / "backwards" / model.weight_hash[:24]
    return folder / f"{name}-{model.device.type}-v{_RECIPE}.safetensors"


def _prompts(model: LanguageModel, d_features: int) -> Drawn:
    """Short prompts to fit on: the same for every layer, written once."""
    known = _drawn.get(model)
    if known is None or known[0] != (model.edition, d_features):
        known = _drawn[model] = (model.edition, d_features), _draw(model, d_features)
    return known[1]


def _draw(model: LanguageModel, d_features: int) -> Drawn:
    """Text, what the model writes, random tokens; and those that are text."""
    length = min(LONGEST_READ, model.max_length or LONGEST_READ)
    rows = max(_FEWEST_ROWS, min(_ROWS_PER_FEATURE * d_features, by_device(_MOST_ROWS, model.device)))
    own = written_by(model, int(_WRITTEN * rows), length)
    rows -= 0 if own is None else len(own)
    each = min(_WINDOW, model.max_length or _WINDOW) // length
    windows = sample(model, max(4, -(-rows // each)), seed=2)
    text, drawn = (half.unfold(1, length, length).flatten(0, 1) for half in windows.tensor_split(2))
    if own is not None:
        text = torch.cat([text, own])
    return torch.cat([text, drawn]), None if model.tokenizer is None else text


def _reader(length: int, slot: int, mean: bool) -> int:
    """Which reader a slot of a prompt of so many tokens has; of one token, that of the next length."""
    if not mean:
        return length - 1 - slot
    return 2 * max(0, length - 2) + (slot > 0)


def _groups(longest: int, mean: bool) -> Iterator[list[tuple[int, int]]]:
    """For each reader, the lengths and slots it is fitted on; the first position's state is none of them."""
    pairs = [(n, slot) for n in range(min(2, longest), longest + 1) for slot in range(n)]
    for number in sorted({_reader(n, slot, mean) for n, slot in pairs}):
        yield [pair for pair in pairs if _reader(*pair, mean) == number]


def _solve(
    given: Float[Tensor, "row d_features"],
    vectors: Float[Tensor, "row d"],
    features: Float[Tensor, "vocabulary d_features"],
) -> tuple[Float[Tensor, "d d_features"], Float[Tensor, " vocabulary"]]:
    """A reader, so that a score is -1/2 of the whitened squared distance to a token's entry, less its own."""
    gram = given.T @ given
    ridge = _RIDGE * gram.diagonal().mean().clamp_min(1e-30)
    write = torch.linalg.solve(gram + ridge * torch.eye(len(gram)).to(gram), given.T @ vectors)
    white = whitening((vectors - given @ write).double()).to(write)
    return white.T @ (white @ write.T), -0.5 * (features @ write @ white.T).square().sum(dim=1)


def _fit_lengths(
    vectors: Float[Tensor, "prompt length d"],
) -> tuple[Float[Tensor, "d length"], Float[Tensor, " length"]]:
    means = vectors.mean(dim=0)
    rest = (vectors - means)[:, 1:] if vectors.shape[1] > 1 else vectors - means
    white = whitening(rest.flatten(0, 1).double()).to(means)
    entries = means @ white.T
    return white.T @ entries.T, -0.5 * entries.square().sum(dim=1)


def _standard(
    states: Float[Tensor, "*prompt d"], centre: Float[Tensor, "*length d"], scale: Float[Tensor, "*length d"]
) -> Float[Tensor, "*prompt d"]:
    return ((states - centre) / scale).clamp(-_LARGEST, _LARGEST)
