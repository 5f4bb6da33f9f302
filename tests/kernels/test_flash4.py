"""FlashAttention-4 as a kernel: what it refuses, what it calls, and that the results are attention.

The package runs on GPUs alone. Here a stand-in with its signatures computes in float64 (standin_fa4.py), so that
everything around the package's own arithmetic is exact or wrong; the tests marked `cuda` call the package itself.
"""

import inspect
import re
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnspan.errors import KernelError
from attnspan.kernels import KERNELS, Spec, choose_kernel, flash4
from attnspan.layouts import Balanced, Contiguous, HeadTail, Striped
from attnspan.masks import Causal, Documents, Full, PrefixLM, SinkTokens, SlidingWindow
from attnspan.masks.tile import Tile
from tests.attention.harness import Problem, check, run
from tests.kernels import standin_fa4
from tests.kernels.cases import deterministic
from tests.plan.strategies import plans

CAUSAL = Tile(range(4), range(4), -3, 0)
INSTALL = "pip install 'attnspan[fa4]'"


@contextmanager
def standing_in(version=flash4.VERSION, on=(9, 0), package=standin_fa4, devices=("cpu",)):
    """`flash4` as where the package is installed and a GPU is there; the calls that were made."""
    dtypes = (torch.float64, torch.float32, torch.bfloat16)
    with (
        patch.object(flash4, "installed", lambda: version),
        patch.object(flash4, "interface", lambda: package),
        patch.object(flash4, "capability", lambda device: on),
        patch.object(flash4, "traits", replace(flash4.traits, devices=devices, dtypes=dtypes)),
        patch.object(flash4.TAKES, "verified", False),
    ):
        standin_fa4.log.clear()
        yield standin_fa4.log


def inputs(dim=64, value_dim=None, dtype=torch.bfloat16):
    x = torch.empty(1, 2, 4, dim, dtype=dtype)
    return x, x, x if value_dim is None else torch.empty(1, 2, 4, value_dim, dtype=dtype)


# ---- exact ---------------------------------------------------------------------------------------------------------


@st.composite
def problems(draw):
    """Any plan, with head dims that it serves, and any of the features that tensors can have."""
    kv_heads = draw(st.integers(1, 2))
    return Problem.of(
        draw(plans(max_len=24, max_ranks=4).filter(lambda plan: not needs_mask_mod(plan))),
        heads=kv_heads * draw(st.integers(1, 3)),
        kv_heads=kv_heads,
        dim=24,
        kernel="flash4",
        scale=draw(st.sampled_from([None, 0.3, -0.5])),
        sinks=draw(st.booleans()),
        through_lse=draw(st.booleans()),
        memory=draw(st.sampled_from(["BHSD", "BSHD", "BHDS", "rows of more"])),
        wanted=draw(st.sampled_from(["qkvsc", "k", "qv", ""])),
        seed=draw(st.integers(0, 1 << 20)),
    )


def needs_mask_mod(plan):
    """Whether some tile is for a program, which this kernel runs none of."""
    steps = (
        step
        for rank in range(0, plan.ranks, plan.degree)
        for row in range(plan.batch_rows)
        for step in plan.steps(rank, row)
    )
    return any(tile.needs_mask_mod for step in steps for tile in step.tiles)


