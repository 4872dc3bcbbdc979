"""A tiny model behind a server, and a browser before it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.browser import Browser
from support.folders import make_folder
from support.serving import Server


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    with Browser() as one:
        yield one


@pytest.fixture(scope="package")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("served") / "model")


@pytest.fixture(scope="package")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="package")
def server(model_folder: Path, runs: Path) -> Iterator[Server]:
    with Server("--model", model_folder, "--runs", runs) as one:
        yield one
