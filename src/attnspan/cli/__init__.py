"""The command line: `attnspan show MASK` draws a mask. See expression.py for how masks are written.

A command is one file with one function, listed in app.py.
"""

import sys


def main() -> None:
    """Run the command line, or say which extra it needs."""
    try:
        from attnspan.cli.app import app
    except ModuleNotFoundError as missing:
        if (missing.name or "").split(".")[0] not in ("rich", "typer"):
            raise
        print(f'attnspan: {missing.name} is not installed; run pip install "attnspan[cli]"', file=sys.stderr)
        raise SystemExit(2) from None
    app(prog_name="attnspan")
