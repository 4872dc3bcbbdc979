"""The layer map F^l: the numbers of plain transformers, and no block more than needed."""

import numpy as np
import pytest
import torch
import transformers

import preimage
from preimage.errors import LayerError, ModelError
from preimage.layers import parse_layers
from support.tiny import NAMES, VOCABULARY, build, random_ids, tiny


@pytest.mark.parametrize("length", [1, 2, 17, 64])
@pytest.mark.parametrize("name", NAMES)
def test_captured_states_equal_transformers_bit_for_bit(name: str, length: int) -> None:  # N10
    model = tiny(name)
    ids = [random_ids(length, seed) for seed in range(3)]
    states = preimage.capture(model, ids)
    assert states.layers == (0, 1, 2, 3, "final")
    for prompt, row in enumerate(ids):
        with torch.no_grad():
            plain = model.module(torch.tensor([row]), output_hidden_states=True)
            last = model.module.base_model(torch.tensor([row])).last_hidden_state
        for layer in range(3):
            assert torch.equal(states.at(prompt, layer), plain.hidden_states[layer][0])
        assert torch.equal(states.at(prompt, "final"), plain.hidden_states[-1][0])
        assert torch.equal(states.at(prompt, "final"), last[0])
        raw = states.at(prompt, 3)  # transformers hides it behind the norm
        assert not torch.equal(raw, states.at(prompt, "final"))
        with torch.no_grad():
            assert torch.equal(model.anatomy.norm(raw[None])[0], last[0])


@pytest.mark.parametrize("name", NAMES)
def test_blocks_above_the_layer_and_the_head_do_not_run(name: str) -> None:
    model = preimage.load(build(name))
    ran: list[int] = []
    for number, block in enumerate(model.anatomy.blocks, start=1):
        # at layer 0 block 1 is entered, and left before anything inside it computes
        for part in [module for module in block.modules() if module is not block]:
            part.register_forward_pre_hook(lambda *_, number=number: ran.append(number))
    head = model.module.get_output_embeddings()
    head.register_forward_pre_hook(lambda *_: ran.append(-1))
    for layer, expected in ((0, []), (1, [1]), (2, [1, 2]), ("final", [1, 2, 3])):
        ran.clear()
        model.states(torch.tensor([random_ids(5)]), (layer,))
        assert list(dict.fromkeys(ran)) == expected


@pytest.mark.parametrize("name", NAMES)
def test_trying_candidates_leaves_the_prefix_unchanged(name: str) -> None:  # N12
    model, ids = tiny(name), torch.tensor(random_ids(20))
    prefix = model.prefix(3)
    prefix.extend(ids[:12])
    before = [(part.keys.clone(), part.values.clone()) for part in prefix._parts]
    alone = prefix.try_tokens(ids[12:13])
    prefix.try_tokens(torch.arange(VOCABULARY))
    prefix.try_embeddings(model.embedding_table[:3] + 0.1)
    assert len(prefix) == 12
    for part, (keys, values) in zip(prefix._parts, before, strict=True):
        assert torch.equal(part.keys, keys)
        assert torch.equal(part.values, values)
    assert torch.equal(prefix.try_tokens(ids[12:13]), alone)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("layer", [0, 1, 3, "final"])
def test_prefix_gives_the_states_of_a_full_pass(name: str, layer: int | str) -> None:  # N11
    model, ids = tiny(name), torch.tensor(random_ids(30))
    full = model.states(ids[None], (layer,))[layer][0]
    allowed = 16 * preimage.noise_floor(model, (layer,))[layer]
    prefix = model.prefix(layer)
    parts = [prefix.extend(ids[:9]), prefix.extend(ids[9:20])]
    prefix.extend(ids[:6])
    prefix.crop(20)
    parts.append(prefix.try_tokens(torch.stack([ids[3], ids[20], ids[5]]))[1:2])
    parts.append(prefix.extend(ids[20:])[1:])
    error = (torch.cat(parts) - full).double().norm(dim=-1)
    assert bool((error <= allowed * full.double().norm(dim=-1)).all())


