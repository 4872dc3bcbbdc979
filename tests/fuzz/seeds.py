"""Whole files of every kind, made by preimage itself with a tiny random model: where a search begins."""

from __future__ import annotations

import io
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors.torch import save

import preimage
from fuzz.judging import scratch
from fuzz.mutation import NEXT
from preimage.collisions import find_collisions
from preimage.geometry import measure_geometry
from preimage.inversion.proposers.lens import Lens, LensShape
from preimage.inversion.proposers.lens_files import save_lens
from preimage.inversion.proposers.lens_repository import push_lenses
from preimage.models import LanguageModel, new_model
from preimage.observations import Site
from support.folders import VOCABULARY, make_tokenizer
from support.gguf_files import write_gguf
from support.tiny import build

LAYER, WIDTH = 2, 16
PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6, 5, 3], [5, 8]]
RANKS = {"text": {"rank0": 0.5, "within8": 0.75, "within64": 1.0, "worst": 30, "first": 0.25}}
# What a case says of itself truly, whatever became of its other files: without it all of them would be
# refused by a checksum. A change may hit these words too, and then the checksum is what is tested.
SIZE, DIGEST = b'"the right size"', b"the right digest"
MODEL = b"the model"  # by its name, which is a path of another folder in every process


@cache
def model() -> LanguageModel:
    """The model that everything is of."""
    return new_model("llama", (WIDTH, 2, 2), vocabulary=40, max_length=32, device="cpu")


def bundles(folder: Path) -> list[bytes]:
    """Manifest and tensors: all positions, the last alone without ids, half precision, and keys."""
    states = preimage.capture(model(), PROMPTS, [0, LAYER, "final"])
    last = preimage.capture(model(), PROMPTS, LAYER, positions="last")
    half = preimage.States.from_tensor(torch.randn(2, 3, WIDTH).half(), LAYER)
    keys = preimage.states_from(torch.randn(2, 3, WIDTH), model(), 1, observe="keys")
    made = [states.save(folder / "all"), last.save(folder / "last", withhold_ids=True)]
    made += [half.save(folder / "half"), keys.save(folder / "keys")]
    return [NEXT.join((_manifest(one), (one / "states.safetensors").read_bytes())) for one in made]


@cache
def model_folder() -> Path:
    """The model on the disk, as a command loads it."""
    folder = scratch() / "model"
    model().module.save_pretrained(folder)
    return folder


def commanded(folder: Path) -> list[bytes]:
    """Bundles whose model a command finds by the name in them."""
    loaded = preimage.load(model_folder(), device="cpu")
    made = preimage.capture(loaded, PROMPTS[:2], LAYER).save(folder / "b")
    named = _manifest(made).replace(str(model_folder()).encode(), MODEL)
    return [NEXT.join((named, (made / "states.safetensors").read_bytes()))]


def _manifest(bundle: Path) -> bytes:
    manifest = json.loads((bundle / "manifest.json").read_bytes())
    manifest |= {"bytes": SIZE.decode().strip('"'), "checksums": {"states.safetensors": DIGEST.decode()}}
    return json.dumps(manifest).encode()


def manifests(folder: Path) -> list[bytes]:
    """Manifests alone, of this schema and of the first."""
    whole = [case.split(NEXT)[0] for case in bundles(folder)]
    first = json.loads(whole[0])
    first |= {"schema": "preimage/1", "model": {**first["model"], "checkpoint": "0" * 64}}
    return [*whole, json.dumps(first).encode()]


def runs(folder: Path) -> list[bytes]:
    """Run folders: inversions and an audit, stopped or done."""
    states = preimage.capture(model(), PROMPTS, LAYER)
    preimage.invert(model(), states, layer=LAYER, out=folder / "invert")
    find_collisions(model(), PROMPTS, [1, LAYER], hard_bases=0, out=folder / "collisions")
    return [
        NEXT.join(_unsealed((folder / name / file).read_bytes()) for file in ("run.json", "items.jsonl"))
        for name in ("invert", "collisions")
    ]


def _unsealed(documents: bytes) -> bytes:
    """Json with the word for the right digest where its own is."""
    return re.sub(rb'("sha256": ")[0-9a-f]{64}"', lambda match: match[1] + DIGEST + b'"', documents)


def results(folder: Path) -> list[bytes]:
    """Saved results of several kinds."""
    states = preimage.capture(model(), PROMPTS, [1, LAYER])
    found: list[Any] = [
        preimage.invert(model(), states, layer=LAYER)[0],
        find_collisions(model(), PROMPTS, [1, LAYER], hard_bases=0),
        measure_geometry(states, bits=(None, 4)),
        preimage.scan_continuations(model(), [[1, 2]], layer=1),
    ]
    return [one.save(folder / f"{number}.json").read_bytes() for number, one in enumerate(found)]


def lenses(folder: Path) -> list[bytes]:
    """Lens files: of a layer, of keys, and with a hidden layer of keys and a prior."""
    return [path.read_bytes() for path in _lens_files(folder)]


def _lens_files(folder: Path) -> list[Path]:
    paths = []
    shapes = {"key_hidden": 0, "prior": 0}, {"key_hidden": 3, "prior": 1}
    for number, (tap, more) in enumerate(((LAYER, shapes[0]), (Site(1, "keys", "before"), shapes[1]))):
        width, features = model().width(tap), WIDTH * (1 if more["key_hidden"] else 2)
        lens = Lens(LensShape(width, model().vocab_size, features, rank=4, hidden=6, **more))
        path = folder / f"{number}.safetensors"
        paths.append(save_lens(lens, path, tap=tap, model=model(), training={"steps": 1}, ranks=RANKS))
    return paths


