"""Checks of flex_attention's arguments: what a session does not support is refused by name, equally on every rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from attnspan.errors import AttentionError, ShardError
from attnspan.masks import Mask
from attnspan.parallel.call_args import FlexArgs
from attnspan.parallel.dtensors import is_split
from attnspan.parallel.session_spec import SessionSpec

if TYPE_CHECKING:
    from attnspan.parallel.attentions import SessionAttention

PROMISES = ("ROWS_GUARANTEED_SAFE", "BLOCKS_ARE_CONTIGUOUS")
"""Options that describe the mask, and change nothing."""

USUAL = {"BACKEND": "AUTO", "PRESCALE_QK": False, "WRITE_DQ": True, "FORCE_USE_FLEX_ATTENTION": False, "USE_TMA": False}
"""Options with their default values."""


def check_args(args: FlexArgs, spec: SessionSpec) -> None:
    """Refuse unsupported arguments."""
    query, key, value = args[:3]
    if not torch.compiler.is_compiling():
        for tensor in (query, key, value):
            spec.sharding.check_mark(tensor)
    if query.dim() != 4 or key.dim() != 4 or value.dim() != 4:
        raise AttentionError(
            "query, key and value must be (batch, heads, tokens, head dim), got shapes "
            f"{tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}"
        )
    if not query.shape[3]:
        raise AttentionError(f"query must have a head dim of at least 1, got shape {tuple(query.shape)}")
    if not args.enable_gqa and query.shape[1] != key.shape[1]:
        raise AttentionError(
            "enable_gqa must be True where query and key have different numbers of heads, got shapes "
            f"{tuple(query.shape)} and {tuple(key.shape)}"
        )
    if args.return_aux is not None and args.return_lse:
        raise AttentionError("return_lse and return_aux must not both be given; use return_aux=AuxRequest(lse=True)")
    if args.return_aux is not None and args.return_aux.max_scores:
        raise AttentionError("return_aux: max_scores are not served over ranks; ask for AuxRequest(lse=True)")
    if args.kernel_options:
        _check_options(args.kernel_options)


def _check_options(options: Mapping[str, object]) -> None:
    for name, value in options.items():
        plain = name.removeprefix("fwd_").removeprefix("bwd_")
        if plain not in PROMISES and not (plain in USUAL and USUAL[plain] == value):
            raise AttentionError(
                f"kernel_options: {name}={value!r} cannot be honoured over ranks, where one call is computed in parts; "
                "leave it out, and choose the kernel by ContextParallel(..., kernel=...)"
            )


def check_session_attention(known: SessionAttention, args: FlexArgs, spec: SessionSpec) -> None:
    if known.spec is not spec:
        raise AttentionError(
            "block_mask is an attention of another session; ask for it by the session that sharded the tensors"
        )
    if args.score_mod is not None and args.score_mod is not known.score_mod:
        raise AttentionError(
            "score_mod must be that of the attention: cp.attention_for(block_mask, score_mod=score_mod)"
        )
    if args.scale is not None and args.scale != known.scale:
        usual = known.scale is None and args.scale == args.query.shape[-1] ** -0.5
        if not usual:
            raise AttentionError(
                f"scale must be that of the attention, {known.scale}, got {args.scale}: cp.attention_for(mask, scale=)"
            )


def check_lengths(block_mask: BlockMask, spec: SessionSpec) -> None:
    wanted, tokens = (spec.seq_len, spec.seq_len), spec.sharding.tokens
    lengths = tuple(block_mask.seq_lengths)
    if lengths == wanted:
        return
    if lengths in ((tokens, spec.seq_len), (tokens, tokens)):
        raise AttentionError(
            f"block_mask must be that of the whole sequence, of lengths {wanted}, got {lengths}: a rank's part "
            "of it; pass the one that it was made from, and leave the rest to the session"
        )
    raise AttentionError(
        f"block_mask must be that of the whole sequence, of lengths {wanted}, got {lengths}; another length is "
        "another session: cp.with_mask(mask, seq_len=...)"
    )


def check_single(mask: Mask, query: Tensor) -> None:
    """See [Note: single rows and heads] in block_masks.py."""
    for dim, what in enumerate(("batch row", "head")):
        if mask.single[dim] and query.shape[dim] != 1:
            raise AttentionError(
                f"block_mask was made for one {what}, and its mask_mod reads the index of it, got query of shape "
                f"{tuple(query.shape)}; give create_block_mask the number of {what}s"
            )


def check_filled(sizes: list[int]) -> None:
    """Refuse to make BlockMasks, on every rank, if a rank has no queries."""
    if 0 in sizes:
        raise ShardError(f"block_mask: rank {sizes.index(0)} has no tokens, and there is no BlockMask of no queries")


def check_unsplit(args: FlexArgs) -> None:
    """Refuse DTensors that are sharded on batch or heads: programs need the global index of both."""
    if is_split(args.query):
        raise AttentionError(
            "query must have all batch rows and heads here for a score_mod, or a mask of several heads: it is a "
            "DTensor that is sharded on them; pass its to_local() and functions of local indices"
        )
