"""The noise floor: measured no deeper than it is asked for, and the same whatever else was asked."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import preimage
from preimage.layers import all_layers
from preimage.models import LanguageModel
from preimage.observations import Site
from preimage.states import measure_noise, noise_of
from preimage.states import noise as noise_module
from support.folders import make_folder
from support.tiny import build

EVERY = all_layers(3)


@pytest.fixture
def lasting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LanguageModel:
    monkeypatch.setenv("PREIMAGE_CACHE", str(tmp_path / "cache"))
    return preimage.load(str(make_folder(tmp_path / "model")), device="cpu")


def saved_by(model: LanguageModel) -> dict[str, list[float]]:
    saved: dict[str, list[float]] = json.loads(noise_module._cache_file(model).read_text())
    return saved


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("llama", torch.float32),
        ("gpt2", torch.float32),
        ("gemma3", torch.float32),
        ("mixtral", torch.float32),
        ("llama", torch.bfloat16),
    ],
)
def test_noise_of_a_layer_is_the_same_however_deep_the_deepest_is(name: str, dtype: torch.dtype) -> None:
    model = preimage.load(build(name, dtype=dtype))
    every = measure_noise(model)
    assert tuple(every) == EVERY
    for count in range(1, len(EVERY)):
        assert measure_noise(model, EVERY[:count]) == {layer: every[layer] for layer in EVERY[:count]}
    for layer in (1, 3, "final"):
        assert noise_of(model, layer) == {layer: every[layer]}


def test_noise_of_the_default_model_is_the_same_however_deep_the_deepest_is(smollm2: LanguageModel) -> None:
    shallow, deeper = measure_noise(smollm2, (0, 1, 2)), measure_noise(smollm2, tuple(range(6)))
    assert list(shallow) == [0, 1, 2]
    assert shallow == {layer: deeper[layer] for layer in shallow}


def test_no_block_above_the_deepest_layer_asked_for_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    model = preimage.load(build("llama"))
    monkeypatch.setattr(model.anatomy.blocks[2], "forward", lambda *_, **__: pytest.fail("block 3 ran"))
    assert noise_of(model, "0,2").keys() == {0, 2}
    monkeypatch.undo()
    assert noise_of(model, "all").keys() == set(EVERY)


def test_layers_below_the_deepest_are_known_with_it(
    lasting: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = noise_of(lasting, 2)
    assert set(saved_by(lasting)) == {"0", "1", "2"}
    noise_module._measured.clear()
    with monkeypatch.context() as patched:
        patched.setattr(noise_module, "measure_noise", lambda *_: pytest.fail("it was measured"))
        below = noise_of(lasting, [0, 1, 2])
    assert below[2] == two[2]
    every = noise_of(lasting, "all")
    assert {layer: every[layer] for layer in below} == below
    assert saved_by(lasting) == {str(layer): list(noise) for layer, noise in every.items()}


def test_what_is_known_is_kept_where_more_is_measured(lasting: LanguageModel) -> None:
    noise_of(lasting, 1)
    path, known = noise_module._cache_file(lasting), [0.5, 0.25, 2.0]
    path.write_text(json.dumps(saved_by(lasting) | {"1": known}))
    noise_module._measured.clear()
    assert list(noise_of(lasting, "1,3")[1]) == known
    path.write_text(json.dumps(saved_by(lasting) | {"2.keys": known}))  # by another process
    noise_of(lasting, "final")
    assert saved_by(lasting)["2.keys"] == saved_by(lasting)["1"] == known
    noise_module._measured.clear()
    assert list(noise_of(lasting, Site(2, "keys"))[Site(2, "keys")]) == known


def on_a_cache(block: nn.Module, change: Callable[[Any], Any]) -> Callable[..., Any]:
    """The forward pass of a block, whose output is changed where it is given a cache."""
    forward = block.forward

    def changed(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        return output if kwargs.get("past_key_values") is None else change(output)

    return changed


def refuse(_: Any) -> Any:
    raise RuntimeError("no cache here")


@pytest.mark.parametrize(
    ("change", "said"),
    [(refuse, "has no cached prefix"), (lambda output: output + 1.0, "something outside its cache")],
)
def test_a_block_without_a_cache_takes_no_noise_from_the_layers_below(
    change: Callable[[Any], Any], said: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = noise_of(preimage.load(build("llama")), "all")
    model = preimage.load(build("llama"))
    monkeypatch.setattr(model.anatomy.blocks[1], "forward", on_a_cache(model.anatomy.blocks[1], change))
    below = measure_noise(model, [0, 1])
    assert not caplog.records
    every = measure_noise(model)
    assert [record for record in caplog.records if said in record.message] == caplog.records[:1]
    assert len(caplog.records) == 1
    for layer in (0, 1):
        assert below[layer] == every[layer] == whole[layer]
    for layer in EVERY[2:]:  # as without a cache: some of what was seen of a sound model, and no more
        assert 0 < every[layer].relative <= whole[layer].relative
        assert 0 < every[layer].absolute <= whole[layer].absolute


@pytest.mark.parametrize(("dtype", "prompts"), [(torch.float32, 4), (torch.float64, 4), (torch.bfloat16, 8)])
def test_more_prompts_are_run_where_fewer_floors_are_noise(
    dtype: torch.dtype, prompts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batches = preimage.load(build("gpt2", dtype=dtype)), []
    run = model.states
    monkeypatch.setattr(model, "states", lambda ids, taps: batches.append(len(ids)) or run(ids, taps))
    measure_noise(model, [0, 1])
    assert sorted(set(batches)) == [1, prompts]
    assert batches.count(1) == 4 * prompts  # whole, and three times truncated


@pytest.mark.parametrize("length", [2, 3, 9])
def test_short_prompts_have_noise_too(length: int) -> None:
    model = preimage.load(build("gpt2", n_positions=length))
    assert all(0 < noise.relative < 1e-5 for noise in measure_noise(model).values())
