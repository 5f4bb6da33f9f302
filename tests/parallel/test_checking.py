"""check_model finds nothing wrong with what is right, and names the place of every classic mistake."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import attnspan as span
from attnspan.attention.inputs import Inputs
from attnspan.errors import AttentionError
from attnspan.parallel.dense_attention import DenseAttention
from attnspan.plan import Plan
from attnspan.testing import loopback
from tests import oracle
from tests.devices import here, mesh_of
from tests.processes import on_backends, spawn

WORDS, WIDTH, HEADS = 32, 16, 2


def rotated(x, positions):
    """Rotary embedding."""
    half = x.shape[-1] // 2
    angle = positions[:, None] * 10.0 ** -torch.arange(half)
    one, other = x[..., :half], x[..., half:]
    return torch.cat([one * angle.cos() - other * angle.sin(), one * angle.sin() + other * angle.cos()], -1)


class Attention(nn.Module):
    """Rotary attention. `mistake` is what it does wrong."""

    def __init__(self, mistake):
        super().__init__()
        self.enter, self.leave, self.mistake = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), mistake

    def forward(self, x, positions):
        query, key, value = self.enter(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        if self.mistake == "local positions":
            positions = torch.arange(x.shape[1])
        query, key = rotated(query, positions), rotated(key, positions)
        out = self._by_hand(query, key, value) if self.mistake == "bypass" else self._sdpa(query, key, value)
        return self.leave(out.transpose(1, 2).flatten(2))

    def _sdpa(self, *qkv):
        return F.scaled_dot_product_attention(*qkv, is_causal=True)

    def _by_hand(self, query, key, value):
        allowed = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril()
        scores = (query @ key.mT * query.shape[-1] ** -0.5).masked_fill(~allowed, -torch.inf)
        return scores.softmax(-1) @ value


class Language(nn.Module):
    """Embedding, layers, head; the second layer may have a mistake."""

    def __init__(self, mistake=None):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.layers = nn.ModuleList([Attention(None), Attention(mistake), Attention(None)])
        self.drop = nn.Dropout(0.5)

    def forward(self, tokens, positions):
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + self.drop(layer(x, positions))
        return self.head(x)


TOKENS = torch.randint(0, WORDS, (2, 23), generator=torch.Generator().manual_seed(1))
PADDED = TOKENS.clone()
PADDED[:, 9:16] = -100  # labels; ranks then hold different numbers of valid ones


def shifted(labels, cp):
    return cp.shift(labels, by=-1, fill=-100)


def shifted_locally(labels, cp):
    return torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], -100)], dim=1)


def mean(losses, valid, cp):
    return cp.mean_loss(losses, valid)


def local_mean(losses, valid, cp):
    return losses[valid].mean()


def step(labels=shifted, average=mean, inside=True, positions=None):
    """A training step as scripts have it; each argument is a place for a mistake."""

    def forward(model, batch, cp):
        tokens, targets = cp.shard(batch["tokens"]), labels(cp.shard(batch["labels"]), cp)
        where = cp.positions if positions is None else positions(tokens)
        if inside:
            with cp.sdpa():
                logits = model(tokens, where)
        else:
            logits = model(tokens, where)
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="none")
        return average(losses.view_as(targets), targets != -100, cp), logits

    return forward


CAUSAL = span.Causal()


def check(mistake=None, mask=CAUSAL, **options):
    return span.check_model(Language(mistake), {"tokens": here(TOKENS), "labels": here(PADDED)}, mask=mask, **options)


# ---- right -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize("mask", [span.Causal(), span.Causal() & span.Documents([[8, 15], [20, 3]])], ids=repr)
def test_a_right_model_is_found_right(ranks, mask):
    found = check(forward=step(), ranks=ranks, mask=mask)
    assert found.ok, str(found)
    assert found.first is None
    assert found.hints == ()
    assert found.calls == 3
    assert set(found.errors) == {"loss", "logits", *dict(Language().named_parameters())}
    found.raise_if_wrong()


@pytest.mark.parametrize("options", [{}, {"layout": span.Striped(3, chunk=2), "strategy": "ring", "ranks": 3}])
def test_plain_modules_need_no_forward_of_their_own(options):
    """Tokens are sharded, positions are given to who takes them, and without labels there is a loss too."""
    assert span.check_model(Language(), TOKENS, mask=span.Causal(), **options).ok
    encoder = nn.TransformerEncoderLayer(WIDTH, HEADS, dim_feedforward=32)
    encoder.self_attn.batch_first = True
    assert span.check_model(encoder, torch.randn(2, 23, WIDTH), mask=span.Full(), **options).ok


class Latent(nn.Module):
    """Latent attention, by the session that it is given."""

    def __init__(self):
        super().__init__()
        self.embed, self.down, self.up = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, 4), nn.Linear(4, 2 * WIDTH)

    def forward(self, tokens, cp):
        x = self.embed(tokens)
        out = cp.attention(x.unflatten(-1, (HEADS, -1)).transpose(1, 2), self.down(x), expand=self.expand)
        return out.transpose(1, 2).flatten(2)

    def expand(self, latent):
        return self.up(latent).unflatten(-1, (2, HEADS, -1)).permute(2, 0, 3, 1, 4).unbind()


def test_latent_attention_is_checked_too():
    found = span.check_model(Latent(), TOKENS, mask=span.Causal(), forward=lambda m, x, cp: m(cp.shard(x), cp), ranks=3)
    assert found.ok, str(found)


class Output(dict):
    """As transformers returns it: a mapping with attributes."""

    def __getattr__(self, name):
        return self.get(name)


class Named(nn.Module):
    """A model called as transformers' are."""

    def __init__(self, mistake=None):
        super().__init__()
        self.model, self.mistake = Language(), mistake

    def forward(self, input_ids, position_ids, labels=None):
        logits = self.model(input_ids, position_ids[0])
        if labels is None:
            return Output(logits=logits)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        return Output(loss=loss, logits=logits)


