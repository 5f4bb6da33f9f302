"""Attention over ranks: the only place where plan, kernel and transport meet.

In the order of a call:

    api.py          `attention`, and `Attention`, which is made once (inputs.py: the tensors of a call; score.py: a
                    traced score_mod; transforms.py: derivatives that are refused)
    ops.py          the custom ops, forward and backward (handles.py: objects as tensors in their arguments)
    bound_plan.py   a plan on a group, with its options (tuned.py: what "auto" plans with; links.py: measured links)
    agreement.py    ranks compare what they are about to do
    execute.py      lanes of a call, and their results (ulysses.py: the exchange of heads around the loop)
    loop.py         the steps of a plan, forward and backward
    lane.py         one step: its messages, and the call of the kernel (wire.py: the format of messages)
    sums.py         gradients, summed over tiles and ranks

    kept.py         keys that stay from forward to backward
    latent.py       latents (MLA), expanded where they arrive
    uses.py         counts of calls (pass_timer.py: their times; recording.py: spans, while a group is profiled)
"""

from attnspan.attention.api import Attention, attention

__all__ = ["Attention", "attention"]
