"""`attnspan plan`: compare strategies for a mask, a length and a machine, and choose one.

::

    $ attnspan plan causal --seq-len 1M --ranks 64 --heads 32 --kv-heads 8 --head-dim 128 --hardware h100-nvlink

Prints balance, bytes, peak memory of keys and the predicted time of every candidate, the choice and why the others
lost. With --strategy it prints that one plan, rank by rank, or refuses it if its keys need more than --memory.
"""

from __future__ import annotations

import json
import re
from math import inf
from typing import Annotated, Any

import typer

from attnspan.cli import options
from attnspan.cli.fitting import say
from attnspan.cli.layout import LAYOUTS, LayoutRequest, named
from attnspan.cli.tokens import size
from attnspan.errors import PlanError
from attnspan.layouts.run import tokens_in
from attnspan.plan import Choice, Hardware, Plan, RecurrentLayers, choose
from attnspan.plan.choose import Candidate, checked_memory, predicted, sampled_ranks
from attnspan.plan.cost import PRESETS
from attnspan.plan.drawing import in_bytes, in_seconds
from attnspan.plan.recurrent import RecurrentCost


def plan(
    mask: options.MaskText,
    ranks: Annotated[str, typer.Option(metavar="R", help="Number of ranks.")],
    seq_len: options.SeqLenOption = None,
    heads: options.HeadsOption = "32",
    kv_heads: options.KvHeadsOption = None,
    head_dim: options.HeadDimOption = "128",
    batch: options.BatchOption = None,
    dtype: options.DtypeOption = "bf16",
    hardware: Annotated[str, typer.Option(metavar="H", help=f"One of {', '.join(PRESETS)}.")] = "h100-nvlink",
    memory: Annotated[float | None, typer.Option(metavar="GB", help="Memory limit for keys per rank.")] = None,
    layout: Annotated[str | None, typer.Option(metavar="L", help=f"Only this layout: {', '.join(LAYOUTS)}.")] = None,
    strategy: Annotated[str | None, typer.Option(metavar="S", help="Print one plan: ring, needed(2), ...")] = None,
    recurrent: Annotated[
        list[str] | None,
        typer.Option(metavar="L", help="Recurrent layers: RULE:HEADSxKEYSxVALUES[:COUNT]. Repeatable."),
    ] = None,
    inference: options.InferenceOption = False,
    keep_keys: Annotated[bool, typer.Option("--keep-keys", help="Keep keys for backward.")] = False,
    as_json: options.JsonOption = False,
) -> None:
    """Compare strategies for a mask, and choose one.

    Prints balance, bytes, memory of keys and predicted time of every candidate, and why the others lost.
    """
    parsed, length, shape = options.attended(mask, seq_len, heads, kv_heads, head_dim, batch, dtype)
    machine, count = Hardware.of(hardware), size(ranks, "--ranks")
    limit = None if memory is None else checked_memory(memory * 1e9)
    beside = [recurrent_layers(each, shape.batch) for each in recurrent or ()]
    asked = LayoutRequest(parsed, length, count)
    if strategy is not None:
        made = Plan(parsed, named(layout or "balanced", asked), length, strategy)
        how: Any = {"backward": not inference, "keep_keys": keep_keys}
        over = [each.over(made.layout, parsed, length) for each in beside]
        how["recurrent"] = RecurrentCost.of(over, machine, backward=not inference)
        found = predicted(made, shape, machine, limit=limit or inf, **how)
        if found.refused:
            raise PlanError(f"--memory: {made.strategy_name} {found.refused}; use more ranks or another strategy")
        if as_json:
            per_rank = [rank_data(made, rank) for rank in sampled_ranks(made)]  # all ranks, or a sample of many
            typer.echo(json.dumps({**candidate_data(found), "per_rank": per_rank}, indent=2))
        else:
            say(f"{made}\n\npredicted on {machine.name}, the slowest rank:\n{found.timeline}")
            if found.recurrent:
                say(f"recurrent layers: {found.recurrent}")
        return
    choice = choose(
        parsed,
        seq_len=length,
        ranks=count,
        shape=shape,
        hardware=machine,
        memory=limit,
        layouts=None if layout is None else [named(layout, asked)],
        backward=not inference,
        keep_keys=keep_keys,
        recurrent=beside,
    )
    if as_json:
        typer.echo(json.dumps(data(choice), indent=2))
    else:
        say(text(choice, inference))


def recurrent_layers(text: str, batch: int) -> RecurrentLayers:
    """Layers as an option tells them: the rule, heads x key dim x value dim, and how many for each attention layer.

    >>> recurrent_layers("KDA:32x128x128:3", 1)
    RecurrentLayers(rule='KDA', heads=32, key_dim=128, value_dim=128, count=3.0, batch=1, dtype='float32')
    """
    form = re.fullmatch(r"(\w+):(\d+)x(\d+)x(\d+)(?::([\d.]+))?", text)
    if form is None:
        raise PlanError(f"--recurrent must be RULE:HEADSxKEYSxVALUES or RULE:HEADSxKEYSxVALUES:COUNT, got {text!r}")
    rule, heads, keys, values, count = form.groups()
    try:
        return RecurrentLayers(rule, int(heads), int(keys), int(values), float(count or 1), batch)
    except ValueError as refusal:
        raise PlanError(f"--recurrent: {refusal}") from None


def rank_data(made: Plan, rank: int) -> dict[str, Any]:
    """What one rank does, over all batch rows."""
    rows = [made.steps(rank, row) for row in range(made.batch_rows)]
    return {
        "rank": rank,
        "tokens": tokens_in(made.layout.runs(made.seq_len, rank)),
        "work": made.work(rank),
        "received_keys": sum(made.received(rank).values()),
        "peak_keys": made.peak_keys(rank),
        "steps": len(rows[0]),
        "tiles": sum(len(step.tiles) for steps in rows for step in steps),
    }


def text(choice: Choice, inference: bool) -> str:
    """The comparison for people."""
    best, machine = choice.candidates[0], choice.hardware
    what = "forward" if inference else "forward and backward"
    return "\n".join(
        [
            f"{what} on {machine.name}: {machine.note}",
            choice.explain(),
            "",
            f"take {best.plan.strategy_name} with {type(best.plan.layout).__name__}: "
            f"{in_seconds(best.seconds)} predicted, {in_bytes(best.peak)} of keys at most, "
            f"{in_seconds(best.timeline.exposed)} of it waiting",
            *([f"recurrent layers: {best.recurrent}"] if best.recurrent else []),
            str(best.timeline),
        ]
    )


def data(choice: Choice) -> dict[str, Any]:
    """The comparison for machines."""
    return {
        "hardware": choice.hardware.name,
        "chosen": choice.plan.strategy_name,
        "candidates": [candidate_data(candidate) for candidate in choice.candidates],
    }


def candidate_data(candidate: Candidate) -> dict[str, Any]:
    return {
        "strategy": candidate.plan.strategy_name,
        "layout": type(candidate.plan.layout).__name__,
        "ranks": candidate.plan.ranks,
        "seq_len": candidate.plan.seq_len,
        "imbalance": candidate.imbalance,
        "moved_bytes_per_rank": candidate.moved,
        "peak_kv_bytes": candidate.peak,
        "kept_kv_bytes": candidate.kept,
        "timeline": {name: getattr(candidate.timeline, name) for name in ("rank", "seconds", "computing", "exposed")},
        "refused": candidate.refused or None,
        **({"runs": candidate.runs, "recurrent": candidate.recurrent._asdict()} if candidate.recurrent else {}),
    }
