"""States as people have them: how much of the prompts each kind of copy gives away.

    python docs/results/observations.py MODEL PROMPTS.json OUT.jsonl CELL... [--device cuda] [--count 50]

PROMPTS.json: lists of token ids, all of one length. A cell is KIND@LAYER or KIND:VALUE@LAYER; a line of json
with a row a prompt is added to OUT for a cell, or a share of its prompts; observations_page.py makes a page
of them. Kinds:

    exact            float32 states, as captured
    bf16-both        states of a bfloat16 model, captured in one batch, read by it
    bf16-states      the same, read by the float32 model
    int8-weights     states of a model with int8 weights (torchao), read by it
    stored:KIND      states kept as fp16, bf16, int8 or fp8 (a scale a token), int4 (a scale a channel)
    noise:SHARE      white noise so long relative to each state
    keys:KIND, values:KIND, kv:KIND   a cache as float32, bf16 (of a bfloat16 model), int8 or fp8
    padded:SIDE      hidden_states of a plain transformers pass over a padded batch of mixed lengths
    permuted, shuffled   coordinates, or positions, in an unknown order
    rotated          coordinates turned by an unknown rotation
    last:N, mean:N   one vector for a prompt of N tokens
    hostile          states that no prompt made
    mistaken         what is said of the states is wrong: seconds until it is named
"""

import argparse
import collections
import dataclasses
import json
import multiprocessing
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import preimage
from preimage import Observation
from preimage.bench.timing import hardware
from preimage.models import LanguageModel, new_model

Layer = int | str
Rows = list[list[int]]
Found = tuple[preimage.Inversion, list[int]]


@dataclasses.dataclass
class Bench:
    """The models and prompts of one run."""

    path: str
    device: str
    prompts: Rows
    models: dict[str, LanguageModel] = dataclasses.field(default_factory=dict)

    def model(self, dtype: str = "float32") -> LanguageModel:
        """The model in a precision, loaded once."""
        if dtype not in self.models:
            base = "bfloat16" if dtype == "bfloat16" else "float32"
            self.models[dtype] = preimage.load(self.path, device=self.device, dtype=base)
            if dtype == "int8":
                self.models[dtype] = with_int8_weights(self.models[dtype])
        return self.models[dtype]

    def states(self, layer: Any, dtype: str = "float32") -> Tensor:
        """States of all prompts, in one batch, on the CPU."""
        return self.model(dtype).states(torch.tensor(self.prompts), (layer,))[layer].cpu()