def registries(folder: Path) -> list[bytes]:
    """A registry and the lens that it lists."""
    path = _lens_files(folder)[0]
    (entry,) = push_lenses([path], folder / "lenses")
    registry = (folder / "lenses" / "lenses.json").read_bytes()
    registry = registry.replace(entry.sha256.encode(), DIGEST).replace(str(entry.bytes).encode(), SIZE)
    return [NEXT.join((registry, path.read_bytes()))]


def models(folder: Path) -> list[bytes]:
    """What preimage itself reads of a model's folder: the config, the tokenizer's, an index, and weights."""
    config = {"model_type": "llama", "dtype": "float32", "hidden_size": 16, "num_hidden_layers": 2,
              "vocab_size": 40, "max_position_embeddings": 32}  # fmt: skip
    index = {"metadata": {"total_size": 64}, "weight_map": {"h": "w.safetensors"}}
    weights = save({"h": torch.zeros(4, 4), "codes": torch.zeros(3, dtype=torch.int8)})
    tokens = [{"bos_token": "<s>"}, {"bos_token": {"content": "<s>"}}]
    both = [config, {"model_type": "gemma3", "text_config": config}]
    return [
        NEXT.join((*(json.dumps(one).encode() for one in (said, token, index)), weights))
        for said, token in zip(both, tokens, strict=True)
    ]


def ggufs(folder: Path) -> list[bytes]:
    """A model as llama.cpp keeps it."""
    sizes = {"hidden_size": WIDTH, "intermediate_size": WIDTH, "num_hidden_layers": 1}
    module = build("llama", vocab_size=VOCABULARY, **sizes)
    return [write_gguf(folder / "m.gguf", module, make_tokenizer()).read_bytes()]


def texts(_: Path) -> list[bytes]:
    """Prompts a line."""
    return ["one prompt\nand another one\n\nGrüße, 你好\r\n".encode(), b"\xef\xbb\xbfbehind a mark"]


def json_lines(_: Path) -> list[bytes]:
    """Prompts a line of json."""
    rows = [{"text": "one"}, {"token_ids": [1, 2, 3]}, "two", [4, 5], {"ids": [6], "text": "three"}]
    return ["\n".join(map(json.dumps, rows)).encode()]


def parquets(_: Path) -> list[bytes]:
    """Prompts a row: text, ids, and packed in every way."""
    tables = [
        pa.table({"text": ["one", "two", None, ""]}),
        pa.table({"input_ids": [[1, 2], [3], None]}),
        pa.table({"text": pa.array(["a", "a", "b"]).dictionary_encode(), "n": [1, 2, 3]}),
    ]
    found = []
    for table, packed in zip(tables, ("snappy", "none", "zstd"), strict=True):
        sink = io.BytesIO()
        pq.write_table(table, sink, compression=packed, write_statistics=packed == "none")
        found.append(sink.getvalue())
    return found


def tensors() -> list[dict[str, torch.Tensor]]:
    """States as people keep them: alone, with a mask, one a layer, and as codes with scales."""
    states, mask = torch.randn(2, 3, WIDTH), torch.tensor([[0, 1, 1], [1, 1, 1]])
    codes = torch.randint(-8, 8, (3, WIDTH), dtype=torch.int8)
    return [
        {"h": states},
        {"h": states.bfloat16(), "attention_mask": mask},
        {f"hidden_states.{layer}": states.half() for layer in range(4)},
        {"h": codes, "h_scale": torch.rand(3), "h_zero": torch.zeros(1)},
    ]


def safetensors(_: Path) -> list[bytes]:
    """The same in safetensors."""
    return [save(held) for held in tensors()]


def npys(_: Path) -> list[bytes]:
    """Arrays, one a file."""
    found = []
    square = np.asfortranarray(np.eye(WIDTH))
    for array in (np.ones((2, 3, WIDTH), "<f4"), np.ones((3, WIDTH), ">f8"), square):
        sink = io.BytesIO()
        np.save(sink, array)
        found.append(sink.getvalue())
    return found


def npzs(_: Path) -> list[bytes]:
    """Archives of arrays, packed and not."""
    found = []
    for held in tensors():
        arrays = {name: tensor.float().numpy() if tensor.is_floating_point() else tensor.numpy()
                  for name, tensor in held.items()}  # fmt: skip
        for write in (np.savez, np.savez_compressed):
            sink = io.BytesIO()
            write(sink, **arrays)
            found.append(sink.getvalue())
    return found


def torch_files(_: Path) -> list[bytes]:
    """What torch.save writes, in the format of today and in the old one."""
    states = torch.randn(2, 3, WIDTH)
    layers = tuple(torch.randn(2, 3, WIDTH) for _ in range(3))
    cache = [[torch.randn(2, 2, 3, WIDTH // 2) for _ in "kv"] for _ in range(2)]
    found = []
    for held in (*tensors(), states, [states[0], states[1, :2].clone()], layers, cache):
        for new in (True, False):
            sink = io.BytesIO()
            torch.save(held, sink, _use_new_zipfile_serialization=new)
            found.append(sink.getvalue())
    return found


def options(_: Path) -> list[bytes]:
    """Layers and positions as commands are given them."""
    return [b"0-2,final", b"all", b"1", b"0-15,20,24-31"]
