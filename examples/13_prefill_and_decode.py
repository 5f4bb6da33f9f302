"""A prompt under context parallelism, then decoding over pages that are spread over the same ranks.

Run: python examples/13_prefill_and_decode.py
     torchrun --nproc-per-node=4 examples/13_prefill_and_decode.py
"""

import torch
import torch.distributed as dist
from launch import launch, mesh_of, say
from model import HEAD_DIM, KV_HEADS, LAYERS
from paging import logits, tiny_model, without_pages

import attnspan as span

PROMPT = list(b"A prompt too long for one rank is computed by all of them, each a part; " * 5) + list(b"and then")
NEW_TOKENS = 8


def main():
    mesh, ranks = mesh_of(-1), dist.get_world_size()
    model = tiny_model()

    # 1. Prefill: every rank has a shard of the tokens, and keeps the keys and values that it computed.
    cp = span.ContextParallel(mesh, seq_len=len(PROMPT), mask=span.Causal())
    computed = []

    def attend(q, k, v):
        computed.append((k, v))
        return cp.attention(q, k, v)

    tokens = cp.shard(torch.tensor([PROMPT]), dim=1)
    last = cp.unshard(model(tokens, cp.positions, attend), dim=1)[0, -1:]

    # 2. Hand over: one exchange per layer takes every key to the rank that keeps it.
    allocator = span.PageAllocator(num_pages=64, page_size=16 * ranks)
    pool = span.PagePool(allocator, [span.PageLayer(KV_HEADS, HEAD_DIM)] * LAYERS, dtype=torch.float64, page_size=16)
    pages = span.ShardedPages(pool, mesh, interleave=4)
    plan = pages.plan(max_sequences=1, max_tokens=len(PROMPT), max_length=512)
    seq = allocator.add()
    plan.step([(seq, len(PROMPT))])
    for layer, (k, v) in enumerate(computed):
        pages.from_context_parallel(layer, k, v, cp, plan)
    pages.agree()
    say(f"{len(PROMPT)} tokens on {ranks} ranks by {cp.layout}".splitlines()[0])
    say(f"handed over to pages: rank 0 holds {plan.metadata.spans[0][1]} keys of each layer")

    # 3. Decode: every rank reads its keys, and one message joins the results.
    text = list(PROMPT)
    for _ in range(NEW_TOKENS):
        text.append(last.argmax(-1).item())
        plan.step([(seq, 1)])
        last = logits(model, pages, plan, text[-1:])

    error = (without_pages(model, text) - last[0]).abs().max().item()
    say(f"after {NEW_TOKENS} tokens more, largest difference from one device: {error:.1e}")
    assert error < 1e-9


if __name__ == "__main__":
    launch(main, ranks=4)
