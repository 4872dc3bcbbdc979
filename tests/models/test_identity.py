"""What tells two models apart."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file


def test_hash_files_is_of_the_tensors_alone(tmp_path: Path) -> None:

    from preimage.models.identity import hash_files

    a, b = torch.arange(6.0).reshape(2, 3), torch.ones(4)
    for folder in ("one", "two", "other", "renamed", "broken"):
        (tmp_path / folder).mkdir()
    save_file({"a": a, "b": b}, tmp_path / "one" / "model.safetensors", {"made": "once"})
    save_file({"a": a}, tmp_path / "two" / "model-1.safetensors")
    save_file({"b": b}, tmp_path / "two" / "model-2.safetensors")
    save_file({"a": a, "b": b + 1e-6}, tmp_path / "other" / "model.safetensors")
    save_file({"a": a, "c": b}, tmp_path / "renamed" / "model.safetensors")
    (tmp_path / "broken" / "model.safetensors").write_bytes(b"\xff" * 64)
    one = hash_files(tmp_path / "one")
    assert one is not None
    assert hash_files(tmp_path / "two") == one
    assert hash_files(tmp_path / "other") not in (one, None)
    assert hash_files(tmp_path / "renamed") not in (one, None)
    assert hash_files(tmp_path / "broken") is None
    assert hash_files(tmp_path) is None
