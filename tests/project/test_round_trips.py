"""Every result that can be read again is, through json, what it was."""

import json
from dataclasses import asdict
from functools import partial
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from preimage.storage import decode
from support.drawn_results import made, recipes, result_types


def test_the_results_are_found() -> None:
    names = {kind.__name__ for kind in result_types()}
    assert {"Geometry", "Inversion", "LayerCollisions", "Trajectory"} <= names


@pytest.mark.parametrize("kind", result_types(), ids=lambda kind: kind.__name__)
@settings(max_examples=15, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_result_survives_json(kind: Any, data: st.DataObject) -> None:
    result = made(data.draw(recipes(kind)))
    written = result.to_dict() if hasattr(result, "to_dict") else asdict(result)
    read = getattr(kind, "from_dict", partial(decode, kind))  # a sweep has a form of its own
    assert read(written) == result
    assert read(json.loads(json.dumps(written))) == result
