"""Any model with the four methods of `ServedModel` is served, and held to what it says of itself."""

import pytest
import torch
from torch import nn

from attnspan import Engine, EngineError, SamplingParams
from attnspan.engine import LayerSpec, ModelFingerprint, ModelInfo, ServedModel
from attnspan.errors import ModelError
from attnspan.testing import loopback

PARAMS = SamplingParams(max_new_tokens=8)
HEADS, KV_HEADS, DIM, VOCABULARY = 4, 2, 8, 40


class Plain(nn.Module):
    """Two layers of grouped heads in plain PyTorch; the second sees a window of five."""

    windows = (None, 5)

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        width = HEADS * DIM
        self.embed, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(128, width)
        self.qkv = nn.ModuleList(nn.Linear(width, (HEADS + 2 * KV_HEADS) * DIM) for _ in self.windows)
        self.head = nn.Linear(width, VOCABULARY)
        self.eval().requires_grad_(False)

    def forward(self, tokens, positions, attend):
        x = self.embed(tokens) + self.places(positions)
        for layer, qkv in enumerate(self.qkv):
            query, key, value = qkv(x).unflatten(-1, (-1, DIM)).split([HEADS, KV_HEADS, KV_HEADS], dim=1)
            x = x + attend(layer, query, key, value).flatten(1)
        return self.head(x)

    def info(self):
        layers = tuple(LayerSpec(KV_HEADS, DIM, window=window) for window in self.windows)
        device = self.head.weight.device
        return ModelInfo(layers, VOCABULARY, torch.float32, device, frozenset({39}), max_positions=128)

    def step(self, batch, attention):
        logits = self(batch.tokens, batch.positions, attention.attend)
        return logits if batch.keep is None else logits[batch.keep]

    def fingerprint(self):
        return ModelFingerprint(self)

    def check_ready(self):
        if self.training:
            raise EngineError("model is in training mode")


def alone(model, prompt, new=8):
    """Every token from the whole sequence, with attention written out."""

    def attend(layer, query, key, value):
        key, value = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query, key) * DIM**-0.5
        back = torch.arange(len(query))[:, None] - torch.arange(len(query))
        seen = (back >= 0) & (back < (model.windows[layer] or 1000))
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), value)

    tokens = list(prompt)
    while len(tokens) < len(prompt) + new and tokens[-1] != 39:
        row = torch.tensor(tokens)
        tokens.append(int(model(row, torch.arange(len(row)), attend)[-1].argmax()))
    return tokens[len(prompt) :]


def prompts():
    draw = torch.Generator().manual_seed(0)
    return [torch.randint(0, 39, (length,), generator=draw).tolist() for length in (3, 30, 11)]


def test_a_plain_pytorch_model_gives_its_own_tokens_on_one_rank_and_two():
    model = Plain()
    expected = [alone(model, prompt) for prompt in prompts()]
    assert isinstance(model, ServedModel)
    one = Engine(model, pages=64, page_size=4, max_sequences=2, max_tokens=16)
    assert [answer.token_ids for answer in one.generate(prompts(), PARAMS)] == expected
    assert one.model is model
    one.check()

    def rank(world):
        spread = Engine(model, pages=40, page_size=2, mesh=world, context_parallel_from=8)
        return [answer.token_ids for answer in spread.generate(prompts(), PARAMS)]

    assert loopback(2).run(rank) == [expected] * 2


def test_a_model_that_has_changed_finds_nothing_of_what_it_computed_before():
    model, prompt = Plain(), prompts()[1]
    one = Engine(model, pages=64, page_size=4)
    one.generate([prompt], PARAMS)
    model.qkv[0].weight.data.neg_()
    assert one.generate([prompt], PARAMS)[0].token_ids == alone(model, prompt)
    assert one.counts.cached == 0


def test_a_model_that_leaves_out_a_layer_is_refused():
    class Forgetful(Plain):
        def step(self, batch, attention):
            return self(
                batch.tokens, batch.positions, lambda layer, q, k, v: q if layer else attention.attend(0, q, k, v)
            )

    one = Engine(Forgetful(), pages=64, page_size=4)
    with pytest.raises(ModelError, match="1 of 2 layers attended over pages in a call of the model"):
        one.generate([[5, 6]])


def test_what_a_model_says_before_a_step_is_raised():
    model = Plain()
    one = Engine(model, pages=64, page_size=4)
    model.train()
    with pytest.raises(EngineError, match="model is in training mode"):
        one.generate([[5, 6]])


def test_what_is_neither_a_served_model_nor_of_transformers_is_refused_with_both_ways_out():
    with pytest.raises(ModelError, match=r"got Linear; .*attnspan\.engine\.ServedModel"):
        Engine(nn.Linear(2, 2), pages=4)
