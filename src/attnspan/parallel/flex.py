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

A call brings its mask and score_mod with it, as functions, and means what they compute at the time of the call. Both
are traced (masks/program.py), and again if they may have changed since (masks/fingerprint.py); what is made of them is
kept for the latest few, by what they compute, so that a new closure of every step is nothing new.

[Note: time of asking] A BlockMask or score_mod counts as it is when it is given: to a call, or to `prepare`. Values of
tensors that a score_mod captures are read at the call in either case, so that they may be learned. A mask of ours is
what its function computed when the mask was made, and is refused once that would be another.

[Note: prepared] Functions cannot be traced inside code that is itself being compiled. `Prepared` is that work done
before: it goes where a block_mask goes, and holds tensors and a handle, which compiled code takes as inputs. Another
one, for other documents, does not compile anew.

[Note: averages] Tensors that a score_mod captured get the sum of all ranks' gradients; each rank takes its part, see
[Note: averages] in loss.py.

[Note: one of its kind] A BlockMask of one batch row or head stands for all of them. A function that reads the index
nevertheless is right for tensors of one row, or one head, alone: there the index is 0, and it is told so.

Shapes: query (B, H, S, D), key (B, Hk, S, D), value (B, Hk, S, Dv), S this rank's tokens.
"""

from __future__ import annotations

import functools
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping
from copy import copy
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask

from attnspan.attention import Attention
from attnspan.attention.agreement import Inputs
from attnspan.attention.lane import wide
from attnspan.attention.score import DTYPES, Captured, Score, ScoreFunction
from attnspan.attention.uses import Uses
from attnspan.errors import AttentionError, MaskError, ShardError
from attnspan.masks import Full, Mask, MaskMod
from attnspan.masks.fingerprint import fingerprint
from attnspan.masks.listed import Listed, listing
from attnspan.masks.mask import MaskFunction
from attnspan.masks.mask_mod import alone
from attnspan.masks.program import name_of, traced
from attnspan.parallel import loss
from attnspan.parallel.dtensors import carried, is_dtensor, is_split
from attnspan.parallel.flex_dispatch import run_eagerly
from attnspan.parallel.guards import check_block, check_session
from attnspan.parallel.report import Past
from attnspan.plan import Plan
from attnspan.plan.local_blocks import local_block_mask

if TYPE_CHECKING:
    from attnspan.parallel.core import Core

MOST_KEPT = 16
"""How many BlockMasks, score_mods, and attentions made of them, a session remembers."""

OTHERS = "block_mask"
"""What masks that are not the session's are called in a report."""

PROMISES = ("ROWS_GUARANTEED_SAFE", "BLOCKS_ARE_CONTIGUOUS")
"""Options that tell of the mask, and ask for nothing."""

USUAL = {"BACKEND": "AUTO", "PRESCALE_QK": False, "WRITE_DQ": True, "FORCE_USE_FLEX_ATTENTION": False, "USE_TMA": False}
"""Options at the values that they have anyway."""


UNPREPARED = (
    "under torch.compile, a mask must be prepared outside: block_mask=cp.prepare(block_mask, score_mod=...); or "
    "compile without fullgraph=True"
)


class Flexed(NamedTuple):
    """The arguments of flex_attention."""

    query: Tensor
    key: Tensor
    value: Tensor
    score_mod: ScoreFunction | None = None
    block_mask: Any = None
    scale: float | None = None
    enable_gqa: bool = False
    return_lse: bool = False
    kernel_options: Any = None
    return_aux: AuxRequest | None = None


