"""A distance is a function of the pair alone."""

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from preimage.distances import direct as direct_module
from preimage.distances import norms, relative_error, row_distances, same_rows
from support.distances import between, lengths, mixed_sets

# A distance is a function of the pair alone.
DEFINED = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int8, torch.bool]


@pytest.mark.parametrize("dtype", DEFINED, ids=str)
@pytest.mark.parametrize("d", [0, 1, 2, 3, 15, 16, 17, 64, 100, 576, 640, 1000])
def test_a_distance_has_the_same_bits_in_every_batch_and_layout(d: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(d)
    x, y = (10 * torch.randn(40, d, generator=generator, dtype=torch.float64) for _ in "xy")
    x, y = (x > 0, y > 0) if dtype == torch.bool else (x.to(dtype), y.to(dtype))
    true = torch.from_numpy(lengths(x.double().numpy() - y.double().numpy()))
    assert torch.equal(row_distances(x, y), true)
    assert torch.equal(row_distances(y, x), true)
    assert torch.equal(norms(x), torch.from_numpy(lengths(x.double().numpy())))
    for size in (1, 2, 3, 7, 15, 16, 17):
        batches = [row_distances(*part) for part in zip(x.split(size), y.split(size), strict=True)]
        assert torch.equal(torch.cat(batches), true)
    assert torch.equal(torch.stack([row_distances(a, b) for a, b in zip(x, y, strict=True)]), true)
    assert torch.equal(row_distances(x.T.contiguous().T, y), true)
    assert torch.equal(row_distances(x.repeat(1, 2)[:, :d], y.repeat(2, 1)[40:]), true)
    assert torch.equal(row_distances(x[::2], y[::2]), true[::2])
    assert torch.equal(row_distances(x.view(5, 8, d), y.view(5, 8, d)), true.view(5, 8))
    assert torch.equal(row_distances(x[:, None], y[None]).diagonal(), true)
    assert torch.equal(row_distances(x[3], y)[3], true[3])
    padded = (torch.cat([rows, rows.new_zeros(40, 37)], dim=1) for rows in (x, y))
    assert torch.equal(row_distances(*padded), true)


def test_pieces_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = (torch.randn(6, 9, 70, generator=torch.Generator().manual_seed(i)) for i in (0, 1))
    true = row_distances(x, y[:1])
    for most in (1, 69, 70, 200, 700, 3000):
        monkeypatch.setattr(direct_module, "_TOGETHER", {"cpu": most})
        assert torch.equal(row_distances(x, y[:1]), true)
        assert torch.equal(row_distances(x[0, 0], y[0, 0]), true[0, 0])


@settings(max_examples=200, deadline=None)
@given(x=mixed_sets())
def test_the_definition_holds_at_every_magnitude(x: Tensor) -> None:
    away = row_distances(x[:, None], x[None])
    assert torch.equal(away, between(x, x))
    assert torch.equal(away, away.T)
    same = same_rows(x)
    assert torch.equal(away == 0, same[:, None] == same[None])  # rows that differ are never 0 apart
    largest = (x[:, None] - x[None]).abs().amax(dim=2)
    assert bool((away >= largest).all())
    assert bool((away <= largest * x.shape[1] ** 0.5 * (1 + 2 * relative_error(x.shape[1])) + 5e-324).all())


_OTHERWISE = """
import hashlib, numpy as np, torch
from preimage.distances import PairScan, closest_pairs, nearest_neighbors, norms, row_distances
digest = hashlib.sha256()
for d in (5, 64, 576, 1111):
    # numpy's numbers: torch draws others with other instructions
    x = torch.from_numpy(30 + np.random.default_rng(d).normal(size=(300, d))).float()
    for rows in (x, x.double() * 1.1, x.bfloat16(), x.T.contiguous().T):
        nearest = nearest_neighbors(rows)
        for found in (norms(rows), row_distances(rows[:-1], rows[1:]), nearest.distances, nearest.indices):
            digest.update(found.numpy().tobytes())
        digest.update(repr(closest_pairs(rows, 10)).encode())
print(digest.hexdigest())
"""


def test_neither_instruction_set_nor_threads_change_a_bit() -> None:
    found = set()
    for capability, threads in (("default", "1"), ("avx512", "2")):
        chosen = {"ATEN_CPU_CAPABILITY": capability, "OMP_NUM_THREADS": threads}
        done = subprocess.run(
            [sys.executable, "-c", _OTHERWISE],
            env={**os.environ, **chosen},
            capture_output=True,
            text=True,
            check=True,
        )
        found.add(done.stdout)
    assert len(found) == 1
