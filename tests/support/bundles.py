"""Bundles of a tiny model, looked at from outside and damaged on purpose."""

from __future__ import annotations

import hashlib
import importlib
import json
from pathlib import Path
from typing import Any

import torch

from preimage.states import States
from support.tiny import random_ids

capture_module = importlib.import_module("preimage.states.capture")  # the package's own name is the function

LAYERS: list[int | str] = [0, 2, "final"]
LENGTHS = (5, 2, 5, 1, 9, 2, 17, 5)  # mixed, and not in the order of the groups
PROMPTS = [random_ids(length, seed) for seed, length in enumerate(LENGTHS)]
TENSORS, MANIFEST, RECORD = "states.safetensors", "manifest.json", "record.jsonl"


def sha(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def manifest_of(folder: Path) -> dict[str, Any]:
    """A bundle's manifest without its own checksum: one that can be changed, and older ones had none."""
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["checksums"].pop(MANIFEST, None)
    return manifest


def same_numbers(one: States, other: States) -> None:
    assert len(one) == len(other)
    assert one.layers == other.layers
    assert one.dtype == other.dtype
    for layer in one.layers:
        for prompt in range(len(one)):
            assert one.at(prompt, layer).dtype == one.dtype
            assert torch.equal(one.at(prompt, layer), other.at(prompt, layer))


def exchange(bundle: Path, raw: bytes) -> None:
    """Another tensor file, with a manifest that vouches for it."""
    (bundle / TENSORS).write_bytes(raw)
    manifest = manifest_of(bundle)
    manifest |= {"bytes": len(raw), "checksums": {TENSORS: hashlib.sha256(raw).hexdigest()}}
    (bundle / MANIFEST).write_text(json.dumps(manifest))


def npy(shape: str, descr: str = "<f4") -> bytes:
    header = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}}}\n".encode()
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(64)
