"""Names of cache pages that were computed from token ids: how each engine does it, and what they give away.

The name of a page is a digest of the name before it and of the page's token ids. So a recovered prompt can be
checked without a single number (:func:`matches`), and small pages can be read from their names alone
(:func:`read_names`). What stands before the first page is fixed in vLLM's default (earlier versions drew it
where PYTHONHASHSEED was not set), in SGLang and in LMCache without vLLM. A salt, and a random start, enter
the first page only: the pages after it hang on its name, which everybody who has the files can see.

Not known here are the names of pages into which more than that enters: adapters (LoRA) and images, whose
names stand in every page of vLLM's, and pairs of neighbours, which SGLang hashes beside EAGLE.

Sources: vLLM 0.33.0 (utils/hashing.py, v1/core/kv_cache_utils.py), LMCache 0.5.6 (v1/token_database.py),
SGLang 0.5.23 (srt/mem_cache/utils.py, cpp_utils/hash_binding.cpp).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from preimage.errors import OptionError, StatesError
from preimage.leak.block_encodings import (
    cbor_ids,
    lmcache_builtin,
    lmcache_cbor,
    lmcache_digest,
    lmcache_pickled,
    pickled_ids,
    sglang,
    sglang_root,
    sha,
    vllm_cbor,
    vllm_pickled,
    vllm_root,
    words,
    xxh,
)
from preimage.leak.holdings import BlockName

__all__ = [
    "SCHEMES",
    "NamedPrompt",
    "NamesRead",
    "Scheme",
    "lmcache_digest",
    "matches",
    "read_names",
    "scheme_of",
    "sglang_root",
    "vllm_root",
]

Propose: TypeAlias = Callable[[tuple[int, ...]], Iterable[Sequence[int]]]
Encoded: TypeAlias = Any  # a page's ids as their scheme hashes them: bytes, or the numbers themselves
After: TypeAlias = Callable[[Encoded], bytes]  # the name of a page, behind a known one

HASHES_A_SECOND = 1_000_000  # about, on one core; measured with hashlib on pages of one token
_LARGEST_ID = 2**32
_LONGEST_PAGE = 8192  # a pickle of more begins a second frame, which no engine's page comes near
SHORTEST_NAME = 8  # bytes: what is shorter proves nothing
_KEPT = 1 << 19  # tokens of a vocabulary that are encoded once for a whole search


@dataclass(frozen=True)
class Scheme:
    """How an engine names pages.

    ``encode``: of a page's ids, what is hashed of them. ``behind``: given the name before, what makes a name
    of that. ``roots``: what stands before the first page unless it is salted or random. ``pages``: usual
    numbers of tokens. ``length``: bytes of a name.
    """

    name: str
    encode: Callable[[Sequence[int]], Encoded]
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
        return self.chain(token_ids[:whole], page, self.roots[0] if root is None else root)

    def chain(self, token_ids: Sequence[int], page: int, root: bytes) -> list[bytes]:
        """As :meth:`digests`, and the rest of the ids as a page of its own."""
        names = [root]
        for part in self.split(token_ids, page):
            names.append(self.behind(names[-1])(part))
        return names[1:]

    def split(self, token_ids: Sequence[int], page: int) -> tuple[Encoded, ...]:
        """The ids page by page, the rest as one of its own, each as it is hashed."""
        _check(token_ids, page)
        return tuple(self.encode(token_ids[start : start + page]) for start in range(0, len(token_ids), page))

    def can_follow(self, before: bytes) -> bool:
        """Whether this may stand before a page: a whole name, or what stands before the first."""
        return len(before) == self.length or before in self.roots


def matches(name: BlockName, ids_so_far: Sequence[int], before: bytes | None = None) -> str | None:
    """The scheme by which a page has this name when its prompt begins with these ids; None: by none.

    ``ids_so_far`` ends with the page's last token. It begins with the prompt, or, where the name of an
    earlier page is given as ``before``, right behind that page. All schemes of the name's engine are tried,
    and usual page sizes where the size is not known.
    """
    if len(name.digest) < SHORTEST_NAME or not ids_so_far:
        return None
    engine = scheme_of(name.scheme).engine
    for scheme in SCHEMES.values():
        if scheme.engine != engine or len(name.digest) > scheme.length:
            continue
        if before is not None and not scheme.can_follow(before):
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
        self._vocabulary: list[tuple[Sequence[int], Encoded]] | None = None
        if propose is None and page == 1 and vocab_size <= _KEPT:
            self._vocabulary = [((one,), scheme.encode((one,))) for one in range(vocab_size)]
        self._found: dict[bytes, tuple[bytes, tuple[int, ...]]] = {}  # name: what it follows, and its ids
        self._hashes = 0

    def run(self, roots: tuple[bytes, ...]) -> bool:
        """Whether everything was tried that could have been, or nothing is missing."""
        self._roots = set(roots)
        waiting = list(roots)
        expanded: set[bytes] = set()
        while self._missing:
            if not waiting:  # the first pages have another start: go on behind their names
                waiting = [one for one in self._names if one not in expanded and self._scheme.can_follow(one)]
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
        after, missing = self._scheme.behind(parent), self._missing
        below: list[bytes] = []
        left = self._budget - self._hashes
        tried = 0
        try:
            for ids, encoded in self._pages(parent):
                if tried >= left:
                    return None
                tried += 1
                digest = after(encoded)
                if digest in missing:
                    missing.remove(digest)
                    self._found[digest] = (parent, tuple(ids))
                    below.append(digest)
                    if not missing:
                        break
        finally:
            self._hashes += tried
        return below

    def _pages(self, parent: bytes) -> Iterable[tuple[Sequence[int], Encoded]]:
        if self._vocabulary is not None:
            return self._vocabulary
        if self._propose is not None:
            return self._proposed(self._propose(self._ids(parent)[1]))
        encode = self._scheme.encode
        every = itertools.product(range(self._vocab_size), repeat=self._page)
        return ((ids, encode(ids)) for ids in every)

    def _proposed(self, pages: Iterable[Sequence[int]]) -> Iterator[tuple[Sequence[int], Encoded]]:
        for ids in pages:
            _check(ids, self._page)
            yield ids, self._scheme.encode(tuple(ids))

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


# hash("0") of CPython with PYTHONHASHSEED=0, the seed LMCache asks for, from 3.11 on and before.
_SEEDED = (5313149338359954478, -5282990986457227702)
_SEEDS = ("vllm-none-hash", "0")  # vLLM's own since it has one, and what its users were told to set
# xxHash has no default seed; of "0", in a pickle and in CBOR, as it is not always installed.
_XXH_ROOT = bytes.fromhex("6fb31cc38bba6066183f7f2104b9c051")
_XXH_CBOR_ROOT = bytes.fromhex("1ebe36576dcb573f26b99533a20aaeca")
_VLLM_PAGES = (16, 32, 64, 128, 8)
_LMCACHE_PAGES = (256, 128, 512, 64)

SCHEMES: dict[str, Scheme] = {
    scheme.name: scheme
    for scheme in (
        Scheme(
            "vllm-sha256",
            pickled_ids,
            lambda before: sha(vllm_pickled(before)),
            tuple(vllm_root(seed) for seed in _SEEDS),
            _VLLM_PAGES,
            32,
        ),
        Scheme(
            "vllm-sha256_cbor",
            cbor_ids,
            lambda before: sha(vllm_cbor(before)),
            tuple(vllm_root(seed, cbor=True) for seed in _SEEDS),
            _VLLM_PAGES,
            32,
        ),
        Scheme(
            "vllm-xxhash",
            pickled_ids,
            lambda before: xxh(vllm_pickled(before)),
            (_XXH_ROOT,),
            _VLLM_PAGES,
            16,
        ),
        Scheme(
            "vllm-xxhash_cbor",
            cbor_ids,
            lambda before: xxh(vllm_cbor(before)),
            (_XXH_CBOR_ROOT,),
            _VLLM_PAGES,
            16,
        ),
        Scheme("sglang", words, sglang, (b"",), (1, 16, 32, 64, 128, 256), 32),
        Scheme(
            "lmcache-builtin",
            tuple,
            lmcache_builtin,
            tuple(number.to_bytes(8, "big", signed=True) for number in (0, *_SEEDED)),
            _LMCACHE_PAGES,
            8,
        ),
        Scheme(
            "lmcache-sha256_cbor",
            cbor_ids,
            lmcache_cbor,
            tuple(vllm_root(seed, cbor=True)[:8] for seed in _SEEDS),
            _LMCACHE_PAGES,
            8,
        ),
        Scheme(
            "lmcache-sha256",
            pickled_ids,
            lmcache_pickled,
            tuple(vllm_root(seed)[:8] for seed in _SEEDS),
            _LMCACHE_PAGES,
            8,
        ),
    )
}


def scheme_of(name: str) -> Scheme:
    """The scheme of a name, or an error that lists all."""
    if name not in SCHEMES:
        raise OptionError(f"There is no scheme {name[:40]!r} of names.", f"Use {', '.join(SCHEMES)}.")
    return SCHEMES[name]
