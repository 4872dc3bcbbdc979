"""Collision search: against brute force, against what theory says must collide, and stopped at any moment."""

from __future__ import annotations

import functools
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from pyarrow import parquet
from torch import Tensor, nn

import preimage
from preimage.collisions import CollisionOptions, auditing, closest_prompts, continuing, sweep_lengths
from preimage.collisions.result import CollidingPair, Continuation, LayerCollisions, Spacing
from preimage.collisions.structure import (
    CONSTANT,
    IDENTICAL_EMBEDDINGS,
    SAME_LAST_TOKEN,
    SAME_WINDOW,
    UNEXPLAINED,
    absolute_positions,
)
from preimage.distances import norms, row_distances
from preimage.errors import LayerError, OptionError, PreimageError, PromptError, RunFolderError, StatesError
from preimage.figures import spacing_figure
from preimage.layers import Layer
from preimage.models import LanguageModel
from preimage.prompts import PromptOptions, PromptSet, gather, hard_pairs
from preimage.states import SAFETY, States, noise_floor
from preimage.storage import Run
from preimage.storage import run as storage_run
from support.folders import VOCABULARY as TEXT_VOCABULARY
from support.folders import make_tokenizer
from support.tiny import VOCABULARY, build, random_ids, tiny

LENGTHS = (3, 9, 5, 9, 12, 1)
PROMPTS = [random_ids(LENGTHS[seed % len(LENGTHS)], seed) for seed in range(24)]
FAMILY = [[7] * 2, [7] * 3, [7] * 17]
ROTARY = ("llama", "gpt_neox", "qwen3", "mixtral")
LEARNED = ("gpt2", "opt")
BOS = 1


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREIMAGE_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[States]:
    """The states a search looks at: those of the prompts, then those of the hard pairs."""
    kept: list[States] = []

    def keep(*args: Any, **kwargs: Any) -> States:
        kept.append(preimage.capture(*args, **kwargs))
        return kept[-1]

    monkeypatch.setattr(auditing, "capture", keep)
    return kept


@functools.cache
def changed(name: str, change: Callable[[nn.Module], None]) -> LanguageModel:
    """A tiny model with other weights, changed before preimage sees it; shared between tests."""
    module = build(name)
    with torch.no_grad():
        change(module)
    return preimage.load(module)


@functools.cache
def with_twins(name: str, first: int = 5, second: int = 6) -> LanguageModel:
    def copy_row(module: nn.Module) -> None:
        table = module.get_input_embeddings().weight  # type: ignore[operator]
        table[second] = table[first]

    return changed(name, copy_row)


def flat(module: nn.Module) -> None:
    """Every state at "final" is 0: all prompts collide there, and nothing says why."""
    module.model.norm.weight.zero_()  # type: ignore[union-attr,operator]


def deaf(module: nn.Module) -> None:
    """No block adds anything: a state is its last token's embedding at every layer."""
    for block in module.model.layers:  # type: ignore[union-attr]
        block.self_attn.o_proj.weight.zero_()
        block.mlp.down_proj.weight.zero_()


def refused(kind: type[PreimageError], action: Callable[[], object]) -> PreimageError:
    with pytest.raises(kind) as caught:
        action()
    assert type(caught.value) is kind
    assert caught.value.hint
    assert "\n" not in str(caught.value)
    return caught.value


def all_distances(states: Tensor) -> Tensor:
    """The definition: float64 differences of every two rows."""
    return row_distances(states[:, None], states[None])


def ends(pairs: Sequence[CollidingPair]) -> list[tuple[int, int]]:
    return [(pair.first, pair.second) for pair in pairs]


def must_collide(first: Sequence[int], second: Sequence[int], layer: Layer, learned: bool) -> bool:
    """What theory says of two prompts of tokens that all have embeddings of their own."""
    if layer == 0:
        return first[-1] == second[-1] and (not learned or len(first) == len(second))
    return not learned and len({*first, *second}) == 1


# --- against brute force ----------------------------------------------------------------------


