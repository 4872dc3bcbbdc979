"""Changes that keep a file's form, so that what lies behind a length, an offset or a checksum is reached."""

from __future__ import annotations

import io
import json
import random
import re
import struct
import warnings
import zipfile
from collections.abc import Callable
from typing import Any, TypeAlias

Mutate: TypeAlias = Callable[[bytes, random.Random], bytes]

NEXT = b"\x00\x1enext file\x1e\x00"  # between the files of one case
# Becomes json of so many levels: what is parsed may be too deep for whatever walks over it next.
DEEP = {f"{levels} levels deep": levels for levels in (50, 150, 220, 300, 450, 3000)}
VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 7, 2**31, 2**53 + 1, 2**63, 2**64, 10**30, 10**400, 0.5, -0.0, 1e-320,
    1e308, float("inf"), float("nan"), "", "a", "0", "-1", "final", "all", "1e999", "9" * 5000, "x" * 5000,
    "\x00", "\n", "\x1b[2J", "\ud800", "\u2028", "../../x", "/dev/zero", [], {}, [[]], [0], [1, "2"], {"": 0},
    {"a": {}}, *DEEP,
]  # fmt: skip
DTYPES = ["BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F4", "F6_E2M3", "I16", "U16", "F16", "BF16",
          "I32", "U32", "F32", "C64", "F64", "I64", "U64", "Q7"]  # fmt: skip
BITS = {"BOOL": 8, "F4": 4, "F6_E2M3": 6, "BF16": 16, "Q7": 8, "F8_E8M0": 8}
NUMBERS = [0, 1, -1, 2, 3, 255, 2**15, 2**31 - 1, 2**31, 2**32, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1]
DESCRIPTIONS = ["<f4", ">f4", "<f2", "<f8", "<f16", "|b1", "|i1", "<u8", "<c8", "|O", "|S0", "|V0", "|V7",
                "<U3", "<M8[ns]", "|S9999999", "nonsense", ""]  # fmt: skip
# What the reader of torch.save's files may call; the fields between are theirs.
GLOBALS = [
    b"torch._utils\n_rebuild_tensor_v2", b"torch._utils\n_rebuild_tensor", b"torch._utils\n_rebuild_qtensor",
    b"torch._utils\n_rebuild_sparse_tensor", b"torch._utils\n_rebuild_nested_tensor",
    b"torch._utils\n_rebuild_meta_tensor_no_storage", b"torch._utils\n_rebuild_parameter",
    b"torch._tensor\n_rebuild_from_type_v2", b"torch\nTensor", b"torch\nSize", b"torch\ndevice",
    b"torch\nFloatStorage", b"torch\nByteStorage", b"torch.storage\nUntypedStorage", b"torch\nfloat32",
    b"collections\nOrderedDict", b"collections\nCounter", b"builtins\nbytearray", b"builtins\nset",
    b"_codecs\nencode", b"os\nsystem", b"builtins\neval",
]  # fmt: skip
# Pieces of the language of pickles: values, marks, calls, the memo, the end.
OPCODES = [b"]", b"}", b")", b"N", b"R", b"Q", b"0", b"(", b"t", b"l", b"a", b"e", b"s", b"u", b"b", b"\x85",
           b"2", b"h\x00", b"q\x00", b"\x81", b"."]  # fmt: skip
# Headers of npy files, which Python reads as a literal.
HEADERS = [b"-" * 4000 + b"1", b"(" * 5000, b"{" * 90, b"'", b"  1\n 2", b"9" * 5000, b"\x00", b"{}",
           b"[0]" * 900, b"1L", b"{'descr'", b"\\", b"lambda: 0", b"\xff"]  # fmt: skip
MEMBERS = ["mask.npy", "scale.npy", "h.npy", "\n.npy", ".."]
PACKED = (zipfile.ZIP_STORED,) * 4 + (zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA)
# Layers and positions in the words of a command, and what is like them.
WORDS = [b"0", b"2", b"3", b"final", b"all", b"-", b",", b" ", b"1-3", b"9" * 5000, b"0-999999", b"\xc2\xb2",
         b"\xd9\xa3", b"+1", b"1_0", b"1e3", b"\x00", b"\xff", b"-1", b"--", b"\n", b"x" * 5000]  # fmt: skip


