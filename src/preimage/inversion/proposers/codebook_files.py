"""Codebooks in the user's cache, so that each is fitted once for a model and layer."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError
from safetensors.torch import load_file

from preimage.errors import RunFolderError
from preimage.layers import Layer
from preimage.models import LanguageModel, cache_folder
from preimage.storage import write_tensors

if TYPE_CHECKING:
    from preimage.inversion.proposers.codebook import Codebook

log = logging.getLogger(__name__)
_RECIPE = 1  # raise when the fit changes


def load_codebook(codebook: Codebook, model: LanguageModel, layer: Layer) -> bool:
    """Fill in a codebook from the cache; False where there is none that can be read."""
    try:
        codebook.load_state_dict(load_file(_path(model, layer)))
    except (OSError, SafetensorError, RuntimeError):
        return False
    return True


def save_codebook(codebook: Codebook, model: LanguageModel, layer: Layer) -> None:
    """Keep a codebook; a cache that cannot be written costs time, nothing else."""
    try:
        write_tensors(_path(model, layer), codebook.state_dict())
    except RunFolderError as error:
        log.warning("the codebook could not be cached: %s", error)


def _path(model: LanguageModel, layer: Layer) -> Path:
    folder = cache_folder() / "codebooks" / model.identity.weight_hash[:24]
    return folder / f"layer-{layer}-v{_RECIPE}.safetensors"
