"""On real processes: every strategy on 2, 3 and 4 ranks, of gloo and of NCCL, forward and backward, against the oracle.

The code is the one that virtual ranks run; what is new here is the wire. A spawn takes seconds, so each tries every
problem. Ranks return shards; the parent puts them together and judges.
"""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from attnspan.attention import Attention
from attnspan.errors import AttentionError
from attnspan.layouts import Balanced, Contiguous, HeadTail, Striped
from attnspan.masks import Causal, Documents, KeyPadding, SlidingWindow
from attnspan.testing import loopback
from tests.attention.harness import Problem, compare, on_rank, together
from tests.processes import on_backends, spawn

STRATEGIES = ["ring", "gather", "needed", "needed(3)", "ulysses"]
HYBRIDS = ["ulysses(2) x ring", "ulysses(2) x gather", "ulysses(2) x needed", "ulysses(2) x needed(2)"]
GRID = "ulysses(2) x ring"
PAIR = [1, 3]  # a part of the four, not their first


def problems(ranks):
    """By name, every strategy with every sort of problem."""
    documents = Causal() & Documents([13, 9, 15])
    rows = Causal() & KeyPadding([37, 20])
    plain = {
        "causal": Problem(Causal(), HeadTail(ranks), 37, heads=4, kv_heads=2),
        "documents, sinks and lse": Problem(documents, Striped(ranks), 37, heads=6, sinks=True, through_lse=True),
        "window, float32": Problem(SlidingWindow(6), Contiguous(ranks), 37, heads=4, kv_heads=4, dtype=torch.float32),
        "rows of their own": Problem(rows, Balanced(rows, ranks=ranks, chunk=2, per_row=True), 37, heads=3, kv_heads=3),
        "fewer tokens than ranks": Problem(Causal(), Contiguous(ranks), ranks - 1, heads=2),
        "cross": Problem(Causal(align="bottom"), HeadTail(ranks), 19, kv_len=30, kv_layout=Striped(ranks), value_dim=5),
        "bfloat16": Problem(Causal(), HeadTail(ranks), 37, heads=4, kv_heads=2, dtype=torch.bfloat16),
    }
    strategies = STRATEGIES + (HYBRIDS if ranks % 2 == 0 else [])
    return {(s, name): replace(problem, strategy=s) for s in strategies for name, problem in plain.items()}


def live(world):
    """One process: every problem on the default group, and on four ranks every form that a group can have."""
    found = {name: on_rank(there(problem, world), None) for name, problem in problems(world.ranks).items()}
    return found | {"forms": forms(world)} if world.ranks == 4 else found


def there(problem, world):
    """A problem whose shards are where the world's are."""
    return replace(problem, device=str(world.device))


def forms(world):
    """The same problem on a mesh, on an axis of one, on a process group and on a part of one; twice on one object."""
    four, two = (there(problems(n)["ring", "causal"], world) for n in (4, 2))
    mesh = init_device_mesh(world.device.type, (4,), mesh_dim_names=("cp",))
    grid = init_device_mesh(world.device.type, (2, 2), mesh_dim_names=("dp", "cp"))
    cube = init_device_mesh(world.device.type, (2, 1, 2), mesh_dim_names=("dp", "cp", "heads"))
    pair = dist.new_group(PAIR)
    attend = Attention(four.plan)
    return {
        "mesh": on_rank(four, mesh),
        "process group": on_rank(four, dist.group.WORLD),
        "axis of a mesh": on_rank(two, grid["cp"]),
        "mesh of two axes": on_rank(there(problems(4)[GRID, "causal"], world), grid),
        "two axes of three": on_rank(there(problems(2)[GRID, "causal"], world), cube["cp", "heads"]),
        "mesh of other axes": refused(four, grid),
        "part of the ranks": on_rank(two, pair) if world.rank in PAIR else None,
        "an object, first": on_rank(four, None, lambda q, k, v, s: attend(q, k, v, return_lse=True)),
        "an object, again": on_rank(four, None, lambda q, k, v, s: attend(q, k, v, return_lse=True)),
    }


def refused(problem, grid):
    """What a plan says to a mesh whose second axis is not its Ulysses groups."""
    with pytest.raises(AttentionError) as error:
        Attention(problem.plan, grid)
    return str(error.value)


@on_backends(4, slow=(2, 3))
def test_processes_compute_attention(ranks, backend):
    """Exactly, and on gloo to the bit what virtual ranks find: sums have one order, whatever carries their parts."""
    told = spawn(ranks, live, backend=backend, timeout=120)
    wrong = {}
    for name, problem in problems(ranks).items():
        real = [each[name] for each in told]
        try:
            compare(problem, together(problem, real))
            if backend == "gloo":
                to_the_bit(real, loopback(ranks).run(partial(on_rank, problem)))
        except AssertionError as error:
            wrong[name] = str(error)
    assert not wrong
    if ranks == 4:
        judge_forms([each["forms"] for each in told])


def to_the_bit(real, virtual):
    for one, other in zip(real, virtual, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(one, other, strict=True) if x is not None), "virtual ranks"


def judge_forms(told):
    four, two = (problems(ranks)["ring", "causal"] for ranks in (4, 2))
    grid = problems(4)[GRID, "causal"]
    compare(grid, together(grid, [each["mesh of two axes"] for each in told]))
    assert {each["mesh of other axes"] for each in told} == {
        "group: the second axis of a mesh exchanges heads, and the plan does so in groups of 1, got a mesh of (2, 2); "
        "use strategy='ulysses(2) x ...'"
    }
    for form in ("mesh", "process group", "an object, first", "an object, again"):
        compare(four, together(four, [each[form] for each in told]))
    for form, members in (("axis of a mesh", (0, 1)), ("axis of a mesh", (2, 3)), ("part of the ranks", PAIR)):
        compare(two, together(two, [told[rank][form] for rank in members]))
    pair = problems(2)[GRID, "causal"]
    for members in ((0, 1), (2, 3)):
        compare(pair, together(pair, [told[rank]["two axes of three"] for rank in members]))
