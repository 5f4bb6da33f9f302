"""An attached model attends by the session that sharded its input: a forgotten `use` is refused, not trained on."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import attnspan as span
from attnspan.errors import AttentionError, ShardError
from attnspan.testing import loopback
from tests.parallel.models import Stack, dense, model, parallel, same, whole

LENGTH = 16
FORGOTTEN = r"the model attends by a session of 16 tokens under .* call attached.use\(session\) with the session that"


def documents(*lengths):
    return span.Causal() & span.Documents(lengths)


def sessions(world, layout="auto"):
    cp = span.ContextParallel(world, seq_len=LENGTH, mask=documents(5, 11), layout=layout)
    return cp, cp.with_mask(documents(9, 7))


ATTACHED = {
    "whole": lambda cp, mine: cp.attach(mine),
    "layers": lambda cp, mine: cp.attach(mine, "layers.*"),
    "inner": lambda cp, mine: cp.attach(mine, "layers.*.enter") and cp.attach(mine, ["layers.0.leave"]),
}


@pytest.mark.parametrize("layout", ["auto", span.HeadTail(ranks=2)])
@pytest.mark.parametrize("attached", ATTACHED)
def test_a_forgotten_use_is_refused_where_token_counts_are_equal(attached, layout):
    def rank(world):
        (cp, following), mine = sessions(world, layout), model()
        using = ATTACHED[attached](cp, mine)
        ids = following.shard(whole(LENGTH))
        assert ids.shape == cp.shard(whole(LENGTH)).shape
        with pytest.raises(ShardError, match=FORGOTTEN):
            mine(ids)
        assert cp.report().calls == 0
        using.use(following)
        if attached == "whole":
            same(parallel(following, mine, mine, whole(LENGTH)), dense(model(), whole(LENGTH), documents(9, 7)))
        with pytest.raises(ShardError, match=FORGOTTEN):
            mine(cp.shard(whole(LENGTH)))

    loopback(2).run(rank)


def test_a_shard_is_found_in_keywords_and_lists_too():
    class Nested(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model()

        def forward(self, *, batch):
            return self.inner(batch["inputs"][0])

    def rank(world):
        (cp, following), mine = sessions(world), Nested()
        with cp.attach(mine), pytest.raises(ShardError, match=FORGOTTEN):
            mine(batch={"inputs": [following.shard(whole(LENGTH))]})

    loopback(1).run(rank)


def test_a_style_compares_and_is_told_of_the_next_batch():
    def rank(world):
        (cp, following), mine = sessions(world), model()
        style = span.ContextParallelStyle(cp)
        for layer in mine.layers:
            style._apply(layer, None)
        with pytest.raises(ShardError, match=FORGOTTEN):
            mine(following.shard(whole(LENGTH)))
        style.use(following)
        same(parallel(following, mine, mine, whole(LENGTH)), dense(model(), whole(LENGTH), documents(9, 7)))
        with pytest.raises(ShardError, match=FORGOTTEN):
            mine(cp.shard(whole(LENGTH)))

    loopback(2).run(rank)


def test_sdpa_and_flex_compare_where_a_shard_is_seen():
    x = torch.randn(1, 2, LENGTH, 4)

    def rank(world):
        cp, following = sessions(world)
        q, k, v = (following.shard(x, dim=2) for _ in range(3))
        with cp.sdpa(), pytest.raises(ShardError, match="use one ContextParallel for a whole batch"):
            F.scaled_dot_product_attention(q, k, v, is_causal=True)
        with pytest.raises(ShardError, match="use one ContextParallel for a whole batch"):
            cp.flex_attention(q, k, v, block_mask=cp.mask)

    loopback(2).run(rank)


def test_where_counts_differ_nobody_is_told_to_shard_again():
    def rank(world):
        cp, mine = span.ContextParallel(world, seq_len=LENGTH, mask=span.Causal()), model()
        longer = cp.with_mask(span.Causal(), seq_len=LENGTH + 4)
        with cp.attach(mine):
            with pytest.raises(ShardError, match=r"call attached.use"):
                mine(longer.shard(whole(LENGTH + 4)))
            with pytest.raises(AttentionError, match=r"attached.use\(session\)") as caught:  # what bears no mark
                mine(longer.shard(whole(LENGTH + 4)) * 1)
        assert "shard it first" not in str(caught.value)

    loopback(2).run(rank)


@pytest.mark.parametrize("again", ["reentrant", "non-reentrant"])
def test_a_region_that_runs_again_is_compared_with_the_session_of_its_first_run(again):
    true = [dense(model(), whole(LENGTH), documents(*lengths)) for lengths in ((5, 11), (9, 7))]

    def rank(world):
        (cp, following), mine = sessions(world), model()
        with cp.attach(mine) as using:
            outs = []
            for batch in (cp, following):
                using.use(batch)
                shard = batch.shard(whole(LENGTH)).requires_grad_()
                outs.append((batch, checkpoint(mine, shard, use_reentrant=again == "reentrant")))
            for (batch, out), (true_out, true_gradients) in zip(outs, true, strict=True):
                mine.zero_grad()
                batch.mean_loss(out.square()).backward()
                batch.average_gradients(mine)
                gradients = {name: p.grad.clone() for name, p in mine.named_parameters()}
                same((batch.unshard(out.detach()), gradients), (true_out, true_gradients))

    loopback(1).run(rank)


class Embedded(nn.Module):
    """Tokens in, as a language model has them."""

    def __init__(self):
        super().__init__()
        self.embed, self.inner = nn.Embedding(10, 16, dtype=torch.float64), model()

    def forward(self, tokens):
        return self.inner(self.embed(tokens))


@pytest.mark.parametrize(
    ("floating", "backend"),
    [
        (False, "aot_eager"),
        (True, "eager"),
        pytest.param(False, "eager", marks=pytest.mark.slow),
        pytest.param(True, "aot_eager", marks=pytest.mark.slow),
    ],
)
def test_a_model_that_is_compiled_whole_compares_when_it_runs(backend, floating):
    torch._dynamo.reset()
    tokens = whole(LENGTH) if floating else torch.arange(LENGTH).view(1, -1) % 10

    def rank(world):
        (cp, following), mine = sessions(world), model() if floating else Embedded()
        with cp.attach(mine) as using:
            count = CompileCounterWithBackend(backend)
            fast = torch.compile(mine, fullgraph=True, backend=count)
            for batch in (cp, following):
                using.use(batch)
                shard = batch.shard(tokens)
                torch.testing.assert_close(fast(shard), mine(shard))
                fast(shard).sum().backward()
            assert count.frame_count == 1
            with pytest.raises(ShardError, match=FORGOTTEN):
                fast(cp.shard(tokens))
            fast(following.shard(tokens))

    loopback(1).run(rank)
    torch._dynamo.reset()


def test_two_models_and_two_sessions_do_not_mix():
    def rank(world):
        (cp, following), first, second = sessions(world), model(), Stack().double()
        with cp.attach(first), following.attach(second):
            first(cp.shard(whole(LENGTH)))
            second(following.shard(whole(LENGTH)))
            with pytest.raises(ShardError, match=FORGOTTEN):
                first(following.shard(whole(LENGTH)))
            with pytest.raises(ShardError, match=FORGOTTEN):
                second(cp.shard(whole(LENGTH)))
            first(cp.shard(whole(LENGTH)))  # and nothing is left behind

    loopback(2).run(rank)
