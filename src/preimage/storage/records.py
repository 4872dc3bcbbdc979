"""Who made a run: versions, machine, date, command and commit, as plain facts."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

_PACKAGES = ("preimage", "torch", "transformers", "numpy")


def record(*, command: bool = True) -> dict[str, Any]:
    """What is known of this process, its command only where it is to be named; nothing is imported for it."""
    torch = sys.modules.get("torch")
    cuda = torch is not None and torch.cuda.is_available()
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": sys.argv if command else None,
        "versions": {"python": platform.python_version(), **_versions()},
        "commit": _commit(),
        "machine": platform.machine(),
        "processor": processor(),
        "gpu": torch.cuda.get_device_name() if torch is not None and cuda else None,
        "threads": torch.get_num_threads() if torch is not None else os.cpu_count(),
    }


@cache
def processor() -> str:
    """The processor's own name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):  # not Linux, or another kind of processor
        return platform.processor() or platform.machine()


@cache
def _versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return versions


@cache
def _commit() -> str | None:
    """The commit of these sources where they are a checkout, "+" behind it where they were changed."""
    here = Path(__file__).parent
    try:
        described = subprocess.run(
            ["git", "-C", str(here), "describe", "--always", "--abbrev=40", "--dirty=+", "--exclude=*"],
            capture_output=True, text=True, timeout=10, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    tracked = described.returncode == 0 and (here.parents[2] / ".git").exists()
    return described.stdout.strip() if tracked else None
