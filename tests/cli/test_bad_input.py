"""Bad input to every command: one line of error, exit code 2, and nothing written."""

from __future__ import annotations

import json
import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from preimage.cli.terminal import printable
from preimage.states import States
from preimage.states.layout import Layout, group_by_length, tensor_name
from preimage.states.states import MemoryStore
from preimage.storage import Run
from support.bundles import TENSORS
from support.commands import CONTEXT, WIDTH, Typed, process
from support.folders import VOCABULARY, make_folder
from support.tiny import random_ids

Case = Callable[[Any], list[object]]


class Given:
    """What the cases below are made of."""

    def __init__(self, folders: dict[str, Path], bundle: Path, jsonl: Callable[..., str], tmp: Path) -> None:
        self.model = folders["model"]
        self.other = folders["other"]
        self.wide = folders["wide"]
        self.bundle = bundle
        self.jsonl = jsonl
        self.tmp = tmp

    def truncated(self) -> Path:
        os.truncate(self.bundle / TENSORS, 100)
        return self.bundle

    def flipped(self) -> Path:
        data = bytearray((self.bundle / TENSORS).read_bytes())
        data[-1] ^= 1
        (self.bundle / TENSORS).write_bytes(data)
        return self.bundle

    def too_long(self) -> Path:
        return States.from_tensor(torch.randn(1, CONTEXT + 1, WIDTH), 1).save(self.tmp / "long")

    def with_nan(self) -> Path:
        tensor = torch.randn(1, 4, WIDTH)
        tensor[0, 2, 5] = float("nan")
        layout = Layout(group_by_length([4]), (1,), "all", WIDTH)
        store = MemoryStore({tensor_name(1, 0): tensor})
        states = States(layout, store, token_ids=None, model=None, noise_floor={}, dtype=torch.float32)
        return states.save(self.tmp / "nan")

    def tensor(self, *shape: int, bad: float | None = None) -> Path:
        tensor = torch.randn(*shape)
        if bad is not None:
            tensor[(1,) * len(shape)] = bad
        save_file({"h": tensor}, self.tmp / "t.safetensors")
        return self.tmp / "t.safetensors"

    def pickled(self) -> Path:
        folder = self.tmp / "pickled"
        folder.mkdir()
        shutil.copy(self.model / "config.json", folder)
        torch.save({}, folder / "pytorch_model.bin")
        return folder

    def untold(self) -> Path:
        return make_folder(self.tmp / "untold", tokenizer=False)

    def unfinished(self) -> Path:
        Run({"command": "collisions"}, self.tmp / "unfinished")
        return self.tmp / "unfinished"

    def file(self, name: str, text: str) -> Path:
        (self.tmp / name).write_text(text)
        return self.tmp / name


