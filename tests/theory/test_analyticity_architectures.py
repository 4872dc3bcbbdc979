"""Architectures whose routers subclass Linear, one that floors positions, and roots that stay below one."""

from __future__ import annotations

from typing import Any

import torch
import transformers as t

import preimage
from preimage.models import LanguageModel
from preimage.theory.analyticity.checking import check_analyticity
from preimage.theory.result import TheoryReport
from support.tiny import VOCABULARY

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
