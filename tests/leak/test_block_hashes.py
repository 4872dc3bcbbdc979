"""Names of pages, held against names that the engines' own code computed (files/README.md)."""

from __future__ import annotations

import json
import pickle
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preimage.errors import OptionError, StatesError
from preimage.leak.block_encodings import pickled, pickled_bytes, pickled_ids, pickled_number
from preimage.leak.block_hashes import (
    SCHEMES,
    lmcache_digest,
    matches,
    read_names,
    scheme_of,
    sglang_root,
    vllm_root,
)
from preimage.leak.holdings import BlockName
from support.refusing import refused

ROWS: list[dict[str, Any]] = json.loads((Path(__file__).parent / "files/block_names.json").read_text())
UNKNOWN = [row for row in ROWS if row["scheme"] == "lmcache-builtin" and row["vllm"] and not row["seed"]]
SALTED = [row for row in ROWS if row["salt"]]
PLAIN = [row for row in ROWS if row not in UNKNOWN + SALTED]
SMALL = 400  # a vocabulary for tests: the search itself does not depend on its size
IDS = [7, 311, 0, 399, 12, 255, 256, 8]


def in_words(row: dict[str, Any]) -> str:
    return "-".join(str(row[name]) for name in ("scheme", "seed", "salt", "page"))


def digests_of(row: dict[str, Any]) -> list[bytes]:
    read = lmcache_digest if row["scheme"].startswith("lmcache") else bytes.fromhex
    return [read(name) for name in row["names"]]


def chain(scheme: str, ids: Sequence[int], page: int, root: bytes | None = None) -> list[bytes]:
    return SCHEMES[scheme].digests(ids, page, root)


def test_the_engines_rows_are_there() -> None:
    assert {row["scheme"] for row in ROWS} == set(SCHEMES)
    assert len(PLAIN) > 15
    assert len(UNKNOWN) == 1
    assert len(SALTED) >= 6


@pytest.mark.parametrize("row", PLAIN, ids=in_words)
def test_names_are_those_of_the_engine(row: dict[str, Any]) -> None:
    """Every prefix of the prompt matches its own page's name, and no other."""
    names, page = digests_of(row), row["page"]
    for index, name in enumerate(names):
        so_far = row["token_ids"][: (index + 1) * page]
        block = BlockName(row["scheme"], name, page)
        assert matches(block, so_far) == row["scheme"]
        assert matches(block, [*so_far[:-1], so_far[-1] + 1]) is None
        assert matches(block, so_far[1:]) is None


@pytest.mark.parametrize("row", UNKNOWN + SALTED, ids=in_words)
def test_an_unknown_start_hides_the_first_page_alone(row: dict[str, Any]) -> None:
    """A salt or a random start: the first name matches nothing, those after it match behind it."""
    names, page, ids = digests_of(row), row["page"], row["token_ids"]
    assert matches(BlockName(row["scheme"], names[0], page), ids[:page]) is None
    for index in range(1, len(names)):
        block = BlockName(row["scheme"], names[index], page)
        assert matches(block, ids[page : (index + 1) * page], before=names[0]) == row["scheme"]


def test_a_name_of_another_kind_stands_before_nothing() -> None:
    row = next(row for row in PLAIN if row["scheme"] == "vllm-sha256" and row["page"] == 4)
    block = BlockName("vllm-sha256", digests_of(row)[1], 4)
    assert matches(block, row["token_ids"][4:8], before=digests_of(row)[0]) == "vllm-sha256"
    assert matches(block, row["token_ids"][4:8], before=digests_of(row)[0][:16]) is None
    assert matches(block, row["token_ids"][4:8], before=b"") is None


def test_a_known_salt_is_no_salt() -> None:
    row = next(row for row in SALTED if row["scheme"] == "sglang" and row["page"] == 4)
    assert chain("sglang", row["token_ids"], 4, sglang_root("pepper")) == digests_of(row)
    assert sglang_root() == b""
    assert sglang_root("") != sglang_root(None, "")


def test_the_scheme_is_found_among_those_of_the_engine() -> None:
    row = next(row for row in PLAIN if row["scheme"] == "vllm-sha256_cbor" and row["page"] == 4)
    block = BlockName("vllm-sha256", digests_of(row)[0], None)  # the file does not say which, nor the page
    assert matches(block, row["token_ids"][:4]) == "vllm-sha256_cbor"
    assert matches(BlockName("sglang", digests_of(row)[0], 4), row["token_ids"][:4]) is None


def test_the_first_bytes_of_a_name_are_enough_and_few_are_not() -> None:
    name = chain("sglang", IDS, 4)[1]
    assert matches(BlockName("sglang", name[:8], 4), IDS) == "sglang"
    assert matches(BlockName("sglang", name[:7], 4), IDS) is None
    assert matches(BlockName("sglang", b"", 4), IDS) is None
    assert matches(BlockName("sglang", name, 4), []) is None


@given(st.binary(max_size=255), st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=300))
def test_the_opcodes_are_those_of_pickle(before: bytes, ids: list[int]) -> None:
    assert pickled(pickled_bytes(before), b"N")(pickled_ids(ids)) == pickle.dumps(
        (before, tuple(ids), None), 5
    )


@given(st.integers(-(2**63), 2**64 - 1), st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=5))
def test_numbers_before_a_page_are_those_of_pickle(before: int, ids: list[int]) -> None:
    assert pickled(pickled_number(before), b")")(pickled_ids(ids)) == pickle.dumps(
        (before, tuple(ids), ()), 5
    )


