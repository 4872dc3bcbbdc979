"""Inversion: which prompt made these states?"""

from typing import TYPE_CHECKING

from preimage.lazy import lazy_names

if TYPE_CHECKING:
    from preimage.inversion.baselines.settings import HardPromptSettings, VocabularyMatchSettings
    from preimage.inversion.engine.first_states import remember_first_states
    from preimage.inversion.inverting import invert
    from preimage.inversion.options import METHODS, InvertOptions, Method
    from preimage.inversion.proposers.lens_repository import (
        LensCheck,
        LensEntry,
        pull_lenses,
        push_lenses,
        verify_lenses,
    )
    from preimage.inversion.proposers.registry import register_proposer
    from preimage.inversion.proposers.scores import Keys, Part, Scores
    from preimage.inversion.proposers.standard import Proposer
    from preimage.inversion.result import Inversion, Position, Status, VerifiedPositions

__getattr__, __dir__, __all__ = lazy_names(__name__)
