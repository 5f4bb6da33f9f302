"""Any FlexAttention program is exact under any strategy: forward, lse and all gradients, against the oracle.

A function whose bands are few becomes a mask of bands, and no kernel asks it. `by_blocks` keeps that from happening, so
that what kernels ask is tried on every program.
"""

from contextlib import nullcontext

import pytest
import torch

from attnspan.attention import Attention, attention
from attnspan.errors import AttentionError, KernelError, MaskError
from attnspan.kernels import flex
from attnspan.layouts import Balanced, Contiguous, HeadTail, RoundRobinByWork, Striped
from attnspan.masks import Causal, Documents, Mask, MaskMod
from attnspan.plan import Plan
from attnspan.testing import loopback
from tests import oracle
from tests.attention import programs
from tests.attention.harness import Problem, Scoring, check, on_rank
from tests.attention.programs import HEADS, WRITTEN, N, problem

STRATEGIES = ["ring", "gather", "needed", "needed(2)", "ulysses", "ulysses(2) x ring", "ulysses(2) x needed"]
LAYOUTS = [HeadTail, Contiguous, Striped]


def ranks_of(strategy, n):
    """A number of ranks from 1 to 4 that the strategy can have."""
    return 4 if "(2) x" in strategy else 1 + n % 4


def turn(name, strategy):
    return list(WRITTEN).index(name) + STRATEGIES.index(strategy)


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        # Every sixth one daily: each program under one strategy or two, each strategy with a sixth of the programs.
        pytest.param(name, strategy, marks=[pytest.mark.slow] if turn(name, strategy) % 6 else [])
        for name in WRITTEN
        for strategy in STRATEGIES
    ],
)
def test_every_program_is_exact_under_every_strategy(by_blocks, name, strategy):
    n = turn(name, strategy) // 6  # so that ranks and lse take turns among the daily ones
    layout = LAYOUTS[n % 3](ranks_of(strategy, n))
    check(problem(name, layout, strategy, through_lse=n % 2 == 0))


@pytest.mark.parametrize("name", WRITTEN)
def test_every_program_is_exact_as_it_is_planned(name):
    check(problem(name, HeadTail(3), "needed"))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("name", WRITTEN)
def test_every_program_is_exact_on_every_number_of_ranks(by_blocks, name, ranks, strategy):
    if ranks % 2 and "(2) x" in strategy:
        return
    for layout in LAYOUTS:
        check(problem(name, layout(ranks), strategy, through_lse=True))


FEATURES = {
    "float32": {"dtype": torch.float32},
    "bfloat16": {"dtype": torch.bfloat16},
    "one query head per key head": {"kv_heads": HEADS},
    "one key head": {"kv_heads": 1},
    "value head dim": {"value_dim": 5},
    "sinks and lse": {"sinks": True, "through_lse": True},
    "memory": {"memory": "rows of more"},
    "gradients of captured tensors alone": {"wanted": "c"},
    "gradients of queries alone": {"wanted": "q"},
    "no gradients": {"wanted": ""},
    "scale": {"scale": 0.7},
}


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize(
    "name",
    [
        "relative bias, per-head window",
        *(pytest.param(x, marks=pytest.mark.slow) for x in ("document", "learned bias")),
    ],
)
def test_every_feature_goes_with_programs(by_blocks, name, feature):
    check(problem(name, HeadTail(3), "needed(2)", **FEATURES[feature]))


@pytest.mark.parametrize("name", ["dilated", "a BlockMask by head", "document"])
@pytest.mark.parametrize("layout", [Balanced, RoundRobinByWork])
def test_layouts_by_work_take_functions_and_block_masks(by_blocks, layout, name):
    """Their work is that of the blocks that hold anything, row by row if asked."""
    mask = WRITTEN[name][0]()
    small = {"chunk": 4} if layout is Balanced else {"block": 4}
    dealt = layout(mask, ranks=3, per_row=mask.rows > 1, **small)
    assert dealt.imbalance(mask, N) < 1.5
    check(Problem(mask, dealt, N, "needed", heads=HEADS, kv_heads=2, batch=2))


def test_work_of_a_block_mask_is_counted_in_its_blocks(by_blocks):
    mask = Mask.from_block_mask(programs.listed(programs.row_and_head, (8, 16), HEADS))
    plan = Plan(mask, Contiguous(2), N)
    listed = (mask.full_RHIJ | mask.partial_RHIJ).any(1)  # for any head
    pairs = 0
    for row, i, j in listed.nonzero().tolist():
        pairs += min(8, N - 8 * i) * min(16, N - 16 * j)
        assert row < 2
    assert sum(plan.work(rank) for rank in range(2)) == pairs


