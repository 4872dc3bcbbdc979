"""Inversion: which prompt made these states?"""

from typing import TYPE_CHECKING

from preimage.lazy import lazy_names

if TYPE_CHECKING:
    from preimage.inversion.inverting import invert as invert
    from preimage.inversion.options import METHODS as METHODS
    from preimage.inversion.options import InvertOptions as InvertOptions
    from preimage.inversion.options import Method as Method
    from preimage.inversion.proposers.registry import register_proposer as register_proposer
    from preimage.inversion.proposers.scores import Keys as Keys
    from preimage.inversion.proposers.scores import Part as Part
    from preimage.inversion.proposers.scores import Scores as Scores
    from preimage.inversion.proposers.standard import Proposer as Proposer
    from preimage.inversion.result import Inversion as Inversion
    from preimage.inversion.result import Position as Position
    from preimage.inversion.result import Status as Status
    from preimage.inversion.result import VerifiedPositions as VerifiedPositions

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "inverting": "invert",
        "options": "METHODS InvertOptions Method",
        "proposers.registry": "register_proposer",
        "proposers.scores": "Keys Part Scores",
        "proposers.standard": "Proposer",
        "result": "Inversion Position Status VerifiedPositions",
    },
)
