"""Block masks where they are used: on a GPU, in the compiled FlexAttention kernel."""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from attnspan.masks import (
    BlockSparse,
    Causal,
    Chunked,
    Documents,
    KeyPadding,
    Mask,
    MaskMod,
    PrefixLM,
    SinkTokens,
    SlidingWindow,
    Tree,
)
from tests.masks.test_laws import LISTS

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # torch's own, as its compiler is first imported
    pytest.mark.filterwarnings("ignore:TensorFloat32:UserWarning"),  # advice about speed
]

LENGTH = 700  # no multiple of the block
IDS = torch.arange(LENGTH) // 99
MASKS = {
    "causal": Causal(),
    "pack": Causal() & Documents([[100, 600], [699, 1], [350, 350]]),
    "streaming": Causal() & (SlidingWindow(63) | SinkTokens(4)),
    "prefix": PrefixLM([0, 100, 700]) & KeyPadding([650, 700, 1]),
    "chunks": Causal() & Chunked(128) | Tree([-1, 0, 0], [100, 300, 300]),
    "blocks": ~BlockSparse(torch.eye(7, dtype=torch.bool), 100),
    "mod": MaskMod(lambda b, h, q, k: (k <= q) & ((q - k) % 3 == 0)),
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_block_masks_are_those_of_torch_and_attend_as_dense_says(mask):
    ours = mask.block_mask(LENGTH, device="cuda")
    theirs = create_block_mask(mask.mask_mod(LENGTH, device="cuda"), mask.rows, 1, LENGTH, LENGTH, "cuda")
    for name in LISTS:
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
    q, k, v = torch.randn(3, mask.rows, 2, LENGTH, 64, device="cuda").unbind()
    out = torch.compile(flex_attention)(q, k, v, block_mask=ours)
    dense = torch.stack([mask.dense(LENGTH, row=row) for row in range(mask.rows)])[:, None].cuda()
    exact = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), attn_mask=dense)
    seen = dense.any(-1, keepdim=True)  # a row without keys is nan there and 0 here
    torch.testing.assert_close(out.double(), exact.nan_to_num() * seen, atol=5e-3, rtol=0)  # tf32 products


def test_a_function_may_capture_tensors_of_the_device():
    ids = IDS.cuda()
    mask = MaskMod(lambda b, h, q, k: ids[q] == ids[k], device="cuda")
    expected = IDS[:, None] == IDS[None, :]
    assert torch.equal(mask.dense(LENGTH), expected)
    assert torch.equal((mask & Causal()).dense(LENGTH), expected.tril())
    assert mask.work(LENGTH) == expected.sum()
    again = Mask.from_block_mask(mask.block_mask(LENGTH, device="cuda"))
    assert torch.equal(again.dense(LENGTH), expected)


@pytest.mark.parametrize("block", [32, 100])
def test_a_function_on_the_device_is_decided_and_asked_as_on_the_host(block):
    """Documents of rows, windows of heads, and one that runs under vmap; a BlockMask too."""
    ids, windows, starts = torch.stack([IDS.flip(0), IDS * 5 % 7]), torch.tensor([5, 300]), torch.arange(3) * 200

    def on(device):
        ids_, windows_, starts_ = (each.to(device) for each in (ids, windows, starts))
        packed = MaskMod(lambda b, h, q, k: (q >= k) & (ids_[b, q] == ids_[b, k]), rows=2, block=block, device=device)
        by_head = MaskMod(lambda b, h, q, k: (q - k) // 2 <= windows_[h], heads=2, block=block, device=device)
        mapped = MaskMod(lambda b, h, q, k: ((k >= starts_) & (k <= starts_ + q)).any(), block=block, device=device)
        listed = Mask.from_block_mask(packed.block_mask(LENGTH, device=device))
        return [mask.cover(LENGTH, row=mask.rows - 1) for mask in (packed, by_head, mapped, listed)]

    assert on("cuda") == on("cpu")
