"""The commands, and how they refuse: one message on stderr, no traceback, exit code 2."""

from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from attnspan._version import __version__
from attnspan.cli import bench, doctor, generate, models, plan, serve, show, tune
from attnspan.errors import AttnspanError

COMMANDS: list[Callable[..., None]] = [
    show.show,
    plan.plan,
    doctor.doctor,
    bench.bench,
    tune.tune,
    generate.generate,
    serve.serve,
    models.models,
]  # a new command: one file with one function, and its entry here


class Refusing(TyperGroup):
    """A group whose commands may raise any error of this library."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except AttnspanError as error:
            typer.echo(f"attnspan: {error}", err=True)
            raise typer.Exit(2) from None


app = typer.Typer(
    cls=Refusing,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in COMMANDS:
    app.command()(command)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def attnspan(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Exact context-parallel attention: draw masks, compare strategies, measure, generate, serve.

    MASK is an expression such as "causal & documents(4096, 1000, 2904)". Patterns: full, causal, window,
    documents, prefix, chunked, sinks, padding, tree. Operators: & | ~. With window(3) a token sees itself and the 3
    tokens before it. "documents(@lengths.txt)" reads document lengths from a file, and @lengths.txt alone means
    "causal & documents(@lengths.txt)". In numbers, k is 1024 and M is 1024 * 1024.
    """
