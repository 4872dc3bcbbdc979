"""Collision searches over several lengths."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import preimage
from preimage.collisions import sweep_lengths
from preimage.errors import LayerError, OptionError, PromptError
from preimage.prompts import PromptOptions, gather
from support.refusing import refused
from support.tiny import VOCABULARY, random_ids, tiny


def test_a_sweep_is_a_search_at_each_length(tmp_path: Path) -> None:
    model, options = tiny("llama"), PromptOptions(count=12, seed=3)
    out = tmp_path / "sweep"
    audits = sweep_lengths(model, "random", [6, 2], "0,2,final", prompts=options, out=out, closest=3)
    assert list(audits) == [6, 2]
    for length, audit in audits.items():
        chosen = PromptOptions(count=12, seed=3, length=length)
        prompts = gather("random", None, chosen, vocab_size=VOCABULARY, max_length=128)
        assert audit.lengths == (length, length)
        assert audit == preimage.find_collisions(model, prompts, "0,2,final", closest=3)
        saved = json.loads((out / f"length-{length}" / "run.json").read_text())
        assert saved["results"] == json.loads(json.dumps(audit.to_dict()))
    assert sorted(path.name for path in out.iterdir()) == ["length-2", "length-6"]
    again = sweep_lengths(model, "random", [6, 2], "0,2,final", prompts=options, out=out, closest=3)
    assert again == audits


def test_a_sweep_over_unequal_numbers_is_refused(tmp_path: Path) -> None:
    model, source = tiny("llama"), tmp_path / "ids.jsonl"
    source.write_text(json.dumps(random_ids(40)) + "\n")
    error = refused(OptionError, lambda: sweep_lengths(model, str(source), [4, 10], out=tmp_path / "out"))
    assert error.message == "The source has 10 at 4, 4 at 10 prompts."
    options = PromptOptions(count=4)
    audits = sweep_lengths(model, str(source), [4, 10], 1, prompts=options, hard_bases=0)
    assert [audit.prompts for audit in audits.values()] == [4, 4]
    refused(OptionError, lambda: sweep_lengths(model, str(source), []))
    with pytest.raises(OptionError, match="length is 0"):
        sweep_lengths(model, str(source), [4, 0])
    refused(PromptError, lambda: sweep_lengths(model, str(source), [4, 50]))
    refused(LayerError, lambda: sweep_lengths(model, str(source), [4], 9))
    assert [path.name for path in tmp_path.iterdir()] == ["ids.jsonl"]
