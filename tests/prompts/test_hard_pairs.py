"""Hard pairs: each kind is what it says, nothing leaves the model's limits, nothing is listed twice."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preimage.errors import OptionError, PromptError
from preimage.models.preview import read_preview
from preimage.prompts import HardPair, hard_pairs
from support.examples import relaxed
from support.prompting import BOS, VOCAB, collect
from support.refusing import refused

ID_KINDS = {"substitution", "swap", "shared suffix", "repetition", "constant"}
TEXT_KINDS = {"whitespace", "case"}
SENTENCE = "The import statement, and a café."


def pairs_of(prompts: Any, tokenizer: Any = None, **given: Any) -> tuple[HardPair, ...]:
    return hard_pairs(prompts, tokenizer, **{"vocab_size": VOCAB, "max_length": None, "bos": None, **given})


def of_kind(pairs: tuple[HardPair, ...], *kinds: str) -> list[HardPair]:
    return [pair for pair in pairs if pair.kind in kinds]


def differing(pair: HardPair) -> list[int]:
    """Positions at which two prompts of one length differ."""
    both = zip(pair.first, pair.second, strict=True)
    return [position for position, (one, other) in enumerate(both) if one != other]


def without(ids: tuple[int, ...], position: int) -> tuple[int, ...]:
    return ids[:position] + ids[position + 1 :]


def is_edit(pair: HardPair, start: int) -> bool:
    """Whether the second is the first with the one change, from ``start`` on, that the kind names."""
    longer = pair.second
    if pair.kind == "repetition":
        doubled = (k for k in range(start, len(longer) - 1) if longer[k] == longer[k + 1])
        return any(without(longer, k) == pair.first for k in doubled)
    places = differing(pair)
    if pair.kind == "substitution":
        return len(places) == 1
    left, right = places
    return right == left + 1 and Counter(pair.first) == Counter(pair.second)


@st.composite
def situations(draw: st.DrawFn) -> dict[str, Any]:
    """Prompts of a model with a small vocabulary, some with BOS, some without, some with nothing else."""
    vocab_size = draw(st.integers(1, 6))
    bos = draw(st.one_of(st.none(), st.integers(0, vocab_size - 1)))
    token = st.integers(0, vocab_size - 1)
    prompts = draw(st.lists(st.lists(token, min_size=1, max_size=9).map(tuple), min_size=1, max_size=6))
    if bos is not None and draw(st.booleans()):
        prompts = [(bos, *ids) for ids in prompts]
    longest = max(map(len, prompts))
    return {
        "prompts": prompts,
        "vocab_size": vocab_size,
        "bos": bos,
        "max_length": draw(st.one_of(st.none(), st.integers(longest, longest + 8))),
        "seed": draw(st.integers(0, 2**40)),
        "bases": draw(st.integers(1, 7)),
    }


@relaxed
@given(situations())
def test_pairs_are_different_listed_once_and_within_the_model(situation):
    prompts = situation.pop("prompts")
    pairs = pairs_of(prompts, **situation)
    assert pairs == pairs_of(prompts, **situation)
    assert all(pair.first != pair.second for pair in pairs)
    assert len({frozenset((pair.first, pair.second)) for pair in pairs}) == len(pairs)
    assert {pair.kind for pair in pairs} <= ID_KINDS
    for ids in (ids for pair in pairs for ids in (pair.first, pair.second)):
        assert ids
        assert all(type(token) is int and 0 <= token < situation["vocab_size"] for token in ids)
        assert situation["max_length"] is None or len(ids) <= situation["max_length"]


@relaxed
@given(situations())
def test_each_kind_is_what_it_says(situation):
    prompts = situation.pop("prompts")
    bos = situation["bos"]
    head = () if bos is None else (bos,)
    for pair in pairs_of(prompts, **situation):
        if pair.kind == "constant":
            bodies = [ids[len(head) :] for ids in (pair.first, pair.second)]
            assert len(bodies[0]) < len(bodies[1])
            assert (*head, *bodies[0]) == pair.first
            assert (*head, *bodies[1]) == pair.second
            assert len({token for body in bodies for token in body}) == 1
        elif pair.kind == "shared suffix":
            shared = len(pair.first) - 1 - max(differing(pair))
            assert shared >= max(1, (len(pair.first) - 1) / 2)
        else:
            assert pair.first in prompts
            start = int(pair.first[:1] == head)
            assert pair.first[:start] == pair.second[:start]
            assert is_edit(pair, start)


@relaxed
@given(situations())
def test_a_base_is_changed_at_every_place(situation):
    [base, *_] = situation.pop("prompts")
    bos, longest = situation["bos"], situation["max_length"]
    start = int(bos is not None and base[0] == bos)
    pairs = pairs_of([base], **situation)
    listed = {frozenset((pair.first, pair.second)) for pair in pairs}
    places = [differing(pair) for pair in of_kind(pairs, "substitution")]
    assert places == [[place] for place in range(start, len(base)) if situation["vocab_size"] > 1]
    for k in range(start, len(base) - 1):
        swapped = (*base[:k], base[k + 1], base[k], *base[k + 2 :])
        assert swapped == base or {base, swapped} in listed
    if len(base) > start and (longest is None or longest > len(base)):
        assert {base, (*base, base[-1])} in listed


@pytest.mark.parametrize("bos", [None, 0])
def test_the_pairs_of_one_base(bos):
    head = () if bos is None else (bos,)
    base = (*head, 5, 6, 7, 7, 8, 9, 5, 4)
    pairs = pairs_of([base], bos=bos)
    assert Counter(pair.kind for pair in pairs) == {
        "substitution": 8,
        "swap": 6,  # the two sevens are the same either way round
        "shared suffix": 3,
        "repetition": 2,
        "constant": 4,
    }
    assert [pair.second for pair in of_kind(pairs, "repetition")] == [
        (*base, 4),
        (*head, 5, 6, 7, 7, 8, 8, 9, 5, 4),
    ]
    lengths = [(len(pair.first) - len(head), len(pair.second) - len(head)) for pair in pairs[-4:]]
    assert lengths == [(1, 2), (2, 3), (3, 17), (63, 64)]
    first_only, quarter, half = (differing(pair) for pair in of_kind(pairs, "shared suffix"))
    start = len(head)
    assert first_only == [start]
    assert quarter == [start, start + 1]
    assert half == [start, start + 1, start + 2, start + 3]


def test_lengths_are_limited_by_the_model():
    base = (1, 2, 3, 4)
    assert not of_kind(pairs_of([base], max_length=4), "repetition")
    for bos, room in [(None, 10), (0, 9)]:
        found = of_kind(pairs_of([base], max_length=10, bos=bos), "constant")
        head = () if bos is None else (bos,)
        wanted = [(1, 2), (2, 3), (3, room)]
        assert [(pair.first, pair.second) for pair in found] == [
            ((*head, *[1] * n), (*head, *[1] * m)) for n, m in wanted
        ]


def test_the_smallest_prompts():
    found = pairs_of([(1,)], vocab_size=2, max_length=2)
    assert [(pair.kind, pair.first, pair.second) for pair in found] == [
        ("substitution", (1,), (0,)),
        ("repetition", (1,), (1, 1)),
    ]
    assert pairs_of([(1,)], vocab_size=2, max_length=1)[0].second == (0,)
    assert pairs_of([(0,)], bos=0) == ()
    assert of_kind(pairs_of([(0,), (0, 3)], bos=0), "swap") == []
    assert pairs_of([(0,)], vocab_size=1, max_length=1) == ()


def test_the_seed_decides_the_random_tokens():
    base = tuple(range(20))
    assert pairs_of([base], seed=1) == pairs_of([base], seed=1)
    assert pairs_of([base], seed=1) != pairs_of([base], seed=2)
    assert of_kind(pairs_of([base], seed=1), "swap") == of_kind(pairs_of([base], seed=2), "swap")


def test_bases_are_spread_over_the_different_prompts():
    prompts = [(k // 2, 9) for k in range(16)]
    found = of_kind(pairs_of(prompts, bases=4), "swap")
    assert [pair.first for pair in found] == [(0, 9), (2, 9), (4, 9), (6, 9)]
    assert len(of_kind(pairs_of(prompts, bases=99), "swap")) == 8


def test_what_cannot_be_used_is_refused():
    for prompts, word in [([], "no prompts"), ([(1,), ()], "prompt 1"), ([(1,), (VOCAB,)], "prompt 1")]:
        assert word in refused(PromptError, lambda prompts=prompts: pairs_of(prompts)).message
    assert "at most 1" in refused(PromptError, lambda: pairs_of([(1, 2)], max_length=1)).message
    assert "BOS" in refused(PromptError, lambda: pairs_of([(1,)], bos=VOCAB)).message
    for wrong in ({"bases": 0}, {"bases": True}, {"seed": -1}):
        [(name, _)] = wrong.items()
        with pytest.raises(OptionError, match=f"{name} is .* allowed"):
            pairs_of([(1,)], **wrong)


# --- text -------------------------------------------------------------------------------------


def ids_of(text: str, tokenizer: Any) -> tuple[int, ...]:
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize("bos", [None, BOS])
def test_text_variants_are_the_texts_they_say(tokenizer, bos):
    head = () if bos is None else (bos,)
    base = (*head, *ids_of(SENTENCE, tokenizer))
    found = of_kind(pairs_of([base], tokenizer, bos=bos), *TEXT_KINDS)
    assert all(pair.first == base for pair in found)
    assert all(pair.second[: len(head)] == head for pair in found)
    assert [(pair.kind, tokenizer.decode(pair.second[len(head) :])) for pair in found] == [
        ("whitespace", " The import statement, and a café."),
        ("whitespace", "The  import statement, and a café."),
        ("whitespace", "The import statement, and a café.\n"),
        ("case", "THE IMPORT STATEMENT, AND A CAFÉ."),
        ("case", "the import statement, and a café."),
    ]  # its only capital is the first letter: to swap that one is to lower all


def test_a_base_without_the_bos_gets_it_on_both_sides(tokenizer):
    base = ids_of(SENTENCE, tokenizer)
    found = of_kind(pairs_of([base], tokenizer, bos=BOS), *TEXT_KINDS)
    assert found
    assert all(pair.first == (BOS, *base) and pair.second[0] == BOS for pair in found)


def test_text_variants_are_cut_to_the_model(tokenizer):
    base = ids_of(SENTENCE, tokenizer)
    found = of_kind(pairs_of([base], tokenizer, max_length=len(base)), *TEXT_KINDS)
    assert all(len(pair.second) <= len(base) for pair in found)
    # cut, the trailing newline is the base again
    assert len(of_kind(tuple(found), "whitespace")) == 2


def test_text_that_does_not_come_back_is_left_out(tokenizer):
    letters = tuple(ids_of(letter, tokenizer)[0] for letter in "import")
    assert letters != ids_of("import", tokenizer)
    half = ids_of("☕", tokenizer)[:1]
    for base in (letters, half):
        assert not of_kind(pairs_of([base], tokenizer), *TEXT_KINDS)
    assert not of_kind(pairs_of([ids_of("☕", tokenizer)], tokenizer), "case")


def test_variants_outside_the_vocabulary_are_left_out(tokenizer):
    base = ids_of("a", tokenizer)
    size = max(base) + 1
    found = of_kind(pairs_of([base], tokenizer, vocab_size=size), *TEXT_KINDS)
    assert [tokenizer.decode(pair.second) for pair in found] == ["A"]


def test_a_tokenizer_that_forgets_gives_no_pair():
    class Forgetful:
        """Lowers and strips all text, as uncased models do, and knows no newline."""

        bos_token_id = None

        def __call__(self, text: str, /, *, add_special_tokens: bool = True) -> dict[str, list[int]]:
            return {"input_ids": [ord(letter) for letter in text.lower().strip()]}

        def decode(self, ids: Any, /, **_: Any) -> str:
            return "".join(map(chr, ids))

    base = tuple(map(ord, "a bcd"))
    found = of_kind(pairs_of([base], Forgetful()), *TEXT_KINDS)
    assert [Forgetful().decode(pair.second) for pair in found] == ["a  bcd"]


@relaxed
@given(
    text=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12), with_bos=st.booleans()
)
def test_any_text_has_sound_variants(tokenizer, text, with_bos):
    base = ((BOS,) if with_bos else ()) + ids_of(text, tokenizer)
    bos = BOS if with_bos else None
    pairs = pairs_of([base], tokenizer, bos=bos, max_length=len(base) + 2)
    assert pairs == pairs_of([base], tokenizer, bos=bos, max_length=len(base) + 2)
    assert len({frozenset((pair.first, pair.second)) for pair in pairs}) == len(pairs)
    for pair in of_kind(pairs, *TEXT_KINDS):
        assert pair.first == base != pair.second
        assert len(pair.second) <= len(base) + 2
        assert not with_bos or pair.second[0] == BOS


@pytest.mark.real_model
def test_the_default_tokenizer_gives_every_kind():
    known = read_preview("smollm2")
    assert known is not None
    limits = {"vocab_size": known.vocab_size, "max_length": known.max_length}
    base = ids_of("The sea was calm and the Sun was low.", known.tokenizer)
    bos = known.tokenizer.bos_token_id
    for begin in (None, bos):
        prompt = base if begin is None else (begin, *base)
        pairs = hard_pairs([prompt], known.tokenizer, bos=begin, **limits)
        assert {pair.kind for pair in pairs} == ID_KINDS | TEXT_KINDS
        assert len(of_kind(pairs, *TEXT_KINDS)) == 6
        assert begin is None or all(ids[0] == begin for p in pairs for ids in (p.first, p.second))


def test_gathered_prompts_can_be_used_as_they_are(tokenizer):
    prompts = collect("default", tokenizer, count=8, length=12)
    pairs = pairs_of(prompts, tokenizer)
    assert {pair.kind for pair in pairs} >= ID_KINDS
