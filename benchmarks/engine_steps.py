"""Steps of the engine over what they must read or multiply: decode, where a step's time goes, and prefill.

Run: python benchmarks/engine_steps.py --limit 100     Llama shapes of 1.1 and 8 billion weights on a CUDA device
     python benchmarks/engine_steps.py --device cpu    tiny ones, to see that it runs
     python benchmarks/engine_steps.py --tests         the tests of what makes steps fast come first

A decode step must read all weights but the embedding, and the keys and values of its rows: the share is the time that
a copy of so many bytes takes on this device, over the step's. The roof also counts that weights are multiplied with all
rows: many rows take longer to multiply than weights to read. Prefill is held against a product of two 8192 x 8192
matrices in bfloat16. Both ceilings are measured in the same run. Weights are random, prompts distinct; pages of 16
tokens, CUDA graphs. Steps are timed by the clock, from call to call.

A breakdown is `torch.profiler`'s of some steps, by the names of kernels. `idle`: no kernel runs, the device waits for
the host. Kernels that are launched while the one before runs count their wait for it. Requests that arrive over a
second wait for their first tokens: the load of a server, without HTTP.

Cells come in the order of their value; none begins when `--limit` seconds have passed, and the page is written after
each.
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib.util
import re
import subprocess
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import transformers
from transformers import LlamaConfig, LlamaForCausalLM

from attnspan import Engine, SamplingParams
from attnspan.integrations.huggingface import linear_products, served_layers
from benchmarks import bench_paged
from benchmarks.report import command, folded, header

RESULTS = Path(__file__).parent / "results"
PAGE, WARM = 16, 6


@dataclass(frozen=True)
class Shape:
    """A Llama model."""

    name: str
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    dim: int = 128
    vocabulary: int = 32000

    def model(self, device: str, dtype: torch.dtype) -> Any:
        config = LlamaConfig(
            vocab_size=self.vocabulary, hidden_size=self.hidden, intermediate_size=self.inner, head_dim=self.dim,
            num_hidden_layers=self.layers, num_attention_heads=self.heads, num_key_value_heads=self.kv_heads,
            max_position_embeddings=4096, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        torch.manual_seed(0)
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with torch.device(device):
                model = LlamaForCausalLM(config).eval().requires_grad_(False)
        finally:
            torch.set_default_dtype(before)
        model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
        return model

    @property
    def read_weights(self) -> int:
        """Weights that a decode step reads."""
        attention = (2 * self.heads + 2 * self.kv_heads) * self.dim * self.hidden
        return self.layers * (attention + 3 * self.hidden * self.inner) + self.hidden * self.vocabulary

    def key_bytes(self, size: int, scales: int = 0) -> int:
        """Bytes of keys and values for a token."""
        return 2 * self.layers * self.kv_heads * (self.dim * size + scales)

    def prefill_flops(self, rows: int, length: int) -> float:
        """Of prompts: matrices for every token but the head's, and causal attention."""
        weights = self.read_weights - self.hidden * self.vocabulary
        return rows * (2.0 * weights * length + 2.0 * self.layers * self.heads * self.dim * length**2)


SHAPES = {"1.1B": Shape("1.1B", 2048, 8192, 16, 16, 8), "8B": Shape("8B", 4096, 14336, 32, 32, 8)}
TINY = {"1.1B": Shape("1.1B", 64, 96, 2, 4, 2, 16, 97), "8B": Shape("8B", 64, 128, 3, 4, 2, 16, 97)}


