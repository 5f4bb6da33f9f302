"""A page holds what the mask, the layouts and the timelines are, and draws it in a browser."""

import json
import re
import shutil
import subprocess

import pytest
import torch
from typer.testing import CliRunner

from attnspan.cli.app import app
from attnspan.inspector import page
from attnspan.inspector.page import Drawn, page_data, write_page
from attnspan.layouts import Balanced, Contiguous, HeadTail, Striped
from attnspan.masks import Causal, Documents, SlidingWindow
from attnspan.plan import Plan
from attnspan.plan.timeline import predict

MASK = Causal() & Documents([[40, 24], [64]])
LAYOUTS = {"balanced": Balanced(MASK, ranks=3, chunk=1), "striped": Striped(ranks=2), "one": Contiguous(1)}
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


def pairs(q0, q1, k0, k1, lo, hi):
    return [(q, k) for q in range(q0, q1) for k in range(k0, k1) if lo <= k - q <= hi]


@pytest.mark.parametrize("row", [0, 1])
def test_it_holds_the_mask_the_owners_and_the_work(row):
    data = json.loads(json.dumps(page_data(Drawn(MASK, 64, LAYOUTS, row))))
    allowed = torch.zeros(64, 64, dtype=torch.bool)
    for band in data["bands"]:
        for q, k in pairs(*band):
            allowed[q, k] = True
    assert torch.equal(allowed, MASK.dense(64, row=row))
    for each, layout in zip(data["layouts"], LAYOUTS.values(), strict=True):
        owners = {q: rank for rank, runs in enumerate(each["runs"]) for run in runs for q in range(*run)}
        assert [owners[q] for q in range(64)] == [layout.owner(64, q) for q in range(64)]
        seen = allowed.sum(1).tolist()
        assert each["work"] == [sum(n for q, n in enumerate(seen) if owners[q] == r) for r in range(layout.ranks)]
        assert sum(each["tokens"]) == 64


def test_timelines_are_those_of_the_plan():
    drawn = Drawn(Causal(), 4096, {"head_tail": HeadTail(4)})
    data = page_data(drawn)
    [layout] = data["layouts"]
    assert [each["name"] for each in layout["strategies"]] == [*page.STRATEGIES]
    for each in layout["strategies"]:
        plan = Plan(Causal(), HeadTail(4), 4096, each["name"])
        for rank, events in enumerate(each["ranks"]):
            expected = predict(plan, rank, drawn.shape, drawn.hardware, backward=True)
            found = [(data["labels"][what], "link" if lane else "compute") for lane, _, _, what in events]
            assert found == [(event.what, event.lane) for event in expected.events]
            assert max(stop for _, _, stop, _ in events) == pytest.approx(expected.seconds * 1e6, abs=0.01)


def test_what_would_be_too_long_to_show_is_left_out(monkeypatch):
    monkeypatch.setattr(page, "MOST_EVENTS", 60)
    few = page_data(Drawn(Causal(), 4096, {"head_tail": HeadTail(4)}))["layouts"][0]["strategies"]
    assert 0 < len(few) < len(page.STRATEGIES)
    monkeypatch.setattr(page, "MOST_PIECES", 3)
    [none] = page_data(Drawn(SlidingWindow(3), 64, {"striped": Striped(ranks=2)}))["layouts"]
    assert none["strategies"] == []


def test_it_is_one_file_that_needs_nothing_else(tmp_path):
    written = write_page(Drawn(MASK, 64, LAYOUTS), tmp_path / "mask.html").read_text(encoding="utf-8")
    assert '"DATA"' not in written
    assert re.findall(r"https?:|src=|@import|url\(", written) == []


def test_the_command_writes_it_with_the_layout_that_was_asked_for_first(tmp_path):
    asked = [
        "show",
        "causal & documents(40, 24)",
        "--layout",
        "head_tail",
        "--ranks",
        "2",
        "--html",
        str(tmp_path / "a.html"),
    ]
    done = CliRunner().invoke(app, asked)
    assert (done.exit_code, done.output) == (0, f"saved to {tmp_path / 'a.html'}\n")
    data = json.loads(re.search(r"const DATA = (.*);\n", (tmp_path / "a.html").read_text())[1])
    names = [each["name"] for each in data["layouts"]]
    assert names == ["HeadTail", "Contiguous", "Striped", "PerDocument", "RoundRobinByWork", "Balanced"]
    done = CliRunner().invoke(app, ["show", "causal", "--seq-len", "8", "--kv-len", "9", "--html", "x.html"])
    assert done.exit_code == 2
    assert "--html draws a mask of as many keys as queries, got 9 and 8" in done.output


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="Chromium is not installed")
@pytest.mark.parametrize("tokens", [64, 1 << 20])
def test_a_browser_draws_every_row_and_every_event(tmp_path, tokens):
    mask = Causal() & Documents([tokens // 64] * 64)
    drawn = Drawn(mask, tokens, {"balanced": Balanced(mask, ranks=8, chunk=1 if tokens == 64 else 128)})
    written = write_page(drawn, tmp_path / "mask.html")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
    command = [BROWSER, *flags, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", written.as_uri()]
    page_text = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    rows = min(620, tokens)  # of the screen; each query of such a mask sees one stretch of keys
    assert int(re.search(r'data-spans="(\d+)"', page_text)[1]) == rows
    first = page_data(drawn)["layouts"][0]["strategies"][0]
    assert int(re.search(r'data-events="(\d+)"', page_text)[1]) == sum(map(len, first["ranks"]))
