"""What the examples over pages share: a model's attention as a write and a read, layer after layer."""

import torch
from model import HEAD_DIM, KV_HEADS, LAYERS, Model

import attnspan as span


def tiny_model():
    """A small transformer with random weights: what it says makes no sense, but is the same every time."""
    torch.manual_seed(0)
    return Model().double().eval().requires_grad_(False)


def cache(num_pages=256, page_size=16, **sizes):
    """An allocator, a pool with a layer for each of the model's, and a plan."""
    allocator = span.PageAllocator(num_pages=num_pages, page_size=page_size)
    pool = span.PagePool(allocator, [span.PageLayer(KV_HEADS, HEAD_DIM)] * LAYERS, dtype=torch.float64)
    sizes = {"max_sequences": 8, "max_tokens": 512, "max_length": 512} | sizes
    return allocator, pool, span.StepPlan(pool, **sizes)


def over_pages(pages, plan):
    """`attend(q, k, v)` for the model: packed tokens as a batch of one; each call is the next layer's."""
    layer = -1

    def attend(q, k, v):
        nonlocal layer
        layer += 1
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
        pages.write(layer, k, v, plan)
        return pages.attend(layer, q, plan).transpose(0, 1).unsqueeze(0)

    return attend


def logits(model, pages, plan, tokens):
    """The logits of each sequence's last new token; `tokens` are the new tokens of the plan's sequences, packed."""
    out = model(torch.tensor([tokens]), plan.positions, over_pages(pages, plan))
    return out[0, plan.last_tokens]


def without_pages(model, tokens):
    """The last logits of one sequence, computed from scratch."""
    attend = torch.nn.functional.scaled_dot_product_attention
    out = model(
        torch.tensor([tokens]), torch.arange(len(tokens)), lambda *qkv: attend(*qkv, is_causal=True, enable_gqa=True)
    )
    return out[0, -1]