class Bench:
    """What cells share: the device, its ceilings, one model at a time, and the page so far."""

    def __init__(self, device: str, limit: float, out: Path | None) -> None:
        self.device, self.limit, self.out, self.began = device, limit, out, time.perf_counter()
        self.cuda = device == "cuda"
        self.shapes, self.dtype = (SHAPES, torch.bfloat16) if self.cuda else (TINY, torch.float32)
        self.steps = 30 if self.cuda else 3
        self.rows: dict[str, list[str]] = {}
        self.notes: list[str] = []
        self.summary: list[str] = []
        self._model: tuple[str, Any] | None = None

    @functools.cached_property
    def bandwidth(self) -> float:
        """Bytes a second that a copy moves, read and written."""
        if self.cuda:
            return 1e12 * bench_paged.copy_bandwidth()
        source = torch.randn(1 << 16)
        return 2e3 * source.nbytes / bench_paged.host_ms(lambda: torch.empty_like(source).copy_(source), 3)

    @functools.cached_property
    def matmul_rate(self) -> float:
        """Operations a second of a large product."""
        n = 8192 if self.cuda else 64
        a, b = torch.randn(2, n, n, device=self.device, dtype=self.dtype)
        out = torch.empty_like(a)
        ms = (bench_paged.device_ms if self.cuda else bench_paged.host_ms)(lambda *turn: torch.mm(a, b, out=out))
        return 2e3 * n**3 / ms

    def model(self, name: str) -> tuple[Shape, Any]:
        if self._model is None or self._model[0] != name:
            self._model = None
            self.free()
            self._model = name, self.shapes[name].model(self.device, self.dtype)
        return self.shapes[name], self._model[1]

    def free(self) -> None:
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()

    def now(self) -> float:
        if self.cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    def engine(self, name: str, rows: int, length: int, **options: Any) -> Engine:
        if not self.cuda:
            length = min(length, 40)
        pages = rows * (-(-(length + 200) // PAGE) + 1) + 2
        budget = max(rows, 8192 if self.cuda else 64)
        return Engine(
            self.model(name)[1], pages=pages, page_size=PAGE, max_sequences=rows, prefix_cache=False,
            cuda_graphs=self.cuda, **({"max_tokens": budget} | options),
        )  # fmt: skip

    def prompts(self, rows: int, length: int, vocabulary: int) -> list[list[int]]:
        if not self.cuda:
            length = min(length, 40)
        draw = torch.Generator().manual_seed(rows + length)
        found: list[list[int]] = torch.randint(1, vocabulary, (rows, length), generator=draw).tolist()
        return found

    def row(self, table: str, cells: Iterable[object], told: str) -> None:
        self.rows.setdefault(table, []).append("| " + " | ".join(map(str, cells)) + " |")
        self.summary.append(told)
        print(f"[{time.perf_counter() - self.began:5.1f} s] {told}", flush=True)

    def write(self) -> None:
        lines = header("Steps of the engine over what they must do", command("python benchmarks/engine_steps.py"))
        lines += [
            f"transformers {transformers.__version__}. A copy moves {self.bandwidth / 1e12:.3g} TB/s, a product of "
            f"large matrices in {str(self.dtype)[6:]} takes {self.matmul_rate / 1e12:.3g} TFLOP/s.", "",
        ]  # fmt: skip
        for title, rows in self.rows.items():
            columns = TABLES[title]
            lines += [f"## {title}", "", "| " + " | ".join(columns) + " |", "|---" * len(columns) + "|", *rows, ""]
        lines += self.notes
        text = folded("\n".join(lines)).rstrip() + "\n"
        if self.out is not None:
            self.out.write_text(text)

    def run(self, cells: dict[str, Callable[[Bench], None]]) -> list[str]:
        """The names of cells that failed."""
        failed: list[str] = []
        for name, cell in cells.items():
            if time.perf_counter() - self.began > self.limit:
                self.notes.append(f"Not measured, for want of time: {name}.")
                continue
            try:
                cell(self)
            except Exception as error:  # the others are still worth having
                traceback.print_exc()
                failed.append(name)
                self.notes.append(f"Failed: {name} ({type(error).__name__}: {str(error)[:300]}).")
            self.free()
            self.write()
        self.write()
        return failed


DECODE, WHERE, PREFILL, PAGES = "Decode", "Where a decode step's time goes, ms", "Prefill", "Attention over pages"
ARRIVALS = "Time to first token, ms, of requests that arrive over a second"
TABLES = {
    DECODE: ("model", "pages", "batch x length", "step ms", "limit ms", "roof ms", "share", "of the roof"),
    WHERE: ("model", "batch x length", "matmuls", "attention", "norm, rotary, activation", "sampling", "copies",
            "idle", "of a step", "kernels"),
    PREFILL: ("what", "tokens", "seconds", "tokens / s", "TFLOP/s", "share of the matmul rate"),
    PAGES: ("lengths", "pages", "ms", "of a copy", "over bf16"),
    ARRIVALS: ("what", "median", "of nine in ten", "of the last", "tokens / s"),
}  # fmt: skip


# ---- decode ----------------------------------------------------------------------------------------------------------


def decoding(
    bench: Bench, name: str, rows: int, length: int, plain: bool = False, **options: Any
) -> tuple[Engine, float]:
    """An engine whose rows have computed their prompts, and the seconds that those took."""
    shape, _ = bench.model(name)
    engine = bench.engine(name, rows, length, **options)
    engine._runner.runs_ahead = bench.cuda and not plain
    prompts = bench.prompts(rows, length, shape.vocabulary)
    for prompt in prompts:
        engine.add(prompt, SamplingParams(max_new_tokens=190, ignore_eos=True))
    began = bench.now()
    while engine.counts.tokens < sum(map(len, prompts)):
        engine.step()
    taken = bench.now() - began
    for _ in range(WARM):
        engine.step()
    return engine, taken


@contextmanager
def kernels_of(plain: bool, products: bool = True) -> Iterator[None]:
    """Engines that are made inside have torch's products unless `products`; if `plain`, no kernels of ours but
    attention's."""
    with ExitStack() as stack:
        if plain:
            stack.enter_context(patch.object(served_layers, "fused_modules", lambda *_: []))
        if plain or not products:
            stack.enter_context(patch.object(linear_products, "runs_on", lambda *_: False))
        yield


def decode(
    bench: Bench, name: str, rows: int, length: int, kv_dtype: str | None = None, plain: bool = False,
    products: bool = True,
) -> None:  # fmt: skip
    """`plain`: the model's own functions, and every step when the tokens of the last are read."""
    shape, _ = bench.model(name)
    with kernels_of(plain, products):
        engine, taken = decoding(bench, name, rows, length, plain, kv_dtype=kv_dtype)
    variant = ", plain" if plain else "" if products else ", torch's products"
    pages, what = kv_dtype or str(bench.dtype)[6:], f"{rows} x {length}{variant}"
    tokens = rows * min(length, length if bench.cuda else 40)
    rate = shape.prefill_flops(rows, tokens // rows) / taken
    began = bench.now()
    for _ in range(bench.steps):
        engine.step()
    wall = 1e3 * (bench.now() - began) / bench.steps
    size = torch.finfo(bench.dtype).bits // 8
    held = sum(len(request.prompt) + len(request.token_ids) for request in engine.unfinished) - rows * bench.steps / 2
    per_token = shape.key_bytes(size) if kv_dtype is None else shape.key_bytes(1, 4)
    reads, keys = (1e3 * each / bench.bandwidth for each in (size * shape.read_weights, held * per_token))
    limit, roof = reads + keys, max(reads, 2e3 * shape.read_weights * rows / bench.matmul_rate) + keys
    bench.row(
        DECODE, (name, pages, what, *(f"{each:.2f}" for each in (wall, limit, roof)), f"{limit / wall:.0%}",
                 f"{roof / wall:.0%}"),
        f"decode {name} {pages} {what}: {wall:.2f} ms, {limit / wall:.0%} of the bandwidth",
    )  # fmt: skip
    if kv_dtype is None:
        bench.row(
            PREFILL, (f"{name}, {what}, cold", tokens, f"{taken:.2f}", f"{tokens / taken:.0f}", f"{rate / 1e12:.0f}",
                      f"{rate / bench.matmul_rate:.0%}"),
            f"  prefill {name} {what}, cold: {tokens / taken:.0f} tokens/s, {rate / bench.matmul_rate:.0%} of matmul",
        )  # fmt: skip
        if bench.cuda:
            breakdown(bench, engine, name, what, 4, wall)


KINDS = {
    "copies": r"memcpy|memset",
    "attention": r"attend_s|flash|fmha|index_put|indexing_backward|scatter_pages|write",
    "sampling": r"argmax|maxops|maxnan|softmax|topk|sort|philox",
    "matmuls": r"gemm|gemv|cutlass|nvjet|splitk|cublas|xmma|^multiply$|^join$",
}
"""By the names of kernels, the first that fits; all else is norms, rotary embeddings, activations and additions."""

WAITING = r"join_s|step#|event|synchronize"
"""Not counted: launched early to wait for another kernel (paged/kernels/decode_programs.py), or no kernel at all."""


def kind_of(kernel: str) -> str:
    found = (kind for kind, pattern in KINDS.items() if re.search(pattern, kernel.lower()))
    return next(found, "small")


def breakdown(bench: Bench, engine: Engine, name: str, what: str, steps: int, wall: float) -> None:
    """Milliseconds of a step by kind, by torch.profiler; the rest of the time by the clock is idle."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiled:
        for _ in range(steps):
            engine.step()
        torch.cuda.synchronize()
    spans: list[tuple[int, int]] = []
    sums, names = Counter[str](), Counter[str]()
    for event in profiled.profiler.kineto_results.events():
        if event.device_type() == torch.autograd.DeviceType.CUDA and event.duration_ns() > 0:
            begin, taken = event.start_ns(), event.duration_ns()
            if kind_of(event.name()) == "small" and re.search(WAITING, event.name().lower()):
                continue
            spans.append((begin, begin + taken))
            sums[kind_of(event.name())] += taken
            names[event.name()[:80]] += taken
    busy = covered(spans)
    per_step = {kind: taken / steps / 1e6 for kind, taken in sums.items()}
    idle = max(0.0, wall - busy / steps / 1e6)
    kinds = ("matmuls", "attention", "small", "sampling", "copies")
    cells = [f"{per_step.get(kind, 0.0):.3f}" for kind in kinds]
    bench.row(
        WHERE, (name, what, *cells, f"{idle:.3f}", f"{wall:.2f}", len(spans) // steps),
        f"  of it {', '.join(f'{kind} {each}' for kind, each in zip(kinds, cells, strict=True))}, idle {idle:.3f}, "
        f"{len(spans) // steps} kernels",
    )  # fmt: skip
    top = ", ".join(f"{kernel} {taken / steps / 1e6:.3f}" for kernel, taken in names.most_common(10))
    print(f"    {top}", flush=True)


def covered(spans: list[tuple[int, int]]) -> int:
    """The length of a union of spans.

    >>> covered([(0, 3), (2, 5), (7, 8)])
    6
    """
    total, until = 0, -1
    for begin, end in sorted(spans):
        total += max(0, end - max(begin, until))
        until = max(until, end)
    return total


# ---- prefill ---------------------------------------------------------------------------------------------------------


def prefill(bench: Bench, name: str, rows: int, length: int) -> None:
    """Prompts of one length, after others of the same: kernels and shapes are known."""
    shape, _ = bench.model(name)
    engine, taken = bench.engine(name, rows, length), 0.0
    for turn in range(2):
        prompts = bench.prompts(rows, length, shape.vocabulary - turn)
        known = engine.counts.tokens
        for prompt in prompts:
            engine.add(prompt, SamplingParams(max_new_tokens=1))
        began = bench.now()
        while engine.unfinished:
            engine.step()
        taken = bench.now() - began
        tokens = engine.counts.tokens - known
    rate = shape.prefill_flops(rows, len(prompts[0])) / taken
    bench.row(
        PREFILL, (f"{name}, {rows} x {length}, warm", tokens, f"{taken:.2f}", f"{tokens / taken:.0f}",
                  f"{rate / 1e12:.0f}", f"{rate / bench.matmul_rate:.0%}"),
        f"prefill {name} {rows} x {length}: {tokens / taken:.0f} tokens/s, {rate / bench.matmul_rate:.0%} of matmul",
    )  # fmt: skip


def first_tokens(bench: Bench, name: str, rows: int = 32, length: int = 512) -> None:
    """The first 16k tokens of prompts after warm_up, and the next."""
    shape, _ = bench.model(name)
    engine = bench.engine(name, rows, length, max_tokens=2048 if bench.cuda else 64)
    began = bench.now()
    engine.warm_up()
    warmed = bench.now() - began
    for turn, said in enumerate(("first after warm_up", "again")):
        prompts = bench.prompts(rows, length, shape.vocabulary - turn)
        for prompt in prompts:
            engine.add(prompt, SamplingParams(max_new_tokens=1))
        began = bench.now()
        while engine.unfinished:
            engine.step()
        taken, tokens = bench.now() - began, sum(map(len, prompts))
        rate = shape.prefill_flops(rows, len(prompts[0])) / taken
        bench.row(
            PREFILL, (f"{name}, {rows} x {length}, {said} ({warmed:.1f} s)", tokens, f"{taken:.3f}",
                      f"{tokens / taken:.0f}", f"{rate / 1e12:.0f}", f"{rate / bench.matmul_rate:.0%}"),
            f"prefill {name} {rows} x {length}, {said} of {warmed:.1f} s: {taken:.3f} s",
        )  # fmt: skip


# ---- under load ------------------------------------------------------------------------------------------------------


def arrivals(bench: Bench, name: str, requests: int = 64, plain: bool = False) -> None:
    """Prompts of 128 to 1,024 tokens that arrive at random within a second, each answered by 64 tokens.

    `plain` as in `decode`.
    """
    shape, _ = bench.model(name)
    draw = torch.Generator().manual_seed(requests)
    lengths = torch.randint(128, 1025, (requests,), generator=draw).tolist()
    due = sorted(torch.rand(requests, generator=draw).tolist()) if requests > 1 else [0.0]
    with kernels_of(plain):
        engine = bench.engine(name, requests, 1024, max_tokens=2048 if bench.cuda else 64)
        engine.warm_up()
    engine._runner.runs_ahead = bench.cuda and not plain
    prompts = [bench.prompts(1, length, shape.vocabulary)[0] for length in lengths]
    waits, waiting, began = [], {}, bench.now()
    while prompts or engine.unfinished:
        while prompts and due[0] <= time.perf_counter() - began:
            request = engine.add(prompts.pop(0), SamplingParams(max_new_tokens=64, ignore_eos=True))
            waiting[request] = due.pop(0)
        if engine.unfinished:
            engine.step()
        elif prompts:
            time.sleep(max(0.0, due[0] - (time.perf_counter() - began)))
        now = time.perf_counter() - began
        waits += [now - waiting.pop(request) for request in list(waiting) if request.token_ids]
    taken, waits = bench.now() - began, sorted(1e3 * wait for wait in waits)
    median, most, last = waits[requests // 2], waits[requests * 9 // 10], waits[-1]
    what = f"{name}, {f'{requests} requests' if requests > 1 else 'one request'}{', plain' if plain else ''}"
    bench.row(
        ARRIVALS, (what, *(f"{each:.0f}" for each in (median, most, last)), f"{64 * requests / taken:.0f}"),
        f"first tokens, {what}: {median:.0f} ms, nine in ten {most:.0f}, the last {last:.0f}",
    )  # fmt: skip


# ---- attention alone -------------------------------------------------------------------------------------------------


def attention(bench: Bench) -> None:
    """`decode` over pages in 8 bits beside bf16, and rows of unequal length, as in bench_paged.py."""
    if not bench.cuda:
        bench.row(PAGES, ("none on a CPU", "-", "-", "-", "-"), "attention alone: for CUDA")
        return
    asked = {"64 x 16k": [16384] * 64, "128 x 4k": [4096] * 128, **bench_paged.UNLIKE}
    for what, lengths in asked.items():
        plain = 0.0
        stored = (None, torch.int8, torch.float8_e4m3fn) if what in ("64 x 16k", "128 x 4k") else (None,)
        for each in stored:
            ms, moved, *_ = bench_paged.decoded(lengths, PAGE, each, times=8)
            plain = plain or ms
            kind, share = "bf16" if each is None else str(each)[6:], 1e3 * moved / ms / bench.bandwidth
            bench.row(
                PAGES, (what, kind, f"{ms:.3f}", f"{share:.0%}", f"{ms / plain:.2f}"),
                f"attention {what} {kind}: {ms:.3f} ms, {share:.0%} of a copy, {ms / plain:.2f} of bf16",
            )  # fmt: skip


# ---- checks ----------------------------------------------------------------------------------------------------------


def checks(bench: Bench) -> None:
    """Tokens of a small model in float32, beside `model.generate`; which modules of it run as one kernel."""
    model = Shape("small", 256, 704, 4, 8, 4, 32, 4000).model(bench.device, torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.1)
    lengths = (5, 17, 1, 40, 200, 64, 33, 128)
    draw = torch.Generator().manual_seed(1)
    prompts = [torch.randint(1, 4000, (length,), generator=draw).tolist() for length in lengths]
    engine = Engine(model, pages=512, page_size=PAGE, max_sequences=8, cuda_graphs=bench.cuda)
    said = [request.token_ids for request in engine.generate(prompts, SamplingParams(max_new_tokens=32))]
    expected = []
    for prompt in prompts:
        tokens = torch.tensor([prompt], device=bench.device)
        found = model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=32, do_sample=False)
        expected.append(found[0, len(prompt) :].tolist())
    same = sum(a == b for a, b in zip(said, expected, strict=True))
    fused = len(served_layers.served_layers(model).fused)
    bench.notes.append(
        f"Greedy tokens in float32 equal to those of `model.generate`: {same} of {len(prompts)} answers of 32 tokens, "
        f"by a small Llama of which {fused} modules run as one kernel."
    )


TESTS = (
    "-m", "cuda", "tests/integrations/test_fused.py", "tests/integrations/test_small_products.py",
    "tests/integrations/test_linear_products.py", "tests/paged/test_slot_writes.py", "tests/engine/test_ahead.py"
)  # fmt: skip
"""Of the kernels that stand in for eager torch, on the device, and of steps that are launched ahead."""


def tested() -> tuple[bool, str]:
    """Whether `TESTS` pass, and what pytest says of them in the end; failures are printed."""
    workers = ["-n", "8"] if importlib.util.find_spec("xdist") and torch.cuda.is_available() else []
    call = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *workers, *TESTS]
    try:
        done = subprocess.run(call, cwd=RESULTS.parents[1], capture_output=True, text=True, timeout=180)
    except subprocess.TimeoutExpired:
        return False, "Tests took more than three minutes."
    said = [*done.stderr.strip().splitlines(), *done.stdout.strip().splitlines(), ""]
    if done.returncode:
        print("\n".join(said[-80:]), flush=True)
    return done.returncode == 0, f"Tests: {said[-2]}"


# ---- all -------------------------------------------------------------------------------------------------------------


CELLS: dict[str, Callable[[Bench], None]] = {
    "checks": checks,
    "1.1B 64 x 512": lambda bench: decode(bench, "1.1B", 64, 512),
    "1.1B 1 x 512": lambda bench: decode(bench, "1.1B", 1, 512),
    "1.1B 64 x 2k": lambda bench: decode(bench, "1.1B", 64, 2048),
    "1.1B 256 x 512": lambda bench: decode(bench, "1.1B", 256, 512),
    "1.1B 64 x 512 plain": lambda bench: decode(bench, "1.1B", 64, 512, plain=True),
    "8B 32 x 512": lambda bench: decode(bench, "8B", 32, 512),
    "8B 64 x 2k": lambda bench: decode(bench, "8B", 64, 2048),
    "8B 1 x 512": lambda bench: decode(bench, "8B", 1, 512),
    "8B 1 x 512 cuBLAS": lambda bench: decode(bench, "8B", 1, 512, products=False),
    "8B 32 x 512 cuBLAS": lambda bench: decode(bench, "8B", 32, 512, products=False),
    "8B 64 x 2k cuBLAS": lambda bench: decode(bench, "8B", 64, 2048, products=False),
    "1.1B 1 x 512 cuBLAS": lambda bench: decode(bench, "1.1B", 1, 512, products=False),
    "8B 256 x 512": lambda bench: decode(bench, "8B", 256, 512),
    "8B prefill": lambda bench: prefill(bench, "8B", 16, 2048),
    "8B first tokens": lambda bench: first_tokens(bench, "8B"),
    "8B arrivals": lambda bench: arrivals(bench, "8B"),
    "8B arrivals plain": lambda bench: arrivals(bench, "8B", plain=True),
    "8B one arrival": lambda bench: arrivals(bench, "8B", requests=1),
    "1.1B 32 x 512": lambda bench: decode(bench, "1.1B", 32, 512),
    "attention alone": attention,
    "1.1B 64 x 2k int8": lambda bench: decode(bench, "1.1B", 64, 2048, "int8"),
    "1.1B 64 x 2k fp8": lambda bench: decode(bench, "1.1B", 64, 2048, "float8_e4m3fn"),
}
"""In the order of their value."""


def main(arguments: list[str] | None = None) -> list[str]:
    """The names of cells that failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cells", nargs="*", help="some of the cells alone, and no result file unless --out")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds after which no cell begins")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tests", action="store_true", help="tests first, whose seconds do not count")
    options = parser.parse_args(arguments)
    unknown = set(options.cells) - set(CELLS)
    if unknown:
        parser.error(f"no cells of these names: {', '.join(sorted(unknown))}; there are {', '.join(CELLS)}")
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    if options.device == "cpu":
        torch.set_num_threads(1)
    written = options.out or (None if options.cells or options.device == "cpu" else RESULTS / "engine_steps.md")
    passed, said = tested() if options.tests else (True, "")
    bench = Bench(options.device, options.limit, written)
    failed = bench.run({name: cell for name, cell in CELLS.items() if not options.cells or name in options.cells})
    print("\n".join(["", *bench.summary, *bench.notes, *filter(None, [said])]), flush=True)
    return failed if passed else ["tests", *failed]


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
