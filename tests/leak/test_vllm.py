"""What vLLM writes, read from files that its own code made (files/README.md), and what is none of it."""

from __future__ import annotations

import json
import os
import resource
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from preimage.errors import LayerError, StatesError
from preimage.leak.block_hashes import matches
from preimage.leak.chains import arrange
from preimage.leak.holdings import Holding, Sizes, Told
from preimage.leak.readers.vllm import read
from support.refusing import refused

FILES = Path(__file__).parent / "files/vllm"
STATES = FILES / "cmpl-7-0.safetensors"
BLOCKS = sorted(FILES.glob("*_r0/*/*/*.bin"), key=lambda path: path.name, reverse=True)  # in their order
IDS = [1, 17, 255, 256, 300, 49151]
BLOCK_IDS = next(
    row["token_ids"]
    for row in json.loads((FILES.parent / "block_names.json").read_text())
    if row["scheme"] == "vllm-sha256" and row["page"] == 4 and row["salt"] is None and row["seed"] is None
)
SIZES = Sizes(n_layers=2, d_model=8, heads=2, head_size=4, vocab_size=50_000)
KNOWN = Told(sizes=SIZES, order="NHD")


def held(path: Path, told: Told = Told()) -> Holding:  # noqa: B008  # it is frozen
    holding = read(path, told)
    assert holding is not None
    return holding


@pytest.fixture
def tier(tmp_path: Path) -> Path:
    """The file tier, to be changed."""
    shutil.copytree(FILES, tmp_path / "tier")
    return tmp_path / "tier"


def block_in(tier: Path) -> Path:
    return next(path for path in tier.glob("*_r0/*/*/*.bin") if path.name == BLOCKS[0].name)


def configured(tier: Path, **changes: Any) -> Path:
    """The first block, beside a config.json with some entries changed; None takes one out."""
    place = next(tier.glob("*/config.json"))
    told = json.loads(place.read_text()) | changes
    place.write_text(json.dumps({name: value for name, value in told.items() if value is not None}))
    return block_in(tier)


def test_a_request_gives_its_token_ids_away() -> None:
    holding = held(STATES)
    assert holding.kind == "vLLM hidden states"
    (piece,) = holding.pieces
    assert piece.clear[0].token_ids == tuple(IDS)
    assert (piece.tokens, piece.start, piece.seen) == (6, 0, ())
    assert any("does not say which 3 layers" in note for note in holding.notes)


@pytest.mark.parametrize(
    ("told", "layers"),
    [
        (Told(layers=(0, 1, 2)), (0, 1, 2)),
        (Told(layers=(0, 2, "final"), sizes=SIZES), (0, 2, "final")),
        (Told(sizes=SIZES), (0, 1, 2)),  # as many as the model has
    ],
)
def test_layers_are_read_one_by_one(told: Told, layers: tuple[int | str, ...]) -> None:
    whole = load_file(STATES)["hidden_states"]
    seen = held(STATES, told).pieces[0].seen
    assert tuple(one.layer for one in seen) == layers
    assert [one.observation.place for one in seen] == [
        "final" if layer == "final" else "residual" for layer in layers
    ]
    assert {one.observation.stored for one in seen} == {"bf16"}
    for index, one in enumerate(seen):
        assert torch.equal(one.read(), whole[:, index])


def test_layers_that_cannot_be_are_refused() -> None:
    for layers in ((1,), (1, 1, 2), (1, 2, 3, 4), ()):
        refused(StatesError, lambda layers=layers: read(STATES, Told(layers=layers)))
    refused(LayerError, lambda: read(STATES, Told(layers=(0, 1, 9), sizes=SIZES)))
    refused(StatesError, lambda: read(STATES, Told(sizes=replace(SIZES, d_model=16))))


def test_a_request_of_one_layer(tmp_path: Path) -> None:
    path = tmp_path / "one.safetensors"
    save_file({"hidden_states": torch.ones(2, 1, 8), "token_ids": torch.tensor([1, 2])}, path)
    (seen,) = held(path, Told(layers=(2,), sizes=SIZES)).pieces[0].seen
    assert (seen.layer, seen.observation.stored) == (2, "float32")


