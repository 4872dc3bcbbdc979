"""How long inversion takes beside the forward pass that made the states, and beside SIPIT."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from jaxtyping import Float
from torch import Tensor

from preimage.bench.timing import hardware, plain_forward, seconds
from preimage.errors import OptionError
from preimage.inversion import invert
from preimage.inversion.result import Inversion
from preimage.layers import Layer, LayerSpec, parse_layers
from preimage.models import LanguageModel
from preimage.progress import Progress, silent
from preimage.prompts import PromptOptions, gather
from preimage.states import States, capture

_PLAIN_BATCH_TOKENS = 16384  # tokens in one pass where many prompts are run
_FORWARDS = 3  # plain passes around each inversion; their median is the unit


@dataclass(frozen=True)
class BenchPrompts:
    """How many prompts of each kind are inverted, and how long they are, in tokens."""

    prose: int = 20
    code: int = 10
    random: int = 10
    length: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        if self.length < 1 or self.prose + self.code + self.random < 1:
            raise OptionError("A benchmark needs prompts of at least one token.", "Give larger numbers.")

    def gather(self, model: LanguageModel) -> list[tuple[int, ...]]:
        """The prompts: prose, code, random tokens, in this order."""
        counts = {"default:prose": self.prose, "default:code": self.code, "random": self.random}
        prompts: list[tuple[int, ...]] = []
        for source, count in counts.items():
            if count:
                options = PromptOptions(count=count, length=self.length, seed=self.seed)
                prompts += gather(source, model, options)
        return prompts


@dataclass(frozen=True)
class SipitRuns:
    """How many of the prompts SIPIT inverts as well, cut to how many tokens, each for how many seconds."""

    prompts: int = 0
    length: int = 20
    seconds: float = 300.0


def bench_inversion(
    model: LanguageModel,
    layers: LayerSpec = (15, 30),
    *,
    prompts: BenchPrompts | Sequence[Sequence[int]] | None = None,
    sipit: SipitRuns | None = None,
    proposers: str | None = None,
    progress: Progress = silent,
) -> dict[str, Any]:
    """For each layer: the median of (seconds to invert) / (seconds of a plain forward pass).

    Prompts are inverted one by one, each between plain passes over the same prompt; the proposer is built
    before, and what that took is ``setup_seconds``. With ``sipit`` the first prompts, cut short, are also
    inverted by SIPIT on the prefix cache and at its published cost. Of a run that was stopped only what it
    had verified counts, and the time of that: it is inverted again, alone. Where no token was verified there
    is no speed-up.
    """
    chosen = parse_layers(layers, model.n_layers)
    sipit = sipit or SipitRuns()
    ids, described = _gathered(model, prompts or BenchPrompts())
    table: dict[str, Any] = {}
    for done, layer in enumerate(chosen):
        progress(done, len(chosen), f"layers, now {layer}")
        table[str(layer)] = _layer(model, layer, ids, proposers)
        if sipit.prompts:
            slow = [row[: sipit.length] for row in ids[: sipit.prompts]]
            table[str(layer)] |= _against_sipit(model, layer, slow, sipit.seconds)
    return {"layers": table, **_conditions(model, described)}


def _gathered(
    model: LanguageModel, prompts: BenchPrompts | Sequence[Sequence[int]]
) -> tuple[list[tuple[int, ...]], dict[str, Any]]:
    """The prompts, as they are or drawn from what every machine has; and what to say of them."""
    if isinstance(prompts, BenchPrompts):
        return prompts.gather(model), asdict(prompts)
    ids = [tuple(row) for row in prompts]
    if not ids or not all(ids):
        raise OptionError("A benchmark needs prompts of at least one token.", "Give some.")
    return ids, {"given": len(ids), "length": max(map(len, ids))}


def _conditions(model: LanguageModel, prompts: dict[str, Any]) -> dict[str, Any]:
    return {"prompts": prompts, "model": model.identity.to_dict(), "hardware": hardware(model.device)}


def _statuses(results: Iterable[Inversion]) -> dict[str, int]:
    """How many came back as what, most frequent first."""
    return dict(Counter(result.status for result in results).most_common())


def _layer(
    model: LanguageModel, layer: Layer, prompts: Sequence[tuple[int, ...]], proposers: str | None
) -> dict[str, Any]:
    states = capture(model, prompts, [layer])
    singles = [States.from_tensor(states.at(i, layer), layer) for i in range(len(prompts))]
    fast = partial(invert, model, layer=layer, proposers=proposers)
    setup = _setup(lambda: fast(singles[0]), model)
    results: list[Inversion] = []
    rows: list[dict[str, Any]] = []
    for ids, single in zip(prompts, singles, strict=True):
        forward = partial(plain_forward, model, [ids])
        before = [seconds(forward, model.device) for _ in range(_FORWARDS)]
        (result,) = fast(single)
        results.append(result)
        rows.append(
            {
                "ratio": result.seconds / statistics.median(before),
                "seconds": result.seconds,
                "forward_seconds": statistics.median(before),
                "forward_tokens": result.forward_tokens,
                "tests": result.tests,
                "proposer": result.proposer,
                "misses": _misses(result),
                "status": result.status,
                "exact": result.claims(ids),
            }
        )
    return {
        "ratio_to_forward": statistics.median(row["ratio"] for row in rows),
        "worst_ratio": max(row["ratio"] for row in rows),
        "exact": sum(row["exact"] for row in rows),
        "statuses": _statuses(results),
        "prompts": len(rows),
        "proposer": rows[0]["proposer"],
        "misses": sum(row["misses"] for row in rows),
        "setup_seconds": setup,
        "seconds": statistics.median(row["seconds"] for row in rows),
        "forward_tokens_per_token": statistics.median(r["forward_tokens"] for r in rows) / len(prompts[0]),
        "rows": rows,
    }


def _setup(work: Callable[[], object], model: LanguageModel) -> float:
    """What the first time costs beyond a second one: a proposer loaded or built."""
    first, second = (seconds(work, model.device) for _ in range(2))
    return max(0.0, first - second)


def _misses(result: Inversion) -> int:
    """Positions whose first proposal was refused."""
    return sum(position.tests > 2 for position in result.positions)  # the token and its likeliest rival


def _against_sipit(
    model: LanguageModel, layer: Layer, prompts: Sequence[tuple[int, ...]], limit: float
) -> dict[str, Any]:
    """Seconds per verified token of the three ways, on the same prompts."""
    states = capture(model, prompts, [layer])
    ways: dict[str, dict[str, Any]] = {
        "fast": {"method": "fast"},
        "sipit": {"method": "sipit", "timeout": limit},
        "published": {"method": "sipit", "published_cost": True, "patience": None, "timeout": limit},
    }
    per_token: dict[str, float | None] = {}
    verified: dict[str, int] = {}
    statuses: dict[str, dict[str, int]] = {}
    for name, options in ways.items():
        results = [
            invert(model, States.from_tensor(states.at(i, layer), layer), layer, **options)[0]
            for i in range(len(prompts))
        ]
        parts = [_verified(model, states.at(i, layer), one, options) for i, one in enumerate(results)]
        verified[name] = sum(tokens for tokens, _ in parts)
        per_token[name] = sum(took for _, took in parts) / verified[name] if verified[name] else None
        statuses[name] = _statuses(results)
    return {
        "seconds_per_token": per_token,
        "verified_tokens": verified,
        "tokens": sum(map(len, prompts)),
        "sipit_statuses": statuses,
        "speedup_over_sipit": _ratio(per_token["published"], per_token["fast"]),
        "speedup_over_cached_sipit": _ratio(per_token["sipit"], per_token["fast"]),
    }


def _verified(
    model: LanguageModel,
    states: Float[Tensor, "position d_model"],
    result: Inversion,
    options: dict[str, Any],
) -> tuple[int, float]:
    """Verified tokens and the seconds they took; a part of a prompt is inverted again, for its time alone."""
    count = len(result.token_ids)
    if result.status != "not_recovered" or count == 0:
        return count, result.seconds if count else 0.0
    part = States.from_tensor(states[:count], result.layer)
    (again,) = invert(model, part, result.layer, **options)
    return (0, 0.0) if again.status == "not_recovered" else (count, again.seconds)


def _ratio(slow: float | None, fast: float | None) -> float | None:
    return None if slow is None or fast is None else slow / fast


def bench_throughput(
    model: LanguageModel,
    layers: LayerSpec = (15,),
    *,
    prompts: BenchPrompts | Sequence[Sequence[int]] | None = None,
    rounds: int = 3,
    proposers: str | None = None,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Many prompts at once: seconds to invert them all, beside batched plain forward passes over them all.

    ``fraction_of_forward`` is plain seconds over ours, medians of the rounds; the proposer is built before
    them (``setup_seconds``). ``misses`` are positions whose first proposal was refused.
    """
    if rounds < 1:
        raise OptionError(f"rounds is {rounds}.", "Give at least 1.")
    chosen = parse_layers(layers, model.n_layers)
    ids, described = _gathered(model, prompts or BenchPrompts(prose=400, code=300, random=300))
    plain = partial(plain_forward, model, ids, max(1, _PLAIN_BATCH_TOKENS // len(ids[0])))
    plain()  # warm
    forward = statistics.median(seconds(plain, model.device) for _ in range(rounds))
    table: dict[str, Any] = {}
    for done, layer in enumerate(chosen):
        progress(done, len(chosen), f"layers, now {layer}")
        table[str(layer)] = _many(model, layer, ids, rounds, proposers)
        took = table[str(layer)]["seconds"]
        table[str(layer)] |= {"ratio_to_forward": took / forward, "fraction_of_forward": forward / took}
    return {"layers": table, "forward_seconds": forward, **_conditions(model, described)}


def _many(
    model: LanguageModel, layer: Layer, ids: Sequence[tuple[int, ...]], rounds: int, proposers: str | None
) -> dict[str, Any]:
    """All prompts inverted in one call, timed."""
    states = capture(model, ids, [layer], batch_tokens=_PLAIN_BATCH_TOKENS)
    results: list[Inversion] = []

    def work() -> None:
        results[:] = invert(model, states, layer, proposers=proposers)

    setup = _setup(work, model)
    return {
        "seconds": statistics.median(seconds(work, model.device) for _ in range(rounds)),
        "setup_seconds": setup,
        "exact": sum(one.claims(row) for one, row in zip(results, ids, strict=True)),
        "statuses": _statuses(results),
        "prompts": len(ids),
        "misses": sum(map(_misses, results)),
        "worst_tests_per_position": max(position.tests for r in results for position in r.positions),
        "forward_tokens_per_token": sum(r.forward_tokens for r in results) / sum(map(len, ids)),
        "proposer": results[0].proposer,
    }
