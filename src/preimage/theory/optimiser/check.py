"""``check_optimiser``: do training steps keep the parameters' distribution absolutely continuous?

Injectivity survives training where every update is a map with a non-singular Jacobian. On small models that
Jacobian is computed whole, by autograd through the update itself; its determinant is compared with the
formula, and the map from the first parameters to the last, which is what persistence is about, is followed
beside it: moments start at zero, so a non-singular step on the joint state does not settle it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Unpack

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from preimage.distances import norms, row_distances
from preimage.errors import OptionError
from preimage.models import LanguageModel, double_copy
from preimage.progress import Listener, Progress, reporting, silent
from preimage.states import encode_all
from preimage.theory.optimiser.lanczos import top_of_spectrum
from preimage.theory.optimiser.options import OptimiserChanges, OptimiserOptions
from preimage.theory.optimiser.training_loss import TrainingLoss, jacobian
from preimage.theory.optimiser.updates import moments, predicted_factors, torch_optimiser, update
from preimage.theory.result import TheoryReport, Verdict

IDENTITY = 1e-9  # relative, of log|det|
SAME_STEP = 1e-12  # relative, ours against torch.optim's
LARGEST_EXACT = 2000  # parameters; the dense Jacobian of AdamW has nine times their square
_STILL = 1e-12  # a slope below this share of the largest is rounding: the gradient does not vary
_EPS = torch.finfo(torch.float64).eps


@dataclass(frozen=True)
class _Step:
    """One row of the table ``steps``.

    ``smallest`` is the least singular value of the balanced Jacobian relative to its largest, and
    ``smallest_factor`` the least absolute value of the factors that the formula multiplies.
    """

    step: int
    loss: float
    sign: float
    log_det: float
    predicted_sign: float
    predicted_log_det: float
    smallest: float
    smallest_factor: float  # of gradient descent the least |1 - eta lambda|
    singular: bool
    predicted_singular: bool
    largest_eigenvalue: float | None  # of H, where the formula needs it
    from_torch: float  # relative distance of our step from torch.optim's
    kinks: int  # parameters at which the update has no derivative


def check_optimiser(
    model: LanguageModel,
    prompts: Sequence[str | Sequence[int]],
    *,
    options: OptimiserOptions | None = None,
    bos: bool | None = None,
    progress: Listener = silent,
    **changes: Unpack[OptimiserChanges],
) -> TheoryReport:
    """Follow an optimiser on the loss of some prompts and decide whether its steps are singular.

    ``prompts``: texts or token ids, two tokens or more each. ``options`` or single fields of it: see
    :class:`OptimiserOptions`. Runs on a float64 copy; the model is not changed. Cost of "exact": for each of
    the steps about p backward passes, and matrices of up to (3p)^2 numbers, for p parameters.

    >>> from preimage.models import new_model
    >>> model = new_model("llama", (2, 1, 1), vocabulary=4, max_length=4, device="cpu")
    >>> report = check_optimiser(model, [[0, 1, 2]], optimiser="heavy-ball", steps=1)
    >>> {verdict.id: verdict.holds for verdict in report.verdicts}["optimiser.every_step"]
    True
    """
    chosen = replace(options or OptimiserOptions(), **changes)
    loss = TrainingLoss(double_copy(model, head=True), encode_all(model, prompts, bos))
    subject = {
        "model": model.identity.to_dict(),
        "parameters": len(loss.start),
        "prompts": len(prompts),
        "options": chosen.to_dict(),
    }
    if chosen.method == "lanczos":
        verdicts, tables = _by_lanczos(loss, chosen)
        return TheoryReport("optimiser", subject, verdicts, tables)
    if len(loss.start) > LARGEST_EXACT:
        raise OptionError(
            f"{len(loss.start)} parameters are too many for a dense Jacobian, {LARGEST_EXACT} at most.",
            "Use method='lanczos', or a smaller model.",
        )
    with reporting(progress) as report:
        steps, whole = _follow(loss, chosen, report)
    tables = {"steps": [asdict(step) for step in steps], "map": [_summary(steps, whole)]}
    verdicts = _verdicts(steps, whole, len(loss.start) * (1 + moments(chosen)))
    return TheoryReport("optimiser", subject, verdicts, tables)


def _follow(
    loss: TrainingLoss, options: OptimiserOptions, progress: Progress
) -> tuple[list[_Step], Float[Tensor, "p p"]]:
    """Every step's row, and d theta_t / d theta_0 with moments that start at zero and do not vary."""
    count = len(loss.start)
    state = torch.nn.functional.pad(loss.start, (0, count * moments(options)))
    tangent = torch.eye(len(state), count, dtype=state.dtype, device=state.device)
    parameter = torch.nn.Parameter(loss.start.clone())
    reference = torch_optimiser(parameter, options)
    steps: list[_Step] = []
    for step in range(1, options.steps + 1):
        progress(step - 1, options.steps, "steps")

        def after(at: Tensor, number: int = step) -> Tensor:
            return update(at, loss.gradient, number, options)

        theta = state[:count]
        matrix = jacobian(after, state)
        following = after(state).detach()
        if not bool(torch.isfinite(matrix).all() and torch.isfinite(following).all()):
            rate = options.learning_rate
            raise OptionError(f"Step {step} is not finite with learning_rate {rate}.", "Give a smaller one.")
        parameter.grad = loss.gradient(theta)
        reference.step()
        steps.append(_measure(step, loss, options, theta, matrix, following, parameter))
        tangent = matrix @ tangent
        state = following
    progress(options.steps, options.steps, "steps")
    return steps, tangent[:count]


