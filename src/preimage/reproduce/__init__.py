"""The tables and figures of both papers, measured again beside what was published."""

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from preimage.lazy import lazy_names

if TYPE_CHECKING:
    from preimage.reproduce.options import PRESETS, Sizes
    from preimage.reproduce.registry import ITEMS, Item, item_of
    from preimage.reproduce.reproducing import reproduce
    from preimage.reproduce.result import Reproduction, Row

__getattr__, __dir__, __all__ = lazy_names(__name__)


class _Room(ModuleType):
    """This room, called like the function it is named after: once it is imported it stands in its place."""

    def __call__(self, *given: Any, **named: Any) -> Any:
        return self.reproduce(*given, **named)


sys.modules[__name__].__class__ = _Room
