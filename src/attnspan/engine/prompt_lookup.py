"""Prompt-lookup speculation: drafts of a sample's next tokens, found where its text repeats itself.

The draft is what followed the latest earlier occurrence of the last few tokens, in the prompt or the answer. It is fed
behind the sample's own token, in the same step, so the model gives logits after each of its tokens. The token chosen
from the first row is compared with the first of the draft, and so on: as long as they are equal, the next row counts
too. Keys of the rest are trimmed. The tokens are those of as many steps without drafts, greedy or sampled, because a
draw depends on seed, sample and position alone (sampler.py).

The index is a cache of the tokens: it knows how many it has seen, and may be made again at any time. Ints only.
"""

from __future__ import annotations

from collections.abc import Sequence

SIZES = (4, 2)
"""Tokens that are looked up, longest first: more of them mislead less often, fewer are found sooner."""


class PromptLookup:
    """Where each run of tokens of a sample last occurred; proposes at most `num_tokens`.

    >>> PromptLookup(num_tokens=3).draft([7, 8, 5, 6, 9, 7, 8])
    (5, 6, 9)
    >>> PromptLookup(num_tokens=5).draft([1, 2, 1, 2])  # a text that repeats what it is proposed
    (1, 2, 1, 2, 1)
    """

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self._ends: dict[tuple[int, ...], int] = {}  # of a run: how many tokens there are up to its end
        self._seen = 1

    def copy(self) -> PromptLookup:
        """For a fork, which goes its own way."""
        other = PromptLookup(self.num_tokens)
        other._ends, other._seen = self._ends.copy(), self._seen
        return other

    def draft(self, tokens: Sequence[int], most: int | None = None) -> tuple[int, ...]:
        """What may come after these tokens, the same as last time with more behind them; () if nothing is known."""
        length = len(tokens)
        for end in range(self._seen, length):
            for size in SIZES:
                if size <= end:
                    self._ends[tuple(tokens[end - size : end])] = end
        self._seen = length
        count = self.num_tokens if most is None else min(most, self.num_tokens)
        for size in SIZES:
            found = self._ends.get(tuple(tokens[max(length - size, 0) :]))
            if found is not None:
                return tuple(tokens[found + step % (length - found)] for step in range(count))
        return ()
