"""Training a small model from scratch, so that it can be stopped anywhere and continued exactly.

Every step draws its windows from a seed of its own and there is no dropout: weights and moments after a step
depend on those before it and on its number alone. On a CPU, with as many threads, a continued training is
that of an uninterrupted one to the bit.
"""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from preimage.distances import products
from preimage.errors import OptionError, RunFolderError
from preimage.models import LanguageModel
from preimage.progress import Progress, silent
from preimage.storage import write_tensors
from preimage.training.trajectory_options import TrajectoryOptions

_SAVE_SECONDS = 60.0  # a training stopped between two checkpoints loses no more than this
_MOMENTS = ("exp_avg", "exp_avg_sq")
_LOWEST = 0.1  # of the learning rate, at the end
_WARM_UP = 100


class Training:
    """A model in training: its weights, AdamW's moments, how many steps were made and the loss of each.

    With ``path`` the training is kept in that file, and one found there is continued.
    """

    def __init__(
        self,
        model: LanguageModel,
        text: Int[Tensor, " token"],
        options: TrajectoryOptions,
        path: Path | None = None,
    ) -> None:
        self.model = model
        self.step = 0
        self.losses: list[float] = []
        self._text = text
        self._options = options
        self._path = path
        self._optimiser = _optimiser(model.module, options.rate)
        if path is not None and path.exists():
            self._load(path)

    def advance(self, to: int, progress: Progress = silent) -> None:
        """Make the steps up to ``to``, and save."""
        saved = time.monotonic()
        while self.step < to:
            self._advance_once()
            progress(self.step, self._options.steps, "training steps")
            if self._path is not None and time.monotonic() - saved > _SAVE_SECONDS:
                self.save()
                saved = time.monotonic()
        self.save()

    def loss(self, windows: Int[Tensor, "window position"]) -> float:
        """The mean loss a token on given windows, in nats."""
        with torch.no_grad(), products("ieee"):
            parts = [(len(some), float(self._loss(some))) for some in windows.split(self._options.batch)]
        return math.fsum(count * loss for count, loss in parts) / len(windows)

    def save(self) -> None:
        """Write everything the training needs to go on, whole or not at all."""
        if self._path is None or self.step == 0:  # the beginning is made anew from its seed
            return
        tensors = {"losses": torch.tensor(self.losses, dtype=torch.float64)}
        for name, parameter in self.model.module.named_parameters():
            tensors[f"weight.{name}"] = parameter
            tensors |= {f"{kind}.{name}": self._optimiser.state[parameter][kind] for kind in _MOMENTS}
        write_tensors(self._path, tensors, {"step": self.step})

    def _load(self, path: Path) -> None:
        try:
            with safe_open(path, framework="pt") as file:
                step = int(json.loads(file.metadata()["about"])["step"])
                stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping
            with torch.no_grad():
                for name, parameter in self.model.module.named_parameters():
                    parameter.copy_(stored[f"weight.{name}"])
                    moments = {kind: stored[f"{kind}.{name}"].to(parameter.device) for kind in _MOMENTS}
                    self._optimiser.state[parameter] = {"step": torch.tensor(float(step)), **moments}
            self.losses = stored["losses"].tolist()
        except (SafetensorError, OSError, KeyError, TypeError, ValueError, RuntimeError) as error:
            raise RunFolderError(f"{path} cannot be read: {error}.", "Give another folder.") from error
        self.step = step

    def _advance_once(self) -> None:
        options, module = self._options, self.model.module
        for group in self._optimiser.param_groups:
            group["lr"] = options.rate * schedule(self.step, options.steps)
        with products("tf32" if options.tf32 else "ieee"):
            loss = self._loss(self._batch())
            self._optimiser.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            self._optimiser.step()
        self.losses.append(float(loss.detach()))
        if not math.isfinite(self.losses[-1]):
            raise OptionError(
                f"The training broke down at step {self.step}: its loss is {self.losses[-1]}.",
                "Give a lower learning rate.",
            )
        self.step += 1

    def _batch(self) -> Int[Tensor, "window position"]:
        """The windows of this step, from anywhere in the text."""
        options = self._options
        generator = torch.Generator().manual_seed(options.seed * 1_000_003 + self.step)
        places = len(self._text) - options.window + 1
        starts = torch.randint(places, (options.batch, 1), generator=generator)
        return self._text[starts + torch.arange(options.window)]

    def _loss(self, windows: Int[Tensor, "window position"]) -> Float[Tensor, ""]:
        ids = windows.to(self.model.device)
        scores = self.model.module(ids, use_cache=False).logits[:, :-1].float()
        return nn.functional.cross_entropy(scores.flatten(0, 1), ids[:, 1:].flatten())


def schedule(step: int, steps: int) -> float:
    """The learning rate of a step, as a share of the highest: a warm-up, then half a cosine to a tenth."""
    warm = max(1, min(_WARM_UP, steps // 10))
    if step < warm:
        return (step + 1) / warm
    return _LOWEST + (1 - _LOWEST) * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))


def _optimiser(module: nn.Module, rate: float) -> torch.optim.AdamW:
    """AdamW that decays matrices, not gains and biases."""
    groups = [
        {"params": [p for p in module.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in module.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95))
