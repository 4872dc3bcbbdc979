"""What a stranger reads first: links lead somewhere, one version, commands are there, CI asks for little."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml
from typer.main import get_command

import preimage
from preimage.cli.app import app
from support.commands import process

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / ".github").glob("*.md")]
LINK = re.compile(r"\]\(([^)\s]+)\)")
NAMED = re.compile(r"`((?:src|tests|docs|\.ci|\.github)/[\w./-]+)`")


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        if not re.match(r"[a-z]+:", target):
            path, _, anchor = target.partition("#")
            found = (page.parent / path).resolve() if path else page
            assert found.exists(), target
            if anchor:
                heads = re.findall(r"^#+ (.+)$", found.read_text(encoding="utf-8"), re.MULTILINE)
                assert anchor in {re.sub(r"[^\w -]", "", head).lower().replace(" ", "-") for head in heads}


def test_places_that_are_named_are_there() -> None:
    for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md"):
        for place in NAMED.findall(read(name)):
            assert (ROOT / place).exists(), (name, place)
    tables = {"geometry": ["GRANULARITIES", "RANGES"], "theory": ["CHECKS"], "leak": ["READERS"]}
    for room, names in tables.items():
        folder = ROOT / "src" / "preimage" / room
        source = "".join(path.read_text(encoding="utf-8") for path in folder.glob("*.py"))
        assert all(re.search(rf"^{name}\b", source, re.MULTILINE) for name in names)


def test_one_version() -> None:
    project = tomllib.loads(read("pyproject.toml"))["project"]
    citation = yaml.safe_load(read("CITATION.cff"))
    assert project["version"] == preimage.__version__ == citation["version"]
    assert project["license"] == citation["license"]
    cited = {reference["url"] for reference in citation["references"]}
    assert cited == set(project["urls"].values())
    done = process("--version")
    assert (done.returncode, done.stdout) == (0, f"preimage {preimage.__version__}\n")


def test_the_readme_names_every_command() -> None:
    said = read("README.md")
    (listed,) = re.findall(r"`preimage (demo \|[^`]+)`", said)
    names = {part.split()[0] for part in listed.split(" | ")}
    commands: dict[str, Any] = get_command(app).commands  # type: ignore[attr-defined]  # it is a group
    assert set(commands) <= names
    used = {line.split()[1] for line in said.splitlines() if line.startswith("    preimage ")}
    assert used <= set(commands)
    assert "make demo" in said
    assert "make test" in said


def test_the_picture_is_of_a_real_run_and_asks_for_nothing() -> None:
    source = read("docs/picture.svg")
    assert len(source) < 40_000
    drawn = ElementTree.fromstring(source)
    said = "".join(drawn.itertext())
    assert "6 of 6 layers" in said
    assert 'class="wrong"' not in source
    kinds = {element.tag.partition("}")[2] for element in drawn.iter()}
    assert kinds == {"svg", "style", "text", "rect", "title"}
    assert not re.search(r"(href|src|url|@import|@font-face)", source)


def test_the_workflow_asks_for_little_and_runs_the_gate() -> None:
    found = list((ROOT / ".github" / "workflows").glob("*.yml"))
    assert found
    for path in found:
        flow = yaml.safe_load(path.read_text(encoding="utf-8"))
        assert flow["permissions"] == {"contents": "read"}
        steps = [step for job in flow["jobs"].values() for step in job["steps"]]
        assert all(re.search(r"@[0-9a-f]{40}$", step["uses"]) for step in steps if "uses" in step)
        assert [step for step in steps if step.get("run") == ".ci/run"]
        assert "secrets." not in path.read_text(encoding="utf-8")


def test_templates_and_hooks_can_be_read() -> None:
    for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"):
        form = yaml.safe_load(path.read_text(encoding="utf-8"))
        if path.stem != "config":
            assert {"name", "description", "body"} <= set(form)
            assert all({"type", "attributes"} <= set(part) for part in form["body"])
    hooks = yaml.safe_load(read(".pre-commit-config.yaml"))["repos"]
    entries = [hook["entry"] for repo in hooks for hook in repo["hooks"]]
    recipe = read("Makefile").partition("\nlint:")[2].partition("\n\n")[0]
    lint = re.findall(r"^\t\$\(BIN\)/(.+)$", recipe, re.MULTILINE)
    assert [entry.split()[0] for entry in entries] == [f".venv/bin/{line.split()[0]}" for line in lint]
    assert [repo["repo"] for repo in hooks] == ["local"]  # nothing is fetched
