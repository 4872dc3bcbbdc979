"""Collision searches over several lengths."""

from __future__ import annotations

import json
from pathlib import Path

import preimage
from preimage.collisions import CollisionOptions, sweep_lengths
from preimage.errors import LayerError, OptionError
from preimage.models import LanguageModel
from preimage.prompts import PromptOptions, PromptSet, Vocabulary, gather
from support.refusing import refused
from support.tiny import random_ids, tiny


def cut(model: LanguageModel, source: str, lengths: list[int], **options: int) -> dict[int, PromptSet]:
    """Prompts of several lengths from one source."""
    return {
        length: gather(
            source,
            Vocabulary(None, model.vocab_size, model.max_length),
            PromptOptions(length=length, **options),
        )
        for length in lengths
    }


def test_a_sweep_is_a_search_at_each_length(tmp_path: Path) -> None:
    model, options = tiny("llama"), CollisionOptions(closest=3)
    out, prompts = tmp_path / "sweep", cut(tiny("llama"), "random", [6, 2], count=12, seed=3)
    audits = sweep_lengths(model, prompts, "0,2,final", options=options, out=out)
    assert list(audits) == [6, 2]
    for length, audit in audits.items():
        assert audit.lengths == (length, length)
        assert audit == preimage.find_collisions(model, prompts[length], "0,2,final", closest=3)
        saved = json.loads((out / f"length-{length}" / "run.json").read_text())
        assert saved["results"] == json.loads(json.dumps(audit.to_dict()))
    assert sorted(path.name for path in out.iterdir()) == ["length-2", "length-6"]
    assert sweep_lengths(model, prompts, "0,2,final", options=options, out=out) == audits


def test_a_sweep_over_unequal_numbers_is_refused(tmp_path: Path) -> None:
    model, source = tiny("llama"), tmp_path / "ids.jsonl"
    source.write_text(json.dumps(random_ids(40)) + "\n")
    uneven = cut(model, str(source), [4, 10])
    error = refused(OptionError, lambda: sweep_lengths(model, uneven, out=tmp_path / "out"))
    assert error.message == "The source has 10 at 4, 4 at 10 prompts."
    even = cut(model, str(source), [4, 10], count=4)
    audits = sweep_lengths(model, even, 1, options=CollisionOptions(hard_bases=0))
    assert [audit.prompts for audit in audits.values()] == [4, 4]
    assert refused(OptionError, lambda: sweep_lengths(model, {})).message == "The source has no prompts."
    refused(LayerError, lambda: sweep_lengths(model, even, 9))
    assert [path.name for path in tmp_path.iterdir()] == ["ids.jsonl"]
