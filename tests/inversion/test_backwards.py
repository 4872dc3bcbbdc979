"""Readers that look backwards from one vector, and what they are fitted on."""

import random
from pathlib import Path

import pytest
import torch
from jaxtyping import Float, Int
from torch import Tensor

from preimage.inversion.proposers import backwards
from preimage.inversion.proposers.backwards import Readers, fit_readers, kept_readers
from preimage.inversion.proposers.features import features_of
from preimage.models import LanguageModel, new_model, train_tokenizer, written_by

VOCABULARY = 50


def see_at(model: LanguageModel, layer: int) -> backwards.See:
    def see(ids: Int[Tensor, "prompt position"]) -> Float[Tensor, "prompt position d"]:
        return model.states(ids, (layer,))[layer]

    return see


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return new_model("gpt2", (16, 2, 2), vocabulary=VOCABULARY, max_length=16, device="cpu")


@pytest.mark.parametrize("mean", [False, True])
def test_lengths_and_tokens_are_read(model: LanguageModel, mean: bool) -> None:
    features = features_of(model)
    readers = fit_readers(model, see_at(model, 2), features, mean=mean)
    draw, lengths, ranks = random.Random(0), [], []
    for _ in range(40):
        ids = [draw.randrange(VOCABULARY) for _ in range(draw.randint(2, 8))]
        states = model.states(torch.tensor([ids]), (2,))[2][0]
        vector = states.mean(dim=0) if mean else states[-1]
        likely = readers.lengths(vector)
        lengths.append(likely.index(max(likely)) + 1 == len(ids))
        scores = readers.slots(vector, len(ids), features, mean=mean)
        assert scores.shape == (len(ids), VOCABULARY)
        ranks.append(int((scores[-1] > scores[-1, ids[-1]]).sum()))
    assert sum(lengths) >= 20  # chance: 5
    assert sorted(ranks)[20] <= (12 if mean else 0)  # chance: 25


def test_prompts_are_no_longer_than_the_positions() -> None:
    short = new_model("gpt2", (16, 1, 2), vocabulary=VOCABULARY, max_length=3, device="cpu")
    readers = fit_readers(short, see_at(short, 1), features_of(short), mean=False)
    assert readers.longest == 3
    assert len(readers.lengths(torch.zeros(16))) == 3


def test_readers_are_kept_and_a_damaged_file_is_fitted_anew(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(backwards, "cache_folder", lambda: tmp_path)
    features = features_of(model)
    first = kept_readers(model, "last-2", see_at(model, 2), features, mean=False)
    (path,) = tmp_path.rglob("*.safetensors")

    def refuse(*_: object, **__: object) -> Readers:
        raise AssertionError("the readers were fitted again")

    with monkeypatch.context() as patched:
        patched.setattr(backwards, "fit_readers", refuse)
        again = kept_readers(model, "last-2", see_at(model, 2), features, mean=False)
        assert torch.equal(first.read, again.read)
        assert torch.equal(first.bias, again.bias)
        path.write_bytes(path.read_bytes()[:100])
        with pytest.raises(AssertionError, match="fitted again"):
            kept_readers(model, "last-2", see_at(model, 2), features, mean=False)
    kept_readers(model, "last-2", see_at(model, 2), features, mean=False)
    assert path.stat().st_size > 100


def test_large_readers_stay_in_memory(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(backwards, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(backwards, "_LARGEST_FILE", 10)
    kept_readers(model, "last-2", see_at(model, 2), features_of(model), mean=False)
    assert not list(tmp_path.rglob("*"))


def test_a_model_writes_by_its_own_distribution(model: LanguageModel) -> None:
    assert written_by(model, 4, 3) is None  # it has no tokenizer, and nothing that begins a text
    tokenizer = train_tokenizer(["one two three four five six seven"] * 20, vocabulary=300)
    writer = new_model("llama", (16, 1, 2), tokenizer=tokenizer, max_length=16, device="cpu")
    texts = written_by(writer, 200, 5, seed=3)
    assert texts is not None
    assert texts.shape == (200, 5)
    assert torch.equal(texts, written_by(writer, 200, 5, seed=3))
    assert not torch.equal(texts, written_by(writer, 200, 5, seed=4))
    with torch.no_grad():  # a head that knows one token alone
        writer.module.lm_head.weight = torch.nn.Parameter(torch.zeros_like(writer.module.lm_head.weight))
        final = writer.states(torch.tensor([[tokenizer.bos_token_id]]), ("final",))["final"][0, 0]
        writer.module.lm_head.weight[42] = 1000 * final
    sure = written_by(writer, 10, 1)
    assert sure is not None
    assert bool((sure == 42).all())
