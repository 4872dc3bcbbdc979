"""Files of models: changed on disk, compared in memory, and pickles that show when they are opened."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn


def rewrite(folder: Path, name: str = "config.json", **changes: object) -> Path:
    path = folder / name
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


def same_weights(one: nn.Module, other: nn.Module, dtype: torch.dtype = torch.float32) -> None:
    ours, theirs = one.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys()
    for name, weight in ours.items():
        assert theirs[name].dtype == dtype
        assert torch.equal(weight.to(dtype), theirs[name]), name


class Trap:
    """Leaves a mark where it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)
