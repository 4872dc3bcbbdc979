"""Cases that a search found, cut down to what they need: each ended in a traceback, or in far too much."""

from __future__ import annotations

import io
import json
import math
import struct
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import preimage
from fuzz import seeds
from preimage.cli import BAD_INPUT, main
from preimage.errors import (
    BundleError,
    LayerError,
    ModelError,
    OptionError,
    PromptError,
    RunFolderError,
    StatesError,
)
from preimage.inversion import Inversion, pull_lenses, push_lenses
from preimage.inversion.proposers.lens_files import given_lens, read_info, read_weights
from preimage.layers import parse_layer, parse_layers
from preimage.models import locate
from preimage.models.memory import require_room
from preimage.observations import Observation
from preimage.prompts import PromptOptions, Vocabulary, gather
from preimage.prompts.files import read_file
from preimage.states import read_states_file
from preimage.states.layout import Group, Layout
from preimage.storage import read_json
from preimage.storage.plans import require_same
from support.bundles import manifest_of, npy, sha
from support.folders import make_tokenizer
from support.refusing import refused

NOVEL = "x" * 5000
HUGE = 10**400  # json has it, and no float
DEEP = '{"a":[' * 3000


# Manifests of bundles


def whole(_: Any) -> None:
    """The manifest as it is, which has to be accepted."""


MANIFESTS: dict[str, Callable[[dict[str, Any]], object]] = {
    "a prompt of one and a half tokens": lambda m: m["groups"][0].update(length=3.5),
    "prompts numbered by floats": lambda m: m["groups"][0].update(prompts=[0.0, 1.0]),
    "a width in words": lambda m: m.update(d_model="16"),
    "a layer twice": lambda m: m.update(layers=[2, "2"]),
    "half a layer": lambda m: m.update(layers=[2.5]),
    "noise beyond any float": lambda m: m.update(noise_floor={"2": HUGE}),
    "prompts that are no source": lambda m: m.update(prompts="a"),
    "a model that is a number": lambda m: m.update(model=5),
    "a model that is text": lambda m: m.update(model="smollm2"),
    "a model named by a number": lambda m: m.update(model={"name": 5}),
    "positions as a novel": lambda m: m.update(positions=NOVEL),
    "a schema as a novel": lambda m: m.update(schema=NOVEL),
    "a place as a novel": lambda m: m.update(observation={"place": NOVEL}),
}