def with_int8_weights(model: LanguageModel) -> LanguageModel:
    """The same model with its weights in int8, as torchao keeps them."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(model.module, Int8WeightOnlyConfig())
    return preimage.load(model.module, tokenizer=model.tokenizer)


def seconds_of(run: Callable[[], object], device: str) -> float:
    """The median time of a call."""
    times = []
    for _ in range(5):
        began = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


# Copies of states.


def kept(states: Tensor, kind: str) -> Tensor:
    """States as they come back from a copy in fewer bits."""
    if kind in ("fp16", "bf16", "float32"):
        return states.to({"fp16": torch.float16, "bf16": torch.bfloat16, "float32": torch.float32}[kind])
    if kind == "fp8":
        scale = states.abs().amax(dim=-1, keepdim=True) / 448
        return (states / scale).to(torch.float8_e4m3fn).float() * scale
    most, axis = {"int8": (127, -1), "int4": (7, -2)}[kind]
    scale = states.abs().amax(dim=axis, keepdim=True) / most
    return (states / scale).round() * scale


def noisy(states: Tensor, share: float, seed: int = 0) -> Tensor:
    """States with white noise, so long relative to each."""
    noise = torch.randn(states.shape, generator=torch.Generator().manual_seed(seed))
    return states + share * states.norm(dim=-1, keepdim=True) * torch.nn.functional.normalize(noise, dim=-1)


# Cells: each gives results beside the truth.


def residual(bench: Bench, kind: str, value: str, layer: Layer) -> list[Found]:
    """The residual stream, however it was kept."""
    if kind == "int8-weights":
        reader, states = bench.model("int8"), bench.states(layer, "int8")
    elif kind.startswith("bf16"):
        reader = bench.model("bfloat16" if kind == "bf16-both" else "float32")
        states = bench.states(layer, "bfloat16")
    else:
        reader, states = bench.model(), bench.states(layer)
        states = kept(states, value) if kind == "stored" else states
        states = noisy(states, float(value)) if kind == "noise" else states
    return beside(preimage.invert(reader, list(states), layer), bench.prompts)


def cache(bench: Bench, kind: str, value: str, layer: Layer) -> list[Found]:
    """Keys, values or both of one block."""
    dtype = "bfloat16" if value == "bf16" else "float32"
    model = bench.model(dtype)
    seen = Observation(kind)
    states = kept(bench.states(seen.tap(layer, model.n_layers), dtype), value)
    return beside(preimage.invert(model, list(states), layer, observe=seen), bench.prompts)


def padded(bench: Bench, kind: str, value: str, layer: int) -> list[Found]:
    """Hidden states of a plain pass over a padded batch, prompts of mixed lengths."""
    model = bench.model()
    prompts = [ids[: 24 + (11 * i) % (len(ids) - 23)] for i, ids in enumerate(bench.prompts)]
    longest = max(map(len, prompts))
    ids, mask = (torch.zeros(len(prompts), longest, dtype=torch.long) for _ in range(2))
    for row, prompt in enumerate(prompts):
        where = slice(longest - len(prompt), None) if value == "left" else slice(0, len(prompt))
        ids[row, where], mask[row, where] = torch.tensor(prompt), 1
    with torch.inference_mode():
        out = model.module(
            input_ids=ids.to(model.device), attention_mask=mask.to(model.device), output_hidden_states=True
        )
    found = preimage.invert(model, out.hidden_states[layer], layer, attention_mask=mask)
    return beside(found, prompts)


def disordered(bench: Bench, kind: str, value: str, layer: Layer) -> list[Found]:
    """Coordinates or positions in an unknown order."""
    states = bench.states(layer)
    generator = torch.Generator().manual_seed(7)
    if kind == "rotated":
        drawn = torch.randn(states.shape[-1], states.shape[-1], generator=generator, dtype=torch.float64)
        rows = list((states.double() @ torch.linalg.qr(drawn)[0]).float())
        seen = Observation(rotated=True)
        return beside(preimage.invert(bench.model(), rows, layer, observe=seen), bench.prompts)
    if kind == "permuted":
        order = torch.randperm(states.shape[-1], generator=generator)
        seen = Observation(permuted=True)
        return beside(
            preimage.invert(bench.model(), list(states[..., order]), layer, observe=seen), bench.prompts
        )
    orders = [torch.randperm(states.shape[1], generator=generator) for _ in states]
    rows = [one[order] for one, order in zip(states, orders, strict=True)]
    found = preimage.invert(bench.model(), rows, layer, observe=Observation(positions="shuffled"))
    for one, order in zip(found, orders, strict=True):
        if one.status == "recovered" and [int(order[row]) for row in one.order] != list(range(len(order))):
            raise SystemExit("a recovered prompt came with a wrong order of its rows")
    return beside(found, bench.prompts)


def one_vector(bench: Bench, kind: str, value: str, layer: Layer) -> list[Found]:
    """The last state, or the mean of all."""
    prompts = [ids[: int(value)] for ids in bench.prompts]
    states = bench.model().states(torch.tensor(prompts), (layer,))[layer].cpu()
    rows = states[:, -1] if kind == "last" else states.mean(dim=1)
    return beside(
        preimage.invert(bench.model(), list(rows), layer, observe=Observation(positions=kind)), prompts
    )


def hostile(bench: Bench, kind: str, value: str, layer: Layer) -> list[Found]:
    """Averages, steered, random and another model's states: nothing may be recovered or likely."""
    model, states = bench.model(), bench.states(layer)
    generator = torch.Generator().manual_seed(11)
    other = torch.roll(states, 1, dims=0)
    lengths = states.norm(dim=-1, keepdim=True)
    ordinary = states[:, 1:].flatten(0, 1)
    steer = torch.nn.functional.normalize(ordinary[0] - ordinary[1], dim=0) * ordinary.norm(dim=1).median()
    drawn = torch.randn(states.shape, generator=generator)
    random = (
        ordinary.mean(dim=0)
        + drawn
        @ torch.linalg.cholesky(
            torch.cov(ordinary.T) + 1e-3 * ordinary.var() * torch.eye(ordinary.shape[1])
        ).T
    )
    stranger = new_model(
        "llama", (model.d_model, 4, 9), vocabulary=model.vocab_size, max_length=256, device=bench.device
    )
    foreign = stranger.states(torch.tensor(bench.prompts), (3,))[3].cpu()
    kinds = {
        "averages of two prompts": (states + other) / 2,
        "averages of three": (states + other + torch.roll(states, 2, dims=0)) / 3,
        "uneven averages": 0.7 * states + 0.3 * other,
        "steered": states + steer,
        "steered a little": states + 0.3 * steer,
        "white": torch.nn.functional.normalize(drawn, dim=-1) * lengths,
        "drawn like states": random,
        "another model's": foreign / foreign.norm(dim=-1, keepdim=True) * lengths,
        "coordinates shuffled apart": torch.stack(
            [row[:, torch.randperm(row.shape[1], generator=generator)] for row in states]
        ),
        "averages of neighbours": (states + torch.roll(states, 1, dims=1)) / 2,
    }
    found = []
    for name, rows in kinds.items():
        results = preimage.invert(model, list(rows), layer)
        print(name, collections.Counter(one.status for one in results), flush=True)  # noqa: T201
        found += results
    return beside(found, [[] for _ in found])


