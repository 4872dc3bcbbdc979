"""docs/notebook.ipynb runs from top to bottom, and shows what its words say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "docs" / "notebook.ipynb"


def test_every_cell_is_introduced_and_nothing_is_kept_of_a_run() -> None:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    kinds = [cell["cell_type"] for cell in cells]
    assert kinds == ["markdown", *["markdown", "code"] * (len(kinds) // 2)]
    for cell in cells:
        assert "".join(cell["source"]).strip()
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    surroundings = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "IPYTHONDIR": str(tmp_path_factory.mktemp("ipython")),
        "PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run(
        [sys.executable, "-m", "support.notebooks", NOTEBOOK],
        capture_output=True, text=True, check=False, env=surroundings,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    cells: list[dict[str, Any]] = json.loads(done.stdout)
    return cells


@pytest.mark.real_model
def test_it_runs_and_shows_what_it_says(shown: list[dict[str, Any]]) -> None:
    model, states, rows, found, several, table, outputs, audit, shape, figure = (one["data"] for one in shown)
    assert "smollm2" in model["text/html"]
    assert "states of 2 prompts at 2 layers" in states["text/html"]
    assert "torch.Size" in rows["text/plain"]
    assert "✓ recovered at layer 15" in found["text/html"]
    assert "My password is hunter2." in found["text/html"]
    assert "nearest other token tried" in found["text/html"]
    assert several["text/plain"].count("<recovered at layer 15 by fast: ") == 2
    assert "The treasure is under the old oak tree." in several["text/plain"]
    assert "hunter" in table["text/html"]
    assert "✓ recovered" in outputs["text/html"]
    assert "And so it begins." in outputs["text/html"]
    assert "no unexplained collision among 40 prompts" in audit["text/html"]
    assert "geometry of 40 prompts at 32 layers" in shape["text/html"]
    drawn = figure["application/vnd.plotly.v1+json"]["data"]
    assert {trace["name"] for trace in drawn} == {"full precision", "8 bits", "4 bits"}
    assert "prompts captured: 100%" in shown[1]["stderr"]
    assert "prompts inverted: 100%" in shown[3]["stderr"]
    assert not any("Warning" in one["stderr"] for one in shown)
