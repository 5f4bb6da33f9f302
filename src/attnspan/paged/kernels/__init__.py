"""Kernels over pages: (out, lse) of packed queries, over the pages that a `PagedMetadata` names (paged/metadata.py).

Each is a module with a `name`, and::

    supports(scoring, metadata, q, keys, values) -> None | reason      reads no values
    forward(scoring, metadata, q, keys, values) -> (out, lse)          out (T, H, Dv), lse (T, H)

q (T, H, D); keys (P, page_size, Hk, D) and values (P, page_size, Hk, Dv) are one layer's pages, Hk dividing H. lse is
the natural log, in float32 or wider, -inf for a query that saw no key, whose out is 0. An explicit request never falls
back: it is met, or refused with the kernel's own reason.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from attnspan.errors import KernelError, one_of
from attnspan.paged.kernels import decode, flex, gather, reference
from attnspan.paged.metadata import PagedMetadata, Pages
from attnspan.paged.scoring import Scoring

__all__ = ["KERNELS", "PagedKernel", "choose_paged_kernel"]


class PagedKernel(Protocol):
    """The interface that every kernel module has."""

    name: str

    def supports(self, scoring: Scoring, metadata: PagedMetadata, q: Tensor, keys: Pages, values: Pages) -> str | None:
        """None if the kernel computes this exactly, else the reason why it does not."""

    def forward(
        self, scoring: Scoring, metadata: PagedMetadata, q: Tensor, keys: Pages, values: Pages
    ) -> tuple[Tensor, Tensor]:
        """(out, lse)."""


KERNELS: dict[str, PagedKernel] = {kernel.name: kernel for kernel in (decode, gather, flex, reference)}
"""In the order in which "auto" asks them."""


def choose_paged_kernel(
    name: str, scoring: Scoring, metadata: PagedMetadata, q: Tensor, keys: Pages, values: Pages
) -> PagedKernel:
    """The kernel of that name, or for "auto" the first that can; raises KernelError if it cannot."""
    one_of("kernel", name, ["auto", *KERNELS], error=KernelError)
    if name != "auto":
        reason = KERNELS[name].supports(scoring, metadata, q, keys, values)
        if reason is not None:
            raise KernelError(f"kernel={name!r} cannot attend over these pages: {reason}; use auto")
        return KERNELS[name]
    reasons = []
    for kernel in KERNELS.values():
        reason = kernel.supports(scoring, metadata, q, keys, values)
        if reason is None and not (kernel is decode and decode.dense_is_faster(metadata, q)):
            return kernel
        reasons.append(reason or "")
    raise KernelError(f"no kernel can attend over these pages: {'; '.join(filter(None, reasons))}")