def mistaken(bench: Bench, kind: str, value: str, layer: int) -> list[dict[str, Any]]:
    """What is said is wrong: which words name it, and after how many seconds."""
    model, ids = bench.model(), bench.prompts[0]
    bos = model.tokenizer.bos_token_id
    below, final = bench.states(layer - 1)[0], bench.states("final")[0]
    behind = model.states(torch.tensor([[bos, *ids]]), (layer,))[layer][0, 1:].cpu()
    stranger = new_model(
        "llama", (model.d_model, 4, 9), vocabulary=model.vocab_size, max_length=256, device=bench.device
    )
    foreign = stranger.states(torch.tensor([ids]), (3,))[3][0].cpu()
    half = bench.states(layer, "bfloat16")[0]
    given = {"wrong layer": (below, layer), "final as L": (final, model.n_layers),
             "wrong dtype": (half, layer), "missing BOS": (behind, layer),
             "another model": (foreign, layer)}  # fmt: skip
    rows = []
    for name, (states, at) in given.items():
        preimage.invert(model, bench.states(at)[0], at)  # what is built once for a layer
        (found,) = preimage.invert(model, states, at)
        rows.append({"given": name, "status": found.status, "reason": found.reason,
                     "seconds": round(found.seconds, 2), "setup": round(found.setup_seconds, 2)})  # fmt: skip
    return rows


CELLS: dict[str, Callable[..., list[Found]]] = {
    **dict.fromkeys(("exact", "bf16-both", "bf16-states", "int8-weights", "stored", "noise"), residual),
    **dict.fromkeys(("keys", "values", "kv"), cache),
    **dict.fromkeys(("permuted", "shuffled", "rotated"), disordered),
    **dict.fromkeys(("last", "mean"), one_vector),
    "padded": padded,
    "hostile": hostile,
}


def beside(found: list[preimage.Inversion], truth: Rows) -> list[Found]:
    """Results beside what is true."""
    return list(zip(found, truth, strict=True))


