"""The benchmark of compute over ranks runs through on a CPU, with a stand-in for FlashAttention-4 and no times."""

import pytest
import torch

from attnspan.layouts import Contiguous, HeadTail
from attnspan.masks import Causal, SlidingWindow
from benchmarks import bench_cp
from benchmarks.bench_cp import ONE_STEP, Work, packed
from tests.kernels.test_flash4 import standing_in

WORKS = {
    "causal": Work(Causal(), HeadTail(8), 128, ("fa4",), kv_heads=8, target=(1.06, 1.12)),
    "documents": packed(256, 2, target=(520, None)),
    "window": Work(SlidingWindow(9), Contiguous(3), 96, ("fa4",), ONE_STEP, window=9),
}


@pytest.fixture
def on_cpu(monkeypatch):
    """Every function is called once, and takes as many milliseconds as there were calls before."""
    calls = []
    monkeypatch.setattr(bench_cp, "DEVICE", "cpu")
    monkeypatch.setattr(bench_cp, "DIM", 24)
    monkeypatch.setattr(bench_cp, "works", lambda: WORKS)
    monkeypatch.setattr(bench_cp, "merging", lambda: "Merge: not measured.")
    monkeypatch.setattr(bench_cp, "timed", lambda fn: (fn(), calls.append(fn), float(len(calls)))[-1])
    monkeypatch.setattr(bench_cp, "torch_ring", lambda work, rank: (1.0, 1.0))
    return calls


def test_ceilings_and_schedules_are_measured_and_written_down(on_cpu, tmp_path, capsys):
    with standing_in() as log:
        bench_cp.main(["--out", str(tmp_path / "page.md")])
    assert {"forward", "backward"} <= set(log)
    page = (tmp_path / "page.md").read_text()
    for name in WORKS:
        rows = [line for line in page.splitlines() if line.startswith(f"| {name} | ")]
        assert [line.split(" | ")[1].split(", ")[1] for line in rows] == ["auto", "flash4"]
        assert all("(fa4)" in line for line in rows)
    assert "520 / -" in page
    assert capsys.readouterr().out.splitlines()[-1].startswith("window: needed, flash4: **")


def test_what_is_refused_is_told_with_its_reason(on_cpu, tmp_path):
    with standing_in(version=None):
        bench_cp.main(["causal", "--out", str(tmp_path / "page.md")])
    page = (tmp_path / "page.md").read_text()
    assert "flash-attn-4: not installed." in page
    assert "flash4 needs the package flash-attn-4, which is not installed" in page


def test_a_run_that_is_cut_short_leaves_what_it_has(on_cpu, tmp_path, monkeypatch):
    def cut(work):
        if work is WORKS["documents"]:
            raise KeyboardInterrupt
        return None

    monkeypatch.setattr(bench_cp, "one_device", cut)
    with standing_in(), pytest.raises(KeyboardInterrupt):
        bench_cp.main(["--out", str(tmp_path / "page.md")])
    assert "| causal | needed, flash4 |" in (tmp_path / "page.md").read_text()


def test_the_works_are_those_of_the_targets():
    known = bench_cp.works()
    for name, work in known.items():
        assert sum(work.layout.tokens(work.seq_len)) == work.seq_len
        assert len(bench_cp.busiest(work)) == min(work.ranks, bench_cp.MAX_RANKS), name
    assert known["documents, 8k a rank, 64 ranks"].seq_len == 64 * 8192
    assert known["causal 64k"].flops == 2 * 65536 * 65537 * 32 * 128
    assert torch.tensor([work.heads for work in known.values()]).max() == 64
