"""The state of every token at the first position.

Nothing stands before it, so these states are the same for all prompts, and one pass over the vocabulary has
them all.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float
from torch import Tensor

from preimage.devices import BATCH_TOKENS, by_device
from preimage.models import LanguageModel
from preimage.observations import Tap

_MOST = {"cpu": 4096, "cuda": 2**18}  # tokens of a vocabulary that is run for them at once
_BYTES = 2**30  # that are kept
_ROWS = 2**15  # of a pass: attention kernels take no 2^16 of them
_known: WeakKeyDictionary[LanguageModel, dict[tuple[int, Tap], Tensor]] = WeakKeyDictionary()


def first_states(
    model: LanguageModel, tap: Tap, *, patiently: bool = False
) -> Float[Tensor, "vocabulary d"] | None:
    """The states of all tokens, kept for a model in memory; None where computing them takes too long.

    ``patiently``: unless they take too much memory. The pass is then counted as the prompt's that asked.
    """
    if (known := known_first_states(model, tap)) is not None:
        return known
    few = model.vocab_size <= by_device(_MOST, model.device)
    small = 4 * model.vocab_size * model.width(tap) <= _BYTES
    if not (small if patiently else few):
        return None
    counted = model.forward_tokens
    rows = min(_ROWS, by_device(BATCH_TOKENS, model.device))
    parts = torch.arange(model.vocab_size)[:, None].split(rows)
    states = torch.cat([model.states(part, (tap,))[tap][:, 0] for part in parts])
    _known[model] = {(model.edition, tap): states}  # of one place at a time
    model.forward_tokens = counted if few else model.forward_tokens
    return states


def remember_first_states(model: LanguageModel, taps: Sequence[Tap]) -> bool:
    """Compute those of several places in one pass over the vocabulary, for work on many prompts.

    They are kept as long as the model, or until others are asked for. False where they would take more than
    2 GiB: then nothing is done. Cost: a forward token for every token of the vocabulary.
    """
    missing = [tap for tap in dict.fromkeys(taps) if known_first_states(model, tap) is None]
    if 4 * model.vocab_size * sum(map(model.width, {*taps})) > 2 * _BYTES:
        return False
    if missing:
        rows = by_device(BATCH_TOKENS, model.device)
        parts: dict[Tap, list[Tensor]] = {tap: [] for tap in missing}
        for some in torch.arange(model.vocab_size)[:, None].split(min(_ROWS, rows)):
            for tap, states in model.states(some, missing).items():
                parts[tap].append(states[:, 0].clone())
        known = _known.setdefault(model, {})
        known |= {(model.edition, tap): torch.cat(some) for tap, some in parts.items()}
    return True


def known_first_states(model: LanguageModel, tap: Tap) -> Float[Tensor, "vocabulary d"] | None:
    """The same where they have been computed."""
    return _known.get(model, {}).get((model.edition, tap))
