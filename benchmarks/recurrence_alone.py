"""The gated delta rule on ranks that run alone, over the best kernel of one device; bytes beside fla's own.

Every rank's share is run by itself (silent.py): compute only, launches included. 16 heads of 128 x 128, bfloat16, 64k
and 256k tokens of one document, on Contiguous and on Balanced (as beside causal attention). One device computes all
tokens with each kernel; the fastest is the ceiling. "fla alone" is what the package's own function takes, without us:
`chunk_gated_delta_rule`; where the package refuses its backward (recurrence/fla.py, [Note: Hopper]), `chunk_kda` on the
same decays written out for every channel.

Two times are given: as a program waits for it, and on the device, behind a queue that was filled while it was busy with
something else, as inside of a model. Bytes of flash-linear-attention's own context parallelism are worked out from its
code, `fla/ops/cp`: every rank gathers the float32 map of every other, of two for zigzag shards.

Run: python -m benchmarks.recurrence --device cuda        writes benchmarks/results/recurrence_cuda.md
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

import attnspan as span
from attnspan.layouts import Balanced, Contiguous, Layout
from attnspan.recurrence import fla, fla_package
from attnspan.transports import Pending
from benchmarks.report import folded, header
from benchmarks.silent import Silent

RANKS = 8
BARS = (1.15, 1.25)
"""Slowest rank times ranks over one device at most: forward, and forward + backward."""
RESULTS = Path(__file__).parent / "results" / "recurrence_cuda.md"
FLUSHED = 2**28
"""Bytes that are written between measurements, so that caches are cold."""
LONG = 1000.0
"""Milliseconds after which a measurement is not repeated again."""
QUEUED = 20_000_000
"""Cycles that the device is busy for while its queue is filled."""


class Sizes(NamedTuple):
    """What is run."""

    device: str = "cuda"
    tokens: tuple[int, ...] = (65536, 262144)
    heads: int = 16
    dim: int = 128
    repeats: int = 7
    configs: int = 0
    """How many configurations the package's tuner tries for each program; 0 for all."""


class Empty(Silent):
    """A rank alone, to which others send zeros."""

    def _post(self, sends: Any, receives: Any, what: str) -> Pending:
        buffers = [buffer for _, buffer in receives if buffer.numel()]
        if buffers:
            torch._foreach_zero_(buffers)
        return Pending()


class Times(NamedTuple):
    """Milliseconds forward and forward + backward: waited for, and on the device."""

    forward: float
    both: float
    forward_on_device: float
    both_on_device: float

    def __str__(self) -> str:
        return f"{self.forward:.2f} / {self.both:.2f} ({self.forward_on_device:.2f} / {self.both_on_device:.2f})"


def tokens_of(sizes: Sizes, count: int) -> dict[str, Tensor]:
    """Tensors of so many tokens."""
    random = torch.Generator(sizes.device).manual_seed(0)
    heads, half = (1, count, sizes.heads), torch.bfloat16
    drawn = lambda *dims, **options: torch.randn(*heads, *dims, generator=random, device=sizes.device, **options)  # noqa: E731
    query, key, value = (drawn(sizes.dim, dtype=half) for _ in range(3))
    beta, decay = drawn(dtype=half).sigmoid(), -drawn().sigmoid()
    given = {"query": query, "key": F.normalize(key, dim=-1), "value": value, "beta": beta, "decay": decay}
    return {name: x.requires_grad_() for name, x in given.items()}


# ---- times ---------------------------------------------------------------------------------------------------------


def timed(sizes: Sizes, forward: Callable[[], Tensor], given: dict[str, Tensor]) -> Times:
    """Medians of a forward pass, and of it with backward."""
    grad = torch.randn_like(forward().detach())
    wants = list(given.values())

    def alone() -> None:
        with torch.no_grad():
            forward()

    def both() -> None:
        torch.autograd.grad(forward(), wants, grad)

    times = [measure(sizes, work) for measure in (waited, on_device) for work in (alone, both)]
    return Times(*times)


