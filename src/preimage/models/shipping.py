"""A model by what another process finds it by, and the same model there: same weights, or refused."""

from __future__ import annotations

import os
from typing import Any

from preimage.errors import ModelError, OptionError
from preimage.models.aliases import ALIASES
from preimage.models.identity import alterations
from preimage.models.language_model import LanguageModel
from preimage.models.loading import load
from preimage.models.offloaded import offloaded

_loaded: dict[str, LanguageModel] = {}  # the one model this process works with for others


def told_model(model: LanguageModel) -> dict[str, Any]:
    """What a worker needs to load the same model, in plain json types.

    A model that was never in files, was changed in memory, or is spread over devices cannot be told.
    """
    files = model.files
    if files is None:
        raise OptionError(
            f"{model.name} is in the memory of this process alone; workers cannot load it.",
            "Save it and load it by its folder, or work without a cluster.",
        )
    if alterations(model.module):
        raise OptionError(
            f"{model.name} has hooks or replaced parts, which its files do not hold.",
            "Remove them, or work without a cluster.",
        )
    if offloaded(model.module) or len({str(weight.device) for weight in model.module.parameters()}) > 1:
        raise OptionError(
            f"{model.name} is spread over several devices.", "Give each worker a device that holds it whole."
        )
    by_name = files.name in ALIASES or not os.path.exists(files.name)
    return {
        "name": files.name if by_name else str(files.path.resolve()),
        "called": model.name,
        "revision": None if files.name in ALIASES else files.revision if by_name else None,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": model.device.type,
        "weight_hash": model.weight_hash,
    }


def model_as_told(told: dict[str, Any]) -> LanguageModel:
    """The model, loaded once in this process; refused where its weights are not those that were meant."""
    meant = told["weight_hash"]
    if meant not in _loaded:
        _loaded.clear()  # before another comes: a worker holds one
        model = load(told["name"], dtype=told["dtype"], device=told["device"], revision=told["revision"])
        if model.weight_hash != meant:
            raise ModelError(
                f"{told['name']} has other weights on a worker: {model.weight_hash[:12]}, not {meant[:12]}.",
                "Put the same files there, or give a folder on a shared disk.",
            )
        model.name = told["called"]
        _loaded[meant] = model
    return _loaded[meant]
