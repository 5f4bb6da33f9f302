"""Context parallelism over real NCCL ranks: torch's, every strategy of ours, and `auto`, in the same processes.

Ranks share one GPU where there are too few, and then talk over sockets: figures are those of a slow link. A cell is
(ranks, tokens, heads, mask); each contender runs forward + backward on the same random data. The first call, which
compiles and agrees, is compared with dense attention in float32 on one device, and is not timed. Then all contenders
of a cell take turns, so that a machine that is slower for a while is slower for all of them; of every turn the slowest
rank counts, and the median is reported. A result that differs from the reference is marked as wrong.

"one device" is the floor where ranks share it: all of the attention on one of them, while the others wait.

torch's contenders: `alltoall` and `allgather` are its ring over SDPA (head-tail; causal or full masks only), `flex` its
all-gather over compiled flex_attention, with the balancer named.

    PYTHONPATH=src python -m benchmarks.nccl --out FILE
    PYTHONPATH=src python -m benchmarks.nccl --cells "4 ranks, causal" "32:8, 32k" --resume --out FILE
    PYTHONPATH=src python -m benchmarks.nccl --device cpu --tokens 512 --cells "2 ranks, 32:8" --out FILE

`--compile-first` compiles what torch compiles for all cells before the time of `--limit` begins: some groups of
processes take cells in turn, and leave the code in torch's cache on disk.

The page is written after every cell, and the figures after every contender, to FILE.json. What is there is kept by
--resume. A contender that takes its group down, or hangs, is skipped, and the others go on in new processes.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import attnspan as span
from attnspan.errors import RankError
from attnspan.plan.drawing import table
from attnspan.plan.strategy import strategy_name
from attnspan.transports import Transport
from benchmarks.report import command, folded, header

RESULT = Path(__file__).parent / "results" / "nccl.md"
RANKS, TOKENS, HEADS, DIM = (4, 2), (32768, 16384), ((32, 8), (32, 32), (32, 1)), 128
STRATEGIES = ("ring", "gather", "needed", "needed(2)", "ulysses")
HYBRIDS = ("ulysses(2) x ring", "ulysses(2) x gather", "ulysses(2) x needed")
AUTO, AGAIN, ALONE = "auto", "auto, keys travel again", "one device"
LIMIT = 480.0
"""Seconds for everything."""

LEAST, MOST, ENOUGH = 3, 7, 0.25
"""Turns of a cell: at least, at most, and the seconds for each contender after which no more are begun."""

FAR = 1.6
"""A contender that takes so many times as long as the fastest of its side in its first turn has no other."""

BAR = 1.5
"""How many times as fast as the better of torch's our best is meant to be."""

NEAR = 1.05
"""What `auto` may take, over our best strategy."""

TOLERANCE = 0.2
"""The largest error of a token, over its norm or that of an average one. On random data bfloat16 gives up to 0.07, in
gradients of queries, whoever computes them; a wrong mask gives about 1."""

PACK = (9000, 520, 4096, 1800, 6200, 264, 3000, 1384, 5000, 504, 1000)
"""Lengths of documents in 32k tokens; torch's balancer needs multiples of twice the ranks."""

UNFINISHED = "its ranks ended, or did not end in time"


