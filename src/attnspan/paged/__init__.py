"""The KV cache in pages: keys and values of generated sequences, shared where they agree, spread where they must.

    allocator.py   which pages belong to which sequence: ints, and nothing else
    prefix.py      pages found by what is in them
    step_plan.py   one step of many sequences, described to the device in one copy
    pool.py        the pages of every layer; `write` and `attend`
    kernels/       attention over pages: `decode` and `flex` for CUDA, `gather`, `reference`
    states.py      states of recurrent layers, in pages of their own
    sharded.py     pages over ranks, and what context parallelism hands over to them

Below these: kv_cache.py (the interface of pool.py and sharded.py), metadata.py (a step, for kernels), scoring.py (masks
and score_mods), quantised.py, slot_writes.py (new keys to their slots, in one kernel), after_prefix.py, page_tensors.py
(what moves with pages).
"""

from attnspan.paged.after_prefix import AfterPrefix
from attnspan.paged.allocator import PageAllocator
from attnspan.paged.pool import PageLayer, PagePool
from attnspan.paged.prefix import PrefixCache
from attnspan.paged.sharded import ShardedPages
from attnspan.paged.states import StatePool
from attnspan.paged.step_plan import StepPlan

__all__ = [
    "AfterPrefix",
    "PageAllocator",
    "PageLayer",
    "PagePool",
    "PrefixCache",
    "ShardedPages",
    "StatePool",
    "StepPlan",
]
