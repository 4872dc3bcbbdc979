"""Numbers of a llama.cpp cache, brought into the order and the basis that transformers has them in."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from preimage.errors import StatesError

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

# Architectures whose converter lays the two halves of a rotation side by side, where transformers has them
# half a head apart (``permute`` in llama.cpp's conversion folder). Keys of all others lie as in transformers.
IN_PAIRS = frozenset(
    (
        *("llama", "llama-embed", "mistral3", "smollm3", "arcee", "nanbeige", "llada", "deci", "baichuan"),
        *("internlm2", "minicpm", "xverse", "olmo", "arctic", "deepseek", "bailingmoe", "chameleon"),
        *("granite", "granitemoe", "graniteswitch", "granite_swa"),
    )
)
_TURNED = 64  # the smallest matrix that quantised keys are turned by, and the one of values
_LOOKED_AT = 512  # tokens of a layer that tell how its keys lie
_FASTER = 1.5  # see keys_in_pairs


class Kept(NamedTuple):
    """The keys or values of one layer in a file: their type, first byte, and shape, cells x width."""

    kind: GGMLQuantizationType
    start: int
    cells: int
    width: int
    transposed: bool = False  # width x cells, of values alone

    @property
    def shape(self) -> tuple[int, int]:
        """As the bytes lie: rows x bytes a row."""
        group, size = GGML_QUANT_SIZES[self.kind]
        rows, columns = (self.width, self.cells) if self.transposed else (self.cells, self.width)
        return rows, columns // group * size


class Order(NamedTuple):
    """How coordinates lie in a head of ``head`` numbers: the two of a rotation side by side, or halves."""

    pairs: bool
    head: int | None


def turn_of(place: str, head: int) -> int:
    """Size of the Hadamard matrix that quantised keys or values of such heads are turned by; 1: none.

    llama.cpp takes for keys the largest power of two that divides a head, for values the smallest matrix.
    """
    if head % _TURNED:
        return 1
    return head & -head if place == "keys" else _TURNED


def read_numbers(path: Path, kept: Kept, cells: NDArray[np.int64], order: Order, turn: int) -> Tensor:
    """Keys or values of some cells, float32, in the order and basis of transformers: cells x width."""
    numbers = _decoded(path, kept, cells)
    if turn > 1:  # the matrix is its own inverse
        matrix = _hadamard(turn)
        numbers = (numbers.reshape(-1, turn) @ matrix).reshape(numbers.shape)
    if order.pairs and order.head is not None:
        heads = numbers.reshape(len(numbers), -1, order.head // 2, 2)
        numbers = heads.swapaxes(-1, -2).reshape(numbers.shape)
    return torch.from_numpy(np.ascontiguousarray(numbers, np.float32))


def keys_in_pairs(path: Path, keys: tuple[Kept, ...], head: int, turned: bool) -> bool:
    """Whether keys look as if the two coordinates of a rotation lay side by side, not half a head apart.

    Coordinates that rotate fast differ more from token to token than slow ones. With halves apart the
    slowest of the first half stand right before the fastest of the second; with pairs side by side nothing
    changes in the middle of a head.
    """
    turn, eighth, half = turn_of("keys", head) if turned else 1, max(1, head // 8), head // 2
    before, after = 0.0, 0.0
    for kept in keys[:: max(1, len(keys) // 8)]:
        cells = np.arange(min(kept.cells, _LOOKED_AT))
        heads = read_numbers(path, kept, cells, Order(False, head), turn).reshape(len(cells), -1, head)
        spread = (heads.var(0, correction=0) / heads.square().mean(0).clamp_min(1e-12)).mean(0)
        before += float(spread[half - eighth : half].sum())
        after += float(spread[half : half + eighth].sum())
    return after < _FASTER * before


def _hadamard(size: int) -> NDArray[np.float32]:
    """Sylvester's orthonormal matrix of a power of two."""
    matrix = np.ones((1, 1), np.float32)
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix / np.float32(np.sqrt(size))


def _decoded(path: Path, kept: Kept, cells: NDArray[np.int64]) -> NDArray[np.float32]:
    try:
        raw = np.memmap(path, np.uint8, mode="r", offset=kept.start, shape=kept.shape)
    except (OSError, ValueError) as error:
        raise StatesError(f"{path.name} has changed since it was opened.", "Open it again.") from error
    rows = np.ascontiguousarray(raw if kept.transposed else raw[cells])
    with np.errstate(over="ignore", invalid="ignore"):  # whoever takes the numbers refuses what is not finite
        numbers = np.asarray(dequantize(rows, kept.kind), np.float32)
    return numbers.T[cells] if kept.transposed else numbers