def dumped(**tensors: torch.Tensor) -> Callable[[Path], object]:
    return lambda path: save_file(tensors, path)


THREE = torch.zeros(2, 1, 4)
OTHERS = {
    "of batches": dumped(hidden_states=THREE, token_ids=torch.zeros(2, 1, dtype=torch.int64)),
    "of one layer": dumped(hidden_states=THREE[0], token_ids=torch.tensor([1])),
    "more beside": dumped(hidden_states=THREE, token_ids=torch.tensor([1, 2]), loss_mask=torch.ones(2)),
    "a model": dumped(weight=THREE),
    "empty": lambda path: path.write_bytes(b""),
    "short": lambda path: path.write_bytes(b"\x02\0\0"),
    "a list": lambda path: path.write_bytes((2).to_bytes(8, "little") + b"[]"),
    "deep": lambda path: path.write_bytes((60_000).to_bytes(8, "little") + b"[" * 60_000),
    "a long header": lambda path: path.write_bytes((10 << 30).to_bytes(8, "little") + b"{}"),
    "text": lambda path: path.write_bytes(b"hello, this is no tensor at all"),
}


@pytest.mark.parametrize("made", OTHERS.values(), ids=OTHERS)
def test_what_others_write_is_left_to_their_readers(tmp_path: Path, made: Callable[[Path], object]) -> None:
    path = tmp_path / "x.safetensors"
    made(path)
    assert read(path, Told()) is None


BAD = {
    "ids of floats": dumped(hidden_states=THREE, token_ids=torch.tensor([1.0, 2.0])),
    "too few ids": dumped(hidden_states=THREE, token_ids=torch.tensor([1])),
    "too many ids": dumped(hidden_states=THREE, token_ids=torch.tensor([1, 2, 3])),
    "a negative id": dumped(hidden_states=THREE, token_ids=torch.tensor([1, -2])),
    "a long id": dumped(hidden_states=THREE, token_ids=torch.tensor([1, 2**32])),
    "whole numbers": dumped(hidden_states=THREE.long(), token_ids=torch.tensor([1, 2])),
    "no tokens": dumped(hidden_states=THREE[:0], token_ids=torch.zeros(0, dtype=torch.int64)),
    "no layers": dumped(hidden_states=THREE[:, :0], token_ids=torch.tensor([1, 2])),
    "cut short": lambda path: path.write_bytes(STATES.read_bytes()[:-1]),
    "longer": lambda path: path.write_bytes(STATES.read_bytes() + b"\0"),
    "overlapping": lambda path: path.write_bytes(STATES.read_bytes().replace(b"[48,336]", b"[40,328]")),
    "a huge shape": lambda path: path.write_bytes(STATES.read_bytes().replace(b"[6,3,8]", b"[6,3,9]")),
}


@pytest.mark.parametrize("made", BAD.values(), ids=BAD)
def test_damaged_requests_are_refused(tmp_path: Path, made: Callable[[Path], object]) -> None:
    path = tmp_path / "x.safetensors"
    made(path)
    refused(StatesError, lambda: read(path, Told()))


def test_a_prompt_of_embeddings_has_no_ids(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"hidden_states": THREE, "token_ids": torch.zeros(0, dtype=torch.int64)}, path)
    assert held(path).pieces[0].clear == ()


def test_a_sparse_file_of_ten_gigabytes_takes_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    tokens = (10 << 30) // 16
    ends = [8 * tokens, 16 * tokens]
    header = json.dumps(
        {
            "token_ids": {"dtype": "I64", "shape": [tokens], "data_offsets": [0, ends[0]]},
            "hidden_states": {"dtype": "F32", "shape": [tokens, 1, 2], "data_offsets": ends},
        }
    ).encode()
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + ends[1])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert str(tokens) in refused(StatesError, lambda: read(path, Told())).message
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB


@given(st.data())
def test_a_changed_byte_is_no_other_error(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    content = bytearray(STATES.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, 150))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("x") / "x.safetensors"
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    try:
        holding = read(path, Told(layers=(0, 1, 2)))
    except StatesError:
        return
    for seen in holding.pieces[0].seen if holding else ():
        assert seen.read().ndim == 2


