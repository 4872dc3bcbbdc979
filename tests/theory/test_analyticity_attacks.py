"""Analyticity of models that were tampered with: what breaks it is never missed, wherever it hides.

Each attack takes a smooth Llama and puts something into it. The verdict must be no, or open; not one of these
may be called analytic. The last tests are attacks that change nothing, and have to stay analytic.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import relu, silu
from torch.nn.utils import parametrize
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama

import preimage
from preimage.theory.analyticity.checking import check_analyticity
from support.attacks import Adapted, Attack, attacked, second, verdict
from support.tiny import build

# --- ways in ----------------------------------------------------------------------------------


def hook(module: nn.Module) -> None:
    second(module).register_forward_hook(lambda _m, _a, output: output.abs())


def pre_hook(module: nn.Module) -> None:
    second(module).mlp.register_forward_pre_hook(lambda _m, args: (args[0].abs(),))


def hook_on_the_backbone(module: Any) -> None:
    def last(_m: nn.Module, _a: object, output: Any) -> Any:
        output.last_hidden_state = output.last_hidden_state.abs()
        return output

    module.model.register_forward_hook(last)


def instance_forward(module: nn.Module) -> None:
    second(module).mlp.act_fn.forward = relu


def whole_forward(module: nn.Module) -> None:
    mlp = second(module).mlp
    mlp.forward = lambda x: mlp.down_proj(relu(mlp.gate_proj(x)) * mlp.up_proj(x))


def misnamed(module: nn.Module) -> None:
    def silu(x: Tensor) -> Tensor:
        return relu(x)

    del second(module).mlp.act_fn
    second(module).mlp.act_fn = silu


def bound_arguments(module: nn.Module) -> None:
    del second(module).mlp.act_fn
    second(module).mlp.act_fn = functools.partial(torch.clamp, min=-1.0)


def swapped_class(module: nn.Module) -> None:
    class SiLUActivation(type(second(module).mlp.act_fn)):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Tensor:
            return relu(x)

    SiLUActivation.__module__ = "transformers.activations"
    second(module).mlp.act_fn.__class__ = SiLUActivation


def routing_linear(module: nn.Module) -> None:
    class TopKRouter(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            values, places = super().forward(x).topk(4, dim=-1)
            return torch.zeros_like(x[..., :1]).expand(*x.shape[:-1], 48).scatter(-1, places, values)

    TopKRouter.__module__ = "transformers.models.llama4.modeling_llama4"
    second(module).mlp.up_proj.__class__ = TopKRouter


def absolute_norm(module: nn.Module) -> None:
    class LayerNorm(nn.LayerNorm):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).abs()

    LayerNorm.__module__ = "torch.nn.modules.normalization"
    second(module).input_layernorm = LayerNorm(32)


def clipped_table(module: Any) -> None:
    class Embedding(nn.Embedding):
        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(ids).clamp(-0.01, 0.01)

    module.model.embed_tokens.__class__ = Embedding


def rounded_weight(module: nn.Module) -> None:
    class Rounded(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight.mul(64).round() / 64

    parametrize.register_parametrization(second(module).mlp.up_proj, "weight", Rounded())


def normed_weight(module: nn.Module) -> None:
    nn.utils.parametrizations.weight_norm(second(module).mlp.up_proj)


def kinked_adapter(module: nn.Module) -> None:
    second(module).mlp.up_proj = Adapted(second(module).mlp.up_proj, relu)


def hidden_parameter(module: nn.Module) -> None:
    """A parameter that no module owns, and that is cut."""
    free = nn.Parameter(torch.randn(32))
    second(module).mlp.register_forward_hook(lambda _m, _a, output: output + free.clamp(min=0))


def zero_eps(module: Any) -> None:
    module.model.layers[1].input_layernorm.variance_epsilon = 0.0


def failing(module: Any) -> None:
    def hook(_m: nn.Module, _a: object, output: Tensor) -> None:
        if torch._C._len_torch_dispatch_stack():
            raise RuntimeError("not while you look")

    module.model.layers[1].register_forward_hook(hook)


def compiled(module: nn.Module) -> None:
    second(module).mlp.act_fn = torch.compile(nn.ReLU(), backend="eager")


@pytest.mark.parametrize(
    "attack",
    [
        hook,
        pre_hook,
        hook_on_the_backbone,
        instance_forward,
        whole_forward,
        misnamed,
        bound_arguments,
        swapped_class,
        routing_linear,
        absolute_norm,
        clipped_table,
        rounded_weight,
        normed_weight,
        kinked_adapter,
        hidden_parameter,
        zero_eps,
        failing,
        compiled,
    ],
    ids=lambda attack: attack.__name__,
)
def test_every_way_in_is_seen(attack: Attack) -> None:
    holds, breaks = attacked(attack)
    assert holds is not True
    assert breaks
    assert all(row["reason"] for row in breaks)


def test_the_place_and_the_code_are_named() -> None:
    holds, (row,) = attacked(misnamed)
    assert holds is False
    assert (row["path"], row["kind"]) == ("model.layers.*.mlp", "activation")
    assert "relu" in row["reason"]
    assert "misnamed.<locals>.silu" in row["reason"]
    holds, (row,) = attacked(routing_linear)
    assert (holds, row["first"], row["kind"]) == (False, "model.layers.1.mlp.up_proj", "routing")
    assert row["class"] == "TopKRouter"


def test_global_hooks_are_seen() -> None:
    def everywhere(module: nn.Module, _args: object, output: Any) -> Any:
        return output.abs() if isinstance(module, nn.Linear) else output

    model = preimage.load(build("llama"))
    handle = nn.modules.module.register_module_forward_hook(everywhere)
    try:
        report = check_analyticity(model)
    finally:
        handle.remove()
    assert report.verdicts[0].holds is False
    assert check_analyticity(model).verdicts[0].holds is True


def test_a_class_whose_forward_was_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.down_proj(relu(self.gate_proj(x)) * self.up_proj(x))

    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", forward)
    assert verdict(preimage.load(build("llama")))[0] is False


def test_a_module_level_name_that_was_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modeling_llama, "rotate_half", torch.abs)
    assert verdict(preimage.load(build("llama")))[0] is False


@pytest.fixture
def argmax_attention() -> Iterator[str]:
    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **_: object
    ) -> tuple[Tensor, None]:
        groups = query.shape[1] // key.shape[1]
        scores = query @ key.repeat_interleave(groups, 1).mT
        causal = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        best = scores.masked_fill(~causal, -math.inf).argmax(-1)
        chosen = nn.functional.one_hot(best, scores.shape[-1]).to(value) @ value.repeat_interleave(groups, 1)
        return chosen.transpose(1, 2).contiguous(), None

    ALL_ATTENTION_FUNCTIONS.register("argmax_of_tests", attend)
    yield "argmax_of_tests"
    del ALL_ATTENTION_FUNCTIONS._global_mapping["argmax_of_tests"]


def test_attention_from_the_registry_is_read(argmax_attention: str) -> None:
    module: Any = build("llama")
    module.config._attn_implementation = argmax_attention
    holds, breaks = verdict(preimage.load(module))
    assert holds is False
    assert {row["kind"] for row in breaks} == {"routing"}
    assert {row["path"] for row in breaks} == {"model.layers.*.self_attn"}


@pytest.mark.parametrize("name", ["eager", "sdpa"])
def test_attention_of_transformers_is_analytic(name: str) -> None:
    module: Any = build("llama")
    module.config._attn_implementation = name
    assert verdict(preimage.load(module))[0] is True


# --- what changes nothing ---------------------------------------------------------------------


def harmless_hook(module: nn.Module) -> None:
    second(module).register_forward_hook(lambda _m, _a, output: output * 1.5 + 0.25)


def looking_hook(module: nn.Module) -> None:
    seen: list[Tensor] = []
    second(module).register_forward_hook(lambda _m, _a, output: seen.append(output.abs().amax(-1)))


def positions(module: nn.Module) -> None:
    def hook(_m: nn.Module, _a: object, output: Tensor) -> Tensor:
        places = torch.arange(output.shape[1], device=output.device)
        return output * (1 + 0.01 * torch.log1p((places / 4).floor())[:, None])

    second(module).register_forward_hook(hook)


def smooth_adapter(module: nn.Module) -> None:
    second(module).mlp.up_proj = Adapted(second(module).mlp.up_proj, silu)


def own_activation(module: nn.Module) -> None:
    class Mine(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * torch.sigmoid(x)

    second(module).mlp.act_fn = Mine()


def no_activation(module: nn.Module) -> None:
    second(module).mlp.act_fn = nn.Identity()


def buffer(module: nn.Module) -> None:
    block = second(module)
    block.register_buffer("offset", torch.ones(32))
    block.register_forward_hook(lambda owner, _a, output: output + owner.offset.abs())


def one_side_of_the_kink(module: nn.Module) -> None:
    second(module).mlp.register_forward_hook(
        lambda _m, _a, output: relu(output.sigmoid()) + output.exp().abs()
    )


def stable_softmax(module: nn.Module) -> None:
    def hook(_m: nn.Module, _a: object, output: Tensor) -> Tensor:
        return (output - output.max(dim=-1, keepdim=True).values).softmax(-1)

    second(module).mlp.register_forward_hook(hook)


def compiled_smooth(module: nn.Module) -> None:
    second(module).mlp.act_fn = torch.compile(nn.SiLU(), backend="eager")


@pytest.mark.parametrize(
    "change",
    [
        harmless_hook,
        looking_hook,
        positions,
        smooth_adapter,
        own_activation,
        no_activation,
        buffer,
        one_side_of_the_kink,
        stable_softmax,
        compiled_smooth,
    ],
    ids=lambda change: change.__name__,
)
def test_what_is_analytic_stays_so(change: Attack) -> None:
    holds, breaks = attacked(change)
    assert (holds, breaks) == (True, [])
