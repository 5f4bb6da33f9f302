"""A sample: one continuation of one prompt, as the scheduler sees it.

Its progress is two numbers. Tokens [0, computed) have their keys in pages; tokens [computed, len(tokens)) are still to
be fed to the model: the whole prompt at first, one token while decoding, everything again after a preemption. When none
remains, the logits give the next token. So prefill, chunked prefill, decode and recomputation are one case.

Ints only: knows nothing of models, tensors or text.
"""

from __future__ import annotations

from collections.abc import Hashable, MutableSequence, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from attnspan.engine.prompt_lookup import PromptLookup

if TYPE_CHECKING:
    from attnspan.engine.model import EmbeddedPrompt


@dataclass(slots=True, eq=False)
class Sample:
    """Sample `number` of a request, by the number of that. Higher priorities come first, then older requests.

    >>> sample = Sample(request_number=0, tokens=[5, 6, 7], max_length=8)
    >>> sample.remaining
    3
    """

    request_number: int  # requests are numbered as they arrive
    tokens: MutableSequence[int]  # in an array of 64 bits each the prefix cache reads them fastest
    max_length: int  # the most tokens it is ever fed
    number: int = 0
    forks: int = 0  # samples that share its prompt, and start when that is computed
    salt: Hashable = None
    encoder_prompt: tuple[int, ...] = ()  # the prompt, if it is for an encoder
    version: int = 0  # of the model that it was begun with
    computed: int = 0
    seq: int = -1  # its sequence in the pages, -1 while it has none
    swapped: bool = False
    unshared: bool = False  # it must not start on cached pages: see scheduler.py, [Note: alone]
    cached: int = 0  # tokens whose full pages the prefix cache has been given
    first_page: int = 0  # a hash of the prompt's first page
    priority: int = 0
    embedded: EmbeddedPrompt | None = None  # its prompt, if it has images or sounds
    atomic_spans: Sequence[tuple[int, int]] = ()  # tokens [start, stop) that are computed in one step, ascending
    prompt_length: int = 0  # how many of the tokens are the prompt: all that there are at first
    adapter: str | None = None  # the name of the adapter that computes it
    lookup: PromptLookup | None = None  # with prompt-lookup speculation

    def __post_init__(self) -> None:
        self.prompt_length = self.prompt_length or len(self.tokens)

    def forget_pages(self) -> None:
        """Its pages were freed: all of its tokens have to be computed again."""
        self.seq, self.swapped, self.computed, self.cached = -1, False, 0, 0

    def split(self) -> list[Sample]:
        """The forks that waited for the prompt: the same tokens, no pages yet."""
        return [
            replace(
                self, number=self.number + fork, seq=-1, tokens=self.tokens[:], forks=0,
                lookup=None if self.lookup is None else self.lookup.copy(),
            )
            for fork in range(1, 1 + self.forks)
        ]  # fmt: skip

    @property
    def cache_salt(self) -> Hashable:
        """The salt of its pages in the prefix cache: pages of another version of the model, adapter or encoder prompt
        are not found."""
        return self.version, self.salt, self.encoder_prompt, self.adapter

    @property
    def content_ids(self) -> MutableSequence[int]:
        """The ids of its tokens in the prefix cache."""
        if self.embedded is None:
            return self.tokens
        ids = self.embedded.content_ids[:]
        ids.extend(self.tokens[self.prompt_length :])
        return ids

    def round_to_spans(self, count: int) -> int:
        """The most of its next `count` tokens that split no atomic span."""
        for start, stop in self.atomic_spans:
            if start < self.computed + count < stop:
                count = max(start - self.computed, 0)
        return count

    @property
    def order(self) -> tuple[int, int, int]:
        """The order of samples: by priority, then by the age of their request, then by number."""
        return -self.priority, self.request_number, self.number

    @property
    def remaining(self) -> int:
        """Tokens to feed."""
        return len(self.tokens) - self.computed
