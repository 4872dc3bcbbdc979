"""Prompts that differ and yet call for the same next token: few-shot sums and translations.

They are drawn together at the end by what they ask, so their last states are nearer to each other than
those of prompts that go on differently.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import perm
from random import Random
from typing import Literal, NamedTuple, TypeAlias, cast

from preimage.errors import OptionError, PromptError
from preimage.prompts.prompt_set import PromptOptions, check_whole
from preimage.prompts.tokens import Entry

Kind: TypeAlias = Literal["arithmetic", "translation"]

SHOTS = 3
# 530 prompts are 140,185 pairs, as many as were published for such sets
DEFAULT_COUNT = 530
# One digit in every number: prompts then have the same length under any usual tokenizer.
LARGEST = 9
ANSWER = 7
WORD = "water"
FRENCH = {
    "sea": "mer", "sun": "soleil", "moon": "lune", "star": "étoile", "sky": "ciel", "earth": "terre",
    "fire": "feu", "wind": "vent", "snow": "neige", "rain": "pluie", "river": "rivière",
    "mountain": "montagne", "tree": "arbre", "flower": "fleur", "bread": "pain", "milk": "lait",
    "cheese": "fromage", "apple": "pomme", "wine": "vin", "salt": "sel", "fish": "poisson",
    "bird": "oiseau", "dog": "chien", "cat": "chat", "horse": "cheval", "cow": "vache", "house": "maison",
    "door": "porte", "window": "fenêtre", "chair": "chaise", "bed": "lit", "book": "livre",
    "school": "école", "city": "ville", "street": "rue", "king": "roi", "queen": "reine", "hand": "main",
    "head": "tête", "night": "nuit",
}  # fmt: skip


class _FewShot(NamedTuple):
    """The lines a set's prompts are put together from: solved ones first, then one to be solved."""

    solved: tuple[str, ...]
    asked: tuple[str, ...]

    @property
    def supply(self) -> int:
        """How many different prompts there are."""
        return perm(len(self.solved), SHOTS) * len(self.asked)

    def prompt(self, number: int) -> str:
        """The prompt of this number, 0..supply-1; another number, another prompt."""
        number, question = divmod(number, len(self.asked))
        left = list(self.solved)
        lines = []
        for _ in range(SHOTS):
            number, choice = divmod(number, len(left))
            lines.append(left.pop(choice))
        return "\n".join([*lines, self.asked[question]])


def same_next(kind: Kind, count: int, seed: int) -> list[str]:
    """``count`` different texts that all call for the same next token.

    "arithmetic": three solved sums and one to be solved, "2 + 3 = 5\\n4 + 4 = 8\\n1 + 2 = 3\\n1 + 6 =".
    Its answer is 7 in every text, and in no solved sum. "translation": three English words with their
    French ones and one without, "sea => mer\\nsun => soleil\\ndog => chien\\nwater =>", always that one.
    Cost: nothing is read; a text takes microseconds.

    Raises OptionError for another kind or count, PromptError where there are not so many texts.
    """
    if kind not in MAKERS:
        raise OptionError(
            f"There is no set {kind!r} of prompts with the same next token.",
            "Sets: 'arithmetic', 'translation'.",
        )
    check_whole("count", count, at_least=1)
    check_whole("seed", seed, at_least=0)
    lines = MAKERS[kind]()
    if count > lines.supply:
        raise PromptError(
            f"The {kind} prompts with the same next token are {lines.supply}; {count} were asked for.",
            f"Ask for at most {lines.supply}.",
        )
    return [lines.prompt(number) for number in Random(seed).sample(range(lines.supply), count)]


def read_same_next(source: str, options: PromptOptions) -> Iterator[Entry]:
    """The prompts of ``same-next:arithmetic`` or ``same-next:translation``, 530 unless a count is set.

    Raises PromptError for another name, OptionError where a length is set.
    """
    kind = source.partition(":")[2]
    if kind not in MAKERS:
        raise PromptError(
            f"{source!r} is no set of prompts with the same next token.",
            "Allowed: same-next:arithmetic, same-next:translation.",
        )
    if options.length is not None:
        raise OptionError(
            f"length is {options.length}, but {source!r} has whole prompts only: it does not apply.",
            "Leave length unset.",
        )
    texts = same_next(cast(Kind, kind), options.count or DEFAULT_COUNT, options.seed)
    return (Entry(f"{source}, prompt {number}", text) for number, text in enumerate(texts))


def _arithmetic() -> _FewShot:
    sums = [(a, b) for a in range(1, LARGEST) for b in range(1, LARGEST) if a + b <= LARGEST]
    return _FewShot(
        solved=tuple(f"{a} + {b} = {a + b}" for a, b in sums if a + b != ANSWER),
        asked=tuple(f"{a} + {b} =" for a, b in sums if a + b == ANSWER),
    )


def _translation() -> _FewShot:
    return _FewShot(
        solved=tuple(f"{english} => {french}" for english, french in FRENCH.items()), asked=(f"{WORD} =>",)
    )


MAKERS = {"arithmetic": _arithmetic, "translation": _translation}