def mutate_bytes(data: bytes, rng: random.Random) -> bytes:
    """A few bytes changed, cut out, put in or repeated."""
    raw = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4))):
        at, count = rng.randrange(len(raw) + 1), rng.choice((1, 2, 4, 8, 64))
        kind = rng.randrange(6)
        if kind == 0 and at < len(raw):
            raw[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            raw[at : at + count] = rng.randbytes(count)
        elif kind == 2:
            del raw[at : at + count]
        elif kind == 3:
            raw[at:at] = raw[rng.randrange(len(raw) + 1) :][:count]
        elif kind == 4:
            raw[at : at + 8] = (rng.choice(NUMBERS) % 2**64).to_bytes(8, rng.choice(("little", "big")))
        else:
            del raw[at:]
    return bytes(raw)


def mutate_value(value: Any, rng: random.Random) -> Any:
    """One place of a json value changed: replaced, removed, doubled, renamed, one more, or made a list."""
    if isinstance(value, dict):
        inside = list(value.items())
    else:
        inside = list(enumerate(value)) if isinstance(value, list) else []
    if inside and rng.random() < 0.8:
        key, part = rng.choice(inside)
        changed = dict(value) if isinstance(value, dict) else list(value)
        kind = rng.randrange(8)
        if kind == 0:
            del changed[key]
        elif kind == 1 and isinstance(changed, dict):
            changed[rng.choice(("", "a", "0", "-1", "9" * 5000, f"{key}0"))] = changed.pop(key)
        elif kind == 1:
            changed.insert(key, part)
        elif kind == 2:
            changed[key] = rng.choice(inside)[1]
        else:
            changed[key] = mutate_value(part, rng)
        return changed
    if type(value) is int and abs(value) < 2**64 and rng.random() < 0.3:
        return value + rng.choice((-1, 1, 0.5))
    return [value] if rng.random() < 0.1 else rng.choice(VALUES)


def mutate_json(data: bytes, rng: random.Random) -> bytes:
    """A json document with one to three places changed; what is none, as bytes."""
    try:
        value = json.loads(data)
        for _ in range(rng.choice((1, 1, 2, 3))):
            value = mutate_value(value, rng)
        return dump_json(value)
    except (ValueError, RecursionError):
        return mutate_bytes(data, rng)


def dump_json(value: Any) -> bytes:
    """Json as bytes, with the markers of depth made real."""
    text = json.dumps(value)
    for marker, levels in DEEP.items():
        text = text.replace(f'"{marker}"', '{"a":[' * levels + "]}" * levels)
    return text.encode()


def mutate_lines(data: bytes, rng: random.Random) -> bytes:
    """Lines of json: one changed, removed or doubled."""
    lines = data.splitlines(keepends=True)
    if not lines:
        return mutate_bytes(data, rng)
    at, kind = rng.randrange(len(lines)), rng.randrange(6)
    if kind == 0:
        del lines[at]
    elif kind == 1:
        lines.insert(at, rng.choice(lines))
    else:
        ending = rng.choice((b"\n", b"\n", b"\r\n", b""))
        lines[at] = mutate_json(lines[at], rng) + ending
    return b"".join(lines)


def mutate_tensors(data: bytes, rng: random.Random) -> bytes:
    """A safetensors file with a changed header of the right length; most often with offsets that agree."""
    try:
        length = int.from_bytes(data[:8], "little")
        header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
        about = header.get("__metadata__", {})
        if "about" in about and rng.random() < 0.5:
            about["about"] = mutate_json(about["about"].encode(), rng).decode()
            return _with_header(header, body)
        if rng.random() < 0.4:
            return _with_header(mutate_value(header, rng), body)
        return _laid_out(header, body, rng)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError, OverflowError):
        return mutate_bytes(data, rng)


def _with_header(header: Any, body: bytes) -> bytes:
    text = dump_json(header)
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + body


def _laid_out(header: dict[str, Any], body: bytes, rng: random.Random) -> bytes:
    """One tensor in another type, shape or name, or one more; the offsets and the bytes follow."""
    names = [name for name in header if name != "__metadata__"]
    name, kind = rng.choice(names), rng.randrange(4)
    entry = dict(header[name])
    if kind == 0:
        entry["dtype"] = rng.choice(DTYPES)
    elif kind == 1:
        entry["shape"] = [rng.choice((0, 1, 2, 3, 8, 31)) for _ in range(rng.randrange(5))]
    else:
        header.pop(name) if kind == 2 else None
        name = rng.choice((
            f"{name}_scale", "scale", "mask", "attention_mask", "hidden_states.2", "2", "", "hidden_states.0",
            "\n", f"hidden_states.{'9' * rng.choice((9, 5000))}", "x" * 5000,
        ))  # fmt: skip
    header[name] = entry
    end, parts = 0, []
    for one in (one for key, one in header.items() if key != "__metadata__"):
        bits = BITS.get(one["dtype"]) or int(re.findall(r"\d+", one["dtype"])[0])
        for size in one["shape"]:
            bits *= size
        if bits > 8 << 20:
            raise ValueError("too large for a case")
        start, end = end, end + (bits + 7) // 8
        one["data_offsets"] = [start, end]
        parts.append(body[: end - start].ljust(end - start, b"\x00"))
    return _with_header(header, b"".join(parts))


