"""Virtual ranks obey every transport's laws, and catch what a real group would not."""

import threading

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from attnspan.errors import TransportError
from attnspan.testing import loopback
from attnspan.transports import Counting, Delayed, transport_of
from tests.transports.conformance import LAWS, held, neighbours, same


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_virtual_ranks_obey(law, ranks):
    loopback(ranks).run(law)


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_slow_links_change_no_result(law):
    loopback(2).run(lambda world: law(Delayed(world, 1e-4)))


def test_results_come_by_rank():
    assert loopback(3).run(lambda world: (world.rank, world.ranks)) == [(0, 3), (1, 3), (2, 3)]


def test_a_world_stands_for_a_group():
    assert loopback(2).run(lambda world: transport_of(world) is world) == [True, True]
    assert repr(loopback(2)) == "Loopback(ranks=2, device='cpu')"
    assert loopback(1).run(repr) == ["World(rank 0 of 1, cpu, group 'loopback')"]


@pytest.mark.parametrize("ranks", [0, 2.0, None])
def test_a_number_of_ranks_that_cannot_be_is_refused(ranks):
    with pytest.raises(TransportError, match="ranks must be a whole number >= 1"):
        loopback(ranks)


def receive(world, source, what="keys"):
    got = torch.full((3,), -1.0)
    return got, world.exchange([], [(source, got)], what)


def test_every_rank_of_every_run_may_trace():
    """In torch 2.11, built for CUDA but without a device, the second would read memory that the first had freed."""

    def rank(world):
        with FakeTensorMode():
            return torch.ones(3).sum().shape

    for _ in range(2):
        assert loopback(2).run(rank) == [(), ()]


# As late as allowed: misuse of buffers shows.


def test_a_receive_read_too_early_shows_its_old_content():
    def early(world):
        after, before = neighbours(world)
        got = torch.full((3,), -1.0)
        pending = world.exchange([(after, held(world.rank, 3))], [(before, got)])
        world.all_gather_bytes(b"")  # all have posted
        early = got.tolist()
        world.all_gather_bytes(b"")  # all have looked
        pending.wait()
        same(got, held(before, 3))
        return early

    assert loopback(2).run(early) == [[-1.0] * 3] * 2


def test_a_send_overwritten_too_early_arrives_overwritten():
    def early(world):
        after, before = neighbours(world)
        out, got = torch.zeros(3), torch.full((3,), -1.0)
        pending = world.exchange([(after, out)], [(before, got)])
        out.fill_(7)
        world.all_gather_bytes(b"")
        pending.wait()
        return got.tolist()

    assert loopback(2).run(early) == [[7.0] * 3] * 2


# No hangs: an error of one rank ends the others, and is the one that is raised.


def test_the_error_of_a_rank_is_raised_with_its_rank_and_ends_the_others():
    said = {}

    def fn(world):
        if world.rank == 2:
            raise ValueError("boom")
        try:
            receive(world, 2)[1].wait()
        except TransportError as error:
            said[world.rank] = str(error), type(error.__cause__)
            raise

    with pytest.raises(ValueError, match="boom") as caught:
        loopback(4).run(fn)
    assert not isinstance(caught.value, TransportError)
    assert caught.value.__notes__ == ["on virtual rank 2"]
    assert said == dict.fromkeys([0, 1, 3], ("given up: rank 2 raised ValueError: boom", ValueError))


def test_posting_after_an_error_elsewhere_raises_too():
    failed = threading.Event()

    def fn(world):
        if world.rank == 0:
            world.post.fail(KeyError("x"), "rank 0 raised KeyError: 'x'")
            failed.set()
        failed.wait()
        with pytest.raises(TransportError, match="given up: rank 0 raised KeyError"):
            receive(world, 1 - world.rank)

    with pytest.raises(KeyError):
        loopback(2).run(fn)


def test_ranks_that_wait_for_each_other_are_told_so():
    def fn(world):
        receive(world, neighbours(world)[1])[1].wait()

    with pytest.raises(TransportError) as caught:
        loopback(3).run(fn)
    assert str(caught.value) == (
        "no rank can go on: rank 0 waits for keys from rank 2; rank 1 waits for keys from rank 0; "
        "rank 2 waits for keys from rank 1"
    )


def test_a_rank_that_waits_for_one_that_has_ended_is_told_so():
    def fn(world):
        if world.rank == 0:
            world.exchange([(1, torch.ones(3))], [], "queries").wait()

    with pytest.raises(TransportError) as caught:
        loopback(2).run(fn)
    assert str(caught.value) == "no rank can go on: rank 0 waits for rank 1 to take queries; rank 1 has ended"


def test_a_wait_ends_after_the_timeout():
    release = threading.Event()

    def fn(world):
        if world.rank == 1:
            release.wait()
            return
        try:
            receive(world, 1)[1].wait()
        finally:
            release.set()

    with pytest.raises(TransportError, match=r"^rank 0 waited 0.05 s for keys from rank 1; .* longer timeout="):
        loopback(2, timeout=0.05).run(fn)


