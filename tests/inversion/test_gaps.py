"""States of some positions alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import preimage
from preimage import Observation
from preimage.cli.arguments import parse_positions
from preimage.errors import OptionError, StatesError
from support.refusing import refused
from support.tiny import NAMES, build, random_ids, tiny


def rows_at(
    model: preimage.LanguageModel, ids: list[int], at: tuple[int, ...], layer: int = 2
) -> torch.Tensor:
    return model.states(torch.tensor([ids]), (layer,))[layer][0, list(at)].clone()


@pytest.mark.parametrize("name", NAMES)
def test_one_missing_token_at_a_time_is_found(name: str) -> None:
    model, ids = tiny(name), random_ids(11, 3)
    for at in ((0, 1, 3, 4, 6, 8, 10), (1, 2, 4, 5, 7)):  # the first one may be missing too
        (result,) = preimage.invert(model, rows_at(model, ids, at), 2, observe=Observation(at=at))
        assert (result.status, list(result.token_ids)) == ("likely", ids[: at[-1] + 1])
        assert list(result.reading.token_ids) == ids[: at[-1] + 1]
        assert (result.unique, result.complete) == (None, False)


def test_several_missing_tokens_are_found_or_nothing_is_claimed() -> None:
    model, found = tiny("llama"), 0
    for seed in range(6):
        ids, at = random_ids(7, seed), (0, 1, 4, 5, 6)
        (result,) = preimage.invert(model, rows_at(model, ids, at), 2, observe=Observation(at=at))
        if result.status == "likely":
            found += 1
            assert list(result.token_ids) == ids
        else:
            assert (result.status, result.failed_position) == ("not_recovered", 4)
            assert "2 before it whose states are missing" in result.reason
    assert found


def test_every_pair_that_fits_is_the_true_one() -> None:
    """Enumeration: behind a known token, no other pair of tokens makes this state."""
    model = tiny("gpt2")
    count, ids = 40, [3, 17, 29]
    pairs = torch.cartesian_prod(torch.tensor([3]), torch.arange(count), torch.arange(count))
    states = model.states(pairs, (2,))[2][:, 2].double()
    true = rows_at(model, ids, (0, 1, 2))[2].double()
    away = (states - true).norm(dim=1)
    assert pairs[away.argmin()].tolist() == ids
    (result,) = preimage.invert(model, rows_at(model, ids, (0, 2)), 2, observe=Observation(at=(0, 2)))
    assert list(result.token_ids) == ids


def test_tokens_that_leave_no_trace_are_not_claimed() -> None:
    """At layer 0 a state is its own token's alone."""
    model, ids, at = tiny("llama"), random_ids(6), (0, 1, 3, 5)
    (result,) = preimage.invert(model, rows_at(model, ids, at, layer=0), 0, observe=Observation(at=at))
    assert (result.status, result.complete) == ("ambiguous", False)
    assert [result.token_ids[place] for place in at] == [ids[place] for place in at]
    sure = result.reading.confidence
    assert all(sure[place] == 1.0 for place in at)
    assert sure[2] < 0.5
    assert sure[4] < 0.5


def test_twins_of_a_missing_token_fit_as_well() -> None:
    module = build("llama")
    with torch.no_grad():
        module.get_input_embeddings().weight[40] = module.get_input_embeddings().weight[38]
    model, ids, at = preimage.load(module), [3, 5, 40, 9, 12], (0, 1, 3, 4)
    (result,) = preimage.invert(model, rows_at(model, ids, at), 2, observe=Observation(at=at))
    assert (result.status, set(result.alternatives)) == (
        "ambiguous", {(3, 5, 40, 9, 12), (3, 5, 38, 9, 12)},
    )  # fmt: skip


def test_nothing_missing_is_as_good_as_all() -> None:
    model, ids = tiny("llama"), random_ids(6)
    at = tuple(range(6))
    (result,) = preimage.invert(model, rows_at(model, ids, at), 2, observe=Observation(at=at))
    assert (result.status, list(result.token_ids)) == ("recovered", ids)


