"""Text as a model itself writes it: what its prompts may look like, without any corpus."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from jaxtyping import Int
from torch import Tensor
from transformers.cache_utils import DynamicCache

from preimage.devices import BATCH_TOKENS, by_device

if TYPE_CHECKING:
    from preimage.models.language_model import LanguageModel


@torch.inference_mode()
def written_by(
    model: LanguageModel, rows: int, length: int, seed: int = 0
) -> Int[Tensor, "row position"] | None:
    """``rows`` beginnings of texts, drawn from the model's own distribution; the BOS token is left out.

    None where a model has no tokenizer, no LM head or no token that begins or ends a text. Draws are made on
    the CPU from ``seed``. Cost: a pass over rows x length tokens.
    """
    table, tokenizer = model.unembedding, model.tokenizer
    begin = next((i for i in (_special(tokenizer, "bos"), _special(tokenizer, "eos")) if i is not None), None)
    if table is None or begin is None:
        return None
    generator = torch.Generator().manual_seed(seed)
    size = max(1, by_device(BATCH_TOKENS, model.device) // 8)
    texts = []
    for start in range(0, rows, size):
        latest = torch.full((min(size, rows - start), 1), begin)
        cache, columns = DynamicCache(config=model.config), []
        for _ in range(length):
            state = model.run(latest, layers=("final",), cache=cache)["final"][:, -1]
            chances = (state.to(table.dtype) @ table.T).float().softmax(dim=-1).cpu()
            latest = torch.multinomial(chances, 1, generator=generator)
            columns.append(latest)
        texts.append(torch.cat(columns, dim=1))
    return torch.cat(texts)


def _special(tokenizer: object, kind: str) -> int | None:
    number = getattr(tokenizer, f"{kind}_token_id", None)
    return number if isinstance(number, int) else None
