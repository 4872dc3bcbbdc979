"""Memory does not grow with the number of captures (J5)."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

import preimage
from support.tiny import random_ids, tiny

MIB = 2**20


def resident() -> int:
    """Bytes of this process that are in memory."""
    gc.collect()
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="NO /proc: resident memory is not read")
def test_memory_is_flat_over_a_thousand_captures(tmp_path: Path) -> None:
    model, prompt = tiny("llama"), random_ids(100)
    size = 100 * 32 * 4 * 5  # bytes of one capture: positions, width, float32, layers
    after_100 = 0
    for number in range(1000):
        states = preimage.capture(model, prompt, out=None if number % 5 else tmp_path / str(number))
        assert states.at(0, "final").shape == (100, 32)
        if number == 99:
            after_100 = resident()
    grown = resident() - after_100
    assert 900 * size > 50 * MIB  # keeping them all would be seen
    assert grown < 8 * MIB