@pytest.mark.parametrize("change", MANIFESTS.values(), ids=MANIFESTS)
def test_a_manifest(change: Callable[[dict[str, Any]], object], tmp_path: Path) -> None:
    folder = preimage.States.from_tensor(torch.ones(2, 3, 16), 2).save(tmp_path / "b")
    manifest = manifest_of(folder)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert len(preimage.open_states(folder)) == 2
    change(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    refused(BundleError, lambda: preimage.open_states(folder))
    assert main(["invert", str(folder)]) == BAD_INPUT


def write_bundle(folder: Path, **changes: Any) -> Path:
    """A bundle of two prompts whose file has just what its manifest says, whatever that is."""
    preimage.States.from_tensor(torch.ones(2, 3, 16), 2).save(folder)
    manifest = manifest_of(folder) | changes
    groups = tuple(Group(group["length"], tuple(group["prompts"])) for group in manifest["groups"])
    layout = Layout(groups, tuple(manifest["layers"]), manifest["positions"], manifest["d_model"])
    path = folder / "states.safetensors"
    save_file({name: torch.ones(shape) for name, shape in layout.names().items()}, path)
    manifest |= {"bytes": path.stat().st_size, "checksums": {path.name: sha(path)}}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


TWO = {"length": 3, "prompts": [0, 1]}
CONSISTENT: dict[str, dict[str, Any]] = {
    "a group without prompts": {"groups": [TWO, {"length": 1, "prompts": []}]},
    "prompts without a position": {"groups": [{"length": 0, "prompts": [0, 1]}]},
    "prompts that are numbered by truth": {"groups": [{"length": 3, "prompts": [False, True]}]},
}


@pytest.mark.parametrize("changes", CONSISTENT.values(), ids=CONSISTENT)
def test_a_bundle_that_agrees_with_itself(changes: dict[str, Any], tmp_path: Path) -> None:
    assert len(preimage.open_states(write_bundle(tmp_path / "whole"))) == 2
    folder = write_bundle(tmp_path / "b", **changes)
    refused(BundleError, lambda: preimage.open_states(folder))


# Lenses


@pytest.fixture
def lens(tmp_path: Path) -> Path:
    """The file of a lens for the model of the seeds."""
    path = tmp_path / "l.safetensors"
    path.write_bytes(seeds.lenses(tmp_path)[0])
    return path


def change_lens(
    path: Path,
    about: Callable[[dict[str, Any]], object] = whole,
    tensors: Callable[[dict[str, torch.Tensor]], object] = whole,
) -> None:
    """Write a lens again, with something else in it."""
    with safe_open(path, framework="pt") as file:
        said = json.loads(file.metadata()["about"])
    held = load_file(path)
    about(said)
    tensors(held)
    save_file(held, path, {"about": json.dumps(said)})


LENSES: dict[str, Callable[[dict[str, Any]], object]] = {
    "a share beyond any float": lambda a: a["ranks"]["text"].update(rank0=HUGE),
    "no rank at all": lambda a: a["shape"].update(rank=0),
    "more neighbours than positions": lambda a: a["shape"].update(neighbours=2**62),
    "a schema as a novel": lambda a: a.update(schema=NOVEL),
    "a size that lenses have not": lambda a: a["shape"].update({NOVEL: 1}),
}


@pytest.mark.parametrize("change", LENSES.values(), ids=LENSES)
def test_what_a_lens_says(change: Callable[[dict[str, Any]], object], lens: Path) -> None:
    change_lens(lens)
    read_weights(read_info(lens))
    change_lens(lens, change)
    refused(ModelError, lambda: read_weights(read_info(lens)))


def test_few_numbers_of_a_lens_are_not_made_many(lens: Path) -> None:
    def one_for_all(held: dict[str, torch.Tensor]) -> None:
        name = next(name for name, value in held.items() if value.dtype == torch.int8)
        held[name] = torch.ones(3000, dtype=torch.int8)  # times a step a row: 3000 x 3000
        held[f"{name}.step"] = torch.ones(3000)

    change_lens(lens, tensors=one_for_all)
    error = refused(ModelError, lambda: read_weights(read_info(lens)))
    assert "no step a row" in str(error.__cause__)  # refused before they are multiplied


@pytest.mark.parametrize("number", [math.nan, math.inf, 1e30])
def test_weights_of_a_lens_that_nothing_can_be_reckoned_with(number: float, lens: Path) -> None:
    def spoil(held: dict[str, torch.Tensor]) -> None:
        held["project.weight.step"][0] = number

    change_lens(lens, tensors=spoil)
    states = preimage.capture(seeds.model(), seeds.PROMPTS, seeds.LAYER)
    refused(ModelError, lambda: preimage.invert(seeds.model(), states, lens=lens))


def test_a_probe_of_no_numbers_that_torch_has(lens: Path) -> None:
    raw = lens.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    probe = header["probe"]
    probe |= {"dtype": "F4", "shape": [*probe["shape"][:-1], 4 * probe["shape"][-1]]}
    about = json.loads(header["__metadata__"]["about"])
    header["__metadata__"]["about"] = json.dumps(about | {"weight_hash": "0" * 64})
    text = json.dumps(header).encode()
    lens.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])
    refused(ModelError, lambda: given_lens(lens, seeds.model(), seeds.LAYER))


@pytest.mark.parametrize("name", [NOVEL, "\n", "\x1b[2J"], ids=["novel", "line", "terminal"])
def test_a_lens_for_a_model_of_any_name(name: str, lens: Path, tmp_path: Path) -> None:
    change_lens(lens, lambda about: about.update(model=name, weight_hash="0" * 64))
    change_lens(lens, tensors=lambda held: held.pop("probe"))
    folder = tmp_path / "lenses"
    push_lenses([lens], folder)
    for action in (
        lambda: given_lens(lens, seeds.model(), seeds.LAYER),
        lambda: pull_lenses(folder, seeds.model()),
        lambda: push_lenses([lens, lens], folder),
    ):
        assert str(refused(ModelError, action)).isprintable()


# Tensors


def write_tensors(path: Path, **entries: tuple[str, list[int], int]) -> Path:
    """A safetensors file of zeros: names with their type, shape and number of bytes."""
    header, end = {}, 0
    for name, (dtype, shape, size) in entries.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(end))
    return path


