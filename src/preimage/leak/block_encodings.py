"""What engines hash to name a page: three things in a row as pickle or CBOR would write them.

The three are what stands before the page, its token ids, and what else tells requests apart. vLLM's default
hashes a pickle: the few opcodes that a tuple of numbers needs are written out here. Nothing is pickled or
unpickled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from hashlib import sha256
from typing import TypeAlias

from preimage.errors import MissingExtraError

After: TypeAlias = Callable[[Sequence[int]], bytes]  # bytes of a page of token ids, behind a known name


@lru_cache(maxsize=1 << 18)  # a vocabulary, which a search goes through again and again
def cbor_head(major: int, number: int) -> bytes:
    """How an item begins in canonical CBOR (RFC 8949): its kind, and its length or value in fewest bytes."""
    if number < 24:
        return bytes([major << 5 | number])
    size = next(size for size in (1, 2, 4, 8) if number < 1 << 8 * size)
    return bytes([major << 5 | 24 + size.bit_length() - 1]) + number.to_bytes(size, "big")


def cbor(before: bytes, extra: bytes) -> After:
    """``(before, ids, extra)`` in canonical CBOR; the outer two are encoded already."""
    start = b"\x83" + before

    def encoded(ids: Sequence[int]) -> bytes:
        return b"".join((start, cbor_head(4, len(ids)), *(cbor_head(0, one) for one in ids), extra))

    return encoded


def pickled_number(number: int) -> bytes:
    """A whole number in a pickle of protocol 5."""
    if 0 <= number < 1 << 8:
        return b"K" + number.to_bytes(1, "little")
    if 0 <= number < 1 << 16:
        return b"M" + number.to_bytes(2, "little")
    if -(1 << 31) <= number < 1 << 31:
        return b"J" + number.to_bytes(4, "little", signed=True)
    size = number.bit_length() // 8 + 1
    return b"\x8a" + bytes([size]) + number.to_bytes(size, "little", signed=True)


_TUPLES = {1: b"\x85\x94", 2: b"\x86\x94", 3: b"\x87\x94"}  # of so many items before it, and remembered


def pickled(before: bytes, extra: bytes) -> After:
    """What ``pickle.dumps((before, tuple(ids), extra), 5)`` gives, of parts that are encoded already."""

    def encoded(ids: Sequence[int]) -> bytes:
        numbers = b"".join(map(pickled_number, ids))
        items = numbers + _TUPLES[len(ids)] if len(ids) in _TUPLES else b"(" + numbers + b"t\x94"
        body = before + items + extra + b"\x87\x94."
        return b"\x80\x05\x95" + len(body).to_bytes(8, "little") + body

    return encoded


def pickled_bytes(text: bytes) -> bytes:
    """Fewer than 256 bytes in a pickle, remembered."""
    return b"C" + bytes([len(text)]) + text + b"\x94"


def sha(encoded: After, size: int = 32) -> After:
    """SHA-256 of what is encoded, its first bytes."""
    return lambda ids: sha256(encoded(ids)).digest()[:size]


def xxh(encoded: After) -> After:
    """XXH3 of 128 bits of what is encoded."""
    try:
        from xxhash import xxh3_128_digest
    except ImportError as error:
        raise MissingExtraError(
            "These names are made with xxHash, which is not installed.", "pip install xxhash"
        ) from error
    return lambda ids: bytes(xxh3_128_digest(encoded(ids)))
