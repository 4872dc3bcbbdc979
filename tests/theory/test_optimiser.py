"""Optimiser steps as maps: every verdict of ``check_optimiser`` in both directions, on real small models."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers as t
from torch import Tensor

import preimage
from preimage.errors import ModelError, OptionError, PromptError
from preimage.models import LanguageModel
from preimage.models.float64 import double_copy, in_double
from preimage.models.identity import weight_hash
from preimage.storage import read_json
from preimage.theory.optimiser import lanczos, updates
from preimage.theory.optimiser.check import IDENTITY, LARGEST_EXACT, check_optimiser
from preimage.theory.optimiser.lanczos import top_of_spectrum
from preimage.theory.optimiser.options import KINDS, OptimiserOptions
from preimage.theory.optimiser.training_loss import TrainingLoss, jacobian
from preimage.theory.optimiser.updates import Gradient
from preimage.theory.result import TheoryReport
from support.refusing import refused
from support.tiny import build, tiny

PROMPTS = [[0, 1, 2, 3, 4, 5], [6, 5, 3, 2, 1, 0], [3, 3, 1, 6]]
FORMULA, EVERY_STEP, WHOLE_MAP, TORCH = range(4)
EPS = torch.finfo(torch.float64).eps
CASES = {
    "gradient-descent": {"learning_rate": 0.1},
    "heavy-ball": {"learning_rate": 0.1, "momentum": 0.9},
    "adamw": {"learning_rate": 1e-3, "weight_decay": 0.1},
}


def gpt2(dtype: torch.dtype = torch.float64, **changes: int) -> LanguageModel:
    """232 parameters, the head tied to the embedding."""
    shape = {"vocab_size": 7, "n_embd": 4, "n_layer": 1, "n_head": 2, "n_positions": 6, "n_inner": 8}
    torch.manual_seed(0)
    config = t.GPT2Config(**shape | changes, bos_token_id=0, eos_token_id=0)
    return preimage.load(t.GPT2LMHeadModel(config).to(dtype))


def llama() -> LanguageModel:
    """188 parameters; RMSNorm, gated MLP, rotary positions, shared keys and values, a head of its own."""
    torch.manual_seed(0)
    config = t.LlamaConfig(
        vocab_size=7,
        hidden_size=4,
        intermediate_size=6,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=8,
    )
    return preimage.load(t.LlamaForCausalLM(config).double())


def training_loss(model: LanguageModel) -> TrainingLoss:
    return TrainingLoss(double_copy(model, head=True), PROMPTS)


def spectrum(model: LanguageModel) -> Tensor:
    loss = training_loss(model)
    return torch.linalg.eigvalsh(loss.hessian(loss.start))


def verdicts(report: TheoryReport) -> list[bool | None]:
    return [verdict.holds for verdict in report.verdicts]


@pytest.mark.parametrize("make", [gpt2, llama])
@pytest.mark.parametrize("optimiser", KINDS)
def test_determinants_are_those_of_the_formulas(make: Callable[[], LanguageModel], optimiser: str) -> None:
    report = check_optimiser(make(), PROMPTS, optimiser=optimiser, **CASES[optimiser])
    assert report.holds
    assert report.subject["parameters"] == (232 if make is gpt2 else 188)
    assert report.verdicts[EVERY_STEP].value > 1e-4
    assert report.verdicts[TORCH].value < 16 * EPS  # a step is a dozen operations on numbers below 1
    (whole,), steps = report.tables["map"], report.tables["steps"]
    assert len(steps) == 3
    assert steps[-1]["loss"] < steps[0]["loss"]  # a real run
    assert whole["log_det_of_all_steps"] == pytest.approx(sum(step["log_det"] for step in steps), rel=1e-12)
    if optimiser == "gradient-descent":  # without moments the whole map is the product of its steps
        assert whole["theta_log_det"] == pytest.approx(whole["log_det_of_all_steps"], rel=IDENTITY)


@pytest.mark.parametrize("optimiser", KINDS)
def test_first_to_last_parameters_by_autograd_through_the_whole_run(optimiser: str) -> None:
    """The run of torch.optim itself, differentiated."""
    model, options = llama(), OptimiserOptions(optimiser=optimiser, steps=2, **CASES[optimiser])
    loss = training_loss(model)
    start = loss.start.detach().requires_grad_()
    point = start.clone()
    lr, decay = options.learning_rate, options.weight_decay
    if optimiser == "adamw":
        stepper = torch.optim.AdamW([point], lr, weight_decay=decay, foreach=False, differentiable=True)
        named = {name: torch.zeros_like(start) for name in ("exp_avg", "exp_avg_sq")}
        stepper.state[point] |= {"step": torch.zeros((), dtype=torch.float64), **named}  # torch: in float32
    else:
        stepper = torch.optim.SGD(
            [point],
            lr,
            momentum=0.9 if optimiser == "heavy-ball" else 0.0,
            weight_decay=decay,
            foreach=False,
            differentiable=True,
        )
    if optimiser == "heavy-ball":  # the buffer torch would begin with is cut off from the graph
        stepper.state[point]["momentum_buffer"] = torch.zeros_like(start)
    for _ in range(2):
        here = point.clone()  # a step changes the point in place
        (point.grad,) = torch.autograd.grad(loss(here), here, create_graph=True)
        stepper.step()
    rows = [torch.autograd.grad(value, start, retain_graph=True)[0] for value in point]
    (found,) = check_optimiser(model, PROMPTS, options=options).tables["map"]
    sign, log_det = torch.linalg.slogdet(torch.stack(rows))
    assert found["theta_sign"] == float(sign)
    assert found["theta_log_det"] == pytest.approx(float(log_det), rel=IDENTITY)


@pytest.mark.parametrize("make", [gpt2, llama])
@pytest.mark.parametrize("index", [-1, -20])
def test_descent_is_singular_where_the_learning_rate_is_one_over_an_eigenvalue(
    make: Callable[[], LanguageModel], index: int
) -> None:
    model = make()
    values = spectrum(model)
    rate = 1 / float(values[index])
    report = check_optimiser(model, PROMPTS, learning_rate=rate, steps=1)
    assert verdicts(report) == [True, False, False, True]  # and the formula says so too
    rounding = len(values) * EPS * float(values[-1])  # of an eigenvalue, in each of two computations
    assert report.tables["steps"][0]["smallest_factor"] < 2 * rate * rounding
    beside = check_optimiser(model, PROMPTS, learning_rate=rate * (1 + 1e-6), steps=1)
    assert verdicts(beside) == [True, True, True, True]
    assert beside.tables["steps"][0]["smallest_factor"] == pytest.approx(1e-6, rel=1e-3)


def test_weight_decay_moves_the_eigenvalue_that_makes_descent_singular() -> None:
    model = llama()
    eigenvalue = float(spectrum(model)[-1])
    options = {"learning_rate": 1 / (eigenvalue + 0.5), "weight_decay": 0.5, "steps": 1}
    assert verdicts(check_optimiser(model, PROMPTS, **options)) == [True, False, False, True]
    (found,) = check_optimiser(model, PROMPTS, **options, method="lanczos").verdicts
    assert found.holds is False


def test_heavy_ball_without_momentum_is_singular_on_the_joint_state_only() -> None:
    report = check_optimiser(gpt2(), PROMPTS, optimiser="heavy-ball", momentum=0.0, learning_rate=0.1)
    assert verdicts(report) == [True, False, True, True]
    assert report.verdicts[EVERY_STEP].value == 0
    descent = check_optimiser(gpt2(), PROMPTS, learning_rate=0.1).tables["map"][0]
    assert report.tables["map"][0]["theta_log_det"] == pytest.approx(descent["theta_log_det"], rel=IDENTITY)


@pytest.mark.parametrize("make", [gpt2, llama])
def test_adamw_is_singular_where_decay_removes_the_parameters(make: Callable[[], LanguageModel]) -> None:
    report = check_optimiser(make(), PROMPTS, optimiser="adamw", learning_rate=1e-3, weight_decay=1000.0)
    assert verdicts(report) == [True, False, False, True]
    past = check_optimiser(make(), PROMPTS, optimiser="adamw", learning_rate=1.0, weight_decay=3.0)
    assert verdicts(past)[:2] == [True, True]
    assert past.tables["steps"][0]["predicted_log_det"] > 0  # |1 - eta w| = 2


def test_adamw_without_beta_is_singular() -> None:
    report = check_optimiser(llama(), PROMPTS, optimiser="adamw", betas=(0.0, 0.999), steps=1)
    assert verdicts(report)[:2] == [True, False]


def nesterov(state: Tensor, gradient: Gradient, step: int, options: OptimiserOptions) -> Tensor:
    theta, velocity = state.chunk(2)
    slope = gradient(theta)
    velocity = options.momentum * velocity + slope
    return torch.cat([theta - options.learning_rate * (slope + options.momentum * velocity), velocity])


def coupled_adam(state: Tensor, gradient: Gradient, step: int, options: OptimiserOptions) -> Tensor:
    """Adam with decay in the gradient, which the determinant does not see."""
    plain = OptimiserOptions("adamw", learning_rate=options.learning_rate)
    return ADAMW(state, lambda theta: gradient(theta) + options.weight_decay * theta, step, plain)


def other_rate(state: Tensor, gradient: Gradient, step: int, options: OptimiserOptions) -> Tensor:
    return state - 1.001 * options.learning_rate * gradient(state)


ADAMW = updates._UPDATES["adamw"]


@pytest.mark.parametrize(
    ("optimiser", "other"),
    [("gradient-descent", other_rate), ("heavy-ball", nesterov), ("adamw", coupled_adam)],
)
def test_another_update_is_not_taken_for_this_one(
    optimiser: str, other: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(updates._UPDATES, optimiser, other)
    report = check_optimiser(llama(), PROMPTS, optimiser=optimiser, **CASES[optimiser])
    assert verdicts(report) == [False, True, True, False]
    assert report.verdicts[FORMULA].value > 1e-6
    assert report.verdicts[TORCH].value > 1e-9


def test_where_adamw_has_no_derivative_nothing_is_decided() -> None:
    model = llama()
    attention = model.anatomy.blocks[0].self_attn
    with torch.no_grad():  # each of the two has gradient 0, and the other's value decides its slope
        attention.v_proj.weight.zero_()
        attention.o_proj.weight.zero_()
    report = check_optimiser(model, PROMPTS, optimiser="adamw", steps=1)
    assert verdicts(report) == [None, None, None, True]
    assert report.tables["steps"][0]["kinks"] == 8 + 16
    assert check_optimiser(model, PROMPTS, learning_rate=0.1, steps=1).holds


def test_parameters_that_are_never_used_rest() -> None:
    report = check_optimiser(gpt2(n_positions=9), PROMPTS, optimiser="adamw", **CASES["adamw"])
    assert report.subject["parameters"] == 232 + 3 * 4
    assert report.holds


@pytest.mark.parametrize("make", [gpt2, llama])
@pytest.mark.parametrize("rate", [0.01, 0.1])
def test_lanczos_agrees_with_the_dense_jacobian(make: Callable[[], LanguageModel], rate: float) -> None:
    model = make()
    exact = check_optimiser(model, PROMPTS, learning_rate=rate, steps=1)
    fast = check_optimiser(model, PROMPTS, learning_rate=rate, method="lanczos")
    (step,), (verdict,) = exact.tables["steps"], fast.verdicts
    assert verdict.holds is True
    assert exact.verdicts[EVERY_STEP].holds is True
    top = max(fast.tables["eigenvalues"], key=lambda row: row["eigenvalue"])
    largest, count = top["eigenvalue"], exact.subject["parameters"]
    away = max(row["error"] for row in fast.tables["eigenvalues"]) + 2 * count * EPS * largest
    assert largest == pytest.approx(step["largest_eigenvalue"], abs=away)
    if rate == 0.01:  # 1/eta above the whole spectrum: the bound, while 1 - eta lambda can be less elsewhere
        assert largest < 1 / rate
        assert verdict.value == pytest.approx(1 - rate * largest, abs=8 * EPS)
    assert verdict.value == pytest.approx(step["smallest_factor"], abs=rate * away)


def test_lanczos_sees_a_singular_step_and_says_when_it_cannot_see(monkeypatch: pytest.MonkeyPatch) -> None:
    model = gpt2()
    eigenvalues = spectrum(model)
    rate = 1 / float(eigenvalues[-2])
    (verdict,) = check_optimiser(model, PROMPTS, learning_rate=rate, method="lanczos").verdicts
    assert verdict.holds is False
    monkeypatch.setattr(lanczos, "_MOST", 4)
    report = check_optimiser(model, PROMPTS, learning_rate=1 / float(eigenvalues[-9]), method="lanczos")
    assert verdicts(report) == [None]  # the fifth largest eigenvalue would have to be known
    assert len(report.tables["eigenvalues"]) == 4


def test_lanczos_errors_bound_the_eigenvalues() -> None:
    model = gpt2()
    top, exact = top_of_spectrum(training_loss(model), 12.0), spectrum(model)
    assert top.covers
    for value, error in zip(top.eigenvalues, top.errors, strict=True):
        assert float((exact - value).abs().min()) <= error + len(exact) * EPS * float(exact[-1])
    assert top.nearest(16.0)[0] == pytest.approx(float(exact[(exact - 16).abs().argmin()]))


def test_lanczos_on_a_model_too_large_for_a_dense_jacobian() -> None:
    model = tiny("llama")
    loss = TrainingLoss(double_copy(model, head=True), [[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
    assert len(loss.start) > LARGEST_EXACT
    report = check_optimiser(model, [[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]], learning_rate=1e-4, method="lanczos")
    assert verdicts(report) == [True]
    rows = report.tables["eigenvalues"]
    assert all(row["error"] < 1e-6 * row["eigenvalue"] for row in rows)
    at, step = loss.start, 1e-4 * torch.nn.functional.normalize(loss.gradient(loss.start), dim=0)
    curve = (loss.gradient(at + step) - loss.gradient(at - step)) @ step / (2 * step @ step)
    assert float(curve) < rows[-1]["eigenvalue"]  # no direction is more curved than the first eigenvector


def test_gradient_and_hessian_by_finite_differences() -> None:
    loss = training_loss(gpt2())
    direction = torch.randn(len(loss.start), dtype=torch.float64)
    step = 1e-6 * direction
    slope = (loss(loss.start + step) - loss(loss.start - step)) / 2e-6
    assert float(slope) == pytest.approx(float(loss.gradient(loss.start) @ direction), rel=1e-6)
    curve = (loss.gradient(loss.start + step) - loss.gradient(loss.start - step)) / 2e-6
    torch.testing.assert_close(curve, loss.hessian(loss.start) @ direction, rtol=1e-5, atol=1e-4)
    raw = jacobian(loss.gradient, loss.start)
    assert float((raw - raw.mT).abs().max()) < 1e-12


def test_loss_is_that_of_transformers() -> None:
    model = llama()
    loss = training_loss(model)
    with torch.no_grad():
        plain = [
            model.module(input_ids=torch.tensor([ids]), labels=torch.tensor([ids])).loss for ids in PROMPTS
        ]
    weights = [len(ids) - 1 for ids in PROMPTS]
    mean = sum(w * float(value) for w, value in zip(weights, plain, strict=True)) / sum(weights)
    assert float(loss(loss.start)) == pytest.approx(mean, rel=1e-6)  # transformers' own is float32


def test_in_double_lifts_the_float32_inside_a_float64_model() -> None:
    plain, ids = preimage.load(build("llama", dtype=torch.float64)), torch.tensor([[3, 1, 4, 1, 5]])
    states = plain.states(ids, (3,))[3]
    with in_double():
        exact = plain.states(ids, (3,))[3]
    gap = float((states - exact).abs().max() / exact.abs().max())
    assert 1e-10 < gap < 1e-6
    flat = preimage.load(build("gpt2", dtype=torch.float64))  # a class without such casts stays what it was
    with in_double():
        exact = flat.states(ids, (3,))[3]
    torch.testing.assert_close(exact, flat.states(ids, (3,))[3], rtol=0, atol=1e-12)  # far below float32's


def test_the_model_is_not_changed_and_may_be_float32() -> None:
    model = gpt2(torch.float32)
    before, mode = weight_hash(model.anatomy.backbone), [p.requires_grad for p in model.module.parameters()]
    report = check_optimiser(model, PROMPTS, learning_rate=0.1)
    check_optimiser(model, PROMPTS, learning_rate=0.1, method="lanczos")
    assert report.holds
    assert weight_hash(model.anatomy.backbone) == before
    assert [p.requires_grad for p in model.module.parameters()] == mode
    assert model.dtype == torch.float32


def test_progress_and_file(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    report = check_optimiser(
        llama(), PROMPTS, steps=2, progress=lambda done, total, _: seen.append((done, total))
    )
    assert seen == [(0, 2), (1, 2), (2, 2)]
    saved = read_json(report.save(tmp_path / "optimiser.json"))
    assert saved["check"] == "optimiser"
    assert saved["holds"] is True
    assert len(saved["tables"]["steps"]) == 2


def test_wrong_input_is_refused_in_words() -> None:
    model = llama()
    refused(OptionError, lambda: check_optimiser(tiny("llama"), [[1, 2, 3]]))
    assert sum(p.numel() for p in tiny("llama").module.parameters()) > LARGEST_EXACT
    refused(OptionError, lambda: check_optimiser(model, PROMPTS, optimiser="adamw", method="lanczos"))
    refused(OptionError, lambda: check_optimiser(model, PROMPTS, learning_rate=1e300))
    refused(PromptError, lambda: check_optimiser(model, [[1, 2], [3]]))
    refused(ModelError, lambda: check_optimiser(preimage.load(model.anatomy.backbone), PROMPTS))
    for wrong in (
        {"optimiser": "adagrad"},
        {"method": "dense"},
        {"steps": 0},
        {"learning_rate": 0.0},
        {"learning_rate": math.inf},
        {"eps": -1.0},
        {"weight_decay": -0.1},
        {"momentum": 1.0},
        {"betas": (0.9, 1.0)},
    ):
        refused(OptionError, lambda wrong=wrong: check_optimiser(model, PROMPTS, **wrong))
