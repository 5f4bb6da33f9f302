"""The attentions of a session: one for each of its named masks, and those for masks and score_mods passed to calls.

Each is made once and cached. Functions are traced (masks/tracing.py), and traced again if they may have changed since
(masks/fingerprint.py). The cache is keyed by what a function computes, so a new closure in every step hits it.

[Note: time of asking] A BlockMask or score_mod is read when it is passed to a call or to `attention_for`. The values of
tensors that a score_mod captures are read in every call, so that they can be learned. A `Mask` is what its function
computed when the mask was made; it is refused once the function computes something else.

[Note: session attention] Functions cannot be traced in code that is being compiled. A `SessionAttention` is traced
before: it is called with shards, or passed as a block_mask. It holds tensors and a handle, which compiled code takes as
inputs, so another one, for other documents, does not recompile.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from attnspan.attention import Attention
from attnspan.attention.api import AttentionCallable
from attnspan.attention.inputs import Inputs
from attnspan.attention.latent import Expand
from attnspan.attention.score import DTYPES, Captured, Score, ScoreFunction
from attnspan.attention.tuned import NO_TUNING, hardware_for, known_tuning, machine_here
from attnspan.attention.uses import Uses
from attnspan.dtypes import lse_dtype
from attnspan.errors import AttentionError
from attnspan.kernels import rounds_gradients
from attnspan.masks import Full, Mask
from attnspan.masks.fingerprint import fingerprint
from attnspan.parallel.block_masks import ReadBlockMask
from attnspan.parallel.call_args import FlexArgs
from attnspan.parallel.checkpoint_checks import attention_by_context, checks_of
from attnspan.parallel.dtensors import is_dtensor
from attnspan.parallel.flex_checks import check_filled, check_lengths, check_single
from attnspan.parallel.report import Machine, PastUses, Report, report
from attnspan.parallel.run_attention import run_attention
from attnspan.parallel.session_spec import SessionSpec
from attnspan.plan import Hardware, Plan, RecurrentLayers, Shape
from attnspan.plan.choose import choice_for
from attnspan.plan.drawing import in_seconds
from attnspan.plan.local_blocks import local_block_mask

MAX_KEPT = 16
"""How many BlockMasks, score_mods, and attentions made of them, a session caches."""

OTHERS = "block_mask"
"""The name in a report for masks that are not the session's."""

Key = TypeVar("Key")
Value = TypeVar("Value")


class SessionAttention(AttentionCallable):
    """Attention of a session under a mask, a scale and a score_mod; called with shards, or given as `block_mask`.

    Made by `ContextParallel.attention_for`, or by `cross` over the keys of another session. That traces the score_mod,
    with the Python numbers that it reads: make another one when they change. The values of captured tensors are read in
    every call.
    """

    def __init__(self, spec: SessionSpec, attend: Attention, score_mod: ScoreFunction | None = None):
        self.spec, self.score_mod, self.scale = spec, score_mod, attend.bound.scale
        self.attend, self.by_context = attend, attention_by_context(attend, checks_of(spec))
        self.captured = attend.captured

    @property
    def mask(self) -> Mask:
        """Which pairs attend."""
        return self.attend.plan.mask

    @property
    def plan(self) -> Plan:
        """The plan; with strategy "auto", the one that last ran."""
        return self.attend.bound.latest

    def run(self, inputs: Inputs, expand: Expand | None = None) -> tuple[Tensor, Tensor]:
        """(out, lse) of the inputs, which may be DTensors."""
        check_single(self.mask, inputs.query)
        return run_attention(self.spec, self.attend, inputs, expand)

    def __repr__(self) -> str:
        score = "" if self.score_mod is None else f", {getattr(self.score_mod, '__name__', 'score_mod')}"
        return f"SessionAttention({self.mask!r}{score})"


