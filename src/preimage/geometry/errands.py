"""What workers do for a measurement: layers, on states that are on a shelf."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from preimage.errors import OptionError
from preimage.geometry.measuring import MeasuredLayers
from preimage.geometry.options import GeometryOptions
from preimage.geometry.quantiser import Quantiser
from preimage.layers import Layer
from preimage.models import LanguageModel, model_as_told, told_model
from preimage.states import States, adopt_noise, pack_ids, states_as_told, told_noise, unpack_ids
from preimage.states.capture import SPREAD
from preimage.states.pieces import PieceStore
from preimage.storage import Errand, decode
from preimage.storage.shelf import Shelf


class GeometryJob:
    """Measures layers in every precision."""

    NAME = "preimage.geometry.errands:GeometryJob"

    def __init__(self, layers: MeasuredLayers) -> None:
        self._layers = layers

    @classmethod
    def errand(cls, model: LanguageModel, states: States, options: GeometryOptions) -> Errand:
        """What workers are told of a measurement whose states are captured."""
        if not isinstance(options.quantiser, Quantiser):
            raise OptionError(
                "A quantiser of one's own cannot be told to workers.", "Work without a cluster."
            )
        assert isinstance(states.store, PieceStore)
        assert states.token_ids is not None
        spec = {
            "model": told_model(model), "noise": told_noise(model, states.layers),
            "options": options.to_dict(), "states": states.store.told(f"states/{SPREAD}"),
        }  # fmt: skip
        return Errand(cls.NAME, spec, pack_ids(states.token_ids), here_too=True)

    @classmethod
    def made(cls, spec: dict[str, Any], attached: bytes, shelf: Shelf) -> GeometryJob:
        """One that works on this machine's own copy of the model."""
        model = model_as_told(spec["model"])
        adopt_noise(model, spec["noise"])
        states = states_as_told(spec["states"], unpack_ids(attached), shelf)
        options: GeometryOptions = decode(GeometryOptions, spec["options"])
        return cls(MeasuredLayers(states, options, model.device, model))

    def do(self, keys: Sequence[str], inputs: bytes) -> list[Any]:
        """Layers by their numbers."""
        return [asdict(self._layers.at(_layer(key))) for key in keys]


def _layer(key: str) -> Layer:
    return "final" if key == "final" else int(key)
