"""Sites inside blocks: the numbers of plain transformers, beside a residual stream that does not notice."""

from collections.abc import Callable

import pytest
import torch
import transformers as t
from torch import Tensor, nn

import preimage
from preimage.errors import ModelError
from preimage.models import LanguageModel, depth, unrotated
from preimage.models.sites import unseen
from preimage.observations import Site
from support.refusing import refused
from support.tiny import NAMES, VOCABULARY, build, random_ids, tiny

WITHOUT_ROTARY = ("gpt2", "opt")
KINDS = ("keys", "values", "kv", "attention", "mlp")
SITES = [Site(block, kind) for block in (1, 3) for kind in KINDS]
SITES += [Site(block, kind, "before") for block in (1, 3) for kind in ("keys", "kv")]
SHAPE = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 32}
SHORT = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2}


def loaded(config: t.PreTrainedConfig) -> LanguageModel:
    torch.manual_seed(0)
    return preimage.load(t.AutoModelForCausalLM.from_config(config))


def beside(heads: Tensor) -> Tensor:
    return heads.transpose(1, 2).flatten(2)


@pytest.mark.parametrize("name", NAMES)
def test_keys_and_values_are_those_of_the_cache_of_transformers(name: str) -> None:
    model, ids = tiny(name), torch.tensor([random_ids(17, seed) for seed in range(2)])
    cache = t.DynamicCache()  # of layers that keep everything, windows included
    with torch.no_grad():
        model.module(ids, past_key_values=cache, use_cache=True)
    for block, layer in enumerate(cache.layers, start=1):
        keys, values = beside(layer.keys), beside(layer.values)
        both = torch.cat([keys, values], dim=-1)
        for kind, expected in (("keys", keys), ("values", values), ("kv", both)):
            site = Site(block, kind)
            assert torch.equal(model.states(ids, (site,))[site], expected)
            assert model.width(site) == expected.shape[-1]


def unturned_keys(model: LanguageModel, block: int, x: Tensor) -> Tensor:
    """Keys before rotary, by hand: projections and norms of some classes by their names."""
    part = model.anatomy.blocks[block - 1]
    normed = part.input_layernorm(x)
    if hasattr(part, "attention"):  # GPT-NeoX: query, key and value of each head lie together
        return part.attention.query_key_value(normed).view(*x.shape[:2], 4, 3, -1)[..., 1, :].flatten(2)
    if hasattr(part.self_attn, "qkv_proj"):  # Phi-3: all queries, then all keys
        return part.self_attn.qkv_proj(normed)[..., 32:48]
    keys = part.self_attn.k_proj(normed).view(*x.shape[:2], 2, -1)
    return getattr(part.self_attn, "k_norm", nn.Identity())(keys).flatten(2)


@pytest.mark.parametrize("block", [1, 3])
@pytest.mark.parametrize(
    "name", ["gpt_neox", "llama", "mistral", "qwen2", "qwen3", "gemma3", "phi3", "mixtral"]
)
def test_keys_before_rotary_are_what_the_projection_gives(name: str, block: int) -> None:
    model, ids = tiny(name), torch.tensor([random_ids(11)])
    site = Site(block, "keys", "before")
    seen = model.states(ids, (site, block - 1))
    with torch.no_grad():
        torch.testing.assert_close(seen[site], unturned_keys(model, block, seen[block - 1]))


@pytest.mark.parametrize("name", NAMES)
def test_keys_turned_back_are_those_before_rotary(name: str) -> None:
    model, ids = tiny(name), torch.tensor([random_ids(23, seed) for seed in range(2)])
    for block in (1, 2, 3):
        for kind in ("keys", "kv"):
            after, before = Site(block, kind), Site(block, kind, "before")
            seen = model.states(ids, (after, before))
            assert torch.equal(seen[after], seen[before]) == (name in WITHOUT_ROTARY)
            counted = model.forward_tokens
            turned = unrotated(model, after, seen[after])
            torch.testing.assert_close(turned, seen[before], atol=1e-5, rtol=1e-5)
            later = unrotated(model, after, seen[after][0, 9:], start=9)
            torch.testing.assert_close(later, seen[before][0, 9:], atol=1e-5, rtol=1e-5)
            assert model.forward_tokens == counted


ROTARY: dict[str, Callable[[], t.PreTrainedConfig]] = {
    "keys scaled by attention": lambda: t.LlamaConfig(**SHAPE, rope_parameters=YARN),
    "sliced by attention itself": lambda: t.PhiConfig(**SHAPE),
    "interleaved": lambda: t.CohereConfig(**SHAPE),
    "half as many angles": lambda: t.GptOssConfig(**SHAPE, head_dim=8, num_local_experts=4),
    "some blocks without": lambda: t.SmolLM3Config(**SHAPE, no_rope_layers=[1, 0, 1]),
    "one head of keys": lambda: t.FalconConfig(
        **SHORT, hidden_size=32, num_hidden_layers=2, num_attention_heads=4
    ),
}  # fmt: skip


