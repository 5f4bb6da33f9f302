"""What every transport does: one function per law, called on every rank of a group with that rank's transport.

A rank knows what the others hold (`held`), so each compares what it got with what was sent, and no law needs another
channel. The same functions run on virtual ranks and in real processes, on the default device.
"""

import pytest
import torch

from attnspan.errors import AttentionError, KernelError, PageError, PoolExhausted, TransportError
from attnspan.transports import Counting, consensus

DTYPES = [
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn,
    torch.int64, torch.int32, torch.uint8, torch.bool, torch.complex64,
]  # fmt: skip


def held(rank, *shape, salt=0, dtype=torch.float32):
    """What ``rank`` holds: random, and known to all."""
    generator = torch.Generator("cpu").manual_seed(1000 * salt + rank)
    return torch.randn(*shape, generator=generator, device="cpu").to(torch.get_default_device(), dtype)


def others(transport):
    return [rank for rank in range(transport.ranks) if rank != transport.rank]


def neighbours(transport):
    """The next rank and the one before, around the ring."""
    return (transport.rank + 1) % transport.ranks, (transport.rank - 1) % transport.ranks


def same(got, expected):
    """Bit for bit, shape and dtype too."""
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    assert got.contiguous().view(-1).view(torch.uint8).equal(expected.contiguous().view(-1).view(torch.uint8))


def an_exchange_delivers_messages_of_uneven_sizes(transport):
    def size(source, target):
        return 1 + 3 * source + 7 * target

    me = transport.rank
    out = {peer: held(me, size(me, peer), salt=peer) for peer in others(transport)}
    into = {peer: torch.empty(size(peer, me)) for peer in others(transport)}
    transport.exchange(list(out.items()), list(into.items())).wait()
    for peer, got in into.items():
        same(got, held(peer, size(peer, me), salt=me))


def every_dtype_travels(transport):
    after, before = neighbours(transport)
    for dtype in DTYPES:
        got = torch.zeros(2, 3).to(dtype)
        transport.exchange([(after, held(transport.rank, 2, 3, dtype=dtype))], [(before, got)], str(dtype)).wait()
        same(got, held(before, 2, 3, dtype=dtype))


def several_messages_between_two_ranks_keep_their_order(transport):
    sizes = [4, 4, 0, 9, 4, 1, 9]
    after, before = neighbours(transport)
    into = [torch.empty(size) for size in sizes]
    transport.exchange(
        [(after, held(transport.rank, size, salt=i)) for i, size in enumerate(sizes)],
        [(before, got) for got in into],
    ).wait()
    for i, got in enumerate(into):
        same(got, held(before, sizes[i], salt=i))


def many_exchanges_are_in_flight_and_waited_for_in_any_order(transport):
    after, before = neighbours(transport)
    into = [torch.empty(50 + i % 3) for i in range(9)]
    pendings = [
        transport.exchange([(after, held(transport.rank, *got.shape, salt=i))], [(before, got)])
        for i, got in enumerate(into)
    ]
    for pending in reversed(pendings):
        pending.wait()
        pending.wait()  # a second time is free
    for i, got in enumerate(into):
        same(got, held(before, *got.shape, salt=i))


def views_are_sent_and_filled_in_place(transport):
    after, before = neighbours(transport)
    buffer = torch.zeros(3, 4)
    column = held(transport.rank, 4, 6)[:, 2]
    assert not column.is_contiguous()
    transport.exchange([(after, column)], [(before, buffer[1])]).wait()
    same(buffer[1], held(before, 4, 6)[:, 2])
    assert not buffer[[0, 2]].any()


def a_receive_that_is_not_contiguous_is_refused(transport):
    _, before = neighbours(transport)
    with pytest.raises(TransportError, match=r"keys from rank \d: a receive must be contiguous, got strides \(1, 3\)"):
        transport.exchange([], [(before, torch.empty(2, 3).t())], "keys")


