"""Files as serving engines and people leave them, read as an audit reads a folder, with all states in them.

A case is names and contents in turn: the name tells much of these files.
"""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
from safetensors.torch import save

from fuzz import mutation, seeds
from fuzz.judging import MESSAGE, check_words
from fuzz.mutation import NEXT, Mutate
from preimage.errors import PreimageError
from preimage.leak.folder import Found, read_paths
from preimage.leak.holdings import Holding, Piece, Seen, Sizes, Told

SIZES = Sizes(n_layers=2, d_model=16, heads=2, head_size=8, vocab_size=40)
TOLD = (
    Told(),
    Told(sizes=SIZES),
    Told(sizes=SIZES, stored="bf16", page=4, layers=(1, 2), rotary="before", scale=2.0),
    Told(sizes=SIZES, order="NHD", stored="fp8"),
)
DIGEST = "a7d96da97f28" * 6
_READ = 3  # pieces of a holding whose states are read
_PARTS, _LONGEST = 8, 200  # folders in one another, and bytes of a name, that every system has


def read_folder(data: bytes, folder: Path) -> None:
    """``read_paths`` of the files of a case, with all that may be told of them, and some states of each."""
    root = folder / "files"
    root.mkdir()
    parts = data.split(NEXT)
    for name, content in zip(parts[::2], parts[1::2], strict=False):
        with suppress(OSError):  # two of one name
            path = _inside(root, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    held = []
    for told in TOLD:
        found = read_paths([root], told)
        _check(found)
        held += found.holdings
    if not held:
        why = found.unread[0][1] if found.unread else "Nothing in it is known."
        raise PreimageError(why, "Give another.")


def _inside(root: Path, name: bytes) -> Path:
    """A path in a folder, as near to a name as can be written."""
    parts = [part.replace(b"\0", b"")[:_LONGEST] for part in name.split(b"/")]
    named = [part.decode(errors="surrogateescape") for part in parts if part not in (b"", b".", b"..")]
    return root.joinpath(*(named[:_PARTS] or ["unnamed"]))


def _check(found: Found) -> None:
    """What is said is one line, and states have the positions that were promised, or are refused."""
    for _, why in found.unread:
        assert why.isprintable(), why
        assert len(why) < MESSAGE, why
    for holding in found.holdings:
        for said in (holding.kind, holding.about, *holding.notes):
            assert said.isprintable(), said
            assert len(said) < MESSAGE, said
        for piece in holding.pieces[:_READ]:
            for seen in piece.seen:
                _read(holding, piece, seen)


def _read(holding: Holding, piece: Piece, seen: Seen) -> None:
    try:
        states = seen.read()
    except PreimageError as error:
        check_words(error)
        return
    assert states.ndim == 2, (holding.kind, states.shape)
    assert seen.layer == "final" or seen.layer >= 0, seen.layer
    if seen.observation.positions == "all":
        assert len(states) <= (len(states) if piece.tokens is None else piece.tokens), holding.kind


def _case(*parts: str | bytes) -> bytes:
    return NEXT.join(part.encode() if isinstance(part, str) else part for part in parts)


def _numbers(*shape: int) -> bytes:
    """Numbers such as states are, in bf16."""
    return torch.randn(shape).bfloat16().view(torch.uint8).numpy().tobytes()


def vllm(_: Path) -> list[bytes]:
    """Hidden states of a request."""
    held = {"hidden_states": torch.randn(4, 2, 16).bfloat16(), "token_ids": torch.arange(4)}
    every = {"hidden_states": torch.randn(4, 3, 16), "token_ids": torch.arange(4)}
    return [_case("cmpl-7-0.safetensors", save(one)) for one in (held, every)]


def vllm_blocks(_: Path) -> list[bytes]:
    """A block in its tier, with the tier's config."""
    groups = [{"layer_names": [f"model.layers.{i}.self_attn.attn" for i in (0, 1)], "tokens_per_block": 4}]
    config = {
        "blocks_per_file": 1, "dcp_size": 1, "dtype": "bfloat16", "inference_engine": "vllm",
        "kv_cache_groups": groups, "model_name": "tiny/model", "pcp_size": 1, "pp_size": 1,
        "tokens_per_hash": 4, "tp_size": 1,
    }  # fmt: skip
    digest = DIGEST[:64]
    place = f"tiny_model_1_r0/{digest[:3]}/{digest[3:5]}_g0/{digest}.bin"
    block = _numbers(2, 4, 2, 2, 8).ljust(4096, b"\0")
    return [
        _case("tiny_model_1/config.json", json.dumps(one), place, block)
        for one in (config, {**config, "kv_layout": "LBNHC", "kv_cache_layout": "NHD"})
    ]


def lmcache(_: Path) -> list[bytes]:
    """Chunks of all layers, and of one."""
    names = "model@1@0@-7d6898b3653177b9@bfloat16.pt", "model@2@1@5348@bfloat16@t%1.pt"
    one = "model@1@0@5348e6690e164538@bfloat16@0.pt"
    return [*(_case(name, _numbers(2, 2, 4, 16)) for name in names), _case(one, _numbers(4, 2, 16))]


def sglang(_: Path) -> list[bytes]:
    """Pages, one of a rank and one of a pipeline's stage."""
    names = f"{DIGEST[:64]}_tiny-model_0_1.bin", f"{DIGEST[:64]}_tiny-model_1_2_1_0.bin"
    return [_case(name, _numbers(2, 4, 2, 2, 8)) for name in names]


def sglang_answers(_: Path) -> list[bytes]:
    """Answers of both routes."""
    rows = torch.randn(3, 16).tolist()
    answer = {"text": "x", "meta_info": {"hidden_states": [rows, rows[0]], "cached_tokens": 2,
              "input_token_logprobs": [[-0.5, 3, None]]}, "output_ids": [1, 2]}  # fmt: skip
    chat = {"choices": [{"message": {"content": "x"}, "hidden_states": rows[0]}]}
    return [_case(f"a{number}.json", json.dumps(one)) for number, one in enumerate((answer, [answer, chat]))]


def llama_cpp(_: Path) -> list[bytes]:
    """A session, and a sequence with a sliding window's second cache."""
    kept = b"".join(struct.pack("<iQ", 1, 32) + torch.randn(3, 16).half().numpy().tobytes() for _ in range(2))
    cells = b"".join(struct.pack("<iIi", position, 1, 0) for position in range(3))
    stream = struct.pack("<I", 3) + cells + struct.pack("<II", 0, 2) + kept + kept
    ids = struct.pack("<I3i", 3, 5, 6, 7)
    session = b"nsgg" + struct.pack("<I", 10) + ids + struct.pack("<I", 5) + b"llama"
    whole = session + struct.pack("<I", 1) + stream
    sequence = b"qsgg" + struct.pack("<I", 3) + ids + struct.pack("<I", 1) + stream
    old = b"qsgg" + struct.pack("<I", 2) + ids + stream
    return [_case("s.session", one) for one in (whole, sequence, old)]


def tensors(folder: Path) -> list[bytes]:
    """What people save themselves, in every format, and text beside it."""
    ids = torch.tensor([[3, 1, 4], [9, 2, 6]])
    more = {"layer_2": torch.randn(2, 3, 16), "input_ids": ids, "attention_mask": torch.ones(2, 3)}
    named = [f"past_key_values.{block}.{half}" for block in (0, 1) for half in ("key", "value")]
    pairs = {name: torch.randn(2, 2, 3, 8) for name in named}
    aux = {"aux_hidden_state": torch.randn(3, 48), "loss_mask": torch.ones(3), "input_ids": ids[0]}
    found = [_case("t.safetensors", save(one)) for one in (more, pairs, aux)]
    npzs, torch_files = seeds.npzs(folder)[4:6], seeds.torch_files(folder)
    made = {"layer_1.npy": seeds.npys(folder), "t.npz": npzs, "t.pt": torch_files}
    found += [_case(name, one) for name, files in made.items() for one in files]
    found.append(_case("t.safetensors", save({"h": torch.randn(3, 16)}), "t.json", '{"prompt": "text"}'))
    return found


def plain_text(_: Path) -> list[bytes]:
    """Rows of prompts."""
    chat = [{"content": "b"}, {"content": [{"text": "c"}]}]
    rows = [{"prompt": "a"}, {"input_ids": [1, 2]}, {"messages": chat}, {"prompt": [[1, 2], [3]]}]
    rows.append({"body": {"input": ["d", "e"]}})
    return [_case("r.jsonl", "\n".join(map(json.dumps, rows))), _case("r.json", json.dumps(rows))]


WORDS = [b"0", b"@1", b"@99999", b"@-1f", b"fp8", b"@float8_e5m2", b"@uint8", b"", b"2", b"\xff\n", b"%s",
         b"x" * 300]  # fmt: skip


def mutate_name(data: bytes, rng: random.Random) -> bytes:
    """A name with another number, or another word between its signs."""
    if not data or rng.random() < 0.5:
        return data
    words = data.replace(b"@", b"_@").split(b"_")
    words[rng.randrange(len(words))] = rng.choice(WORDS)
    return b"_".join(words).replace(b"_@", b"@")


def _by_name(data: bytes, rng: random.Random) -> bytes:
    """A file of tensors in the way of its format."""
    if data.startswith(b"PK"):
        return mutation.mutate_zip(_inner)(data, rng)
    if data.startswith(b"\x93NUMPY"):
        return mutation.mutate_npy(data, rng)
    return (mutation.mutate_tensors if data[8:9] == b"{" else mutation.mutate_pickle)(data, rng)


def _inner(name: str) -> Mutate:
    return mutation.mutate_pickle if name.endswith(".pkl") else mutation.mutate_npy


def mutate_numbers(data: bytes, rng: random.Random) -> bytes:
    """A binary file with another number of 32 or 64 bits, or another length."""
    if rng.random() < 0.4:
        return mutation.mutate_bytes(data, rng)
    size = rng.choice((4, 4, 8))
    at = 4 * rng.randrange(rng.choice((3, 25, len(data) // 4 + 1)))  # what it says of itself comes first
    number = rng.choice([*mutation.NUMBERS, *range(12)]) % 2 ** (8 * size)
    return data[:at] + number.to_bytes(size, "little") + data[at + size :]


_JSON = mutation.mutate_json
FAMILIES: dict[str, tuple[Callable[[Path], list[bytes]], Mutate]] = {
    "vllm": (vllm, mutation.mutate_files(mutate_name, mutation.mutate_tensors)),
    "vllm-blocks": (
        vllm_blocks,
        mutation.mutate_files(mutate_name, _JSON, mutate_name, mutation.mutate_bytes),
    ),
    "lmcache": (lmcache, mutation.mutate_files(mutate_name, mutation.mutate_bytes)),
    "sglang": (sglang, mutation.mutate_files(mutate_name, mutation.mutate_bytes)),
    "sglang-answers": (sglang_answers, mutation.mutate_files(mutate_name, _JSON)),
    "llama-cpp": (llama_cpp, mutation.mutate_files(mutate_name, mutate_numbers)),
    "tensors": (tensors, mutation.mutate_files(mutate_name, _by_name, mutate_name, _JSON)),
    "plain-text": (plain_text, mutation.mutate_files(mutate_name, mutation.mutate_lines)),
}