class Prepared:
    """A mask and a score_mod of a session, to be given as `block_mask` inside torch.compile, or called with shards.

    Made by `ContextParallel.prepare`. The score_mod was traced then, with the numbers that it read: prepare it again
    when they change. Tensors that it captures are found then, and their values read at every call.
    """

    def __init__(self, core: Core, attend: Attention, score_mod: ScoreFunction | None):
        self.core, self.score_mod, self.scale = core, score_mod, attend.call.scale
        self.attend = attend
        self.watched = attend.variant(guard=functools.partial(_check_both, core))
        self.followed = attend.variant(guard=functools.partial(check_session, core))
        self.captured, self.alone = attend.captured, alone_of(attend.plan.mask)

    @property
    def mask(self) -> Mask:
        """Who attends to whom."""
        return self.attend.plan.mask

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, *, sinks: Tensor | None = None) -> Tensor:
        """The output for this rank's queries, (B, H, S, Dv)."""
        return self.with_lse(query, key, value, sinks=sinks, returned=False)[0]

    def with_lse(
        self, query: Tensor, key: Tensor, value: Tensor, *, sinks: Tensor | None = None, returned: bool = True
    ) -> tuple[Tensor, Tensor]:
        """The output, and the log-sum-exp of every row (B, H, S), differentiable too."""
        _check_alone(self.alone, query)
        return _run(self.core, self.attend, self.captured.of(query), query, key, value, sinks, lse=returned)

    def __repr__(self) -> str:
        score = "" if self.score_mod is None else f", {getattr(self.score_mod, '__name__', 'score_mod')}"
        return f"Prepared({self.mask!r}{score})"


