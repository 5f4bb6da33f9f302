"""Text from tokens as they come, and the stop strings where it ends.

A token is seldom a text of its own: the bytes of one character may be spread over several, and some tokenizers write
the space before a word only if a word came before. So the newest tokens are decoded together with a few before them, at
first those of the prompt, and the text that is new is what the decoded text grew by: a prompt and its answer can be
joined. A character whose bytes are not all there waits for the rest.

[Note: held back] A stop string may begin in one token and end in a later one. Text that may still become one is held
back, so that nothing is reported that is cut off later. Joined, the pieces are the text.

[Note: special tokens] A special token is not part of the text, and is not decoded with others. A stop string may name
it, as in stop="<|im_end|>": each such token is replaced by a private-use character in the held-back text and in the
stop strings, which is removed before anything is reported. A stop string that is only a part of its name does not match
it.

[Note: cleaned texts] A tokenizer may clean up spaces (`clean_up_tokenization_spaces`), which changes earlier text:
"do n ' t" becomes "don't" with its last token. Tokens are decoded without, and the text is cleaned up to a space that
no rule reaches across; later text waits, but is searched for stop strings as it would be now.

Knows nothing of models or requests.
"""

from __future__ import annotations

from collections.abc import Sequence, Sized
from typing import Any, Protocol

from attnspan.errors import EngineError

CONTEXT = 8
"""Tokens of a prompt that an answer is read after."""

REPLACEMENT = "\ufffd"
"""What decoding puts where bytes are not yet a letter."""

SYMBOLS = range(0xF0000, 0xFFFFE)
"""Characters for private use, which stand for special tokens. See [Note: special tokens]."""


class Tokenizer(Protocol):
    """A tokenizer, such as those of transformers."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = ...) -> str: ...


def check_tokenizer(tokenizer: object, vocabulary: int) -> None:
    """EngineError for what is no tokenizer, or one with more tokens than the model knows."""
    if tokenizer is None:
        return
    for method in ("encode", "decode"):
        if not callable(getattr(tokenizer, method, None)):
            raise EngineError(f"tokenizer must have encode and decode, got {type(tokenizer).__name__}")
    size = len(tokenizer) if isinstance(tokenizer, Sized) else 0
    if size > vocabulary:
        raise EngineError(
            f"tokenizer does not fit the model: it has {size} tokens, and the model knows {vocabulary}; give the one "
            "that the model was trained with"
        )


class Detokenizer:
    """The text of one sample `after` a prompt: `push` a token, get the text that it settles.

    >>> class Letters:
    ...     def decode(self, token_ids, skip_special_tokens=True):
    ...         return "".join(map(chr, token_ids))
    >>> detokenizer = Detokenizer(Letters(), stop=("end",))
    >>> [detokenizer.push(ord(letter)) for letter in "an end"]
    ['a', 'n', ' ', '', '', '']
    >>> detokenizer.stopped
    True
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = (), after: Sequence[int] = ()) -> None:
        self.tokenizer = tokenizer
        self.stopped = False
        self._cleaner = SpaceCleaner(tokenizer) if cleans(tokenizer) else None
        self._uncleaned: dict[str, Any] = {"clean_up_tokenization_spaces": False} if self._cleaner is not None else {}
        self._stops = StopStrings(stop)
        self._special: dict[int, str] = {}  # those that were met, and their names
        self._tokens = list(after[-CONTEXT:])
        self._before = 0
        self._read = len(self._tokens)  # tokens [before, read) were returned, and are decoded again with the next
        self._length = len(text := self._decoded(0))  # of what those from `before` on are, when last decoded
        if text.endswith(REPLACEMENT):
            self._before, self._length = self._read, 0  # a prompt that ends within a letter
        self._reported = self._length  # how much of that was returned

    def push(self, token: int) -> str:
        """What the text grew by, as far as it is settled."""
        if token not in self._special:
            self._tokens.append(token)
            whole = self._decoded(self._before)
            if len(whole) > self._length or not self._is_special(token):
                return self._settled(self._grown(whole))
            self._tokens.pop()
        return self._settled(self._stops.symbol(self._special[token]))

    def end(self) -> str:
        """What was held back, when no more tokens come."""
        if self.stopped:
            return ""
        rest = self._decoded(self._before)[self._reported :]
        self._reported += len(rest)
        return self._settled(rest, ended=True)

    def _grown(self, whole: str) -> str:
        """What is new in the text of the tokens from `before` on, up to a letter that is not there yet."""
        settled = whole.rstrip(REPLACEMENT)
        new = settled[self._reported :]
        self._reported, self._length = max(self._reported, len(settled)), len(whole)
        if len(settled) == len(whole) and new:
            self._before, self._read = self._read, len(self._tokens)
            self._reported = self._length = len(self._decoded(self._before))
        return new

    def _settled(self, new: str, ended: bool = False) -> str:
        """Clean new text, look for stop strings, and hold back what may become one."""
        tentative = ""
        if self._cleaner is not None:
            new, tentative = self._cleaner.cleaned(new, ended or new[:1] in self._stops.symbols)
        text, self.stopped = self._stops.cut(new, tentative, ended)
        return text

    def _is_special(self, token: int) -> bool:
        """Whether a token has a name and no text; it is remembered."""
        name = self.tokenizer.decode([token], skip_special_tokens=False)
        if not name or self.tokenizer.decode([token], skip_special_tokens=True):
            return False
        self._special[token] = name
        return True

    def _decoded(self, first: int) -> str:
        """The text of the tokens from `first` on, before it is cleaned."""
        tokens = self._tokens[first:]
        return self.tokenizer.decode(tokens, skip_special_tokens=True, **self._uncleaned) if tokens else ""