@pytest.mark.parametrize("name", NAMES)
def test_gradients_reach_a_continuous_embedding(name: str) -> None:
    model, ids = tiny(name), torch.tensor(random_ids(6))
    prefix = model.prefix(2)
    prefix.extend(ids[:5])
    point = model.embedding_table[ids[5]].clone()
    direction = torch.randn_like(point)

    def loss(e: torch.Tensor) -> torch.Tensor:
        return prefix.try_embeddings(e[None])[0].double().square().sum()

    (gradient,) = torch.autograd.grad(loss(point.requires_grad_(True)), point)
    assert torch.isfinite(gradient).all()
    step = 1e-2 * point.detach().norm() / direction.norm()
    with torch.no_grad():
        slope = (loss(point + step * direction) - loss(point - step * direction)) / (2 * step)
    assert float(slope) == pytest.approx(float(gradient @ direction), rel=0.05, abs=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_layer_states_do_not_depend_on_what_else_is_captured(name: str) -> None:
    model, ids = tiny(name), torch.tensor([random_ids(9)])
    together = model.states(ids, (0, 1, 2, 3, "final"))
    for layer, states in together.items():
        assert torch.equal(model.states(ids, (layer,))[layer], states)


def test_user_module_is_not_changed() -> None:
    module = build("llama")
    before = {name: value.clone() for name, value in module.state_dict().items()}
    model = preimage.load(module)
    preimage.capture(model, [random_ids(5)])
    assert model.module is module
    assert all(parameter.requires_grad for parameter in module.parameters())
    assert not any(len(block._forward_hooks) for block in model.anatomy.blocks)
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name])


def test_weight_hash_follows_the_weights_and_ignores_the_head() -> None:
    module = build("llama", tie_word_embeddings=False)
    same = preimage.load(build("llama", tie_word_embeddings=False)).identity.weight_hash
    assert preimage.load(module).identity.weight_hash == same
    assert preimage.load(module.model).identity.weight_hash == same
    with torch.no_grad():
        module.lm_head.weight[0, 0] += 1
    assert preimage.load(module).identity.weight_hash == same
    with torch.no_grad():
        module.model.layers[2].mlp.up_proj.weight[0, 0] += 1e-6
    assert preimage.load(module).identity.weight_hash != same
    assert preimage.load(build("llama", seed=1)).identity.weight_hash != same


def test_what_cannot_be_mapped_is_refused_by_name() -> None:
    t5 = transformers.T5Config(
        vocab_size=20, d_model=16, d_kv=4, d_ff=16, num_layers=2, num_heads=2, decoder_start_token_id=0
    )
    with pytest.raises(ModelError, match=r"T5.*encoder-decoder"):
        preimage.load(transformers.T5ForConditionalGeneration(t5))
    with pytest.raises(ModelError, match=r"Linear.*not a transformers model"):
        preimage.load(torch.nn.Linear(3, 3))


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("all", (0, 1, 2, 3, "final")),
        (2, (2,)),
        ("1-3", (1, 2, 3)),
        ("final,0", (0, "final")),
        ([3, "final", 3], (3, "final")),
        (np.int64(2), (2,)),
        (np.array([3, 1]), (1, 3)),
    ],
)
def test_layer_specifications(spec: object, expected: tuple[object, ...]) -> None:
    assert parse_layers(spec, 3) == expected


@pytest.mark.parametrize(
    "spec",
    [4, -1, "4", "-1", "last", "", "3-1", [], True, "0-9", 1.5, "1.5", [1.5], [None], None, [[1]], b"1",
     {"final": 1.0}.values(), np.array(1.5)],
    ids=repr,
)  # fmt: skip
def test_wrong_layers_name_what_is_allowed(spec: object) -> None:
    with pytest.raises(LayerError) as caught:
        parse_layers(spec, 3)
    assert caught.value.hint == 'This model has layers 0..3 and "final".'


@pytest.mark.parametrize("name", NAMES)
def test_states_carried_up_are_those_of_a_whole_pass(name: str) -> None:
    model = tiny(name)
    ids = torch.tensor([random_ids(9, seed) for seed in range(3)])
    layers = (0, 1, 2, 3, "final")
    whole = model.states(ids, layers)
    for at, start in enumerate(layers):
        assert model.lift(whole[start], start, start) is whole[start]
        for layer in layers[at + 1 :]:
            torch.testing.assert_close(model.lift(whole[start], start, layer), whole[layer])
    for layer, states in model.states(ids, layers).items():  # and nothing was left behind in the model
        assert torch.equal(states, whole[layer])
