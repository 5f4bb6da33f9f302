"""docs/extending.md tells the truth: its mask, layout and kernel run as they stand, and are exact."""

import pytest
import torch

import attnspan as span
from attnspan.kernels import KERNELS
from attnspan.testing import loopback
from tests import oracle
from tests.docs.pages import blocks
from tests.masks.strategies import Case
from tests.masks.test_laws import check_bands


@pytest.fixture(scope="module")
def page():
    return blocks("extending.md")


def tensors(tokens, heads=(2, 2, 2)):
    random = torch.Generator().manual_seed(0)
    return [torch.randn(1, each, tokens, 8, generator=random) for each in heads]


def dense(page, whole):
    return oracle.attention(*whole, page["BlockCausal"](16).dense(whole[0].shape[2]), 8**-0.5)[0]


def test_the_mask_draws_its_blocks_and_keeps_the_law_of_masks(page, capsys):
    assert page["BlockCausal"](2).draw(4).splitlines() == ["█ █ · ·", "█ █ · ·", "█ █ █ █", "█ █ █ █"]
    for size, q_len, kv_len in ((1, 5, 5), (2, 7, 7), (16, 5, 5), (3, 9, 4), (3, 4, 9)):
        case = Case(page["BlockCausal"](size), q_len, kv_len)
        check_bands(case)
        expected = torch.arange(kv_len) // size <= torch.arange(q_len)[:, None] // size
        assert torch.equal(case.mask.dense(q_len, kv_len), expected)


@pytest.mark.parametrize(("ranks", "tokens"), [(1, 5), (3, 9), (4, 31), (5, 3)])
def test_the_layout_deals_every_position_once(page, ranks, tokens):
    positions = page["Snake"](ranks, chunk=2).positions(tokens)
    assert sorted(position for own in positions for position in own) == list(range(tokens))
    assert page["imbalance"] < 1.05


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_attention_over_both_is_that_of_one_device(page, ranks):
    whole = tensors(97, heads=(4, 2, 2))
    for out in loopback(ranks).run(lambda world: page["attended"](world, whole)):
        torch.testing.assert_close(out.double(), dense(page, whole), rtol=0, atol=2e-6)


def test_the_kernel_is_exact_forward_and_backward_and_refuses_in_words(page):
    whole = [x.requires_grad_() for x in tensors(97)]
    out = page["try_it"](whole)
    expected = dense(page, whole)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=2e-6)
    assert "plain" not in KERNELS

    def gradients(kernel):
        KERNELS["plain"] = page["PerTile"](page["Plain"]())

        def rank(world):
            mask = page["BlockCausal"](16)
            cp = span.ContextParallel(world, seq_len=97, mask=mask, kernel=kernel, strategy="ring")
            shards = [x.detach().requires_grad_() for x in cp.shard([x.detach() for x in whole], dim=2)]
            cp.attention(*shards).square().sum().backward()
            return cp.unshard([x.grad for x in shards], dim=2)

        try:
            return loopback(2).run(rank)[0]
        finally:
            del KERNELS["plain"]

    torch.testing.assert_close(gradients("plain"), gradients("reference"))
    with pytest.raises(span.KernelError, match="plain needs as many key heads as query heads, got 1 and 2"):
        page["try_it"](tensors(97, heads=(2, 1, 1)))
