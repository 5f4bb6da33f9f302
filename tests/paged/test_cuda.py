"""The same laws on a CUDA device, for the kernels that run there. Slots that are nobody's hold NaN."""

import pytest
import torch

from attnspan.errors import KernelError
from attnspan.masks import Full, MaskMod, PrefixLM, SlidingWindow, Tree
from attnspan.paged import AfterPrefix
from attnspan.paged.kernels import decode
from attnspan.testing import loopback
from tests.paged import test_sharded
from tests.paged.cases import Cache, agree, words
from tests.paged.test_quantised import Stored

# torch's compiler warns of its own parts.
pytestmark = [pytest.mark.cuda, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

KERNELS = ["auto", "decode", "gather", "flex", "reference"]


def history(cache, kernel, **options):
    """A prompt, chunks and single tokens in one batch, then single tokens alone."""
    a, b, c, d = (cache.add() for _ in range(4))
    if kernel == "flex":  # every number of new tokens is compiled
        batches = [[(a, 140), (b, 140)], [(a, 1), (b, 1)]]
    else:
        batches = [[(a, 170), (b, 1), (c, 400)], [(c, 1), (a, 5), (d, 9), (b, 0)], [(a, 1), (b, 1), (c, 1), (d, 1)]]
    for batch in batches:
        cache.step(batch)
        agree(cache.attend(kernel=kernel, **options), cache.expected(**options), cache.layer.dtype)


def sized(page_size, **more):
    sizes = {"pages": 2 + 1200 // page_size + 12, "dim": 64, "heads": 8, "max_tokens": 800, "max_length": 600}
    return {"page_size": page_size, "device": "cuda"} | sizes | more


def cuda_cache(page_size, **more):
    return Cache(**sized(page_size, **more))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("page_size", [1, 3, 16, 128])
def test_ragged_batches(kernel, dtype, page_size):
    if kernel == "flex" and page_size < 128:
        with pytest.raises(KernelError, match="flex needs pages of 128 slots"):
            history(cuda_cache(page_size, dtype=dtype), kernel)
    else:
        history(cuda_cache(page_size, dtype=dtype), kernel)


@pytest.mark.parametrize("page_size", [3, 16, 128])
@pytest.mark.parametrize("lengths", [[3000], [3000, 700, 5]], ids=str)
@pytest.mark.parametrize("window", [None, 1000])
def test_long_rows_are_joined_from_parts(page_size, lengths, window):
    more = {"pages": 4000 // page_size + 12, "max_tokens": 3000, "max_length": 4000, "window": window}
    cache = cuda_cache(page_size, dtype=torch.float32, **more)
    seqs = [cache.add(length) for length in lengths]
    for new in (1, 3):
        cache.step([(seq, new) for seq in seqs])
        shares = decode._shares(2, cache.pool.device, decode.DecodeTuning())
        assert 3000 / decode.MIN_KEYS > 10 < shares, "the long row lies in many"
        agree(cache.attend(kernel="decode"), cache.expected(), torch.float32)


@pytest.mark.parametrize("rows", [31, 60, 300])
@pytest.mark.parametrize("window", [None, 100])
def test_keys_of_many_rows_are_dealt_in_shares(rows, window):
    """Rows of all lengths, some without a token in the step."""
    sizes = {"pages": rows * 40, "max_sequences": rows, "max_tokens": rows * 600, "max_length": 700}
    cache = cuda_cache(16, dtype=torch.bfloat16, window=window, **sizes)
    seqs = [cache.add() for _ in range(rows)]
    cache.step([(seq, 1 + row * 7919 % 600) for row, seq in enumerate(seqs)])
    for new in (lambda row: 1, lambda row: row % 4):
        cache.step([(seq, new(row)) for row, seq in enumerate(seqs)])
        agree(cache.attend(kernel="decode"), cache.expected(), torch.bfloat16)


@pytest.mark.parametrize("kernel", ["auto", "decode", "flex"])
@pytest.mark.parametrize("window", [5, 130])
def test_windows(kernel, window):
    history(cuda_cache(128, dtype=torch.bfloat16, window=window), kernel)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "value_dim"), [(12, 2, 128, 128), (8, 8, 80, 48), (32, 1, 256, 256)]
)
def test_heads_and_dims(heads, kv_heads, dim, value_dim):
    cache = cuda_cache(16, dtype=torch.bfloat16, heads=heads, kv_heads=kv_heads, dim=dim, value_dim=value_dim)
    history(cache, "decode")


@pytest.mark.parametrize("kernel", ["auto", "gather", "flex"])
@pytest.mark.parametrize(
    "options",
    [
        {"mask": Full()},
        {"mask": PrefixLM(30)},
        {"mask": MaskMod(lambda b, h, q, k: (k <= q) & ((q + k) % 3 != 0))},
        {"score_mod": lambda s, b, h, q, k: 5 * torch.tanh(s / 5) - 0.01 * (q - k)},
        {"mask": SlidingWindow(40), "sinks": torch.linspace(-1, 1, 8).cuda() if torch.cuda.is_available() else None},
    ],
    ids=words,
)
def test_masks_and_score_mods(kernel, options):
    history(cuda_cache(128, dtype=torch.bfloat16), kernel, **options)


@pytest.mark.parametrize("kernel", ["auto", "decode", "gather"])
def test_shared_beginnings(kernel):
    cache = cuda_cache(16, dtype=torch.bfloat16)
    a, other = cache.add(300), cache.add(5)
    b, c = cache.fork(a, 2)
    cache.step([(other, 3), (a, 1), (b, 3), (c, 2)], share=True)
    assert cache.plan.shared
    agree(cache.attend(kernel=kernel), cache.expected(), torch.bfloat16)


@pytest.mark.parametrize("stored", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("page_size", [3, 16, 128])
def test_keys_in_eight_bits(stored, dtype, page_size):
    for kernel in ("decode", "auto"):
        history(Stored(stored, wanted=dtype, **sized(page_size, window=130 if page_size == 16 else None)), kernel)


@pytest.mark.parametrize("stored", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_keys_in_eight_bits_with_shared_beginnings_and_odd_dims(stored):
    cache = Stored(stored, wanted=torch.bfloat16, **sized(16, heads=12, dim=80))
    a, other = cache.add(300), cache.add(5)
    b, c = cache.fork(a, 2)
    cache.step([(other, 3), (a, 1), (b, 3), (c, 2)], share=True)
    assert cache.plan.shared
    agree(cache.attend(kernel="decode"), cache.expected(), torch.bfloat16)


@pytest.mark.parametrize("kernel", ["decode", "gather", "flex"])
def test_a_layer_of_more_numbers_than_32_bits_count(kernel):
    """More than 2^31 keys in one tensor; the sequences lie at its end."""
    cache = Cache(page_size=128, pages=16500, heads=16, kv_heads=8, dim=128, dtype=torch.bfloat16, device="cuda")
    assert cache.pool.keys[0].numel() > 1 << 31
    cache.allocator._free.reverse()
    a, b = cache.add(200), cache.add(30)
    assert min(cache.allocator.table(a) + cache.allocator.table(b)) > 16490
    cache.step([(a, 1), (b, 1)])
    if kernel == "flex":
        with pytest.raises(KernelError, match=r"flex needs layers of at most 2\^31 numbers"):
            cache.attend(kernel=kernel)
    else:
        agree(cache.attend(kernel=kernel), cache.expected(), torch.bfloat16)


@pytest.mark.parametrize("kernel", ["auto", "flex"])
def test_trees(kernel):
    cache = cuda_cache(128, dtype=torch.float32)
    a, b = cache.add(9), cache.add(140)
    cache.step([(a, 3), (b, 3)])
    mask = AfterPrefix(Tree([-1, 0, 0]))
    wanted = [x.cpu().double() for x in cache.attend(kernel="reference", mask=mask)]
    agree(cache.attend(kernel=kernel, mask=mask), wanted, torch.float32)


def test_physical_pages_do_not_matter():
    outs = []
    for seed in range(2):
        cache = cuda_cache(16, dtype=torch.bfloat16, seed=9)
        pages = cache.allocator.num_pages - 1
        cache.allocator._free = torch.randperm(pages, generator=torch.Generator().manual_seed(seed)).add(1).tolist()
        seq = cache.add(333)
        cache.step([(seq, 1)])
        outs.append(cache.attend(kernel="decode"))
    assert torch.equal(outs[0][0], outs[1][0])
    assert torch.equal(outs[0][1], outs[1][1])


def test_growing_compiles_nothing_anew():
    cache = cuda_cache(128, dtype=torch.bfloat16)
    a, b = cache.add(100), cache.add(250)
    cache.step([(a, 1), (b, 1)])
    cache.attend(kernel="flex")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(60):
            cache.step([(a, 1), (b, 1)])
            agree(cache.attend(kernel="flex"), cache.expected(), torch.bfloat16)


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_on_one_device(ranks, monkeypatch):
    """Virtual ranks; the kernel sees positions that are spread."""
    cache = cuda_cache(16, dtype=torch.float32)
    assert cache.pool.device.type == "cuda"

    def each(world):
        from attnspan.paged import PageAllocator, PageLayer, PagePool, ShardedPages

        allocator = PageAllocator(num_pages=32, page_size=16 * world.ranks)
        pool = PagePool(allocator, [PageLayer(2, 64, window=90)], page_size=16, device="cuda")
        pages = ShardedPages(pool, world, interleave=4)
        plan = pages.plan(max_sequences=2, max_tokens=300, max_length=400)
        a, b = allocator.add(), allocator.add()
        for number, batch in enumerate([[(a, 200), (b, 3)], [(a, 7), (b, 1)], [(a, 1), (b, 1)]]):
            tokens = sum(new for _, new in batch)
            q, k, v = (test_sharded.drawn(number + i, tokens, h, 64).float().cuda() for i, h in enumerate((8, 2, 2)))
            plan.step(batch)
            pages.write(0, k, v, plan)
            found = pages.attend(0, q, plan, return_lse=True, kernel="decode")
            wanted = pages.attend(0, q, plan, return_lse=True, kernel="reference")
            for x, y in zip(found, wanted, strict=True):
                torch.testing.assert_close(x.double(), y.double(), atol=2e-5, rtol=2e-5)

    loopback(ranks, device="cuda").run(each)
