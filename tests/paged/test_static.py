"""A step costs what its tokens cost: nothing waits for the device, nothing grows with the pool, nothing moves.

A dispatch mode writes down every operation of `step`, `write` and `attend`. Operations whose result the host must wait
for are forbidden, whatever the device: on a CPU they would pass unnoticed. Sizes of results are compared between a
pool and one sixteen times as large; views of the pool's own storage are no work.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from attnspan.masks import Causal, Full, PrefixLM, SlidingWindow
from attnspan.paged import AfterPrefix
from attnspan.paged.kernels import gather_decode
from tests.paged.cases import Cache, words

WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "unique", "_unique2", "equal", "is_nonzero", "item",
         "repeat_interleave", "bincount", "_to_cpu"}  # fmt: skip


class Watch(TorchDispatchMode):
    """What was run: (name of the operation, elements of results that are not the pool's)."""

    def __init__(self, pool):
        super().__init__()
        self.own = {pages.untyped_storage().data_ptr() for pages in (*pool.keys, *pool.values)}
        self.log = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        tensors = [x for x in torch.utils._pytree.tree_leaves(result) if isinstance(x, torch.Tensor)]
        made = [x.numel() for x in tensors if x.untyped_storage().data_ptr() not in self.own]
        self.log.append((func._schema.name.split("::")[1], tuple(made)))
        return result

    @property
    def waits(self):
        return [name for name, _ in self.log if name in WAITS]


def decoding(pages, **options):
    cache = Cache(page_size=4, pages=pages, dtype=torch.float32)
    a, b, c = cache.add(9), cache.add(16), cache.add(3)
    cache.fork(a, 1)
    return cache, [(a, 1), (b, 1), (c, 5)]


def watched(cache, batch, **options):
    layer, q = cache.layer, None
    tokens = sum(new for _, new in batch)
    q, k, v = cache.random(tokens, 4, 8), cache.random(tokens, 2, 8), cache.random(tokens, 2, 8)
    assert layer.kv_heads == 2
    with Watch(cache.pool) as watch:
        cache.plan.step(batch)
        cache.pool.write(0, k, v, cache.plan)
        cache.pool.attend(0, q, cache.plan, **options)
    return watch


OPTIONS = [
    {},
    {"kernel": "gather"},
    {"mask": SlidingWindow(5)},
    {"mask": Causal() & PrefixLM(3)},
    {"mask": Full(), "sinks": torch.zeros(4)},
    {"mask": AfterPrefix(Causal())},
    {"score_mod": lambda s, b, h, q, k: s * 0.5 + h},
    {"return_lse": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=words)
def test_a_step_never_waits_for_the_device(options, monkeypatch):
    monkeypatch.setattr(gather_decode, "groups", lambda *asked: [])  # done on a CPU alone, where looking is no wait
    cache, batch = decoding(64)
    watched(cache, batch, **options)
    assert watched(cache, batch, **options).waits == []  # the second time: a mask's tensors are sent once


@pytest.mark.parametrize("options", OPTIONS, ids=words)
def test_no_operation_grows_with_the_pool(options):
    small, large = (watched(*decoding(pages), **options).log for pages in (64, 64 * 16))
    assert small == large


@pytest.mark.parametrize("planted", ["item", "nonzero", "clone"])
def test_twin_a_wait_and_a_copy_of_the_pool_are_noticed(planted):
    logs = []
    for pages in (64, 1024):
        cache, batch = decoding(pages)
        with Watch(cache.pool) as watch:
            cache.plan.step(batch)
            if planted == "clone":
                cache.pool.keys[0].clone()
            else:
                getattr(cache.plan.lengths[0], planted)()
        logs.append(watch)
    assert logs[0].waits if planted != "clone" else logs[0].log != logs[1].log


def test_nothing_moves_in_a_hundred_steps():
    cache, _ = decoding(200)
    a, b = cache.add(2), cache.add(5)
    places = set()
    for _ in range(100):
        cache.step([(a, 1), (b, 1)])
        cache.attend()
        plan = cache.plan
        kept = (plan.positions, plan.slots, plan.rows, plan.lengths, plan.offsets, plan.tables, plan.metadata.key_ends)
        places.add(tuple(x.data_ptr() for x in (*kept, *cache.pool.keys, *cache.pool.values)))
    assert len(places) == 1


@pytest.mark.cuda
@pytest.mark.parametrize("page_size", [16, 128])
def test_a_captured_decode_step_serves_later_steps(page_size):
    cache = Cache(page_size=page_size, pages=300, heads=8, kv_heads=2, dim=64, dtype=torch.bfloat16, device="cuda",
                  max_sequences=4, max_tokens=256, max_length=600)  # fmt: skip
    seqs = [cache.add(n) for n in (100, 3, 250)]
    q, k, v = (torch.zeros(4, heads, 64, dtype=torch.bfloat16, device="cuda") for heads in (8, 2, 2))

    def compute():
        cache.pool.write(0, k, v, cache.plan)
        return cache.pool.attend(0, q, cache.plan, kernel="decode", return_lse=True)

    cache.plan.step([(seq, 1) for seq in seqs], pad_to=4)
    compute()
    torch.cuda.synchronize()
    for seq in seqs:
        cache.k[seq], cache.v[seq] = torch.cat([cache.k[seq], k[:1]]), torch.cat([cache.v[seq], v[:1]])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = compute()
    for _ in range(40):
        cache.plan.step([(seq, 1) for seq in seqs], pad_to=4)
        for x in (q, k, v):
            x.copy_(cache.random(*x.shape))
        graph.replay()
        for row, seq in enumerate(seqs):
            cache.k[seq], cache.v[seq] = (
                torch.cat([cache.k[seq], k[row : row + 1]]),
                torch.cat([cache.v[seq], v[row : row + 1]]),
            )
        cache.query, cache.rows = q[:3], [(seq, 1) for seq in seqs]
        wanted = cache.expected()
        torch.testing.assert_close(out[:3].double().cpu(), wanted[0], atol=3e-2, rtol=3e-2)
        torch.testing.assert_close(lse[:3].double().cpu(), wanted[1], atol=1e-2, rtol=1e-2)
        assert out[3].abs().max() == 0


@pytest.mark.cuda
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_a_step_on_a_device_copies_once_and_never_waits():
    cache = Cache(page_size=16, dtype=torch.bfloat16, dim=64, device="cuda")
    a, b = cache.add(40), cache.add(7)
    q, k, v = (cache.random(2, heads, 64) for heads in (4, 2, 2))
    cache.plan.step([(a, 1), (b, 1)])
    cache.pool.write(0, k, v, cache.plan)
    cache.pool.attend(0, q, cache.plan)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(5):
            cache.plan.step([(a, 1), (b, 1)])
            cache.pool.write(0, k, v, cache.plan)
            cache.pool.attend(0, q, cache.plan)
    finally:
        torch.cuda.set_sync_debug_mode("default")
