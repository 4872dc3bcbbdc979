"""Windows: exact, disjoint, seeded, and with the BOS rule."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from preimage.errors import OptionError, PromptError
from preimage.prompts import PromptSet
from preimage.prompts.windows import cut, spread
from support.examples import relaxed
from support.prompting import BOS, VOCAB, Counted, collect
from support.refusing import refused


@relaxed
@given(st.lists(st.integers(1, 50), max_size=60), st.integers(2, 9), st.booleans())
def test_windows_are_exact_disjoint_and_in_order(ids, length, with_bos):
    begin = BOS if with_bos else None
    windows = cut(ids, length, begin)
    bodies = [window[1:] if with_bos else window for window in windows]
    assert all(len(window) == length for window in windows)
    assert all(window[0] == BOS for window in windows if with_bos)
    joined = [item for body in bodies for item in body]
    assert joined == ids[: len(joined)]
    assert len(ids) - len(joined) < length - with_bos


def test_a_bos_that_begins_a_document_is_not_doubled():
    assert cut([BOS, 1, 2, 3, 4], 3, BOS) == [(BOS, 1, 2), (BOS, 3, 4)]
    assert cut([], 3, BOS) == []


documents_of_windows = st.lists(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=8), max_size=12
)


@relaxed
@given(documents_of_windows, st.integers(0, 99), st.one_of(st.none(), st.integers(1, 9)))
def test_spread_yields_every_window_once(found, seed, count):
    everything = Counter(window for windows in found for window in windows)
    assert Counter(spread(found, Random(seed), count)) == everything


def test_spread_takes_one_of_each_document_first():
    found = [[(document, k) for k in range(5)] for document in range(7)]
    first = list(spread(found, Random(3), None))
    for turn in range(5):
        assert {window[0] for window in first[7 * turn : 7 * turn + 7]} == set(range(7))


def test_windows_of_a_stream_read_only_a_pool():
    source = Counted([[k, k + 1] * 8 for k in range(500)])
    prompts = collect(source, length=4, count=3, keep_duplicates=True)
    assert len(prompts) == 3
    assert source.read == 3  # 3 documents of 4 windows are the pool for 3 prompts


@settings(relaxed, max_examples=25)
@given(
    st.lists(st.lists(st.integers(0, 20), min_size=1, max_size=40), min_size=1, max_size=8),
    st.integers(1, 6),
    st.integers(0, 2**40),
)
def test_same_seed_same_set(source, length, seed):
    def attempt() -> Any:
        try:
            return collect(source, length=length, count=10, seed=seed)
        except PromptError as error:
            return error.message

    first = attempt()
    assert first == attempt()
    if isinstance(first, PromptSet):
        assert set(first.lengths) == {length}
        assert len(set(first)) == len(first)


def test_windows_follow_the_bos_rule(tokenizer, eager):
    text = ["one two three four five six seven eight nine ten"] * 2
    for model, bos, expected in [
        (tokenizer, None, False),
        (tokenizer, True, True),
        (eager, None, True),
        (eager, False, False),
    ]:
        prompts = collect(text, model, length=4, bos=bos)
        assert set(prompts.lengths) == {4}
        assert all((ids[0] == BOS) is expected for ids in prompts)
        assert all(BOS not in ids[1:] for ids in prompts)
        assert prompts.duplicates_removed == len(prompts)


def test_windows_of_ids_are_left_without_bos_unless_asked(eager):
    assert set(collect([[1, 2, 3, 4]], eager, length=2)) == {(1, 2), (3, 4)}
    assert set(collect([[1, 2, 3, 4]], eager, length=1)) == {(1,), (2,), (3,), (4,)}
    assert set(collect([[1, 2]], eager, length=2, bos=True)) == {(BOS, 1), (BOS, 2)}


def test_short_texts_are_skipped(tokenizer):
    assert set(collect([[1], [], [1, 2, 3]], length=2)) == {(1, 2)}
    error = refused(PromptError, lambda: collect(["a", "b"], tokenizer, length=50))
    assert "50 tokens" in error.message
    assert "nothing is left" in error.message


def test_windows_check_what_they_are_cut_from(tokenizer):
    refused(PromptError, lambda: collect([[1, VOCAB]], length=1))
    refused(PromptError, lambda: collect([[1, 2.5]], length=1))
    refused(PromptError, lambda: collect(["a\udfffb"], tokenizer, length=1))
    refused(PromptError, lambda: collect(["text"], None, length=1))
    refused(PromptError, lambda: collect([[1, 2]], length=9, max_length=8))
    refused(OptionError, lambda: collect(["text"], tokenizer, length=1, bos=True))


def test_a_bos_outside_the_vocabulary_is_refused(tokenizer):
    class HighBos:
        bos_token_id = VOCAB

        def __call__(self, text: str, *, add_special_tokens: bool = True) -> dict[str, list[int]]:
            return tokenizer(text, add_special_tokens=False)

    assert "BOS" in refused(PromptError, lambda: collect("random", HighBos(), count=1, bos=True)).message
