"""What a tuning table says, and what it refuses to be."""

import json
from dataclasses import replace

import pytest
import torch

from attnspan.errors import TuningError
from attnspan.kernels import KERNELS, Spec, choose_kernel, kernel_for_tile
from attnspan.layouts import HeadTail
from attnspan.masks import Causal
from attnspan.masks.tile import Tile
from attnspan.plan import Hardware, Link, Plan, Shape, predict
from attnspan.plan import choose as choose_plan
from attnspan.tuning import Rate, Table, store
from attnspan.tuning.store import shipped

CPU = Hardware.of("cpu-gloo")
SHAPE = Shape(4, 2, 64, dtype="float32")


def rate(kernel, kind="full", size=1024, forward=0.1, backward=0.25, dtype="float32", head_dim=64):
    area = size * (size + 1) // 2 if kind == "causal" else size * size
    return Rate(kernel, dtype, head_dim, 4, kind, size, area, forward, backward)


def table(*rates, **changes):
    plain = Table("a cpu", "2.13", "2026-01-01", rates or (rate("cpu_flash"),), 1e10, (1e-5, 2e-5))
    return replace(plain, **changes)


def full(rows, cols=None):
    cols = cols or rows
    return Tile(range(rows), range(cols), 1 - rows, cols - 1)


# ---- how long --------------------------------------------------------------------------------------------------------


def test_a_tile_that_was_measured_is_predicted_to_take_as_long():
    """To the launch: it is added to every tile, and taken out of the rates before."""
    machine = table().hardware(SHAPE, CPU)
    for backward, seconds in ((False, 0.1), (True, 0.25)):
        assert machine.compute([full(1024)], SHAPE.flops, backward=backward) == pytest.approx(seconds)


def test_time_grows_with_the_work():
    machine = table().hardware(SHAPE, CPU)
    one, four = (machine.compute([tile], SHAPE.flops) for tile in (full(1024), full(2048)))
    assert four - 1e-5 == pytest.approx(4 * (one - 1e-5))


def test_auto_is_predicted_at_the_fastest_kernel_and_a_kernel_at_its_own():
    both = table(rate("slow", forward=0.2), rate("fast", forward=0.1))
    seconds = {
        kernel: both.hardware(SHAPE, CPU, kernel).compute([full(1024)], SHAPE.flops)
        for kernel in ("auto", "slow", "fast")
    }
    assert seconds["auto"] == seconds["fast"] == pytest.approx(seconds["slow"] / 2)


def test_what_was_not_measured_is_the_presets():
    machine = table().hardware(SHAPE, CPU)
    tile = Tile(range(64), range(64), -63, 0)
    assert machine.compute([tile], 1e3) == pytest.approx(1e-5 + CPU.compute([tile], 1e3) - CPU.launch)
    assert machine.inside == CPU.inside
    assert machine.links == "", "a preset's"
    linked = table(inside=Link(1e6, 1e-3)).hardware(SHAPE, CPU)
    assert linked.inside == Link(1e6, 1e-3)
    assert linked.links == "measured 2026-01-01 by attnspan tune"


def test_the_nearest_head_dim_is_taken_and_no_other_dtype():
    mixed = table(rate("a", head_dim=64), rate("b", head_dim=128, forward=0.1), rate("c", dtype="bfloat16"))
    assert [c.forward for c in mixed.hardware(Shape(4, 2, 100, dtype="fp32"), CPU).curves] == [
        c.forward for c in table(rate("b", head_dim=128, forward=0.1)).hardware(SHAPE, CPU).curves
    ]
    assert table(rate("c", dtype="bfloat16")).hardware(SHAPE, CPU).curves == ()


def test_a_timeline_goes_by_the_table():
    plan = Plan(Causal(), HeadTail(2), 4096, "gather")
    slow, fast = (
        predict(
            plan,
            0,
            SHAPE,
            table(*(rate("k", kind, forward=t, backward=t) for kind in ("full", "causal"))).hardware(SHAPE, CPU),
        )
        for t in (0.4, 0.2)
    )
    assert slow.computing == pytest.approx(2 * fast.computing, rel=0.05)


def test_a_choice_says_that_rates_were_measured():
    machine = table().hardware(SHAPE, CPU)
    told = choose_plan(Causal(), seq_len=64, ranks=2, shape=SHAPE, hardware=machine).explain().splitlines()
    assert told[-1].startswith("rates: a cpu, measured 2026-01-01 with torch 2.13 by attnspan tune")