class Flexes:
    """The attentions of a session: of its masks by name, and of what calls of flex_attention bring, made once."""

    def __init__(self, core: Core):
        self.core = core
        self.named = {name: core.attention(mask) for name, mask in core.masks.items()}
        self.uses, self.past = Uses(), Past(OTHERS)
        self._attends: OrderedDict[object, Attention] = OrderedDict()
        self._masks: OrderedDict[int, Read] = OrderedDict()
        self._scores: OrderedDict[object, Score] = OrderedDict()

    def __call__(self, asked: Flexed, name: str | None = None, way: str = "attend") -> Any:
        """flex_attention. `name` is the mask that a block was opened for, `way` how a prepared one runs."""
        check(asked, self.core)
        known = asked.block_mask
        if isinstance(known, Prepared):
            _check_prepared(known, asked, self.core)
            attend: Attention = getattr(known, way)
            captured = known.captured.of(asked.query)
        else:
            if torch.compiler.is_dynamo_compiling():  # functions are traced between two graphs, if there may be two
                torch._dynamo.graph_break(msg=UNPREPARED)
            elif torch.compiler.is_compiling():
                raise AttentionError(UNPREPARED)
            attend, captured = eagerly(self._at_call)(asked, name)
        _check_alone(known.alone if isinstance(known, Prepared) else alone_of(attend.plan.mask), asked.query)
        if captured or attend.plan.mask.heads > 1 or attend.call.score is not None:
            _check_whole(asked)
        returned = asked.return_lse or (asked.return_aux is not None and asked.return_aux.lse)
        out, lse = _run(self.core, attend, captured, *asked[:3], lse=returned)
        if asked.return_aux is not None:
            return out, AuxOutput(lse=lse if asked.return_aux.lse else None, max_scores=None)
        return (out, lse) if asked.return_lse else out

    def prepare(self, block_mask: Any, score_mod: ScoreFunction | None, scale: float | None) -> Prepared:
        """See [Note: prepared]."""
        if torch.compiler.is_compiling():
            raise AttentionError("under torch.compile, call cp.prepare(...) outside and use what it returns inside")
        if isinstance(block_mask, Prepared):
            raise AttentionError(f"block_mask is prepared already: {block_mask!r}")
        _check_scale(scale, self.core)
        own, mask = self._mask(block_mask, None)
        score = None if score_mod is None else self._score(score_mod, DTYPES)
        mine = self._found(own, mask, score, scale).variant(watched=mask)  # a call of its own captures other tensors
        mine.captured = Captured([], []) if score is None else score.captured
        return Prepared(self.core, mine, score_mod)

    def reset(self) -> None:
        """Start counting anew."""
        self.uses.clear()
        self.past = Past(OTHERS)

    def shard(self, block_mask: BlockMask | Mask) -> BlockMask:
        """This rank's rows of a BlockMask, against all keys in order."""
        size: tuple[int, int] = (128, 128)
        device = self.core.transport.device
        if isinstance(block_mask, BlockMask):
            size, device = block_mask.BLOCK_SIZE, block_mask.kv_indices.device
        _, mask = self._mask(block_mask, None)
        check_filled(self.core.sharding.sizes)
        plan = Plan(mask, self.core.layout, self.core.seq_len, "gather")
        return local_block_mask(plan, self.core.rank, block_size=size, device=device)

    # ---- attentions ----------------------------------------------------------------------------------------------

    def _at_call(self, asked: Flexed, name: str | None) -> tuple[Attention, list[Tensor]]:
        """The attention of a call, and what its score_mod captures at present. See [Note: time of asking]."""
        query, key, value = asked[:3]
        own, mask = self._mask(asked.block_mask, name)
        score = None if asked.score_mod is None else self._score(asked.score_mod, (wide(query.dtype),))
        scale = None if asked.scale == query.shape[-1] ** -0.5 else asked.scale
        attend, captured = self._found(own, mask, score, scale), [] if score is None else score.captured.of(query)
        if not isinstance(asked.block_mask, BlockMask) and not is_dtensor(query):
            attend.check_mask(mask, Inputs(query, key, value, None, *captured))
        return attend, captured

    def _found(self, own: str | None, mask: Mask, score: Score | None, scale: float | None) -> Attention:
        """The attention of a mask, a score_mod and a scale."""
        key = mask, score, scale
        if key not in self._attends:
            uses = self.uses if own is None else self.named[own].call.uses
            attend = self.core.attention(mask).variant(score=score, scale=scale, uses=uses, watched=None)
            _keep(self._attends, key, attend)
            self.past = self.past.settled(self.uses, self.core.rank, MOST_KEPT)
        self._attends.move_to_end(key)
        return self._attends[key]

    def _score(self, score_mod: ScoreFunction, dtypes: tuple[torch.dtype, ...]) -> Score:
        """A score_mod, traced; what has not changed since is not traced again."""
        read = fingerprint(score_mod)  # before it runs, and perhaps changes something
        key = (read, dtypes)
        if key not in self._scores:
            score = Score(score_mod, self.core.transport.device, dtypes)
            if read is None or score.reads_values:
                return score
            _keep(self._scores, key, score)
        self._scores.move_to_end(key)
        return self._scores[key]

    # ---- masks ---------------------------------------------------------------------------------------------------

    def _mask(self, block_mask: Any, name: str | None) -> tuple[str | None, Mask]:
        """What a block_mask means, and its name if it is one of the session's."""
        core, masks = self.core, self.core.masks
        if block_mask is None:
            return self._everything(name)
        if isinstance(block_mask, str):
            return core.mask_name(block_mask), masks[core.mask_name(block_mask)]
        if isinstance(block_mask, Mask):
            block_mask.check_lengths(core.seq_len)
            return next((own for own, mask in masks.items() if mask == block_mask), None), block_mask
        if isinstance(block_mask, BlockMask):
            return None, self._read(block_mask)
        raise AttentionError(
            "block_mask must be the BlockMask of the whole sequence, a mask, the name of one of the session's, or "
            f"None, got {type(block_mask).__name__}"
        )

    def _everything(self, name: str | None) -> tuple[str, Mask]:
        """FlexAttention without a mask attends to everything; so must the session."""
        masks = self.core.masks
        known = masks if name is None else {name: masks[name]}
        full = next((own for own, mask in known.items() if mask == Full()), None)
        if full is None:
            told = repr(next(iter(known.values()))) if len(known) == 1 else f"one of {list(known)}"
            usual = "cp.mask" if len(masks) == 1 else f"{next(iter(known))!r}"
            raise AttentionError(
                f"block_mask must be given: without one, flex_attention attends to everything, and the session's mask "
                f"is {told:.80}; pass block_mask={usual}, or Full() if everything is meant"
            )
        return full, masks[full]

    def _read(self, block_mask: BlockMask) -> Mask:
        """The mask of a BlockMask, read again if that has changed. See [Note: time of asking]."""
        _check_lengths(block_mask, self.core)
        key = id(block_mask)
        if key not in self._masks or not self._masks[key].is_current:
            _keep(self._masks, key, Read(block_mask))
        self._masks.move_to_end(key)
        return self._masks[key].mask


run_eagerly(Flexes.__call__.__code__)


