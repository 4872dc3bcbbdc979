"""The result of watching geometry while a model is trained."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from preimage.geometry.result import Geometry, LayerGeometry
from preimage.layers import Layer
from preimage.markup import Markup
from preimage.storage import Saved, dataframe
from preimage.views import Shown, number, table

QUANTITIES = ("margin", "normalised_margin_quantile", "normalised_colipschitz_quantile")


@dataclass(frozen=True)
class Checkpoint:
    """One moment of a training, measured on the same probes as every other.

    ``training_loss`` is the mean over the steps since the checkpoint before, None at step 0; losses are in
    nats a token. States are computed in float64: ``weight_hash`` is that of the weights so, ``noise_floor``
    the largest relative difference over layers of the same state computed in another shape.
    """

    step: int
    training_loss: float | None
    held_out_loss: float
    weight_hash: str
    noise_floor: float
    geometry: Geometry

    @property
    def blocks(self) -> dict[Layer, LayerGeometry]:
        """Every layer above 0, at which equally long prompts that end alike collide whatever the weights."""
        return {layer: at for layer, at in self.geometry.layers.items() if layer != 0}

    @property
    def last(self) -> LayerGeometry:
        """The last layer, after the last norm."""
        return self.geometry.layers["final"]

    def smallest(self, quantity: str) -> tuple[Layer, float]:
        """The layer above 0 at which a quantity is smallest, and its value there."""
        layer, smallest = min(self.blocks.items(), key=lambda item: float(getattr(item[1], quantity)))
        return layer, float(getattr(smallest, quantity))

    @property
    def collisions(self) -> int:
        """Pairs of equal states above layer 0, over all layers, in full precision."""
        return sum(layer.collisions for layer in self.blocks.values())

    def to_dict(self) -> dict[str, Any]:
        """Plain json types, the smallest values over layers included."""
        return {**asdict(self), "geometry": self.geometry.to_dict(), "smallest": self._smallest()}

    def _smallest(self) -> dict[str, dict[str, Any]]:
        smallest = {quantity: self.smallest(quantity) for quantity in QUANTITIES}
        return {name: {"layer": layer, "value": value} for name, (layer, value) in smallest.items()}


@dataclass(frozen=True)
class Drift:
    """How a quantity, smallest over layers, changed: from initialisation, and over the second half.

    Changes are relative, -0.2 a fall by a fifth, and None where the earlier value was 0. ``half_step`` is
    the checkpoint nearest to half of the training.
    """

    first: float
    half: float
    half_step: int
    last: float
    from_start: float | None
    second_half: float | None


@dataclass(frozen=True)
class SmallestMargin:
    """The smallest margin of all checkpoints and layers above 0, and where it occurred."""

    step: int
    layer: Layer
    margin: float
    normalised_margin: float


@dataclass(frozen=True, repr=False)
class Trajectory(Saved, Shown):
    """Geometry along a training; ``options``, ``model`` and the fingerprints say of what."""

    _kind = "trajectory"

    options: dict[str, Any]
    model: dict[str, Any]
    probes: str  # fingerprint of the probes' token ids
    text: str  # fingerprint of the tokens trained on
    checkpoints: tuple[Checkpoint, ...]

    @property
    def smallest(self) -> SmallestMargin:
        """The smallest margin over all time."""
        at = min(self.checkpoints, key=lambda checkpoint: checkpoint.smallest("margin")[1])
        layer, margin = at.smallest("margin")
        return SmallestMargin(at.step, layer, margin, at.geometry.layers[layer].normalised_margin)

    def drift(self, quantity: str) -> Drift:
        """How a quantity of the layers, the smallest over them, changed in training."""
        *before, end = self.checkpoints
        half = min(before, key=lambda at: abs(at.step - end.step / 2))
        moments = (before[0], half, end)
        first, middle, last = (at.smallest(quantity)[1] for at in moments)
        return Drift(first, middle, half.step, last, _change(first, last), _change(middle, last))

    def to_dict(self) -> dict[str, Any]:
        """Plain json types, the derived values included."""
        return {
            "options": self.options,
            "model": self.model,
            "probes": self.probes,
            "text": self.text,
            "smallest": asdict(self.smallest),
            "drift": {quantity: asdict(self.drift(quantity)) for quantity in QUANTITIES},
            "checkpoints": [checkpoint.to_dict() for checkpoint in self.checkpoints],
        }

    def rows(self) -> list[dict[str, Any]]:
        """One flat row a checkpoint, layer and precision, for tables."""
        return [
            {
                "training_step": checkpoint.step,  # a quantiser has a step too
                "training_loss": checkpoint.training_loss,
                "held_out_loss": checkpoint.held_out_loss,
                **row,
            }
            for checkpoint in self.checkpoints
            for row in checkpoint.geometry.rows()
        ]

    def to_dataframe(self) -> Any:
        """The rows as a DataFrame of pandas: one a checkpoint, layer and precision."""
        return dataframe(self.rows())

    def _line(self) -> str:
        last, smallest = self.checkpoints[-1], self.smallest
        return (
            f"a training of {last.step:,} steps, held-out loss {number(last.held_out_loss)}; smallest margin "
            f"{number(smallest.margin)} at step {smallest.step}, layer {smallest.layer}"
        )

    def _parts(self) -> Iterable[Markup]:
        moments = []
        for at in self.checkpoints:
            smallest = {name: at.smallest(name)[1] for name in QUANTITIES}
            losses = {"training_loss": at.training_loss, "held_out_loss": at.held_out_loss}
            moments.append({"step": at.step, **losses, **smallest, "collisions": at.collisions})
        yield table(moments, "Margins and constants: the smallest over the layers above 0.")


def _change(before: float, after: float) -> float | None:
    return after / before - 1 if before else None
