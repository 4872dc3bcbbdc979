"""``read_files``: prompts in files, in the clear or inverted, each with how it is known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import preimage
from preimage.errors import StatesError
from preimage.leak import FilesAudit, Told, judge_files, read_files
from preimage.leak.block_hashes import SCHEMES
from preimage.leak.files import sizes_of
from preimage.models import LanguageModel
from preimage.observations import Site
from support.refusing import refused
from support.tiny import tiny

IDS = [7, 3, 9, 4, 11, 5, 30, 2]
OTHER = [7, 3, 9, 4, 1, 1, 8, 12]
PAGE = 4


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return tiny("llama")


def cached(model: LanguageModel, ids: list[int]) -> torch.Tensor:
    """Keys and values of all blocks, 2 x layer x token x width, as a pass leaves them in a cache."""
    sites = [Site(block, kind) for kind in ("keys", "values") for block in range(1, model.n_layers + 1)]
    states = model.states(torch.tensor([ids]), sites)
    halves = torch.stack([states[site][0] for site in sites])
    return halves.unflatten(0, (2, model.n_layers))


def write_lmcache(folder: Path, model: LanguageModel, ids: list[int]) -> None:
    """Chunks of all layers, named by LMCache's default hash."""
    names = SCHEMES["lmcache-builtin"].digests(ids, PAGE)
    whole = cached(model, ids)
    for number, name in enumerate(names):
        signed = int.from_bytes(name, "big", signed=True)
        chunk = whole[:, :, number * PAGE : (number + 1) * PAGE].to(torch.bfloat16).contiguous()
        path = folder / f"tiny@1@0@{signed:x}@bfloat16.pt"
        path.write_bytes(chunk.view(torch.int16).numpy().tobytes())


def write_vllm(path: Path, model: LanguageModel, ids: list[int]) -> None:
    """Hidden states of a request: every layer from 0 on, and the ids."""
    layers = list(range(model.n_layers + 1))
    states = model.states(torch.tensor([ids]), layers)
    stacked = torch.stack([states[layer][0] for layer in layers], dim=1).contiguous()
    save_file({"hidden_states": stacked, "token_ids": torch.tensor(ids)}, path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, model: LanguageModel) -> Path:
    """A dump in the clear, a request of vLLM, and chunks of two prompts with one beginning."""
    top = tmp_path_factory.mktemp("dump")
    (top / "log.jsonl").write_text('{"prompt": "tell me", "token_ids": [5, 6]}\n{"prompt": "and me"}\n')
    write_vllm(top / "cmpl-1-0.safetensors", model, IDS)
    (top / "lm").mkdir()
    write_lmcache(top / "lm", model, IDS)
    write_lmcache(top / "lm", model, OTHER)
    (top / "broken.safetensors").write_bytes(b"\xff" * 64)
    return top


@pytest.fixture(scope="module")
def found(folder: Path, model: LanguageModel) -> FilesAudit:
    return read_files(folder, model, told=Told(page=PAGE))


def ids_of(found: FilesAudit, kind: str, status: str) -> set[tuple[int, ...]]:
    return {one.token_ids for one in found.prompts if kind in one.kind and one.status == status}


def test_every_kind_is_named(found: FilesAudit) -> None:
    assert {kind.kind for kind in found.kinds} >= {"vLLM hidden states", "LMCache chunk"}
    assert len(found.kinds) == 3


def test_what_stands_in_the_clear_comes_first(found: FilesAudit) -> None:
    clear = [one for one in found.prompts if one.status == "clear"]
    assert found.prompts[: len(clear)] == tuple(clear)
    assert {one.text for one in clear} >= {"tell me", "and me"}
    assert ids_of(found, "vLLM", "clear") == {tuple(IDS)}


def test_states_are_inverted_and_held_against_the_ids_beside_them(found: FilesAudit) -> None:
    (one,) = [one for one in found.prompts if "vLLM" in one.kind and one.status == "recovered"]
    assert one.token_ids == tuple(IDS)
    assert "They are the ids that stand in the clear" in one.proof


