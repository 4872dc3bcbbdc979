"""Run folders beside one another: what each was, and the pages that lie in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from preimage.errors import PreimageError
from preimage.markup import plainly
from preimage.storage import read_json
from preimage.web.guard import RequestError

PAGES = ("report.html", "leak.html")
# A page that somebody made: it runs its own scripts in an origin of its own, and can ask for nothing.
POLICY = (
    "sandbox allow-scripts allow-popups; default-src 'none'; script-src 'unsafe-inline'; "
    "style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_RUN = "run.json"
_MOST = 500  # folders
_MOST_BYTES = 32 << 20  # of a run.json that is read; results of many prompts may be more, and are not
_MOST_PAGE = 64 << 20
_LETTERS, _LAYERS = 200, 6  # of a word, and layers named one by one


def list_runs(root: Path) -> list[dict[str, Any]]:
    """Every run folder in a folder, the latest first."""
    found = [_about(path) for path in _folders(root)]
    return sorted(found, key=lambda run: run["changed"], reverse=True)


def run_page(root: Path, name: str, page: str) -> bytes:
    """A page of a run folder. Names are looked up among those that are there, and never made into a path."""
    folder = next((path for path in _folders(root) if path.name == name), None)
    path = None if folder is None or page not in PAGES else folder / page
    if path is None or not _is_inside(path, root) or path.stat().st_size > _MOST_PAGE:
        raise RequestError("There is no such page.", "Open one of those that are listed.", status=404)
    return path.read_bytes()


def _folders(root: Path) -> list[Path]:
    """Folders that hold a run or a page of one; links that lead elsewhere are none."""
    try:
        inside = sorted(path for path in root.iterdir() if path.is_dir() and _stays(path, root))
    except OSError:
        return []
    kept = (path for path in inside if any(_is_inside(path / name, root) for name in (_RUN, *PAGES)))
    return list(kept)[:_MOST]


def _stays(path: Path, root: Path) -> bool:
    return path.resolve().is_relative_to(root.resolve())


def _is_inside(path: Path, root: Path) -> bool:
    return path.is_file() and _stays(path, root)


def _about(path: Path) -> dict[str, Any]:
    pages = [name for name in PAGES if _is_inside(path / name, path.parent)]
    newest = max((path / name).stat().st_mtime for name in (_RUN, *pages) if (path / name).is_file())
    when = datetime.fromtimestamp(newest, UTC).strftime("%Y-%m-%d %H:%M")
    facts = {
        plainly(name, _LETTERS): plainly(str(value), _LETTERS) for name, value in _facts(path / _RUN).items()
    }
    return {
        "name": path.name if path.name.isprintable() else None, "shown": plainly(path.name, _LETTERS),
        "changed": when, "pages": pages, "facts": facts,
    }  # fmt: skip


def _facts(path: Path) -> dict[str, Any]:
    """What is worth comparing of a run, as far as its plan and results say it."""
    if not path.is_file() or path.stat().st_size > _MOST_BYTES:
        return {}
    try:
        run = read_json(path)
    except PreimageError:
        return {"state": "damaged"}
    model, layers = run.get("model"), run.get("layers")
    facts: dict[str, Any] = {
        name: run[name] for name in ("command", "state", "layer", "layers") if name in run
    }
    if isinstance(layers, list) and layers:
        some = ", ".join(map(str, layers[:_LAYERS]))
        facts["layers"] = some if len(layers) <= _LAYERS else f"{layers[0]} … {layers[-1]} ({len(layers)})"
    if isinstance(model, Mapping):
        facts |= {
            f"model {name}" if name != "name" else "model": model.get(name) for name in ("name", "dtype")
        }
    results = run.get("results")
    if isinstance(results, list):
        facts["results"] = len(results)
        statuses = Counter(
            str(one.get("status")) for one in results if isinstance(one, Mapping) and "status" in one
        )
        if statuses:
            facts["statuses"] = ", ".join(f"{count} {status}" for status, count in statuses.most_common(6))
            facts["seconds"] = (
                f"{sum(_number(one.get('seconds')) for one in results if isinstance(one, Mapping)):.1f}"
            )
    options = run.get("options")
    if isinstance(options, Mapping):
        facts |= {
            str(name): value
            for name, value in list(options.items())[:30]
            if isinstance(value, str | int | float)
        }
    return facts


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0
