"""What the tests of collisions share: one cache, a finished search, and a look at what is compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from preimage.collisions import audit, layer_audit, prefixes
from preimage.collisions.result import Spacing
from preimage.states import States, capture_for_run
from support.collisions import search


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREIMAGE_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[States]:
    """The states a search looks at: those of the prompts, then those of the hard pairs."""
    kept: list[States] = []

    def keep(*args: Any, **kwargs: Any) -> States:
        kept.append(capture_for_run(*args, **kwargs))
        return kept[-1]

    monkeypatch.setattr(audit, "capture_for_run", keep)
    return kept


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A search that was never interrupted."""
    out = tmp_path_factory.mktemp("whole") / "run"
    search(out)
    return out


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many sets of states were compared, counted from now on."""
    count: list[int] = []
    for module in (layer_audit, prefixes):
        original = module.measure_spacing

        def counted(*args: Any, original: Any = original) -> Spacing:
            count.append(1)
            return original(*args)

        monkeypatch.setattr(module, "measure_spacing", counted)
    return count
