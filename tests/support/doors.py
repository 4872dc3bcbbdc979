"""Every public door, tried with what users of Hugging Face have at hand; run as a program of its own.

The checks of annotations that the tests switch on would come before the words that people see.
Prints json: what was tried, and how it ended.
"""

from __future__ import annotations

import json
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers import BatchEncoding

import preimage
from preimage.errors import PreimageError
from preimage.reproduce import reproduce
from support.tiny import build

IDS = [7, 3, 9, 4]
RAW = build("llama")
MODEL = preimage.load(RAW)
ROWS = torch.tensor([IDS])
with torch.no_grad():
    OUTPUTS: Any = RAW(ROWS, output_hidden_states=True, use_cache=True)
STATES = preimage.capture(MODEL, [IDS, [5, 6]], layers=[1, "final"])

NO_MODELS = {
    "raw": RAW, "backbone": RAW.model, "name": "smollm2", "path": pathlib.Path("model"), "none": None,
    "class": type(RAW), "config": RAW.config, "number": 3, "other module": torch.nn.Linear(2, 2),
}  # fmt: skip
DOORS: dict[str, Callable[[Any], Any]] = {
    "invert": lambda m: preimage.invert(m, OUTPUTS, layer=1),
    "capture": lambda m: preimage.capture(m, [IDS], layers=1),
    "states_from": lambda m: preimage.states_from(OUTPUTS, m, 1),
    "noise_floor": lambda m: preimage.noise_floor(m, 1),
    "gather": lambda m: preimage.gather([[1, 2]], m),
    "find_collisions": lambda m: preimage.find_collisions(m, [IDS, [1, 2]], layers=1),
    "scan_continuations": lambda m: preimage.scan_continuations(m, [IDS]),
    "measure_geometry": lambda m: preimage.measure_geometry(STATES, model=m),
    "measure_leak": lambda m: preimage.measure_leak(m, [IDS], [1]),
    "train_lens": lambda m: preimage.train_lens(m, 1),
    "check_analyticity": lambda m: preimage.check_analyticity(m),
    "check_dichotomy": lambda m: preimage.check_dichotomy(m, [IDS, [1, 2]]),
    "distance_to_collision": lambda m: preimage.distance_to_collision(m, IDS, [1, 2], 1),
    "build_collision": lambda m: preimage.build_collision(m, IDS, [1, 2], 1),
    "reproduce": lambda m: reproduce(m, "collisions"),
    "require_made_by": lambda m: STATES.require_made_by(m),
}
PROMPTS = {
    "array": np.array(IDS), "rows": np.array([IDS]), "tensor": ROWS[0], "tensor of rows": ROWS,
    "tuple": tuple(IDS), "numpy numbers": list(np.array(IDS)), "tensor numbers": list(ROWS[0]),
    "bytes of ids": np.array(IDS, dtype=np.uint8), "arrays": [np.array(IDS)],
    "encoding": BatchEncoding({"input_ids": ROWS, "attention_mask": torch.ones_like(ROWS)}),
    "encoding of one": BatchEncoding({"input_ids": IDS, "attention_mask": [1] * 4}),
    "padded": BatchEncoding(
        {"input_ids": torch.tensor([[0, 0, *IDS]]), "attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1]])}
    ),
    "dictionary": {"input_ids": [IDS]},
}  # fmt: skip
FLAT = ("tuple", "numpy numbers", "tensor numbers")  # gather takes lists of prompts alone
NO_PROMPTS = {
    "none": None, "number": 5, "bytes": b"ab", "set": {1, 2}, "path": pathlib.Path("x.txt"),
    "outputs": OUTPUTS, "floats": np.array([1.0]), "one number": torch.tensor(3), "states": STATES,
    "truths": np.array([True]), "messages": [{"role": "user", "content": "hi"}],
}  # fmt: skip
HIDDEN = OUTPUTS.hidden_states
SEEN = {
    "outputs": OUTPUTS, "hidden_states": HIDDEN, "list": list(HIDDEN), "layer": HIDDEN[1],
    "array": HIDDEN[1].numpy(), "rows": HIDDEN[1][0].numpy(), "arrays": (HIDDEN[1][0].numpy(),),
    "cache": OUTPUTS.past_key_values, "dictionary": {"hidden_states": HIDDEN}, "states": STATES,
}  # fmt: skip
UNSEEN = {"name": "bundle", "none": None, "ids": IDS, "path": pathlib.Path("x"), "logits": RAW(ROWS)}


def tried() -> dict[str, Callable[[], Any]]:
    """What is tried, by its name; what ends with ``refused`` has to be."""
    given: dict[str, Callable[[], Any]] = {}
    for name, door in DOORS.items():
        for kind, model in NO_MODELS.items():
            if (name, kind) != ("measure_geometry", "none"):
                given[f"{name} {kind} refused"] = lambda door=door, model=model: door(model)
    for kind, one in PROMPTS.items():
        given[f"capture {kind}"] = lambda one=one: preimage.capture(MODEL, one, layers=1).token_ids
        if kind not in FLAT:
            given[f"gather {kind}"] = lambda one=one: preimage.gather(one, MODEL).ids
    for kind, one in NO_PROMPTS.items():
        given[f"capture {kind} refused"] = lambda one=one: preimage.capture(MODEL, one, layers=1)
        given[f"gather {kind} refused"] = lambda one=one: preimage.gather(one, MODEL)
    for kind, one in SEEN.items():
        given[f"invert {kind}"] = lambda one=one: [preimage.invert(MODEL, one, layer=1)[0].token_ids]
    for kind, one in UNSEEN.items():
        given[f"invert {kind} refused"] = lambda one=one: preimage.invert(MODEL, one, layer=1)
        given[f"open_states {kind} refused"] = lambda one=one: preimage.open_states(one)
        given[f"measure_geometry of {kind} refused"] = lambda one=one: preimage.measure_geometry(one)
    for kind in ("none", "class", "config", "number"):
        given[f"load {kind} refused"] = lambda kind=kind: preimage.load(NO_MODELS[kind])
    return given


def ended(call: Callable[[], Any]) -> str:
    """What came back, or what was said; anything else that was raised by its name."""
    try:
        return repr(call())
    except PreimageError as error:
        return f"refused: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    json.dump({name: ended(call) for name, call in tried().items()}, sys.stdout)
