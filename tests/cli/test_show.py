"""`attnspan show`: what it draws, what it says to machines, and how it refuses."""

import json

import pytest
from typer.testing import CliRunner

from attnspan.cli import layout as cli_layout
from attnspan.cli.app import app
from attnspan.cli.expression import parse
from attnspan.layouts import HeadTail
from attnspan.masks import Causal, Documents, KeyPadding


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    """No terminal, whatever the machine that runs the tests pretends."""
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def shown(*arguments):
    done = run("show", *arguments)
    assert (done.exit_code, done.stderr) == (0, "")
    return "\n".join(line.rstrip() for line in done.stdout.splitlines())


def data(*arguments):
    return json.loads(shown(*arguments, "--json"))


def test_a_mask_alone():
    assert shown("docs(1, 3)") == (
        """\
documents(1, 3)
█ · · ·
· █ █ █
· █ █ █
· █ █ █
10 of 16 pairs allowed (62.5%), in 2 bands"""
    )


def test_a_mask_and_who_owns_its_rows():
    assert shown("causal & docs(3, 5)", "--layout", "head_tail", "--ranks", 2) == (
        """\
causal & documents(3, 5)
r0 | █ · · · · · · ·
r0 | █ █ · · · · · ·
r1 | █ █ █ · · · · ·
r1 | · · · █ · · · ·
r1 | · · · █ █ · · ·
r1 | · · · █ █ █ · ·
r0 | · · · █ █ █ █ ·
r0 | · · · █ █ █ █ █
21 of 64 pairs allowed (32.8%), in 2 bands
HeadTail over 2 ranks: imbalance 1.143
rank 0: 4 tokens, 12 pairs, [0, 2) [6, 8)
rank 1: 4 tokens, 9 pairs, [2, 6)"""
    )


def test_more_keys_than_queries():
    assert shown("causal(align=bottom)", "--seq-len", 2, "--kv-len", 4, "--layout", "striped", "--ranks", 3) == (
        """\
causal(align=bottom)
r0 | █ █ █ ·
r1 | █ █ █ █
7 of 8 pairs allowed (87.5%), in 1 band
Striped with chunks of 1 over 3 ranks: imbalance 1.714
rank 0: 1 tokens, 3 pairs, [0, 1)
rank 1: 1 tokens, 4 pairs, [1, 2)
rank 2: 0 tokens, 0 pairs, nothing"""
    )


def test_one_batch_row_of_several():
    assert shown("padding(1, 3)", "--seq-len", 3, "--row", 1, "--layout", "contiguous", "--ranks", 1) == (
        """\
key_padding(1, 3), batch row 1 of 2
r0 | █ █ █
r0 | █ █ █
r0 | █ █ █
9 of 9 pairs allowed (100.0%), in 1 band
Contiguous over 1 rank: imbalance 1.000 (1.000 over the batch)
rank 0: 3 tokens, 9 pairs, [0, 3)"""
    )


def test_a_line_of_several_owners_says_how_many():
    lines = shown("full", "--seq-len", 64, "--layout", "striped", "--ranks", 3).splitlines()
    assert [line[:7] for line in lines[1:4]] == ["r0+1 | ", "r0+1 | ", "r1+1 | "]
    assert lines[33] == "(r1+2: a line whose queries lie on rank 1 and 2 others)"


def test_many_ranks_and_runs_are_cut_short():
    lines = shown("full", "--seq-len", "1k", "--layout", "striped", "--chunk", 2, "--ranks", 40).splitlines()
    assert lines[-1] == "... 8 more ranks; --json lists them all"
    assert lines[-2] == "rank 31: 26 tokens, 26624 pairs, [62, 64) [142, 144) [222, 224) [302, 304) ... 9 more"
    assert len(data("full", "--layout", "striped", "--ranks", 40)["layout"]["runs"]) == 40


def test_the_length_is_the_masks_own_or_32():
    assert data("docs(3, 5)")["seq_len"] == 8
    assert data("causal")["seq_len"] == 32
    assert data("causal", "--seq-len", "1M")["work"] == Causal().work(2**20)


