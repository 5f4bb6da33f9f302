"""`attnspan bench`: measure strategies and kernels at your sizes, and compare with the prediction.

::

    $ torchrun --nproc-per-node 8 -m attnspan bench "causal & documents(@lengths.txt)" --heads 32 --kv-heads 8
    $ attnspan bench causal --seq-len 8k --ranks 2 --heads 4 --head-dim 64 --dtype fp32 --tune

Runs on torchrun's ranks, on processes that it starts (--ranks), or on virtual ranks (--virtual), where one device does
all the work and nothing travels. Predictions use the table for the device (`attnspan tune`), or one that --tune
measures first at these sizes. Without a table they use a preset, and the output says so.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from attnspan.attention.links import Links, group_links
from attnspan.attention.tuned import GroupTuning, group_tuning, hardware_for
from attnspan.cli import options
from attnspan.cli.expression import write
from attnspan.cli.fitting import say
from attnspan.cli.layout import LAYOUTS, LayoutRequest, named
from attnspan.cli.tokens import optional_size, shortened
from attnspan.cli.tune import bar
from attnspan.errors import PlanError, one_of
from attnspan.kernels import KERNELS
from attnspan.measure import Bench, Measured, Ranks, Tuning, Workload
from attnspan.measure import chart as draw
from attnspan.measure import tune as measure
from attnspan.measure.chart import check_chart
from attnspan.plan import Link
from attnspan.plan.drawing import in_seconds, table
from attnspan.plan.strategy import Strategy
from attnspan.transports import Transport
from attnspan.tuning import device_name, read

STRATEGIES = ["auto", "gather", "needed(1)", "needed(2)", "ring", "ulysses"]


def bench(
    mask: options.MaskText,
    ranks: options.RanksOption = None,
    seq_len: options.SeqLenOption = None,
    heads: options.HeadsOption = "32",
    kv_heads: options.KvHeadsOption = None,
    head_dim: options.HeadDimOption = "128",
    batch: options.BatchOption = None,
    dtype: options.DtypeOption = "bf16",
    layout: Annotated[str, typer.Option(metavar="L", help=f"One of {', '.join(LAYOUTS)}.")] = "balanced",
    strategy: Annotated[
        list[str] | None, typer.Option(metavar="S", help="Measure only this strategy. Repeatable.")
    ] = None,
    kernel: Annotated[
        list[str] | None, typer.Option(metavar="K", help="Use this kernel, not auto. Repeatable.")
    ] = None,
    repeats: Annotated[int, typer.Option(metavar="N", min=1, help="Repeats; the median is reported.")] = 3,
    inference: options.InferenceOption = False,
    device: options.DeviceOption = None,
    virtual: options.VirtualOption = False,
    tune: Annotated[bool, typer.Option("--tune", help="Measure tiles and links at these sizes first.")] = False,
    tuning: Annotated[Path | None, typer.Option(metavar="FILE", help="Predict with this table.")] = None,
    chart: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a chart. Needs matplotlib.")] = None,
    as_json: options.JsonOption = False,
) -> None:
    """Measure strategies and kernels, and compare with predictions.

    Runs on torchrun's ranks, on local processes (--ranks), or on virtual ranks (--virtual).
    """
    where = Ranks(optional_size("--ranks", ranks), device, virtual)
    parsed, length, shape = options.attended(mask, seq_len, heads, kv_heads, head_dim, batch, dtype)
    strategies = strategy or [each for each in STRATEGIES if each != "ulysses" or where.count <= shape.heads]
    for each in (each for each in strategies if each != "auto"):
        Strategy.of(each)
    for each in kernel or ():
        one_of("--kernel", each, ["auto", *KERNELS], error=PlanError)
    if chart is not None:
        check_chart("--chart", chart)
    if tune and tuning:
        raise PlanError("--tune measures a table and --tuning reads one; give one of them")
    dealt = named(layout, LayoutRequest(parsed, length, where.count))
    job = BenchJob(
        Workload(parsed, length, dealt, shape, backward=not inference),
        tuple(strategies),
        tuple(kernel or ["auto"]),
        repeats,
        tune,
        tuning,
    )
    found = where.run(partial(on_rank, job))
    if found is None:
        return
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    else:
        say(text(found))
    if chart is not None:
        path = draw([Measured(**row) for row in found["rows"]], shortened(found["what"], 90), chart)
        typer.echo(f"chart: {path}", err=True)


@dataclass(frozen=True, slots=True)
class BenchJob:
    """What every rank does."""

    work: Workload
    strategies: tuple[str, ...]
    kernels: tuple[str, ...]
    repeats: int
    tune: bool
    tuning: Path | None


def on_rank(job: BenchJob, transport: Transport) -> dict[str, Any]:
    """One rank's part."""
    shape, device = job.work.shape, transport.device
    known = known_to(job, transport)
    tried = Bench(job.work, transport, known, job.repeats)
    if transport.rank == 0:
        about = in_seconds(tried.forecast(job.strategies, job.kernels))
        say(f"measuring for about {about}, as predicted; kernels that compile take longer", err=True)
    rows = list(tried.run(job.strategies, job.kernels, partial(bar, transport.rank, "strategies")))
    hardware, links = hardware_for(known, shape, device), Links() if tried.virtual else group_links(transport)
    link = links.between or links.inside
    return {
        "what": described(job.work, tried.virtual, transport),
        "predicted_with": f"{hardware.name}: {hardware.note}; links {hardware.links or 'of a preset'}",
        "virtual": tried.virtual,
        "link": None if link is None else asdict(link),
        "rows": [row.data() for row in rows],
    }


