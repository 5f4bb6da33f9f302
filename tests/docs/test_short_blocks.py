"""Short blocks of docs/models.md, docs/torch_compat.md, docs/bench.md and docs/quickstart.md, run where they belong.

They use what the text around them speaks of: a session, a model, a batch. Here it is made for them, and what they
compute is compared with one device.
"""

import contextlib
import copy
import io

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention.flex_attention import create_block_mask

import attnspan as span
from attnspan.testing import loopback
from tests.docs.pages import sources
from tests.engine.models import VOCABULARY, tiny
from tests.processes import spawn

TOKENS, HEADS, DIM, VOCAB, LAYERS = 64, 2, 8, 16, 32


class Layer(nn.Module):
    """Causal attention through SDPA."""

    def forward(self, x):
        x = x.unflatten(-1, (HEADS, DIM)).transpose(1, 2)
        return F.scaled_dot_product_attention(x, x, x, is_causal=True).transpose(1, 2).flatten(2)


class Model(nn.Module):
    """As many layers as the page says, and positions."""

    def __init__(self, layers=LAYERS):
        super().__init__()
        self.embed, self.places = nn.Embedding(VOCAB, HEADS * DIM), nn.Embedding(TOKENS, HEADS * DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))

    def forward(self, tokens, positions):
        x = self.embed(tokens) + self.places(positions)
        for layer in self.layers:
            x = x + layer(F.layer_norm(x, x.shape[-1:]))
        return x @ self.embed.weight.T


def batch():
    return torch.arange(TOKENS).view(1, -1) % VOCAB


def run(source, **names):
    """A block with what its page speaks of; what it printed, and what it defines."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(compile(source, "a page", "exec"), names)
    return said.getvalue(), names


# ---- models.md -------------------------------------------------------------------------------------------------------


def test_counted_attached_and_checked_models_are_those_of_one_device(capsys):
    counted, _, attached, checked, own_forward = sources("models.md")
    whole = Model()
    expected = whole(batch(), torch.arange(TOKENS)).detach()
    copies = [copy.deepcopy(whole) for _ in range(2)]

    def rank(world):
        model = copies[world.rank]
        cp = span.ContextParallel(world, seq_len=TOKENS, mask=span.Causal())

        def logits(*_):
            return cp.unshard(model(cp.shard(batch()), cp.positions))

        names = {"cp": cp, "model": model, "batch": batch()}
        exec(counted, names | {"step": logits})
        found = {}

        def training_step(*_):
            found["attached"] = logits()
            return found["attached"].sum()

        exec(attached, names | {"training_step": training_step})
        with cp.sdpa():
            found["block"] = logits()
        return [each.detach() for each in found.values()]

    for found in loopback(2).run(rank):
        for each in found:
            torch.testing.assert_close(each, expected, rtol=1e-5, atol=1e-3)  # 32 layers of float32, numbers of 100
    assert "32" in capsys.readouterr().out
    assert (
        "2 ranks beside one device"
        in run(checked, span=span, model=copy.deepcopy(tiny("Llama")).requires_grad_(True), batch=labelled())[0]
    )
    run(own_forward, span=span, F=F, mask=span.Causal(), model=Model(2), batch={"tokens": batch()})


def labelled():
    tokens = torch.arange(32).view(1, 32) % VOCABULARY
    return {"input_ids": tokens, "labels": tokens}


def test_attention_bound_for_a_batch_is_that_of_flex_attention():
    bound = sources("models.md")[1]
    block_mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, TOKENS, TOKENS, device="cpu")
    slopes = torch.tensor([0.5, 0.25])

    def alibi(score, b, h, q, k):
        return score - slopes[h] * (q - k)

    whole = [torch.randn(1, HEADS, TOKENS, DIM, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    bias = slopes[:, None, None] * (torch.arange(TOKENS) - torch.arange(TOKENS)[:, None])
    hidden = ~span.Causal().dense(TOKENS)
    expected = F.scaled_dot_product_attention(*whole, attn_mask=bias.masked_fill(hidden, -torch.inf)[None])

    def rank(world):
        cp = span.ContextParallel(world, seq_len=TOKENS, mask=span.Causal())
        step = lambda cp, batch, attend: cp.unshard(attend(*cp.shard(batch, dim=2)), dim=2)  # noqa: E731
        names = {"cp": cp, "block_mask": block_mask, "alibi": alibi, "compiled_step": step, "batch": whole}
        return run(bound, **names)[1]["loss"]

    for out in loopback(2).run(rank):
        torch.testing.assert_close(out, expected)


# ---- torch_compat.md -------------------------------------------------------------------------------------------------


class Compatible(Model):
    """A model whose positions are a buffer, sharded beside inputs and labels."""

    def __init__(self):
        super().__init__(layers=2)
        self.freqs_cis = self.places.weight.detach().clone()

    def forward(self, tokens):
        x = self.embed(tokens) + self.freqs_cis
        for layer in self.layers:
            x = x + layer(F.layer_norm(x, x.shape[-1:]))
        return x @ self.embed.weight.T


def compatible(world):
    """The loss of the page's program, counted as the page says, and the mean of ranks' means."""
    changed, counted = sources("torch_compat.md")
    torch.manual_seed(0)
    model, mesh = Compatible(), init_device_mesh("cpu", (world.ranks,), mesh_dim_names=("cp",))
    inputs, labels = batch(), batch().roll(-1, 1)

    def loss_fn(logits, labels):
        return run(counted, F=F, dist=dist, mesh=mesh, logits=logits, labels=labels)[1]["loss"]

    loss = run(changed, **locals())[1]["loss"].detach()
    dist.all_reduce(loss)
    gradient = model.embed.weight.grad
    dist.all_reduce(gradient)
    return (loss / world.ranks).item(), gradient / world.ranks


def test_a_program_of_torchs_names_has_the_loss_of_one_device():
    torch.manual_seed(0)
    model = Compatible()
    loss = F.cross_entropy(model(batch()).flatten(0, 1), batch().roll(-1, 1).flatten())
    loss.backward()
    for found, gradient in spawn(2, compatible):
        assert abs(found - loss.item()) < 1e-5
        torch.testing.assert_close(gradient, model.embed.weight.grad)


# ---- bench.md and quickstart.md --------------------------------------------------------------------------------------


def test_a_profile_a_plan_a_report_and_an_explanation_are_printed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    [profiled], [_, looked] = sources("bench.md"), sources("quickstart.md")
    model = copy.deepcopy(tiny("Llama")).requires_grad_(True)

    def rank(world):
        cp = span.ContextParallel(world, seq_len=TOKENS, mask=span.Causal())
        q = cp.shard(torch.randn(1, HEADS, TOKENS, DIM), dim=2)
        cp.attention(q, q, q)
        exec(profiled, {"cp": cp, "model": model, "batch": labelled()})
        exec(looked, {"cp": cp})

    with contextlib.redirect_stdout(io.StringIO()) as said:
        loopback(2).run(rank)
    for words in ("attention has not run since", "imbalance 1.0", "rank 0 of 2: 1 calls", "ran: needed(2)"):
        assert words in said.getvalue()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["steps.0.json", "steps.1.json"]
