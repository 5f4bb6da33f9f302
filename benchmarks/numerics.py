"""How exact half precision is over ranks on CUDA: error against float64, over that of one device's fused SDPA.

The yardstick is strict: of torch's flash, cuDNN and memory-efficient attention over the whole sequence, whichever can
compute the mask and is the most exact, by quantity. Root mean squares are compared; 1.0 is an error as on one device.

`band` returns partial results in float32, so nothing is rounded before it is merged. `auto` takes cuDNN for full and
causal tiles, which rounds a tile's results to half precision; each rank then merges rounded parts. `flash4`, where its
package is installed, is run by gather and needed, where it merges nothing.

Run: python -m benchmarks.numerics        writes benchmarks/results/cp_numerics.md (or to --out FILE); needs CUDA
"""

from __future__ import annotations

import argparse
import warnings
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from attnspan import Causal, Documents, Full, HeadTail, Mask, SlidingWindow
from attnspan.kernels import flash4
from benchmarks.report import folded, header
from tests import oracle
from tests.attention.harness import Problem, run

RESULTS = Path(__file__).parent / "results"
LENGTH, HEADS = 2048, 8
RANKS = (1, 2, 3, 4, 8)
STRATEGIES = ("ring", "gather", "needed", "ulysses")
KERNELS = {"band": STRATEGIES, "auto": STRATEGIES}
if flash4.installed() is not None:
    KERNELS["flash4"] = ("gather", "needed")
QUANTITIES = ("out", "dq", "dk", "dv")

# By mask, with its number of key heads: no fused SDPA takes a mask together with grouped ones.
MASKS: dict[str, tuple[Mask, int]] = {
    "full": (Full(), 2),
    "causal": (Causal(), 2),
    "window": (SlidingWindow(500), 8),
    "documents": (Causal() & Documents([300, 1100, 648]), 8),
}
DIMS = {torch.bfloat16: 128, torch.float16: 64}


def problem(mask: str, dtype: torch.dtype, strategy: str = "gather", ranks: int = 1, kernel: str = "auto") -> Problem:
    """One attention of 2048 tokens, 8 heads."""
    what, kv_heads = MASKS[mask]
    shape = {"heads": HEADS, "kv_heads": kv_heads, "dim": DIMS[dtype], "batch": 1}
    return Problem(what, HeadTail(ranks), LENGTH, strategy, kernel=kernel, dtype=dtype, device="cuda", **shape)


def ratios(mask: str, dtype: torch.dtype, strategy: str, ranks: int, kernel: str) -> dict[str, float]:
    """By quantity, our error over that of SDPA on one device."""
    found = run(problem(mask, dtype, strategy, ranks, kernel))
    return {
        name: rms(getattr(found, name).cuda() - true) / theirs for name, (true, theirs) in truth(mask, dtype).items()
    }


@cache
def truth(mask: str, dtype: torch.dtype) -> dict[str, tuple[Tensor, float]]:
    """By quantity, what is true in float64, and the error of the most exact fused SDPA."""
    whole = problem(mask, dtype)
    query, key, value, grad = (x.cuda() for x in (*whole.whole[:3], whole.whole.grad))
    dense = whole.dense[0, 0].cuda()
    out, _ = oracle.attention(query, key, value, dense, whole.used_scale)
    grads = oracle.gradients(query, key, value, dense, whole.used_scale, grad)
    true = dict(zip(QUANTITIES, (out, *grads), strict=True))
    every = [{name: rms(x - true[name]) for name, x in found.items()} for found in _fused(whole, mask)]
    assert every, "no fused SDPA can do this"
    return {name: (true[name], min(errors[name] for errors in every)) for name in QUANTITIES}


def _fused(whole: Problem, mask: str) -> list[dict[str, Tensor]]:
    """What each backend of SDPA that is one kernel, and can, makes of the whole."""
    how = {"attn_mask": whole.dense.cuda()} if mask in ("window", "documents") else {"is_causal": mask == "causal"}
    results = []
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
        q, k, v = (x.cuda().requires_grad_() for x in whole.whole[:3])
        try:
            with sdpa_kernel(backend), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # why a backend cannot: that it cannot is all we ask
                out = F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1], **how)
                grads = torch.autograd.grad(out, (q, k, v), whole.whole.grad.cuda())
        except RuntimeError as refused:
            if not any(words in str(refused) for words in ("No available kernel", "No viable backend", "cuDNN")):
                raise
            continue
        results.append(dict(zip(QUANTITIES, (out.detach(), *grads), strict=True)))
    return results


def worst(kernel: str, mask: str, dtype: torch.dtype) -> list[tuple[float, str]]:
    """By number of ranks, the largest ratio over strategies and quantities, and the quantity."""
    return [
        max(
            (ratio, name)
            for strategy in KERNELS[kernel]
            for name, ratio in ratios(mask, dtype, strategy, ranks, kernel).items()
        )
        for ranks in RANKS
    ]


def rms(x: Tensor) -> float:
    """Root mean square."""
    return float(x.square().mean().sqrt())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default=str(RESULTS / "cp_numerics.md"))
    parser.add_argument("--processes", type=int, default=8)
    args = parser.parse_args()
    rows = [(kernel, mask, dtype) for kernel in KERNELS for mask in MASKS for dtype in DIMS]
    lines, most = [], dict.fromkeys(KERNELS, 0.0)
    with ProcessPoolExecutor(args.processes, get_context("spawn")) as pool:
        for (kernel, mask, dtype), found in zip(rows, pool.map(worst, *zip(*rows, strict=True)), strict=True):
            most[kernel] = max(most[kernel], *(ratio for ratio, _ in found))
            cells = [f"{ratio:.2f} {name}" for ratio, name in found]
            lines.append(f"| {kernel} | {mask} | {str(dtype).removeprefix('torch.')} | " + " | ".join(cells) + " |")
            print(lines[-1], flush=True)
    text = "\n".join(
        [
            *header("Half precision over ranks", "python -m benchmarks.numerics"),
            f"{LENGTH} tokens, {HEADS} heads (2 key heads for full and causal), HeadTail, virtual ranks on one device;",
            "head dim 128 in bfloat16, 64 in float16. A cell is the largest, over ring, gather, needed and ulysses",
            "(flash4: gather and needed) and over out, dq, dk and dv, of our root-mean-square error against float64",
            "over that of the most exact fused SDPA on one device, and the quantity it was found in.",
            "",
            "Largest of all: " + ", ".join(f"{kernel} {ratio:.3f}" for kernel, ratio in most.items()) + ".",
            "",
            "| kernel | mask | dtype | " + " | ".join(f"{n} rank{'s' * (n > 1)}" for n in RANKS) + " |",
            "|---" * (3 + len(RANKS)) + "|",
            *lines,
            "",
        ]
    )
    Path(args.out).write_text(folded(text))


if __name__ == "__main__":
    main()