# ---- which kernel ----------------------------------------------------------------------------------------------------


def test_kernels_are_ordered_by_time_and_as_measured_where_they_are_as_fast():
    known = table(rate("a", forward=0.3), rate("b", forward=0.1), rate("c", forward=0.1001))
    assert known.order("float32", 64, full(1024)) == ("b", "c", "a")
    assert table(rate("c", forward=0.1001), rate("b", forward=0.1)).order("float32", 64, full(1024)) == ("c", "b")


def test_sizes_have_orders_of_their_own():
    small = [rate("a", size=64, forward=0.01, backward=0.01), rate("b", size=64, forward=0.02, backward=0.02)]
    large = [rate("a", size=4096, forward=2.0, backward=2.0), rate("b", size=4096, forward=1.0, backward=1.0)]
    known = table(*small, *large)
    assert known.order("float32", 64, full(64)) == ("a", "b")
    assert known.order("float32", 64, full(4096)) == ("b", "a")


@pytest.mark.parametrize(
    ("dtype", "head_dim", "tile"),
    [
        ("bfloat16", 64, full(1024)),
        ("float32", 128, full(1024)),
        ("float32", 64, Tile(range(1024), range(1024), -1023, 0)),
        ("float32", 64, full(4)),
    ],
    ids=["another dtype", "another head dim", "another kind", "less than two launches"],
)
def test_a_table_is_silent_on_what_it_did_not_measure(dtype, head_dim, tile):
    assert table().order(dtype, head_dim, tile) == ()


def below(rows, cols):
    """Tiles of one column of tiles, each of 64 rows."""
    return tuple(Tile(range(at, at + 64), range(cols), 1 - at - 64, cols - 1) for at in range(0, rows, 64))


def test_a_kernel_of_all_tiles_is_as_fast_as_on_one_tile_of_their_rows():
    """Alone "whole" is half as fast on 64 rows and three times as fast on 1024."""
    small = [rate(name, size=64, forward=t, backward=t) for name, t in (("whole", 2e-3), ("each", 1e-3))]
    large = [rate(name, size=1024, forward=t, backward=t) for name, t in (("whole", 0.1), ("each", 0.3))]
    known = table(*small, *large)
    asked = ("whole",), "float32", 64
    assert known.in_one_call(*asked, below(1024, 1024)) == "whole"
    assert known.in_one_call(*asked, below(64, 64)) is None
    assert known.in_one_call(*asked, (full(1024),)) == "whole"
    assert known.in_one_call(("whole", "each"), "float32", 64, below(64, 64)) == "each"
    assert known.in_one_call(("unknown",), "float32", 64, below(1024, 1024)) is None
    assert known.in_one_call((), "float32", 64, below(1024, 1024)) is None
    assert known.in_one_call(("whole",), "bfloat16", 64, below(1024, 1024)) is None
    assert known.in_one_call(("whole",), "float32", 128, below(1024, 1024)) is None
    causal = Tile(range(1024), range(1024), -1023, 0)
    assert known.in_one_call(*asked, (full(1024), causal)) is None, "causal tiles were not measured"


def test_auto_takes_the_kernel_that_the_table_prefers_and_the_registrys_where_it_is_silent():
    x = torch.empty(1, 1, 1024, 64)
    spec = Spec(1.0, preference=table(rate("reference", forward=0.1), rate("cpu_flash", forward=0.9)))
    assert kernel_for_tile(spec, x, x, x, full(1024)).name == "reference"
    assert kernel_for_tile(Spec(1.0), x, x, x, full(1024)).name == "cpu_flash"
    causal = Tile(range(1024), range(1024), -1023, 0)
    assert kernel_for_tile(spec, x, x, x, causal).name == "cpu_flash"
    assert choose_kernel("cpu_flash", spec, x, x, x, (full(1024),)).name == "cpu_flash"


def test_a_kernel_that_refuses_is_not_taken_however_fast_it_was():
    x = torch.empty(1, 1, 1024, 64)
    spec = Spec(1.0, preference=table(rate("cudnn", forward=1e-3), rate("unknown", forward=1e-4)))
    assert kernel_for_tile(spec, x, x, x, full(1024)).name == "cpu_flash"


