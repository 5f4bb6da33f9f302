"""docs/recurrence.md tells the truth: its code runs as it stands, and gives what one device gives."""

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import attnspan as span
from attnspan.layouts import Contiguous, HeadTail
from tests.recurrence import oracle

PAGE = Path(__file__).parents[2] / "docs" / "recurrence.md"


def test_the_code_of_the_page_gives_the_recurrence_of_one_device():
    names = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL):
        exec(compile(block, PAGE.name, "exec"), names)
    assert "recurrent" in names["choice"].explain()
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


@pytest.mark.parametrize("tokens", [65536, 262144])
def test_the_bytes_of_the_page_are_those_that_are_planned(tokens):
    text = PAGE.read_text(encoding="utf-8")
    rows = {name: tuple(map(float, sizes)) for name, *sizes in re.findall(r"\| (.*) \| (.*) MB \| (.*) MB \|", text)}
    layers = span.RecurrentLayers("GatedDelta", heads=16, key_dim=128)
    for layout, row in {
        Contiguous(8): "`Contiguous`",
        HeadTail(8): "`HeadTail`, and `Balanced` under a causal mask",
    }.items():
        found = layers.over(layout, span.Causal(), tokens)
        for way in (0, 1):
            sizes = [found.arriving(rank)[way] / 1e6 for rank in range(8)]
            assert (round(max(sizes), 1), round(sum(sizes), 1)) == rows[row]
    one = 7 * 16 * 128 * (128 + 128) * 4 / 1e6  # a map of each other rank, matrix and state
    assert rows["flash-linear-attention, contiguous"] == (round(one, 1), round(8 * one, 1))
    assert rows["flash-linear-attention, zigzag"] == (round(2 * one, 1), round(16 * one, 1))


def test_the_page_names_every_rule():
    text = PAGE.read_text(encoding="utf-8")
    rules = [name for name in span.__all__ if isinstance(getattr(span, name), type) and "Rule" in mro(name)]
    assert len(rules) == 6
    assert all(f"`{name}`" in text for name in rules)


def mro(name):
    return [each.__name__ for each in getattr(span, name).__mro__]
