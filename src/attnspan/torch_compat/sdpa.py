"""SDPA as torch's context parallelism has it: causal or full, as each call says.

`ContextParallel.sdpa()` compares calls with the one mask of a session; here a session has two, and `is_causal` chooses.
Everything else, from how calls are seen to what is refused, is that of `attnspan.parallel.sdpa`.

[Note: backward inside] torch's programs run forward and backward inside one ``with context_parallel(...)``, with
activation checkpointing between. Even so, the second run of a region does not find itself in the context: whoever calls
`Tensor.backward` calls a torch function, for which the mode steps aside, and autograd has threads of its own. So a
region that calls attention is given a block around its second run. If the context was left by then, the buffers are no
longer what they were, and that raises.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn
from weakref import WeakSet

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from attnspan.attention import Attention
from attnspan.errors import AttentionError
from attnspan.masks import Causal, Full
from attnspan.parallel.checkpoint_regions import regions, rerun_of
from attnspan.parallel.core import Core
from attnspan.parallel.flex import Flexed, Flexes, InBlock, Prepared
from attnspan.parallel.sdpa import Asked, Scope, Served, _rewired
from attnspan.parallel.session import ContextParallel
from attnspan.torch_compat.errors import AttentionNotImplemented

MASKS = {"causal": Causal(), "full": Full()}


class Either(InBlock):
    """Causal or full attention of a session, with the signatures of `Served`. flex_attention brings its mask."""

    name = None

    def __init__(self, session: ContextParallel, guard: Callable[[], None] | None = None):
        self.core, self.flexes, self.guard = session.core, session.attentions, guard
        self.causal, self.full = (
            Called(self.flexes, name) if guard is None else Guarded(self.flexes, name, guard) for name in MASKS
        )
        self.heads_now, self.heads_inner, self.heads_outer = map(_rewired, (self.now, self.inner, self.outer))

    def now(self, *args: Any, **kwargs: Any) -> Tensor:
        """In eager code."""
        return (self.causal if Asked(*args, **kwargs).is_causal else self.full).now(*args, **kwargs)

    def inner(self, *args: Any, **kwargs: Any) -> Tensor:
        """In compiled code, with its block."""
        return (self.causal if Asked(*args, **kwargs).is_causal else self.full).inner(*args, **kwargs)

    def outer(self, *args: Any, **kwargs: Any) -> Tensor:
        """In compiled code, inside a block of eager code."""
        return (self.causal if Asked(*args, **kwargs).is_causal else self.full).outer(*args, **kwargs)

    def _meant(self, asked: Flexed) -> Flexed:
        """A BlockMask that was made for this rank stands for the whole one."""
        part = getattr(asked.block_mask, PART, None)
        if part is None:
            return asked
        if not torch.compiler.is_compiling():
            part.check(self.core)
        whole = part if torch.compiler.is_compiling() else part.mask
        return asked._replace(block_mask=whole)

    def _before(self) -> None:
        if self.guard is None:
            super()._before()
        else:
            self.guard()


class Called(Served):
    """Served, with torch's kinds of errors."""

    def _check(self, asked: Asked) -> None:
        if asked.attn_mask is not None:
            raise AttentionNotImplemented(
                "attn_mask must be None: torch's names take causal and full attention alone; ContextParallel takes "
                "masks as data, as in ContextParallel(mesh, seq_len=..., mask=Mask.from_dense(attn_mask))"
            )
        query, key = asked[:2]
        if asked.is_causal and query.dim() > 1 and key.dim() > 1 and query.shape[-2] != key.shape[-2]:
            raise AttentionNotImplemented(
                f"is_causal must be False where queries and keys are of different lengths, got {query.shape[-2]} and "
                f"{key.shape[-2]} tokens here; other keys than the queries' are ContextParallel.cross"
            )
        super()._check(asked)

    def _refuse(self, attend: Attention, asked: Asked, wrong: AttentionError) -> NoReturn:
        try:
            super()._refuse(attend, asked, wrong)
        except AttentionError as told:  # to all ranks, who may have more to say
            raise type(wrong)(str(told)) from None


