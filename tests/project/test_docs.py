"""Numbers that the documentation states and the code decides."""

from pathlib import Path

from preimage.inversion.proposers import codebook
from preimage.prompts import documents

DOCS = Path(__file__).parents[2] / "docs"
WORDS = {8: "eight", 12: "twelve"}


def test_what_is_said_of_the_codebook_and_of_the_corpus() -> None:
    page = (DOCS / "inversion.md").read_text(encoding="utf-8")
    assert f"over {WORDS[codebook._TOKENS_PER_REGRESSOR]} tokens per regressor" in page
    held_out, trained = (sum(1 for _ in documents("code", split)) for split in ("test", "train"))
    assert 0.2 < held_out / (held_out + trained) < 0.3
    assert "the training three quarters of the default corpus" in page
    results = (DOCS / "results" / "inversion.md").read_text(encoding="utf-8")
    assert "the test quarter of the default corpus" in results
