"""Every answer about a tiny model, held against every prompt there is.

    python tests/test_enumeration.py 20000      # as many inversions, drawn anew; one line of json at the end

A vocabulary of a few tokens with near duplicates among them, prompts of a few positions: all prompts are run,
and which of them fit is known without any search. No prompt may be ``recovered`` that did not make the states
or while another fits, and what is said to be complete must be.
"""

import dataclasses
import itertools
import json
import random
import sys
import time
from collections import Counter

import pytest
import torch

import preimage
from preimage.inversion.result import Inversion
from preimage.models import LanguageModel
from preimage.states import States, noise_of
from support.tiny import NAMES, build, opt_with_projection

VOCABULARY_LEFT = 6  # tokens that are tried; the others are moved out of the way
LENGTH = 3
TOLERANCES = (None, None, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 0.3)
STORED = (torch.float32, torch.bfloat16, torch.float16)
METHODS = ("fast", "fast", "sipit", "brute-force")
LAYERS = (1, 3, "final")


@dataclasses.dataclass(frozen=True)
class Case:
    """One inversion."""

    name: str
    seed: int
    layer: object
    stored: torch.dtype
    tolerance: float | None
    method: str
    change: str  # what was done to the states
    positions: str
    max_tests: int | None
    prove: bool
    ids: tuple[int, ...]


def draw(number: int) -> Case:
    """The case of a number, the same everywhere."""
    choose = random.Random(number)
    tolerance = choose.choice(TOLERANCES)
    stored = choose.choice(STORED)
    if tolerance is not None and stored is not torch.float32:
        tolerance = max(tolerance, 1e-2)  # below the rounding of the type it is refused
    name = choose.choice([*NAMES, "opt projected"])
    return Case(
        name=name,
        seed=choose.randrange(3),
        # behind the last norm OPT projects back to the width of its table, which is no state's
        layer=choose.choice(LAYERS[:-1] if name == "opt projected" else LAYERS),
        stored=stored,
        tolerance=tolerance,
        method=choose.choice(METHODS),
        change=choose.choice([""] * 6 + ["noise", "mean", "midpoint", "layer"]),
        positions=choose.choice(["all", "all", "all", "last"]),
        max_tests=choose.choice([None] * 8 + [3, 10]),
        prove=choose.random() < 0.2,
        ids=tuple(choose.randrange(VOCABULARY_LEFT) for _ in range(choose.randint(1, LENGTH))),
    )


_models: dict[tuple[str, int], LanguageModel] = {}


def model_of(name: str, seed: int) -> LanguageModel:
    """A tiny model of a few tokens, some of them near duplicates of others."""
    if (name, seed) not in _models:
        if name == "opt projected":
            module = opt_with_projection(vocab_size=VOCABULARY_LEFT, seed=seed)
        else:
            module = build(name, seed, vocab_size=VOCABULARY_LEFT)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            table = module.get_input_embeddings().weight
            assert len(table) == VOCABULARY_LEFT
            table.mul_(0.3 / table.std())
            scale = float(table[0].norm()) / table.shape[1] ** 0.5
            for copy, original, distance in ((3, 1, 10 ** (-2 - 2 * seed)), (5, 2, 0.03)):
                noise = torch.randn(table.shape[1], generator=generator)
                table[copy] = table[original] + distance * scale * noise
        _models[name, seed] = preimage.load(module)
    return _models[name, seed]


def every_prompt(length: int) -> list[tuple[int, ...]]:
    return list(itertools.product(range(VOCABULARY_LEFT), repeat=length))


def observe(case: Case, model: LanguageModel) -> States:
    """The states that are inverted: those of the prompt, or changed ones that no prompt made."""
    own = model.states(torch.tensor([case.ids]), (case.layer,))[case.layer][0].clone()
    if case.change == "noise":
        own += 0.01 * own.norm(dim=-1, keepdim=True) * torch.randn_like(own) / own.shape[1] ** 0.5
    if case.change in ("mean", "midpoint"):
        others = torch.tensor([(*case.ids[:-1], token) for token in range(VOCABULARY_LEFT)])
        states = model.states(others, (case.layer,))[case.layer][:, -1]
        own[-1] = states.mean(0) if case.change == "mean" else (states[0] + states[4]) / 2
    if case.change == "layer":
        own = model.states(torch.tensor([case.ids]), (2,))[2][0].clone()
    if case.positions == "last":
        own = own[-1:]
    states = States.from_tensor(own.to(case.stored), case.layer)
    if case.positions == "last":
        layout = dataclasses.replace(states.layout, positions="last")
        states = States(layout, states.store, token_ids=None, model=None, noise_floor={}, dtype=states.dtype)
    return states