class Guarded(Called):
    """Served inside a context that also holds the backward pass. See [Note: backward inside]."""

    def __init__(self, flexes: Flexes, name: str, guard: Callable[[], None]):
        self.guard = guard
        super().__init__(flexes, name)

    def _before(self) -> None:
        self.guard()

    def _check_block(self) -> None:
        self.guard()

    def _check_session(self) -> None:
        self.guard()


class Later:
    """`Either`, of a sequence whose length is known once the first call comes."""

    def __init__(self, ask: Callable[[int], Either]):
        self.ask = ask
        self.known: Either | None = None
        self.heads_now, self.heads_inner, self.heads_outer = map(_rewired, (self.now, self.inner, self.outer))

    def now(self, *args: Any, **kwargs: Any) -> Tensor:
        """In eager code."""
        if self.known is None:
            self.known = self._asked(Asked(*args, **kwargs).query)
        return self.known.now(*args, **kwargs)

    def _asked(self, query: Tensor) -> Either:
        local = query.to_local() if isinstance(query, DTensor) else query
        return self.ask(local.shape[-2] if local.dim() > 1 else 0)

    def inner(self, *args: Any, **kwargs: Any) -> Tensor:
        """In compiled code."""
        if self.known is None:
            raise AttentionError("under torch.compile the length must be known: give context_parallel its buffers")
        return self.known.inner(*args, **kwargs)

    outer = inner

    def flex_now(self, *args: Any, **kwargs: Any) -> Any:
        """flex_attention in eager code."""
        if self.known is None:
            self.known = self._asked(Flexed(*args, **kwargs).query)
        return self.known.flex_now(*args, **kwargs)

    def flex_inner(self, *args: Any, **kwargs: Any) -> Any:
        """flex_attention in compiled code."""
        if self.known is None:
            raise AttentionError("under torch.compile the length must be known: give context_parallel its buffers")
        return self.known.flex_inner(*args, **kwargs)

    flex_outer = flex_inner


PART = "attnspan_part"
"""Where a BlockMask of this rank's rows keeps what it is a part of."""


class Part(Prepared):
    """The whole mask of a BlockMask that was made for one rank."""

    def check(self, core: Core) -> None:
        """Refuse tensors that lie in another order."""
        mine, theirs = self.core, core
        if (mine.layout, mine.seq_len) != (theirs.layout, theirs.seq_len):
            raise AttentionError(
                f"block_mask was made for {mine.seq_len} tokens in {mine.layout!r}, and {theirs.seq_len} lie in "
                f"{theirs.layout!r}; give both the same load_balancer"
            )


class Lifetime:
    """How long a context lasts; regions that first ran in it may run again for as long as it does.

    Regions that were around when it began are not its business: their second run begins it anew.
    """

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.over = False
        self._around = [region.name for region in regions()]
        self._watched: WeakSet[Any] = WeakSet()

    def guard(self) -> None:
        """Watch the regions around a call of attention. See [Note: backward inside]."""
        for region in regions(torch.is_grad_enabled()):
            ours = not any(region.name is name for name in self._around if name is not None)
            if ours and not region.again and region.name not in self._watched:
                self._watch(region.name)

    def _watch(self, region: Any) -> None:
        """From here on the region runs again in a block of this context, or not at all."""
        again = rerun_of(region)
        if again is None:
            raise AttentionError(f"activation checkpointing by {type(region).__name__} is not known; {ELSE}")
        setattr(region, again, functools.partial(self._run, getattr(region, again)))
        self._watched.add(region)

    def _run(self, again: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.over:
            raise AttentionError(f"a checkpointed region runs again after context_parallel was left; {ELSE}")
        with self.scope:
            return again(*args, **kwargs)


ELSE = "run backward inside the context, or use ContextParallel.attach(model)"
