"""What engines hash to name a page: three things in a row as pickle or CBOR would write them.

The three are what stands before the page, its token ids, and what else tells requests apart. The ids are
encoded by themselves, once, and then hashed behind as many names as there are to try. vLLM's default hashes a
pickle: the few opcodes that a tuple of numbers needs are written out here. Nothing is pickled or unpickled.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import TypeAlias

from preimage.errors import MissingExtraError

Wrap: TypeAlias = Callable[[bytes], bytes]  # encoded ids of a page, into all that is hashed

_TUPLES = {1: b"\x85\x94", 2: b"\x86\x94", 3: b"\x87\x94"}  # of so many items before it, and remembered


def cbor_head(major: int, number: int) -> bytes:
    """How an item begins in canonical CBOR (RFC 8949): its kind, and its length or value in fewest bytes."""
    if number < 24:
        return bytes([major << 5 | number])
    size = next(size for size in (1, 2, 4, 8) if number < 1 << 8 * size)
    return bytes([major << 5 | 24 + size.bit_length() - 1]) + number.to_bytes(size, "big")


def cbor_ids(ids: Sequence[int]) -> bytes:
    """An array of token ids in canonical CBOR."""
    return b"".join((cbor_head(4, len(ids)), *(cbor_head(0, one) for one in ids)))


def cbor(before: bytes, extra: bytes) -> Wrap:
    """``(before, ids, extra)`` in canonical CBOR; all three are encoded already."""
    start = b"\x83" + before
    return lambda ids: start + ids + extra


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


def pickled_ids(ids: Sequence[int]) -> bytes:
    """A tuple of token ids in a pickle, remembered."""
    numbers = b"".join(map(pickled_number, ids))
    return numbers + _TUPLES[len(ids)] if len(ids) in _TUPLES else b"(" + numbers + b"t\x94"


def pickled(before: bytes, extra: bytes) -> Wrap:
    """What ``pickle.dumps((before, ids, extra), 5)`` gives, of parts that are encoded already."""
    end = extra + b"\x87\x94."
    rest = len(before) + len(end)

    def whole(ids: bytes) -> bytes:
        return b"\x80\x05\x95" + (rest + len(ids)).to_bytes(8, "little") + before + ids + end

    return whole


def pickled_bytes(text: bytes) -> bytes:
    """Fewer than 256 bytes in a pickle, remembered."""
    return b"C" + bytes([len(text)]) + text + b"\x94"


def words(ids: Sequence[int]) -> bytes:
    """Token ids as little-endian numbers of 32 bits."""
    return struct.pack(f"<{len(ids)}I", *ids)


def sha(whole: Wrap, size: int = 32) -> Wrap:
    """SHA-256 of what is hashed, its first bytes."""
    return lambda ids: sha256(whole(ids)).digest()[:size]


def xxh(whole: Wrap) -> Wrap:
    """XXH3 of 128 bits of what is hashed."""
    try:
        from xxhash import xxh3_128_digest
    except ImportError as error:
        raise MissingExtraError(
            "These names are made with xxHash, which is not installed.", "pip install xxhash"
        ) from error
    return lambda ids: bytes(xxh3_128_digest(whole(ids)))


def vllm_pickled(before: bytes) -> Wrap:
    """What vLLM hashes behind a name by default: a pickle, of no keys but the ids."""
    return pickled(pickled_bytes(before), b"N")


def vllm_cbor(before: bytes) -> Wrap:
    """The same with sha256_cbor or xxhash_cbor."""
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


def sglang(before: bytes) -> Wrap:
    """How SGLang names a page behind a name."""
    return sha(lambda ids: before + ids)


def lmcache_builtin(before: bytes) -> Callable[[tuple[int, ...]], bytes]:
    """LMCache's default, Python's own ``hash`` of numbers: the same in every 64-bit CPython since 3.8."""
    prefix = int.from_bytes(before, "big", signed=True)
    return lambda ids: hash((prefix, ids, ())).to_bytes(8, "big", signed=True)


def lmcache_cbor(before: bytes) -> Wrap:
    """LMCache with vLLM's sha256_cbor, of which it keeps 64 bits."""
    return sha(cbor(cbor_head(0, int.from_bytes(before, "big")), b"\x80"), 8)


def lmcache_pickled(before: bytes) -> Wrap:
    """LMCache with vLLM's sha256."""
    return sha(pickled(pickled_number(int.from_bytes(before, "big")), b")"), 8)


def lmcache_digest(name: str) -> bytes:
    """A digest of 8 bytes as LMCache writes it into a file's name: hexadecimal, short, with a minus."""
    return (int(name, 16) % (1 << 64)).to_bytes(8, "big")
