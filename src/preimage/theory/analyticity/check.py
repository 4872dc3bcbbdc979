"""Whether the theorems' first hypothesis holds: is every block real-analytic in its parameters?"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from preimage.collisions import absolute_positions, linear_biases
from preimage.distances import equal_row_groups, same_rows
from preimage.layers import all_layers
from preimage.models import LanguageModel, require_model
from preimage.prompts import window_bos
from preimage.theory.analyticity.branches import other_lengths
from preimage.theory.analyticity.marks import Event, Trace
from preimage.theory.analyticity.rules import OTHER, QUANTISED, STATEMENTS, Break
from preimage.theory.analyticity.watcher import watching
from preimage.theory.result import TheoryReport, Verdict

_NOT_SHOWN = (
    "Passes over one token and over {length} were followed; a branch that other lengths or ids take was not "
    "seen. That a kink is reached by some parameters. Arithmetic of finite precision is itself not analytic."
)
_ALL = ("analyticity.every_block", "every block is real-analytic in its parameters")
_WORDS = {True: "yes", False: "no", None: "unknown"}
_LENGTH = 16  # tokens of the longer pass
_QUANTISERS = re.compile(
    r"[48]bit|quant|awq|wqlinear|gptq|hqq|fp8|float8|mxfp4|bitlinear|aqlm|eetq|spqr|vptq|higgs", re.IGNORECASE
)
_GRIDS = re.compile(r"bitsandbytes|torchao|hqq|quant", re.IGNORECASE)  # where such tensors come from


def check_analyticity(model: LanguageModel) -> TheoryReport:
    """Which modules are real-analytic in their parameters, which are not, and where.

    Two passes of the very module that was given are followed from the parameters to every F^l, operation by
    operation: whatever a hook, a replaced part or a function of somebody's own does is seen as it runs. The
    language model head is not run. Beside it stands what decides which prompts must collide: positions, the
    tokenizer's BOS, equal embedding rows and sliding windows. Cost: two passes, each operation looked at.

    >>> from preimage.models import new_model
    >>> model = new_model("llama", (8, 1, 2), vocabulary=16, max_length=8, device="cpu")
    >>> check_analyticity(model).holds
    True
    """
    require_model(model)
    length = _longer(model)
    trace, events = _followed(model)
    not_shown = _NOT_SHOWN.format(length=length)
    unread = any(one.broken.kind == OTHER for one in events)
    verdicts = [_verdict(*_ALL, events, False, not_shown)]
    for kind, statement in STATEMENTS.items():
        broken = [one for one in events if one.broken.kind == kind]
        verdicts.append(_verdict(f"analyticity.{kind}", statement, broken, unread, not_shown))
    with _evaluating(model.module):
        groups = list(equal_row_groups(same_rows(model.embedding_table)).values())
        structure = _structure(model, groups)
    subject = {
        "model": model.name,
        "architecture": type(model.module).__name__,
        "blocks": model.n_layers,
        "modules": len(trace.operations),
        "tokens": length,
    }
    tables = {
        "modules": _modules(trace, events),
        "breaks": _breaks(events),
        "structure": structure,
        "equal_embeddings": [{"tokens": group} for group in groups],
    }
    return TheoryReport("analyticity", subject, tuple(verdicts), tables)


def is_analytic(model: LanguageModel) -> bool | None:
    """The first verdict of ``check_analyticity`` alone."""
    return _verdict(*_ALL, _followed(model)[1], False, "").holds


def _longer(model: LanguageModel) -> int:
    return min(_LENGTH, model.max_length or _LENGTH)


def _followed(model: LanguageModel) -> tuple[Trace, list[Event]]:
    """Both passes, and everything that is not analytic in them, in the order of the modules' paths."""
    trace = _trace(model, sorted({1, _longer(model)}))
    events = trace.reached | set(_quantised_modules(model))
    return trace, sorted(events, key=lambda one: (one.path, one.broken.reason))


def _trace(model: LanguageModel, lengths: Sequence[int]) -> Trace:
    """Passes over prompts of these lengths; one that fails is an open question."""
    trace = Trace()
    layers = all_layers(model.n_layers)
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices):  # a dropout draws
        for length in lengths:
            ids = (torch.arange(length, device=model.device) % model.vocab_size)[None]
            try:
                with watching(model.module, trace, [ids]) as reach:
                    for state in model.run(ids, layers=layers).values():
                        reach(state)
            except Exception as error:  # of any kind: somebody's own code ran
                reason = f"a pass over {length} tokens failed: {type(error).__name__}: {error}"
                trace.reached.add(Event("", type(model.module).__name__, Break(OTHER, None, reason)))
    for code, (path, owner) in trace.places.items():
        for name in other_lengths(code, trace.lines[code]):
            reason = f"{name} may run at other lengths (in {code.co_qualname})"
            trace.reached.add(Event(path, owner, Break(OTHER, None, reason)))
    return trace