def test_needed_moves_only_blocks_that_hold_a_pair(by_blocks):
    """A window over four contiguous shards: the last rank does not hear of the first one's keys."""
    plan = Plan(MaskMod(programs.sliding_window, block=8), Contiguous(4), 64, "needed")
    assert set(plan.received(3)) == {2}
    assert plan.received(3)[2] <= 16


# ---- the flex kernel -------------------------------------------------------------------------------------------------


def written_out(q, keys, score_mod, block_mask, scale):
    """What FlexAttention does, densely: blocks that are not listed are skipped, and full ones not asked."""
    k, v = flex._apart(keys, q.shape[3])
    scores = q @ oracle.per_query_head(k, q).mT * scale
    if score_mod is not None:
        scores = oracle.scored(score_mod, scores)
    asked = oracle.scored(lambda _, *indices: block_mask.mask_mod(*indices), scores)
    lists = [(block_mask.kv_num_blocks, block_mask.kv_indices)]
    lists += [(block_mask.full_kv_num_blocks, block_mask.full_kv_indices)]
    partial, full = (blocks(*each, block_mask.BLOCK_SIZE[0], scores.shape[2:]) for each in lists)
    allowed = full | (partial & asked)
    return oracle.dense(scores, allowed, [(allowed, oracle.per_query_head(v, q))])


class WrittenOut:
    """In the place of what is compiled."""

    fn = staticmethod(written_out)

    def roomy(self, *_):
        return nullcontext()


def blocks(counts, indices, size, lengths):
    """The pairs in listed blocks."""
    allowed = torch.zeros(lengths, dtype=torch.bool)
    for i, count in enumerate(counts[0, 0].tolist()):
        for j in indices[0, 0, i, :count].tolist():
            allowed[i * size : (i + 1) * size, j * size : (j + 1) * size] = True
    return allowed


FLEX = ["relative bias, per-head window", "a BlockMask by head", "learned bias", "rows of tables", "tanh soft-cap"]


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        # Daily each program under one strategy or two, each strategy with two programs or more.
        pytest.param(name, strategy, marks=[] if (n + m) % 3 != 1 else [pytest.mark.slow])
        for n, name in enumerate(FLEX)
        for m, strategy in enumerate(["gather", "ring", "ulysses(2) x needed"])
    ],
)
def test_the_flex_kernel_is_exact_if_flex_attention_is(by_blocks, monkeypatch, name, strategy):
    """Block lists, positions, merged gradients and captured tensors, in float64, with FlexAttention written out."""
    monkeypatch.setattr(flex, "supports", lambda *_: None)
    monkeypatch.setattr(flex, "_compiled", lambda key: WrittenOut())
    monkeypatch.setattr(flex, "BLOCK", 4)
    for layout, sinks in ((Striped(4), False), (HeadTail(4), True)):
        check(problem(name, layout, strategy, kernel="flex", through_lse=True, sinks=sinks))


def test_a_score_mod_over_a_mask_of_bands_may_go_to_flex(monkeypatch):
    """By `auto` too, which takes it wherever it can run: it asks the mask's own rule."""
    monkeypatch.setattr(flex, "supports", lambda *_: None)
    monkeypatch.setattr(flex, "_compiled", lambda key: WrittenOut())
    x = torch.randn(1, 2, 8, 16, dtype=torch.float64)
    attend = {"mask": Causal(), "layout": Contiguous(1), "seq_len": 8, "score_mod": lambda s, b, h, q, k: s - (q - k)}
    found = [
        loopback(1).run(lambda world, kernel=kernel: attention(x, x, x, group=world, kernel=kernel, **attend))[0]
        for kernel in ("auto", "blocks")
    ]
    torch.testing.assert_close(*found, rtol=0, atol=1e-12)  # float64: sums in another order


@pytest.mark.parametrize("kernel", ["auto", "blocks"])
def test_a_number_among_the_indices_of_a_table_is_an_index(kernel):
    table = torch.rand(1, 12, 12) < 0.5
    table[0].fill_diagonal_(True)
    mask, x = MaskMod(lambda b, h, q, k: table[0, q, k], block=4), torch.randn(1, 2, 12, 8, dtype=torch.float64)
    (found,) = loopback(1).run(
        lambda world: attention(x, x, x, mask=mask, layout=Contiguous(1), seq_len=12, group=world, kernel=kernel)
    )
    expected = (x @ x.mT * 8**-0.5).masked_fill(~table[0], -torch.inf).softmax(-1) @ x
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)  # float64: sums in another order


