"""One prompt to token ids: the tokenizer's part, the BOS rule, and every check on the ids."""

from __future__ import annotations

import logging
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from numbers import Integral
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

from preimage.errors import OptionError, PromptError

Prompt: TypeAlias = str | Sequence[int]
"""Text, or the token ids themselves."""


@runtime_checkable
class Tokenizer(Protocol):
    """What is needed of a Hugging Face tokenizer; any of them fits."""

    @property
    def bos_token_id(self) -> int | None:
        """The id that begins a sequence, or None where the model has no such token."""

    def __call__(self, text: str, /, *, add_special_tokens: bool = True) -> Mapping[str, Any]:
        """Tokenise; the ids are under ``"input_ids"``."""

    def decode(
        self,
        ids: Sequence[int],
        /,
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool = False,
    ) -> str:
        """The text of these ids."""


class Entry(NamedTuple):
    """One prompt or document of a source, with the name that errors call it by."""

    name: str
    prompt: Prompt


def encode(
    prompt: Prompt,
    tokenizer: Tokenizer | None,
    *,
    vocab_size: int,
    max_length: int | None,
    bos: bool | None = None,
    name: str = "prompt 0",
) -> tuple[int, ...]:
    """One prompt to its token ids, whole: nothing is ever cut off.

    ``prompt``: text, or token ids (a list, or a one-dimensional numpy array or torch tensor).
    ``vocab_size``: ids must lie in 0..vocab_size-1. ``max_length``: most tokens the model takes,
    BOS included; None for no limit. ``bos``: None leaves text to the tokenizer's own habit and ids
    as they are; True puts BOS first unless it is there; False never adds it (one that the prompt
    itself holds stays). ``name`` is what errors call this prompt.
    Cost: one tokenizer call for text, one pass over the ids.

    Raises PromptError for a prompt that cannot be used, OptionError for ``bos=True`` without a BOS.
    """
    if isinstance(prompt, str):
        if not prompt:
            raise PromptError(f"{name} is empty text.", "A prompt needs at least one token.")
        ids = text_ids(prompt, tokenizer, add_special_tokens=bos is not False, name=name)
    else:
        ids = given_ids(prompt, name=name)
    if not ids:
        raise PromptError(f"{name} has no tokens.", "A prompt needs at least one token.")
    if bos:
        begin = required_bos(tokenizer)
        ids = ids if ids[0] == begin else (begin, *ids)
    check_range(ids, vocab_size=vocab_size, name=name)
    check_length(ids, max_length=max_length, name=name)
    return ids


def listed(prompts: object) -> list[Any]:
    """Prompts one by one: of a list, an array or tensor, or what a tokenizer returned, padding cut off.

    A bare sequence of ids is one prompt, and so is a text.
    """
    if isinstance(prompts, Mapping):
        return _unpadded(prompts)
    items = prompts.tolist() if hasattr(prompts, "tolist") else prompts
    if isinstance(items, str):
        return [items]
    if not isinstance(items, Iterable) or isinstance(items, bytes | bytearray | Set):
        raise PromptError(
            f"Prompts cannot be of type {type(prompts).__name__}.",
            "Give a text, a list of texts or of lists of token ids, or preimage.gather(…) of a file.",
        )
    rows = list(items)
    bare = rows and all(_is_number(row) for row in rows)
    return [rows] if bare else rows


def _unpadded(batch: Mapping[Any, Any]) -> list[Any]:
    """The prompts of what a tokenizer returned."""
    if "input_ids" not in batch:
        raise PromptError(f"A {type(batch).__name__} without input_ids holds no prompts.", "Give token ids.")
    rows, mask = listed(batch["input_ids"]), batch.get("attention_mask")
    if mask is None:
        return rows
    kept = listed(mask)
    if [len(row) for row in rows] != [len(row) for row in kept]:
        raise PromptError("input_ids and attention_mask have other lengths.", "Give token ids alone.")
    return [[token for token, is_kept in zip(row, keep, strict=True) if is_kept]
            for row, keep in zip(rows, kept, strict=True)]  # fmt: skip


