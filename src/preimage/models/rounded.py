"""A copy of a model whose weights are rounded to few bits: the same function as one that is stored so.

Blocks' matrices are rounded and computed with in the model's own type, as weight-only quantisation does it;
embeddings, norms, biases and the LM head stay. The kinds are those people load models in: ``int8`` with a
step a row, ``fp4`` and ``nf4`` with a step for every 64 weights of a row, by the codes of the 4-bit float and
of the normal distribution's quantiles (arXiv 2305.14314).
"""

from __future__ import annotations

import copy
from typing import Literal, TypeAlias, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn

from preimage.errors import OptionError
from preimage.models.language_model import LanguageModel

Rounding: TypeAlias = Literal["int8", "fp4", "nf4"]
ROUNDINGS: tuple[str, ...] = get_args(Rounding)

_BLOCK = 64  # weights that share a step, of 4 bits
_FP4 = (0.0, 0.0052083333, 0.16666667, 0.25, 0.33333333, 0.5, 0.66666667, 1.0)  # and their negatives
_NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip
_CODES = {"fp4": tuple(sorted({sign * one for one in _FP4 for sign in (-1.0, 1.0)})), "nf4": _NF4}


def rounded_copy(model: LanguageModel, kind: str) -> LanguageModel:
    """A model of its own with every matrix of its blocks rounded.

    Memory: the model a second time. It has no files and is named after both, so that nothing measured of the
    one is taken for the other.

    >>> from preimage.models import new_model
    >>> model = new_model("llama", (16, 1, 2), vocabulary=50, max_length=16, device="cpu")
    >>> rounded_copy(model, "nf4").name == f"{model.name} in nf4"
    True
    """
    if kind not in ROUNDINGS:
        raise OptionError(f"Rounding {kind!r} is not known.", f"Use {', '.join(ROUNDINGS)}.")
    module = copy.deepcopy(model.module)
    whole = LanguageModel(module, model.tokenizer, name=f"{model.name} in {kind}", revision=model.revision)
    with torch.no_grad():
        for block in whole.anatomy.blocks:
            for part in block.modules():
                weight = getattr(part, "weight", None)
                if isinstance(weight, nn.Parameter) and weight.ndim == 2:
                    linear = isinstance(part, nn.Linear)
                    rows = weight if linear else weight.T  # GPT-2 keeps its matrices the other way round
                    new = rounded(rows.float(), kind).to(weight)
                    weight.copy_(new if linear else new.T)
    return LanguageModel(module, model.tokenizer, name=whole.name, revision=model.revision)


def rounded(rows: Float[Tensor, "out in"], kind: str) -> Float[Tensor, "out in"]:
    """Weights as they come back: each row's (or block's) largest is kept exactly, zero too."""
    if kind == "int8":
        step = rows.abs().amax(dim=1, keepdim=True).clamp_min(1e-30) / 127
        return (rows / step).round() * step
    codes = torch.tensor(_CODES[kind], dtype=rows.dtype, device=rows.device)
    middles = (codes[1:] + codes[:-1]) / 2
    width = rows.shape[1]
    filled = nn.functional.pad(rows, (0, -width % _BLOCK)).unflatten(1, (-1, _BLOCK))
    largest = filled.abs().amax(dim=-1, keepdim=True).clamp_min(1e-30)
    chosen = codes[torch.bucketize((filled / largest).contiguous(), middles)]
    back: Tensor = (chosen * largest).flatten(1)[:, :width]
    return back
