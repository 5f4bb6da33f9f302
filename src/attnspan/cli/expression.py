"""Masks written as text: `causal & documents(4096, 1000, 2904)`. Read by hand, never by eval.

::

    expression  =  term { "|" term }
    term        =  factor { "&" factor }
    factor      =  "~" factor  |  "(" expression ")"  |  name [ "(" arguments ")" ]  |  @path
    arguments   =  [ [ name "=" ] value { "," [ name "=" ] value } ]
    value       =  number  |  number "*" times  |  "[" values "]"  |  word  |  @path

Operators bind as in Python: `~` before `&` before `|`. Names are those of the classes in any case, with or
without `_` and `-`, or a short form: sliding_window, SlidingWindow, sliding-window and window are the same.
Arguments are those of the classes; `documents` and `key_padding` also take their lengths one by one:

    documents(4096, 1000)           Documents([4096, 1000])
    documents([3, 5], [1, 7])       Documents([[3, 5], [1, 7]]), one list per batch row
    window(4k, right=16)            SlidingWindow(4096, right=16), which shows 4096 keys before a token, the token
                                    itself and 16 after it; k is 1024, M is 1024 * 1024
    causal(align=bottom)            Causal(align="bottom")

`4096*3` is three numbers in a row, and `@path` all the numbers of a text file (parted by white space or
commas; `#` starts a comment); both add their numbers to the list around them. `@path` in the place of a
mask is `(causal & documents(@path))`. A path with blanks or brackets is quoted: `@"my lengths.txt"`.

>>> parse("causal & documents(4k*2, 100)")
Causal() & Documents([4096, 4096, 100])
>>> write(parse("causal & documents(4k*2, 100)"))
'causal & documents(4096*2, 100)'
>>> parse("causal & documents(3 5)")
Traceback (most recent call last):
attnspan.errors.ExpressionError: expected ',' or ')', got '5'
    causal & documents(3 5)
                         ^

[Note: limits of a text] A text from anywhere must not exhaust the stack or the memory. Nesting, the number of masks
(each may deepen the tree that masks walk recursively), of numbers and of characters are bounded far above
honest use.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, Field, fields
from itertools import groupby
from typing import Any

from attnspan.cli.tokens import Lexeme, Source, number, size
from attnspan.errors import AttnspanError, ExpressionError, integer, one_of
from attnspan.masks import Causal, Chunked, Documents, Full, KeyPadding, Mask, PrefixLM, SinkTokens, SlidingWindow, Tree
from attnspan.masks.combined import And, Not, Or

__all__ = ["parse", "size", "write"]


def _plain(name: str) -> str:
    """A name without what people write differently."""
    return name.lower().replace("_", "").replace("-", "")


PATTERNS: dict[str, type[Any]] = {
    "full": Full,
    "causal": Causal,
    "sliding_window": SlidingWindow,
    "window": SlidingWindow,
    "documents": Documents,
    "docs": Documents,
    "prefix_lm": PrefixLM,
    "prefix": PrefixLM,
    "chunked": Chunked,
    "sink_tokens": SinkTokens,
    "sinks": SinkTokens,
    "key_padding": KeyPadding,
    "padding": KeyPadding,
    "tree": Tree,
}
"""Every name a mask goes by, its own before its short form."""

OWN_NAME = {pattern: name for name, pattern in PATTERNS.items() if _plain(pattern.__name__) == _plain(name)}

LISTED = (Documents, KeyPadding)
"""The masks whose lengths may be given one by one."""

# See [Note: limits of a text].
NESTING = 50
LIMITS = {"masks": 100, "numbers": 1 << 20}
CHARACTERS, FILE_BYTES = 1 << 20, 1 << 24


def parse(text: str, *, seq_len: int | None = None) -> Mask:
    """The mask that a text describes; refused with an ExpressionError that points at the place.

    With `seq_len`, a mask that cannot be laid over that many queries and keys is refused at its place too:

    >>> parse("causal & documents(3, 5)", seq_len=9)
    Traceback (most recent call last):
    attnspan.errors.ExpressionError: lengths must sum to q_len (9), got 2 documents with sum 8; \