def a_rank_that_does_not_exist_is_refused(transport):
    with pytest.raises(TransportError, match=f"keys to rank {transport.ranks}: ranks are 0 to {transport.ranks - 1}"):
        transport.exchange([(transport.ranks, torch.ones(1))], [], "keys")


def a_tensor_on_another_device_is_refused(transport):
    with pytest.raises(TransportError, match=f"this transport moves tensors on {transport.device}, got meta"):
        transport.exchange([(0, torch.ones(1, device="meta"))], [], "keys")


def a_rank_sends_to_itself(transport):
    me = transport.rank
    first, second = torch.empty(3), torch.empty(2, 2)
    transport.exchange([(me, held(me, 3)), (me, held(me, 4, salt=1))], [(me, first), (me, second)]).wait()
    same(first, held(me, 3))
    same(second, held(me, 4, salt=1).view(2, 2))
    with pytest.raises(TransportError, match=r"sends itself \(3,\) but expects nothing"):
        transport.exchange([(me, first)], [])


def ranks_without_messages_need_not_call(transport):
    last = transport.ranks - 1
    if transport.rank == 0:
        transport.exchange([(last, torch.ones(3))], [(0, torch.empty(3))] if last == 0 else []).wait()
    elif transport.rank == last:
        got = torch.empty(3)
        transport.exchange([], [(0, got)]).wait()
        same(got, torch.ones(3))


def tensors_without_elements_never_travel(transport):
    transport.exchange([], []).wait()
    transport.exchange([(peer, torch.empty(0, 4)) for peer in others(transport)], []).wait()  # nobody receives


def tensors_that_need_gradients_are_sent_as_they_are(transport):
    after, before = neighbours(transport)
    got = torch.empty(3)
    leaf = held(transport.rank, 3).requires_grad_()
    transport.exchange([(after, leaf * 1)], [(before, got)]).wait()
    same(got, held(before, 3))
    assert not got.requires_grad


def buffers_are_the_callers_again_after_wait(transport):
    after, before = neighbours(transport)
    out, kept = held(transport.rank, 2**20), []
    for turn in range(3):
        got = torch.empty(2**20)
        transport.exchange([(after, out)], [(before, got)]).wait()
        kept.append(got)
        out.fill_(turn)  # what was sent is rewritten at once: no earlier result may change
    same(kept[0], held(before, 2**20))
    same(kept[1], torch.zeros(2**20))
    same(kept[2], torch.ones(2**20))


def compute_goes_on_while_messages_are_under_way(transport):
    """Rank 1 sends only when it has heard that rank 0 has posted the receive and computed: a post that blocks hangs."""
    if transport.ranks == 1:
        return
    ones, hosts = torch.ones(8, 8), transport.hosts
    ones @ ones  # CUDA loads a kernel when it first runs, and that waits for messages under way
    if transport.rank == 0:
        got = torch.empty(1000)
        pending = transport.exchange([], [(1, got)], "keys")
        computed = (ones @ ones).cpu()
        # By the hosts: on NCCL a receive that waits holds up every message posted after it.
        hosts.exchange([(1, computed)], [], "a tile").wait()
        pending.wait()
        same(got, held(1, 1000))
    if transport.rank == 1:
        heard = torch.empty(8, 8, device="cpu")
        hosts.exchange([], [(0, heard)], "a tile").wait()
        same(heard, torch.full((8, 8), 8.0, device="cpu"))
        transport.exchange([(0, held(1, 1000))], [], "keys").wait()


def a_gather_brings_everybodys_tensor(transport):
    whole = torch.empty(transport.ranks, 2, 3)
    transport.gather(held(transport.rank, 2, 3), list(whole)).wait()
    same(whole, torch.stack([held(rank, 2, 3) for rank in range(transport.ranks)]))


def a_gather_takes_uneven_and_empty_shards(transport):
    outputs = [torch.empty(2, 3 * rank, dtype=torch.bfloat16) for rank in range(transport.ranks)]
    transport.gather(held(transport.rank, 2, 3 * transport.rank, dtype=torch.bfloat16), outputs).wait()
    for rank, got in enumerate(outputs):
        same(got, held(rank, 2, 3 * rank, dtype=torch.bfloat16))


