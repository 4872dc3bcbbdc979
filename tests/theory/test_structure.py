"""The dichotomy and the search for structural collisions: each verdict seen both ways."""

import functools
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as t
from torch import Tensor, nn

import preimage
from preimage.collisions.structure import (
    CONSTANT,
    FULL_WINDOW,
    SAME_LAST_TOKEN,
    SAME_WINDOW,
    SAME_WORD,
    Structure,
)
from preimage.distances import norms, row_distances
from preimage.errors import ModelError, OptionError, PromptError
from preimage.layers import Layer
from preimage.models import LanguageModel
from preimage.models.random_parameters import random_parameters
from preimage.theory.dichotomy.check import check_dichotomy, search_structure
from preimage.theory.dichotomy.families import UNNAMED, classes, describe
from preimage.theory.result import TheoryReport
from support.tiny import NAMES, build, random_ids, tiny

ALIBI: dict[str, Callable[[], Any]] = {
    "bloom": lambda: t.BloomConfig(vocab_size=41, hidden_size=32, n_layer=3, n_head=4),
    "mpt": lambda: t.MptConfig(vocab_size=41, d_model=32, n_layers=3, n_heads=4, max_seq_len=64),
    "falcon": lambda: t.FalconConfig(
        vocab_size=41, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, alibi=True
    ),
}
GENERIC, ABOVE, AGREE, NAMED, PREDICTED, ROUNDING, CLEAR = range(7)


@functools.cache
def alibi(name: str) -> LanguageModel:
    return preimage.load(t.AutoModelForCausalLM.from_config(ALIBI[name]()))


def holds(report: TheoryReport) -> list[bool | None]:
    return [verdict.holds for verdict in report.verdicts]


def found(report: TheoryReport, layer: Layer) -> dict[str, str]:
    """What the search says of a layer: description and known name of each kind of class."""
    rows = [row for row in report.tables["classes"] if row["layer"] == layer]
    return {row["description"]: row["known_as"] for row in rows}


class Changed(nn.Linear):
    """An output projection that does something to what it returns."""

    def __init__(self, like: nn.Linear, change: Callable[[nn.Linear, Tensor], Tensor]) -> None:
        super().__init__(like.in_features, like.out_features, bias=False)
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        return self.change(self, super().forward(x))


def changed(change: Callable[[nn.Linear, Tensor], Tensor]) -> LanguageModel:
    """A tiny Llama whose attention returns something else."""

    class ChangedLlama(t.LlamaForCausalLM):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            for block in self.model.layers:
                block.self_attn.o_proj = Changed(block.self_attn.o_proj, change)

    return preimage.load(ChangedLlama(build("llama").config))


def faint(factor: float) -> LanguageModel:
    """Tokens before the last one are seen through a factor: prompts with one last token differ by it."""
    return changed(lambda _, output: output * factor)


# --- random parameters ------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_random_parameters_are_generic_and_float64(name: str) -> None:
    model = tiny(name)
    before = {key: value.clone() for key, value in model.module.state_dict().items()}
    drawn = random_parameters(model, seed=3)
    assert type(drawn.module) is type(model.module)
    assert drawn.dtype == torch.float64
    assert drawn.device.type == "cpu"
    for key, parameter in drawn.module.named_parameters():
        assert parameter.dtype == torch.float64, key
        assert not torch.isin(parameter, torch.tensor([0.0, 1.0, -1.0], dtype=torch.float64)).any(), key
        assert len(parameter.unique()) == parameter.numel(), key
    assert all(torch.equal(before[key], value) for key, value in model.module.state_dict().items())
    ids = torch.tensor([random_ids(6)])
    states = drawn.states(ids, (2, "final"))
    again = random_parameters(model, seed=3).states(ids, (2, "final"))
    other = random_parameters(model, seed=4).states(ids, (2, "final"))
    for layer in states:
        assert states[layer].dtype == torch.float64
        assert torch.equal(states[layer], again[layer])
        assert float(row_distances(states[layer], other[layer]).min()) > 0.1