def known_to(job: BenchJob, transport: Transport) -> GroupTuning:
    """What predictions go by."""
    if job.tuning is not None:
        return GroupTuning(read(job.tuning, device_name(transport.device)))
    if not job.tune:
        return group_tuning(transport)
    shape = job.work.shape
    asked = Tuning.of(
        transport.device,
        dtypes=(shape.dtype,),
        head_dims=(shape.head_dim,),
        heads=shape.heads * shape.batch,
        kv_heads=shape.kv_heads * shape.batch,
        kernels=() if "auto" in job.kernels else job.kernels,
    )
    return GroupTuning(measure(asked, transport, partial(bar, transport.rank, "tiles")))


def described(work: Workload, virtual: bool, transport: Transport) -> str:
    """What was run, in a line."""
    shape, way = work.shape, "forward + backward" if work.backward else "forward"
    grouped = "" if shape.kv_heads == shape.heads else f" on {shape.kv_heads} key heads"
    ranks = f"{transport.ranks} {'virtual ' if virtual else ''}ranks on {transport.device.type}"
    return (
        f"{shortened(write(work.mask), 60)}, {work.seq_len} tokens, {type(work.layout).__name__} over {ranks}; "
        f"{shape.heads} heads{grouped}, head dim {shape.head_dim}, {shape.dtype}; {way}"
    )


def text(found: dict[str, Any]) -> str:
    """The table for people."""
    rows = [Measured(**row) for row in found["rows"]]
    best = min((row.seconds for row in rows if not row.refused), default=0.0)
    travels = [] if found["virtual"] else ["on the wire", "waits", "hidden"]
    head = ["strategy", "kernel", "measured", "predicted", "ratio", *travels, "over the fastest"]
    able = [row for row in rows if not row.refused]
    lines = [
        [
            f"auto: {row.chosen}" if row.chosen else row.strategy,
            row.kernel,
            in_seconds(row.seconds),
            in_seconds(row.predicted),
            f"{row.ratio:.2f}",
            *([in_seconds(each) for each in (row.wire, row.waits, row.hidden)] if travels else []),
            f"{row.seconds / best:.2f}x",
        ]
        for row in able
    ]
    about = [found["what"], f"predicted with {found['predicted_with']}"]
    if found["link"]:
        about.append(f"link measured: {Link(**found['link'])}, all ranks sending at once")
    return "\n".join([*about, table(head, lines), *_refused(rows)])


def _refused(rows: Sequence[Measured]) -> list[str]:
    return [f"{row.strategy} with {row.kernel}: {row.refused}" for row in rows if row.refused]