def test_a_terminal_gets_a_colour_per_rank(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    done = run("show", "full", "--seq-len", 2, "--layout", "contiguous", "--ranks", 2)
    assert "\x1b[36mr0 | █ █\x1b[0m\n\x1b[33mr1 | █ █\x1b[0m\n" in done.stdout


def test_json_is_the_whole_answer():
    assert data("causal & docs(3, 5)", "--layout", "HeadTail", "--ranks", 2) == {
        "mask": "causal & documents(3, 5)",
        "seq_len": 8,
        "kv_len": 8,
        "row": 0,
        "rows": 1,
        "work": 21,
        "density": 21 / 64,
        "bands": [
            {"q0": 0, "q1": 3, "k0": 0, "k1": 3, "lo": -2, "hi": 0},
            {"q0": 3, "q1": 8, "k0": 3, "k1": 8, "lo": -4, "hi": 0},
        ],
        "layout": {
            "name": "HeadTail",
            "chunk": None,
            "ranks": 2,
            "imbalance": 24 / 21,
            "batch_imbalance": 24 / 21,
            "tokens": [4, 4],
            "work": [12, 9],
            "runs": [
                [{"start": 0, "stop": 2, "step": 1}, {"start": 6, "stop": 8, "step": 1}],
                [{"start": 2, "stop": 6, "step": 1}],
            ],
        },
    }


@pytest.mark.parametrize("name", list(cli_layout.LAYOUTS))
@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_every_layout_deals_every_token_and_all_the_work(name, ranks):
    found = data("causal & docs(20, 1, 43)", "--layout", name, "--ranks", ranks)
    runs = [range(*run.values()) for rank in found["layout"]["runs"] for run in rank]
    assert sorted(position for run in runs for position in run) == list(range(64))
    assert sum(found["layout"]["work"]) == found["work"]
    assert sum(found["layout"]["tokens"]) == 64
    assert max(found["layout"]["work"]) * ranks / found["work"] == found["layout"]["imbalance"]


def test_the_imbalance_of_the_batch_is_the_layouts_own():
    found = data("padding(1, 8) & causal", "--seq-len", 8, "--layout", "head_tail", "--ranks", 3)
    mask = KeyPadding([1, 8]) & Causal()
    assert found["layout"]["batch_imbalance"] == HeadTail(ranks=3).imbalance(mask, 8)
    assert found["layout"]["imbalance"] != found["layout"]["batch_imbalance"]


def test_the_expression_in_json_reads_back(tmp_path):
    (tmp_path / "lengths.txt").write_text("3 3 2", encoding="utf-8")
    assert parse(data(f"@{tmp_path}/lengths.txt")["mask"]) == Causal() & Documents([3, 3, 2])


NAMES = "contiguous, head_tail, striped, per_document, round_robin_by_work, balanced"
PER_DOCUMENT = (
    "--layout per_document needs a mask with one list of documents, got {}; "
    "write one, as in causal & documents(4096, 1000)"
)
NUMBER = "expected a whole number such as 4096, 4_096, 64k (x 1024) or 1M (x 1024 x 1024)"


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["causal &"], "expected a mask, got the end\n    causal &\n            ^"),
        (["causal", "--seq-len", "0"], "--seq-len must be a whole number >= 1, got 0"),
        (["causal", "--seq-len", "1G"], f"--seq-len: {NUMBER}, got '1G'"),
        (["padding(1, 3)", "--row", "2"], "row must be below the mask's 2 batch rows, got 2"),
        (
            ["causal", "--layout", "head_tail"],
            "--layout needs --ranks, got none; as in --layout head_tail --ranks 4",
        ),
        (["causal", "--ranks", "2"], "--ranks needs --layout, got none; as in --layout head_tail --ranks 4"),
        (["causal", "--chunk", "2"], "--chunk needs --layout, got none; as in --layout head_tail --ranks 4"),
        (["causal", "--layout", "balanced", "--ranks", "0"], "--ranks must be a whole number >= 1, got 0"),
        (
            ["causal", "--layout", "headtale", "--ranks", "2"],
            f"--layout must be one of {NAMES}, got 'headtale'; did you mean 'head_tail'?",
        ),
        (
            ["causal", "--layout", "head_tail", "--ranks", "2", "--chunk", "4"],
            "--chunk is for the layouts striped, round_robin_by_work, balanced, got head_tail; leave --chunk out",
        ),
        (["causal", "--layout", "per_document", "--ranks", "2"], PER_DOCUMENT.format(0)),
        (["docs(3, 5) & docs(8)", "--layout", "per_document", "--ranks", "2"], PER_DOCUMENT.format(2)),
    ],
)
def test_a_refusal_is_one_message_on_stderr(arguments, message, as_json):
    done = run("show", *arguments, *(["--json"] if as_json else []))
    assert (done.exit_code, done.stdout, done.stderr) == (2, "", f"attnspan: {message}\n")


def test_lengths_that_do_not_sum_to_the_sequence_are_pointed_at():
    done = run("show", "causal & docs(3, 5)", "--seq-len", 9)
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith("attnspan: lengths must sum to q_len (9), got 2 documents with sum 8")
    assert done.stderr.endswith("\n    causal & docs(3, 5)\n             ^^^^^^^^^^\n")


def test_a_bug_is_not_dressed_up_as_a_refusal(monkeypatch):
    monkeypatch.setattr("attnspan.cli.show.parse", lambda text, seq_len: 1 // 0)
    assert isinstance(run("show", "causal").exception, ZeroDivisionError)


@pytest.mark.parametrize("arguments", [["shw"], ["show"], ["show", "causal", "--sequence"]])
def test_a_command_line_that_cannot_be_read_is_refused(arguments):
    done = run(*arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    assert "Error: " in done.stderr
