"""Pages of SGLang's hierarchical cache, some written by its own code (files/README.md), and its answers."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from preimage.errors import StatesError
from preimage.leak.block_hashes import SCHEMES, matches
from preimage.leak.holdings import Holding, Piece, Sizes, Told
from preimage.leak.readers.sglang import read
from support.refusing import refused

FILES = Path(__file__).parent / "files" / "sglang"
SIZES = Sizes(n_layers=3, d_model=16, heads=2, head_size=8, vocab_size=41)
PAGE = 2
IDS = (7, 3, 40, 11)  # two pages
NAMES = [name.hex() for name in SCHEMES["sglang"].digests(IDS, PAGE)]


def pool(tokens: int = PAGE, sizes: Sizes = SIZES) -> Tensor:
    """Keys and values of every layer, token and head; each number says where it belongs."""
    shape = (2, sizes.n_layers, tokens, sizes.heads, sizes.head_size)
    return torch.arange(math.prod(shape)).reshape(shape).float()


def holding(path: Path, **told: Any) -> Holding:
    found = read(path, Told(**{"sizes": SIZES, **told}))
    assert found is not None
    return found


def numbers(piece: Piece) -> dict[tuple[int | str, str], Tensor]:
    return {(seen.layer, seen.observation.place): seen.read() for seen in piece.seen}


def check(
    piece: Piece, expected: Tensor, layers: Sequence[int] = (1, 2, 3), kept: tuple[int, ...] | None = None
) -> None:
    """``expected``: 2 x layer x token x head x channel."""
    found = numbers(piece)
    assert list(found) == [(layer, place) for layer in layers for place in ("keys", "values")]
    for index, layer in enumerate(layers):
        assert torch.equal(found[layer, "keys"], expected[0, index].flatten(1))
        assert torch.equal(found[layer, "values"], expected[1, index].flatten(1))
    assert {seen.observation.kept for seen in piece.seen} == {kept}


# Pages that SGLang's own code laid out, named and wrote.

WRITTEN = {"page_first": "bf16", "layer_first": "fp16", "page_first_direct": "float32", "page_head": "bf16"}


@pytest.mark.parametrize("order", WRITTEN)
@pytest.mark.parametrize("index", [0, 1])
def test_pages_of_every_layout(order: str, index: int) -> None:
    path = FILES / order / f"{NAMES[index]}_tiny-model_0_1.bin"
    (piece,) = holding(path, order=order, page=PAGE).pieces
    expected = pool(2 * PAGE)[:, :, index * PAGE : (index + 1) * PAGE]
    check(piece, expected.remainder(256) if WRITTEN[order] == "bf16" else expected)  # which holds no larger
    assert {seen.observation.stored for seen in piece.seen} == {WRITTEN[order]}
    assert piece.tokens == PAGE
    assert piece.start is None
    assert piece.block is not None
    assert matches(piece.block, IDS[: (index + 1) * PAGE]) == "sglang"
    assert matches(piece.block, IDS[::-1][: (index + 1) * PAGE]) is None


def test_a_rank_holds_its_heads() -> None:
    (piece,) = holding(FILES / "ranks" / f"{NAMES[1]}_tiny-model_1_2.bin", page=PAGE).pieces
    check(piece, pool(2 * PAGE)[:, :, PAGE:, 1:], kept=tuple(range(8, 16)))


def test_a_stage_holds_its_layers() -> None:
    """Three layers in two stages: the last has two."""
    (piece,) = holding(FILES / "stages" / f"{NAMES[0]}_tiny-model_0_1_2_1.bin", page=PAGE).pieces
    check(piece, pool(2 * PAGE)[:, 1:, :PAGE], layers=(2, 3))


def test_a_page_is_not_read_in_another_order() -> None:
    """So that the tests above can fail."""
    (piece,) = holding(
        FILES / "page_first" / f"{NAMES[0]}_tiny-model_0_1.bin", order="layer_first", page=PAGE
    ).pieces
    with pytest.raises(AssertionError):
        check(piece, pool(2 * PAGE)[:, :, :PAGE].remainder(256))


# What follows is written here.


def write(
    folder: Path, rest: str = "model_0_1", numbers: Tensor | None = None, digest: str = NAMES[0]
) -> Path:
    path = folder / f"{digest}_{rest}.bin"
    kept = (pool() if numbers is None else numbers).transpose(1, 2).contiguous()
    path.write_bytes(kept.numpy().tobytes())
    return path


@pytest.mark.parametrize(
    ("rest", "word"),
    [
        ("model", "latent"),
        ("model_2_1", "latent"),  # of two stages the second
        ("model_0_1_cp0_2", "sharded"),
        ("model_tp2_dcp0_2_page64", "sharded"),
        ("ukv1-0123456789abcdef_L0-30_H0", "sharded"),
    ],
)
def test_pages_that_are_not_read_leave_their_names(tmp_path: Path, rest: str, word: str) -> None:
    found = holding(write(tmp_path, rest), page=PAGE)
    (piece,) = found.pieces
    assert not piece.seen
    assert piece.block is not None
    assert piece.block.digest.hex() == NAMES[0]
    assert word in found.notes[-1]


def test_pages_of_other_pools_are_not_read(tmp_path: Path) -> None:
    path = tmp_path / f"{NAMES[0]}.mamba_model_0_1.bin"
    path.write_bytes(bytes(100))
    assert "mamba" in holding(path).notes[-1]


@pytest.mark.parametrize("model", ["llama_3_8", "a_0_1", "org-name", "x"])
def test_names_of_models_may_end_in_numbers(tmp_path: Path, model: str) -> None:
    found = holding(write(tmp_path, f"{model}_0_1"), stored="float32")
    assert f"model {model}," in found.about or model == "a_0_1"  # which may be of a stage as well
    assert found.pieces[0].block is not None


def test_without_a_model_or_a_type_the_name_is_what_there_is(tmp_path: Path) -> None:
    path = write(tmp_path)
    assert "name the model" in holding(path, sizes=None, page=PAGE).notes[-1]
    assert "type of its numbers" in holding(path).notes[-1]
    assert not holding(path).pieces[0].seen


@pytest.mark.parametrize(
    "told",
    [
        {"page": 3},
        {"stored": "int7"},
        {"stored": "bf16", "page": PAGE},
        {"stored": "float32", "order": "NHD"},
        {"page": PAGE, "sizes": Sizes(4, 16, 2, 8, 41)},
        {"page": PAGE, "sizes": Sizes(3, 16, 5, 8, 41)},
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, told: dict[str, Any]) -> None:
    path = write(tmp_path)
    refused(StatesError, lambda: holding(path, **told))


@pytest.mark.parametrize("rest", ["model_1_3", "model_0_1_9999_1"])
def test_ranks_and_stages_that_a_model_cannot_have(tmp_path: Path, rest: str) -> None:
    """Two heads are not shared by three ranks, three layers not by 9,999 stages."""
    path = write(tmp_path, rest)
    refused(StatesError, lambda: holding(path, page=PAGE))


def test_more_ranks_than_heads_have_the_same(tmp_path: Path) -> None:
    for rank in range(4):
        path = write(tmp_path, f"model_{rank}_4", pool()[:, :, :, rank // 2 : rank // 2 + 1])
        (piece,) = holding(path, page=PAGE).pieces
        check(
            piece,
            pool()[:, :, :, rank // 2 : rank // 2 + 1],
            kept=tuple(range(rank // 2 * 8, rank // 2 * 8 + 8)),
        )


def test_a_page_that_ends_anywhere(tmp_path: Path) -> None:
    path = write(tmp_path)
    raw = path.read_bytes()
    for end in range(len(raw)):
        path.write_bytes(raw[:end])
        refused(StatesError, lambda: holding(path, stored="float32", page=PAGE))
    path.write_bytes(raw)
    (piece,) = holding(path, page=PAGE).pieces
    path.write_bytes(raw[:-1])
    refused(StatesError, lambda: numbers(piece))


# Answers.

ROWS = [[0.5, -1.25, 3.0], [1.0, 2.0, 0.125], [4.0, 0.0, -2.0]]
NARROW = Sizes(n_layers=3, d_model=3, heads=2, head_size=8, vocab_size=41)


def answer(held: Any, **more: Any) -> dict[str, Any]:
    meta = {"hidden_states": held, "cached_tokens": more.pop("cached_tokens", 0)}
    return {"text": " and so on", "output_ids": [5, 6], "meta_info": meta, **more}


def answers(path: Path, document: Any, **told: Any) -> Holding:
    path.write_text(json.dumps(document))
    return holding(path, **{"sizes": NARROW, **told})


def test_an_answer_holds_the_prompt_and_what_came_after_it(tmp_path: Path) -> None:
    """A table for the prompt, a row for every token after it, all after the last norm."""
    found = answers(tmp_path / "a.json", answer([ROWS[:2], ROWS[2]], input_ids=[7, 8]))
    (piece,) = found.pieces
    (seen,) = piece.seen
    assert torch.equal(seen.read(), torch.tensor(ROWS))
    assert (seen.layer, seen.observation.positions, piece.tokens, piece.start) == ("final", "all", 3, 0)
    assert [one.token_ids or one.text for one in piece.clear] == [" and so on", (7, 8), (5, 6)]


def test_what_the_server_had_in_its_cache_is_missing(tmp_path: Path) -> None:
    (piece,) = answers(tmp_path / "a.json", answer([ROWS], cached_tokens=16)).pieces
    assert piece.start == 16
    found = answers(tmp_path / "b.json", answer([], cached_tokens=16))
    assert not found.pieces[0].seen
    assert "cache" in found.notes[0]


def test_one_vector_of_a_prompt(tmp_path: Path) -> None:
    found = answers(tmp_path / "a.json", answer(ROWS[0]))
    (seen,) = found.pieces[0].seen
    assert seen.observation.positions == "last"
    assert torch.equal(seen.read(), torch.tensor(ROWS[:1]))


def test_answers_of_the_openai_routes(tmp_path: Path) -> None:
    choices = [
        {"message": {"content": "Paris"}, "hidden_states": ROWS[0]},
        {"text": "Rome", "hidden_states": []},
        {"text": "Oslo"},
    ]
    found = answers(tmp_path / "a.json", {"choices": choices})
    assert [piece.clear[0].text for piece in found.pieces] == ["Paris", "Rome"]
    assert torch.equal(found.pieces[0].seen[0].read(), torch.tensor(ROWS[:1]))
    assert not found.pieces[1].seen


def test_ids_among_the_log_probabilities(tmp_path: Path) -> None:
    document = answer([ROWS])
    document["meta_info"]["input_token_logprobs"] = [[None, 7, None], [-1.5, 8, "x"]]
    (piece,) = answers(tmp_path / "a.json", document).pieces
    assert (7, 8) in [one.token_ids for one in piece.clear]


def test_many_answers_in_a_list_or_in_lines(tmp_path: Path) -> None:
    assert len(answers(tmp_path / "a.json", [answer([ROWS])] * 3).pieces) == 3
    path = tmp_path / "b.jsonl"
    path.write_text("\n\n".join(json.dumps(answer([ROWS])) for _ in range(3)) + "\n")
    assert len(holding(path, sizes=NARROW).pieces) == 3


def test_json_of_others_is_none_of_ours(tmp_path: Path) -> None:
    for words in (
        "",
        "{",
        "[]",
        "null",
        "3",
        '{"hidden_states": [[1.0]]}',
        '{"text": "hidden_states"}',
        "[" * 9999,
    ):
        path = tmp_path / "a.json"
        path.write_text(words)
        assert read(path, Told()) is None, words


HOSTILE = (
    '[["a"]]', "[[1, 2], [3]]", "[[1, 2, [3]]]", "[[]]", "[[[]]]", "[null]", "[[null]]", "[[1, 2]]", "[{}]",
    "[[NaN, 1, 2]]", "[[1, Infinity, 2]]", "[[1e999, 1, 2]]", "[[1e39, 1, 2]]", f"[[{10**400}, 1, 2]]",
    f"[[{'9' * 5000}, 1, 2]]", "[" * 99 + "1" + "]" * 99, "[" * 150 + "1" + "]" * 150,
    "[" * 100_000 + "]" * 100_000, "[[1, 2, 3]", "[[[1, 2, 3]], [1, 2]]",
)  # fmt: skip


@pytest.mark.parametrize("held", HOSTILE, ids=range(len(HOSTILE)))
def test_states_that_are_none(tmp_path: Path, held: str) -> None:
    path = tmp_path / "a\nb.json"
    path.write_text(f'{{"meta_info": {{"hidden_states": {held}}}}}')
    refused(StatesError, lambda: holding(path, sizes=NARROW))
    path.write_text(f'{{"choices": [{{"hidden_states": [{held}]}}]}}')
    refused(StatesError, lambda: holding(path, sizes=NARROW))


@pytest.mark.parametrize("ids", [[-1], [41], [1.5], ["a"], [True], [None], [[1]], [10**30]])
def test_token_ids_that_are_none(tmp_path: Path, ids: list[Any]) -> None:
    refused(StatesError, lambda: answers(tmp_path / "a.json", answer([ROWS], input_ids=ids)))


def test_too_many_parts_are_refused_before_they_are_parsed(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"hidden_states": [' + "[]," * (1 << 22) + "[]]}")
    assert "too much json" in str(refused(StatesError, lambda: read(path, Told())))


def test_an_answer_that_ends_anywhere(tmp_path: Path) -> None:
    words = json.dumps(answer([ROWS[:2], ROWS[2]], input_ids=[7, 8]))
    path = tmp_path / "a.json"
    for end in range(len(words)):
        path.write_text(words[:end])
        if '"hidden_states"' in words[:end]:
            refused(StatesError, lambda: read(path, Told()))
        else:
            assert read(path, Told()) is None


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
    lambda parts: st.lists(parts, max_size=4) | st.dictionaries(st.text(max_size=3), parts, max_size=3),
    max_leaves=12,
)


@given(held=JSON, cached=JSON, ids=JSON, logprobs=JSON, choices=JSON)
def test_any_json(
    tmp_path_factory: pytest.TempPathFactory, held: Any, cached: Any, ids: Any, logprobs: Any, choices: Any
) -> None:
    """Whatever stands where states should be: nothing but a StatesError, and states are finite tables."""
    document = answer(held, cached_tokens=cached, input_ids=ids, text=ids, choices=choices)
    document["meta_info"]["input_token_logprobs"] = logprobs
    path = tmp_path_factory.getbasetemp() / "any.json"
    path.write_text(json.dumps([document, {"choices": [{"hidden_states": held, "message": choices}]}]))
    try:
        found = read(path, Told())
    except StatesError:
        return
    for piece in found.pieces if found is not None else ():
        for seen in piece.seen:
            assert seen.read().ndim == 2
            assert seen.read().isfinite().all()