def _is_number(item: object) -> bool:
    return isinstance(item, Integral) or (hasattr(item, "ndim") and item.ndim == 0)


def text_ids(
    text: str, tokenizer: Tokenizer | None, *, add_special_tokens: bool, name: str
) -> tuple[int, ...]:
    """The ids of ``text``, however many (possibly none)."""
    if tokenizer is None:
        raise PromptError(f"{name} is text, and this model has no tokenizer.", "Pass token ids instead.")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise PromptError(
            f"{name} is not encodable as UTF-8: {text[error.start]!r} at character {error.start}"
            " is half of a surrogate pair.",
            "Remove it, or pass token ids instead.",
        ) from None
    with _no_length_warning():
        return tuple(tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])


def given_ids(prompt: object, *, name: str) -> tuple[int, ...]:
    """Ids somebody gave, as plain ints (possibly none); what is no whole number is refused."""
    # numpy arrays and torch tensors are no Sequence; both know tolist, so neither need be imported
    items = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if not isinstance(items, Sequence) or isinstance(items, str | bytes | bytearray):
        raise PromptError(
            f"{name} is {reprlib.repr(prompt)} ({type(prompt).__name__});"
            " a prompt is text or a list of token ids.",
            "A single prompt goes inside a list: ['text'] or [[1, 2, 3]].",
        )
    items = [item.tolist() if getattr(item, "ndim", 1) == 0 else item for item in items]
    for position, item in enumerate(items):
        if isinstance(item, bool) or not isinstance(item, Integral):
            raise PromptError(
                f"{name} has {reprlib.repr(item)} ({type(item).__name__}) at position {position};"
                " a token id is an int.",
                "Pass each prompt as text or as one flat list of ints.",
            )
    return tuple(map(int, items))


def check_range(ids: Sequence[int], *, vocab_size: int, name: str) -> None:
    """Refuse the first id outside 0..vocab_size-1."""
    for position, item in enumerate(ids):
        if not 0 <= item < vocab_size:
            raise PromptError(
                f"{name} has token id {item} at position {position};"
                f" this model's ids are 0..{vocab_size - 1}.",
                "Were the ids made with another model's tokenizer?",
            )


def check_length(ids: Sequence[int], *, max_length: int | None, name: str) -> None:
    """Refuse more tokens than the model takes: cutting silently would change the question."""
    if max_length is not None and len(ids) > max_length:
        raise PromptError(
            f"{name} has {len(ids)} tokens; this model takes at most {max_length}.",
            "Shorten it, or set a length to cut windows from it.",
        )


def required_bos(tokenizer: Tokenizer | None) -> int:
    """The BOS id, for ``bos=True``."""
    begin = None if tokenizer is None else tokenizer.bos_token_id
    if begin is None:
        what = "there is no tokenizer" if tokenizer is None else "the tokenizer has no BOS token"
        raise OptionError(f"bos=True, but {what}.", "Leave bos unset, or put the wanted id first yourself.")
    return begin


def window_bos(tokenizer: Tokenizer | None, bos: bool | None) -> int | None:
    """The BOS id that windows of text and random prompts begin with, or None for none.

    ``bos=None`` follows the tokenizer's own habit, found by tokenising one letter.
    """
    if bos:
        return required_bos(tokenizer)
    if bos is False or tokenizer is None or tokenizer.bos_token_id is None:
        return None
    begin = tokenizer.bos_token_id
    adds_it = list(tokenizer("a", add_special_tokens=True)["input_ids"])[:1] == [begin]
    return begin if adds_it else None


@contextmanager
def _no_length_warning() -> Iterator[None]:
    # transformers warns that a text is longer than the model's maximum. Here that is either our own
    # error or a whole document about to be cut into windows, so the warning would be a false alarm.
    logger = logging.getLogger("transformers.tokenization_utils_base")
    logger.addFilter(_is_not_about_length)
    try:
        yield
    finally:
        logger.removeFilter(_is_not_about_length)


def _is_not_about_length(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("Token indices sequence length is longer")