def check_spacing(
    spacing: Spacing,
    states: Tensor,
    structural: Callable[[int, int], bool],
    thresholds: Sequence[float],
    count: int = 10,
) -> None:
    """Every number of a spacing, by float64 differences of all pairs."""
    away, lengths, rows = all_distances(states), norms(states), range(len(states))
    pairs = sorted((float(away[i, j]), i, j) for i, j in combinations(rows, 2))
    distances = [distance for distance, _, _ in pairs]
    same = [[j for j in rows if torch.equal(states[i], states[j])] for i in rows]
    first_like = [min(j for j in same[i] if i == j or structural(i, j)) for i in rows]
    assert spacing.states == len(states)
    assert spacing.pairs == len(pairs) == len(states) * (len(states) - 1) // 2
    assert spacing.distinct == len({min(like) for like in same})
    assert (spacing.minimum.first, spacing.minimum.second) == pairs[0][1:]
    assert spacing.minimum.distance == pytest.approx(distances[0], rel=1e-12)
    apart = [
        pair
        for pair in pairs
        if not structural(*pair[1:]) and first_like[pair[1]] == pair[1] and first_like[pair[2]] == pair[2]
    ][:count]
    assert ends(spacing.closest) == [pair[1:] for pair in apart]
    assert [pair.distance for pair in spacing.closest] == pytest.approx([p[0] for p in apart], rel=1e-12)
    assert spacing.separation == spacing.closest[0].distance
    assert spacing.mean_norm == pytest.approx(float(lengths.mean()), rel=1e-12)
    assert spacing.normalised == pytest.approx(spacing.closest[0].distance / spacing.mean_norm, rel=1e-12)
    floor = {(i, j): SAFETY * spacing.noise_floor * float(max(lengths[i], lengths[j])) for _, i, j in pairs}
    assert spacing.floor == pytest.approx(SAFETY * spacing.noise_floor * spacing.mean_norm, rel=1e-12)
    for pair in (spacing.minimum, *spacing.closest, *spacing.listed):
        assert pair.floor == pytest.approx(floor[pair.first, pair.second], rel=1e-12)
    below = {f"{t:g}": sum(distance < t for distance in distances) for t in (1e-6, *thresholds)}
    assert spacing.below == below
    at_floor = [(i, j) for distance, i, j in pairs if distance <= floor[i, j]]
    assert spacing.at_floor == len(at_floor) == sum(spacing.explained.values()) + spacing.unexplained
    assert spacing.unexplained == sum(not structural(i, j) for i, j in at_floor)
    for q, (value, low, high) in spacing.quantiles.items():
        truth = distances[max(1, math.ceil(float(q) * len(distances))) - 1]
        assert low <= truth <= high
        assert low <= value <= high
        if truth > 0.1 * float(lengths.max()):
            assert high - low < 1e-2 * truth


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_every_layer_agrees_with_brute_force(name: str, captured: list[States]) -> None:
    model, thresholds = tiny(name), (0.15, 6.0)
    given = [*PROMPTS, PROMPTS[4], FAMILY[0], PROMPTS[0], PROMPTS[4], FAMILY[1]]
    distinct = [*PROMPTS, *FAMILY[:2]]
    audit = preimage.find_collisions(model, given, thresholds=thresholds)
    assert (audit.prompts, audit.duplicates_removed, audit.lengths) == (len(distinct), 3, (1, 12))
    assert audit.model == model.identity.to_dict()
    assert audit.fingerprint == PromptSet(tuple(map(tuple, distinct)), "list", 0, 0).fingerprint
    assert [found.layer for found in audit.layers] == [0, 1, 2, 3, "final"]
    states, hard = captured
    assert states.token_ids == tuple(map(tuple, distinct))
    floor = noise_floor(model, states.layers)
    counted = set()
    for found in audit.layers:
        assert found.spacing.noise_floor == floor[found.layer]
        check_spacing(
            found.spacing,
            states.last(found.layer),
            lambda i, j: must_collide(distinct[i], distinct[j], found.layer, name == "gpt2"),  # noqa: B023
            thresholds,
        )
        assert (audit.at(found.layer), found.unexplained) == (found, 0)
        counted |= {0 < found.spacing.below[f"{t:g}"] < found.spacing.pairs for t in thresholds}
        for pair in found.spacing.closest:
            assert (pair.first_ids, pair.second_ids) == (
                states.token_ids[pair.first],
                states.token_ids[pair.second],
            )
            assert (pair.first_text, pair.explanation) == (None, "")
        check_hard_kinds(model, distinct, hard, found)
    assert True in counted  # a threshold that cuts through the pairs


def check_hard_kinds(
    model: LanguageModel, prompts: list[list[int]], hard: States, found: LayerCollisions
) -> None:
    limits: dict[str, Any] = {"vocab_size": VOCABULARY, "max_length": model.max_length}
    expected = hard_pairs([tuple(ids) for ids in prompts], None, bos=None, **limits)
    learned, last = absolute_positions(model), hard.last(found.layer)
    assert hard.token_ids is not None
    rows = {ids: row for row, ids in enumerate(hard.token_ids)}
    assert [kind.kind for kind in found.hard] == list(dict.fromkeys(pair.kind for pair in expected))
    for kind in found.hard:
        members = [pair for pair in expected if pair.kind == kind.kind]
        sides = [(last[rows[pair.first]], last[rows[pair.second]]) for pair in members]
        away = [float(row_distances(*side)) for side in sides]
        noise = SAFETY * found.spacing.noise_floor
        floors = [noise * float(max(norms(one), norms(other))) for one, other in sides]
        explained = [must_collide(pair.first, pair.second, found.layer, learned) for pair in members]
        assert kind.pairs == len(members)
        assert kind.minimum.distance == pytest.approx(min(away), rel=1e-12)
        nearest = away.index(min(away))
        assert (kind.minimum.first_ids, kind.minimum.second_ids) == (
            members[nearest].first,
            members[nearest].second,
        )
        apart = [distance for distance, told in zip(away, explained, strict=True) if not told]
        assert kind.separation == (pytest.approx(min(apart), rel=1e-12) if apart else None)
        assert kind.at_floor == sum(d <= f for d, f in zip(away, floors, strict=True))
        assert sum(kind.explained.values()) == sum(explained)
        assert kind.unexplained == 0


def test_text_is_shown_and_options_are_one_object() -> None:
    model = preimage.load(build("llama", vocab_size=TEXT_VOCABULARY), tokenizer=make_tokenizer())
    texts = ["the cat", "a dog", "the bird"]
    audit = preimage.find_collisions(model, texts, 2, closest=2, hard_bases=1)
    (found,) = audit.layers
    assert {found.spacing.closest[0].first_text, found.spacing.closest[0].second_text} <= {
        f"<s>{text}" for text in texts
    }
    assert len(found.spacing.closest) == 2
    assert {"whitespace", "case"} <= {kind.kind for kind in found.hard}
    assert audit == preimage.find_collisions(model, texts, 2, options=CollisionOptions((), 2, 1))
    assert audit.options == {"thresholds": [], "closest": 2, "hard_bases": 1, "seed": 0}
    assert preimage.find_collisions(model, texts, 2, hard_bases=0).layers[0].hard == ()
    without = preimage.find_collisions(model, texts, 2, bos=False, hard_bases=0)
    assert without.layers[0].spacing.closest[0].first_ids[0] != BOS
    assert "<td>2</td>" in audit._repr_html_()


# --- numbers that are none (N7) ---------------------------------------------------------------


