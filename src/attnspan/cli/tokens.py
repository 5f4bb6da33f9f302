"""The words of a mask expression, where they stand, and how a mistake is shown at its place.

::

    text                          tokens
    causal & docs(4k*3, 100)      name sign name sign number sign number sign number sign

A number is whole, may hold underscores (4_096) and may end in a unit: k or K is 1024, m or M is 1024 * 1024.
Knows nothing of masks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from attnspan.errors import AttnspanError, ExpressionError, integer

UNITS = {"k": 1024, "m": 1024 * 1024}
LARGEST = (1 << 63) - 1  # what a tensor of lengths can hold
WIDTH = 76
"""The most columns of a text that an error shows."""

_WHOLE = re.compile(r"-?[0-9](_?[0-9])*[kKmM]?")
_LEXEMES = re.compile(
    r"""
    (?P<space>  \s+ )
  | (?P<file>   @ ( "[^"]*" | '[^']*' | [^\s,()\[\]&|"']* ) )
  | (?P<number> [-+]? [0-9] [0-9A-Za-z_.]* )
  | (?P<name>   [A-Za-z_] [A-Za-z0-9_-]* )
  | (?P<quoted> "[^"]*" | '[^']*' )
  | (?P<sign>   [&|~()\[\],=*] )
  | (?P<stray>  . )
    """,
    re.VERBOSE | re.DOTALL,
)


class Lexeme(NamedTuple):
    """A word of the text, and the columns [start, stop) it stands in."""

    kind: str
    text: str
    start: int
    stop: int

    def __str__(self) -> str:
        """What arrived, as an error names it."""
        return "the end" if self.kind == "end" else repr(shortened(self.text))


@dataclass(frozen=True, slots=True)
class Source:
    """A text in which mistakes can be pointed at."""

    text: str

    def tokens(self) -> list[Lexeme]:
        """The words of the text, then one token for its end.

        >>> [token.text for token in Source("docs(4k*3)").tokens()]
        ['docs', '(', '4k', '*', '3', ')', '']
        """
        found = (Lexeme(m.lastgroup or "", m[0], *m.span()) for m in _LEXEMES.finditer(self.text))
        end = Lexeme("end", "", len(self.text), len(self.text))
        return [*(token for token in found if token.kind != "space"), end]

    def error(self, message: str, start: int, stop: int) -> ExpressionError:
        """An error that shows the text with columns [start, stop) marked.

        >>> print(Source("causal & )").error("expected a mask, got ')'", 9, 10))
        expected a mask, got ')'
            causal & )
                     ^
        """
        first = max(0, start - WIDTH // 2) if len(self.text) > WIDTH else 0
        shown = "".join(c if c.isprintable() else " " for c in self.text[first : first + WIDTH])
        left, right = "... " if first else "", " ..." if first + WIDTH < len(self.text) else ""
        marks = "^" * max(1, min(stop, first + WIDTH) - start)
        indent = " " * (4 + len(left) + start - first)
        return ExpressionError(f"{message}\n    {left}{shown}{right}\n{indent}{marks}")

    @contextmanager
    def at(self, start: int, stop: int) -> Iterator[None]:
        """What is refused inside is refused here: the same message, with these columns marked."""
        try:
            yield
        except ExpressionError:
            raise
        except AttnspanError as error:
            raise self.error(str(error), start, stop) from error


def number(text: str) -> int:
    """A whole number as people write it.

    >>> number("4_096"), number("64k"), number("-1")
    (4096, 65536, -1)
    """
    if not _WHOLE.fullmatch(text):
        example = "such as 4096, 4_096, 64k (x 1024) or 1M (x 1024 x 1024)"
        raise AttnspanError(f"expected a whole number {example}, got {shortened(text)!r}")
    digits, unit = (text[:-1], UNITS[text[-1].lower()]) if text[-1].isalpha() else (text, 1)
    # Python refuses to read thousands of digits, so their count is looked at first.
    value = int(digits) * unit if len(digits) <= 64 else LARGEST + 1
    if abs(value) > LARGEST:
        raise AttnspanError(f"expected a whole number below 2 ** 63, got {shortened(text)!r}")
    return value


def size(text: str, name: str = "size") -> int:
    """The value of an option such as --seq-len: a whole number >= 1, written as in an expression.

    >>> size("1M", "--seq-len")
    1048576
    """
    try:
        value = number(text)
    except AttnspanError as error:
        raise ExpressionError(f"{name}: {error}") from None
    return integer(name, value, at_least=1, error=ExpressionError)


def optional_size(name: str, text: str | None) -> int | None:
    """`size` of an option that may be left out."""
    return None if text is None else size(text, name)


def shortened(text: str, width: int = 40) -> str:
    """The text, or its beginning.

    >>> shortened("documents", width=6)
    'doc...'
    """
    return text if len(text) <= width else f"{text[: width - 3]}..."
