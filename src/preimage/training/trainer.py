"""Training with AdamW that can be stopped anywhere and continued exactly.

What a step does depends on the weights and moments before it and on its number alone: whoever gives the loss
draws its batch from a seed of that number. On a CPU, with as many threads, a continued training is that of an
uninterrupted one to the bit.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Int
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from preimage.distances import products
from preimage.errors import OptionError, RunFolderError
from preimage.progress import Progress, silent
from preimage.storage import write_tensors

_SAVE_SECONDS = 60.0  # a training that is stopped loses no more than this
_MOMENTS = ("exp_avg", "exp_avg_sq")
_WARM_UP = 100


@dataclass(frozen=True)
class Recipe:
    """How a module is trained; ``rate`` is the highest learning rate, ``lowest`` the share of it at the end.

    ``weight_decay`` is of matrices; gains and biases are not decayed. ``tf32``: allow it, on a GPU.
    """

    steps: int
    rate: float
    lowest: float
    weight_decay: float
    betas: tuple[float, float]
    tf32: bool = False

    def rate_at(self, step: int) -> float:
        """The learning rate of a step: a warm-up, then half a cosine down to the lowest."""
        warm = max(1, min(_WARM_UP, self.steps // 10))
        if step < warm:
            return self.rate * ((step + 1) / warm)
        fall = 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, self.steps - warm)))
        return self.rate * (self.lowest + (1 - self.lowest) * fall)

    def optimiser(self, module: nn.Module) -> torch.optim.AdamW:
        """AdamW over a module's parameters."""
        parameters = list(module.parameters())
        groups = [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": self.weight_decay},
            {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=self.rate, betas=self.betas)


class Trainer:
    """A module in training: its weights, AdamW's moments, how many steps were made and the loss of each.

    ``loss``: the loss of a step, by its number. With ``path`` the training is kept in that file, and one
    found there is continued.
    """

    def __init__(
        self, module: nn.Module, loss: Callable[[int], Tensor], recipe: Recipe, path: Path | None = None
    ) -> None:
        self.step = 0
        self.losses: list[float] = []
        self._module, self._loss, self._recipe, self._path = module, loss, recipe, path
        self._optimiser = recipe.optimiser(module)
        if path is not None and path.exists():
            self._load(path)

    def advance(self, to: int, progress: Progress = silent) -> None:
        """Make the steps up to ``to``, and save."""
        saved = time.monotonic()
        while self.step < to:
            self._advance_once()
            progress(self.step, self._recipe.steps, "training steps")
            if self._path is not None and time.monotonic() - saved > _SAVE_SECONDS:
                self.save()
                saved = time.monotonic()
        self.save()

    def save(self) -> None:
        """Write everything the training needs to go on, whole or not at all."""
        if self._path is None or self.step == 0:  # the beginning is made anew from its seed
            return
        tensors = {"losses": torch.tensor(self.losses, dtype=torch.float64)}
        for name, parameter in self._module.named_parameters():
            tensors[f"weight.{name}"] = parameter
            tensors |= {f"{kind}.{name}": self._optimiser.state[parameter][kind] for kind in _MOMENTS}
        write_tensors(self._path, tensors, {"step": self.step})

    def _load(self, path: Path) -> None:
        try:
            with safe_open(path, framework="pt") as file:
                step = int(json.loads(file.metadata()["about"])["step"])
                stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping
            with torch.no_grad():
                for name, parameter in self._module.named_parameters():
                    parameter.copy_(stored[f"weight.{name}"])
                    moments = {kind: stored[f"{kind}.{name}"].to(parameter.device) for kind in _MOMENTS}
                    self._optimiser.state[parameter] = {"step": torch.tensor(float(step)), **moments}
            self.losses = stored["losses"].tolist()
        except (SafetensorError, OSError, KeyError, TypeError, ValueError, RuntimeError) as error:
            raise RunFolderError(f"{path} cannot be read: {error}.", "Give another folder.") from error
        self.step = step

    def _advance_once(self) -> None:
        for group in self._optimiser.param_groups:
            group["lr"] = self._recipe.rate_at(self.step)
        with products("tf32" if self._recipe.tf32 else "ieee"):
            loss = self._loss(self.step)
            self._optimiser.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(self._module.parameters(), 1.0)
            self._optimiser.step()
        self.losses.append(float(loss.detach()))
        if not math.isfinite(self.losses[-1]):
            raise OptionError(
                f"The training broke down at step {self.step}: its loss is {self.losses[-1]}.",
                "Give a lower learning rate.",
            )
        self.step += 1


def seeded(seed: int, number: int) -> torch.Generator:
    """Random numbers of one step of one training, on the CPU."""
    return torch.Generator().manual_seed(seed * 1_000_003 + number)


def windows_of(
    text: Int[Tensor, "*row token"], count: int, length: int, generator: torch.Generator
) -> Int[Tensor, "window position"]:
    """Windows from anywhere in a text, or in texts that are rows."""
    starts = torch.randint(text.shape[-1] - length + 1, (count, 1), generator=generator)
    places = starts + torch.arange(length)
    if text.ndim == 1:
        return text[places]
    return text[torch.randint(len(text), (count, 1), generator=generator), places]
