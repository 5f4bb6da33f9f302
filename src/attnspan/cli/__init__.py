"""The command line: one command per file, such as `attnspan show MASK`. expression.py reads masks.

A command is one file with one function, listed in app.py.
"""

import sys


def main() -> None:
    """Run the command line, or name the extra that it needs."""
    try:
        from attnspan.cli.app import app
    except ModuleNotFoundError as missing:
        if (missing.name or "").split(".")[0] not in ("rich", "typer"):
            raise
        print(f'attnspan: {missing.name} is not installed; run pip install "attnspan[cli]"', file=sys.stderr)
        raise SystemExit(2) from None
    app(prog_name="attnspan")
