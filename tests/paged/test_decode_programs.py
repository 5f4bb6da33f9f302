"""The Triton programs of `decode` in Triton's interpreter: keys in shares, and rows in splits, are dense attention.

Triton interprets only what was defined under TRITON_INTERPRET=1, so it has to be set before Python starts::

    TRITON_INTERPRET=1 python -m pytest tests/paged/test_decode_programs.py
"""

import random

import pytest
import torch

from attnspan.paged.kernels import decode
from tests.kernels.interpreter import INTERPRETS, interpreted
from tests.paged.cases import Cache, agree

pytestmark = [
    pytest.mark.skipif(not INTERPRETS, reason="needs Triton, and TRITON_INTERPRET=1 in the environment"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),  # parts that nobody wrote
]


@pytest.fixture(autouse=True)
def in_interpreter():
    with interpreted():
        yield


@pytest.mark.parametrize("seed", range(24))
def test_any_step_is_dense_attention(seed, monkeypatch):
    """Any number of shares, of any length, over rows of any lengths, of which some have no token in a step."""
    draw = random.Random(seed)
    shares, fewest, block = draw.choice([1, 2, 3, 5, 9]), draw.choice([16, 64, 256]), draw.choice([16, 32])
    monkeypatch.setattr(decode, "_shares", lambda *_: shares)
    monkeypatch.setattr(decode, "MIN_KEYS", fewest)
    monkeypatch.setattr(decode, "_tuning", lambda *_: decode.DecodeTuning(block=block))
    heads, kv_heads = draw.choice([(4, 4), (6, 2), (4, 1), (3, 3)])
    page_size, window = draw.choice([1, 3, 4, 16]), draw.choice([None, None, 5, 30])
    cache = Cache(
        page_size=page_size, pages=900, heads=heads, kv_heads=kv_heads, dim=16, value_dim=draw.choice([8, 16]),
        dtype=torch.float32, window=window, seed=seed, max_tokens=400,
    )  # fmt: skip
    seqs = [cache.add() for _ in range(draw.randint(1, 6))]
    cache.step([(seq, draw.choice([1, 3, 17, 60])) for seq in seqs])
    agree(cache.attend(kernel="decode"), cache.expected(), torch.float32)
    for _ in range(3):
        some = draw.sample(seqs, draw.randint(1, len(seqs)))
        cache.step([(seq, draw.choice([0, 1, 1, 1, 2])) for seq in some[1:]] + [(some[0], 1)])
        agree(cache.attend(kernel="decode"), cache.expected(), torch.float32)


@pytest.mark.parametrize("shares", [1, 3, 9])
@pytest.mark.parametrize("window", [None, 12, 30])
def test_rows_that_begin_alike_read_their_pages_once(shares, window, monkeypatch):
    monkeypatch.setattr(decode, "_shares", lambda *_: shares)
    monkeypatch.setattr(decode, "MIN_KEYS", 16)
    monkeypatch.setattr(decode, "_tuning", lambda *_: decode.DecodeTuning(block=16))
    cache = Cache(page_size=4, pages=300, heads=6, kv_heads=2, dim=16, dtype=torch.float32, window=window)
    a, other = cache.add(37), cache.add(5)
    b, c = cache.fork(a, 2)
    for new in (3, 1, 3, 2), (1, 1, 1, 1), (1, 0, 2, 0):
        cache.step(list(zip((other, a, b, c), new, strict=True)), share=True)
        assert cache.plan.shared
        agree(cache.attend(kernel="decode"), cache.expected(), torch.float32)
