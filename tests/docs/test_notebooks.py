"""Notebooks say what they said: their cells run, and print what is committed."""

import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted(ROOT.glob("docs/notebooks/*.ipynb"))


@pytest.fixture(scope="module")
def notebook():
    spec = importlib.util.spec_from_file_location("notebook", ROOT / "docs/notebook.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pictures(outputs):
    return sum("image/png" in each.get("data", {}) for each in outputs)


def texts(notebook, outputs):
    return [notebook.text_of(each) for each in outputs if "image/png" not in each.get("data", {})]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_cells_show_what_is_committed(notebook, path):
    for cell, outputs in notebook.run(path):
        assert texts(notebook, outputs) == texts(notebook, cell["outputs"]), "".join(cell["source"])
        assert pictures(outputs) == pictures(cell["outputs"])
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert len({cell["id"] for cell in cells}) == len(cells)
    assert all(len(line.rstrip("\n")) <= 120 for cell in cells for line in cell["source"])


def test_twin_another_output_is_noticed(notebook, tmp_path):
    cells = [
        {
            "cell_type": "code",
            "id": "a",
            "execution_count": 1,
            "source": ["x = 2\n", "print(x)\n", "x + 1"],
            "outputs": [],
        }
    ]
    path = tmp_path / "two.ipynb"
    path.write_text(json.dumps({"cells": cells}))
    path.write_text(notebook.executed(path))
    test_cells_show_what_is_committed(notebook, path)
    assert notebook.as_page(path).count("```text\n2\n```") == notebook.as_page(path).count("```text\n3\n```") == 1
    path.write_text(path.read_text().replace('"2\\n"', '"4\\n"'))
    with pytest.raises(AssertionError, match="print"):
        test_cells_show_what_is_committed(notebook, path)
