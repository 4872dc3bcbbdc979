"""Analyticity of models that were tampered with: what breaks it is never missed, wherever it hides.

Each attack takes a smooth Llama and puts something into it. The verdict must be no, or open; not one of these
may be called analytic. The last tests are attacks that change nothing, and have to stay analytic.
"""

from __future__ import annotations

import ctypes
import functools
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import transformers as t
from torch import Tensor, nn
from torch.nn.functional import relu, silu
from torch.nn.utils import parametrize
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama

import preimage
from preimage.models import LanguageModel
from preimage.theory.analyticity.checking import check_analyticity
from preimage.theory.dichotomy.checking import SEPARATED_ABOVE, check_dichotomy
from preimage.theory.result import TheoryReport
from support.tiny import VOCABULARY, build

Attack = Callable[[nn.Module], object]


def verdict(model: LanguageModel) -> tuple[bool | None, list[dict[str, Any]]]:
    report = check_analyticity(model)
    return report.verdicts[0].holds, report.tables["breaks"]


def attacked(attack: Attack) -> tuple[bool | None, list[dict[str, Any]]]:
    model = preimage.load(build("llama", num_hidden_layers=2))
    attack(model.module)
    return verdict(model)


def second(module: Any) -> Any:
    return module.model.layers[1]


# --- functions that hide a kink, applied to what the second block's MLP gives -----------------


def _by_item(x: Tensor) -> Tensor:
    return x * 2 if float(x.mean()) > 0 else x


def _by_list(x: Tensor) -> Tensor:
    return torch.tensor([[[max(v, 0.0) for v in row] for row in rows] for rows in x.tolist()])


def _by_numpy(x: Tensor) -> Tensor:
    return torch.from_numpy(np.maximum(x.numpy(), 0))


def _by_array(x: Tensor) -> Tensor:
    return torch.as_tensor(np.abs(np.asarray(x)))