give the padding at the end a document of its own
        causal & documents(3, 5)
                 ^^^^^^^^^^^^^^^
    """
    if len(text) > CHARACTERS:
        raise ExpressionError(
            f"expected at most {CHARACTERS} characters, got {len(text)}; a file holds more lengths: @path"
        )
    return _Parser(text, seq_len).whole_text()


def write(mask: Mask) -> str:
    """The text of a mask, so that `parse(write(mask)) == mask`.

    >>> write(~Causal() | Documents([[3, 5], [4, 4]]) & SlidingWindow(2, right=1))
    '~causal | documents([3, 5], [4*2]) & sliding_window(2, right=1)'
    """
    match mask:
        case And():
            return f"{_grouped(mask.left, Or)} & {_grouped(mask.right, Or, And)}"
        case Or():
            return f"{write(mask.left)} | {_grouped(mask.right, Or)}"
        case Not():
            return f"~{_grouped(mask.inner, And, Or)}"
    if type(mask) not in OWN_NAME:
        raise ExpressionError(f"only {', '.join(OWN_NAME.values())} can be written as text, got {mask!r}")
    name, arguments = OWN_NAME[type(mask)], ", ".join(_written_arguments(mask))
    return f"{name}({arguments})" if arguments else name


# ---- reading -------------------------------------------------------------------------------------------


class _Several(list[Any]):
    """Numbers that become items of the list around them."""


class _Parser:
    """One pass over the tokens: a method per line of the grammar."""

    def __init__(self, text: str, seq_len: int | None):
        self.source = Source(text)
        self.tokens = self.source.tokens()
        self.seq_len = seq_len
        self.index = self.depth = 0
        self.counts = dict.fromkeys(LIMITS, 0)

    def whole_text(self) -> Mask:
        mask = self.expression()
        if self.token.kind != "end":
            raise self.unexpected("&, | or the end")
        return mask

    def expression(self) -> Mask:
        return self.combined("|", self.term, operator.or_)

    def term(self) -> Mask:
        return self.combined("&", self.factor, operator.and_)

    def combined(self, sign: str, part: Callable[[], Mask], combine: Callable[[Mask, Mask], Mask]) -> Mask:
        mask = part()
        while found := self.accept(sign):
            right = part()
            with self.source.at(found.start, found.stop):
                mask = combine(mask, right)
        return mask

    def factor(self) -> Mask:
        inverted = False
        while self.accept("~"):
            inverted = not inverted
        mask = self.operand()
        return ~mask if inverted else mask

    def operand(self) -> Mask:
        if self.accept("("):
            self.deepen()
            mask = self.expression()
            self.close(")", "&, | or ')'")
            return mask
        if self.token.kind not in ("name", "file"):
            raise self.unexpected("a mask")
        token = self.take()
        self.count("masks", 1, token)
        if token.kind == "file":
            return Causal() & self.built("documents", [self.lengths(token)], {}, token)
        with self.source.at(token.start, token.stop):
            name = _known(token.text)
        positional, named = self.arguments(name) if self.accept("(") else ([], {})
        return self.built(name, positional, named, token)

    def arguments(self, name: str) -> tuple[list[Any], dict[str, Any]]:
        self.deepen()
        positional: list[Any] = []
        named: dict[str, Any] = {}
        while self.token.text != ")":
            token = self.token
            if token.kind == "name" and self.tokens[self.index + 1].text == "=":
                with self.source.at(token.start, token.stop):
                    argument = _argument(name, token.text, named)
                self.index += 2
                named[argument] = self.value()
            elif named:
                raise self.unexpected(f"a named argument after {list(named)[-1]}=, as in name=value")
            else:
                positional.append(self.value())
            if not self.accept(","):
                break
        self.close(")", "',' or ')'")
        return positional, named

    def value(self) -> Any:
        token = self.token
        match token.kind:
            case "number":
                return self.number()
            case "file":
                return self.lengths(self.take())
            case "name":
                return self.take().text
            case "quoted":
                return self.take().text[1:-1]
        if not self.accept("["):
            raise self.unexpected("a whole number, a list, a word or @path")
        self.deepen()
        items: list[Any] = []
        while self.token.text != "]":
            items.append(self.value())
            if not self.accept(","):
                break
        self.close("]", "',' or ']'")
        return _spliced(items)

    def number(self) -> int | _Several:
        token = self.take()
        with self.source.at(token.start, token.stop):
            value = number(token.text)
        if not self.accept("*"):
            self.count("numbers", 1, token)
            return value
        if self.token.kind != "number":
            raise self.unexpected("how many times, as in 4096*3")
        times = self.take()
        with self.source.at(times.start, times.stop):
            count = integer("the number of times", number(times.text), at_least=1)
        self.count("numbers", count, times)
        return _Several([value] * count)

    def lengths(self, token: Lexeme) -> _Several:
        with self.source.at(token.start, token.stop):
            found = _read(token.text[1:].strip("\"'"))
        self.count("numbers", len(found), token)
        return found

    def built(self, name: str, positional: list[Any], named: dict[str, Any], start: Lexeme) -> Mask:
        """The mask of a call, and proof that it fits the sequence."""
        with self.source.at(start.start, self.tokens[self.index - 1].stop):
            mask: Mask = PATTERNS[name](**_bound(name, positional, named))
            if self.seq_len is not None:
                for row in range(mask.rows):
                    mask.bands(self.seq_len, row=row)
            return mask

    # ---- moving along --------------------------------------------------------------------------------------

    @property
    def token(self) -> Lexeme:
        return self.tokens[self.index]

    def take(self) -> Lexeme:
        self.index += 1
        return self.tokens[self.index - 1]

    def accept(self, sign: str) -> Lexeme | None:
        return self.take() if self.token.text == sign else None

    def deepen(self) -> None:
        """Count the bracket just taken."""
        self.depth += 1
        if self.depth > NESTING:
            bracket = self.tokens[self.index - 1]
            raise self.source.error(
                f"expected at most {NESTING} brackets inside one another, got more", bracket.start, bracket.stop
            )

    def close(self, bracket: str, expected: str) -> None:
        if not self.accept(bracket):
            raise self.unexpected(expected)
        self.depth -= 1

    def count(self, what: str, more: int, token: Lexeme) -> None:
        self.counts[what] += more
        if self.counts[what] > LIMITS[what]:
            message = f"expected at most {LIMITS[what]} {what} in all, got more"
            raise self.source.error(message, token.start, token.stop)

    def unexpected(self, expected: str) -> ExpressionError:
        return self.source.error(f"expected {expected}, got {self.token}", self.token.start, self.token.stop)


def _known(name: str) -> str:
    """The table's name for a mask written in any of its ways."""
    for known in PATTERNS:
        if _plain(known) == _plain(name):
            return known
    return one_of("a mask", name, list(PATTERNS))


