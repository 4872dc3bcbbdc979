"""One prompt: its ids, the BOS rule, and prompts that cannot be used."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import models
from transformers import PreTrainedTokenizerFast

from preimage.errors import OptionError, PromptError
from support.prompting import BOS, collect, make_tokenizer, one
from support.refusing import refused


def test_text_becomes_exactly_what_the_tokenizer_says(tokenizer, eager):
    text = "The import statement, and café ☕."
    plain = tuple(tokenizer(text)["input_ids"])
    assert one(text, tokenizer) == plain
    assert tokenizer.decode(plain) == text
    assert one(text, eager) == (BOS, *plain)


@pytest.mark.parametrize("prompt", [[5, 6], (5, 6), np.array([5, 6]), [np.int64(5), 6]])
def test_ids_become_plain_ints(prompt):
    ids = one(prompt)
    assert ids == (5, 6)
    assert all(type(item) is int for item in ids)


def test_bos_is_added_once_or_never(tokenizer, eager):
    plain = one("import", tokenizer, bos=False)
    assert one("import", eager, bos=False) == plain
    assert one("import", tokenizer, bos=None) == plain
    for either in (tokenizer, eager):
        assert one("import", either, bos=True) == (BOS, *plain)
        assert one([5], either, bos=True) == (BOS, 5)
        assert one([BOS, 5], either, bos=True) == (BOS, 5)
        assert one([5], either, bos=None) == (5,)
        # what the prompt itself holds is never taken away
        assert one([BOS, 5], either, bos=False) == (BOS, 5)


def test_bos_without_one_is_an_option_error(bare):
    error = refused(OptionError, lambda: one("import", bare, bos=True))
    assert "no BOS" in error.message
    assert "no tokenizer" in refused(OptionError, lambda: one([1], None, bos=True)).message
    refused(OptionError, lambda: collect("random", bare, count=2, bos=True))
    assert one("import", bare) == one("import", bare, bos=False)


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("", ["empty"]),
        ([], ["no tokens"]),
        ([4, -1], ["-1", "position 1", "0..599"]),
        ([600], ["600", "position 0", "0..599"]),
        ([1, True], ["True", "bool", "position 1"]),
        ([1.0], ["1.0", "float", "position 0"]),
        (["1"], ["'1'", "str", "position 0"]),
        ([[1, 2]], ["list", "position 0"]),
        (np.array([[1, 2]]), ["list", "position 0"]),
        (np.array(3), ["ndarray", "text or a list of token ids"]),
        (5, ["5", "int", "text or a list of token ids"]),
        (None, ["None", "text or a list of token ids"]),
        (b"bytes", ["bytes", "text or a list of token ids"]),
        ({"text": "x"}, ["dict", "text or a list of token ids"]),
        ("a\ud800b", ["UTF-8", "character 1"]),
    ],
)
def test_a_prompt_that_cannot_be_used_is_named(tokenizer, prompt, words):
    error = refused(PromptError, lambda: one(prompt, tokenizer, name="prompt 17"))
    assert error.message.startswith("prompt 17 ")
    for word in words:
        assert word in error.message


def test_text_without_a_tokenizer_asks_for_ids():
    error = refused(PromptError, lambda: one("text"))
    assert "no tokenizer" in error.message
    assert error.hint == "Pass token ids instead."


def test_a_long_prompt_is_refused_not_cut(tokenizer):
    assert len(one([1] * 8, max_length=8)) == 8
    error = refused(PromptError, lambda: one([1] * 8, tokenizer, max_length=8, bos=True))
    assert "9 tokens" in error.message
    assert "at most 8" in error.message


def test_tokens_only_the_tokenizer_knows_are_refused(tokenizer):
    assert "0..49" in refused(PromptError, lambda: one("import", tokenizer, vocab_size=50)).message


def test_text_of_no_tokens_is_refused(tokenizer):
    empty = RawTokenizer(models.BPE())
    nothing = PreTrainedTokenizerFast(tokenizer_object=empty)
    assert "no tokens" in refused(PromptError, lambda: one("text", nothing)).message


def test_long_documents_raise_no_false_alarm(tokenizer, caplog):
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)  # transformers' loggers do not propagate to the root
    try:
        collect(["word " * 500], make_tokenizer(bos=True, adds_bos=False), length=8)
    finally:
        logger.removeHandler(caplog.handler)
    assert not caplog.records