def test_pages_are_read_one_by_one_and_proved_by_their_names(found: FilesAudit) -> None:
    assert ids_of(found, "LMCache", "recovered") == {tuple(IDS), tuple(OTHER)}
    for one in found.prompts:
        if "LMCache" in one.kind:
            assert "lmcache-builtin" in one.proof
            assert f"values of block {tiny('llama').n_layers} are the model's own" in one.proof


def test_a_broken_file_stops_nothing_and_is_named(found: FilesAudit) -> None:
    assert [Path(path).name for path, _ in found.unread] == ["broken.safetensors"]
    assert not found.complete


def test_without_a_model_only_what_needs_none_is_read(folder: Path) -> None:
    found = read_files(folder)
    assert {one.status for one in found.prompts} == {"clear"}
    assert "No model was named" in " ".join(judge_files(found).not_tried)


def test_another_models_states_are_not_recovered(tmp_path: Path, model: LanguageModel) -> None:
    foreign = torch.randn(6, model.d_model, generator=torch.Generator().manual_seed(5))
    save_file({"hidden_states.1": foreign}, tmp_path / "states.safetensors")
    found = read_files(tmp_path / "states.safetensors", model)
    assert [one.status for one in found.prompts] == ["not_recovered"]
    assert not found.complete


def test_pages_of_one_token_are_read_from_names_alone(tmp_path: Path) -> None:
    """No model, no numbers: SGLang's names of pages of one token."""
    for name in SCHEMES["sglang"].digests(IDS, 1):
        (tmp_path / f"{name.hex()}_tiny_0_1.bin").write_bytes(b"")
    found = read_files(tmp_path, told=Told(page=1))
    assert [one.token_ids for one in found.prompts] == [tuple(IDS)]
    assert found.prompts[0].how == "the names of its pages alone"


def test_pages_that_cannot_be_read_are_said_to_be_unread(tmp_path: Path, model: LanguageModel) -> None:
    """Their name says whose they are; nothing says the type of their numbers, unless the user does."""
    whole = cached(model, IDS).transpose(1, 2).to(torch.bfloat16).contiguous()  # page_first
    for number, name in enumerate(SCHEMES["sglang"].digests(IDS, PAGE)):
        numbers = whole[:, number * PAGE : (number + 1) * PAGE].contiguous().view(torch.int16).numpy()
        (tmp_path / f"{name.hex()}_tiny_0_1.bin").write_bytes(numbers.tobytes())
    write_vllm(tmp_path / "cmpl-1-0.safetensors", model, OTHER)
    found = read_files(tmp_path, model)
    assert [why for _, why in found.unread] == [found.unread[0][1]] * 2
    assert "Say it with stored" in found.unread[0][1]
    assert not found.complete
    verdict = judge_files(found)
    assert "Every prompt" not in verdict.headline
    assert sum("Say it with stored" in line for line in verdict.not_tried) == 2
    told = read_files(tmp_path, model, told=Told(stored="bf16"))
    assert told.complete
    assert ids_of(told, "SGLang", "recovered") == {tuple(IDS)}


def test_a_single_bad_file_is_an_error(tmp_path: Path, model: LanguageModel) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes((10 * 2**30).to_bytes(8, "little") + b"{}")
    refused(StatesError, lambda: read_files(path, model))
    refused(StatesError, lambda: read_files(tmp_path / "nothing", model))


def test_results_are_saved_and_read_again(found: FilesAudit, tmp_path: Path) -> None:
    found.save(tmp_path / "leak.json")
    assert FilesAudit.load(tmp_path / "leak.json") == found
    assert "recovered" in found._repr_html_()
    json.dumps(found.rows)


def test_the_verdict_on_files(found: FilesAudit, tmp_path: Path) -> None:
    verdict = judge_files(found)
    assert verdict.tone == "bad"
    assert "can be read from these files" in verdict.headline
    assert any("names" in line.lower() for line in verdict.advice)
    (tmp_path / "nothing.xyz").write_text("?")
    assert judge_files(read_files(tmp_path)).tone == "good"


def test_sizes_are_the_models(model: LanguageModel) -> None:
    sizes = sizes_of(model)
    assert sizes.width == preimage.capture(model, [[1, 2]], 1, observe="keys").d_model
