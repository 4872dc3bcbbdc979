"""Wrong options are refused before torch is imported, in every command."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

WRONG = """
invert --text x --method no
invert --text x --layer 99
invert --text x --dtype int3
invert --text x --device gpu?
invert --text x --max-tests 0
invert --text x --proposers no
invert --model no/such --text x
invert nowhere
invert
capture --text x --layers 99 --out OUT
capture --text x --positions some --out OUT
capture --text x --batch-tokens 0 --out OUT
capture --prompts nofile.txt --out OUT
capture --from-tensor nofile.npy --layer 1 --out OUT
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
def test_wrong_options_are_refused_before_torch_is_imported() -> None:
    asked = "\n".join(WRONG).replace("OUT", "/nonexistent/out")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], input=asked, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    ends = [json.loads(line[4:]) for line in done.stdout.splitlines() if line.startswith("END ")]
    assert [line for line, _, _ in ends] == asked.splitlines()
    late = [line for line, code, torch in ends if code != 2 or torch]
    assert not late
