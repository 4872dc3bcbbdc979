"""Lists, sets and random ids as sources: order, de-duplication, counts."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preimage.errors import OptionError, PromptError
from preimage.prompts import PromptSet
from support.examples import relaxed
from support.prompting import BOS, VOCAB, Counted, collect, one
from support.refusing import refused

# --- lists and sets as sources ----------------------------------------------------------------


def test_a_list_mixes_text_and_ids(tokenizer):
    prompts = collect(["import", [5, 6]], tokenizer)
    assert prompts.ids == (one("import", tokenizer), (5, 6))
    assert prompts.source == "list"
    assert prompts.duplicates_removed == 0


def test_duplicates_are_found_on_ids_not_on_text(tokenizer):
    ids = list(one("import", tokenizer))
    assert collect(["import", ids, "x"], tokenizer).duplicates_removed == 1
    kept = collect(["import", ids, "x"], tokenizer, keep_duplicates=True)
    assert len(kept) == 3
    assert kept.duplicates_removed == 0


def test_reading_stops_when_the_count_is_reached():
    source = Counted([[1], [1], [2], [3], [4]])
    prompts = collect(source, count=2)
    assert prompts.ids == ((1,), (2,))
    assert prompts.duplicates_removed == 1
    assert source.read == 3


def test_fewer_prompts_than_the_count_are_all_of_them():
    assert len(collect([[1], [2]], count=5)) == 2


@pytest.mark.parametrize(
    ("source", "word"),
    [([], "no prompts"), ([1, 2], "prompt 0 is 1"), (["ok", ""], "prompt 1 is empty"), (7, "int")],
)
def test_a_list_that_cannot_be_used_is_refused(tokenizer, source, word):
    assert word in refused(PromptError, lambda: collect(source, tokenizer)).message


def test_a_prompt_set_is_returned_and_cut():
    prompts = PromptSet(((1,), (2,), (3,)), "random", 4, 2)
    assert collect(prompts) is prompts
    assert collect(prompts, count=9) is prompts
    assert collect(prompts, count=2) == PromptSet(((1,), (2,)), "random", 4, 2)


def test_a_prompt_set_of_another_model_is_refused():
    assert (
        "prompt 1" in refused(PromptError, lambda: collect(PromptSet(((1,), (VOCAB,)), "list", 0, 0))).message
    )
    refused(PromptError, lambda: collect(PromptSet(((1, 2),), "list", 0, 0), max_length=1))


small_ids = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3), min_size=1, max_size=30)


@relaxed
@given(small_ids)
def test_dedup_keeps_order_and_removes_exactly_the_duplicates(source):
    prompts = collect(source)
    assert list(prompts) == list(dict.fromkeys(map(tuple, source)))
    assert len(prompts) + prompts.duplicates_removed == len(source)


# --- random -----------------------------------------------------------------------------------


def test_random_is_uniform_distinct_and_seeded(tokenizer, eager):
    prompts = collect("random", count=200, length=20, seed=3)
    assert len(set(prompts)) == 200
    assert set(prompts.lengths) == {20}
    seen = Counter(item for ids in prompts for item in ids)
    assert len(seen) > 0.99 * VOCAB
    assert max(seen) < VOCAB
    assert collect("random", tokenizer, count=200, length=20, seed=3) == prompts
    assert collect("random", count=200, length=20, seed=4) != prompts
    assert all(ids[0] == BOS for ids in collect("random", eager, count=5))


def test_random_has_a_default_length_within_the_model():
    assert collect("random", count=2).lengths == (32, 32)
    assert collect("random", count=2, max_length=10).lengths == (10, 10)


def test_random_gives_all_there_are_and_says_when_there_are_no_more(tokenizer):
    assert len(collect("random", count=VOCAB, length=1)) == VOCAB
    error = refused(PromptError, lambda: collect("random", count=VOCAB + 1, length=1))
    assert f"has {VOCAB}" in error.message
    assert len(collect("random", count=VOCAB + 1, length=1, keep_duplicates=True)) == VOCAB + 1
    assert "no count" in refused(PromptError, lambda: collect("random")).message
    refused(OptionError, lambda: collect("random", tokenizer, count=1, length=1, bos=True))
