"""How long inversion takes beside the forward pass that made the states, and beside SIPIT."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
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


def bench_inversion(
    model: LanguageModel,
    layers: LayerSpec = (15, 30),
    *,
    prose: int = 20,
    code: int = 10,
    random: int = 10,
    length: int = 64,
    sipit_prompts: int = 0,
    sipit_length: int = 20,
    sipit_seconds: float = 300.0,
    proposers: str | None = None,
    seed: int = 0,
    progress: Progress = silent,
) -> dict[str, Any]:
    """For each layer: the median of (seconds to invert) / (seconds of a plain forward pass).

    Prompts are inverted one by one, each between plain passes over the same prompt; the proposer is built
    before, and what that took is ``setup_seconds``. With ``sipit_prompts`` the first prompts, cut to
    ``sipit_length`` tokens, are also inverted by SIPIT on the prefix cache and at its published cost, each
    for at most ``sipit_seconds``. Of a run that was stopped only what it had verified counts, and the time
    of that: it is inverted again, alone. Where no token was verified there is no speed-up.
    """
    if length < 1 or prose + code + random < 1:
        raise OptionError("A benchmark needs prompts of at least one token.", "Give larger numbers.")
    chosen = parse_layers(layers, model.n_layers)
    prompts = _prompts(model, {"default:prose": prose, "default:code": code, "random": random}, length, seed)
    table: dict[str, Any] = {}
    for done, layer in enumerate(chosen):
        progress(done, len(chosen), f"layers, now {layer}")
        table[str(layer)] = _layer(model, layer, prompts, proposers)
        if sipit_prompts:
            slow = [ids[:sipit_length] for ids in prompts[:sipit_prompts]]
            table[str(layer)] |= _against_sipit(model, layer, slow, sipit_seconds)
    return {
        "layers": table,
        "prompts": {"prose": prose, "code": code, "random": random, "length": length, "seed": seed},
        "model": model.identity.to_dict(),
        "hardware": hardware(model),
    }


def _prompts(model: LanguageModel, counts: dict[str, int], length: int, seed: int) -> list[tuple[int, ...]]:
    limits: dict[str, Any] = {"vocab_size": model.vocab_size, "max_length": model.max_length}
    found: list[tuple[int, ...]] = []
    for source, count in counts.items():
        if count:
            options = PromptOptions(count=count, length=length, seed=seed)
            found += gather(source, model.tokenizer, options, **limits)
    return found


def _statuses(found: Iterable[Inversion]) -> dict[str, int]:
    """How many came back as what, most frequent first."""
    return dict(Counter(result.status for result in found).most_common())


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
        (found,) = fast(single)
        results.append(found)
        rows.append(
            {
                "ratio": found.seconds / statistics.median(before),
                "seconds": found.seconds,
                "forward_seconds": statistics.median(before),
                "forward_tokens": found.forward_tokens,
                "tests": found.tests,
                "proposer": found.proposer,
                "misses": _misses(found),
                "status": found.status,
                "exact": found.claims(ids),
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


def _misses(found: Inversion) -> int:
    """Positions whose first proposal was refused."""
    return sum(position.tests > 2 for position in found.positions)  # the token and its likeliest rival


def _against_sipit(
    model: LanguageModel, layer: Layer, prompts: Sequence[tuple[int, ...]], limit: float
) -> dict[str, Any]:
    """Seconds a verified token of the three ways, on the same prompts."""
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
        found = [
            invert(model, States.from_tensor(states.at(i, layer), layer), layer, **options)[0]
            for i in range(len(prompts))
        ]
        parts = [_verified(model, states.at(i, layer), one, options) for i, one in enumerate(found)]
        verified[name] = sum(tokens for tokens, _ in parts)
        per_token[name] = sum(took for _, took in parts) / verified[name] if verified[name] else None
        statuses[name] = _statuses(found)
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
    found: Inversion,
    options: dict[str, Any],
) -> tuple[int, float]:
    """Verified tokens and the seconds they took; a part of a prompt is inverted again, for its time alone."""
    count = len(found.token_ids)
    if found.status != "not_recovered" or count == 0:
        return count, found.seconds if count else 0.0
    part = States.from_tensor(states[:count], found.layer)
    (again,) = invert(model, part, found.layer, **options)
    return (0, 0.0) if again.status == "not_recovered" else (count, again.seconds)


def _ratio(slow: float | None, fast: float | None) -> float | None:
    return None if slow is None or fast is None else slow / fast


def bench_throughput(
    model: LanguageModel,
    layers: LayerSpec = (15,),
    *,
    prose: int = 400,
    code: int = 300,
    random: int = 300,
    length: int = 64,
    rounds: int = 3,
    proposers: str | None = None,
    seed: int = 0,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Many prompts at once: seconds to invert them all, beside batched plain forward passes over them all.

    ``fraction_of_forward`` is plain seconds over ours, medians of the rounds; the proposer is built before
    them (``setup_seconds``). ``misses`` are positions whose first proposal was refused.
    """
    counts = {"default:prose": prose, "default:code": code, "random": random}
    if rounds < 1 or length < 1 or sum(counts.values()) < 1:
        raise OptionError("A benchmark needs rounds and prompts.", "Give numbers of at least 1.")
    chosen = parse_layers(layers, model.n_layers)
    prompts = _prompts(model, counts, length, seed)
    size = max(1, _PLAIN_BATCH_TOKENS // length)
    batches = [prompts[start : start + size] for start in range(0, len(prompts), size)]

    def plain() -> None:
        for batch in batches:
            plain_forward(model, batch)

    plain()  # warm
    forward = statistics.median(seconds(plain, model.device) for _ in range(rounds))
    table: dict[str, Any] = {}
    for done, layer in enumerate(chosen):
        progress(done, len(chosen), f"layers, now {layer}")
        states = capture(model, prompts, [layer], batch_tokens=_PLAIN_BATCH_TOKENS)
        found: list[Inversion] = []

        def work(states: States = states, layer: Layer = layer, found: list[Inversion] = found) -> None:
            found[:] = invert(model, states, layer, proposers=proposers)

        setup = _setup(work, model)
        took = statistics.median(seconds(work, model.device) for _ in range(rounds))
        table[str(layer)] = {
            "exact": sum(one.claims(ids) for one, ids in zip(found, prompts, strict=True)),
            "statuses": _statuses(found),
            "prompts": len(prompts),
            "seconds": took,
            "setup_seconds": setup,
            "ratio_to_forward": took / forward,
            "fraction_of_forward": forward / took,
            "misses": sum(map(_misses, found)),
            "worst_tests_per_position": max(position.tests for r in found for position in r.positions),
            "forward_tokens_per_token": sum(r.forward_tokens for r in found) / sum(map(len, prompts)),
            "proposer": found[0].proposer,
        }
    return {
        "layers": table,
        "forward_seconds": forward,
        "prompts": {"prose": prose, "code": code, "random": random, "length": length, "seed": seed},
        "model": model.identity.to_dict(),
        "hardware": hardware(model),
    }
