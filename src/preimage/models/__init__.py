"""Loading a model and running its layer maps F^l."""

from typing import TYPE_CHECKING

from preimage.lazy import lazy_names

if TYPE_CHECKING:
    from preimage.models.aliases import ALIASES, Alias, cache_folder, converted_folder, ensure_converted
    from preimage.models.identity import ModelIdentity, tensor_bytes
    from preimage.models.language_model import LanguageModel
    from preimage.models.loading import load
    from preimage.models.locating import locate
    from preimage.models.prefix import Prefix
    from preimage.models.preview import ModelPreview, read_preview

__all__ = [
    "ALIASES",
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
    "read_preview",
    "tensor_bytes",
]

__getattr__ = lazy_names(
    __name__,
    {
        "ALIASES": "aliases",
        "Alias": "aliases",
        "LanguageModel": "language_model",
        "ModelIdentity": "identity",
        "ModelPreview": "preview",
        "Prefix": "prefix",
        "cache_folder": "aliases",
        "converted_folder": "aliases",
        "ensure_converted": "aliases",
        "load": "loading",
        "locate": "locating",
        "read_preview": "preview",
        "tensor_bytes": "identity",
    },
)
