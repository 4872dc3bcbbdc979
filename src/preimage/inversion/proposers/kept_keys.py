"""The keys of a lens, one for every token, kept in the user's cache: they take a pass of all tokens."""

from __future__ import annotations

import logging
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from preimage.errors import RunFolderError
from preimage.inversion.proposers.features import features_in_parts
from preimage.inversion.proposers.lens import Lens
from preimage.inversion.proposers.scores import TurnedKeys
from preimage.models import LanguageModel, cache_folder
from preimage.progress import stage
from preimage.storage import write_tensors

log = logging.getLogger(__name__)

_RECIPE = 1  # raise when features or keys change
_BYTES = 2**28  # of keys that are kept on disk


def keys_of(model: LanguageModel, lens: Lens, path: Path | None = None) -> TurnedKeys:
    """The keys of a lens for a model's tokens; ``path``: the lens's file, by which they are kept."""
    place = None if path is None else _place(model, lens, path)
    shape = (lens.shape.vocab_size, 1 + lens.shape.rank)
    if place is not None:
        with suppress(OSError, SafetensorError, KeyError, ValueError):  # none there, or none that can be read
            return TurnedKeys.of_parts(load_file(place), shape, model.device)
    stage("keys of the lens")
    with torch.inference_mode():
        keys = torch.cat([lens.keys(part) for part in features_in_parts(model, lens.shape)])
        made = TurnedKeys.of(keys, lens.bias.detach())
    if place is not None:
        try:
            write_tensors(place, made.parts())
        except RunFolderError as error:  # a cache that cannot be written costs time, nothing else
            log.warning("the keys of a lens could not be cached: %s", error)
    return made


def _place(model: LanguageModel, lens: Lens, path: Path) -> Path | None:
    if not model.lasting or 2 * lens.shape.vocab_size * lens.shape.rank > _BYTES:
        return None
    of = sha256(path.read_bytes()).hexdigest()[:24]
    return cache_folder() / "keys" / model.weight_hash[:24] / f"{of}-v{_RECIPE}.safetensors"
