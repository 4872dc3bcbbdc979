"""Result files: whole or not there at all."""

from __future__ import annotations

import json
import math
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from preimage.errors import RunFolderError


def plain(value: Any) -> Any:
    """The same value in what json knows; a number that is not finite becomes null."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def dumps(document: dict[str, Any]) -> str:
    """One json document. Lone surrogates and control characters leave it as escapes."""
    return json.dumps(plain(document), indent=1, ensure_ascii=True, allow_nan=False)


def write_json(path: Path, document: dict[str, Any]) -> Path:
    """Write one json document."""
    return write_text(path, dumps(document))


def write_text(path: Path, text: str) -> Path:
    """Write a file: to a temporary one, synced, then renamed."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise RunFolderError(f"{path} cannot be written: {error.strerror}.", "Give another place.") from error
    return path