@pytest.mark.parametrize("name", WRITTEN)
def test_every_program_here_combines_numbers_and_looks_them_up(name):
    """Such programs run without vmap, and FlexAttention can compile them."""
    whole = problem(name, Contiguous(1), "gather", kernel="blocks")

    def rank(world):
        score_mod = whole.scoring.of(*whole.whole.captured) if whole.scoring else None
        mods = Attention(whole.plan, world, kernel="blocks", score_mod=score_mod).bound.mods(whole.whole.query)
        return [program.is_flat for program in (mods.score_mod, mods.mask_mod) if program is not None]

    assert all(loopback(1).run(rank)[0])


@pytest.mark.cuda
@pytest.mark.parametrize("kernel", ["flex", "band"])
@pytest.mark.parametrize("name", WRITTEN)
def test_every_program_is_exact_on_cuda(name, kernel):
    """Two strategies in one test: what is compiled for one serves the other."""
    for strategy, ranks in (("gather", 2), ("needed(2)", 3)):
        half = {"device": "cuda", "dtype": torch.bfloat16, "dim": 16, "kernel": kernel, "through_lse": True}
        check(problem(name, HeadTail(ranks), strategy, **half))


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["relative bias table", "per-head window", "learned bias", "a BlockMask by head"])
def test_every_program_is_exact_by_blocks_on_cuda(name):
    check(problem(name, HeadTail(2), "ring", device="cuda", kernel="blocks"))


PACKS = [(300, 468), (128, 400, 240), (768,), (1, 255, 256, 256)]


@pytest.mark.cuda
@pytest.mark.parametrize(("strategy", "ranks"), [("gather", 3), ("ring", 3), ("needed", 2)])
def test_other_documents_run_what_was_compiled(strategy, ranks):
    """Forward and backward. Under "needed" packs differ in how many keys travel: two of them tell the compiler so."""
    from torch._dynamo.utils import counters

    def graphs_after(*masks):
        for mask in masks:
            half = {"device": "cuda", "dtype": torch.bfloat16, "dim": 16, "kernel": "flex"}
            check(Problem(mask, HeadTail(ranks), sum(PACKS[0]), strategy, **half))
        return counters["stats"]["unique_graphs"]

    flex._compiled.cache_clear()  # what other tests had compiled
    packs = [Causal() & Documents(lengths) for lengths in PACKS]
    before, warm, after = graphs_after(), graphs_after(*packs[:2]), graphs_after(*packs[2:])
    assert before < warm == after
    assert after < graphs_after(Causal())  # another program is another one


# ---- torch.compile ---------------------------------------------------------------------------------------------------


def test_other_captured_values_and_other_masks_do_not_compile_anew():
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()

    def rank(world):
        query, key, value = torch.randn(3, 1, 2, 12, 8).unbind()

        def model(query, attend):
            return attend(query, key, value).square().sum()

        counter = CompileCounterWithBackend("aot_eager")
        fast = torch.compile(model, fullgraph=True, backend=counter)
        for n in range(3):
            table = torch.randn(2, 13, requires_grad=True)
            mask = MaskMod(lambda b, h, q, k, n=n: (q >= k) & ((q - k) % (n + 2) == 0))
            plan = Plan(mask, Contiguous(1), 12, "gather")
            attend = Attention(plan, world, score_mod=programs.relative(table))
            q = query.clone().requires_grad_()
            found = torch.autograd.grad(fast(q, attend), [q, table])
            true = torch.autograd.grad(model(q, attend), [q, table])
            for x, y in zip(found, true, strict=True):
                torch.testing.assert_close(x, y)
        assert counter.frame_count == 1

    loopback(1).run(rank)
    torch._dynamo.reset()


def test_a_closure_made_anew_is_agreed_on_once():
    """What is told apart is the program, not the function object; tensors that it captured are inputs."""
    from attnspan.transports import Counting

    def rank(world):
        transport = Counting(world)
        x = torch.randn(1, 2, 6, 8)
        plan = Plan(Causal(), Contiguous(2), 12, "gather")
        outs = []
        for _ in range(3):
            table = torch.randn(2, 13, generator=torch.Generator().manual_seed(len(outs)))
            outs.append(attention(x, x, x, plan=plan, group=transport, score_mod=programs.relative(table)))
        assert not torch.equal(outs[0], outs[1])
        return transport.calls["agree"]

    assert loopback(2).run(rank) == [1, 1]


# ---- torch's defect --------------------------------------------------------------------------------------------------


