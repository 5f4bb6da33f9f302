"""What a change costs the engine: instructions and seconds of the same requests in two checkouts.

    python benchmarks/engine_cost.py BEFORE AFTER                             the tiny model
    python benchmarks/engine_cost.py BEFORE AFTER --cases tiny mid-size:8     and 8 requests to the mid-size one

The requests and the engine are those of each checkout's `bench_engine.py`. One process imports torch and transformers
and forks a child for each measurement, so that both versions start from the same memory; they take turns. Hashes are
seeded, addresses are not randomised, there is one thread, and garbage is collected before the first turn.

Instructions are counted by valgrind (callgrind) and do not depend on what else the machine does. They need `valgrind`
and `gcc`. Seconds are the processor's: the fastest time of each call (`add`, `step`) over all turns of a child, summed
over calls. Each child is a sample; medians of children are compared. The spread of one version is reported beside the
difference, because a difference within it means nothing.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import re
import statistics
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

RESULTS = Path(__file__).parent / "results"
WARM = 50
"""The number of a turn that is not measured; turns differ in their tokens, not in lengths."""
SWITCH = """
#include <valgrind/callgrind.h>
void start(void) { CALLGRIND_START_INSTRUMENTATION; }
void dump(void) { CALLGRIND_DUMP_STATS; }
"""


# ---- in a child ------------------------------------------------------------------------------------------------------


class Bench:
    """The engine and the requests of one checkout's benchmark."""

    def __init__(self, checkout: Path, case: str) -> None:
        sys.path[:0] = [str(checkout / "src"), str(checkout)]
        import attnspan
        from benchmarks import bench_engine

        for module in (attnspan, bench_engine):
            assert Path(module.__file__).is_relative_to(checkout), f"{module.__file__} is not of {checkout}"
        self.module = bench_engine
        name, _, requests = case.partition(":")
        self.case = {each.name: each for each in (bench_engine.TINY, bench_engine.MID)}[name]
        self.asked = self.case.asked()[: int(requests) if requests else None]
        self.engine = bench_engine.Ours(self.case, self.case.model("cpu"), "cpu").engine
        self.engine.warm_up()
        self.turn(WARM)

    def turn(self, number: int) -> list[float]:
        """All requests, once; the processor's seconds of each call."""
        asked = self.module.turned(self.asked, number, self.case.vocabulary)
        params = [self.module.SamplingParams(max_new_tokens=new) for _, new in asked]
        marks = [time.process_time()]
        for (prompt, _), each in zip(asked, params, strict=True):
            self.engine.add(prompt, each)
            marks.append(time.process_time())
        while self.engine.unfinished:
            self.engine.step()
            marks.append(time.process_time())
        return [after - before for before, after in pairwise(marks)]


def counted(bench: Bench, turns: int, folder: Path) -> float:
    """Instructions of one turn."""
    switch = ctypes.CDLL(str(folder / "switch.so"))
    gc.collect()
    switch.start()
    bench.turn(0)
    switch.dump()
    profile = (folder / f"{os.getpid()}.1").read_text()
    return float(re.search(r"^(?:totals|summary): (\d+)", profile, re.MULTILINE)[1])


def timed(bench: Bench, turns: int, folder: Path) -> float:
    """Seconds of a turn, each call at its fastest."""
    gc.collect()
    calls = zip(*(bench.turn(number) for number in range(turns)), strict=True)
    return sum(min(times) for times in calls)


KINDS: dict[str, Callable[[Bench, int, Path], float]] = {"instructions": counted, "seconds": timed}


def children(kind: str, checkouts: list[str], case: str, turns: int, folder: str) -> None:
    """Fork a child for each checkout, one after the other; each prints its place and its figure."""
    import torch
    import transformers

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.LlamaForCausalLM  # noqa: B018 (naming it imports it)
    torch.set_num_threads(1)
    gc.collect()
    for place, checkout in enumerate(checkouts):
        if child := os.fork():
            os.waitpid(child, 0)
            continue
        try:
            print(json.dumps([place, KINDS[kind](Bench(Path(checkout), case), turns, Path(folder))]), flush=True)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)


