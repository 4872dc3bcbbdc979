"""``preimage.train_trajectory``: how the geometry of a model's states moves while it is trained."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from preimage.distances import products
from preimage.errors import RunFolderError
from preimage.geometry.measuring import measure_geometry
from preimage.geometry.options import GeometryOptions
from preimage.models import LanguageModel, new_model, parse_size, save_model
from preimage.models.float64 import double_copy
from preimage.models.loading import parse_device
from preimage.progress import Listener, reporting, silent
from preimage.states import capture
from preimage.storage import Run, write_text
from preimage.storage.places import on_a_disk
from preimage.training.options import TrajectoryOptions, checkpoint_steps
from preimage.training.result import Checkpoint, Trajectory
from preimage.training.text import TrainingText, prepare_text
from preimage.training.trainer import Recipe, Trainer, seeded, windows_of

_STATE, _MODEL = "training.safetensors", "model"
_BATCH_TOKENS = 4096  # of a capture; in float64 the shape of a batch matters to no margin


def train_trajectory(
    options: TrajectoryOptions | None = None,
    *,
    texts: Sequence[str] | None = None,
    out: str | Path | None = None,
    device: str | torch.device = "auto",
    progress: Listener = silent,
    **changes: Any,
) -> Trajectory:
    """Train a small model from scratch and measure its geometry at log-spaced steps.

    Trains on the default corpus, or on ``texts``, one a document, whose last quarter is held out. At every
    checkpoint the weights as they are go over the same probes in float64 from end to end
    (:mod:`preimage.models.float64`), so that no margin is rounding.
    With ``out`` every checkpoint is kept in that run folder, calling again continues, and the trained model
    is written to ``out``/model, from where ``preimage.load`` opens it.
    """
    chosen = replace(options or TrajectoryOptions(), **changes)
    geometry, on = GeometryOptions(bits=chosen.bits, subsets=0), parse_device(device)
    text = prepare_text(texts, chosen)
    plan = {
        "command": "trajectory",
        "options": chosen.to_dict(),
        "text": text.fingerprint,
        "probes": text.probes.fingerprint,
    }
    run = Run(plan, None if out is None else on_a_disk(out, "a training"))
    longest = max(chosen.window, chosen.length)
    model = new_model(
        chosen.family, chosen.size, tokenizer=text.tokenizer, max_length=longest, seed=chosen.seed, device=on
    )
    steps = checkpoint_steps(chosen.steps, chosen.checkpoints)
    checkpoints = [*run.kept(steps, Checkpoint).values()]
    kept = run.place(_MODEL)
    if run.left(steps) or (kept is not None and not kept.exists()):
        state = run.place(_STATE)
        training = Training(model, text.train, chosen, state)
        if checkpoints and training.step < checkpoints[-1].step:
            raise RunFolderError(f"{state} is missing or too old.", "Give another folder.")

        def train_to(some: tuple[int, ...]) -> Iterator[Checkpoint]:
            for step in some:
                training.advance(step, report)
                before = checkpoints[-1].step if checkpoints else 0
                checkpoints.append(_checkpoint(training, text, geometry, before, on))
                yield checkpoints[-1]

        with reporting(progress) as report:
            run.each(steps, Checkpoint, train_to)
    trajectory = Trajectory(
        options=chosen.to_dict(),
        model=_about(model, chosen),
        probes=text.probes.fingerprint,
        text=text.fingerprint,
        checkpoints=tuple(checkpoints),
    )
    if run.path is not None:
        _finish(run.path, model, text)
    run.finish(trajectory.to_dict, {"checkpoints": trajectory.rows}, remove=[_STATE])
    return trajectory


class Training(Trainer):
    """A language model in training on windows from anywhere in a text; there is no dropout."""

    def __init__(
        self,
        model: LanguageModel,
        text: Int[Tensor, " token"],
        options: TrajectoryOptions,
        path: Path | None = None,
    ) -> None:
        self.model, self._text, self._options = model, text, options
        recipe = Recipe(options.steps, options.rate, 0.1, 0.1, (0.9, 0.95), options.tf32)
        super().__init__(model.module, lambda step: self._mean_loss(self._batch(step)), recipe, path)

    def loss(self, windows: Int[Tensor, "window position"]) -> float:
        """The mean loss per token on given windows, in nats."""
        with torch.no_grad(), products("ieee"):
            parts = [(len(some), float(self._mean_loss(some))) for some in windows.split(self._options.batch)]
        return math.fsum(count * loss for count, loss in parts) / len(windows)

    def _batch(self, step: int) -> Int[Tensor, "window position"]:
        options = self._options
        return windows_of(self._text, options.batch, options.window, seeded(options.seed, step))

    def _mean_loss(self, windows: Int[Tensor, "window position"]) -> Float[Tensor, ""]:
        ids = windows.to(self.model.device)
        scores = self.model.module(ids, use_cache=False).logits[:, :-1].float()
        return nn.functional.cross_entropy(scores.flatten(0, 1), ids[:, 1:].flatten())


def _checkpoint(
    training: Training, text: TrainingText, geometry: GeometryOptions, before: int, device: torch.device
) -> Checkpoint:
    """What the model is at this step."""
    recent = training.losses[before : training.step]
    model = double_copy(training.model)
    states = capture(model, text.probes, positions="last", batch_tokens=_BATCH_TOKENS)
    assert states.model is not None
    return Checkpoint(
        step=training.step,
        training_loss=sum(recent) / len(recent) if recent else None,
        held_out_loss=training.loss(text.held_out),
        weight_hash=states.model["weight_hash"],
        noise_floor=max(states.noise_floor.values()),
        geometry=measure_geometry(states, options=geometry, model=model, device=device),
    )


def _finish(folder: Path, model: LanguageModel, text: TrainingText) -> None:
    """The model and its probes; the training state goes last: at no moment is there neither."""
    if not (folder / _MODEL).exists():
        save_model(model, folder / _MODEL)
    lines = [json.dumps({"token_ids": ids}) for ids in text.probes]
    write_text(folder / "probes.jsonl", "\n".join(lines) + "\n")


def _about(model: LanguageModel, options: TrajectoryOptions) -> dict[str, Any]:
    return {
        "name": model.name,
        "architecture": type(model.module).__name__,
        "parameters": sum(parameter.numel() for parameter in model.module.parameters()),
        **parse_size(options.size)._asdict(),
        "vocab_size": model.vocab_size,
    }