@pytest.mark.parametrize("name", ["gpt2", "gemma2"])
def test_tied_matrices_stay_tied(name: str) -> None:
    drawn = random_parameters(tiny(name))
    assert drawn.unembedding is not None
    assert drawn.unembedding.data_ptr() == drawn.anatomy.embedding.weight.data_ptr()  # type: ignore[union-attr,operator]


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("gpt2", "opt")])
def test_nothing_is_rounded_to_float32_on_the_way(name: str) -> None:
    """Constant prompts show it: float64 leaves 1e-15, a float32 anywhere on the way about 1e-8."""
    drawn = random_parameters(tiny(name))
    layers: tuple[Layer, ...] = (1, 2, 3, "final")
    noise = 0.0
    for token in range(1, 9):
        short = drawn.states(torch.tensor([[token] * 2]), layers)
        longer = drawn.states(torch.tensor([[token] * 13]), layers)
        for layer, states in short.items():
            away = row_distances(states[0, -1], longer[layer][0, -1]) / norms(states[0, -1])
            noise = max(noise, float(away))
    assert 0 < noise < 1e-11  # as far from the one as from the other


def test_the_same_parameters_in_plain_transformers_are_the_same_map_but_rounded() -> None:
    drawn = random_parameters(tiny("llama"))
    plain = build("llama", dtype=torch.float64)
    plain.load_state_dict(drawn.module.state_dict())
    ids = torch.tensor([random_ids(12)])
    away = row_distances(preimage.load(plain).states(ids, (3,))[3], drawn.states(ids, (3,))[3])
    relative = float((away / norms(drawn.states(ids, (3,))[3])).max())
    assert 1e-10 < relative < 1e-5  # transformers' norms are float32 in a float64 model


PAIR = torch.tensor([[3, 9, 5], [8, 4, 5]])


def apart(model: LanguageModel, layer: Layer = 3) -> float:
    """How far two prompts with one last token are from each other at random parameters."""
    first, second = random_parameters(model).states(PAIR, (layer,))[layer][:, -1]
    return float(row_distances(first, second))


def silenced(output: Any) -> Any:
    """An attention's output with nothing in it."""
    return (output[0] * 0, *output[1:])


def test_a_class_that_needs_more_than_its_config_is_copied_as_it_stands() -> None:
    class Needy(t.LlamaForCausalLM):
        def __init__(self, config: Any, more: int) -> None:
            super().__init__(config)

    assert apart(preimage.load(Needy(build("llama").config, 1))) > 0.1


def test_hooks_and_replaced_parts_are_part_of_the_map() -> None:
    hooked, replaced, wrapped = (build("llama") for _ in range(3))
    calls: list[int] = []
    for block in hooked.model.layers:
        block.self_attn.register_forward_hook(lambda _module, _args, output: silenced(output))
    for block in replaced.model.layers:
        block.self_attn.o_proj = nn.Identity()
        block.self_attn.o_proj.register_forward_hook(lambda _module, _args, output: output * 0)
    for block in wrapped.model.layers:

        def forward(*args: Any, original: Any = block.self_attn.forward, **kwargs: Any) -> Any:
            calls.append(1)
            return silenced(original(*args, **kwargs))

        block.self_attn.forward = forward
    models = [preimage.load(module) for module in (hooked, replaced, wrapped)]
    before = len(calls)
    assert max(apart(model) for model in models) < 1e-11  # rows of one batch may differ in their last bits
    assert len(calls) == before  # the copy's hooks write into copies
    assert apart(tiny("llama")) > 0.1


def test_a_forward_that_holds_the_original_holds_the_copy_in_the_copy() -> None:
    module = build("llama")
    attention = module.model.layers[0].self_attn
    original, scale = attention.forward, torch.tensor(0.5)

    def forward(*args: Any, **kwargs: Any) -> Any:
        output = original(*args, **kwargs)
        return (output[0] * scale, *output[1:])

    attention.forward = forward
    model = preimage.load(module)
    ids = torch.tensor([random_ids(6)])
    states = random_parameters(model, 3).states(ids, (1,))[1]
    assert states.dtype == torch.float64
    plain = random_parameters(tiny("llama"), 3)
    twice = 2 * states - plain.states(ids, (1,))[1]  # not the plain map, and not a constant's either
    assert float(norms(twice).min()) > 0.1
    assert attention.forward is forward
    assert attention.q_proj.weight.dtype == torch.float32