def test_nan_is_refused_by_prompt_and_layer() -> None:
    model = preimage.load(build("llama"))
    with torch.no_grad():
        model.module.model.layers[1].mlp.down_proj.weight[0, 0] = float("nan")  # type: ignore[index,union-attr]
    prompts = PROMPTS[:6]
    assert preimage.find_collisions(model, prompts, "0-1").unexplained == 0
    for layers, layer in (("all", 2), (3, 3), ("final", "final")):
        error = refused(StatesError, lambda: preimage.find_collisions(model, prompts, layers))  # noqa: B023
        assert f"Prompt 5, layer {layer}, position 0 holds NaN or infinity." == error.message  # the shortest
    error = refused(StatesError, lambda: preimage.scan_continuations(model, [[3]], 2))
    assert error.message == "Prefix 0, layer 2, token 0 holds NaN or infinity."


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_one_bad_prompt_is_named_among_good_ones(bad: float) -> None:
    model = preimage.load(build("llama"))
    with torch.no_grad():
        model.module.model.embed_tokens.weight[40] = bad  # type: ignore[index,union-attr]
    prompts = [[1, 2, 3], [4, 5, 6], [40, 2, 3], [7, 8]]
    error = refused(StatesError, lambda: preimage.find_collisions(model, prompts, 1))
    assert error.message == "Prompt 2, layer 1, position 2 holds NaN or infinity."
    good = [ids for ids in prompts if 40 not in ids]
    assert preimage.find_collisions(model, good, 1, hard_bases=0).unexplained == 0
    many = [random_ids(30, seed, vocabulary=40) for seed in range(8)]  # some substitution draws the token
    error = refused(StatesError, lambda: preimage.find_collisions(model, many, 1, hard_bases=8))
    assert error.message.startswith("The hard prompt (")
    assert "layer 1, holds NaN or infinity." in error.message
    error = refused(StatesError, lambda: preimage.scan_continuations(model, [[1], [2, 3]], 1))
    assert error.message == "Prefix 0, layer 1, token 40 holds NaN or infinity."


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
        assert {spacing.minimum.first, spacing.minimum.second} <= members
        assert spacing.minimum.explanation == CONSTANT
        assert set(spacing.explained) <= {CONSTANT}
        assert all(pair.explanation == CONSTANT for pair in spacing.listed)
        assert len(spacing.closest) == spacing.pairs - 3  # every pair but the three of the family
        assert not any({pair.first, pair.second} <= members for pair in spacing.closest)
        assert all(pair.explanation == "" for pair in spacing.closest)
        assert spacing.separation > 1000 * float(floors.max())
        constant = next(kind for kind in found.hard if kind.kind == "constant")
        assert (constant.explained, constant.unexplained) == ({CONSTANT: constant.pairs}, 0)


@pytest.mark.parametrize("name", ROTARY)
def test_a_beginning_of_sequence_tells_constant_prompts_apart(name: str) -> None:
    model = tiny(name)
    prompts = [[BOS, *ids] for ids in (*(random_ids(9, seed) for seed in range(6)), *FAMILY)]
    audit = preimage.find_collisions(model, prompts, "1-3,final", hard_bases=0)
    for found in audit.layers:
        spacing = found.spacing
        assert (spacing.at_floor, spacing.explained, spacing.unexplained) == (0, {}, 0)
        assert spacing.listed == ()
        assert spacing.minimum == spacing.closest[0]
        assert spacing.minimum.explanation == ""
        assert spacing.minimum.distance > 100 * spacing.minimum.floor


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
    assert (spacing.at_floor, spacing.unexplained) == (len(expected), 0)
    assert set(ends(spacing.listed)) <= expected
    assert all(pair.explanation == SAME_LAST_TOKEN for pair in spacing.listed)
    assert not set(ends(spacing.closest)) & expected
    if kept is not None:
        assert ends(spacing.closest) == kept
    assert spacing.separation > 1000 * spacing.minimum.floor
    above = audit.at(1).spacing
    assert (above.at_floor, above.explained) == (0, {})
    assert above.minimum.explanation == ""


@pytest.mark.parametrize("name", LEARNED)
def test_learned_positions_know_no_constant_family(name: str) -> None:
    audit = preimage.find_collisions(tiny(name), [*(random_ids(9, seed) for seed in range(6)), *FAMILY])
    assert audit.unexplained == 0
    for found in audit.layers:
        reasons = {reason for kind in found.hard for reason in kind.explained} | set(found.spacing.explained)
        assert reasons <= ({SAME_LAST_TOKEN} if found.layer == 0 else set())
        assert not set(combinations((6, 7, 8), 2)) & set(ends(found.spacing.listed))
        assert found.spacing.separation > 1000 * found.spacing.minimum.floor
        constant = next(kind for kind in found.hard if kind.kind == "constant")
        assert (constant.at_floor, constant.explained, constant.unexplained) == (0, {}, 0)
        assert constant.minimum.explanation == ""


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
        assert all(pair.distance <= pair.floor for pair in spacing.listed)
        assert spacing.separation > 1000 * spacing.minimum.floor
        assert not {(0, 1), (2, 3)} & set(ends(spacing.closest))
    apart = preimage.find_collisions(tiny(name), prompts, "1-3,final", hard_bases=0)
    assert all(found.spacing.at_floor == 0 for found in apart.layers)  # it is the embeddings that do it


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
        assert (spacing.closest, spacing.separation, spacing.normalised) == ((), None, None)
        assert (spacing.pairs, spacing.unexplained, spacing.minimum.explanation) == (3, 0, CONSTANT)
        assert LayerCollisions.from_dict(json.loads(json.dumps(asdict(found)))) == found
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
    assert (spacing.distinct, spacing.at_floor, spacing.below) == (1, 10, {"1e-06": 10})
    assert (spacing.unexplained, spacing.explained) == (9, {CONSTANT: 1})
    assert spacing.minimum.explanation == UNEXPLAINED
    assert (spacing.separation, spacing.normalised, spacing.mean_norm) == (0.0, None, 0.0)
    assert len(spacing.closest) == 6  # of the two constant prompts, which are one, the first
    assert all(pair.explanation == UNEXPLAINED for pair in spacing.closest)
    listed = [pair for pair in spacing.listed if pair.explanation == UNEXPLAINED]
    assert len(listed) == 6
    assert all(kind.at_floor == kind.pairs for kind in found.hard)
    assert found.unexplained == 9 + sum(kind.unexplained for kind in found.hard) > 9
    assert audit.unexplained == found.unexplained


