"""Wrong options are refused before torch is imported, in every command."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

WRONG = """
invert --text x --method no
invert --text x --layer 99
invert --text x --dtype int3
invert --text x --device gpu?
invert --text x --max-tests 0
invert --text x --proposers no
invert --text x --lens nofile
invert --text x --lens FILE --method sipit
invert --text x --lens FILE --proposers codebook
demo --model no/such
demo --device gpu?
invert --model no/such --text x
invert nowhere
invert nofile.npy --layer 1
invert FILE
invert FILE --layer 99
invert FILE --layer 1 --text x
invert FILE --layer 1 --observe no
invert FILE --layer 1 --stored no
invert FILE --layer 1 --positions no
invert FILE --layer 1 --rotary no
invert FILE --layer 1 --rotary before
invert FILE --layer 0 --observe keys
invert FILE --layer 1 --observe final
invert nowhere --key h
invert --text x --key h
invert --text x --mask-key m
invert --text x --observe residual
invert --text x --stored bf16
invert --text x --positions all
invert --text x --rotary after
invert --text x --permuted
invert --text x --rotated
invert --text x --prefix y
invert
capture --text x --layers 99 --out OUT
capture --text x --positions some --out OUT
capture --text x --batch-tokens 0 --out OUT
capture --prompts nofile.txt --out OUT
capture --from-tensor nofile.npy --layer 1 --out OUT
capture --from-tensor FILE --out OUT
capture --from-tensor FILE --layer 99 --out OUT
capture --from-tensor FILE --layer 1 --positions some --out OUT
capture --from-tensor FILE --layer 1 --observe some --out OUT
capture --text x --observe queries --out OUT
capture --text x --mask-key m --out OUT
capture --text x --positions mean --out OUT
collisions --closest 0
collisions --threshold -1
collisions --layers 99
collisions --prompts nofile.txt
collisions --lengths 8,x
continuations --text x --layer 99
continuations
geometry --bits 99
geometry --granularity no
geometry --range no
geometry --quantile 3
geometry --layers 99
geometry --dtype int3
geometry --figures bmp
geometry nowhere
trajectory --steps 0
trajectory --family no
trajectory --text nofile.txt
lens train --layer 99
lens train --layer 1 --steps 0
lens train --layer 1 --dtype int3
lens train --layer 1 --observe queries
lens train --layer final --observe keys
lens train --layer 1 --observe final
lens train --layer 1 --neighbours -1
lens train --layer 1 --sampled-tokens 0
lens train --layer 1 --prompts random --sampled-tokens 9
lens pull --from nowhere --all --layer 1
lens pull --from nowhere --layer 99
lens pull --from nowhere --model no/such
lens verify nowhere --model no/such
theory analyticity no/such
theory dichotomy --layers 99
theory symmetry --dtype int3
theory optimiser --optimiser no
theory discriminant --text a
theory discriminant --layer 99 --text a --text b
bench inversion --layers 99
bench throughput --layers 99
bench geometry --layers 99
bench capture --dtype int3
bench pairs --n 1
models no/such
""".strip().splitlines()
SCRIPT = """
import json, sys
from preimage.cli import main
for line in sys.stdin.read().splitlines():
    code = main([*line.split(), "--json"])
    print("END", json.dumps([line, code, "torch" in sys.modules]), flush=True)
"""


@pytest.mark.real_model  # the default model's files say how many layers it has
def test_wrong_options_are_refused_before_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "t.npy").write_bytes(b"")
    asked = "\n".join(WRONG).replace("OUT", "/nonexistent/out").replace("FILE", str(tmp_path / "t.npy"))
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], input=asked, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    ends = [json.loads(line[4:]) for line in done.stdout.splitlines() if line.startswith("END ")]
    assert [line for line, _, _ in ends] == asked.splitlines()
    late = [line for line, code, torch in ends if code != 2 or torch]
    assert not late