def test_keys_of_some_positions() -> None:
    model, ids, at = tiny("llama"), random_ids(8), (0, 1, 2, 4, 6, 7)
    keys = preimage.capture(model, [ids], 2, observe="keys").at(0, 2)[list(at)]
    (result,) = preimage.invert(model, keys, 2, observe=Observation("keys", at=at))
    assert (result.status, list(result.token_ids)) == ("likely", ids)


def test_changed_states_are_not_explained_by_a_missing_token() -> None:
    model, ids, at = tiny("llama"), random_ids(8), (0, 1, 3, 4)
    rows = rows_at(model, ids, at)
    rows[2] += 0.05 * rows[2].norm() * torch.nn.functional.normalize(torch.ones(model.d_model), dim=0)
    (result,) = preimage.invert(model, rows, 2, observe=Observation(at=at))
    assert (result.status, result.failed_position) == ("not_recovered", 3)


def test_what_fits_nothing_is_read_all_the_same() -> None:
    """The tokens before a changed state are sure, those behind it are what their states read as."""
    model, ids, at = tiny("llama"), random_ids(8), (0, 1, 2, 4, 5, 7)
    rows = rows_at(model, ids, at)
    rows[3] *= 1.05
    (result,) = preimage.invert(model, rows, 2, observe=Observation(at=at))
    assert result.status == "not_recovered"
    assert len(result.reading.token_ids) == len(result.reading.confidence) == 8
    assert list(result.reading.token_ids[:3]) == ids[:3]
    assert result.reading.confidence[:3] == (1.0, 1.0, 1.0)
    assert all(sure <= 0.9 for sure in result.reading.confidence[3:])
    read = [result.reading.token_ids[place] == ids[place] for place in at[3:]]
    assert sum(read) >= 2


def test_positions_that_cannot_be_meant_are_refused() -> None:
    model = tiny("llama")
    for at in ((), (2, 1), (1, 1), (-1, 0)):
        refused(OptionError, lambda at=at: Observation(at=at))
    refused(OptionError, lambda: Observation(at=(0, 2), positions="last"))
    refused(OptionError, lambda: Observation(at=(0, 2), rotated=True))
    seen, rows = Observation(at=(0, 2)), rows_at(model, random_ids(4), (0, 2))
    refused(StatesError, lambda: preimage.invert(model, torch.cat([rows, rows]), 2, observe=seen))
    for wrong in ({"prefix": [1]}, {"prove": True}, {"method": "sipit"}):
        refused(OptionError, lambda wrong=wrong: preimage.invert(model, rows, 2, observe=seen, **wrong))


def test_positions_as_they_are_told() -> None:
    assert parse_positions("0-3,7, 9-10") == (0, 1, 2, 3, 7, 9, 10)
    for wrong in ("", "a", "1-", "-1", "0-9999999", "1--2", "4-3", "0,9-2"):
        refused(OptionError, lambda wrong=wrong: parse_positions(wrong))


@pytest.mark.real_model
def test_every_fourth_state_of_the_default_model_is_missing(
    smollm2: preimage.LanguageModel, tmp_path: Path
) -> None:
    text = "The second law of thermodynamics states that the entropy of an isolated system never decreases."
    ids = smollm2.tokenizer(text)["input_ids"]
    at = tuple(place for place in range(len(ids)) if place % 4 != 2)
    rows = smollm2.states(torch.tensor([ids]), (15,))[15][0, list(at)]
    np.save(tmp_path / "x.npy", rows.numpy())
    states = preimage.states.read_states_file(tmp_path / "x.npy").states
    (result,) = preimage.invert(smollm2, states, 15, observe=Observation(at=at))
    assert (result.status, list(result.token_ids)) == ("likely", ids[: at[-1] + 1])
