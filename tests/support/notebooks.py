"""A notebook run from top to bottom in IPython, every result formatted as a notebook formats it; a program.

``python -m support.notebooks FILE`` prints json: for every cell of code what it shows, by mime type, and what
it wrote. The first cell that fails ends it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import nbformat
import plotly.io
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from traitlets.config import Config


def run(path: Path) -> list[dict[str, Any]]:
    """What every cell of code shows."""
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    config = Config()
    config.HistoryManager.enabled = False
    shell = InteractiveShell.instance(config=config)
    plotly.io.renderers.default = "plotly_mimetype"  # what a notebook takes
    shown = []
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        with capture_output() as captured:
            result = shell.run_cell(cell.source)
        result.raise_error()
        data: dict[str, Any] = {}
        if result.result is not None:
            data, _ = shell.display_formatter.format(result.result)
        for output in captured.outputs:
            data |= output.data
        shown.append({"data": data, "stderr": captured.stderr})
    return shown


if __name__ == "__main__":
    json.dump(run(Path(sys.argv[1])), sys.stdout, default=str)
