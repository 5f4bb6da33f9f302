"""flex_attention has torch's own code, except while a block or an attachment that needs it is open.

All checks run in one process of their own, where nothing that another test left behind is open.
"""

import gc
import importlib
import pkgutil

import pytest
import torch
from torch.nn.attention import flex_attention as theirs

import attnspan as span
from attnspan.testing import loopback
from tests.processes import spawn


def is_torchs():
    gc.collect()
    return theirs.flex_attention.__code__.co_filename == theirs.__file__


class Layer(torch.nn.Module):
    def forward(self, x):
        return torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)


def importing_everything_leaves_it_alone(cp):
    for found in pkgutil.walk_packages(span.__path__, "attnspan."):
        if not found.name.endswith("__main__"):
            importlib.import_module(found.name)


def sessions_shards_and_calls_of_attention_leave_it_alone(cp):
    x = cp.shard(torch.randn(1, 1, 8, 4), dim=2)
    cp.attention(x, x, x)
    cp.flex_attention(x, x, x, block_mask=cp.mask)


def blocks_of_sdpa_and_attachments_leave_it_alone(cp):
    x = cp.shard(torch.randn(1, 1, 8, 4), dim=2)
    with cp.sdpa(), cp.sdpa():
        Layer()(x)
        assert is_torchs()
    with cp.attach(layer := Layer()):
        layer(x)
        assert is_torchs()


def a_block_of_flex_has_other_code_until_it_ends_also_by_an_exception(cp):
    with cp.flex():
        with cp.flex(), cp.sdpa():
            assert not is_torchs()
        assert not is_torchs(), "the outer block is open"
    assert is_torchs()
    with pytest.raises(KeyError), cp.flex():
        raise KeyError


def an_attachment_that_needs_it_has_other_code_until_it_is_detached_or_gone(cp):
    first, second = (cp.attach(Layer(), flex=True) for _ in range(2))
    assert not is_torchs()
    first.detach()
    assert not is_torchs(), "the second is attached"
    del second


CHECKS = [
    importing_everything_leaves_it_alone,
    sessions_shards_and_calls_of_attention_leave_it_alone,
    blocks_of_sdpa_and_attachments_leave_it_alone,
    a_block_of_flex_has_other_code_until_it_ends_also_by_an_exception,
    an_attachment_that_needs_it_has_other_code_until_it_is_detached_or_gone,
]


def checked(world):
    """By check, whether the code was torch's before and after, or what the check raised."""
    found = {}
    for check in CHECKS:
        before = is_torchs()
        try:
            loopback(1).run(
                lambda world, check=check: check(span.ContextParallel(world, seq_len=8, mask=span.Causal()))
            )
            found[check.__name__] = before, is_torchs()
        except Exception as raised:
            found[check.__name__] = repr(raised)
    return found


@pytest.fixture(scope="module")
def seen():
    return spawn(1, checked)[0]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_flex_attention_has_torchs_code(seen, check):
    assert seen[check.__name__] == (True, True)