@pytest.mark.parametrize("shape", [[2, 4, 16], [16]], ids=str)
@pytest.mark.parametrize(("dtype", "bits"), [("F4", 4), ("F6_E2M3", 6)])
def test_numbers_of_a_type_that_torch_has_not(
    dtype: str, bits: int, shape: list[int], tmp_path: Path
) -> None:
    size = math.prod(shape) * bits // 8
    path = write_tensors(tmp_path / "t.safetensors", h=(dtype, shape, size))
    refused(StatesError, lambda: preimage.states_from(read_states_file(path).states, seeds.model(), 2))


def test_a_shape_that_no_tensor_has(tmp_path: Path) -> None:
    path = write_tensors(tmp_path / "t.safetensors", h=("F32", [1, 2**63, 0], 0))
    refused(StatesError, lambda: read_states_file(path))


NAMES: dict[str, list[str]] = {
    "a layer of thousands of digits": ["hidden_states.0", f"hidden_states.{'9' * 5000}"],
    "a layer that needs all memory": ["hidden_states.0", "hidden_states.999999999"],
    "names of several lines": ["a\nb", "c"],
    "names as novels": [NOVEL, "c"],
    "names that write on the terminal": ["\x1b[2J", "c"],
}


@pytest.mark.parametrize("names", NAMES.values(), ids=NAMES)
def test_names_of_tensors(names: list[str], tmp_path: Path) -> None:
    path = write_tensors(tmp_path / "t.safetensors", **{name: ("F32", [1, 16], 64) for name in names})
    error = refused(StatesError, lambda: read_states_file(path, layer=1))
    assert str(error).isprintable()


HEADERS: dict[str, bytes] = {
    "an open bracket": b"{'descr'",
    "nested beyond recursion": b"-" * 4000 + b"1",
    "brackets without end": b"(" * 5000,
    "indented anew": b"  1\n 2",
    "a number of thousands of digits": b"9" * 5000,
}


@pytest.mark.parametrize("header", HEADERS.values(), ids=HEADERS)
def test_headers_of_arrays(header: bytes, tmp_path: Path) -> None:
    raw = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + bytes(64)
    path = tmp_path / "t.npy"
    path.write_bytes(raw)
    refused(StatesError, lambda: read_states_file(path))
    with zipfile.ZipFile(tmp_path / "t.npz", "w") as archive:
        archive.writestr("h.npy", raw)
    refused(StatesError, lambda: read_states_file(tmp_path / "t.npz"))


def test_an_archive_of_a_later_version(tmp_path: Path) -> None:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr("h.npy", npy(np.ones((2, 16), "f4")))
    raw = bytearray(made.getvalue())
    raw[raw.index(b"PK\x01\x02") + 6] = 109  # the version needed to extract
    (tmp_path / "t.npz").write_bytes(raw)
    refused(StatesError, lambda: read_states_file(tmp_path / "t.npz"))


# Prompts


def gathered(path: Path) -> list[Any]:
    vocabulary = Vocabulary(make_tokenizer(), 300, None)
    return list(gather(path, vocabulary, PromptOptions(length=3, count=2)))


def test_a_text_that_stands_once_in_a_parquet_file_is_once_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "p.parquet"
    text = pa.array(["a b c d " * 20_000])
    rows = pa.DictionaryArray.from_arrays(pa.array([0] * 1024, pa.int32()), text)
    for column in (rows, rows.cast(pa.string())):  # 160 MB of less than a kilobyte
        pq.write_table(pa.table({"text": column}), path, compression="zstd")
        assert path.stat().st_size < 2000
        before = pa.total_allocated_bytes()
        entries = read_file(path, whole=False)
        next(entries)
        assert pa.total_allocated_bytes() - before < 20 << 20
        assert len(gathered(path)) == 2


def test_a_parquet_file_that_would_fill_the_memory(tmp_path: Path) -> None:
    path = tmp_path / "p.parquet"
    pq.write_table(pa.table({"text": ["x" * 100_000_000]}), path, compression="zstd")
    refused(PromptError, lambda: gathered(path))


def test_a_parquet_file_of_a_million_lists_in_its_footer(tmp_path: Path) -> None:
    footer = b"\x15\x02\x19\xfc" + b"\xc0\x84\x3d"  # a version, and a schema of so many elements
    path = tmp_path / "p.parquet"
    path.write_bytes(b"PAR1" + footer + len(footer).to_bytes(4, "little") + b"PAR1")
    error = refused(PromptError, lambda: gathered(path))
    assert "size" in error.message.lower()  # of the list, before it is read


