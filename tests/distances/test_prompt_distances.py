"""Distances of prompts: Hamming and Levenshtein, and bounds of them."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from preimage.distances.prompt_distances import PromptDistances
from support.geometry import edits, table

prompt_sets = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=9), min_size=2, max_size=12)


@settings(max_examples=60, deadline=None)
@given(ids=prompt_sets)
def test_prompt_distances_are_exact(ids: list[list[int]]) -> None:
    prompts = PromptDistances(ids)
    equal = len({len(row) for row in ids}) == 1
    assert prompts.name == ("hamming" if equal else "levenshtein")
    apart = table(prompts)
    every = torch.arange(len(ids))
    least = prompts.at_least(every, every)
    assert bool((least <= apart).all())
    for i, one in enumerate(ids):
        for j, other in enumerate(ids):
            true = sum(a != b for a, b in zip(one, other, strict=True)) if equal else edits(one, other)
            assert int(apart[i, j]) == true


def test_lower_bounds_are_near_the_distances() -> None:
    """Of prompts with many tokens, few share a bucket by chance."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 49152, (60, 32), generator=generator)
    ids[1::2, :20] = ids[::2, :20]  # pairs that share the first 20 tokens
    for lengths in ([32] * 60, [int(n) for n in torch.randint(24, 33, (60,), generator=generator)]):
        prompts = PromptDistances([row[:n].tolist() for row, n in zip(ids, lengths, strict=True)])
        every = torch.arange(60)
        least, apart = prompts.at_least(every, every), table(prompts)
        assert bool((least <= apart).all())
        assert float((apart - least).mean()) < 2.5
        assert int(least[0, 1]) <= 12