def test_explaining_lists_kernels_the_first_first():
    told = table(rate("a", forward=0.3), rate("b", forward=0.1)).explain()
    assert told.splitlines()[0] == "a cpu, torch 2.13, 2026-01-01"
    assert told.splitlines()[1].index("b 0.0") < told.splitlines()[1].index("a 0.0")


# ---- files -----------------------------------------------------------------------------------------------------------


def test_what_is_written_is_read_back(tmp_path, monkeypatch):
    known = table(device="a cpu", torch=torch.__version__, inside=Link(1e9, 1e-4))
    store.write(known, tmp_path / "deep" / "table.json")
    assert store.read(tmp_path / "deep" / "table.json", "a cpu").data() == known.data()
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["table.json"]


def damaged(change):
    data = table(torch=torch.__version__).data()
    data = json.loads(json.dumps(data))
    change(data)
    return json.dumps(data)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is damaged: "),
        ("[]", "is no tuning table; measure it again with attnspan tune"),
        ('{"device": "a cpu"}', "is no tuning table"),
        (damaged(lambda d: d.update(format=99)), "has format 99, this version reads 1"),
        (damaged(lambda d: d.update(rates=[])), "is damaged: no rates"),
        (damaged(lambda d: d.update(more=1)), "is damaged: unknown more"),
        (damaged(lambda d: d.pop("launch")), "is damaged: 'launch'"),
        (damaged(lambda d: d["rates"][0].update(forward=-1.0)), "is damaged: a time that is not a positive number"),
        (damaged(lambda d: d["rates"][0].update(forward="fast")), "is damaged: "),
        (damaged(lambda d: d["rates"][0].update(kind="round")), "is damaged: a rate of 'round' tiles in 'float32'"),
        (
            damaged(lambda d: d.update(memory_bandwidth=float("nan"))),
            "is damaged: a time that is not a positive number",
        ),
        (damaged(lambda d: d.update(device="another")), "was measured with device 'another', this is 'a cpu'"),
        (damaged(lambda d: d.update(torch="1.0")), "was measured with torch '1.0', this is"),
    ],
)
def test_a_file_that_is_damaged_or_of_another_machine_is_refused(text, message, tmp_path):
    path = tmp_path / "table.json"
    path.write_text(text)
    with pytest.raises(TuningError) as refused:
        store.read(path, "a cpu")
    assert str(refused.value).startswith(str(path))
    assert message in str(refused.value)
    assert "attnspan tune" in str(refused.value)


def test_a_file_that_is_not_there_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("ATTNSPAN_TUNING", str(tmp_path / "none.json"))
    with pytest.raises(TuningError, match=r"none.json cannot be read: No such file .* or unset ATTNSPAN_TUNING"):
        store.table_for(torch.device("cpu"))


def test_the_variable_comes_before_the_cache_and_the_cache_before_the_package(tmp_path, monkeypatch):
    device = torch.device("cpu")
    name = store.device_name(device)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("ATTNSPAN_TUNING")
    assert store.table_for(device) is None
    store.write(table(device=name, torch=torch.__version__, date="cached"), store.cache_path(name))
    assert store.table_for(device).date == "cached"
    store.write(table(device=name, torch=torch.__version__, date="asked for"), tmp_path / "mine.json")
    monkeypatch.setenv("ATTNSPAN_TUNING", str(tmp_path / "mine.json"))
    assert store.table_for(device).date == "asked for"
    monkeypatch.setenv("ATTNSPAN_TUNING", "none")
    assert store.table_for(device) is None


def test_the_number_of_threads_is_part_of_a_cpus_name():
    threads = torch.get_num_threads()
    before = store.device_name(torch.device("cpu"))
    torch.set_num_threads(threads + 1)
    try:
        assert store.device_name(torch.device("cpu")) != before
    finally:
        torch.set_num_threads(threads)


def test_the_tables_of_the_package_are_of_devices_by_name_and_of_kernels_that_there_are(monkeypatch, tmp_path):
    tables = shipped()
    assert [each.device for each in tables] == ["NVIDIA H200"]
    for each in tables:
        assert {r.kernel for r in each.rates} <= set(KERNELS)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert store._table_for("", str(tmp_path), "NVIDIA H200").data() == tables[0].data()
    assert store._table_for("", str(tmp_path), "NVIDIA H200 NVL") is None
