"""Context parallel attention on a CPU: two gloo ranks of one thread each, beside one process and torch's own.

Three questions. How far from half the time of one process are two ranks? How does torch's flex context parallelism
stand there, the only one of torch's that runs on a CPU? Does a rank hold as many keys as its plan says?

[Note: two clocks] Wall time says what a user waits for, but on a machine with other work it measures that, too. So each
figure is also given as CPU time, of all threads of the slowest rank, which leaves out waiting but not the sockets.

[Note: live bytes] Memory is counted, not sampled: a dispatch mode sees every tensor made under the loops of
attention/loop.py and, by a finalizer on its storage, when it is freed. Packed keys and values are told from other
tensors by their shape and dtype (attention/wire.py). What a library kernel allocates inside is not seen.

Run: python -m benchmarks.bench_cp_cpu [section ...]        writes those sections of benchmarks/results/cp_cpu.md
"""

from __future__ import annotations

import argparse
import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch, and for the ranks

import json
import multiprocessing
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from attnspan import Balanced, Causal, Documents, HeadTail, Layout, Mask, Plan
from attnspan.attention import Attention, execute
from attnspan.attention.bound_plan import BoundPlan
from attnspan.attention.inputs import Inputs
from attnspan.kernels import MergedOutputs
from attnspan.testing import loopback
from attnspan.transports.group import transport_of
from benchmarks.corpus import lognormal
from benchmarks.report import header, progress

RESULT = Path(__file__).parent / "results" / "cp_cpu.md"
RANKS, HEADS, KEY_HEADS, DIM = 2, 4, 2, 64
TOKENS, MEMORY_TOKENS = 16384, 4096
REPEATS = 2
STRATEGIES = ("needed(2)", "gather", "ring")