# ---- in the program --------------------------------------------------------------------------------------------------


def measured(kind: str, order: list[Path], case: str, turns: int) -> list[float]:
    """The figure of each checkout of the order, from children of one process."""
    with TemporaryDirectory() as folder:
        program = ["setarch", "-R", sys.executable]
        if kind == "instructions":
            Path(folder, "switch.c").write_text(SWITCH)
            subprocess.run(["gcc", "-shared", "-fPIC", "-o", "switch.so", "switch.c"], cwd=folder, check=True)
            callgrind = ["--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={folder}/%p", "--quiet"]
            program = ["valgrind", *callgrind, sys.executable]
        given = json.dumps([kind, [str(each) for each in order], case, turns, folder])
        environment = os.environ | {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
        found: dict[int, float] = {}
        with subprocess.Popen([*program, __file__, "--children", given], env=environment, stdout=-1, text=True) as run:
            for line in run.stdout or ():
                place, figure = json.loads(line)
                found[place] = figure
                print(f"  {kind}: {order[place].name} {figure}", flush=True)
    assert len(found) == len(order), f"{len(order) - len(found)} of {len(order)} children failed"
    return [found[place] for place in range(len(order))]


def revision(checkout: Path) -> str:
    told = subprocess.run(
        ["git", "-C", str(checkout), "describe", "--always", "--dirty"], capture_output=True, text=True
    )
    return told.stdout.strip() or checkout.name


def row(what: str, before: list[float], after: list[float], digits: str) -> str:
    """Medians, their difference, and how far the figures of one version are apart."""
    old, new = statistics.median(before), statistics.median(after)
    spread = " and ".join(f"{max(each) / min(each) - 1:.3%}" for each in (before, after)) if len(before) > 1 else "-"
    return f"| {what} | {len(before)} | {old:{digits}} | {new:{digits}} | {new / old - 1:+.2%} | {spread} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--cases", nargs="+", default=["tiny"], metavar="NAME[:REQUESTS]")
    parser.add_argument("--counts", type=int, default=2, help="children of each version that count instructions")
    parser.add_argument("--pairs", type=int, default=20, help="children of each version that are timed")
    parser.add_argument("--turns", type=int, default=4, help="of a timed child")
    parser.add_argument("--out", type=Path, default=RESULTS / "engine_cost.md")
    options = parser.parse_args()
    checkouts = [options.before.resolve(), options.after.resolve()]
    rows = []
    for case in options.cases:
        for kind, pairs, turns, scale, digits in (
            ("instructions", options.counts, 1, 1e9, ".4f"),
            ("seconds", options.pairs, options.turns, 1, ".3f"),
        ):
            if pairs:
                order = [each for pair in range(pairs) for each in checkouts[:: 1 if pair % 2 else -1]]
                found = measured(kind, order, case, turns)
                before, after = ([found[n] / scale for n, each in enumerate(order) if each == one] for one in checkouts)
                rows.append(row(f"{case}, {'1e9 ' if scale > 1 else ''}{kind}", before, after, digits))
                print(rows[-1], flush=True)

    sys.path.insert(0, str(Path(__file__).parents[1]))
    from benchmarks.report import command, folded, header

    valgrind = subprocess.run(["valgrind", "--version"], capture_output=True, text=True).stdout.strip()
    lines = header("What a change costs the engine", command("python benchmarks/engine_cost.py"))
    lines += [
        f"Before is {revision(checkouts[0])}, after is {revision(checkouts[1])}; {valgrind}, one thread. A turn of "
        "`bench_engine.py`'s requests; medians of children.",
        "",
        "| | children | before | after | difference | spread before and after |",
        "|---|---|---|---|---|---|",
        *rows,
        "",
    ]
    options.out.write_text(folded("\n".join(lines)))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--children"]:
        children(*json.loads(sys.argv[2]))
    else:
        main()