def test_a_file_that_changed_since_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    shutil.copy(STATES, path)
    seen = held(path, Told(layers=(0, 1, 2))).pieces[0].seen[0]
    save_file({"hidden_states": torch.zeros(6, 3, 4)}, path)
    refused(StatesError, seen.read)
    path.write_bytes(b"gone")
    refused(StatesError, seen.read)


def test_a_block_is_known_by_its_name_without_a_model() -> None:
    for index, path in enumerate(BLOCKS):
        (piece,) = held(path).pieces
        assert (piece.tokens, piece.start, piece.seen) == (4, None, ())
        assert piece.block is not None
        assert piece.block.page == 4
        assert matches(piece.block, BLOCK_IDS[: 4 * (index + 1)]) == "vllm-sha256"


def test_blocks_are_put_in_order_and_proved() -> None:
    blocks = [held(path).pieces[0].block for path in BLOCKS]
    assert blocks[0] is not None
    assert blocks[1] is not None
    found = arrange([(blocks[1], BLOCK_IDS[4:8]), (blocks[0], BLOCK_IDS[:4])])
    assert [prompt.token_ids for prompt in found.prompts()] == [tuple(BLOCK_IDS[:8])]


@pytest.mark.parametrize(
    ("order", "axes"),
    [
        ("NHD", (2, 4, 2, 2, 4)),  # layer, token, head, half, channel
        ("HND", (2, 2, 4, 2, 4)),
        ("LB2NHC", (2, 2, 4, 2, 4)),
        ("bhlnc", (2, 2, 4, 2, 4)),
    ],
)
def test_keys_and_values_stand_where_the_order_says(order: str, axes: tuple[int, ...]) -> None:
    """The engine's file holds 0..127 (files/README.md), so that a number says where it was."""
    letters = {"NHD": "lnhkc", "HND": "lhnkc", "LB2NHC": "lknhc", "bhlnc": "hlnkc"}[order]
    counted = torch.arange(128.0).reshape(axes)
    whole = counted.permute([letters.index(letter) for letter in "lknhc"]).reshape(2, 2, 4, 8)
    (piece,) = held(BLOCKS[0], replace(KNOWN, order=order)).pieces
    assert piece.tokens == 4
    assert [(one.layer, one.observation.place) for one in piece.seen] == [
        (1, "keys"), (1, "values"), (2, "keys"), (2, "values"),
    ]  # fmt: skip
    assert piece.seen[0].observation.stored == "bf16"
    for index, one in enumerate(piece.seen):
        assert torch.equal(one.read(), whole[index // 2, index % 2])


def test_the_order_that_a_canonical_format_names(tier: Path) -> None:
    path = configured(tier, canonical_format="v1-nhd")
    ours, told = held(path, Told(sizes=SIZES)).pieces[0].seen, held(BLOCKS[0], KNOWN).pieces[0].seen
    assert all(torch.equal(one.read(), other.read()) for one, other in zip(ours, told, strict=True))
    refused(StatesError, lambda: read(configured(tier, canonical_format="v1-zigzag"), Told(sizes=SIZES)))


def test_layers_in_another_order_keep_their_numbers(tier: Path) -> None:
    names = [f"model.layers.{layer}.self_attn.attn" for layer in (1, 0)]
    path = configured(tier, kv_cache_groups=[{"layer_names": names, "tokens_per_block": 4}])
    assert [one.layer for one in held(path, KNOWN).pieces[0].seen] == [2, 2, 1, 1]


def test_what_nobody_said_is_asked_for_and_the_name_is_used(tmp_path: Path) -> None:
    assert any("order" in note for note in held(BLOCKS[0], Told(sizes=SIZES)).notes)
    path = tmp_path / BLOCKS[0].name
    shutil.copy(BLOCKS[0], path)
    holding = held(path, Told(sizes=SIZES))
    assert holding.pieces[0].block is not None
    assert holding.pieces[0].seen == ()
    assert all(word in holding.notes[-1] for word in ("page", "stored", "order"))
    alone = held(path, Told(sizes=SIZES, page=4, stored="bf16", order="NHD"))
    assert torch.equal(alone.pieces[0].seen[3].read(), held(BLOCKS[0], KNOWN).pieces[0].seen[3].read())


def test_a_cache_of_several_workers_keeps_its_names(tier: Path) -> None:
    holding = held(configured(tier, tp_size=2), KNOWN)
    assert holding.pieces[0].block is not None
    assert holding.pieces[0].seen == ()
    assert "tp_size" in holding.notes[-1]


@pytest.mark.parametrize(
    "told",
    [
        replace(KNOWN, sizes=replace(SIZES, n_layers=3)),
        replace(KNOWN, sizes=replace(SIZES, heads=4096)),
        replace(KNOWN, order="zigzag\x1b[2J"),
        replace(KNOWN, stored="float32"),
    ],
    ids=["layers", "heads", "order", "stored"],
)
def test_another_model_is_refused(told: Told) -> None:
    refused(StatesError, lambda: read(BLOCKS[0], told))


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": None},
        {"dtype": 5},
        {"dtype": "int3"},
        {"tokens_per_hash": 0},
        {"tokens_per_hash": True},
        {"blocks_per_file": 10**9},
        {"blocks_per_file": 17},
        {"kv_cache_groups": []},
        {"kv_cache_groups": "x"},
        {"kv_cache_groups": [{"layer_names": [], "tokens_per_block": 4}]},
        {"kv_cache_groups": [{"layer_names": ["a", "b"], "tokens_per_block": 4}]},
        {"kv_cache_groups": [{"layer_names": ["m.0.a", "m.0.a"], "tokens_per_block": 4}]},
        {"kv_cache_groups": [{"layer_names": ["m.0.a", "m.1.a"], "tokens_per_block": 1 << 20}]},
        {"model_name": None},
        {"canonical_format": 7},
    ],
)
def test_a_config_that_says_nonsense_is_refused(tier: Path, changes: dict[str, Any]) -> None:
    refused(StatesError, lambda: read(configured(tier, **changes), KNOWN))


