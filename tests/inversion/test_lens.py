"""Lenses: they learn, they are tied to their model, and they never decide."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

import preimage
from preimage.errors import ModelError, OptionError, RunFolderError
from preimage.inversion.proposers import features, kept_keys, lens_files
from preimage.inversion.proposers import standard as proposers
from preimage.inversion.proposers.lens_files import find_lens, read_info, read_lens, save_lens
from preimage.models import LanguageModel
from preimage.storage import write_tensors
from preimage.training import LensOptions, trainer
from preimage.training.lenses import held_out_ranks, train_lens
from support.tiny import VOCABULARY, build, random_ids, tiny

SMALL = LensOptions(steps=60, batch_tokens=512, length=16, rank=16, hidden=64)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = train_lens(tiny("llama"), 2, "random", SMALL, out=tmp_path_factory.mktemp("lens") / "layer-2").path
    assert path is not None
    return path


def test_training_beats_chance_by_far(trained: Path) -> None:
    model = tiny("llama")
    ids = torch.tensor([random_ids(16, seed) for seed in range(100, 116)])
    ranks = held_out_ranks(model, 2, read_lens(trained, model), ids)
    assert float((ranks < 1).float().mean()) > 0.5  # chance is 1 in 41
    untrained = read_lens(trained, model)
    torch.nn.init.normal_(untrained.project.weight)
    assert float((held_out_ranks(model, 2, untrained, ids) < 1).float().mean()) < 0.2


def test_keys_may_be_of_embeddings_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No token goes through a block for them."""
    model = tiny("llama")
    ids = torch.tensor([random_ids(16, seed) for seed in range(100, 116)])
    path = train_lens(model, 2, "random", replace(SMALL, key_hidden=32), out=tmp_path / "lens").path
    assert path is not None
    monkeypatch.setattr(features, "token_features", lambda _: pytest.fail("the vocabulary was run"))
    lens = read_lens(path, model)
    assert lens.shape.key_hidden == 32
    assert float((held_out_ranks(model, 2, lens, ids) < 1).float().mean()) > 0.5
    (result,) = preimage.invert(model, preimage.capture(model, [random_ids(12)], 2), lens=path)
    assert (result.status, result.proposer) == ("recovered", "lens-2")


def test_a_lens_of_another_model_is_refused(trained: Path) -> None:
    with pytest.raises(ModelError, match="was trained for"):
        read_lens(trained, tiny("llama", seed=1))
    info = read_info(trained)
    assert (info.layer, info.weight_hash) == (2, tiny("llama").identity.weight_hash)