INVERT: dict[str, tuple[Case, str]] = {
    "unknown model": (
        lambda g: ["--model", "no/such", "--text", "x"],
        "'no/such' is not an alias (smollm2), no file or folder here, and not in the hub's cache (offline).",
    ),
    "missing gguf": (lambda g: ["--model", "no.gguf", "--text", "x"], "There is no file no.gguf."),
    "pickled weights": (lambda g: ["--model", g.pickled(), "--text", "x"], "is a pickled file"),
    "missing prompts": (
        lambda g: ["--model", g.model, "--prompts", "none.txt"],
        "The source of prompts 'none.txt' does not exist.",
    ),
    "layer too deep": (
        lambda g: ["--model", g.model, "--text", "x", "--layer", 4],
        "There is no layer '4'. This model has layers 0..3 and \"final\".",
    ),
    "layer below 0": (lambda g: ["--model", g.model, "--text", "x", "--layer=-1"], "There is no layer '-1'."),
    "layer of a kind": (lambda g: ["--model", g.model, "--text", "x", "--layer", "top"], "no layer 'top'"),
    "two layers": (lambda g: ["--model", g.model, "--text", "x", "--layer", "1,2"], "One layer is needed"),
    "empty prompt": (lambda g: ["--model", g.model, "--text", ""], "prompt 0 is empty text."),
    "empty file": (lambda g: ["--model", g.model, "--prompts", g.file("e.txt", "")], "holds no prompts."),
    "no prompt": (lambda g: ["--model", g.model], "--text and --prompts: neither given."),
    "both": (lambda g: ["--model", g.model, "--text", "x", "--prompts", "random"], "both given."),
    "too long": (lambda g: ["--model", g.model, "--text", "word " * 200], "this model takes at most 128."),
    "wrong id": (
        lambda g: ["--model", g.model, "--prompts", g.jsonl([1, 2], {"token_ids": [5, VOCABULARY]})],
        f"line 2 has token id {VOCABULARY} at position 1; this model's ids are 0..{VOCABULARY - 1}.",
    ),
    "negative id": (lambda g: ["--model", g.model, "--prompts", g.jsonl([-1])], "has token id -1"),
    "missing bundle": (lambda g: [g.tmp / "none"], "is not a state bundle: no manifest.json in it."),
    "bundle and text": (lambda g: [g.bundle, "--text", "x"], "States and prompts were given."),
    "bundle of another model": (
        lambda g: [g.bundle, "--model", g.other, "--layer", 1],
        "These states were made by",
    ),
    "bundle of another width": (
        lambda g: [g.bundle, "--model", g.wide, "--layer", 1],
        "These states are 32 wide, those of",
    ),
    "bundle of another dtype": (
        lambda g: [g.bundle, "--layer", 1, "--dtype", "bfloat16"],
        "Load that model with dtype float32",
    ),
    "bundle of more positions": (
        lambda g: [g.too_long(), "--model", g.model, "--layer", 1],
        "Prompt 0 has 129 positions; ",
    ),
    "layer not in the bundle": (lambda g: [g.bundle, "--layer", 3], "Layer 3 was not captured."),
    "truncated bundle": (lambda g: [g.truncated(), "--layer", 1], "has 100 bytes"),
    "damaged bundle": (lambda g: [g.flipped(), "--layer", 1], "fails its checksum."),
    "NaN in a bundle": (
        lambda g: [g.with_nan(), "--model", g.model, "--layer", 1],
        "Prompt 0, layer 1, position 2 holds NaN or infinity.",
    ),
    "NaN where the layer is not said": (lambda g: [g.with_nan(), "--model", g.model], "position 2 holds NaN"),
    "unknown method": (lambda g: ["--model", g.model, "--text", "x", "--method", "luck"], "'luck' is not"),
    "unknown dtype": (lambda g: ["--model", g.model, "--text", "x", "--dtype", "int3"], "'int3' is not"),
    "unknown device": (lambda g: ["--model", g.model, "--text", "x", "--device", "abacus"], "'abacus'"),
    "tolerance 0": (lambda g: ["--model", g.model, "--text", "x", "--tolerance", 0], "tolerance is 0"),
    "tolerance below the floor": (
        lambda g: ["--model", g.model, "--text", "x", "--tolerance", 1e-12],
        "lies below the noise floor",
    ),
    "negative seed": (lambda g: ["--model", g.model, "--text", "x", "--seed=-1"], "seed is -1"),
}
TENSOR: dict[str, tuple[Case, str]] = {
    "missing tensor": (lambda g: [g.tmp / "t.npy", "--layer", 1], "There is no file"),
    "no layer": (lambda g: [g.tensor(3, WIDTH)], "t.safetensors does not say its layer."),
    "layer too deep": (lambda g: [g.tensor(3, WIDTH), "--layer", 9], "There is no layer '9'."),
    "NaN": (
        lambda g: [g.tensor(3, WIDTH, bad=float("nan")), "--layer", 1],
        "Prompt 0, layer 1, position 1 holds NaN or infinity.",
    ),
    "infinity": (
        lambda g: [g.tensor(2, 3, WIDTH, bad=float("inf")), "--layer", "final"],
        "Prompt 1, layer final, position 1 holds NaN or infinity.",
    ),
    "another width": (
        lambda g: [g.tensor(3, 31), "--layer", 1],
        "states are 31 wide, those of this model are 32.",
    ),
    "more positions": (
        lambda g: [g.tensor(2, CONTEXT + 1, WIDTH), "--layer", 1],
        "Prompt 0 has 129 positions",
    ),
    "one axis": (lambda g: [g.tensor(WIDTH), "--layer", 1], "shape (32,) is not the states"),
    "pickled tensor": (lambda g: [g.pickled() / "pytorch_model.bin", "--layer", 1], "holds a dict without"),
    "text called npy": (lambda g: [g.file("t.npy", "1 2 3"), "--layer", 1], "cannot be read as a plain"),
    "wrong key": (lambda g: [g.tensor(3, WIDTH), "--layer", 1, "--key", "k"], "holds no tensor 'k'."),
}
TWO = ["--text", "x", "--text", "y"]
COLLISIONS: dict[str, tuple[Case, str]] = {
    "one prompt": (lambda g: ["--text", "x"], "1 prompts, 1 of them different."),
    "equal prompts": (lambda g: ["--text", "x", "--text", "x"], "2 prompts, 1 of them different."),
    "empty file": (lambda g: ["--prompts", g.file("e.txt", "")], "holds no prompts."),
    "missing prompts": (lambda g: ["--prompts", "none.txt"], "'none.txt' does not exist."),
    "threshold 0": (lambda g: [*TWO, "--threshold", 0], "A threshold is 0.0."),
    "threshold below 0": (lambda g: [*TWO, "--threshold=-1"], "A threshold is -1.0."),
    "threshold below the floor": (
        lambda g: [*TWO, "--threshold", 1e-8, "--layers", "2,final"],
        "The threshold 1e-08 is below the noise floor of layer 2, ",
    ),
    "layer too deep": (lambda g: [*TWO, "--layers", "0-4"], "There is no layer '0-4'."),
    "closest 0": (lambda g: [*TWO, "--closest", 0], "closest is 0."),
    "hard bases below 0": (lambda g: [*TWO, "--hard-bases=-1"], "hard_bases is -1."),
    "negative seed": (lambda g: [*TWO, "--seed=-1"], "seed is -1."),
    "count of text": (lambda g: [*TWO, "--count", 1], "--count and --length cut --prompts."),
    "lengths of text": (lambda g: [*TWO, "--lengths", "4,8"], "--lengths cuts --prompts."),
    "length and lengths": (lambda g: ["--length", 4, "--lengths", "4,8"], "--lengths cuts --prompts."),
    "lengths that are none": (lambda g: ["--lengths", "4,long"], "--lengths is '4,long'."),
    "length 0": (lambda g: ["--prompts", "random", "--lengths", "4,0"], "length is 0"),
    "too long": (
        lambda g: ["--prompts", "random", "--lengths", "4,129"],
        "length is 129; this model takes at most 128 tokens.",
    ),
    "unequal numbers": (
        lambda g: ["--prompts", g.jsonl(random_ids(40)), "--lengths", "4,10"],
        "The source has 10 at 4, 4 at 10 prompts. Set count to the smallest of these numbers.",
    ),
    "text without a tokenizer": (
        lambda g: ["--prompts", "same-next:arithmetic", "--model", g.untold()],
        "prompt 0 is text, and this model has no tokenizer.",
    ),
    "default without a tokenizer": (lambda g: ["--model", g.untold()], "'default' is text, and this model"),
}
CONTINUATIONS: dict[str, tuple[Case, str]] = {
    "no prefix": (lambda g: [], "A scan needs prefixes."),
    "text and prompts": (lambda g: ["--text", "x", "--prompts", "random"], "A scan needs prefixes."),
    "missing audit": (lambda g: ["--audit", g.tmp / "none"], "cannot be read"),
    "unfinished audit": (lambda g: ["--audit", g.unfinished()], "holds no finished collision search."),
    "layer too deep": (lambda g: ["--text", "x", "--layer", 4], "There is no layer '4'."),
    "two layers": (lambda g: ["--text", "x", "--layer", "1,2"], "One layer is needed"),
    "as long as the model": (
        lambda g: ["--prompts", g.jsonl([3] * 128)],
        "Prefix 0 has 128 tokens, as many as the model takes.",
    ),
    "threshold below the floor": (
        lambda g: ["--text", "x", "--threshold", 1e-12],
        "is below the noise floor of layer final",
    ),
    "closest 0": (lambda g: ["--text", "x", "--closest", 0], "closest is 0."),
}
CASES = {
    **{
        f"{command}, {name}": ([command, "--model", "the model"], *case)
        for command, cases in (("collisions", COLLISIONS), ("continuations", CONTINUATIONS))
        for name, case in cases.items()
    },
    **{f"invert, {name}": (["invert"], *case) for name, case in INVERT.items()},
    **{
        f"capture, {name}": (["capture"], *case)
        for name, case in INVERT.items()
        if name in ("unknown model", "missing gguf", "pickled weights", "missing prompts", "empty prompt",
                    "empty file", "no prompt", "both", "too long", "wrong id", "negative id", "unknown dtype",
                    "unknown device", "negative seed")
    },
    **{f"tensor, {name}": (["capture", "--from-tensor"], *case) for name, case in TENSOR.items()},
    "capture, layer too deep": (
        ["capture"],
        lambda g: ["--model", g.model, "--text", "x", "--layers", "0-4"],
        "There is no layer '0-4'.",
    ),
    "capture, unknown positions": (
        ["capture"],
        lambda g: ["--model", g.model, "--text", "x", "--positions", "some"],
        "positions 'some' is not known.",
    ),
    "capture, layer of a tensor": (
        ["capture"],
        lambda g: ["--model", g.model, "--text", "x", "--layer", "1"],
        "--layer goes with --from-tensor.",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("command", "case", "message"), CASES.values(), ids=CASES)
def test_bad_input_is_one_line_and_writes_nothing(
    command: list[str],
    case: Case,
    message: str,
    run: Typed,
    folders: dict[str, Path],
    bundle: Path,
    jsonl: Callable[..., str],
    tmp_path: Path,
) -> None:
    given, out = Given(folders, bundle, jsonl, tmp_path), tmp_path / "out"
    argv = [given.model if part == "the model" else part for part in command]
    argv += [*case(given), "--out", out]
    if "--from-tensor" in command:
        argv += ["--model", given.model]
    before = sorted(tmp_path.rglob("*"))
    code, stdout, stderr = run(*argv)
    assert code == 2
    assert stdout == ""
    assert len(stderr.splitlines()) == 1
    assert stderr.startswith("preimage: ")
    assert message in stderr
    code, stdout, _ = run(*argv, "--json")
    assert code == 2
    error = json.loads(stdout)["error"]
    assert error.keys() == {"code", "message", "hint"}
    assert stderr == f"preimage: {printable((error['message'] + ' ' + error['hint']).rstrip())}\n"
    assert not out.exists()
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.real_model
@pytest.mark.parametrize(
    "case", ["model", "model to describe", "layer", "prompt", "missing", "truncated", "no tensor"]
)
def test_bad_input_takes_less_than_five_seconds(case: str, tmp_path: Path) -> None:
    truncated = tmp_path / "truncated"
    States.from_tensor(torch.randn(3, 576), 1).save(truncated)
    os.truncate(truncated / TENSORS, 1000)
    argv, message = {
        "model": (["invert", "--model", "no/such-model", "--text", "x"], "'no/such-model' is not an alias"),
        "model to describe": (["models", "no/such-model"], "'no/such-model' is not an alias"),
        "layer": (["invert", "--text", "x", "--layer", 31], "There is no layer '31'."),
        "prompt": (["invert", "--text", "", "--layer", 15], "prompt 0 is empty text."),
        "missing": (["invert", tmp_path / "none", "--layer", 15], "is not a state bundle"),
        "truncated": (["invert", truncated, "--layer", 1], "has 1000 bytes"),
        "no tensor": (
            ["capture", "--from-tensor", tmp_path / "t.npy", "--layer", 1, "--out", tmp_path / "b"],
            "There is no file",
        ),
    }[case]
    before = sorted(tmp_path.rglob("*"))
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = process(*argv)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert message in done.stderr
    # the processor's own seconds: how long one waits depends on who else uses the machine
    assert after.ru_utime + after.ru_stime - spent.ru_utime - spent.ru_stime < 5
    assert sorted(tmp_path.rglob("*")) == before
