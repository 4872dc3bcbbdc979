"""What states look like, asked before any scan: this layer, another one, behind a BOS, no layer at all.

A lens reads most tokens of states even where they are of another layer, and one pass over what it read shows
them at every layer at once. Where the states agree with one of these far better than with the layer that was
said, that is what they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from preimage.devices import BATCH_TOKENS, by_device
from preimage.inversion.proposers.lens_files import find_lens
from preimage.inversion.proposers.registry import build_proposer
from preimage.inversion.proposers.standard import Proposer
from preimage.inversion.proposers.statistics import statistics_of
from preimage.layers import Layer, all_layers
from preimage.models import LanguageModel
from preimage.observations import Site, Tap
from preimage.states import calibration_prompts

_AGREES = 0.35  # median relative distance at which states look like those of a layer
_BETTER = 0.5  # and so many times that to the layer that was said
_COMMON = 0.3  # what states of a layer have in common at least, as a cosine, to be known by it
_LEANS, _SEVERAL = 0.2, 8  # the share of it that states of another model do not have, at so many positions
_TRIED = 2  # other layers that are tried by their lens
_profiles: WeakKeyDictionary[LanguageModel, tuple[int, dict[Layer, Float[Tensor, " d"]]]]
_profiles = WeakKeyDictionary()


class Diagnosis(NamedTuple):
    """What states look like."""

    layer: Layer | None = None  # another layer, where they look like one
    before: tuple[int, ...] = ()  # tokens that stood before the first state
    words: str = ""  # empty where they look like what was said, or where it is open
    away: float = 0.0  # median relative distance to the layer that was said, as a first look reads it
    foreign: bool = False  # whether they are nothing that this model computes at that layer


def diagnose(
    model: LanguageModel, observed: Sequence[Float[Tensor, "_ d"]], tap: Tap, proposer: Proposer
) -> list[Diagnosis]:
    """Compare states with every layer, behind nothing and behind every token a prompt may begin with."""
    if isinstance(tap, Site) or not observed:
        return [Diagnosis()] * len(observed)
    on_device = [one.to(model.device) for one in observed]
    with torch.inference_mode():
        found = _agreements(model, on_device, tap, proposer)
        for index, (rows, own) in enumerate(zip(on_device, found, strict=True)):
            for assumed in _like(model, rows, tap) if min(own).away > _AGREES else ():
                own += _agreements(model, [rows], assumed, build_proposer(model, assumed))[0]
                if min(own).away <= _AGREES:
                    break
            found[index] = own
        named = [_named(model, own, tap) for own in found]
        return [
            one if one.words or leans(model, rows, tap) else _foreign(model, one, tap)
            for one, rows in zip(named, on_device, strict=True)
        ]


def leans(model: LanguageModel, rows: Float[Tensor, "position d"], tap: Layer) -> bool:
    """Whether states lean towards the mean state of a layer as its states do, whatever their tokens are.

    What a model computes has much in common at every position. Noise as long as the states leaves that.
    """
    usual = statistics_of(model, tap)
    mean = usual.mean.norm()
    expected = float(mean / (mean.square() + usual.spread.sum()).sqrt())
    ordinary = rows[1:][~usual.sinks(rows)[1:]].double()
    if expected < _COMMON or len(ordinary) < _SEVERAL:
        return True
    cosines = ordinary @ (usual.mean / mean) / ordinary.norm(dim=1).clamp_min(1e-300)
    return float(cosines.median()) >= _LEANS * expected


def _foreign(model: LanguageModel, look: Diagnosis, tap: Layer) -> Diagnosis:
    words = (
        f"The states look like no layer of {model.name}: they have nothing in common with what it computes "
        f"at layer {tap}. They are another model's, or were changed."
    )
    return look._replace(words=words, foreign=True)


def _named(model: LanguageModel, found: list[_Agreement], tap: Layer) -> Diagnosis:
    said = min(one.away for one in found if one.layer == tap and not one.before)
    best = min(found)
    better = best.away < said and best.away <= _BETTER * said  # states of zeros are those of any layer
    if best.away > _AGREES or not better:
        return Diagnosis(away=said)
    other = None if best.layer == tap else best.layer
    name = f"this layer, {tap}," if other is None else f"layer {other}, not {tap},"
    behind = ""
    if best.before:
        shown = model.decode(best.before)
        behind = f" behind a token {shown!r} whose state is not among them: give it as prefix"
    words = f"The states look like {name}{behind} ({100 * best.away:.2g} % off)."
    return Diagnosis(other, best.before, words, said)


class _Agreement(NamedTuple):
    away: float  # median relative distance
    order: int
    layer: Layer
    before: tuple[int, ...]


def _agreements(
    model: LanguageModel, observed: Sequence[Float[Tensor, "_ d"]], assumed: Layer, proposer: Proposer
) -> list[list[_Agreement]]:
    """How near states are to every layer of what a proposer reads in them, as they are and behind a token."""
    found: list[list[_Agreement]] = [[] for _ in observed]
    longest = model.max_length or 2**31
    for before in ((), *_beginnings(model)):
        own = model.states(torch.tensor([before]), (assumed,))[assumed][0] if before else observed[0][:0]
        whole = [torch.cat([own.to(one), one]) for one in observed]
        size = max(1, by_device(BATCH_TOKENS, model.device) // max(map(len, whole)))
        for some in torch.arange(len(whole)).split(size):
            rows = [whole[index] for index in some]
            if max(map(len, rows)) > longest:
                continue
            for agreement in _agree(model, rows, before, proposer):
                for index, one in zip(some.tolist(), agreement, strict=True):
                    found[index].append(one)
    return found


def _agree(
    model: LanguageModel, observed: list[Tensor], before: tuple[int, ...], proposer: Proposer
) -> Iterator[list[_Agreement]]:
    """How near states of prompts are to each layer in turn; the first are of given tokens, not compared."""
    counts = torch.tensor([len(one) for one in observed], device=model.device)
    padded = pad_sequence(observed, batch_first=True)
    valid = torch.arange(padded.shape[1], device=model.device) < counts[:, None]
    ids = proposer.score(padded.float(), valid).best()
    ids[:, : len(before)] = torch.tensor(before, dtype=ids.dtype, device=ids.device)
    valid[:, : len(before)] = False
    lengths = padded.double().norm(dim=-1).clamp_min(1e-30)
    for order, (layer, states) in enumerate(model.states(ids, all_layers(model.n_layers)).items()):
        if states.shape[-1] != padded.shape[-1]:
            continue  # what leaves the last norm of some models is narrower
        away = (states.double() - padded.double()).norm(dim=-1) / lengths
        away = away.masked_fill(~valid, torch.nan).nanmedian(dim=1).values
        yield [_Agreement(one, order + 100 * len(before), layer, before) for one in away.tolist()]


def _beginnings(model: LanguageModel) -> list[tuple[int, ...]]:
    """Special tokens that a prompt may begin with."""
    tokenizer: Any = model.tokenizer
    ids = [getattr(tokenizer, f"{name}_token_id", None) for name in ("bos", "eos", "pad")]
    return [(token,) for token in dict.fromkeys(ids) if token is not None and token < model.vocab_size]


def _like(model: LanguageModel, observed: Tensor, tap: Layer) -> list[Layer]:
    """Other layers that have a lens and whose median state is most like that of these states."""
    edition, profiles = _profiles.get(model, (-1, {}))
    if edition != model.edition:
        counted = model.forward_tokens
        states = model.states(calibration_prompts(model, 2), all_layers(model.n_layers))
        profiles = {layer: _profile(some.flatten(0, 1)) for layer, some in states.items()}
        _profiles[model], model.forward_tokens = (model.edition, profiles), counted
    own = _profile(observed)
    apart = {
        layer: float((mean - own).norm() / mean.norm())
        for layer, mean in profiles.items()
        if mean.shape == own.shape
    }
    near = (layer for layer in sorted(apart, key=apart.__getitem__) if layer != tap)
    return [layer for layer in islice(near, _TRIED) if find_lens(model, layer) is not None]


def _profile(rows: Float[Tensor, "row d"]) -> Float[Tensor, " d"]:
    """The median state: sinks do not count."""
    return rows.double().median(dim=0).values
