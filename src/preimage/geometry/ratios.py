"""The smallest D/d of every prompt over all others, exact, and its second nearest state."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from preimage.distances import PairScan, row_distances
from preimage.distances.prompt_distances import PromptDistances

_TOGETHER = {"cpu": 128, "cuda": 4096}
_CERTIFIED = 2**14


class Ratios(NamedTuple):
    """For every prompt: the smallest D/d, D/d at the nearest state, and the two smallest D."""

    smallest: Float[Tensor, " row"]
    at_nearest: Float[Tensor, " row"]
    first: Float[Tensor, " row"]
    second: Float[Tensor, " row"]


def measure_ratios(scan: PairScan, prompts: PromptDistances) -> Ratios:
    """Every pair counts, few are looked at.

    d is never larger than the longest prompt T, so a pair with D > T r cannot have a ratio below r. A few
    near states give every prompt some ratio r it can reach, and a second nearest state it need not look
    beyond; the pairs within the larger of the two are certified, the others are excluded.
    """
    nearest = scan.nearest
    count, device = len(nearest.indices), nearest.distances.device
    every = torch.arange(count, device=device)
    at_nearest = nearest.distances / prompts.of(every, nearest.indices)
    ratio, second = _within_reach(scan, prompts, nearest.indices, at_nearest)
    # D/d and T r are rounded once each, so that D <= T r may come out two units beyond: four are allowed
    reach = torch.maximum(prompts.largest * ratio * (1 + 2 * torch.finfo(torch.float64).eps), second)
    smallest, two = at_nearest.clone(), torch.full((count, 2), torch.inf, dtype=torch.float64, device=device)
    two[:, 0] = nearest.distances
    for i, j, away in scan.within_each(reach):
        i, j, away = _with_twins(scan, i, j, away)
        smallest.scatter_reduce_(0, i, away / prompts.of(i, j), "amin")
        other = j != nearest.indices[i]
        two[:, 1].scatter_reduce_(0, i[other], away[other], "amin")
    twins = scan.same != every
    equal = twins.clone()
    equal[scan.same[twins]] = True  # the first of a group has twins too
    smallest[equal] = 0.0
    sizes = scan.same.bincount(minlength=count)[scan.same]
    two[sizes > 2, 1] = 0.0
    two[sizes > 1] = two[scan.same[sizes > 1]]
    return Ratios(smallest, at_nearest, two[:, 0], two[:, 1])


def largest_ratio(scan: PairScan, prompts: PromptDistances, x: Float[Tensor, "row d"]) -> float:
    """The largest D/d of all pairs: bounds of both for every pair, the few that can be it certified."""
    every = torch.arange(len(x), device=x.device)
    place = torch.searchsorted(scan.firsts, scan.same)  # of each row among those that differ
    best = 0.0
    if len(scan.firsts) == 1:
        return best
    for rows in every.split(_TOGETHER.get(x.device.type, _TOGETHER["cpu"])):
        highest = scan.upper_bounds(place[rows])[:, place]
        highest[place[rows][:, None] == place[None, :]] = 0.0
        bounds = highest / prompts.at_least(rows, every).clamp_min_(1)
        for promising in (bounds == bounds.max(), True):  # the most promising first: it excludes the others
            i, j = ((bounds > best) & promising).nonzero().T
            for first, second in zip(i.split(_CERTIFIED), j.split(_CERTIFIED), strict=True):
                apart = prompts.of(rows[first], second).clamp_min(1)
                left = highest[first, second] / apart > best
                if bool(left.any()):
                    one, other = rows[first[left]], second[left]
                    best = max(best, float((row_distances(x[one], x[other]) / apart[left]).max()))
    return best


def _within_reach(
    scan: PairScan, prompts: PromptDistances, nearest: Tensor, at_nearest: Tensor
) -> tuple[Tensor, Tensor]:
    """For every row a ratio some pair of it reaches, and a distance its second nearest does not exceed."""
    kept = scan.firsts
    second = torch.full_like(at_nearest, torch.inf)
    ratio = at_nearest.clone()
    if len(kept) > 1:
        found, bounds = scan.near_some()
        apart = prompts.of(kept.repeat_interleave(found.shape[1]), found.flatten()).view_as(found)
        ratio[kept] = torch.minimum(ratio[kept], (bounds / apart.clamp_min(1)).amin(dim=1))
        bounds[found == nearest[kept][:, None]] = torch.inf
        second[kept] = bounds.amin(dim=1)
    return ratio, second


def _with_twins(scan: PairScan, i: Tensor, j: Tensor, away: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same pairs with every state that is the same as the second one's."""
    sizes = scan.same.bincount(minlength=len(scan.same))
    often = sizes[j]
    if int(often.max()) == 1:
        return i, j, away
    members = scan.same.argsort(stable=True)  # group after group
    begins = (sizes.cumsum(0) - sizes)[j] - (often.cumsum(0) - often)
    spelled = begins.repeat_interleave(often) + torch.arange(int(often.sum()), device=j.device)
    return i.repeat_interleave(often), members[spelled], away.repeat_interleave(often)