def mutate_npy(data: bytes, rng: random.Random) -> bytes:
    """An npy file whose header says something else, at its right length."""
    match = re.match(rb"\x93NUMPY(.)\x00(..)", data, re.DOTALL)
    if match is None or rng.random() < 0.3:
        return mutate_bytes(data, rng)
    length = struct.unpack("<H", match[2])[0]
    header, body = data[10 : 10 + length], data[10 + length :]
    kind = rng.randrange(5)
    if kind == 0:
        shape = tuple(rng.choice([*NUMBERS, 4, 8, 16]) for _ in range(rng.randrange(5)))
        header = re.sub(rb"\(.*?\)", repr(shape).encode(), header, count=1)
    elif kind == 1:
        plain = repr(rng.choice(DESCRIPTIONS))
        described = rng.choice((plain, "[('a', '<f4')]", "[('a', '<f4', (2, 2))]", "('<f4', (3,))"))
        header = re.sub(rb"'descr': '[^']*'", b"'descr': " + described.encode(), header)
    elif kind == 2:
        header = rng.choice(HEADERS)
    else:
        header = mutate_bytes(header, rng)
    version = rng.choice((1, 1, 1, 2, 3))
    size = struct.pack("<H", len(header) % 2**16) if version == 1 else struct.pack("<I", len(header))
    return b"\x93NUMPY" + bytes([version, 0]) + size + header + body


def mutate_gguf(data: bytes, rng: random.Random) -> bytes:
    """A GGUF file with another number, or other bytes, among what it says of itself."""
    end = max(1, data.rfind(b".weight"))  # behind the name of the last tensor
    if rng.random() < 0.3:
        return mutate_bytes(data[:end], rng) + data[end:]
    names = [match.end() for match in re.finditer(rb"[a-z]\.[a-z_.]+", data[:end])] or [8]
    at, size = rng.choice(names) + rng.choice((0, 4, 4, 8)), rng.choice((4, 8))
    number = rng.choice(NUMBERS) % 2 ** (8 * size)
    return data[:at] + number.to_bytes(size, "little") + data[at + size :]


def mutate_pickle(data: bytes, rng: random.Random) -> bytes:
    """A pickle that calls something else, or with another number."""
    names, kind = list(re.finditer(rb"c([\w.]+\n\w+)\n", data)), rng.randrange(4)
    if names and kind == 0:
        chosen = rng.choice(names)
        return data[: chosen.start(1)] + rng.choice(GLOBALS) + data[chosen.end(1) :]
    numbers = list(re.finditer(rb"K(.)", data, re.DOTALL))
    if numbers and kind == 1:
        chosen, number = rng.choice(numbers), rng.choice(NUMBERS)
        written = number.to_bytes(9, "little", signed=True)
        return data[: chosen.start()] + b"\x8a" + bytes([9]) + written + data[chosen.end() :]
    if kind == 2:
        at = rng.randrange(len(data) + 1)
        return data[:at] + rng.choice([*OPCODES, b"c" + rng.choice(GLOBALS) + b"\n"]) + data[at:]
    return mutate_bytes(data, rng)


def mutate_zip(inner: Callable[[str], Mutate]) -> Mutate:
    """Archives: a member changed by ``inner`` of its name, renamed, doubled or packed another way."""

    def mutate(data: bytes, rng: random.Random) -> bytes:
        try:
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                members = [(info.filename, archive.read(info)) for info in archive.infolist()]
            at = rng.randrange(len(members))
        except Exception:  # no archive any more
            return mutate_bytes(data, rng)
        if rng.random() < 0.3:
            return mutate_bytes(data, rng)
        name, raw = members[at]
        kind = rng.randrange(8)
        if kind == 0:
            del members[at]
        elif kind == 1:
            members.append((rng.choice([*MEMBERS, name.removesuffix(".npy")]), raw))
        else:
            members[at] = name, inner(name)(raw, rng)
        how = rng.choice(PACKED)
        written = io.BytesIO()
        with warnings.catch_warnings(), zipfile.ZipFile(written, "w", how) as archive:
            warnings.simplefilter("ignore")  # of a name that is there twice
            for member, content in members:
                archive.writestr(zipfile.ZipInfo(member), content, compress_type=how)
        return written.getvalue()

    return mutate


def mutate_files(*each: Mutate) -> Mutate:
    """A case of several files, each with its own way to be changed."""

    def mutate(data: bytes, rng: random.Random) -> bytes:
        parts = data.split(NEXT, len(each) - 1)
        at = rng.randrange(len(parts))
        parts[at] = each[at](parts[at], rng)
        return NEXT.join(parts)

    return mutate


def mutate_text(data: bytes, rng: random.Random) -> bytes:
    """Text of options: numbers, ranges, words and what is like them."""
    if rng.random() < 0.3:
        return mutate_bytes(data, rng)
    parts = data.split(b",")
    parts[rng.randrange(len(parts))] = b"".join(rng.choice(WORDS) for _ in range(rng.choice((1, 2, 3))))
    return b",".join([*parts, *([rng.choice(WORDS)] if rng.random() < 0.3 else [])])
