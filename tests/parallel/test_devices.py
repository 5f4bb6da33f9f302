"""Sessions on a CUDA device as on a CPU, over virtual ranks: everything that a training script touches.

What is expected is computed on the CPU, in float64 or by one device's training.
"""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import attnspan as span
from attnspan.testing import loopback
from tests.devices import on_every_device
from tests.parallel.model import SEQ_LEN, Llama, batch, gradients, losses, off, one_device, optimizer
from tests.parallel.models import dense, model, parallel, same, whole

LENGTH = 29
DOCUMENTS = span.Causal() & span.Documents([4, 9, 16])
STEPS = 3

# float32 on another device: other kernels, other orders of sums, over three steps that start from each other.
TRAINED = 5e-5
# float64 there: exp and products are not the CPU's to the last bit.
PRECISE = 1e-10


@on_every_device
@pytest.mark.parametrize("reentrant", [None, True, False])
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_few_steps_of_training_are_one_devices(device, ranks, reentrant):
    true = one_device(steps=range(STEPS))

    def rank(world):
        net, found = Llama(reentrant).to(device), []
        optim = optimizer(net)
        for step in range(STEPS):
            given = batch(step)
            cp = span.ContextParallel(world, seq_len=SEQ_LEN, mask=given.mask)
            tokens, labels = cp.shard(given.tokens.to(device)), cp.shard(given.labels.to(device))
            per_token, valid = losses(net, tokens, labels, cp.positions, cp)
            loss = cp.mean_loss(per_token, valid)
            optim.zero_grad()
            loss.backward()
            cp.average_gradients(net)
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            found.append((loss.item(), {name: grad.cpu() for name, grad in gradients(net).items()}))
            optim.step()
        return found

    for found in loopback(ranks, device).run(rank):
        assert off(found, true) < TRAINED


@on_every_device
@pytest.mark.parametrize("again", [None, "reentrant", "non-reentrant"])
def test_a_model_that_calls_sdpa_is_served_attached_and_in_a_block(device, again):
    true = dense(model(), whole(LENGTH), DOCUMENTS)

    def rank(world):
        cp, net, x = session(world), model(again=again).to(device), whole(LENGTH).to(device)

        def in_a_block(shard):
            with cp.sdpa():
                return net(shard)

        found = [parallel(cp, net, in_a_block, x)] if again is None else []
        with cp.attach(net):
            found.append(parallel(cp, net, net, x))
        return [(out.cpu(), {name: grad.cpu() for name, grad in grads.items()}) for out, grads in found]

    for each in loopback(2, device).run(rank):
        for found in each:
            same(found, true, PRECISE)


def session(world, **options):
    return span.ContextParallel(world, seq_len=LENGTH, mask=DOCUMENTS, **options)


@on_every_device
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool], ids=str)
def test_what_is_sharded_comes_back_and_shifts_across_ranks(device, dtype):
    x = torch.arange(2 * LENGTH * 3).view(2, LENGTH, 3).remainder(2 if dtype == torch.bool else 100).to(dtype)
    shifted = torch.cat([x[:, 1:], torch.zeros_like(x[:, :1])], dim=1)

    def rank(world):
        cp = session(world)
        shard = cp.shard(x.to(device))
        assert shard.device.type == device
        ahead = cp.shift(shard, -1, fill=0, documents=False)
        return cp.unshard(shard).cpu(), cp.unshard(ahead).cpu()

    for back, ahead in loopback(4, device).run(rank):
        assert torch.equal(back, x)
        assert torch.equal(ahead, shifted)


@on_every_device
def test_gradients_come_back_through_shard_and_unshard(device):
    x = torch.randn(2, LENGTH, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def rank(world):
        cp, leaf = session(world), x.clone().to(device).requires_grad_()
        out = cp.unshard(cp.shard(leaf) ** 2)
        (out**2).sum().backward()
        return leaf.grad.cpu()

    found = sum(loopback(3, device).run(rank))  # each has what it owns, of the sum of all ranks' losses
    torch.testing.assert_close(found, 3 * 4 * x**3)


def bias(score, b, h, q, k):
    return score - 0.05 * (h + 1) * (q - k)


@on_every_device
@pytest.mark.parametrize("score_mod", [None, bias], ids=["plain", "scored"])
def test_flex_attention_in_a_block(device, score_mod):
    length = 200
    ids = torch.repeat_interleave(torch.arange(3), torch.tensor([70, 30, 100]))
    q, k, v = torch.randn(3, 1, 2, length, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    at = torch.arange(length)
    allowed = (ids[:, None] == ids) & (at[:, None] >= at)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    scores = leaves[0] @ leaves[1].mT * 0.25
    if score_mod is not None:
        scores = score_mod(scores, 0, torch.arange(2).view(2, 1, 1), at[:, None], at)
    out = scores.masked_fill(~allowed, -torch.inf).softmax(-1) @ leaves[2]
    true = [out.detach(), *torch.autograd.grad((out**2).sum(), leaves)]

    def rank(world):
        own = ids.to(device)
        mask = create_block_mask(
            lambda b, h, q, k: (own[q] == own[k]) & (q >= k), None, None, length, length, device=device
        )
        cp = span.ContextParallel(world, seq_len=length, mask=span.Causal())
        shards = [cp.shard(x.to(device).float(), dim=2).detach().requires_grad_() for x in (q, k, v)]
        with cp.flex():
            out = flex_attention(*shards, score_mod=score_mod, block_mask=mask)
        grads = torch.autograd.grad((out**2).sum(), shards)
        return [cp.unshard(x.detach(), dim=2).double().cpu() for x in (out, *grads)]

    for found in loopback(2, device).run(rank):
        for one, other in zip(found, true, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)  # float32, sums of 100 keys


@on_every_device
@pytest.mark.parametrize("shape", [(1, 1), (4, 2), (6, 3)], ids=str)
def test_half_precision_is_no_less_exact_than_one_device(device, shape):
    heads, kv_heads = shape
    length = 311
    drawn = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, h, length, 64, generator=drawn).bfloat16() for h in (heads, kv_heads, kv_heads))
    true = attended(F.scaled_dot_product_attention, [x.double() for x in (q, k, v)])
    one = attended(F.scaled_dot_product_attention, [x.to(device) for x in (q, k, v)])

    def rank(world):
        cp = span.ContextParallel(world, seq_len=length, mask=span.Causal())
        shards = [cp.shard(x.to(device), dim=2) for x in (q, k, v)]
        return [cp.unshard(x, dim=2).cpu() for x in attended(lambda *x, **_: cp.attention(*x), shards)]

    for found in loopback(3, device).run(rank):
        for name, mine, theirs, exact in zip(("out", "dq", "dk", "dv"), found, one, true, strict=True):
            # 1.26 is the most that was found, where partial results are rounded before they are joined.
            assert error(mine, exact) <= 1.3 * error(theirs.cpu(), exact), name


def attended(call, tensors):
    leaves = [x.detach().requires_grad_() for x in tensors]
    out = call(*leaves, is_causal=True, enable_gqa=True)
    return [out.detach(), *torch.autograd.grad((out**2).sum(), leaves)]


def error(found, exact):
    """Root mean square."""
    return (found.double() - exact).square().mean().sqrt().item()
