"""Proposers and the fast engine: any of them, alone or combined, leads to the same exact prompts."""

from collections.abc import Sequence

import plotly.graph_objects as go
import pytest
import torch
from torch import Tensor

import preimage
from preimage.errors import OptionError
from preimage.figures import margin_figure
from preimage.inversion import register_proposer
from preimage.inversion.engine.budget import Budget
from preimage.inversion.engine.fast import FastInverter
from preimage.inversion.engine.verifier import Verifier
from preimage.inversion.proposers import codebook as codebook_module
from preimage.inversion.proposers import registry
from preimage.inversion.proposers.codebook import Codebook
from preimage.inversion.proposers.registry import build_proposer
from preimage.inversion.proposers.scores import Keys, Part, Scores
from preimage.inversion.proposers.standard import CodebookProposer, PriorProposer, Proposer
from preimage.inversion.result import Inversion, Position, VerifiedPositions
from preimage.layers import Layer
from preimage.models import LanguageModel, Prefix
from preimage.states import SAFETY, noise_of
from support.tiny import VOCABULARY, build, random_ids, tiny


class Useless:
    """Ranks tokens by their id."""

    name = "useless"

    def score(self, observed: Tensor, valid: Tensor) -> Scores:
        keys = Keys(torch.zeros(VOCABULARY, 1), -torch.arange(VOCABULARY).float())
        return Scores((Part(torch.zeros(valid.numel(), 1), (keys,)),), valid.shape[1])


def engine(model: LanguageModel, layer: Layer, proposer: Proposer, together: bool) -> FastInverter:
    verifier = Verifier(model, layer, noise=noise_of(model, (layer,))[layer])
    return FastInverter(model, verifier, proposer, together=together)


@pytest.mark.parametrize(
    "names", ["codebook", "prior", "codebook,prior", "codebook,gradient", "prior,gradient"]
)
@pytest.mark.parametrize("layer", [1, 3, "final"])
def test_every_proposer_leads_to_the_exact_prompt(names: str, layer: Layer) -> None:
    model = tiny("qwen2")
    prompts = [random_ids(14, seed) for seed in (5, 6)]
    found = preimage.invert(model, preimage.capture(model, prompts, layer), proposers=names)
    assert [list(result.token_ids) for result in found] == prompts
    assert {result.proposer for result in found} == {names.removesuffix(",gradient").replace(",", "+")}
    assert all(result.tests <= 14 * VOCABULARY for result in found)


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("useless", [True, False])
def test_prompts_of_many_lengths_are_inverted_together_and_alone(together: bool, useless: bool) -> None:
    model = tiny("qwen2")
    prompts = [random_ids(length, length) for length in (15, 1, 9, 15, 12, 4)]
    states = preimage.capture(model, prompts, layers=3)
    observed = [states.at(index, 3).clone() for index in range(len(prompts))]
    observed[3][7] *= 1.5  # one of them was changed
    proposer = Useless() if useless else build_proposer(model, 3)
    outcomes = engine(model, 3, proposer, together).run(observed, [Budget(10**6, None) for _ in prompts])
    for index, (outcome, prompt) in enumerate(zip(outcomes, prompts, strict=True)):
        ids = [fit.position.token_id for fit in outcome.partial]
        assert ids == (prompt[:7] if index == 3 else prompt)
        assert bool(outcome.hypotheses) == (index != 3)
    assert outcomes[3].failure is not None
    assert outcomes[3].failure.index == 7


