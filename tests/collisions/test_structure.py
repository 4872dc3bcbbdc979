"""Structural collisions are shown by the very module at random parameters, and claimed nowhere else."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as t
from torch import Tensor, nn

import preimage
from preimage.collisions import confirmation
from preimage.collisions.confirmation import ConfirmedStructure
from preimage.collisions.result import CollisionAudit, LayerCollisions
from preimage.collisions.structure import (
    CONSTANT,
    FULL_WINDOW,
    IDENTICAL_EMBEDDINGS,
    SAME_LAST_TOKEN,
    SAME_WINDOW,
    SAME_WORD,
    UNEXPLAINED,
    Structure,
    measured_reach,
    token_classes,
)
from preimage.errors import ModelError
from preimage.layers import Layer
from preimage.models import LanguageModel, block_draws, quirks
from preimage.models.block_draws import draw_by_block
from preimage.states import SAFETY, noise_floor
from preimage.theory.dichotomy.check import search_structure
from support.tiny import NAMES, VOCABULARY, build, random_ids, tiny

COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
}  # fmt: skip
FAMILY = [[7] * 2, [7] * 3, [7] * 17]
PROMPTS = [*(random_ids(9, seed) for seed in range(6)), *FAMILY]
ABOVE: tuple[Layer, ...] = (1, 2, 3, "final")


def gpt_oss() -> LanguageModel:
    """Every head may look at a learned sink, whose weight falls as a prompt grows."""
    config = t.GptOssConfig(
        **COMMON,
        num_key_value_heads=2,
        intermediate_size=32,
        head_dim=8,
        num_local_experts=4,
        sliding_window=4,
    )
    config._attn_implementation = "eager"
    return preimage.load(t.GptOssForCausalLM(config))


def recurrent_gemma() -> LanguageModel:
    """Recurrent blocks count how often a token came."""
    config = t.RecurrentGemmaConfig(
        **COMMON, num_key_value_heads=1, intermediate_size=64, lru_width=32, attention_window_size=4
    )
    return preimage.load(t.RecurrentGemmaForCausalLM(config))


def minimax() -> LanguageModel:
    """Linear attention adds where softmax averages."""
    kinds = ["linear_attention", "full_attention", "linear_attention"]
    config = t.MiniMaxConfig(
        **COMMON, num_key_value_heads=2, intermediate_size=32, num_local_experts=4, head_dim=8,
        layer_types=kinds, block_size=4,
    )  # fmt: skip
    return preimage.load(t.MiniMaxForCausalLM(config))


def gpt_neo() -> LanguageModel:
    """A local block below a global one, named in words of its own; learned positions."""
    config = t.GPTNeoConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_layers=2, num_heads=4, window_size=4,
        attention_types=[[["local", "global"], 1]], max_position_embeddings=64,
    )  # fmt: skip
    return preimage.load(t.GPTNeoForCausalLM(config))


def reasons(found: LayerCollisions) -> set[str]:
    return set(found.spacing.explained) | {reason for kind in found.hard for reason in kind.explained}


def constant_pairs(audit: CollisionAudit, layer: Layer) -> list[float]:
    """The distances of a search's constant prompts, where it takes them for prompts like any other."""
    pairs = audit.at(layer).spacing.closest
    return [pair.distance for pair in pairs if {*pair.first_ids, *pair.second_ids} == {7}]


# --- architectures that no config gives away ------------------------------------------------------


def test_an_attention_sink_tells_constant_prompts_apart() -> None:
    audit = preimage.find_collisions(gpt_oss(), PROMPTS, closest=40)
    assert audit.unexplained == 0
    for layer in ABOVE:
        found = audit.at(layer)
        assert found.spacing.explained == {}
        apart = constant_pairs(audit, layer)
        assert len(apart) == 3
        assert found.spacing.margin == min(apart) > 1000 * found.spacing.noise_radius / SAFETY
    hard = {layer: next(kind for kind in audit.at(layer).hard if kind.kind == "constant") for layer in ABOVE}
    assert all(hard[layer].explained == {} for layer in (2, 3, "final"))
    assert set(hard[1].explained) == {CONSTANT}  # 63 and 64 times, both of which fill the window of 4
    assert hard[1].explained[CONSTANT] == hard[1].within_noise == hard[1].pairs // 4 + 1


