"""Output fits narrow terminals, loses nothing, and is as it was in files and pipes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from attnspan.cli.app import app
from attnspan.cli.fitting import fit

COMMANDS = [
    ["plan", "causal", "--seq-len", "64k", "--ranks", "8", "--hardware", "h100-nvlink"],
    ["plan", "causal", "--seq-len", "1k", "--ranks", "2", "--strategy", "ring", "--layout", "balanced"],
    ["bench", "causal", "--seq-len", "64", "--heads", "2", "--head-dim", "8", "--dtype", "fp32", "--strategy", "ring"],
    ["doctor"],
    ["show", "causal & documents(3, 5)", "--layout", "balanced", "--ranks", "2", "--chunk", "1"],
]


@given(st.text(alphabet="ab \n█", max_size=200), st.integers(10, 60))
def test_lines_fit_and_say_the_same(text, columns):
    found = fit(text, columns)
    assert found.split() == text.split()
    longest = max(map(len, text.split()), default=0)
    assert all(len(line) <= max(columns, longest + 4) or not line.strip() for line in found.split("\n"))
    assert fit(text, 0) == text


@pytest.mark.parametrize("columns", [60, 80])
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: " ".join(command[:2]))
def test_commands_fit(monkeypatch, command, columns):
    piped = CliRunner().invoke(app, command)
    assert any(len(line) > 60 for line in piped.output.splitlines()) or command[0] == "show"
    monkeypatch.setattr("attnspan.cli.fitting.columns_of", lambda stream: columns)
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    assert [line for line in done.output.splitlines() if len(line) > columns] == []