def _measure(
    step: int,
    loss: TrainingLoss,
    options: OptimiserOptions,
    theta: Float[Tensor, " p"],
    matrix: Float[Tensor, "n n"],
    following: Float[Tensor, " n"],
    reference: Float[Tensor, " p"],
) -> _Step:
    count = len(theta)
    descent = options.optimiser == "gradient-descent"
    eigenvalues = torch.linalg.eigvalsh(loss.hessian(theta)) if descent else theta.new_empty(0)
    factors = predicted_factors(options, count, eigenvalues)
    sign, log_det = torch.linalg.slogdet(matrix)
    smallest, bound = _smallest(_balanced(matrix)), len(matrix) * _EPS
    gap = row_distances(following[:count], reference.detach()) / norms(reference.detach())
    return _Step(
        step=step,
        loss=float(loss(theta)),
        sign=float(sign),
        log_det=float(log_det),
        predicted_sign=float(factors.sign().prod()),
        predicted_log_det=float(factors.abs().log().sum()),
        smallest=smallest,
        smallest_factor=float(factors.abs().min()),
        singular=smallest <= bound,
        predicted_singular=bool(factors.abs().min() <= bound * factors.abs().max().clamp_min(1.0)),
        largest_eigenvalue=float(eigenvalues.max()) if descent else None,
        from_torch=float(gap),
        kinks=_kinks(matrix, following, count) if options.optimiser == "adamw" else 0,
    )


def _balanced(matrix: Float[Tensor, "n n"]) -> Float[Tensor, "n n"]:
    """The same map in other units for each coordinate, by powers of two: v is 1e-16 where theta is 1."""
    from scipy.linalg import matrix_balance  # type: ignore[import-untyped]  # scipy carries no types

    with np.errstate(invalid="ignore"):  # scales beyond the integers, in a part of its answer we do not use
        balanced, _ = matrix_balance(matrix.cpu().numpy(), permute=False)
    return torch.from_numpy(np.ascontiguousarray(balanced))


def _smallest(matrix: Float[Tensor, "n n"]) -> float:
    """The least singular value, relative to the largest."""
    values = torch.linalg.svdvals(matrix)
    return float(values[-1] / values[0])


def _kinks(matrix: Float[Tensor, "n n"], following: Float[Tensor, " n"], count: int) -> int:
    """Parameters whose v is 0 though their gradient varies: sqrt(v) has no derivative there."""
    slopes = matrix[count : 2 * count, :count].abs().amax(dim=1)  # of m', in proportion to H
    return int(((following[2 * count :] == 0) & (slopes > _STILL * slopes.max())).sum())


