"""Keys in 8 bits: what is stored is within its bound, stays as it was written, and is attended to exactly.

Exactly: attention over a quantised cache is attention over the numbers that it stores, as close as float32 is; how far
these are from what was written is bounded, and so is what that does to the result.
"""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnspan.errors import KernelError, PageError
from attnspan.masks import SlidingWindow
from attnspan.paged import PageAllocator, PageLayer, PagePool, PrefixCache, StepPlan
from attnspan.paged.kernels import decode, flex
from attnspan.paged.metadata import tensors
from attnspan.paged.quantised import MAX_CODES, MIN_SCALE, Quantised, quantise
from attnspan.paged.scoring import Scoring
from tests.paged.cases import NAN, Cache, agree

DTYPES = [torch.int8, torch.float8_e4m3fn]
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def error_bound(x, dtype):
    """How far a stored number may be from each of x: [Note: how far off] in paged/quantised.py."""
    wide = x.double()
    most = wide.abs().amax(-1, keepdim=True).clamp(min=MAX_CODES[dtype] * MIN_SCALE).expand_as(wide)
    rounding = most * 2.0**-22  # of the division and the product, in float32
    if dtype == torch.int8:
        return most / 254 + rounding
    return torch.maximum(wide.abs() / 16, most / 448 / 1024) + rounding


class Stored(Cache):
    """A quantised cache beside the numbers that it stores. Codes cannot be NaN, so scales are."""

    def __init__(self, dtype, wanted=torch.float32, **options):
        self.stored = dtype
        super().__init__(dtype=wanted, **options)
        layer = PageLayer(
            self.layer.kv_heads, self.layer.head_dim, window=self.layer.window, dtype=wanted, quantised=dtype
        )
        self.pool = PagePool(self.allocator, [layer], device=self.device)
        sizes = {name: getattr(self.plan, name) for name in ("max_sequences", "max_tokens", "max_length")}
        self.plan = StepPlan(self.pool, **sizes)
        self.layer = self.pool.layers[0]
        self.written_k, self.written_v = {}, {}
        self.poison()

    def step(self, batch, **options):
        before = {seq: len(self.k[seq]) for seq, _ in batch}
        q = super().step(batch, **options)
        for seq, _ in batch:
            for kept, written in ((self.k, self.written_k), (self.v, self.written_v)):
                new = kept[seq][before[seq] :]
                written[seq] = torch.cat([written.get(seq, new[:0]), new])
                kept[seq] = torch.cat([kept[seq][: before[seq]], quantise(new, self.stored).dequantise()])
        return q

    def poison(self, new=False):
        if isinstance(self.pool.keys[0], Quantised):
            pool, self.pool = self.pool, type("Scales", (), {})()
            self.pool.keys = [pages.scales[..., None] for pages in pool.keys]
            self.pool.values = [pages.scales[..., None] for pages in pool.values]
            super().poison(new)
            self.pool = pool


@each_dtype
@pytest.mark.parametrize("kernel", ["auto", "gather", "reference"])
def test_attention_is_that_of_the_numbers_stored(dtype, kernel):
    cache = Stored(dtype, page_size=3)
    a, b, c = (cache.add() for _ in range(3))
    for batch in ([(a, 17), (b, 1), (c, 40)], [(c, 1), (a, 5), (b, 2)], [(a, 1), (b, 1), (c, 1)]):
        cache.step(batch)
        agree(cache.attend(kernel=kernel), cache.expected(), torch.float32)
    agree(cache.attend(mask=SlidingWindow(4)), cache.expected(mask=SlidingWindow(4)), torch.float32)


@each_dtype
def test_half_precision_queries_meet_stored_numbers_in_float32(dtype):
    cache = Stored(dtype, wanted=torch.bfloat16, page_size=4)
    a = cache.add(20)
    cache.step([(a, 3)])
    agree(cache.attend(), cache.expected(), torch.bfloat16)


@each_dtype
@given(st.integers(0, 10_000), st.floats(-46, 37), st.floats(0, 4))  # from less than float32 knows to nearly its most
def test_a_stored_number_is_within_its_bound(dtype, seed, size, spread):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(5, 3, 16, generator=generator) * 10**size
    x = x * 10 ** (-spread * torch.rand(5, 3, 16, generator=generator))
    x[0, 0] = 0.0
    error = (quantise(x, dtype).dequantise().double() - x.double()).abs()
    assert (error <= error_bound(x, dtype)).all()


@each_dtype
def test_twin_half_the_bound_is_not_kept(dtype):
    x = torch.randn(2000, 64, generator=torch.Generator().manual_seed(0))
    error = (quantise(x, dtype).dequantise().double() - x.double()).abs()
    assert (error > 0.9 * error_bound(x, dtype)).any()


