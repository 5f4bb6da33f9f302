"""What a training script touches: `ContextParallel`, and the ways by which a model's attention reaches it.

    session.py                ContextParallel (family.py: sessions that come from one another)
    core.py                   what a session's parts share: ranks, masks, options
    attentions.py             its attentions, by mask and score_mod (soft_cap.py: one such score_mod)
    recurrences.py            its recurrences
    sharding.py               cutting and joining tensors (moves.py: between layouts; dtensors.py: as DTensors;
                              marks.py: what a shard remembers of its session)
    batch.py                  whole batches, entry by entry
    loss.py                   losses over all ranks

Calls of torch's attention that a session answers:

    sdpa.py                   the block of cp.sdpa() and cp.flex(), which sees them
    flex_dispatch.py          how flex_attention reaches a block
    call_args.py              their arguments, by name
    handler.py                who answers them (sdpa_checks.py, flex_checks.py: which are accepted)
    flex.py                   flex_attention (block_masks.py: the mask of a BlockMask)
    multihead.py              nn.MultiheadAttention
    attach.py                 cp.attach (attached_modules.py: which modules; attached_forward.py: their forward)
    style.py                  the same for torch's parallelize_module
    checkpoint_regions.py     activation checkpointing, which runs regions again (guards.py: by which rules)
    compiled_checkpoints.py   the same in compiled code (compiled_inputs.py: inputs; eager.py: what is left alone)

What ran, and whether it was right:

    checking.py               check_model (comparison.py: of two runs; dense_attention.py: that of one device)
    checksum.py               one number for the bits of many tensors
    report.py, profile.py     what a session was used for, and how long its steps took
"""

from typing import TYPE_CHECKING

from attnspan.parallel.batch import Batch
from attnspan.parallel.checking import check_model
from attnspan.parallel.session import ContextParallel

if TYPE_CHECKING:
    from attnspan.parallel.style import ContextParallelStyle

__all__ = ["Batch", "ContextParallel", "ContextParallelStyle", "check_model"]


def __getattr__(name: str) -> object:
    if name == "ContextParallelStyle":  # what it derives from takes torch longer to import than all of this package
        from attnspan.parallel.style import ContextParallelStyle

        return ContextParallelStyle
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
