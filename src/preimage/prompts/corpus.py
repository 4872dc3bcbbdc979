"""The default corpus: text every Python carries, so that nothing need be downloaded.

Prose is the language reference behind ``help()`` (``pydoc_data.topics``); code is the standard
library's own source. Both change a little from one Python version to the next: a prompt set's
fingerprint says whether two runs had the same text.
"""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Iterator
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from typing import Literal, TypeAlias

from preimage.errors import OptionError, PromptError

Kind: TypeAlias = Literal["prose", "code"]
Split: TypeAlias = Literal["train", "test"]

# A choice of packages, not all: enough text, and each in every Python since 3.11.
PACKAGES = (
    "asyncio", "collections", "concurrent", "email", "html", "http", "importlib", "json", "logging",
    "unittest", "urllib", "xml",
)  # fmt: skip
SKIPPED_FOLDERS = {"test", "tests", "__pycache__", "site-packages"}
# Shorter paragraphs ("Example:", "else:") recur by chance and give nothing away.
SHARED_PARAGRAPH = 40


def documents(kind: Kind, split: Split) -> Iterator[tuple[str, str]]:
    """Yield (name, text) of every document of one kind and split, in the order of the names.

    The split is by document: a quarter of the names, chosen by their sha256, is ``test``. Documents
    quote each other at length, so paragraphs of a test document are also taken out of the train
    ones: what trains a lens is never what tests it.
    Cost: reads about 0.5 MB for prose; for code about 2 MB for ``test`` and 7 MB for ``train``.
    """
    readers = {"prose": _read_prose, "code": _read_code}
    if kind not in readers or split not in ("train", "test"):
        raise OptionError(
            f"The default corpus has no {kind!r} {split!r}.",
            "Kinds: 'prose', 'code'; splits: 'train', 'test'.",
        )
    read = readers[kind]
    if split == "test":
        yield from ((name, text) for name, text in read() if in_test(name))
        return
    tested = {key for _, text in documents(kind, "test") for key, _ in _paragraphs(text) if key}
    for name, text in read():
        if not in_test(name):
            kept = [paragraph for key, paragraph in _paragraphs(text) if key not in tested]
            yield name, "\n\n".join(kept)


def in_test(name: str) -> bool:
    """Whether the document of this name belongs to the test split: one name in four, for ever."""
    return sha256(name.encode()).digest()[0] < 64


def _paragraphs(text: str) -> Iterator[tuple[str, str]]:
    # Yields (key, paragraph), the key empty for one too short to matter. The key ignores
    # indentation and line breaks, which differ between a topic and its quotation.
    for paragraph in text.split("\n\n"):
        key = " ".join(paragraph.split())
        yield key if len(key) >= SHARED_PARAGRAPH else "", paragraph


def _read_prose() -> Iterator[tuple[str, str]]:
    try:
        topics: dict[str, str] = import_module("pydoc_data.topics").topics
    except ImportError:
        raise PromptError(
            "This Python has no pydoc_data.topics, the default prose.",
            "Use 'default:code', 'random' or a file of prompts.",
        ) from None
    yield from sorted(topics.items())


def _read_code() -> Iterator[tuple[str, str]]:
    root = Path(sysconfig.get_paths()["stdlib"])
    # Only the standard library's own modules: a distribution may put files of its own beside them.
    files = [path for path in root.glob("*.py") if path.stem in sys.stdlib_module_names]
    for package in PACKAGES:
        files.extend((root / package).rglob("*.py"))
    named = sorted((path.relative_to(root).as_posix(), path) for path in files)
    for name, path in named:
        if SKIPPED_FOLDERS.isdisjoint(name.split("/")):
            try:
                yield name, path.read_text(encoding="utf-8")
            except (UnicodeDecodeError, OSError):
                continue
