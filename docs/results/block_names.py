"""What the names of cache pages give away by themselves, for every scheme and several sizes of page.

    python docs/results/block_names.py

writes raw/block-names.json beside this file, in some minutes of two cores. The prompts are windows of 32
tokens of the prose that every Python carries. Pages of one token are read by trying the whole vocabulary.
Larger ones are read where a language model, the default one, proposes them: the likeliest beginnings
of a beam, each with its likeliest last tokens (PAGES).
"""

import argparse
import os
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from hashlib import sha256
from multiprocessing import get_context
from pathlib import Path
from time import process_time
from typing import Any

import torch

import preimage
from preimage.leak.block_hashes import SCHEMES, NamesRead, Propose, read_names
from preimage.models import read_preview
from preimage.prompts import PromptOptions, gather
from preimage.storage import record, write_json

HERE = Path(__file__).parent
MODEL, LENGTH = "smollm2", 32
DEFAULTS = ("vllm-sha256", "sglang", "lmcache-builtin")  # what the engines do unless told otherwise
PAGES = {2: (64, 1024), 4: (16, 4096), 16: (16, 4096)}  # of each, beginnings and last tokens of the beam
Prompt = tuple[int, ...]


def read_one(
    ids: Prompt,
    scheme: str,
    page: int,
    vocabulary: int,
    salt: bytes | None = None,
    propose: Propose | None = None,
) -> tuple[NamesRead, float, list[bytes]]:
    """A prompt's pages by their names alone; the seconds of a core it took; the names in their order."""
    root = None if salt is None else sha256(salt).digest()[: SCHEMES[scheme].length]
    names = SCHEMES[scheme].digests(ids, page, root)
    mixed = random.Random(7).sample(names, len(names))
    roots = None if propose is None else SCHEMES[scheme].roots[:1]  # a model is asked once for each
    started = process_time()
    read = read_names(mixed, scheme, page, vocabulary, propose=propose, roots=roots)
    return read, process_time() - started, names


def single_tokens(scheme: str, salted: bool, prompts: Sequence[Prompt], vocabulary: int) -> dict[str, Any]:
    """Pages of one token of some prompts, each prompt by itself."""
    whole, tokens, hashes, seconds = 0, 0, 0, 0.0
    for ids in prompts:
        read, took, _ = read_one(ids, scheme, 1, vocabulary, b"a secret" if salted else None)
        found = max((prompt.token_ids for prompt in read.prompts), key=len, default=())
        right = found == (ids[1:] if salted else ids)
        whole += right and not salted
        tokens += len(found) if right else 0
        hashes, seconds = hashes + read.hashes, seconds + took
    count = len(prompts)
    return {
        "scheme": scheme,
        "salted": salted,
        "page": 1,
        "prompts": count,
        "prompts_read": whole / count,
        "tokens_read": tokens / (count * LENGTH),
        "core_seconds_a_prompt": seconds / count,
        "hashes_a_core_second": hashes / seconds,
    }


class Beam:
    """Pages that a language model finds likely behind some tokens, the likeliest first."""

    def __init__(self, model: preimage.LanguageModel, page: int, width: int, last: int) -> None:
        self.model, self.page, self.width, self.last = model, page, width, last
        self.start = [model.tokenizer.bos_token_id]

    @torch.inference_mode()
    def __call__(self, before: Prompt) -> Iterator[Prompt]:
        """``last`` pages for each of ``width`` beginnings; of pages of one token, the ``last`` likeliest."""
        out = self.model.module(torch.tensor([[*self.start, *before]]), use_cache=True)
        ids, scores = torch.zeros(1, 0, dtype=torch.long), torch.zeros(1)
        for step in range(self.page):
            logits = out.logits[:, -1].float().log_softmax(dim=-1)
            most = self.width if step < self.page - 1 else self.last
            each = logits.topk(most, dim=-1)
            joint = (scores[:, None] + each.values).flatten()
            order = joint.topk(self.width).indices if step < self.page - 1 else joint.argsort(descending=True)
            rows = order // most
            ids = torch.cat((ids[rows], each.indices.flatten()[order, None]), dim=1)
            scores = joint[order]
            if step < self.page - 1:
                out.past_key_values.reorder_cache(rows)
                out = self.model.module(ids[:, -1:], past_key_values=out.past_key_values, use_cache=True)
        return map(tuple, ids.tolist())


def proposed(page: int, prompts: Sequence[Prompt], vocabulary: int) -> dict[str, Any]:
    """Pages of several tokens where a model proposes them, each prompt by itself."""
    torch.set_num_threads(1)
    beam = Beam(preimage.load(MODEL, device="cpu"), page, *PAGES[page])
    pages, first, first_read, later_read, whole, hashes, seconds = 0, 0, 0, 0, 0, 0, 0.0
    for ids in prompts:
        read, took, names = read_one(ids, "vllm-sha256", beam.page, vocabulary, propose=beam)
        unread = set(read.unread)
        pages, first = pages + len(names), first + 1
        first_read += names[0] not in unread
        later_read += sum(name not in unread for name in names[1:])
        whole += not unread
        hashes, seconds = hashes + read.hashes, seconds + took
    return {
        "scheme": "vllm-sha256",
        "page": beam.page,
        "width": beam.width,
        "last": beam.last,
        "prompts": len(prompts),
        "prompts_read": whole / len(prompts),
        "pages": pages,
        "pages_read": (first_read + later_read) / pages,
        "first_pages_read": first_read / first,
        "later_pages_read": later_read / (pages - first),
        "hashes_a_page": hashes / pages,
        "core_seconds_a_prompt": seconds / len(prompts),
    }


def main() -> None:
    """Measure, and write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--prompts", type=int, default=100, help="of the engines' default schemes")
    parser.add_argument(
        "--fewer", type=int, default=10, help="of the other schemes, of salts and of larger pages"
    )
    parser.add_argument("--out", type=Path, default=HERE / "raw" / "block-names.json")
    given = parser.parse_args()
    preview = read_preview(MODEL)
    assert preview is not None, "run `make model` once"
    found = gather("default:prose", preview, PromptOptions(count=given.prompts, length=LENGTH))
    prompts = [tuple(ids) for ids in found.ids]
    cases = [(scheme, False) for scheme in SCHEMES] + [(scheme, True) for scheme in DEFAULTS]
    with ProcessPoolExecutor(min(2, os.cpu_count() or 1), mp_context=get_context("spawn")) as pool:
        tasks = [
            pool.submit(
                single_tokens,
                scheme,
                salted,
                prompts if scheme in DEFAULTS and not salted else prompts[: given.fewer],
                preview.vocab_size,
            )
            for scheme, salted in cases
        ]
        beams = [pool.submit(proposed, page, prompts[: given.fewer], preview.vocab_size) for page in PAGES]
        single, larger = [task.result() for task in tasks], [task.result() for task in beams]
    document = {
        "record": record(),
        "model": MODEL,
        "vocabulary": preview.vocab_size,
        "length": LENGTH,
        "single_tokens": single,
        "proposed": larger,
    }
    write_json(given.out, document)


if __name__ == "__main__":
    main()
