"""What the theory of injectivity states, checked on a model: each check returns a ``TheoryReport``."""

from typing import TYPE_CHECKING

from preimage.lazy import lazy_names

if TYPE_CHECKING:
    from preimage.theory.analyticity import check_analyticity
    from preimage.theory.dichotomy import check_dichotomy, search_structure
    from preimage.theory.discriminant import build_collision, distance_to_collision
    from preimage.theory.optimiser import check_optimiser
    from preimage.theory.symmetry import check_symmetry
    from preimage.theory.updates import OptimiserOptions
    from preimage.theory.verifying import verify

__all__ = [
    "OptimiserOptions",
    "build_collision",
    "check_analyticity",
    "check_dichotomy",
    "check_optimiser",
    "check_symmetry",
    "distance_to_collision",
    "search_structure",
    "verify",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "OptimiserOptions": "updates",
        "build_collision": "discriminant",
        "check_analyticity": "analyticity",
        "check_dichotomy": "dichotomy",
        "check_optimiser": "optimiser",
        "check_symmetry": "symmetry",
        "distance_to_collision": "discriminant",
        "search_structure": "dichotomy",
        "verify": "verifying",
    },
)
