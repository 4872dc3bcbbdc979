"""From what an inversion is given to what it works on: states in order, a verifier, known tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from preimage.errors import LayerError, OptionError, StatesError
from preimage.inversion.engine.budget import Budget, BudgetSpentError
from preimage.inversion.engine.permuted import find_permutation
from preimage.inversion.engine.rotated import find_rotation
from preimage.inversion.engine.verifier import Verifier
from preimage.inversion.options import READERS, InvertOptions
from preimage.inversion.proposers.lens_files import LensInfo, find_lenses, given_lens
from preimage.inversion.proposers.registry import GRADIENT, LENS, build_proposer
from preimage.inversion.proposers.standard import FilledProposer, Proposer, lens_proposer
from preimage.inversion.proposers.statistics import statistics_of
from preimage.layers import Layer, parse_layer
from preimage.models import LanguageModel
from preimage.observations import Tap
from preimage.states import States, encode_all, noise_of, states_from, undone

_SCANS = 8  # of the vocabulary at every position, that finding a rotation may cost
_proposers: WeakKeyDictionary[LanguageModel, dict[tuple[object, ...], Proposer]] = WeakKeyDictionary()


class Prepared(NamedTuple):
    """What an inversion works on."""

    states: States  # as the model orders them
    verifier: Verifier
    known: tuple[int, ...]  # tokens before the first state
    found_out: bool  # how the coordinates were changed was not known, and found out by what fits


def prepare(
    model: LanguageModel, x: Any, layer: int | str | None, attention_mask: Any, options: InvertOptions
) -> Prepared:
    """Take what came through the door, and refuse what cannot be worked on."""
    states = states_from(x, model, layer, observe=options.observe, attention_mask=attention_mask)
    at = _choose_layer(states, layer, model.n_layers)
    if options.prove and states.positions != "all":
        raise OptionError("These states keep the last position alone.", "Prove states of every position.")
    if options.prefix and states.observation.positions != "all":
        raise OptionError("A known prefix needs the states of every position.", "Leave the prefix out.")
    if options.method in READERS and (states.positions != "all" or states.observation.positions != "all"):
        raise OptionError(
            f"The method {options.method} needs the states of every position, in order.", "Use fast."
        )
    changed = states.observation.permuted or states.observation.rotated
    if changed and (options.prefix or options.prove):
        what = "A known prefix" if options.prefix else "A proof"
        raise OptionError(
            f"{what} needs coordinates as the model has them.", "Leave it out, or undo their change."
        )
    if states.observation.at is not None:
        _check_gaps(states, options)
    states.require_width(model)
    tap = states.observation.tap(at, model.n_layers)
    if options.lens is not None and states.positions != "all":
        raise OptionError("One vector for a whole prompt is read without a lens.", "Leave the lens out.")
    _given(model, tap, options)  # which refuses what does not fit
    states = _undone(model, states, at, tap)
    verifier = _verifier(model, states, tap, options)
    verifier.require_above_noise(states.at(0, at))
    known = _known_tokens(model, options.prefix)
    states.require_finite(at)  # before any work is done
    if changed:
        states = _found_out(model, states, tap, options)
        verifier = _verifier(model, states, tap, options)
    return Prepared(states, verifier, known, changed)


def _check_gaps(states: States, options: InvertOptions) -> None:
    """Refuse what needs the states of every position, and rows that are not as many as positions."""
    at = states.observation.at or ()
    wrong = next((length for length in states.lengths if length != len(at)), None)
    if wrong is not None:
        raise StatesError(
            f"{len(at)} positions were named, and a prompt has {wrong} states.", "Name them all."
        )
    if states.observation.gaps and (options.prefix or options.prove or options.method != "fast"):
        raise OptionError(
            "A prefix, a proof and other methods need the states of every position.", "Leave them out."
        )


def _verifier(model: LanguageModel, states: States, tap: Tap, options: InvertOptions) -> Verifier:
    """What is allowed comes from this model on this machine, never from what came with the states."""
    noise = noise_of(model, (tap,))[tap]
    return Verifier(model, tap, noise=noise, tolerance=options.tolerance, observation=states.observation)


def _undone(model: LanguageModel, states: States, at: Layer, tap: Tap) -> States:
    """The states with what is known of their coordinates' order and rotation turned back."""
    seen = states.observation
    if seen.plain or seen.permuted or seen.rotated:
        return states
    rows = [undone(states.at(index, at), seen, model.width(tap)) for index in range(len(states))]
    return States.from_tensor([row for row, _ in rows], at, observation=rows[0][1])


