"""The state of every token at the first position.

Nothing stands before it, so these states are the same for all prompts, and one pass over the vocabulary has
them all.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float
from torch import Tensor

from preimage.devices import BATCH_TOKENS, by_device
from preimage.models import LanguageModel
from preimage.observations import Tap

_MOST = {"cpu": 4096, "cuda": 2**18}  # tokens of a vocabulary that is run for them
_known: WeakKeyDictionary[LanguageModel, dict[tuple[int, Tap], Tensor]] = WeakKeyDictionary()


def first_states(model: LanguageModel, tap: Tap) -> Float[Tensor, "vocabulary d"] | None:
    """The states of all tokens; None where computing them takes too long. Kept for a model in memory."""
    if model.vocab_size > by_device(_MOST, model.device):
        return None
    known = _known.setdefault(model, {})
    key = model.edition, tap
    if key not in known:
        counted = model.forward_tokens
        ids = torch.arange(model.vocab_size)[:, None]
        parts = ids.split(by_device(BATCH_TOKENS, model.device))
        known.clear()  # of one place at a time
        known[key] = torch.cat([model.states(part, (tap,))[tap][:, 0] for part in parts])
        model.forward_tokens = counted
    return known[key]
