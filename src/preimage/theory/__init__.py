"""What the theory of injectivity states, checked on a model: each check returns a ``TheoryReport``."""

from typing import TYPE_CHECKING

from preimage.lazy import lazy_names

if TYPE_CHECKING:
    from preimage.theory.analyticity.checking import check_analyticity as check_analyticity
    from preimage.theory.dichotomy.checking import check_dichotomy as check_dichotomy
    from preimage.theory.dichotomy.checking import search_structure as search_structure
    from preimage.theory.discriminant.checking import build_collision as build_collision
    from preimage.theory.discriminant.checking import distance_to_collision as distance_to_collision
    from preimage.theory.optimiser.checking import check_optimiser as check_optimiser
    from preimage.theory.optimiser.updates import OptimiserOptions as OptimiserOptions
    from preimage.theory.result import TheoryReport as TheoryReport
    from preimage.theory.result import Verdict as Verdict
    from preimage.theory.symmetry.checking import check_symmetry as check_symmetry
    from preimage.theory.verifying import verify as verify

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "analyticity.checking": "check_analyticity",
        "dichotomy.checking": "check_dichotomy search_structure",
        "discriminant.checking": "build_collision distance_to_collision",
        "optimiser.checking": "check_optimiser",
        "optimiser.updates": "OptimiserOptions",
        "result": "TheoryReport Verdict",
        "symmetry.checking": "check_symmetry",
        "verifying": "verify",
    },
)
