"""Pages over ranks give what one rank gives: virtual ranks, and real processes once."""

import pytest
import torch
import torch.distributed as dist

from attnspan.errors import PageError
from attnspan.layouts import Contiguous, HeadTail, Striped
from attnspan.masks import Full, MaskMod, SlidingWindow, Tree
from attnspan.paged import AfterPrefix, PageAllocator, PageLayer, PagePool, ShardedPages, StepPlan
from attnspan.testing import loopback
from attnspan.transports.counting import Counting
from attnspan.transports.group import transport_of
from tests.devices import here
from tests.paged.cases import words
from tests.processes import on_backends, spawn

HEADS, KV_HEADS, DIM = 6, 2, 8
NAN = float("nan")


def stored_here():
    """How a pool keeps its pages."""
    return {"dtype": torch.float64, "device": torch.get_default_device()}


def drawn(seed, *shape):
    random = torch.Generator().manual_seed(seed)
    return here(torch.randn(*shape, generator=random, dtype=torch.float64, device="cpu"))


def tensors(seed, tokens):
    return [drawn(seed + i, tokens, heads, DIM) for i, heads in enumerate((HEADS, KV_HEADS, KV_HEADS))]


HISTORY = [[17, 1, 3], [1, 0, 30], [1, 6, 1], [5, 1, 1], [1, 1, 1]]  # new tokens of three sequences, step by step
OPTIONS = [
    {},
    {"mask": SlidingWindow(6)},
    {"mask": Full()},
    {"mask": MaskMod(lambda b, h, q, k: (k <= q) & (k % 3 != 1))},
    {"score_mod": lambda s, b, h, q, k: 4 * torch.tanh(s / 4) - 0.01 * (q - k)},
    {"sinks": torch.linspace(-1, 1, HEADS, dtype=torch.float64)},
    {"kernel": "reference"},
]


def walk(write, attend, plan, allocator, options):
    """All steps of HISTORY; every step's (out, lse)."""
    seqs = [allocator.add() for _ in range(3)]
    found = []
    for number, counts in enumerate(HISTORY):
        batch = [(seq, new) for seq, new in zip(seqs, counts, strict=True)]
        q, k, v = tensors(10 * number, sum(counts))
        plan.step(batch)
        write(0, k, v, plan)
        found.append(attend(0, q, plan, return_lse=True, **options))
    return found


def alone(options):
    allocator = PageAllocator(num_pages=64, page_size=4)
    pool = PagePool(allocator, [PageLayer(KV_HEADS, DIM)], dtype=torch.float64)
    plan = StepPlan(pool, max_sequences=3, max_tokens=64, max_length=100)
    return walk(pool.write, pool.attend, plan, allocator, options)


def over(world, options, interleave=2, page_size=4):
    ranks = transport_of(world).ranks
    allocator = PageAllocator(num_pages=64, page_size=page_size * ranks)
    pool = PagePool(allocator, [PageLayer(KV_HEADS, DIM)], **stored_here(), page_size=page_size)
    for pages in (*pool.keys, *pool.values):
        pages.fill_(NAN)
    pages = ShardedPages(pool, world, interleave=interleave)
    plan = pages.plan(max_sequences=3, max_tokens=64, max_length=100)
    found = walk(pages.write, pages.attend, plan, allocator, options)
    pages.agree()
    return found


