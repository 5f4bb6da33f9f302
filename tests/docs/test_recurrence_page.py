"""docs/recurrence.md tells the truth: its code runs as it stands, and gives what one device gives."""

import re
from pathlib import Path

import torch
import torch.nn.functional as F

import attnspan as span
from tests.recurrence import oracle

PAGE = Path(__file__).parents[2] / "docs" / "recurrence.md"


def test_the_code_of_the_page_gives_the_recurrence_of_one_device():
    [block] = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    names = {}
    exec(compile(block, PAGE.name, "exec"), names)
    query, key, value, decay, beta, weight = (
        names[name].double() for name in ("query", "key", "value", "decay", "beta", "weight")
    )
    lengths = [[20, 44, 32]]
    mixed = F.silu(oracle.conv1d(key.flatten(2), weight, None, lengths)).view_as(key)
    rule = (query, F.normalize(mixed, dim=-1), value, decay, beta, 0.25)
    out, states = oracle.attending(*rule, lengths, torch.zeros(3, 2, 16, 16, dtype=torch.float64))
    for found, ends in names["outputs"]:
        torch.testing.assert_close(found.double(), out, rtol=0, atol=2e-6)
        torch.testing.assert_close(ends.double(), states, rtol=0, atol=2e-6)


def test_the_page_names_every_rule():
    text = PAGE.read_text(encoding="utf-8")
    rules = [name for name in span.__all__ if isinstance(getattr(span, name), type) and "Rule" in mro(name)]
    assert len(rules) == 6
    assert all(f"`{name}`" in text for name in rules)


def mro(name):
    return [each.__name__ for each in getattr(span, name).__mro__]
