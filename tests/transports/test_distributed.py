"""Real processes over gloo obey every transport's laws, on whole groups and on parts of them, and fail in time.

Starting processes takes seconds, so each spawn tries many things and the tests ask it what it saw.
"""

import os
import signal
import time
import traceback
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from attnspan.errors import RankError, TransportError
from attnspan.testing import Processes
from attnspan.transports import Distributed, transport_of
from attnspan.transports.distributed import _gloo_beside
from tests.pace import in_time, stretched
from tests.processes import Died, Patient, on_backends, spawn
from tests.transports.conformance import LAWS, held, neighbours, same


def obeyed(transport):
    """The laws by name, with None or how each was broken. After the first broken one ranks may be out of step."""
    found = {}
    for law in LAWS:
        try:
            law(transport)
            found[law.__name__] = None
        except Exception:
            found[law.__name__] = traceback.format_exc()
            break
    return found


OBEYED = dict.fromkeys(law.__name__ for law in LAWS)


def whole_group(world):
    """The laws on the default group, and on a mesh."""
    mesh = init_device_mesh(world.device.type, (world.ranks,), mesh_dim_names=("cp",))
    return {"group": obeyed(world), "mesh": obeyed(transport_of(mesh["cp"]))}


def two_at_once(world):
    """The laws on parts of four ranks, of which the two halves are at work at once; then on the axes of a mesh."""
    halves = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    half = transport_of(halves[world.rank % 2])
    half.all_gather_bytes(b"")  # of an NCCL group the first operation is everybody's
    found = {"halves": obeyed(half)}
    mesh = init_device_mesh(world.device.type, (2, 2), mesh_dim_names=("outer", "inner"))
    for axis in ("outer", "inner"):
        found[axis] = obeyed(transport_of(mesh[axis]))
    odd = DeviceMesh(world.device.type, torch.tensor([3, 1, 0, 2], device="cpu"))
    return found | {"out of order": obeyed(transport_of(odd))}


def data_moves_by_itself(rank):
    """Whether a large message arrives while its receiver computes and waits for nothing."""
    world = transport_of(None)
    after, before = neighbours(world)
    got, give_up = torch.zeros(2**22), time.monotonic() + stretched(20)
    pending = world.exchange([(after, torch.ones(2**22))], [(before, got)])
    while got[-1] == 0 and time.monotonic() < give_up:
        torch.ones(16, 16) @ torch.ones(16, 16)
    arrived = bool(got[-1] == 1)
    pending.wait()
    return arrived


def many_groups(world):
    """Four processes: all of them, some, alternate ones, the axes of a mesh; then errors of use."""
    rank = world.rank
    saw = {"moves by itself": data_moves_by_itself(rank), "four": obeyed(transport_of(None))}
    for name, members in [("two", [3, 1]), ("three", [1, 2, 3])]:
        group = dist.new_group(members)
        saw[name] = obeyed(transport_of(group)) if rank in members else OBEYED
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    saw["alternate ranks"] = obeyed(transport_of(groups[rank % 2]))

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    for axis in ("outer", "inner"):
        saw[axis] = obeyed(transport_of(mesh[axis]))
    saw["mesh device"] = str(transport_of(mesh["inner"]).device)

    for name, places in {"mesh out of order": [[0, 2], [1, 3]], "axis out of order": [3, 1, 0, 2]}.items():
        odd = DeviceMesh("cpu", torch.tensor(places))
        saw[name] = obeyed(transport_of(odd))
        place = transport_of(odd).rank, transport_of(odd) == transport_of(odd) != transport_of(None)
        saw["places"] = [*saw.get("places", []), place == (odd.mesh.flatten().tolist().index(rank), True)]

    # Two groups with the same members at once: their messages do not meet.
    one, two = (transport_of(dist.new_group([0, 1, 2, 3])) for _ in range(2))
    after, before = neighbours(one)
    first, second = torch.empty(3), torch.empty(3)
    pendings = [one.exchange([(after, held(rank, 3))], [(before, first)])]
    pendings += [two.exchange([(after, held(rank, 3, salt=1))], [(before, second)])]
    for pending in reversed(pendings):
        pending.wait()
    same(first, held(before, 3))
    same(second, held(before, 3, salt=1))

    saw["equal"] = transport_of(groups[rank % 2]) == transport_of(groups[rank % 2]) != one
    flat = transport_of(mesh)
    saw["2-D mesh"] = (flat.rank, flat.ranks) == (rank, 4)
    saw["3-D mesh"] = refusal(transport_of, init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("a", "b", "c")))
    saw["not a member"] = refusal(transport_of, groups[1 - rank % 2])
    saw["not a group"] = refusal(transport_of, "cp")

    world = transport_of(None)
    pending = world.exchange([], [(after, torch.empty(3))], "keys")
    dist.destroy_process_group()
    saw["posting when destroyed"] = refusal(world.exchange, [(after, torch.empty(3))], [], "keys")
    saw["waiting when destroyed"] = refusal(pending.wait)
    return saw