def test_a_pass_that_contradicts_an_earlier_one_is_decided_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a shared pass of another shape a verified position may fall out of tolerance by noise."""
    model = tiny("llama")
    prompt = random_ids(10, 3)
    states = preimage.capture(model, [prompt], layers=2).at(0, 2)
    contradicted: list[bool] = []
    plain = LanguageModel.states

    def noisy(self: LanguageModel, ids: Tensor, layers: Sequence[Layer]) -> dict[Layer, Tensor]:
        found = plain(self, ids, layers)
        if not contradicted and len(ids) > 1 and bool((ids[:, :2] == torch.tensor(prompt[:2])).all()):
            contradicted.append(True)
            found[2][:, 0] += 1.0
        return found

    proposer = Useless()
    inverter = engine(model, 2, proposer, together=True)
    monkeypatch.setattr(LanguageModel, "states", noisy)
    (outcome,) = inverter.run([states], [Budget(10**6, None)])
    assert contradicted
    assert [fit.position.token_id for fit in outcome.partial] == prompt
    assert outcome.hypotheses


@pytest.mark.parametrize("together", [True, False])
def test_a_state_that_only_the_plain_pass_reproduces_costs_no_scan(
    together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cached and shared passes put position 3 out of tolerance; the plain pass over the prompt does not."""
    model = tiny("llama")
    prompt = random_ids(10, 3)
    states = preimage.capture(model, [prompt], layers=2).at(0, 2)
    inverter = engine(model, 2, build_proposer(model, 2), together)
    off = 3 * inverter._verifier.target(states).radii[3] / model.d_model**0.5
    extend, run = Prefix.extend, LanguageModel.states

    def cached(self: Prefix, ids: Tensor) -> Tensor:
        found, start = extend(self, ids), len(self) - len(ids)
        if start <= 3 < start + len(ids):
            found[3 - start] += off
        return found

    def shared(self: LanguageModel, ids: Tensor, layers: Sequence[Layer]) -> dict[Layer, Tensor]:
        found = run(self, ids, layers)
        if together and len(ids) > 1 and ids.shape[1] > 3:
            found[2][:, 3] += off
        return found

    monkeypatch.setattr(Prefix, "extend", cached)
    monkeypatch.setattr(LanguageModel, "states", shared)
    budgets = [Budget(10**6, None) for _ in range(2)]
    outcomes = inverter.run([states, states], budgets)
    for outcome, budget in zip(outcomes, budgets, strict=True):
        assert [fit.position.token_id for fit in outcome.partial] == prompt
        assert outcome.hypotheses
        assert budget.tests < model.vocab_size


@pytest.mark.parametrize("together", [True, False])
def test_the_worst_order_takes_the_vocabulary_at_every_position_and_no_more(together: bool) -> None:
    model = tiny("llama")
    prompt = random_ids(6, 4)
    states = preimage.capture(model, [prompt], layers=2).at(0, 2)
    budget = Budget(len(prompt) * model.vocab_size, None)
    (outcome,) = engine(model, 2, Useless(), together).run([states], [budget])
    assert [fit.position.token_id for fit in outcome.partial] == prompt
    assert (len(outcome.hypotheses), outcome.undecided) == (1, False)


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("tests", [1, 7, 40, 150])
@pytest.mark.parametrize("useless", [True, False])
def test_a_spent_budget_keeps_what_was_verified(together: bool, tests: int, useless: bool) -> None:
    model = tiny("gpt2")
    prompt = random_ids(12, 1)
    states = preimage.capture(model, [prompt], layers=2).at(0, 2)
    budget = Budget(tests, None)
    proposer = Useless() if useless else build_proposer(model, 2)
    (outcome,) = engine(model, 2, proposer, together).run([states], [budget])
    ids = [fit.position.token_id for fit in outcome.partial]
    assert ids == prompt[: len(ids)]
    assert budget.tests <= tests
    if useless or tests < 12:
        assert len(ids) < 12
        assert f"budget of {tests} tests" in outcome.reason


def test_the_codebook_ranks_far_above_chance_and_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    model: LanguageModel = preimage.load(build("llama"))
    proposer = build_proposer(model, 2, ("codebook",))
    ids = torch.tensor([random_ids(16, seed) for seed in range(200, 216)])
    observed = model.states(ids, (2,))[2]
    best = proposer.score(observed, torch.ones_like(ids, dtype=torch.bool)).best()
    assert float((best == ids).float().mean()) > 0.5  # chance is 1 in 41

    def refit(*_: object) -> None:
        raise AssertionError("the codebook was fitted again")

    monkeypatch.setattr(Codebook, "fit", refit)
    again = build_proposer(model, 2, ("codebook",))
    assert torch.equal(again.score(observed, torch.ones_like(ids, dtype=torch.bool)).best(), best)
    path = codebook_module.cache_path(model, 2, 2 * model.d_model)
    path.write_bytes(path.read_bytes()[:-50])  # a damaged one is fitted again
    with pytest.raises(AssertionError, match="fitted again"):
        build_proposer(model, 2, ("codebook",))


def test_padding_changes_no_score() -> None:
    model = tiny("mistral")
    proposer = build_proposer(model, 2, ("codebook",))
    ids = torch.tensor([random_ids(12, 1)])
    short = model.states(ids[:, :7], (2,))[2]
    padded = torch.nn.functional.pad(short, (0, 0, 0, 5), value=3.0)
    valid = torch.arange(12)[None] < 7
    one = proposer.score(short, valid[:, :7]).at(torch.arange(7))
    other = proposer.score(padded, valid).at(torch.arange(7))
    largest = float(one.abs().max())  # the sums of a row are added in another order, in float32
    assert torch.allclose(one, other, rtol=0, atol=1e-4 * largest)


