"""Options of prompts, and the set they give."""

from __future__ import annotations

import json

import pytest

from preimage.errors import OptionError
from preimage.prompts import PromptOptions, PromptSet


@pytest.mark.parametrize(
    "bad",
    [
        {"count": 0},
        {"count": True},
        {"count": 1.5},
        {"length": 0},
        {"length": "32"},
        {"seed": -1},
        {"seed": None},
        {"bos": "yes"},
        {"bos": 1},
        {"keep_duplicates": 1},
    ],
)
def test_options_outside_what_is_allowed_are_refused(bad):
    [(name, value)] = bad.items()
    with pytest.raises(OptionError) as caught:
        PromptOptions(**bad)
    assert name in caught.value.message
    assert repr(value) in caught.value.message
    assert "allowed" in caught.value.message


def test_prompt_set_is_a_sized_iterable_with_a_plain_dictionary():
    prompts = PromptSet(((1, 2), (3,)), "list", 7, 1)
    assert len(prompts) == 2
    assert list(prompts) == [(1, 2), (3,)]
    assert prompts.lengths == (2, 1)
    saved = json.loads(json.dumps(prompts.to_dict()))
    assert saved == {
        "source": "list",
        "seed": 7,
        "count": 2,
        "duplicates_removed": 1,
        "fingerprint": prompts.fingerprint,
        "ids": [[1, 2], [3]],
    }


def test_fingerprint_is_of_the_ids_and_their_order_only():
    base = PromptSet(((1, 2), (3,)), "a", 0, 0).fingerprint
    assert len(base) == 64
    assert PromptSet(((1, 2), (3,)), "b", 5, 9).fingerprint == base
    others = [((3,), (1, 2)), ((1,), (2, 3)), ((1, 2, 3),), ((1, 2), (3,), ()), ((1, 2), (4,))]
    prints = {PromptSet(ids, "a", 0, 0).fingerprint for ids in others}
    assert len(prints | {base}) == len(others) + 1
