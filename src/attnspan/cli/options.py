"""Options that several commands have, each written once: a mask, and the sizes of an attention."""

from __future__ import annotations

from typing import Annotated

import typer

from attnspan.plan.cost import DTYPES

MASK_HELP = 'For example "causal & documents(3, 5)". @lengths.txt alone: causal & documents of these lengths.'
MaskText = Annotated[str, typer.Argument(metavar="MASK", help=MASK_HELP)]
SeqLenOption = Annotated[str | None, typer.Option(metavar="N", help="Tokens. Default: the mask's own length.")]
HeadsOption = Annotated[str, typer.Option(metavar="N", help="Query heads.")]
KvHeadsOption = Annotated[str | None, typer.Option(metavar="N", help="Key heads. Default: as many as query heads.")]
HeadDimOption = Annotated[str, typer.Option(metavar="N", help="Head dim.")]
BatchOption = Annotated[str | None, typer.Option(metavar="N", help="Batch rows. Default: the rows of the mask.")]
DtypeOption = Annotated[str, typer.Option(metavar="T", help=f"One of {', '.join(DTYPES)}.")]
