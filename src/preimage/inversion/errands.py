"""What workers do for an inversion: prompts, whose states come with them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from preimage.errors import OptionError
from preimage.inversion.baselines.settings import HardPromptSettings, VocabularyMatchSettings
from preimage.inversion.engine.verifier import Verifier
from preimage.inversion.inverter import Inverter
from preimage.inversion.options import InvertOptions
from preimage.inversion.preparing import Prepared
from preimage.models import LanguageModel, model_as_told, told_model
from preimage.observations import Observation
from preimage.progress import silent
from preimage.states import States, adopt_noise, group_by_length, noise_of, told_noise
from preimage.states.layout import Layout, tensor_name
from preimage.states.states import DTYPES
from preimage.storage import Errand, decode
from preimage.storage.elsewhere import Group
from preimage.storage.shelf import Shelf
from preimage.storage.tensor_file import pack, unpack


class ReceivedStore:
    """States of those prompts alone that are worked on now, in the places all of them have."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._rows: dict[tuple[str, int], Tensor] = {}

    def receive(self, states: dict[str, Tensor]) -> None:
        """States by the number of their prompt; those of before are forgotten."""
        (layer,) = self._layout.layers
        self._rows.clear()
        for prompt, rows in states.items():
            group, row = self._layout.place(int(prompt))
            self._rows[tensor_name(layer, group), row] = rows

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows start..stop of a named tensor."""
        return torch.stack([self._rows[name, row] for row in range(start, stop)])


class InvertJob:
    """Inverts prompts whose states it is given."""

    NAME = "preimage.inversion.errands:InvertJob"

    def __init__(self, inverter: Inverter, store: ReceivedStore) -> None:
        self._inverter, self._store = inverter, store

    @classmethod
    def errand(cls, model: LanguageModel, prepared: Prepared, options: InvertOptions) -> Errand:
        """What workers are told of an inversion that is prepared."""
        states, verifier = prepared.states, prepared.verifier
        if any(not isinstance(one, str) for one in options.chosen_proposers):
            raise OptionError("Proposers of one's own cannot be told to workers.", "Work without a cluster.")
        layer = verifier.layer
        spec = {
            "model": told_model(model),
            "noise": told_noise(model, (verifier.tap,)),
            "options": _told(options, prepared.known),
            "observation": states.observation.to_dict(),
            "found_out": prepared.found_out,
            "layer": layer,
            "lengths": list(states.lengths),
            "positions": states.positions,
            "width": states.d_model,
            "dtype": str(states.dtype).removeprefix("torch."),
        }

        def inputs(group: Group) -> bytes:
            return pack({key: states.at(int(key), layer) for key in group})

        return Errand(cls.NAME, spec, inputs=inputs)

    @classmethod
    def made(cls, spec: dict[str, Any], attached: bytes, shelf: Shelf) -> InvertJob:
        """One that works on this machine's own copy of the model."""
        began = time.perf_counter()
        model = model_as_told(spec["model"])
        adopt_noise(model, spec["noise"])
        observation: Observation = decode(Observation, spec["observation"])
        options: InvertOptions = _as_told(spec["options"])
        layout = Layout(group_by_length(spec["lengths"]), (spec["layer"],), spec["positions"], spec["width"])
        store = ReceivedStore(layout)
        states = States(
            layout, store, token_ids=None, model=None, noise_floor={}, dtype=DTYPES[spec["dtype"]],
            observation=observation,
        )  # fmt: skip
        tap = observation.tap(spec["layer"], model.n_layers)
        noise = noise_of(model, (tap,))[tap]
        verifier = Verifier(model, tap, noise=noise, tolerance=options.tolerance, observation=observation)
        prepared = Prepared(states, verifier, tuple(options.prefix), spec["found_out"])  # type: ignore[arg-type]
        inverter = Inverter(model, prepared, options)
        inverter.batches(list(range(len(states))))
        inverter.setup_seconds = time.perf_counter() - began
        return cls(inverter, store)

    def do(self, keys: Sequence[str], inputs: bytes) -> list[Any]:
        """Prompts by their numbers."""
        self._store.receive(unpack(inputs))
        return [one.to_dict() for one in self._inverter.invert(tuple(map(int, keys)), silent)]


def _told(options: InvertOptions, known: tuple[int, ...]) -> dict[str, Any]:
    """Options in plain json types, of which a worker makes the same; what was seen is told beside them."""
    told = {field.name: getattr(options, field.name) for field in fields(options)}
    chosen = options.proposers
    return told | {
        "observe": None,
        "prefix": list(known),
        "proposers": None if chosen is None else ",".join(map(str, options.chosen_proposers)),
        "lens": None if options.lens is None else str(Path(options.lens).resolve()),
        "hard_prompts": asdict(options.hard_prompts),
        "vocabulary_match": asdict(options.vocabulary_match),
    }


def _as_told(told: dict[str, Any]) -> InvertOptions:
    """The inverse of :func:`_told`."""
    settings = {
        "hard_prompts": HardPromptSettings(**told["hard_prompts"]),
        "vocabulary_match": VocabularyMatchSettings(**told["vocabulary_match"]),
    }
    return InvertOptions(**(told | settings))
