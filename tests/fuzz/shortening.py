"""A case cut down to what a fault needs, so that a person can read it."""

from __future__ import annotations

import time
from collections.abc import Callable

SECONDS = 20.0  # that one case is worth


def shorten(data: bytes, still_fails: Callable[[bytes], bool]) -> bytes:
    """``data`` without whatever can be left out: halves, quarters, … single bytes."""
    end = time.monotonic() + SECONDS
    size = len(data) // 2
    while size:
        at = 0
        while at < len(data):
            shorter = data[:at] + data[at + size :]
            if time.monotonic() > end:
                return data
            if still_fails(shorter):
                data = shorter
            else:
                at += size
        size //= 2
    return data