def median(sizes: Sizes, once: Callable[[], float]) -> float:
    """Of several after one that is dropped; of fewer if they take seconds."""
    once()
    took: list[float] = []
    while len(took) < sizes.repeats and sum(took) < LONG:
        took.append(once())
    return sorted(took)[len(took) // 2]


def waited(sizes: Sizes, work: Callable[[], None]) -> float:
    """Milliseconds from an idle device to the end."""

    def once() -> float:
        flushed(sizes)
        began = time.perf_counter()
        work()
        if sizes.device == "cuda":
            torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - began)

    return median(sizes, once)


def on_device(sizes: Sizes, work: Callable[[], None]) -> float:
    """Milliseconds of the device alone: everything is queued before it begins."""
    if sizes.device != "cuda":
        return waited(sizes, work)

    def once() -> float:
        flushed(sizes)
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(QUEUED)
        first.record()
        work()
        last.record()
        torch.cuda.synchronize()
        return float(first.elapsed_time(last))

    return median(sizes, once)


def flushed(sizes: Sizes) -> None:
    if sizes.device == "cuda":
        torch.empty(FLUSHED, dtype=torch.int8, device="cuda").zero_()
        torch.cuda.synchronize()


def within_memory(measure: Callable[[], Times]) -> Times | None:
    """None where it does not fit."""
    try:
        return measure()
    except torch.cuda.OutOfMemoryError:
        return None
    finally:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


# ---- what is run ---------------------------------------------------------------------------------------------------


def of_rank(sizes: Sizes, layout: Layout, tokens: int, rank: int, kernel: str) -> Times:
    """One rank's share, or one device's whole, by a kernel."""
    transport = Empty(rank, layout.ranks, sizes.device)
    cp = span.ContextParallel(transport, seq_len=tokens, mask=span.Causal(), layout=layout)
    given = tokens_of(sizes, cp.sharding.tokens)

    def forward() -> Tensor:
        out = cp.recurrence(span.GatedDelta(**given), kernel=kernel)
        assert isinstance(out, Tensor), "no states were asked for"
        return out

    return timed(sizes, forward, given)


