"""What is written has a version: no field of it is changed under the same one (C4).

After a change on purpose raise ``SCHEMA`` and run this file: ``python tests/storage/test_schema.py``.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import preimage
from preimage.storage import SCHEMA

KEPT = Path(__file__).with_name("schema.json")


def written() -> dict[str, dict[str, str]]:
    """The fields, with their types, of everything that is saved: results, options, identities."""
    names = [module.name for module in pkgutil.walk_packages(preimage.__path__, "preimage.")]
    ends = ("result", "options", "identity", "layout")
    wanted = [name for name in names if name.rpartition(".")[2] in ends]
    kinds: dict[str, dict[str, str]] = {}
    for name in wanted:
        for kind in vars(importlib.import_module(name)).values():
            if isinstance(kind, type) and kind.__module__ == name and is_dataclass(kind):
                kinds[f"{name}.{kind.__name__}"] = {field.name: str(field.type) for field in fields(kind)}
            elif isinstance(kind, type) and kind.__module__ == name and hasattr(kind, "_fields"):
                hints = kind.__annotations__
                kinds[f"{name}.{kind.__name__}"] = {
                    field: getattr(hints[field], "__forward_arg__", str(hints[field]))
                    for field in kind._fields
                    for field in kind._fields
                }
    return dict(sorted(kinds.items()))


def test_no_format_changes_under_the_same_version() -> None:
    kept: dict[str, Any] = json.loads(KEPT.read_text(encoding="utf-8"))
    assert kept["schema"] == SCHEMA, "run this file, so that the fields of the new version are kept"
    assert written() == kept["fields"], "a format has changed: raise SCHEMA, then run this file"


if __name__ == "__main__":
    KEPT.write_text(json.dumps({"schema": SCHEMA, "fields": written()}, indent=1) + "\n", encoding="utf-8")
