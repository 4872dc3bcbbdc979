"""docs/architecture.md is true: every module is in it, and imports go the way it says."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "preimage"
MAP = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
MODULES = sorted(path.relative_to(SOURCE) for path in SOURCE.rglob("*.py"))
ROWS = dict(re.findall(r"^\| `(\w+)` \|([\w, ]*)\|", MAP, re.MULTILINE))
ALLOWED = {room: {name.strip() for name in names.split(",")} - {""} for room, names in ROWS.items()}


def room_of(module: Path) -> str:
    return module.parts[0].removesuffix(".py")


def imported_rooms(module: Path) -> set[str]:
    tree = ast.parse((SOURCE / module).read_text(encoding="utf-8"))
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names.add(node.module)
        elif isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        assert not (isinstance(node, ast.ImportFrom) and node.level), f"{module} imports relatively"
    return {name.split(".")[1] for name in names if name.startswith("preimage.")}


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_imports_follow_the_map(module: Path) -> None:
    room = room_of(module)
    if room in ("__init__", "__main__", "cli"):
        return  # these see everything
    assert room in ALLOWED, f"room {room} is not in docs/architecture.md"
    wrong = imported_rooms(module) - ALLOWED[room] - {room}
    assert not wrong, f"{module} imports {sorted(wrong)}, which the map does not allow"


def test_the_map_has_no_cycle_and_nothing_stale() -> None:
    order = list(ROWS)
    for room, names in ALLOWED.items():
        if room != "cli":
            assert all(order.index(name) < order.index(room) for name in names), room
        assert (SOURCE / room).is_dir() or (SOURCE / f"{room}.py").is_file(), f"{room} is gone"


def test_every_module_has_its_line() -> None:
    listed = set(re.findall(r"^\| `([\w/]+\.py)` \|", MAP, re.MULTILINE))
    wanted = {
        str(module)
        for module in MODULES
        if len(module.parts) > 1 and module.name != "__init__.py" and module.parts[0] != "cli"
    }
    assert listed == wanted


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_who_may_touch_what(module: Path) -> None:
    text = (SOURCE / module).read_text(encoding="utf-8")
    room = room_of(module)
    if room not in ("models", "states"):
        assert not re.search(r"^\s*(from|import) transformers", text, re.MULTILINE)
    if room != "distances":
        assert not re.search(r"cdist|vector_norm\([^)]*-|pdist", text)
    if room != "cli":
        assert not re.search(r"^\s*print\(", text, re.MULTILINE)
    assert len(text.splitlines()) <= 400


def defined(module: Path) -> set[str]:
    """Functions, classes and methods of a module, methods as Class.method."""
    names: set[str] = set()
    for node in ast.parse((SOURCE / module).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{part.name}" for part in node.body if isinstance(part, ast.FunctionDef)}
    return names


def test_every_place_on_the_walks_exists() -> None:
    places = re.findall(r"`([\w/]+\.py):([\w.]+)`", MAP)
    assert len(places) > 40
    missing = [f"{path}:{name}" for path, name in places if name not in defined(Path(path))]
    assert not missing


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_functions_fit_on_a_screen(module: Path) -> None:
    for node in ast.walk(ast.parse((SOURCE / module).read_text(encoding="utf-8"))):
        if not isinstance(node, ast.FunctionDef):
            continue
        lines = (node.end_lineno or 0) - node.body[0].lineno + 1
        assert lines <= 60, f"{node.name} has {lines} lines"
        given = node.args
        names = [one.arg for one in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
        count = len([name for name in names if name not in ("self", "cls")]) + bool(given.vararg)
        if room_of(module) != "cli":
            assert count <= 8, f"{node.name} has {count} parameters"
