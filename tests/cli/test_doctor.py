"""``preimage doctor``: what is here, and whether it works."""

from __future__ import annotations

import resource
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from preimage.cli import doctor
from preimage.cli.doctor import _cache
from support.commands import Typed


def test_doctor(document: Any, run: Typed, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code, found = document("doctor")
    assert code == 0
    assert (found["schema"], found["command"]) == ("preimage/9", "doctor")
    checks = {check["check"]: check for check in found["checks"]}
    assert {"python", "preimage", "torch", "device", "cache", "default model", "extra data"} <= checks.keys()
    assert checks["torch"] == {"check": "torch", "ok": True, "found": torch.__version__}
    monkeypatch.setenv("PREIMAGE_CACHE", str(tmp_path / "empty"))
    code, found = document("doctor")
    assert code == 1  # done, and something is missing
    missing = [check for check in found["checks"] if not check["ok"]]
    assert [check["check"] for check in missing] == ["default model"]
    assert "preimage models --fetch smollm2" in missing[0]["found"]
    assert list(tmp_path.iterdir()) == []
    code, out, _ = run("doctor")
    assert code == 1
    assert "preimage models --fetch smollm2" in out


def test_doctor_tries_to_write_the_cache(
    document: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also where permissions say nothing: below a file, in a folder of the system, on a disk that is full."""
    (tmp_path / "file").write_text("")
    for place in (Path("/proc/preimage-test"), tmp_path / "file" / "cache"):
        monkeypatch.setenv("PREIMAGE_CACHE", str(place))
        name, ok, said = _cache()
        assert (name, ok) == ("cache", False)
        assert said.startswith(f"{place} cannot be written")
    code, found = document("doctor")
    assert code == 1
    assert {"check": "cache", "ok": False, "found": said} in found["checks"]
    (tmp_path / "cache" / "noise").mkdir(parents=True)
    monkeypatch.setenv("PREIMAGE_CACHE", str(tmp_path / "cache"))
    assert _cache() == ("cache", True, str(tmp_path / "cache"))
    assert list((tmp_path / "cache").rglob("*")) == [tmp_path / "cache" / "noise"]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        full = _cache()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert full[1] is False


def test_doctor_says_where_half_precision_crashes(
    document: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def dies(command: list[str], **_: Any) -> subprocess.CompletedProcess[bytes]:
        return subprocess.CompletedProcess(command, -signal.SIGILL)

    monkeypatch.setattr(doctor.subprocess, "run", dies)
    monkeypatch.setattr(doctor.Path, "read_text", lambda *_, **__: "flags: amx_bf16")
    code, found = document("doctor")
    assert code == 0  # float32 works
    (check,) = [check for check in found["checks"] if check["check"] == "extra bfloat16"]
    assert check["ok"] is False
    assert "ONEDNN_MAX_CPU_ISA" in check["found"]
