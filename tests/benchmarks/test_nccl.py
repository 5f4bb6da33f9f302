"""The benchmark of NCCL ranks, on gloo ranks: it runs, and does not take a wrong result for a fast one."""

import json

import pytest
import torch

from attnspan.errors import RankError
from attnspan.measure.checkup import dense, differentiated
from benchmarks import nccl
from benchmarks.nccl import AGAIN, ALONE, AUTO, STRATEGIES, UNFINISHED, Book, Cell, Found
from tests.processes import Patient

SMALL = ("--device", "cpu", "--tokens", "256", "--cells", "2 ranks, 32:1, documents")


def test_strategies_are_measured_and_rivals_that_cannot_run_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(nccl.span.testing, "processes", Patient)
    nccl.main([*SMALL, "--out", str(tmp_path / "page.md")])
    found = {row["contender"]: Found(**row) for row in json.loads((tmp_path / "page.json").read_text())}
    assert {name for name, each in found.items() if each.right} == {*STRATEGIES, AUTO, AGAIN, ALONE}
    reason = "flex_attention has no backward on a CPU"
    assert {each.reason for name, each in found.items() if name.startswith("torch")} == {reason}
    page = (tmp_path / "page.md").read_text()
    assert "| 2 | 256 | 32:1 | no [1] | no [1] | " in page
    assert f"[1] {reason}" in page

    monkeypatch.setattr(nccl.span.testing, "processes", lambda *_, **__: pytest.fail("all is known"))
    nccl.main([*SMALL, "--resume", "--out", str(tmp_path / "page.md")])
    assert (tmp_path / "page.md").read_text() == page


def test_what_takes_its_ranks_down_is_written_off_and_the_rest_runs(tmp_path, monkeypatch):
    cell, out, started = Cell(2, 256, 32, 1, "documents"), tmp_path / "page.md", []

    class Ranks:
        def __init__(self, *_, **__):
            started.append(Book(out, resume=True).lacks(cell))

        def run(self, fn, job):
            book = Book(out, resume=True)
            if len(started) == 1:
                book.add(Found(str(cell), "ring", reason=UNFINISHED))
                raise RankError("rank 1 was ended by SIGABRT")
            book.add(Found(str(cell), "gather", 12.0, 0.001))

    monkeypatch.setattr(nccl.span.testing, "processes", Ranks)
    nccl.main([*SMALL, "--out", str(out)])
    first, second = started
    assert set(first) - set(second) == {"ring"}
    assert f"[1] {UNFINISHED}" in out.read_text()
    assert " | no [1] | **12.0** |" in out.read_text()


def test_a_wrong_result_is_marked_and_is_nobodys_best(tmp_path):
    book = Book(tmp_path / "page.md")
    cell = str(Cell(2, 16384, 32, 8, "causal"))
    for name, ms, error in (
        ("torch alltoall", 300.0, 0.01),
        ("torch allgather", 10.0, 0.9),
        ("ring", 200.0, 0.01),
        ("gather", 150.0, 0.01),
        ("auto", 180.0, 0.01),
        ("one device", 120.0, 0.01),
    ):
        book.add(Found(cell, name, ms, error))
    page = nccl.page(book, "python -m benchmarks.nccl")
    assert "| **300** | 10.0 wrong |  | 200 | **150** |" in page
    assert "**2.00 to 2.00**; at least 1.5 in **1 of 1** cells" in page
    assert "**2.50 to 2.50**; less than 1.5 in **0 of 1** cells" in " ".join(page.split()), (
        "what one device takes is the limit"
    )
    assert "`auto` over our best: **1.20 to 1.20**" in page
    assert f"Wrong results: {cell}: torch allgather 10.0 ms, WRONG, error 0.9000." in page


def test_cells_are_chosen_by_their_parts():
    everything = nccl.cells(nccl.TOKENS, ())
    assert len(everything) == len(set(map(str, everything))) == 36
    some = nccl.cells(nccl.TOKENS, ["4 ranks, causal", "32:1, 16k"])
    assert all({"4 ranks", "causal"} <= set(cell.parts) or {"32:1", "16k"} <= set(cell.parts) for cell in some)
    assert len(some) == 6 + 6 - 1
    for bad in (["--cells", "5 ranks"], ["--tokens", "64"]):
        with pytest.raises(SystemExit):
            nccl.main(bad)


def test_ranks_that_fail_before_any_contender_are_not_started_for_ever(tmp_path, monkeypatch):
    class Ranks:
        def __init__(self, *_, **__):
            pass

        def run(self, fn, job):
            raise RankError("no memory")

    monkeypatch.setattr(nccl.span.testing, "processes", Ranks)
    nccl.main([*SMALL, "--out", str(tmp_path / "page.md")])
    assert json.loads((tmp_path / "page.json").read_text()) == []


@pytest.mark.parametrize("mask", ["causal", "documents", "window"])
def test_masks_and_reference_are_what_they_say(mask):
    cell = Cell(2, 256, 4, 2, mask)
    built = cell.built()
    rows = torch.arange(cell.tokens)
    assert torch.equal(cell.mask_mod("cpu")(0, 0, rows[:, None], rows), built.dense(cell.tokens))
    assert (sum(cell.lengths), {length % 8 for length in cell.lengths}) == (256, {0})
    *inputs, grad = (x.double() for x in nccl.data(cell, "cpu"))
    leaves = [x.requires_grad_() for x in inputs]
    out = dense(built, *leaves)
    true = [out.detach(), *torch.autograd.grad(out, leaves, grad)]
    found = nccl.reference(cell.mask_mod("cpu"), nccl.data(cell, "cpu"))
    assert nccl.error(found, true, rows) < 1e-5
    off = differentiated(inputs, lambda q, k, v: dense(built, q, k, v) * 1.25)
    assert nccl.error(off[:1], true[:1], rows) > nccl.TOLERANCE, "an error of a quarter is seen"


def test_who_may_be_the_fastest_of_a_side_goes_on():
    first = {
        "torch flex, PTRR": 1.0,
        "torch alltoall": 1.7,
        "ring": 5.0,
        "needed": 3.3,
        AUTO: 9.0,
        AGAIN: 5.3,
        ALONE: 0.1,
    }
    assert nccl.near(first) == ["torch flex, PTRR", "ring", "needed", AUTO, ALONE]


def test_every_cell_is_compiled_for_once(tmp_path, monkeypatch):
    given = []

    class Ranks:
        def __init__(self, ranks, *_, **__):
            self.ranks = ranks

        def run(self, fn, job):
            assert fn is nccl.compile_cells
            assert {cell.ranks for cell in job.cells} == {self.ranks}
            given.extend(job.cells)

    monkeypatch.setattr(nccl.span.testing, "processes", Ranks)
    wanted = nccl.cells((512,), ())
    nccl.compile_first(wanted, nccl.Job((), "cpu", tmp_path / "page.md", "", 0.0))
    assert sorted(map(str, given)) == sorted(map(str, wanted))
