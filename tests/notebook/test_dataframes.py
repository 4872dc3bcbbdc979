"""Results as DataFrames: what pandas reads from the parquet tables of run folders, to the bit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas
import pytest
from pandas.testing import assert_frame_equal

import preimage
from preimage.storage import write_table
from support.shown_results import IDS, results, spoken


def rows_of(result: Any) -> list[dict[str, Any]]:
    rows = result.table if isinstance(result, preimage.Reproduction) else result.rows
    return list(rows() if callable(rows) else rows)


WITH_TABLES = sorted(name for name, result in results().items() if hasattr(result, "to_dataframe"))


def test_which_have_one() -> None:
    without = {name.partition(" ")[0] for name in results().keys() - set(WITH_TABLES)}
    assert without == {"WorkPlan", "States", "LanguageModel"}


@pytest.mark.parametrize("name", WITH_TABLES)
def test_a_dataframe_is_what_pandas_reads_from_the_table(name: str, tmp_path: Path) -> None:
    result = results()[name]
    frame = result.to_dataframe()
    assert len(frame) == len(rows_of(result)) > 0
    assert_frame_equal(frame, pandas.read_parquet(write_table(tmp_path / "table.parquet", rows_of(result))))


def test_run_folders_hold_the_same_table(tmp_path: Path) -> None:
    model = spoken()
    audit = preimage.find_collisions(model, IDS, layers=[0, 2], hard_bases=0, out=tmp_path / "audit")
    assert_frame_equal(audit.to_dataframe(), pandas.read_parquet(tmp_path / "audit" / "layers.parquet"))
    states = preimage.capture(model, IDS, layers=[1, "final"], positions="last")
    shape = preimage.measure_geometry(states, bits=(None, 8), out=tmp_path / "shape")
    assert_frame_equal(shape.to_dataframe(), pandas.read_parquet(tmp_path / "shape" / "layers.parquet"))
    frame = shape.to_dataframe()
    assert list(frame["layer"]) == ["1", "final"] * 2
    assert list(frame["bits"].fillna(0)) == [0, 0, 8, 8]
    assert frame["margin"][0] == shape.layers[1].margin


def test_without_pandas_the_error_says_what_to_install() -> None:
    script = (
        "import sys; sys.modules['pandas'] = None\n"
        "from preimage.errors import MissingExtraError\n"
        "from preimage.storage import dataframe\n"
        "try: dataframe([{'a': 1}])\n"
        "except MissingExtraError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "pandas is not installed. pip install pandas\n"