def refusal(call, *args):
    try:
        call(*args)
    except TransportError as error:
        return str(error)


@pytest.fixture(scope="module")
def seen_in_groups():
    return spawn(4, many_groups)


def broken(found):
    """What a rank has to say against the laws: the first broken one, or those that were not reached."""
    return next(filter(None, found.values()), None) or [name for name in OBEYED if name not in found]


@pytest.mark.parametrize(
    "group", ["two", "three", "four", "alternate ranks", "outer", "inner", "mesh out of order", "axis out of order"]
)
def test_processes_obey(seen_in_groups, group):
    for saw in seen_in_groups:
        assert not broken(saw[group])


@on_backends(2, nccl=(1, 2, 3, 4))
def test_a_whole_group_obeys(ranks, backend):
    for found in spawn(ranks, whole_group, backend=backend):
        assert [broken(each) for each in found.values()] == [[], []]


@pytest.mark.nccl
def test_tensors_of_the_cpu_may_travel_beside():
    for found in spawn(2, whole_group, backend="cpu:gloo,cuda:nccl"):
        assert [broken(each) for each in found.values()] == [[], []]


@on_backends(nccl=(4,))
def test_parts_of_a_group_obey_while_others_work(ranks, backend):
    for found in spawn(ranks, two_at_once, backend=backend):
        assert [broken(each) for each in found.values()] == [[]] * 4


def hosts_beside(world):
    """What hosts say to each other in groups that are made when needed, by ranks that have different groups already."""
    heard = []
    pair = dist.new_group([1, 2])
    for group in (pair, dist.group.WORLD, dist.new_group()):
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            continue
        beside = _gloo_beside(group)
        hosts = Distributed(beside, torch.device("cpu"), group)
        own = torch.tensor([10 * len(heard) + hosts.rank], device="cpu")
        said = [torch.empty_like(own) for _ in range(hosts.ranks)]
        hosts.gather(own, said).wait()
        heard.append([int(each) % 10 for each in said])
    return heard


def test_hosts_find_each_other_whatever_other_groups_they_have():
    """torch's own groups of this kind have names that differ then, and their ranks wait for each other in vain."""
    everybody = [0, 1, 2]
    assert spawn(3, hosts_beside) == [[everybody] * 2, [[0, 1], everybody, everybody], [[0, 1], everybody, everybody]]


def test_messages_move_while_their_receiver_computes(seen_in_groups):
    assert [saw["moves by itself"] for saw in seen_in_groups] == [True] * 4


def test_transports_of_one_group_are_equal(seen_in_groups):
    assert all(saw["equal"] for saw in seen_in_groups)
    assert {saw["mesh device"] for saw in seen_in_groups} == {"cpu"}


def test_ranks_are_counted_in_the_order_of_a_mesh(seen_in_groups):
    """Not by their global numbers, as torch counts the members of a group."""
    assert [saw["places"] for saw in seen_in_groups] == [[True, True]] * 4


def test_what_is_no_group_of_this_process_is_refused(seen_in_groups):
    for saw in seen_in_groups:
        assert saw["2-D mesh"], "all its ranks, row by row"
        assert saw["3-D mesh"] == (
            "group must be a DeviceMesh of one axis or two, got 3 axes of (2, 2, 1); "
            "take one axis or two, as in mesh['a']"
        )
        assert saw["not a member"] == "group: this process is not a member; only members take part"
        assert saw["not a group"] == ("group must be a DeviceMesh, a process group or a virtual world, got 'cp' (str)")


def test_a_destroyed_group_is_told_at_once(seen_in_groups):
    for rank, saw in enumerate(seen_in_groups):
        name = f"rank {rank} of 4, group '0' (default_pg)"
        assert (
            saw["posting when destroyed"]
            == f"{name}: waiting for rank {(rank + 1) % 4} to take keys: the process group was destroyed"
        )
        awaited = f"waiting for keys from rank {(rank + 1) % 4}"
        assert saw["waiting when destroyed"] == f"{name}: {awaited}: the process group was destroyed"


