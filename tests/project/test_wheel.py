"""What people install: the wheel holds all of the package, the source distribution makes the same wheel, and
the wheel works outside the repository, where there is no compiler and no source.

The environment it is installed into is empty but for the wheel. What the wheel needs is lent by that of the
tests through its path alone, so that gigabytes are not fetched anew. Nothing of preimage comes that way, as
is tested. What is not shown is that pip finds all of it by the wheel's own list: of that, only that every
package the source imports is in the list.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from email import message_from_bytes
from importlib import metadata
from pathlib import Path, PurePosixPath

import pytest

import preimage

ROOT = Path(__file__).parents[2]
NOT_OURS = (
    ".*cache", ".git", ".venv", ".hypothesis", "__pycache__", "build", "dist", "runs", "shared", "*.egg-info",
)  # fmt: skip
# and pandas, which whoever asks for a DataFrame has
OF_EXTRAS = {
    "accelerate", "choreographer", "datasets", "fsspec", "pandas", "ray", "universal_pathlib", "xxhash",
}  # fmt: skip


def files_of(folder: Path) -> set[str]:
    found = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(folder).as_posix() for path in found}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source distribution, the wheel made of it, and, below ``direct``, one of the tree."""
    home = tmp_path_factory.mktemp("dist")
    tree = home / "tree"
    shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(*NOT_OURS), symlinks=True)
    for what in ([], ["--wheel"]):
        where = home / "direct" if what else home
        command = [sys.executable, "-m", "build", "--no-isolation", *what, "--outdir", str(where), str(tree)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    return home


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (path,) = built.glob("*.whl")
    return path


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_the_wheel_is_the_package(wheel: Path) -> None:
    held = contents(wheel)
    packaged = {name.removeprefix("preimage/") for name in held if name.startswith("preimage/")}
    assert packaged == files_of(ROOT / "src" / "preimage")  # lenses, css, js and py.typed among them
    assert {"py.typed", "report/page.css", "report/page.js"} <= packaged
    assert sum(name.startswith("inversion/lenses/smollm2/") for name in packaged) == 3
    others = {PurePosixPath(name).parts[0] for name in held} - {"preimage"}
    assert others == {f"preimage-{preimage.__version__}.dist-info"}
    assert wheel.name == f"preimage-{preimage.__version__}-py3-none-any.whl"  # nothing in it is compiled


def test_what_the_wheel_says_of_itself(wheel: Path) -> None:
    held = contents(wheel)
    (name,) = (name for name in held if name.endswith(".dist-info/METADATA"))
    said = message_from_bytes(held[name])
    assert said["Version"] == preimage.__version__
    assert said["Requires-Python"] == ">=3.11"
    classifiers = said.get_all("Classifier", [])
    assert all(f"Programming Language :: Python :: 3.{minor}" in classifiers for minor in (11, 12, 13))
    labels = [url.partition(",")[0] for url in said.get_all("Project-URL", [])]
    assert len(labels) >= 2
    assert all(len(label) <= 32 for label in labels)  # as indexes take them
    lines = [line for line in said.get_all("Requires-Dist", []) if "extra ==" not in line]
    listed = {re.split(r"[^\w.-]", line)[0].lower().replace("-", "_") for line in lines}
    assert imported() - OF_EXTRAS - listed == set()


def imported() -> set[str]:
    """The distributions that the source imports, by the names they are listed under."""
    roots = set()
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                roots |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                roots.add(str(node.module).split(".")[0])
    distributions = metadata.packages_distributions()
    others = roots - sys.stdlib_module_names - {"preimage"}
    return {distributions.get(name, [name])[0].lower().replace("-", "_") for name in others}


def test_the_source_distribution_makes_the_same_wheel(built: Path, wheel: Path) -> None:
    (direct,) = (built / "direct").glob("*.whl")
    assert contents(direct) == contents(wheel)
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as source:
        names = {name.partition("/")[2] for name in source.getnames()}
    for kept in ("Makefile", "constraints.txt", "pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE",
                 "SECURITY.md", "CONTRIBUTING.md", "CITATION.cff", ".ci/run"):  # fmt: skip
        assert kept in names
    for room in ("tests", "docs", "src/preimage"):
        kept = {name.removeprefix(f"{room}/") for name in names if name.startswith(f"{room}/")}
        assert files_of(ROOT / room) <= kept
    assert not any(".venv" in name or "__pycache__" in name for name in names)


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel in it; what else it needs is lent, and nothing of preimage with it."""
    home = tmp_path_factory.mktemp("clean")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home / "venv")], check=True)
    python = home / "venv" / "bin" / "python"
    install = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(python),
        "install",
        "--quiet",
        "--no-index",
        "--no-deps",
    ]
    subprocess.run([*install, str(wheel)], check=True)
    own = subprocess.run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
                         capture_output=True, text=True, check=True)  # fmt: skip
    # A path in a .pth file is searched; .pth files there, such as an editable install's, are not read
    (Path(own.stdout.strip()) / "lent.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return home


def outside(home: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run what is installed there, with nothing on PATH: no compiler, no git, no shell."""
    nothing = home / "nothing"
    nothing.mkdir(exist_ok=True)
    given = {"PATH": str(nothing), "HOME": str(nothing)}
    taken = ("CC", "CXX", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    environment = {name: value for name, value in os.environ.items() if name not in taken} | given
    assert not any(shutil.which(compiler, path=str(nothing)) for compiler in ("cc", "gcc", "clang", "c++"))
    program = str(home / "venv" / "bin" / command[0])
    return subprocess.run(
        [program, *command[1:]], cwd=nothing, env=environment, capture_output=True, text=True, check=False
    )


def test_it_is_the_wheel_that_runs(installed: Path) -> None:
    done = outside(installed, "python", "-c", "import preimage; print(preimage.__file__)")
    assert Path(done.stdout.strip()).is_relative_to(installed), done.stderr
    said = outside(installed, "preimage", "--version")
    assert (said.stdout, said.stderr, said.returncode) == (f"preimage {preimage.__version__}\n", "", 0)
    lenses = json.loads(outside(installed, "preimage", "lens", "list", "--json").stdout)["lenses"]
    shipped = [Path(lens["path"]) for lens in lenses if Path(lens["path"]).is_relative_to(installed)]
    assert len(shipped) == 3
    typed = outside(installed, "python", "-c", "from importlib.resources import files; "
                    "print((files('preimage') / 'py.typed').is_file())")  # fmt: skip
    assert typed.stdout == "True\n"


@pytest.mark.real_model
def test_the_demo_runs_from_the_wheel(installed: Path) -> None:
    done = outside(installed, "preimage", "demo", "--json")
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)["results"]
    assert [row["exact"] for row in results] == [True, True, True]
    assert results[0]["text"] == "My password is hunter2."
