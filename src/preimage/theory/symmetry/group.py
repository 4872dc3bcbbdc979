"""Which transforms the symmetry group of an architecture offers, and which it does not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from torch import Generator, Tensor

from preimage.theory.symmetry import transforms as acts
from preimage.theory.symmetry.weights import Weights

# Changes the weights in place; gives back the matrix that turns the states, None where they stay.
Act: TypeAlias = Callable[[Weights, Generator], Tensor | None]


@dataclass(frozen=True)
class Transform:
    """A transform of the weights and what is said of it.

    ``symmetry``: whether the theory says the states stay, or turn by the matrix ``act`` gives back.
    ``final``: whether that is said of the layer after the last norm as well.
    """

    name: str
    statement: str
    act: Act
    symmetry: bool = True
    final: bool = True


def group_of(weights: Weights) -> tuple[tuple[Transform, ...], tuple[str, ...]]:
    """The transforms to draw for a model, and a line on each that is not, and why."""
    blocks = weights.blocks
    grouped = len(blocks[0].key.weight) < len(blocks[0].query.weight)
    normed = any(block.query_norm is not None for block in blocks)
    rotary = weights.planes is not None
    gated = any(units.gate is not None for block in blocks for units in block.units)
    routed = any(block.router is not None for block in blocks)
    post_normed = any(block.post_norms for block in blocks)
    foldable = _foldable(weights)
    turned = foldable and not post_normed
    heads = "key/value heads with their query heads" if grouped else "attention heads"
    any_matrix = "Mapping a head's keys by any invertible matrix, undone in its queries,"
    planes = "Scaling and rotating the rotary planes of a head's keys, undone in its queries,"
    factors = "Trading factors and signs of rotary planes between normed queries and keys"
    values = "Mapping a head's values by any invertible matrix, undone in its output,"
    units = "Reordering MLP units" + (" and scaling what is gated" if gated else "")
    gains = "Folding the norms that linear maps read into them"
    offered = [  # when, and what
        (True, _keeps("heads", f"Reordering {heads}", acts.permute_heads)),
        (True, _keeps("values and outputs", values, acts.mix_values)),
        (normed and rotary, _keeps("queries and keys", factors, acts.rescale_normed_queries_keys)),
        (not normed and rotary, _keeps("queries and keys", planes, acts.turn_planes)),
        (not normed and not rotary, _keeps("queries and keys", any_matrix, acts.mix_queries_keys)),
        (True, _keeps("units", units, acts.permute_units)),
        (foldable, _keeps("norm gains", gains, acts.fold_norms)),
        (True, _turns("coordinates", "Reordering the residual stream's coordinates", acts.permute_stream)),
        (turned, _turns("rotation", "Rotating the residual stream", acts.rotate_stream, final=False)),
    ]
    in_planes = "rotations within rotary planes: queries and keys are normed, with gains in between"
    unfolded = "rotations of the residual stream: gains that cannot be folded do not commute with them"
    missing = [
        (normed and rotary, in_planes),
        (normed and not rotary, "transforms of queries and keys: they are normed"),
        (routed, "reordering of experts: allowed, and not drawn"),
        (not foldable, "folding of norms: no linear map reads a norm, or one has no bias to take a norm's"),
        (post_normed, "folding of the norms after attention and MLP: their output is added to the stream"),
        (post_normed, unfolded),
        (turned, 'layer "final" under rotations: the last norm\'s gain does not commute with them'),
        (not foldable and not post_normed, "rotations of the residual stream: its norms cannot be folded"),
    ]
    transforms = [transform for allowed, transform in offered if allowed]
    transforms.append(_together(tuple(transforms)))
    between = ["rotary positions"] * rotary + ["normed queries and keys"] * normed
    if between:  # the negative control: what the theory says is not a symmetry
        says = f"{any_matrix} is no symmetry with {' and '.join(between)}"
        transforms.append(Transform("generic queries and keys", says, acts.mix_queries_keys, symmetry=False))
    return tuple(transforms), tuple(line for applies, line in missing if applies)


def _foldable(weights: Weights) -> bool:
    """Whether norms are read by linear maps alone, and by such as can take their bias."""
    pairs = [pair for block in weights.blocks for pair in block.read_norms]
    biased = [norm.bias is None or all(reader.bias is not None for reader in maps) for norm, maps in pairs]
    return bool(pairs) and all(biased)


def _keeps(name: str, what: str, act: Act) -> Transform:
    return Transform(name, f"{what} leaves every F^l unchanged", act)


def _turns(name: str, what: str, act: Act, *, final: bool = True) -> Transform:
    which = "every F^l" if final else "every F^l, l = 0..L,"
    return Transform(name, f"{what} turns {which} by one orthogonal matrix", act, final=final)


def _together(transforms: tuple[Transform, ...]) -> Transform:
    """All that leave the states alone and the last that turns them, one after another."""
    last = transforms[-1]

    def act(weights: Weights, random: Generator) -> Tensor | None:
        for transform in transforms[:-1]:
            if transform.act is not acts.permute_stream:
                transform.act(weights, random)
        return last.act(weights, random)

    return _turns("all together", "Doing all of these, one after another,", act, final=last.final)
