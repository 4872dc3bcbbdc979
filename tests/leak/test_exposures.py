"""What is seen of states: each change does what it says, and an attacker is told what is no secret."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from preimage.errors import OptionError
from preimage.leak.exposures import FAMILIES, Exposure, parse_exposures
from preimage.leak.options import DEFENCES, STANDARD, LeakOptions
from support.refusing import refused

ROWS = [torch.randn(length, 16, generator=torch.Generator().manual_seed(length)) for length in (5, 7)]


def seen(spec: str, seed: int = 0, rows: list[torch.Tensor] = ROWS) -> list[torch.Tensor]:
    return Exposure.parse(spec).of(rows, seed)[0]


@pytest.mark.parametrize("spec", sorted({*STANDARD, *DEFENCES, "keys:int8", "kv:fp8", "cut:12.5", "mean"}))
def test_a_spec_is_what_it_reads_back_as(spec: str) -> None:
    assert Exposure.parse(spec).spec == spec
    assert Exposure.parse(Exposure.parse(spec).spec) == Exposure.parse(spec)
    assert "{" not in Exposure.parse(spec).about


@pytest.mark.parametrize(
    "spec", ["", "noise", "noise:", "noise:-1", "noise:nan", "noise:inf", "int8:3", "keys:int3", "cut:0",
             "cut:101", "every:0", "md5", "x" * 5000]
)  # fmt: skip
def test_what_is_no_exposure_is_refused_shortly(spec: str) -> None:
    error = refused(OptionError, lambda: Exposure.parse(spec))
    assert len(error.message) < 200
    assert error.hint


def test_lists_keep_their_order_and_each_once() -> None:
    assert [one.spec for one in parse_exposures("int8, float32,int8")] == ["int8", "float32"]
    refused(OptionError, lambda: parse_exposures(" , "))
    refused(OptionError, lambda: LeakOptions(exposures=("sha1",)))
    refused(OptionError, lambda: LeakOptions(minutes=0.0))
    refused(OptionError, lambda: LeakOptions(searched=-1))


@given(st.sampled_from([5.0, 20.0, 300.0]), st.integers(0, 5))
def test_noise_is_as_long_as_it_says(percent: float, seed: int) -> None:
    for plain, noisy in zip(ROWS, seen(f"noise:{percent:g}", seed), strict=True):
        share = (noisy - plain).norm(dim=1) / plain.norm(dim=1)
        assert torch.allclose(share, torch.full_like(share, percent / 100), rtol=1e-4)


def test_noise_of_low_rank_lies_in_few_directions_the_same_for_all() -> None:
    noise = torch.cat([noisy - plain for plain, noisy in zip(ROWS, seen("lowrank:50"), strict=True)])
    assert torch.linalg.matrix_rank(noise, rtol=1e-4) == 2  # an eighth of 16
    white = torch.cat([noisy - plain for plain, noisy in zip(ROWS, seen("noise:50"), strict=True)])
    assert torch.linalg.matrix_rank(white, rtol=1e-4) == 12


def test_clipped_states_are_no_longer_than_the_median_before_noise() -> None:
    lengths = torch.cat([one.norm(dim=1) for one in ROWS])
    clipped = torch.cat([one.norm(dim=1) for one in seen("clipped:0")])
    assert torch.allclose(clipped, lengths.clamp_max(float(lengths.median())), rtol=1e-5)


def test_what_was_cut_is_told_and_no_more() -> None:
    rows, told = Exposure.parse("cut:25").of(ROWS, 3)
    assert told.kept is not None
    assert len(told.kept) == 4
    assert all(torch.equal(one, plain[:, list(told.kept)]) for one, plain in zip(rows, ROWS, strict=True))
    assert seen("cut:100")[0].equal(ROWS[0])


def test_every_second_position_has_the_last() -> None:
    rows, told = Exposure.parse("every:2").of(ROWS[:1], 0)
    assert told.at == (0, 2, 4)
    assert torch.equal(rows[0], ROWS[0][[0, 2, 4]])


@pytest.mark.parametrize("spec", ["permuted", "rotated", "shuffled"])
def test_secrets_are_not_told(spec: str) -> None:
    rows, told = Exposure.parse(spec).of(ROWS, 1)
    assert told == FAMILIES[spec].seen
    assert told.kept is None
    assert told.rotation is None
    assert not rows[0].equal(ROWS[0])
    assert torch.allclose(rows[0].norm(), ROWS[0].norm(), rtol=1e-5)


def test_one_secret_for_all_prompts_and_another_for_another_seed() -> None:
    first, second = seen("permuted", 1), seen("permuted", 2)
    order = [int((one == ROWS[0][0]).nonzero()[0, 0]) for one in first[0][0][:, None]]
    assert torch.equal(first[1], ROWS[1][:, order])
    assert not torch.equal(first[0], second[0])


@pytest.mark.parametrize(("kind", "step"), [("int8", 1 / 127), ("fp8", 1 / 8), ("bf16", 2**-7)])
def test_few_bits_are_off_by_half_a_step_at_most(kind: str, step: float) -> None:
    for plain, kept in zip(ROWS, seen(kind), strict=True):
        most = plain.abs().amax(dim=1, keepdim=True)
        assert bool(((kept.float() - plain).abs() <= 0.51 * step * most).all())
        assert not torch.equal(kept.float(), plain)


def test_states_are_copied_and_zeros_stay_zeros() -> None:
    before = [one.clone() for one in ROWS]
    for spec in {*STANDARD, *DEFENCES}:
        seen(spec, rows=ROWS[:1])
    assert all(torch.equal(one, was) for one, was in zip(ROWS, before, strict=True))
    assert not torch.cat(seen("int8", rows=[torch.zeros(2, 16)])).any()
    assert not torch.cat(seen("noise:20", rows=[torch.zeros(2, 16)])).any()