@pytest.mark.parametrize("config", ROTARY.values(), ids=ROTARY)
def test_other_ways_to_turn_are_turned_back_too(config: Callable[[], t.PreTrainedConfig]) -> None:
    model, ids = loaded(config()), torch.tensor([random_ids(12)])
    for block in (1, 2):
        after, before = Site(block, "keys"), Site(block, "keys", "before")
        seen = model.states(ids, (after, before))
        turned = unrotated(model, after, seen[after])
        torch.testing.assert_close(turned, seen[before], atol=1e-5, rtol=1e-5)


def test_a_latent_cache_is_not_turned_back() -> None:
    config = t.DeepseekV3Config(
        **SHAPE | {"num_key_value_heads": 4}, moe_intermediate_size=16, n_routed_experts=4, n_group=2,
        topk_group=1, num_experts_per_tok=2, kv_lora_rank=8, q_lora_rank=8, qk_rope_head_dim=4, v_head_dim=8,
        qk_nope_head_dim=4,
    )  # fmt: skip
    model, site = loaded(config), Site(2, "kv")
    seen = model.states(torch.tensor([random_ids(6)]), (site,))[site]
    assert unrotated(model, site, seen) is None


@pytest.mark.parametrize("name", NAMES)
def test_attention_and_mlp_are_what_is_added_to_the_stream(name: str) -> None:
    model, ids = tiny(name), torch.tensor([random_ids(13, seed) for seed in range(2)])
    for block in (1, 2, 3):
        part = model.anatomy.blocks[block - 1]
        attention, mlp = Site(block, "attention"), Site(block, "mlp")
        seen = model.states(ids, (block - 1, attention, mlp, block))
        added = {attention: seen[attention], mlp: seen[mlp]}
        with torch.no_grad():
            if hasattr(part, "post_feedforward_layernorm"):  # normed again before it is added
                added = {
                    attention: part.post_attention_layernorm(seen[attention]),
                    mlp: part.post_feedforward_layernorm(seen[mlp]),
                }
        torch.testing.assert_close(seen[block - 1] + added[attention] + added[mlp], seen[block])


@pytest.mark.parametrize("name", NAMES)
def test_what_is_seen_does_not_depend_on_what_else_is(name: str) -> None:
    model, ids = tiny(name), torch.tensor([random_ids(9, seed) for seed in range(2)])
    layers = (0, 1, 3, "final")
    together = model.states(ids, ("final", *SITES, 3, 1, 0))
    for layer, states in model.states(ids, layers).items():
        assert torch.equal(states, together[layer])
    for site in SITES:
        assert torch.equal(model.states(ids, (site,))[site], together[site])


@pytest.mark.parametrize("name", NAMES)
def test_the_pass_ends_at_the_site_and_leaves_nothing_behind(name: str) -> None:
    model = preimage.load(build(name))
    ran: list[str] = []
    for number, block in enumerate(model.anatomy.blocks, start=1):
        for path, part in block.named_modules():
            if path and not list(part.children()):
                part.register_forward_pre_hook(lambda *_, at=f"{number}.{path}": ran.append(at))
    hooks = [len(part._forward_hooks) + len(part._forward_pre_hooks) for part in model.module.modules()]
    for site in [Site(2, kind) for kind in KINDS] + [Site(2, "keys", "before")]:
        ran.clear()
        model.states(torch.tensor([random_ids(5)]), (site,))
        assert {at[0] for at in ran} == {"1", "2"}
        if site.kind in ("keys", "values", "kv"):
            assert not [
                at for at in ran if at.startswith("2.") and ("o_proj" in at or "mlp" in at or "fc" in at)
            ]
    now = [len(part._forward_hooks) + len(part._forward_pre_hooks) for part in model.module.modules()]
    assert now == hooks


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("site", SITES, ids=str)
def test_a_prefix_gives_what_a_full_pass_gives(name: str, site: Site) -> None:
    model, ids = tiny(name), torch.tensor(random_ids(30))
    full = model.states(ids[None], (site,))[site][0]
    prefix = model.prefix(site)
    parts = [prefix.extend(ids[:9]), prefix.extend(ids[9:20])]
    prefix.extend(ids[:6])
    prefix.crop(20)
    parts.append(prefix.try_tokens(torch.stack([ids[3], ids[20], ids[5]]))[1:2])
    parts.append(prefix.extend(ids[20:])[1:])
    torch.testing.assert_close(torch.cat(parts), full, atol=1e-5, rtol=1e-4)
    assert not any("update" in vars(part) for part in prefix._parts)


