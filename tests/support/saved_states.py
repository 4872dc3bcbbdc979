"""States of a tiny model as people save them, and what is asked of a reader of such files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

import preimage
from preimage.leak.holdings import Holding, Sizes, Told
from preimage.leak.readers import tensors
from preimage.observations import Observation
from support.tiny import VOCABULARY, random_ids, tiny

SIZES = Sizes(n_layers=3, d_model=32, heads=2, head_size=8, vocab_size=VOCABULARY)
TOLD = Told(sizes=SIZES)
NOBODY = Told()
PROMPTS = [random_ids(5), random_ids(5, seed=1)]
LAYERS: list[Any] = [0, 1, 2, 3, "final"]


def passed() -> Any:
    with torch.no_grad():
        return tiny("llama").module(torch.tensor(PROMPTS), use_cache=True, output_hidden_states=True)


def truth() -> preimage.States:
    return preimage.capture(tiny("llama"), PROMPTS, LAYERS)


def known(path: Path, told: Told = TOLD) -> Holding:
    holding = tensors.read(path, told)
    assert holding is not None
    assert holding.paths[0] == path
    return holding


def require_states(holding: Holding, layers: list[Any]) -> None:
    """Every prompt has the states of these layers; a pass over one prompt rounds otherwise than over two."""
    assert len(holding.pieces) == len(PROMPTS)
    for prompt, piece in enumerate(holding.pieces):
        assert (piece.tokens, piece.start) == (5, 0)
        assert [one.layer for one in piece.seen] == layers
        for one in piece.seen:
            assert one.observation == Observation()
            expected = truth().at(prompt, one.layer)
            torch.testing.assert_close(one.read(), expected, rtol=1e-5, atol=1e-6)


def write_safetensors(path: Path, held: dict[str, torch.Tensor], **about: str) -> None:
    save_file({name: one.contiguous() for name, one in held.items()}, path, metadata=about or None)


def write_npz(path: Path, held: dict[str, torch.Tensor]) -> None:
    np.savez_compressed(path, **{name: one.numpy() for name, one in held.items()})


def write_old_torch(path: Path, held: dict[str, torch.Tensor]) -> None:
    torch.save(held, path, _use_new_zipfile_serialization=False)


WRITERS: dict[str, Callable[[Path, dict[str, torch.Tensor]], None]] = {
    "t.safetensors": write_safetensors,
    "t.npz": write_npz,
    "t.pt": lambda path, held: torch.save(held, path),
    "t.ckpt": write_old_torch,
    "no-ending": lambda path, held: torch.save(held, path),
}


def sparse(path: Path, start: bytes, size: int) -> Path:
    """A file that claims to be large and takes no disk."""
    with path.open("wb") as file:
        file.write(start)
        file.truncate(size)
    return path