@pytest.mark.parametrize("make", [recurrent_gemma, minimax])
def test_parts_that_do_not_average_tell_constant_prompts_apart(make: Callable[[], LanguageModel]) -> None:
    shown = ConfirmedStructure(make(), PROMPTS, (0, *ABOVE))
    for layer in ABOVE:
        assert len({shown.key(ids, layer) for ids in PROMPTS}) == len(PROMPTS)
        assert shown.explain(FAMILY[0], FAMILY[1], layer, near=False) == ""
        assert shown.explain(FAMILY[0], FAMILY[1], layer, near=True) == UNEXPLAINED
    assert shown.explain(FAMILY[0], FAMILY[1], 0, near=True) == SAME_LAST_TOKEN


@pytest.mark.parametrize(
    ("make", "said"), [(recurrent_gemma, "something outside its cache"), (minimax, "has no cached prefix")]
)
def test_a_model_that_does_not_run_on_a_cached_prefix_is_searched(
    make: Callable[[], LanguageModel],
    said: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a prefix makes of it is another map, or an error; neither is noise."""
    monkeypatch.setattr(quirks, "_QUIRKS", {})  # as an architecture that nobody has heard of
    model = make()
    audit = preimage.find_collisions(model, PROMPTS)
    assert said in caplog.text
    assert audit.unexplained == 0
    assert all(reasons(audit.at(layer)) == set() for layer in ABOVE)
    assert all(0 < floor < 1e-4 for floor in noise_floor(model, ABOVE).values())


def test_a_window_that_only_gpt_neo_calls_so_is_seen() -> None:
    model = gpt_neo()
    long = random_ids(12, 1)
    prompts = [long, [*random_ids(6, 5), *long[6:]], [*random_ids(8, 6), *long[8:]], random_ids(12, 3)]
    audit = preimage.find_collisions(model, prompts, hard_bases=0)
    assert audit.unexplained == 0
    assert [found.spacing.explained for found in audit.layers] == [
        {SAME_LAST_TOKEN: 3}, {SAME_WINDOW: 3}, {}, {},
    ]  # fmt: skip
    report = search_structure(model, vocabulary=2, longest=6, draws=2)
    assert not report.tables["unnamed"]
    assert {row["family"] for row in report.tables["families"] if row["layer"] == 1} == {SAME_WINDOW}


@pytest.mark.parametrize(
    ("name", "reach"), [("mistral", [7, 13, 19, 19]), ("gemma2", [5, None, None, None]), ("gpt2", [None] * 4)]
)
def test_the_reach_of_a_layer_is_measured(name: str, reach: list[int | None]) -> None:
    found = measured_reach(tiny(name), random_ids(24), (0, *ABOVE))
    assert found == {0: 1, **dict(zip(ABOVE, reach, strict=True))}
    assert measured_reach(tiny(name), [5], ABOVE) == {0: 1, **dict.fromkeys(ABOVE)}


@pytest.mark.parametrize("name", ["bloom", "falcon"])
def test_a_word_repeated_under_alibi_is_one_word_at_layer_1(name: str) -> None:
    configs = {
        "bloom": t.BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=3, n_head=4),
        "falcon": t.FalconConfig(**COMMON, alibi=True),
    }
    model = preimage.load(t.AutoModelForCausalLM.from_config(configs[name]))
    prompts = [[3, 5], [3, 5, 3, 5], [5, 3, 5], random_ids(6), *FAMILY]
    audit = preimage.find_collisions(model, prompts, hard_bases=0)
    assert audit.unexplained == 0
    expected = [{CONSTANT: 3, SAME_WORD: 1}, {CONSTANT: 3}, {CONSTANT: 3}, {CONSTANT: 3}]
    assert [found.spacing.explained for found in audit.layers[1:]] == expected


def test_runs_that_fill_a_window_are_named() -> None:
    model = preimage.load(build("mistral", sliding_window=3))
    prompts = [[5] * 4 + [6, 8], [5] * 9 + [6, 8], [5] * 2 + [6, 8], random_ids(9), [5] * 3 + [8, 6]]
    audit = preimage.find_collisions(model, prompts, hard_bases=0)
    assert audit.unexplained == 0
    named = {layer: audit.at(layer).spacing.explained for layer in ABOVE}
    assert named[1] == {SAME_WINDOW: 3}
    assert all(FULL_WINDOW in named[layer] for layer in (2, 3, "final"))


# --- collisions of these weights ------------------------------------------------------------------


def test_equal_rows_of_a_position_table_are_no_structure() -> None:
    """The named failure case of arXiv 2510.15511: these weights collide, the architecture does not."""
    module = build("gpt2")
    with torch.no_grad():
        module.transformer.wpe.weight[1] = module.transformer.wpe.weight[0]
    prompts = [[7], [7, 7], [3, 9, 4], [9, 3, 4], [5, 6]]
    audit = preimage.find_collisions(preimage.load(module), prompts, hard_bases=0)
    at_0 = audit.at(0).spacing
    assert (at_0.explained, at_0.unexplained, at_0.margin) == ({SAME_LAST_TOKEN: 1}, 1, 0.0)
    for layer in ABOVE:
        spacing = audit.at(layer).spacing
        pairs = {(*pair.first_ids, -1, *pair.second_ids) for pair in spacing.listed}
        assert spacing.explained == {}
        assert (7, -1, 7, 7) in pairs
        assert spacing.unexplained == len(pairs)
        assert spacing.margin is not None
        assert spacing.margin <= spacing.noise_radius


def test_a_projection_that_merges_two_embeddings_makes_them_one_token() -> None:
    config = build("opt").config
    config.word_embed_proj_dim = 16
    module = t.OPTForCausalLM(config).eval()
    with torch.no_grad():
        module.model.decoder.project_in.weight[:, 3] = 0.0
        table = module.model.decoder.embed_tokens.weight
        table[6] = table[5]
        table[6, 3] += 1.0  # only where the projection does not look
    model = preimage.load(module)
    assert not torch.equal(model.embedding_table[5], model.embedding_table[6])
    assert token_classes(model, 9)[6] == 5
    # its "final" is as narrow as its table, and capture does not take it
    audit = preimage.find_collisions(model, [[9, 5, 3], [9, 6, 3], [20, 21, 22]], "0-3", hard_bases=0)
    assert all(found.spacing.explained == {IDENTICAL_EMBEDDINGS: 1} for found in audit.layers[1:])
    assert audit.unexplained == 0
    (scan,) = preimage.scan_continuations(model, [[9, 4]], 2).prefixes
    assert (scan.spacing.explained, scan.spacing.unexplained) == ({IDENTICAL_EMBEDDINGS: 1}, 0)


def test_tokens_that_agree_at_one_position_only_are_two() -> None:
    module = build("gpt2")
    with torch.no_grad():
        rows, places = module.transformer.wte.weight, module.transformer.wpe.weight
        rows[6] = rows[5]
        rows[6, 0] += 1e-6
        places[0, 0] = 1e4  # so large that the difference is lost in the sum
    model = preimage.load(module)
    assert token_classes(model)[6] == 5
    assert token_classes(model, 9)[6] == 6


def test_a_second_table_of_embeddings_tells_twins_apart() -> None:
    """Tokens that enter block 1 as one, and are two to a part further up."""
    module = build("llama")
    with torch.no_grad():
        module.model.embed_tokens.weight[6] = module.model.embed_tokens.weight[5]
    module.model.second = second = nn.Embedding(VOCABULARY, 32)
    given: dict[str, Tensor] = {}
    plain = module.model.forward

    def forward(input_ids: Any = None, **kwargs: Any) -> Any:
        given["ids"] = input_ids
        return plain(input_ids=input_ids, **kwargs)

    module.model.forward = forward
    module.model.layers[1].register_forward_hook(lambda _module, _args, out: out + second(given["ids"]))
    shown = ConfirmedStructure(preimage.load(module), [[9, 5, 3, 5], [9, 6, 3, 5], [9, 5, 3, 6]], (1, 2, 3))
    assert shown.explain([9, 5, 3, 5], [9, 5, 3, 6], 1, near=True) == IDENTICAL_EMBEDDINGS
    assert shown.explain([9, 5, 3, 5], [9, 5, 3, 6], 2, near=True) == UNEXPLAINED
    assert shown.explain([9, 5, 3, 5], [9, 6, 3, 5], 2, near=True) == IDENTICAL_EMBEDDINGS
    assert shown.explain([9, 5, 3, 5], [9, 6, 3, 5], 3, near=True) == UNEXPLAINED


# --- hooks and replaced parts ---------------------------------------------------------------------


def steps(factor: float) -> Callable[[Any, Any, Tensor], Tensor]:
    """A hook that adds something to every position but the first, the more the later."""

    def hook(_module: Any, _args: Any, output: Tensor) -> Tensor:
        return output + factor * torch.arange(output.shape[1]).to(output)[:, None]

    return hook


def test_a_hook_that_knows_positions_ends_the_family_above_it() -> None:
    module = build("llama")
    module.model.layers[1].register_forward_hook(steps(1e-3))
    audit = preimage.find_collisions(preimage.load(module), PROMPTS)
    assert audit.unexplained == 0
    assert reasons(audit.at(1)) == {CONSTANT}
    for layer in (2, 3, "final"):
        assert reasons(audit.at(layer)) == set()
        closest = audit.at(layer).spacing.closest[0]
        assert {*closest.first_ids, *closest.second_ids} == {7}  # the hook's own step


def test_a_hook_too_faint_for_float32_leaves_collisions_of_these_weights() -> None:
    """Apart in float64, the same in float32: nothing structural, and at the floor."""
    module = build("llama")
    module.model.layers[0].register_forward_hook(steps(1e-9))
    spacing = preimage.find_collisions(preimage.load(module), PROMPTS, 2, hard_bases=0).at(2).spacing
    assert (spacing.explained, spacing.unexplained) == ({}, 3)


def test_an_attention_put_in_the_place_of_another_decides() -> None:
    """Sums where softmax averages: no constant family. A silent one: nothing but the last token is seen."""

    class Counting(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.value = nn.Linear(width, width)

        def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
            return self.value(hidden_states).cumsum(dim=1) * 0.01, None

    class Silent(nn.Module):
        def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
            return torch.zeros_like(hidden_states), None

    counting, silent = build("llama"), build("llama")
    for block in counting.model.layers:
        block.self_attn = Counting(32)
    for block in silent.model.layers:
        block.self_attn = Silent()
    prompts = [[7, 7], [7, 7, 7], [3, 7], [4, 8]]
    found = preimage.find_collisions(preimage.load(counting), prompts, 2, hard_bases=0).at(2).spacing
    assert (found.explained, found.unexplained) == ({}, 0)
    found = preimage.find_collisions(preimage.load(silent), prompts, 2, hard_bases=0).at(2).spacing
    # this module sees no token but the last, whatever its parameters: a window of one
    assert (sum(found.explained.values()), found.unexplained) == (3, 0)


def test_a_local_attention_put_into_a_model_is_measured() -> None:
    module = build("llama")
    module.config._attn_implementation = "eager"
    for block in module.model.layers[:1]:
        plain = block.self_attn.forward

        def local(*args: Any, attention_mask: Any = None, plain: Any = plain, **kwargs: Any) -> Any:
            size = kwargs["hidden_states"].shape[1]
            away = torch.arange(size)[:, None] - torch.arange(size)[None]
            mask = torch.where((away < 0) | (away > 2), -torch.inf, 0.0).to(kwargs["hidden_states"])
            return plain(*args, attention_mask=mask[None, None], **kwargs)

        block.self_attn.forward = local
    long = random_ids(10, 1)
    shown = ConfirmedStructure(preimage.load(module), [long, [*random_ids(5, 2), *long[5:]]], (1, 2))
    assert shown.explain(long, [*random_ids(5, 2), *long[5:]], 1, near=True) == SAME_WINDOW
    assert shown.explain(long, [*random_ids(5, 2), *long[5:]], 2, near=True) == UNEXPLAINED


# --- one line for noise ---------------------------------------------------------------------------


@pytest.mark.parametrize("times", [0.99, 1.01])
def test_a_pair_is_at_the_floor_within_so_many_floors_of_the_longer(times: float) -> None:
    """The line is inversion's: SAFETY floors of one state, not a floor of each."""
    module = build("llama")
    model = preimage.load(module)
    floor = noise_floor(model, (0,))[0]
    with torch.no_grad():
        table = module.model.embed_tokens.weight
        table[5] = 0.0
        table[5, 0] = 1.0
        table[6] = table[5]
        table[6, 1] = times * SAFETY * floor
    moved = preimage.load(module)
    assert noise_floor(moved, (0,))[0] == floor
    spacing = preimage.find_collisions(moved, [[9, 5], [9, 6], [8, 3]], 0, hard_bases=0).at(0).spacing
    assert (spacing.within_noise, spacing.unexplained) == ((1, 1) if times < 1 else (0, 0))
    assert spacing.closest_pair.noise_radius == pytest.approx(SAFETY * floor, rel=1e-6)


@pytest.mark.parametrize("prompts", [[[7], [8]], [[7, 7], [7]], [[7] * 2, [7] * 3, [7] * 4]])
def test_two_prompts_and_nothing_but_collisions_are_enough(prompts: list[list[int]]) -> None:
    audit = preimage.find_collisions(tiny("llama"), prompts)
    assert audit.unexplained == 0
    assert all(found.spacing.closest_pair is not None for found in audit.layers)


# --- how it is shown ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_blocks_drawn_one_at_a_time_are_the_same_map(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = tiny(name), torch.tensor([random_ids(6)])
    layers: tuple[Layer, ...] = (0, 2, "final")
    held = draw_by_block(model, 3)
    monkeypatch.setattr(block_draws, "_HELD", 0)
    dropped = draw_by_block(model, 3)
    for layer in layers:
        states = held.states(ids, (layer,))[layer]
        assert states.dtype == torch.float64
        assert torch.equal(states, dropped.states(ids, (layer,))[layer])
        assert not torch.equal(states, draw_by_block(model, 4).states(ids, (layer,))[layer])
    blocks = [parameter for block in dropped.anatomy.blocks for parameter in block.parameters()]
    assert all(parameter.numel() == 0 for parameter in blocks)
    assert sum(p.numel() for p in held.module.parameters()) == sum(
        p.numel() for p in model.anatomy.backbone.parameters()
    )
    shown = ConfirmedStructure(model, PROMPTS, ABOVE)
    learned = name in ("gpt2", "opt")
    assert shown.explain(FAMILY[0], FAMILY[2], 3, near=False) == ("" if learned else CONSTANT)


def test_nothing_is_drawn_where_nothing_may_have_to_collide(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(confirmation, "draw_by_block", fail)
    prompts = [[*random_ids(8, seed), seed] for seed in range(6)]
    assert preimage.find_collisions(tiny("llama"), prompts, hard_bases=0).unexplained == 0


def test_what_cannot_be_shown_is_not_claimed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any) -> None:
        raise ModelError("A copy in float64 takes 60.0 GiB; 20.0 GiB are free.", "Use a smaller model.")

    monkeypatch.setattr(block_draws, "require_memory", full)
    with caplog.at_level(logging.WARNING):
        audit = preimage.find_collisions(tiny("llama"), PROMPTS, 2, hard_bases=0)
    assert (audit.at(2).spacing.explained, audit.unexplained) == ({}, 3)
    assert "no structural collision is claimed: A copy in float64 takes 60.0 GiB" in caplog.text


@pytest.mark.parametrize(("make", "said"), [(lambda: tiny("llama"), CONSTANT), (gpt_oss, "")])
def test_prompts_too_many_to_run_follow_those_that_were(
    make: Callable[[], LanguageModel], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(confirmation, "_TOKENS", {"cpu": 5})
    shown = ConfirmedStructure(make(), [[7] * 17, [7] * 20, [8, 8], [8] * 3], (3,))
    assert shown.explain([8] * 2, [8] * 3, 3, near=False) == said
    assert shown.explain([7] * 17, [7] * 20, 3, near=False) == said
    alone = ConfirmedStructure(make(), [[7] * 17, [7] * 20], (3,))  # nothing of the family can be run
    assert alone.explain([7] * 17, [7] * 20, 3, near=False) == ""


def test_a_structure_that_is_only_supposed_names_what_it_supposes() -> None:
    structure = Structure(tiny("llama"))
    assert structure.explain([7, 7], [7], 2, near=False) == CONSTANT
    assert structure.explain([7, 8], [7], 2, near=False) == ""
    assert structure.explain([7, 8], [7], 2, near=True) == UNEXPLAINED