def test_a_lens_serves_almost_the_same_weights(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = read_info(trained)
    monkeypatch.setattr(lens_files, "known_lenses", lambda: [info])
    module, generator = build("llama"), torch.Generator().manual_seed(0)
    for weights in module.parameters():  # as fewer bits do, or a little tuning
        weights.data *= 1 + 0.02 * torch.randn(weights.shape, generator=generator)
    nudged: LanguageModel = preimage.load(module)
    assert nudged.identity.weight_hash != info.weight_hash
    before = nudged.forward_tokens
    assert find_lens(nudged, 2) == info
    assert nudged.forward_tokens == before  # what it costs to find out is no cost of a prompt
    ids = random_ids(20)
    (found,) = preimage.invert(nudged, preimage.capture(nudged, [ids], layers=2))
    assert (found.reading.token_ids, found.proposer) == (tuple(ids), "lens-2")
    for other in (tiny("llama", seed=1), tiny("gpt2")):
        assert find_lens(other, 2) is None
    own = replace(info, weight_hash=nudged.identity.weight_hash, model="nudged")
    monkeypatch.setattr(lens_files, "known_lenses", lambda: [info, own])
    assert find_lens(nudged, 2) == own  # just these weights go before
    with safe_open(trained, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys() if name != "probe"}  # noqa: SIM118
        about = json.loads(file.metadata()["about"])
    old = read_info(write_tensors(tmp_path / "old.safetensors", tensors, about))
    monkeypatch.setattr(lens_files, "known_lenses", lambda: [old])
    assert find_lens(nudged, 2) is None  # of before there were probes: its own weights alone
    assert find_lens(preimage.load(build("llama")), 2) == old


def test_a_damaged_lens_is_refused(trained: Path, tmp_path: Path) -> None:
    broken = tmp_path / "lens.safetensors"
    broken.write_bytes(trained.read_bytes()[:-100])
    with pytest.raises(ModelError, match="is not a lens"):
        read_info(broken)
    with pytest.raises(ModelError, match="is not a lens"):
        read_info(tmp_path / "nowhere.safetensors")


def test_int8_keeps_the_ranking(trained: Path, tmp_path: Path) -> None:
    model = tiny("llama")
    once = read_lens(trained, model)
    again = save_lens(once, tmp_path / "again.safetensors", tap=2, model=model, training={}, ranks={})
    ids = torch.tensor([random_ids(16, seed) for seed in range(4)])
    first, second = (held_out_ranks(model, 2, lens, ids) for lens in (once, read_lens(again, model)))
    assert torch.equal(first, second)  # quantising twice changes nothing


def test_interrupted_training_continues_as_if_it_had_not_been(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("gpt2")
    options = LensOptions(steps=12, batch_tokens=128, length=8, rank=8, hidden=16)
    monkeypatch.setattr(trainer, "_SAVE_SECONDS", -1.0)
    whole = train_lens(model, 1, "random", options, out=tmp_path / "whole")

    def stop(done: int, total: int, note: str) -> None:
        if done == 7:
            raise KeyboardInterrupt

    path = tmp_path / "lens"
    with pytest.raises(KeyboardInterrupt):
        train_lens(model, 1, "random", options, out=path, progress=stop)
    assert not path.exists()
    with pytest.raises(RunFolderError, match="another layer"):
        train_lens(model, 2, "random", options, out=path)
    with pytest.raises(RunFolderError, match="another text"):
        train_lens(model, 1, torch.arange(40), options, out=path)
    steps: list[int] = []
    continued = train_lens(
        model, 1, "random", options, out=path, progress=lambda done, total, note: steps.append(done)
    )
    assert steps[0] == 7  # the sixth was the last that was saved
    assert path.read_bytes() == (tmp_path / "whole").read_bytes()
    assert continued.held_out == whole.held_out
    assert sorted(place.name for place in tmp_path.iterdir()) == ["lens", "whole"]


def test_the_engine_uses_a_lens_where_there_is_one(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model: LanguageModel = preimage.load(build("llama"))
    ids = random_ids(20)
    states = preimage.capture(model, [ids], layers=[1, 2, 3])
    info = read_info(trained)
    monkeypatch.setattr(lens_files, "known_lenses", lambda: [info])
    assert find_lens(model, 2) == info
    assert find_lens(model, 1) == info  # the states are carried up to it
    assert find_lens(model, 3) is None
    for layer, name in ((1, "lens-2"), (2, "lens-2"), (3, "codebook+prior")):
        (found,) = preimage.invert(model, states, layer)
        assert (found.status, found.token_ids, found.proposer) == ("recovered", tuple(ids), name)
    with pytest.raises(OptionError, match="no lens for layer 3"):
        preimage.invert(model, states, 3, proposers="lens")


def test_exactness_does_not_depend_on_the_proposer(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model: LanguageModel = preimage.load(build("llama"))
    useless = read_lens(trained, model)
    torch.nn.init.normal_(useless.project.weight)
    proposer = proposers.LensProposer(model, 2, useless, 2)
    from preimage.inversion import preparing

    monkeypatch.setattr(preparing, "build_proposer", lambda *_: proposer)
    ids = random_ids(12)
    (found,) = preimage.invert(model, preimage.capture(model, [ids], layers=2))
    assert (found.status, found.token_ids) == ("recovered", tuple(ids))
    assert found.tests <= len(ids) * VOCABULARY


def test_keys_are_made_once_for_all_processes(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREIMAGE_CACHE", str(tmp_path / "cache"))
    build("llama").save_pretrained(tmp_path / "model")
    model = preimage.load(str(tmp_path / "model"))
    lens = read_lens(trained, model)
    first = kept_keys.keys_of(model, lens, trained)
    (kept,) = (tmp_path / "cache" / "keys").rglob("*.safetensors")

    def refuse(*_: object) -> torch.Tensor:
        raise AssertionError("features are not computed again")

    with monkeypatch.context() as patched:
        patched.setattr(kept_keys, "features_in_parts", refuse)
        again = kept_keys.keys_of(model, lens, trained)
        for name, part in first.parts().items():
            assert torch.equal(again.parts()[name], part)
        other = tmp_path / "other.safetensors"
        other.write_bytes(trained.read_bytes() + b" ")
        with pytest.raises(AssertionError, match="not computed again"):  # of another lens
            kept_keys.keys_of(model, lens, other)
    kept.write_bytes(kept.read_bytes()[:100])
    rebuilt = kept_keys.keys_of(model, lens, trained)
    assert torch.equal(rebuilt.keys.keys, first.keys.keys)
    assert kept.stat().st_size > 100
    in_memory = preimage.load(build("llama"))  # may be another map under the same weights
    kept.unlink()
    kept_keys.keys_of(in_memory, lens, trained)
    assert not kept.exists()


@pytest.mark.parametrize(
    "wrong", [{"steps": 0}, {"neighbours": -1}, {"sampled_tokens": 0}, {"learning_rate": 0.0}], ids=str
)
def test_wrong_lens_options_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=next(iter(wrong))):
        LensOptions(**wrong)


def test_headers_that_name_no_place_are_of_layers() -> None:
    shipped = [info for info in lens_files.known_lenses() if info.model == "smollm2"]
    assert {15, 23, "final"} <= {info.tap for info in shipped}
    assert {info.place for info in shipped} == {"residual"}


@pytest.mark.real_model
def test_shipped_lenses_are_those_of_the_default_model(smollm2: LanguageModel) -> None:
    size = 0
    for layer in (15, 23, "final"):
        info = find_lens(smollm2, layer)
        assert info is not None
        assert info.layer == layer
        size += info.path.stat().st_size
        prompts = preimage.prompts.gather(
            "default:prose", smollm2, preimage.PromptOptions(count=4, length=48, seed=9)
        )
        ranks = held_out_ranks(smollm2, layer, read_lens(info.path, smollm2), torch.tensor(list(prompts)))
        assert float((ranks < 1).float().mean()) > 0.94
    assert size <= 16_000_000


@pytest.mark.real_model
def test_default_model_is_inverted_in_whole_passes(smollm2: LanguageModel) -> None:
    text = "It was a bright cold day in April, and the clocks were striking thirteen."
    lenses = {1: "lens-15", 15: "lens-15", 22: "lens-23", 30: "lens-final", "final": "lens-final"}
    states = preimage.capture(smollm2, [text], layers=list(lenses))
    for layer, name in lenses.items():
        (found,) = preimage.invert(smollm2, states, layer)
        assert (found.status, found.text, found.proposer) == ("recovered", text, name)
        assert found.forward_tokens <= 8 * states.lengths[0]


@pytest.mark.real_model
def test_attention_sinks_behind_the_first_position_are_named_too(smollm2: LanguageModel) -> None:
    generator = torch.Generator().manual_seed(3)
    pairs = torch.randint(smollm2.vocab_size, (192, 2), generator=generator)
    info = find_lens(smollm2, 15)
    assert info is not None
    lens = read_lens(info.path, smollm2)
    sinks = lens.standardise.sinks(smollm2.states(pairs, (15,))[15])[:, 1]
    assert 0 < int(sinks.sum()) < 60
    ranks = held_out_ranks(smollm2, 15, lens, pairs)[:, 1]
    assert float((ranks[sinks] < 8).float().mean()) > 0.9
