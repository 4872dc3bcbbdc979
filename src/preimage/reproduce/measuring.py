"""Items about geometry, training and theory: margins, co-Lipschitz constants, and what is stated of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from preimage.geometry import GeometryOptions, measure_model
from preimage.geometry.result import Geometry, LayerGeometry
from preimage.models import LanguageModel, new_model
from preimage.progress import Progress
from preimage.reproduce.options import Sizes
from preimage.reproduce.result import Measured, Row
from preimage.reproduce.texts import layers_of, some
from preimage.theory import verify
from preimage.training import TrajectoryOptions, train_trajectory

_FULL = GeometryOptions(bits=(None,), subsets=0)
_BITS = GeometryOptions(bits=(None, 8, 4), subsets=0)
_UNTRAINED = ("gpt2", "llama")
_WIDTHS = ("tiny", "small")
_STEADY = 0.5  # a normalised metric that changes by less than this over the second half of a training


def margin(model: LanguageModel, sizes: Sizes, progress: Progress) -> Measured:
    """How the margin goes with anisotropy and with intrinsic dimension, over the layers of one model."""
    found = _geometry(model, sizes, progress, _FULL)
    blocks = [one for layer, one in found.layers.items() if layer != 0]
    rows = []
    for name, published, values in (
        ("anisotropy", 0.72, [one.anisotropy for one in blocks]),
        ("intrinsic dimension (TwoNN)", -0.60, [one.intrinsic_dimension for one in blocks]),
    ):
        kept = [(one.margin, value) for one, value in zip(blocks, values, strict=True) if value is not None]
        r = pearson([a for a, _ in kept], [b for _, b in kept])
        same = r is not None and r * published > 0
        rows.append(
            Row(
                f"Pearson r of margin and {name}", f"{published:+.2f} (GPT-2 small)",
                "too few layers" if r is None else f"{r:+.2f} over {len(kept)} layers", {"r": r},
                "" if r is None else "same sign" if same else "other sign",
            )
        )  # fmt: skip
    return rows, {"geometry": found.to_dict()}


def layers(model: LanguageModel, sizes: Sizes, progress: Progress) -> Measured:
    """Raw norm, margin and co-Lipschitz constant, layer by layer, and whether they follow the norm."""
    found = _geometry(model, sizes, progress, _FULL)
    rows = [
        Row(
            f"layer {layer}", "",
            f"norm {one.mean_norm:.4g}, margin {one.margin:.4g}, co-Lipschitz {one.colipschitz:.4g}",
            _values(one),
        )
        for layer, one in found.layers.items()
    ]  # fmt: skip
    blocks = [one for layer, one in found.layers.items() if layer not in (0, "final")]
    for name in ("margin", "colipschitz"):
        pairs = [(one.mean_norm, float(getattr(one, name))) for one in blocks if getattr(one, name) > 0]
        r = pearson([math.log(a) for a, _ in pairs], [math.log(b) for _, b in pairs])
        rows.append(
            Row(
                f"{name} with the norm", "raw values follow norm growth",
                "too few layers" if r is None else f"r = {r:+.2f} of the logarithms", {"r": r},
                "" if r is None else "follows" if r > 0.5 else "does not follow",
            )
        )  # fmt: skip
    return rows, {"geometry": found.to_dict()}


def lengths(model: LanguageModel, sizes: Sizes, progress: Progress) -> Measured:
    """Normalised values of the last layer over lengths that double, at equally many prompts."""
    longest = sizes.length if model.max_length is None else min(sizes.length, model.max_length)
    wanted = sorted({max(2, longest // 2**part) for part in range(4)})
    sets = {length: some(model, sizes, length=length) for length in wanted}
    fewest = min(map(len, sets.values()))
    rows, raw, at_length = list[Row](), dict[str, Any](), list[LayerGeometry]()
    for done, (length, ids) in enumerate(sets.items()):
        progress(done, len(sets), f"lengths, now {length}")
        layer = layers_of(model, sizes)[-1]
        found = measure_model(model, replace(ids, ids=ids.ids[:fewest]), [layer], options=_FULL)
        one = found.layers[layer]
        at_length.append(one)
        rows.append(Row(f"{length} tokens", "", _normalised(one), _values(one)))
        raw[str(length)] = found.to_dict()
    first, last = at_length[0], at_length[-1]
    for name, words, said in (
        ("normalised_colipschitz_quantile", "normalised co-Lipschitz", "longer contexts lower it"),
        ("length_colipschitz_quantile", "the same, distance over length", ""),
    ):
        before, after = getattr(first, name), getattr(last, name)
        ratio = after / before if before else None
        rows.append(
            Row(
                f"{words}, longest over shortest", said, "" if ratio is None else f"{ratio:.3g}",
                {"ratio": ratio},
                "" if ratio is None else "lower" if ratio < 1 else "not lower",
            )
        )  # fmt: skip
    return rows, {"lengths": raw}


def families(model: LanguageModel, sizes: Sizes, progress: Progress) -> Measured:
    """The model beside untrained ones of two families and sizes, on as many prompts."""
    rows, raw = list[Row](), dict[str, Any]()
    ids = some(model, sizes)
    names = [model.name, *(f"{family}, {size}, untrained" for family in _UNTRAINED for size in _WIDTHS)]
    for done, name in enumerate(names):
        progress(done, len(names), f"models, now {name}")
        this = model
        if done:
            family, size = name.split(", ")[:2]
            longest = max(map(len, ids))
            this = new_model(
                family, size, vocabulary=model.vocab_size, max_length=longest, seed=sizes.seed,
                device=model.device,
            )  # fmt: skip
        found = measure_model(this, ids, "all", options=_FULL)
        blocks = [one for layer, one in found.layers.items() if layer not in (0, "final")]
        least, most = (pick(one.normalised_margin_quantile for one in blocks) for pick in (min, max))
        values: dict[str, float | None] = {"least": least, "most": most, "layers": len(blocks)}
        rows.append(Row(name, "", f"normalised margin {least:.3g} to {most:.3g} over layers", values))
        raw[name] = found.to_dict()
    return rows, {"models": raw}


def quantised(model: LanguageModel, sizes: Sizes, progress: Progress) -> Measured:
    """States stored in 8 and 4 bits: collisions, and the normalised values that are left."""
    found = _geometry(model, sizes, progress, _BITS)
    published = {
        "full precision": "no collision",
        "8 bits": "no collision",
        "4 bits": "a few collisions, mostly deep",
    }
    rows, middle = [], (model.n_layers + 1) // 2
    for name, by_layer in found.sets.items():
        blocks = {layer: one for layer, one in by_layer.items() if layer != 0}
        total = sum(one.collisions for one in blocks.values())
        deep = sum(one.collisions for layer, one in blocks.items() if layer == "final" or int(layer) > middle)
        lost = [one.normalised_margin_quantile for one in blocks.values()]
        values: dict[str, float | None] = {"collisions": total, "deep": deep, "least_margin": min(lost)}
        words = f"{total} pairs over {len(blocks)} layers, {deep} of them above the middle; "
        words += f"normalised margin at least {min(lost):.3g}"
        verdict = "no collision" if not total else f"{deep / total:.0%} deep"
        rows.append(Row(name, published[name], words, values, verdict))
    return rows, {"geometry": found.to_dict()}


def near(model: LanguageModel, sizes: Sizes, progress: Progress) -> Measured:
    """Shares of pairs nearer than a threshold, by layer: full precision and 4 bits."""
    found = _geometry(model, sizes, progress, GeometryOptions(bits=(None, 4), subsets=0))
    rows = []
    for name, by_layer in found.sets.items():
        for eps in map(str, found.options["eps"]):
            shares = {
                layer: _share(one.near_collisions, eps) for layer, one in by_layer.items() if layer != 0
            }
            some_layers = [str(layer) for layer, share in shares.items() if share > 0]
            said = ""
            if name == "full precision":
                said = "early layers only" if float(eps) == 1e-2 else "none"
            worst = max(shares.values())
            where = f"layers {_ranges(some_layers)}, at most {worst:.3g}" if some_layers else "none"
            values: dict[str, float | None] = {"worst": worst, "layers": len(some_layers)}
            rows.append(Row(f"{name}, closer than {eps}", said, where, values))
    return rows, {"geometry": found.to_dict()}


def training(model: LanguageModel, sizes: Sizes, progress: Progress) -> Measured:
    """A small GPT-2 from scratch, measured as it learns."""
    options = TrajectoryOptions(steps=sizes.slow, probes=sizes.count, length=sizes.length, seed=sizes.seed)
    found = train_trajectory(options, device=model.device, progress=progress)
    rows = []
    for one in found.checkpoints:
        layer, value = one.smallest("normalised_margin_quantile")
        words = f"normalised margin {value:.3g} (layer {layer}), {one.collisions} collisions, held-out loss "
        values: dict[str, float | None] = {
            "margin": value, "collisions": one.collisions, "held_out_loss": one.held_out_loss,
        }  # fmt: skip
        rows.append(Row(f"step {one.step}", "", f"{words}{one.held_out_loss:.3f}", values))
    for name in ("normalised_margin_quantile", "normalised_colipschitz_quantile"):
        change = found.drift(name).second_half
        words = "it was 0" if change is None else f"{change:+.1%} over the second half"
        steady = "" if change is None else "stable" if abs(change) < _STEADY else "not stable"
        title = name.replace("_quantile", "").replace("_", " ").replace("colipschitz", "co-Lipschitz")
        rows.append(Row(title, "normalised metrics stay stable", words, {"change": change}, steady))
    return rows, {"trajectory": found.to_dict()}


def theory(_: LanguageModel, sizes: Sizes, progress: Progress) -> Measured:
    """Every statement that software can check, on small models in float64."""
    reports = verify(seed=sizes.seed, progress=progress)
    rows = []
    for report in reports:
        for verdict in report.verdicts:
            value = "" if verdict.value is None else f"{verdict.value:.3g}"
            bound = "" if verdict.bound is None else f"bound {verdict.bound:.3g}"
            judged = {True: "holds", False: "does not hold", None: "not decided"}[verdict.holds]
            values: dict[str, float | None] = {"value": verdict.value, "bound": verdict.bound}
            what = f"{report.check}, {report.subject.get('architecture', '')}: {verdict.statement}"
            rows.append(Row(what, "stated", ", ".join(filter(None, (value, bound))), values, judged))
    return rows, {"reports": [report.to_dict() for report in reports]}


def pearson(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Pearson's correlation; None for fewer than three, or where one does not vary.

    >>> round(pearson([1.0, 2.0, 3.0], [2.0, 4.0, 6.0]), 9)
    1.0
    """
    if len(first) < 3:
        return None
    means = [math.fsum(values) / len(values) for values in (first, second)]
    away = [[value - mean for value in values] for values, mean in zip((first, second), means, strict=True)]
    spreads = [math.sqrt(math.fsum(one * one for one in values)) for values in away]
    if not all(spreads):
        return None
    return math.fsum(a * b for a, b in zip(*away, strict=True)) / (spreads[0] * spreads[1])


