"""What an engine gains: ragged requests against static batches and transformers' own continuous batching.

Run: python benchmarks/bench_engine.py                  tiny and mid-size models on this machine's CPU, one thread
     python benchmarks/bench_engine.py --cuda --graphs  these and one of a billion weights on a CUDA device, bfloat16
     python benchmarks/bench_engine.py --quick          tiny alone, and nothing is written

All requests are there at once; every rival has the same rows in a batch. A static batch pads to its longest prompt and
runs until its longest answer is there, which is what `generate` can do; requests are taken in the order they came.
Rivals run in turns, several times, and the fastest turn of each counts: what else a machine does only adds. One whose
turn takes very long has no other. On a CPU rivals are compared by the processor's time, which others on the machine
hardly change; the clock's is told as well.

On CUDA torch's attention prefers cuDNN, which makes a plan for every length that it has not met: some 20 ms at most
steps of the rivals, and ten times the time of a tiny model. They do better without, and are given that.

Answers in bfloat16 differ wherever two tokens are nearly as likely, and these models are random. There the same is
asked of every rival: how many of its tokens are the likeliest by the model in float32, after those it said before.
"""

from __future__ import annotations

import argparse
import copy
import random
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import transformers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, StoppingCriteria, StoppingCriteriaList

from attnspan import Engine, SamplingParams
from benchmarks.report import command, folded, header

RESULTS = Path(__file__).parent / "results"
PAGE = 16
JUDGED = 48
"""Requests whose tokens are held to the model in float32, on a CUDA device."""
PATIENCE = 15.0
"""Seconds of a turn after which a rival has no other."""


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
        with torch.device(device):
            model = LlamaForCausalLM(config).to(dtype).eval().requires_grad_(False)
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
BILLION = Case("1B", 2048, 20, 32, 8, 32000, requests=192, rows=64, prompt=400, answer=120, most=512)


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
        allocator = engine._scheduler.kv_cache.groups[0].allocator
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


