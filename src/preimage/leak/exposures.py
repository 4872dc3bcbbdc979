"""What somebody gets to see of a prompt's states: whole, kept in few bits, noised, cut, or in another order.

An exposure is a family by its name, with a value where it has one: ``float32``, ``int8``, ``keys``,
``keys:int8``, ``noise:20`` (white noise a fifth as long as each state), ``permuted``, ``last``. Some are what
services keep, some are defences; an attacker knows which one it is and not its secrets (the noise, the order,
the rotation). Quick to import: wrong names are refused before torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from preimage.errors import OptionError
from preimage.observations import STORED, Observation

if TYPE_CHECKING:
    from torch import Generator, Tensor

# From states of all prompts (position x width each), a value and a seeded generator to what is seen of them,
# and what of the change is no secret.
Change: TypeAlias = "Callable[[list[Tensor], float, Generator], tuple[list[Tensor], dict[str, object]]]"

_CODES = {"int8": (127, -1), "int4": (7, -2)}  # the largest code, and the axis over which a step is shared
_FP8_MOST = 448.0
_LOW_RANK = 8  # noise of low rank lies in one of so many directions


class Family(NamedTuple):
    """Exposures of one name.

    ``about``: in words, with {} for the value. ``seen``: what an attacker is told. ``change``: what is done
    to plain states. ``value``: its unit in words, and its least and largest; None: it has none.
    """

    about: str
    seen: Observation
    change: Change
    value: tuple[str, float, float] | None = None

    @property
    def lossy(self) -> bool:
        """Whether what comes after has other numbers to work with than it would have had."""
        return self.change not in (_unchanged, _permuted, _rotated)


def _unchanged(rows: list[Tensor], _: float, __: Generator) -> tuple[list[Tensor], dict[str, object]]:
    return rows, {}


def _kept_as(kind: str) -> Change:
    def change(rows: list[Tensor], _: float, __: Generator) -> tuple[list[Tensor], dict[str, object]]:
        return [stored_as(one, kind) for one in rows], {}

    return change


def stored_as(rows: Tensor, kind: str) -> Tensor:
    """States as they come back from a copy in fewer bits, position x width.

    fp8 and int8 with a step for each token, int4 with one for each coordinate, as caches are usually kept.
    """
    import torch

    if kind in ("float32", "bf16", "fp16"):
        return rows.to({"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[kind])
    if kind == "fp8":
        scale = rows.abs().amax(dim=-1, keepdim=True).clamp_min(1e-30) / _FP8_MOST
        return (rows / scale).to(torch.float8_e4m3fn).float() * scale
    most, axis = _CODES[kind]
    scale = rows.abs().amax(dim=axis, keepdim=True).clamp_min(1e-30) / most
    return (rows / scale).round() * scale


def _noised(rows: list[Tensor], percent: float, draw: Generator) -> tuple[list[Tensor], dict[str, object]]:
    return [one + _as_long(_white(one, draw), one, percent) for one in rows], {}


def _noised_in_few(
    rows: list[Tensor], percent: float, draw: Generator
) -> tuple[list[Tensor], dict[str, object]]:
    """Noise in a secret subspace, the same at every position, of an eighth of the directions."""
    import torch

    width = rows[0].shape[-1]
    basis = torch.linalg.qr(torch.randn(width, max(1, width // _LOW_RANK), generator=draw))[0]
    drawn = [torch.randn(len(one), basis.shape[1], generator=draw) @ basis.T for one in rows]
    return [one + _as_long(noise, one, percent) for one, noise in zip(rows, drawn, strict=True)], {}


def _clipped(rows: list[Tensor], percent: float, draw: Generator) -> tuple[list[Tensor], dict[str, object]]:
    """No state longer than the median one, and then noise: how differential privacy adds it."""
    import torch

    median = torch.cat([one.norm(dim=-1) for one in rows]).median()
    clipped = [one * (median / one.norm(dim=-1, keepdim=True)).clamp_max(1.0) for one in rows]
    return [one + _as_long(_white(one, draw), median, percent) for one in clipped], {}


def _cut(rows: list[Tensor], percent: float, draw: Generator) -> tuple[list[Tensor], dict[str, object]]:
    """So many percent of the coordinates, drawn at random and known."""
    import torch

    width = rows[0].shape[-1]
    order = torch.randperm(width, generator=draw)[: max(1, round(width * percent / 100))]
    kept = tuple(sorted(order.tolist()))
    return [one[:, list(kept)] for one in rows], {"kept": kept}


def _every(rows: list[Tensor], step: float, _: Generator) -> tuple[list[Tensor], dict[str, object]]:
    """The last position, and every so many before it."""
    length = len(rows[0])
    at = tuple(range((length - 1) % int(step), length, int(step)))
    return [one[list(at)] for one in rows], {"at": at}


def _permuted(rows: list[Tensor], _: float, draw: Generator) -> tuple[list[Tensor], dict[str, object]]:
    import torch

    order = torch.randperm(rows[0].shape[-1], generator=draw)
    return [one[:, order] for one in rows], {}


def _rotated(rows: list[Tensor], _: float, draw: Generator) -> tuple[list[Tensor], dict[str, object]]:
    import torch

    width = rows[0].shape[-1]
    turn = torch.linalg.qr(torch.randn(width, width, generator=draw, dtype=torch.float64))[0]
    return [(one.double() @ turn).float() for one in rows], {}


def _shuffled(rows: list[Tensor], _: float, draw: Generator) -> tuple[list[Tensor], dict[str, object]]:
    import torch

    return [one[torch.randperm(len(one), generator=draw)] for one in rows], {}


def _last(rows: list[Tensor], _: float, __: Generator) -> tuple[list[Tensor], dict[str, object]]:
    return [one[-1] for one in rows], {}


def _mean(rows: list[Tensor], _: float, __: Generator) -> tuple[list[Tensor], dict[str, object]]:
    return [one.mean(dim=0) for one in rows], {}


def _white(like: Tensor, draw: Generator) -> Tensor:
    import torch

    return torch.randn(like.shape, generator=draw)


def _as_long(noise: Tensor, states: Tensor, percent: float) -> Tensor:
    """Noise made so long relative to each state, or to one length for all."""
    import torch

    length = states.norm(dim=-1, keepdim=True) if states.ndim else states
    return percent / 100 * length * torch.nn.functional.normalize(noise, dim=-1)


_SHARE = ("percent of the state's length", 0.0, 1e6)
_PLAIN = Observation()
FAMILIES: dict[str, Family] = {
    "float32": Family("states as they are, float32", _PLAIN, _unchanged),
    **{kind: Family(f"states kept as {kind}", _PLAIN, _kept_as(kind)) for kind in STORED[1:]},
    **{
        place: Family(f"{words} of a block", Observation(place), _unchanged)
        for place, words in {
            "keys": "keys", "values": "values", "kv": "keys and values",
            "attention": "the attention's output", "mlp": "the MLP's output",
        }.items()
    },
    "noise": Family("white noise of {:g} % of each state's length", _PLAIN, _noised, _SHARE),
    "lowrank": Family(
        "noise of {:g} % of each state's length in a secret eighth of the directions", _PLAIN, _noised_in_few,
        _SHARE,
    ),
    "clipped": Family(
        "lengths cut to the median, then white noise of {:g} % of it", _PLAIN, _clipped, _SHARE
    ),
    "cut": Family("{:g} % of the coordinates, known which", _PLAIN, _cut, ("percent kept", 1e-6, 100.0)),
    "every": Family("one position in {:g}, the last among them", _PLAIN, _every, ("positions", 1.0, 1e6)),
    "permuted": Family("coordinates in a secret order", Observation(permuted=True), _permuted),
    "rotated": Family("coordinates turned by a secret rotation", Observation(rotated=True), _rotated),
    "shuffled": Family("positions in a secret order", Observation(positions="shuffled"), _shuffled),
    "last": Family("the last position alone", Observation(positions="last"), _last),
    "mean": Family("the mean over positions alone", Observation(positions="mean"), _mean),
}  # fmt: skip
_ONE_VECTOR = ("last", "mean")


@dataclass(frozen=True)
class Exposure:
    """What is seen: a family, its value, and for places beside the stream the type it is kept in.

    >>> Exposure.parse("noise:20").about
    "white noise of 20 % of each state's length"
    >>> Exposure.parse("keys:int8").spec
    'keys:int8'
    """

    family: str
    value: float | None = None
    stored: str | None = None

    @classmethod
    def parse(cls, spec: str) -> Exposure:
        """An exposure by its spec, NAME or NAME:VALUE."""
        name, colon, given = spec.strip().partition(":")
        family = FAMILIES.get(name)
        if family is None:
            raise OptionError(f"Exposure {spec[:60]!r} is not known.", f"Use some of {', '.join(FAMILIES)}.")
        if family.value is not None:
            return cls(name, _number(spec, given, family.value))
        if colon and (name not in ("keys", "values", "kv") or given not in STORED):
            raise OptionError(
                f"Exposure {spec[:60]!r} is not known.",
                f"{name} takes no value; keys, values and kv take {', '.join(STORED)}.",
            )
        return cls(name, None, given or None)

    @property
    def spec(self) -> str:
        """What :meth:`parse` reads."""
        value = self.stored if self.value is None else f"{self.value:g}"
        return self.family if value is None else f"{self.family}:{value}"

    @property
    def about(self) -> str:
        """In words."""
        words = FAMILIES[self.family].about.format(self.value)
        return words if self.stored is None else f"{words}, kept as {self.stored}"

    @property
    def seen(self) -> Observation:
        """Where in the model it is seen, and what of it an attacker is told before any state is there."""
        return FAMILIES[self.family].seen

    @property
    def one_vector(self) -> bool:
        """Whether a prompt leaves one vector, from which it has to be searched for."""
        return self.family in _ONE_VECTOR

    @property
    def noise(self) -> float:
        """How much noise there is, in percent of a state's length; the more, the longer a reading takes."""
        return self.value or 0.0 if FAMILIES[self.family].value is _SHARE else 0.0

    @property
    def equal_lengths(self) -> bool:
        """Whether prompts of one length have to be changed together."""
        return self.family == "every"

    @property
    def lossy(self) -> bool:
        """Whether the model itself has other numbers to go on with."""
        return FAMILIES[self.family].lossy or self.stored not in (None, "float32")

    def of(self, rows: Sequence[Tensor], seed: int) -> tuple[list[Tensor], Observation]:
        """What is seen of states (position x width each), and what an attacker is told of it.

        The same secret for all of them, from ``seed``; noise is drawn for each.
        """
        import torch

        family = FAMILIES[self.family]
        plain = [one.detach().float().cpu() for one in rows]
        draw = torch.Generator().manual_seed(seed)
        seen, told = family.change(plain, self.value or 0.0, draw)
        if self.stored is not None:
            seen = [stored_as(one, self.stored) for one in seen]
        return seen, family.seen.changed(**told)


def parse_exposures(given: str | Sequence[str]) -> tuple[Exposure, ...]:
    """Exposures from a list such as ``float32,int8,noise:20``, each once."""
    specs = given.split(",") if isinstance(given, str) else given
    found = tuple(dict.fromkeys(Exposure.parse(spec) for spec in specs if spec.strip()))
    if not found:
        raise OptionError("No exposure was given.", f"Use some of {', '.join(FAMILIES)}.")
    return found


def _number(spec: str, given: str, value: tuple[str, float, float]) -> float:
    unit, least, most = value
    try:
        number = float(given)
    except ValueError:
        number = math.nan
    if not least <= number <= most:
        raise OptionError(
            f"Exposure {spec[:60]!r} has no value that fits.",
            f"Give {unit} from {least:g} to {most:g}, such as {spec.partition(':')[0][:20]}:20.",
        )
    return number
