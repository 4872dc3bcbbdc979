"""Analyticity: what breaks it is found and named, and each verdict is seen both ways."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as t
from torch import Tensor, nn
from torch.nn.functional import relu, silu

import preimage
from preimage.models import LanguageModel
from preimage.theory.analyticity.check import check_analyticity, positional_scheme
from preimage.theory.result import TheoryReport
from support.tiny import NAMES, VOCABULARY, build, tiny

OVERALL, ACTIVATION, ROUTING, CLIPPING, QUANTISED, DOMAIN, DROPOUT, OTHER = range(8)
BREAKS = {"opt": ACTIVATION, "mixtral": ROUTING}


def load(name: str, **changes: object) -> LanguageModel:
    return preimage.load(build(name, **changes))


def olmo(**changes: object) -> LanguageModel:
    shape = {key: getattr(build("llama").config, key) for key in ("vocab_size", "hidden_size")}
    config = t.OlmoConfig(
        **shape, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, pad_token_id=0, **changes
    )
    return preimage.load(t.AutoModelForCausalLM.from_config(config))


def holds(report: TheoryReport) -> list[bool | None]:
    return [verdict.holds for verdict in report.verdicts]


def only(report: TheoryReport, verdict: int, value: bool | None = False) -> dict[str, Any]:
    """The single break of a report, after checking that nothing else is said to be broken."""
    expected: list[bool | None] = [None if verdict == OTHER else True] * 8  # what is not read may be anything
    expected[OVERALL] = expected[verdict] = value
    assert holds(report) == expected
    (row,) = report.tables["breaks"]
    assert row["analytic"] == ("no" if value is False else "unknown")
    return row


def test_verdicts_have_stable_ids() -> None:
    assert [verdict.id.partition(".")[2] for verdict in check_analyticity(tiny("llama")).verdicts] == [
        "every_block",
        "activation",
        "routing",
        "clipping",
        "quantised",
        "domain",
        "dropout",
        "known",
    ]


def value(report: TheoryReport, wanted: str) -> str:
    (found,) = (row["value"] for row in report.tables["structure"] if row["property"].startswith(wanted))
    return found


# --- whole models -----------------------------------------------------------------------------


@pytest.mark.real_model
def test_the_default_model_is_analytic(smollm2: LanguageModel) -> None:
    report = check_analyticity(smollm2)
    assert report.holds
    assert not report.tables["breaks"]
    assert len(report.tables["modules"]) < 25  # thirty blocks, one line a place
    assert {row["count"] for row in report.tables["modules"]} == {1, 30}
    assert value(report, "positions") == "rotary"
    assert value(report, "tokenizer puts BOS first") == "no"
    groups = [row["tokens"] for row in report.tables["equal_embeddings"]]
    assert [5, 9, 11, 36743] in groups
    assert value(report, "embedding rows") == str(sum(map(len, groups)) - len(groups)) == "11"
    for group in groups:
        rows = smollm2.embedding_table[group]
        assert torch.equal(rows, rows[:1].expand_as(rows))


@pytest.mark.parametrize("name", [name for name in NAMES if name not in BREAKS])
def test_smooth_architectures_are_analytic(name: str) -> None:
    report = check_analyticity(tiny(name))
    assert report.holds
    rows = report.tables["modules"]
    assert {row["analytic"] for row in rows} == {"yes"}
    ran = {name for row in rows for name in row["operations"].split(", ")}
    assert "embedding" in ran
    assert ran & {"mm", "addmm"}
    assert ran & {"silu", "gelu", "tanh"}
    assert ran & {"rsqrt", "native_layer_norm"}
    assert any("attention" in name or "softmax" in name for name in ran)


def test_opt_has_kinks_where_its_activations_are() -> None:
    row = only(check_analyticity(tiny("opt")), ACTIVATION)
    assert (row["path"], row["class"], row["count"]) == ("model.decoder.layers.*.activation_fn", "ReLU", 3)
    assert check_analyticity(load("opt", activation_function="gelu")).holds


def test_mixtral_chooses_experts() -> None:
    row = only(check_analyticity(tiny("mixtral")), ROUTING)
    assert (row["path"], row["count"]) == ("model.layers.*.mlp.gate", 3)
    assert "topk" in row["reason"]
    row = only(check_analyticity(load("mixtral", num_experts_per_tok=4)), ROUTING, None)
    assert "every entry" in row["reason"]  # all four: nothing is chosen, but their order jumps


def test_olmo_clips_where_its_config_says_so() -> None:
    row = only(check_analyticity(olmo(clip_qkv=8.0)), CLIPPING)
    assert row["path"] == "model.layers.*.self_attn"
    assert check_analyticity(olmo()).holds


@pytest.mark.parametrize(
    ("activation", "verdict"),
    [("relu6", ACTIVATION), ("relu2", ACTIVATION), ("leaky_relu", ACTIVATION), ("gelu_10", CLIPPING)],
)
def test_other_activations_that_break(activation: str, verdict: int) -> None:
    row = only(check_analyticity(load("gpt2", activation_function=activation)), verdict)
    assert row["path"] == "transformer.h.*.mlp.act"


@pytest.mark.parametrize(
    "activation", ["gelu", "gelu_new", "gelu_pytorch_tanh", "silu", "tanh", "quick_gelu"]
)
def test_activations_that_do_not(activation: str) -> None:
    assert check_analyticity(load("gpt2", activation_function=activation)).holds


# --- one thing changed ------------------------------------------------------------------------


def test_one_changed_block_is_named() -> None:
    model = load("llama")
    model.module.model.layers[1].mlp.act_fn = nn.LeakyReLU()
    row = only(check_analyticity(model), ACTIVATION)
    assert (row["first"], row["count"]) == ("model.layers.1.mlp.act_fn", 1)


@pytest.mark.parametrize(
    ("name", "attribute"), [("llama", "variance_epsilon"), ("gemma2", "eps"), ("gpt2", "eps")]
)
def test_a_norm_needs_eps(name: str, attribute: str) -> None:
    model = load(name)
    assert model.anatomy.norm is not None
    setattr(model.anatomy.norm, attribute, 0.0)
    row = only(check_analyticity(model), DOMAIN)
    assert row["count"] == 1
    assert "eps = 0" in row["reason"]


def test_dropout_breaks_only_while_training() -> None:
    model = load("gpt2")
    assert check_analyticity(model).holds
    model.module.train()
    report = check_analyticity(model)
    assert holds(report)[OVERALL] is False
    assert holds(report)[DROPOUT] is False
    assert {row["kind"] for row in report.tables["breaks"]} == {"dropout"}
    assert "transformer.h.*.mlp.dropout" in {row["path"] for row in report.tables["breaks"]}
    assert all(part.training for part in model.module.modules())  # the mode is left as it was
    model = load("llama")
    model.module.train()
    assert check_analyticity(model).holds  # its dropout is 0
    model.module.model.layers[0].self_attn.attention_dropout = 0.5
    assert only(check_analyticity(model), DROPOUT)["first"] == "model.layers.0.self_attn"


def test_weights_of_one_byte_are_quantised() -> None:
    model = load("llama")
    linear = model.module.model.layers[2].mlp.up_proj
    linear.weight = nn.Parameter(torch.zeros(linear.weight.shape, dtype=torch.int8), requires_grad=False)
    report = check_analyticity(model)
    expected: list[bool | None] = [None] * 8  # the pass fails: it cannot be read
    expected[OVERALL] = expected[QUANTISED] = False
    assert holds(report) == expected
    (row,) = (row for row in report.tables["breaks"] if row["kind"] == "quantised")
    assert row["first"] == "model.layers.2.mlp.up_proj"


@pytest.mark.parametrize("name", ["Linear4bit", "Linear8bitLt", "QuantLinear", "HQQLinear", "FP8Linear"])
def test_quantised_layers_are_known_by_name(name: str) -> None:
    model = load("llama")
    model.module.model.layers[1].mlp.up_proj.__class__ = type(name, (nn.Linear,), {})
    assert only(check_analyticity(model), QUANTISED)["first"] == "model.layers.1.mlp.up_proj"


def test_quantised_tensors_are_known_by_their_type() -> None:
    kind = type("Grid", (Tensor,), {"__module__": "torchao.quantization.grid"})
    model = load("llama")
    model.module.model.layers[1].mlp.register_buffer("codes", torch.zeros(2).as_subclass(kind))
    assert only(check_analyticity(model), QUANTISED)["first"] == "model.layers.1.mlp"


def test_rows_that_are_rescaled_break() -> None:
    model = load("llama")
    model.anatomy.embedding.max_norm = 1.0
    assert only(check_analyticity(model), CLIPPING)["path"] == "model.embed_tokens"
    assert "max_norm" in only(check_analyticity(model), CLIPPING)["reason"]


# --- what is not known ------------------------------------------------------------------------


@pytest.mark.parametrize(("function", "expected"), [(silu, True), (relu, False), (math.sinh, None)])
def test_plain_functions_are_activations_too(function: Any, expected: bool | None) -> None:
    model = load("llama")
    for block in model.module.model.layers:
        del block.mlp.act_fn
        block.mlp.act_fn = function
    report = check_analyticity(model)
    assert holds(report)[OVERALL] is holds(report)[ACTIVATION] is expected


def test_a_pass_that_fails_leaves_everything_open() -> None:
    model = load("llama")
    model.module.model.layers[0].mlp.act_fn.forward = math.sinh
    report = check_analyticity(model)
    assert holds(report) == [None] * 8
    assert all("failed: " in row["reason"] for row in report.tables["breaks"])
    assert not torch._C._len_torch_dispatch_stack()


def test_an_operation_that_is_not_known_leaves_it_open() -> None:
    model = load("llama")
    model.module.model.layers[1].mlp.act_fn.forward = torch.lgamma  # analytic here and there, and not listed
    row = only(check_analyticity(model), OTHER, None)
    assert row["first"] == "model.layers.1.mlp.act_fn"
    assert "lgamma" in row["reason"]


def test_code_without_source_is_followed_all_the_same() -> None:
    space: dict[str, Any] = {"torch": torch}
    exec("def smooth(x): return x * torch.sigmoid(x)\ndef kinked(x): return torch.relu(x)", space)
    for name, expected in (("smooth", True), ("kinked", False)):
        model = load("llama")
        model.module.model.layers[0].mlp.act_fn.forward = space[name]
        assert holds(check_analyticity(model))[OVERALL] is expected


def test_nothing_of_the_model_or_of_torch_changes() -> None:
    model = load("gpt2")
    model.module.train()
    before = {name: tensor.clone() for name, tensor in model.module.state_dict().items()}
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    check_analyticity(model)
    assert torch.equal(torch.rand(3), expected)  # the dropouts that were followed drew from another stream
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.module.state_dict().items())
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.module.modules())


# --- what decides the structural cases --------------------------------------------------------


class Letters:
    """A tokenizer of one letter a token, with or without BOS in front."""

    def __init__(self, habit: bool) -> None:
        self.bos_token_id, self._habit = 1, habit

    def __call__(self, text: str, /, *, add_special_tokens: bool = True) -> Mapping[str, Any]:
        ids = [ord(letter) % VOCABULARY for letter in text]
        return {"input_ids": [1, *ids] if add_special_tokens and self._habit else ids}

    def decode(self, ids: Sequence[int], /, **_: bool) -> str:
        return "".join(map(chr, ids))


def test_bos_habit() -> None:
    for tokenizer, expected in (
        (None, "unknown: no tokenizer"),
        (Letters(True), "yes"),
        (Letters(False), "no"),
    ):
        model = preimage.load(build("llama"), tokenizer=tokenizer)
        assert value(check_analyticity(model), "tokenizer") == expected


def schemes() -> Iterator[tuple[LanguageModel, str]]:
    yield tiny("gpt2"), "learned"
    yield tiny("opt"), "learned"
    yield tiny("llama"), "rotary"
    yield tiny("gemma3"), "rotary"
    bloom = t.BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4)
    yield preimage.load(t.AutoModelForCausalLM.from_config(bloom)), "ALiBi"
    bare = load("gpt2")
    bare.module.transformer.wpe.weight.data.zero_()
    yield bare, "none detected"


def test_positional_schemes() -> None:
    for model, expected in schemes():
        assert positional_scheme(model) == expected


def test_windows_and_equal_rows() -> None:
    assert value(check_analyticity(tiny("llama")), "sliding") == "none"
    assert value(check_analyticity(tiny("mistral")), "sliding").startswith("7 tokens in 3 of 3 blocks")
    assert value(check_analyticity(tiny("gemma2")), "sliding").startswith("5 tokens in 2 of 3 blocks")
    module = build("llama")
    with torch.no_grad():
        table = module.model.embed_tokens.weight
        table[7] = table[30] = table[3]
        table[9] = table[8]
    report = check_analyticity(preimage.load(module))
    assert value(report, "embedding rows") == "3"
    assert report.tables["equal_embeddings"] == [{"tokens": [3, 7, 30]}, {"tokens": [8, 9]}]


def test_the_report_is_plain_json(tmp_path: Path) -> None:
    path = check_analyticity(tiny("mixtral")).save(tmp_path / "analyticity.json")
    saved = json.loads(path.read_text())
    assert saved["holds"] is False
    assert saved["tables"]["breaks"][0]["path"] == "model.layers.*.mlp.gate"
