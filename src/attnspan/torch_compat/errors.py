"""Refusals that are also what torch raises, for programs that catch torch's.

Every error of this library is a ValueError. Where torch raises another kind for the same mistake, the refusal here is
of both kinds::

    rotate methods, attn_mask, keys of another length    AttentionNotImplemented    NotImplementedError
    tasks that do not divide among groups                LayoutNotImplemented       NotImplementedError
    indices that are no (1, S) or (B, S)                 LayoutAssertion            AssertionError
    inputs of a style that are no tensors                AttentionAssertion         AssertionError
    buffers on several devices, or other placements      ShardAssertion             AssertionError
    a BlockMask where a rank has no tokens               ShardNotImplemented        NotImplementedError
    computed buffers that require gradients              ShardRuntime               RuntimeError
    a pool without enough pages                          PoolAssertion              AssertionError
    values and masks that do not fit the pages           PageRuntime                RuntimeError
    a row of the page table that is not there            PageIndex                  IndexError
"""

from attnspan.errors import AttentionError, LayoutError, PageError, PoolExhausted, ShardError


class AttentionNotImplemented(AttentionError, NotImplementedError):
    """Attention that torch's context parallelism does not serve either."""


class AttentionAssertion(AttentionError, AssertionError):
    """Inputs of attention that are not what they must be."""


class LayoutNotImplemented(LayoutError, NotImplementedError):
    """An order that torch does not serve either."""


class LayoutAssertion(LayoutError, AssertionError):
    """Indices of a load balancer that are not what they must be."""


class ShardAssertion(ShardError, AssertionError):
    """Buffers that cannot be cut together."""


class ShardNotImplemented(ShardError, NotImplementedError):
    """A part of a BlockMask that torch does not make either."""


class ShardRuntime(ShardError, RuntimeError):
    """A buffer that cannot be cut in place."""


class PageRuntime(PageError, RuntimeError):
    """Values or masks that do not fit the pages; nothing was written."""


class PageIndex(PageError, IndexError):
    """A row that the page table does not have."""


class PoolAssertion(PoolExhausted, AssertionError):
    """Fewer pages are free than are needed; nothing was changed. It says so in torch's words first."""

    def __str__(self) -> str:
        return f"requested {self.needed} pages but there are only {self.free} empty pages; {super().__str__()}"