class Read:
    """A BlockMask, and the mask that was read from it."""

    def __init__(self, block_mask: BlockMask):
        self.block_mask = block_mask  # alive, so that no other object has its id
        self.mask_mod, self.tensors = block_mask.mask_mod, listing(block_mask)
        self.mask = mask_of(block_mask)

    @property
    def is_current(self) -> bool:
        """Whether the BlockMask still means the mask."""
        same = self.block_mask.mask_mod is self.mask_mod
        same = same and all(x is y for x, y in zip_longest(self.tensors, listing(self.block_mask)))
        return same and self.mask.is_current


def mask_of(block_mask: BlockMask) -> Mask:
    """The mask of a BlockMask. See [Note: one of its kind]."""
    counts = block_mask.kv_num_blocks.shape[:2]
    mask_mod = only(block_mask.mask_mod, *counts, device=block_mask.kv_indices.device)
    if mask_mod is not block_mask.mask_mod:
        block_mask = copy(block_mask)
        block_mask.mask_mod = mask_mod
    return Mask.from_block_mask(block_mask)


def only(fn: MaskFunction, rows: int, heads: int, *, device: torch.device) -> MaskFunction:
    """A mask_mod for so many batch rows and heads; where it reads the index of the only one, that is told to it."""
    reads = traced(fn, device=device, error=MaskError).reads if 1 in (rows, heads) else frozenset()
    row, head = rows == 1 and "b" in reads, heads == 1 and "h" in reads
    if not row and not head:
        return fn
    zero = torch.zeros((), dtype=torch.int64, device=device)

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return fn(zero if row else b, zero if head else h, q_idx, kv_idx)

    mask_mod.__name__ = name_of(fn)
    mask_mod.alone = (row, head)  # type: ignore[attr-defined]
    return mask_mod


def alone_of(mask: Mask) -> tuple[bool, bool]:
    """Whether a mask is for one batch row alone, and for one head."""
    return alone(mask.fn if isinstance(mask, MaskMod) else mask.source.mask_mod if isinstance(mask, Listed) else None)


# ---- running ---------------------------------------------------------------------------------------------------------


