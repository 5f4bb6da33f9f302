"""Products of few rows against cuBLAS's, in CUDA graphs: layers of a model without attention, and single products.

Run: python benchmarks/small_products.py [--out PAGE]    on a CUDA device

Layers have weights of their own, so that these come from memory; the ideal is the time of a copy of as many bytes.
"Launched in turn" is ours without dependent launches.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional as F

from attnspan.integrations.huggingface import fused_kernels, small_products
from attnspan.integrations.huggingface.fused_kernels import fused_add_norm, fused_gate, fused_norm
from attnspan.integrations.huggingface.small_products import gated_product, product, products
from benchmarks.report import command, folded, header

ROWS = (1, 8, 32, 64)
MODELS = {"8B": (4096, 14336, 1024, 4), "1.1B": (2048, 8192, 1024, 8)}
"""Hidden and inner size, those of keys, and layers."""


def drawn(n: int, k: int, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(n, k, generator=generator, device="cuda").mul_(k**-0.5).bfloat16()


def microseconds(chain: Callable[[], object], repeats: int = 30) -> float:
    """Of a replay: the median of three turns."""
    chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain()
    turns = []
    for _ in range(4):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(repeats):
            graph.replay()
        end.record()
        end.synchronize()
        turns.append(1e3 * begin.elapsed_time(end) / repeats)
    return statistics.median(turns[1:])


def bytes_per_microsecond() -> float:
    """Of a copy, which reads and writes each."""
    x = torch.empty(1 << 29, dtype=torch.int32, device="cuda")
    y = torch.empty_like(x)
    return 2 * x.nbytes / microseconds(lambda: y.copy_(x), repeats=5)


@contextmanager
def launched_in_turn() -> Iterator[None]:
    with ExitStack() as stack:
        for module in (fused_kernels, small_products):
            stack.enter_context(patch.object(module, "dependent_launch", lambda device: {"pdl": False}))
        yield


class Layers:
    """Layers without attention, of some rows."""

    def __init__(self, name: str, rows: int) -> None:
        hidden, inner, keys, self.count = MODELS[name]
        sizes = [(hidden, hidden), (keys, hidden), (keys, hidden), (hidden, hidden), (inner, hidden), (inner, hidden)]
        self.weights = [
            [drawn(n, k, 7 * i + j) for j, (n, k) in enumerate([*sizes, (hidden, inner)])] for i in range(self.count)
        ]
        self.one = torch.ones(hidden, device="cuda", dtype=torch.bfloat16)
        self.x = drawn(rows, hidden, 99)[None]
        self.bytes = sum(weight.nbytes for weight in self.weights[0])

    def ours(self) -> Tensor:
        x = self.x
        for q, k, v, o, gate, up, down in self.weights:
            y = product(products(fused_norm(x, self.one, 1e-5, "rounded"), [q, k, v])[0], o)
            x, y = fused_add_norm(x, y, self.one, 1e-5, "rounded")
            x = product(gated_product(y, gate, up, "silu"), down, None, x)
        return x

    def torchs(self) -> Tensor:
        x = self.x
        for q, k, v, o, gate, up, down in self.weights:
            y = fused_norm(x, self.one, 1e-5, "rounded")
            attended, _, _ = (F.linear(y, each) for each in (q, k, v))
            y = F.linear(attended, o)
            x, y = fused_add_norm(x, y, self.one, 1e-5, "rounded")
            x = x + F.linear(fused_gate(F.linear(y, gate), F.linear(y, up), "silu"), down)
        return x


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "small_products.md")
    page, rate = parser.parse_args(arguments).out, bytes_per_microsecond()
    rows = ["| model | rows | ideal | cuBLAS | ours | launched in turn | apart |", "|---|---|---|---|---|---|---|"]
    for name in MODELS:
        for count in ROWS:
            layers = Layers(name, count)
            ours, torchs = layers.ours(), layers.torchs()
            apart = float((ours.double() - torchs.double()).norm() / torchs.double().norm())
            took = [microseconds(each) / layers.count for each in (layers.torchs, layers.ours)]
            with launched_in_turn():
                took.append(microseconds(layers.ours) / layers.count)
            cells = [layers.bytes / rate, *took]
            rows.append(f"| {name} | {count} | {' | '.join(f'{each:.1f}' for each in cells)} | {apart:.1e} |")
            print(rows[-1], flush=True)
    title = header("Products of few rows", command("python benchmarks/small_products.py"))
    told = f"bfloat16; microseconds of a layer without attention. A copy moves {rate / 1e6:.2f} TB/s."
    page.write_text(folded("\n".join([*title, told, "", *rows, ""])))


if __name__ == "__main__":
    with torch.no_grad():
        main()
