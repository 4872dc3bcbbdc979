"""``preimage doctor``."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

from preimage.cli import DONE, FINDINGS
from preimage.cli.arguments import Json
from preimage.cli.terminal import print_result, print_table

_PACKAGES = ("preimage", "torch", "transformers", "safetensors", "tokenizers", "gguf", "numpy", "pyarrow")


def doctor(json: Json = False) -> int:
    """Say what this machine has, what is missing, and what to do about it."""
    python = ("python", sys.version_info >= (3, 11), platform.python_version())
    needed = [_installed(name, name, f"missing; pip install {name}") for name in _PACKAGES]
    data = _installed("extra data", "datasets", 'not installed; pip install "preimage[data]"')
    checks = [python, *needed, _device(), *_half_precision(), _cache(), _default_model(), data]
    if json:
        rows = [dict(zip(("check", "ok", "found"), check, strict=True)) for check in checks]
        print_result("doctor", {"checks": rows})
    else:
        rows_ = [["ok" if ok else "--", name, found] for name, ok, found in checks]
        print_table("preimage doctor", ["", "what", "found"], rows_, prose=["found"])
    return DONE if all(ok for name, ok, _ in checks if not name.startswith("extra ")) else FINDINGS


def _installed(check: str, package: str, missing: str) -> tuple[str, bool, str]:
    try:
        version = metadata.version(package)
    except metadata.PackageNotFoundError:
        return check, False, missing
    return check, True, version if check == package else f"{package} {version}"


def _device() -> tuple[str, bool, str]:
    import torch

    if torch.cuda.is_available():
        return "device", True, f"cuda, {torch.cuda.get_device_name()}"
    return "device", True, f"cpu, {torch.get_num_threads()} threads of {os.cpu_count()} cores"


def _half_precision() -> list[tuple[str, bool, str]]:
    """Whether torch survives a bfloat16 product, where the processor says that it has AMX.

    Some virtual machines advertise it and then refuse its instructions: the process dies of that.
    """
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:  # not Linux
        return []
    if "amx_bf16" not in flags:
        return []
    product = "import torch; one = torch.ones(64, 64, dtype=torch.bfloat16); one @ one"
    done = subprocess.run([sys.executable, "-c", product], capture_output=True, check=False)
    if done.returncode == 0:
        return [("extra bfloat16", True, "works")]
    said = "crashes: this machine advertises AMX and refuses it; set ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16"
    return [("extra bfloat16", False, said)]


def _cache() -> tuple[str, bool, str]:
    from preimage.models import cache_folder

    folder = cache_folder()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    parts = [path for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []
    try:
        for place in (existing, *parts):  # tried, because permissions do not tell of disks that are full
            with tempfile.TemporaryFile(dir=place) as file:
                file.write(b"?" * 4096)
    except OSError as error:
        hint = "set PREIMAGE_CACHE to a folder that can"
        return "cache", False, f"{folder} cannot be written ({error.strerror}); {hint}"
    return "cache", True, str(folder)


def _default_model() -> tuple[str, bool, str]:
    from preimage.models import ALIASES, converted_folder

    folder = converted_folder(ALIASES["smollm2"])
    if folder.is_dir():
        return "default model", True, str(folder)
    return "default model", False, "not fetched yet; run `preimage models --fetch smollm2`"