@each_dtype
def test_the_result_is_within_what_the_bounds_allow(dtype):
    """A score is off by at most e = scale * sum |q| |dk|; weights by a factor of e^2e; the rest follows."""
    cache = Stored(dtype, page_size=4, dim=64)
    seq = cache.add(60)
    cache.step([(seq, 4)])
    found = cache.attend()[0].double()
    k, v = cache.written_k[seq].double(), cache.written_v[seq].double()
    stored = cache.k[seq], cache.v[seq]
    cache.k[seq], cache.v[seq] = k.float(), v.float()
    wanted = cache.expected()[0]
    cache.k[seq], cache.v[seq] = stored
    per_head = cache.query.double().abs().unflatten(1, (2, 2))
    off = torch.einsum("nhgd,mhd->nhgm", per_head, error_bound(k, dtype)).amax(-1).flatten(1) * 64**-0.5
    most = v.abs().amax(0).repeat_interleave(2, 0)  # of each head and dim
    bound = torch.expm1(2 * off).unsqueeze(-1) * most + error_bound(v, dtype).amax(0).repeat_interleave(2, 0) + 1e-5
    error = (found - wanted).abs()
    assert (error <= bound).all()
    assert error.max() > 1e-4  # and the cache is not secretly exact
    assert error.max() < {torch.int8: 0.01, torch.float8_e4m3fn: 0.1}[dtype]  # of values around 1


@each_dtype
def test_what_was_written_keeps_every_bit(dtype):
    cache = Stored(dtype, page_size=4, host_pages=30)
    a = cache.add(6)
    slots = cache.plan.slots.clone()

    def bits():
        pages = cache.pool.keys[0]
        return pages.codes.flatten(0, 1)[slots].clone(), pages.scales.flatten(0, 1)[slots].clone()

    before = bits()
    cache.generator.manual_seed(3)
    [b] = cache.fork(a, 1)
    cache.written_k[b], cache.written_v[b] = cache.written_k[a], cache.written_v[a]
    cache.step([(a, 1), (b, 1)])  # one of them on a copy of the last page, next to a new token
    assert torch.equal(bits()[0][:4], before[0][:4])
    agree(cache.attend(), cache.expected(), torch.float32)
    cache.pool.swap_out(a)
    cache.poison()
    cache.pool.swap_in(a)
    cache.step([(a, 1), (b, 1)])
    agree(cache.attend(), cache.expected(), torch.float32)


@each_dtype
def test_a_prefix_hit_finds_codes_and_scales(dtype):
    cache = Stored(dtype, page_size=4)
    prefixes = PrefixCache(cache.allocator)
    prompt = list(range(11))
    seq, _ = prefixes.add(prompt)
    cache.k[seq], cache.v[seq] = cache.random(0, 2, 8), cache.random(0, 2, 8)
    cache.step([(seq, 11)])
    prefixes.insert(seq, prompt)
    hit, length = prefixes.add([*prompt[:6], 99, 98])
    cache.k[hit], cache.v[hit] = cache.k[seq][:length], cache.v[seq][:length]
    cache.step([(hit, 8 - length)])
    agree(cache.attend(), cache.expected(), torch.float32)


def test_pages_take_half_the_room():
    allocator = PageAllocator(num_pages=4, page_size=16)
    plain = PagePool(allocator, [PageLayer(2, 128)], dtype=torch.bfloat16)
    stored = PagePool(allocator, [PageLayer(2, 128, quantised=torch.int8)], dtype=torch.bfloat16)
    sizes = [sum(x.nbytes for x in tensors(*pool.keys, *pool.values)) for pool in (plain, stored)]
    assert sizes[1] / sizes[0] == (8 + 32 / 128) / 16


def test_what_cannot_be_is_refused():
    with pytest.raises(PageError, match=r"quantised must be torch\.int8 or torch\.float8_e4m3fn, got torch\.int4"):
        PageLayer(1, 8, quantised=torch.int4)
    cache = Stored(torch.int8, page_size=4)
    cache.step([(cache.add(), 1)])
    with pytest.raises(KernelError, match="kernel='flex' cannot attend over these pages"):
        cache.attend(kernel="flex")
    assert flex.supports(None, cache.plan.metadata, *on_cuda(cache)) == (
        "flex reads keys as they were written, got torch.int8 codes"
    )


def on_cuda(cache):
    """A query that says it is on CUDA, and the pages."""
    query = SimpleNamespace(device=torch.device("cuda"), dtype=torch.float32, shape=cache.query.shape)
    return query, cache.pool.keys[0], cache.pool.values[0]


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_decode_reads_codes_that_the_device_knows(capability, monkeypatch):
    monkeypatch.setattr(decode, "_capability", lambda device: capability)
    monkeypatch.setattr(decode, "has_triton", lambda: True)
    reasons = []
    for dtype in DTYPES:
        cache = Stored(dtype, page_size=4)
        cache.step([(cache.add(), 1)])
        reasons.append(decode.supports(Scoring(1.0), cache.plan.metadata, *on_cuda(cache)))
    old = "decode needs a device of compute capability 8.9 for torch.float8_e4m3fn, got (8, 0)"
    assert reasons == [None, old if capability < (8, 9) else None]


def test_twin_poisoned_scales_would_show():
    cache = Stored(torch.int8, page_size=4)
    seq = cache.add(5)
    cache.step([(seq, 1)])
    cache.pool.keys[0].scales[cache.allocator.table(seq)[0], 2] = NAN
    assert cache.attend()[0].isnan().any()
