"""Every command and every line of Python in the README and the documents is run, in the order of its page.

Each page has a folder of its own with the files that are named there (``support/workspace.py``), in which
``smollm2`` is a small model. What is changed before a line is run stands in ``SMALLER``; what is not run, and
why, in ``NOT_RUN``; what ends with exit code 1 there, and why, in ``FOUND``. Nothing else is left out.
"""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import typer

import preimage
from preimage.cli import main
from preimage.cli.app import app
from support import workspace
from support.documents import PAGES, ROOT, Typed, blocks, typed

# What an option's value becomes, for one command or (under "") for all; several values stay several.
SMALLER = {
    "": {
        "--count": "6", "--length": "8", "--lengths": "4,6", "--layers": "15,final", "--rounds": "1",
        "--prose": "1", "--code": "1", "--random": "1", "--sipit-prompts": "0", "--n": "500", "--d": "16",
        "--sets": "1", "--steps": "3", "--sampled-tokens": "2000", "--batch-tokens": "256", "--rank": "16",
        "--hidden": "16", "--key-hidden": "16", "--margins": "1", "--minutes": "0.2", "--timeout": "10",
        "--preset": "small", "--probes": "20", "--size": "tiny", "--device": "cpu", "--window": "16",
        "--batch": "2", "--vocabulary": "300",
    },
    "geometry": {"--length": "4,6"},
    "leak": {"--count": "2", "--length": "6", "--layers": "15"},
    "reproduce": {"--count": "4", "--length": "8"},
    "theory dichotomy": {"--layers": "0,1", "--draws": "2", "--longest": "2"},
    "theory symmetry": {"--count": "2"},
}  # fmt: skip
# What a command is told where it does not say it itself, unless something else is in it.
ADDED = (
    ("collisions|geometry", "--count 6", "bundle|--text"),
    ("collisions|geometry", "--length 8", "bundle|--text|--prompts|--lengths"),
    ("collisions|geometry|bench geometry", "--layers 15,final", "runs/t/model"),  # which has two blocks
    ("bench (geometry|capture)", "--count 6 --length 8 --rounds 1", ""),
    ("bench (inversion|throughput)", "--prose 1 --code 1 --random 1 --length 8 --sipit-prompts 0", ""),
    ("bench pairs", "--n 500 --d 16 --rounds 1", ""),
    ("trajectory", "--steps 3 --size tiny --checkpoints 2 --batch 2 --window 16 --vocabulary 300", ""),
    ("trajectory", "--probes 20 --length 8 --text-tokens 4000", ""),
    ("trajectory", "--text mine.txt", "--text-from"),
    ("lens train", "--steps 3 --rank 16 --hidden 16", ""),
    ("lens train", "--sampled-tokens 2000", "--prompts"),
    ("leak", "--count 2 --length 6 --layers 15 --minutes 0.2", "dump|FILES"),
    ("reproduce", "--count 4 --length 8", "--list"),
    ("theory (symmetry|dichotomy)", "--text 'a b' --text 'b a'", "--count|--longest"),
)
WITHOUT = ("--tf32", ",…")  # there need not be a GPU; and others
PLACES = {"LAYER": "15", "RUN": "runs/{line}", "DIR": "runs/{line}"}  # words to be filled in

# A pattern, and why a line that it matches is not run.
NOT_RUN = (
    (r"--out s3://|--cluster \d+\.", "there is no object store and no cluster at an address: tests/cluster"),
    (r"--cluster local|^preimage bench cluster", "tests/cluster starts a cluster, once for many tests"),
    (r"^preimage serve\b", "it serves until it is stopped: the page has tests of its own"),
    (r"^preimage(\[| …|$)|^preimage \w+ \|", "the name of the package or of all commands together"),
    (r"^preimage/", "a file"),
    (r"^preimage report RUN…", "any run: the page of the command and the README have some"),
)  # fmt: skip

# Commands that end with exit code 1 with what is in the folder, and why.
FOUND = (
    (r"^preimage doctor", "what a machine lacks is for the machine to say: 0 or 1"),
    (r"invert x\.npy --observe final", "x.npy holds states of layer 15 here"),
    (r"invert states\.safetensors --layer 12", "states.safetensors holds states of layer 15 here"),
)