def a_gather_into_too_few_outputs_is_refused(transport):
    message = f"keys: outputs must be one tensor per rank, {transport.ranks}, got {transport.ranks + 1}"
    with pytest.raises(TransportError, match=message):
        transport.gather(torch.ones(1), [torch.ones(1)] * (transport.ranks + 1), "keys")


def summed(parts):
    """The sum in rank order, in float32, rounded once."""
    total = torch.zeros_like(parts[0], dtype=torch.promote_types(parts[0].dtype, torch.float32))
    for part in parts:
        total = total + part
    return total.to(parts[0].dtype)


def same_sum(transport, got, parts):
    """Bit for bit; NCCL sums float32 and float64 in an order of its own, which is the same for two ranks."""
    expected, wide = summed(parts), got.dtype in (torch.float32, torch.float64)
    if transport.device.type == "cpu" or transport.ranks < 3 or not wide:
        return same(got, expected)
    rounding = transport.ranks * torch.finfo(got.dtype).eps * torch.stack(parts).abs().sum(0)
    assert ((got - expected).abs() <= rounding).all()


def a_reduce_scatter_sums_in_rank_order_and_rounds_once(transport):
    for dtype in [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64]:
        for unevenness in [0, 3]:
            # Rank r gets the tensors of salt r; with uneven sizes rank 0 gets nothing.
            shapes = [(2, 3 * unevenness * rank if unevenness else 8) for rank in range(transport.ranks)]
            inputs = [held(transport.rank, *shape, salt=rank, dtype=dtype) for rank, shape in enumerate(shapes)]
            output = torch.empty_like(inputs[transport.rank])
            transport.reduce_scatter(inputs, output).wait()
            mine = shapes[transport.rank]
            everyones = [held(rank, *mine, salt=transport.rank, dtype=dtype) for rank in range(transport.ranks)]
            same_sum(transport, output, everyones)


def a_reduce_scatter_may_write_over_its_own_input(transport):
    inputs = [held(transport.rank, 5, salt=rank) for rank in range(transport.ranks)]
    transport.reduce_scatter(inputs, inputs[transport.rank]).wait()
    everyones = [held(rank, 5, salt=transport.rank) for rank in range(transport.ranks)]
    same_sum(transport, inputs[transport.rank], everyones)


def an_all_reduce_gives_every_rank_the_same_bits(transport):
    tensor = held(transport.rank, 33)
    transport.all_reduce(tensor).wait()
    same(tensor, summed([held(rank, 33) for rank in range(transport.ranks)]))


def all_hear_what_each_says(transport):
    said = [b"x" * rank + bytes([rank, 255]) * (rank != 1) for rank in range(transport.ranks)]
    assert transport.all_gather_bytes(said[transport.rank]) == said
    assert transport.all_gather_bytes(b"") == [b""] * transport.ranks


def counting_counts_what_travels_and_changes_nothing(transport):
    counted = Counting(transport)
    after, before = neighbours(transport)
    into = torch.empty(4), torch.empty(0), torch.empty(2)
    pending = counted.exchange(
        [(after, held(transport.rank, size)) for size in (4, 0, 2)], [(before, got) for got in into], "keys"
    )
    counted.mark("a tile")
    pending.wait()
    same(into[0], held(before, 4))
    assert [(event.kind, event.what) for event in counted.log] == [
        ("exchange", "keys"),
        ("mark", "a tile"),
        ("wait", "keys"),
    ]
    assert counted.sent == ({after: 24} if transport.ranks > 1 else {})
    assert counted.received == ({before: 24} if transport.ranks > 1 else {})

    for call in [a_gather_brings_everybodys_tensor, an_all_reduce_gives_every_rank_the_same_bits]:
        call(counted)
    a_reduce_scatter_may_write_over_its_own_input(counted)
    all_hear_what_each_says(counted)
    assert counted.calls == {"exchange": 1, "gather": 1, "all_reduce": 1, "reduce_scatter": 1, "agree": 2}
    collectives = 4 * (6 + 33 + 5)
    expected = dict.fromkeys(others(transport), collectives)
    expected |= {after: collectives + 24} if transport.ranks > 1 else {}
    assert counted.sent == expected


