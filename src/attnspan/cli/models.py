"""`attnspan models`: which families of the installed transformers are served, or why not.

Each is built from its default config, without weights, and checked as `enable` and `Engine` check a model
(integrations/huggingface/census.py).
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from difflib import get_close_matches
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
        list[str] | None,
        typer.Argument(metavar="[NAME]...", help='Model types or their names, such as llama, Qwen3-Next or "qwen*".'),
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
    unknown = [each for each in names or () if not any(_matches(name, each) for _, name in wanted)]
    if unknown:
        sought = "causal or image-text" if kind == "all" else kind
        version, said = transformers.__version__, " or ".join(unknown)
        hint = _near(unknown[0], [name for each in kinds(kind) for name in families(each)]) or "others are not checked"
        raise ModelError(f"no {sought} family of transformers {version} is called {said}; {hint}")
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
    return not names or any(_matches(name, pattern) for pattern in names)


def _matches(name: str, pattern: str) -> bool:
    """Whether a family is meant, as its model type is written or as its card has it.

    >>> _matches("qwen3_next", "Qwen3-Next"), _matches("qwen3_5", "Qwen3.5"), _matches("qwen3", "qwen")
    (True, True, False)
    """
    return fnmatch(_plain(name), _plain(pattern))


def _plain(name: str) -> str:
    return name.lower().replace("-", "_").replace(".", "_")


def _near(name: str, names: Sequence[str]) -> str:
    """What to ask instead of a name that no family has; empty if nothing is near.

    >>> _near("qwen", ["llama", "qwen2", "qwen3"])
    'did you mean "qwen*"?'
    >>> _near("mistrall", ["llama", "mistral"]), _near("gpt-99", ["llama", "gpt2"])
    ("did you mean 'mistral'?", '')
    """
    if any(_matches(each, f"{name}*") for each in names):
        return f'did you mean "{name}*"?'
    near = get_close_matches(_plain(name), names, n=1, cutoff=0.75)
    return f"did you mean {near[0]!r}?" if near else ""


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
