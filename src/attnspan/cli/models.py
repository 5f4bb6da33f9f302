"""`attnspan models`: which families of the installed transformers are served, or why not.

Each is built from its default config, without weights, and checked as `enable` and `Engine` check a model
(integrations/huggingface/census.py).
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from fnmatch import fnmatch
from typing import TYPE_CHECKING, Annotated

import typer

from attnspan.cli.fitting import say
from attnspan.cli.options import JsonOption
from attnspan.cli.tune import bar
from attnspan.errors import ModelError

if TYPE_CHECKING:
    from attnspan.integrations.huggingface.census import FamilyReport

COLUMNS = 100
NAMES = 26


def models(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help='Model types, such as llama or "qwen*".')
    ] = None,
    kind: Annotated[str, typer.Option(metavar="K", help="causal, image-text or all.")] = "all",
    as_json: JsonOption = False,
) -> None:
    """Say which families of transformers are served, in training over ranks and in generation, or why not.

    A family is a model type, causal or image-text: encoders and encoder-decoders are not among them. It is checked by
    its default config, without weights. With a NAME, reasons are whole.
    """
    try:
        import transformers

        from attnspan.integrations.huggingface.census import families, family, kinds
    except ImportError:
        raise ModelError('transformers is not installed; run pip install "attnspan[hf]"') from None
    wanted = [(each, name) for each in kinds(kind) for name in families(each) if _is_asked(name, names)]
    unknown = [each for each in names or () if not any(fnmatch(name, each) for _, name in wanted)]
    if unknown:
        sought = "causal or image-text" if kind == "all" else kind
        version, said = transformers.__version__, " or ".join(unknown)
        raise ModelError(f"no {sought} family of transformers {version} is called {said}; others are not checked")
    transformers.logging.set_verbosity_error()
    found = [family(*each) for each in bar(0, "families", wanted)]
    if as_json:
        typer.echo(json.dumps([asdict(each) for each in found], indent=1))
        return
    for each in kinds(kind):
        of_kind = [one for one in found if one.kind == each]
        for line in _lines(each, of_kind, whole=bool(names)) if of_kind else ():
            say(line)


def _is_asked(name: str, names: Sequence[str] | None) -> bool:
    return not names or any(fnmatch(name, pattern) for pattern in names)


def _lines(kind: str, found: Sequence[FamilyReport], whole: bool) -> Iterator[str]:
    """A table of one kind: a line for each family, and its reasons, cut or `whole`."""
    yield f"{kind:{NAMES}} training  generation"
    for each in found:
        served = ["yes" if reason is None else "no" for reason in (each.training, each.generation)]
        reasons = dict.fromkeys(reason for reason in (each.training, each.generation) if reason is not None)
        first, *more = [*_fitted(reasons, whole), ""]
        yield f"{each.name:{NAMES}} {served[0]:9} {served[1]:11} {first}".rstrip()
        yield from (f"{'':{NAMES + 22}} {line}" for line in more if line)
    counts = [sum(reason is None for reason in column) for column in zip(*_reasons(found), strict=True)]
    noun = "family" if len(found) == 1 else "families"
    yield f"{len(found)} {noun}: {counts[0]} served in training, {counts[1]} in generation"


def _reasons(found: Sequence[FamilyReport]) -> list[tuple[str | None, str | None]]:
    return [(each.training, each.generation) for each in found]


def _fitted(reasons: dict[str, None], whole: bool) -> Iterator[str]:
    width = COLUMNS - NAMES - 23
    for reason in reasons:
        lines = textwrap.wrap(reason, width)
        yield from lines if whole else [lines[0] if len(lines) == 1 else f"{reason[: width - 3]}..."]
