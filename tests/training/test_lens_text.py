"""Lenses from what the model itself writes: the same for a seed, continued, and never needed."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
import transformers as t

import preimage
from preimage.errors import OptionError, RunFolderError
from preimage.models import LanguageModel, rows_at_once, sampling, written_by
from preimage.observations import Site
from preimage.training import LensOptions, lens_text, train_lens
from preimage.training.lenses import _batch
from support.refusing import refused
from support.tiny import CONFIGS, VOCABULARY, tiny

OPTIONS = LensOptions(steps=4, batch_tokens=64, length=8, rank=4, hidden=8, sampled_tokens=100)


@pytest.fixture(autouse=True)
def _few_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three texts of 16 tokens in a piece."""
    monkeypatch.setattr(lens_text, "rows_at_once", lambda model, length: 3)
    monkeypatch.setattr(lens_text, "_ROW", 16)


def weights(lens: torch.nn.Module) -> torch.Tensor:
    return torch.cat([part.flatten() for part in lens.parameters()])


def test_texts_begin_with_any_token_and_go_on_as_the_model_would() -> None:
    model = tiny("gpt2")
    texts = written_by(model, 400, 3, seed=5, start="random")  # it has no tokenizer
    assert texts is not None
    assert texts.shape == (400, 3)
    assert len(texts[:, 0].unique()) == VOCABULARY
    assert torch.equal(texts, written_by(model, 400, 3, seed=5, start="random"))
    assert not torch.equal(texts, written_by(model, 400, 3, seed=6, start="random"))
    with torch.inference_mode():
        logits = model.module(texts).logits[:, :-1].log_softmax(-1)
    chances = logits.gather(2, texts[:, 1:, None])
    entropy = -(logits.exp() * logits).sum(-1).mean()
    assert float(-chances.mean()) == pytest.approx(float(entropy), rel=0.05)


def test_a_cache_does_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama")
    a_text = 3 * 2 * 16 * 4 * 10  # blocks, keys and values, float32, tokens
    monkeypatch.setattr(sampling, "_CACHE_BYTES", {"cpu": 7 * a_text})
    assert rows_at_once(model, 10) == 7
    assert rows_at_once(model, 10**9) == 1
    texts = written_by(model, 20, 10, start="random")
    assert texts is not None
    assert texts.shape == (20, 10)


def test_a_seed_means_the_same_lens(tmp_path: Path) -> None:
    model, notes = tiny("llama"), []
    one = train_lens(
        model, Site(1, "keys"), options=OPTIONS, out=tmp_path / "lens",
        progress=lambda done, total, note: notes.append((done, total, note)),
    )  # fmt: skip
    assert torch.equal(weights(one.lens), weights(train_lens(model, Site(1, "keys"), "self", OPTIONS).lens))
    assert notes[:4] == [(done, 112, "tokens sampled") for done in (0, 48, 96, 112)]
    assert notes[4] == (1, 4, "training steps")
    assert [place.name for place in tmp_path.iterdir()] == ["lens"]
    other = LensOptions(**OPTIONS.to_dict() | {"seed": 1})
    assert not torch.equal(weights(one.lens), weights(train_lens(model, Site(1, "keys"), "self", other).lens))


@pytest.mark.parametrize("moment", [(96, "tokens sampled"), (2, "training steps")], ids=str)
def test_what_was_sampled_is_not_sampled_again(
    moment: tuple[int, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, sampled = tiny("gpt2"), []
    whole = train_lens(model, 1, options=OPTIONS, out=tmp_path / "whole")

    def stop(done: int, total: int, note: str) -> None:
        if (done, note) == moment:
            raise KeyboardInterrupt

    def counted(*given: object, **named: object) -> torch.Tensor | None:
        sampled.append(given[1])
        return written_by(*given, **named)  # type: ignore[arg-type]

    path = tmp_path / "lens"
    with pytest.raises(KeyboardInterrupt):
        train_lens(model, 1, options=OPTIONS, out=path, progress=stop)
    monkeypatch.setattr(lens_text, "written_by", counted)
    for changed in ({"sampled_tokens": 99}, {"seed": 3}):
        other = LensOptions(**OPTIONS.to_dict() | changed)
        with pytest.raises(RunFolderError, match=f"another options: {next(iter(changed))}"):
            train_lens(model, 1, options=other, out=path)
    with pytest.raises(RunFolderError, match="another place"):
        train_lens(model, Site(1, "values"), options=OPTIONS, out=path)
    again = train_lens(model, 1, options=OPTIONS, out=path)
    assert sampled == ([1] if moment[1] == "tokens sampled" else [])
    assert path.read_bytes() == (tmp_path / "whole").read_bytes()
    assert again.held_out == whole.held_out


def test_a_batch_is_text_mixed_and_random() -> None:
    text = torch.zeros(5, 40, dtype=torch.long)
    options = LensOptions(batch_tokens=4000, length=20)
    model = tiny("llama")
    windows, pairs = _batch(model, text, options, step=3)
    written = (windows == 0).float().mean(dim=1)
    assert windows.shape == (200, 20)
    assert pairs.shape == (500, 2)
    assert bool((written[:100] == 1).all())
    mixed = written[100:150]
    assert 0.35 < float(mixed.mean()) < 0.65
    assert float(mixed.std()) > 0.2  # any share, not the same of all
    assert float(written[150:].mean()) < 0.1
    assert torch.equal(windows, _batch(model, text, options, step=3)[0])
    assert not torch.equal(windows, _batch(model, text, options, step=4)[0])
    alone, _ = _batch(model, torch.empty(0, dtype=torch.long), options, step=3)
    assert float((alone == 0).float().mean()) < 0.1


def test_without_an_lm_head_random_tokens_are_left(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model: LanguageModel = preimage.load(t.AutoModel.from_config(CONFIGS["llama"]()).eval())
    path = tmp_path / "lens"
    with caplog.at_level(logging.WARNING):
        trained = train_lens(model, 1, options=OPTIONS, out=path)
    assert "has no LM head to write text with" in caplog.text
    assert preimage.inversion.proposers.lens_files.read_info(path).training["text"] == "random"
    alone = train_lens(model, 1, "random", OPTIONS)
    assert torch.equal(weights(trained.lens), weights(alone.lens))


def test_text_needs_a_tokenizer() -> None:
    error = refused(OptionError, lambda: train_lens(tiny("llama"), 1, "default", OPTIONS))
    assert "self or random" in str(error.hint)


def test_rows_of_ids_are_texts_and_too_short_ones_are_refused() -> None:
    model = tiny("llama")
    rows = written_by(model, 6, 9, start="random")
    assert rows is not None
    assert train_lens(model, 1, rows, OPTIONS).held_out
    error = refused(OptionError, lambda: train_lens(model, 1, rows[:, :7], OPTIONS))
    assert "has 7 tokens, fewer than a window of 8" in error.message