def a_refusal_of_one_rank_is_raised_by_all(transport):
    last = transport.ranks - 1
    words = PageError("no room") if transport.rank == last else ["go", transport.rank]
    with pytest.raises(PageError) as raised:
        consensus.all_gather_object(transport, words, "a test")
    assert str(raised.value) == ("no room" if transport.rank == last else f"on rank {last}: no room")


def words_come_by_rank_and_the_odd_ranks_are_named(transport):
    words = {"length": 8, "share": 0.1, "rank 1": transport.rank == 1, "sum": 1 << 63}
    said = consensus.all_gather_object(transport, words, "a test")
    assert said == [{**words, "rank 1": rank == 1} for rank in range(transport.ranks)]
    assert consensus.differing_ranks(said) == [1][: transport.ranks - 1]
    [(usual, ranks), *others] = consensus.ranks_by_value(said)
    assert (usual, ranks) == (said[0], [rank for rank in range(transport.ranks) if rank != 1])
    assert others == [({**words, "rank 1": True}, [1])][: transport.ranks - 1]


def refusals_of_many_ranks_make_one_error(transport):
    """Of their class if they have one; a class of one process alone, or one that is made of numbers, is its parent."""

    class Private(PageError):
        pass

    wrong = [Private("no room"), PoolExhausted(3, 2), KernelError("no kernel")][min(transport.rank, 2)]
    said = consensus.all_gather_outcomes(transport, wrong, "a test")
    assert [type(each) for each in said] == [PageError, PageError, KernelError, KernelError][: transport.ranks]
    error = consensus.refusal(said, mixed=AttentionError)
    assert type(error) is (PageError if transport.ranks < 3 else AttentionError)
    if transport.ranks == 1:
        assert str(error) == "no room"
    else:
        assert str(error).startswith("on rank 0: no room; on rank 1: 3 pages needed, 2 free;")
    if transport.ranks == 4:
        assert str(error).endswith("; on ranks 2, 3: no kernel")
    assert consensus.refusal(["go"] * transport.ranks) is None


def a_record_travels_while_a_rank_does_something_else(transport):
    first = consensus.post(transport, bytes([transport.rank, 7]), "a test")
    second = consensus.post(transport, b"x", "a test")
    assert second() == [b"x"] * transport.ranks
    assert first() == [bytes([rank, 7]) for rank in range(transport.ranks)]


LAWS = [
    an_exchange_delivers_messages_of_uneven_sizes,
    every_dtype_travels,
    several_messages_between_two_ranks_keep_their_order,
    many_exchanges_are_in_flight_and_waited_for_in_any_order,
    views_are_sent_and_filled_in_place,
    a_receive_that_is_not_contiguous_is_refused,
    a_rank_that_does_not_exist_is_refused,
    a_tensor_on_another_device_is_refused,
    a_rank_sends_to_itself,
    ranks_without_messages_need_not_call,
    tensors_without_elements_never_travel,
    tensors_that_need_gradients_are_sent_as_they_are,
    buffers_are_the_callers_again_after_wait,
    compute_goes_on_while_messages_are_under_way,
    a_gather_brings_everybodys_tensor,
    a_gather_takes_uneven_and_empty_shards,
    a_gather_into_too_few_outputs_is_refused,
    a_reduce_scatter_sums_in_rank_order_and_rounds_once,
    a_reduce_scatter_may_write_over_its_own_input,
    an_all_reduce_gives_every_rank_the_same_bits,
    all_hear_what_each_says,
    a_refusal_of_one_rank_is_raised_by_all,
    words_come_by_rank_and_the_odd_ranks_are_named,
    refusals_of_many_ranks_make_one_error,
    a_record_travels_while_a_rank_does_something_else,
    counting_counts_what_travels_and_changes_nothing,
]