# ---- cells -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """What is attended, on how many ranks."""

    ranks: int
    tokens: int
    heads: int
    kv_heads: int
    mask: str

    @property
    def parts(self) -> tuple[str, ...]:
        return f"{self.ranks} ranks", short(self.tokens), f"{self.heads}:{self.kv_heads}", self.mask

    def __str__(self) -> str:
        return ", ".join(self.parts)

    @property
    def lengths(self) -> list[int]:
        """Of the documents: the pack, for as many tokens, in multiples of 8."""
        scaled = [max(8, length * self.tokens // sum(PACK) // 8 * 8) for length in PACK]
        return [*scaled[1:], self.tokens - sum(scaled[1:])]

    @property
    def window(self) -> int:
        """How many keys a query sees, itself included."""
        return min(4096, self.tokens // 4)

    def built(self) -> span.Mask:
        if self.mask == "causal":
            return span.Causal()
        if self.mask == "documents":
            return span.Causal() & span.Documents(self.lengths)
        return span.SlidingWindow(self.window - 1)

    def mask_mod(self, device: str) -> Callable[..., Tensor]:
        """The same for FlexAttention, as its users write it."""
        window = self.window
        documents = torch.repeat_interleave(torch.arange(len(self.lengths)), torch.tensor(self.lengths)).to(device)

        def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return q >= k

        def same_document(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (q >= k) & (documents[q] == documents[k])

        def near(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (q >= k) & (q - k < window)

        return {"causal": causal, "documents": same_document, "window": near}[self.mask]


def cells(tokens: Sequence[int], patterns: Sequence[str]) -> list[Cell]:
    """All that match some pattern, the most telling ones first."""
    every = [
        Cell(ranks, length, *heads, mask)
        for ranks in RANKS
        for heads in HEADS
        for length in tokens
        for mask in ("causal", "documents", "window")
    ]
    wanted = [{part.strip() for part in pattern.split(",")} for pattern in patterns]
    return [cell for cell in every if not wanted or any(parts <= set(cell.parts) for parts in wanted)]


def short(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else str(tokens)


# ---- contenders: each prepares one rank's part and says which positions it holds -------------------------------------


@dataclass(frozen=True)
class Ready:
    """One rank's part of a contender: its positions and tensors, how it attends, and what is to be said of it."""

    positions: Tensor
    tensors: Sequence[Tensor]
    attend: Callable[[Tensor, Tensor, Tensor], Tensor]
    note: Callable[[], str] = lambda: ""
    link: Callable[[], str] = lambda: ""  # as it was measured

    def step(self) -> list[Tensor]:
        """Out, and the gradients of query, key and value."""
        *inputs, grad = self.tensors
        leaves = [x.detach().requires_grad_() for x in inputs]
        out = self.attend(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


Contender = Callable[[Cell, list[Tensor]], Ready]


def contenders(cell: Cell) -> dict[str, Contender]:
    """By name, in the order in which they run."""
    balancers = {"documents": ("PTRR", "per document"), "window": ("PTRR", "head-tail")}.get(cell.mask, ("head-tail",))
    rotations = ("alltoall", "allgather") if cell.mask == "causal" else ()
    strategies = (*STRATEGIES, *(HYBRIDS if cell.ranks == 4 else ()), AUTO)
    return {
        **{f"torch {method}": partial(torch_ring, method) for method in rotations},
        **{f"torch flex, {name}": partial(torch_flex, name) for name in balancers},
        **{strategy: partial(ours, strategy) for strategy in strategies},
        AGAIN: partial(ours, AUTO, keep_keys=False),
        ALONE: alone,
    }


def refusal(name: str, device: str) -> str:
    """Why a contender cannot run on a device; empty if it can."""
    if device == "cpu" and name.startswith("torch flex"):
        return "flex_attention has no backward on a CPU"
    return "torch's ring has no kernel for a CPU" if device == "cpu" and name.startswith("torch") else ""


def ours(strategy: str, cell: Cell, whole: list[Tensor], keep_keys: Literal["auto", False] = "auto") -> Ready:
    cp = span.ContextParallel(
        dist.group.WORLD, seq_len=cell.tokens, mask=cell.built(), strategy=strategy, keep_keys=keep_keys
    )
    positions = cp.positions.to(whole[0].device)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = cp.attention(query, key, value)
        assert isinstance(out, Tensor), "no lse was asked for"
        return out

    tensors = [x[:, :, positions].contiguous() for x in whole]
    if strategy != AUTO:
        return Ready(positions, tensors, attend)

    def link() -> str:
        said = cp.explain()
        if dist.get_rank() == 0:
            print(said, flush=True)
        return next(line for line in said.splitlines() if line.startswith("link: "))

    return Ready(positions, tensors, attend, lambda: strategy_name(cp.plan.strategy), link)


def alone(cell: Cell, whole: list[Tensor]) -> Ready:
    """Everything on the first rank, and nothing on the others."""
    positions = torch.arange(cell.tokens if dist.get_rank() == 0 else 0, device=whole[0].device)
    cp = span.ContextParallel(whole[0].device, seq_len=cell.tokens, mask=cell.built())

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if not len(positions):
            return query * (key.sum() + value.sum())
        out = cp.attention(query, key, value)
        assert isinstance(out, Tensor), "no lse was asked for"
        return out

    return Ready(positions, [x[:, :, positions].contiguous() for x in whole], attend)


class RingModule(nn.Module):
    """SDPA alone, by one kernel."""

    def __init__(self, kernel: Any) -> None:
        super().__init__()
        self.kernel = kernel

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        from torch.nn.attention import sdpa_kernel

        with sdpa_kernel(self.kernel):
            return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


def torch_ring(method: str, cell: Cell, whole: list[Tensor]) -> Ready:
    kernel = ring_kernel(method, replace(cell, tokens=512 * cell.ranks), whole[0].device.type)
    return ring_of(method, kernel, cell, whole)


@functools.cache
def ring_kernel(method: str, small: Cell, device: str) -> Any:
    """The first kernel that torch's ring can do a few tokens by; the fastest is tried first."""
    from torch.nn.attention import SDPBackend

    try:
        ring_of(method, SDPBackend.CUDNN_ATTENTION, small, data(small, device)).step()
    except Exception as why:  # ranks raise alike
        print(f"torch {method}: no cuDNN: {why}", flush=True)
        return SDPBackend.FLASH_ATTENTION
    return SDPBackend.CUDNN_ATTENTION


def ring_of(method: str, kernel: Any, cell: Cell, whole: list[Tensor]) -> Ready:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental._context_parallel import _attention as torch_cp
    from torch.distributed.tensor.parallel import parallelize_module

    mesh = init_device_mesh(whole[0].device.type, (cell.ranks,))
    torch_cp._enable_context_parallel_dispatcher()
    style = torch_cp._ContextParallel(seq_dim=2, attention_type=torch_cp._ContextParallel.AttentionType.SDPA)
    module = parallelize_module(RingModule(kernel), mesh, style)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        torch_cp.set_rotate_method(method)  # of the process, and contenders take turns
        return module(query, key, value)

    positions, tensors = torch_shards(mesh, whole, torch_balancer("head-tail", cell, whole[0].device))
    return Ready(positions, tensors, attend, lambda: "" if "CUDNN" in str(kernel) else "FlashAttention")


class FlexModule(nn.Module):
    """FlexAttention alone, compiled for the shapes at hand."""

    def __init__(self, block_mask: Any) -> None:
        super().__init__()
        from torch.nn.attention.flex_attention import flex_attention

        self.block_mask, self.compiled = block_mask, torch.compile(flex_attention, dynamic=False)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return self.compiled(query, key, value, block_mask=self.block_mask, enable_gqa=True)


def torch_flex(balancer: str, cell: Cell, whole: list[Tensor]) -> Ready:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental._context_parallel import _attention as torch_cp
    from torch.distributed.tensor.parallel import parallelize_module

    device = whole[0].device
    mesh = init_device_mesh(device.type, (cell.ranks,))
    balance = torch_balancer(balancer, cell, device)
    with torch.compiler.set_stance("force_eager"):  # a mask that is made once need not be compiled for
        mask = torch_cp._create_cp_block_mask(cell.mask_mod(device.type), 1, 1, cell.tokens, cell.tokens, mesh, balance)
    style = torch_cp._ContextParallel(seq_dim=2, attention_type=torch_cp._ContextParallel.AttentionType.FLEX)
    return Ready(*torch_shards(mesh, whole, balance), parallelize_module(FlexModule(mask), mesh, style))


def torch_balancer(name: str, cell: Cell, device: torch.device) -> Any:
    from torch.distributed.tensor.experimental._context_parallel import _load_balancer as torch_cp

    if name == "PTRR":
        return torch_cp._PTRRLoadBalancer(cell.built().block_mask(cell.tokens, device=device), cell.ranks)
    if name == "per document":
        return torch_cp._PerDocumentHeadTailLoadBalancer([cell.lengths], cell.ranks, device)
    return torch_cp._HeadTailLoadBalancer(cell.tokens, cell.ranks, device)


def torch_shards(mesh: Any, whole: list[Tensor], balance: Any) -> tuple[Tensor, list[Tensor]]:
    """A rank's positions and tensors, as torch deals them."""
    from torch.distributed.tensor.experimental._context_parallel._attention import _context_parallel_shard

    everything = [torch.arange(whole[0].shape[2], device=whole[0].device), *whole]
    positions, *tensors = _context_parallel_shard(mesh, everything, [0, *([2] * len(whole))], balance)
    return positions, [x.contiguous() for x in tensors]


# ---- the reference ---------------------------------------------------------------------------------------------------


def reference(mask_mod: Callable[..., Tensor], whole: list[Tensor]) -> list[Tensor]:
    """Out and gradients of dense attention, in float32, some rows at a time; batch of one."""
    query, key, value, grad = (x[0].float() for x in whole)
    groups, tokens = query.shape[0] // key.shape[0], query.shape[1]
    scale, rows = query.shape[2] ** -0.5, max(32, 4096 // groups)
    out, d_query, d_key, d_value = (torch.zeros_like(x) for x in (query, query, key, value))
    zero, columns = torch.zeros((), dtype=torch.long, device=query.device), torch.arange(tokens, device=query.device)
    for first in range(0, tokens, rows):
        own = columns[first : first + rows]
        allowed = mask_mod(zero, zero, own[:, None], columns)
        for head in range(key.shape[0]):
            heads, k, v = slice(head * groups, (head + 1) * groups), key[head], value[head]
            q, g = query[heads, own], grad[heads, own]
            weights = (q @ k.T * scale).masked_fill(~allowed, -torch.inf).softmax(-1)
            found = weights @ v
            d_scores = weights * (g @ v.T - (g * found).sum(-1, keepdim=True)) * scale
            out[heads, own], d_query[heads, own] = found, d_scores @ k
            d_key[head] += torch.einsum("gqk,gqd->kd", d_scores, q)
            d_value[head] += torch.einsum("gqk,gqd->kd", weights, g)
    return [x[None].to(whole[0].dtype) for x in (out, d_query, d_key, d_value)]


def error(found: Sequence[Tensor], true: Sequence[Tensor], positions: Tensor) -> float:
    """The largest of any token: the norm of its error over its norm, or over that of an average token if larger."""
    if not len(positions):
        return 0.0
    worst = []
    for a, b in zip(found, true, strict=True):
        b_own = b[:, :, positions].float()
        off, norms = ((x.norm(dim=-1)) for x in (a.float() - b_own, b_own))
        worst.append((off / norms.maximum(b.float().norm(dim=-1).square().mean().sqrt())).max())
    return float(torch.stack(worst).nan_to_num(torch.inf).max())


# ---- on the ranks ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    """What became of a contender in a cell: milliseconds and error, or the reason why there are none."""

    cell: str
    contender: str
    ms: float | None = None
    error: float | None = None
    reason: str = ""
    note: str = ""
    repeats: int = 0
    link: str = ""

    @property
    def right(self) -> bool:
        return self.ms is not None and self.error is not None and self.error <= TOLERANCE

    def __str__(self) -> str:
        if self.ms is None:
            return f"{self.cell}: {self.contender}: {self.reason}"
        said = f" ({self.note})" if self.note else ""
        wrong = "" if self.right else " WRONG,"
        return f"{self.cell}: {self.contender}{said} {self.ms:.1f} ms,{wrong} error {self.error:.4f}"


class Book:
    """All that was found, in a file that is whole at any time."""

    def __init__(self, out: Path, resume: bool = False) -> None:
        self.out, self.data = out, out.with_suffix(".json")
        known = json.loads(self.data.read_text()) if resume and self.data.exists() else []
        self.found = {(row["cell"], row["contender"]): Found(**row) for row in known}

    def add(self, found: Found) -> None:
        self.found[found.cell, found.contender] = found
        self._write()

    def forget_unfinished(self) -> None:
        self.found = {key: each for key, each in self.found.items() if each.reason != UNFINISHED}
        self._write()

    def _write(self) -> None:
        beside = self.data.with_suffix(".part")
        beside.write_text(json.dumps([asdict(each) for each in self.found.values()], indent=1))
        beside.replace(self.data)

    def lacks(self, cell: Cell) -> list[str]:
        """Contenders of a cell of which nothing is known."""
        return [name for name in contenders(cell) if (str(cell), name) not in self.found]


@dataclass(frozen=True)
class Job:
    """What every rank does: these cells, until that time (of time.time())."""

    cells: tuple[Cell, ...]
    device: str
    out: Path
    program: str
    until: float


def on_rank(world: Transport, job: Job) -> None:
    """One rank's part: all of it, or what there is time for."""
    warnings.simplefilter("ignore")  # torch's, of its experimental parts
    book, rank = Book(job.out, resume=True), world.rank
    for cell in job.cells:
        left = everyone(book.lacks(cell))[0]
        if not left or everyone(time.time() > job.until)[0]:
            continue
        if job.device == "cuda":
            torch._dynamo.reset()  # else the shapes of many cells exceed the compiler's limit
        began = time.perf_counter()
        whole = data(cell, job.device)
        true = told_by_first(lambda cell=cell, whole=whole: reference(cell.mask_mod(job.device), whole), whole)
        if rank == 0:
            print(f"{cell}: reference after {time.perf_counter() - began:.1f} s", flush=True)
        ready: dict[str, Ready] = {}
        found: dict[str, Found] = {}
        for name in left:
            if rank == 0:
                book.add(Found(str(cell), name, reason=UNFINISHED))
            began = time.perf_counter()
            made, found[name] = prepared(cell, name, contenders(cell)[name], whole, true)
            if rank == 0:
                print(f"{cell}: {name}: ready after {time.perf_counter() - began:.1f} s", flush=True)
            if made is not None:
                ready[name] = made
            elif rank == 0:
                book.add(found[name])
        times = in_turn(ready, whole[0].device)
        turns = _by_name(everyone(times))
        for name, each in ready.items():
            ms = 1e3 * statistics.median(max(turn) for turn in turns[name])
            told = replace(found[name], ms=ms, note=each.note(), link=each.link(), repeats=len(times[name]))
            if rank == 0:
                book.add(told)
                print(f"{time.strftime('%H:%M:%S')} {told}", flush=True)
        ready.clear()
        if job.device == "cuda":
            torch.cuda.empty_cache()
        if rank == 0:
            job.out.write_text(page(book, job.program))


def compile_cells(world: Transport, job: Job) -> None:
    """One rank's part of what torch compiles, which stays in its cache on disk."""
    warnings.simplefilter("ignore")
    for cell in job.cells:
        torch._dynamo.reset()
        whole = data(cell, job.device)
        for name, contender in contenders(cell).items():
            if name.startswith("torch flex") and not refusal(name, job.device):
                contender(cell, whole).step()
        if world.rank == 0:
            print(f"{cell}: compiled", flush=True)


def data(cell: Cell, device: str) -> list[Tensor]:
    """query, key, value and the gradient of out: whole, and the same on every rank."""
    draw = torch.Generator(device).manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    heads = (cell.heads, cell.kv_heads, cell.kv_heads, cell.heads)
    return [torch.randn(1, h, cell.tokens, DIM, generator=draw, device=device, dtype=dtype) for h in heads]


def told_by_first(compute: Callable[[], list[Tensor]], like: list[Tensor]) -> list[Tensor]:
    """What rank 0 computes, on every rank."""
    query, key, value, _ = like
    told = compute() if dist.get_rank() == 0 else [torch.empty_like(x) for x in (query, query, key, value)]
    synchronise(query.device)
    everyone(None)
    for tensor in told:
        dist.broadcast(tensor, 0)
    synchronise(query.device)
    return told


def prepared(
    cell: Cell, name: str, contender: Contender, whole: list[Tensor], true: list[Tensor]
) -> tuple[Ready | None, Found]:
    """One contender in one cell after its first call, with its error; None where it cannot, with the reason."""
    found = partial(Found, str(cell), name)
    if why := refusal(name, whole[0].device.type):
        return None, found(reason=why)
    complaint, off, ready = "", float("inf"), None
    try:
        ready = contender(cell, whole)
        off = error(ready.step(), true, ready.positions)
    except Exception as raised:  # a refusal, or what a rival of these sizes cannot do: ranks raise alike
        complaint = f"{type(raised).__name__}: {' '.join(str(raised).split())[:160]}"
    complaints = [each for each in everyone(complaint) if each]
    if complaints:
        return None, found(reason=complaints[0])
    return ready, found(error=max(everyone(off)))


def in_turn(ready: dict[str, Ready], device: torch.device) -> dict[str, list[float]]:
    """Seconds of every turn of each contender on this rank; all ranks begin a step together."""
    times: dict[str, list[float]] = {name: [] for name in ready}
    began, order = time.perf_counter(), list(ready)
    for turn in range(MOST):
        if turn >= LEAST and everyone(time.perf_counter() - began > ENOUGH * len(ready))[0]:
            break
        if turn == 1:
            order = near({name: max(each) for name, (each,) in _by_name(everyone(times)).items()})
        for name in order if turn % 2 == 0 else order[::-1]:  # nobody runs after the same one always
            everyone(None)
            start = time.perf_counter()
            ready[name].step()
            synchronise(device)
            times[name].append(time.perf_counter() - start)
    return times


def _by_name(times: list[dict[str, list[float]]]) -> dict[str, list[tuple[float, ...]]]:
    """The turns of each contender, as all ranks saw them."""
    return {name: list(zip(*(each[name] for each in times), strict=True)) for name in times[0]}


def near(first: dict[str, float]) -> list[str]:
    """Contenders that may be the fastest of their side, by their first turns; `auto` and the floor in any case."""

    def side(name: str) -> bool:
        return name.startswith("torch")

    able = [name for name in first if name not in (AUTO, ALONE)]
    return [
        name
        for name in first
        if name not in able or first[name] <= FAR * min(first[other] for other in able if side(other) == side(name))
    ]


def everyone(said: Any) -> list[Any]:
    """What every rank says, by rank; also a barrier, of the hosts: NCCL's would keep the shared device from others."""
    heard: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(heard, said, group=hosts())
    return heard


@functools.cache
def hosts() -> dist.ProcessGroup:
    """All ranks, by messages of the host."""
    group = dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup), "of all ranks"
    return group


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


# ---- the page --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A cell and what was found in it, by contender."""

    cell: Cell
    found: dict[str, Found]

    def best(self, torchs: bool) -> Found | None:
        """The fastest right one, of torch's or of our strategies; auto is none of them."""
        others = (AUTO, AGAIN, ALONE)
        able = [f for n, f in self.found.items() if n.startswith("torch") == torchs and n not in others and f.right]
        return min(able, key=lambda each: each.ms or 0.0, default=None)

    @property
    def speedup(self) -> float | None:
        """The better of torch's over our best."""
        return _over(self.best(True), self.best(False))

    @property
    def room(self) -> float | None:
        """The better of torch's over one device: what the speedup would be if nothing travelled."""
        return _over(self.best(True), self.found.get(ALONE))

    @property
    def auto(self) -> float | None:
        """auto over our best."""
        return _over(self.found.get(AUTO), self.best(False))

    @property
    def taken(self) -> Found | None:
        """The strategy that auto took, as it did by itself."""
        chosen = self.found.get(AUTO)
        return self.found.get(chosen.note.replace("needed(1)", "needed")) if chosen else None

    @property
    def choice(self) -> float | None:
        """What auto took over our best: both as they did by themselves."""
        return _over(self.taken, self.best(False))

    @property
    def noise(self) -> float | None:
        """auto over the strategy that it took: the same programs."""
        return _over(self.found.get(AUTO), self.taken)


def _over(one: Found | None, other: Found | None) -> float | None:
    return one.ms / other.ms if one and one.ms and other and other.ms else None


def rows(book: Book) -> list[Row]:
    by_cell: dict[str, dict[str, Found]] = {}
    for found in book.found.values():
        by_cell.setdefault(found.cell, {})[found.contender] = found
    tokens = sorted({_tokens(cell) for cell in by_cell}, reverse=True)
    return [Row(cell, by_cell[str(cell)]) for cell in cells(tokens, ()) if str(cell) in by_cell]


def _tokens(cell: str) -> int:
    length = cell.split(", ")[1]
    return int(length[:-1]) * 1024 if length.endswith("k") else int(length)


def page(book: Book, program: str) -> str:
    """The result file."""
    found = rows(book)
    lines = [
        *header("Context parallelism over real NCCL ranks", program),
        f"{ranks_of(found)} Forward + backward, wall milliseconds: the slowest rank, median of {LEAST} to {MOST} "
        f"turns, one turn where it took {FAR} times the fastest of its side. Head dim {DIM}; {versions()}. "
        f"Documents: {len(PACK)} of {min(PACK)} to {max(PACK)} tokens in 32k; window: 4k keys. "
        "Ours: the default layout and kernel. Every result was compared with dense attention in "
        f"float32; a token that is off by more than {TOLERANCE} of its norm makes it wrong.",
        "",
        *verdict(found),
        "",
    ]
    notes: dict[str, int] = {}
    for mask in dict.fromkeys(row.cell.mask for row in found):
        lines += [f"## {mask}", "", *section([row for row in found if row.cell.mask == mask], notes), ""]
    lines += [f"[{number}] {why}" + "  " for why, number in notes.items()]
    links = {(row.cell.ranks, each.link): None for row in found for each in row.found.values() if each.link}
    lines += [f"- {ranks} ranks, {link}" for ranks, link in links]
    return folded("\n".join([*lines, ""]))


def versions() -> str:
    if not torch.cuda.is_available():
        return "gloo, float32"
    from triton import __version__ as triton

    return f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}, triton {triton}, bfloat16"


def ranks_of(found: list[Row]) -> str:
    counts = ", ".join(str(count) for count in sorted({row.cell.ranks for row in found}))
    if not torch.cuda.is_available():
        return f"{counts} gloo ranks of one thread."
    shared = torch.cuda.device_count() < max((row.cell.ranks for row in found), default=1)
    return f"{counts} ranks" + (" that share one GPU and talk over loopback sockets." if shared else ", a GPU each.")


def verdict(found: list[Row]) -> list[str]:
    speedups = {row.cell: row.speedup for row in found if row.speedup is not None}
    autos = {row.cell: row.auto for row in found if row.auto is not None}
    lines = []
    if speedups:
        least = min(speedups, key=lambda cell: speedups[cell])
        met = sum(each >= BAR for each in speedups.values())
        lines.append(
            f"- The better of torch's over our best: **{speedups[least]:.2f} to {max(speedups.values()):.2f}**; at "
            f"least {BAR} in **{met} of {len(speedups)}** cells (least: {least})."
        )
        rooms = [row.room for row in found if row.room is not None]
        if rooms:
            lines.append(
                f"- The better of torch's over one device alone, which no strategy of ranks that share it can pass: "
                f"**{min(rooms):.2f} to {max(rooms):.2f}**; less than {BAR} in **{sum(r < BAR for r in rooms)} of "
                f"{len(rooms)}** cells."
            )
    if autos:
        most = max(autos, key=lambda cell: autos[cell])
        near = sum(each <= NEAR for each in autos.values())
        lines.append(
            f"- `auto` over our best: **{min(autos.values()):.2f} to {autos[most]:.2f}**; at most {NEAR} in "
            f"**{near} of {len(autos)}** cells (most: {most})."
        )
        choices = [row.choice for row in found if row.choice is not None]
        noise = [row.noise for row in found if row.noise is not None]
        if choices:
            near = sum(each <= NEAR for each in choices)
            lines.append(
                f"- The strategy that `auto` took over our best, each as it did by itself: **1.00 to "
                f"{max(choices):.2f}**; at most {NEAR} in **{near} of {len(choices)}**. The same strategy twice, taken "
                f"by `auto` and by name: {min(noise):.2f} to {max(noise):.2f}, median {statistics.median(noise):.2f}."
            )
    wrong = [str(each) for row in found for each in row.found.values() if each.ms is not None and not each.right]
    return [*lines, f"- Wrong results: {'; '.join(wrong) or 'none'}."]


def section(found: list[Row], notes: dict[str, int]) -> list[str]:
    order = [name for row in found for name in contenders(row.cell)]
    theirs = [name for name in dict.fromkeys(order) if name.startswith("torch")]
    mine = [*STRATEGIES, *(name for name in HYBRIDS if name in order), AUTO, AGAIN, ALONE]
    names = [*theirs, *mine]
    head = ["ranks", "tokens", "heads", *names, "torch / one device", "torch / our best", "auto / our best"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for row in found:
        best = {id(row.best(True)), id(row.best(False))}
        shown = [_shown(row.found.get(name), best, notes) for name in names]
        ratios = [f"**{each:.2f}**" if each is not None else "" for each in (row.room, row.speedup, row.auto)]
        heads = f"{row.cell.heads}:{row.cell.kv_heads}"
        lines.append("| " + " | ".join([str(row.cell.ranks), short(row.cell.tokens), heads, *shown, *ratios]) + " |")
    return lines


def _shown(found: Found | None, best: set[int], notes: dict[str, int]) -> str:
    if found is None:
        return ""
    if found.ms is None:
        return f"no [{notes.setdefault(found.reason, len(notes) + 1)}]"
    text = f"{found.ms:.0f}" if found.ms >= 100 else f"{found.ms:.1f}"
    text = f"**{text}**" if id(found) in best else text
    return text + (f" ({found.note})" if found.note else "") + ("" if found.right else " wrong")


def summary(found: list[Row]) -> str:
    """The short table for the terminal."""
    head = ["cell", "torch's better", "ms", "our best", "ms", "torch / ours", "auto / ours"]
    lines = []
    for row in found:
        pairs = [(each.contender, f"{each.ms:.1f}") if each else ("", "") for each in map(row.best, (True, False))]
        ratios = [f"{each:.2f}" if each is not None else "" for each in (row.speedup, row.auto)]
        lines.append([str(row.cell), *pairs[0], *pairs[1], *ratios])
    return table(head, lines)


# ---- the run ---------------------------------------------------------------------------------------------------------


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULT, help="the page; figures go beside it, as .json")
    parser.add_argument("--cells", nargs="+", default=[], metavar="P", help='such as "4 ranks, causal"; all if none')
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS), metavar="N")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--limit", type=float, default=LIMIT, metavar="S", help="seconds for everything")
    parser.add_argument("--compile-first", action="store_true", help="before the limit's time begins")
    parser.add_argument("--resume", action="store_true", help="keep what the .json file has")
    args = parser.parse_args(given)
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # ranks compile at the same time as it is
    wanted = cells(args.tokens, args.cells)
    if any(length < 256 or length % 8 for length in args.tokens):
        parser.error(f"--tokens: multiples of 8 from 256 on hold the documents, got {args.tokens}")
    if not wanted:
        parser.error(f"--cells: none matches; cells are named as {cells(args.tokens, ())[0]}")
    Book(args.out, args.resume).forget_unfinished()
    program = command("python -m benchmarks.nccl") if given is None else "python -m benchmarks.nccl"
    if args.compile_first:
        compile_first(wanted, Job((), args.device, args.out, program, 0.0))
    until = time.time() + args.limit
    for ranks in RANKS:
        some = tuple(cell for cell in wanted if cell.ranks == ranks)
        run(Job(some, args.device, args.out, program, until))
    book = Book(args.out, resume=True)
    args.out.write_text(page(book, program))
    print(summary(rows(book)))
    print(f"{args.out}: {len(book.found)} results, {time.time() - until + args.limit:.0f} s")


GROUPS = {4: 3, 2: 2}
"""Groups of so many ranks that compile at once: for 16 cores."""


def compile_first(wanted: Sequence[Cell], job: Job) -> None:
    """Compile for all cells, in several groups of processes at once."""
    parts = [
        replace(job, cells=tuple(cell for cell in wanted if cell.ranks == ranks)[first::count])
        for ranks, count in GROUPS.items()
        for first in range(count)
    ]
    backend = "nccl" if job.device == "cuda" else "gloo"

    def compiled(part: Job) -> None:
        if part.cells:
            span.testing.processes(part.cells[0].ranks, backend, timeout=300, group_timeout=60).run(compile_cells, part)

    with ThreadPoolExecutor(len(parts)) as pool:
        list(pool.map(compiled, parts))


def run(job: Job) -> None:
    """Start ranks until all is done or the time is over: each that fails has written off one contender."""
    backend, known = "nccl" if job.device == "cuda" else "gloo", -1
    while time.time() < job.until:
        book = Book(job.out, resume=True)
        left = tuple(cell for cell in job.cells if book.lacks(cell))
        if not left or len(book.found) == known:
            return
        known = len(book.found)
        seconds = max(1.0, job.until - time.time()) + 60
        group = span.testing.processes(left[0].ranks, backend, timeout=seconds, group_timeout=60)
        try:
            group.run(on_rank, replace(job, cells=left))
            return
        except RankError as failed:
            print(f"{left[0].ranks} ranks: {failed}", flush=True)


if __name__ == "__main__":
    main()