def _argument(name: str, text: str, named: dict[str, Any]) -> str:
    """The parameter that `text` names, given once."""
    known = _parameters(name)
    if not known:
        raise AttnspanError(f"{name} takes no arguments, got {text!r}")
    argument = one_of(f"an argument of {name}", text.lower().replace("-", "_"), known)
    if argument in named:
        raise AttnspanError(f"{argument} must be given once, got it twice")
    return argument


def _bound(name: str, positional: list[Any], named: dict[str, Any]) -> dict[str, Any]:
    """Every argument by the name of its parameter."""
    known = _parameters(name)
    if PATTERNS[name] in LISTED and positional:
        positional = _spliced(positional)
        one_list = len(positional) == 1 and isinstance(positional[0], list)
        positional = positional if one_list else [positional]
    if len(positional) > len(known):
        takes = f"at most {len(known)} arguments ({', '.join(known)})" if known else "no arguments"
        raise AttnspanError(f"{name} takes {takes}, got {len(positional)}")
    given = dict(zip(known, positional, strict=False))
    for twice in given.keys() & named.keys():
        raise AttnspanError(f"{twice} must be given once, got it twice")
    for parameter in fields(PATTERNS[name]):
        if parameter.init and _is_required(parameter) and parameter.name not in given | named:
            raise AttnspanError(f"{name} needs {parameter.name}, got nothing; write {name}({parameter.name}=...)")
    return given | named


