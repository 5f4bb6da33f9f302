"""A page holds what the mask, the layouts and the timelines are, and draws it in a browser."""

import html
import json
import re
import shutil
import subprocess

import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from attnspan.cli.app import app
from attnspan.inspector import page
from attnspan.inspector.page import Drawn, page_data, write_page
from attnspan.layouts import Balanced, Contiguous, HeadTail, Striped
from attnspan.masks import Causal, Documents, SlidingWindow
from attnspan.plan import Plan
from attnspan.plan.timeline import predict
from tests.pace import stretched

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
    monkeypatch.setattr(page, "MAX_EVENTS", 60)
    few = page_data(Drawn(Causal(), 4096, {"head_tail": HeadTail(4)}))["layouts"][0]["strategies"]
    assert 0 < len(few) < len(page.STRATEGIES)
    monkeypatch.setattr(page, "MAX_PIECES", 3)
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


needs_browser = pytest.mark.skipif(BROWSER is None, reason="Chromium is not installed")
TELL = """
for (const id of ["mask", "time"]) document.body.dataset[id] = JSON.stringify($(id).getBoundingClientRect());
document.body.dataset.colours = JSON.stringify(DATA.layouts[layout].runs.map((_, rank) => {
  const paint = document.createElement("canvas").getContext("2d");
  paint.fillStyle = colour(rank);
  paint.fillRect(0, 0, 1, 1);
  return [...paint.getImageData(0, 0, 1, 1).data].slice(0, 3);
}));
document.body.dataset.overflow = document.documentElement.scrollWidth - window.innerWidth;
"""


def browse(tmp_path, page_file, *flags, window="1400,1000"):
    """What Chromium says of a page."""
    always = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
    always += ["--hide-scrollbars", f"--window-size={window}", f"--user-data-dir={tmp_path / 'profile'}"]
    command = [BROWSER, *always, *flags, page_file.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=stretched(120), check=True).stdout


def told(tmp_path, drawn, script="", window="1400,1000"):
    """A page that runs a script and tells where things are, and what it tells."""
    written = write_page(drawn, tmp_path / "mask.html")
    written.write_text(written.read_text().replace("</script>", f"{script}{TELL}</script>"))
    body = re.search(r"<body[^>]*>", browse(tmp_path, written, "--dump-dom", window=window))[0]
    found = {name: json.loads(html.unescape(text)) for name, text in re.findall(r'data-(\w+)="([^"]*)"', body)}
    return written, found


@pytest.mark.slow
@needs_browser
@pytest.mark.parametrize("tokens", [64, 1 << 20])
def test_a_browser_draws_every_row_and_every_event(tmp_path, tokens):
    mask = Causal() & Documents([tokens // 64] * 64)
    drawn = Drawn(mask, tokens, {"balanced": Balanced(mask, ranks=8, chunk=1 if tokens == 64 else 128)})
    page_text = browse(tmp_path, write_page(drawn, tmp_path / "mask.html"), "--dump-dom")
    rows = int(re.search(r'data-rows="(\d+)"', page_text)[1])
    assert rows == 64 if tokens == 64 else 500 < rows < 1000  # those of the screen
    assert int(re.search(r'data-spans="(\d+)"', page_text)[1]) == rows  # each query sees one stretch of keys
    first = page_data(drawn)["layouts"][0]["strategies"]
    shown = min(first, key=lambda each: each["end"])  # the fastest
    assert int(re.search(r'data-events="(\d+)"', page_text)[1]) == sum(map(len, shown["ranks"]))


@pytest.mark.slow
@needs_browser
@pytest.mark.parametrize("row", [0, 1])
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_screenshot_has_every_pair_in_the_colour_of_its_rank(tmp_path, name, row):
    script = f"layout = {list(LAYOUTS).index(name)}; show();"
    written, found = told(tmp_path, Drawn(MASK, 64, LAYOUTS, row), script)
    browse(tmp_path, written, f"--screenshot={tmp_path / 'shot.png'}")
    picture = Image.open(tmp_path / "shot.png").convert("RGB")
    box, allowed, layout = found["mask"], MASK.dense(64, row=row), LAYOUTS[name]
    cell = box["width"] / 64

    def seen(q, k):
        return picture.getpixel((round(box["x"] + (k + 0.5) * cell), round(box["y"] + (q + 0.5) * cell)))

    paper = picture.getpixel((2, 2))
    for q in range(64):
        own = tuple(found["colours"][layout.owner(64, q)])
        assert [seen(q, k) for k in range(64)] == [own if allowed[q, k] else paper for k in range(64)]


@pytest.mark.slow
@needs_browser
@pytest.mark.parametrize("window", ["1400,1000", "500,1600"])
def test_a_screenshot_shows_what_every_rank_does_at_any_width(tmp_path, window):
    drawn = Drawn(Causal(), 1 << 17, {"head_tail": HeadTail(64)})
    written, found = told(tmp_path, drawn, window=window)
    browse(tmp_path, written, f"--screenshot={tmp_path / 'shot.png'}", window=window)
    assert found["overflow"] <= 0  # nothing is cut off
    picture = Image.open(tmp_path / "shot.png").convert("RGB")
    box, high = found["time"], (found["time"]["height"] - 28) / 64
    strategies = page_data(drawn)["layouts"][0]["strategies"]
    chosen = min(strategies, key=lambda each: each["end"])
    scale = (box["width"] - 2 - 34 - 8) / max(each["end"] for each in strategies)
    for rank, events in enumerate(chosen["ranks"]):
        long = max((event for event in events if event[0] == 0), key=lambda event: event[2] - event[1])
        x = box["x"] + 1 + 34 + scale * (long[1] + long[2]) / 2
        y = box["y"] + 1 + 4 + rank * high + 0.35 * high
        pixel, own = picture.getpixel((int(x), int(y))), found["colours"][rank]
        assert max(abs(a - b) for a, b in zip(pixel, own, strict=True)) <= 40  # edges of a bar of 4 pixels are blended


@pytest.mark.slow
@needs_browser
def test_hovering_tells_the_figures_and_buttons_switch(tmp_path):
    script = """
    const move = (id, x, y) => { const box = $(id).getBoundingClientRect(); $(id).dispatchEvent(new PointerEvent(
      "pointermove", {clientX: box.left + x * box.width, clientY: box.top + y * box.height})); };
    document.querySelectorAll("#layouts button")[1].click();
    document.querySelectorAll("#strategies button")[1].click();
    document.body.dataset.head = JSON.stringify($("head").textContent);
    move("mask", 0.1 / 64, 40.5 / 64);
    document.body.dataset.told = JSON.stringify($("told").textContent);
    move("time", 0.3, 0.1);
    document.body.dataset.when = JSON.stringify($("when").textContent);
    """
    _, found = told(tmp_path, Drawn(MASK, 64, LAYOUTS), script)
    layout = LAYOUTS["striped"]
    work = layout.works(MASK.bands(64, row=0), 64, 0)
    assert found["head"].endswith(f"on 2 ranks; imbalance {2 * max(work) / sum(work):.3f}")
    asked = f"query 40 on rank {layout.owner(64, 40)} does not see key 0 of rank {layout.owner(64, 0)}\nit sees 1 keys"
    assert found["told"] == asked  # 40 is the first of its document
    assert re.match(r"rank 0 at [\d.]+ (µs|ms): .*\ncomputes [\d.]+ µs, transfers [\d.]+ µs, waits", found["when"])
