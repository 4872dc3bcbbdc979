"""What the theory of injectivity states, checked on a model: each check returns a ``TheoryReport``."""

from typing import TYPE_CHECKING

from preimage.lazy import lazy_names

if TYPE_CHECKING:
    from preimage.theory.analyticity.check import check_analyticity as check_analyticity
    from preimage.theory.dichotomy.check import check_dichotomy as check_dichotomy
    from preimage.theory.dichotomy.check import search_structure as search_structure
    from preimage.theory.discriminant.check import build_collision as build_collision
    from preimage.theory.discriminant.check import distance_to_collision as distance_to_collision
    from preimage.theory.optimiser.check import check_optimiser as check_optimiser
    from preimage.theory.optimiser.updates import OptimiserOptions as OptimiserOptions
    from preimage.theory.registry import CHECKS as CHECKS
    from preimage.theory.registry import Check as Check
    from preimage.theory.result import TheoryReport as TheoryReport
    from preimage.theory.result import Verdict as Verdict
    from preimage.theory.symmetry.check import check_symmetry as check_symmetry
    from preimage.theory.verification import verify as verify

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "analyticity.check": "check_analyticity",
        "dichotomy.check": "check_dichotomy search_structure",
        "discriminant.check": "build_collision distance_to_collision",
        "optimiser.check": "check_optimiser",
        "optimiser.updates": "OptimiserOptions",
        "registry": "CHECKS Check",
        "result": "TheoryReport Verdict",
        "symmetry.check": "check_symmetry",
        "verification": "verify",
    },
)