def _found_out(model: LanguageModel, states: States, tap: Tap, options: InvertOptions) -> States:
    """The states with their coordinates in the model's order, or turned back; how, is found out first."""
    (at,), seen = states.layers, states.observation
    plain = seen.changed(permuted=False, rotated=False)
    rows = [states.at(index, at) for index in range(len(states))]
    finder = _verifier(model, States.from_tensor(rows, at, observation=plain), tap, options)
    proposer = proposer_of(model, tap, options)
    bound = (_SCANS * sum(map(len, rows)) if seen.rotated else len(rows[0])) * model.vocab_size
    budget = Budget(options.max_tests or bound, options.timeout)
    try:
        if seen.rotated:
            turn = find_rotation(model, rows, finder, proposer, budget).T
            back = [(row.double() @ turn.to(row.device)).to(row.dtype) for row in rows]
        else:
            order = torch.tensor(find_permutation(model, rows, finder, proposer, budget)).argsort()
            back = [row[:, order] for row in rows]
    except BudgetSpentError as spent:
        raise StatesError(
            f"How the coordinates were changed was not found out: {spent}.",
            "Give more tests or time, or states of fewer prompts.",
        ) from spent
    return States.from_tensor(back, at, observation=plain)


def _known_tokens(model: LanguageModel, prefix: str | Sequence[int]) -> tuple[int, ...]:
    """The ids of a known prefix, text as the tokenizer makes it where it stands first."""
    if not prefix:
        return ()
    given = prefix if isinstance(prefix, str) else tuple(prefix)
    return tuple(encode_all(model, [given])[0])


def _choose_layer(states: States, layer: int | str | None, n_layers: int) -> Layer:
    if layer is not None:
        return parse_layer(layer, n_layers)
    if len(states.layers) == 1:
        return states.layers[0]
    kept = ", ".join(map(str, states.layers))
    raise LayerError(f"These states hold {len(states.layers)} layers.", f"Choose one of {kept}.")


def proposer_of(
    model: LanguageModel, tap: Tap, options: InvertOptions, kept: tuple[int, ...] | None = None
) -> Proposer:
    """The proposer of a layer or site; of names alone, it is built once for a model in memory."""
    if kept is not None:
        return FilledProposer(proposer_of(model, tap, options), statistics_of(model, tap), kept)
    chosen, given = options.chosen_proposers, _given(model, tap, options)
    if any(not isinstance(one, str) for one in chosen):
        return build_proposer(model, tap, _with_given(model, tap, chosen, given))
    names = tuple(one for one in chosen if one != GRADIENT)
    lenses = given or find_lenses(model, tap)  # one may be trained meanwhile
    known = _proposers.setdefault(model, {})
    of = (tap, names, *((lens.path, lens.path.stat().st_mtime_ns) for lens in lenses))
    if of not in known:
        known[of] = build_proposer(model, tap, _with_given(model, tap, names, given))
    return known[of]


def _given(model: LanguageModel, tap: Tap, options: InvertOptions) -> tuple[LensInfo, ...]:
    """The lens of the options, if there is one."""
    return () if options.lens is None else (given_lens(Path(options.lens), model, tap),)


def _with_given(
    model: LanguageModel, tap: Tap, chosen: Sequence[str | Proposer], given: tuple[LensInfo, ...]
) -> tuple[str | Proposer, ...]:
    """What was chosen, with the lens that was given in the place of those that would be found."""
    if not given:
        return tuple(chosen)
    return (lens_proposer(model, tap, given), *(one for one in chosen if one != LENS))
