"""The local page: prompts and files inverted while one looks on, behind a guard that lets nobody else in."""

from typing import TYPE_CHECKING

from preimage.lazy import lazy_names

if TYPE_CHECKING:
    from preimage.web.options import Limits, ServeOptions
    from preimage.web.serving import Served, serve

__getattr__, __dir__, __all__ = lazy_names(__name__)
