"""What the tests of killed, stopped and damaged jobs share."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.jobs import JOBS, kill_at


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folder of every kind of job, made in one go; what a model needs once is known from then on."""
    root = tmp_path_factory.mktemp("undisturbed")
    for name, job in JOBS.items():
        job(root / name)
    return {name: root / name for name in JOBS}


@pytest.fixture(scope="session")
def half_done(undisturbed: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folder of every kind of job, killed when two pieces were finished; to be copied."""
    root = tmp_path_factory.mktemp("half-done")
    for name, job in JOBS.items():
        assert kill_at(job, root / name, piece=2)
    return {name: root / name for name in JOBS}
