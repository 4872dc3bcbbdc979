"""What theory says must collide is explained; what must not and does is reported."""

from __future__ import annotations

import json
from dataclasses import asdict
from itertools import combinations

import pytest
import torch
from torch import nn

import preimage
from preimage.collisions import closest_prompts
from preimage.collisions.result import LayerCollisions
from preimage.collisions.structure import (
    CONSTANT,
    IDENTICAL_EMBEDDINGS,
    SAME_LAST_TOKEN,
    SAME_WINDOW,
    UNEXPLAINED,
)
from preimage.distances import norms
from preimage.figures import spacing_figure
from preimage.layers import Layer
from preimage.storage import decode
from support.collisions import BOS, FAMILY, all_distances, changed, deaf, ends, flat, with_twins
from support.folders import VOCABULARY as TEXT_VOCABULARY
from support.folders import make_tokenizer
from support.tiny import VOCABULARY, build, random_ids, tiny

ROTARY = ("llama", "gpt_neox", "qwen3", "mixtral")
LEARNED = ("gpt2", "opt")

# --- what must collide ------------------------------------------------------------------------


@pytest.mark.parametrize("name", ROTARY)
def test_constant_prompts_are_one_to_a_rotary_model(name: str) -> None:
    model = tiny(name)
    prompts = [*(random_ids(9, seed) for seed in range(6)), *FAMILY]
    members = {6, 7, 8}
    audit = preimage.find_collisions(model, prompts, closest=40)
    states = preimage.capture(model, prompts, positions="last")
    assert audit.unexplained == 0
    for found in audit.layers:
        spacing, away = found.spacing, all_distances(states.last(found.layer))
        floors = 2 * spacing.noise_floor * norms(states.last(found.layer))
        if found.layer == 0:
            continue
        for i, j in combinations(sorted(members), 2):  # at the floor, or as near as rounding elsewhere may be
            assert float(away[i, j]) <= 4 * float(floors[i]), found.layer
        assert {spacing.closest_pair.first, spacing.closest_pair.second} <= members
        assert spacing.closest_pair.explanation == CONSTANT
        assert set(spacing.explained) <= {CONSTANT}
        assert all(pair.explanation == CONSTANT for pair in spacing.listed)
        assert len(spacing.closest) == spacing.pairs - 3  # every pair but the three of the family
        assert not any({pair.first, pair.second} <= members for pair in spacing.closest)
        assert all(pair.explanation == "" for pair in spacing.closest)
        assert spacing.margin > 1000 * float(floors.max())
        constant = next(kind for kind in found.hard if kind.kind == "constant")
        assert (constant.explained, constant.unexplained) == ({CONSTANT: constant.pairs}, 0)


@pytest.mark.parametrize("name", ROTARY)
def test_a_beginning_of_sequence_tells_constant_prompts_apart(name: str) -> None:
    model = tiny(name)
    prompts = [[BOS, *ids] for ids in (*(random_ids(9, seed) for seed in range(6)), *FAMILY)]
    audit = preimage.find_collisions(model, prompts, "1-3,final", hard_bases=0)
    for found in audit.layers:
        spacing = found.spacing
        assert (spacing.within_noise, spacing.explained, spacing.unexplained) == (0, {}, 0)
        assert spacing.listed == ()
        assert spacing.closest_pair == spacing.closest[0]
        assert spacing.closest_pair.explanation == ""
        assert spacing.closest_pair.distance > 100 * spacing.closest_pair.noise_radius


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_layer_0_knows_the_last_token_and_perhaps_its_place(name: str) -> None:
    prompts = [[3, 4, 7], [5, 6, 7], [8, 7], [9, 7], [7, 7, 7, 7], [10, 11]]
    audit = preimage.find_collisions(tiny(name), prompts, "0-1", hard_bases=0)
    spacing = audit.at(0).spacing
    if name == "llama":  # positions enter in the blocks: five prompts end in 7
        expected, kept = set(combinations(range(5), 2)), [(0, 5)]
    else:  # only prompts of one length
        expected, kept = {(0, 1), (2, 3)}, None
    assert spacing.explained == {SAME_LAST_TOKEN: len(expected)}
    assert (spacing.within_noise, spacing.unexplained) == (len(expected), 0)
    assert set(ends(spacing.listed)) <= expected
    assert all(pair.explanation == SAME_LAST_TOKEN for pair in spacing.listed)
    assert not set(ends(spacing.closest)) & expected
    if kept is not None:
        assert ends(spacing.closest) == kept
    assert spacing.margin > 1000 * spacing.closest_pair.noise_radius
    above = audit.at(1).spacing
    assert (above.within_noise, above.explained) == (0, {})
    assert above.closest_pair.explanation == ""