def distances(case: Case, model: LanguageModel, states: States, prompts: list[tuple[int, ...]]) -> tuple:
    """How far every prompt is at every position, and what is allowed: by the definition, without a search."""
    observed = states.at(0, case.layer)
    made = model.states(torch.tensor(prompts), (case.layer,))[case.layer]
    made = made[:, -1:] if case.positions == "last" else made
    if case.tolerance is not None:
        away = (made.double() - observed.double()).norm(dim=-1)
        return away, case.tolerance * observed.double().norm(dim=-1)
    from preimage.inversion.engine.verifier import Verifier

    verifier = Verifier(model, case.layer, noise=noise_of(model, (case.layer,))[case.layer])
    target = verifier.target(observed)
    return target.away(made), target.radius


def check(case: Case) -> tuple[str, list[str]]:
    """The status, and what is wrong with the answer."""
    model = model_of(case.name, case.seed)
    states = observe(case, model)
    lengths = [len(case.ids)] if case.positions == "all" else [1, 2, 3]
    surely: set[tuple[int, ...]] = set()
    maybe: set[tuple[int, ...]] = set()
    noise = noise_of(model, (case.layer,))[case.layer].relative
    for length in lengths:
        prompts = every_prompt(length)
        away, allowed = distances(case, model, states, prompts)
        band = 4 * noise * states.at(0, case.layer).double().norm(dim=-1)
        surely |= {p for p, ok in zip(prompts, (away <= allowed - band).all(dim=-1), strict=True) if ok}
        maybe |= {p for p, ok in zip(prompts, (away <= allowed + band).all(dim=-1), strict=True) if ok}
    prove = case.prove and case.positions == "all"
    try:
        (found,) = preimage.invert(
            model, states, case.layer, method=case.method, tolerance=case.tolerance,
            max_tests=case.max_tests, prove=prove,
        )  # fmt: skip
    except preimage.errors.OptionError:
        return "refused", []  # a tolerance below the noise
    return found.status, list(wrongs(case, found, surely, maybe))


def wrongs(case: Case, found: Inversion, surely: set, maybe: set) -> list[str]:
    wrong = []
    ids = tuple(found.token_ids)
    if found.status == "recovered":
        if surely - {ids}:
            wrong.append(f"recovered {ids} while {surely - {ids}} fits")
        if ids not in maybe:
            wrong.append(f"recovered {ids}, which does not fit")
        if case.change == "" and ids != case.ids and case.positions == "all":
            wrong.append(f"recovered {ids}, made by {case.ids}")
        if found.unique not in ("proved", "tested") or not found.uniqueness or not found.complete:
            wrong.append("recovered without saying how it is known to be unique")
    if found.status == "ambiguous":
        listed = set(found.alternatives)
        if any(prompt not in maybe for prompt in listed if len(prompt) <= LENGTH):
            wrong.append("something is listed that does not fit")
        if found.complete and (surely - listed or found.fitting != len(listed)):
            wrong.append(f"complete, but {surely - listed} is missing")
        if not found.complete and not found.reason:
            wrong.append("not complete, and not said why")
        if len(listed) > found.fitting:
            wrong.append("more are listed than counted")
    decidable = {prompt for prompt in surely if case.positions == "all" or len(prompt) == 1}
    if found.status == "not_recovered" and decidable and "Stopped" not in found.reason:
        wrong.append(f"{decidable} fits, and it says {found.reason}")
    return wrong


@pytest.mark.parametrize("start", range(0, 600, 50))
def test_no_answer_about_a_tiny_model_is_wrong(start: int) -> None:
    for number in range(start, start + 50):
        case = draw(number)
        status, wrong = check(case)
        assert not wrong, (number, case, status, wrong)


@pytest.mark.parametrize("number", [73_000_185])
def test_what_was_said_wrongly_once(number: int) -> None:
    _, wrong = check(draw(number))
    assert not wrong


def main(count: int, first: int = 1_000_000) -> None:
    """Many more, from numbers the tests do not draw."""
    statuses: Counter[str] = Counter()
    failures, began = [], time.perf_counter()
    for number in range(first, first + count):
        case = draw(number)
        status, wrong = check(case)
        statuses[status] += 1
        if wrong:
            failures.append({"number": number, "case": str(case), "wrong": wrong})
            sys.stderr.write(f"{failures[-1]}\n")
    document = {"inversions": count, "first": first, "statuses": dict(sorted(statuses.items()))}
    document |= {"wrong": failures, "seconds": round(time.perf_counter() - began)}
    sys.stdout.write(json.dumps(document) + "\n")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]))