def _geometry(model: LanguageModel, sizes: Sizes, progress: Progress, options: GeometryOptions) -> Geometry:
    wanted = layers_of(model, sizes)
    return measure_model(model, some(model, sizes), wanted, options=options, progress=progress)


def _normalised(one: LayerGeometry) -> str:
    margin, ratio = one.normalised_margin_quantile, one.normalised_colipschitz_quantile
    return f"normalised margin {margin:.3g}, co-Lipschitz {ratio:.3g}"


def _values(one: LayerGeometry) -> dict[str, float | None]:
    names = ("mean_norm", "margin", "margin_quantile", "normalised_margin_quantile", "colipschitz",
             "colipschitz_quantile", "normalised_colipschitz_quantile", "length_colipschitz_quantile",
             "anisotropy", "intrinsic_dimension")  # fmt: skip
    return {name: getattr(one, name) for name in names}


def _share(shares: dict[str, float], eps: str) -> float:
    return next(share for name, share in shares.items() if float(name) == float(eps))


def _ranges(names: Iterable[str]) -> str:
    """Numbers in a row written as a range.

    >>> _ranges(["1", "2", "3", "7", "final"])
    '1-3, 7, final'
    """
    runs: list[list[str]] = []
    for name in names:
        if runs and name.isdecimal() and runs[-1][-1].isdecimal() and int(name) == int(runs[-1][-1]) + 1:
            runs[-1].append(name)
        else:
            runs.append([name])
    return ", ".join(run[0] if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
