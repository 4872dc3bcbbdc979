"""From any source of prompts to one PromptSet."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from itertools import repeat, zip_longest
from pathlib import Path
from random import Random
from typing import NamedTuple, Protocol, TypeAlias, cast

from preimage.errors import ModelError, OptionError, PromptError
from preimage.prompts.corpus import Kind, Split, documents
from preimage.prompts.files import SOURCES, read_file
from preimage.prompts.prompt_set import PromptOptions, PromptSet
from preimage.prompts.same_next import read_same_next
from preimage.prompts.streams import PREFIX, read_stream
from preimage.prompts.tokens import (
    Entry,
    Prompt,
    Tokenizer,
    check_length,
    check_range,
    encode,
    given_ids,
    listed,
    text_ids,
    window_bos,
)
from preimage.prompts.windows import cut, spread

DEFAULT_LENGTH = 32

Ids: TypeAlias = tuple[int, ...]
Source: TypeAlias = Iterable[Prompt] | PromptSet | str | Path
_ALL = PromptOptions()


class TakesTokens(Protocol):
    """What is asked of a model to gather prompts for it; ``tokenizer`` may be None where no text is read."""

    @property
    def tokenizer(self) -> Tokenizer | None:
        """From text to token ids."""

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""

    @property
    def max_length(self) -> int | None:
        """Tokens of the longest prompt; None: any."""


class Vocabulary(NamedTuple):
    """A tokenizer and the sizes of a model that is not there."""

    tokenizer: Tokenizer | None
    vocab_size: int
    max_length: int | None


def gather(source: Source, model: TakesTokens, options: PromptOptions = _ALL) -> PromptSet:
    """Collect prompts from a source, as distinct token ids.

    ``source``: a list of prompts (text or token ids); a PromptSet, which is only cut to the count;
    or a name: ``default[:prose|:code][:train|:test]`` (prose and code, half each, of the test split
    unless said), ``random`` (uniform ids), ``same-next:arithmetic`` or ``same-next:translation``
    (different prompts that call for the same next token), a .txt, .jsonl or .parquet file, or
    ``datasets:NAME[:SPLIT[:COLUMN]]``. ``model``: a model, its preview, or a :class:`Vocabulary`; a prompt
    outside its vocabulary or longer than it takes is an error.
    Cost: tokenises what is read, and reading stops when the count is reached; windows are chosen
    from a pool of about four times the count.

    Raises PromptError when the source cannot give usable prompts; same arguments, same set.

    >>> from preimage.prompts import PromptOptions, Vocabulary
    >>> gather("random", Vocabulary(None, 50, None), PromptOptions(count=3, length=4)).lengths
    (4, 4, 4)
    """
    if not (hasattr(model, "tokenizer") and hasattr(model, "vocab_size")):
        raise ModelError(
            f"A {type(model).__name__} is no model that preimage loaded.",
            "Use model = preimage.load(model) once, with tokenizer= for one in memory, and give that.",
        )
    if isinstance(source, PromptSet):
        return _cut_set(source, options, model)
    if options.length is not None and model.max_length is not None and options.length > model.max_length:
        raise PromptError(
            f"length is {options.length}; this model takes at most {model.max_length} tokens.",
            "Set a smaller length.",
        )
    gatherer = _Gatherer(model, options)
    if isinstance(source, str) and source.split(":")[0] == "default":
        ids = gatherer.default(source)
    elif isinstance(source, str) and source == "random":
        ids = gatherer.random()
    elif isinstance(source, str) and source.split(":")[0] == "same-next":
        ids = gatherer.entries(read_same_next(source, options), source)
    elif isinstance(source, str) and source.startswith(PREFIX):
        ids = gatherer.entries(read_stream(source), source)
    elif isinstance(source, str | Path):
        entries = read_file(Path(source), whole=options.length is not None)
        ids = gatherer.entries(entries, str(source))
    else:
        ids = gatherer.entries(_listed(source), "list")
    name = str(source) if isinstance(source, str | Path) else "list"
    return PromptSet(tuple(ids), name, options.seed, gatherer.duplicates)


class _Gatherer:
    """One gathering: the model's limits, and which ids were taken already."""

    def __init__(self, model: TakesTokens, options: PromptOptions) -> None:
        self.tokenizer, self.options = model.tokenizer, options
        self.vocab_size, self.max_length = model.vocab_size, model.max_length
        self.rng = Random(options.seed)
        self.taken: set[Ids] = set()
        self.duplicates = 0

    def entries(self, entries: Iterable[Entry], source: str) -> list[Ids]:
        """Whole prompts, or windows of them when a length is set."""
        options = self.options
        if options.length is None:
            ids = self._take((self._whole(entry) for entry in entries), options.count)
        else:
            ids = self._take(self._windows(entries, options.length, options.count), options.count)
        if not ids and options.length is not None:
            raise _nothing_left(source, options.length)
        if not ids:
            raise PromptError(f"{source} holds no prompts.", "Give at least one.")
        return ids

    def default(self, source: str) -> list[Ids]:
        """Windows of the default corpus, exactly ``count`` of them where a count is set."""
        kinds, split = _parse_default(source)
        if self.tokenizer is None:
            raise PromptError(
                f"{source!r} is text, and this model has no tokenizer.",
                "Use 'random' or pass token ids instead.",
            )
        count = self.options.count
        shares = _shares(count, len(kinds))
        parts = [self._corpus(kind, split, share) for kind, share in zip(kinds, shares, strict=True)]
        each = min(map(len, parts))
        if not any(parts):
            raise _nothing_left(source, self._length())
        if count is not None and sum(map(len, parts)) < count:
            raise _too_few(source, count, each * len(parts), "a shorter length gives more")
        if count is None:
            parts = [part[:each] for part in parts]
        return [ids for row in zip_longest(*parts) for ids in row if ids is not None]

    def random(self) -> list[Ids]:
        """Uniform ids, ``count`` prompts of ``length`` tokens (BOS first where it is wanted)."""
        count, length = self.options.count, self._length()
        if count is None:
            raise PromptError("The source 'random' never ends, and no count is set.", "Set a count.")
        begin = self._begin
        head = () if begin is None else (begin,)
        free = _room(length, begin)
        distinct: int = self.vocab_size**free
        if count > distinct and not self.options.keep_duplicates:
            raise _too_few("random", count, distinct, "a greater length gives more")
        vocabulary = range(self.vocab_size)
        return self._take(((*head, *self.rng.choices(vocabulary, k=free)) for _ in repeat(None)), count)

    def _take(self, candidates: Iterable[Ids], count: int | None) -> list[Ids]:
        """The first ``count`` candidates not taken before; the rest is not asked for."""
        kept: list[Ids] = []
        for ids in candidates:
            if ids in self.taken and not self.options.keep_duplicates:
                self.duplicates += 1
                continue
            self.taken.add(ids)
            kept.append(ids)
            if len(kept) == count:
                break
        return kept

    def _whole(self, entry: Entry) -> Ids:
        return encode(
            entry.prompt, self.tokenizer, vocab_size=self.vocab_size, max_length=self.max_length,
            bos=self.options.bos, name=entry.name,
        )  # fmt: skip

    def _windows(self, entries: Iterable[Entry], length: int, count: int | None) -> Iterator[Ids]:
        return spread((self._cut(entry, length) for entry in entries), self.rng, count)

    def _cut(self, entry: Entry, length: int) -> list[Ids]:
        if isinstance(entry.prompt, str):
            ids = text_ids(entry.prompt, self.tokenizer, add_special_tokens=False, name=entry.name)
            begin = self._begin
        else:
            ids = given_ids(entry.prompt, name=entry.name)
            # ids are taken as they are: only an explicit True adds BOS to them
            begin = self._begin if self.options.bos else None
        check_range(ids, vocab_size=self.vocab_size, name=entry.name)
        _room(length, begin)
        return cut(ids, length, begin)

    def _corpus(self, kind: Kind, split: Split, count: int | None) -> list[Ids]:
        if count == 0:
            return []
        entries = [Entry(f"default:{kind}, {name}", text) for name, text in documents(kind, split)]
        # the corpus is sorted by name; shuffled, a small count does not always meet the same few
        self.rng.shuffle(entries)
        return self._take(self._windows(entries, self._length(), count), count)

    def _length(self) -> int:
        return self.options.length or min(DEFAULT_LENGTH, self.max_length or DEFAULT_LENGTH)

    @cached_property
    def _begin(self) -> int | None:
        begin = window_bos(self.tokenizer, self.options.bos)
        if begin is not None:
            check_range([begin], vocab_size=self.vocab_size, name="The tokenizer's BOS")
        return begin


