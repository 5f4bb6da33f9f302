"""docs/attention.md tells the truth: its code runs as it stands, and gives the attention of one device."""

import re
from pathlib import Path

import torch

from tests import oracle

PAGE = Path(__file__).parents[2] / "docs" / "attention.md"


def test_the_code_of_the_page_gives_the_attention_of_one_device():
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    names = {}
    for block in blocks:
        exec(compile(block, PAGE.name, "exec"), names)
    span, mask, seq_len = names["span"], names["MASK"], names["SEQ_LEN"]
    random = torch.Generator().manual_seed(0)
    whole = [torch.randn(1, heads, seq_len, 16, generator=random) for heads in (4, 2, 2)]
    expected, _ = oracle.attention(*whole, mask.dense(seq_len), scale=0.25)
    layout = span.Balanced(mask, ranks=2, chunk=1)
    for rank, out in enumerate(names["outputs"]):
        own = [position for run in layout.runs(seq_len, rank) for position in run.positions]
        torch.testing.assert_close(out.double(), expected[:, :, own], rtol=0, atol=2e-6)  # the bar of float32
    query, (key, value) = names["query"], names["expand"](names["latent"])
    expected, _ = oracle.attention(query, key.detach(), value.detach(), mask.dense(seq_len), query.shape[3] ** -0.5)
    for out in names["expanded"]:
        torch.testing.assert_close(out.detach().double(), expected, rtol=0, atol=2e-6)
    allowed, drop = mask.dense(seq_len), oracle.dropped(0.1, 7, (1, 4, seq_len, seq_len))
    expected, _ = oracle.dense(
        torch.zeros(drop.shape).double(), allowed, [(allowed, torch.ones(seq_len, 16).double())], drop
    )
    for out in (names["one"], names["two"]):
        torch.testing.assert_close(out.double(), expected, rtol=0, atol=2e-6)
