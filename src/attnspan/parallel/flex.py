"""flex_attention of a session: torch's signature, shards in place of whole tensors, masks and positions global.

>>> import torch
>>> import attnspan as span
>>> from torch.nn.attention.flex_attention import create_block_mask
>>> def past(b, h, q_idx, kv_idx):
...     return q_idx >= kv_idx
>>> def rank(world):
...     cp = span.ContextParallel(world, seq_len=256, mask=span.Causal())
...     query, key, value = (cp.shard(x, dim=2) for x in torch.ones(3, 1, 2, 256, 8).unbind())
...     whole = create_block_mask(past, None, None, 256, 256, device="cpu")
...     return cp.flex_attention(query, key, value, block_mask=whole).shape
>>> span.testing.loopback(ranks=2).run(rank)
[torch.Size([1, 2, 128, 8]), torch.Size([1, 2, 128, 8])]

A call passes its mask and score_mod as functions, which count as what they compute at the time of the call.
attentions.py finds or makes the attention for them. Compiled code has to be given a `SessionAttention` instead.

Shapes: query (B, H, S, D), key (B, Hk, S, D), value (B, Hk, S, Dv), S this rank's tokens.
"""

from __future__ import annotations

import torch
from torch.nn.attention.flex_attention import AuxOutput

from attnspan.attention.inputs import Inputs
from attnspan.errors import AttentionError
from attnspan.parallel.attentions import Attentions, SessionAttention
from attnspan.parallel.call_args import FlexArgs, FlexResult
from attnspan.parallel.checkpoint_checks import CallContext
from attnspan.parallel.eager import eagerly, skip_frames
from attnspan.parallel.flex_checks import check_args, check_session_attention, check_single, check_unsplit
from attnspan.parallel.run_attention import run_attention

UNBOUND = (
    "under torch.compile, block_mask must be an attention that was made outside: "
    "block_mask=cp.attention_for(block_mask, score_mod=...); or compile without fullgraph=True"
)


def flex_attention(
    attentions: Attentions, args: FlexArgs, name: str | None = None, context: CallContext = "eager"
) -> FlexResult:
    """flex_attention of a session. `name` is the mask that a scope was opened for, if it was."""
    spec, block_mask = attentions.spec, args.block_mask
    check_args(args, spec)
    if isinstance(block_mask, SessionAttention):
        check_session_attention(block_mask, args, spec)
        attend, captured = block_mask.by_context[context], block_mask.captured.for_query(args.query)
    else:
        spec.check_scale(args.scale)
        if torch.compiler.is_dynamo_compiling():  # functions are traced between two graphs, if there may be two
            torch._dynamo.graph_break(msg=UNBOUND)
        elif torch.compiler.is_compiling():
            raise AttentionError(UNBOUND)
        attend, captured = eagerly(Attentions.for_call)(attentions, args, name)
    check_single(attend.plan.mask, args.query)
    if captured or attend.plan.mask.heads > 1 or attend.bound.score is not None:
        check_unsplit(args)
    out, lse = run_attention(spec, attend, Inputs(*args[:3], captured=captured, return_lse=args.wants_lse))
    if args.return_aux is not None:
        return out, AuxOutput(lse=lse if args.return_aux.lse else None, max_scores=None)
    return (out, lse) if args.return_lse else out


skip_frames(flex_attention.__code__)
