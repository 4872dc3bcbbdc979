"""Collisions that are there by construction: how far they are, how they are found, how they vanish."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from torch import Tensor, nn

import preimage
from preimage.distances import norms, row_distances
from preimage.errors import LayerError, ModelError, OptionError, PromptError
from preimage.layers import Layer
from preimage.models import LanguageModel
from preimage.models.float64 import double_copy
from preimage.models.identity import weight_hash
from preimage.theory.discriminant import movement
from preimage.theory.discriminant.checking import COLLISION, build_collision, distance_to_collision
from preimage.theory.result import TheoryReport
from support.refusing import refused
from support.tiny import NAMES, VOCABULARY, build, random_ids

ARCHITECTURES = tuple(name for name in NAMES if name != "mixtral")  # its kernels know no float64
FIRST, SECOND = [5, 1, 0, 9, 2, 17], [30, 4, 1, 2, 8]  # padding, BOS and EOS ids among them
LAST = 3
UNIT = 2.0**-53
APART, REACHED, BELOW, BEYOND = range(4)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREIMAGE_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@functools.cache
def exact(name: str) -> LanguageModel:
    """A tiny float64 model, shared between tests, which must not change it."""
    return preimage.load(build(name, dtype=torch.float64))


@functools.cache
def measured(name: str) -> TheoryReport:
    return distance_to_collision(exact(name), FIRST, SECOND, LAST, learning_rate=1e-5)


@functools.cache
def collided(name: str) -> LanguageModel:
    return build_collision(exact(name), FIRST, SECOND, LAST)


def gap(model: LanguageModel, layer: Layer) -> float:
    """The pair's distance by the norm of the states, in float64 throughout."""
    first, second = (model.states(torch.tensor([ids]), (layer,))[layer][0, -1] for ids in (FIRST, SECOND))
    return float(row_distances(first, second) / norms(first))


def whole_jacobian(model: LanguageModel, layer: int, only: str = "") -> tuple[Tensor, Tensor]:
    """g, and J with respect to every entry of every parameter of the backbone: the definition."""
    copy = double_copy(model, head=True)
    for table in copy.module.modules():
        if isinstance(table, nn.Embedding):
            table.padding_idx = None  # it keeps the row from training, not from being a parameter
    named = copy.anatomy.backbone.named_parameters()
    parameters = [parameter.requires_grad_() for name, parameter in named if only in name]
    first, second = (copy.run(torch.tensor([ids]), layers=(layer,))[layer][0, -1] for ids in (FIRST, SECOND))
    value = first - second
    rows = [
        torch.cat(
            [
                torch.zeros_like(p).flatten() if slope is None else slope.flatten()
                for p, slope in zip(
                    parameters,
                    torch.autograd.grad(one, parameters, retain_graph=True, allow_unused=True),
                    strict=True,
                )
            ]
        )
        for one in value
    ]
    return value.detach(), torch.stack(rows)


def first_order(value: Tensor, jacobian: Tensor) -> float:
    return math.sqrt(float(value @ torch.linalg.solve(jacobian @ jacobian.mT, value)))


def rounding(model: LanguageModel, value: Tensor, jacobian: Tensor) -> float:
    """How far apart two float64 computations of the first-order distance may be, relative to it.

    Entries of g and J go through a pass and back: 16 (l + 1) inner products of at most k terms one after
    another, each wrong by k units of rounding, so by a relative e = 16 (l + 1) k u in all (``witnesses``
    counts the pass alone). With A = J J^T and w = A^-1 g, q = g^T w moves by at most 2 e |A| |w|^2 +
    2 e |g| |w|, and |g| |w| / q is at most sqrt(s), s = |A| |w|^2 / q: sqrt(q) moves by a relative
    e (s + sqrt(s)) <= 2 e s.
    s is 2 for GPT-2 and 4e6 for Gemma 3, whose queries and keys are normed.
    """
    squares = jacobian @ jacobian.mT
    weights = torch.linalg.solve(squares, value)
    size = float(torch.linalg.matrix_norm(squares, 2))
    amplified = max(1.0, size * float(weights @ weights) / float(value @ weights))
    terms = max(max(matrix.shape) for block in model.anatomy.blocks for matrix in block.parameters())
    return 2 * amplified * 16 * (LAST + 1) * terms * UNIT


