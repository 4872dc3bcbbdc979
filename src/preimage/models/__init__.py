"""Loading a model and running its layer maps F^l."""

from typing import TYPE_CHECKING

from preimage.lazy import lazy_names

if TYPE_CHECKING:
    from preimage.models.aliases import ALIASES, Alias, cache_folder, converted_folder, ensure_converted
    from preimage.models.branching import states_of_branches
    from preimage.models.identity import ModelIdentity, tensor_bytes
    from preimage.models.language_model import LanguageModel
    from preimage.models.loading import load
    from preimage.models.locating import locate
    from preimage.models.prefix import Prefix
    from preimage.models.preview import ModelPreview, read_preview
    from preimage.models.scratch import (
        FAMILIES,
        SIZES,
        new_model,
        parse_size,
        save_model,
        train_tokenizer,
    )

__all__ = [
    "ALIASES",
    "FAMILIES",
    "SIZES",
    "Alias",
    "LanguageModel",
    "ModelIdentity",
    "ModelPreview",
    "Prefix",
    "cache_folder",
    "converted_folder",
    "ensure_converted",
    "load",
    "locate",
    "new_model",
    "parse_size",
    "read_preview",
    "save_model",
    "states_of_branches",
    "tensor_bytes",
    "train_tokenizer",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "ALIASES": "aliases",
        "Alias": "aliases",
        "FAMILIES": "scratch",
        "LanguageModel": "language_model",
        "ModelIdentity": "identity",
        "ModelPreview": "preview",
        "Prefix": "prefix",
        "SIZES": "scratch",
        "cache_folder": "aliases",
        "converted_folder": "aliases",
        "ensure_converted": "aliases",
        "load": "loading",
        "locate": "locating",
        "new_model": "scratch",
        "parse_size": "scratch",
        "read_preview": "preview",
        "save_model": "scratch",
        "states_of_branches": "branching",
        "tensor_bytes": "identity",
        "train_tokenizer": "scratch",
    },
)