def test_without_text_the_prior_counts_nothing() -> None:
    model = tiny("llama")  # no tokenizer: nothing but random tokens to calibrate on
    base = CodebookProposer(model, 2)
    ids = torch.tensor([random_ids(16, seed) for seed in range(4)])
    observed, valid = model.states(ids, (2,))[2], torch.ones_like(ids, dtype=torch.bool)
    with_prior = PriorProposer(model, 2, base).score(observed, valid).best()
    assert torch.equal(with_prior, base.score(observed, valid).best())


def test_scores_add_up_and_their_pieces_agree() -> None:
    generator = torch.Generator().manual_seed(0)
    keys = [Keys(torch.randn(9, 4, generator=generator), torch.randn(9, generator=generator)) for _ in "abc"]
    queries = torch.randn(6, 4, generator=generator)
    book = torch.tensor([0, 1, 1, 0, 1, 0])
    scores = Scores((Part(queries, (keys[0], keys[1]), book), Part(queries, (keys[2],))), 3)
    rows = torch.arange(6)
    expected = torch.stack(
        [keys[int(b)].keys @ q + keys[int(b)].bias for q, b in zip(queries, book, strict=True)]
    )
    expected = expected + queries @ keys[2].keys.T + keys[2].bias
    assert torch.allclose(scores.at(rows), expected, atol=1e-4)
    assert torch.equal(scores.best().flatten(), expected.argmax(dim=1))
    assert torch.equal(scores.order(1, 2), expected[5].argsort(descending=True))
    assert scores.top(1, 0, 3) == expected[3].argsort(descending=True)[:3].tolist()


def test_proposers_are_chosen_as_objects_beside_names() -> None:
    model, prompt = tiny("qwen2"), random_ids(9, 4)
    states = preimage.capture(model, [prompt], 2)
    for chosen, name in (
        ((Useless(),), "useless"),
        ((Useless(), "gradient"), "useless"),
        (("prior", Useless()), "useless+prior"),
        (("prior", "codebook"), "codebook+prior"),
    ):
        (result,) = preimage.invert(model, states, proposers=chosen)
        assert (list(result.token_ids), result.proposer) == (prompt, name)
    assert preimage.InvertOptions(proposers=("prior", Useless())).to_dict()["proposers"] == "prior,useless"


def test_a_registered_proposer_is_known_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_BUILDERS", dict(registry._BUILDERS))
    with pytest.raises(OptionError, match="'by-number' is not known"):
        preimage.InvertOptions(proposers="by-number")
    register_proposer("by-number", lambda model, layer, base: Useless())
    model, prompt = tiny("qwen2"), random_ids(5, 4)
    (result,) = preimage.invert(model, preimage.capture(model, [prompt], 2), proposers="by-number")
    assert (list(result.token_ids), result.proposer) == (prompt, "useless")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"proposers": "crystal"}, "not known"),
        ({"proposers": ""}, "No proposer was given"),
        ({"proposers": ("codebook", 3)}, "3 is not known"),
        ({"proposers": "gradient"}, "is SIPIT"),
        ({"proposers": "codebook", "method": "sipit"}, "its own order"),
    ],
)
def test_wrong_proposers_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        preimage.InvertOptions(**options)


@pytest.mark.parametrize("architecture", ["gpt2", "gemma3"])
def test_a_proof_finds_the_exact_margin(architecture: str) -> None:
    model = tiny(architecture)
    prompt = random_ids(6, 2)
    (found,) = preimage.invert(model, preimage.capture(model, [prompt], 2), prove=True)
    assert found.status == "recovered"
    for index, position in enumerate(found.positions):
        rows = torch.tensor([[*prompt[:index], v] for v in range(VOCABULARY)])
        states = model.states(rows, (2,))[2][:, -1].double()
        apart = (states - states[prompt[index]]).norm(dim=1)
        apart[prompt[index]] = torch.inf
        noise = 2 * SAFETY * found.noise_floor * float(states.norm(dim=1).max())
        assert position.margin == pytest.approx(float(apart.min()), rel=0, abs=noise)
        assert noise < 0.01 * position.margin
        assert position.runner_up_id == int(apart.argmin())
        assert position.tolerated_noise == position.margin / 2
    assert found.margin == min(position.margin for position in found.positions if position.margin is not None)
    assert found.tests == 6 * VOCABULARY
    figure = margin_figure(found, str)
    assert isinstance(figure, go.Figure)
    assert list(figure.data[0].y) == [position.margin for position in found.positions]
    assert Inversion.from_dict(found.to_dict()) == found


