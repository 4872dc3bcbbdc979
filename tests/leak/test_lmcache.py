"""What LMCache keeps on a disk, read from files that its own code wrote (files/README.md)."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from preimage.errors import StatesError
from preimage.leak.block_hashes import matches
from preimage.leak.chains import arrange
from preimage.leak.holdings import Holding, Sizes, Told
from preimage.leak.readers.lmcache import read
from support.refusing import refused

FILES = Path(__file__).parent / "files/lmcache"
NAMES = ("tiny-model@1@0@5348e6690e164538@bfloat16", "tiny-model@1@0@-7d6898b3653177b9@bfloat16")
CHUNKS = [FILES / f"{name}.pt" for name in NAMES]  # in the order of their prompt
LAYER = FILES / f"{NAMES[0]}@0.pt"
IDS = next(
    row["token_ids"]
    for row in json.loads((FILES.parent / "block_names.json").read_text())
    if row["scheme"] == "lmcache-builtin" and not row["vllm"]
)
SIZES = Sizes(n_layers=2, d_model=8, heads=2, head_size=4, vocab_size=50_000)
KNOWN = Told(sizes=SIZES)


def held(path: Path, told: Told = Told()) -> Holding:  # noqa: B008  # it is frozen
    holding = read(path, told)
    assert holding is not None
    return holding


def copied(folder: Path, name: str, content: bytes | None = None) -> Path:
    """The first chunk's bytes, or others, under another name."""
    path = folder / name
    path.write_bytes(CHUNKS[0].read_bytes() if content is None else content)
    return path


def test_a_chunk_is_known_by_its_name_without_a_model() -> None:
    for index, path in enumerate(CHUNKS):
        holding = held(path, Told(page=8))
        (piece,) = holding.pieces
        assert holding.kind == "LMCache chunk"
        assert (piece.start, piece.seen) == (None, ())
        assert piece.block is not None
        assert matches(piece.block, IDS[: 8 * (index + 1)]) == "lmcache-builtin"
        assert matches(piece.block, [*IDS[: 8 * (index + 1) - 1], 77]) is None
    assert "name the model" in held(CHUNKS[0]).notes[-1]


def test_chunks_are_put_in_order_and_proved() -> None:
    first, second = (held(path).pieces[0].block for path in CHUNKS)
    assert first is not None
    assert second is not None
    found = arrange([(second, IDS[8:]), (first, IDS[:8])])
    assert [(prompt.pages, prompt.token_ids) for prompt in found.prompts()] == [((1, 0), tuple(IDS))]


