"""Collision search against brute force; what cannot be searched is refused in words."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import preimage
from preimage.collisions import CollisionOptions
from preimage.collisions.result import LayerCollisions
from preimage.collisions.spacing import RowLabels, measure_spacing
from preimage.collisions.structure import UNEXPLAINED, absolute_positions
from preimage.distances import norms, row_distances
from preimage.errors import LayerError, OptionError, PreimageError, PromptError, StatesError
from preimage.layers import Layer
from preimage.models import LanguageModel
from preimage.prompts import PromptSet, hard_pairs
from preimage.states import SAFETY, States, noise_floor
from support.collisions import BOS, FAMILY, PROMPTS, check_spacing, search
from support.folders import VOCABULARY as TEXT_VOCABULARY
from support.folders import make_tokenizer
from support.refusing import refused
from support.tiny import VOCABULARY, build, random_ids, tiny


def must_collide(first: Sequence[int], second: Sequence[int], layer: Layer, learned: bool) -> bool:
    """What theory says of two prompts of tokens that all have embeddings of their own."""
    if layer == 0:
        return first[-1] == second[-1] and (not learned or len(first) == len(second))
    return not learned and len({*first, *second}) == 1


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
        assert kind.closest_pair.distance == pytest.approx(min(away), rel=1e-12)
        nearest = away.index(min(away))
        assert (kind.closest_pair.first_ids, kind.closest_pair.second_ids) == (
            members[nearest].first,
            members[nearest].second,
        )
        apart = [distance for distance, told in zip(away, explained, strict=True) if not told]
        assert kind.margin == (pytest.approx(min(apart), rel=1e-12) if apart else None)
        assert kind.within_noise == sum(d <= f for d, f in zip(away, floors, strict=True))
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
    assert ">2</td>" in audit._repr_html_()


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
    labels = RowLabels(
        ids=lambda row: (row,),
        text=lambda row: None,
        key=lambda row: keys[row],
        explain=lambda a, b, near: "same" if keys[a] == keys[b] else UNEXPLAINED if near else "",
    )
    thresholds = (1e-4, 1.0, 1e3)
    found = measure_spacing(states, 1e-5, labels, CollisionOptions(thresholds, closest=300))
    check_spacing(found, states, lambda i, j: keys[i] == keys[j], thresholds, count=300)
    assert found.unexplained > 5
    assert found.margin == 0.0
    assert {pair.explanation for pair in found.closest} == {"", UNEXPLAINED}
    for pair in found.listed:
        assert pair.distance <= pair.noise_radius
        assert pair.explanation in ("same", UNEXPLAINED)


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
