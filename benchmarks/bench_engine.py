"""What an engine gains: ragged requests against static batches and transformers' own continuous batching.

Run: python benchmarks/bench_engine.py                  tiny and mid-size models on this machine's CPU, one thread
     python benchmarks/bench_engine.py --cuda           mid-size and 1B models on a CUDA device, bfloat16
     python benchmarks/bench_engine.py --quick          tiny alone, and nothing is written

All requests are there at once; every rival has the same rows in a batch. A static batch pads to its longest prompt and
runs until its longest answer is there, which is what `generate` can do; requests are taken in the order they came.
Rivals run in turns, several times, and the fastest turn of each counts: what else a machine does only adds. On a CPU
rivals are compared by the processor's time, which others on the machine hardly change; the clock's is told as well.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import transformers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, StoppingCriteria, StoppingCriteriaList

from attnspan.engine import Engine, SamplingParams
from attnspan.paged import PrefixCache
from benchmarks.report import header

RESULTS = Path(__file__).parent / "results"
PAGE = 16


@dataclass(frozen=True)
class Case:
    """A model and its requests: so many, with prompts and answers of these medians and means."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    requests: int
    rows: int
    prompt: int = 160
    answer: int = 40
    most: int = 192

    def model(self, device: str) -> Any:
        config = LlamaConfig(
            vocab_size=self.vocabulary, hidden_size=self.hidden, intermediate_size=self.hidden * 11 // 4,
            num_hidden_layers=self.layers, num_attention_heads=self.heads, num_key_value_heads=self.kv_heads,
            max_position_embeddings=4096, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        torch.manual_seed(0)
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        model = LlamaForCausalLM(config).to(device, dtype).eval().requires_grad_(False)
        model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
        return model

    def asked(self) -> list[tuple[list[int], int]]:
        """(prompt, tokens to generate): lengths are log-normal, answers are exponential, as in what people ask."""
        draw = random.Random(0)
        found = []
        for _ in range(self.requests):
            length = min(4 * self.prompt, 4 + int(self.prompt * draw.lognormvariate(0, 0.6)))
            new = min(self.most, 2 + int(draw.expovariate(1 / self.answer)))
            found.append(([draw.randrange(1, self.vocabulary) for _ in range(length)], new))
        return found


TINY = Case("tiny", 64, 2, 4, 2, 256, requests=96, rows=16)
MID = Case("mid-size", 512, 8, 8, 4, 8000, requests=32, rows=16)
CUDA_MID = Case("mid-size", 1024, 16, 16, 4, 32000, requests=256, rows=64, prompt=400, answer=120, most=512)
CUDA_1B = Case("1B", 2048, 20, 32, 8, 32000, requests=256, rows=64, prompt=400, answer=120, most=512)


@dataclass
class Run:
    """Seconds for all, by the clock and of the processor; seconds to each request's first token; what was said."""

    clock: float
    busy: float
    first: list[float]
    said: list[list[int]]

    def row(self, name: str, tokens: int, device: str, best: Run) -> str:
        ratio = self.seconds(device) / best.seconds(device)
        busy = f"{self.busy:.2f} | " if device == "cpu" else ""
        first = f"{statistics.mean(self.first):.3f} | {max(self.first):.3f}" if self.first else "- | -"
        return f"| {name} | {busy}{self.clock:.2f} | {tokens / self.seconds(device):.0f} | {first} | {ratio:.2f} |"

    def seconds(self, device: str) -> float:
        return self.busy if device == "cpu" else self.clock


def clock(device: str) -> float:
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter()


class Timed:
    """Both kinds of seconds of a block."""

    def __init__(self, device: str) -> None:
        self.device = device

    def __enter__(self) -> Timed:
        self.start, self._busy = clock(self.device), time.process_time()
        return self

    def __exit__(self, *error: object) -> None:
        self.clock, self.busy = clock(self.device) - self.start, time.process_time() - self._busy


# ---- the rivals ------------------------------------------------------------------------------------------------------


class Ours:
    """The engine, one for all turns; every turn asks something else, so that nothing is known from before."""

    def __init__(self, case: Case, model: Any, device: str, **options: Any) -> None:
        self.device, self.turn, self.case = device, 0, case
        longest = max(len(prompt) + new for prompt, new in case.asked())
        pages = case.rows * (longest // PAGE + 2)
        budget = {"max_tokens": 512 if device == "cpu" else 2048}
        self.engine = Engine(model, pages=pages, page_size=PAGE, max_sequences=case.rows, **(budget | options))
        self.waste: list[float] = []

    def __call__(self, asked: list[tuple[list[int], int]], watch: bool = False) -> Run:
        engine, first = self.engine, {}
        allocator = engine._scheduler.room.stores[0].allocator
        with Timed(self.device) as timed:
            requests = [engine.add(prompt, SamplingParams(max_new_tokens=new)) for prompt, new in asked]
            while engine.unfinished:
                for token in engine.step():
                    if token.request.number not in first:
                        first[token.request.number] = clock(self.device) - timed.start
                if watch:
                    self.waste.append(allocator.stats().waste)
        return Run(timed.clock, timed.busy, list(first.values()), [request.token_ids for request in requests])


class _First(StoppingCriteria):
    """Stops nothing: notes when the first token was there."""

    def __init__(self, device: str) -> None:
        self.device, self.at = device, None

    def __call__(self, input_ids: torch.Tensor, scores: Any, **more: Any) -> torch.Tensor:
        self.at = self.at or clock(self.device)
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def static(case: Case, model: Any, device: str, asked: list[tuple[list[int], int]]) -> Run:
    """`model.generate`, batch after batch, padded on the left."""
    with Timed(device) as timed:
        found = [_batch(model, device, asked[low : low + case.rows]) for low in range(0, len(asked), case.rows)]
    first = [at - timed.start for at, said in found for _ in said]
    return Run(timed.clock, timed.busy, first, [row for _, said in found for row in said])


def _batch(model: Any, device: str, some: list[tuple[list[int], int]]) -> tuple[float, list[list[int]]]:
    """When the first token was there, and what was said."""
    longest, most = (max(sizes) for sizes in zip(*((len(prompt), new) for prompt, new in some), strict=True))
    tokens = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt, _ in some], device=device)
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt, _ in some], device=device)
    seen = _First(device)
    out = model.generate(
        tokens,
        attention_mask=mask,
        max_new_tokens=most,
        do_sample=False,
        stopping_criteria=StoppingCriteriaList([seen]),
    )
    return seen.at, [row[longest : longest + new].tolist() for row, (_, new) in zip(out, some, strict=True)]