def measured(one: preimage.Inversion, truth: list[int]) -> dict[str, Any]:
    """What one result shows: tokens read right, how many of those called sure are, and what it cost."""
    read = list(one.reading.token_ids)
    same = [a == b for a, b in zip(read, truth, strict=False)] + [False] * max(0, len(truth) - len(read))
    sure = [ok for ok, share in zip(same, one.reading.confidence, strict=False) if share >= 0.99]
    return {
        "status": one.status, "tokens": len(truth), "right": sum(same), "after_first": sum(same[1:]),
        "exact": read == truth,
        "wrongly_recovered": one.status == "recovered" and one.token_ids != tuple(truth),
        "sure": len(sure), "sure_and_right": sum(sure),
        "passes": round(one.forward_tokens / max(1, len(truth)), 2), "seconds": round(one.seconds, 3),
        "setup": round(one.setup_seconds, 1),
    }  # fmt: skip


def cells(names: list[str]) -> Iterator[tuple[str, str, str, Layer]]:
    """Name, kind, value and layer of each cell."""
    for name in names:
        what, _, where = name.rpartition("@")
        kind, _, value = what.partition(":")
        yield name, kind, value, where if where == "final" else int(where)


_BENCH: list[Bench] = []  # of this process


def begin(path: str, device: str, prompts: Rows) -> None:
    """Make a process ready."""
    _BENCH[:] = [Bench(path, device, prompts)]


def measure(name: str, first: int, last: int) -> dict[str, Any]:
    """One cell over some of the prompts."""
    ((_, kind, value, layer),) = cells([name])
    bench = dataclasses.replace(_BENCH[0], prompts=_BENCH[0].prompts[first:last])
    began, whole = time.perf_counter(), torch.tensor(bench.prompts)
    plain = seconds_of(lambda: bench.model().states(whole, ("final",)), bench.device) / len(whole)
    about: dict[str, Any] = {"cell": name, "first": first, "plain_seconds": round(plain, 5)}
    if kind == "mistaken":
        about["named"] = mistaken(bench, kind, value, int(layer))
    else:
        about["rows"] = [measured(*one) for one in CELLS[kind](bench, kind, value, layer)]
    return about | {"seconds": round(time.perf_counter() - began, 1)}


def main() -> None:
    """Measure the cells that are named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    for name in ("model", "prompts", "out"):
        parser.add_argument(name)
    parser.add_argument("cells", nargs="+")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--processes", type=int, default=1, help="at once; their times are no times")
    parser.add_argument("--share", type=int, default=50, help="prompts a process takes at once")
    parser.add_argument("--commit", default="", help="where this is not run in its repository")
    given = parser.parse_args()
    prompts = json.loads(Path(given.prompts).read_text())[: given.count]
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    about = {"commit": given.commit or commit.stdout.strip(), "processes": given.processes,
             "hardware": hardware(torch.device(given.device)),
             "tokens_a_prompt": len(prompts[0])}  # fmt: skip
    pieces = [
        (name, first, min(first + given.share, len(prompts)))
        for name in given.cells
        for first in range(0, 1 if name.startswith("mistaken") else len(prompts), given.share)
    ]
    with ProcessPoolExecutor(
        given.processes, multiprocessing.get_context("spawn"), begin, (given.model, given.device, prompts)
    ) as pool:
        for done in as_completed([pool.submit(measure, *piece) for piece in pieces]):
            found = done.result()
            with Path(given.out).open("a") as file:
                file.write(json.dumps(found | about) + "\n")
            rows = found.get("rows", [])
            print(  # noqa: T201
                found["cell"], found["first"], f"{found['seconds']} s", *map(str, found.get("named", [])),
                f"{sum(r['exact'] for r in rows)} of {len(rows)}",
                f"{sum(r['right'] for r in rows)} of {sum(r['tokens'] for r in rows)}",
                f"after first {sum(r['after_first'] for r in rows)}",
                f"sure {sum(r['sure_and_right'] for r in rows)} of {sum(r['sure'] for r in rows)}",
                f"passes {statistics.median([r['passes'] for r in rows] or [0])}",
                collections.Counter(r["status"] for r in rows),
                "WRONG" if any(r["wrongly_recovered"] for r in rows) else "", flush=True,
            )  # fmt: skip


if __name__ == "__main__":
    main()