def test_noise_below_half_the_margin_leaves_the_token_nearest() -> None:
    model = tiny("llama")
    prompt = random_ids(5, 4)
    states = preimage.capture(model, [prompt], 2)
    (proved,) = preimage.invert(model, states, prove=True)
    clean = states.at(0, 2)
    for index, position in enumerate(proved.positions):
        assert position.tolerated_noise is not None
        assert position.runner_up_id is not None
        rows = torch.tensor([[*prompt[:index], v] for v in range(VOCABULARY)])
        all_states = model.states(rows, (2,))[2][:, -1]
        toward = torch.nn.functional.normalize(all_states[position.runner_up_id] - clean[index], dim=0)
        for share, nearest in ((0.99, prompt[index]), (1.01, position.runner_up_id)):  # the worst direction
            moved = clean[index] + share * position.tolerated_noise * toward
            assert int((all_states - moved).norm(dim=1).argmin()) == nearest


def test_states_far_from_any_token_are_refused_at_their_position() -> None:
    model = tiny("llama")
    clean = preimage.capture(model, [random_ids(5, 4)], 2).at(0, 2)
    (lost,) = preimage.invert(model, clean[None] + 0.5 * clean.norm(dim=1).max(), 2)
    assert (lost.status, lost.failed_position) == ("not_recovered", 0)
    assert VOCABULARY <= lost.tests <= 9 * VOCABULARY * len(clean)  # finding out, and a reading
    assert lost.failed_distance is not None


def test_the_last_state_alone_cannot_be_proved() -> None:
    model = tiny("llama")
    states = preimage.capture(model, [random_ids(4)], 1, positions="last")
    with pytest.raises(OptionError, match="last position alone"):
        preimage.invert(model, states, prove=True)


def test_an_inversion_that_was_not_proved_has_no_margins_to_draw() -> None:
    model = tiny("llama")
    (found,) = preimage.invert(model, preimage.capture(model, [random_ids(4)], 1))
    with pytest.raises(OptionError, match="not proved"):
        margin_figure(found, str)


def test_positions_are_made_when_looked_at() -> None:
    rivals = [4, 5, 6], [9.0, 8.0, 7.0]
    lazy = VerifiedPositions([7, 8, 9], [0.1, 0.2, 0.3], [1.0, 1.0, 2.0], [2, 5, 2], *rivals)
    whole = (
        Position(0, 7, 0.1, 1.0, True, 4, 9.0, 2),
        Position(1, 8, 0.2, 1.0, True, 5, 8.0, 5),
        Position(2, 9, 0.3, 2.0, True, 6, 7.0, 2),
    )
    assert lazy == whole
    assert lazy[-1] == whole[-1]
    assert lazy[1:] == whole[1:]
    assert hash(lazy) == hash(whole)
    with pytest.raises(IndexError):
        lazy[3]


@pytest.mark.real_model
def test_without_a_lens_the_default_model_is_inverted_in_few_passes(smollm2: LanguageModel) -> None:
    text = "It was a bright cold day in April, and the clocks were striking thirteen."
    random = [1000 * token + 500 for token in random_ids(12, 5)]
    states = preimage.capture(smollm2, [text, random], layers=8)  # the deeper, the longer the fit
    written, drawn = preimage.invert(smollm2, states, proposers="codebook,prior")
    assert (written.status, written.text, written.proposer) == ("recovered", text, "codebook+prior")
    assert list(drawn.token_ids) == random
    assert written.forward_tokens <= 16 * states.lengths[0]


@pytest.mark.real_model
def test_the_prior_helps_text_and_leaves_random_tokens_alone(smollm2: LanguageModel) -> None:
    base = build_proposer(smollm2, 8, ("codebook",))  # in the cache of these tests by now
    both = PriorProposer(smollm2, 8, base)
    misses = {}
    for source in ("default:prose", "random"):
        options = preimage.PromptOptions(count=8, length=48, seed=13)
        ids = torch.tensor(list(preimage.prompts.gather(source, smollm2, options)))
        observed, valid = smollm2.states(ids, (8,))[8], torch.ones_like(ids, dtype=torch.bool)
        misses[source] = [int((p.score(observed, valid).best() != ids).sum()) for p in (base, both)]
    assert misses["default:prose"][1] < misses["default:prose"][0]
    assert misses["random"][1] == misses["random"][0]


def test_stages_of_set_up_are_named_as_they_begin() -> None:
    model = preimage.load(build("llama", seed=7, vocab_size=500))
    states, notes = preimage.capture(model, [[3, 5, 7]], 2), list[str]()

    def listen(done: int, total: int, note: str) -> None:
        notes.append(note)

    preimage.noise_floor(model, 3)  # nobody listens, and what is known is not measured again
    preimage.invert(model, states, progress=listen)
    assert {"token features", "codebook"} <= set(notes)
    assert "noise floor" not in notes
    notes.clear()
    other = preimage.load(build("llama", seed=8, vocab_size=500))
    preimage.invert(other, states, progress=listen)
    assert notes[0] == "noise floor"
    notes.clear()
    preimage.invert(other, states, progress=listen)
    assert set(notes) == {"prompts inverted"}