@pytest.mark.parametrize("name", LEARNED)
def test_learned_positions_know_no_constant_family(name: str) -> None:
    audit = preimage.find_collisions(tiny(name), [*(random_ids(9, seed) for seed in range(6)), *FAMILY])
    assert audit.unexplained == 0
    for found in audit.layers:
        reasons = {reason for kind in found.hard for reason in kind.explained} | set(found.spacing.explained)
        assert reasons <= ({SAME_LAST_TOKEN} if found.layer == 0 else set())
        assert not set(combinations((6, 7, 8), 2)) & set(ends(found.spacing.listed))
        assert found.spacing.margin > 1000 * found.spacing.closest_pair.noise_radius
        constant = next(kind for kind in found.hard if kind.kind == "constant")
        assert (constant.within_noise, constant.explained, constant.unexplained) == (0, {}, 0)
        assert constant.closest_pair.explanation == ""


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_tokens_with_one_embedding_are_one_token(name: str) -> None:
    model = with_twins(name)
    prompts = [[9, 5, 3, 11], [9, 6, 3, 11], [5, 12], [6, 12], [20, 21, 22]]
    audit = preimage.find_collisions(model, prompts, hard_bases=0)
    assert audit.unexplained == 0
    for found in audit.layers:
        spacing = found.spacing
        assert spacing.explained == {IDENTICAL_EMBEDDINGS: 2}, found.layer
        assert set(ends(spacing.listed)) == {(0, 1), (2, 3)}
        assert all(pair.distance <= pair.noise_radius for pair in spacing.listed)
        assert spacing.margin > 1000 * spacing.closest_pair.noise_radius
        assert not {(0, 1), (2, 3)} & set(ends(spacing.closest))
    apart = preimage.find_collisions(tiny(name), prompts, "1-3,final", hard_bases=0)
    assert all(found.spacing.within_noise == 0 for found in apart.layers)  # it is the embeddings that do it


def test_constant_prompts_may_be_written_with_twins() -> None:
    model = with_twins("llama")
    audit = preimage.find_collisions(model, [[5, 6], [6, 6, 5], [5, 5], [7, 8, 9]], "1,final", hard_bases=0)
    for found in audit.layers:
        explained = found.spacing.explained
        assert set(explained) <= {CONSTANT, IDENTICAL_EMBEDDINGS}
        assert explained[IDENTICAL_EMBEDDINGS] == 1  # [5, 6] and [5, 5]
        assert found.unexplained == 0
        assert found.spacing.closest
        assert all(3 in pair for pair in ends(found.spacing.closest))


def test_a_set_of_nothing_but_one_family_has_no_separation() -> None:
    audit = preimage.find_collisions(tiny("llama"), FAMILY, "1,final", hard_bases=0)
    for found in audit.layers:
        spacing = found.spacing
        assert (spacing.closest, spacing.margin, spacing.normalised_margin) == ((), None, None)
        assert (spacing.pairs, spacing.unexplained, spacing.closest_pair.explanation) == (3, 0, CONSTANT)
        assert decode(LayerCollisions, json.loads(json.dumps(asdict(found)))) == found
    assert spacing_figure(audit).data
    assert closest_prompts(audit) == []


# --- what must not collide and does -----------------------------------------------------------


def test_a_collision_that_nothing_explains_is_reported() -> None:
    model = changed("llama", flat)
    prompts = [[1, 2, 3], [4, 5, 6], [7, 8], [9, 9], [9, 9, 9]]
    audit = preimage.find_collisions(model, prompts, hard_bases=2)
    assert all(found.unexplained == 0 for found in audit.layers[:-1])
    found = audit.at("final")
    spacing = found.spacing
    assert (spacing.distinct, spacing.within_noise, spacing.below) == (1, 10, {"1e-06": 10})
    assert (spacing.unexplained, spacing.explained) == (9, {CONSTANT: 1})
    assert spacing.closest_pair.explanation == UNEXPLAINED
    assert (spacing.margin, spacing.normalised_margin, spacing.mean_norm) == (0.0, None, 0.0)
    assert len(spacing.closest) == 6  # of the two constant prompts, which are one, the first
    assert all(pair.explanation == UNEXPLAINED for pair in spacing.closest)
    listed = [pair for pair in spacing.listed if pair.explanation == UNEXPLAINED]
    assert len(listed) == 6
    assert all(kind.within_noise == kind.pairs for kind in found.hard)
    assert found.unexplained == 9 + sum(kind.unexplained for kind in found.hard) > 9
    assert audit.unexplained == found.unexplained


