"""One of every result that a notebook shows, those of models measured; and the same full of others' texts."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import fields, is_dataclass, replace
from functools import cache
from typing import Any

import torch

import preimage
from preimage.geometry.result import Setting, SweptGeometry
from preimage.leak.result import FileKind, FilePrompt, LeakCell, PromptRead, Utility
from preimage.planning import WorkPlan
from preimage.planning.result import Stage
from preimage.reproduce.result import Row
from preimage.theory.result import Verdict
from preimage.training.result import Checkpoint
from support.tiny import VOCABULARY, build, tiny

IDS = [[7, 3, 9, 4], [5, 6, 7, 2], [1, 2, 3, 8], [9, 9, 1, 4]]


class Words:
    """A tokenizer of words: those of any text, by their letters."""

    bos_token_id = None

    def __call__(self, text: str, *, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [sum(map(ord, word)) % VOCABULARY for word in text.split()]}

    def decode(self, ids: Any, **_: Any) -> str:
        return "".join(f" w{int(token)}" for token in ids)


@cache
def spoken() -> preimage.LanguageModel:
    """A tiny model whose tokens are words."""
    return preimage.load(build("llama"), tokenizer=Words())


@cache
def results() -> dict[str, Any]:
    """By the name of the type, and what is special of it."""
    model = spoken()
    identity = model.identity.to_dict()
    states = preimage.capture(model, IDS, layers=[0, 2, "final"])
    prompts = preimage.gather(IDS, model)
    shape = preimage.measure_geometry(states, bits=(None, 4), subsets=0)
    moments = tuple(Checkpoint(step, None, 5.0 - step, "ab" * 32, 1e-15, shape) for step in (0, 2, 4))
    return {
        "Inversion": preimage.invert(model, states, layer=2)[0],
        "Inversion of noise": preimage.invert(model, torch.randn(3, model.d_model), layer=2)[0],
        "Inversion without text": preimage.invert(tiny("llama"), states, layer=2)[0],
        "CollisionAudit": preimage.find_collisions(model, prompts, layers=[0, 2], hard_bases=0),
        "ContinuationScan": preimage.scan_continuations(model, IDS[:2], layer=2),
        "Geometry": shape,
        "GeometrySweep": preimage.GeometrySweep(
            (SweptGeometry(Setting("tiny", 4, "float32", "uniform"), identity, shape),)
        ),
        "Trajectory": preimage.Trajectory({}, {"family": "gpt2"}, "ab", "cd", moments),
        "LeakAudit": _leak(identity),
        "FilesAudit": _files(identity),
        "TheoryReport": preimage.TheoryReport(
            "dichotomy",
            {"model": "tiny"},
            (Verdict("apart", "Some theta separates them.", True, 2.5, 0.1, "Other prompts."),
             Verdict("open", "Nothing is known.", None, None, None, "All of it.", descriptive=True)),
            {"pairs": [{"first": [1, 2], "second": [3]}]},
        ),
        "Reproduction": preimage.Reproduction(
            "collisions", "arXiv 2510.15511", "Smallest distances", "small", identity, {},
            (Row("layer 1", "0.3", "0.25", {"margin": 0.25}, "as published"),), ("Another model.",),
            ("Fewer prompts.",), {}, 3.2, {"date": "2026-11-19"},
        ),
        "WorkPlan": WorkPlan(
            "capture", "tiny", (Stage("capturing", 3, 0.5),), 4, 6, 100, 1000, 2, "cpu", 0.1, {}
        ),
        "PromptSet": prompts,
        "States": states,
        "LanguageModel": model,
    }  # fmt: skip


def _leak(identity: dict[str, Any]) -> preimage.LeakAudit:
    read = PromptRead("recovered", 4, 4, True, 4, 4, 1.0, 0.2, 9)
    lost = PromptRead("not_recovered", 4, 1, False, 0, 0, 0.3, 1.5, 90)
    utility = Utility(0.1, 0.02, 20.0, 19.0)
    cells = (
        LeakCell("float32", "states as they are", 2, (read, read), 0, "", 0.3, 1.0, None),
        LeakCell("noise:20", "noise of a fifth", 2, (read, lost), 1, "time", 0.0, 2.0, utility),
        LeakCell("float32", "states as they are", "final", (), 3, "time", 0.0, 0.0, None),
    )
    return preimage.LeakAudit(identity, 3, (4, 4), "list", "ab", {}, cells, 0.05, {2: (0.1, 0.2)}, ("a", "b"))


def _files(identity: dict[str, Any]) -> preimage.FilesAudit:
    found = FilePrompt(
        "bundle", "bundle", "inverted from layer 2", "recovered", (7, 3), None, 1.0, "It is.", 0.1
    )
    clear = replace(found, how="in the clear", status="clear", text="hello there")
    kind = FileKind("bundle", 1, 2, 1, "Hidden states.", (), ("bundle",))
    return preimage.FilesAudit(
        identity, ("here",), (kind,), (found, clear), 2, (("other.bin", "It is damaged."),), 1, 0.4
    )


def saying(value: Any, text: str) -> Any:
    """A result with every string in it exchanged for ``text`` but for keys and the layer "final"."""
    if isinstance(value, str):
        return value if value == "final" else text
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(saying(part, text) for part in value))
    if is_dataclass(value) and not isinstance(value, type):
        other = copy(value)  # made past its checks: a status is one of few words
        for one in fields(value):
            object.__setattr__(other, one.name, saying(getattr(value, one.name), text))
        return other
    if isinstance(value, Mapping):
        return {key: saying(part, text) for key, part in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(saying(part, text) for part in value)
    return value
