"""Session files of llama.cpp: some that it wrote itself (files/README.md), and every way to damage them."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import preimage
from preimage.errors import StatesError
from preimage.leak.holdings import Holding, Piece, Sizes, Told
from preimage.leak.readers.llama_cpp import read
from preimage.models import LanguageModel
from support.refusing import refused
from support.tiny import tiny

FILES = Path(__file__).parent / "files" / "llama_cpp"
TINY = Sizes(n_layers=3, d_model=32, heads=2, head_size=8, vocab_size=41)
SMOLLM2 = Sizes(n_layers=30, d_model=576, heads=3, head_size=64, vocab_size=49152)
IDS = (7, 3, 40, 11, 3, 25)  # of every tiny file
OTHER = (7, 3, 40, 30, 2)  # the second sequence, where there is one
F16_FILE, Q8_FILE, Q4_FILE = (
    FILES / f"smollm2-{name}" for name in ("f16.session", "q8_0.sequence", "q4_0.sequence")
)
PROMPT = (504, 3575, 282, 4649, 314, 7042)  # "The capital of France is Paris"


def holding(path: Path, sizes: Sizes | None = TINY, order: str | None = None) -> Holding:
    found = read(path, Told(sizes=sizes, order=order))
    assert found is not None
    return found


def numbers(piece: Piece) -> dict[tuple[int | str, str], Tensor]:
    """Everything that is to be read of a piece, by layer and place."""
    found = {(seen.layer, seen.observation.place): seen.read() for seen in piece.seen}
    assert all(rows.shape[0] == piece.tokens and rows.dtype == torch.float32 for rows in found.values())
    return found


def difference(model: LanguageModel, ids: Sequence[int], piece: Piece) -> float:
    """The largest relative difference of a row from what transformers computes."""
    worst = 0.0
    for seen in piece.seen:
        place, layer = seen.observation.place, seen.layer
        expected = preimage.capture(model, [list(ids)], layer, observe=place).at(0, int(layer))
        rows = seen.read()
        worst = max(worst, float(((rows - expected).norm(dim=1) / expected.norm(dim=1)).max()))
    return worst


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("tiny-f32.session", 1e-4),
        ("tiny-f16.session", 2e-3),
        ("tiny-f16.sequence", 2e-3),
        ("tiny-f16-flash.session", 2e-3),
        ("tiny-bf16-flash.sequence", 2e-2),
    ],
)
def test_keys_and_values_are_those_of_transformers(name: str, most: float) -> None:
    found = holding(FILES / name, order="pairs" if name.endswith("sequence") else None)
    (piece,) = found.pieces
    assert [seen.layer for seen in piece.seen] == [1, 1, 2, 2, 3, 3]
    assert piece.clear[0].token_ids == IDS
    assert piece.tokens == len(IDS)
    assert piece.start == 0
    assert difference(tiny("llama"), IDS, piece) < most
    stored = {seen.observation.stored for seen in piece.seen}
    assert stored == {{"f32": "float32", "f16": "fp16", "bf1": "bf16"}[name[5:8]]}
    assert found.kind == "llama.cpp " + name.rpartition(".")[2]


def test_keys_of_the_wrong_order_are_not_those_of_transformers() -> None:
    """So that the test above can fail."""
    (piece,) = holding(FILES / "tiny-f32.session", order="halves").pieces
    assert difference(tiny("llama"), IDS, piece) > 0.1


@pytest.mark.parametrize(
    ("name", "other"), [("tiny-two-streams.session", OTHER), ("tiny-two-shared.session", IDS[:3])]
)
def test_two_sequences_are_told_apart(name: str, other: Sequence[int]) -> None:
    """Each in cells of its own, or with cells that belong to both; the token ids are not told apart."""
    found = holding(FILES / name)
    whole, first, second = found.pieces
    assert not whole.seen
    assert whole.clear
    assert not first.clear
    assert not second.clear
    assert difference(tiny("llama"), IDS, first) < 2e-3
    assert difference(tiny("llama"), other, second) < 2e-3
    assert "2 sequences" in " ".join(found.notes)


def test_without_a_model_the_ids_are_read_all_the_same() -> None:
    found = holding(FILES / "tiny-f16.session", sizes=None)
    (piece,) = found.pieces
    assert piece.clear[0].token_ids == IDS
    assert {seen.observation.place for seen in piece.seen} == {"values"}
    assert "name the model" in " ".join(found.notes)


def test_another_model_is_refused() -> None:
    path = FILES / "tiny-f16.session"
    for sizes in (
        Sizes(n_layers=4, d_model=32, heads=2, head_size=8, vocab_size=41),
        Sizes(n_layers=3, d_model=32, heads=3, head_size=8, vocab_size=41),
        Sizes(n_layers=3, d_model=32, heads=2, head_size=8, vocab_size=40),
    ):
        assert "name the model" in refused(StatesError, lambda: holding(path, sizes)).hint.lower()  # noqa: B023


def test_orders_of_other_engines_say_nothing() -> None:
    (piece,) = holding(FILES / "tiny-f32.session", order="NHD").pieces
    assert difference(tiny("llama"), IDS, piece) < 1e-4


# What follows is written here, after the layout that the reader describes.

F16, Q8_0 = 1, 8


def cell(position: int, owners: Sequence[int] = (0,), extra: int = 0) -> bytes:
    return struct.pack("<iI", position, len(owners)) + bytes(extra) + struct.pack(f"<{len(owners)}i", *owners)


def rows_of(numbers: Tensor) -> bytes:
    raw = numbers.half().numpy().tobytes()
    return struct.pack("<iQ", F16, len(raw) // len(numbers)) + raw


def columns_of(numbers: Tensor) -> bytes:
    return struct.pack("<iII", F16, 2, numbers.shape[1]) + numbers.half().T.contiguous().numpy().tobytes()


def stream(keys: Tensor, values: Tensor | None, cells: Sequence[bytes], transposed: bool = False) -> bytes:
    """A stream; ``keys`` and ``values``: layer x cell x width."""
    parts = [struct.pack("<I", len(cells)), *cells, struct.pack("<II", transposed, len(keys))]
    parts += [rows_of(one) for one in keys]
    if values is not None:
        parts += [columns_of(one) if transposed else rows_of(one) for one in values]
    return b"".join(parts)


def header(magic: bytes, version: int, ids: Sequence[int] = IDS) -> bytes:
    return magic + struct.pack(f"<II{len(ids)}i", version, len(ids), *ids)


def text(words: str) -> bytes:
    return struct.pack("<I", len(words)) + words.encode()


def states(layers: int = 3, cells: int = len(IDS), width: int = 16) -> Tensor:
    """Numbers that half precision holds exactly."""
    return torch.arange(layers * cells * width).reshape(layers, cells, width).remainder(2047).float()


SESSION, SEQUENCE = b"nsgg", b"qsgg"
CELLS = tuple(cell(position) for position in range(len(IDS)))
CACHE = stream(states(), states(), CELLS)
OUTPUTS = struct.pack("<IiQ2fQ", 1, 5, 2, 0.5, -0.5, 0)  # one token had logits, two numbers of them


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("extra", [0, 8])
@pytest.mark.parametrize("streams", [b"", struct.pack("<I", 1)])
@pytest.mark.parametrize("outputs", [b"", OUTPUTS])
def test_sessions_of_version_9(
    tmp_path: Path, transposed: bool, extra: int, streams: bytes, outputs: bytes
) -> None:
    keys, values = states(), states() + 1
    cells = [cell(position, extra=extra) for position in range(len(IDS))]
    path = tmp_path / "old.session"
    cache = stream(keys, values, cells, transposed)
    path.write_bytes(header(SESSION, 9) + text("qwen2") + outputs + streams + cache)
    (piece,) = holding(path).pieces
    found = numbers(piece)
    for layer in range(3):
        assert torch.equal(found[layer + 1, "keys"], keys[layer])
        assert torch.equal(found[layer + 1, "values"], values[layer])


def test_sequences_of_version_2_do_not_say_whose_the_cells_are(tmp_path: Path) -> None:
    cells = [cell(position, owners=()) for position in range(len(IDS))]
    path = tmp_path / "old.sequence"
    path.write_bytes(header(SEQUENCE, 2) + stream(states(), states(), cells))
    (piece,) = holding(path, order="halves").pieces
    assert torch.equal(numbers(piece)[2, "values"], states()[1])


def test_cells_of_models_with_positions_in_parts(tmp_path: Path) -> None:
    cells = [cell(position, extra=12) for position in range(len(IDS))]
    path = tmp_path / "new.session"
    path.write_bytes(
        header(SESSION, 10) + text("qwen3") + struct.pack("<I", 1) + stream(states(), states(), cells)
    )
    (piece,) = holding(path).pieces
    assert torch.equal(numbers(piece)[3, "keys"], states()[2])


def write_cells(path: Path, positions: Sequence[int]) -> Path:
    cells = [cell(position) for position in positions]
    body = stream(states(cells=len(cells)), states(cells=len(cells)), cells)
    path.write_bytes(header(SESSION, 10) + text("gpt2") + struct.pack("<I", 1) + body)
    return path


def test_cells_come_in_the_order_of_their_positions(tmp_path: Path) -> None:
    (piece,) = holding(write_cells(tmp_path / "s", (2, 0, 1))).pieces
    assert torch.equal(numbers(piece)[1, "keys"], states(cells=3)[0][[1, 2, 0]])
    assert piece.seen[0].observation.at is None


def test_positions_that_are_missing_are_named(tmp_path: Path) -> None:
    (piece,) = holding(write_cells(tmp_path / "s", (0, 1, 5))).pieces
    assert piece.start == 0
    assert {seen.observation.at for seen in piece.seen} == {(0, 1, 5)}
    (piece,) = holding(write_cells(tmp_path / "t", (4, 5, 6))).pieces
    assert piece.start == 4
    assert {seen.observation.at for seen in piece.seen} == {None}


def test_one_position_twice_is_not_read(tmp_path: Path) -> None:
    found = holding(write_cells(tmp_path / "s", (0, 1, 1)))
    assert not found.pieces[0].seen
    assert found.pieces[0].clear[0].token_ids == IDS


@pytest.mark.parametrize(
    ("body", "word"),
    [
        (stream(states(), None, CELLS), "latent"),
        (CACHE + struct.pack("<I", 1) + CACHE, "window"),
        (struct.pack("<I", 0), None),  # an empty cache
        (CACHE + b"\0", "damaged"),
        (CACHE[:-1], "damaged"),
        (b"", "damaged"),
    ],
)
def test_caches_that_are_not_read_leave_the_ids(tmp_path: Path, body: bytes, word: str | None) -> None:
    path = tmp_path / "s"
    path.write_bytes(header(SESSION, 10) + text("llama") + struct.pack("<I", 1) + body)
    found = holding(path)
    (piece,) = found.pieces
    assert piece.clear[0].token_ids == IDS
    assert not piece.seen
    assert (word or "") in " ".join(found.notes)


def test_images_have_no_token_ids(tmp_path: Path) -> None:
    path = tmp_path / "s"
    path.write_bytes(header(SESSION, 10, (5, -1, -1, 6)) + text("llama") + struct.pack("<II", 1, 0))
    found = holding(path)
    assert found.pieces[0].clear[0].token_ids == (5, 6)
    assert "2 tokens have no id" in found.notes[0]


@pytest.mark.parametrize("version", [11, 1 << 31])
def test_newer_versions_are_read_as_far_as_the_ids(tmp_path: Path, version: int) -> None:
    path = tmp_path / "s"
    path.write_bytes(header(SESSION, version) + b"something else")
    found = holding(path)
    assert found.pieces[0].clear[0].token_ids == IDS
    assert str(version) in found.notes[0]


@pytest.mark.parametrize(
    "raw",
    [
        b"nsgg",
        b"nsgg" + bytes(7),
        header(SESSION, 8),
        header(SEQUENCE, 1),
        header(SESSION, 10)[:8] + struct.pack("<I", 1 << 31),
        header(SESSION, 10)[:8] + struct.pack("<I", 7) + bytes(27),
        header(SESSION, 10, (5, -2)),
        header(SESSION, 10, (5, 41)),
    ],
)
def test_bad_headers_are_refused(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "a\nb.session"
    path.write_bytes(raw)
    refused(StatesError, lambda: holding(path))


def test_other_files_are_none_of_ours(tmp_path: Path) -> None:
    for raw in (b"", b"nsg", b"GGUF" + bytes(100), b"ggsn" + bytes(100)):
        path = tmp_path / "file"
        path.write_bytes(raw)
        assert read(path, Told()) is None
    assert read(tmp_path, Told()) is None
    assert read(tmp_path / "not there", Told()) is None


# Hostile: whatever a file claims, it is refused in words or read in part, and costs no more than it is large.

SMALL = header(SESSION, 10) + text("llama") + struct.pack("<I", 1) + stream(states(2), states(2), CELLS)
OLD = header(SEQUENCE, 2) + stream(states(2), states(2), CELLS, transposed=True)
SMALL_SIZES = Sizes(n_layers=2, d_model=32, heads=2, head_size=8, vocab_size=41)


def attack(path: Path, raw: bytes) -> None:
    """Read it and all it holds: nothing but a StatesError comes out, with a model and without."""
    path.write_bytes(raw)
    for sizes in (SMALL_SIZES, None):
        try:
            found = read(path, Told(sizes=sizes))
            for piece in found.pieces if found is not None else ():
                numbers(piece)
        except StatesError:
            continue


@pytest.mark.parametrize("raw", [SMALL, OLD])
def test_a_file_that_ends_anywhere(tmp_path: Path, raw: bytes) -> None:
    for end in range(len(raw)):
        attack(tmp_path / "cut", raw[:end])


@pytest.mark.parametrize("raw", [SMALL, OLD])
def test_huge_numbers_anywhere(tmp_path: Path, raw: bytes) -> None:
    for value in (0, 1, 1 << 31, (1 << 32) - 1):
        for at in range(4, 200, 3):  # numbers begin at many remainders of four: names have any length
            attack(tmp_path / "huge", raw[:at] + struct.pack("<I", value) + raw[at + 4 :])


@given(
    raw=st.sampled_from((SMALL, OLD)),
    flips=st.lists(st.tuples(st.integers(0, 400), st.integers(1, 255)), min_size=1, max_size=4),
)
def test_flipped_bits(
    tmp_path_factory: pytest.TempPathFactory, raw: bytes, flips: list[tuple[int, int]]
) -> None:
    changed = bytearray(raw)
    for at, mask in flips:
        changed[at] ^= mask
    attack(tmp_path_factory.getbasetemp() / "flipped", bytes(changed))


@pytest.mark.parametrize("path", [F16_FILE, Q8_FILE], ids=lambda path: path.stem)
def test_a_real_file_that_ends_anywhere(tmp_path: Path, path: Path) -> None:
    raw, cut = path.read_bytes(), tmp_path / path.name
    for part in range(20):
        cut.write_bytes(raw[: len(raw) * part // 20])
        found = read(cut, Told(sizes=SMOLLM2))
        assert (found is None) == (part == 0)
        if found is not None:
            assert found.pieces[0].clear[0].token_ids == PROMPT
            assert not found.pieces[0].seen
            assert found.notes


def test_many_cells_that_are_claimed_cost_nothing(tmp_path: Path) -> None:
    """Two million cells are the most; each is of 256 sequences at most, and of a type that caches have."""
    start = header(SESSION, 10) + text("llama") + struct.pack("<I", 1)
    for claimed in (
        struct.pack("<I", 1 << 21) + bytes(1 << 20),
        struct.pack("<I", (1 << 21) + 1) + bytes(1 << 20),
        struct.pack("<IiI", 1, 0, 257) + bytes(1 << 20),
        struct.pack("<IiIiII", 1, 0, 1, 0, 0, 1 << 10) + struct.pack("<iQ", F16, 1 << 40),
    ):
        attack(tmp_path / "claims", start + claimed)


def test_a_file_that_shrinks_after_it_was_looked_at(tmp_path: Path) -> None:
    path = tmp_path / "s"
    path.write_bytes(SMALL)
    (piece,) = holding(path, SMALL_SIZES).pieces
    path.write_bytes(SMALL[:100])
    refused(StatesError, lambda: numbers(piece))


# The real model, whose GGUF llama.cpp itself ran.


@pytest.mark.parametrize("path", [F16_FILE, Q8_FILE, Q4_FILE])
def test_the_ids_of_the_real_files(path: Path) -> None:
    (piece,) = holding(path, SMOLLM2).pieces
    assert piece.clear[0].token_ids == PROMPT
    assert len(piece.seen) == 60
    assert {rows.shape for rows in numbers(piece).values()} == {(len(PROMPT), 192)}


@pytest.mark.parametrize("path", [Q8_FILE, Q4_FILE])
def test_how_keys_lie_is_seen_from_the_numbers(path: Path) -> None:
    """A sequence does not name its architecture."""
    found = holding(path, SMOLLM2)
    assert "look like pairs" in " ".join(found.notes)
    assert "Hadamard matrix of 64" in " ".join(found.notes)


# How far the rows of another engine lie from ours, relative to their length. The layouts are exact (see the
# tiny files in float32); but llama.cpp rounds what it multiplies with quantised weights to 8 bits, as we do
# not. The worst rows of layers 1, 15 and 30, as measured; in another order or basis they are 1 away or more.
#        keys               values
# f16    .005  .028  .028   .015  .065  .075
# q8_0   .007  .030  .031   .016  .075  .076
# q4_0   .089  .138  .153   .085  .256  .309
WORST = {F16_FILE: (0.02, 0.12), Q8_FILE: (0.02, 0.12), Q4_FILE: (0.15, 0.45)}


@pytest.mark.real_model
@pytest.mark.parametrize("path", WORST, ids=lambda path: path.stem)
def test_real_keys_and_values_are_those_of_transformers(smollm2: LanguageModel, path: Path) -> None:
    (piece,) = holding(path, SMOLLM2).pieces
    rows = numbers(piece)
    for place in ("keys", "values"):
        expected = preimage.capture(smollm2, [list(PROMPT)], [1, 15, 30], observe=place)
        for layer in (1, 15, 30):
            truth = expected.at(0, layer)
            away = float(((rows[layer, place] - truth).norm(dim=1) / truth.norm(dim=1)).max())
            assert away < WORST[path][layer > 1], (place, layer, away)


@pytest.mark.real_model
@pytest.mark.parametrize("path", [F16_FILE, Q8_FILE], ids=lambda path: path.stem)
def test_the_prompt_is_read_from_real_values(smollm2: LanguageModel, path: Path) -> None:
    """From values of layer 1, without the ids in the header."""
    (piece,) = holding(path, SMOLLM2).pieces
    seen = next(one for one in piece.seen if one.layer == 1 and one.observation.place == "values")
    (result,) = preimage.invert(smollm2, seen.read(), layer=1, observe=seen.observation)
    assert result.status in ("recovered", "likely")
    assert tuple(result.reading.token_ids) == PROMPT