def fla_alone(sizes: Sizes, tokens: int) -> Times:
    """The package's own functions, as they are called without us."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from fla.ops.kda import chunk_kda

    given = tokens_of(sizes, tokens)
    wide = fla._miscompiled(torch.device(sizes.device))

    def forward() -> Tensor:
        q, k, v, beta, decay = given.values()
        if wide and torch.is_grad_enabled():
            decay = decay.unsqueeze(-1).expand(*decay.shape, sizes.dim)
            out: Tensor = chunk_kda(q, k, v, decay, beta)[0]
            return out
        return chunk_gated_delta_rule(q, k, v, decay, beta)[0]

    return timed(sizes, forward, given)


def narrowed(count: int) -> None:
    """Leave the package's tuner so many configurations of each program, far apart: tuning takes minutes."""
    for module in [each for name, each in sys.modules.items() if name.startswith("fla.ops")]:
        for kernel in vars(module).values():
            while kernel is not None and not isinstance(configs := getattr(kernel, "configs", None), list):
                kernel = getattr(kernel, "fn", None) if type(kernel).__module__.startswith(("triton", "fla")) else None
            if kernel is not None:
                middle = range(len(configs) // (2 * count), len(configs), -(-len(configs) // count))
                kernel.configs = [configs[i] for i in middle]


# ---- the page ------------------------------------------------------------------------------------------------------


class Row(NamedTuple):
    """A line of the table."""

    tokens: int
    what: str
    times: Times | None
    over: Times | None = None
    """One device's."""

    @property
    def ratios(self) -> list[float]:
        """Over one device, forward and forward + backward, waited for and on the device."""
        if self.times is None or self.over is None:
            return []
        return [RANKS * mine / one for mine, one in zip(self.times, self.over, strict=True)]

    def __str__(self) -> str:
        times = "does not fit" if self.times is None else str(self.times)
        ratios = [f"{each:.3f}" for each in self.ratios]
        told = f"{ratios[0]} / {ratios[1]} (**{ratios[2]} / {ratios[3]}**)" if ratios else ""
        return f"| {self.tokens} | {self.what} | {times} | {told} |"


def rows(sizes: Sizes) -> Iterator[Row]:
    """Kernels of one device, then layouts, for each length."""
    kernels = ["chunked"] if fla.installed() is None or sizes.device != "cuda" else ["fla", "chunked"]
    for tokens in sizes.tokens:
        one: dict[str, Callable[[], Times]] = {
            f"one device, {kernel}": lambda kernel=kernel: of_rank(sizes, Contiguous(1), tokens, 0, kernel)  # noqa: B023
            for kernel in kernels
        }
        if "fla" in kernels:
            one["one device, fla alone"] = lambda: fla_alone(sizes, tokens)  # noqa: B023
        found = {}
        for name, measure in one.items():
            found[name] = within_memory(measure)
            yield Row(tokens, name, found[name])
        ceiling = Times(*map(min, zip(*(each for each in found.values() if each is not None), strict=True)))
        layouts: dict[str, Layout] = {
            "Contiguous": Contiguous(RANKS), "Balanced": Balanced(span.Causal(), ranks=RANKS)
        }  # fmt: skip
        for name, layout in layouts.items():
            for kernel in kernels[:1]:
                each = [of_rank(sizes, layout, tokens, rank, kernel) for rank in range(RANKS)]
                slowest = Times(*map(max, zip(*each, strict=True)))
                yield Row(tokens, f"{name}, {kernel}: the slowest of {RANKS}", slowest, ceiling)


def bytes_of(sizes: Sizes) -> list[str]:
    """What arrives, ours beside the package's."""
    layers = span.RecurrentLayers("GatedDelta", sizes.heads, sizes.dim)
    tokens, mb = sizes.tokens[0], 1e6
    lines = ["| bytes of maps, each direction | at a rank, at most | at all ranks |", "|---|---|---|"]
    for name, layout, maps in (
        ("contiguous", Contiguous(RANKS), 1), ("zigzag", Balanced(span.Causal(), ranks=RANKS), 2)
    ):  # fmt: skip
        over = layers.over(layout, span.Causal(), tokens)
        ours = [over.arriving(rank) for rank in range(RANKS)]
        most, all_of_them = max(map(max, ours)), max(map(sum, zip(*ours, strict=True)))
        theirs = 4 * sizes.heads * sizes.dim * 2 * sizes.dim * (RANKS - 1) * maps
        lines.append(f"| {type(layout).__name__} | {most / mb:.1f} MB | {all_of_them / mb:.1f} MB |")
        lines.append(f"| flash-linear-attention, {name} | {theirs / mb:.1f} MB | {RANKS * theirs / mb:.1f} MB |")
    return lines


def page(sizes: Sizes, found: Sequence[Row], command: str) -> str:
    """The result file."""
    return "\n".join(
        [
            *header("Recurrences on ranks that run alone", command),
            f"Gated delta rule, {sizes.heads} heads of {sizes.dim} x {sizes.dim}, bfloat16, one document; fla-core "
            f"{fla.installed() or 'not installed'}. Milliseconds forward / forward + backward, medians of "
            f"{sizes.repeats}: waited for, and in brackets on the device alone. Then the slowest rank times {RANKS} "
            f"over the fastest of one device; bars {BARS[0]} / {BARS[1]}.",
            "",
            "| tokens | what | ms | over one device |",
            "|---|---|---|---|",
            *map(str, found),
            "",
            *bytes_of(sizes),
            "",
        ]
    )


def main(sizes: Sizes, out: Path, command: str) -> None:
    began, found = time.perf_counter(), []
    if sizes.configs and fla.installed() is not None:
        for name in fla_package.PARTS:
            fla_package.part(name)
        narrowed(sizes.configs)
    for row in rows(sizes):
        found.append(row)
        print(f"{time.perf_counter() - began:5.0f} s  {row}", flush=True)
        out.write_text(folded(page(sizes, found, command)), encoding="utf-8")
    print(page(sizes, found, command).split("\n\n", 3)[-1])
