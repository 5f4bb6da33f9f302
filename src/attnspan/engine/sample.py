"""One continuation of one prompt, as the scheduler sees it: tokens, and how many of them are in pages.

Everything about progress is in two numbers. Tokens [0, computed) have their keys in pages; tokens [computed,
len(tokens)) are still to be fed to the model, all of a prompt at first, one while decoding, everything again after
pages were taken away. When nothing is left to feed, the model's answer is the next token. So prompts, chunks of them,
decoding and recomputing are one case.

Ints only: knows nothing of models, tensors or text.
"""

from __future__ import annotations

from collections.abc import Hashable, MutableSequence
from dataclasses import dataclass, replace


@dataclass(slots=True, eq=False)
class Sample:
    """Sample `number` of the request that arrived as `arrival`-th; older ones come first.

    >>> sample = Sample(arrival=0, tokens=[5, 6, 7], most=8)
    >>> sample.rest
    3
    """

    arrival: int
    tokens: MutableSequence[int]  # in an array of 64 bits each the prefix cache reads them fastest
    most: int  # the most tokens it may ever have
    number: int = 0
    forks: int = 0  # samples that will be split off when its prompt is computed
    salt: Hashable = None
    version: int = 0  # of the model that it was begun with
    computed: int = 0
    seq: int | None = None  # its name in the pages, once it has some
    swapped: bool = False
    unshared: bool = False  # it must not begin on pages of others: see scheduler.py, [Note: alone]
    kept: int = 0  # tokens whose full pages were shown to the prefix cache
    beginning: int = 0  # the same for samples whose prompts have the same first page
    prompt: int = 0  # how many of the tokens are the prompt: all that there are at first

    def __post_init__(self) -> None:
        self.prompt = self.prompt or len(self.tokens)

    def split(self) -> list[Sample]:
        """The samples that waited for the prompt, with the same tokens; they have no pages yet."""
        return [
            replace(self, number=self.number + fork, seq=None, tokens=self.tokens[:], forks=0)
            for fork in range(1, 1 + self.forks)
        ]

    @property
    def kept_as(self) -> Hashable:
        """The salt of its pages."""
        return self.version, self.salt

    @property
    def order(self) -> tuple[int, int]:
        """The order of samples: by arrival, then by number."""
        return self.arrival, self.number

    @property
    def rest(self) -> int:
        """Tokens to feed."""
        return len(self.tokens) - self.computed
