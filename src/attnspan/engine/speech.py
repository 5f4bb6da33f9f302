"""Text from tokens as they come, and the places where it must stop.

A token is seldom a text of its own: bytes of one letter may be spread over several, and some tokenizers write the space
before a word only where a word came before. So the newest tokens are decoded together with a few before them, at first
those of the prompt, and what is new is what the text grew by: a prompt and its answer can be joined. A text that ends
in the middle of a letter waits for the rest of it.

[Note: held back] A text to stop at may begin in one token and end in a later one. What may still become one is held
back, so that nothing is ever told that is cut off later. Joined, the pieces are the text.

Knows nothing of models or requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

CONTEXT = 8
"""Tokens of a prompt that an answer is read after."""

UNFINISHED = "\ufffd"
"""What decoding puts where bytes are not yet a letter."""


class Tokenizer(Protocol):
    """What is asked of a tokenizer; those of transformers are such."""

    def encode(self, text: str) -> list[int]:
        """Tokens of a text."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = ...) -> str:
        """The text of tokens."""
        ...


class Speech:
    """The text of one sample `after` a prompt: `push` tokens, get what can be told.

    >>> class Letters:
    ...     def decode(self, token_ids, skip_special_tokens=True):
    ...         return "".join(map(chr, token_ids))
    >>> speech = Speech(Letters(), stop=("end",))
    >>> [speech.push(ord(letter)) for letter in "an end"]
    ['a', 'n', ' ', '', '', '']
    >>> speech.stopped
    True
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = (), after: Sequence[int] = ()) -> None:
        self.tokenizer, self.stop = tokenizer, tuple(stop)
        self.stopped = False
        self._tokens = list(after[-CONTEXT:])
        self._before = 0
        self._read = len(self._tokens)  # tokens [before, read) were told, and are decoded again with what comes next
        self._held = ""
        if self._tokens and self._decoded(0, self._read).endswith(UNFINISHED):
            self._before = self._read  # a prompt that ends within a letter

    def push(self, token: int) -> str:
        """What the text grew by, as far as it can be told."""
        self._tokens.append(token)
        known = self._decoded(self._before, self._read)
        whole = self._decoded(self._before, len(self._tokens))
        if len(whole) <= len(known) or whole.endswith(UNFINISHED):
            return ""
        self._before, self._read = self._read, len(self._tokens)
        return self._told(whole[len(known) :])

    def end(self) -> str:
        """What was held back, when no more tokens come."""
        if self.stopped:
            return ""
        known = self._decoded(self._before, self._read)
        whole = self._decoded(self._before, len(self._tokens))
        self._read = len(self._tokens)
        told = self._told(whole[len(known) :]) + self._held
        self._held = ""
        return told

    def _told(self, new: str) -> str:
        """See [Note: held back]."""
        text = self._held + new
        ends = [place for place in (text.find(stop) for stop in self.stop) if place >= 0]
        if ends:
            self.stopped, self._held = True, ""
            return text[: min(ends)]
        beginnings = (stop[:n] for stop in self.stop for n in range(1, len(stop)))
        kept = max((len(beginning) for beginning in beginnings if text.endswith(beginning)), default=0)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]

    def _decoded(self, first: int, last: int) -> str:
        return self.tokenizer.decode(self._tokens[first:last], skip_special_tokens=True)
