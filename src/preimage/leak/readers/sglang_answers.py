"""Answers of an SGLang server in json, with the hidden states it was asked for.

``/generate`` gives ``meta_info.hidden_states``: first what the pass over the prompt made, tokens x d, then a
vector for every token that was generated after it; all after the last norm. What was in the server's own
cache is missing from the front. The OpenAI routes give the last vector alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from preimage.errors import StatesError, first_line, shown
from preimage.leak.holdings import Clear, Holding, Piece, Seen, Told
from preimage.leak.readers.raw import is_file
from preimage.observations import Observation
from preimage.storage.files import parse_json

if TYPE_CHECKING:
    from torch import Tensor

_SUFFIXES = (".json", ".jsonl", ".ndjson")
_MARK = b'"hidden_states"'
# What is parsed takes many times its bytes in memory, and a second for every million numbers.
_MOST_BYTES = 1 << 28
_MOST_NUMBERS = 1 << 24  # and all else that stands behind a comma
_MOST_PARTS = 1 << 22  # lists, objects and texts
_TEXTS = {"text": "the answer's text", "prompt": "the prompt"}
_IDS = {
    "input_ids": "the prompt's ids",
    "prompt_token_ids": "the prompt's ids",
    "output_ids": "the answer's ids",
}


def read(path: Path, told: Told) -> Holding | None:
    """The answers in a file; None where it holds no hidden states of SGLang's."""
    if path.suffix.lower() not in _SUFFIXES or not is_file(path):
        return None
    with path.open("rb") as file:
        raw = file.read(_MOST_BYTES + 1)
    if _MARK not in raw:
        return None
    parts = sum(map(raw.count, (b"[", b"{", b'"')))
    if len(raw) > _MOST_BYTES or parts > _MOST_PARTS or raw.count(b",") > _MOST_NUMBERS:
        raise StatesError(f"{shown(path.name)} holds too much json at once.", "Split it into answers.")
    notes: dict[str, None] = {}  # each once
    pieces = tuple(
        piece
        for row, document in enumerate(_documents(path, raw))
        for piece in _pieces(f"{path.name}, answer {row}", document, told, notes)
    )
    if not pieces:
        return None
    about = (
        f"{len(pieces)} answers of an SGLang server in json, known by the hidden states in them, which are "
        "taken after the last norm."
    )
    return Holding((path,), "SGLang hidden states", about, pieces, tuple(notes))


def _documents(path: Path, raw: bytes) -> Iterator[Any]:
    """The json objects in a file: one, a list of them, or one a line."""
    try:
        whole = parse_json(raw)
    except ValueError:
        whole = None
    if whole is not None:
        yield from whole if isinstance(whole, list) else [whole]
        return
    for line in filter(bytes.strip, raw.splitlines()):
        try:
            yield parse_json(line)
        except ValueError as error:
            raise StatesError(
                f"{shown(path.name)} is not json from end to end.",
                "It is cut short or damaged; save it again.",
            ) from error


def _pieces(name: str, document: Any, told: Told, notes: dict[str, None]) -> Iterator[Piece]:
    if not isinstance(document, dict):
        return
    meta, choices = document.get("meta_info"), document.get("choices")
    if isinstance(meta, dict) and isinstance(meta.get("hidden_states"), list):
        yield _generated(name, document, meta, told, notes)
    for choice in choices if isinstance(choices, list) else ():
        if isinstance(choice, dict) and isinstance(choice.get("hidden_states"), list):
            yield _chosen(name, choice, told)


def _generated(
    name: str, document: dict[str, Any], meta: dict[str, Any], told: Told, notes: dict[str, None]
) -> Piece:
    """An answer of ``/generate``."""
    held = meta["hidden_states"]
    clear = tuple(_clear(name, document, meta, told))
    if not held:
        notes["An answer came wholly from the server's cache, without states."] = None
        return Piece(name, 0, clear=clear)
    if not isinstance(held[0], list):  # the last position alone was asked for
        numbers = _tensor(name, [held], told)
        return Piece(name, None, None, (_final(numbers, "last"),), clear)
    rows: list[Any] = []
    for part in held:
        inner = isinstance(part, list) and part and isinstance(part[0], list)
        rows.extend(part if inner else [part])
    numbers = _tensor(name, rows, told)
    cached = meta.get("cached_tokens", 0)
    start = cached if type(cached) is int and 0 <= cached < 1 << 31 else None
    if start:
        notes["Tokens that were in the server's cache are missing from the front of some answers."] = None
    return Piece(name, len(numbers), start, (_final(numbers, "all"),), clear)


def _chosen(name: str, choice: dict[str, Any], told: Told) -> Piece:
    """A choice of the OpenAI routes."""
    message = choice.get("message")
    text = message.get("content") if isinstance(message, dict) else choice.get("text")
    clear = (Clear("the answer's text", text=text),) if isinstance(text, str) and text else ()
    held = choice["hidden_states"]
    seen = (_final(_tensor(name, [held], told), "last"),) if held else ()
    return Piece(name, None, None, seen, clear)


def _clear(name: str, document: dict[str, Any], meta: dict[str, Any], told: Told) -> Iterator[Clear]:
    for field, where in _TEXTS.items():
        if isinstance(document.get(field), str) and document[field]:
            yield Clear(where, text=document[field])
    for field, where in _IDS.items():
        if isinstance(document.get(field), list) and document[field]:
            yield Clear(where, token_ids=_ids(name, document[field], told))
    logprobs = meta.get("input_token_logprobs")  # log probability, id, and text where that was asked for
    if (
        isinstance(logprobs, list)
        and logprobs
        and all(isinstance(one, list) and len(one) > 1 for one in logprobs)
    ):
        yield Clear(
            "the log probabilities of the prompt", token_ids=_ids(name, [one[1] for one in logprobs], told)
        )


def _ids(name: str, given: list[Any], told: Told) -> tuple[int, ...]:
    highest = (1 << 24) if told.sizes is None else told.sizes.vocab_size
    if not all(type(one) is int and 0 <= one < highest for one in given):
        raise StatesError(
            f"{shown(name)} has token ids that are none.", f"They are whole numbers below {highest}."
        )
    return tuple(given)


def _tensor(name: str, rows: list[Any], told: Told) -> Tensor:
    try:
        numbers = torch.tensor(rows, dtype=torch.float32)
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:
        raise StatesError(
            f"{shown(name)} has hidden states that are no table of numbers: {first_line(error)}.",
            "Save it again.",
        ) from error
    if numbers.ndim != 2 or not numbers.numel():
        raise StatesError(
            f"{shown(name)} has hidden states of shape {tuple(numbers.shape)}.", "Give tokens x d_model."
        )
    if not numbers.isfinite().all():
        raise StatesError(f"{shown(name)} has hidden states that are not finite.", "Save it again.")
    if told.sizes is not None and numbers.shape[1] != told.sizes.d_model:
        raise StatesError(
            f"{shown(name)} has states of {numbers.shape[1]} numbers; the model has {told.sizes.d_model}.",
            "Name the model that made them; layers side by side, as drafts take them, are not read.",
        )
    return numbers


def _final(numbers: Tensor, positions: str) -> Seen:
    return Seen("final", Observation(positions=positions), lambda: numbers)