def test_without_torch_distributed_the_default_group_is_refused():
    with pytest.raises(TransportError, match=r"got None and torch.distributed is not initialised; call init_"):
        transport_of(None)


def test_a_device_stands_for_this_process_alone():
    world = transport_of(torch.device("cpu"))
    assert (world.rank, world.ranks, world.device) == (0, 1, torch.device("cpu"))
    assert world.all_gather_bytes(b"mine") == [b"mine"]
    assert transport_of(torch.device("cpu")) is world, "one group, in which sessions can meet"


# Faults


# Timeouts of groups, in seconds of an idle machine. What is noticed after more than SLACK is noticed too late.
SHORT, PATIENT = 2, 6
SLACK = 4


def faults(world):
    """Three processes: a silent peer, ends that disagree, then one killed in the middle of an exchange."""
    rank = world.rank
    short = timedelta(seconds=stretched(SHORT))
    silent, disagreeing = (dist.new_group(timeout=short) for _ in range(2))
    saw = {}
    dist.barrier()

    world = Distributed(silent)
    if rank == 0:
        saw["silent"] = timed(world.exchange([], [(2, torch.empty(3))], "keys").wait)
    dist.barrier()

    world = Distributed(disagreeing)
    if rank == 0:
        saw["disagreeing"] = timed(world.exchange([], [(1, torch.empty(3))], "keys").wait)
    if rank == 1:
        saw["disagreeing"] = timed(world.exchange([(0, torch.ones(5))], [], "keys").wait)
    dist.barrier()

    world = transport_of(None)
    after, before = neighbours(world)
    big = torch.ones(2**22)

    def rotate():
        pending = world.exchange([(after, big)], [(before, torch.empty_like(big))], "values")
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        pending.wait()

    saw["killed"] = timed(rotate)
    saw["afterwards"] = timed(lambda: world.exchange([(1, big)], [], "keys").wait())
    return saw


def timed(call):
    """Seconds until ``call`` refused, and how."""
    began = time.monotonic()
    said = refusal(call)
    return time.monotonic() - began, said


@pytest.fixture(scope="module")
def seen_in_faults():
    return spawn(3, faults, group_timeout=PATIENT, may_die=True)


def test_a_silent_peer_is_given_up_on_after_the_groups_timeout(seen_in_faults):
    seconds, said = seen_in_faults[0]["silent"]
    assert said.startswith("rank 0 of 3, group ")
    assert "waiting for keys from rank 2: " in said
    assert "Timed out" in said
    assert in_time(seconds, SHORT + SLACK)


def test_ends_that_disagree_do_not_meet_and_no_process_is_aborted(seen_in_faults):
    seconds, said = seen_in_faults[0]["disagreeing"]
    assert "waiting for keys from rank 1: " in said
    assert in_time(seconds, SHORT + SLACK)


def test_a_killed_peer_is_named_within_the_groups_timeout(seen_in_faults):
    assert seen_in_faults[1] == Died(by="SIGKILL")
    awaited = {0: ("waiting for rank 1 to take values: ",), 2: ("waiting for values from rank 1: ",)}
    awaited[0] += ("waiting for values from rank 2: ",)  # which may have given up before it sent them
    for rank in (0, 2):
        seconds, said = seen_in_faults[rank]["killed"]
        assert said.removeprefix(f"rank {rank} of 3, group '0' (default_pg): ").startswith(awaited[rank])
        assert in_time(seconds, PATIENT + SLACK)
        seconds, said = seen_in_faults[rank]["afterwards"]
        assert said.startswith(f"rank {rank} of 3, group '0' (default_pg): waiting for rank 1 to take keys: ")
        assert in_time(seconds, PATIENT + SLACK)


def one_raises(world):
    rank = world.rank
    if rank == 1:
        raise ValueError("boom")
    transport_of(None).exchange([], [(1, torch.empty(3))], "keys").wait()


def test_a_rank_that_raises_ends_the_others_and_all_are_reported():
    with pytest.raises(RankError) as caught:
        spawn(2, one_raises, group_timeout=10)
    said = str(caught.value)
    assert "ValueError: boom" in said
    assert "TransportError: rank 0 of 2, group '0' (default_pg): " in said


def hang(world):
    time.sleep(600)


def test_twin_a_process_that_does_not_end_is_killed_and_reported(monkeypatch):
    monkeypatch.setattr(Patient, "_ready", Processes._ready)  # it is known to hang: the pace is not measured again
    with pytest.raises(RankError, match="rank 0 did not end within 1 s"):
        spawn(1, hang, timeout=1)