@dataclass(frozen=True)
class Workload:
    """What is attended: a mask by name, a length, a dtype."""

    mask: str
    dtype: str
    tokens: int = TOKENS

    @property
    def lengths(self) -> list[int]:
        """Of the documents; one for a causal mask."""
        return [self.tokens] if self.mask == "causal" else lognormal(self.tokens, mean=self.tokens // 8, seed=1)

    def built(self) -> Mask:
        return Causal() if self.mask == "causal" else Causal() & Documents(self.lengths)

    def layout(self, name: str, ranks: int = RANKS) -> Layout:
        return HeadTail(ranks) if name == "HeadTail" else Balanced(self.built(), ranks=ranks)

    def tensors(self, rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """query, key, value that want gradients, and the gradient of the output."""
        dtype = getattr(torch, self.dtype)
        q, k, v = (torch.randn(1, h, rows, DIM, dtype=dtype).requires_grad_() for h in (HEADS, KEY_HEADS, KEY_HEADS))
        return q, k, v, torch.randn(1, HEADS, rows, DIM, dtype=dtype)


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds: of the wall and of the CPU, forward and forward + backward, the fastest of some repeats."""

    forward: float
    both: float
    forward_cpu: float
    both_cpu: float


# ---- what is timed, in the processes of its ranks --------------------------------------------------------------------


def one_process(work: Workload) -> Times:
    """torch's SDPA, document by document, on one thread."""
    q, k, v, grad = work.tensors(work.tokens)

    def attend() -> Tensor:
        parts = zip(*(x.split(work.lengths, dim=2) for x in (q, k, v)), strict=True)
        return torch.cat(
            [F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True) for q, k, v in parts], 2
        )

    return timed(attend, (q, k, v), grad)


def ours(work: Workload, layout: str, strategy: str, backward: bool = True) -> Times:
    """One rank of span.attention; alone if no group was joined."""
    world = loopback(1).run(lambda world: world)[0] if not dist.is_initialized() else None
    ranks = dist.get_world_size() if world is None else 1
    plan = Plan(work.built(), work.layout(layout, ranks), work.tokens, strategy)
    attend = Attention(plan, world)
    rows = plan.layout.tokens(work.tokens)[dist.get_rank() if world is None else 0]
    q, k, v, grad = work.tensors(rows)
    return timed(lambda: attend(q, k, v), (q, k, v) if backward else (), grad)


def torch_flex(work: Workload) -> Times:
    """One rank of torch's context parallelism over flex_attention, compiled, HeadTail; on a CPU it has no backward."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental._context_parallel import (
        _context_parallel_shard,
        _ContextParallel,
        _HeadTailLoadBalancer,
    )
    from torch.distributed.tensor.experimental._context_parallel._attention import _create_cp_block_mask
    from torch.distributed.tensor.parallel import parallelize_module
    from torch.nn.attention.flex_attention import flex_attention

    compiled: Any = torch.compile(flex_attention)

    class Attend(torch.nn.Module):
        def forward(self, query: Tensor, key: Tensor, value: Tensor, block_mask: Any) -> Tensor:
            return compiled(query, key, value, block_mask=block_mask, enable_gqa=True)

    mesh = init_device_mesh("cpu", (RANKS,))
    balance = _HeadTailLoadBalancer(work.tokens, RANKS, "cpu")
    block_mask = _create_cp_block_mask(
        work.built().mask_mod(work.tokens, work.tokens), 1, 1, work.tokens, work.tokens, mesh, balance
    )
    whole = [x.detach() for x in work.tensors(work.tokens)]
    q, k, v, grad = cast(list[Tensor], _context_parallel_shard(mesh, whole, [2] * 4, balance))
    style = _ContextParallel(seq_dim=2, attention_type=_ContextParallel.AttentionType.FLEX)
    attend = parallelize_module(Attend(), mesh, style)
    return timed(lambda: attend(q, k, v, block_mask), (), grad)


def timed(attend: Callable[[], Tensor], inputs: tuple[Tensor, ...], grad: Tensor) -> Times:
    """The fastest of some repeats, ranks starting together; without inputs forward alone."""
    runs = []
    for _ in range(REPEATS):
        if dist.is_initialized():
            dist.barrier()
        start = clocks()
        out = attend()
        between = clocks()
        if inputs:
            torch.autograd.grad(out, inputs, grad)
        end = clocks()
        runs.append([later[clock] - start[clock] for clock in (0, 1) for later in (between, end)])
    return Times(*map(min, zip(*runs, strict=True)))  # the first run makes plans, agrees, compiles: it is never fastest


def clocks() -> tuple[float, float]:
    """See [Note: two clocks]."""
    return time.perf_counter(), time.process_time()


# ---- memory --------------------------------------------------------------------------------------------------------


class Live(TorchDispatchMode):
    """Live bytes of tensors made inside, and their peak; of packed keys, of packed gradients, and of all."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.now = {"keys": 0, "gradients": 0, "all": 0}
        self.peak = dict(self.now)
        self._dtype, self._known = dtype, weakref.WeakSet[Any]()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        aliases = {x.untyped_storage().data_ptr() for x in tensors_in((args, kwargs))}
        for tensor in tensors_in(found):
            if tensor.untyped_storage().data_ptr() not in aliases:
                self._made(tensor)
        return found

    def _made(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage in self._known or not storage.nbytes():
            return
        self._known.add(storage)
        kinds = ["all"]
        if tensor.dim() == 4 and tensor.shape[2:] == (KEY_HEADS, 2 * DIM):
            kinds.append("keys" if tensor.dtype == self._dtype else "gradients")
        for kind in kinds:
            self.now[kind] += storage.nbytes()
            self.peak[kind] = max(self.peak[kind], self.now[kind])
        weakref.finalize(storage, self._freed, kinds, storage.nbytes())

    def _freed(self, kinds: list[str], size: int) -> None:
        for kind in kinds:
            self.now[kind] -= size


def tensors_in(tree: Any) -> Iterator[Tensor]:
    return (x for x in torch.utils._pytree.tree_leaves(tree) if isinstance(x, Tensor))


def memory(work: Workload, layout: str, strategy: str) -> dict[str, float]:
    """Bytes: what the plan says a rank holds of keys and values, and what was counted."""
    plan = Plan(work.built(), work.layout(layout, dist.get_world_size()), work.tokens, strategy)
    call, rank = BoundPlan(plan, transport_of(None)), dist.get_rank()
    rows = plan.layout.tokens(work.tokens)[rank]
    q, k, v, grad = (x.detach() for x in work.tensors(rows))
    said = plan.peak_keys(rank) * KEY_HEADS * 2 * DIM * k.element_size()
    with Live(k.dtype) as forward:
        out, lse = execute.forward(call, Inputs(q, k, v))
    with Live(k.dtype) as backward:
        execute.backward(call, Inputs(q, k, v), MergedOutputs(grad, None, out, lse))
    return {
        "said": said,
        "own": k.nbytes + v.nbytes,
        **{f"forward {kind}": size for kind, size in forward.peak.items()},
        **{f"backward {kind}": size for kind, size in backward.peak.items()},
    }


# ---- processes -----------------------------------------------------------------------------------------------------


def on_ranks(ranks: int, measures: Sequence[Callable[[], Any]]) -> list[tuple[Any, ...]]:
    """For each measure what every rank found, in a fresh group of processes; one rank joins no group."""
    with tempfile.TemporaryDirectory() as folder:
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(ranks, spawn) as pool:
            found = [pool.submit(live, rank, ranks, f"file://{folder}/store", measures) for rank in range(ranks)]
            return list(zip(*(each.result() for each in found), strict=True))


def live(rank: int, ranks: int, store: str, measures: Sequence[Callable[[], Any]]) -> list[Any]:
    """One rank: it waits for the others before each measure."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if ranks > 1:
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    try:
        return [measure() for measure in measures]
    finally:
        if ranks > 1:
            dist.barrier()
            dist.destroy_process_group()


def slowest(times: tuple[Times, ...]) -> Times:
    return Times(*(max(getattr(each, name) for each in times) for name in Times.__slots__))


# ---- sections of the result ------------------------------------------------------------------------------------------


def speed(mask: str, dtype: str) -> list[str]:
    """Two ranks against one process."""
    work = Workload(mask, dtype)
    shards = {work.layout(name).shards(work.tokens): name for name in ("Balanced", "HeadTail")}  # once where they agree
    choices = [(layout, strategy) for layout in shards.values() for strategy in STRATEGIES]
    alone = [partial(one_process, work), partial(ours, work, "HeadTail", "needed(2)")]
    (sdpa,), (single,) = on_ranks(1, alone)
    pairs = on_ranks(RANKS, [partial(ours, work, *choice) for choice in choices])
    rows = [("one process, SDPA", sdpa, 1), ("one process, ours", single, 1)]
    rows += [(f"{RANKS} ranks, {', '.join(c)}", slowest(found), RANKS) for c, found in zip(choices, pairs, strict=True)]
    lengths = "" if mask == "causal" else f" Documents, log-normal: {', '.join(map(str, work.lengths))} tokens."
    return [
        f"{work.tokens} tokens.{lengths}",
        "1.00 is one process running SDPA, divided by the ranks.",
        *([] if len(shards) > 1 else ["Balanced deals as HeadTail does."]),
        "",
        "| | fwd s | fwd+bwd s | fwd+bwd CPU s | fwd x ranks / SDPA | fwd+bwd x ranks / SDPA | the same in CPU time |",
        "|---|---|---|---|---|---|---|",
        *(
            f"| {name} | {t.forward:.2f} | {t.both:.2f} | {t.both_cpu:.2f} | {t.forward * n / sdpa.forward:.2f} | "
            f"**{t.both * n / sdpa.both:.2f}** | **{t.both_cpu * n / sdpa.both_cpu:.2f}** |"
            for name, t, n in rows
        ),
    ]


def flex() -> list[str]:
    """Two ranks of ours beside two of torch's, float32, forward: torch has no more."""
    works = [Workload(mask, "float32") for mask in ("causal", "documents")]
    measures: list[Callable[[], Times]] = []
    for work in works:
        measures += [partial(ours, work, "HeadTail", "needed(2)", False), partial(torch_flex, work)]
    found = map(slowest, on_ranks(RANKS, measures))
    rows = [(work.mask, next(found), next(found)) for work in works]
    return [
        f"float32, {TOKENS} tokens, {RANKS} ranks, HeadTail, flex_attention compiled. Forward alone: on a CPU torch",
        'has no backward ("FlexAttention does not support backward on CPU"). Ours is needed(2).',
        "",
        "| | ours s | torch s | torch / ours | ours CPU s | torch CPU s | torch / ours |",
        "|---|---|---|---|---|---|---|",
        *(
            f"| {mask} | {our.forward:.2f} | {its.forward:.2f} | **{its.forward / our.forward:.2f}** | "
            f"{our.forward_cpu:.2f} | {its.forward_cpu:.2f} | **{its.forward_cpu / our.forward_cpu:.2f}** |"
            for mask, our, its in rows
        ),
    ]


def keys_held() -> list[str]:
    """What each rank holds, as the plan says and as counted."""
    works = [Workload(mask, "bfloat16", MEMORY_TOKENS) for mask in ("causal", "documents")]
    cells = [(work, layout, s) for work in works for layout in ("HeadTail", "Balanced") for s in STRATEGIES]
    lines = []
    for ranks in (RANKS, 4):
        found = on_ranks(ranks, [partial(memory, *cell) for cell in cells])
        for (work, layout, strategy), each in zip(cells, found, strict=True):
            most = max(each, key=lambda rank: rank["said"])
            mib = {name: size / 2**20 for name, size in most.items()}
            if strategy == "ring" and ranks > 2:  # its packed copy has been handed on: own keys are the caller's
                mib["forward keys"] += mib["own"]
                mib["backward keys"] += mib["own"]
            lines.append(
                f"| {ranks} | {work.mask} | {layout} | {strategy} | {mib['said']:.2f} | {mib['forward keys']:.2f} | "
                f"**{mib['forward keys'] / mib['said']:.2f}** | {mib['backward keys']:.2f} | "
                f"{mib['backward gradients']:.2f} | {mib['forward all']:.2f} | {mib['backward all']:.2f} |"
            )
    return [
        f"MiB on the rank that holds most, bfloat16, {MEMORY_TOKENS} tokens, peaks of live bytes counted by a dispatch",
        "mode. Said: plan.peak_keys x bytes of a key and value. Keys: packed buffers of keys and values; own ones",
        "count once, as the packed copy that travels, or as the caller's where a longer ring has handed that copy on;",
        "beside a packed copy the caller's own K and V come on top. Gradients: packed float32 sums. All:",
        "everything made in forward or in backward, results included; not what a library kernel allocates inside.",
        "",
        "| ranks | mask | layout | strategy | said | keys, forward | / said | keys, backward | gradients | "
        "all, forward | all, backward |",
        "|---" * 11 + "|",
        *lines,
    ]


SECTIONS: dict[str, Callable[[], list[str]]] = {
    **{
        f"{mask}, {dtype}": partial(speed, mask, dtype)
        for mask in ("causal", "documents")
        for dtype in ("float32", "bfloat16")
    },
    "torch's flex context parallelism": flex,
    "keys held": keys_held,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("section", nargs="*", help=f"among {json.dumps(list(SECTIONS))}; all if none is given")
    chosen = parser.parse_args().section or list(SECTIONS)
    texts = written()
    for name in progress(chosen, "sections"):
        texts[name] = "\n".join([*SECTIONS[name](), "", load()])
        print(f"## {name}\n\n{texts[name]}\n", flush=True)
        RESULT.write_text(page(texts))


def load() -> str:
    """How busy the machine was with this and other work: on a quiet one it is no more than the ranks."""
    return f"(load average at the end of this section: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores)"


def written() -> dict[str, str]:
    """The sections that the result has already."""
    if not RESULT.exists():
        return {}
    _, *sections = RESULT.read_text().split("\n## ")
    return {name: text.strip() for name, text in (section.split("\n", 1) for section in sections)}


def page(texts: dict[str, str]) -> str:
    lines = [
        *header("Context parallelism on a CPU", "python -m benchmarks.bench_cp_cpu"),
        f"gloo ranks of one thread each; {HEADS} heads on {KEY_HEADS} key heads, head dim {DIM}; fastest of {REPEATS},",
        "the slowest rank. CPU time leaves out waiting, for the other rank and for cores that other work had. A load",
        "above the ranks means that other work shared the cores: do not trust the wall times of such a section.",
        "",
    ]
    for name in (name for name in SECTIONS if name in texts):
        lines += [f"## {name}", "", texts[name], ""]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
