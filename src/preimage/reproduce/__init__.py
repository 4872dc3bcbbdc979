"""The tables and figures of both papers, measured again beside what was published."""

from typing import TYPE_CHECKING

from preimage.lazy import lazy_names

if TYPE_CHECKING:
    from preimage.reproduce.options import PRESETS, Sizes
    from preimage.reproduce.registry import ITEMS, Item, item_of
    from preimage.reproduce.reproducing import reproduce
    from preimage.reproduce.result import Reproduction, Row

__getattr__, __dir__, __all__ = lazy_names(__name__)
