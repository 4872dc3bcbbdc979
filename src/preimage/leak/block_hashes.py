"""Names of cache pages that were computed from token ids: how each engine does it, and what they give away.

The name of a page is a digest of the name before it and of the page's token ids. So a recovered prompt can be
checked without a single number (:func:`matches`), and small pages can be read from their names alone
(:func:`read_names`). What stands before the first page is fixed in vLLM's default, in SGLang and in LMCache
without vLLM. A salt, and a random start, enter the first page only: the pages after it hang on its name,
which everybody who has the files can see.

Sources: vLLM 0.33.0 (utils/hashing.py, v1/core/kv_cache_utils.py), LMCache 0.5.6 (v1/token_database.py),
SGLang 0.5.23 (srt/mem_cache/utils.py and its C++ hash).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import TypeAlias

from preimage.errors import OptionError, StatesError
from preimage.leak.block_encodings import (
    After,
    cbor,
    cbor_head,
    pickled,
    pickled_bytes,
    pickled_number,
    sha,
    xxh,
)
from preimage.leak.holdings import BlockName

Propose: TypeAlias = Callable[[tuple[int, ...]], Iterable[Sequence[int]]]

HASHES_A_SECOND = 1_000_000  # about, on one core; measured with hashlib on pages of one token
_LARGEST_ID = 2**32
_LONGEST_PAGE = 8192  # a pickle of more begins a second frame, which no engine's page comes near
_SHORTEST_NAME = 8  # bytes: what is shorter proves nothing


@dataclass(frozen=True)
class Scheme:
    """How an engine names pages.

    ``behind``: given the name before, what computes a page's digest. ``roots``: what stands before the first
    page where that is known; random otherwise. ``pages``: usual numbers of tokens. ``length``: bytes.
    """

    name: str
    behind: Callable[[bytes], After]
    roots: tuple[bytes, ...]
    pages: tuple[int, ...]
    length: int

    @property
    def engine(self) -> str:
        """Who names so: vllm, lmcache, sglang."""
        return self.name.partition("-")[0]

    def digests(self, token_ids: Sequence[int], page: int, root: bytes | None = None) -> list[bytes]:
        """The names of all whole pages, each behind the one before; ``root``: another start than usual."""
        whole = len(token_ids) - len(token_ids) % page if page > 0 else 0
        if root is None and not self.roots:
            raise StatesError(
                f"{self.name} starts from random bytes, another in every process.",
                "Give the name of the page before, or the start that a seed gives.",
            )
        return self.chain(token_ids[:whole], page, self.roots[0] if root is None else root)

    def chain(self, token_ids: Sequence[int], page: int, root: bytes) -> list[bytes]:
        """As :meth:`digests`, and the rest of the ids as a page of its own."""
        _check(token_ids, page)
        names: list[bytes] = []
        for start in range(0, len(token_ids), page):
            names.append(self.behind(names[-1] if names else root)(token_ids[start : start + page]))
        return names


def matches(name: BlockName, ids_so_far: Sequence[int], before: bytes | None = None) -> str | None:
    """The scheme by which a page has this name when its prompt begins with these ids; None: by none.

    ``ids_so_far`` ends with the page's last token. It begins with the prompt, or, where the name of an
    earlier page is given as ``before``, right behind that page. All schemes of the name's engine are tried,
    and usual page sizes where the size is not known.
    """
    if len(name.digest) < _SHORTEST_NAME or not ids_so_far:
        return None
    engine = scheme_of(name.scheme).engine
    for scheme in SCHEMES.values():
        if scheme.engine != engine or len(name.digest) > scheme.length:
            continue
        roots = scheme.roots if before is None else (before,)
        for root, page in itertools.product(roots, (name.page,) if name.page else scheme.pages):
            if scheme.chain(ids_so_far, page, root)[-1].startswith(name.digest):
                return scheme.name
    return None


@dataclass(frozen=True)
class NamedPrompt:
    """Token ids that were read from names. ``behind``: the name they follow; None: the prompt's beginning."""

    token_ids: tuple[int, ...]
    names: tuple[bytes, ...]
    behind: bytes | None


@dataclass(frozen=True)
class NamesRead:
    """What :func:`read_names` found: prompts, the names it could not read, hashes tried, whether all were."""

    prompts: tuple[NamedPrompt, ...]
    unread: tuple[bytes, ...]
    hashes: int
    finished: bool


