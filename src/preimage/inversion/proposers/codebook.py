"""The codebook: what state a token has, on average, at a layer. Fitted in closed form, not trained.

A standardised state is modelled as x_t = B f(token) + A [x_(t-1), x_(t+1)] + noise, where f are the model's
own token features: B f(v) is the codebook's entry for token v, A takes out what the neighbours say of the
context, and the noise's covariance whitens the distance. Attention sinks have a fit of their own. Two
least-squares problems over some ten thousand tokens, text and random ones, are all there is to it.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path

import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from preimage.devices import by_device
from preimage.errors import RunFolderError
from preimage.inversion.proposers.lens import Observed, Standardise, Valid, window
from preimage.inversion.proposers.scores import Keys, Part
from preimage.models import LanguageModel, cache_folder
from preimage.observations import Tap
from preimage.progress import stage
from preimage.prompts import PromptOptions, gather
from preimage.storage import write_tensors

log = logging.getLogger(__name__)

_RECIPE = 1  # raise when the fit changes
_LENGTH = 64
_TOKENS_PER_REGRESSOR = 8
_MOST_TOKENS = 2**17
_RIDGE = (1e-2, 1e-3)  # of sinks, which are fewer, and of all others
_SHRINKAGE = 0.02  # of the noise's covariance towards a multiple of the identity
_BATCH = {"cpu": 2048, "cuda": 65536}  # tokens in one pass


class Codebook(nn.Module):
    """A map from windows of states to queries, and from token features to keys, for sinks and for others."""

    read: Tensor
    write: Tensor

    def __init__(self, width: int, d_features: int) -> None:
        super().__init__()
        self.standardise = Standardise(width)
        self.register_buffer("read", torch.zeros(2, 3 * width, width))
        self.register_buffer("write", torch.zeros(2, d_features, width))

    @torch.no_grad()
    def fit(self, model: LanguageModel, tap: Tap, features: Float[Tensor, "vocabulary d_features"]) -> None:
        """Run the sample through the model and solve for both kinds of positions."""
        tokens = min(_TOKENS_PER_REGRESSOR * (features.shape[1] + 2 * model.width(tap)), _MOST_TOKENS)
        windows = sample(model, max(8, tokens // _LENGTH))
        generator = torch.Generator().manual_seed(1)
        pairs = torch.randint(model.vocab_size, (max(16, tokens // 4), 2), generator=generator)
        samples = [(ids.to(model.device), _states(model, tap, ids)) for ids in (windows, pairs)]
        self.standardise.fit(samples[0][1], samples[1][1])
        rows: tuple[list[tuple[Tensor, ...]], ...] = [], []
        for ids, states in samples:
            x, sinks = self.standardise(states), self.standardise.sinks(states)
            around = window(x, 1)
            for parts, mine in zip(rows, (sinks, ~sinks), strict=True):
                parts.append((ids[mine], x[mine], around[mine]))
        for kind, parts in enumerate(rows):
            of, x, around = (torch.cat(column) for column in zip(*parts, strict=True))
            self._solve(kind, features[of], x, around)

    def _solve(self, kind: int, given: Tensor, x: Tensor, around: Tensor) -> None:
        d = x.shape[1]
        neighbours = torch.cat([around[:, :d], around[:, 2 * d :]], dim=1)
        left = torch.cat([given, neighbours], dim=1).double()
        gram = left.T @ left
        ridge = _RIDGE[kind] * gram.diagonal().mean().clamp_min(1e-30)
        solution = torch.linalg.solve(gram + ridge * torch.eye(len(gram)).to(gram), left.T @ x.double())
        noise = x.double() - left @ solution
        whiten = whitening(noise)
        context = solution[given.shape[1] :]
        undo = torch.cat([-context[:d], torch.eye(d).to(context), -context[d:]])
        self.read[kind] = (undo @ whiten.T).float()
        self.write[kind] = (solution[: given.shape[1]] @ whiten.T).float()

    def keys(self, features: Float[Tensor, "vocabulary d_features"]) -> tuple[Keys, Keys]:
        """The whitened entries; with the bias, a score is -1/2 of a squared distance, up to a constant."""
        books = [features @ self.write[kind] for kind in (0, 1)]
        sinks, others = (Keys(book, -0.5 * book.square().sum(dim=1)) for book in books)
        return sinks, others

    def part(self, states: Observed, valid: Valid, books: tuple[Keys, Keys]) -> Part:
        """Queries of observed states."""
        seen = window(self.standardise(states) * valid[..., None], 1).flatten(0, 1)
        kind = (~self.standardise.sinks(states)).long().flatten()
        queries = seen.new_empty(len(seen), self.read.shape[2])
        for number in (0, 1):
            mine = (kind == number).nonzero().flatten()
            queries[mine] = seen[mine] @ self.read[number]
        return Part(queries, books, kind)


def fitted_codebook(
    model: LanguageModel, tap: Tap, features: Float[Tensor, "vocabulary d_features"]
) -> Codebook:
    """A codebook from the user's cache, or fitted now and put there."""
    codebook = Codebook(model.width(tap), features.shape[1]).to(model.device)
    path = cache_path(model, tap, features.shape[1])
    with suppress(OSError, SafetensorError, RuntimeError):  # none there, or none that can be read
        codebook.load_state_dict(load_file(path))
        return codebook
    stage("codebook")
    codebook.fit(model, tap, features)
    try:
        write_tensors(path, codebook.state_dict())
    except RunFolderError as error:  # a cache that cannot be written costs time, nothing else
        log.warning("the codebook could not be cached: %s", error)
    return codebook


def cache_path(model: LanguageModel, tap: Tap, d_features: int) -> Path:
    """Where the codebook of a model and a layer or site is kept."""
    folder = cache_folder() / "codebooks" / model.weight_hash[:24]
    return folder / f"layer-{tap}-{d_features}-v{_RECIPE}.safetensors"


def sample(model: LanguageModel, rows: int, seed: int = 0) -> Int[Tensor, "prompt position"]:
    """Prompts to fit or calibrate on: text (if there is a tokenizer) in the first half, random tokens."""
    length = min(_LENGTH, model.max_length or _LENGTH)
    generator = torch.Generator().manual_seed(seed)
    windows = torch.randint(model.vocab_size, (rows, length), generator=generator)
    if model.tokenizer is not None:
        options = PromptOptions(count=rows // 4, length=length, seed=seed, keep_duplicates=True)
        for part, source in enumerate(("default:prose:train", "default:code:train")):
            text = torch.tensor(list(gather(source, model, options)))
            windows[part * (rows // 4) :][: len(text)] = text
    return windows


def _states(model: LanguageModel, tap: Tap, ids: Int[Tensor, "prompt position"]) -> Tensor:
    size = max(1, by_device(_BATCH, model.device) // ids.shape[1])
    return torch.cat([model.states(part, (tap,))[tap].float() for part in ids.split(size)])


def whitening(noise: Float[Tensor, "row d"]) -> Float[Tensor, "d d"]:
    """W with W S W^T = I for the (shrunk) covariance S of the noise."""
    covariance = noise.T @ noise / len(noise)
    mean = covariance.diagonal().mean().clamp_min(1e-12)
    shrunk = (1 - _SHRINKAGE) * covariance + _SHRINKAGE * mean * torch.eye(len(covariance)).to(noise)
    values, vectors = torch.linalg.eigh(shrunk)
    solution: Tensor = (vectors * values.clamp_min(1e-9 * float(mean)).rsqrt()).T
    return solution