def test_functions_that_hold_nothing_of_the_model_stay_themselves() -> None:
    module = build("llama")
    del module.model.layers[0].mlp.act_fn
    module.model.layers[0].mlp.act_fn = nn.functional.relu
    drawn = random_parameters(preimage.load(module))
    assert drawn.anatomy.blocks[0].mlp.act_fn is nn.functional.relu  # type: ignore[union-attr]


def test_linear_parts_in_a_few_bits_are_drawn_as_real_numbers() -> None:
    class Packed(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(x, self.weight.view(16, 32).to(x) / 255)

    module = build("llama")
    like = module.model.layers[0].self_attn.k_proj
    part = Packed(like.in_features, like.out_features, bias=False)
    numbers = torch.randint(0, 255, (like.weight.numel(), 1), dtype=torch.uint8)
    part.weight = nn.Parameter(numbers, requires_grad=False)
    module.model.layers[0].self_attn.k_proj = part
    assert like.weight.shape == (16, 32)
    drawn = random_parameters(preimage.load(module))
    copied = drawn.anatomy.blocks[0].self_attn.k_proj  # type: ignore[union-attr]
    assert (copied.weight.dtype, copied.weight.shape) == (torch.float64, like.weight.shape)


def test_what_cannot_be_copied_is_refused() -> None:
    module = build("llama")
    module.model.lock = threading.Lock()
    with pytest.raises(ModelError, match="cannot be copied"):
        random_parameters(preimage.load(module))


# --- the search -------------------------------------------------------------------------------


def test_rotary_without_bos_has_both_families() -> None:
    report = search_structure(tiny("llama"))
    assert report.subject["prompts"] == 120
    assert found(report, 0) == {"the same last token": SAME_LAST_TOKEN}
    for layer in (1, 2, 3, "final"):
        assert found(report, layer) == {"one token repeated": CONSTANT}
    by_layer = {row["layer"]: row for row in report.tables["layers"]}
    assert by_layer[0]["structural"] == 3 * 40 * 39 // 2  # 40 of the 120 prompts end in each token
    assert all(by_layer[layer]["structural"] == 3 * 6 for layer in (1, 2, 3, "final"))  # a, aa, aaa, aaaa
    assert holds(report) == [False, False, True, True, True, True, True]
    for row in report.tables["layers"]:
        assert row["farthest_structural"] < row["bound"] < 1e-11
        assert row["nearest_separated"] > 1e-4


def test_rotary_with_bos_has_none_above_layer_0() -> None:
    report = search_structure(tiny("llama"), vocabulary=2, bos=1)
    assert {row["layer"] for row in report.tables["classes"]} == {0}
    assert holds(report) == [False, True, True, True, True, True, True]
    assert all(row["example"][0][0] == 1 for row in report.tables["classes"])


@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_learned_positions_have_none_but_layer_0_at_one_length(name: str) -> None:
    report = search_structure(tiny(name), vocabulary=2)
    assert found(report, 0) == {"the same last token, and the same length": SAME_LAST_TOKEN}
    assert {row["layer"] for row in report.tables["classes"]} == {0}
    almost_all = True if name == "gpt2" else None  # OPT has kinks: witnesses speak for their neighbours alone
    assert holds(report)[ABOVE:] == [almost_all, *[True] * 5]
    above = search_structure(tiny(name), vocabulary=2, layers="1-3")
    assert holds(above) == [almost_all, almost_all, *[True] * 5]


@pytest.mark.parametrize("name", ALIBI)
def test_alibi_adds_repeated_words_at_layer_1(name: str) -> None:
    report = search_structure(alibi(name), vocabulary=2)
    assert found(report, 0) == {"the same last token": SAME_LAST_TOKEN}
    assert found(report, 1) == {"one token repeated": CONSTANT, "one word repeated": SAME_WORD}
    for layer in (2, 3, "final"):
        assert found(report, layer) == {"one token repeated": CONSTANT}
    assert holds(report)[AGREE:] == [True] * 5
    assert search_structure(alibi(name), vocabulary=2, bos=1, layers="1-3").holds


def test_sliding_windows_hide_what_lies_behind_them() -> None:
    report = search_structure(preimage.load(build("mistral", sliding_window=2)), vocabulary=2, bos=40)
    assert found(report, 1) == {"the same last 2 tokens": SAME_WINDOW}
    assert found(report, 2) == {"the same last 3 tokens": SAME_WINDOW}
    assert found(report, 3) == {}  # sees 4 tokens and the BOS before the longest prompt's four
    assert holds(report)[AGREE:] == [True] * 5


def test_a_full_block_above_a_window_sees_everything() -> None:
    report = search_structure(preimage.load(build("gemma2", sliding_window=2)), vocabulary=2, bos=40)
    assert found(report, 1) == {"the same last 2 tokens": SAME_WINDOW}
    assert found(report, 2) == {}
    assert holds(report)[AGREE:] == [True] * 5


@pytest.mark.parametrize("window", [2, 3])
def test_runs_that_fill_a_window_count_as_one(window: int) -> None:
    model = preimage.load(build("mistral", sliding_window=window))
    report = search_structure(model, vocabulary=2, longest=6)
    names = {row["family"] for row in report.tables["families"]}
    assert names == {SAME_LAST_TOKEN, CONSTANT, SAME_WINDOW, FULL_WINDOW}
    assert holds(report)[AGREE:] == [True] * 5  # none unnamed, none predicted that does not collide
    run = f"a run at their beginning counted {window - 1} times at most"
    assert any(text.endswith(run) for text in found(report, 2))
    structure = Structure(random_parameters(model))
    assert structure.explain([5] * 2 * window + [6], [5] * window + [6], 3, near=True) == FULL_WINDOW


@pytest.mark.parametrize("name", NAMES)
def test_every_architecture_has_only_known_families(name: str) -> None:
    report = search_structure(tiny(name), vocabulary=2, longest=3, draws=2)
    assert holds(report)[AGREE:] == [True] * 5
    assert not report.tables["unnamed"]


def test_attention_that_is_off_is_found_and_has_no_name() -> None:
    report = search_structure(faint(0.0), vocabulary=2, longest=3)
    assert set(found(report, 3)) == {"the same last token"}  # described, though nothing known predicts it
    assert UNNAMED in found(report, 3)["the same last token"]
    assert holds(report)[NAMED] is False
    assert report.tables["unnamed"]
    assert report.tables["unnamed"][0]["layer"] == 1


def test_bad_searches_are_refused() -> None:
    model = tiny("llama")
    for wrong in ({"vocabulary": 0}, {"longest": 0}, {"vocabulary": 42}, {"longest": 9}, {"bos": 41}):
        with pytest.raises(OptionError):
            search_structure(model, **wrong)
    with pytest.raises(OptionError, match="draws"):
        search_structure(model, draws=1)
    with pytest.raises(OptionError, match="at most 3"):
        search_structure(preimage.load(build("llama", max_position_embeddings=3)), vocabulary=2)


# --- the dichotomy ----------------------------------------------------------------------------


def test_dichotomy_of_given_prompts(tmp_path: Path) -> None:
    prompts = [[5, 5], [5, 5, 5], [7, 5], [3, 9, 4], [3, 9, 4]]
    report = check_dichotomy(tiny("llama"), prompts, layers=[0, 2, "final"])
    assert report.subject["prompts"] == 4
    families = {(row["layer"], row["family"]): row["pairs"] for row in report.tables["families"]}
    assert families == {(0, SAME_LAST_TOKEN): 3, (2, CONSTANT): 1, ("final", CONSTANT): 1}
    assert holds(report) == [False, False, True, True, True, True, True]
    assert report.verdicts[GENERIC].value == 5
    saved = json.loads(report.save(tmp_path / "report.json").read_text())
    assert saved["check"] == "dichotomy"
    assert len(saved["verdicts"]) == 7


def test_one_witness_a_pair_makes_a_layer_injective() -> None:
    report = check_dichotomy(tiny("llama"), [random_ids(8, seed) for seed in range(6)], layers="1-3")
    assert report.holds
    assert [row["injective_parameters"] for row in report.tables["layers"]] == ["almost all"] * 3


def test_separation_of_a_millionth_counts_and_rounding_does_not() -> None:
    prompts = [[3, 9, 5], [8, 4, 5]]
    visible = check_dichotomy(faint(1e-6), prompts, layers=[1, 3])
    assert visible.holds
    assert all(1e-9 < row["nearest_separated"] < 1e-4 for row in visible.tables["layers"])
    invisible = check_dichotomy(faint(1e-15), prompts, layers=[1, 3])
    assert holds(invisible)[GENERIC] is False
    assert holds(invisible)[NAMED] is False
    assert all(row["farthest_structural"] < row["bound"] for row in invisible.tables["layers"])


def test_what_is_only_just_above_rounding_is_said_to_be() -> None:
    report = check_dichotomy(faint(1e-11), [[3, 9, 5], [8, 4, 5]], layers=[1])
    assert holds(report) == [True, True, True, True, True, True, False]


def test_a_map_that_is_not_analytic_makes_draws_disagree() -> None:
    """Attention that a sign of one weight switches off: half of all theta separate, half do not."""
    model = changed(lambda linear, output: output * (linear.weight[0, 0] > 0))
    report = check_dichotomy(model, [[3, 9, 5], [8, 4, 5]], layers=[1], draws=6)
    assert holds(report)[AGREE] is False
    assert report.verdicts[AGREE].value == 1


def test_a_prediction_that_fails_is_seen() -> None:
    """A config that names a window its model does not use."""
    model = preimage.load(build("llama", sliding_window=2))
    report = check_dichotomy(model, [[3, 9, 5, 7], [8, 9, 5, 7]], layers=[1])
    assert holds(report)[PREDICTED] is False
    assert holds(check_dichotomy(tiny("llama"), [[3, 9, 5, 7], [8, 9, 5, 7]], layers=[1]))[PREDICTED] is True


def test_a_model_that_looks_ahead_breaks_the_bound_on_rounding() -> None:
    model = changed(lambda _, output: output * (1 + 1e-6 * output.shape[1]))
    report = check_dichotomy(model, [[3, 9, 5], [8, 4, 5]], layers=[1])
    assert holds(report)[ROUNDING] is False


def test_no_room_for_another_shape_leaves_rounding_open() -> None:
    model = preimage.load(build("llama", max_position_embeddings=3))
    report = check_dichotomy(model, [[3, 9, 5], [8, 4, 5]], layers=[1])
    assert holds(report)[ROUNDING] is None
    assert not report.holds


def test_bad_prompts_are_refused() -> None:
    with pytest.raises(PromptError, match="1 different"):
        check_dichotomy(tiny("llama"), [[1, 2], [1, 2]])
    with pytest.raises(OptionError, match="draws"):
        check_dichotomy(tiny("llama"), [[1, 2], [1, 3]], draws=1)


# --- classes in words -------------------------------------------------------------------------


def test_descriptions_fit_exactly_or_not_at_all() -> None:
    prompts = [(0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)]
    groups = [[0, 2, 4], [0, 2], [2, 4], [0, 2, 5]]
    assert describe(groups, prompts) == [
        "the same last token",
        "one token repeated",
        "the same last token, and the same length",
        UNNAMED,
    ]


def test_pairs_join_to_classes() -> None:
    assert classes(6, [(0, 2), (4, 5), (2, 3)]) == [[0, 2, 3], [4, 5]]
    assert classes(3, []) == []