def _by_memory(x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    ctypes.memmove(out.data_ptr(), x.contiguous().data_ptr(), x.numel() * 4)
    return out


def _by_dlpack(x: Tensor) -> Tensor:
    return torch.from_dlpack(torch.utils.dlpack.to_dlpack(x))


def _elsewhere(x: Tensor) -> Tensor:
    """In a thread, which the modes of torch do not reach."""
    found: list[Tensor] = []
    worker = threading.Thread(target=lambda: found.append(x.abs()))
    worker.start()
    worker.join()
    return found[0]


def _unseen(x: Tensor) -> Tensor:
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes():
        return x.abs()


def _by_storage(x: Tensor) -> Tensor:
    out = torch.empty(x.shape)
    out.untyped_storage().copy_(x.abs().contiguous().untyped_storage())
    return out


def _each(x: Tensor) -> Tensor:
    return x.clone().apply_(lambda v: max(v, 0.0))


def _assigned(x: Tensor) -> Tensor:
    y = x.clone()
    y[y < 0] = 0
    return y


def _through_data(x: Tensor) -> Tensor:
    y = x.clone()
    y.data = x.abs()
    return y


def _in_place(x: Tensor) -> Tensor:
    y = x.clone()
    y[..., :3].relu_()
    return y


def _out(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    torch.abs(x, out=y)
    return y


def _bits(x: Tensor) -> Tensor:
    return (x.contiguous().view(torch.int32) & 0x7FFFFFFF).view(torch.float32)


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.abs()


@torch.library.custom_op("preimage_tests::kink", mutates_args=())
def _kink(x: Tensor) -> Tensor:
    return x.abs()


@torch.library.custom_op("preimage_tests::kink_in_place", mutates_args=("x",))
def _kink_in_place(x: Tensor) -> None:
    x.abs_()


def _custom_in_place(x: Tensor) -> Tensor:
    y = x.clone()
    _kink_in_place(y)
    return y


def _long(x: Tensor) -> Tensor:
    length = x.shape[1]
    if length > 100:
        x = x.clamp(min=0)
    return x * 2


@torch.jit.script
def _scripted(x: Tensor) -> Tensor:
    return torch.relu(x) + 1


def _routed(x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for row in (x.sum(-1) > 0).nonzero():
        out[row[0], row[1]] = x[row[0], row[1]]
    return out


def _cached(x: Tensor) -> Tensor:
    return x * _CACHE


_CACHE = torch.ones(32)


class _Wrapped(Tensor):
    """A tensor that computes by rules of its own, below torch's modes."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> _Wrapped:
        made: _Wrapped = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0].inner.abs()


HIDDEN: dict[str, Callable[[Tensor], Tensor]] = {
    "abs": torch.abs,
    "complex abs": lambda x: (
        torch.view_as_complex(x.view(*x.shape[:-1], 16, 2).contiguous()).abs().repeat(1, 1, 2)
    ),
    "product with a comparison": lambda x: x * (x > 0),
    "where": lambda x: torch.where(x > 0, x, 0.1 * x),
    "root of a square": lambda x: (x * x).sqrt(),
    "power of a power": lambda x: x.pow(2).pow(0.5),
    "quotient by its size": lambda x: x / x.norm(dim=-1, keepdim=True),
    "quotient by 0": lambda x: torch.nan_to_num(x / 0.0, posinf=1.0, neginf=-1.0),
    "times infinity": lambda x: torch.nan_to_num(x * math.inf),
    "overflow": lambda x: torch.where(torch.isinf(torch.exp(x * 1e30)), 0.0, x),
    "largest so far": lambda x: x.cummax(-1).values,
    "largest": lambda x: x - x.amax(-1, keepdim=True),
    "shift of other rows": lambda x: (x - x.amax(-1, keepdim=True)).mT.softmax(-1).mT,
    "shift along another dimension": lambda x: (x - x.amax(-1, keepdim=True)).softmax(-2),
    "half a shift": lambda x: ((x - x.amax(-1, keepdim=True)) * x).softmax(-1),
    "complex power": lambda x: torch.exp(torch.complex(x, x)).real.log(),
    "sum of nothing": lambda x: x + x.exp()[..., :0].sum(-1, keepdim=True).sqrt(),
    "sorted": lambda x: x.sort(-1).values,
    "rounded": lambda x: x.round(),
    "remainder": lambda x: x % 1.0,
    "integers": lambda x: x.int().float(),
    "few bits": lambda x: x.to(torch.float8_e4m3fn).float(),
    "bits": _bits,
    "logarithm": lambda x: x.log(),
    "clamped": lambda x: x.clamp(-1, 1),
    "thresholds": lambda x: torch.bucketize(x, torch.linspace(-1, 1, 5)).float(),
    "pieces": nn.functional.hardswish,
    "elu": nn.functional.elu,
    "lists of tensors": lambda x: torch._foreach_abs([x])[0],
    "mapped": torch.vmap(torch.relu),
    "assigned": _assigned,
    "through data": _through_data,
    "part in place": _in_place,
    "out": _out,
    "branch": _by_item,
    "loop": _routed,
    "list": _by_list,
    "numpy": _by_numpy,
    "array": _by_array,
    "memory": _by_memory,
    "dlpack": _by_dlpack,
    "storage": _by_storage,
    "each entry": _each,
    "thread": _elsewhere,
    "modes off": _unseen,
    "autograd function": _Function.apply,
    "custom operation": _kink,
    "custom operation in place": _custom_in_place,
    "script": _scripted,
    "subclass": lambda x: _Wrapped(x) + 0,
    "tensor of unknown origin": _cached,
    "random": lambda x: x + torch.randn_like(x),
    "uninitialised": lambda x: x + torch.empty(32),
    "other lengths": _long,
    "scatter": lambda x: torch.zeros_like(x).scatter_reduce(
        -1, torch.zeros_like(x, dtype=torch.long), x, "amax"
    ),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_a_hook_may_do_anything_and_is_seen(name: str) -> None:
    def attack(module: nn.Module) -> None:
        second(module).mlp.register_forward_hook(lambda _m, _a, output: HIDDEN[name](output))

    holds, breaks = attacked(attack)
    assert holds is not True
    assert any("layers.1" in row["first"] for row in breaks), breaks


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


class Adapted(nn.Module):
    """A matrix with a low-rank one beside it, as LoRA puts there."""

    def __init__(self, inner: nn.Linear, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.function = inner, function
        self.down = nn.Parameter(torch.randn(2, inner.in_features))
        self.up = nn.Parameter(torch.randn(inner.out_features, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.function(x @ self.down.T) @ self.up.T


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


# --- architectures whose routers subclass Linear, and one that floors positions ---------------

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}


def from_config(config: Any) -> LanguageModel:
    torch.manual_seed(0)
    return preimage.load(t.AutoModelForCausalLM.from_config(config).eval())


def kinds(report: TheoryReport) -> set[str]:
    return {row["kind"] for row in report.tables["breaks"]}


def test_llama_4_and_phi_moe_choose_experts() -> None:
    llama = check_analyticity(from_config(t.Llama4TextConfig(**SIZES, **EXPERTS, intermediate_size_mlp=48)))
    assert llama.verdicts[0].holds is False
    assert kinds(llama) == {"routing"}
    assert {row["class"] for row in llama.tables["breaks"]} == {"Llama4Router"}
    without_width = {key: value for key, value in SIZES.items() if key != "head_dim"}
    phi = check_analyticity(from_config(t.PhimoeConfig(**without_width, **EXPERTS)))
    assert phi.verdicts[0].holds is False
    assert {row["class"] for row in phi.tables["breaks"]} == {"PhimoeTopKRouter"}


def test_a_floor_of_positions_is_no_parameters() -> None:
    report = check_analyticity(from_config(t.Ministral3Config(**SIZES)))
    assert report.holds
    assert not report.tables["breaks"]


def test_sinks_in_a_softmax_that_is_shifted_by_its_largest_entry() -> None:
    """gpt-oss takes the largest score away before its softmax, which is the same softmax."""
    report = check_analyticity(from_config(t.GptOssConfig(**SIZES, **EXPERTS, sliding_window=8)))
    assert kinds(report) == {"routing", "clipping"}  # of its experts, and nothing of its attention
    assert not any("self_attn" in row["path"] for row in report.tables["breaks"])


def test_recurrences_with_roots_of_what_stays_below_one() -> None:
    config = t.RecurrentGemmaConfig(**SIZES, lru_width=32, attention_window_size=8)
    assert check_analyticity(from_config(config)).holds


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


# --- the dichotomy of the model that was given ------------------------------------------------


def test_silenced_attention_separates_nothing_but_last_tokens() -> None:
    module: Any = build("gpt2")
    for block in module.transformer.h:
        block.attn.register_forward_hook(lambda _m, _a, output: (output[0] * 0.0, *output[1:]))
    pair = [[3, 9, 5, 7], [8, 9, 5, 7]]  # the same last token, at the same position
    report = check_dichotomy(preimage.load(module), pair)
    answers = {found.id: found.holds for found in report.verdicts}
    assert answers[SEPARATED_ABOVE] is False
    assert {row["structural"] for row in report.tables["layers"]} == {1}
    plain = check_dichotomy(preimage.load(build("gpt2")), pair)
    assert {found.id: found.holds for found in plain.verdicts}[SEPARATED_ABOVE] is True


def test_a_witness_of_what_is_not_analytic_speaks_for_its_neighbours_alone() -> None:
    module: Any = build("llama")
    second(module).register_forward_hook(lambda _m, _a, output: output.abs())
    report = check_dichotomy(preimage.load(module), [[3, 9, 5], [8, 4, 1]])
    found = {one.id: one for one in report.verdicts}[SEPARATED_ABOVE]
    assert (found.holds, report.subject["analytic"]) == (None, False)
    assert "not known to be analytic" in found.not_shown
    assert report.tables["layers"][-1]["injective_parameters"] == "some"
