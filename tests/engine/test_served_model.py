"""Any model with the four methods of `ServedModel` is served, and held to what it says of itself."""

import dataclasses

import pytest
import torch
from torch import nn

from attnspan import Affine, Engine, EngineError, Lightning, SamplingParams
from attnspan.engine import LayerSpec, ModelFingerprint, ModelInfo, ServedModel, StateSpec
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
        return logits if batch.logits_to_keep is None else logits[batch.logits_to_keep]

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


# ---- recurrent layers ------------------------------------------------------------------------------------------------

CONVOLUTION, RECURRENCE, OWN = range(3)


class Recurrent(Plain):
    """A window of attention, a convolution, a recurrence, and a function of its own, one after another."""

    windows = (5,)

    def __init__(self):
        super().__init__()
        width = HEADS * DIM
        self.filters = nn.Parameter(torch.randn(width, 3), requires_grad=False)
        self.mixed = nn.Linear(width, 3 * width).requires_grad_(False)

    def info(self):
        states = StateSpec.convolution(HEADS * DIM, 3), StateSpec((HEADS, DIM, DIM)), StateSpec((HEADS * DIM,))
        return dataclasses.replace(super().info(), states=states)

    def forward(self, tokens, positions, attend, conv1d, recurrence):
        x = self.embed(tokens)
        query, key, value = self.qkv[0](x).unflatten(-1, (-1, DIM)).split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        x = x + attend(0, query, key, value).flatten(1)
        x = x + conv1d(CONVOLUTION, x, self.filters).tanh()
        query, key, value = self.mixed(x).view(1, len(x), 3, HEADS, DIM).unbind(2)
        x = x + recurrence(RECURRENCE, Lightning(query, key, value, torch.full((HEADS,), -0.2))).flatten(2)[0]
        x = x + recurrence(OWN, Affine(running_mean, [x.unsqueeze(0)], (HEADS * DIM,), diagonal=True))[0]
        return self.head(x)

    def step(self, batch, attention):
        logits = self(batch.tokens, batch.positions, attention.attend, attention.conv1d, attention.recurrence)
        return logits if batch.logits_to_keep is None else logits[batch.logits_to_keep]


def running_mean(x, mean):
    outs = []
    for token in x.unbind(1):
        mean = 0.8 * mean + 0.2 * token
        outs.append(mean)
    return torch.stack(outs, 1), mean


def recurrent_alone(model, prompt, new=8):
    """Every token from the whole sequence, with recurrences written out."""

    def attend(layer, query, key, value):
        key, value = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (key, value))
        back = torch.arange(len(query))[:, None] - torch.arange(len(query))
        scores = torch.einsum("qhd,khd->hqk", query, key) * DIM**-0.5
        weights = scores.masked_fill((back < 0) | (back >= 5), -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, value)

    def conv1d(state, x, weight):
        padded = torch.cat([x.new_zeros(2, x.shape[1]), x])
        return sum(padded[i : i + len(x)] * weight[:, i] for i in range(3))

    def recurrence(state, rule):
        if state == OWN:
            return running_mean(rule.inputs[0], torch.zeros(1, HEADS * DIM))[0]
        query, key, value = (x[0] for x in (rule.query, rule.key, rule.value))
        back = torch.arange(len(query))[:, None] - torch.arange(len(query))
        weights = torch.einsum("qhd,khd->hqk", query, key) * DIM**-0.5 * torch.exp(-0.2 * back) * (back >= 0)
        return torch.einsum("hqk,khd->qhd", weights, value).unsqueeze(0)

    tokens = list(prompt)
    while len(tokens) < len(prompt) + new and tokens[-1] != 39:
        row = torch.tensor(tokens)
        tokens.append(int(model(row, torch.arange(len(row)), attend, conv1d, recurrence)[-1].argmax()))
    return tokens[len(prompt) :]


SMALL = {"pages": 64, "page_size": 4, "max_sequences": 2, "max_tokens": 7, "state_every": 2, "states": 16}


def test_a_plain_model_with_recurrent_layers_gives_its_own_tokens_on_one_rank_and_two():
    model, asked = Recurrent(), prompts()
    expected = [recurrent_alone(model, prompt) for prompt in asked]
    one = Engine(model, **SMALL)
    for _ in range(2):
        assert [answer.token_ids for answer in one.generate(asked, PARAMS)] == expected
    assert one.counts.cached == 24 + 8
    few = Engine(model, **(SMALL | {"pages": 9, "states": 2, "host_pages": 9}))
    assert [answer.token_ids for answer in few.generate(asked, PARAMS)] == expected
    assert few.counts.recomputed + few.counts.swapped_out

    def rank(world):
        spread = Engine(model, mesh=world, context_parallel_from=16, **SMALL)
        return [answer.token_ids for answer in spread.generate(asked, PARAMS)]

    assert loopback(2).run(rank) == [expected, expected]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"states": ()}, r"state 0 is used, and the model's info\(\) names 0 of them"),
        ({"last": StateSpec((3,))}, r"state 2 is used as float32 of shape \(32,\), and info\(\) says .*\(3,\)"),
        (
            {"last": StateSpec((32,), torch.float64)},
            r"state 2 is used as float32 .*, and info\(\) says float64 of shape",
        ),
        ({"more": StateSpec((2,))}, "3 of 4 recurrent states were used in a call of the model"),
    ],
)
def test_states_are_used_as_the_model_says(changes, why):
    class Other(Recurrent):
        def info(self):
            states = super().info().states
            states = changes.get("states", (*states[:2], changes.get("last", states[2])))
            return dataclasses.replace(super().info(), states=(*states, *filter(None, [changes.get("more")])))

    with pytest.raises(ModelError, match=why):
        Engine(Other(), **SMALL).generate(prompts(), PARAMS)


def test_a_state_that_is_used_twice_is_refused():
    class Twice(Recurrent):
        def step(self, batch, attention):
            attention.conv1d(0, torch.zeros(len(batch.tokens), HEADS * DIM), self.filters)
            return super().step(batch, attention)

    one = Engine(Twice(), **SMALL)
    for _ in range(2):
        with pytest.raises(ModelError, match="state 0 is used twice in one step"):
            one.generate(prompts(), PARAMS)
