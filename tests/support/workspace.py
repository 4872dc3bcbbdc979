"""A folder with everything the documents' commands name, and a small model under the name they use.

``smollm2`` is here a Llama of 30 blocks and width 64 with random weights and a tokenizer of 300 tokens, so
that commands can be run as they stand: layer 15 is there, and a pass takes milliseconds.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

import preimage
from preimage.models import ALIASES, converted_folder
from support.folders import make_folder

LAYER = 15
PROMPT, OTHER = "The answer is 42.", "My password is hunter2."
_WIDE = {"num_hidden_layers": 30, "hidden_size": 64, "max_position_embeddings": 2048}
_MODELS = ("MODEL", "gpt2", "my-org/my-model", "runs/a/model", "runs/b/model")
_WORDS = ("one", "two", "three", "four", "five", "six")


def make_model() -> Path:
    """The folder behind ``smollm2`` in the cache that is set."""
    folder = converted_folder(ALIASES["smollm2"])
    make_folder(folder, **_WIDE)
    return folder


def kept(model: Any) -> dict[str, Any]:
    """What somebody has of a pass, by the names the documents give it."""
    ids, others = (model.tokenizer(text, return_tensors="pt")["input_ids"] for text in (PROMPT, OTHER))
    short = ids[:, :2]
    length = max(ids.shape[1], others.shape[1])
    rows = [torch.nn.functional.pad(one[0], (0, length - one.shape[1])) for one in (ids, others)]
    mask = torch.tensor([[int(at < one.shape[1]) for at in range(length)] for one in (ids, others)])
    with torch.no_grad():
        outputs = model.module(ids, output_hidden_states=True, use_cache=True)
        batch = model.module(torch.stack(rows), attention_mask=mask, output_hidden_states=True)
        first = model.module(short, output_hidden_states=True).hidden_states[LAYER][0]
    x = outputs.hidden_states[LAYER][0]
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(x.shape, generator=generator)
    scales = x.abs().amax(1, keepdim=True) / 127
    codes = (x / scales).round().to(torch.int8)
    turned = torch.linalg.qr(torch.randn(x.shape[1], x.shape[1], generator=generator, dtype=torch.float64))[0]
    cache = outputs.past_key_values
    return {
        "outputs": outputs, "hidden": outputs.hidden_states, "final": outputs.hidden_states[-1][0],
        "x": x, "x0": x, "x1": batch.hidden_states[LAYER][1][: int(mask[1].sum())],
        "padded": batch.hidden_states[LAYER], "mask": mask, "last": first[-1], "mean": first.mean(0),
        "x_int8": codes.float() * scales, "codes": codes, "scales": scales, "some": x[[0, 1, 2, 4, 5]],
        "shuffled": x[torch.randperm(len(x), generator=generator)],
        "permuted": x[:, torch.randperm(x.shape[1], generator=generator)],
        "rotated": (x.double() @ turned).float(),
        "noisy": x + 0.2 * x.norm(dim=1, keepdim=True) * noise / noise.norm(dim=1, keepdim=True),
        "keys": cache.layers[LAYER - 1].keys, "k": cache.layers[LAYER - 1].keys,
        "cache": [(layer.keys, layer.values) for layer in cache.layers],
        "x_half": preimage.capture(preimage.load(model.name, dtype="bf16"), PROMPT, LAYER).at(0, LAYER),
    }  # fmt: skip


def fill(folder: Path, model: Any, seen: dict[str, Any]) -> None:
    """The files that the documents' commands name."""
    for name in _MODELS:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to(converted_folder(ALIASES["smollm2"]), target_is_directory=True)
    for name in ("x", "final", "shuffled", "permuted", "rotated", "some", "noisy", "last", "mean"):
        np.save(folder / f"{name}.npy", seen[name].numpy())
    np.save(folder / "copy.npy", seen["x"].bfloat16().float().numpy())
    np.save(folder / "int8.npy", seen["x_int8"].numpy())
    for name in ("x", "padded"):
        np.savez(folder / f"{name}.npz", states=seen["padded"].numpy(), attention_mask=seen["mask"].numpy())
    for name in ("mine", "states", "x"):
        save_file({"states": seen["x"].clone()}, folder / f"{name}.safetensors")
    save_file({"h": seen["codes"], "h_scale": seen["scales"]}, folder / "codes.safetensors")
    for name in ("k", "keys"):
        save_file({"keys": seen["keys"].clone()}, folder / f"{name}.safetensors")
    torch.save(list(seen["hidden"]), folder / "hidden.pt")
    torch.save([seen["x0"], seen["x1"]], folder / "list.pt")
    torch.save(seen["cache"], folder / "cache.pt")
    torch.save(seen["x_half"], folder / "half.pt")
    lines = [f"{OTHER} {word} {index}" for index, word in enumerate(_WORDS)]
    (folder / "mine.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    for name in ("corpus.txt", "mine.txt"):
        (folder / name).write_text("\n".join(topics[key] for key in sorted(topics)[:12]))
    lens = preimage.LensOptions(steps=2, rank=8, hidden=8, sampled_tokens=1000)
    preimage.train_lens(model, LAYER, options=lens, out=folder / "my.safetensors")
    shutil.copy(folder / "my.safetensors", folder / "FILE")
    for name in ("bundle", "BUNDLE"):
        preimage.capture(model, [PROMPT, OTHER], LAYER).save(folder / name)
    for name in ("dump", "FILES"):
        (folder / name).mkdir()
        save_file({f"layer_{LAYER}": seen["x"].clone()}, folder / name / "a.safetensors")
        (folder / name / "log.jsonl").write_text(json.dumps({"prompt": OTHER}) + "\n")
