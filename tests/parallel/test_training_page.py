"""docs/training.md tells the truth: its blocks are run as they stand, and give what one device gives."""

import re
from pathlib import Path

import pytest
import torch

from attnspan.masks import Causal, Documents, KeyPadding
from attnspan.parallel import ContextParallel
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


def tokens(number=0, seq_len=SEQ_LEN):
    return (torch.arange(2 * seq_len).view(2, seq_len) * (7 + number)) % VOCAB


class Flat(Llama):
    """Takes positions as batches have them, (1, S)."""

    def forward(self, tokens, positions, attend):
        return super().forward(tokens, positions[0], attend)


def one_device(packs, clip):
    """The loss and gradients of micro-batches of such documents together."""
    model, parts = Llama(), []
    for number, lengths in enumerate(packs):
        dense = Dense(Causal() & Documents(lengths), sum(lengths))
        own = tokens(number, sum(lengths))
        labels = own.roll(-1, dims=1)
        labels[:, torch.tensor(lengths).cumsum(0) - 1] = -100
        parts.append([each.flatten() for each in losses(model, own, labels, dense.positions, dense)])
    per_token, valid = (torch.cat(side) for side in zip(*parts, strict=True))
    mean = per_token[valid].mean()
    mean.backward()
    if clip:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return mean.item(), gradients(model)


def batch(number=0, seq_len=SEQ_LEN):
    return {"input_ids": tokens(number, seq_len), "labels": tokens(number, seq_len)}


def test_a_step_is_that_of_one_device(page):
    def rank(world):
        model = Flat()
        return page["step"](world, model, batch(), LENGTHS), gradients(model)

    for found in loopback(3).run(rank):
        assert off([found], [one_device([LENGTHS], clip=True)]) < 1e-5  # float32


def test_accumulation_of_micro_batches_of_any_lengths_is_a_step_on_one_large_batch(page):
    packs = [LENGTHS, [9, 4, 14], [17]]
    batches = [batch(number, sum(lengths)) for number, lengths in enumerate(packs)]

    def rank(world):
        model = Flat()
        return page["accumulate"](world, model, batches, packs), gradients(model)

    for found in loopback(2).run(rank):
        assert off([found], [one_device(packs, clip=False)]) < 1e-5  # float32


def test_sessions_come_in_order_planned_ahead(page):
    packs = [LENGTHS, [9, 4, 14], [17], LENGTHS]

    def rank(world):
        cp = ContextParallel(world, seq_len=SEQ_LEN, mask=Causal())
        found = []
        for session in page["planned"](cp, iter(packs)):
            x = torch.ones(1, 2, len(session.positions), 4)
            session.attention(x, x, x)
            found.append(session.mask)
        assert list(page["planned"](cp, [])) == []
        return found

    assert loopback(2).run(rank) == [[Causal() & Documents(lengths) for lengths in packs]] * 2


def test_padding_becomes_a_mask(page):
    padding = torch.ones(2, SEQ_LEN)
    padding[1, 20:] = 0
    for mask, done in loopback(2).run(lambda world: page["padded"](world, tokens(), padding)):
        assert mask == Causal() & KeyPadding([SEQ_LEN, 20])
        assert done == f"made a mask: span.KeyPadding([{SEQ_LEN}, 20])"