def same(found, wanted):
    for (out, lse), (dense, dense_lse) in zip(found, wanted, strict=True):
        torch.testing.assert_close(out, dense, atol=1e-10, rtol=1e-10)
        torch.testing.assert_close(lse, dense_lse, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("options", OPTIONS, ids=words)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_any_number_of_ranks_gives_what_one_gives(ranks, options):
    results = loopback(ranks).run(lambda world: over(world, options))
    same(results[0], alone(options))
    for other in results[1:]:
        assert all(torch.equal(a[0], b[0]) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize(("page_size", "interleave"), [(1, 1), (4, 1), (4, 4), (6, 3)])
def test_any_interleaving_gives_what_one_rank_gives(page_size, interleave):
    results = loopback(3).run(lambda world: over(world, {}, interleave, page_size))
    same(results[2], alone({}))


def test_a_tree_of_guesses_over_ranks():
    mask = AfterPrefix(Tree([-1, 0, 0, 1]))

    def guessed(world):
        ranks = world.ranks if world else 1
        allocator = PageAllocator(num_pages=20, page_size=4 * ranks)
        pool = PagePool(allocator, [PageLayer(KV_HEADS, DIM)], dtype=torch.float64, page_size=4)
        pages = ShardedPages(pool, world, interleave=2) if world else pool
        sizes = {"max_sequences": 2, "max_tokens": 64, "max_length": 100}
        plan = pages.plan(**sizes) if world else StepPlan(pool, **sizes)
        a, b = allocator.add(), allocator.add()
        for number, batch in enumerate([[(a, 11), (b, 2)], [(a, 4), (b, 4)]]):
            q, k, v = tensors(number, sum(new for _, new in batch))
            plan.step(batch)
            pages.write(0, k, v, plan)
        return pages.attend(0, q, plan, mask=mask, return_lse=True)

    same([loopback(3).run(guessed)[1]], [guessed(None)])


def test_one_message_to_each_rank_and_step():
    def counted(world):
        counting = Counting(world)
        over(counting, {})
        return counting.calls, counting.sent

    for calls, sent in loopback(3).run(counted):
        assert calls["gather"] == len(HISTORY)
        tokens = sum(map(sum, HISTORY))
        assert set(sent.values()) == {tokens * HEADS * (DIM + 1) * 8}  # out and lse side by side, in float64


class Session:
    """As much of a context-parallel session as pages need."""

    def __init__(self, layout, seq_len, transport):
        self.layout, self.seq_len, self.transport = layout, seq_len, transport


def handed_over(world, layout, batch, seq_len, pack):
    """A prompt under context parallelism, then a step of decoding; (out, lse) of the step."""
    allocator = PageAllocator(num_pages=64, page_size=4 * world.ranks)
    pool = PagePool(allocator, [PageLayer(KV_HEADS, DIM)], **stored_here(), page_size=4)
    pages = ShardedPages(pool, world, interleave=2)
    plan = pages.plan(max_sequences=4, max_tokens=64, max_length=100)
    seqs = [allocator.add() for _ in pack]
    plan.step(list(zip(seqs, pack, strict=True)))
    _, k, v = tensors(3, batch * seq_len)
    k, v = (x.view(batch, seq_len, KV_HEADS, DIM).transpose(1, 2) for x in (k, v))
    mine = torch.tensor(layout.positions(seq_len)[world.rank], dtype=torch.int64)
    session = Session(layout, seq_len, world)
    pages.from_context_parallel(0, k[:, :, mine], v[:, :, mine], session, plan)
    q, k, v = tensors(4, len(pack))
    plan.step([(seq, 1) for seq in seqs])
    pages.write(0, k, v, plan)
    return pages.attend(0, q, plan, return_lse=True)


def never_spread(batch, seq_len, pack):
    allocator = PageAllocator(num_pages=64, page_size=4)
    pool = PagePool(allocator, [PageLayer(KV_HEADS, DIM)], dtype=torch.float64)
    plan = StepPlan(pool, max_sequences=4, max_tokens=64, max_length=100)
    seqs = [allocator.add() for _ in pack]
    for number, counts in ((3, pack), (4, [1] * len(pack))):
        q, k, v = tensors(number, sum(counts))
        plan.step(list(zip(seqs, counts, strict=True)))
        pool.write(0, k, v, plan)
    return pool.attend(0, q, plan, return_lse=True)


@pytest.mark.parametrize("kind", [Contiguous, HeadTail, Striped])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("batch", "seq_len", "pack"),
    [(1, 23, [23]), (2, 13, [13, 13]), (1, 20, [4, 1, 15]), (1, 2, [2])],
    ids=["one", "two rows", "a pack of documents", "fewer tokens than ranks"],
)
def test_keys_of_context_parallelism_go_on_in_pages(kind, ranks, batch, seq_len, pack):
    results = loopback(ranks).run(lambda world: handed_over(world, kind(ranks), batch, seq_len, pack))
    wanted = never_spread(batch, seq_len, pack)
    for found in results:
        same([found], [wanted])


def test_handing_over_is_one_exchange_of_what_is_elsewhere():
    def counted(world):
        counting = Counting(world)
        handed_over(counting, Contiguous(3), 1, 24, [24])
        return counting.calls["exchange"], sum(counting.sent.values())

    results = loopback(3).run(counted)
    assert [calls for calls, _ in results] == [1, 1, 1]
    attended = 2 * HEADS * (DIM + 1) * 8  # one query's (out, lse), to two ranks
    moved = sum(sent - attended for _, sent in results)
    elsewhere = sum(Contiguous(3).owner(24, p) != p // 2 % 3 for p in range(24))
    assert moved == elsewhere * KV_HEADS * 2 * DIM * 8


@pytest.mark.parametrize(
    ("message", "make"),
    [
        ("allocator's page_size must be ranks x the pool's, 2 x 4, got 4", lambda w: sharded(w, 4, 4)),
        ("interleave must divide the pool's page_size", lambda w: sharded(w, 8, 4, interleave=3)),
        ("interleave must be a whole number >= 1", lambda w: sharded(w, 8, 4, interleave=0)),
        ("a part of each page is for ShardedPages", lambda w: a_plain_plan(w)),
        ("made by ShardedPages.plan", lambda w: attend_with_a_plan_of_another_interleave(w)),
        ("must be one of this pool's", lambda w: attend_with_a_plan_of_another_pool(w)),
        ("the plan is stale", lambda w: hand_over_after_a_change(w)),
        ("layer must be below the pool's 1 layers, got 1", lambda w: hand_over_wrongly(w, layer=1)),
        ("page tables differ between rank 0 and ranks \\[1\\]", lambda w: disagree(w)),
        ("cp must be on the same ranks", lambda w: hand_over_wrongly(w, ranks=5)),
        ("multiple of seq_len=9, got 8", lambda w: hand_over_wrongly(w, seq_len=9)),
        ("key must be this rank's shard", lambda w: hand_over_wrongly(w, tokens=3)),
    ],
)
def test_what_does_not_fit_is_refused_on_every_rank(message, make):
    def each(world):
        with pytest.raises(PageError, match=message):
            make(world)

    loopback(2).run(each)


def sharded(world, size, local, interleave=1):
    allocator = PageAllocator(num_pages=4, page_size=size)
    return ShardedPages(
        PagePool(allocator, [PageLayer(KV_HEADS, DIM)], page_size=local, dtype=torch.float64),
        world,
        interleave=interleave,
    )


def a_plain_plan(world):
    StepPlan(sharded(world, 8, 4).pool, max_sequences=1, max_tokens=4, max_length=8)


def attend_with_a_plan_of_another_interleave(world):
    pages = sharded(world, 8, 4)
    other = ShardedPages(pages.pool, world, interleave=2)
    plan = other.plan(max_sequences=1, max_tokens=4, max_length=8).step([(pages.allocator.add(), 1)])
    pages.attend(0, drawn(0, 1, HEADS, DIM), plan)


def attend_with_a_plan_of_another_pool(world):
    pages, other = sharded(world, 8, 4), sharded(world, 8, 4)
    plan = other.plan(max_sequences=1, max_tokens=4, max_length=8).step([(other.allocator.add(), 1)])
    pages.attend(0, drawn(0, 1, HEADS, DIM), plan)


def hand_over_after_a_change(world):
    """Between two layers, the pages went to another sequence."""
    pages = sharded(world, 8, 4)
    seq = pages.allocator.add()
    plan = pages.plan(max_sequences=1, max_tokens=8, max_length=8).step([(seq, 8)])
    session = Session(Contiguous(2), 8, world)
    shard = drawn(0, 1, KV_HEADS, 4, DIM)
    pages.from_context_parallel(0, shard, shard, session, plan)
    pages.allocator.free(seq)
    pages.from_context_parallel(0, shard, shard, session, plan)


def disagree(world):
    pages = sharded(world, 8, 4)
    pages.allocator.step([(pages.allocator.add(), 1 + world.rank)])
    pages.agree()


def hand_over_wrongly(world, ranks=2, seq_len=8, tokens=4, layer=0):
    pages = sharded(world, 8, 4)
    plan = pages.plan(max_sequences=1, max_tokens=8, max_length=8).step([(pages.allocator.add(), 8)])
    session = Session(Contiguous(ranks), seq_len, type("Fake", (), {"rank": world.rank, "ranks": ranks}))
    pages.from_context_parallel(layer, *(drawn(0, 1, KV_HEADS, tokens, DIM) for _ in range(2)), session, plan)


def in_a_process(world):
    decoded = handed_over(world, HeadTail(world.ranks), 1, 23, [23])
    return [*over(dist.group.WORLD, {}), decoded]


@on_backends(3, nccl=(2, 3, 4))
def test_real_processes_give_what_one_rank_gives(ranks, backend):
    for found in spawn(ranks, in_a_process, backend=backend):
        same(found, [*alone({}), never_spread(1, 23, [23])])
