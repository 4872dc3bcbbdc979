"""Items about inversion: which method recovers what, and how long that takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from preimage.inversion import HardPromptSettings, Inversion, InvertOptions, invert
from preimage.layers import Layer
from preimage.models import LanguageModel
from preimage.models.rounded import ROUNDINGS, rounded_copy
from preimage.progress import Progress
from preimage.reproduce.options import Sizes
from preimage.reproduce.result import Measured, Row, spread
from preimage.reproduce.texts import layer_of, layers_of, mixed, of_kinds, some
from preimage.states import States, capture

Prompt = tuple[int, ...]


class _Method(NamedTuple):
    """A method of the inversion table: its options, what was published, and whether it is a slow one."""

    name: str
    options: InvertOptions
    published: str
    slow: bool = False


class _Runs(NamedTuple):
    """What a method did with some prompts."""

    results: list[Inversion]
    prompts: list[Prompt]

    @property
    def ended(self) -> list[bool]:
        """Which ended by themselves, and were not stopped by a limit."""
        return ["Stopped" not in one.reason for one in self.results]

    @property
    def seconds(self) -> list[float]:
        """Of those that ended."""
        return [one.seconds for one, ended in zip(self.results, self.ended, strict=True) if ended]

    @property
    def tokens_ended(self) -> int:
        """Tokens of the prompts that ended."""
        return sum(len(ids) for ids, ended in zip(self.prompts, self.ended, strict=True) if ended)

    @property
    def seconds_a_token(self) -> float | None:
        """Over the prompts that ended."""
        return sum(self.seconds) / self.tokens_ended if self.tokens_ended else None

    @property
    def exact(self) -> int:
        """Prompts claimed as they are."""
        return sum(one.claims(ids) for one, ids in zip(self.results, self.prompts, strict=True))

    @property
    def tokens_right(self) -> float:
        """The share of tokens read, of all prompts."""
        right = sum(
            a == b
            for one, ids in zip(self.results, self.prompts, strict=True)
            for a, b in zip(one.reading.token_ids, ids, strict=False)
        )
        return right / sum(map(len, self.prompts))

    @property
    def wrong(self) -> int:
        """Prompts called recovered that are others: there should be none."""
        return sum(
            one.status == "recovered" and one.token_ids != ids
            for one, ids in zip(self.results, self.prompts, strict=True)
        )

    def values(self) -> dict[str, float | None]:
        """The numbers behind a row."""
        return {
            "prompts": len(self.prompts), "tokens": sum(map(len, self.prompts)), "exact": self.exact,
            "ended": sum(self.ended), "tokens_right": self.tokens_right, "wrong": self.wrong,
            "seconds_a_token": self.seconds_a_token,
            "passes": sum(one.forward_tokens for one in self.results) / sum(map(len, self.prompts)),
            "tests": sum(one.tests for one in self.results) / sum(map(len, self.prompts)),
            "setup_seconds": self.results[0].setup_seconds if self.results else None,
        }  # fmt: skip

    def in_words(self) -> str:
        """Seconds a prompt, over those that ended, and how many were recovered."""
        time = spread(self.seconds, "s") or "none ended"
        count, length = len(self.prompts), max(map(len, self.prompts), default=0)
        left = "" if all(self.ended) else f", {sum(self.ended)} ended"
        return f"{time}; {self.exact} of {count} x {length} tokens exact{left}"

    def raw(self) -> list[dict[str, Any]]:
        """One row a prompt."""
        return [
            {"status": one.status, "seconds": one.seconds, "forward_tokens": one.forward_tokens,
             "tests": one.tests, "ended": ended, "exact": one.claims(ids), "tokens": len(ids),
             "proposer": one.proposer, "reason": one.reason}
            for one, ids, ended in zip(self.results, self.prompts, self.ended, strict=True)
        ]  # fmt: skip


def methods(model: LanguageModel, sizes: Sizes, progress: Progress) -> Measured:
    """Every method on the same prompts; the slow ones on the first of them, cut short, as ``sizes`` says."""
    layer, prompts = layer_of(model, sizes), mixed(model, sizes)
    slow = [ids[: sizes.slow_length] for ids in prompts[: sizes.slow]]
    rows, raw, seconds = list[Row](), dict[str, Any](), dict[str, float | None]()
    table = _methods(sizes)
    for done, method in enumerate(table):
        progress(done, len(table), f"methods, now {method.name}")
        runs = _run(model, layer, slow if method.slow else prompts, method.options)
        seconds[method.name] = runs.seconds_a_token
        rows.append(Row(method.name, method.published, runs.in_words(), runs.values(), _verdict(runs)))
        raw[method.name] = runs.raw()
    ours = seconds["fast (ours)"]
    for name in ("SIPIT, published cost", "SIPIT, cached", "BRUTEFORCE, published cost", "HARDPROMPTS"):
        theirs = seconds.get(name)
        ratio = None if theirs is None or not ours else theirs / ours
        text = "" if ratio is None else f"{ratio:,.0f} times as long a token"
        rows.append(Row(f"{name} beside ours", "", text, {"ratio": ratio}, "" if text else "none ended"))
    return rows, {"layer": layer, "methods": raw}


def _methods(sizes: Sizes) -> list[_Method]:
    steps = HardPromptSettings(steps=sizes.steps)
    limit = sizes.seconds
    return [
        _Method("fast (ours)", InvertOptions(), ""),
        _Method("vocabulary matching", InvertOptions(method="vocabulary-match", timeout=limit),
                "99.7 to 100 % of tokens (arXiv 2505.18332)"),
        _Method("nearest embedding", InvertOptions(method="nearest-embedding"), ""),
        _Method("logit lens", InvertOptions(method="logit-lens"), ""),
        _Method("SIPIT, cached", InvertOptions(method="sipit", timeout=limit), "", slow=True),
        _Method("SIPIT, published cost",
                InvertOptions(method="sipit", published_cost=True, patience=None, timeout=limit),
                "28.01 ± 35.87 s, accuracy 1.00 (GPT-2 small)", slow=True),
        _Method("BRUTEFORCE, cached", InvertOptions(method="brute-force", timeout=limit), "", slow=True),
        _Method("BRUTEFORCE, published cost",
                InvertOptions(method="brute-force", published_cost=True, timeout=limit),
                "3889.61 ± 691.17 s, accuracy 1.00 (GPT-2 small)", slow=True),
        _Method("HARDPROMPTS",
                InvertOptions(method="hard-prompts", hard_prompts=steps, timeout=limit),
                "6132.59 ± 104.61 s, accuracy 0.00 (GPT-2 small)", slow=True),
    ]  # fmt: skip


def kinds(model: LanguageModel, sizes: Sizes, progress: Progress) -> Measured:
    """Text a model knows, text it does not, and random tokens."""
    published = {
        "written by the model": "146.48 ± 91.52 s, 100 % (training text)",
        "unseen prose": "128.62 ± 83.40 s, 100 % (test text)",
        "random tokens": "106.87 ± 39.10 s, 100 %",
    }
    layer, rows, raw = layer_of(model, sizes), list[Row](), dict[str, Any]()
    every = of_kinds(model, sizes)
    for done, (kind, prompts) in enumerate(every.items()):
        progress(done, len(every), f"kinds of text, now {kind}")
        runs = _run(model, layer, prompts, InvertOptions())
        rows.append(Row(kind, published[kind], runs.in_words(), runs.values(), _verdict(runs)))
        raw[kind] = runs.raw()
    return rows, {"layer": layer, "kinds": raw}


def depth(model: LanguageModel, sizes: Sizes, progress: Progress) -> Measured:
    """The same prompts from every layer; the paper's figure is of GPT-2 small and SIPIT."""
    read_off = {1: "about 32 s (SIPIT, layer 1 of 12)", model.n_layers: "about 75 s (SIPIT, layer 12 of 12)"}
    read_off[(model.n_layers + 1) // 2] = "about 45 s (SIPIT, layer 6 of 12)"
    layers, prompts = layers_of(model, sizes), mixed(model, sizes)
    rows, raw = list[Row](), dict[str, Any]()
    for done, layer in enumerate(layers):
        progress(done, len(layers), f"layers, now {layer}")
        runs = _run(model, layer, prompts, InvertOptions())
        said = read_off.get(layer, "") if isinstance(layer, int) else ""
        rows.append(Row(f"layer {layer}", said, runs.in_words(), runs.values(), _verdict(runs)))
        raw[str(layer)] = runs.raw()
    return rows, {"layers": raw}


def vocabulary(model: LanguageModel, sizes: Sizes, progress: Progress) -> Measured:
    """Verifier tests a token, as a share of the vocabulary."""
    layer, prompts = layer_of(model, sizes), mixed(model, sizes)
    slow = [ids[: sizes.slow_length] for ids in prompts[: sizes.slow]]
    published = "0.21 % (Mistral-7B, 32k), 0.22 % (Llama-3.1-8B, 128k)"
    ways = {
        "SIPIT": (InvertOptions(method="sipit", patience=None, timeout=sizes.seconds), slow, published),
        "fast (ours)": (InvertOptions(), prompts, ""),
        "vocabulary matching": (InvertOptions(method="vocabulary-match"), prompts, ""),
    }
    rows, raw = list[Row](), dict[str, Any]()
    for done, (name, (options, some_prompts, said)) in enumerate(ways.items()):
        progress(done, len(ways), f"methods, now {name}")
        runs = _run(model, layer, some_prompts, options)
        share = runs.values()["tests"]
        part = None if share is None else share / model.vocab_size
        words = f"{100 * (part or 0):.3g} % of {model.vocab_size:,}; {runs.in_words()}"
        rows.append(Row(name, said, words, runs.values() | {"share_tried": part}, _verdict(runs)))
        raw[name] = runs.raw()
    return rows, {"layer": layer, "methods": raw}


def quantised(model: LanguageModel, sizes: Sizes, progress: Progress) -> Measured:
    """The same quantised model on both sides."""
    published = {"fp4": "111.78 s (Mistral-7B), 549.48 s (Llama-3.1-8B), 100 %"}
    layer, prompts = layer_of(model, sizes), list(some(model, sizes))
    rows, raw = list[Row](), dict[str, Any]()
    for done, kind in enumerate(("full precision", *ROUNDINGS)):
        progress(done, len(ROUNDINGS) + 1, f"weights, now {kind}")
        this = model if kind == "full precision" else rounded_copy(model, kind)
        runs = _run(this, layer, prompts, InvertOptions())
        rows.append(Row(kind, published.get(kind, ""), runs.in_words(), runs.values(), _verdict(runs)))
        raw[kind] = runs.raw()
    return rows, {"layer": layer, "weights": raw}


def _run(model: LanguageModel, layer: Layer, prompts: Sequence[Prompt], options: InvertOptions) -> _Runs:
    """Prompts inverted one after another, blind: each call has their states alone."""
    rows = list(prompts)
    if not rows:
        return _Runs([], [])
    states = capture(model, rows, [layer])
    blind = States.from_tensor([states.at(index, layer) for index in range(len(rows))], layer)
    return _Runs(invert(model, blind, layer, options=options), rows)


def _verdict(runs: _Runs) -> str:
    if runs.wrong:
        return f"{runs.wrong} wrong"
    if runs.prompts and runs.exact == len(runs.prompts):
        return "exact"
    return f"{100 * runs.tokens_right:.1f} % of tokens" if runs.prompts else "not run"
