"""The default model itself."""

import subprocess
import sys

import pytest
import torch

import preimage
from preimage.collisions.structure import CONSTANT, SAME_LAST_TOKEN
from preimage.models import LanguageModel
from preimage.prompts import PromptOptions, gather
from preimage.states import measure_noise

pytestmark = pytest.mark.real_model

TEXT = "The river is wide."


def test_states_equal_plain_transformers_bit_for_bit(smollm2: LanguageModel) -> None:  # N10
    states = preimage.capture(smollm2, [TEXT, "x", [49151, 0, 7]])
    for prompt, ids in enumerate(states.token_ids):
        with torch.no_grad():
            plain = smollm2.module(torch.tensor([ids]), output_hidden_states=True)
        for layer in range(30):
            assert torch.equal(states.at(prompt, layer), plain.hidden_states[layer][0])
        assert torch.equal(states.at(prompt, "final"), plain.hidden_states[-1][0])


def test_layer_15_is_inverted_by_sipit(smollm2: LanguageModel) -> None:
    states = preimage.capture(smollm2, [TEXT], layers=15)
    (found,) = preimage.invert(smollm2, states, method="sipit")
    assert (found.status, found.text) == ("recovered", TEXT)
    assert found.token_ids == states.token_ids[0]
    assert found.margin > 1000 * found.noise_floor * float(states.at(0, 15).norm(dim=-1)[1:].max())


def test_noise_floor_is_small_and_grows_from_layer_0(smollm2: LanguageModel) -> None:  # N11
    floor = measure_noise(smollm2)
    assert len(floor) == 32
    assert floor[0].relative < 1e-6
    assert all(1e-8 < noise.relative < 1e-3 for noise in floor.values())


def test_another_process_sees_only_bundle_and_model(smollm2: LanguageModel, tmp_path: object) -> None:
    bundle = f"{tmp_path}/bundle"
    preimage.capture(smollm2, ["Ada"], layers=15).save(bundle, withhold_ids=True)
    script = (
        "import preimage, sys; s = preimage.open_states(sys.argv[1]); assert s.token_ids is None; "
        "m = preimage.load('smollm2'); s.require_made_by(m); "
        "print(preimage.invert(m, s, layer=15)[0].text)"
    )
    command = [sys.executable, "-c", script, bundle]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "Ada"


def test_tokens_that_are_no_text_and_bos_are_recovered_by_id(smollm2: LanguageModel) -> None:  # I2
    pieces = [i for i in range(0, smollm2.vocab_size, 7) if "\ufffd" in (smollm2.decode([i]) or "")]
    assert len(pieces) >= 5
    bos = smollm2.tokenizer.bos_token_id
    prompts = [pieces[:5], [bos, *pieces[-3:]], [bos], [pieces[0]], [bos, bos, 7000, 7000]]
    states = preimage.capture(smollm2, prompts, layers=15)
    for ids, found in zip(prompts, preimage.invert(smollm2, states), strict=True):
        assert (found.status, found.token_ids) == ("recovered", tuple(ids))
    assert "\ufffd" in smollm2.decode(pieces[:5])  # the text alone would not have been enough


def test_constant_prompts_collide_without_bos_and_not_with_it(smollm2: LanguageModel) -> None:
    options = preimage.PromptOptions(count=40, length=16, bos=False)
    prompts = [*gather("default", smollm2, options)]
    prompts += [tuple(smollm2.tokenizer(" the" * times)["input_ids"]) for times in (2, 3, 17)]
    assert {len(set(ids)) for ids in prompts[40:]} == {1}
    family, layers = {40, 41, 42}, "0,1,15,30,final"
    without = preimage.find_collisions(smollm2, prompts, layers, bos=False, hard_bases=1)
    assert (without.prompts, without.unexplained) == (43, 0)
    for found in without.layers:
        spacing = found.spacing
        reason = SAME_LAST_TOKEN if found.layer == 0 else CONSTANT
        assert set(spacing.explained) == {reason}
        assert spacing.closest_pair.explanation == reason
        assert spacing.margin > 10 * spacing.closest_pair.noise_radius
        assert not any({pair.first, pair.second} <= family for pair in spacing.closest)
        if found.layer != 0:
            assert {spacing.closest_pair.first, spacing.closest_pair.second} <= family
            assert spacing.closest_pair.distance <= spacing.closest_pair.noise_radius
        constant = next(kind for kind in found.hard if kind.kind == "constant")
        assert constant.explained == {reason: constant.pairs}
    apart = preimage.find_collisions(smollm2, prompts, layers, bos=True, hard_bases=1)
    assert apart.unexplained == 0
    for found in apart.layers[1:]:
        spacing = found.spacing
        assert (spacing.within_noise, spacing.explained, spacing.closest_pair.explanation) == (0, {}, "")
        assert spacing.closest_pair.distance > 10 * spacing.closest_pair.noise_radius
        constant = next(kind for kind in found.hard if kind.kind == "constant")
        assert (constant.within_noise, constant.explained) == (0, {})


def test_states_of_which_channels_kept_four_bits_are_not_taken_for_another_models(
    smollm2: LanguageModel,
) -> None:
    """The sink sets the steps, and most numbers of ordinary states become zero."""
    (ids,) = gather("default:prose:test", smollm2, PromptOptions(count=1, length=24, seed=3))
    rows = smollm2.states(torch.tensor([list(ids)]), (15,))[15][0]
    step = rows.abs().amax(dim=0, keepdim=True) / 7
    (result,) = preimage.invert(smollm2, (rows / step).round() * step, 15)
    assert (result.status in ("recovered", "likely"), list(result.token_ids)) == (True, list(ids))
