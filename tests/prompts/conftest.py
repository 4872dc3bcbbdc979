"""Tokenizers: with a BOS, adding it, and without one."""

from __future__ import annotations

import pytest
from transformers import PreTrainedTokenizerFast

from support.prompting import make_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """Knows a BOS, does not add it by itself."""
    return make_tokenizer(bos=True, adds_bos=False)


@pytest.fixture(scope="session")
def eager() -> PreTrainedTokenizerFast:
    """Adds its BOS by itself, as Llama's does."""
    return make_tokenizer(bos=True, adds_bos=True)


@pytest.fixture(scope="session")
def bare() -> PreTrainedTokenizerFast:
    """Has no BOS at all."""
    return make_tokenizer(bos=False, adds_bos=False)
