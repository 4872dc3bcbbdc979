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

_RECIPE = 2  # raise when the measurement changes
_PROMPTS = 16  # of text, and as many of random tokens
_SINK = 4.0  # a sink is so many times as long as the median state
_RIDGE = 1e-4  # of the spread, where coordinates are filled in
_TOP, _QUIET = 8, 2  # one in so many directions has the most spread, one in so many the least


@dataclass(frozen=True)
class Statistics:
    """Mean and principal directions of ordinary states, sinks left out; those of most spread first."""

    mean: Float[Tensor, " d"]
    spread: Float[Tensor, " d"]
    axes: Float[Tensor, "d d"]
    length: Float[Tensor, ""]  # of the median state
    tilt: Float[Tensor, ""]  # of what a wrong token leaves over: see :func:`tilt_of`

    @classmethod
    def of(cls, states: Float[Tensor, "prompt position d"], mistaken: Float[Tensor, "some d"]) -> Statistics:
        """The statistics of a sample; ``mistaken``: by how much wrong tokens miss the right states."""
        rows = states[:, min(1, states.shape[1] - 1) :].flatten(0, 1).double()
        lengths = rows.norm(dim=1)
        median = lengths.median()
        rows = rows[lengths <= _SINK * median]
        centred = rows - rows.mean(dim=0)
        spread, axes = _principal(centred.T @ centred / len(rows))
        missed = mistaken.double()[mistaken.any(dim=1)]
        tilt = tilt_of(missed @ axes).median() if len(missed) else torch.ones_like(median)
        return cls(rows.mean(dim=0), spread, axes, median, tilt)

    def cut(self, kept: Sequence[int]) -> Statistics:
        """The statistics of some coordinates alone."""
        some = torch.tensor(kept, device=self.mean.device)
        share = (self.spread[:, None] * self.axes[some].T).T @ self.axes[some].T
        length = self.length * (len(kept) / len(self.mean)) ** 0.5
        spread, axes = _principal(share)
        flatter = tilt_of(spread.sqrt()) / tilt_of(self.spread.sqrt())
        return Statistics(self.mean[some], spread, axes, length, (self.tilt * flatter).clamp_min(1.0))

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


def tilt_of(along: Float[Tensor, "*row d"]) -> Float[Tensor, "*row"]:
    """How much longer rows are along the directions of most spread than along those of least: variances.

    ``along``: their coordinates along principal directions. 1 for white noise; for what a wrong token leaves
    over, more the more the directions differ in which states lie.
    """
    loud, quiet = loud_and_quiet(along)
    return loud / quiet


def loud_and_quiet(along: Float[Tensor, "*row d"]) -> tuple[Float[Tensor, "*row"], Float[Tensor, "*row"]]:
    """The variance along the directions in which states differ most, and in which they differ least."""
    energy, width = along.double().square(), along.shape[-1]
    loud = energy[..., : max(1, width // _TOP)].mean(dim=-1)
    quiet = energy[..., -max(1, width // _QUIET) :].mean(dim=-1)
    return loud, quiet.clamp_min(1e-300)


def _principal(covariance: Float[Tensor, "d d"]) -> tuple[Float[Tensor, " d"], Float[Tensor, "d d"]]:
    spread, axes = torch.linalg.eigh(covariance)
    return spread.flip(0).clamp_min(0), axes.flip(1)


_known: WeakKeyDictionary[LanguageModel, dict[tuple[int, Tap], Statistics]] = WeakKeyDictionary()


def statistics_of(model: LanguageModel, tap: Tap) -> Statistics:
    """The statistics of a model at a place: from this process, the user's cache, or measured now."""
    known = _known.setdefault(model, {})
    key = model.edition, tap
    if key not in known:
        known[key] = _load_or_measure(model, tap)
    return known[key]


def _load_or_measure(model: LanguageModel, tap: Tap) -> Statistics:
    path = cache_folder() / "statistics" / model.weight_hash[:24] / f"{tap}-v{_RECIPE}.safetensors"
    if model.lasting:
        with suppress(OSError, SafetensorError, TypeError):  # none there, or none that can be read
            kept = load_file(path)
            return Statistics(**{name: part.to(model.device).double() for name, part in kept.items()})
    counted = model.forward_tokens
    prompts = calibration_prompts(model, _PROMPTS)
    rows, places = torch.arange(len(prompts)), (7 * torch.arange(len(prompts))) % prompts.shape[1]
    wrong = prompts.clone()
    wrong[rows, places] = prompts.roll(1, dims=0)[rows, places]
    states, other = (
        torch.cat([model.states(part, (tap,))[tap].float() for part in some.split(8)])
        for some in (prompts, wrong)
    )
    model.forward_tokens = counted
    measured = Statistics.of(states, (states - other)[rows, places][places > 0])
    if model.lasting:
        parts = {field.name: getattr(measured, field.name) for field in fields(measured)}
        try:
            write_tensors(path, {name: part.float().cpu().contiguous() for name, part in parts.items()})
        except RunFolderError as error:  # a cache that cannot be written costs time, nothing else
            log.warning("the statistics of states could not be cached: %s", error)
    return measured