def test_vllm_roots_are_pickles_of_the_seed() -> None:
    from hashlib import sha256

    assert vllm_root("41") == sha256(pickle.dumps("41", 5)).digest()


@given(st.integers(-(2**63), 2**63 - 1))
def test_lmcache_writes_signed_hex(number: int) -> None:
    assert lmcache_digest(f"{number:x}") == number.to_bytes(8, "big", signed=True)


@pytest.mark.parametrize("scheme", list(SCHEMES))
def test_pages_of_one_token_are_read_from_their_names(scheme: str) -> None:
    names = chain(scheme, IDS, 1)
    random.Random(5).shuffle(names)  # a folder has no order
    read = read_names(names, scheme, 1, SMALL)
    assert [prompt.token_ids for prompt in read.prompts] == [tuple(IDS)]
    assert read.prompts[0].behind is None
    assert read.prompts[0].names == tuple(chain(scheme, IDS, 1))
    assert read.finished
    assert not read.unread
    assert len(IDS) <= read.hashes <= SMALL * (len(IDS) + len(SCHEMES[scheme].roots))


def test_the_engines_own_names_are_read() -> None:
    row = next(row for row in PLAIN if row["scheme"] == "sglang" and row["page"] == 1)
    read = read_names(digests_of(row), "sglang", 1, 65536)
    assert read.prompts[0].token_ids == tuple(row["token_ids"])


def test_prompts_that_share_a_beginning_are_told_apart() -> None:
    prompts = [IDS, [*IDS[:3], 5, 6], [9]]
    names = [name for ids in prompts for name in chain("sglang", ids, 1)]
    read = read_names(names, "sglang", 1, SMALL)
    assert {prompt.token_ids for prompt in read.prompts} == {tuple(ids) for ids in prompts}


def test_a_salt_hides_the_first_page_and_nothing_behind_it() -> None:
    names = chain("sglang", IDS, 1, sglang_root("a secret of any length"))
    read = read_names(names, "sglang", 1, SMALL)
    assert [prompt.token_ids for prompt in read.prompts] == [tuple(IDS[1:])]
    assert read.prompts[0].behind == names[0]
    assert read.unread == (names[0],)
    assert read.finished


def test_a_missing_page_cuts_a_prompt_in_two() -> None:
    names = chain("vllm-sha256", IDS, 1)
    read = read_names([*names[:3], *names[4:]], "vllm-sha256", 1, SMALL)
    assert {prompt.token_ids for prompt in read.prompts} == {tuple(IDS[:3]), tuple(IDS[5:])}
    assert read.unread == (names[4],)  # what stands before it is gone


def test_pages_of_two_are_within_a_small_vocabulary() -> None:
    names = chain("sglang", [3, 29, 8, 0], 2)
    read = read_names(names, "sglang", 2, 30)
    assert read.prompts[0].token_ids == (3, 29, 8, 0)
    assert read.hashes <= 2 * 30**2


def test_larger_pages_are_refused_with_their_price() -> None:
    error = refused(OptionError, lambda: read_names([bytes(32)], "sglang", 2, 49152))
    assert "10^9.4 hashes" in error.message
    assert "hours" in error.message
    for page in (16, 8192):  # of which the price itself is beyond a float
        error = refused(OptionError, lambda page=page: read_names([bytes(32)], "sglang", page, 49152))
        assert "propos" in error.hint


def test_proposed_pages_read_larger_ones() -> None:
    """What a language model ranks first is tried first: here, runs of neighbours."""
    ids = [10, 11, 12, 13, 14, 15, 16, 17, 40, 41, 42, 43]
    asked = []

    def runs(prefix: tuple[int, ...]) -> Iterator[list[int]]:
        asked.append(prefix)
        for start in range(SMALL):
            yield list(range(start, start + 4))

    read = read_names(chain("vllm-sha256", ids, 4), "vllm-sha256", 4, SMALL, propose=runs)
    assert [prompt.token_ids for prompt in read.prompts] == [tuple(ids)]
    assert tuple(ids[:8]) in asked


def test_a_spent_budget_gives_what_was_found() -> None:
    names = chain("sglang", IDS, 1)
    read = read_names(names, "sglang", 1, SMALL, budget=SMALL + 5)
    assert not read.finished
    assert read.hashes == SMALL + 5
    assert read.prompts[0].token_ids == tuple(IDS[:1])
    assert read.unread == tuple(names[1:])


def test_names_of_nobody_are_left() -> None:
    names = (b"x" * 32, b"y" * 5, b"z" * 300, b"")
    for scheme in SCHEMES:
        read = read_names(names, scheme, 1, 50)
        assert read.prompts == ()
        assert read.unread == names
        assert read.finished


@pytest.mark.parametrize("page", [0, -1, 10_000])
def test_impossible_pages_are_refused(page: int) -> None:
    refused(OptionError, lambda: read_names([], "sglang", page, SMALL, budget=9))
    refused(OptionError, lambda: SCHEMES["sglang"].digests([1], page))


def test_impossible_ids_and_schemes_are_refused() -> None:
    refused(StatesError, lambda: SCHEMES["sglang"].digests([1, -1], 1))
    refused(StatesError, lambda: SCHEMES["sglang"].digests([2**32], 1))
    refused(StatesError, lambda: read_names([b"x" * 32], "sglang", 1, 9, propose=lambda _: [[-1]]))
    assert "sglang" in refused(OptionError, lambda: scheme_of("md5" * 999)).hint
