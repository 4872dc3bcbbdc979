"""Ratios D/d of all pairs, exact: D the distance of two states, d that of their prompts (in tokens)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from preimage.devices import by_device
from preimage.distances import PairScan, distance_bounds, row_distances, some_near
from preimage.distances.prompt_distances import PromptDistances
from preimage.distances.scan import Pairs

_TOGETHER = {"cpu": 128, "cuda": 4096}  # rows whose bounds against all others are held at once
_CERTIFIED = 2**14  # pairs recomputed at once
# D/d and T r are rounded once each, so that D <= T r may come out two units beyond: four are allowed
_ROUNDED = 1 + 2 * torch.finfo(torch.float64).eps


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
    nearest, same = scan.nearest, scan.rows.same
    every = torch.arange(len(same), device=same.device)
    at_nearest = nearest.distances / prompts.of(every, nearest.indices)
    ratio, beyond_second = _first_bounds(scan, prompts, at_nearest)
    radii = torch.maximum(prompts.largest * ratio * _ROUNDED, beyond_second)
    smallest, second = at_nearest.clone(), torch.full_like(at_nearest, torch.inf)
    for pairs in scan.pairs_within_each(radii):
        i, j, away = _with_equal_columns(same, pairs)
        smallest.scatter_reduce_(0, i, away / prompts.of(i, j), "amin")
        other = j != nearest.indices[i]
        second.scatter_reduce_(0, i[other], away[other], "amin")
    # Only the first of a group of equal rows was looked at: the others have what it has, and D = 0 to it.
    sizes = same.bincount(minlength=len(same))[same]
    smallest[sizes > 1] = 0.0
    second = torch.where(sizes > 2, 0.0, second[same])
    return Ratios(smallest, at_nearest, nearest.distances, second)


def _first_bounds(
    scan: PairScan, prompts: PromptDistances, at_nearest: Float[Tensor, " row"]
) -> tuple[Float[Tensor, " row"], Float[Tensor, " row"]]:
    """For every row a ratio some pair of it reaches, and a distance its second nearest does not exceed."""
    ratio, second = at_nearest.clone(), torch.full_like(at_nearest, torch.inf)
    firsts = scan.rows.firsts
    if len(firsts) > 1:
        near, bounds = some_near(scan)
        apart = prompts.of(firsts.repeat_interleave(near.shape[1]), near.flatten()).view_as(near)
        ratio[firsts] = torch.minimum(ratio[firsts], (bounds / apart.clamp_min(1)).amin(dim=1))
        bounds[near == scan.nearest.indices[firsts][:, None]] = torch.inf
        second[firsts] = bounds.amin(dim=1)
    return ratio, second


def _with_equal_columns(
    same: Int[Tensor, " row"], pairs: Pairs
) -> tuple[Int[Tensor, " more"], Int[Tensor, " more"], Float[Tensor, " more"]]:
    """The same pairs, each as often as there are rows equal to its second: with every one of those."""
    i, j, away = pairs
    sizes = same.bincount(minlength=len(same))  # of the group, at its first row
    repeats = sizes[j]
    if int(repeats.max()) == 1:
        return pairs
    members = same.argsort(stable=True)  # group after group, each in order
    group_starts = (sizes.cumsum(0) - sizes)[j]  # of the group of j among the members
    pair_starts = repeats.cumsum(0) - repeats  # of the pair among the repeated pairs
    place = torch.arange(int(repeats.sum()), device=j.device)
    place += (group_starts - pair_starts).repeat_interleave(repeats)
    return i.repeat_interleave(repeats), members[place], away.repeat_interleave(repeats)


def largest_ratio(scan: PairScan, prompts: PromptDistances, x: Float[Tensor, "row d"]) -> float:
    """The largest D/d of all pairs: bounds of both for every pair, the few that can be it certified."""
    if len(scan.rows.firsts) == 1:
        return 0.0
    every = torch.arange(len(x), device=x.device)
    place = torch.searchsorted(scan.rows.firsts, scan.rows.same)  # of each row among the distinct ones
    best = 0.0
    for rows in every.split(by_device(_TOGETHER, x.device)):
        highest = distance_bounds(scan, place[rows])[:, place]
        highest[place[rows][:, None] == place[None, :]] = 0.0  # equal rows
        bounds = highest / prompts.at_least(rows, every).clamp_min_(1)
        for candidates in (bounds == bounds.max(), None):  # the most promising first: it excludes the others
            wanted = bounds > best if candidates is None else candidates & (bounds > best)
            best = _certify_largest(rows, wanted, highest, prompts, x, best)
    return best


def _certify_largest(
    rows: Int[Tensor, " some"],
    wanted: Bool[Tensor, "some row"],
    highest: Float[Tensor, "some row"],
    prompts: PromptDistances,
    x: Float[Tensor, "row d"],
    best: float,
) -> float:
    """The larger of ``best`` and D/d of the wanted pairs; ``highest`` are bounds of their D."""
    places, others = wanted.nonzero().T
    for first, second in zip(places.split(_CERTIFIED), others.split(_CERTIFIED), strict=True):
        apart = prompts.of(rows[first], second).clamp_min(1)
        left = highest[first, second] / apart > best
        if bool(left.any()):
            distances = row_distances(x[rows[first[left]]], x[second[left]])
            best = max(best, float((distances / apart[left]).max()))
    return best