def test_prompts_that_only_this_model_confuses_are_not_structural() -> None:
    model = changed("llama", deaf)
    prompts = [[7, 7], [3, 7], [7, 7, 7], [4, 8], [5, 9]]
    for found in preimage.find_collisions(model, prompts, hard_bases=0).layers:
        spacing = found.spacing
        if found.layer == 0:
            assert (spacing.explained, spacing.unexplained) == ({SAME_LAST_TOKEN: 3}, 0)
            assert spacing.separation > 0.01
        else:
            assert (spacing.explained, spacing.unexplained) == ({CONSTANT: 1}, 2)
            assert spacing.separation == spacing.closest[0].distance == 0.0
            assert ends(spacing.closest)[0] == (0, 1)
            assert spacing.closest[1].distance > 0.01  # and the next are others


@pytest.mark.parametrize("seed", range(6))
def test_any_states_and_any_reasons_agree_with_brute_force(seed: int) -> None:
    # Long and short states, some equal to the bit and some nearly; reasons that cut across all of them.
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(40, 8, generator=generator) * 10.0 ** torch.randint(
        -3, 4, (40, 1), generator=generator
    )
    states[10:20] = states[torch.randint(10, (10,), generator=generator)]
    states[20:30] = states[torch.randint(20, (10,), generator=generator)]
    states[20:30] *= 1 + 10.0 ** torch.randint(-7, -3, (10, 1), generator=generator)
    keys = torch.randint(30, (40,), generator=generator).tolist()
    named = auditing.Named(
        ids=lambda row: (row,),
        text=lambda row: None,
        key=lambda row: keys[row],
        explain=lambda a, b, near: "same" if keys[a] == keys[b] else UNEXPLAINED if near else "",
    )
    thresholds = (1e-4, 1.0, 1e3)
    found = auditing.measure_spacing(states, 1e-5, named, CollisionOptions(thresholds, closest=300))
    check_spacing(found, states, lambda i, j: keys[i] == keys[j], thresholds, count=300)
    assert found.unexplained > 5
    assert found.separation == 0.0
    assert {pair.explanation for pair in found.closest} == {"", UNEXPLAINED}
    for pair in found.listed:
        assert pair.distance <= pair.floor
        assert pair.explanation in ("same", UNEXPLAINED)


def test_states_one_rounding_apart_are_at_the_floor_and_unexplained() -> None:
    def next_float(module: nn.Module) -> None:
        table = module.get_input_embeddings().weight  # type: ignore[operator]
        table[6] = table[5]
        table[6, 0] = torch.nextafter(table[5, 0], torch.tensor(1.0))

    prompts = [[9, 5], [9, 6], [20, 21, 22], [30, 31]]
    spacing = preimage.find_collisions(changed("llama", next_float), prompts, 0, hard_bases=0).at(0).spacing
    assert (spacing.distinct, spacing.at_floor, spacing.unexplained) == (4, 1, 1)
    assert 0 < spacing.minimum.distance <= spacing.minimum.floor
    assert spacing.minimum == spacing.closest[0] == spacing.listed[0]
    assert spacing.minimum.explanation == UNEXPLAINED
    assert (spacing.separation, spacing.below) == (spacing.minimum.distance, {"1e-06": 1})


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


# --- interrupted and continued (J1, J2) -------------------------------------------------------

GIVEN: dict[str, Any] = {"thresholds": (0.5,), "closest": 4, "hard_bases": 2}


class Stopped(Exception):  # noqa: N818  # a signal, not an error
    """Stands for a crash."""


def stop_at(note: str, number: int) -> Callable[[int, int, str], None]:
    """Progress that ends the run at the n-th report that begins so."""
    seen = 0

    def progress(done: int, total: int, said: str) -> None:
        nonlocal seen
        seen += said.startswith(note)
        if seen == number and said.startswith(note):
            raise Stopped

    return progress


def results_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if not path.name.endswith(".jsonl")}


def differing(first: Any, second: Any, at: str = "") -> list[str]:
    """Where two documents differ, and how: what an assertion over two files of bytes does not show."""
    if isinstance(first, dict) and isinstance(second, dict) and first.keys() == second.keys():
        return [line for key in first for line in differing(first[key], second[key], f"{at}.{key}")]
    if isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
        pairs = enumerate(zip(first, second, strict=True))
        return [line for i, pair in pairs for line in differing(*pair, f"{at}[{i}]")]
    return [] if first == second else [f"{at}: {first!r}, {second!r}"]


def lines(folder: Path) -> int:
    """Finished items in a run folder."""
    items = folder / "items.jsonl"
    return items.read_bytes().count(b"\n") if items.exists() else 0


def search(out: Path, **changes: Any) -> preimage.CollisionAudit:
    given: dict[str, Any] = {"model": tiny("llama"), "prompts": PROMPTS, "layers": "all"} | GIVEN | changes
    return preimage.find_collisions(out=out, **given)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A search that was never interrupted."""
    out = tmp_path_factory.mktemp("whole") / "run"
    search(out)
    return out


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many sets of states were compared, counted from now on."""
    count: list[int] = []
    for module in (auditing, continuing):
        original = module.measure_spacing

        def counted(*args: Any, original: Any = original) -> Spacing:
            count.append(1)
            return original(*args)

        monkeypatch.setattr(module, "measure_spacing", counted)
    return count