def _quantised_modules(model: LanguageModel) -> Iterator[Event]:
    """Weights on a grid, recognised by the module's class or by the tensors' type."""
    used = set(model.anatomy.backbone.modules())
    for path, module in model.module.named_modules():
        kind, grids = type(module), []
        if module not in used:
            continue
        if not kind.__module__.startswith("torch.nn.modules") and _QUANTISERS.search(kind.__name__):
            grids.append(kind.__name__)
        for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            narrow = not tensor.is_floating_point() or tensor.dtype.itemsize < 2
            if _GRIDS.search(type(tensor).__module__) or (narrow and isinstance(tensor, nn.Parameter)):
                grids.append(f"{name} is a {type(tensor).__name__} of {tensor.dtype}")
        if grids:
            reason = f"{', '.join(grids)}: weights on a grid have no density"
            yield Event(path, kind.__name__, Break(QUANTISED, False, reason))


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """Eval mode for a while; each part goes back to the mode it was in."""
    training = [part for part in module.modules() if part.training]
    module.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True


def _verdict(name: str, statement: str, events: Sequence[Event], unread: bool, not_shown: str) -> Verdict:
    """False where an event breaks the statement, open where one is not known or something was not read."""
    breaks = sum(one.broken.analytic is False for one in events)
    holds = False if breaks else None if events or unread else True
    return Verdict(name, statement, holds, float(breaks), 0.0, not_shown)


def _modules(trace: Trace, events: Sequence[Event]) -> list[dict[str, Any]]:
    """What each module computed itself from its parameters."""
    answers: dict[str, bool | None] = {}
    for one in events:
        answers[one.path] = False if answers.get(one.path) is False else one.broken.analytic
    rows = (
        (path, trace.owners[path], ", ".join(sorted(names)), _WORDS[answers.get(path, True)])
        for path, names in trace.operations.items()
    )
    return _by_place(("class", "operations", "analytic"), rows)


def _breaks(events: Sequence[Event]) -> list[dict[str, Any]]:
    """What is not analytic, and where."""
    rows = ((e.path, e.owner, e.broken.kind, _WORDS[e.broken.analytic], e.broken.reason) for e in events)
    return _by_place(("class", "kind", "analytic", "reason"), rows)


def _by_place(columns: Sequence[str], rows: Iterable[tuple[str, ...]]) -> list[dict[str, Any]]:
    """A path and its columns; what is the same at the same place of several blocks is one row."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for path, *values in rows:
        starred = re.sub(r"\.\d+(?=\.|$)", ".*", path)
        groups.setdefault((starred, *values), []).append(path)
    return [
        {**dict(zip(("path", *columns), key, strict=True)), "count": len(paths), "first": paths[0]}
        for key, paths in groups.items()
    ]


def _structure(model: LanguageModel, groups: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    """What decides which prompts must collide; ``groups``: tokens with bit-identical embeddings."""
    habit = "unknown: no tokenizer"
    if model.tokenizer is not None:
        habit = "no" if window_bos(model.tokenizer, None) is None else "yes"
    values = {
        "positions": positional_scheme(model),
        "tokenizer puts BOS first": habit,
        "embedding rows equal to an earlier one": str(sum(map(len, groups)) - len(groups)),
        "sliding windows": _windows(model),
    }
    return [{"property": name, "value": value} for name, value in values.items()]


def positional_scheme(model: LanguageModel) -> str:
    """How a model knows where a token stands, "none detected" where nothing says so."""
    schemes, inside = [], list(model.anatomy.backbone.modules())
    if absolute_positions(model):
        others = (part for part in inside if part is not model.anatomy.embedding)
        learned = any(isinstance(part, nn.Embedding) for part in others)
        schemes.append("learned" if learned else "absolute")
    if any("rotary" in type(part).__name__.lower() or getattr(part, "rotary_dim", None) for part in inside):
        schemes.append("rotary")
    if linear_biases(model):
        schemes.append("ALiBi")
    return " and ".join(schemes) or "none detected"


def _windows(model: LanguageModel) -> str:
    """The windows by what a state can see; receptive fields stop at the first block without one."""
    fields = [model.receptive_field(layer) for layer in range(1, model.n_layers + 1)]
    config = model.module.config.get_text_config(decoder=True)  # type: ignore[union-attr,operator]
    kinds = getattr(config, "layer_types", None) or []
    sliding = [kind for kind in kinds if kind == "sliding_attention"]
    seen = sum(field is not None for field in fields)
    if not sliding and not seen:
        return "none"
    width = getattr(config, "sliding_window", None)
    return f"{width} tokens in {len(sliding) or seen} of {model.n_layers} blocks, the first {seen} among them"
