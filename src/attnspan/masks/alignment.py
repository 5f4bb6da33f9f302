"""How the query axis meets the key axis when their lengths differ. See [Note: lengths] in mask.py.

`offset` is what to add to a query's index to get its position on the key axis::

    4 queries, 6 keys      top: offset 0          bottom: offset 2
                           query 0 is at key 0    query 3 is at key 5
"""

from __future__ import annotations

from typing import Literal

from attnspan.errors import MaskError, one_of

Align = Literal["top", "bottom"] | None


def check_align(align: Align) -> None:
    """Refuse an alignment that does not exist."""
    if align is not None:
        one_of("align", align, ["top", "bottom"], error=MaskError)


def offset(align: Align, q_len: int | None, kv_len: int | None) -> int:
    """The position of query 0 on the key axis, refused where `align` must say how the axes meet, and does not.

    Lengths that are not known are taken as equal.

    >>> offset("bottom", 4, 6), offset("top", 4, 6), offset(None, 6, 6)
    (2, 0, 0)
    """
    if align == "bottom":
        if q_len is None or kv_len is None:
            raise MaskError('align="bottom" needs both lengths: call mask_mod(q_len, kv_len)')
        return kv_len - q_len
    if align is None and q_len != kv_len:
        raise MaskError(
            f"align must be given when q_len ({q_len}) and kv_len ({kv_len}) differ: "
            '"top" if query 0 meets key 0, "bottom" if the last query meets the last key'
        )
    return 0