@pytest.mark.parametrize(
    "content", [b"", b"[" * 5000, b"{}", b"[]", b"\xff\xfe", b"null", b'"x"', b" " * (2 << 20)]
)
def test_a_config_that_is_none_is_refused(tier: Path, content: bytes) -> None:
    next(tier.glob("*/config.json")).write_bytes(content)
    refused(StatesError, lambda: read(block_in(tier), KNOWN))


def test_a_block_cut_short_or_sparse_is_refused(tier: Path) -> None:
    path = block_in(tier)
    for size in (0, 1, 255, 4095, 4097, 10 << 30):
        os.truncate(path, size)
        refused(StatesError, lambda: read(path, KNOWN))
    os.truncate(path, 256)  # without what fills up a memory page
    assert len(held(path, KNOWN).pieces[0].seen) == 4


def test_names_that_are_no_blocks(tmp_path: Path) -> None:
    digest = BLOCKS[0].stem
    folder = tmp_path / "x_r0" / "123" / "45_g0"
    folder.mkdir(parents=True)
    for path in (
        folder / f"{digest}.bin",  # of another folder
        tmp_path / f"{digest[:32]}.bin",  # anybody's, without folders that are vLLM's
        tmp_path / f"{digest}.bin.tmp",
        tmp_path / f"{digest.upper()}.bin",
        tmp_path / f"{digest}\n.bin",
    ):
        path.write_bytes(BLOCKS[0].read_bytes())
        assert read(path, KNOWN) is None
    assert read(tmp_path / ("a" * 64 + ".bin"), KNOWN) is None  # there is none
    assert read(tmp_path / ("a" * 9000 + ".bin"), KNOWN) is None
    assert read(tmp_path, KNOWN) is None
    assert read(tmp_path / "a\0b", KNOWN) is None


def test_names_of_models_are_shown_on_one_line(tier: Path) -> None:
    path = configured(tier, model_name="\x1b[31mevil\n" + "y" * 5000)
    holding = held(path)
    assert "\x1b" not in holding.about
    assert "\n" not in holding.about
    assert len(holding.about) < 500