def test_a_parquet_file_of_times_that_python_has_not(tmp_path: Path) -> None:
    path = tmp_path / "p.parquet"
    times = pa.array([[2**60]], pa.list_(pa.int64())).cast(pa.list_(pa.duration("s")))
    pq.write_table(pa.table({"ids": times}), path)
    refused(PromptError, lambda: gathered(path))


def test_a_parquet_file_whose_column_has_none(tmp_path: Path) -> None:
    elements = b"\x48\x06schema\x15\x02\x00", b"\x35\x02\x18\x04text\x15\x00\x00"  # one inside, and none
    rows = b"\x19\x0c\x16\x00\x16\x06\x00"  # three, of no column
    footer = b"\x15\x02\x19\x2c" + b"".join(elements) + b"\x16\x06\x19\x1c" + rows + b"\x00"
    path = tmp_path / "p.parquet"
    path.write_bytes(b"PAR1" + footer + len(footer).to_bytes(4, "little") + b"PAR1")
    refused(PromptError, lambda: gathered(path))


# Models


HEADS: dict[str, Any] = {
    "a header of text": "h",
    "one offset": {"h": {"dtype": "F32", "shape": [1], "data_offsets": [0]}},
    "one offset of codes": {"h": {"dtype": "I8", "shape": [4], "data_offsets": [0]}},
    "more numbers than floats can count": {
        "h": {"dtype": "F32", "shape": [2**60] * 20, "data_offsets": [0, 4]}
    },
    "nested beyond recursion": None,
}


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
def test_weights_with_any_header(head: Any, tmp_path: Path) -> None:
    text = DEEP.encode() if head is None else json.dumps(head).encode()
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "w.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(4))
    files = locate(str(tmp_path))
    require_room(files, "float32", torch.device("cpu"))
    assert files.hash is None or len(files.hash) == 64


def test_a_config_or_an_index_of_weights_nested_beyond_recursion(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(DEEP)
    (tmp_path / "w.safetensors").write_bytes(b"")
    assert locate(str(tmp_path)).dtype == "float32"
    (tmp_path / "model.safetensors.index.json").write_text(DEEP)
    refused(ModelError, lambda: locate(str(tmp_path)))


def test_names_in_a_model_as_novels(tmp_path: Path) -> None:
    refused(ModelError, lambda: locate(NOVEL))
    (tmp_path / "config.json").write_text(json.dumps({"dtype": NOVEL}))
    (tmp_path / "w.safetensors").write_bytes(b"")
    refused(ModelError, lambda: locate(str(tmp_path)).dtype)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"h": NOVEL}}))
    refused(ModelError, lambda: locate(str(tmp_path)))


# Results and plans


DOCUMENTS: dict[str, str] = {
    "nested beyond recursion": DEEP,
    "a kind as a novel": json.dumps({"kind": NOVEL}),
}


@pytest.mark.parametrize("text", DOCUMENTS.values(), ids=DOCUMENTS)
def test_a_saved_result(text: str, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_text(text)
    refused(RunFolderError, lambda: Inversion.load(path))


def test_a_document_nested_too_deeply(tmp_path: Path) -> None:
    levels = 220  # which json reads, and what walks over the document next does not
    for text in (DEEP, '{"a":[' * levels + "]}" * levels):
        (tmp_path / "run.json").write_text(text)
        refused(RunFolderError, lambda: read_json(tmp_path / "run.json"))


@pytest.mark.parametrize("name", [NOVEL, "\n", "\x1b[2J"], ids=["novel", "line", "terminal"])
def test_a_plan_with_fields_of_any_name(name: str, tmp_path: Path) -> None:
    error = refused(RunFolderError, lambda: require_same(tmp_path, {"plan": {name: 1}}, {"plan": {"a": 1}}))
    assert str(error).isprintable()


# Options


def test_a_layer_beside_any_space() -> None:
    assert parse_layers("1\x1f,\u20032", 3) == parse_layers([1, 2], 3)


def test_layers_and_positions_of_thousands_of_digits() -> None:
    for text in ("9" * 5000, f"0-{'9' * 5000}", f"{'9' * 5000}-0", NOVEL, f"{NOVEL}-{NOVEL}"):
        refused(LayerError, partial(parse_layers, text, 3))
        refused(LayerError, partial(parse_layer, text, 3))
    refused(OptionError, lambda: Observation(at=(*range(1000), 0)))
    refused(OptionError, lambda: Observation(NOVEL))