def _parameters(name: str) -> list[str]:
    return [parameter.name for parameter in fields(PATTERNS[name]) if parameter.init]


def _is_required(parameter: Field[Any]) -> bool:
    return parameter.default is MISSING


def _spliced(items: Iterable[Any]) -> list[Any]:
    """The items, with the numbers of every `_Several` in its place."""
    return [one for item in items for one in (item if isinstance(item, _Several) else [item])]


def _read(path: str) -> _Several:
    """The numbers of a text file. Bounded, so that an endless device is refused and a pipe is not."""
    if not path:
        raise AttnspanError("expected a path after @, got nothing")
    try:
        with open(os.path.expanduser(path), "rb") as file:
            content = file.read(FILE_BYTES + 1)
    except FileNotFoundError:
        raise AttnspanError(f"expected a file of lengths, got {path!r}, which does not exist") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise AttnspanError(f"expected a file of lengths, got {path!r}, which cannot be read: {reason}") from None
    if len(content) > FILE_BYTES:
        raise AttnspanError(f"expected a file of at most {FILE_BYTES} bytes, got {path!r}, which is longer")
    return _numbers(path, content.decode("utf-8", errors="replace"))


def _numbers(path: str, content: str) -> _Several:
    found = _Several()
    for line, text in enumerate(content.splitlines(), start=1):
        for word in text.partition("#")[0].replace(",", " ").split():
            try:
                found.append(number(word))
            except AttnspanError as error:
                raise AttnspanError(f"{path!r}, line {line}: {error}") from None
    if not found:
        raise AttnspanError(f"expected a file of lengths, got {path!r}, which holds no number")
    return found


# ---- writing -------------------------------------------------------------------------------------------


def _grouped(mask: Mask, *loose: type[Mask]) -> str:
    return f"({write(mask)})" if isinstance(mask, loose) else write(mask)


def _written_arguments(mask: Any) -> Iterable[str]:
    for parameter in fields(mask):
        if not parameter.init:
            continue
        value = getattr(mask, parameter.name)
        if not _is_required(parameter):
            if value != parameter.default and not (isinstance(mask, Tree) and set(value) == {1}):
                yield f"{parameter.name}={_written(value)}"
        elif isinstance(mask, LISTED):
            rows = value[0] if isinstance(mask, Documents) and len(value) == 1 else value
            yield _written(rows)[1:-1]
        else:
            one_for_all = isinstance(mask, PrefixLM) and len(value) == 1
            yield _written(value[0] if one_for_all else value)


def _written(value: Any) -> str:
    """
    >>> _written((4, 4, 4, 1)), _written(((1, 2), (3,)))
    ('[4*3, 1]', '[[1, 2], [3]]')
    """
    if not isinstance(value, Sequence) or isinstance(value, str):
        return str(value)
    if any(isinstance(item, Sequence) for item in value):
        return f"[{', '.join(map(_written, value))}]"
    runs = ((item, len(list(group))) for item, group in groupby(value))
    return f"[{', '.join(f'{item}*{n}' if n > 1 else f'{item}' for item, n in runs)}]"