def test_a_run_folder_holds_what_the_search_returns(whole: Path, compared: list[int]) -> None:
    assert sorted(path.name for path in whole.iterdir()) == [
        "items.jsonl",
        "layers.parquet",
        "record.jsonl",
        "run.json",
    ]
    saved = json.loads((whole / "run.json").read_text())
    assert (saved["schema"], saved["command"], saved["state"]) == ("preimage/1", "collisions", "done")
    audit = preimage.find_collisions(tiny("llama"), PROMPTS, **GIVEN)
    assert len(compared) == 5
    assert saved["results"] == json.loads(json.dumps(audit.to_dict()))
    assert parquet.read_table(whole / "layers.parquet").to_pylist() == audit.rows()
    before = results_of(whole)
    assert search(whole) == audit  # a finished run is read, not run
    assert len(compared) == 5
    assert results_of(whole) == before


@pytest.mark.parametrize(
    ("note", "number", "left"),
    [("prompts captured", 2, 5), ("layers compared", 1, 4), ("layers compared", 3, 2), ("layers", 5, 0)],
)
def test_an_interrupted_search_continues(
    note: str, number: int, left: int, whole: Path, compared: list[int], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    with pytest.raises(Stopped):
        search(out, progress=stop_at(note, number))
    assert json.loads((out / "run.json").read_text())["state"] == "running"
    assert (out / "states").is_dir()
    assert not (out / "layers.parquet").exists()
    kept = (out / "items.jsonl").read_bytes() if left < 5 else b""
    assert lines(out) == 5 - left
    compared.clear()
    reports: list[tuple[int, int]] = []
    search(out, progress=lambda done, total, said: reports.append((done, total)))
    assert len(compared) == left  # finished layers are not compared again
    assert reports[-left:] == [(done, 5) for done in range(6 - left, 6)] or left == 0
    assert (out / "items.jsonl").read_bytes().startswith(kept)
    assert results_of(out) == results_of(whole)
    assert not (out / "states").exists()


def test_a_search_stopped_at_any_moment_gives_the_same_bytes(
    whole: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # What a kill -9 leaves is what is on the disk at that moment: a copy of the folder.
    out, copies = tmp_path / "run", []

    def copy_folder(*_: object) -> None:
        if out.exists():
            copies.append(shutil.copytree(out, tmp_path / f"killed-{len(copies)}"))

    def watched(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            copy_folder()
            found = original(*args, **kwargs)
            copy_folder()
            return found

        return call

    with monkeypatch.context() as patch:
        for home, name in ((Run, "finish"), (storage_run.shutil, "rmtree")):
            patch.setattr(home, name, watched(getattr(home, name)))
        search(out, progress=copy_folder)
    last = next(folder for folder in reversed(copies) if (folder / "states").exists())
    running = next(folder for folder in copies if lines(folder) == 3)
    torn, lost, half = (tmp_path / name for name in ("torn", "lost", "half"))
    shutil.copytree(running, torn)
    (torn / "items.jsonl").write_bytes((running / "items.jsonl").read_bytes()[:-40])  # half a line
    shutil.rmtree(shutil.copytree(running, lost) / "states")  # captured again
    shutil.rmtree(shutil.copytree(last, half) / "states" / "prompts")  # killed while cleaning up
    unfinished = 0
    for folder in (*copies, torn, lost, half):
        unfinished += (folder / "states").exists()
        search(folder)
        assert results_of(folder) == results_of(whole), folder.name
    assert unfinished > 15


KILLED = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
import preimage, test_collisions as here
def kill(done, total, note):
    if note.startswith("layers compared") and done == 3:
        os.kill(os.getpid(), signal.SIGKILL)
here.search(here.Path(sys.argv[2]), progress=kill)
"""


def test_a_killed_process_is_continued_by_another(whole: Path, compared: list[int], tmp_path: Path) -> None:
    out = tmp_path / "run"
    command = [sys.executable, "-c", KILLED, str(Path(__file__).parents[1]), str(out)]
    threads = {"OMP_NUM_THREADS": str(torch.get_num_threads())}  # the bits of a state depend on them
    done = subprocess.run(command, env=os.environ | threads, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert lines(out) == 3
    search(out)
    assert len(compared) == 2
    assert not differing(*(json.loads((folder / "run.json").read_text()) for folder in (out, whole)))
    assert results_of(out) == results_of(whole)


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("model", {"model": lambda: tiny("llama", seed=1)}),
        ("model", {"model": lambda: preimage.load(build("llama", dtype=torch.bfloat16))}),
        ("prompts", {"prompts": lambda: PROMPTS[:-1]}),
        ("prompts", {"prompts": lambda: PROMPTS[::-1]}),
        ("layers", {"layers": lambda: "0-3"}),
        ("options", {"closest": lambda: 5}),
        ("options", {"thresholds": lambda: (0.25,)}),
        ("options", {"hard_bases": lambda: 1}),
        ("options", {"seed": lambda: 1}),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_other_work_in_the_folder_is_refused_by_the_field(
    field: str, change: dict[str, Callable[[], Any]], whole: Path, tmp_path: Path
) -> None:
    out = shutil.copytree(whole, tmp_path / "run")
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    error = refused(RunFolderError, lambda: search(out, **{name: make() for name, make in change.items()}))
    assert f"{out} was begun with another {field}: " in error.message
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


def test_duplicates_and_order_of_layers_are_no_other_work(whole: Path, tmp_path: Path) -> None:
    out = shutil.copytree(whole, tmp_path / "run")
    audit = search(out, prompts=[*PROMPTS, PROMPTS[3]], layers=["final", 3, 2, 1, 0, 0])
    assert audit.duplicates_removed == 1
    assert audit.layers == search(whole).layers


# --- bad input --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "prompts", "message"),
    [
        (PromptError, [], "No prompt was given."),
        (PromptError, [[3, 4]], "1 prompts, 1 of them different."),
        (PromptError, [[3, 4], [3, 4]], "2 prompts, 1 of them different."),
        (PromptError, [[3, 4], []], "Prompt 1 has no tokens."),
        (PromptError, [[3, 4], [VOCABULARY]], f"Prompt 1 has token id {VOCABULARY}"),
        (PromptError, [[3, 4], "text"], "Prompt 1 is text, and this model has no tokenizer."),
        (PromptError, [[3], [4] * 129], "Prompt 1 has 129 tokens; this model takes at most 128."),
    ],
    ids=["none", "one", "two that are equal", "an empty one", "a wrong id", "text", "too long"],
)
def test_prompts_that_make_no_pair(
    kind: type[PreimageError], prompts: list[Any], message: str, tmp_path: Path
) -> None:
    error = refused(kind, lambda: preimage.find_collisions(tiny("llama"), prompts, out=tmp_path / "run"))
    assert message in error.message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        (OptionError, {"thresholds": (0.0,)}, "A threshold is 0.0."),
        (OptionError, {"thresholds": (0.5, -1.0)}, "A threshold is -1.0."),
        (OptionError, {"thresholds": (float("nan"),)}, "A threshold is nan."),
        (OptionError, {"thresholds": (float("inf"),)}, "A threshold is inf."),
        (
            OptionError,
            {"thresholds": (0.5, 1e-9)},
            "The threshold 1e-09 is below the noise floor of layer 0,",
        ),
        (OptionError, {"closest": 0}, "closest is 0."),
        (OptionError, {"hard_bases": -1}, "hard_bases is -1."),
        (OptionError, {"seed": -1}, "seed is -1."),
        (LayerError, {"layers": 4}, "There is no layer 4."),
        (LayerError, {"layers": "top"}, "There is no layer 'top'."),
        (LayerError, {"layers": []}, "No layer was given."),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_options_that_mean_nothing(
    kind: type[PreimageError], change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    error = refused(kind, lambda: search(tmp_path / "run", **change))
    assert message in error.message
    assert list(tmp_path.iterdir()) == []


def test_a_threshold_is_refused_by_the_layer_it_is_too_fine_for() -> None:
    model = tiny("llama")
    states = preimage.capture(model, PROMPTS, positions="last")
    noise = {layer: 2 * states.noise_floor[layer] * float(norms(states.last(layer)).median()) for layer in
             states.layers}  # fmt: skip
    between = (noise[3] * noise["final"]) ** 0.5
    assert noise[3] < between < noise["final"] / 2
    assert preimage.find_collisions(model, PROMPTS, "0-3", thresholds=(between,), hard_bases=0)
    for action in (
        lambda: preimage.find_collisions(model, PROMPTS, thresholds=(between,)),
        lambda: preimage.scan_continuations(model, PROMPTS[:2], thresholds=(between,)),
    ):
        error = refused(OptionError, action)
        assert f"The threshold {between:g} is below the noise floor of layer final, " in error.message


# --- several lengths --------------------------------------------------------------------------


def test_a_sweep_is_a_search_at_each_length(tmp_path: Path) -> None:
    model, options = tiny("llama"), PromptOptions(count=12, seed=3)
    out = tmp_path / "sweep"
    audits = sweep_lengths(model, "random", [6, 2], "0,2,final", prompts=options, out=out, closest=3)
    assert list(audits) == [6, 2]
    for length, audit in audits.items():
        chosen = PromptOptions(count=12, seed=3, length=length)
        prompts = gather("random", None, chosen, vocab_size=VOCABULARY, max_length=128)
        assert audit.lengths == (length, length)
        assert audit == preimage.find_collisions(model, prompts, "0,2,final", closest=3)
        saved = json.loads((out / f"length-{length}" / "run.json").read_text())
        assert saved["results"] == json.loads(json.dumps(audit.to_dict()))
    assert sorted(path.name for path in out.iterdir()) == ["length-2", "length-6"]
    again = sweep_lengths(model, "random", [6, 2], "0,2,final", prompts=options, out=out, closest=3)
    assert again == audits


def test_a_sweep_over_unequal_numbers_is_refused(tmp_path: Path) -> None:
    model, source = tiny("llama"), tmp_path / "ids.jsonl"
    source.write_text(json.dumps(random_ids(40)) + "\n")
    error = refused(OptionError, lambda: sweep_lengths(model, str(source), [4, 10], out=tmp_path / "out"))
    assert error.message == "The source has 10 at 4, 4 at 10 prompts."
    options = PromptOptions(count=4)
    audits = sweep_lengths(model, str(source), [4, 10], 1, prompts=options, hard_bases=0)
    assert [audit.prompts for audit in audits.values()] == [4, 4]
    refused(OptionError, lambda: sweep_lengths(model, str(source), []))
    with pytest.raises(OptionError, match="length is 0"):
        sweep_lengths(model, str(source), [4, 0])
    refused(PromptError, lambda: sweep_lengths(model, str(source), [4, 50]))
    refused(LayerError, lambda: sweep_lengths(model, str(source), [4], 9))
    assert [path.name for path in tmp_path.iterdir()] == ["ids.jsonl"]


# --- every next token -------------------------------------------------------------------------

PREFIXES = [[3], random_ids(6, 1), [7] * 5]


def full_passes(model: LanguageModel, prefix: list[int], layer: Layer) -> Tensor:
    """The state of every token after the prefix, without a cache: whole prompts from their first token on."""
    prompts = torch.tensor([[*prefix, token] for token in range(model.vocab_size)])
    return model.states(prompts, (layer,))[layer][:, -1]


@pytest.mark.parametrize("layer", [0, 2, "final"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_scan_agrees_with_plain_passes_over_the_vocabulary(name: str, layer: Layer) -> None:
    model = tiny(name)
    scan = preimage.scan_continuations(model, [*PREFIXES, PREFIXES[0]], layer, closest=5)
    assert [found.prefix for found in scan.prefixes] == [tuple(prefix) for prefix in PREFIXES]
    assert (scan.layer, scan.unexplained, scan.model) == (layer, 0, model.identity.to_dict())
    for found in scan.prefixes:
        spacing, states = found.spacing, full_passes(model, list(found.prefix), layer)
        away, noise = all_distances(states), 2 * spacing.noise_floor * float(norms(states).max())
        pairs = sorted((float(away[i, j]), i, j) for i, j in combinations(range(VOCABULARY), 2))
        assert (found.layer, spacing.states, spacing.pairs) == (layer, VOCABULARY, len(pairs))
        assert found.margin == spacing.separation
        assert abs(found.margin - pairs[0][0]) <= 2 * noise
        for pair, (distance, i, j) in zip(spacing.closest, pairs, strict=False):
            assert abs(pair.distance - distance) <= 2 * noise
            assert abs(pair.distance - float(away[pair.first, pair.second])) <= 2 * noise
            assert (pair.first_ids, pair.second_ids) == ((pair.first,), (pair.second,))
            assert (i, j) == (pair.first, pair.second) or abs(pairs[0][0] - pairs[1][0]) < noise
        assert spacing.mean_norm == pytest.approx(float(norms(states).mean()), rel=1e-5)
        assert abs(spacing.quantiles["1"][0] - pairs[-1][0]) <= 1e-2 * pairs[-1][0]
        assert (spacing.at_floor, spacing.listed) == (0, ())


@pytest.mark.parametrize("layer", [0, 2, "final"])
def test_tokens_with_one_embedding_do_not_count_for_the_margin(layer: Layer) -> None:
    model = with_twins("llama")
    scan = preimage.scan_continuations(model, PREFIXES, layer)
    assert scan.unexplained == 0
    for found in scan.prefixes:
        spacing = found.spacing
        assert spacing.explained == {IDENTICAL_EMBEDDINGS: 1}
        assert (ends(spacing.listed), spacing.listed[0].explanation) == ([(5, 6)], IDENTICAL_EMBEDDINGS)
        assert spacing.minimum == spacing.listed[0]
        assert spacing.minimum.distance <= (0.0 if layer == 0 else spacing.minimum.floor)
        away = all_distances(full_passes(model, list(found.prefix), layer))
        away[5, 6] = away[6, 5] = torch.inf
        noise = 2 * spacing.noise_floor * 2 * spacing.mean_norm
        smallest = float(away.fill_diagonal_(torch.inf).min())
        assert found.margin is not None
        assert abs(found.margin - smallest) <= noise
        assert (5, 6) not in ends(spacing.closest)


def test_the_longest_prefix_leaves_room_for_one_token() -> None:
    (found,) = preimage.scan_continuations(tiny("llama"), [random_ids(127)], 1).prefixes
    assert (len(found.prefix), found.spacing.states) == (127, VOCABULARY)


def test_tokens_that_only_this_model_confuses_leave_no_margin() -> None:
    scan = preimage.scan_continuations(changed("llama", flat), [[3, 4]], "final")
    (found,) = scan.prefixes
    assert scan.unexplained == found.spacing.unexplained == VOCABULARY * (VOCABULARY - 1) // 2
    assert (found.margin, found.spacing.closest[0].explanation) == (0.0, UNEXPLAINED)
    assert len(found.spacing.closest) == len(found.spacing.listed) == 10


def test_text_prefixes_and_their_tables() -> None:
    model = preimage.load(build("llama", vocab_size=TEXT_VOCABULARY), tokenizer=make_tokenizer())
    scan = preimage.scan_continuations(model, ["the <b>", "a"], 1, closest=1)
    assert [found.text for found in scan.prefixes] == ["<s>the <b>", "<s>a"]
    pair = scan.prefixes[0].spacing.closest[0]
    assert pair.first_text == model.decode(pair.first_ids)
    assert [row["text"] for row in scan.rows()] == ["<s>the <b>", "<s>a"]
    assert "&lt;s&gt;the &lt;b&gt;" in scan._repr_html_()
    assert preimage.scan_continuations(model, ["a"], 1, bos=False).prefixes[0].text == "a"
    untold = preimage.scan_continuations(tiny("llama"), [[3, 4]], 1)
    assert untold.rows()[0]["text"] == "[3, 4]"


def test_a_scan_is_saved_and_continued(compared: list[int], tmp_path: Path) -> None:
    model = tiny("llama")
    scan = preimage.scan_continuations(model, PREFIXES, 2, out=tmp_path / "whole")
    assert scan == preimage.scan_continuations(model, PREFIXES, 2)
    saved = json.loads((tmp_path / "whole" / "run.json").read_text())
    assert (saved["command"], saved["state"]) == ("continuations", "done")
    assert saved["results"] == json.loads(json.dumps(scan.to_dict()))
    assert [entry["margin"] for entry in saved["results"]["prefixes"]] == [f.margin for f in scan.prefixes]
    assert parquet.read_table(tmp_path / "whole" / "prefixes.parquet").to_pylist() == scan.rows()
    out, copies = tmp_path / "run", []

    def copy_folder(*_: object) -> None:
        copies.append(shutil.copytree(out, tmp_path / f"killed-{len(copies)}"))

    preimage.scan_continuations(model, PREFIXES, 2, out=out, progress=copy_folder)
    copy_folder()
    for done, folder in enumerate(copies):
        compared.clear()
        assert preimage.scan_continuations(model, PREFIXES, 2, out=folder) == scan
        assert len(compared) == max(0, len(PREFIXES) - done)
        assert results_of(folder) == results_of(tmp_path / "whole")
    changes: dict[str, Any] = {
        "model": (tiny("llama", 1), PREFIXES, 2, {}), "prefixes": (model, PREFIXES[:2], 2, {}),
        "layer": (model, PREFIXES, 3, {}), "options": (model, PREFIXES, 2, {"closest": 3}),
    }  # fmt: skip
    for field, (other, prefixes, layer, options) in changes.items():
        with pytest.raises(RunFolderError, match=f"was begun with another {field}: "):
            preimage.scan_continuations(other, prefixes, layer, out=copies[1], **options)


@pytest.mark.parametrize(
    ("kind", "prefixes", "change", "message"),
    [
        (PromptError, [[3], [4] * 128], {}, "Prefix 1 has 128 tokens, as many as the model takes."),
        (PromptError, [], {}, "No prompt was given."),
        (PromptError, [[VOCABULARY]], {}, f"Prompt 0 has token id {VOCABULARY}"),
        (LayerError, [[3]], {"layer": 9}, "There is no layer 9."),
        (LayerError, [[3]], {"layer": "1,2"}, "One layer is needed here"),
        (OptionError, [[3]], {"thresholds": (1e-12,)}, "is below the noise floor of layer final"),
        (OptionError, [[3]], {"thresholds": (-1.0,)}, "A threshold is -1.0."),
        (OptionError, [[3]], {"closest": 0}, "closest is 0."),
    ],
)
def test_a_scan_of_nothing_that_can_be_scanned(
    kind: type[PreimageError], prefixes: list[Any], change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    error = refused(kind, lambda: preimage.scan_continuations(tiny("llama"), prefixes, out=out, **change))
    assert message in error.message
    assert not out.exists()


def test_the_prompts_of_the_closest_pairs(whole: Path, tmp_path: Path) -> None:
    audit = search(whole)
    found = closest_prompts(audit)
    pairs = audit.at("final").spacing.closest
    assert found[:2] == [pairs[0].first_ids, pairs[0].second_ids]
    assert set(found) == {ids for pair in pairs for ids in (pair.first_ids, pair.second_ids)}
    assert len(found) == len(set(found))
    assert closest_prompts(whole) == closest_prompts(str(whole)) == found
    assert closest_prompts(whole, 1) == closest_prompts(audit, 1)
    assert closest_prompts(audit, 1)[0] == audit.at(1).spacing.closest[0].first_ids
    assert closest_prompts(audit, count=3) == found[:3]
    for of in (audit, whole):
        error = refused(OptionError, lambda: closest_prompts(of, 7))  # noqa: B023
        assert (error.message, error.hint) == ("The audit has no layer 7.", "It has 0, 1, 2, 3, final.")
        for count in (0, -1):
            refused(OptionError, lambda: closest_prompts(of, count=count))  # noqa: B023
    with pytest.raises(Stopped):
        search(tmp_path / "half", progress=stop_at("layers compared", 2))
    Run({"command": "invert"}, tmp_path / "other").finish(list)
    for name in ("half", "other"):
        error = refused(RunFolderError, lambda: closest_prompts(tmp_path / name))  # noqa: B023
        assert error.message == f"{tmp_path / name} holds no finished collision search."
    refused(RunFolderError, lambda: closest_prompts(tmp_path / "nowhere"))


# --- results ----------------------------------------------------------------------------------


def test_results_survive_json(tmp_path: Path) -> None:
    audit = preimage.find_collisions(tiny("llama"), [*PROMPTS, *FAMILY], thresholds=(0.5,))
    for found in audit.layers:
        assert LayerCollisions.from_dict(asdict(found)) == found
        assert LayerCollisions.from_dict(json.loads(json.dumps(asdict(found)))) == found
    scan = preimage.scan_continuations(with_twins("llama"), PREFIXES, 2)
    for prefix in scan.prefixes:
        assert Continuation.from_dict(json.loads(json.dumps(asdict(prefix)))) == prefix
    for kind, result in (("collisions", audit), ("continuations", scan)):
        saved = json.loads(result.save(tmp_path / f"{kind}.json").read_text())
        assert (saved["schema"], saved["kind"], saved["unexplained"]) == ("preimage/1", kind, 0)
        assert saved == {"schema": "preimage/1", "kind": kind, **json.loads(json.dumps(result.to_dict()))}


def test_the_figure_has_a_curve_for_every_quantity() -> None:
    audit = preimage.find_collisions(tiny("llama"), [*PROMPTS, *FAMILY])
    figure = spacing_figure(audit)
    curves = {curve.name: list(curve.y) for curve in figure.data}
    assert list(curves) == [
        "maximum", "quantile 0.5", "quantile 0.01", "closest pair that must differ",
        "closest hard pair that must differ", "noise floor",
    ]  # fmt: skip
    assert all(list(curve.x) == ["0", "1", "2", "3", "final"] for curve in figure.data)
    spacings = [found.spacing for found in audit.layers]
    assert curves["closest pair that must differ"] == [spacing.separation for spacing in spacings]
    assert curves["maximum"] == [spacing.quantiles["1"][0] for spacing in spacings]
    assert curves["noise floor"] == [s.floor for s in spacings]
    hard = curves["closest hard pair that must differ"]
    for found, value in zip(audit.layers[1:], hard[1:], strict=True):
        assert value == min(k.separation for k in found.hard if k.separation is not None)
    assert figure.layout.yaxis.type == "log"
    assert figure.layout.xaxis.type == "category"


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
        assert found.spacing.at_floor == sum(alike)
