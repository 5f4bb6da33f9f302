"""The benchmark of an engine's steps runs through on a CPU, with tiny models."""

import pytest

from benchmarks import engine_steps
from benchmarks.engine_steps import Bench, Shape, kind_of


def test_every_kind_of_cell_is_measured_and_written_down(tmp_path, capsys):
    cells = [
        "checks",
        "1.1B 1 x 512",
        "1.1B 64 x 512 plain",
        "8B prefill",
        "8B first tokens",
        "8B arrivals",
        "attention alone",
        "1.1B 64 x 2k int8",
    ]
    failed = engine_steps.main([*cells, "--device", "cpu", "--out", str(tmp_path / "page.md")])
    assert failed == []
    page = (tmp_path / "page.md").read_text()
    assert "| 1.1B | float32 | 1 x 512 | " in page
    assert "| 1.1B | int8 | 64 x 2048 | " in page
    assert "| 8B, 32 x 512, first after warm_up (" in page
    assert "| 1.1B | float32 | 64 x 512, plain | " in page
    assert "| 8B, 64 requests | " in page
    assert page.count("## ") == 4
    assert "Greedy tokens in float32 equal to those of `model.generate`: 8 of 8 answers" in " ".join(page.split())
    assert "\ndecode 1.1B int8 64 x 2048: " in capsys.readouterr().out


def test_no_cell_begins_after_the_limit_and_one_that_fails_ends_no_other(tmp_path):
    def failing(bench):
        raise ValueError("of a cell")

    bench, page = Bench("cpu", 60.0, tmp_path / "page.md"), tmp_path / "page.md"
    assert bench.run({"first": failing, "attention": engine_steps.attention}) == ["first"]
    assert "Failed: first (ValueError: of a cell)." in page.read_text()
    assert "none on a CPU" in page.read_text()
    late = Bench("cpu", -1.0, page)
    assert late.run({"first": failing}) == []
    assert "Not measured, for want of time: first." in page.read_text()


def test_tests_come_first_and_are_told_last(monkeypatch, capsys):
    monkeypatch.setattr(engine_steps, "TESTS", ("tests/test_pace.py",))
    assert engine_steps.main(["attention alone", "--device", "cpu", "--tests"]) == []
    assert " passed" in capsys.readouterr().out.splitlines()[-1]
    monkeypatch.setattr(engine_steps, "TESTS", ("tests/none.py",))
    passed, said = engine_steps.tested()
    assert not passed
    assert said.startswith("Tests: no tests ran")


def test_cells_that_there_are_not_are_refused(capsys):
    with pytest.raises(SystemExit):
        engine_steps.main(["7B", "--device", "cpu"])
    assert "no cells of these names: 7B; there are checks, 1.1B 64 x 512, " in capsys.readouterr().err


def test_weights_that_a_step_reads_are_those_of_the_model():
    shape = Shape("tiny", 64, 96, 2, 4, 2, 16, 97)
    model = shape.model("cpu", engine_steps.torch.float32)
    matrices = {name: each.numel() for name, each in model.named_parameters() if each.dim() == 2}
    del matrices["model.embed_tokens.weight"]
    assert shape.read_weights == sum(matrices.values())


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("nvjet_tst_64x8_64x16_4x1_v_bz_TNT", "matmuls"),
        ("attend_split", "attention"),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MaxOps<float>>>", "sampling"),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float>>>", "small"),
        ("Memcpy HtoD (Pinned -> Device)", "copies"),
    ],
)
def test_kernels_are_known_by_their_names(kernel, kind):
    assert kind_of(kernel) == kind