def test_a_failed_wait_fails_again():
    def fn(world):
        _, pending = receive(world, 1 - world.rank)
        for _ in range(2):
            with pytest.raises(TransportError, match=r"no rank can go on|given up"):
                pending.wait()

    with pytest.raises(TransportError, match="some messages never arrived"):
        loopback(2).run(fn)


def test_ends_that_disagree_are_told_so():
    def fn(world):
        sends = [(1, torch.ones(2, 3))] if world.rank == 0 else []
        receives = [(0, torch.ones(5))] if world.rank == 1 else []
        world.exchange(sends, receives, "keys").wait()

    with pytest.raises(TransportError) as caught:
        loopback(2).run(fn)
    assert str(caught.value) == "rank 0 sends rank 1 keys (2, 3) float32, which expects keys (5,) float32"


def test_messages_that_nobody_takes_are_an_error():
    def fn(world):
        if world.rank == 0:
            world.exchange([(1, torch.ones(2))], [], "keys")

    with pytest.raises(TransportError, match=r"never arrived: rank 0 did not wait for rank 1 to take keys$"):
        loopback(2).run(fn)


def test_a_group_can_be_used_again_after_an_error():
    group = loopback(2)
    with pytest.raises(ZeroDivisionError):
        group.run(lambda world: 1 / world.rank)
    assert group.run(lambda world: world.all_gather_bytes(bytes([world.rank]))) == [[b"\0", b"\1"]] * 2


# Threads: what ranks inherit from the caller.


def surroundings(world):
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None,
        torch.empty(0).device.type,
    )


@pytest.mark.parametrize(
    ("context", "expected"),
    [
        (torch.enable_grad, (True, False, None, "cpu")),
        (torch.no_grad, (False, False, None, "cpu")),
        (torch.inference_mode, (False, True, None, "cpu")),
        (lambda: torch.autocast("cpu", torch.float16), (True, False, torch.float16, "cpu")),
        (lambda: torch.device("meta"), (True, False, None, "meta")),
    ],
    ids=["grad", "no_grad", "inference", "autocast", "default device"],
)
def test_ranks_start_in_the_callers_surroundings(context, expected):
    with context():
        assert loopback(2, "cpu").run(surroundings) == [expected] * 2
    assert surroundings(None) == (True, False, None, "cpu")


def test_backward_runs_in_the_rank_that_calls_it():
    seen = {}

    class Swap(torch.autograd.Function):
        @staticmethod
        def forward(ctx, tensor, world):
            ctx.world = world
            return tensor * 1

        @staticmethod
        def backward(ctx, grad):
            seen[ctx.world.rank] = threading.current_thread().name
            got = torch.empty_like(grad)
            peer = 1 - ctx.world.rank
            ctx.world.exchange([(peer, grad)], [(peer, got)], "gradients").wait()
            return got, None

    def fn(world):
        leaf = torch.ones(2, requires_grad=True)
        (Swap.apply(leaf, world) * (world.rank + 1)).sum().backward()
        return leaf.grad.tolist()

    assert loopback(2).run(fn) == [[2.0, 2.0], [1.0, 1.0]]
    assert seen == {0: "rank 0", 1: "rank 1"}


def test_a_log_shows_what_overlaps():
    def fn(world):
        world = Counting(world)
        peer = 1 - world.rank
        got = torch.empty(4)
        pending = world.exchange([(peer, torch.ones(4))], [(peer, got)], "keys")
        world.mark("tile")
        pending.wait()
        return [(event.kind, event.what) for event in world.log]

    assert loopback(2).run(fn) == [[("exchange", "keys"), ("mark", "tile"), ("wait", "keys")]] * 2


@pytest.mark.cuda
@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_virtual_ranks_on_one_cuda_device_obey(law, ranks):
    with torch.device("cuda"):
        loopback(ranks, "cuda").run(law)


@pytest.mark.cuda
@pytest.mark.parametrize("ranks", [2, 4])
def test_on_one_cuda_device_ranks_exchange_in_forward_and_backward(ranks):
    class Rotate(torch.autograd.Function):
        @staticmethod
        def forward(ctx, tensor, world):
            ctx.world = world
            return rotate(tensor, world, *neighbours(world))

        @staticmethod
        def backward(ctx, grad):
            return rotate(grad, ctx.world, *reversed(neighbours(ctx.world))), None

    def rotate(tensor, world, target, source):
        got = torch.empty_like(tensor)
        world.exchange([(target, tensor)], [(source, got)]).wait()
        return got

    def fn(world):
        assert world.device.index is not None
        streams.add(torch.cuda.current_stream().cuda_stream)
        leaf = torch.full((2**20,), float(world.rank), device="cuda", requires_grad=True)
        out = Rotate.apply(leaf, world)
        (out * (world.rank + 1)).sum().backward()
        return out[-1].item(), leaf.grad[-1].item()

    streams = set()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        results = loopback(ranks, "cuda").run(fn)
    assert results == [((rank - 1) % ranks, (rank + 1) % ranks + 1) for rank in range(ranks)]
    assert streams == {stream.cuda_stream}
