"""Transforms of a model's weights that the theory says leave its states alone, and one that does not.

Each changes the weights in place. Random matrices are orthogonal but for factors in [1/2, 2], so that undoing
them costs no digits; random orders are never the identity where there is another.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Generator, Tensor

from preimage.theory.symmetry.weights import BlockWeights, Weights

Matrices = Float[Tensor, "head d d"]


def permute_heads(weights: Weights, random: Generator) -> None:
    """Reorder key and value heads, each with its own query heads, and the query heads among themselves."""
    for block in weights.blocks:
        groups, together = _groups(block)
        order = _order(groups, random)
        in_group = torch.stack([_order(together, random) for _ in range(groups)])
        heads = (order[:, None] * together + in_group).flatten()
        block.query.take(heads)
        block.key.take(order)
        block.value.take(order)
        block.output.weight.copy_(block.output.weight[:, heads])
        for norm, chosen in ((block.query_norm, heads), (block.key_norm, order)):
            width = block.query.weight.shape[1]
            if norm is not None and len(norm.weight) > width:  # one gain for each head's coordinates
                norm.take((chosen[:, None] * width + torch.arange(width)).flatten())


def mix_values(weights: Weights, random: Generator) -> None:
    """v -> A v for each key and value head; the output of every query head that reads it undoes A."""
    for block in weights.blocks:
        groups, together = _groups(block)
        mix = _invertible(groups, block.value.weight, random)
        block.value.act(mix)
        undo = torch.linalg.inv(mix).repeat_interleave(together, dim=0)
        block.output.weight.copy_(torch.einsum("dhi,hij->dhj", block.output.weight, undo))


def mix_queries_keys(weights: Weights, random: Generator) -> None:
    """k -> A k and q -> A^-T q with any invertible A a head: q.k stays unless positions come in between."""
    for block in weights.blocks:
        _act_on_queries_keys(block, _invertible(_groups(block)[0], block.key.weight, random))


def turn_planes(weights: Weights, random: Generator) -> None:
    """The same with what commutes with rotary positions: scale and rotation in each frequency's plane.

    Coordinates that no frequency turns may be mixed at will.
    """
    assert weights.planes is not None
    first, second = weights.planes.T
    for block in weights.blocks:
        groups, width = block.key.weight.shape[:2]
        free = [i for i in range(width) if i not in weights.planes]
        angle = torch.rand(groups, len(first), generator=random, dtype=torch.float64) * 2 * torch.pi
        scale = _factors((groups, len(first)), random)
        matrices = torch.zeros(groups, width, width, dtype=torch.float64)
        matrices[:, first, first] = matrices[:, second, second] = scale * angle.cos()
        matrices[:, second, first] = scale * angle.sin()
        matrices[:, first, second] = -scale * angle.sin()
        if free:
            rows = torch.tensor(free)
            matrices[:, rows[:, None], rows] = _invertible(groups, matrices[:, : len(free), 0], random)
        _act_on_queries_keys(block, matrices.to(block.key.weight))


def rescale_normed_queries_keys(weights: Weights, random: Generator) -> None:
    """What is left of Q/K where queries and keys are normed.

    The gain of the query norm times c in each plane, that of the key norm over c; and, unless the norm takes
    a mean off, the sign of a plane in a key head and its query heads.
    """
    assert weights.planes is not None
    for block in weights.blocks:
        if block.query_norm is None or block.key_norm is None:
            continue
        groups, together = _groups(block)
        width = block.key.weight.shape[1]
        shared = len(block.key_norm.weight) == width  # one gain for all heads, or one for each
        scale = _by_plane(_factors((1 if shared else groups, len(weights.planes)), random), weights, width)
        scale = scale.to(block.key.weight)
        block.key_norm.scale((1 / scale).flatten())
        block.query_norm.scale((scale if shared else scale.repeat_interleave(together, dim=0)).flatten())
        if not block.key_norm.centres and not block.query_norm.centres:
            signs = _signs((groups, len(weights.planes)), random)
            matrices = torch.diag_embed(_by_plane(signs, weights, width)).to(block.key.weight)
            _act_on_queries_keys(block, matrices)


def permute_units(weights: Weights, random: Generator) -> None:
    """Reorder the units of every MLP; in a gated one scale what is gated, and undo it on the way down."""
    for block in weights.blocks:
        for units in block.units:
            order = _order(len(units.up.weight), random)
            units.up.take(order)
            units.down.weight.copy_(units.down.weight[:, order])
            if units.gate is None:
                continue
            units.gate.take(order)
            scale = (_factors((len(order),), random) * _signs((len(order),), random)).to(units.up.weight)
            units.up.weight.mul_(scale[:, None])
            if units.up.bias is not None:
                units.up.bias.mul_(scale)
            units.down.weight.div_(scale)


def fold_norms(weights: Weights, random: Generator) -> None:
    """Move gain and bias of every norm that linear maps read into those maps."""
    for block in weights.blocks:
        for norm, readers in block.read_norms:
            for reader in readers:
                if norm.bias is not None:
                    assert reader.bias is not None
                    reader.bias.add_(reader.weight @ norm.bias)
                reader.weight.mul_(norm.gain)
            norm.weight.fill_(1.0 - norm.offset)
            if norm.bias is not None:
                norm.bias.zero_()


def rotate_stream(weights: Weights, random: Generator) -> Float[Tensor, "d d"]:
    """h -> h Q everywhere, Q a random orthogonal matrix, after the gains are folded away.

    A norm that takes the mean off allows only those Q that leave the all-ones direction where it is.
    """
    fold_norms(weights, random)
    width = weights.embeddings[0].shape[1]
    if _centred(weights):
        basis = torch.eye(width, dtype=torch.float64)
        basis[:, 0] = 1.0
        fixed = torch.linalg.qr(basis).Q  # its first column is the all-ones direction
        turn = torch.eye(width, dtype=torch.float64)
        turn[1:, 1:] = _orthogonal((width - 1, width - 1), random)
        matrix = fixed @ turn @ fixed.T
    else:
        matrix = _orthogonal((width, width), random)
    return _turn_stream(weights, matrix)


def permute_stream(weights: Weights, random: Generator) -> Float[Tensor, "d d"]:
    """Reorder the coordinates of the residual stream, with random signs where no norm takes a mean off.

    Gains go along with their coordinates, so that no norm stands in the way.
    """
    width = weights.embeddings[0].shape[1]
    order = _order(width, random)
    signs = torch.ones(width, dtype=torch.float64) if _centred(weights) else _signs((width,), random)
    matrix = torch.zeros(width, width, dtype=torch.float64)
    matrix[order, torch.arange(width)] = signs
    for block in weights.blocks:
        for norm in (*(norm for norm, _ in block.read_norms), *block.post_norms):
            norm.take(order)
    if weights.final is not None:
        weights.final.take(order)
    return _turn_stream(weights, matrix)


def _turn_stream(weights: Weights, matrix: Float[Tensor, "d d"]) -> Float[Tensor, "d d"]:
    matrix = matrix.to(weights.embeddings[0])
    for table in weights.embeddings:
        table.copy_(table @ matrix)
    for block in weights.blocks:
        for reader in block.readers:
            reader.weight.copy_(reader.weight @ matrix)
        for writer in block.writers:
            writer.weight.copy_(torch.einsum("de,d...->e...", matrix, writer.weight))
            if writer.bias is not None:
                writer.bias.copy_(writer.bias @ matrix)
    return matrix


def _act_on_queries_keys(block: BlockWeights, matrices: Matrices) -> None:
    block.key.act(matrices)
    undo = torch.linalg.inv(matrices).mT
    block.query.act(undo.repeat_interleave(_groups(block)[1], dim=0))


def _groups(block: BlockWeights) -> tuple[int, int]:
    """Key and value heads, and how many query heads read each."""
    groups = len(block.key.weight)
    return groups, len(block.query.weight) // groups


def _centred(weights: Weights) -> bool:
    norms = [norm for block in weights.blocks for norm, _ in block.read_norms]
    norms += [norm for block in weights.blocks for norm in block.post_norms]
    return any(norm.centres for norm in (*norms, *([weights.final] if weights.final else [])))


def _by_plane(values: Float[Tensor, "row plane"], weights: Weights, width: int) -> Float[Tensor, "row width"]:
    """One value for both coordinates of a plane, 1 for those in none."""
    assert weights.planes is not None
    by_coordinate = torch.ones(len(values), width, dtype=torch.float64)
    by_coordinate[:, weights.planes] = values[..., None]
    return by_coordinate


def _order(count: int, random: Generator) -> Int[Tensor, " row"]:
    same = torch.arange(count)
    order = torch.randperm(count, generator=random)
    while count > 1 and torch.equal(order, same):
        order = torch.randperm(count, generator=random)
    return order


def _factors(shape: tuple[int, ...], random: Generator) -> Tensor:
    """Between 1/2 and 2, evenly by their logarithm."""
    return 2 ** (2 * torch.rand(shape, generator=random, dtype=torch.float64) - 1)


def _signs(shape: tuple[int, ...], random: Generator) -> Tensor:
    return 1.0 - 2.0 * torch.randint(2, shape, generator=random).double()


def _orthogonal(shape: tuple[int, ...], random: Generator) -> Tensor:
    matrix: Tensor = torch.linalg.qr(torch.randn(shape, generator=random, dtype=torch.float64)).Q
    return matrix


def _invertible(count: int, like: Float[Tensor, "head d ..."], random: Generator) -> Matrices:
    """Orthogonal times diagonal times orthogonal, condition at most 4."""
    shape = (count, like.shape[1], like.shape[1])
    scale = _factors(shape[:2], random)[:, None]
    matrices = _orthogonal(shape, random) * scale @ _orthogonal(shape, random)
    return matrices.to(like)