def verdicts(report: TheoryReport) -> list[bool | None]:
    return [verdict.holds for verdict in report.verdicts]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_few_numbers_give_the_distance_of_all_parameters(name: str) -> None:
    model, report = exact(name), measured(name)
    value, jacobian = whole_jacobian(model, LAST)
    (numbers,) = report.tables["distance"]
    within = rounding(model, value, jacobian)
    assert within < 1e-5  # what is wrong with a Jacobian is far above it
    assert numbers["first_order"] == pytest.approx(first_order(value, jacobian), rel=within)
    assert 20_000 < report.subject["parameters"] <= jacobian.shape[1]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_collision_is_reached_and_earlier_layers_stay_apart(name: str) -> None:
    report = measured(name)
    assert report.holds
    (numbers,), rows = report.tables["distance"], report.tables["newton"]
    assert numbers["residual_before"] > 0.5
    assert numbers["residual_after"] <= COLLISION
    assert [row["layer"] for row in report.tables["layers"]] == [0, 1, 2, 3]
    assert all(row["after"] > 1e-2 for row in report.tables["layers"][:-1])
    assert 0.5 * numbers["first_order"] < numbers["distance"] < 5 * numbers["first_order"]
    sums = report.subject["parameters"] * 2 * UNIT  # of as many terms
    assert numbers["distance"] <= sum(row["length"] for row in rows) * (1 + sums)
    model = collided(name)
    assert gap(model, LAST) <= COLLISION
    assert gap(model, "final") <= 10 * COLLISION  # gains are 1 or so: a norm hardly stretches
    assert all(gap(model, layer) > 1e-2 for layer in range(LAST))
    moved = dict(model.module.named_parameters())
    squares = [
        float(row_distances(parameter.detach().flatten(), moved[key].flatten())) ** 2
        for key, parameter in exact(name).module.named_parameters()
    ]
    assert math.sqrt(sum(squares)) == pytest.approx(numbers["distance"], rel=sums)


def test_at_layer_0_the_distance_is_known() -> None:
    model = exact("llama")
    first, second = (model.embedding_table[ids[-1]] for ids in (FIRST, SECOND))
    expected = float(row_distances(first, second)) / math.sqrt(2)  # both rows meet half way
    (numbers,) = distance_to_collision(model, FIRST, SECOND, 0).tables["distance"]
    assert numbers["first_order"] == pytest.approx(expected, rel=1e-12)
    assert numbers["distance"] == pytest.approx(expected, rel=1e-12)


def among_others() -> list[list[int]]:
    """The pair as prompts 7 and 15 of 22."""
    prompts = [random_ids(3 + seed % 5, seed) for seed in range(40, 60)]
    return [*prompts[:7], FIRST, *prompts[7:14], SECOND, *prompts[14:]]


def shaken(model: LanguageModel) -> LanguageModel:
    """Every parameter changed by a thousandth of what it is, or so."""
    copy = double_copy(model, head=True)
    with torch.no_grad():
        for parameter in copy.module.parameters():
            parameter += 2e-5 * torch.randn_like(parameter)
    return copy


