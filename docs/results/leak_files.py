"""A folder as engines leave it, with the default model's numbers in it, and what `preimage leak` reads there.

    python docs/results/leak_files.py write FOLDER          # and FOLDER.json: the prompts, beside it
    preimage leak FOLDER --model smollm2 --layers 2,15,28 --stored bf16 --out RUN --json > FOUND.json
    python docs/results/leak_files.py judge FOLDER FOUND.json SECONDS docs/results/raw/leak-files.json

The prompts are windows of prose that no lens was trained on; the model computes in bfloat16, as a service
does. Layouts are those that the tests hold against files of the engines themselves (tests/leak/files):

    log.jsonl     a log of requests with text and token ids in the clear
    hidden/       vLLM's hidden states of layers 2, 15 and 28, a file a request, 48 tokens
    tier/         vLLM's file tier: blocks of 16 tokens under unsalted names, 64 tokens a request
    pages/        SGLang's hierarchical cache: pages of 16 tokens, 64 tokens a request
    lm/           LMCache's chunks of 256 tokens, 512 tokens a request
"""

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

import preimage
from preimage.leak.block_hashes import SCHEMES
from preimage.models import LanguageModel
from preimage.observations import Site
from preimage.storage import record, write_json

EACH = 4  # requests of each kind
LENGTHS = {"log": 32, "hidden": 48, "tier": 64, "pages": 64, "lm": 512}
TOLD = (2, 15, 28)  # layers of the hidden states
Prompts = dict[str, list[list[int]]]


def write(folder: Path) -> None:
    """Every kind of file, and beside the folder what was asked."""
    model = preimage.load("smollm2", device="cpu", dtype="bfloat16")
    options = preimage.PromptOptions(count=EACH * len(LENGTHS), length=max(LENGTHS.values()))
    rows = list(preimage.gather("default:prose:test", model, options))
    prompts: Prompts = {
        kind: [list(row)[:length] for row in rows[EACH * number : EACH * (number + 1)]]
        for number, (kind, length) in enumerate(LENGTHS.items())
    }
    for name in ("hidden", "tier", "pages", "lm"):
        (folder / name).mkdir(parents=True)
    log = [{"id": number, "prompt": model.decode(ids), "prompt_token_ids": ids}
           for number, ids in enumerate(prompts["log"])]  # fmt: skip
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in log))
    for number, ids in enumerate(prompts["hidden"]):
        states = model.states(torch.tensor([ids]), TOLD)
        stacked = torch.stack([states[layer][0] for layer in TOLD], dim=1).bfloat16().contiguous()
        path = folder / "hidden" / f"cmpl-{number}-0.safetensors"
        save_file({"hidden_states": stacked, "token_ids": torch.tensor(ids)}, path)
    write_tier(folder / "tier", model, prompts["tier"])
    for ids in prompts["pages"]:
        for name, page in pages(model, ids, 16, "sglang"):
            path = folder / "pages" / f"{name.hex()}_smollm2_0_1.bin"
            write_numbers(path, page.transpose(1, 2))  # page_first: 2 x token x layer x width
    for ids in prompts["lm"]:
        for name, page in pages(model, ids, 256, "lmcache-builtin"):
            signed = int.from_bytes(name, "big", signed=True)
            write_numbers(folder / "lm" / f"smollm2@1@0@{signed:x}@bfloat16.pt", page)
    beside(folder).write_text(json.dumps(prompts))


def write_tier(folder: Path, model: LanguageModel, prompts: list[list[int]]) -> None:
    """Blocks of layer x token x head x key or value x channel, filled up to whole memory pages."""
    base = "smollm2_a7d96da97f28"
    names = [f"model.layers.{layer}.self_attn.attn" for layer in range(model.n_layers)]
    config = {
        "model_name": "smollm2", "dtype": "bfloat16", "tokens_per_hash": 16, "blocks_per_file": 1,
        "kv_cache_groups": [{"layer_names": names, "tokens_per_block": 16}], "canonical_format": "v1-nhd",
        "tp_size": 1, "pp_size": 1, "pcp_size": 1, "dcp_size": 1,
    }  # fmt: skip
    (folder / base).mkdir()
    (folder / base / "config.json").write_text(json.dumps(config))
    heads = model.module.config.num_key_value_heads
    for ids in prompts:
        for digest, page in pages(model, ids, 16, "vllm-sha256"):
            name = digest.hex()
            place = folder / f"{base}_r0" / name[:3] / f"{name[3:5]}_g0"
            place.mkdir(parents=True, exist_ok=True)
            block = page.unflatten(-1, (heads, -1)).permute(1, 2, 3, 0, 4)
            write_numbers(place / f"{name}.bin", block, fill=4096)


def pages(model: LanguageModel, ids: list[int], page: int, scheme: str) -> list[tuple[bytes, Tensor]]:
    """Names of a prompt's whole pages, and keys and values of each: 2 x layer x token x width."""
    sites = [Site(block, kind) for kind in ("keys", "values") for block in range(1, model.n_layers + 1)]
    states = model.states(torch.tensor([ids]), sites)
    whole = torch.stack([states[site][0] for site in sites]).unflatten(0, (2, model.n_layers))
    names = SCHEMES[scheme].digests(ids, page)
    return [(name, whole[:, :, page * at : page * (at + 1)]) for at, name in enumerate(names)]


def write_numbers(path: Path, numbers: Tensor, fill: int = 1) -> None:
    """In bfloat16, and zeros up to a multiple of ``fill`` bytes."""
    content = numbers.bfloat16().contiguous().view(torch.int16).numpy().tobytes()
    path.write_bytes(content + bytes(-len(content) % fill))


def beside(folder: Path) -> Path:
    """Where the prompts of a folder stand: not in it."""
    return folder.with_name(f"{folder.name}.json")


def judge(folder: Path, found: Path, seconds: float, out: Path) -> None:
    """What was read of each kind, held against what was asked."""
    prompts: Prompts = json.loads(beside(folder).read_text())
    audit = json.loads(found.read_text())["results"]
    read: list[dict[str, Any]] = [one for one in audit["prompts"] if one["token_ids"]]  # text has none
    kinds = []
    for kind in dict.fromkeys(one["kind"] for one in read):
        here = [one for one in read if one["kind"] == kind]
        truth = {tuple(ids) for rows in prompts.values() for ids in rows}
        kinds.append({
            "kind": kind,
            "statuses": Counter(one["status"] for one in here),
            "prompts": len(here),
            "right": sum(tuple(one["token_ids"]) in truth for one in here),
            "tokens": sum(len(one["token_ids"]) for one in here),
            "proofs": sorted({one["proof"] for one in here}),
        })  # fmt: skip
    document = {"record": record(), "seconds": seconds, "asked": {k: len(v) for k, v in prompts.items()},
                "lengths": LENGTHS, "kinds": kinds, "unread": audit["unread"]}  # fmt: skip
    write_json(out, document)


if __name__ == "__main__":
    if sys.argv[1] == "write":
        write(Path(sys.argv[2]))
    else:
        judge(Path(sys.argv[2]), Path(sys.argv[3]), float(sys.argv[4]), Path(sys.argv[5]))