def test_keys_and_values_stand_where_they_should() -> None:
    """The engine's file holds 0..255 (files/README.md): 2 x layers x tokens x width."""
    whole = torch.arange(256.0).reshape(2, 2, 8, 8)
    (piece,) = held(CHUNKS[0], KNOWN).pieces
    assert piece.tokens == 8
    assert [(one.layer, one.observation.place) for one in piece.seen] == [
        (1, "keys"), (1, "values"), (2, "keys"), (2, "values"),
    ]  # fmt: skip
    for index, one in enumerate(piece.seen):
        assert torch.equal(one.read(), whole[index % 2, index // 2])
        assert one.observation.stored == "bf16"
    assert piece.block is not None
    assert piece.block.page == 8


@pytest.mark.parametrize(("order", "shape"), [(None, (8, 2, 8)), ("T2D", (8, 2, 8)), ("2TD", (2, 8, 8))])
def test_a_layer_by_itself(order: str | None, shape: tuple[int, ...]) -> None:
    whole = torch.arange(128.0).reshape(shape)
    keys, values = held(LAYER, replace(KNOWN, order=order)).pieces[0].seen
    assert (keys.layer, values.layer) == (1, 1)
    half = shape.index(2)
    assert torch.equal(keys.read(), whole.select(half, 0))
    assert torch.equal(values.read(), whole.select(half, 1))


def test_the_last_layer_has_its_number(tmp_path: Path) -> None:
    path = copied(tmp_path, f"{NAMES[0]}@1.pt", LAYER.read_bytes())
    assert held(path, KNOWN).pieces[0].seen[0].layer == 2
    path = copied(tmp_path, f"{NAMES[0]}@2.pt", LAYER.read_bytes())
    refused(StatesError, lambda: read(path, KNOWN))


def test_a_worker_has_its_heads(tmp_path: Path) -> None:
    path = copied(tmp_path, "m@2@1@5348e6690e164538@bfloat16.pt")
    (piece,) = held(path, KNOWN).pieces
    assert piece.tokens == 16
    assert piece.seen[0].observation.kept == (4, 5, 6, 7)
    assert piece.seen[0].read().shape == (16, 4)
    for name in (
        "m@2@2@5348e6690e164538@bfloat16.pt",
        "m@3@0@5348e6690e164538@bfloat16.pt",
        "m@0@0@1@half.pt",
    ):
        path = copied(tmp_path, name)
        refused(StatesError, lambda path=path: read(path, KNOWN))


def test_types_that_the_name_says(tmp_path: Path) -> None:
    for name, stored, width in (
        ("half", "fp16", 2),
        ("float", "float32", 4),
        ("fp8_e5m2", "fp8", 1),
        ("uint8", "fp8", 1),
    ):
        (piece,) = held(copied(tmp_path, f"m@1@0@5348e6690e164538@{name}.pt"), KNOWN).pieces
        assert piece.seen[0].observation.stored == stored
        assert piece.tokens == 16 // width
    for name in ("int64", "fp8_e4m3fnuz", "nonsense"):
        path = copied(tmp_path, f"m@1@0@5348e6690e164538@{name}.pt")
        refused(StatesError, lambda path=path: read(path, KNOWN))
    refused(StatesError, lambda: read(CHUNKS[0], replace(KNOWN, stored="fp16")))


def test_tags_and_slashes_and_newlines_in_names(tmp_path: Path) -> None:
    path = copied(tmp_path, "\x1b[31m\nevil..-model@1@0@5348e6690e164538@bfloat16@user%0 x@b%.pt")
    holding = held(path, KNOWN)
    assert "\x1b" not in holding.about
    assert "\n" not in holding.about
    assert any("tagged" in note for note in holding.notes)
    assert holding.pieces[0].tokens == 8


@pytest.mark.parametrize(
    "told",
    [
        replace(KNOWN, sizes=replace(SIZES, n_layers=3)),
        replace(KNOWN, sizes=replace(SIZES, heads=64)),
        replace(KNOWN, page=4),
        replace(KNOWN, order="HND"),
        replace(KNOWN, stored="int8"),
    ],
    ids=["layers", "heads", "page", "order", "stored"],
)
def test_another_model_is_refused(told: Told) -> None:
    refused(StatesError, lambda: read(CHUNKS[0], told))


def test_a_chunk_cut_short_or_sparse_is_refused(tmp_path: Path) -> None:
    path = copied(tmp_path, CHUNKS[0].name)
    for size in (0, 1, 511, 513, 10 << 30):
        os.truncate(path, size)
        refused(StatesError, lambda: read(path, KNOWN))
    os.truncate(path, 64 * 3)  # the last chunk of a prompt is a short one
    assert held(path, KNOWN).pieces[0].tokens == 3


def test_a_chunk_that_changed_since_is_refused(tmp_path: Path) -> None:
    path = copied(tmp_path, CHUNKS[0].name)
    seen = held(path, KNOWN).pieces[0].seen[0]
    os.truncate(path, 64)
    refused(StatesError, seen.read)


def test_the_file_connector_and_the_server_give_their_names_alone(tmp_path: Path) -> None:
    path = copied(tmp_path, f"org-SEP-{NAMES[0]}.data")
    holding = held(path, KNOWN)
    assert holding.pieces[0].seen == ()
    assert holding.pieces[0].block is not None
    assert matches(holding.pieces[0].block, IDS[:8]) == "lmcache-builtin"
    for end in ("", "@salt"):
        holding = held(copied(tmp_path, f"m@0x01000100@0@{'ab' * 32}{end}.data"), KNOWN)
        assert holding.pieces[0].block is None
        assert ("salt" in holding.notes[0]) == bool(end)


class Evil:
    """What an unpickler would run."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("executed",)


def test_torch_files_of_such_a_name_are_not_ours_and_nothing_is_unpickled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / CHUNKS[0].name
    torch.save({"a": torch.ones(2)}, path)
    assert read(path, KNOWN) is None
    torch.save({"a": torch.ones(2)}, path, _use_new_zipfile_serialization=False)
    assert read(path, KNOWN) is None
    path.write_bytes(pickle.dumps(Evil()).ljust(512, b"\0"))
    held(path, KNOWN).pieces[0].seen[0].read()
    assert not (tmp_path / "executed").exists()


@given(st.text(st.sampled_from("@%-.0aftp\n\x1b/é"), max_size=40))
def test_other_names_are_none(name: str) -> None:
    assert read(FILES / f"{name.replace('/', '-')}.pt", KNOWN) is None


def test_what_is_no_file(tmp_path: Path) -> None:
    (tmp_path / CHUNKS[0].name).mkdir()
    assert read(tmp_path / CHUNKS[0].name, KNOWN) is None
    assert read(tmp_path / f"{'x' * 9000}{CHUNKS[0].name}", KNOWN) is None
    assert read(tmp_path / f"{'x' * 9000}@0x01000100@0@{'ab' * 32}.data", KNOWN) is None
    shutil.copy(CHUNKS[0], tmp_path / "model.pt")
    assert read(tmp_path / "model.pt", KNOWN) is None
