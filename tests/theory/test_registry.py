"""The registry of checks, and reports that are written and read again."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

from preimage import theory
from preimage.errors import RunFolderError
from preimage.theory import CHECKS, TheoryReport, Verdict
from preimage.theory.verification import small_model
from support.refusing import refused


def test_every_check_is_there_and_its_reports_carry_its_name() -> None:
    for check in CHECKS.values():
        assert check.function in theory.__all__
        assert check.asks.endswith("?")
    models = small_model("llama", blocks=2), small_model("llama")
    for name in ("analyticity", "symmetry"):
        cases = CHECKS[name].cases
        assert cases is not None
        (case,) = cases(*models, 0)
        assert case.run().check == name


def test_the_registry_is_quick_to_import() -> None:
    script = "import sys, preimage.theory.registry; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_a_report_is_read_as_it_was_written(tmp_path: Path) -> None:
    verdict = Verdict("a.b", "something holds", True, 0.5, 1.0, "the rest", descriptive=True)
    report = TheoryReport("a", {"model": "m"}, (verdict,), {"rows": [{"layer": "final", "x": 1.5}]})
    path = report.save(tmp_path / "report.json")
    assert TheoryReport.load(path) == TheoryReport.from_dict(report.to_dict()) == report
    endless = TheoryReport("a", {}, (Verdict("a.b", "s", False, math.inf, 1.0, ""),))
    assert TheoryReport.load(endless.save(path)).verdicts[0].value is None
    path.write_text(json.dumps({"kind": "collisions"}))
    error = refused(RunFolderError, lambda: TheoryReport.load(path))
    assert error.message == f"{path} is not a saved theory: its kind is 'collisions', not 'theory'."
