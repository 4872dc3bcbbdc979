"""Hard pairs: two prompts as alike as prompts can be.

Random prompts differ nearly everywhere, so that their states differ says little. These pairs differ in
one token, in the order of two, far from the end, in how often a token comes, or in blanks and case only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import TypeAlias

from preimage.errors import PromptError
from preimage.prompts.prompt_set import check_whole
from preimage.prompts.tokens import Tokenizer, check_length, check_range, text_ids

Ids: TypeAlias = tuple[int, ...]

# (n, m) of a^n against a^m: as short as can be, far apart, and so long that one more hardly counts
CONSTANT_LENGTHS = ((1, 2), (2, 3), (3, 17), (63, 64))
_INNER_SPACE = re.compile(r"(?<=\S) (?=\S)")


@dataclass(frozen=True)
class HardPair:
    """Two different prompts, as token ids, and what makes them hard to tell apart.

    ``kind``: "substitution", "swap", "shared suffix", "repetition", "constant", "whitespace" or "case".
    """

    kind: str
    first: tuple[int, ...]
    second: tuple[int, ...]


def hard_pairs(
    prompts: Iterable[tuple[int, ...]],
    tokenizer: Tokenizer | None,
    *,
    vocab_size: int,
    max_length: int | None,
    bos: int | None,
    seed: int = 0,
    bases: int = 4,
) -> tuple[HardPair, ...]:
    """Pairs made from ``bases`` of the prompts, spread evenly over the different ones.

    - "substitution": the base, and the base with one token replaced at random; at every position.
    - "swap": the base, and the base with two different neighbouring tokens swapped; every two.
    - "shared suffix": only the first token differs, or the first quarter, or the first half.
    - "repetition": the base, and the base with its last or a middle token doubled.
    - "constant": one token n times and m times, for the first token of each base. Where positions enter
      through attention alone (rotary, ALiBi) and there is no BOS, the states of such a pair are equal but
      for rounding, as are those of a repetition in a constant base: true collisions.
    - "whitespace", "case": the base's text, and the text with a leading space, a doubled space or a
      trailing newline; in upper or lower case, or with its first letter's case changed. Only where there
      is a tokenizer, the base's text gives the base's ids, and the variant's ids give the variant.

    ``vocab_size``, ``max_length``: the model's; variants stay within them. ``bos``: the id that begins
    the prompts, or None. It is never replaced, moved or doubled; constant prompts and both sides of the
    text pairs begin with it. No pair is listed twice, in either order; same arguments, same pairs.
    Cost: about 2n + 15 pairs for a base of n tokens, and 14 calls of the tokenizer.

    Raises PromptError for a prompt that does not fit the model and where there are none.
    """
    check_whole("seed", seed, at_least=0)
    check_whole("bases", bases, at_least=1)
    given, limits = list(prompts), _Limits(vocab_size, max_length, bos)
    limits.check(given)
    distinct = list(dict.fromkeys(given))
    count = min(bases, len(distinct))
    chosen = [distinct[k * len(distinct) // count] for k in range(count)]
    pairs: dict[frozenset[Ids], HardPair] = {}
    for pair in _every_pair(chosen, tokenizer, limits, Random(seed)):
        if pair.first != pair.second:
            pairs.setdefault(frozenset((pair.first, pair.second)), pair)
    return tuple(pairs.values())


@dataclass(frozen=True)
class _Limits:
    """What a variant must keep to."""

    vocab_size: int
    max_length: int | None
    bos: int | None

    @property
    def head(self) -> Ids:
        """What a prompt made anew begins with."""
        return () if self.bos is None else (self.bos,)

    def start(self, base: Ids) -> int:
        """The first position that may change."""
        return int(self.bos is not None and base[0] == self.bos)

    def allow(self, length: int) -> bool:
        """Whether the model takes so many tokens."""
        return self.max_length is None or length <= self.max_length

    def cut(self, ids: Ids) -> Ids:
        """As many of the ids as the model takes."""
        return ids[: self.max_length]

    def check(self, prompts: list[Ids]) -> None:
        """Refuse prompts that do not keep to it themselves."""
        if not prompts:
            raise PromptError("There are no prompts to make hard pairs from.", "Give at least one.")
        for number, ids in enumerate(prompts):
            if not ids:
                raise PromptError(f"prompt {number} has no tokens.", "A prompt needs at least one token.")
            check_range(ids, vocab_size=self.vocab_size, name=f"prompt {number}")
            check_length(ids, max_length=self.max_length, name=f"prompt {number}")
        check_range(self.head, vocab_size=self.vocab_size, name="The BOS given")


def _every_pair(
    bases: list[Ids], tokenizer: Tokenizer | None, limits: _Limits, rng: Random
) -> Iterator[HardPair]:
    for base in bases:
        if limits.start(base) == len(base):
            continue  # a bare BOS: nothing in it may change
        if limits.vocab_size > 1:
            yield from _substitutions(base, limits, rng)
            yield from _shared_suffixes(base, limits, rng)
        yield from _swaps(base, limits)
        yield from _repetitions(base, limits)
        if tokenizer is not None:
            yield from _text_pairs(base, tokenizer, limits)
    yield from _constants(bases, limits)


def _substitutions(base: Ids, limits: _Limits, rng: Random) -> Iterator[HardPair]:
    for position in range(limits.start(base), len(base)):
        yield HardPair("substitution", base, _replaced(base, position, position + 1, limits, rng))


def _shared_suffixes(base: Ids, limits: _Limits, rng: Random) -> Iterator[HardPair]:
    start = limits.start(base)
    size = len(base) - start
    if size < 2:
        return
    # two fresh tokens: against the base's own first token, the pair would be a substitution
    one, other = (
        (*base[:start], token, *base[start + 1 :]) for token in rng.sample(range(limits.vocab_size), 2)
    )
    yield HardPair("shared suffix", one, other)
    for part in (size // 4, size // 2):
        if part:
            yield HardPair("shared suffix", base, _replaced(base, start, start + part, limits, rng))


def _replaced(base: Ids, start: int, end: int, limits: _Limits, rng: Random) -> Ids:
    """The base with another token, drawn uniformly, at each position from ``start`` to before ``end``."""
    drawn = (rng.randrange(limits.vocab_size - 1) for _ in range(start, end))
    others = (token + (token >= old) for token, old in zip(drawn, base[start:end], strict=True))
    return (*base[:start], *others, *base[end:])


def _swaps(base: Ids, limits: _Limits) -> Iterator[HardPair]:
    for left in range(limits.start(base), len(base) - 1):
        pair = base[left : left + 2]
        yield HardPair("swap", base, (*base[:left], *reversed(pair), *base[left + 2 :]))


def _repetitions(base: Ids, limits: _Limits) -> Iterator[HardPair]:
    if not limits.allow(len(base) + 1):
        return
    middle = (limits.start(base) + len(base)) // 2
    for position in (len(base) - 1, middle):
        yield HardPair("repetition", base, (*base[: position + 1], *base[position:]))


def _constants(bases: list[Ids], limits: _Limits) -> Iterator[HardPair]:
    head = limits.head
    tokens = dict.fromkeys(token for base in bases for token in base[limits.start(base) :][:1])
    for token in tokens:
        for lengths in CONSTANT_LENGTHS:
            first, second = (limits.cut((*head, *(token,) * length)) for length in lengths)
            yield HardPair("constant", first, second)


def _text_pairs(base: Ids, tokenizer: Tokenizer, limits: _Limits) -> Iterator[HardPair]:
    body = base[limits.start(base) :]
    text = _text(body, tokenizer)
    if not text or _ids(text, tokenizer) != body:
        return
    first = limits.cut((*limits.head, *body))
    for kind, variant in _text_variants(text):
        ids = _ids(variant, tokenizer)
        if _text(ids, tokenizer) == variant and max(ids) < limits.vocab_size:
            yield HardPair(kind, first, limits.cut((*limits.head, *ids)))


def _text_variants(text: str) -> Iterator[tuple[str, str]]:
    yield "whitespace", " " + text
    yield "whitespace", _INNER_SPACE.sub("  ", text, count=1)
    yield "whitespace", text + "\n"
    yield "case", text.upper()
    yield "case", text.lower()
    yield "case", _first_letter_swapped(text)


def _first_letter_swapped(text: str) -> str:
    for place, letter in enumerate(text):
        if letter.swapcase() != letter:
            return text[:place] + letter.swapcase() + text[place + 1 :]
    return text


def _ids(text: str, tokenizer: Tokenizer) -> Ids:
    return text_ids(text, tokenizer, add_special_tokens=False, name="A variant")


def _text(ids: Sequence[int], tokenizer: Tokenizer) -> str:
    return tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
