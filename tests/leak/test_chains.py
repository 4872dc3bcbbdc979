"""Pages put in order by their names: what is said to be proved is right, whatever was read wrongly."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from preimage.errors import OptionError, StatesError
from preimage.leak.block_hashes import SCHEMES, lmcache_digest
from preimage.leak.chains import Arranged, Page, arrange
from preimage.leak.holdings import BlockName
from support.refusing import refused

ROWS: list[dict[str, Any]] = json.loads((Path(__file__).parent / "files/block_names.json").read_text())
IDS = [7, 311, 0, 399, 12, 255, 256, 8]


def pages_of(
    ids: Sequence[int], page: int, scheme: str = "vllm-sha256", root: bytes | None = None, told: bool = True
) -> list[Page]:
    """The pages of a prompt, the last of which may be shorter, with their names."""
    start = SCHEMES[scheme].roots[0] if root is None else root
    names = SCHEMES[scheme].chain(ids, page, start)
    return [
        (BlockName(scheme, name, page if told else None), tuple(ids[index * page : (index + 1) * page]))
        for index, name in enumerate(names)
    ]


def standings(found: Arranged) -> list[str]:
    return [page.standing for page in found.pages]


def prompts(found: Arranged) -> set[tuple[int, ...]]:
    return {prompt.token_ids for prompt in found.prompts()}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['scheme']}-{row['page']}-{row['salt']}")
def test_pages_that_an_engine_named(row: dict[str, Any]) -> None:
    read = lmcache_digest if row["scheme"].startswith("lmcache") else bytes.fromhex
    page, ids = row["page"], row["token_ids"]
    parts = [ids[start : start + page] for start in range(0, len(ids), page)]
    given = [
        (BlockName(row["scheme"], read(name), None), part)
        for name, part in zip(row["names"], parts, strict=True)
    ]
    found = arrange(given[::-1])
    random_start = row["scheme"] == "lmcache-builtin" and row["vllm"] and not row["seed"]
    hidden = bool(row["salt"] or random_start)
    if hidden and len(given) == 1:
        assert standings(found) == ["open"]
        assert not list(found.prompts())
        return
    assert standings(found)[:-1] == ["behind" if hidden else "proved"] * (len(given) - 1)
    assert standings(found)[-1] == ("open" if hidden else "proved")
    (prompt,) = found.prompts()
    assert prompt.token_ids == tuple(ids[page:] if hidden else ids)
    assert prompt.behind == (len(given) - 1 if hidden else None)
    assert prompt.scheme == row["scheme"]


@pytest.mark.parametrize("scheme", list(SCHEMES))
@pytest.mark.parametrize("told", [True, False])
def test_prompts_that_share_a_beginning(scheme: str, told: bool) -> None:
    first, second, other = [*IDS, 1, 2], [*IDS[:6], 5, 5], [9]
    pages = {page for ids in (first, second, other) for page in pages_of(ids, 3, scheme, told=told)}
    shuffled = sorted(pages, key=lambda page: page[0].digest)
    found = arrange(shuffled)
    assert set(standings(found)) == {"proved"}
    assert prompts(found) == {tuple(first), tuple(second), tuple(other)}
    for prompt in found.prompts():
        assert [one for page in prompt.pages for one in shuffled[page][1] or ()] == list(prompt.token_ids)
        assert prompt.scheme == scheme


def test_a_page_read_wrongly_stops_nothing_behind_it() -> None:
    pages = pages_of(IDS, 2)
    pages[1] = (pages[1][0], (1, 1))
    found = arrange(pages)
    assert standings(found) == ["proved", "open", "behind", "behind"]
    assert [(prompt.token_ids, prompt.behind) for prompt in found.prompts()] == [
        (tuple(IDS[:2]), None),
        (tuple(IDS[4:]), 1),
    ]


def test_a_page_that_was_not_read_and_one_that_is_not_here() -> None:
    pages = pages_of(IDS, 2)
    pages[0] = (pages[0][0], None)
    found = arrange(pages)
    assert standings(found) == ["unread", "behind", "behind", "behind"]
    assert [prompt.behind for prompt in found.prompts()] == [0]
    found = arrange(pages[1:])  # nothing says what stood before
    assert standings(found) == ["open", "behind", "behind"]
    assert prompts(found) == {tuple(IDS[4:])}


def test_another_reading_of_a_page_is_found_out() -> None:
    """A name has one page: with one reading proved the others are wrong, and those that are missing known."""
    pages = pages_of(IDS, 4)
    name = pages[1][0]
    found = arrange([(name, (1, 2, 3, 4)), *pages, (name, None), (name, pages[1][1])])
    assert standings(found) == ["contradicted", "proved", "proved", "proved", "proved"]
    assert {page.token_ids for page in found.pages} == {tuple(IDS[:4]), tuple(IDS[4:])}
    assert [prompt.pages for prompt in found.prompts()] == [(1, 2)]  # pages of one name stand once


def test_several_pages_of_the_hash_in_one_file() -> None:
    """An engine may keep several in a file, which has the name of the last."""
    small = pages_of(IDS, 2)
    found = arrange([(small[1][0], IDS[:4]), (small[3][0], IDS[4:])])
    assert standings(found) == ["proved", "proved"]
    found = arrange([(BlockName("vllm-sha256", small[1][0].digest, 4), IDS[:4])])
    assert standings(found) == ["open"]


def test_a_name_cut_short_proves_and_what_follows_hangs_on_the_whole_one() -> None:
    pages = pages_of(IDS, 2, "sglang")
    short = [(BlockName("sglang", name.digest[:8], 2), ids) for name, ids in pages]
    assert standings(arrange(short)) == ["proved"] * 4
    assert standings(arrange(short[1:])) == ["open"] * 3  # of the first, only its beginning is there
    shorter = [(BlockName("sglang", name.digest[:7], 2), ids) for name, ids in pages]
    assert standings(arrange(shorter)) == ["open"] * 4


def test_engines_are_kept_apart() -> None:
    pages = pages_of(IDS, 4, "sglang") + pages_of(IDS, 4, "lmcache-builtin") + pages_of(IDS, 4, "vllm-xxhash")
    found = arrange(pages)
    assert standings(found) == ["proved"] * 6
    assert [page.scheme for page in found.pages[::2]] == ["sglang", "lmcache-builtin", "vllm-xxhash"]
    wrong = [(BlockName("sglang", name.digest, 4), ids) for name, ids in pages_of(IDS, 4, "vllm-sha256")]
    assert standings(arrange(wrong)) == ["open", "open"]


def test_the_scheme_is_found_where_the_name_says_another_of_the_engine() -> None:
    pages = [
        (BlockName("vllm-sha256", name.digest, 4), ids) for name, ids in pages_of(IDS, 4, "vllm-sha256_cbor")
    ]
    assert {page.scheme for page in arrange(pages).pages} == {"vllm-sha256_cbor"}


def test_a_spent_budget_keeps_what_was_proved() -> None:
    pages = pages_of(IDS, 1)
    found = arrange(pages, budget=20)
    assert not found.finished
    assert standings(found)[0] == "proved"
    assert standings(found)[-1] == "open"
    whole = arrange(pages)
    assert whole.finished
    assert whole.hashes <= 8 * 9 // 2 + 8 * len(SCHEMES["vllm-sha256"].roots) * 2


def test_nothing_and_what_is_impossible() -> None:
    assert arrange([]) == Arranged((), (), 0, True)
    name = pages_of(IDS, 4)[0][0]
    assert standings(arrange([(name, ())])) == ["unread"]
    refused(StatesError, lambda: arrange([(name, (-1,))]))
    refused(StatesError, lambda: arrange([(name, (2**32,))]))
    refused(OptionError, lambda: arrange([(BlockName("md5", name.digest, 4), (1,))]))
    refused(OptionError, lambda: arrange([(BlockName("vllm-sha256", name.digest, -4), (1,))]))


def test_many_pages_take_a_hash_for_each_pair() -> None:
    ids = [index % 997 for index in range(600)]
    pages = pages_of(ids, 2)
    random.Random(3).shuffle(pages)
    found = arrange(pages)
    assert prompts(found) == {tuple(ids)}
    assert found.hashes < len(pages) * (len(pages) + 5)


# Annotations of what the strategy calls are checked by beartype, which draws items of containers at random.
_DRAWS = "ignore::hypothesis.errors.HypothesisDeprecationWarning"


@dataclass(frozen=True)
class Folder:
    """``pages``: some read wrongly, not at all or twice, some missing. ``every``: all, read rightly."""

    pages: list[Page]
    every: list[Page]
    salted: set[bytes]  # names that hang on a salt

    @property
    def truth(self) -> dict[bytes, tuple[int, ...]]:
        return {name.digest: tuple(ids or ()) for name, ids in self.every}


@st.composite
def folders(draw: st.DrawFn) -> Folder:
    scheme = draw(st.sampled_from(sorted(SCHEMES)))
    page = draw(st.integers(1, 5))
    word = st.integers(0, draw(st.sampled_from([2, 300, 70_000, 2**32 - 1])))
    beginning = draw(st.lists(word, max_size=6))
    folder = Folder([], [], set())
    for end in draw(st.lists(st.lists(word, min_size=1, max_size=9), min_size=1, max_size=3)):
        salt = draw(st.none() | st.binary())
        root = None if salt is None else sha256(b"salt" + salt).digest()[: SCHEMES[scheme].length]
        prompt = pages_of([*beginning, *end], page, scheme, root, told=draw(st.booleans()))
        folder.every.extend(prompt)
        for name, ids in prompt:
            assert ids is not None
            if salt is not None:
                folder.salted.add(name.digest)
            wrong = (*ids[:-1], (ids[-1] + draw(st.integers(1, 5))) % 2**32)
            kinds: list[list[Sequence[int] | None]] = [[ids], [ids], [wrong], [None], [wrong, ids], []]
            folder.pages.extend((name, reading) for reading in draw(st.sampled_from(kinds)))
    return Folder(draw(st.permutations(folder.pages)), folder.every, folder.salted)


@pytest.mark.filterwarnings(_DRAWS)
@settings(max_examples=150)
@given(folders())
def test_what_is_proved_is_true(folder: Folder) -> None:
    found = arrange(folder.pages)
    assert found.finished
    read = {(name.digest, tuple(ids)) for name, ids in folder.pages if ids is not None}
    for (name, ids), placed in zip(folder.pages, found.pages, strict=True):
        right = folder.truth[name.digest]
        if placed.token_ids is not None:
            assert placed.token_ids == right
            assert (name.digest, right) in read  # nothing is known that was not read
        if placed.standing in ("proved", "behind"):
            assert ids is None or tuple(ids) == right
        if placed.standing == "contradicted":
            assert ids is not None
            assert tuple(ids) != right
        if placed.standing == "proved":
            assert name.digest not in folder.salted
        if placed.standing == "unread":
            assert ids is None
    for prompt in found.prompts():
        names = [folder.pages[page][0].digest for page in prompt.pages]
        assert prompt.token_ids == tuple(one for name in names for one in folder.truth[name])
        assert (prompt.behind is None) == (found.pages[prompt.pages[0]].standing == "proved")


@pytest.mark.filterwarnings(_DRAWS)
@settings(max_examples=100)
@given(folders())
def test_where_every_page_was_read_every_page_is_placed(folder: Folder) -> None:
    """Whatever else was read of them; but for the first pages behind a salt."""
    found = arrange([*folder.pages, *folder.every])
    whole = found.pages[len(folder.pages) :]
    firsts = 0
    for (name, ids), placed in zip(folder.every, whole, strict=True):
        if name.digest not in folder.salted:
            assert (placed.standing, placed.token_ids) == ("proved", ids)
        else:
            firsts += placed.standing == "open"
            assert placed.standing in ("open", "behind")
    assert firsts <= 3
    assert {prompt.token_ids for prompt in found.prompts()} <= parts_of_prompts(folder)


def parts_of_prompts(folder: Folder) -> set[tuple[int, ...]]:
    """Pages in a row of one prompt, as they were made."""
    found: set[tuple[int, ...]] = set()
    before: list[Page] = []
    for page in folder.every:
        before.append(page)
        for start in range(len(before)):
            found.add(tuple(one for _, ids in before[start:] for one in ids or ()))
    return found
