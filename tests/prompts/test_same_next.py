"""Prompts with the same next token."""

from __future__ import annotations

import re

import pytest

from preimage.errors import OptionError, PromptError
from preimage.prompts.same_next import FRENCH, same_next
from support.prompting import BOS, collect
from support.refusing import refused


@pytest.mark.parametrize("kind", ["arithmetic", "translation"])
def test_same_next_is_distinct_and_seeded(kind):
    texts = same_next(kind, 530, 0)
    assert len(set(texts)) == 530
    assert same_next(kind, 530, 0) == texts
    assert same_next(kind, 530, 1) != texts
    assert len({text.splitlines()[0] for text in texts}) > 20


def test_every_sum_is_right_and_the_asked_one_the_same():
    asked = set()
    for text in same_next("arithmetic", 300, 2):
        *solved, question = text.split("\n")
        assert len(set(solved)) == 3
        for line in solved:
            a, b, total = map(int, re.fullmatch(r"(\d) \+ (\d) = (\d)", line).groups())
            assert a + b == total != 7
        a, b = map(int, re.fullmatch(r"(\d) \+ (\d) =", question).groups())
        assert a + b == 7
        asked.add((a, b))
    assert asked == {(a, 7 - a) for a in range(1, 7)}


def test_every_translation_asks_for_the_same_word():
    seen = set()
    for text in same_next("translation", 300, 2):
        *solved, question = text.split("\n")
        assert question == "water =>"
        assert len(set(solved)) == 3
        seen.update(solved)
    assert seen == {f"{english} => {french}" for english, french in FRENCH.items()}
    assert len(FRENCH) == len(set(FRENCH.values())) == 40
    assert "water" not in FRENCH
    assert "eau" not in FRENCH.values()


def test_same_next_gives_all_there_are_and_says_when_there_are_no_more():
    error = refused(PromptError, lambda: same_next("translation", 10**9, 0))
    supply = 40 * 39 * 38
    assert str(supply) in error.message
    assert len(set(same_next("translation", supply, 0))) == supply
    assert str(6 * 30 * 29 * 28) in refused(PromptError, lambda: same_next("arithmetic", 10**9, 0)).message


def test_same_next_options_outside_what_is_allowed():
    refused(OptionError, lambda: same_next("poetry", 5, 0))  # type: ignore[arg-type]
    for count, seed in [(0, 0), (True, 0), (5, -1)]:
        with pytest.raises(OptionError, match="allowed"):
            same_next("arithmetic", count, seed)


@pytest.mark.parametrize("kind", ["arithmetic", "translation"])
def test_same_next_is_a_source(tokenizer, eager, kind):
    name = f"same-next:{kind}"
    prompts = collect(name, tokenizer, max_length=128)
    assert (len(prompts), prompts.source, prompts.duplicates_removed) == (530, name, 0)
    assert [tokenizer.decode(ids) for ids in prompts] == same_next(kind, 530, 0)
    few = collect(name, eager, count=7, seed=3)
    assert [tokenizer.decode(ids[1:]) for ids in few] == same_next(kind, 7, 3)
    assert all(ids[0] == BOS for ids in few)


def test_same_next_source_errors(tokenizer):
    error = refused(OptionError, lambda: collect("same-next:arithmetic", tokenizer, length=8))
    assert "length is 8" in error.message
    for name in ("same-next", "same-next:", "same-next:poetry", "same-next:arithmetic:train"):
        error = refused(PromptError, lambda name=name: collect(name, tokenizer))
        assert repr(name) in error.message
        assert "same-next:translation" in error.hint
    assert "no tokenizer" in refused(PromptError, lambda: collect("same-next:arithmetic")).message
    assert (
        "at most 4"
        in refused(PromptError, lambda: collect("same-next:translation", tokenizer, max_length=4)).message
    )
    refused(PromptError, lambda: collect("same-next:translation", tokenizer, count=10**9))