class StopStrings:
    """Stop strings, and text that is held back because it may become one."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = tuple(texts)
        self.symbols: dict[str, str] = {}  # of special tokens that a text names: symbol and name
        self._with_symbols: tuple[str, ...] = ()  # the texts that do
        self._held = ""

    def symbol(self, name: str) -> str:
        """What stands for the special token of this name, also in texts that name it; nothing if none does."""
        found = next((symbol for symbol, each in self.symbols.items() if each == name), "")
        if found or not any(name in text for text in self.texts):
            return found
        new = chr(SYMBOLS[len(self.symbols)])
        self.symbols[new] = name
        # The longest first: a name may be a part of another.
        named = sorted(self.symbols.items(), key=lambda pair: -len(pair[1]))
        texts = []
        for text in self.texts:
            for symbol, each in named:
                text = text.replace(each, symbol)
            texts.append(text)
        self._with_symbols = tuple(text for text, plain in zip(texts, self.texts, strict=True) if text != plain)
        return new

    def cut(self, new: str, tentative: str, ended: bool) -> tuple[str, bool]:
        """What is settled of a text that continues with `new`, and whether it stops there.

        `tentative` comes after it and may yet be another; at the end nothing is held back.
        """
        text = self._held + new
        place = self._first(text + tentative)
        if place is not None:
            self._held = ""
            return self._shown((text + tentative)[:place]), True
        kept = len(text) if ended else self._beginning(text)
        self._held = text[kept:]
        return self._shown(text[:kept]), False

    def _first(self, text: str) -> int | None:
        """Where the first stop string begins, in the visible text or with special tokens."""
        shown, places = self._places(text)
        found = [places[place] for place in (shown.find(each) for each in self.texts) if place >= 0]
        found += [place for place in (text.find(each) for each in self._with_symbols) if place >= 0]
        return min(found, default=None)

    def _beginning(self, text: str) -> int:
        """Where a possible stop string begins; the end of the text if there is none."""
        shown, places = self._places(text)
        begun = places[len(shown) - _overlap(shown, self.texts)]
        return min(begun, len(text) - _overlap(text, self._with_symbols))

    def _places(self, text: str) -> tuple[str, Sequence[int]]:
        """What is shown of a text, and where each letter of that, and its end, is in the text."""
        if not self.symbols:
            return text, range(len(text) + 1)
        places = [place for place, letter in enumerate(text) if letter not in self.symbols]
        return self._shown(text), [*places, len(text)]

    def _shown(self, text: str) -> str:
        return "".join(letter for letter in text if letter not in self.symbols) if self.symbols else text


def _overlap(text: str, stops: Sequence[str]) -> int:
    """The most letters at the end of a text that one of `stops` begins with, and is longer than."""
    beginnings = (stop[:n] for stop in stops for n in range(1, len(stop)))
    return max((len(each) for each in beginnings if text.endswith(each)), default=0)


def cleans(tokenizer: object) -> bool:
    """Whether a tokenizer cleans up spaces when it decodes; transformers does not for BPE, unless forced to."""
    if not getattr(tokenizer, "clean_up_tokenization_spaces", False):
        return False
    model = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
    forced = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
    return type(model).__name__ != "BPE" or bool(getattr(tokenizer, forced, False))


class SpaceCleaner:
    """Text as its tokenizer cleans it, piece by piece. See [Note: cleaned texts]."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._waiting = ""

    def cleaned(self, new: str, ended: bool) -> tuple[str, str]:
        """The part of the cleaned text that is final after `new`, and the rest as it would be cleaned now."""
        text = self._waiting + new
        place = len(text) if ended else next((at for at in range(len(text) - 2, 0, -1) if _is_apart(text, at)), 0)
        self._waiting = text[place:]
        clean = self._tokenizer.clean_up_tokenization
        return clean(text[:place]), clean(self._waiting)


def _is_apart(text: str, at: int) -> bool:
    """Whether no rule reaches across the place before a letter: all rules begin with a space, and one has two."""
    return text[at] == " " and text[at + 1] not in " '" and text[at - 2 : at] != " '"
