"""A model of your own, in plain PyTorch, served by the engine: four methods, and attention left to the engine.

Run: python examples/16_custom_model.py
"""

import torch
from torch import nn
from torch.nn import functional as F

import attnspan as span
from attnspan.engine import LayerSpec, ModelFingerprint, ModelInfo


class TinyLM(nn.Module):
    """A decoder of two layers. `vocabulary` tokens, `heads` heads of `dim` each, positions up to `longest`."""

    def __init__(self, vocabulary=50, heads=4, dim=8, layers=2, longest=256):
        super().__init__()
        self.heads, self.dim = heads, dim
        self.tokens, self.positions = nn.Embedding(vocabulary, heads * dim), nn.Embedding(longest, heads * dim)
        self.norms = nn.ModuleList(nn.LayerNorm(heads * dim) for _ in range(layers))
        self.qkv = nn.ModuleList(nn.Linear(heads * dim, 3 * heads * dim) for _ in range(layers))
        self.out = nn.ModuleList(nn.Linear(heads * dim, heads * dim) for _ in range(layers))
        self.head = nn.Linear(heads * dim, vocabulary)

    def forward(self, tokens, positions, attend):
        """(T,) tokens -> (T, V) logits; `attend(layer, query, key, value)` of (T, H, D) each."""
        x = self.tokens(tokens) + self.positions(positions)
        for layer, (norm, qkv, out) in enumerate(zip(self.norms, self.qkv, self.out, strict=True)):
            query, key, value = qkv(norm(x)).view(-1, 3, self.heads, self.dim).unbind(1)
            x = x + out(attend(layer, query, key, value).flatten(1))
        return self.head(x)

    # What an engine asks for (attnspan/engine/model.py).

    def info(self):
        layers = (LayerSpec(kv_heads=self.heads, head_dim=self.dim),) * len(self.qkv)
        weight = self.head.weight
        return ModelInfo(
            layers, vocabulary=len(weight), dtype=weight.dtype, device=weight.device, end_tokens=frozenset({0}),
            max_positions=self.positions.num_embeddings,
        )  # fmt: skip

    def step(self, batch, attention):
        logits = self(batch.tokens, batch.positions, attention.attend)
        return logits if batch.logits_to_keep is None else logits[batch.logits_to_keep]

    def fingerprint(self):
        return ModelFingerprint(self)

    def check_ready(self):
        if self.training:
            raise span.EngineError("model is in training mode; call model.eval()")


def greedy(model, prompt, new):
    """The same model without an engine: the whole sequence again for every token."""

    def attend(layer, query, key, value):
        query, key, value = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)[0].transpose(0, 1)

    tokens = list(prompt)
    for _ in range(new):
        row = torch.tensor(tokens)
        tokens.append(int(model(row, torch.arange(len(row)), attend)[-1].argmax()))
    return tokens[len(prompt) :]


torch.manual_seed(0)
model = TinyLM().eval().requires_grad_(False)
engine = span.Engine(model, pages=64, page_size=8)
prompts = [[5, 6, 7], list(range(1, 40)), [9, 10]]
params = span.SamplingParams(max_new_tokens=20, ignore_eos=True)
for prompt, answer in zip(prompts, engine.generate(prompts, params), strict=True):
    assert answer.token_ids == greedy(model, prompt, 20)
    print(f"{len(prompt)} tokens of prompt -> {answer.token_ids}")


def rank(world):
    """The same over ranks: a prompt that all of them compute, and pages spread over all."""
    spread = span.Engine(model, pages=12, page_size=2, mesh=world, context_parallel_from=16)
    return spread.generate([prompts[1]], params)[0].token_ids


for found in span.testing.loopback(3).run(rank):
    assert found == greedy(model, prompts[1], 20)
print("on three ranks: the same tokens")
print(engine)