def continuous(case: Case, model: Any, device: str, asked: list[tuple[list[int], int]]) -> Run:
    """transformers' own continuous batching, as it comes but for the rows."""
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    config = GenerationConfig(max_new_tokens=case.most, do_sample=False, eos_token_id=-1, pad_token_id=0)
    batching = ContinuousBatchingConfig(max_requests_per_batch=case.rows)
    context = model.continuous_batching_context_manager(
        generation_config=config, continuous_batching_config=batching, block=True, timeout=5
    )
    before = model.config._attn_implementation
    with context as manager, Timed(device) as timed:
        names = [
            manager.add_request(input_ids=prompt, max_new_tokens=new, record_timestamps=True) for prompt, new in asked
        ]
        found: dict[str, Any] = {}
        while len(found) < len(names):
            got = manager.get_result(timeout=1)
            if got is not None and got.is_finished():
                found[got.request_id] = got
    model.set_attn_implementation(before)
    first = [found[name].timestamps[0] - timed.start for name in names if found[name].timestamps]
    return Run(timed.clock, timed.busy, first, [list(found[name].generated_tokens) for name in names])


# ---- what is measured ------------------------------------------------------------------------------------------------


def turned(asked: list[tuple[list[int], int]], turn: int, vocabulary: int) -> list[tuple[list[int], int]]:
    """The same lengths with other tokens."""
    return [([1 + (token + 7 * turn) % (vocabulary - 1) for token in prompt], new) for prompt, new in asked]