def test_the_search_finds_it_in_float64_and_a_small_change_removes_it() -> None:
    line = {"thresholds": (1e-9,), "hard_bases": 0}
    found = preimage.find_collisions(collided("gpt2"), among_others(), "1-3,final", **line)
    assert [layer.spacing.below["1e-09"] for layer in found.layers] == [0, 0, 1, 1]
    for layer in (LAST, "final"):
        closest = found.at(layer).spacing.closest[0]
        assert (closest.first, closest.second) == (7, 15)
        assert (closest.first_ids, closest.second_ids) == (tuple(FIRST), tuple(SECOND))
        assert closest.distance <= 1e-12 * found.at(layer).spacing.mean_norm
    for model in (exact("gpt2"), shaken(collided("gpt2"))):
        apart = preimage.find_collisions(model, among_others(), "1-3,final", **line)
        assert [layer.spacing.below["1e-09"] for layer in apart.layers] == [0] * 4
        assert apart.at(LAST).spacing.separation > 1e-6 * apart.at(LAST).spacing.mean_norm


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_the_search_reports_it_as_unexplained_in_float32(name: str) -> None:
    def unexplained(model: LanguageModel) -> list[int]:
        single = preimage.load(double_copy(model, head=True).module.to(torch.float32))
        found = preimage.find_collisions(single, among_others(), "all", hard_bases=0)
        listed = [pair for layer in found.layers for pair in layer.spacing.listed]
        assert all((p.first, p.second) == (7, 15) for p in listed if p.explanation == "unexplained")
        return [layer.unexplained for layer in found.layers]

    assert unexplained(collided(name)) == [0, 0, 0, 1, 1]
    assert unexplained(exact(name)) == [0] * 5
    assert unexplained(shaken(collided(name))) == [0] * 5


def test_prompts_that_collide_for_all_parameters_are_not_apart() -> None:
    report = distance_to_collision(exact("llama"), [7, 7], [7, 7, 7], LAST)
    assert verdicts(report) == [False, True, None, False]
    (numbers,) = report.tables["distance"]
    assert numbers["distance"] == 0
    assert report.tables["newton"] == []
    assert verdicts(distance_to_collision(exact("gpt2"), [7, 7], [7, 7, 7], LAST))[APART] is True


def test_where_nothing_that_may_move_helps_no_collision_is_reached() -> None:
    model, pair = exact("gpt2"), ([3, 5], [4, 6])
    report = distance_to_collision(model, *pair, 0, only="wpe")  # both prompts end at the same position
    assert verdicts(report) == [True, False, None, None]
    (numbers,) = report.tables["distance"]
    assert (numbers["first_order"], numbers["distance"]) == (math.inf, 0)
    refused(ModelError, lambda: build_collision(model, *pair, 0, only="wpe"))
    assert verdicts(distance_to_collision(model, *pair, 0, only="wte"))[REACHED] is True


def test_blocks_that_do_nothing_collide_with_what_they_pass_on() -> None:
    module = build("llama", dtype=torch.float64)
    with torch.no_grad():
        for block in module.model.layers:  # type: ignore[union-attr]
            block.self_attn.o_proj.weight.zero_()
            block.mlp.down_proj.weight.zero_()
    report = distance_to_collision(preimage.load(module), FIRST, SECOND, LAST, only="embed_tokens")
    assert verdicts(report)[:3] == [True, True, False]
    assert report.verdicts[BELOW].value <= COLLISION


def test_one_step_is_farther_than_a_collision_or_not() -> None:
    for rate, beyond in ((1e-5, True), (1.0, False)):
        report = distance_to_collision(exact("qwen2"), FIRST, SECOND, LAST, learning_rate=rate)
        (numbers,) = report.tables["distance"]
        assert report.verdicts[BEYOND].holds is beyond
        assert report.verdicts[BEYOND].tolerance == rate * math.sqrt(report.subject["parameters"])
        assert numbers["optimiser_steps"] == pytest.approx(numbers["distance"] / numbers["optimiser_step"])


def test_only_some_parameters_move() -> None:
    model = exact("llama")
    report = distance_to_collision(model, FIRST, SECOND, LAST, only=r"layers\.2\.")
    (part,), (all_of_them,) = (found.tables["distance"] for found in (report, measured("llama")))
    assert verdicts(report)[:3] == [True, True, True]
    assert part["first_order"] > all_of_them["first_order"]
    value, jacobian = whole_jacobian(model, LAST, "layers.2.")
    within = rounding(model, value, jacobian)
    assert part["first_order"] == pytest.approx(first_order(value, jacobian), rel=within)
    for row in report.tables["layers"][:-1]:
        assert row["before"] == row["after"]
    moved = build_collision(model, FIRST, SECOND, LAST, only=r"layers\.2\.")
    for key, parameter in moved.module.named_parameters():
        same = torch.equal(parameter, model.module.get_parameter(key))
        assert same is ("layers.2." not in key or key.endswith("input_layernorm.bias"))