def read_names(
    names: Iterable[bytes],
    scheme: str,
    page: int,
    vocab_size: int,
    *,
    propose: Propose | None = None,
    roots: Sequence[bytes] | None = None,
    budget: int = 200_000_000,
) -> NamesRead:
    """Prompts from the names of their pages alone, in any order, mixed, and with pages missing.

    Behind every start and every name all pages of the vocabulary are tried: ``vocab_size ** page`` hashes
    each. On one core, with 49,152 tokens, a page of one token takes 0.02 to 0.1 s, of two half an hour to an
    hour; more are beyond reach. ``propose`` gives pages to try instead, behind token ids (those that are
    known: without their beginning where the first page is salted). ``budget``: hashes in all.
    """
    known = scheme_of(scheme)
    _check((), page)
    exponent = page * math.log10(max(vocab_size, 1))
    if propose is None and exponent > math.log10(max(budget, 1)) + 1e-9:
        hours = exponent - math.log10(HASHES_A_SECOND * 3600)
        raise OptionError(
            f"Pages of {page} tokens from {vocab_size} need 10^{exponent:.1f} hashes each, "
            f"10^{hours:.1f} hours on one core; the budget is {budget} hashes.",
            "Give a larger budget, or a function that proposes pages.",
        )
    walk = _Walk(known, dict.fromkeys(names), page, vocab_size, propose, budget)
    finished = walk.run(tuple(known.roots if roots is None else roots))
    return walk.result(finished)


class _Walk:
    """A search for the page before every name: each name has one, as digests do not collide."""

    def __init__(
        self,
        scheme: Scheme,
        names: dict[bytes, None],
        page: int,
        vocab_size: int,
        propose: Propose | None,
        budget: int,
    ) -> None:
        self._scheme, self._page, self._vocab_size = scheme, page, vocab_size
        self._propose, self._budget = propose, budget
        self._names = names
        self._missing = set(names)
        self._found: dict[bytes, tuple[bytes, tuple[int, ...]]] = {}  # name: what it follows, and its ids
        self._hashes = 0

    def run(self, roots: tuple[bytes, ...]) -> bool:
        """Whether everything was tried that could have been, or nothing is missing."""
        self._roots = set(roots)
        waiting = list(roots)
        expanded: set[bytes] = set()
        while self._missing:
            if not waiting:  # the first pages have another start: go on behind their names
                waiting = [name for name in self._names if name not in expanded]
                if not waiting:
                    return True
            parent = waiting.pop(0)
            if parent in expanded:
                continue
            expanded.add(parent)
            below = self._expand(parent)
            if below is None:
                return False
            waiting[:0] = below
        return True

    def _expand(self, parent: bytes) -> list[bytes] | None:
        """The names behind one; None when the budget is spent."""
        after = self._scheme.behind(parent)
        below = []
        for ids in self._pages(parent):
            if self._hashes >= self._budget:
                return None
            self._hashes += 1
            digest = after(ids)
            if digest in self._missing:
                self._missing.remove(digest)
                self._found[digest] = (parent, tuple(ids))
                below.append(digest)
                if not self._missing:
                    break
        return below

    def _pages(self, parent: bytes) -> Iterator[Sequence[int]]:
        if self._propose is None:
            yield from itertools.product(range(self._vocab_size), repeat=self._page)
            return
        for ids in self._propose(self._ids(parent)[1]):
            _check(ids, self._page)
            yield ids

    def _ids(self, name: bytes) -> tuple[list[bytes], tuple[int, ...], bytes]:
        """The names on the way to one, the ids of all of them, and what the first of them follows."""
        way: list[bytes] = []
        while name in self._found and name not in way:
            way.append(name)
            name = self._found[name][0]
        way.reverse()
        return way, tuple(one for part in way for one in self._found[part][1]), name

    def result(self, finished: bool) -> NamesRead:
        """One prompt for every name that none follows."""
        inner = {parent for parent, _ in self._found.values()}
        prompts = []
        for leaf in self._names:
            if leaf in self._found and leaf not in inner:
                way, ids, first = self._ids(leaf)
                prompts.append(NamedPrompt(ids, tuple(way), None if first in self._roots else first))
        unread = tuple(name for name in self._names if name in self._missing)
        return NamesRead(tuple(prompts), unread, self._hashes, finished)


def _check(token_ids: Sequence[int], page: int) -> None:
    if not 0 < page <= _LONGEST_PAGE:
        raise OptionError(f"A page of {page} tokens is not known.", f"Give 1..{_LONGEST_PAGE}.")
    if any(not 0 <= one < _LARGEST_ID for one in token_ids):
        raise StatesError("A token id is negative, or has more than 32 bits.", "Give ids of the vocabulary.")


def _vllm_pickled(before: bytes) -> After:
    return pickled(pickled_bytes(before), b"N")


