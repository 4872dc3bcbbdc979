"""docs/testing.md says what every code in the tests stands for."""

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "tests").rglob("*.py"))
LISTED = set(
    re.findall(
        r"^\| ([NIJSWC]\d{1,2}) \|", (ROOT / "docs" / "testing.md").read_text(encoding="utf-8"), re.MULTILINE
    )
)


def remarks(source: str) -> str:
    """Comments and docstrings."""
    found = [
        token.string
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    ]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.append(ast.get_docstring(node) or "")
    return "\n".join(found)


def codes(text: str) -> set[str]:
    """Codes in a text: N4, (J1, J2), and all of N1-N9; the rules of a linter are none."""
    text = re.sub(r"noqa.*", "", text)
    found = set(re.findall(r"\b[NIJSWC]\d{1,2}\b", text))
    for letter, first, last in re.findall(r"\b([NIJSWC])(\d{1,2})-\1(\d{1,2})\b", text):
        found |= {f"{letter}{number}" for number in range(int(first), int(last) + 1)}
    return found


def test_codes_are_found_in_remarks_alone() -> None:
    source = '"""About J1-J3."""\nx = "N99"  # noqa: N818, S301\ny = 1  # N4, (S2)\n'
    assert codes(remarks(source)) == {"J1", "J2", "J3", "N4", "S2"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT / "tests")))
def test_every_code_is_in_the_list(path: Path) -> None:
    if path == Path(__file__):
        return  # its codes are examples
    unknown = codes(remarks(path.read_text(encoding="utf-8"))) - LISTED
    assert not unknown, f"docs/testing.md does not say what {sorted(unknown)} stand for"
