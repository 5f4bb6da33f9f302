"""Sliding-window and full layers in one model: one layout, balanced over both, and a mask per layer by name.

Run: python examples/03_window_and_full.py    or    torchrun --nproc-per-node=4 examples/03_window_and_full.py
"""

import torch
import torch.nn.functional as F
from launch import device, launch, mesh_of, say

import attnspan as span

SEQ_LEN = 1024
MASKS = {"full": span.Causal(), "window": span.SlidingWindow(127)}
LAYERS = ["window", "window", "window", "full"]


def layers(x, attend):
    """Attention layers without weights, so that only the masks matter."""
    for name in LAYERS:
        y = F.layer_norm(x, x.shape[-1:])
        x = x + attend(y, y, y, name)
    return x


def main():
    torch.manual_seed(0)
    whole = torch.randn(1, 4, SEQ_LEN, 32, device=device())
    weights = {name: LAYERS.count(name) for name in MASKS}
    cp = span.ContextParallel(mesh_of(-1), seq_len=SEQ_LEN, mask=MASKS, weights=weights)

    out = layers(cp.shard(whole, dim=2), lambda q, k, v, name: cp.attention(q, k, v, mask=name))
    found = cp.unshard(out, dim=2)

    dense = {name: mask.dense(SEQ_LEN).to(device()) for name, mask in MASKS.items()}
    expected = layers(whole, lambda q, k, v, name: F.scaled_dot_product_attention(q, k, v, attn_mask=dense[name]))
    error = (found - expected).abs().max().item()
    for name in MASKS:
        say(f"{name}: imbalance {cp.plan_of(name).imbalance():.3f}, {cp.plan_of(name).strategy}")
    say(f"largest difference from one device {error:.1e}")
    assert error < 1e-5


if __name__ == "__main__":
    launch(main)