# Python: what is replaced, and what a name stands for in a row where it is not what it is elsewhere.
SMALLER_PYTHON = (
    (r"count=\d{3,}", "count=6"),
    (r"lengths=\(8, 16, 32\)", "lengths=(4, 6)"),
    (r'(?<="collisions", count=6)', ", length=4"),
    (
        r"steps=600",
        "texts=[__import__('pathlib').Path('mine.txt').read_text()], vocabulary=300, size='tiny', steps=2, "
        "checkpoints=2, probes=9, length=8, batch=2, window=16",
    ),
    (r"^observe=", ""),
)  # fmt: skip
ELSEWHERE = {"attention_mask=mask": {"x": "padded"}}

COMMANDS = typer.main.get_command(app)
GROUPS = [name for name, one in COMMANDS.commands.items() if hasattr(one, "commands")]
STATUSES = ("recovered", "ambiguous", "likely", "not_recovered")


def commands(page: Path) -> list[Typed]:
    """The commands of a page, bare names in running text among them."""
    found = [one for one in typed(page) if re.match(r"preimage\b(?![.-])", one.text)]
    return [one for one in found if not any(re.search(pattern, one.text) for pattern, _ in NOT_RUN)]


def named(text: str) -> tuple[Any, list[str]]:
    """The command that a line calls, and what is left of the line; asserts that there is such a command."""
    words = shlex.split(text, comments=True)[1:]
    found: Any = COMMANDS
    while words and hasattr(found, "commands") and not words[0].startswith("-"):
        assert words[0] in found.commands, f"there is no command {words[0]!r}: {text}"
        found = found.commands[words.pop(0)]
    return found, words


def is_run(one: Typed) -> bool:
    """Whether a line is one to run; in running text the name of a command, or of its option, is not."""
    _, left = named(one.text)
    return (
        one.whole
        or (one.cell is not None and bool(left))
        or len(left) > 1
        or (left[:1] != [] and left[0][0] != "-")
    )


def smaller(one: Typed) -> str:
    """The same command, small enough for a test."""
    text = one.text
    for gone in WITHOUT:
        text = text.replace(gone, "")
    words = [PLACES.get(word, word).format(line=one.line) for word in shlex.split(text, comments=True)]
    name = " ".join(words[1:3] if words[1] in GROUPS else words[1:2])
    sizes = SMALLER[""] | SMALLER.get(name, {})
    for at, word in enumerate(words[:-1]):
        size = sizes.get(word)
        if size:
            words[at + 1] = size if "," in words[at + 1] or words[at + 1] == "all" else size.split(",")[0]
    for pattern, extra, unless in ADDED:
        if re.fullmatch(pattern, name) and not (unless and re.search(unless, " ".join(words))):
            known = {option for given in named(text)[0].params for option in given.opts}
            more = shlex.split(extra)
            pairs = zip(more[::2], more[1::2], strict=True)
            new = [pair for pair in pairs if pair[0] in known and pair[0] not in words]
            words += [part for pair in new for part in pair]
    return shlex.join(words)


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, dict[str, Any]]:
    """The folder that every page gets a copy of, the model and what was kept of a pass."""
    home = tmp_path_factory.mktemp("documents")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PREIMAGE_CACHE", str(home / "cache"))
        workspace.make_model()
        model = preimage.load("smollm2")
        seen = workspace.kept(model)
        workspace.fill(home / "work", model, seen)
    return home, model, seen


