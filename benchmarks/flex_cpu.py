"""Programs on a CPU against FlexAttention as torch runs it there: time and memory of forward + backward, one thread.

8k tokens, 8 heads, head dim 64, packed documents. torch's flex_attention does not train on a CPU, so what it does
eagerly is written out here: all scores at once, the program by vmap, softmax, and autograd. Every run is a process of
its own; memory is the largest resident size above that of the process before the call.

Run: python -m benchmarks.flex_cpu        writes benchmarks/results/flex_cpu.md
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import Tensor

from attnspan import Causal, Contiguous, Documents, MaskMod, Plan, SlidingWindow
from attnspan.attention import Attention
from attnspan.testing import loopback
from benchmarks.report import folded, header

RESULTS = Path(__file__).parent / "results"
TOKENS, HEADS, DIM = 8192, 8, 64
CEILING_TIME, CEILING_MEMORY = 1 / 5, 0.10


def documents() -> list[int]:
    """Log-normal lengths, mean about 1k."""
    random = torch.Generator().manual_seed(0)
    lengths: list[int] = []
    while sum(lengths) < TOKENS:
        lengths.append(int(torch.randn((), generator=random).mul(0.8).add(6.5).exp()) + 1)
    lengths[-1] -= sum(lengths) - TOKENS
    return lengths


def ids() -> Tensor:
    lengths = documents()
    return torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))


def programs() -> dict[str, tuple]:
    """(our mask, mask_mod, score_mod) by name."""
    number, slopes = ids(), torch.linspace(0.1, 0.8, HEADS)
    table = torch.randn(HEADS, 257, requires_grad=True)

    def packed(b, h, q, k):
        return (number[q] == number[k]) & (q >= k)

    def thinned(b, h, q, k):
        return (number[q] == number[k]) & (q >= k) & ((q - k < 64) | (k % 4 == 0))

    def alibi(score, b, h, q, k):
        return score - slopes[h] * (q - k)

    def relative(score, b, h, q, k):
        return score + table[h, (q - k).clamp(-128, 128) + 128]

    ours = Causal() & Documents(documents())
    return {
        "documents, our mask": (ours, packed, None),
        "documents, a mask_mod": (MaskMod(packed), packed, None),
        "documents, every 4th far key": (MaskMod(thinned), thinned, None),
        "documents, ALiBi": (ours, packed, alibi),
        "documents, learned relative bias": (ours, packed, relative),
        "window of 512, soft-cap": (
            SlidingWindow(512, 0),
            lambda b, h, q, k: (q >= k) & (q - k <= 512),
            lambda score, b, h, q, k: 20.0 * torch.tanh(score / 20.0),
        ),
    }


def eager(mask_mod, score_mod, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """flex_attention without compile: its own steps, in torch."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
    from torch.nn.attention.flex_attention import create_mask

    def mapped(fn, scores):
        for dim in reversed(range(4)):
            fn = torch.vmap(fn, in_dims=(*[0] * scores, *(0 if i == dim else None for i in range(4))))
        return fn

    scores = q @ k.mT * DIM**-0.5
    if score_mod is not None:
        with TransformGetItemToIndex():
            scores = mapped(score_mod, 1)(scores, *(torch.arange(size) for size in scores.shape))
    allowed = create_mask(mask_mod, 1, 1, TOKENS, TOKENS, "cpu")
    return torch.where(allowed, scores, -float("inf")).softmax(-1) @ v


def measured(name: str, who: str) -> tuple[float, float]:
    """(seconds, MB) of a forward and backward; planning and tracing are done before."""
    torch.set_num_threads(1)
    mask, mask_mod, score_mod = programs()[name]
    q, k, v = (torch.randn(1, HEADS, TOKENS, DIM).requires_grad_() for _ in range(3))
    grad = torch.randn(1, HEADS, TOKENS, DIM)

    def ours(world):
        attend = Attention(Plan(mask, Contiguous(1), TOKENS, "gather"), world, score_mod=score_mod)
        attend.bound.plan.steps(0)
        attend.bound.mods(q)
        return attend

    attend = loopback(1).run(ours)[0] if who == "attnspan" else None
    before, start = _resident(), time.perf_counter()
    out = attend(q, k, v) if attend else eager(mask_mod, score_mod, q, k, v)
    torch.autograd.grad(out, (q, k, v), grad)
    return time.perf_counter() - start, _resident() - before


def _resident() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def alone(name: str, who: str) -> tuple[float, float]:
    """`measured` in a process of its own."""
    code = f"from benchmarks.flex_cpu import measured; import json; print(json.dumps(measured({name!r}, {who!r})))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if done.returncode:
        print(done.stderr[-2000:])
        return float("nan"), float("nan")
    return tuple(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    lines = []
    for name in programs():
        (our_time, our_memory), (time_, memory) = (alone(name, who) for who in ("attnspan", "eager"))
        lines.append(
            f"| {name} | {our_time:.2f} | {time_:.2f} | **{time_ / our_time:.1f}x** | "
            f"{our_memory:.0f} | {memory:.0f} | **{our_memory / memory:.1%}** |"
        )
        print(lines[-1], flush=True)
    text = [
        *header("Programs on a CPU", "python -m benchmarks.flex_cpu"),
        f"{TOKENS} tokens, {HEADS} heads, head dim {DIM}, float32, one thread, forward + backward; "
        f"{len(documents())} documents. Bar: 5x faster than eager flex_attention, under 10 % of its memory.",
        "",
        "| program | attnspan s | eager s | faster | attnspan MB | eager MB | of its memory |",
        "|---|---|---|---|---|---|---|",
        *lines,
        "",
    ]
    (RESULTS / "flex_cpu.md").write_text(folded("\n".join(text)))


if __name__ == "__main__":
    main()
