"""What the theory of injectivity states, checked on a model: each check returns a ``TheoryReport``."""

from typing import TYPE_CHECKING

from preimage.lazy import lazy_names

if TYPE_CHECKING:
    from preimage.theory.analyticity.check import check_analyticity
    from preimage.theory.dichotomy.check import check_dichotomy, search_structure
    from preimage.theory.discriminant.check import build_collision, distance_to_collision
    from preimage.theory.optimiser.check import check_optimiser
    from preimage.theory.optimiser.options import OptimiserOptions
    from preimage.theory.registry import CHECKS, Check
    from preimage.theory.result import TheoryReport, Verdict
    from preimage.theory.symmetry.check import check_symmetry
    from preimage.theory.verification import verify

__getattr__, __dir__, __all__ = lazy_names(__name__)