def test_batches_by_name_have_their_labels_shifted():
    found = span.check_model(Named(), {"input_ids": TOKENS, "labels": PADDED}, mask=span.Causal())
    assert found.ok, str(found)


class Apart(nn.Module):
    """Positions that the model itself makes for its layers: it is wrong between modules."""

    def __init__(self):
        super().__init__()
        self.model = Language()

    def forward(self, tokens):
        x = self.model.embed(tokens)
        for layer in self.model.layers:
            x = x + layer(x, torch.arange(tokens.shape[1]))
        return {"logits": self.model.head(x)}


def test_a_difference_between_modules_is_told_between_which():
    found = span.check_model(Apart(), TOKENS, mask=span.Causal())
    assert (found.first.where, found.first.what) == ("Apart", "its inputs agree, its output differs")
    assert found.first.inside == "model.embed agrees, model.layers.0 is given another argument 1"


@pytest.mark.parametrize("mistake", [None, "bypass"])
def test_models_that_return_dicts_are_served(mistake):
    class Returns(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = Language(mistake)

        def forward(self, tokens, positions):
            return {"logits": self.model(tokens, positions), "hidden": tokens}

    assert span.check_model(Returns(), TOKENS, mask=span.Causal()).ok is (mistake is None)

    def forward(model, batch, cp):
        losses, valid = F.cross_entropy, cp.positions >= 0
        with cp.sdpa():
            logits = model(cp.shard(batch["tokens"]), cp.positions)["logits"]
        targets = cp.shard(batch["tokens"])
        each = losses(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
        return {"loss": cp.mean_loss(each, valid.expand_as(targets)), "logits": logits}

    found = span.check_model(Returns(), {"tokens": TOKENS}, mask=span.Causal(), forward=forward)
    assert found.ok is (mistake is None)
    assert "logits" in found.errors


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_models_are_checked_without_a_forward_of_their_own(reentrant):
    class Again(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = Language()

        def forward(self, tokens, positions):
            x = self.model.embed(tokens)
            for layer in self.model.layers:
                x = x + checkpoint(layer, x, positions, use_reentrant=reentrant)
            return self.model.head(x)

    found = span.check_model(Again(), TOKENS, mask=span.Causal())
    assert found.ok, str(found)


def test_masks_that_differ_by_head_are_checked():
    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.enter = nn.Linear(8, 8)

        def forward(self, x):
            y = self.enter(x).unflatten(-1, (2, 4)).transpose(1, 2)
            return F.scaled_dot_product_attention(y, y, y).transpose(1, 2).flatten(2)

    mask = span.MaskMod(lambda b, h, q, k: (q >= k) | (h == 1), heads=2)
    found = span.check_model(Heads(), torch.randn(1, 12, 8), mask=mask)
    assert found.ok, str(found)


def test_an_attached_model_is_refused():
    def rank(world):
        cp, mine = span.ContextParallel(world, seq_len=23, mask=span.Causal()), Language()
        with cp.attach(mine), pytest.raises(AttentionError, match=r"is attached already, detach\(\) it first"):
            span.check_model(mine, TOKENS, mask=span.Causal())

    loopback(1).run(rank)


def test_attached_models_and_sessions_with_several_masks_are_checked_too():
    masks = {"full": span.Causal(), "window": span.SlidingWindow(3)}

    def forward(model, batch, cp):
        with cp.attach(model, {"layers.0": "full", "layers.*": "window"}):
            return model(cp.shard(batch), cp.positions)

    assert span.check_model(Language(), TOKENS, mask=masks, forward=forward).ok


def test_the_dense_side_is_dense_attention():
    """Of the oracle: with grouped heads, a scale, sinks and rows that see nothing."""
    mask = span.Causal() & span.KeyPadding([7, 0])
    query, key, value = (
        torch.randn(2, 4, 7, 8).double(),
        torch.randn(2, 2, 7, 8).double(),
        torch.randn(2, 2, 7, 6).double(),
    )
    attend = DenseAttention(Plan(mask, span.Contiguous(1), 7), 0.3)
    allowed = torch.stack([mask.dense(7, row=row) for row in range(2)])[:, None]
    out, lse = attend.run(Inputs(query, key, value))
    true, true_lse = oracle.attention(query, key, value, allowed, 0.3)
    torch.testing.assert_close((out, lse), (true, true_lse))
    sinks = torch.randn(4).double()
    folded = torch.logaddexp(true_lse, sinks[None, :, None])
    out, lse = attend.run(Inputs(query, key, value, sinks))
    share = (true_lse - folded).exp().unsqueeze(-1)
    torch.testing.assert_close((out, lse), (true * share, folded))


# ---- wrong -----------------------------------------------------------------------------------------------------------


def test_local_positions_in_a_module_are_found_there():
    found = check("local positions", forward=step())
    assert not found.ok
    assert (found.first.where, found.first.what) == ("layers.1", "its inputs agree, its output differs")
    assert "first difference in layers.1: its inputs agree, its output differs (error " in str(found)
    assert str(found).endswith("\ninside: layers.1.enter agrees, layers.1.leave is given another argument 0")


def test_local_positions_given_to_the_model_are_found_there():
    found = check(forward=step(positions=lambda tokens: torch.arange(tokens.shape[1])))
    assert not found.ok
    assert (found.first.where, found.first.what) == ("Language", "it is given something else")
    assert found.hints == (
        "what a model is given must be sharded by the session, positions too: cp.shard, cp.positions",
    )


def test_attention_that_bypasses_sdpa_is_found():
    found = check("bypass", forward=step())
    assert not found.ok
    assert found.first.where == "layers.1"
    assert found.calls == 2


def test_a_forgotten_block_is_found():
    found = check(forward=step(inside=False))
    assert not found.ok
    assert found.first.where == "layers.0"
    assert found.calls == 0
    assert found.hints[0].startswith("no attention ran through the session: use cp.sdpa()")


@pytest.mark.parametrize("wrong", [{"labels": shifted_locally}, {"average": local_mean}], ids=["labels", "mean"])
def test_a_wrong_loss_over_right_modules_is_told_so(wrong):
    found = check(forward=step(**wrong))
    assert not found.ok
    assert found.first is None
    assert found.errors["logits"] < found.tolerance < found.errors["loss"]
    assert found.hints == (
        "every module agrees: the difference is in the labels (cp.shift) or in the mean (cp.mean_loss)",
    )


def test_a_model_that_computes_its_own_loss_is_found():
    """As transformers' do: labels are shifted inside the shard, and every rank takes its own mean."""

    def forward(model, batch, cp):
        parts = {name: cp.shard(x) for name, x in batch.items()}
        with cp.sdpa():
            return model(**parts, position_ids=cp.positions[None])

    found = span.check_model(Named(), {"input_ids": TOKENS, "labels": PADDED}, mask=span.Causal(), forward=forward)
    assert not found.ok
    assert found.first.where == "Named"
    assert found.errors["loss"] > found.tolerance


def test_a_mean_of_means_that_happens_to_be_right_is_mentioned():
    found = span.check_model(
        Language(),
        {"tokens": TOKENS[:, :20], "labels": TOKENS[:, :20]},
        mask=span.Causal(),
        forward=step(average=every),
    )
    assert found.ok, str(found)
    assert found.hints == (
        "every rank has its own loss: their mean is right only while ranks hold equally many valid tokens",
    )


def every(losses, valid, cp):
    """A mean over all tokens of the rank; those without a label have loss 0."""
    return losses.mean()


def test_a_gradient_that_is_not_averaged_right_is_told_from_the_loss():
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, loss):
            return loss.clone()

        @staticmethod
        def backward(ctx, grad):
            return 2 * grad

    def doubled(losses, valid, cp):
        loss = cp.mean_loss(losses, valid)
        return Twice.apply(loss) if cp.ranks > 1 else loss

    found = check(forward=step(average=doubled))
    assert not found.ok
    assert found.errors["loss"] < found.tolerance
    assert found.hints[0].startswith("the loss agrees and gradients do not")
    assert "15 of 15 differ" in str(found)


def test_a_gradient_of_rounding_alone_is_not_taken_for_a_mistake():
    """A bias of keys moves all scores of a row alike: its gradient is 0, and what is left is noise."""

    class Keys(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.query, self.key, self.value = (nn.Linear(8, 8) for _ in range(3))

        def forward(self, x):
            return F.scaled_dot_product_attention(*(part(x)[:, None] for part in (self.query, self.key, self.value)))[
                :, 0
            ]

    found = span.check_model(Keys(), torch.randn(1, 64, 8), mask=span.Full())
    assert found.ok, str(found)


def test_raising_says_all_of_it():
    with pytest.raises(AttentionError, match=r"^the model is not the same on 2 ranks as on one device\n2 ranks beside"):
        check("bypass", forward=step(), raises=True)
    check(forward=step(), raises=True)


def test_modules_called_in_another_order_are_told():
    class Sometimes(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.two(self.one(x)) if x.shape[1] > 6 else self.one(x)

    found = span.check_model(Sometimes(), torch.randn(1, 9, 4), mask=span.Full())
    assert (found.first.where, found.first.what) == ("two", "modules are not called in the same order, or as often")


def test_a_batch_without_a_length_is_refused():
    with pytest.raises(AttentionError, match="seq_len must be given: the batch has no tensor"):
        span.check_model(Language(), {"n": 3}, mask=span.Causal())


# ---- real ranks ------------------------------------------------------------------------------------------------------


def _on_mesh(world):
    mesh = mesh_of(2)
    right, wrong = (check(mistake, forward=step(), mesh=mesh) for mistake in (None, "local positions"))
    return right.ok, str(right), wrong.ok, wrong.first.where, wrong.errors["loss"]


@on_backends(2)
def test_on_a_mesh_every_rank_hears_the_same(ranks, backend):
    (right, words, wrong, where, error), other = spawn(ranks, _on_mesh, backend=backend)
    assert (right, wrong, where) == (True, False, "layers.1"), words
    assert (right, words, wrong, where, error) == other
