"""Loading a model and running its layer maps F^l."""

from typing import TYPE_CHECKING

from preimage.lazy import lazy_names

if TYPE_CHECKING:
    from preimage.models.aliases import ALIASES, Alias, cache_folder, converted_folder, ensure_converted
    from preimage.models.block_draws import draw_by_block, release
    from preimage.models.float64 import DoubleModel, double_copy, in_double
    from preimage.models.identity import ModelIdentity, hash_files, tokenizer_hash
    from preimage.models.language_model import LanguageModel
    from preimage.models.loading import load, require_model
    from preimage.models.locating import (
        DTYPES,
        HUB_SECONDS,
        ModelFiles,
        check_device,
        check_device_map,
        check_dtype,
        locate,
    )
    from preimage.models.memory import weight_bytes
    from preimage.models.prefix import FEW_TOKENS, Prefix, states_of_branches
    from preimage.models.preview import ModelPreview, read_preview, tokenizer_here
    from preimage.models.sampling import in_bfloat16, rows_at_once, written_by
    from preimage.models.scratch import FAMILIES, SIZES, new_model, parse_size, save_model, train_tokenizer
    from preimage.models.shipping import model_as_told, told_model
    from preimage.models.sites import depth, turned_back, unrotated, without_positions

__getattr__, __dir__, __all__ = lazy_names(__name__)
