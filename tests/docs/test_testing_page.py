"""docs/testing.md tells the truth: its tests pass as they stand."""

import importlib
import re
from pathlib import Path

import attnspan.testing
from tests.processes import Patient

PAGE = Path(__file__).parents[2] / "docs" / "testing.md"


def test_the_tests_of_the_page_pass(tmp_path, monkeypatch):
    [block] = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "tests_of_the_page.py").write_text(block)  # a module: processes find its functions by name
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(attnspan.testing, "processes", lambda *how, timeout: Patient(*how, timeout))
    page = importlib.import_module("tests_of_the_page")
    page.test_attention_on_virtual_ranks()
    page.test_attention_on_processes()
