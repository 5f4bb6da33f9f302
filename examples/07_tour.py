"""A tour on virtual ranks, cell by cell as in a notebook: look at a mask, a layout, a plan, and watch one run.

Run: python examples/07_tour.py
"""

# %% What attends: a mask is data. It draws itself and counts its pairs.
import torch

import attnspan as span

mask = span.Causal() & span.Documents([5, 11])
print(mask, f"\n{mask.work(16)} pairs\n")

# %% Who owns what: the same tokens and, as near as can be, the same work for every rank.
layout = span.Balanced(mask, ranks=2, chunk=1)
print(layout, f"\nwork per rank {layout.work_per_rank(mask, 16)}\n")

# %% Which keys travel when, and which tiles are computed.
plan = span.Plan(mask, layout, seq_len=16, strategy="needed")
print(plan, "\n")
for step in plan.steps(rank=0):
    print("rank 0 receives", *step.receives, "and computes", *map(str, step.tiles), sep="\n  ")

# %% Run it: two virtual ranks in this process. An exception in one is raised here, with its rank.
queries = torch.randn(1, 2, 16, 8, dtype=torch.float64)


def rank(world):
    cp = span.ContextParallel(world, seq_len=16, mask=mask, layout=layout, strategy="needed")
    q = cp.shard(queries, dim=2).requires_grad_()
    out = cp.attention(q, q, q)
    out.square().sum().backward()
    return cp.unshard(out, dim=2), cp.unshard(q.grad, dim=2), world.rank


(out, grad, _), _ = span.testing.loopback(ranks=2).run(rank)

# %% And it is the attention of one device, gradients included.
whole = queries.clone().requires_grad_()
dense = torch.nn.functional.scaled_dot_product_attention(whole, whole, whole, attn_mask=mask.dense(16))
dense.square().sum().backward()
print(f"\nlargest difference: out {(out - dense).abs().max():.1e}, gradient {(grad - whole.grad).abs().max():.1e}")
assert torch.allclose(out, dense)
assert torch.allclose(grad, whole.grad)

# %% What is refused says why, on every rank, before anything travels.
try:
    span.testing.loopback(ranks=2).run(lambda world: span.ContextParallel(world, seq_len=15, mask=mask))
except span.AttnspanError as refused:
    print(f"\nrefused: {refused}")
