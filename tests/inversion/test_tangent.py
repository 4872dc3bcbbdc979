"""Tokens found by the model's own derivative, lookalikes that cost no scan, and prompts of other kernels."""

import pytest
import torch
from torch import Tensor

import preimage
from preimage.devices import fetch
from preimage.inversion.engine import shared_pass, verifier
from preimage.inversion.engine.budget import Budget, BudgetSpentError
from preimage.inversion.engine.fast import FastInverter
from preimage.inversion.engine.lookalikes import lookalikes_of
from preimage.inversion.engine.tangent import Descent, merged, tangent_order
from preimage.inversion.engine.verifier import Target, Verifier
from preimage.inversion.proposers.scores import Keys, Part, Scores
from preimage.models import LanguageModel
from preimage.states import noise_of
from support.tiny import build, random_ids

VOCABULARY, LENGTH = 6000, 12


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    torch.manual_seed(3)
    return preimage.load(build("llama", vocab_size=VOCABULARY, hidden_size=64))


def verified(model: LanguageModel, ids: list[int], layer: int = 2) -> tuple[Verifier, Tensor, Target]:
    states = model.states(torch.tensor([ids]), (layer,))[layer][0]
    checker = Verifier(model, layer, noise=noise_of(model, (layer,))[layer])
    return checker, states, checker.target(states)


class Ignorant:
    """Ranks tokens by their number, whatever was seen."""

    name = "ignorant"

    def score(self, observed: Tensor, valid: Tensor) -> Scores:
        rows = valid.shape[0] * valid.shape[1]
        keys = -torch.arange(float(VOCABULARY))[:, None]
        return Scores((Part(torch.ones(rows, 1), (Keys(keys, torch.zeros(VOCABULARY)),)),), valid.shape[1])


@pytest.mark.parametrize("together", [False, True])
def test_an_ignorant_proposer_is_led_to_the_prompt(model: LanguageModel, together: bool) -> None:
    """Without the derivative each position would cost thousands of tests."""
    prompts = [[7, *random_ids(LENGTH - 1, seed, VOCABULARY)] for seed in (1, 2)]
    states = [verified(model, ids)[1] for ids in prompts]
    checker = verified(model, prompts[0])[0]
    budgets = [Budget(LENGTH * VOCABULARY, None) for _ in prompts]
    found = FastInverter(model, checker, Ignorant(), together=together).run(states, budgets)
    assert [[fit.position.token_id for fit in one.partial] for one in found] == prompts
    assert all(one.hypotheses for one in found)
    assert max(budget.tests for budget in budgets) < LENGTH * VOCABULARY // 8


