"""The library computes where its tensors are, whatever torch.set_default_device() says.

A factory of torch without a device makes its tensor on the default one. Bookkeeping that means the CPU then meets a
tensor of the GPU. So every call of a factory names a device, and planning runs under a default device that holds no
data at all.
"""

import ast
from pathlib import Path

import torch

import attnspan as span
from attnspan.testing import loopback

ROOT = Path(span.__file__).parent
FACTORIES = {
    *("arange", "as_tensor", "empty", "empty_strided", "eye", "full", "linspace", "ones", "rand", "randint", "randn"),
    *("randperm", "scalar_tensor", "tensor", "zeros"),
}


def unplaced(source):
    """Lines on which a factory of torch is called without a device."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "torch"
        and node.func.attr in FACTORIES
        and "device" not in {keyword.arg for keyword in node.keywords}
    ]


def test_every_factory_of_torch_is_told_a_device():
    found = {path.relative_to(ROOT).as_posix(): unplaced(path.read_text()) for path in ROOT.rglob("*.py")}
    assert {path: lines for path, lines in found.items() if lines} == {}


def test_a_factory_without_a_device_would_be_found():
    assert unplaced("x = torch.arange(3)\ny = torch.ones(2, device=x.device)\nz = torch.as_tensor(x)") == [1, 3]


def by_document(b, h, q, k):
    return (q // 16 == k // 16) & (k <= q)


def test_masks_layouts_and_sessions_work_under_any_default_device():
    def rank(world):
        with torch.device("cpu"):
            query, key, value = torch.randn(3, 1, 2, 64, 4, generator=torch.Generator().manual_seed(0)).unbind()
            listed = torch.nn.attention.flex_attention.create_block_mask(by_document, 1, 1, 64, 64, "cpu", BLOCK_SIZE=8)
        found = []
        for mask in (
            span.Causal() & span.Documents([16] * 4),
            span.MaskMod(by_document),
            span.Mask.from_block_mask(listed),
        ):
            cp = span.ContextParallel(world, seq_len=64, mask=mask)
            out = cp.attention(*(cp.shard(x, dim=2) for x in (query, key, value)))
            shifted = cp.shift(cp.shard(query[0, 0, :, 0][None], dim=1), 1, fill=0.0)
            found += [cp.unshard(out, dim=2), cp.unshard(shifted, dim=1), cp.positions]
        return found

    plain = loopback(2).run(rank)[0]
    with torch.device("meta"):
        placed = loopback(2).run(rank)[0]
    assert all(torch.equal(one, other) for one, other in zip(plain, placed, strict=True))
