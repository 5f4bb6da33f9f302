"""Options that several commands have, each written once: a mask, the sizes of an attention, and where it runs."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import typer

from attnspan.cli.expression import parse, write
from attnspan.cli.tokens import optional_size, size
from attnspan.errors import PlanError
from attnspan.masks import Mask
from attnspan.plan import Shape
from attnspan.plan.cost import DTYPES

MASK_HELP = 'For example "causal & documents(3, 5)". @lengths.txt alone: causal & documents of these lengths.'
MaskText = Annotated[str, typer.Argument(metavar="MASK", help=MASK_HELP)]
SeqLenOption = Annotated[str | None, typer.Option(metavar="N", help="Tokens. Default: the mask's own length.")]
HeadsOption = Annotated[str, typer.Option(metavar="N", help="Query heads.")]
KvHeadsOption = Annotated[str | None, typer.Option(metavar="N", help="Key heads. Default: as many as query heads.")]
HeadDimOption = Annotated[str, typer.Option(metavar="N", help="Head dim.")]
BatchOption = Annotated[str | None, typer.Option(metavar="N", help="Batch rows. Default: the rows of the mask.")]
DtypeOption = Annotated[str, typer.Option(metavar="T", help=f"One of {', '.join(DTYPES)}.")]
RanksOption = Annotated[str | None, typer.Option(metavar="R", help="Processes to start. Under torchrun: its ranks.")]
DeviceOption = Annotated[str | None, typer.Option(metavar="D", help="cpu or cuda. Default: cuda if available.")]
VirtualOption = Annotated[bool, typer.Option("--virtual", help="Use virtual ranks: one process, one device.")]
InferenceOption = Annotated[bool, typer.Option("--inference", help="Forward only, not a training step.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON only.")]


class Attended(NamedTuple):
    """What is attended: a mask over a length, and the sizes of the tensors."""

    mask: Mask
    seq_len: int
    shape: Shape


def attended(
    mask: str, seq_len: str | None, heads: str, kv_heads: str | None, head_dim: str, batch: str | None, dtype: str
) -> Attended:
    """The options of that name, read; what is left out is the mask's own."""
    length = optional_size("--seq-len", seq_len)
    parsed = parse(mask, seq_len=length)
    length = length or parsed.natural_len
    if length is None:
        raise PlanError(f"--seq-len must be given: {write(parsed)} has no length of its own")
    rows = optional_size("--batch", batch) or parsed.rows
    parsed.check_rows(rows)
    sizes = size(heads, "--heads"), optional_size("--kv-heads", kv_heads), size(head_dim, "--head-dim")
    return Attended(parsed, length, Shape(*sizes, batch=rows, dtype=dtype))