@pytest.fixture
def there(
    template: tuple[Path, Any, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A folder of one's own, entered."""
    home, _, _ = template
    shutil.copytree(home / "work", tmp_path / "work", symlinks=True)
    shutil.copytree(home / "cache", tmp_path / "cache", symlinks=True)  # lenses of one page serve no other
    monkeypatch.setenv("PREIMAGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work"


@pytest.fixture
def names(template: tuple[Path, Any, dict[str, Any]]) -> dict[str, Any]:
    """What the documents' Python takes for granted."""
    _, model, seen = template
    texts = [f"{workspace.PROMPT} {index}" for index in range(6)]
    states = preimage.capture(model, texts, [workspace.LAYER])
    ours = {"preimage": preimage, "invert": preimage.invert, "Observation": preimage.Observation}
    return seen | ours | {"model": model, "texts": texts, "prompts": texts, "states": states}


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=str)
def test_commands_run(page: Path, there: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = {one: smaller(one) for one in commands(page) if is_run(one)}
    for made in re.findall(r"--out (\S+)", "\n".join(asked.values())):
        remove(there / made)  # what a page makes is not there before
    for one, text in asked.items():
        code = main(shlex.split(text)[1:])
        said = capsys.readouterr()
        expected = {1} if any(re.search(pattern, text) for pattern, _ in FOUND) else {0}
        if text.startswith("preimage doctor"):
            expected = {0, 1}
        assert code in expected, f"{one}\nrun as: {text}\n{said.out[-2000:]}\n{said.err[-2000:]}"


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=str)
def test_python_runs(page: Path, there: Path, names: dict[str, Any]) -> None:
    for line, source in blocks(page):
        for pattern, instead in SMALLER_PYTHON:
            source = re.sub(pattern, instead, source)
        for kept in re.findall(r'\.save\("([^"]+)"', source):
            remove(there / kept)  # which the commands of a page have use for too
        exec(compile("\n" * (line - 1) + source, str(page), "exec"), names)
        found = names.get("found")
        results = found if isinstance(found, list) else [found]
        assert {one.status for one in results if isinstance(one, preimage.Inversion)} <= {"recovered"}


def expected_status(row: list[Typed]) -> str | None:
    """What a row of a table says that comes back."""
    return next(
        (one.text for one in row if one.cell and one.cell[0] == "expect" and one.text in STATUSES), None
    )


@pytest.mark.parametrize("page", [Path("docs/inversion.md"), Path("docs/guide/logged.md")], ids=str)
def test_tables_of_python_run(page: Path, there: Path, names: dict[str, Any]) -> None:
    rows: dict[int, list[Typed]] = {}
    for one in typed(page):
        if one.cell:
            rows.setdefault(one.line, []).append(one)
    called = 0
    for row in rows.values():
        for one in row:
            if one.cell and one.cell[0] != "Python":
                continue
            meant = next((some for key, some in ELSEWHERE.items() if key in one.text), {})
            here = names | {name: names[other] for name, other in meant.items()}
            found = eval(re.sub(SMALLER_PYTHON[-1][0], "", one.text), here)  # noqa: S307  # our own documents
            called += 1
            status = expected_status(row)
            if status is not None:
                assert {each.status for each in found} == {status}, one
    assert called >= 15


def test_nothing_in_the_tables_above_is_left_over() -> None:
    """What is made smaller, left out or expected to find something is in some document."""
    every = [one for page in PAGES for one in typed(page) if one.text.startswith("preimage")]
    run = [smaller(one) for page in PAGES for one in commands(page) if is_run(one)]
    for pattern, why in NOT_RUN:
        about = re.match(r"\^preimage (\w+)", pattern)
        if about is None or about[1] in COMMANDS.commands:  # a command may come later than its line here
            assert any(re.search(pattern, one.text) for one in every), why
    for pattern, why in FOUND:
        assert any(re.search(pattern, text) for text in run), why
    for options in SMALLER.values():
        for option in options:
            assert any(f"{option} " in one.text for one in every), option
    assert len(run) > 130


def test_documents_are_read_as_people_read_them() -> None:
    page = """Say `preimage invert` or `preimage invert x.npy`.

    preimage demo     # at once

```console
$ preimage doctor
```

```python
preimage.load("smollm2")
```

| Python | command |
|---|---|
| `f(x)` | `preimage leak dump/` |
"""
    found = typed(Path("a.md"), page)
    assert [(one.text, one.whole) for one in found] == [
        ("preimage invert", False),
        ("preimage invert x.npy", False),
        ("preimage demo     # at once", True),
        ("preimage doctor", True),
        ("f(x)", False),
        ("preimage leak dump/", False),
    ]
    assert [is_run(one) for one in found if one.text != "f(x)"] == [False, True, True, True, True]
    assert [one.cell for one in found[4:]] == [("Python", 15), ("command", 15)]
    assert blocks(Path("a.md"), page) == [(10, 'preimage.load("smollm2")\n')]


def test_what_else_is_typed_is_there() -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    told = [one for page in PAGES for one in typed(page)]
    for one in told:
        made = re.match(r"(?:[A-Z]+=\S+ )*make ([\w-]+)", one.text)
        assert made is None or made[1] in targets, one
        script = re.match(r"python (docs/\S+\.py|tests/\S+\.py)", one.text)
        assert script is None or one.whole is False or (ROOT / script[1]).is_file(), one
    assert sum(one.text.startswith("make ") for one in told) > 4
