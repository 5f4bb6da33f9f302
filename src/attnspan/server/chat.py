"""Texts and messages to tokens, in a thread of their own: a long text does not keep the event loop waiting.

A tokenizer is not made for two threads, so each has a copy: the one that encodes, and the event loop, which asks for
single tokens. The engine's own belongs to the thread that steps.
Messages become tokens by the tokenizer's chat template, as transformers applies it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from typing import Any, TypeVar

from attnspan.server.api_errors import ApiError

T = TypeVar("T")

REPLACEMENT = "\ufffd"


class ChatTokenizer:
    """What a server asks of a tokenizer, such as those of transformers."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self._for_pieces = deepcopy(tokenizer), deepcopy(tokenizer)
        self._thread = ThreadPoolExecutor(1, "attnspan-tokenizer")  # which ends with this object

    async def _in_thread(self, function: Callable[..., T], *args: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)

    async def encode(self, text: str) -> list[int]:
        """The tokens of a text, as the engine has them."""
        return list(await self._in_thread(self._tokenizer.encode, text))

    async def apply_template(self, messages: list[dict[str, Any]]) -> list[int]:
        """The tokens of a conversation, up to where the assistant speaks."""
        if getattr(self._tokenizer, "chat_template", None) is None:
            raise ApiError(
                400, "the model's tokenizer has no chat template; use /v1/completions", code="no_chat_template"
            )
        return await self._in_thread(self._templated, messages)

    def _templated(self, messages: list[dict[str, Any]]) -> list[int]:
        try:
            text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # templates refuse by raising, and are code of the model's own
            reason = " ".join(str(error).split())[:200]
            raise ApiError(
                400, f"the model's chat template refuses these messages: {reason}", param="messages"
            ) from None
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    async def decode(self, tokens: list[int]) -> str:
        """The text of a prompt of tokens."""
        return str(await self._in_thread(self._tokenizer.decode, tokens))

    def piece(self, token: int) -> tuple[str, list[int] | None]:
        """One token as text, and as bytes, where it is a text of its own."""
        text = self._for_pieces.decode([token], skip_special_tokens=False)
        return text, None if REPLACEMENT in text else list(text.encode())