def test_the_tangent_ranks_the_right_token_before_nearly_all_others(model: LanguageModel) -> None:
    ids = random_ids(LENGTH, 5, VOCABULARY)
    checker, _, target = verified(model, ids)
    prefix = model.prefix(2)
    ranks = []
    for at in range(1, LENGTH):
        prefix.crop(at - 1)
        prefix.extend(torch.tensor(ids[at - 1 : at]))
        order = tangent_order(model, prefix, checker, target[at], (ids[at] + 17) % VOCABULARY)
        assert order is not None
        assert order.sort().values.tolist() == list(range(VOCABULARY))
        ranks.append(int((order == ids[at]).nonzero()))
    assert sorted(ranks)[len(ranks) // 2] < VOCABULARY // 50


def test_a_proposal_is_read_on_and_what_it_may_cost_is_kept(model: LanguageModel) -> None:
    ids = random_ids(LENGTH, 6, VOCABULARY)
    checker, states, target = verified(model, ids)
    descent = Descent(model, checker, states, target)
    wrong = torch.tensor([*ids[:3], *((token + 11) % VOCABULARY for token in ids[3:])])
    assert descent.read_on(wrong, 3, Budget(10, None)).tolist() == ids
    assert descent.read_on(torch.tensor(ids), 1, Budget(10, None)).tolist() == ids
    with pytest.raises(BudgetSpentError):
        descent.read_on(wrong, 3, Budget(10, 0.0))


def test_states_of_nothing_lead_nowhere(model: LanguageModel) -> None:
    ids = random_ids(LENGTH, 8, VOCABULARY)
    checker, states, _ = verified(model, ids)
    noise = torch.randn(states.shape, generator=torch.Generator().manual_seed(0)) * states.std()
    descent = Descent(model, checker, noise, checker.target(noise))
    assert descent.read_on(torch.tensor(ids), 1, Budget(10, None)).tolist() == ids


def test_a_model_without_gradients_is_asked_otherwise(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = random_ids(LENGTH, 9, VOCABULARY)
    checker, states, target = verified(model, ids)

    def refuse(*_: object) -> None:
        raise NotImplementedError("no derivative")

    prefix = model.prefix(2)
    monkeypatch.setattr(type(prefix), "try_embeddings", refuse)
    assert tangent_order(model, prefix, checker, target[0], 5) is None
    descent = Descent(model, checker, states, target)
    assert descent.order(ids[:3], [4]) is None
    assert descent.read_on(torch.tensor(ids), 3, Budget(10, None)).tolist() == ids


def test_orders_are_merged_by_where_a_token_comes_soonest() -> None:
    first, second = torch.tensor([3, 0, 1, 2]), torch.tensor([2, 3, 1, 0])
    both = merged(first, second)
    assert both is not None
    assert both.tolist() == [3, 2, 0, 1]
    assert merged(None, second) is second
    assert merged(None, None) is None


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize(("gap", "status"), [(1e-3, "recovered"), (1e-9, "ambiguous")])
def test_near_embeddings_are_tried_without_a_scan(gap: float, status: str, together: bool) -> None:
    """A hundred tokens of almost one embedding: told apart, or not, by trying them, not by trying all."""
    module = build("llama", vocab_size=VOCABULARY, hidden_size=64)
    with torch.no_grad():
        table = module.get_input_embeddings().weight
        table[100:200] = table[50] + gap * table[50].norm() * torch.randn(100, 64) / 8
    model = preimage.load(module)
    ids = [7, 60, 150, 61, 62]
    states = model.states(torch.tensor([ids]), (2,))[2][0]
    checker = Verifier(model, 2, noise=noise_of(model, (2,))[2])
    budget = Budget(len(ids) * VOCABULARY, None)
    (found,) = FastInverter(model, checker, Ignorant(), together=together).run([states], [budget], (), ids)
    assert tuple(ids) in {tuple(fit.position.token_id for fit in one) for one in found.hypotheses}
    assert (len(found.hypotheses) > 1) == (status == "ambiguous")
    if status == "recovered":
        assert budget.tests < VOCABULARY


def test_what_is_near_beyond_what_its_embedding_explains_is_not_clear(model: LanguageModel) -> None:
    alike = lookalikes_of(model)
    alike._near[1] = ((2,), {3: 0.001, 4: 0.5})
    assert alike.all_far(1, {2: 0.0, 3: 0.1, 4: 9.0, 5: 20.0}, 16.0)  # 0.1 / 0.001 is far beyond 16
    assert not alike.all_far(1, {2: 0.0, 3: 0.1, 4: 7.0, 5: 20.0}, 16.0)  # 7 / 0.5 is not
    assert not alike.all_far(1, {5: 15.0}, 16.0)
    assert not alike.all_far(1, {2: 0.0, 3: 0.1}, 16.0)  # nothing else was tried
    del alike._near[1]


def test_a_prompt_off_in_one_shape_is_looked_at_in_a_large_batch(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels of a GPU round otherwise in small batches; here passes with branches are moved a little."""
    prompts = [random_ids(LENGTH, seed, VOCABULARY) for seed in (21, 22)]
    checker, _, target = verified(model, prompts[0])
    states = [verified(model, ids)[1] for ids in prompts]
    plain, asked = shared_pass.states_of_branches, []
    off = 5 * target.radii[4] / states[0].shape[1] ** 0.5

    def moved(*given: object) -> tuple[Tensor, Tensor]:
        trunk, others = plain(*given)  # type: ignore[arg-type]
        trunk = trunk.clone()
        trunk[:, 4] += off
        return trunk, others

    original = Verifier.states_in_large_batch

    def counted(self: Verifier, rows: Tensor) -> Tensor:
        asked.append(len(rows))
        return original(self, rows)

    monkeypatch.setitem(verifier.LARGE, "cpu", 4 * LENGTH)
    monkeypatch.setattr(shared_pass, "states_of_branches", moved)
    monkeypatch.setattr(Verifier, "states_in_large_batch", counted)

    class Right(Ignorant):
        name = "right"

        def score(self, observed: Tensor, valid: Tensor) -> Scores:
            keys = torch.nn.functional.one_hot(torch.tensor(prompts).flatten(), VOCABULARY).float()
            return Scores((Part(20 * keys, (Keys(torch.eye(VOCABULARY), torch.zeros(VOCABULARY)),)),), LENGTH)

    budgets = [Budget(LENGTH * VOCABULARY, None) for _ in prompts]
    found = FastInverter(model, checker, Right(), together=True).run(states, budgets)
    assert [[fit.position.token_id for fit in one.partial] for one in found] == prompts
    assert all(len(one.hypotheses) == 1 for one in found)
    assert asked == [2]  # both in one


def test_a_tensor_on_the_cpu_is_fetched_as_it_is() -> None:
    some = torch.arange(3)
    assert fetch(some)().tolist() == [0, 1, 2]


def test_a_call_looks_once_whether_a_model_was_changed() -> None:
    model = preimage.load(build("llama", vocab_size=50))
    before = model.edition
    with model.unchanging():
        with torch.no_grad():
            model.module.get_input_embeddings().weight.mul_(2)
        assert model.edition == before
    assert model.edition != before
