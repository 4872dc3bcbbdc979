"""Text as a model itself writes it: what its prompts may look like, without any corpus."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers.cache_utils import DynamicCache

from preimage.devices import BATCH_TOKENS, by_device
from preimage.errors import ModelError
from preimage.observations import Site

if TYPE_CHECKING:
    from preimage.models.language_model import LanguageModel

_CACHE_BYTES = {"cpu": 2**30, "cuda": 2**33}  # keys and values of texts that are written together


@torch.inference_mode()
def written_by(
    model: LanguageModel, rows: int, length: int, seed: int = 0, *, start: Literal["bos", "random"] = "bos"
) -> Int[Tensor, "row position"] | None:
    """``rows`` texts of ``length`` tokens, drawn from the model's own distribution at temperature 1.

    ``start``: each begins behind the BOS token, which is left out, or with one token that is as likely as any
    other. None where a model has no LM head or, for "bos", no token that begins or ends a text. Draws are
    made from ``seed`` where the model is, on a GPU in bfloat16. Cost: a pass over rows x length tokens.
    """
    table = model.unembedding
    begin = _beginning(model.tokenizer) if start == "bos" else None
    if table is None or (start == "bos" and begin is None):
        return None
    generator = torch.Generator(model.device).manual_seed(seed)
    size, texts = rows_at_once(model, length), []
    with in_bfloat16(model.device):
        for number in range(0, rows, size):
            shape = min(size, rows - number), 1
            if begin is None:
                first = torch.randint(model.vocab_size, shape, generator=generator, device=model.device)
                texts.append(_continued(model, table, first, length - 1, generator))
            else:
                first = torch.full(shape, begin, device=model.device)
                texts.append(_continued(model, table, first, length, generator)[:, 1:])
    return torch.cat(texts).cpu()


def rows_at_once(model: LanguageModel, length: int) -> int:
    """How many texts so long are written together: so many that their keys and values do not fill memory."""
    size = by_device(BATCH_TOKENS, model.device) // 8
    width = 2 * model.d_model  # as much as there may be, where blocks do not say
    with suppress(ModelError):
        width = model.width(Site(1, "kv"))
    a_text = model.n_layers * width * model.dtype.itemsize * length
    return max(1, min(size, by_device(_CACHE_BYTES, model.device) // a_text))


def in_bfloat16(device: torch.device) -> torch.autocast:
    """Products in bfloat16 where that is fast and exact numbers do not matter: on a GPU alone."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def _continued(
    model: LanguageModel,
    table: Float[Tensor, "vocabulary d_model"],
    latest: Int[Tensor, "row 1"],
    length: int,
    generator: torch.Generator,
) -> Int[Tensor, "row position"]:
    """The token each row begins with, and so many behind it."""
    cache, columns = DynamicCache(config=model.config), [latest]
    for _ in range(length):
        state = model.run(latest, layers=("final",), cache=cache)["final"][:, -1]
        chances = (state.to(table.dtype) @ table.T).float().softmax(dim=-1)
        latest = torch.multinomial(chances, 1, generator=generator)
        columns.append(latest)
    return torch.cat(columns, dim=1)


def _beginning(tokenizer: object) -> int | None:
    """The token that begins a text, else the one that ends it."""
    given = _special(tokenizer, "bos")
    return _special(tokenizer, "eos") if given is None else given


def _special(tokenizer: object, kind: str) -> int | None:
    number = getattr(tokenizer, f"{kind}_token_id", None)
    return number if isinstance(number, int) else None
