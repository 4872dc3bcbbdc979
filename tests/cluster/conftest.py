"""What the tests of clusters share: a real model in a folder, and a real Ray cluster of two workers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import preimage
from preimage.cluster import Cluster
from preimage.models import LanguageModel
from support.folders import make_folder


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    """A model that workers can load, too."""
    return preimage.load(make_folder(tmp_path_factory.mktemp("cluster") / "model"))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two workers on this machine, not yet at work for anybody."""
    with Cluster("local", workers=2) as opened, preimage.storage.working_with(None):
        opened.wait()  # else the driver begins alone, and small work is done before they come
        yield opened


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return tmp_path / "runs"
