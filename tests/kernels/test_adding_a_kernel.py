"""A new kernel is one file and one line in the registry.

A copy of the package gets both, and a fresh process looks for the newcomer wherever a kernel is known by its name.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import attnspan

ROOT = Path(__file__).resolve().parents[2]

FILE = '''
"""A toy: the reference's formulas, counted, for few enough rows."""

import torch

from attnspan.kernels import reference
from attnspan.kernels.kernel import Traits

name = "toy"
traits = Traits(devices=("cpu",), dtypes=(torch.float32, torch.float64), order=45)
tiles = []


def supports(spec, q, k, v, tile):
    if reason := traits.misfit(q):
        return f"toy {reason}"
    return None if len(tile.rows) <= 64 else f"toy computes up to 64 rows, got {len(tile.rows)}"


def forward(spec, q, k, v, tile):
    tiles.append(tile)
    return reference.forward(spec, q, k, v, tile)


def backward(spec, *tensors):
    return reference.backward(spec, *tensors)
'''

PROGRAM = """
import json
import torch
from attnspan import Causal, HeadTail, attention
from attnspan.attention.tuned import GroupTuning, hardware_for
from attnspan.cli import doctor
from attnspan.errors import KernelError
from attnspan.kernels import KERNELS, Spec, kernel_for_tile, refusals, rounds_gradients, toy
from attnspan.masks.tile import Tile
from attnspan.measure import Tuning, tune
from attnspan.plan import Shape
from attnspan.testing import loopback
from benchmarks.support import DEVICES, FEATURES, Cell

CPU, found = torch.device("cpu"), {}


def run(kernel, tokens=16):
    toy.tiles.clear()
    whole = [torch.randn(1, 2, tokens, 8) for _ in range(3)]

    def on_rank(world):
        own = torch.tensor(HeadTail(2).positions(tokens)[world.rank])
        parts = [x[:, :, own].requires_grad_() for x in whole]
        out = attention(*parts, mask=Causal(), layout=HeadTail(2), seq_len=tokens, group=world, kernel=kernel)
        out.sum().backward()

    try:
        loopback(2).run(on_rank)
    except KernelError as refused:
        return str(refused)
    return len(toy.tiles)


full = lambda rows: Tile(range(rows), range(rows), 1 - rows, rows - 1)
x = torch.empty(1, 2, 128, 8)
found["asked for"], found["by auto"], found["refused"] = run("toy"), run("auto"), run("toy", 512)
found["fastest"] = [kernel_for_tile(Spec(1.0), x, x, x, full(rows)).name for rows in (64, 65)]
found["explained"] = refusals(Spec(1.0), x, x, x, (full(65),))["toy"]
found["doctor"] = [line for line in doctor.kernels("cpu", torch.bfloat16) if line.startswith("toy")]
untuned = hardware_for(GroupTuning(), Shape(2, head_dim=8, dtype="float32"), CPU, "toy")
found["rounds"] = rounds_gradients("toy", CPU), untuned.rounds
asked = Tuning.of(CPU, head_dims=(8,), heads=2, sizes=(16, 64))
table = tune(asked)
found["measured"] = sorted({rate.kernel for rate in table.rates}), "toy" in table.explain()
cells = {feature.name: Cell("toy", "ring", "Causal", feature) for feature in FEATURES}
found["support"] = DEVICES["toy"], cells["float64"].reasons, cells["bfloat16"].reasons
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def newcomer(tmp_path_factory):
    """What a process finds of a kernel that is one file and one line."""
    folder = tmp_path_factory.mktemp("package")
    package = folder / "attnspan"
    shutil.copytree(Path(attnspan.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    (package / "kernels" / "toy.py").write_text(FILE)
    registry = package / "kernels" / "registry.py"
    text = registry.read_text()
    for known, with_toy in (
        (", reference\n", ", reference, toy\n"),
        ("    PerTile(reference),\n", "    PerTile(reference),\n    PerTile(toy),\n"),
    ):
        assert text.count(known) == 1, known
        text = text.replace(known, with_toy)
    registry.write_text(text)
    paths = [str(folder), str(ROOT)]
    there = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "ATTNSPAN_TUNING": "none"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=there, cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_kernel_that_was_added_is_chosen_by_name_and_by_auto(newcomer):
    assert newcomer["asked for"] == newcomer["by auto"] > 0
    assert newcomer["fastest"] == ["toy", "cpu_flash"]


def test_a_kernel_that_was_added_is_explained_where_it_refuses(newcomer):
    reason = "toy computes up to 64 rows, got 65"
    assert newcomer["explained"] == reason
    assert "kernel='toy' cannot compute" in newcomer["refused"]
    assert "for this tile use cpu_flash or reference, or auto" in newcomer["refused"]
    assert newcomer["doctor"] == ["toy         no (toy needs float32 or float64, got bfloat16)"]


def test_a_kernel_that_was_added_is_measured_and_known_to_the_cost_model(newcomer):
    assert newcomer["measured"] == [["cpu_flash", "toy"], True]
    assert newcomer["rounds"] == [False, False]


def test_a_kernel_that_was_added_is_in_the_table_of_what_is_served(newcomer):
    assert newcomer["support"] == ["cpu", [], ["toy needs float32 or float64, got bfloat16"]]