@contextmanager
def without_cudnn() -> Iterator[None]:
    """torch's attention by other kernels; see the file's docstring."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


@without_cudnn()
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


@without_cudnn()
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
            elif got is None and not manager.is_running():
                raise RuntimeError("transformers' continuous batching has ended before its requests")
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
    with Timed(device) as warming:
        ours.engine.warm_up()
    print(f"  {case.name}: warmed up in {warming.clock:.2f} s", flush=True)
    rivals: dict[str, Callable[[list[tuple[list[int], int]]], Run]] = {
        "attnspan.engine": ours,
        f"generate, static batches of {case.rows}": lambda some: static(case, model, device, some),
        "transformers' continuous batching": lambda some: continuous(case, model, device, some),
    }
    best: dict[str, Run] = {}
    cold: dict[str, float] = {}
    # Answers of all lengths, so that batches of all sizes are warm.
    warm = [(prompt[:40], 2 + place) for place, (prompt, _) in enumerate(asked[: case.rows])]
    for rival in rivals.values():
        rival(warm)
    for turn in range(turns):
        some, said = turned(asked, turn, case.vocabulary), {}
        for name, rival in rivals.items():
            if name in best and best[name].clock > PATIENCE:
                continue
            run = rival(some)
            said[name] = run.said
            cold.setdefault(name, run.seconds(device))
            if name not in best or run.seconds(device) < best[name].seconds(device):
                best[name] = run
            print(f"  {case.name}, turn {turn + 1}: {name} {run.busy:.2f} s, by the clock {run.clock:.2f}", flush=True)
        if turn == 0:
            mine, theirs, _ = said.values()
            same = sum(a == b for a, b in zip(mine, theirs, strict=True))
            shares = {name: likeliest(model, some, rows) for name, rows in said.items()} if device != "cpu" else {}
    if device == "cpu":
        answers = f"Answers equal to those of the static batches, token for token: {same} of {len(asked)}."
    else:
        told = ", ".join(f"{name} {share:.2%}" for name, share in shares.items())
        answers = f"Tokens that are the likeliest by the model in float32: {told}."
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
        answers,
        "",
        f"The engine was warmed up in {warming.clock:.2f} s. First turns: "
        + ", ".join(f"{name} {seconds:.2f} s" for name, seconds in cold.items())
        + ".",
        "",
        *costs(case, device, ours),
        "",
    ]


@torch.no_grad()
def likeliest(model: Any, asked: list[tuple[list[int], int]], said: list[list[int]], most: int = JUDGED) -> float:
    """The share of tokens that the model in float32 would have said after the same tokens, of the first requests."""
    precise, hits, count = copy.deepcopy(model).float(), 0, 0
    for (prompt, _), answer in list(zip(asked, said, strict=True))[:most]:
        tokens = torch.tensor([[*prompt, *answer]], device=model.device)
        logits = precise(tokens, use_cache=False).logits[0, len(prompt) - 1 : -1]
        hits += int((logits.argmax(-1) == tokens[0, len(prompt) :]).sum())
        count += len(answer)
    return hits / count


class Stopwatch:
    """Seconds spent in some methods of some objects while it is on; one within another counts once."""

    def __init__(self, *methods: tuple[Any, str]) -> None:
        self.methods, self.seconds, self._within = methods, 0.0, False

    def __enter__(self) -> Stopwatch:
        self.before = [getattr(each, name) for each, name in self.methods]
        for (each, name), method in zip(self.methods, self.before, strict=True):
            setattr(each, name, self._timed(method))
        return self

    def __exit__(self, *error: object) -> None:
        for (each, name), method in zip(self.methods, self.before, strict=True):
            setattr(each, name, method)

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            if self._within:
                return method(*arguments, **named)
            self._within, start = True, time.perf_counter()  # to ask for the processor's time costs more than a call
            try:
                return method(*arguments, **named)
            finally:
                self.seconds += time.perf_counter() - start
                self._within = False

        return timed


def costs(case: Case, device: str, ours: Ours) -> list[str]:
    """The prefix cache where nothing is found in it, and slots that hold no token."""
    some = turned(case.asked(), 100, case.vocabulary)
    known, [group] = ours.engine.counts.cached, ours.engine._scheduler.kv_cache.groups
    assert group.prefix_cache is not None, "it is on unless asked for"
    asked = [(group.prefix_cache, name) for name in ("add", "insert")]
    called = [(group.allocator, name) for name in ("_reclaim", "_on_idle")]  # by the allocator, when pages are short
    with Stopwatch(*asked, *called) as watch, Timed(device) as timed:
        ours(some)
    hits = ours.engine.counts.cached - known
    ours(turned(case.asked(), 101, case.vocabulary), watch=True)
    return [
        f"Prefix cache, {hits} of {sum(len(prompt) for prompt, _ in some)} tokens found: "
        f"{watch.seconds / timed.clock:.2%} of the run's time. Slots of used pages without a token, pages of "
        f"{PAGE}: mean {statistics.mean(ours.waste):.1%}.",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cuda", action="store_true", help="on a CUDA device")
    parser.add_argument("--graphs", action="store_true", help="decode by CUDA graphs")
    parser.add_argument("--quick", action="store_true", help="the smallest model, and no result file")
    parser.add_argument("--only", metavar="NAME", help="one of the models, and no result file")
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    device = "cuda" if options.cuda else "cpu"
    if not options.cuda:
        torch.set_num_threads(1)
    cases = [TINY, MID, BILLION] if options.cuda else [TINY, MID]
    if options.quick or options.only:
        cases = [case for case in cases if case.name == (options.only or "tiny")]
    lines = header("Generation: an engine over pages", command("python benchmarks/bench_engine.py"))
    threads = "" if options.cuda else f"; {torch.get_num_threads()} thread"
    lines += [
        f"transformers {transformers.__version__}{threads}. All requests are there at once, the same rows for every "
        f"rival; the fastest of {options.turns} turns each, of one where it takes over {PATIENCE:.0f} s.",
        "",
    ]
    if options.cuda:
        lines[-1:] = [
            f"bfloat16; {'the engine decodes by graphs; ' if options.graphs else ''}the others run without cuDNN's "
            "attention, with which they take longer. The likeliest tokens are counted over the first "
            f"{JUDGED} requests of the first turn.",
            "",
        ]
    print("\n".join(lines))
    for case in cases:
        lines += (found := compared(case, device, options.turns, options.graphs))
        print("\n".join(found), flush=True)
        if not options.quick and not options.only:
            (RESULTS / f"engine_{'cuda' if options.cuda else 'cpu'}.md").write_text(folded("\n".join(lines)))


if __name__ == "__main__":
    main()