def _room(length: int, begin: int | None) -> int:
    """Tokens of a window beside its BOS."""
    room = length if begin is None else length - 1
    if room == 0:
        raise OptionError(
            "length is 1 and BOS counts towards it: no room is left for the prompt.",
            "Set a length of at least 2, or bos=False.",
        )
    return room


def _listed(prompts: object) -> Iterator[Entry]:
    if not isinstance(prompts, Iterable):
        raise PromptError(
            f"A source of prompts cannot be of type {type(prompts).__name__}.",
            f"Give a list of prompts, or one of {SOURCES}.",
        )
    # a list may be a stream, which is read no further than is needed
    items = listed(prompts) if isinstance(prompts, Mapping) or hasattr(prompts, "tolist") else prompts
    return (Entry(f"prompt {number}", prompt) for number, prompt in enumerate(items))


def _cut_set(prompts: PromptSet, options: PromptOptions, model: TakesTokens) -> PromptSet:
    # it may have been gathered for another model
    for number, ids in enumerate(prompts):
        check_range(ids, vocab_size=model.vocab_size, name=f"prompt {number}")
        check_length(ids, max_length=model.max_length, name=f"prompt {number}")
    if options.count is None or options.count >= len(prompts):
        return prompts
    return replace(prompts, ids=prompts.ids[: options.count])


def _parse_default(source: str) -> tuple[tuple[Kind, ...], Split]:
    parts = source.split(":")[1:]
    split = parts.pop() if parts and parts[-1] in ("train", "test") else "test"
    if parts not in ([], ["prose"], ["code"]):
        raise PromptError(
            f"{source!r} is not a part of the default corpus.",
            "Allowed: default[:prose|:code][:train|:test].",
        )
    return cast(tuple[Kind, ...], tuple(parts) or ("prose", "code")), cast(Split, split)


def _shares(count: int | None, parts: int) -> list[int | None]:
    """``count`` in equal shares; the first ones get what does not divide."""
    if count is None:
        return [None] * parts
    return [count // parts + (part < count % parts) for part in range(parts)]


def _nothing_left(source: str, length: int) -> PromptError:
    return PromptError(
        f"{source} has no text of {length} tokens or more: nothing is left.", "Set a smaller length."
    )


def _too_few(source: str, count: int, supply: int, more: str) -> PromptError:
    return PromptError(
        f"{source!r} cannot supply {count} prompts; with these options it has {supply}.",
        f"Ask for at most {supply}; {more}.",
    )