def test_prompts_that_only_this_model_confuses_are_not_structural() -> None:
    model = changed("llama", deaf)
    prompts = [[7, 7], [3, 7], [7, 7, 7], [4, 8], [5, 9]]
    for found in preimage.find_collisions(model, prompts, hard_bases=0).layers:
        spacing = found.spacing
        if found.layer == 0:
            assert (spacing.explained, spacing.unexplained) == ({SAME_LAST_TOKEN: 3}, 0)
            assert spacing.margin > 0.01
        else:
            assert (spacing.explained, spacing.unexplained) == ({CONSTANT: 1}, 2)
            assert spacing.margin == spacing.closest[0].distance == 0.0
            assert ends(spacing.closest)[0] == (0, 1)
            assert spacing.closest[1].distance > 0.01  # and the next are others


def test_states_one_rounding_apart_are_at_the_floor_and_unexplained() -> None:
    def next_float(module: nn.Module) -> None:
        table = module.get_input_embeddings().weight  # type: ignore[operator]
        table[6] = table[5]
        table[6, 0] = torch.nextafter(table[5, 0], torch.tensor(1.0))

    prompts = [[9, 5], [9, 6], [20, 21, 22], [30, 31]]
    spacing = preimage.find_collisions(changed("llama", next_float), prompts, 0, hard_bases=0).at(0).spacing
    assert (spacing.distinct, spacing.within_noise, spacing.unexplained) == (4, 1, 1)
    assert 0 < spacing.closest_pair.distance <= spacing.closest_pair.noise_radius
    assert spacing.closest_pair == spacing.closest[0] == spacing.listed[0]
    assert spacing.closest_pair.explanation == UNEXPLAINED
    assert (spacing.margin, spacing.below) == (spacing.closest_pair.distance, {"1e-06": 1})


def test_the_same_text_in_other_tokens_is_no_excuse() -> None:
    tokenizer = make_tokenizer()
    module = build("llama", vocab_size=TEXT_VOCABULARY)
    with torch.no_grad():
        flat(module)
    model = preimage.load(module, tokenizer=tokenizer)
    whole = tokenizer("the the", add_special_tokens=False)["input_ids"]
    pieces = tokenizer.convert_tokens_to_ids([*"".join(tokenizer.tokenize("the the"))])
    assert len(whole) < len(pieces)
    assert model.decode(whole) == model.decode(pieces) == "the the"
    audit = preimage.find_collisions(model, [whole, pieces, [BOS, *whole]], "final", hard_bases=0)
    spacing = audit.at("final").spacing
    assert (spacing.explained, spacing.unexplained) == ({}, 3)
    same = next(pair for pair in spacing.listed if pair.first_ids == tuple(whole))
    assert same.first_text == same.second_text == "the the"  # shown, and no reason


# --- sliding windows --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("mistral", [1, 7, 13, 19, 19]),  # a window of 7 in each of three blocks
        ("gemma2", [1, 5, None, None, None]),  # every other block attends to everything
        ("llama", [1, None, None, None, None]),
    ],
)
def test_what_no_window_shows_is_structural(name: str, fields: list[int | None]) -> None:
    model = tiny(name)
    layers: tuple[Layer, ...] = (0, 1, 2, 3, "final")
    assert [model.receptive_field(layer) for layer in layers] == fields
    long = random_ids(24, 1)
    prompts = [
        long,
        [(long[0] + 1) % VOCABULARY, *long[1:]],
        [*random_ids(11, 2), *long[11:]],
        random_ids(24, 3),
    ]
    audit = preimage.find_collisions(model, prompts, hard_bases=0)
    assert audit.unexplained == 0
    for found, field in zip(audit.layers, fields, strict=True):
        alike = [field is not None and field <= shared for shared in (23, 13, 13)]  # of 0-1, 0-2, 1-2
        reason = SAME_LAST_TOKEN if found.layer == 0 else SAME_WINDOW
        assert found.spacing.explained == ({reason: sum(alike)} if any(alike) else {})
        assert found.spacing.within_noise == sum(alike)
