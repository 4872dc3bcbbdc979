"""Raw numbers without a header: every order of the axes, and files that do not hold what they are said to."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from preimage.errors import StatesError
from preimage.leak.readers.raw import TYPES, RawPages, is_file, scale_note, size_of
from preimage.storage.tensor_file import tensor_bytes
from support.refusing import refused

SIZES = {"L": 2, "B": 3, "N": 4, "2": 2, "H": 2, "C": 5}
ORDERS = ["".join(order) for order in itertools.permutations("LBN2HC")]


def written(
    folder: Path, order: str, kind: str = "float32", end: bytes = b""
) -> tuple[RawPages, torch.Tensor]:
    """A file of counted numbers, and the same as L x 2 x tokens x width."""
    numbers = (torch.arange(480) % 7).float().reshape([SIZES[letter] for letter in "L2BNHC"])
    stored = numbers.permute(["L2BNHC".index(letter) for letter in order]).to(TYPES[kind])
    path = folder / "page.bin"
    path.write_bytes(bytes(tensor_bytes(stored)) + end)
    return RawPages(path, {letter: SIZES[letter] for letter in order}, kind), numbers.reshape(2, 2, 12, 10)


@given(st.sampled_from(ORDERS), st.sampled_from(sorted(TYPES)))
def test_any_order_and_any_type(tmp_path_factory: pytest.TempPathFactory, order: str, kind: str) -> None:
    pages, numbers = written(tmp_path_factory.mktemp("raw"), order, kind)
    pages.check()
    for layer, half in itertools.product(range(2), range(2)):
        assert torch.equal(pages.part(layer, half), numbers[layer, half])
    assert torch.equal(pages.block(1), torch.cat((numbers[1, 0], numbers[1, 1]), dim=1))


def test_the_scale_of_codes_is_that_which_was_told(tmp_path: Path) -> None:
    pages, numbers = written(tmp_path, "LBNH2C", "fp8")
    scaled = RawPages(pages.path, pages.axes, "fp8", 0.5)
    assert torch.equal(scaled.part(0, 0), numbers[0, 0] * 0.5)
    assert scale_note("fp8", None)
    assert not scale_note("fp8", 0.5)
    assert not scale_note("bf16", None)


def test_a_file_of_another_size_is_refused(tmp_path: Path) -> None:
    for end in (b"\0", b"\0" * 4096):
        pages, _ = written(tmp_path, "LBNH2C", end=end)
        assert "bytes" in refused(StatesError, pages.check).message
        refused(StatesError, lambda pages=pages: pages.check(padded=True))
    pages, numbers = written(tmp_path, "LBNH2C", end=b"\0" * (4096 - 1920))
    refused(StatesError, pages.check)
    pages.check(padded=True)
    assert torch.equal(pages.part(1, 1), numbers[1, 1])
    pages.path.write_bytes(pages.path.read_bytes()[:-1])  # since it was checked
    refused(StatesError, lambda: pages.part(0, 0))
    pages.path.unlink()
    refused(StatesError, lambda: pages.part(0, 0))


def test_a_file_of_nonsense_sizes_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "sparse.bin"
    with path.open("wb") as file:
        file.truncate(10 << 30)
    axes = {"L": 1, "B": 10 << 20, "N": 16, "2": 2, "H": 4, "C": 4}
    assert size_of(path) == RawPages(path, axes, "bf16").bytes
    error = refused(StatesError, lambda: RawPages(path, axes, "bf16").part(0, 0))
    assert "tokens" in error.message
    refused(StatesError, RawPages(path, {**axes, "B": 0}, "bf16").check)


def test_what_is_no_file(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none", tmp_path / ("x" * 5000), tmp_path / "a\0b"):
        assert not is_file(path)
        refused(StatesError, lambda path=path: size_of(path))


def test_bits_are_read_as_they_are_on_any_machine(tmp_path: Path) -> None:
    path = tmp_path / "one.bin"
    path.write_bytes(np.array([1.5, -2.0], dtype="<f4").tobytes())
    pages = RawPages(path, {"2": 2, "L": 1, "B": 1, "N": 1, "H": 1, "C": 1}, "float32")
    assert pages.part(0, 0).item() == 1.5
    assert pages.part(0, 1).item() == -2.0
