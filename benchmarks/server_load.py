"""A server under load: many streams at once, of which some leave, drop their connection, or send what is no request.

    PYTHONPATH=src:. python -m benchmarks.server_load --streams 500 --seconds 600

A tiny model is served by `attnspan serve` in a process of its own, on 127.0.0.1. Clients are coroutines of this one.
Every answer that is read to its end is compared with what `engine.generate` says; afterwards all pages must be free.
The result is written to benchmarks/results/server_load.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from attnspan import Engine, SamplingParams
from benchmarks.report import command, folded, header
from tests.engine.models import tiny, tokenizer

RESULTS = Path(__file__).parent / "results"
MODEL = "tiny"
WORDS = ["the", "cat", "and", "dog", "hat", "sat", "there", "on", "that", "mat"]
ACTIONS = {"stream": 60, "whole": 10, "leave": 14, "drop": 10, "half": 3, "bad": 3}
"""What a client does, and how often: reads a stream or a whole answer to its end, leaves a stream in the middle, drops
the connection once the request is sent, sends half of it, or something that is none."""


@dataclass(frozen=True)
class Case:
    """A request, and what the engine says to it."""

    body: dict
    texts: tuple[str, ...]


@dataclass
class Tally:
    """What has happened."""

    counts: Counter = field(default_factory=Counter)
    tokens: int = 0
    first: list[float] = field(default_factory=list)  # seconds to the first event of a stream
    wrong: list[str] = field(default_factory=list)


def catalogue(engine: Engine, cases: int, longest: int) -> list[Case]:
    """Requests of all kinds with their answers."""
    draw, asked = random.Random(0), []
    for seed in range(cases):
        prompt = " ".join(draw.choices(WORDS, k=draw.randint(1, 40)))
        wishes = {"max_tokens": draw.randint(1, longest), "n": draw.choice([1, 1, 1, 2])}
        if draw.random() < 0.6:
            wishes |= {"temperature": 1.0, "seed": seed, "top_p": draw.choice([1.0, 0.9])}
        if draw.random() < 0.3:
            wishes |= {"presence_penalty": 0.5}
        asked.append((prompt, wishes))
    params = [
        SamplingParams(max_new_tokens=wishes["max_tokens"], **{k: v for k, v in wishes.items() if k != "max_tokens"})
        for _, wishes in asked
    ]
    answers = engine.generate([prompt for prompt, _ in asked], params)
    return [
        Case({"model": MODEL, "prompt": prompt, **wishes}, tuple(sample.text for sample in answer.continuations))
        for (prompt, wishes), answer in zip(asked, answers, strict=True)
    ]


class Client:
    """One client after another, on connections of their own, until the time is over."""

    def __init__(self, address: str, cases: list[Case], tally: Tally, seed: int) -> None:
        self.host, port = re.fullmatch(r"http://([\w.]+):(\d+)", address).groups()
        assert self.host == "127.0.0.1", "load is for this machine alone"
        self.port, self.cases, self.tally, self.random = int(port), cases, tally, random.Random(seed)

    async def run(self, until: float) -> None:
        while time.monotonic() < until:
            [action] = self.random.choices([*ACTIONS], [*ACTIONS.values()])
            case = self.random.choice(self.cases)
            reader, writer = await asyncio.open_connection(self.host, self.port)
            try:
                await self._act(action, case, reader, writer)
            except OSError as error:
                self.tally.wrong.append(f"{action}: {error!r}")
            finally:
                writer.close()

    async def _act(self, action: str, case: Case, reader, writer) -> None:
        stream = action in ("stream", "leave") or (action == "drop" and self.random.random() < 0.5)
        body = json.dumps(case.body | {"stream": stream}).encode()
        if action == "bad":
            body = self.random.choice([b"{", b'{"model": NaN}', b"[[[[", b'{"model": "tiny", "prompt": 5}', body[:-1]])
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {self.host}\r\nConnection: close\r\nContent-Type: application/json"
        )
        request = f"{head}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
        writer.write(request[: len(request) // 2] if action == "half" else request)
        await writer.drain()
        self.tally.counts[action] += 1
        if action in ("half", "drop"):
            await asyncio.sleep(self.random.random() * 0.5)
            return
        began = time.monotonic()
        status = int((await reader.readline()).split()[1])
        if status == 429:
            self.tally.counts["429"] += 1
            await asyncio.sleep(1)
        elif action == "bad":
            self._expect(status == 400, f"a bad body was answered with {status}")
        elif status != 200:
            self._expect(False, f"{status} to {case.body}")
        else:
            while (await reader.readline()).strip():
                pass  # headers
            if stream:
                await self._read_stream(action, case, reader, began)
            else:
                answer = json.loads(await reader.read())
                self._check(case, [each["text"] for each in answer["choices"]])
                self.tally.tokens += answer["usage"]["completion_tokens"]

    async def _read_stream(self, action: str, case: Case, reader, began: float) -> None:
        texts, events, leave = [""] * len(case.texts), 0, self.random.randint(1, 12)
        while line := await reader.readline():  # between them are the sizes of chunks
            if not line.startswith(b"data: "):
                continue
            events += 1
            if events == 1:
                self.tally.first.append(time.monotonic() - began)
            if line == b"data: [DONE]\n":
                self._check(case, texts)
                return
            if action == "leave" and events >= leave:
                self.tally.counts["left"] += 1
                return
            event = json.loads(line[6:])
            if "error" in event:
                self._expect(False, f"an error in a stream: {event}")
                return
            self.tally.tokens += 1
            for choice in event["choices"]:
                texts[choice["index"]] += choice["text"]
        self._expect(False, f"a stream ended without [DONE] after {events} events")

    def _check(self, case: Case, texts: list[str]) -> None:
        self.tally.counts["finished"] += 1
        self._expect(tuple(texts) == case.texts, f"{case.body} was answered {texts}, the engine says {case.texts}")

    def _expect(self, holds: bool, otherwise: str) -> None:
        if not holds:
            self.tally.wrong.append(otherwise)


async def load(address: str, cases: list[Case], streams: int, seconds: float) -> Tally:
    """So many clients at once for so long."""
    tally, until = Tally(), time.monotonic() + seconds
    await asyncio.gather(*(Client(address, cases, tally, seed).run(until) for seed in range(streams)))
    return tally


# ---- a server in a process of its own --------------------------------------------------------------------------------


@dataclass
class Served:
    """The process of a server, and the memory that it had."""

    process: subprocess.Popen
    address: str
    memory: list[tuple[float, float]] = field(default_factory=list)  # seconds, MiB

    def resident(self) -> float:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+) kB", status)[1]) / 1024

    async def watch(self, seconds: float) -> None:
        began = time.monotonic()
        while (now := time.monotonic() - began) < seconds:
            self.memory.append((now, self.resident()))
            await asyncio.sleep(min(5.0, seconds / 20))

    async def metrics(self) -> dict[str, float]:
        host, port = self.address.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(f"GET /metrics HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        lines = (await reader.read()).decode().splitlines()
        writer.close()
        return {
            line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if line.startswith("attnspan_")
        }


def started(folder: Path) -> Served:
    tiny("Llama", vocab_size=320).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    program = [sys.executable, "-m", "attnspan", "serve", "--model", str(folder), "--served-model-name", MODEL]
    sizes = ["--port", "0", "--pages", "1024", "--max-sequences", "64", "--max-waiting", "450"]
    process = subprocess.Popen(
        [*program, *sizes], stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    for line in process.stderr:
        found = re.search(r"listening on (http://127\.0\.0\.1:\d+)", line)
        if found:
            return Served(process, found[1])
    raise RuntimeError("the server has ended")


async def measured(served: Served, cases: list[Case], streams: int, seconds: float) -> tuple[Tally, dict[str, float]]:
    watch = asyncio.create_task(served.watch(seconds))
    tally = await load(served.address, cases, streams, seconds)
    await watch
    for _ in range(600):
        metrics = await served.metrics()
        if not metrics["attnspan_streams_open"]:
            break
        await asyncio.sleep(0.1)
    return tally, metrics


def page(arguments: argparse.Namespace, tally: Tally, metrics: dict[str, float], served: Served) -> str:
    counts, first = tally.counts, sorted(tally.first)
    warm = [(when, size) for when, size in served.memory if when >= arguments.seconds / 5]
    fifths = [
        statistics.fmean(size for _, size in warm[n * len(warm) // 4 : (n + 1) * len(warm) // 4]) for n in range(4)
    ]
    pages = {state: metrics[f'attnspan_pages{{state="{state}"}}'] for state in ("used", "free", "cached")}
    rows = [
        ("clients at once", arguments.streams),
        ("requests", sum(counts[action] for action in ACTIONS)),
        ("answers read to their end", counts["finished"]),
        ("of them equal to the engine's", counts["finished"] - sum("the engine says" in each for each in tally.wrong)),
        ("anything else that was wrong", sum("the engine says" not in each for each in tally.wrong)),
        ("streams left in the middle", counts["left"]),
        ("connections dropped; half requests; bad bodies", f"{counts['drop']}; {counts['half']}; {counts['bad']}"),
        ("refused, queue full (429)", counts["429"]),
        ("tokens generated per second", f"{metrics['attnspan_generated_tokens_total'] / arguments.seconds:.0f}"),
        (
            "first event of a stream, median and 99 %",
            f"{first[len(first) // 2]:.2f} s, {first[len(first) * 99 // 100]:.2f} s",
        ),
        ("samples preempted", f"{metrics['attnspan_preemptions_total']:.0f}"),
        (
            "steps; of them failed",
            f"{metrics['attnspan_steps_total']:.0f}; {metrics['attnspan_failed_steps_total']:.0f}",
        ),
        ("pages used afterwards, free, cached", ", ".join(f"{number:.0f}" for number in pages.values())),
        ("memory of the server, MiB, quarters of the last four fifths", ", ".join(f"{size:.0f}" for size in fifths)),
    ]
    lines = header("A server under load", command("python -m benchmarks.server_load"))
    lines += [
        f"{arguments.seconds:.0f} seconds. Clients share the processor with the server. A tiny Llama in float32, 64 "
        "samples at once, 450 waiting, 1024 pages of 16 tokens.",
        "",
        "| | |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in rows),
    ]
    return folded("\n".join(lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--out", type=Path, default=RESULTS / "server_load.md")
    arguments = parser.parse_args()
    engine = Engine(tiny("Llama", vocab_size=320), pages=1024, tokenizer=tokenizer())
    cases = catalogue(engine, 200, longest=60)
    with TemporaryDirectory() as folder:
        served = started(Path(folder))
        try:
            tally, metrics = asyncio.run(measured(served, cases, arguments.streams, arguments.seconds))
        finally:
            served.process.send_signal(signal.SIGTERM)
            print(served.process.stderr.read(), f"the server ended with {served.process.wait()}", file=sys.stderr)
    text = page(arguments, tally, metrics, served)
    print(text)
    print(*tally.wrong[:10], sep="\n")
    arguments.out.write_text(text)
    assert served.process.returncode == 0, "the server did not end as it should"
    assert not tally.wrong, f"{len(tally.wrong)} things were wrong"
    assert metrics['attnspan_pages{state="used"}'] == 0, "pages are lost"


if __name__ == "__main__":
    main()