@given(problems())
@settings(max_examples=max(1, settings.default.max_examples // 4))
def test_any_plan_is_exact(problem):
    with standing_in():
        check(problem)


PACK = Documents([20, 3, 17, 1, 30, 7])
MASKS = {
    "full": Full(),
    "causal": Causal(),
    "documents": Causal() & PACK,
    "window": SlidingWindow(9),
    "window of two sides": SlidingWindow(9, 4),
    "window, documents": SlidingWindow(9) & PACK,
    "prefix": PrefixLM(10),
    "sinks and window": SinkTokens(2) | SlidingWindow(5),
    "nothing": ~Full(),
}
LAYOUTS = {
    "head-tail": lambda mask, ranks: HeadTail(ranks),
    "contiguous": lambda mask, ranks: Contiguous(ranks),
    "striped": lambda mask, ranks: Striped(ranks),
    "balanced": lambda mask, ranks: Balanced(mask, ranks=ranks, chunk=4),
}
STRATEGIES = ["gather", "needed", "needed(2)", "ring", "ulysses(2) x gather"]


def cells():
    """Daily every second of masks and strategies, layouts and ranks in turn; all under `slow`."""
    layouts, ranks = list(LAYOUTS), (1, 2, 3, 4)
    for i, mask in enumerate(MASKS):
        for j, strategy in enumerate(STRATEGIES):
            for layout in layouts:
                for count in ranks:
                    if "ulysses" in strategy and count % 2:
                        continue
                    odd = (
                        (i + j) % 2
                        or layout != layouts[(i + j) % 4]
                        or count != (4 if "ulysses" in strategy else ranks[(2 * i + j) % 4])
                    )
                    yield pytest.param(mask, strategy, layout, count, marks=[pytest.mark.slow] if odd else [])


@pytest.mark.parametrize(("mask", "strategy", "layout", "ranks"), list(cells()))
def test_strategies_masks_layouts_and_ranks(mask, strategy, layout, ranks):
    there = LAYOUTS[layout](MASKS[mask], ranks)
    with standing_in():
        check(Problem(MASKS[mask], there, 78, strategy, kernel="flash4", heads=4, kv_heads=2, dim=24, through_lse=True))


def test_nothing_is_read_that_was_not_written():
    """torch fills new memory with NaN when it is to be deterministic, and the package is told to be so too."""
    blind = Causal() & ~Documents([30, 20, 28])  # rows of the first document see nothing; keys of the last are not seen
    for mask, strategy in ((blind, "gather"), (blind, "ring"), (Causal() & PACK, "needed(2)"), (Causal(), "needed")):
        with standing_in(), deterministic():
            check(Problem(mask, HeadTail(3), 78, strategy, kernel="flash4", heads=2, kv_heads=1, dim=24))


# ---- calls ---------------------------------------------------------------------------------------------------------


def counted(problem):
    """Calls forward and backward of the busiest rank of a batch row, and how often results were merged."""
    ranks = problem.layout.ranks
    with standing_in() as log, patch("attnspan.kernels.accumulator.merge") as merge:
        run(problem)
    return log.count("forward") / ranks, log.count("backward") / ranks, merge.call_count


@pytest.mark.parametrize(
    ("mask", "layout", "strategy", "forward", "backward"),
    [
        (Causal(), HeadTail(2), "gather", 1, 1.5),  # the last rank's two chunks are neighbours, hence one segment
        (Causal(), HeadTail(4), "needed", 1, 1.75),
        (Causal() & PACK, Balanced(Causal() & PACK, ranks=4), "needed", 1, 1),
        (Causal() & PACK, Balanced(Causal() & PACK, ranks=4), "gather", 1, 1),
        (SlidingWindow(9), Contiguous(3), "needed", 1, 1),
        (Full(), Contiguous(3), "gather", 1, 1),
    ],
)
def test_what_one_step_computes_is_one_call_forward_and_is_not_merged(mask, layout, strategy, forward, backward):
    problem = Problem(mask, layout, 78, strategy, kernel="flash4", heads=2, kv_heads=1, dim=24, batch=1)
    assert counted(problem) == (forward, backward, 0)


def test_batch_rows_are_one_call_where_they_are_one_segment():
    problem = Problem(Causal(), Contiguous(2), 32, "gather", kernel="flash4", dim=24, batch=5)
    assert counted(problem) == (1, 1, 0)
    assert counted(replace(problem, layout=HeadTail(2)))[0] == 3  # 5 on the rank with two segments, 1 on the other


def test_gradients_are_written_where_they_leave_from():
    """No copy between the package and the buffer that travels: what it is given lies in that."""
    given = []

    class Watched:
        _flash_attn_fwd = staticmethod(standin_fa4._flash_attn_fwd)

        @staticmethod
        def _flash_attn_bwd(*args, dk=None, dv=None, **rest):
            given.append((dk.untyped_storage().data_ptr(), dv.untyped_storage().data_ptr(), dk.shape))
            return standin_fa4._flash_attn_bwd(*args, dk=dk, dv=dv, **rest)

    problem = Problem(Causal(), Contiguous(2), 32, "gather", kernel="flash4", heads=2, kv_heads=2, dim=24, batch=1)
    with (
        standing_in(package=Watched),
        patch.object(flash4, "_takes", lambda: True),
        patch.object(flash4.TAKES, "verified", True),
    ):
        check(problem)
    (apart,) = [each for each in given if each[2][1] == 32]
    assert apart[0] == apart[1]  # keys and values side by side, as they travel


# ---- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("there", "tensors", "scale", "reason"),
    [
        ({"version": None}, {}, 1.0, f"flash4 needs the package flash-attn-4, which is not installed; {INSTALL}"),
        ({"version": "4.0.0b12"}, {}, 1.0, f"flash4 calls flash-attn-4 4.0.0b36, got 4.0.0b12; {INSTALL}"),
        ({"on": (8, 0)}, {}, 1.0, "flash4 needs a GPU of compute capability 9.x and 10.x, got 8.0"),
        ({"devices": ("cuda",)}, {}, 1.0, "flash4 runs on cuda, got tensors on cpu"),
        ({}, {"dtype": torch.float16}, 1.0, "flash4 needs float64, float32 or bfloat16, got float16"),
        ({}, {"dim": 20}, 1.0, "flash4 needs a head dim that is a multiple of 8 up to 256, got 20"),
        ({}, {"dim": 264}, 1.0, "flash4 needs a head dim that is a multiple of 8 up to 256, got 264"),
        *(
            (
                {},
                {"dim": dim},
                1.0,
                f"flash4 needs a head dim of 24, 32, 56, 64, 88, 96, 120 or 128 and more, got {dim}: "
                "others have wrong gradients",
            )
            for dim in (8, 16, 40, 80, 112)
        ),
        ({"on": (10, 0)}, {"dim": 256}, 1.0, "flash4 needs a head dim that is a multiple of 8 up to 128, got 256"),
        ({}, {"value_dim": 32}, 1.0, "flash4 needs one head dim for keys and values, got 64 and 32"),
        ({}, {}, 0.0, "flash4 needs a scale above 0, got 0.0"),
    ],
)  # fmt: skip
def test_a_refusal_is_a_reason(there, tensors, scale, reason):
    request = Spec(scale), *inputs(**tensors), (CAUSAL,)
    with standing_in(**there):
        assert KERNELS["flash4"].supports(*request) == reason
        with pytest.raises(KernelError, match=re.escape(f"kernel='flash4' cannot compute {CAUSAL}: {reason}; ")):
            choose_kernel("flash4", *request)
    with standing_in():
        assert KERNELS["flash4"].supports(Spec(1.0), *inputs(), (CAUSAL,)) is None


def test_head_dims_whose_gradients_are_right():
    for dim in (24, 32, 56, 88, 96, 128, 136, 192, 256):
        with standing_in():
            assert KERNELS["flash4"].supports(Spec(1.0), *inputs(dim), (CAUSAL,)) is None
    with standing_in(on=(10, 0)):  # there both pad to 32
        assert KERNELS["flash4"].supports(Spec(1.0), *inputs(80), (CAUSAL,)) is None


def test_here_it_is_not_installed_and_its_dtypes_are_half_precision():
    assert flash4.traits.dtypes == (torch.float16, torch.bfloat16)
    reason = flash4.supports(Spec(1.0), *inputs(), (CAUSAL,))
    assert reason == "flash4 runs on cuda, got tensors on cpu"


class Moved:
    """The package with an argument renamed, and with one more that must be given."""

    @staticmethod
    def renamed(q, k, v, softmax_scale=None, window_left=None):
        raise AssertionError("called in spite of its arguments")

    @staticmethod
    def demanding(q, k, v, softcap):
        raise AssertionError("called in spite of its arguments")


@pytest.mark.parametrize("moved", [Moved.renamed, Moved.demanding])
def test_arguments_that_moved_are_a_refusal(moved):
    class Package:
        _flash_attn_fwd = staticmethod(moved)
        _flash_attn_bwd = staticmethod(standin_fa4._flash_attn_bwd)

    with standing_in(package=Package):
        reason = flash4.supports(Spec(1.0), *inputs(), (CAUSAL,))
    assert reason.startswith("flash4 cannot call flash-attn-4 4.0.0b36: kernels/flash4.py: with this version")


def test_the_stand_in_refuses_what_the_package_gets_wrong():
    with pytest.raises(AssertionError, match="share rows or keys"):
        standin_fa4.apart([slice(0, 4), slice(3, 5)])
    with pytest.raises(AssertionError, match="share rows or keys"):  # offsets that go down
        standin_fa4.sums_apart([slice(100, 150), slice(0, 100)], 64, 150)
    standin_fa4.sums_apart([slice(0, 100), slice(100, 150)], 64, 150)


@pytest.mark.parametrize("name", ["_flash_attn_fwd", "_flash_attn_bwd"])
def test_the_stand_in_has_the_signatures_of_the_package(name):
    package = pytest.importorskip("flash_attn.cute.interface")
    if flash4.installed() != flash4.VERSION:
        pytest.skip(f"flash-attn-4 {flash4.installed()} is installed")
    ours, theirs = (inspect.signature(getattr(each, name)) for each in (standin_fa4, package))
    assert [(p.name, p.default) for p in ours.parameters.values()] == [
        (p.name, p.default) for p in theirs.parameters.values()
    ]
    flash4.TAKES.verify()


# ---- "auto" --------------------------------------------------------------------------------------------------------


class Measured:
    """Measurements that say so."""

    def __init__(self, *order):
        self.names = order

    def order(self, dtype, head_dim, tile):
        return self.names

    def in_one_call(self, kernels, dtype, head_dim, tiles):
        assert "flash4" in kernels
        return next(iter(self.names), None)


@pytest.mark.parametrize(
    ("version", "preference", "chosen"),
    [
        (flash4.VERSION, Measured("flash4", "cpu_flash"), "flash4"),
        (flash4.VERSION, Measured("cpu_flash", "flash4"), "auto"),
        (flash4.VERSION, Measured(), "auto"),
        (flash4.VERSION, None, "auto"),
        (None, Measured("flash4", "cpu_flash"), "auto"),
    ],
)
def test_auto_takes_it_only_where_it_is_installed_and_measured_as_the_fastest(version, preference, chosen):
    with standing_in(version=version):
        assert choose_kernel("auto", Spec(1.0, preference=preference), *inputs(), (CAUSAL, CAUSAL)).name == chosen


# ---- the package itself --------------------------------------------------------------------------------------------


@pytest.fixture
def on_gpu():
    if reason := flash4.supports(Spec(1.0), *(x.cuda() for x in inputs()), (CAUSAL,)):
        pytest.skip(reason)


ON_GPU = [
    *((mask, strategy, (8, 2)) for mask in MASKS for strategy in ("gather", "needed(2)", "ring")),
    *((mask, "needed", heads) for mask in ("causal", "documents") for heads in ((4, 4), (6, 2))),
]
"""A new ratio of heads is a new program, which compiles for some seconds."""


@pytest.mark.cuda
@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize(("mask", "strategy", "heads"), ON_GPU)
def test_strategies_and_masks_on_a_gpu(mask, strategy, heads):
    there = Balanced(MASKS[mask], ranks=4) if "documents" in mask else HeadTail(4)
    shape = {"heads": heads[0], "kv_heads": heads[1], "dim": 64, "dtype": torch.bfloat16, "device": "cuda"}
    check(Problem(MASKS[mask], there, 78, strategy, kernel="flash4", through_lse=True, **shape))


LENGTHS = [300, 3, 217, 1, 400, 179]


@pytest.mark.cuda
@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize(
    ("mask", "dim"),
    [
        (Causal(), 128),
        (Causal() & Documents(LENGTHS), 128),
        (SlidingWindow(150), 128),
        (Full(), 128),
        (Causal() & Documents(LENGTHS), 64),
        (Causal() & Documents(LENGTHS), 256),
    ],
)
def test_long_sequences_on_a_gpu(mask, dim):
    """Several blocks of rows and keys, segments that end inside of one, grouped heads, two batch rows."""
    shape = {"heads": 8, "kv_heads": 2, "dim": dim, "dtype": torch.bfloat16, "device": "cuda"}
    for strategy in ("gather", "needed(2)"):
        check(Problem(mask, Balanced(mask, ranks=4), sum(LENGTHS), strategy, kernel="flash4", batch=2, **shape))


@pytest.mark.cuda
@pytest.mark.usefixtures("on_gpu")
def test_on_a_gpu_the_same_bits_come_out_where_torch_must_be_deterministic():
    shape = {"heads": 8, "kv_heads": 2, "dim": 128, "dtype": torch.bfloat16, "device": "cuda"}
    problem = Problem(Causal() & PACK, Balanced(Causal() & PACK, ranks=2), 78, "needed", kernel="flash4", **shape)
    with deterministic():
        first, second = run(problem), run(problem)
    for a, b in zip(first[:5], second[:5], strict=True):
        assert torch.equal(a, b)
