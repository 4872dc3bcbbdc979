"""A run folder of every command that makes one, made by it, on a tiny model with a tokenizer."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import preimage
from preimage.cli import main
from support.folders import make_folder

PROMPTS = ("the cat sat", "a <b>dog</b> & co", "naïve 漢字 🙂")
_SOME = ["--prompts", "random", "--count", "24"]
_TEXTS = [part for text in PROMPTS for part in ("--text", text)]
_TRAINED = "--size 16,1,2 --steps 4 --checkpoints 3 --probes 16 --length 6 --vocabulary 300 --window 32"
COMMANDS: dict[str, list[str]] = {
    "invert": ["invert", *_TEXTS, "--layer", "2"],
    "proved": ["invert", "--text", "the cat", "--layer", "1", "--prove"],
    "bundle": ["capture", *_TEXTS, "--layers", "1,2"],
    "collisions": ["collisions", *_SOME, "--length", "6"],
    "lengths": ["collisions", *_SOME, "--lengths", "4,6", "--layers", "1,final"],
    "continuations": ["continuations", "--text", "the cat", "--text", "a dog", "--layer", "final"],
    "geometry": ["geometry", *_SOME, "--length", "6"],
    "sweep": ["geometry", *_SOME, "--length", "4,6", "--subsets", "0"],
    "trajectory": ["trajectory", *_TRAINED.split()],
    "theory": ["theory", "symmetry", "--text", "a cat", "--text", "the dog"],
    "leak": ["leak", *_SOME[:2], "--count", "3", "--length", "6", "--layers", "1,2", "--margins", "1",
             "--exposures", "float32,int8,noise:10,noise:50"],
    "reproduction": ["reproduce", "collisions", *_SOME, "--length", "5", "--layers", "0,1,final"],
}  # fmt: skip
_NO_MODEL = ("trajectory",)


def make_runs(root: Path) -> dict[str, Path]:
    """All of them below a folder, by their names."""
    model = make_folder(root / "model")
    for name, command in COMMANDS.items():
        named = [] if name in _NO_MODEL else ["--model", str(model)]
        code = main([*command, *named, "--out", str(root / name), "--json"])
        assert code in (0, 1), name
    for name, command in _of_files(root, str(model)).items():
        assert main([*command, "--model", str(model), "--out", str(root / name), "--json"]) in (0, 1), name
    return {name: root / name for name in (*COMMANDS, "likely", "files")}


def _of_files(root: Path, model: str) -> dict[str, list[str]]:
    """Commands on what others have left: states that were noised, and a bundle."""
    generator = np.random.default_rng(0)
    exact = preimage.capture(preimage.load(model), PROMPTS[:1], 2).at(0, 2).numpy()
    noise = generator.standard_normal(exact.shape).astype(exact.dtype)
    np.save(root / "noisy.npy", exact + 0.05 * noise * np.linalg.norm(exact, axis=1, keepdims=True) / 32**0.5)
    return {
        "likely": ["invert", str(root / "noisy.npy"), "--layer", "2"],
        "files": ["leak", str(root / "bundle")],
    }