def test_shared_parameters_move_once() -> None:
    module = build("llama", dtype=torch.float64)
    for block in module.model.layers:  # type: ignore[union-attr]
        block.mlp.up_proj.weight = block.mlp.gate_proj.weight
    model = preimage.load(module)
    value, jacobian = whole_jacobian(model, LAST)
    report = distance_to_collision(model, FIRST, SECOND, LAST)
    assert report.tables["distance"][0]["first_order"] == pytest.approx(
        first_order(value, jacobian), rel=rounding(model, value, jacobian)
    )
    assert verdicts(report)[REACHED] is True
    block = build_collision(model, FIRST, SECOND, LAST).anatomy.blocks[0]
    assert block.mlp.up_proj.weight is block.mlp.gate_proj.weight  # type: ignore[union-attr]
    tied = collided("gpt2").module
    assert tied.lm_head.weight is tied.transformer.wte.weight  # type: ignore[union-attr]
    assert tied.transformer.wte.weight.shape == (VOCABULARY, 32)  # type: ignore[union-attr]


def test_the_model_is_not_changed_and_nothing_is_left_on_the_copy() -> None:
    model = preimage.load(build("opt"))
    before = weight_hash(model.anatomy.backbone)
    moved = build_collision(model, FIRST, SECOND, 2)
    assert weight_hash(model.anatomy.backbone) == before
    assert (model.dtype, moved.dtype) == (torch.float32, torch.float64)
    for module in moved.module.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    assert not any(parameter.requires_grad for parameter in moved.module.parameters())
    tables = [
        [part for part in each.module.modules() if isinstance(part, nn.Embedding)] for each in (model, moved)
    ]
    for one, other in zip(*tables, strict=True):
        assert (one.weight.shape, one.padding_idx) == (other.weight.shape, other.padding_idx)
    assert gap(moved, 2) <= 1e-12


def test_wrong_input_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    model = exact("llama")
    refused(PromptError, lambda: distance_to_collision(model, FIRST, FIRST))
    refused(LayerError, lambda: distance_to_collision(model, FIRST, SECOND, 4))
    refused(OptionError, lambda: distance_to_collision(model, FIRST, SECOND, only="no such name"))
    refused(OptionError, lambda: distance_to_collision(model, FIRST, SECOND, only="("))
    refused(OptionError, lambda: distance_to_collision(model, FIRST, SECOND, learning_rate=0.0))
    monkeypatch.setattr(movement, "MEMORY", 1000)
    refused(OptionError, lambda: distance_to_collision(model, FIRST, SECOND))


@pytest.mark.real_model
def test_a_pair_of_the_default_model(smollm2: LanguageModel) -> None:
    pair = (" the river", " the sea")
    deep = distance_to_collision(smollm2, *pair, 6, only=r"layers\.(4|5)\.", bos=True, learning_rate=1e-4)
    whole = distance_to_collision(smollm2, *pair, 2, bos=True, learning_rate=1e-4)
    for report in (deep, whole):
        assert verdicts(report)[:3] == [True, True, True]
        (numbers,) = report.tables["distance"]
        assert numbers["residual_before"] > 0.1
        assert numbers["residual_after"] <= COLLISION
        assert numbers["relative"] < 0.05
        assert 0.2 < numbers["distance"] / numbers["first_order"] < 8
    assert len(deep.tables["layers"]) == 7
    assert all(row["before"] == row["after"] for row in deep.tables["layers"][:5])
    assert smollm2.dtype == torch.float32
