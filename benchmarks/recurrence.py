"""Recurrences on a CPU: chunks against a loop over tokens, and what ranks compute against one device. One thread.

4,096 tokens, 4 heads of 64 x 64, float32. Times are of the processor, not of the clock, so that other programs do not
count; each is the least of several. Virtual ranks take turns on one thread: their time together, over that of one rank,
is what splitting costs. The loop is what each law says, token by token, all heads at once.

Run: python -m benchmarks.recurrence        writes benchmarks/results/recurrence.md
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import attnspan as span
from attnspan.layouts import Balanced, Contiguous, HeadTail, Layout
from attnspan.recurrence import Rule
from benchmarks.report import folded, header

RESULTS = Path(__file__).parent / "results" / "recurrence.md"
TOKENS, HEADS, DIM, TIMES = 4096, 4, 64, 4
CEILING = 5.0  # times as fast as the loop, at least: the gated delta rule forward, and all rules with backward
RULES = ("GatedDelta", "KDA", "GLA", "Lightning", "SSD")


def tensors(rule: str) -> dict[str, Tensor]:
    """Whole tensors of a rule."""
    random = torch.Generator().manual_seed(0)
    tokens = (1, TOKENS, HEADS)
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


def over(layout: Layout, rule: str, backward: bool) -> tuple[float, float]:
    """Seconds of all ranks together, forward or with backward, and the largest error against the loop."""
    given = {name: x.clone().requires_grad_(backward) for name, x in tensors(rule).items()}

    def rank(world: span.testing.World) -> tuple[Tensor, list[float]]:
        cp = span.ContextParallel(world, seq_len=TOKENS, mask=span.Causal(), layout=layout)
        shards = {name: x if x.dim() == 1 else cp.shard(x) for name, x in given.items()}
        call: Rule = getattr(span, rule)(**shards)

        def work() -> Tensor:
            out = cp.recurrence(call)
            assert isinstance(out, Tensor), "no states were asked for"
            if backward:
                out.sum().backward(retain_graph=True)
            return out

        return cp.unshard(work().detach()), [timed(world, work) for _ in range(TIMES)]

    def timed(world: span.testing.World, work: Callable[[], Tensor]) -> float:
        world.agree(b"")
        began = time.process_time()
        work()
        world.agree(b"")
        return time.process_time() - began

    found = span.testing.loopback(ranks=layout.ranks, timeout=600).run(rank)
    with torch.no_grad():
        error = (found[0][0] - LOOPS[rule]).abs().max() / LOOPS[rule].abs().max()
    return min(found[0][1]), float(error)


LOOPS: dict[str, Tensor] = {}


def against_the_loop() -> list[str]:
    lines = ["| rule | loop | chunks | times as fast | error | loop, with backward | chunks | times as fast |"]
    lines += ["|---|---|---|---|---|---|---|---|"]
    for rule in RULES:
        given = tensors(rule)
        with torch.no_grad():
            LOOPS[rule] = loop(rule, given)
            slow = seconds(lambda: loop(rule, given), 2)  # noqa: B023
        for x in given.values():
            x.requires_grad_()
        slow_both = seconds(lambda: loop(rule, given).sum().backward(), 1)  # noqa: B023
        with torch.no_grad():
            fast, error = over(Contiguous(1), rule, backward=False)
        both, _ = over(Contiguous(1), rule, backward=True)
        ratios = {"forward": slow / fast} if rule == "GatedDelta" else {}
        for what, ratio in (ratios | {"with backward": slow_both / both}).items():
            assert ratio >= CEILING, f"{rule} {what}: {ratio:.1f} times as fast as the loop, {CEILING} promised"
        cells = (f"{slow:.2f} s", f"{fast:.3f} s", f"{slow / fast:.1f}", f"{error:.1e}", f"{slow_both:.1f} s")
        lines.append(f"| {' | '.join((rule, *cells, f'{both:.2f} s', f'{slow_both / both:.0f}'))} |")
    return lines


def against_one_device() -> list[str]:
    mask = span.Causal()
    layouts = {"Contiguous(8)": Contiguous(8), "HeadTail(8)": HeadTail(8), "Balanced(8)": Balanced(mask, ranks=8)}
    lines = ["| rule | " + " | ".join(f"{name}, forward | both" for name in layouts) + " |"]
    lines += ["|---" * (1 + 2 * len(layouts)) + "|"]
    for rule in RULES:
        with torch.no_grad():
            alone, _ = over(Contiguous(1), rule, backward=False)
        both, _ = over(Contiguous(1), rule, backward=True)
        cells = []
        for layout in layouts.values():
            with torch.no_grad():
                cells.append(f"{over(layout, rule, backward=False)[0] / alone:.2f}")
            cells.append(f"{over(layout, rule, backward=True)[0] / both:.2f}")
        lines.append(f"| {' | '.join((rule, *cells))} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=RESULTS)
    out: Path = parser.parse_args().out
    torch.set_num_threads(1)
    page = [
        *header("Recurrences on a CPU", "python -m benchmarks.recurrence"),
        f"{TOKENS} tokens, {HEADS} heads of {DIM} x {DIM}, float32, one thread; seconds of the processor.",
        "",
        "## Chunks against a loop over tokens, on one device",
        "",
        *against_the_loop(),
        "",
        "## Eight virtual ranks together, as a multiple of one",
        "",
        *against_one_device(),
        "",
    ]
    out.write_text(folded("\n".join(page)), encoding="utf-8")
    print("\n".join(page))


if __name__ == "__main__":
    main()
