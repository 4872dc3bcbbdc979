"""Text into html: the one place where it is escaped, and where what cannot be seen is made visible.

Control characters, bidirectional overrides, lone surrogates, invisible letters and spaces that look like
others are spelled out, so that a text shows what it holds, cannot reorder or cover what stands beside it, and
is valid UTF-8 in the end.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from itertools import groupby

LONG = 20_000  # characters of one text that are shown
SHORT = 300  # the same for titles, heads and labels

# Letters that print nothing; variation selectors with which text is smuggled.
_INVISIBLE = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0") | {
    chr(code) for code in range(0xE0100, 0xE01F0)
}
# More than four marks on one letter are a pile that reaches over the lines around it.
_MARKS = "[\u0300-\u036f\u0483-\u0489\u1ab0-\u1aff\u1dc0-\u1dff\u20d0-\u20ff\ufe20-\ufe2f]"
_PILE = re.compile(f"(?<={_MARKS}{{4}}){_MARKS}+")
# Where a word of a thousand letters may break: finding places by itself takes a browser seconds. No marks are
# among these letters, which must not be torn off.
_UNBROKEN = re.compile("[!-\u02ff\u0370-\u0482\u048a-\u058f]{60}")


class Markup(str):
    """Html that was written here. Every other string is text."""

    __slots__ = ()


def tag(name: str, *children: str | None, **attributes: str | None) -> Markup:
    """An element: its children, text escaped, and its attributes (``class_``, ``aria_label``) but None."""
    opened = name
    for key, value in attributes.items():
        if value is not None:
            opened += f' {key.strip("_").replace("_", "-")}="{html.escape(plainly(value))}"'
    return Markup(f"<{opened}>{joined(*children)}</{name}>")


def joined(*children: str | None) -> Markup:
    """Children one behind the other, text escaped."""
    return Markup(
        "".join(child if isinstance(child, Markup) else visible(child) for child in children if child)
    )


def visible(text: str, most: int = LONG) -> Markup:
    """Text as html of which every character is seen; what is spelled out is set apart, too much is cut."""
    shown = "".join(
        f'<span class="odd">{_escaped(piece)}</span>' if odd else _escaped(piece)
        for odd, piece in _pieces(text[:most])
    )
    return Markup(shown + (f'<span class="odd">{_rest(text, most)}</span>' if len(text) > most else ""))


def flat(text: str, most: int = LONG) -> Markup:
    """The same for an element that holds text alone, as a title does."""
    return Markup(html.escape(plainly(text, most)))


def plainly(text: str, most: int = LONG) -> str:
    """The same where no html is: attributes before they are escaped, labels of figures."""
    shown = "".join(piece for _, piece in _pieces(text[:most]))
    return shown + (_rest(text, most) if len(text) > most else "")


def _escaped(piece: str) -> str:
    return html.escape(_UNBROKEN.sub("\\g<0>\0", piece)).replace("\0", "<wbr>")  # no NUL is left in a piece


def _rest(text: str, most: int) -> str:
    return f" […] {len(text) - most:,} more characters are not shown"


def _pieces(text: str) -> Iterator[tuple[bool, str]]:
    """The text in pieces, and whether each is one that had to be spelled out."""
    end = 0
    for pile in _PILE.finditer(text):
        yield from _runs(text[end : pile.start()])
        yield True, "".join(map(_spelled, pile.group()))
        end = pile.end()
    yield from _runs(text[end:])


def _runs(text: str) -> Iterator[tuple[bool, str]]:
    for odd, letters in groupby(text, _is_odd):
        run = "".join(letters)
        yield odd, "".join(map(_spelled, run)) if odd else run


def _is_odd(character: str) -> bool:
    return character not in "\n\t" and (not character.isprintable() or character in _INVISIBLE)


def _spelled(character: str) -> str:
    """A control picture (␀) where there is one, else the escape a programmer knows (\\u202e)."""
    code = ord(character)
    if code < 0x20:
        return chr(0x2400 + code)
    if code == 0x7F:
        return "␡"
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
