"""Loading a model and running its layer maps F^l."""

from typing import TYPE_CHECKING

from preimage.lazy import lazy_names

if TYPE_CHECKING:
    from preimage.models.aliases import ALIASES as ALIASES
    from preimage.models.aliases import Alias as Alias
    from preimage.models.aliases import cache_folder as cache_folder
    from preimage.models.aliases import converted_folder as converted_folder
    from preimage.models.aliases import ensure_converted as ensure_converted
    from preimage.models.branching import states_of_branches as states_of_branches
    from preimage.models.float64 import DoubleModel as DoubleModel
    from preimage.models.float64 import double_copy as double_copy
    from preimage.models.float64 import in_double as in_double
    from preimage.models.identity import ModelIdentity as ModelIdentity
    from preimage.models.identity import hash_files as hash_files
    from preimage.models.identity import tensor_bytes as tensor_bytes
    from preimage.models.language_model import LanguageModel as LanguageModel
    from preimage.models.loading import load as load
    from preimage.models.locating import DTYPES as DTYPES
    from preimage.models.locating import ModelFiles as ModelFiles
    from preimage.models.locating import check_device as check_device
    from preimage.models.locating import check_dtype as check_dtype
    from preimage.models.locating import locate as locate
    from preimage.models.prefix import Prefix as Prefix
    from preimage.models.preview import ModelPreview as ModelPreview
    from preimage.models.preview import read_preview as read_preview
    from preimage.models.scratch import FAMILIES as FAMILIES
    from preimage.models.scratch import SIZES as SIZES
    from preimage.models.scratch import new_model as new_model
    from preimage.models.scratch import parse_size as parse_size
    from preimage.models.scratch import save_model as save_model
    from preimage.models.scratch import train_tokenizer as train_tokenizer

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "aliases": "ALIASES Alias cache_folder converted_folder ensure_converted",
        "branching": "states_of_branches",
        "float64": "DoubleModel double_copy in_double",
        "identity": "ModelIdentity hash_files tensor_bytes",
        "language_model": "LanguageModel",
        "loading": "load",
        "locating": "DTYPES ModelFiles check_device check_dtype locate",
        "prefix": "Prefix",
        "preview": "ModelPreview read_preview",
        "scratch": "FAMILIES SIZES new_model parse_size save_model train_tokenizer",
    },
)