def _verdicts(steps: Sequence[_Step], whole: Float[Tensor, "p p"], size: int) -> tuple[Verdict, ...]:
    """``size`` is that of the joint state. Where the update has no derivative, nothing is decided."""
    kinked = any(step.kinks for step in steps)
    error, gap = max(map(_disagreement, steps)), max(step.from_torch for step in steps)
    smallest, smallest_of_map = min(step.smallest for step in steps), _smallest(whole)
    zero = "A value below the bound cannot be told from 0 in float64"
    formula = "Every step's Jacobian has the determinant that the formula of this optimiser gives."
    others = "Other parameters, prompts and steps than those followed; the formula is proved apart."
    step_by_step = "Every step's Jacobian on the joint state is non-singular."
    points = (
        f"{zero}. Non-singular at these points is not non-singular almost everywhere, though for analytic"
        " maps one point is enough."
    )
    ends = "The map from the first parameters to the last has a non-singular Jacobian."
    long = f"{zero}, which long runs reach."
    same = "The steps followed are those of torch.optim."
    variants = "Fused and foreach variants, and other precisions than float64."
    regular = not any(step.singular for step in steps)
    bound, bound_of_map = size * _EPS, len(whole) * _EPS
    answers = (error <= IDENTITY, regular, smallest_of_map > bound_of_map)
    exact, each, all_steps = (None if kinked else answer for answer in answers)
    return (
        Verdict("optimiser.determinant", formula, exact, error, IDENTITY, others),
        Verdict("optimiser.every_step", step_by_step, each, smallest, bound, points),
        Verdict("optimiser.whole_map", ends, all_steps, smallest_of_map, bound_of_map, long),
        Verdict("optimiser.torch_steps", same, gap <= SAME_STEP, gap, SAME_STEP, variants),
    )


def _disagreement(step: _Step) -> float:
    """Relative error of log|det|; of a singular step, whether both say so."""
    if step.singular or step.predicted_singular:
        return 0.0 if step.singular and step.predicted_singular else math.inf
    if step.sign != step.predicted_sign:
        return math.inf
    return abs(step.log_det - step.predicted_log_det) / max(1.0, abs(step.predicted_log_det))


def _summary(steps: Sequence[_Step], whole: Float[Tensor, "p p"]) -> dict[str, Any]:
    sign, log_det = torch.linalg.slogdet(whole)
    return {
        "steps": len(steps),
        "log_det_of_all_steps": sum(step.log_det for step in steps),
        "theta_sign": float(sign),
        "theta_log_det": float(log_det),
        "theta_smallest": _smallest(whole),
    }


def _by_lanczos(
    loss: TrainingLoss, options: OptimiserOptions
) -> tuple[tuple[Verdict, ...], dict[str, list[dict[str, Any]]]]:
    """The first step of gradient descent, from the Hessian's eigenvalues down to 1/eta."""
    if options.optimiser != "gradient-descent":
        raise OptionError(
            f"method='lanczos' looks at gradient descent only, not at {options.optimiser}.",
            "That one's determinant on the joint state does not depend on the Hessian; use method='exact'.",
        )
    pole = 1 / options.learning_rate - options.weight_decay  # the eigenvalue that makes a step singular
    top = top_of_spectrum(loss, pole)
    pairs = zip(top.eigenvalues, top.errors, strict=True)
    rows = [{"eigenvalue": value, "error": error} for value, error in pairs]
    nearest, error = top.nearest(pole) if rows else (math.nan, math.inf)
    factor = options.learning_rate * abs(pole - nearest)
    scale = max((abs(value) for value in top.eigenvalues), default=0.0)
    bound = options.learning_rate * (error + len(loss.start) * _EPS * (scale + abs(pole)))
    statement = "The first step's Jacobian, I - eta H, is non-singular: no eigenvalue of H is 1/eta."
    not_shown = (
        "Lanczos shows eigenvalues that are there, not that there are no others: one whose eigenvector is"
        " orthogonal to the random start would be missed. Later steps."
    )
    holds = False if factor <= bound else True if top.covers else None
    value = factor if rows else None
    verdict = Verdict("optimiser.first_step", statement, holds, value, bound, not_shown)
    return (verdict,), {"eigenvalues": rows}
