"""`ContextParallel`, the session of a training script, and the ways in which a model's attention reaches it.

    session.py                ContextParallel (family.py: sessions made from one another by with_mask)
    session_spec.py           what the parts of a session share: ranks, masks, options
    attentions.py             its attentions, by mask and score_mod (soft_cap.py: one such score_mod)
    run_attention.py          the call of one of them (dtensors.py: on DTensors)
    recurrences.py            its recurrences
    sharding.py               sharding and unsharding of tensors (moves.py: tokens between shards; marks.py: which
                              tensors are shards)
    batch.py                  whole batches, entry by entry
    loss.py                   losses over all ranks

Interception of torch's SDPA and flex_attention:

    sdpa.py                   the torch function mode of cp.sdpa() and cp.flex()
    flex_dispatch.py          how flex_attention reaches that mode
    call_args.py              the arguments of intercepted calls, by name
    handler.py                what answers intercepted calls (sdpa_checks.py, flex_checks.py: which are accepted)
    flex.py                   flex_attention (block_masks.py: the mask of a BlockMask)
    multihead.py              nn.MultiheadAttention
    attach.py                 cp.attach (attached_modules.py: which modules; attached_forward.py: their forward)
    style.py                  the same for torch's parallelize_module
    checkpoint_regions.py     activation checkpointing, which recomputes regions (checkpoint_checks.py: the rules for
                              attention)
    compiled_checkpoints.py   the same in compiled code (compiled_inputs.py: inputs; eager.py: what is not compiled)

Verification and statistics:

    checking.py               check_model (comparison.py: of two runs; dense_attention.py: on one device)
    checksum.py               a checksum of many tensors
    report.py, profile.py     how often attention ran, and how long its steps took
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
