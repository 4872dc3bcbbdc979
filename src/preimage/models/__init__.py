"""Loading a model and running its layer maps F^l."""

from preimage.models.aliases import ALIASES, Alias, cache_folder, converted_folder, ensure_converted
from preimage.models.identity import ModelIdentity, tensor_bytes
from preimage.models.language_model import LanguageModel
from preimage.models.layers import CONVENTION, Layer, LayerSpec, parse_layer, parse_layers
from preimage.models.loading import load
from preimage.models.prefix import Prefix
from preimage.models.preview import ModelPreview, preview

__all__ = [
    "ALIASES",
    "CONVENTION",
    "Alias",
    "LanguageModel",
    "Layer",
    "LayerSpec",
    "ModelIdentity",
    "ModelPreview",
    "Prefix",
    "cache_folder",
    "converted_folder",
    "ensure_converted",
    "load",
    "parse_layer",
    "parse_layers",
    "preview",
    "tensor_bytes",
]
