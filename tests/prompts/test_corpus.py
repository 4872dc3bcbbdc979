"""The default corpus: its documents, its parts, and what trains never tests."""

from __future__ import annotations

import sys
from pydoc_data.topics import topics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from preimage.errors import OptionError, PromptError
from preimage.prompts import documents
from preimage.prompts.corpus import in_test
from support.examples import relaxed
from support.prompting import collect
from support.refusing import refused


@pytest.mark.parametrize("kind", ["prose", "code"])
def test_train_and_test_documents_are_disjoint(kind):
    train, test = (dict(documents(kind, split)) for split in ("train", "test"))
    assert not train.keys() & test.keys()
    assert list(train) == sorted(train)
    assert 0.1 < len(test) / len(train | test) < 0.45
    shared = {" ".join(p.split()) for text in test.values() for p in text.split("\n\n")}
    shared = {paragraph for paragraph in shared if len(paragraph) >= 40}
    for text in train.values():
        assert shared.isdisjoint(" ".join(p.split()) for p in text.split("\n\n"))


@settings(relaxed, max_examples=5)
@given(seed=st.integers(0, 2**32), kind=st.sampled_from(["prose", "code"]))
def test_what_trains_never_tests(tokenizer, seed, kind):
    train, test = (
        collect(f"default:{kind}:{split}", tokenizer, count=12, length=40, seed=seed)
        for split in ("train", "test")
    )
    assert set(train).isdisjoint(test)


def test_the_corpus_is_the_documents_it_says():
    prose = dict(documents("prose", "test")) | dict(documents("prose", "train"))
    code = dict(documents("code", "test")) | dict(documents("code", "train"))
    assert prose.keys() == topics.keys()
    assert {"json/decoder.py", "argparse.py", "asyncio/events.py"} <= code.keys()
    assert not any("/test" in name or "site-packages" in name for name in code)
    # a train document keeps its short paragraphs
    assert sum(map(len, code.values())) > 4_000_000
    # pinned: what a lens was trained on today must not test it tomorrow
    assert [in_test("json/decoder.py"), in_test("argparse.py")] == [True, False]


def test_an_unknown_part_of_the_corpus_is_refused():
    refused(OptionError, lambda: list(documents("poetry", "test")))  # type: ignore[arg-type]
    refused(OptionError, lambda: list(documents("prose", "all")))  # type: ignore[arg-type]


def test_python_without_topics_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    assert "pydoc_data" in refused(PromptError, lambda: list(documents("prose", "test"))).message


def test_code_that_is_not_utf8_is_passed_over(monkeypatch, tmp_path):
    (tmp_path / "json").mkdir()
    (tmp_path / "json" / "good.py").write_text("x = 1\n")
    (tmp_path / "json" / "bad.py").write_bytes(b"# \xff\n")
    (tmp_path / "not_stdlib.py").write_text("y = 1\n")
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    found = [name for split in ("train", "test") for name, _ in documents("code", split)]
    assert found == ["json/good.py"]


def test_default_is_half_prose_half_code(tokenizer):
    prompts = collect("default", tokenizer, count=11, length=16)
    prose = collect("default:prose", tokenizer, count=6, length=16)
    assert len(prompts) == 11
    assert set(prompts.lengths) == {16}
    assert prompts.ids[::2] == prose.ids
    text = "\n".join(text for _, text in documents("code", "test"))
    for ids in prompts.ids[1::2]:
        assert tokenizer.decode(ids).strip("\ufffd") in text


@pytest.mark.parametrize("kind", ["prose", "code"])
def test_default_parts_come_from_their_split(tokenizer, kind):
    for name, split in [("", "test"), (":test", "test"), (":train", "train")]:
        prompts = collect(f"default:{kind}{name}", tokenizer, count=5)
        texts = [text for _, text in documents(kind, split)]
        assert set(prompts.lengths) == {32}
        for ids in prompts:
            words = tokenizer.decode(ids).strip("\ufffd")
            assert any(words in text for text in texts)


def test_default_depends_on_the_seed_only(tokenizer):
    first = collect("default", tokenizer, count=20, seed=1)
    assert collect("default", tokenizer, count=20, seed=1) == first
    assert collect("default", tokenizer, count=20, seed=2).fingerprint != first.fingerprint
    assert collect("default:train", tokenizer, count=1).source == "default:train"


def test_default_without_a_count_is_balanced(tokenizer):
    prompts = collect("default", tokenizer, length=1000)
    prose = collect("default:prose", tokenizer, length=1000)
    assert len(prompts) == 2 * len(prose)
    assert prompts.ids[::2] == prose.ids


def test_default_errors(tokenizer):
    error = refused(PromptError, lambda: collect("default:prose", tokenizer, count=10**6))
    supply = int(error.message.rstrip(".").split()[-1])
    assert len(collect("default:prose", tokenizer, count=supply)) == supply
    error = refused(PromptError, lambda: collect("default", tokenizer, count=10**6))
    assert int(error.message.rstrip(".").split()[-1]) == 2 * supply
    refused(PromptError, lambda: collect("default", tokenizer, count=2, length=10**7))
    assert "no tokenizer" in refused(PromptError, lambda: collect("default")).message
    for name in ("default:poetry", "default:train:prose", "default:", "default:prose:code"):
        error = refused(PromptError, lambda name=name: collect(name, tokenizer))
        assert name in error.message
