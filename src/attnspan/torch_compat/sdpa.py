"""SDPA as torch's context parallelism has it: causal or full, as each call says.

`ContextParallel.sdpa()` compares calls with the one mask of a session; here a session has two, and `is_causal` chooses.
Everything else, from how calls are seen to what is refused, is that of `attnspan.parallel.sdpa`.

[Note: backward inside] torch's programs run forward and backward inside one ``with context_parallel(...)``, with
activation checkpointing between. Even so, the second run of a region is not in the context: `Tensor.backward` is a
torch function, during which the mode is off, and autograd has threads of its own. So a region that calls attention is
given a scope around its second run. If the context was left by then, the buffers are no longer what they were, and that
raises.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, get_args
from weakref import WeakSet

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from attnspan.attention import Attention
from attnspan.errors import AttentionError
from attnspan.masks import Causal, Full
from attnspan.parallel.attentions import SessionAttention
from attnspan.parallel.call_args import FlexArgs, FlexResult, SdpaArgs
from attnspan.parallel.checkpoint_checks import CallContext, CheckpointChecks
from attnspan.parallel.checkpoint_regions import regions, rerun_through
from attnspan.parallel.handler import AttentionHandler, SessionHandler
from attnspan.parallel.sdpa import AttentionMode
from attnspan.parallel.session import ContextParallel
from attnspan.parallel.session_spec import SessionSpec
from attnspan.torch_compat.errors import AttentionNotImplemented

MASKS = {"causal": Causal(), "full": Full()}


class CausalOrFull(AttentionHandler):
    """Causal or full attention of a session, as each call of SDPA says. flex_attention brings its mask.

    `check` runs before each call, instead of what a session checks by itself.
    """

    def __init__(self, session: ContextParallel, check: Callable[[], None] | None = None):
        checks: CheckpointChecks | None = None if check is None else dict.fromkeys(get_args(CallContext), check)
        self.spec = session.spec
        self._causal, self._full = (CompatHandler(session.attentions, name, checks) for name in MASKS)
        self._flex = SessionHandler(session.attentions, None, checks)

    def sdpa(self, context: CallContext, args: SdpaArgs) -> Tensor:
        return (self._causal if args.is_causal else self._full).sdpa(context, args)

    def flex(self, context: CallContext, args: FlexArgs) -> FlexResult:
        """A BlockMask that was made for this rank stands for the whole one."""
        whole: WholeMask | None = getattr(args.block_mask, PART, None)
        if whole is not None:
            if context == "eager":
                whole.check(self.spec)
            args = args._replace(block_mask=whole.mask if context == "eager" else whole)
        return self._flex.flex(context, args)


class CompatHandler(SessionHandler):
    """A session's attention, with torch's kinds of errors."""

    def check_sdpa(self, args: SdpaArgs) -> None:
        if args.attn_mask is not None:
            raise AttentionNotImplemented(
                "attn_mask must be None: torch's names take causal and full attention alone; ContextParallel takes "
                "masks as data, as in ContextParallel(mesh, seq_len=..., mask=Mask.from_dense(attn_mask))"
            )
        query, key = args[:2]
        if args.is_causal and query.dim() > 1 and key.dim() > 1 and query.shape[-2] != key.shape[-2]:
            raise AttentionNotImplemented(
                f"is_causal must be False where queries and keys are of different lengths, got {query.shape[-2]} and "
                f"{key.shape[-2]} tokens here; other keys than the queries' are ContextParallel.cross"
            )
        super().check_sdpa(args)

    def refuse_together(self, attend: Attention, args: SdpaArgs, wrong: AttentionError) -> NoReturn:
        """Raise what is wrong, of its kind."""
        try:
            super().refuse_together(attend, args, wrong)
        except AttentionError as told:  # to all ranks, which may have more to say
            raise type(wrong)(str(told)) from None


class DeferredHandler(AttentionHandler):
    """`CausalOrFull`, of a sequence whose length is known once the first call comes."""

    def __init__(self, ask: Callable[[int], CausalOrFull]):
        self._ask = ask
        self._known: CausalOrFull | None = None

    def sdpa(self, context: CallContext, args: SdpaArgs) -> Tensor:
        return self._handler(context, args.query).sdpa(context, args)

    def flex(self, context: CallContext, args: FlexArgs) -> FlexResult:
        return self._handler(context, args.query).flex(context, args)

    def _handler(self, context: CallContext, query: Tensor) -> CausalOrFull:
        if self._known is None:
            if context != "eager":
                raise AttentionError("under torch.compile the length must be known: give context_parallel its buffers")
            local = query.to_local() if isinstance(query, DTensor) else query
            self._known = self._ask(local.shape[-2] if local.dim() > 1 else 0)
        return self._known


PART = "attnspan_part"
"""Where a BlockMask of this rank's rows keeps what it is a part of."""


class WholeMask(SessionAttention):
    """The whole mask of a BlockMask that was made for one rank."""

    def check(self, spec: SessionSpec) -> None:
        """Refuse tensors that lie in another order."""
        mine, theirs = self.spec, spec
        if (mine.layout, mine.seq_len) != (theirs.layout, theirs.seq_len):
            raise AttentionError(
                f"block_mask was made for {mine.seq_len} tokens in {mine.layout!r}, and {theirs.seq_len} lie in "
                f"{theirs.layout!r}; give both the same load_balancer"
            )


class Lifetime:
    """How long a context lasts; regions that first ran in it may run again for as long as it does.

    Regions that were around when it began are not its business: their second run begins another.
    """

    def __init__(self, mode: AttentionMode) -> None:
        self.mode = mode
        self.over = False
        self._around = [region.name for region in regions()]
        self._watched: WeakSet[Any] = WeakSet()

    def watch_regions(self) -> None:
        """Watch the regions around a call of attention. See [Note: backward inside]."""
        for region in regions(torch.is_grad_enabled()):
            ours = not any(region.name is name for name in self._around if name is not None)
            if ours and not region.recomputing and region.name not in self._watched:
                self._watch(region.name)

    def _watch(self, region: Any) -> None:
        """From here on the region runs again in a scope of this context, or not at all."""
        if not rerun_through(region, self._run):
            raise AttentionError(f"activation checkpointing by {type(region).__name__} is not known; {ELSE}")
        self._watched.add(region)

    def _run(self, again: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.over:
            raise AttentionError(f"a checkpointed region runs again after context_parallel was left; {ELSE}")
        with self.mode:
            return again(*args, **kwargs)


ELSE = "run backward inside the context, or use ContextParallel.attach(model)"
