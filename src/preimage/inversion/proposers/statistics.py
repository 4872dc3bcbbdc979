"""How the states at a place of a model are spread: their mean, and the directions in which they differ.

What a model computes differs along few directions. What noise adds lies in all of them alike: along those in
which states hardly differ it is weighted down before anything is proposed.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Bool, Float
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from preimage.errors import RunFolderError
from preimage.models import LanguageModel, cache_folder
from preimage.observations import Tap
from preimage.states import calibration_prompts
from preimage.storage import write_tensors

log = logging.getLogger(__name__)

_RECIPE = 1  # raise when the measurement changes
_PROMPTS = 16  # of text, and as many of random tokens
_SINK = 4.0  # a sink is so many times as long as the median state
_RIDGE = 1e-4  # of the spread, where coordinates are filled in


@dataclass(frozen=True)
class Statistics:
    """Mean and principal directions of ordinary states, sinks left out; those of most spread first."""

    mean: Float[Tensor, " d"]
    spread: Float[Tensor, " d"]
    axes: Float[Tensor, "d d"]
    length: Float[Tensor, ""]  # of the median state

    @classmethod
    def of(cls, states: Float[Tensor, "prompt position d"]) -> Statistics:
        """The statistics of a sample."""
        rows = states[:, min(1, states.shape[1] - 1) :].flatten(0, 1).double()
        lengths = rows.norm(dim=1)
        median = lengths.median()
        rows = rows[lengths <= _SINK * median]
        centred = rows - rows.mean(dim=0)
        return cls._along(rows.mean(dim=0), centred.T @ centred / len(rows), median)

    @classmethod
    def _along(cls, mean: Tensor, covariance: Tensor, length: Tensor) -> Statistics:
        spread, axes = torch.linalg.eigh(covariance)
        return cls(mean, spread.flip(0).clamp_min(0), axes.flip(1), length)

    def cut(self, kept: Sequence[int]) -> Statistics:
        """The statistics of some coordinates alone."""
        some = torch.tensor(kept, device=self.mean.device)
        share = (self.spread[:, None] * self.axes[some].T).T @ self.axes[some].T
        length = self.length * (len(kept) / len(self.mean)) ** 0.5
        return self._along(self.mean[some], share, length)

    def filled_in(self, observed: Float[Tensor, "*row kept"], kept: Sequence[int]) -> Float[Tensor, "*row d"]:
        """Whole states, the coordinates that were not kept being what the others make most likely."""
        some = torch.tensor(kept, device=self.mean.device)
        covariance = (self.axes * self.spread) @ self.axes.T
        inner = covariance[some][:, some]
        inner = inner + _RIDGE * inner.diagonal().mean() * torch.eye(len(some)).to(inner)
        gain = torch.linalg.solve(inner, covariance[some])
        whole: Tensor = (observed.double() - self.mean[some]) @ gain + self.mean
        whole[..., some] = observed.double()
        return whole.to(observed.dtype)

    def sinks(self, observed: Float[Tensor, "position d"]) -> Bool[Tensor, " position"]:
        """Which states are attention sinks: far longer than the others seen with them, or than the sample."""
        lengths = observed.double().norm(dim=-1)
        usual = max(float(self.length), float(lengths.median()))
        sinks: Tensor = lengths > _SINK * usual
        return sinks

    def coordinates(self, rows: Float[Tensor, "*row d"]) -> Float[Tensor, "*row d"]:
        """Rows, or differences of rows, along the principal directions."""
        return rows.double() @ self.axes

    def denoised(self, observed: Float[Tensor, "position d"], relative: float) -> Float[Tensor, "position d"]:
        """Each state as it most likely was before white noise; ``relative``: to what its length is now."""
        lengths = observed.double().norm(dim=-1, keepdim=True)
        variance = (relative * lengths).square() / observed.shape[-1]
        along = self.coordinates(observed.double() - self.mean)
        shrunk = along * (self.spread / (self.spread + variance).clamp_min(1e-30))
        calm: Tensor = shrunk @ self.axes.T + self.mean
        return calm.to(observed.dtype)


_known: WeakKeyDictionary[LanguageModel, dict[tuple[int, Tap], Statistics]] = WeakKeyDictionary()


def statistics_of(model: LanguageModel, tap: Tap) -> Statistics:
    """The statistics of a model at a place: from this process, the user's cache, or measured now."""
    known = _known.setdefault(model, {})
    key = model.edition, tap
    if key not in known:
        known[key] = _load_or_measure(model, tap)
    return known[key]


def _load_or_measure(model: LanguageModel, tap: Tap) -> Statistics:
    path = cache_folder() / "statistics" / model.identity.weight_hash[:24] / f"{tap}-v{_RECIPE}.safetensors"
    if model.lasting:
        with suppress(OSError, SafetensorError, TypeError):  # none there, or none that can be read
            kept = load_file(path)
            return Statistics(**{name: part.to(model.device).double() for name, part in kept.items()})
    counted = model.forward_tokens
    prompts = calibration_prompts(model, _PROMPTS)
    states = torch.cat([model.states(part, (tap,))[tap].float() for part in prompts.split(8)])
    model.forward_tokens = counted
    measured = Statistics.of(states)
    if model.lasting:
        parts = {field.name: getattr(measured, field.name) for field in fields(measured)}
        try:
            write_tensors(path, {name: part.float().cpu().contiguous() for name, part in parts.items()})
        except RunFolderError as error:  # a cache that cannot be written costs time, nothing else
            log.warning("the statistics of states could not be cached: %s", error)
    return measured
