"""Faults over real ranks: one of three is killed, raises or stalls; who ends how, after how many seconds.

Every rank is a program as a user would start it: an error that nobody catches ends it with a traceback. A rank that
computes on after the fault, or that is alive when the group's timeout and `SLACK` seconds have passed, is marked.

    PYTHONPATH=src:. python -m benchmarks.faults --out FILE
    PYTHONPATH=src:. python -m benchmarks.faults --device cpu --cases "ring, forward"

On CUDA the ranks are NCCL's, three on one GPU where there are too few.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

from benchmarks.report import command, folded, header, progress

RANKS, VICTIM = 3, 1
TIMEOUT, SLACK = 10, 10
"""Seconds: of the groups, and how much later everybody has ended at the latest."""

START = 120
"""Seconds in which ranks have started and attended in peace."""

AT_ONCE = 4
"""Cases under way at the same time."""


@dataclass(frozen=True)
class Case:
    """What happens to the victim, in which strategy (or the engine), and when."""

    fault: str  # killed, raises, stalls, killed at any time
    where: str
    when: str
    waits: str = ""  # "for its device": the others read a result after every turn

    def __str__(self) -> str:
        return ", ".join(filter(None, (self.fault, self.where, self.when, self.waits and f"host waits {self.waits}")))


CASES = [
    Case("killed", "ring", "forward"),
    Case("killed", "needed(2)", "backward"),
    Case("killed", "ulysses", "forward"),
    Case("killed", "gather", "forward", "for its device"),
    Case("killed", "gather", "while it sends", "for its device"),
    Case("killed at any time", "ring", "", "for its device"),
    Case("killed at any time", "gather", ""),
    Case("killed at any time", "needed(2)", "", "for its device"),
    Case("raises", "ring", "forward"),
    Case("raises", "gather", "backward"),
    Case("stalls", "needed", "forward"),
    Case("stalls", "ring", "while it sends", "for its device"),
    Case("stalls", "ulysses", "while it sends", "for its device"),
    Case("killed", "engine", "prefill"),
    Case("killed", "engine", "decode"),
]


@dataclass
class Ended:
    """How a rank ended: its exit code, or None if it had to be killed, when after the fault, and what it said."""

    code: int | None
    seconds: float
    said: str
    finished: bool

    @property
    def in_time(self) -> bool:
        return self.code is not None and not self.finished and self.seconds < TIMEOUT + SLACK

    def __str__(self) -> str:
        if self.code is None:
            how = "alive"
        else:
            how = f"exit {self.code}" if self.code >= 0 else signal.Signals(-self.code).name
        return f"{how} after {self.seconds:.1f} s" + (" (computed on)" if self.finished else "")


# ---- a rank ----------------------------------------------------------------------------------------------------------


def live(case: Case, rank: int, store: str, device: str) -> None:
    """One rank: turns in peace, then turns until something ends it."""
    if device == "cuda":
        os.environ.update(NCCL_HOSTID=f"host{rank}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
    import torch
    import torch.distributed as dist

    backend, own = ("nccl", torch.device("cuda", 0)) if device == "cuda" else ("gloo", None)
    limit = timedelta(seconds=TIMEOUT)
    dist.init_process_group(
        backend, init_method=f"file://{store}", rank=rank, world_size=RANKS, timeout=limit, device_id=own
    )
    turn = engine_turn(device) if case.where == "engine" else attention_turn(case, device)
    for _ in range(3):
        turn()
    dist.barrier()
    say("calm")
    if rank == VICTIM:
        doom(case)
    for _ in range(100_000 if case.fault == "killed at any time" else 40):
        turn()
    if device == "cuda":
        torch.cuda.synchronize()
    say("finished")


def attention_turn(case: Case, device: str) -> Callable[[], object]:
    import torch
    import torch.distributed as dist

    import attnspan as span

    size, dtype = (8192, torch.bfloat16) if device == "cuda" else (96, torch.float32)
    cp = span.ContextParallel(dist.group.WORLD, seq_len=size, mask=span.Causal(), strategy=case.where)
    own = cp.positions.numel()
    q, k, v = (torch.randn(1, h, own, 64, device=device, dtype=dtype, requires_grad=True) for h in (6, 3, 3))

    def turn() -> object:
        out = cp.attention(q, k, v)
        out.sum().backward()
        return out.float().sum().item() if case.waits else None

    return turn


def engine_turn(device: str) -> Callable[[], object]:
    import torch.distributed as dist

    from attnspan import Engine, SamplingParams
    from tests.engine.models import prompts, tiny

    engine = Engine(tiny("Llama").to(device), mesh=dist.group.WORLD, pages=40, page_size=4, context_parallel_from=20)
    seeds = itertools.count()

    def turn() -> object:
        asked = prompts([40, 5, 23], seed=next(seeds))  # new ones: nothing of them is in the prefix cache
        requests = [engine.add(prompt, SamplingParams(max_new_tokens=12)) for prompt in asked]
        try:
            while engine.unfinished:
                engine.step()
        except BaseException:
            say(f"requests ended: {', '.join(str(request.finish_reason) for request in requests)}")
            raise
        return requests

    return turn


def doom(case: Case) -> None:
    """Make this process come to grief at the next such moment."""
    from attnspan.attention.lane import Lane
    from attnspan.engine.model_runner import PagedStepAttention
    from attnspan.transports import Distributed

    if case.fault == "killed at any time":
        return  # by who started it
    spot: tuple[type, str] = {
        "forward": (Lane, "forward"),
        "backward": (Lane, "backward"),
        "while it sends": (Distributed, "_post_batch"),
        "prefill": (Lane, "forward"),
        "decode": (PagedStepAttention, "attend"),
    }[case.when]
    act = {"killed": killed, "raises": raises, "stalls": stalls}[case.fault]

    def doomed(*args: object) -> NoReturn:
        say("fault")
        act()

    setattr(*spot, doomed)


def killed() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("dead")


def raises() -> NoReturn:
    raise RuntimeError("out of memory")


def stalls() -> NoReturn:
    time.sleep(TIMEOUT + 3 * SLACK)
    killed()


def say(what: str) -> None:
    print(f"@{time.time()} {what}", flush=True)


# ---- all ranks of a case ---------------------------------------------------------------------------------------------


class Trial:
    """A case under way."""

    def __init__(self, case: Case, device: str) -> None:
        self.case = case
        self._folder = tempfile.TemporaryDirectory()
        folder = Path(self._folder.name)
        self._logs = [folder / f"{rank}.log" for rank in range(RANKS)]
        program = [sys.executable, "-m", "benchmarks.faults", "--device", device]
        self._processes = [
            subprocess.Popen(
                [*program, "--rank", str(rank), "--cases", str(case), "--store", str(folder / "store")],
                stdout=log.open("w"),
                stderr=subprocess.STDOUT,
            )
            for rank, log in enumerate(self._logs)
        ]
        self._ended: dict[int, float] = {}
        self._began, self._fault = time.time(), 0.0

    def look(self) -> bool:
        """Whether it is over."""
        now = time.time()
        if not self._fault:
            self._fault = self._when_it_came()
        for rank, process in enumerate(self._processes):
            if rank not in self._ended and process.poll() is not None:
                self._ended[rank] = now
        waited = now - (self._fault or self._began + START)
        others = set(range(RANKS)) - {VICTIM}
        return others <= set(self._ended) or waited > TIMEOUT + 2 * SLACK

    def _when_it_came(self) -> float:
        said = self._said(VICTIM)
        if self.case.fault == "killed at any time" and "calm" in said:
            time.sleep(1.0)
            self._processes[VICTIM].kill()
            return time.time()
        return said.get("fault", 0.0)

    def _said(self, rank: int) -> dict[str, float]:
        """What a rank has said, by the time it said so."""
        lines = [line[1:].split(" ", 1) for line in self._logs[rank].read_text().splitlines() if line.startswith("@")]
        return {what: float(when) for when, what in lines}

    def results(self) -> Iterator[tuple[int, Ended]]:
        """How all but the victim ended; whoever has not is killed now."""
        for rank in set(range(RANKS)) - {VICTIM}:
            text = self._logs[rank].read_text()
            seconds = self._ended.get(rank, time.time()) - self._fault
            code = self._processes[rank].poll()
            yield rank, Ended(code if self._fault else None, seconds, last_words(text), "finished" in self._said(rank))
        for process in self._processes:
            process.kill()
            process.wait()
        self._folder.cleanup()


def last_words(text: str) -> str:
    """What a rank says that it awaited, and what became of its requests."""
    awaited = re.findall(rf"rank \d of {RANKS}, group [^:]*: (.*)", text)
    words = re.sub(r"\[[^]]*\.cc:\d+\] |, NCCL version.*", "", awaited[-1])[:120] if awaited else text[-120:]
    requests = re.findall(r"^@\S+ (requests ended.*)", text, re.MULTILINE)
    return "; ".join([words.replace("\n", " ").replace("|", "/"), *requests])


def run(cases: list[Case], device: str) -> list[tuple[Case, int, Ended]]:
    """All cases, some at a time."""
    rows = []
    for first in progress(range(0, len(cases), AT_ONCE), "faults"):
        trials = [Trial(case, device) for case in cases[first : first + AT_ONCE]]
        under_way = list(trials)
        while under_way:
            time.sleep(0.1)
            under_way = [trial for trial in under_way if not trial.look()]
        rows += [(trial.case, rank, ended) for trial in trials for rank, ended in trial.results()]
    return rows


def page(rows: list[tuple[Case, int, Ended]]) -> str:
    lines = [
        *header("Faults over real ranks", command("PYTHONPATH=src:. python -m benchmarks.faults")),
        f"Rank {VICTIM} of {RANKS} comes to grief; groups have a timeout of {TIMEOUT} s. Nobody may be alive "
        f"{TIMEOUT + SLACK} s after the fault, or compute on.",
        "",
        "| rank 1 | rank | ended | in time | it said |",
        "|---|---|---|---|---|",
        *(
            f"| {case} | {rank} | {ended} | {'yes' if ended.in_time else 'NO'} | {ended.said} |"
            for case, rank, ended in rows
        ),
    ]
    return folded("\n".join(lines)) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--cases", default="", metavar="PART", help='such as "ring, forward"; all if none')
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    given = parser.parse_args()
    cases = [case for case in CASES if given.cases in str(case)]
    if given.rank is not None:
        return live(next(case for case in cases if str(case) == given.cases), given.rank, given.store, given.device)
    rows = run(cases, given.device)
    if given.out:
        given.out.write_text(page(rows))
    print(page(rows))
    sys.exit(not all(ended.in_time for _, _, ended in rows))


if __name__ == "__main__":
    main()
