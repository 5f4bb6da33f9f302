"""Messages over torch.distributed: gloo on the CPU, NCCL on CUDA devices.

A name for a process group, made when needed and equal to any other of the same group, whose ledger they share. Ranks
are those of the group, whatever the processes' global ranks are.

[Note: weak groups] torch keeps a process group until it is destroyed. A transport refers to it weakly, so that what is
remembered for a group (`memo`) goes with it, whoever still holds a transport.

[Note: gloo] Messages travel on gloo's own threads, so compute goes on meanwhile; its handles report completion only
once waited for. A message larger than the buffer that awaits it aborts the receiving process, and a smaller one leaves
the end of the buffer unwritten, both without an exception. Therefore the tag of a message is its size: ends that
disagree do not meet. A receiver in vain, and one whose peer died in the middle of a message, hears of it when the
group's timeout has passed; a peer that died between messages is noticed at once. Headers (operations.py) have a tag of
their own and are waited for first: ends in different operations hear of it whatever the sizes of their messages.

[Note: nccl] The process group has a stream of its own, which waits for the current stream when messages are posted and
is waited for by the current stream in `Pending.wait`: what is launched between the two overlaps. Messages run in the
order in which they are posted: a receive that waits holds up a send posted after it. References to all buffers are kept
until then, so that the allocator cannot hand them to somebody else. The first operation of a group has to be one that
every rank takes part in; `all_gather_bytes` is. When a peer is lost, its host is missed, by a header that does not
come, or the device waits in vain: see watchdog.py. Headers go from host to host, by a gloo group of the same ranks, and
are read before data is posted: hosts run ahead of their devices, which need not stop for it. While a CUDA graph is
captured there are none, since hosts take no part in its replays.

[Note: hosts] A group of hosts is made when needed, by its members alone. torch.distributed.new_group() is not for that:
it counts the groups that a process knows into a new one's name, so ranks that have other groups besides would wait for
each other under different names. (The names of groups that NCCL splits off another differ in the same way.) The group
is therefore made by way of the default store, under its ranks and the number of groups of hosts that these ranks made
before, and torch.distributed does not know it.

[Note: views] Where the outputs of a gather lie end to end in one buffer, NCCL fills them in place. Otherwise torch
gathers into a buffer of its own and copies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_store

from attnspan.errors import TransportError
from attnspan.transports import watchdog
from attnspan.transports.operations import ledger_of
from attnspan.transports.transport import HALVES, Messages, Pending, Transport

Work = tuple[str, Any]  # what is awaited, and torch's handle

DEFAULT_TIMEOUT = timedelta(minutes=30)  # torch's, for a group of gloo

HEADER_TAG = 2**31 - 1  # the largest C int; other messages have their size for a tag, see [Note: gloo]


class Distributed(Transport):
    """This process's end of a process group."""

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device | None = None, registered: dist.ProcessGroup | None = None
    ) -> None:
        self._group = ref(group)  # see [Note: weak groups]
        self._registered = ref(registered or group)  # what torch.distributed knows it by, see [Note: hosts]
        self.name = _name(group)
        self.rank, self.ranks = group.rank(), group.size()
        self.device = device or _device(group)

        self._identity: tuple[object, ...] = (self._group, self.device)

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group."""
        group = self._group()
        if group is None:
            raise self.error("the process group was destroyed")
        return group

    @property
    def memo(self) -> dict[Hashable, Any]:
        """As any transport's, and that of every equal one."""
        return _MEMOS.setdefault(self.group, {}).setdefault(self, {})

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Distributed) and self._identity == other._identity

    def __hash__(self) -> int:
        return hash(self._identity)

    @property
    def hosts(self) -> Distributed:
        """The same ranks, for tensors of the host."""
        if self.device.type == "cpu":
            return self
        return self._on_hosts(_group_of_hosts(self.group))

    def _on_hosts(self, hosts: dist.ProcessGroup) -> Distributed:
        return Distributed(hosts, torch.device("cpu"), self.group)

    def abort(self) -> None:
        """As any transport's, for NCCL's group and the one that its hosts talk by. See watchdog.py."""
        group = self._group()
        if group is None or self.device.type == "cpu" or not _alive(group) or torch.cuda.is_current_stream_capturing():
            return
        watchdog.abort(self.device, partial(_give_up, group))

    def contains(self, other: Transport) -> bool:
        """Whether every process of another group is in this one too."""
        if not isinstance(other, Distributed):
            return False
        ours, theirs = (dist.get_process_group_ranks(each.group) for each in (self, other))
        return set(theirs) <= set(ours)

    def _post(self, sends: Messages, receives: Messages, what: str) -> Pending:
        met = self._greet([peer for peer, _ in [*sends, *receives]], what)
        if self.device.type == "cpu":
            works = self._post_each(sends, receives, what)
        else:
            met.wait()  # see [Note: nccl]
            works = self._post_batch(sends, receives, what)
        return met.then(self._pending(works, sends, receives).wait)

    def _greet(self, peers: Iterable[int], what: str) -> Pending:
        """Exchange headers with those of some ranks that the operation under way has not met."""
        ledger = ledger_of(self)
        operation = ledger.current
        if operation is None or (self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            return Pending()
        new = operation.greet(peers)
        own = torch.full((1,), operation.header, dtype=torch.int64, device="cpu")
        theirs = own.new_empty(len(new))

        def check() -> None:
            for peer, header in zip(new, theirs.tolist(), strict=True):
                ledger.check(self, operation, peer, header)

        sends, receives = [(peer, own) for peer in new], list(zip(new, theirs.split(1), strict=True)) if new else []
        return self._pending(self.hosts._post_each(sends, receives, what, HEADER_TAG), own).then(check)

    def _post_each(self, sends: Messages, receives: Messages, what: str, tag: int | None = None) -> list[Work]:
        """One operation per message, receives first: a message that finds its buffer waiting is not held up."""
        arriving = [(f"waiting for {what} from rank {peer}", dist.irecv, peer, tensor) for peer, tensor in receives]
        leaving = [(f"waiting for rank {peer} to take {what}", dist.isend, peer, tensor) for peer, tensor in sends]
        return [self._start(*message, tag) for message in [*arriving, *leaving]]

    def _start(self, doing: str, operation: Callable[..., Any], peer: int, tensor: Tensor, tag: int | None) -> Work:
        end = {"group_dst" if operation is dist.isend else "group_src": peer}
        tag = tensor.nbytes % HEADER_TAG if tag is None else tag  # [Note: gloo]
        with self._blaming(doing):
            return doing, operation(_bytes(tensor), group=self.group, tag=tag, **end)

    def _post_batch(self, sends: Messages, receives: Messages, what: str) -> list[Work]:
        """One operation for all messages, so that no order of them can block."""
        operation = partial(dist.P2POp, group=self.group)
        peers = ", ".join(str(peer) for peer in sorted({peer for peer, _ in [*sends, *receives]}))
        doing = f"waiting for {what} exchanged with rank {peers}"
        with self._blaming(doing):
            batch = [operation(dist.irecv, _bytes(tensor), group_peer=peer) for peer, tensor in receives]
            batch += [operation(dist.isend, _bytes(tensor), group_peer=peer) for peer, tensor in sends]
            return [(doing, work) for work in dist.batch_isend_irecv(batch)]

    def gather(self, tensor: Tensor, outputs: Sequence[Tensor], what: str = "tensors") -> Pending:
        """As any transport's; NCCL's own where every rank brings as much."""
        if not self._native(outputs):
            return super().gather(tensor, outputs, what)
        self._greet(self._round()[1:], what).wait()
        source = self._sent(self.rank, tensor, what).view(-1)
        targets = [self._filled(peer, output, what).view(-1) for peer, output in enumerate(outputs)]
        whole = _end_to_end(targets)  # [Note: views]
        doing = f"waiting for {what} gathered from all"
        with self._blaming(doing):
            if whole is None:
                work = dist.all_gather(targets, source, group=self.group, async_op=True)
            else:
                # torch 2.13 deprecates the names that 2.11 knows, here and in reduce_scatter.
                single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
                work = single(whole, source, group=self.group, async_op=True)
        return self._pending([(doing, work)], source, targets)

    def reduce_scatter(self, inputs: Sequence[Tensor], output: Tensor, what: str = "tensors") -> Pending:
        """As any transport's; NCCL's own where every rank gets as much and no sum is rounded to half on its way."""
        exact = output.dtype == inputs[self.rank].dtype and output.dtype not in HALVES
        if not (exact and self._native(inputs)):
            return super().reduce_scatter(inputs, output, what)
        self._greet(self._round()[1:], what).wait()
        sources = [self._sent(peer, tensor, what).view(-1) for peer, tensor in enumerate(inputs)]
        target = self._filled(self.rank, output, what).view(-1)
        whole = _end_to_end(sources)
        doing = f"waiting for {what} reduced from all"
        with self._blaming(doing):
            if whole is None:
                work = dist.reduce_scatter(target, sources, group=self.group, async_op=True)
            else:
                single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
                work = single(target, whole, group=self.group, async_op=True)
        return self._pending([(doing, work)], sources, target)

    def _native(self, tensors: Sequence[Tensor]) -> bool:
        """Whether the group's own collective does it. Every rank knows every size, so all answer alike."""
        even = len(tensors) == self.ranks and len({tensor.numel() for tensor in tensors}) == 1
        return self.device.type != "cpu" and even and tensors[0].numel() > 0

    def _pending(self, works: Sequence[Work], *kept: object) -> Pending:
        def finish() -> None:
            for doing, work in works:
                with self._blaming(doing):
                    work.wait()
            self._watch(works)
            _ = kept  # in use by the group until here

        return Pending(finish)

    def _watch(self, works: Sequence[Work]) -> None:
        """What the device waits for from now on is overdue after the group's timeout. See watchdog.py."""
        if not works or self.device.type == "cpu" or not watchdog.is_enabled():
            return
        timeout = _timeout(self.group)
        if timeout is not None and not torch.cuda.is_current_stream_capturing():
            watchdog.WATCHDOG.watch(str(self.error(works[0][0])), timeout.total_seconds())

    @contextmanager
    def _blaming(self, doing: str) -> Iterator[None]:
        """Errors of torch.distributed become one that names the group and what was awaited."""
        registered = self._registered()
        if registered is None or not _alive(registered):
            raise self.error(f"{doing}: the process group was destroyed")
        try:
            yield
        except TransportError:
            raise
        except (RuntimeError, ValueError) as cause:
            raise self.error(f"{doing}: {cause}") from cause


_MEMOS: WeakKeyDictionary[dist.ProcessGroup, dict[Distributed, dict[Hashable, Any]]] = WeakKeyDictionary()


def _group_of_hosts(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A group of the same ranks that moves tensors of the host: the group itself, or one that is made on first use."""
    if "cpu:gloo" in str(dist.get_backend_config(group)):
        return group
    if group not in _OF_HOSTS:
        try:
            _OF_HOSTS[group] = _gloo_beside(group)
        except (RuntimeError, ValueError) as cause:
            raise TransportError(
                f"group {_name(group)}: hosts tell each other which call they are in by a gloo group, which could not "
                f"be made: {cause}; name a network interface in GLOO_SOCKET_IFNAME, or give the group gloo for tensors "
                'of the CPU, as init_process_group("cpu:gloo,cuda:nccl") does'
            ) from cause
    return _OF_HOSTS[group]


def _gloo_beside(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A gloo group of the same ranks, under the same name. See [Note: hosts]."""
    ranks = tuple(dist.get_process_group_ranks(group))
    store = dist.PrefixStore(f"attnspan/hosts/{ranks}/{_MADE[ranks]}/", _get_default_store())
    _MADE[ranks] += 1
    gloo = dist.ProcessGroupGloo(store, group.rank(), group.size(), _timeout(group) or DEFAULT_TIMEOUT)
    hosts = dist.ProcessGroup(store, group.rank(), group.size())
    hosts._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    hosts._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    hosts._set_group_name(group.group_name)
    hosts._set_group_desc(group.group_desc)
    return hosts


_OF_HOSTS: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()
_MADE: Counter[tuple[int, ...]] = Counter()  # by ranks: how many groups of hosts were made of them


def _give_up(group: dist.ProcessGroup) -> None:
    """End what a group has under way on the device, and part from the hosts of its ranks, who then hear of it."""
    _OF_HOSTS.pop(group, None)
    with suppress(RuntimeError, ValueError):  # one that failed already
        group.abort()


def _timeout(group: dist.ProcessGroup) -> timedelta | None:
    """How long a group waits; None, for torch's default, where it does not say."""
    options = getattr(group._get_backend(torch.device("cuda")), "options", None)
    return getattr(options, "_timeout", None)


def _name(group: dist.ProcessGroup) -> str:
    described = "" if group.group_desc in ("", "undefined") else f" ({group.group_desc})"
    return f"{group.group_name!r}{described}"


def _device(group: dist.ProcessGroup) -> torch.device:
    """Where the group's tensors live: on this process's CUDA device if NCCL is among its backends."""
    nccl = "nccl" in str(dist.get_backend_config(group))
    return torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")


def _alive(group: dist.ProcessGroup) -> bool:
    """Whether torch.distributed still knows the group; a destroyed one takes messages, which go nowhere."""
    try:
        dist.get_backend(group)
    except (ValueError, AssertionError, KeyError):
        return False
    return True


def _bytes(tensor: Tensor) -> Tensor:
    """The tensor as it travels: bytes are one dtype that every backend has."""
    return tensor.view(-1).view(torch.uint8)


def _end_to_end(tensors: Sequence[Tensor]) -> Tensor | None:
    """One flat view of equally long flat tensors that follow each other in one storage; None if they do not."""
    first = tensors[0]
    storage = first.untyped_storage().data_ptr()
    for i, tensor in enumerate(tensors):
        here = tensor.untyped_storage().data_ptr(), tensor.storage_offset()
        if here != (storage, first.storage_offset() + i * first.numel()):
            return None
    return first.as_strided((len(tensors) * first.numel(),), (1,))
