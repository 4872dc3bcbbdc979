"""No pickle is opened, and no code that comes with a model is run (S2)."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import preimage
from preimage.errors import ModelError
from support.folders import VOCABULARY
from support.model_files import Trap, rewrite, same_weights
from support.refusing import refused
from support.tiny import build


def test_the_trap_works(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Trap(tmp_path / "mark")))  # noqa: S301  # our own, on purpose
    assert (tmp_path / "mark").exists()


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.PTH", "a.ckpt", "b.pkl"])
def test_a_folder_of_pickled_weights_is_refused_unopened(name: str, folder: Path, mark: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(pickle.dumps(Trap(mark)))
    for source in (folder, folder / name):
        error = refused(ModelError, lambda source=source: preimage.load(source))
        assert error.message.startswith(f"{folder / name} is a pickled file, which can run code when opened")
        assert "Convert it to safetensors" in error.hint


def test_pickles_beside_safetensors_are_not_opened(folder: Path, mark: Path) -> None:
    for name in ("pytorch_model.bin", "training_args.bin", "optimizer.pt"):
        (folder / name).write_bytes(pickle.dumps(Trap(mark)))
    same_weights(build("llama", vocab_size=VOCABULARY), preimage.load(folder).module)


@pytest.mark.parametrize("index", ["model.safetensors.index.json", "sub/x.safetensors.index.json"])
@pytest.mark.parametrize("harmless", [True, False])
def test_pickles_are_not_reached_through_an_index(
    index: str, harmless: bool, folder: Path, mark: Path
) -> None:
    weights = load_file(folder / "model.safetensors")
    (folder / "sub").mkdir()
    path = (folder / index).parent / "shard.bin"
    if harmless:
        torch.save(weights, path)
    else:
        path.write_bytes(pickle.dumps(Trap(mark)))
    (folder / index).write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(weights, path.name)}))
    (folder / "model.safetensors").rename(folder / "decoy.safetensors")
    rewrite(folder, transformers_weights=index)
    error = refused(ModelError, lambda: preimage.load(folder))
    assert error.message.startswith(f"{path} is a pickled file")


def test_other_files_are_no_models(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("notes")
    error = refused(ModelError, lambda: preimage.load(path))
    assert error.message == f"{path} is a file preimage cannot load."


@pytest.mark.parametrize("model_type", ["llama", "evil"])
def test_code_that_comes_with_a_model_is_not_run(model_type: str, folder: Path, mark: Path) -> None:
    (folder / "evil.py").write_text(
        f"import os\nos.mkdir({str(mark)!r})\n"
        "from transformers import LlamaConfig as C, LlamaForCausalLM as M, PreTrainedTokenizerFast as T\n"
    )
    code = {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M", "AutoTokenizer": ["evil.T", "evil.T"]}
    rewrite(folder, auto_map=code, model_type=model_type, architectures=["M"])
    rewrite(folder, "tokenizer_config.json", auto_map=code)
    if model_type == "llama":  # one that transformers itself has
        same_weights(build("llama", vocab_size=VOCABULARY), preimage.load(folder).module)
    else:
        error = refused(ModelError, lambda: preimage.load(folder))
        assert "contains custom code which must be executed" in error.message