@pytest.mark.parametrize("site", SITES, ids=str)
@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "llama", "qwen3", "olmo2"])
def test_branches_give_what_trying_alone_gives(name: str, site: Site) -> None:
    model, ids = tiny(name), torch.tensor(random_ids(12))
    places, tokens = torch.tensor([0, 5, 11]), torch.tensor([7, 8, 9])
    prefix = model.prefix(site)
    states, rivals = prefix.extend_and_try(ids, places, tokens)
    torch.testing.assert_close(states, model.states(ids[None], (site,))[site][0], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(prefix.try_at(places, tokens), rivals, atol=1e-5, rtol=1e-4)
    for place, token, rival in zip(places, tokens, rivals, strict=True):
        alone = torch.cat([ids[:place], token[None]])[None]
        torch.testing.assert_close(model.states(alone, (site,))[site][0, -1], rival, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_trying_at_several_sites_leaves_the_prefix_unchanged(name: str) -> None:
    model, ids = tiny(name), torch.tensor(random_ids(12))
    prefix = model.prefix("final")
    prefix.extend(ids)
    before = [(part.keys.clone(), part.values.clone()) for part in prefix._parts]
    tried = prefix.try_layers(torch.arange(4), (1, *SITES, "final"))
    for part, (keys, values) in zip(prefix._parts, before, strict=True):
        assert torch.equal(part.keys, keys)
        assert torch.equal(part.values, values)
    for tap, states in tried.items():
        torch.testing.assert_close(prefix.try_layers(torch.arange(4), (tap,))[tap], states)
        assert states.shape == (4, model.width(tap))


@pytest.mark.parametrize("site", SITES[:5], ids=str)
def test_gradients_reach_a_continuous_embedding(site: Site) -> None:
    model = tiny("llama")
    prefix = model.prefix(site)
    prefix.extend(torch.tensor(random_ids(5)))
    point = model.embedding_table[7].clone().requires_grad_(True)
    (gradient,) = torch.autograd.grad(prefix.try_embeddings(point[None]).square().sum(), point)
    assert torch.isfinite(gradient).all()
    assert bool(gradient.abs().max() > 0)


def test_widths_are_found_out_once_and_cost_nothing() -> None:
    model = preimage.load(build("llama"))
    widths = {kind: model.width(Site(2, kind)) for kind in KINDS}
    assert widths == {"keys": 16, "values": 16, "kv": 32, "attention": 32, "mlp": 32}
    assert (model.width(2), model.width("final"), model.forward_tokens) == (32, 32, 0)


def test_depths_are_in_the_order_of_a_pass() -> None:
    taps = ["final", 2, Site(2, "mlp"), 1, Site(1, "kv"), 0]
    assert sorted(taps, key=depth) == [0, Site(1, "kv"), 1, Site(2, "mlp"), 2, "final"]


def test_an_error_inside_a_pass_leaves_nothing_behind() -> None:
    model = preimage.load(build("llama"))
    prefix = model.prefix(Site(3, "kv"))
    prefix.extend(torch.tensor([3, 4]))

    def fail(*_: object) -> None:
        raise RuntimeError("the cable was pulled")

    handle = model.anatomy.blocks[1].register_forward_hook(fail)
    for site in (Site(3, "kv"), Site(3, "keys", "before"), Site(3, "mlp")):
        with pytest.raises(RuntimeError, match="cable"):
            model.run(torch.tensor([[5]]), layers=(site,), cache=prefix._cache)
    handle.remove()
    assert not any("update" in vars(part) for part in prefix._parts)
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.module.modules())


class Another(nn.Module):
    """Attention that keeps nothing."""

    def forward(self, hidden_states: Tensor, **_: object) -> tuple[Tensor, None]:
        return hidden_states, None


def test_what_a_model_does_not_have_is_refused_by_name() -> None:
    bloom = loaded(t.BloomConfig(**SHORT, hidden_size=32, n_layer=2, n_head=4))
    gptj = loaded(t.GPTJConfig(**SHORT, n_embd=32, n_layer=2, n_head=4, n_positions=64, rotary_dim=4))
    recurrent = loaded(t.RecurrentGemmaConfig(**SHAPE, head_dim=8, lru_width=32, attention_window_size=5))
    replaced = build("llama")
    replaced.model.layers[1].self_attn = Another()
    shared = preimage.load(replaced)
    ids = torch.tensor([[5, 6, 7]])
    for model, site, words in (
        (bloom, Site(1, "mlp"), "The mlp of BloomForCausalLM gives the stream itself"),
        (bloom, Site(1, "attention"), "The attention of BloomForCausalLM gives the stream itself"),
        (gptj, Site(2, "keys", "before"), "GPTJForCausalLM has rotary positions of its own kind"),
        (recurrent, Site(1, "kv"), "RecurrentGemmaForCausalLM has no keys and values in every block"),
        (recurrent, Site(1, "mlp"), "No mlp was found in the blocks of RecurrentGemmaForCausalLM"),
        (shared, Site(2, "values"), "Block 2 of LlamaForCausalLM hands no values on"),
        (shared, Site(2, "keys", "before"), "Block 2 of LlamaForCausalLM hands no keys on"),
    ):
        error = refused(ModelError, lambda model=model, site=site: model.states(ids, (site,)))
        assert words in error.message
    assert unrotated(gptj, Site(1, "keys"), torch.zeros(3, 32)) is None
    assert "hands no keys on" in unseen(shared, Site(2, "keys")).message
    assert shared.states(ids, (Site(1, "keys"), 3))[3].shape == (1, 3, 32)  # the others have theirs
