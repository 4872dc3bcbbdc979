"""Workers compute in as many threads as the driver, whatever their share of the cores (N4)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import preimage
from preimage.cluster import Cluster
from preimage.models import LanguageModel
from preimage.prompts import PromptOptions, gather
from support.jobs import outcome

WIDE = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3}


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def wide(tmp_path: Path) -> LanguageModel:
    """A model whose products MKL sums in another order in two threads than in one, on some processors."""
    torch.manual_seed(0)
    config = LlamaConfig(**WIDE, num_hidden_layers=2, vocab_size=120, max_position_embeddings=64)
    LlamaForCausalLM(config).eval().save_pretrained(tmp_path / "wide")
    return preimage.load(str(tmp_path / "wide"))


@pytest.mark.usefixtures("two_threads")
def test_bits_are_those_of_a_driver_with_two_threads(wide: LanguageModel) -> None:
    prompts = gather("random", wide, PromptOptions(count=24, length=16))

    def search() -> object:
        return preimage.find_collisions(wide, prompts, hard_bases=1, closest=3)

    one = search()
    with Cluster("local", workers=2) as cluster:
        two = search()  # which a worker of other threads would be refused for
    assert outcome(one) == outcome(two)
    assert sum(stats.pieces for stats in cluster.stats.values()) > 1
