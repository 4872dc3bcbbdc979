"""A search led by coverage: atheris keeps the cases that reach new code of preimage, and changes them."""

from __future__ import annotations

import os
import random
import sys
import tempfile
from pathlib import Path

import atheris

from fuzz.searching import Parents, Search

LIBFUZZER = ["-max_len=65536", "-len_control=0", "-mutate_depth=1", "-rss_limit_mb=0"]  # every case is judged
OTHERS = 0.1  # share of the changes that are libFuzzer's own, which keep no file's form
ANEW = 0.5  # share of the cases made of whole files: most of what reaches new code is refused early on


def guide(one: Search, seed: int) -> None:
    """Search until time or cases are spent, then end the process: atheris does not return."""
    seeds = one.begin()
    parents = Parents(seeds, random.Random(seed))

    def try_case(data: bytes) -> None:
        if not one.left():
            one.report(done=True)
            os._exit(0)
        if one.try_case(data):
            parents.add(data)

    def mutate(data: bytes, most: int, number: int) -> bytes:
        rng = random.Random(number)
        if rng.random() < OTHERS:
            return atheris.Mutate(data, most)
        return one.target.mutated(next(parents) if rng.random() < ANEW else data, rng)[:most]

    with tempfile.TemporaryDirectory() as corpus:
        for number, data in enumerate(seeds):
            (Path(corpus) / str(number)).write_bytes(data)
        atheris.Setup(
            ["fuzz", f"-seed={seed + 1}", *LIBFUZZER, f"-artifact_prefix={corpus}/", corpus],
            try_case,
            custom_mutator=mutate,
        )
        atheris.Fuzz()
    sys.exit("atheris has returned")