def _vllm_cbor(before: bytes) -> After:
    return cbor(cbor_head(2, len(before)) + before, b"\xf6")


def vllm_root(seed: str, cbor: bool = False) -> bytes:
    """What stands before the first page in vLLM with PYTHONHASHSEED set to ``seed`` (sha256, sha256_cbor)."""
    text = seed.encode()
    if cbor:
        return sha256(cbor_head(3, len(text)) + text).digest()
    body = b"\x8c" + bytes([len(text)]) + text + b"\x94."
    return sha256(b"\x80\x05\x95" + len(body).to_bytes(8, "little") + body).digest()


def sglang_root(salt: str | None = None, extra_key: str | None = None) -> bytes:
    """What stands before the first page in SGLang: nothing, or a digest of a request's salt and extra key."""
    if salt is None and extra_key is None:
        return b""
    parts = [b"sglang-cache-namespace-v1"]
    for part in (extra_key, salt):
        text = (part or "").encode()
        parts.append(b"\0" if part is None else b"\1" + len(text).to_bytes(8, "little") + text)
    return sha256(b"".join(parts)).digest()


def _sglang(before: bytes) -> After:
    start = sha256(before)

    def digest(ids: Sequence[int]) -> bytes:
        page = start.copy()
        page.update(b"".join(one.to_bytes(4, "little") for one in ids))
        return page.digest()

    return digest


def _lmcache_builtin(before: bytes) -> After:
    """Python's own ``hash`` of a tuple of numbers: the same in every 64-bit CPython since 3.8."""
    prefix = int.from_bytes(before, "big", signed=True)
    return lambda ids: hash((prefix, tuple(ids), ())).to_bytes(8, "big", signed=True)


def _lmcache_cbor(before: bytes) -> After:
    return sha(cbor(cbor_head(0, int.from_bytes(before, "big")), b"\x80"), 8)


def _lmcache_pickled(before: bytes) -> After:
    return sha(pickled(pickled_number(int.from_bytes(before, "big")), b")"), 8)


def lmcache_digest(name: str) -> bytes:
    """A digest of 8 bytes as LMCache writes it into a file's name: hexadecimal, short, with a minus."""
    return (int(name, 16) % (1 << 64)).to_bytes(8, "big")


# hash("0") of CPython with PYTHONHASHSEED=0, the seed LMCache asks for, from 3.11 on and before.
_SEEDED = (5313149338359954478, -5282990986457227702)
_SEEDS = ("vllm-none-hash", "0")  # vLLM's own since it has one, and what its users were told to set
_VLLM_ROOTS = tuple(vllm_root(seed) for seed in _SEEDS)
_VLLM_CBOR_ROOTS = tuple(vllm_root(seed, cbor=True) for seed in _SEEDS)
_VLLM_PAGES = (16, 32, 64, 128, 8)
_LMCACHE_PAGES = (256, 128, 512, 64)

SCHEMES: dict[str, Scheme] = {
    scheme.name: scheme
    for scheme in (
        Scheme("vllm-sha256", lambda before: sha(_vllm_pickled(before)), _VLLM_ROOTS, _VLLM_PAGES, 32),
        Scheme("vllm-sha256_cbor", lambda before: sha(_vllm_cbor(before)), _VLLM_CBOR_ROOTS, _VLLM_PAGES, 32),
        Scheme("vllm-xxhash", lambda before: xxh(_vllm_pickled(before)), (), _VLLM_PAGES, 16),
        Scheme("vllm-xxhash_cbor", lambda before: xxh(_vllm_cbor(before)), (), _VLLM_PAGES, 16),
        Scheme("sglang", _sglang, (b"",), (1, 16, 32, 64, 128, 256), 32),
        Scheme(
            "lmcache-builtin",
            _lmcache_builtin,
            tuple(number.to_bytes(8, "big", signed=True) for number in (0, *_SEEDED)),
            _LMCACHE_PAGES,
            8,
        ),
        Scheme(
            "lmcache-sha256_cbor",
            _lmcache_cbor,
            tuple(root[:8] for root in _VLLM_CBOR_ROOTS),
            _LMCACHE_PAGES,
            8,
        ),
        Scheme(
            "lmcache-sha256", _lmcache_pickled, tuple(root[:8] for root in _VLLM_ROOTS), _LMCACHE_PAGES, 8
        ),
    )
}


def scheme_of(name: str) -> Scheme:
    """The scheme of a name, or an error that lists all."""
    if name not in SCHEMES:
        raise OptionError(f"There is no scheme {name[:40]!r} of names.", f"Use {', '.join(SCHEMES)}.")
    return SCHEMES[name]
