"""Recurrences on a CPU: chunks against a loop over tokens, and what ranks compute against one device. One thread.

4 heads of 64 x 64, float32; 4,096 tokens against the loop, 16,384 over ranks. Times are of the processor, not of the
clock, and each is the least of several. Virtual ranks are threads on one core. What splitting costs is told in two
ways, over the time of one device: that of the slowest rank times the ranks, and that of all ranks together. The loop is
what each law says, token by token, all heads at once.

Run: python -m benchmarks.recurrence        writes benchmarks/results/recurrence.md
     python -m benchmarks.recurrence --device cuda        ranks that run alone: recurrence_alone.py
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

import attnspan as span
from attnspan.layouts import Balanced, Contiguous, HeadTail, Layout
from attnspan.recurrence import Rule
from benchmarks import recurrence_alone
from benchmarks.report import command, folded, header

RESULTS = Path(__file__).parent / "results" / "recurrence.md"
TOKENS, HEADS, DIM, TIMES = 4096, 4, 64, 5
LONG = 16384  # tokens over ranks
CEILING = 5.0  # times as fast as the loop, at least
RULES = ("GatedDelta", "KDA", "GLA", "Lightning", "SSD")


def tensors(rule: str, length: int = TOKENS) -> dict[str, Tensor]:
    """Whole tensors of a rule."""
    random = torch.Generator().manual_seed(0)
    tokens = (1, length, HEADS)
    query, key, value = (torch.randn(*tokens, DIM, generator=random) for _ in range(3))
    gate = -torch.rand(*tokens, *([DIM] if rule in ("KDA", "GLA") else []), generator=random)
    if rule == "SSD":
        return {"x": value, "dt": -gate, "A": -torch.ones(HEADS), "B": key[:, :, :1], "C": query[:, :, :1]}
    given = {"query": query, "key": torch.nn.functional.normalize(key, dim=-1), "value": value, "decay": gate}
    return given | ({"beta": torch.rand(*tokens, generator=random)} if rule in ("GatedDelta", "KDA") else {})


def loop(rule: str, given: dict[str, Tensor]) -> Tensor:
    """The law, token by token."""
    if rule == "SSD":
        step = given["dt"]
        query, key = (given[name].expand(-1, -1, HEADS, -1) for name in ("C", "B"))
        value, decay = given["x"] * step.unsqueeze(-1), step * given["A"]
    else:
        query, key, value, decay = (given[name] for name in ("query", "key", "value", "decay"))
        query = query * DIM**-0.5
    beta = given.get("beta")
    state, outs = query.new_zeros(1, HEADS, DIM, DIM), []
    for t in range(TOKENS):
        state = decay[:, t].exp().view(1, HEADS, -1, 1) * state
        new = value[:, t]
        if beta is not None:
            new = beta[:, t].unsqueeze(-1) * (new - (key[:, t].unsqueeze(-2) @ state).squeeze(-2))
        state = state + key[:, t].unsqueeze(-1) * new.unsqueeze(-2)
        outs.append((query[:, t].unsqueeze(-2) @ state).squeeze(-2))
    return torch.stack(outs, 1)


def seconds(work: Callable[[], object], times: int = TIMES) -> float:
    """Of the processor, the least of several."""
    took = []
    for _ in range(times):
        began = time.process_time()
        work()
        took.append(time.process_time() - began)
    return min(took)


class Took(NamedTuple):
    """Seconds of the processor: of the slowest rank, and of all ranks."""

    slowest: float
    together: float


def over(layout: Layout, rule: str, backward: bool, length: int = TOKENS, times: int = TIMES) -> tuple[Took, Tensor]:
    """What ranks take, forward or with backward, and the output."""
    given = tensors(rule, length)

    def rank(world: span.testing.World) -> tuple[Tensor, list[float]]:
        cp = span.ContextParallel(world, seq_len=length, mask=span.Causal(), layout=layout)
        shards = {name: x if x.dim() == 1 else cp.shard(x).contiguous() for name, x in given.items()}
        call: Rule = getattr(span, rule)(**{name: x.clone().requires_grad_(backward) for name, x in shards.items()})

        def work() -> Tensor:
            out = cp.recurrence(call)
            assert isinstance(out, Tensor), "no states were asked for"
            if backward:
                out.sum().backward()
            return out

        with torch.set_grad_enabled(backward):
            return cp.unshard(work().detach()), [timed(world, work) for _ in range(times)]

    def timed(world: span.testing.World, work: Callable[[], Tensor]) -> float:
        world.all_gather_bytes(b"")
        began = time.thread_time()
        work()
        return time.thread_time() - began

    found = span.testing.loopback(ranks=layout.ranks, timeout=600).run(rank)
    passes = list(zip(*(times for _, times in found), strict=True))
    return Took(min(map(max, passes)), min(map(sum, passes))), found[0][0]


BELOW: list[str] = []
"""What is slower than promised."""


def against_the_loop() -> list[str]:
    lines = ["| rule | loop | chunks | times as fast | error | loop, with backward | chunks | times as fast |"]
    lines += ["|---|---|---|---|---|---|---|---|"]
    for rule in RULES:
        given = tensors(rule)
        with torch.no_grad():
            expected = loop(rule, given)
            slow = seconds(lambda: loop(rule, given), 3)  # noqa: B023
        for x in given.values():
            x.requires_grad_()
        slow_both = seconds(lambda: loop(rule, given).sum().backward(), 1)  # noqa: B023
        fast, out = over(Contiguous(1), rule, backward=False, times=4 * TIMES)
        both, _ = over(Contiguous(1), rule, backward=True)
        error = float((out - expected).abs().max() / expected.abs().max())
        ratios = {"forward": slow / fast.slowest, "with backward": slow_both / both.slowest}
        for what, ratio in ratios.items():
            if ratio < CEILING:
                BELOW.append(f"{rule} {what}: {ratio:.1f} times as fast as the loop, {CEILING} promised")
        cells = (f"{slow:.2f} s", f"{fast.slowest:.3f} s", f"{ratios['forward']:.1f}", f"{error:.1e}")
        more = (f"{slow_both:.1f} s", f"{both.slowest:.2f} s", f"{ratios['with backward']:.0f}")
        lines.append(f"| {' | '.join((rule, *cells, *more))} |")
    return lines


def against_one_device() -> list[str]:
    mask = span.Causal()
    layouts = {"Contiguous(8)": Contiguous(8), "HeadTail(8)": HeadTail(8), "Balanced(8)": Balanced(mask, ranks=8)}
    lines = ["| rule | " + " | ".join(f"{name}, forward | both" for name in layouts) + " |"]
    lines += ["|---" * (1 + 2 * len(layouts)) + "|"]
    for rule in RULES:
        alone = [over(Contiguous(1), rule, backward, LONG)[0].slowest for backward in (False, True)]
        cells = []
        for layout in layouts.values():
            for backward, one in zip((False, True), alone, strict=True):
                took, _ = over(layout, rule, backward, LONG)
                cells.append(f"{took.slowest * layout.ranks / one:.2f} ({took.together / one:.2f})")
        lines.append(f"| {' | '.join((rule, *cells))} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--device", default=None, help="ranks that run alone: cuda, or cpu to try it")
    parser.add_argument("--tokens", type=int, nargs="+", default=recurrence_alone.Sizes().tokens)
    for name in ("heads", "dim", "repeats", "configs"):
        parser.add_argument(f"--{name}", type=int, default=getattr(recurrence_alone.Sizes(), name))
    given = parser.parse_args()
    if given.device is not None:
        names = ("heads", "dim", "repeats", "configs")
        sizes = recurrence_alone.Sizes(given.device, tuple(given.tokens), *(getattr(given, name) for name in names))
        out = given.out or recurrence_alone.RESULTS
        return recurrence_alone.main(sizes, out, command("python -m benchmarks.recurrence"))
    out = given.out or RESULTS
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # threads of ranks share its cache by turns
    page = [
        *header("Recurrences on a CPU", "python -m benchmarks.recurrence"),
        f"{HEADS} heads of {DIM} x {DIM}, float32, one core; seconds of the processor.",
        "",
        f"## {TOKENS} tokens: chunks against a loop over tokens, on one device",
        "",
        *against_the_loop(),
        "",
        f"## {LONG} tokens: the slowest of eight virtual ranks, times eight, as a multiple of one device",
        "",
        "In brackets: all ranks together.",
        "",
        *against_one_device(),
        "",
    ]
    out.write_text(folded("\n".join(page)), encoding="utf-8")
    print("\n".join(page))
    assert not BELOW, "\n".join(BELOW)


if __name__ == "__main__":
    main()