def compared(case: Case, device: str, turns: int, cuda_graphs: bool) -> list[str]:
    """One model, all rivals."""
    model, asked = case.model(device), case.asked()
    ours = Ours(case, model, device, cuda_graphs=cuda_graphs)
    rivals: dict[str, Callable[[list[tuple[list[int], int]]], Run]] = {
        "attnspan.engine": ours,
        f"generate, static batches of {case.rows}": lambda some: static(case, model, device, some),
        "transformers' continuous batching": lambda some: continuous(case, model, device, some),
    }
    best: dict[str, Run] = {}
    warm = [(prompt[:40], 4) for prompt, _ in asked[: case.rows]]
    for rival in rivals.values():
        rival(warm)
    same = total = 0
    for turn in range(turns):
        some, said = turned(asked, turn, case.vocabulary), {}
        for name, rival in rivals.items():
            run = rival(some)
            said[name] = run.said
            if name not in best or run.seconds(device) < best[name].seconds(device):
                best[name] = run
            print(f"  {case.name}, turn {turn + 1}: {name} {run.busy:.2f} s, by the clock {run.clock:.2f}", flush=True)
        mine, theirs, _ = said.values()
        same += sum(a == b for a, b in zip(mine, theirs, strict=True))
        total += len(some)
    tokens = sum(new for _, new in asked)
    prompts = sum(len(prompt) for prompt, _ in asked)
    first = best["attnspan.engine"]
    parameters = sum(p.numel() for p in model.parameters())
    busy = "processor seconds | " if device == "cpu" else ""
    return [
        f"## {case.name}: {parameters / 1e6:.1f}M parameters, {len(asked)} requests, {prompts} tokens of prompts, "
        f"{tokens} of answers",
        "",
        f"| | {busy}seconds | tokens / s | first token, mean s | last s | times the engine's |",
        "|---" * (7 if device == "cpu" else 6) + "|",
        *(run.row(name, tokens, device, first) for name, run in best.items()),
        "",
        f"Answers equal to those of the static batches, token for token: {same} of {total}.",
        "",
        *costs(case, model, device, ours),
        "",
    ]


class Stopwatch:
    """Seconds of CPU time spent in some methods while it is on."""

    def __init__(self, cls: type, names: list[str]) -> None:
        self.cls, self.names, self.seconds = cls, names, 0.0

    def __enter__(self) -> Stopwatch:
        self.before = {name: getattr(self.cls, name) for name in self.names}
        for name, method in self.before.items():
            setattr(self.cls, name, self._timed(method))
        return self

    def __exit__(self, *error: object) -> None:
        for name, method in self.before.items():
            setattr(self.cls, name, method)

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            start = time.process_time()
            try:
                return method(*arguments, **named)
            finally:
                self.seconds += time.process_time() - start

        return timed


def costs(case: Case, model: Any, device: str, ours: Ours) -> list[str]:
    """The prefix cache where nothing is found in it, and slots that hold no token."""
    some = turned(case.asked(), 100, case.vocabulary)
    known = ours.engine.counts.known
    with Stopwatch(PrefixCache, ["add", "keep", "_reclaim"]) as watch:
        start = time.process_time()
        ours(some)
        whole = time.process_time() - start
    hits = ours.engine.counts.known - known
    ours(turned(case.asked(), 101, case.vocabulary), watch=True)
    return [
        f"Prefix cache, {hits} of {sum(len(prompt) for prompt, _ in some)} tokens found: {watch.seconds / whole:.2%} "
        f"of the run's CPU time. Slots of used pages without a token, pages of {PAGE}: mean "
        f"{statistics.mean(ours.waste):.1%}.",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cuda", action="store_true", help="on a CUDA device")
    parser.add_argument("--graphs", action="store_true", help="decode by CUDA graphs")
    parser.add_argument("--quick", action="store_true", help="the smallest model, and no result file")
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    device = "cuda" if options.cuda else "cpu"
    if not options.cuda:
        torch.set_num_threads(1)
    cases = ([CUDA_MID, CUDA_1B] if options.cuda else [TINY, MID])[: 1 if options.quick else None]
    command = " ".join(["python benchmarks/bench_engine.py", *sys.argv[1:]])
    lines = header("Generation: an engine over pages", command)
    threads = "" if options.cuda else f"; {torch.get_num_threads()} thread"
    lines += [
        f"transformers {transformers.__version__}{threads}. All requests are there at once, the same rows for every "
        f"rival; the fastest of {options.turns} turns each.",
        "",
    ]
    for case in cases:
        lines += compared(case, device, options.turns, options.graphs)
    text = "\n".join(lines)
    print(text)
    if not options.quick:
        (RESULTS / f"engine_{'cuda' if options.cuda else 'cpu'}.md").write_text(text)


if __name__ == "__main__":
    main()