def _run(
    core: Core,
    attend: Attention,
    captured: list[Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None = None,
    *,
    lse: bool,
) -> tuple[Tensor, Tensor]:
    """(out, lse). See [Note: averages]."""
    parts = [loss.shared(x, core.ranks) if x.requires_grad else x for x in captured]
    if sinks is not None:
        sinks = loss.shared(sinks, core.ranks)
    return carried(core, attend, query, key, value, sinks, captured=parts, lse=lse)


def _keep(known: OrderedDict[Any, Any], key: object, value: object) -> None:
    known[key] = value
    if len(known) > MOST_KEPT:
        known.popitem(last=False)


def eagerly(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that dynamo leaves alone, where it breaks off and runs plain code between two graphs."""
    dynamo = sys.modules.get("torch._dynamo")  # to import it takes longer than all of this package
    return function if dynamo is None else dynamo.disable(function)


def _check_both(core: Core) -> None:
    check_block()
    check_session(core)


class InBlock:
    """flex_attention inside a block: a call is checked as SDPA's is, see [Note: handles of three kinds] in sdpa.py."""

    core: Core
    flexes: Flexes
    name: str | None

    def flex_now(self, *args: Any, **kwargs: Any) -> Any:
        """In eager code."""
        asked = self._meant(Flexed(*args, **kwargs))
        self._before()
        return self.flexes(asked, self.name)

    def flex_inner(self, *args: Any, **kwargs: Any) -> Any:
        """In compiled code, with its block."""
        return self.flexes(self._meant(Flexed(*args, **kwargs)), self.name, "followed")

    def flex_outer(self, *args: Any, **kwargs: Any) -> Any:
        """In compiled code, inside a block of eager code."""
        return self.flexes(self._meant(Flexed(*args, **kwargs)), self.name, "watched")

    def _meant(self, asked: Flexed) -> Flexed:
        return asked

    def _before(self) -> None:
        """Asked before a call of eager code."""
        check_block(torch.is_grad_enabled())
        check_session(self.core)


# ---- checks ----------------------------------------------------------------------------------------------------------


def check(asked: Flexed, core: Core) -> None:
    """Refuse what cannot be served; it is the same on every rank."""
    query, key, value = asked[:3]
    if not torch.compiler.is_compiling():
        for tensor in (query, key, value):
            core.sharding.check_mark(tensor)
    if query.dim() != 4 or key.dim() != 4 or value.dim() != 4:
        raise AttentionError(
            "query, key and value must be (batch, heads, tokens, head dim), got shapes "
            f"{tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}"
        )
    if not query.shape[3]:
        raise AttentionError(f"query must have a head dim of at least 1, got shape {tuple(query.shape)}")
    if not asked.enable_gqa and query.shape[1] != key.shape[1]:
        raise AttentionError(
            "enable_gqa must be True where query and key have different numbers of heads, got shapes "
            f"{tuple(query.shape)} and {tuple(key.shape)}"
        )
    if asked.return_aux is not None and asked.return_lse:
        raise AttentionError("return_lse and return_aux must not both be given; use return_aux=AuxRequest(lse=True)")
    if asked.return_aux is not None and asked.return_aux.max_scores:
        raise AttentionError("return_aux: max_scores are not served over ranks; ask for AuxRequest(lse=True)")
    if asked.kernel_options:
        _check_options(asked.kernel_options)
    if not isinstance(asked.block_mask, Prepared):
        _check_scale(asked.scale, core)


def _check_options(options: Mapping[str, Any]) -> None:
    for name, value in options.items():
        plain = name.removeprefix("fwd_").removeprefix("bwd_")
        if plain not in PROMISES and not (plain in USUAL and USUAL[plain] == value):
            raise AttentionError(
                f"kernel_options: {name}={value!r} cannot be honoured over ranks, where one call is computed in parts; "
                "leave it out, and choose the kernel by ContextParallel(..., kernel=...)"
            )


def _check_scale(scale: float | None, core: Core) -> None:
    if scale is None and core.options.scale is not None:
        raise AttentionError(
            f"scale must be given: the session was made with scale={core.options.scale}, and a call without means "
            "1 / sqrt(head dim); give it in the call, or make the session without"
        )


def _check_prepared(known: Prepared, asked: Flexed, core: Core) -> None:
    if known.core is not core:
        raise AttentionError("block_mask was prepared by another session; prepare it with the one that shards lie by")
    if asked.score_mod is not None and asked.score_mod is not known.score_mod:
        raise AttentionError("score_mod must be the one that was prepared: cp.prepare(block_mask, score_mod=score_mod)")
    if asked.scale is not None and asked.scale != known.scale:
        usual = known.scale is None and asked.scale == asked.query.shape[-1] ** -0.5
        if not usual:
            raise AttentionError(
                f"scale must be the one that was prepared, {known.scale}, got {asked.scale}; prepare it with scale="
            )


def _check_lengths(block_mask: BlockMask, core: Core) -> None:
    whole, tokens = core.seq_len, core.sharding.tokens
    lengths = tuple(block_mask.seq_lengths)
    if lengths == (whole, whole):
        return
    if lengths in ((tokens, whole), (tokens, tokens)):
        raise AttentionError(
            f"block_mask must be that of the whole sequence, of lengths {(whole, whole)}, got {lengths}: a rank's part "
            "of it; pass the one that it was made from, and leave the rest to the session"
        )
    raise AttentionError(
        f"block_mask must be that of the whole sequence, of lengths {(whole, whole)}, got {lengths}; another length is "
        "another session: cp.with_mask(mask, seq_len=...)"
    )


def _check_alone(known: tuple[bool, bool], query: Tensor) -> None:
    """See [Note: one of its kind]."""
    for dim, what in enumerate(("batch row", "head")):
        if known[dim] and query.shape[dim] != 1:
            raise AttentionError(
                f"block_mask was made for one {what}, and its mask_mod reads the index of it, got query of shape "
                f"{tuple(query.shape)}; give create_block_mask the number of {what}s"
            )


def check_filled(sizes: list[int]) -> None:
    """Refuse to make BlockMasks, on every rank, where one of them has no queries."""
    if 0 in sizes:
        raise ShardError(f"block_mask: rank {sizes.index(0)} has no tokens, and there is no BlockMask of no queries")


def _check_whole(asked: Flexed) -> None:
    """Programs are asked by batch row and head, of which a DTensor may hold but some."""
    if is_split(asked.query):
        raise AttentionError(
            "query must have all batch rows and heads here for a score_mod, or a mask of several heads: it is a "
            "DTensor that is sharded on them; pass its to_local() and functions of local indices"
        )