class Attentions:
    """The attentions of a session: `named` ones of its masks, and cached ones of other masks and score_mods."""

    def __init__(self, spec: SessionSpec):
        self.spec = spec
        self.named = {name: spec.bind_attention(mask) for name, mask in spec.masks.items()}
        self.uses, self.past = Uses(), PastUses(OTHERS)
        self._attends: OrderedDict[object, Attention] = OrderedDict()
        self._masks: OrderedDict[int, ReadBlockMask] = OrderedDict()
        self._scores: OrderedDict[object, Score] = OrderedDict()

    def attention_for(
        self, wanted: str | Mask | BlockMask | None, scale: float | None, score_mod: ScoreFunction | None
    ) -> SessionAttention:
        """See `ContextParallel.attention_for`, and [Note: session attention]."""
        if torch.compiler.is_compiling():
            raise AttentionError("under torch.compile, call cp.attention_for(...) outside and use its result inside")
        if isinstance(wanted, SessionAttention):
            raise AttentionError(f"mask is an attention already: {wanted!r}")
        self.spec.check_scale(scale)
        own, mask = self._mask(self.spec.mask_name(None) if wanted is None else wanted, None)
        score = None if score_mod is None else self._score(score_mod, DTYPES)
        attend = self._attention(own, mask, score, scale).variant(watched=mask)
        attend.captured = Captured([], []) if score is None else score.captured  # not those of an equal score_mod
        return SessionAttention(self.spec, attend, score_mod)

    @property
    def latest_shapes(self) -> dict[str, Shape]:
        """By the name of a mask, the shape of the tensors that attention under it last ran on."""
        shapes = {name: attend.bound.uses.latest_shape for name, attend in self.named.items()}
        return {name: shape for name, shape in shapes.items() if shape is not None}

    def plan_ahead(self, shapes: Mapping[str, Shape]) -> None:
        """Plan in advance for tensors of some shapes, by the name of their mask."""
        for name in shapes.keys() & self.named.keys():
            self.named[name].bound.plan_ahead(shapes[name])

    def report(self) -> Report:
        """How often each ran, in words and bytes."""
        uses = {name: attend.bound.uses for name, attend in self.named.items()}
        return report(self.spec.rank, self.spec.ranks, {**uses, OTHERS: self.uses}, self.past, self._machine)

    def explain(self, name: str, recurrent: Sequence[RecurrentLayers] = ()) -> str:
        """See `ContextParallel.explain`."""
        call = self.named[name].bound
        plan, shape = call.latest, call.uses.latest_shape
        if shape is None:
            return "attention has not run: strategies are compared for the shapes of its tensors"
        machine, hardware = self._machine.hardware(shape), self.hardware(shape)
        options = {"keep_keys": call.keep_keys, "recurrent": recurrent}
        lines = [choice_for(plan, shape=shape, hardware=hardware, **options).explain()]
        if not hardware.links:
            unmeasured = "virtual ranks" if machine is None else "one rank, strategy given, or ATTNSPAN_LINK=none"
            lines.append(f"link: {hardware.inside}, that of {hardware.name}; not measured ({unmeasured})")
        lines += call.programs
        took = call.uses.took("forward", (plan, shape)).seconds + call.uses.took("backward", (plan, shape)).seconds
        given = "" if call.auto else ", as given"
        return "\n".join([*lines, f"ran: {plan.strategy_name}{given}; measured {in_seconds(took)}"])

    def hardware(self, shape: Shape) -> Hardware:
        """The hardware that predictions use; on virtual ranks a preset."""
        transport = self.spec.transport
        known = known_tuning(transport) or NO_TUNING
        found = self._machine.hardware(shape)
        return found or hardware_for(known, shape, transport.device, self.spec.options.kernel)

    @property
    def _machine(self) -> Machine:
        transport, kernel = self.spec.transport, self.spec.options.kernel
        return Machine(partial(machine_here, transport, kernel=kernel), rounds_gradients(kernel, transport.device))

    def reset(self) -> None:
        """Start counting again."""
        for attend in self.named.values():
            attend.bound.uses.clear()
        self.uses.clear()
        self.past = PastUses(OTHERS)

    def shard(self, block_mask: BlockMask | Mask) -> BlockMask:
        """This rank's rows of a BlockMask, against all keys in order."""
        size: tuple[int, int] = (128, 128)
        device = self.spec.transport.device
        if isinstance(block_mask, BlockMask):
            size, device = block_mask.BLOCK_SIZE, block_mask.kv_indices.device
        _, mask = self._mask(block_mask, None)
        check_filled(self.spec.sharding.sizes)
        plan = Plan(mask, self.spec.layout, self.spec.seq_len, "gather")
        return local_block_mask(plan, self.spec.rank, block_size=size, device=device)

    # ---- attentions ----------------------------------------------------------------------------------------------

    def for_call(self, args: FlexArgs, name: str | None) -> tuple[Attention, list[Tensor]]:
        """The attention of a call, and the tensors that its score_mod captures. See [Note: time of asking]."""
        query = args.query
        own, mask = self._mask(args.block_mask, name)
        score = None if args.score_mod is None else self._score(args.score_mod, (lse_dtype(query.dtype),))
        scale = None if args.scale == query.shape[-1] ** -0.5 else args.scale
        attend = self._attention(own, mask, score, scale)
        captured = [] if score is None else score.captured.for_query(query)
        if not isinstance(args.block_mask, BlockMask) and not is_dtensor(query):
            attend.check_mask(mask, Inputs(*args[:3], captured=captured))
        return attend, captured

    def _attention(self, own: str | None, mask: Mask, score: Score | None, scale: float | None) -> Attention:
        """The attention of a mask, a score_mod and a scale."""
        key = mask, score, scale
        if key not in self._attends:
            uses = self.uses if own is None else self.named[own].bound.uses
            attend = self.spec.bind_attention(mask).variant(score=score, scale=scale, uses=uses, watched=None)
            _keep(self._attends, key, attend)
            self.past = self.past.settled(self.uses, self.spec.rank, self._machine, MAX_KEPT)
        self._attends.move_to_end(key)
        return self._attends[key]

    def _score(self, score_mod: ScoreFunction, dtypes: tuple[torch.dtype, ...]) -> Score:
        """A traced score_mod; cached as long as the function is unchanged."""
        read = fingerprint(score_mod)  # before it runs, and perhaps changes something
        key = (read, dtypes)
        if key not in self._scores:
            score = Score(score_mod, self.spec.transport.device, dtypes)
            if read is None or score.reads_values:
                return score
            _keep(self._scores, key, score)
        self._scores.move_to_end(key)
        return self._scores[key]

    # ---- masks ---------------------------------------------------------------------------------------------------

    def _mask(self, block_mask: object, name: str | None) -> tuple[str | None, Mask]:
        """The mask that a block_mask stands for, and its name if it is one of the session's."""
        spec, masks = self.spec, self.spec.masks
        if block_mask is None:
            return self._everything(name)
        if isinstance(block_mask, str):
            return spec.mask_name(block_mask), masks[spec.mask_name(block_mask)]
        if isinstance(block_mask, Mask):
            block_mask.check_lengths(spec.seq_len)
            return next((own for own, mask in masks.items() if mask == block_mask), None), block_mask
        if isinstance(block_mask, BlockMask):
            return None, self._read(block_mask)
        raise AttentionError(
            "block_mask must be the BlockMask of the whole sequence, a mask, the name of one of the session's, or "
            f"None, got {type(block_mask).__name__}"
        )

    def _everything(self, name: str | None) -> tuple[str, Mask]:
        """The full mask of the session: flex_attention without a block_mask attends to everything."""
        masks = self.spec.masks
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
        check_lengths(block_mask, self.spec)
        key = id(block_mask)
        if key not in self._masks or not self._masks[key].is_current:
            _keep(self._masks, key, ReadBlockMask(block_mask))
        self._masks.move_to_end(key)
        return self._masks[key].mask


def _keep(known: OrderedDict[Key, Value], key: Key, value: Value) -> None:
    known[key] = value
    if len(known) > MAX_KEPT:
        known.popitem(last=False)
