"""Proposers by name: what ``proposers=`` and ``--proposers`` accept. Adding one is one registration.

Names are known without torch; a builder imports what it needs when it is called.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from preimage.errors import OptionError
from preimage.observations import Site

if TYPE_CHECKING:
    from preimage.inversion.proposers.standard import Proposer
    from preimage.models import LanguageModel
    from preimage.observations import Tap

# From a model, a layer or site, and what was built so far (None: nothing) to that with the proposer added.
Builder: TypeAlias = "Callable[[LanguageModel, Tap, Proposer | None], Proposer]"

LENS = "lens"
GRADIENT = "gradient"  # SIPIT's descent: it scores nothing beforehand, and serves where the ranking failed
_FEW_TOKENS = 4096  # a vocabulary that is soon tried in full
_NEAR_TOKENS = 1  # the layer up to which an embedding is plain to see in a state, trained or not
_BUILDERS: dict[str, Builder] = {}


def register_proposer(name: str, build: Builder) -> None:
    """Make a proposer known by name: ``build(model, layer, base)`` adds it to ``base``, None if it is first.

    Proposers that are chosen together are built in the order in which they were registered.
    """
    _BUILDERS[name] = build


def proposer_names() -> tuple[str, ...]:
    """Every name that can be chosen."""
    return (*_BUILDERS, GRADIENT)


def build_proposer(model: LanguageModel, tap: Tap, chosen: Sequence[str | Proposer] = ()) -> Proposer:
    """What was chosen, scores added; nothing chosen: a lens if there is one, else codebook and prior.

    Where the blocks below can be undone almost down to the tokens, nothing else reads as well.

    Inside a block there is no prior: what is seen there cannot be carried up to the LM head.
    """
    base: Proposer | None = None
    for proposer in chosen:
        if not isinstance(proposer, str):
            base = _add(base, proposer)
    names = chosen or _best_there_is(model, tap)
    for name, build in _BUILDERS.items():
        if name in names:
            base = build(model, tap, base)
    assert base is not None, "options refuse a choice without any"
    return base


def _best_there_is(model: LanguageModel, tap: Tap) -> tuple[str, ...]:
    from preimage.inversion.proposers.lens_files import find_lenses

    if find_lenses(model, tap):
        return (LENS,)
    if can_be_peeled(model, tap):
        return ("peel",)
    if isinstance(tap, Site) or model.unembedding is None:
        return ("codebook",)
    return ("codebook", "prior")


def can_be_peeled(model: LanguageModel, tap: Tap) -> bool:
    """Whether the blocks below can be undone almost down to the tokens."""
    from preimage.inversion.proposers.peeling import lowest_layer

    if not isinstance(tap, int) or tap <= _NEAR_TOKENS or model.vocab_size <= _FEW_TOKENS:
        return False
    return lowest_layer(model, tap) <= _NEAR_TOKENS


def _add(base: Proposer | None, proposer: Proposer) -> Proposer:
    from preimage.inversion.proposers.standard import SumProposer

    return proposer if base is None else SumProposer(base, proposer)


def _lens(model: LanguageModel, tap: Tap, base: Proposer | None) -> Proposer:
    from preimage.inversion.proposers.standard import find_lens_proposer

    return _add(base, find_lens_proposer(model, tap))


def _codebook(model: LanguageModel, tap: Tap, base: Proposer | None) -> Proposer:
    from preimage.inversion.proposers.standard import CodebookProposer

    return _add(base, CodebookProposer(model, tap))


def _peel(model: LanguageModel, tap: Tap, base: Proposer | None) -> Proposer:
    from preimage.inversion.proposers.standard import PeelProposer

    if not isinstance(tap, int):
        where = tap.kind if isinstance(tap, Site) else tap
        raise OptionError(f"Blocks are undone from a layer's states, not {where}.", "Leave peel out.")
    return _add(base, PeelProposer(model, tap))


def _prior(model: LanguageModel, tap: Tap, base: Proposer | None) -> Proposer:
    from preimage.inversion.proposers.standard import PriorProposer

    if isinstance(tap, Site):
        raise OptionError(
            f"The prior reads the residual stream, not {tap.kind}.", "Use the codebook, or a lens."
        )
    return PriorProposer(model, tap, base)


register_proposer(LENS, _lens)
register_proposer("codebook", _codebook)
register_proposer("peel", _peel)
register_proposer("prior", _prior)
