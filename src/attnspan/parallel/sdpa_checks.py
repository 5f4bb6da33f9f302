"""What a session under one of its masks accepts of SDPA's arguments; everything else is refused by name.

[Note: is_causal] SDPA's `is_causal` and the session's mask say the same thing twice, so they must agree: True is for
masks in which no query sees a later key, False for the others. A mask in which queries see neither earlier nor later
keys fits both, and so does a rank of at most one query: models write ``is_causal=query.shape[2] > 1``.
"""

from __future__ import annotations

from attnspan.errors import AttentionError
from attnspan.parallel.call_args import SdpaArgs
from attnspan.parallel.session_spec import SessionSpec
from attnspan.plan import Plan


class SdpaChecks:
    """The checks of calls under one mask, whose plan is given."""

    def __init__(self, spec: SessionSpec, plan: Plan):
        self.spec, self.tokens = spec, spec.sharding.tokens
        self.mask, self.rows = plan.mask, plan.batch_rows
        bands = [band for row in range(plan.batch_rows) for band in plan.bands(row)]
        self.sees_later = any(band.hi > 0 for band in bands)
        self.sees_earlier = any(band.lo < 0 for band in bands)

    def check_args(self, args: SdpaArgs) -> None:
        query, key = args[:2]
        if min(query.dim(), key.dim()) > 1 and key.shape[-2] != query.shape[-2] == self.tokens:
            raise AttentionError(
                f"key must hold this rank's {self.tokens} of {self.spec.seq_len} tokens, got {key.shape[-2]}; shard it "
                "first, or where keys are of another sequence, attend by cp.cross(keys)(query, key, value) outside of "
                "this block, with `keys` that sequence's session"
            )
        if args.attn_mask is not None:
            raise AttentionError(
                f"attn_mask must be None inside cp.sdpa(): the session's mask is {self.mask!r}; describe yours there, "
                "as in ContextParallel(mesh, seq_len=..., mask=Causal() & Documents(lengths)) or, if it is a bool "
                "tensor of the whole sequence, mask=Mask.from_dense(attn_mask)"
            )
        self._check_causal(args)
        self._check_shapes(args)
        self.spec.check_scale(args.scale)

    def _check_causal(self, args: SdpaArgs) -> None:
        """See [Note: is_causal]."""
        if args.query.dim() >= 2 and args.query.shape[-2] <= 1:
            return
        if args.is_causal and self.sees_later:
            raise AttentionError(
                f"is_causal must be False: in the session's mask {self.mask!r} some queries see later keys; make the "
                "session with mask=... & Causal(), or call with is_causal=False"
            )
        if not args.is_causal and self.sees_earlier and not self.sees_later:
            raise AttentionError(
                f"is_causal must be True: in the session's mask {self.mask!r} no query sees a later key; call with "
                "is_causal=True, or make the session with a mask that is not causal, such as Full()"
            )

    def _check_shapes(self, args: SdpaArgs) -> None:
        query, key, value = args[:3]
        if query.dim() < 2 or key.dim() != query.dim() or value.dim() != query.dim():
            raise AttentionError(
                "query, key and value must be (..., heads, tokens, head dim), got shapes "
                f"{tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}"
            )
        if not query.shape[:-3] == key.shape[:-3] == value.shape[:-3]:
            raise AttentionError(
                "query, key and value must have the same dims before heads: they are not broadcast, got shapes "
                f"{tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}"
            )
        if self.rows > 1 and query.dim() != 4:
            raise AttentionError(
                f"query must be (batch, heads, tokens, head dim) for a mask of {self.rows} batch rows, got shape "
                f"{tuple(query.shape)}"
            )
        if not args.enable_gqa and query.dim() > 2 and query.shape[-3] != key.shape[-3]:
            raise AttentionError(
                f"enable_gqa must be True where query and key have different numbers of heads, got {query.shape[-3]} "
                f"and {key.shape[-3]}"
            )

    def has_usual_scale(self, args: SdpaArgs) -> bool:
        """Whether the scale is the one that the session's attention has."""
        if args.scale is None or 0 in (args.query.dim(), *args.query.shape[-1:]):  # which is refused later
            return True
        usual = self.spec.options.scale
        return args.scale == (args.query.shape[-1] ** -0.5 if usual is None else usual)
