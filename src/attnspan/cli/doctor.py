"""`attnspan doctor`: versions, devices, which kernels run here and why others do not, and a self-test.

The self-test (measure/checkup.py) is the real thing: every strategy, forward and backward, against dense attention in
float64, on virtual ranks or, with --ranks, on processes that talk by NCCL or gloo. It ends with exit code 1 if anything
differs.
"""

from __future__ import annotations

import importlib.metadata
import platform
import time
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer

from attnspan._version import __version__
from attnspan.cli.fitting import say
from attnspan.cli.tokens import optional_size
from attnspan.dtypes import dtype_name
from attnspan.errors import RankError, TransportError, integer
from attnspan.kernels import KERNELS, Spec, refusals
from attnspan.masks.tile import Tile
from attnspan.measure.checkup import Findings, self_test
from attnspan.plan.drawing import table
from attnspan.testing import loopback, processes

PACKAGES = ["triton", "numpy", "rich", "typer", "matplotlib", "transformers"]
RANKS, TIMEOUT = 4, 120.0
DTYPES = (torch.float32, torch.bfloat16)
TILES = {
    "full": Tile(range(64), range(64), -63, 63),
    "causal": Tile(range(64), range(64), -63, 0),
    "any band": Tile(range(64), range(64), -9, 5),
}


def doctor(
    ranks: Annotated[
        str | None, typer.Option(metavar="N", help="Test N processes: NCCL where there is CUDA, else gloo.")
    ] = None,
) -> None:
    """Report what runs on this machine, and test it.

    Prints versions, devices, and for every kernel whether it runs here and why not; then tests attention on virtual
    ranks, against dense attention in float64. With --ranks it tests processes instead, and measures their link.
    """
    count = optional_size("--ranks", ranks)
    if count is not None:
        integer("--ranks", count, at_least=2, error=TransportError)
    for line in (*versions(), "", *devices(), ""):
        say(line)
    wrong = on_virtual_ranks() if count is None else on_processes(count)
    for line in wrong or ["all well"]:
        say(line)
    if wrong:
        raise typer.Exit(1)


def on_virtual_ranks() -> list[str]:
    """Test every kind of device here; what is wrong."""
    here = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    for device in here:
        for dtype in DTYPES:
            say(f"kernels on {device}, {dtype_name(dtype)}, head dim 64")
            for line in kernels(device, dtype):
                say(f"  {line}")
    typer.echo()
    wrong = []
    for device in here:
        start = time.perf_counter()
        found = loopback(RANKS, device).run(self_test)
        worst = max((each for rank in found for each in rank.strategies), key=attrgetter("error"))
        say(
            f"self-test on {device}: {len(found[0].strategies)} strategies, {RANKS} virtual ranks, forward and "
            f"backward: largest error {worst.error:.1e} ({worst.strategy}), {time.perf_counter() - start:.1f} s"
        )
        wrong += complaints(found)
    return wrong


def on_processes(count: int) -> list[str]:
    """Test so many processes; what is wrong."""
    backend = "nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
    group = processes(count, backend, timeout=TIMEOUT, group_timeout=TIMEOUT / 4)
    say(f"self-test on {count} {backend} ranks, forward and backward, against dense float64")
    start = time.perf_counter()
    try:
        found = group.run(self_test)
    except RankError as failed:
        return failures(failed.outcomes)
    say(results(found))
    if found[0].link is not None:
        say(f"link: {found[0].link}, all ranks sending at once")
    took = max(each.seconds for each in found)
    say(f"{took:.1f} s, after {time.perf_counter() - start - took:.1f} s to start the processes")
    return complaints(found)


def results(found: Sequence[Findings]) -> str:
    """A line for every strategy: over all ranks, the largest error and what they received."""
    lines = []
    for each in zip(*(rank.strategies for rank in found), strict=True):
        worst = max(range(len(each)), key=lambda rank: each[rank].error)
        passed = "wrong" if any(finding.wrong for finding in each) else "passed"
        received, planned = (sum(getattr(finding, name) for finding in each) for name in ("received", "planned"))
        lines.append([each[0].strategy, f"{each[worst].error:.1e}", worst, received, planned, passed])
    return table(["strategy", "largest error", "on rank", "bytes received", "planned", ""], lines)


def complaints(found: Sequence[Findings]) -> list[str]:
    """What is wrong, by rank and strategy."""
    return [
        f"wrong: rank {rank}, {finding.strategy}: {finding.wrong}"
        for rank, findings in enumerate(found)
        for finding in findings.strategies
        if finding.wrong
    ]


def failures(outcomes: Sequence[Any]) -> list[str]:
    """What became of ranks that returned nothing, a line each."""
    lines = []
    for rank, outcome in enumerate(outcomes):
        raised = f"raised {type(outcome.value).__name__}: {outcome.value}"
        if outcome.kind != "returned":
            lines.append(f"wrong: rank {rank} {raised if outcome.kind == 'raised' else outcome}")
    return lines


def versions() -> Iterator[str]:
    """One line for each thing that matters."""
    yield f"attnspan {__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    yield f"torch {torch.__version__}, CUDA {torch.version.cuda or 'not built in'}, cuDNN {_cudnn()}"
    backends = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()} if dist.is_available() else {}
    yield "torch.distributed: " + (", ".join(name for name, there in backends.items() if there) or "not available")
    yield "optional: " + ", ".join(f"{name} {_version(name)}" for name in PACKAGES)


def devices() -> Iterator[str]:
    """The devices, one per line."""
    yield f"cpu: {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        yield f"cuda:{index}: {device.name}, {device.total_memory / 2**30:.0f} GiB, sm_{device.major}{device.minor}"


def kernels(device: str, dtype: torch.dtype) -> Iterator[str]:
    """For every kernel the kinds of tile that it computes, or why it does not."""
    x = torch.empty(1, 2, 64, 64, dtype=dtype, device=device)
    reasons = {kind: refusals(Spec(scale=0.125), x, x, x, (tile,)) for kind, tile in TILES.items()}
    for name in KERNELS:
        able = [kind for kind in TILES if name not in reasons[kind]]
        why = next((reasons[kind][name] for kind in TILES if name in reasons[kind]), "")
        yield f"{name:12}" + (", ".join(able) or "no") + (f" ({why})" if why else "")


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def _cudnn() -> str:
    cudnn = torch.backends.cudnn
    return str(cudnn.version()) if cudnn.is_available() else "absent"
