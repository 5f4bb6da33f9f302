"""docs/training.md tells the truth: its blocks are run as they stand, and give what one device gives."""

import re
from pathlib import Path

import pytest
import torch

from attnspan.masks import Causal, Documents, KeyPadding
from attnspan.testing import loopback
from tests.parallel.model import SEQ_LEN, VOCAB, Dense, Llama, gradients, losses, off

PAGE = Path(__file__).parents[2] / "docs" / "training.md"
LENGTHS = [5, 22]


@pytest.fixture(scope="module")
def page():
    """What the page's blocks define."""
    names = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL):
        exec(compile(block, PAGE.name, "exec"), names)
    return names


def tokens(number=0):
    return (torch.arange(2 * SEQ_LEN).view(2, SEQ_LEN) * (7 + number)) % VOCAB


class Flat(Llama):
    """Takes positions as batches have them, (1, S)."""

    def forward(self, tokens, positions, attend):
        return super().forward(tokens, positions[0], attend)


def one_device(count, clip):
    """The loss and gradients of so many micro-batches together."""
    model, dense = Llama(), Dense(Causal() & Documents(LENGTHS), SEQ_LEN)
    parts = []
    for number in range(count):
        labels = tokens(number).roll(-1, dims=1)
        labels[:, torch.tensor(LENGTHS).cumsum(0) - 1] = -100
        parts.append(losses(model, tokens(number), labels, dense.positions, dense))
    per_token, valid = (torch.cat(side) for side in zip(*parts, strict=True))
    mean = per_token[valid].mean()
    mean.backward()
    if clip:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return mean.item(), gradients(model)


def batch(number=0):
    return {"input_ids": tokens(number), "labels": tokens(number)}


def test_a_step_is_that_of_one_device(page):
    def rank(world):
        model = Flat()
        return page["step"](world, model, batch(), LENGTHS), gradients(model)

    for found in loopback(3).run(rank):
        assert off([found], [one_device(1, clip=True)]) < 1e-5  # float32


def test_accumulation_is_a_step_on_one_large_batch(page):
    def rank(world):
        model = Flat()
        return page["accumulate"](world, model, [batch(), batch(1), batch(2)], LENGTHS), gradients(model)

    for found in loopback(2).run(rank):
        assert off([found], [one_device(3, clip=False)]) < 1e-5  # float32


def test_padding_becomes_a_mask(page):
    padding = torch.ones(2, SEQ_LEN)
    padding[1, 20:] = 0
    for mask, done in loopback(2).run(lambda world: page["padded"](world, tokens(), padding)):
        assert mask == Causal() & KeyPadding([SEQ_LEN, 20])
        assert done == f"made a mask: span.KeyPadding([{SEQ_LEN}, 20])"
