"""Whether the theorems' first hypothesis holds: is every block real-analytic in its parameters?"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from preimage.collisions.structure import absolute_positions, linear_biases
from preimage.distances import same_rows
from preimage.models import LanguageModel
from preimage.prompts.tokens import window_bos
from preimage.results.theory import TheoryReport, Verdict
from preimage.theory.forward_code import ACTIVATION, CLIPPING, QUANTISED, ROUTING
from preimage.theory.parts import DROPOUT, NORM, OTHER, Part, parts

_STATIC = (
    "The walk is static: classes, attributes and the source of each forward, not what functions of other "
    "files and compiled kernels do. Arithmetic of finite precision is itself not analytic."
)
_STATEMENTS = {
    ACTIVATION: "no activation has a kink",
    ROUTING: "no routing chooses among experts",
    CLIPPING: "nothing is clipped",
    QUANTISED: "no weight is quantised",
    NORM: "every norm has eps > 0",
    DROPOUT: "no dropout acts",
    OTHER: "every module is known",
}
_WORDS = {True: "yes", False: "no", None: "unknown"}


@dataclass(frozen=True)
class _Found:
    path: str
    module: nn.Module
    part: Part


def check_analyticity(model: LanguageModel) -> TheoryReport:
    """Which modules are real-analytic in their parameters, which are not, and where.

    Everything that F^l runs is walked, the language model head is not. Beside it stands what decides which
    prompts must collide: positions, the tokenizer's BOS, equal embedding rows and sliding windows.
    """
    used = set(model.anatomy.backbone.modules())
    found = [
        _Found(path, module, part)
        for path, module in model.module.named_modules()
        if module in used
        for part in parts(module, path.rpartition(".")[2])
    ]
    found += _without_activation(model, found)
    broken = [one for one in found if one.part.analytic is not True]
    overall = _verdict("every block is real-analytic in its parameters", found)
    kinds = [
        _verdict(statement, [one for one in found if one.part.kind == kind])
        for kind, statement in _STATEMENTS.items()
    ]
    with _evaluating(model.module):
        groups = _duplicates(model)
        structure = _structure(model, groups)
    return TheoryReport(
        check="analyticity",
        subject={
            "model": model.name,
            "architecture": type(model.module).__name__,
            "blocks": model.n_layers,
            "modules": len({one.path for one in found}),
        },
        verdicts=(overall, *kinds),
        tables={
            "modules": _rows(found),
            "breaks": _rows(broken),
            "structure": structure,
            "equal_embeddings": [{"tokens": group} for group in groups],
        },
    )


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


def _verdict(statement: str, found: Sequence[_Found]) -> Verdict:
    """False where a part breaks the statement, open where one is not known."""
    breaks = sum(one.part.analytic is False for one in found)
    undecided = any(one.part.analytic is None for one in found)
    holds = False if breaks else None if undecided else True
    return Verdict(statement, holds, float(breaks), 0.0, _STATIC)


def _without_activation(model: LanguageModel, found: Sequence[_Found]) -> list[_Found]:
    """A model in which no activation was found has one somewhere that was not seen."""
    if any(one.part.kind in (ACTIVATION, CLIPPING) for one in found):
        return []
    part = Part(ACTIVATION, None, "no activation was found among the modules")
    return [_Found("", model.module, part)]


def _rows(found: Sequence[_Found]) -> list[dict[str, Any]]:
    """One row for the same part at the same place of several blocks."""
    groups: dict[tuple[str, str, Part], list[str]] = {}
    for one in found:
        starred = re.sub(r"\.\d+(?=\.|$)", ".*", one.path)
        groups.setdefault((starred, type(one.module).__name__, one.part), []).append(one.path)
    return [
        {
            "path": starred,
            "class": name,
            "kind": part.kind,
            "analytic": _WORDS[part.analytic],
            "reason": part.reason,
            "count": len(paths),
            "first": paths[0],
        }
        for (starred, name, part), paths in groups.items()
    ]


def _structure(model: LanguageModel, groups: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    """What decides which prompts must collide."""
    extra = sum(map(len, groups)) - len(groups)
    return [
        {"property": "positions", "value": positional_scheme(model)},
        {"property": "tokenizer puts BOS first", "value": _bos_habit(model)},
        {"property": "embedding rows equal to an earlier one", "value": str(extra)},
        {"property": "sliding windows", "value": _windows(model)},
    ]


def positional_scheme(model: LanguageModel) -> str:
    """How a model knows where a token stands, "none detected" where nothing says so."""
    found, inside = [], list(model.anatomy.backbone.modules())
    if absolute_positions(model):
        learned = any(
            isinstance(part, nn.Embedding) and part is not model.anatomy.embedding for part in inside
        )
        found.append("learned" if learned else "absolute")
    if any("rotary" in type(part).__name__.lower() or getattr(part, "rotary_dim", None) for part in inside):
        found.append("rotary")
    if linear_biases(model):
        found.append("ALiBi")
    return " and ".join(found) or "none detected"


def _bos_habit(model: LanguageModel) -> str:
    if model.tokenizer is None:
        return "unknown: no tokenizer"
    return "no" if window_bos(model.tokenizer, None) is None else "yes"


def _duplicates(model: LanguageModel) -> list[list[int]]:
    """Tokens with bit-identical embeddings, group by group."""
    groups: dict[int, list[int]] = {}
    for token, first in enumerate(same_rows(model.embedding_table).tolist()):
        groups.setdefault(first, []).append(token)
    return [group for group in groups.values() if len(group) > 1]


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