def test_a_score_mod_sees_global_positions():
    """torch's own context parallelism hands a score_mod the positions of the shard: the same bias on every rank."""
    seen = Scoring(lambda: lambda score, b, h, q, k: score + 0.3 * q - 0.2 * k)
    whole = Problem(Causal(), HeadTail(2), 16, "gather", scoring=seen, heads=2)
    check(whole)

    def local(problem, world):
        def shifted(score, b, h, q, k):
            return score + 0.3 * (q % 8) - 0.2 * k

        return on_rank(
            problem,
            world,
            lambda q, k, v, s: attention(q, k, v, plan=problem.plan, group=world, score_mod=shifted, return_lse=True),
        )

    with pytest.raises(AssertionError, match="exceed"):
        check(whole, local)


# ---- refusals --------------------------------------------------------------------------------------------------------


def branching(score, b, h, q, k):
    return score if q > k else score * 2


def four_arguments(score, b, q, k):
    return score


def a_bool(score, b, h, q, k):
    return score > 0


def two_scores(score, b, h, q, k):
    return torch.stack([score, score])


def a_number(score, b, h, q, k):
    return 1.0


def in_place(score, b, h, q, k):
    return score.mul_(2)


REFUSED = {
    "branching": (branching, r"^branching could not be evaluated as a score_mod: .*control flow"),
    "arity": (four_arguments, r"^four_arguments could not be evaluated as a score_mod: .*takes 4 positional arguments"),
    "dtype": (a_bool, r"^a_bool must return a floating-point tensor, got torch.bool"),
    "shape": (two_scores, r"^two_scores must return one score for one pair of indices, got shape \(2,\)"),
    "no tensor": (a_number, r"^a_number must return a floating-point tensor, got float"),
    "in place": (in_place, r"^in_place must not change tensors in place, got aten.mul_.Tensor; return a new one"),
    "no function": (3, r"^score_mod must be a function \(score, b, h, q_idx, kv_idx\) -> score, got 3"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_score_mod_that_cannot_be_evaluated_is_refused_by_name(what):
    fn, message = REFUSED[what]
    with pytest.raises(AttentionError, match=message):
        loopback(1).run(lambda world: Attention(Plan(Causal(), Contiguous(1), 8), world, score_mod=fn))


@pytest.mark.parametrize("kernel", ["reference", "cpu_flash"])
def test_kernels_that_run_no_programs_say_so(by_blocks, kernel):
    with pytest.raises(KernelError, match=f"{kernel} runs no score_mod .*; for this tile use blocks, or auto"):
        check(problem("ALiBi", HeadTail(2), "gather", kernel=kernel))
    with pytest.raises(
        KernelError, match=rf"{kernel} runs no mask_mod \(MaskMod\(dilated\)\); for this tile use blocks"
    ):
        check(problem("dilated", HeadTail(2), "gather", kernel=kernel))


def test_a_mask_of_other_heads_is_refused(by_blocks):
    with pytest.raises(AttentionError, match="query must have the mask's 4 heads, got 2"):
        check(problem("per-head window", HeadTail(2), "gather", heads=2))


def test_a_block_mask_of_another_length_is_refused():
    mask = Mask.from_block_mask(programs.listed(programs.document, (16, 8), None))
    with pytest.raises(
        MaskError, match=r"block_mask is for lengths \(37, 37\), got \(64, 64\); give the mask of the whole"
    ):
        Plan(mask, Contiguous(2), 64).steps(0)


def test_a_mask_whose_tables_were_changed_in_place_is_refused():
    def rank(world):
        ids = torch.tensor([0] * 6 + [1] * 6)
        plan = Plan(MaskMod(lambda b, h, q, k: ids[q] == ids[k]) & Causal(), Contiguous(1), 12)
        x = torch.randn(1, 2, 12, 8)
        attention(x, x, x, plan=plan, group=world)
        ids[3:6] = 1
        attention(x, x, x, plan=plan, group=world)

    with pytest.raises(
        AttentionError, match=r"mask: <lambda> has changed: .* make a new mask of it, as MaskMod\(<lambda>\), and"
    ):
        loopback(1).run(rank)


def test_ranks_must_run_the_same_program():
    def rank(world):
        x = torch.randn(1, 2, 6, 8)
        mods = [programs.softcap(), lambda score, b, h, q, k: score * 2]
        attention(x, x, x, plan=Plan(Causal(), Contiguous(2), 12), group=world, score_mod=mods[world.rank])

    with pytest.raises(AttentionError, match="all ranks must run the same plan, kernel, scale, programs and shapes"):
        loopback(2).run(rank)
