"""Every entry of a batch is sharded, passed, dropped or refused by a rule that its `done` tells."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnspan.errors import ShardError
from attnspan.layouts import Balanced
from attnspan.masks import Causal, Documents, KeyPadding, SlidingWindow
from attnspan.parallel import ContextParallel
from attnspan.testing import loopback
from attnspan.transports.counting import Counting
from tests.layouts.strategies import lengths_of

S, B = 8, 2
IDS = torch.arange(B * S).view(B, S)
ONES = torch.ones(B, S, dtype=torch.int64)
RIGHT = torch.tensor([[1] * 8, [1] * 5 + [0] * 3])
PAIR = {"full": Causal(), "window": SlidingWindow(3)}
CAUSAL = Causal()
ROWS = Causal() & Documents([[3, 5], [8]])


def on_two(do, mask=CAUSAL, **options):
    def rank(world):
        cp = ContextParallel(Counting(world), seq_len=S, mask=mask, **options)
        found = do(cp)
        travelled = {(event.kind, event.what) for event in cp.transport.log}
        assert travelled <= {("agree", "the first batch")}, "no tensor travels, and only the first is compared"
        return found

    return loopback(2).run(rank)


def test_what_runs_along_the_sequence_is_sharded_and_the_rest_passes_as_it_came():
    batch = {
        "input_ids": IDS,
        "labels": IDS + 1,
        "position_ids": torch.arange(3 * B * S).view(3, B, S),
        "inputs_embeds": torch.rand(B, S, 5),
        "loss_weights": torch.rand(B, S),  # any name: (B, S, ...)
        "features": torch.rand(B, S, 4, 3),
        "document": torch.arange(S),
        "scale": torch.tensor(2.0),
        "classes": torch.tensor([0, 1]),
        "pixels": torch.rand(B, 3, 5, 5),
        "names": ["a", "b"],
        "text": "tokens",
        "options": {"use_cache": False},
        "nothing": None,
    }
    along = {"position_ids": 2, "document": 0}
    passed = {"scale", "classes", "pixels", "names", "text", "options", "nothing"}

    def rank(cp):
        before = copy.deepcopy(batch)
        found = cp.shard_batch(batch)
        assert list(found) == list(batch)
        for name, value in batch.items():
            if name in passed:
                assert found[name] is value
                assert found.done[name] == "passed as it came"
            else:
                assert torch.equal(found[name], cp.shard(value, along.get(name, 1)))
                assert found.done[name] == f"sharded in dim {along.get(name, 1)}"
        assert found.session is cp
        assert all(torch.equal(before[name], batch[name]) for name in batch if name not in passed)

    on_two(rank)


def test_positions_are_added_unless_they_are_given():
    def rank(cp):
        added = cp.shard_batch({"input_ids": IDS})
        assert torch.equal(added["position_ids"], cp.positions.unsqueeze(0))
        assert added.done["position_ids"] == "added: the global positions"
        none = cp.shard_batch({"input_ids": IDS, "position_ids": None})
        assert torch.equal(none["position_ids"], added["position_ids"])
        own = cp.shard_batch({"input_ids": IDS, "position_ids": torch.arange(S)[None] % 3})
        assert torch.equal(own["position_ids"], cp.positions[None] % 3)
        assert dict(**own).keys() == own.keys() == {"input_ids", "position_ids"}

    on_two(rank)


@pytest.mark.parametrize("shape", [(S,), (1, S), (B, S), (3, 1, S), (3, B, S)])
def test_positions_of_all_rows_serve_rows_that_lie_differently(shape):
    layout = Balanced(ROWS, ranks=2, chunk=1, per_row=True)
    positions = torch.arange(S).expand(shape)

    def rank(cp):
        found = cp.shard_batch({"input_ids": IDS, "position_ids": positions})
        assert torch.equal(found["input_ids"], cp.shard(IDS))
        assert torch.equal(found["position_ids"], cp.positions.expand(*shape[:-2], B, -1))
        assert torch.equal(cp.shard_batch({"input_ids": IDS})["position_ids"], cp.positions)

    on_two(rank, mask=ROWS, layout=layout)


# ---- labels ----------------------------------------------------------------------------------------------------------


@given(lengths_of(S), lengths_of(S), st.booleans(), st.booleans())
def test_shifted_labels_are_those_of_the_next_token_within_documents(one, other, rows, packed):
    mask = CAUSAL & Documents([one, other] if rows else one) if packed else CAUSAL
    each = ([one, other] if rows else [one, one]) if packed else [[S], [S]]
    whole = IDS.clone()
    for row, lengths in enumerate(each):
        ends = torch.tensor(lengths).cumsum(0) - 1
        whole[row] = whole[row].roll(-1)
        whole[row, ends] = -100

    def rank(world):
        cp = ContextParallel(world, seq_len=S, mask=mask)
        found = cp.shard_batch({"input_ids": IDS, "labels": IDS}, shift_labels=True)
        assert torch.equal(found["shift_labels"], cp.shard(whole))
        assert torch.equal(found["labels"], cp.shard(IDS))
        assert torch.equal(found["shift_labels"], cp.shift(found["labels"], -1, -100, documents=packed))

    loopback(2).run(rank)


# ---- padding ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mask", "given", "done"),
    [
        (CAUSAL, None, "dropped: none"),
        (CAUSAL, ONES, "dropped: all ones"),
        (PAIR, ONES.bool(), "dropped: all ones"),
        (CAUSAL & KeyPadding([8, 5]), RIGHT, "dropped: the session's mask hides as much"),
        (CAUSAL & KeyPadding([8, 4]), RIGHT.float(), "dropped: the session's mask hides as much"),
        ({name: mask & KeyPadding([8, 5]) for name, mask in PAIR.items()}, RIGHT, "dropped: the session's mask hides"),
    ],
    ids=["none", "ones", "ones for two masks", "in the mask", "more in the mask", "in both masks"],
)
def test_an_attention_mask_that_the_session_has_is_dropped(mask, given, done):
    def rank(cp):
        found = cp.shard_batch({"input_ids": IDS, "attention_mask": given})
        assert "attention_mask" not in found
        assert found.done["attention_mask"].startswith(done)
        assert found.session is cp

    on_two(rank, mask=mask)


@pytest.mark.parametrize(
    ("mask", "use"),
    [
        (CAUSAL, "cp.with_mask(cp.mask & span.KeyPadding([8, 5]))"),
        (CAUSAL & KeyPadding([8, 6]), "cp.with_mask(cp.mask & span.KeyPadding([8, 5]))"),
        (
            PAIR | {"window": SlidingWindow(3) & KeyPadding([8, 5])},
            "cp.with_mask({name: mask & span.KeyPadding([8, 5]) for name, mask in cp.masks.items()})",
        ),
    ],
    ids=["not in the mask", "too little in the mask", "in one of two"],
)
def test_padding_that_the_session_lacks_is_refused_with_the_session_that_has_it(mask, use):
    import attnspan as span

    batch = {"input_ids": IDS, "attention_mask": RIGHT}

    def rank(cp):
        with pytest.raises(ShardError) as error:
            cp.shard_batch(batch)
        assert f"use {use}, or shard_batch(..., padding='mask')" in str(error.value)
        better = eval(use, {"cp": cp, "span": span})  # the expression does what it says
        assert better.shard_batch(batch).session is better
        found = cp.shard_batch(batch, padding="mask")
        assert found.session.masks == better.masks
        assert found.session.layout == cp.layout  # what was sharded before is still a shard
        assert found.done["attention_mask"] == "made a mask: span.KeyPadding([8, 5])"
        assert torch.equal(found["input_ids"], cp.shard(IDS))

    on_two(rank, mask=mask)


# ---- what is refused -------------------------------------------------------------------------------------------------

WRONG = {
    "no dict": (lambda cp: cp.shard_batch([IDS]), "batch must be a dict of tensors by name, got list"),
    "left padding": ({"attention_mask": RIGHT.flip(1)}, "attention_mask pads row 1 on the left, which moves the posit"),
    "holes": ({"attention_mask": torch.tensor([[1, 0, 1, 1, 1, 1, 1, 1]] * 2)}, "attention_mask has holes in row 0;"),
    "four dims": (
        {"attention_mask": torch.ones(B, 1, S, S)},
        "attention_mask of shape (2, 1, 8, 8) says which query sees which key, which a session is told by its mask: ",
    ),
    "numbers to add": (
        {"attention_mask": torch.full((B, S), -1e9)},
        "attention_mask must be ones and zeros, got other",
    ),
    "a shard's": ({"attention_mask": ONES[:, :4]}, "must be (2, 8), the whole batch's, got shape (2, 4)"),
    "other rows": ({"attention_mask": ONES[:1]}, "must be (2, 8), the whole batch's, got shape (1, 8)"),
    "no mask": ({"attention_mask": "causal"}, "attention_mask must be a tensor of (B, S) or None, got str"),
    "cu_seqlens": (
        {"cu_seq_lens_q": torch.tensor([0, 3, 8])},
        "cu_seq_lens_q: documents are told by the session's mask, as in cp.with_mask(span.Causal() & ",
    ),
    "another length": (
        {"labels": IDS[:, :7]},
        "labels: tensor must be whole, with seq_len=8 tokens in dim 1, got shape",
    ),
    "labels of rows": (
        {"labels": torch.tensor([0, 1])},
        "labels must have its sequence in dim 1, got shape (2,); if it has none, dims={'labels': None} passes it",
    ),
    "labels of other rows": (
        {"labels": IDS[:1]},
        "must have as many batch rows each, got {'input_ids': 2, 'labels': 1}",
    ),
    "a list": ({"labels": IDS.tolist()}, "labels must be a tensor, got list"),
    "tensors inside": ({"images": [torch.ones(2)]}, "images holds things that may be tensors; give each its own name"),
    "a dict inside": ({"more": {"ids": IDS}}, "more holds things that may be tensors; give each its own name"),
    "two such dims": ({"bias": torch.ones(B, S, S)}, "bias of shape (2, 8, 8) may or may not run along the sequence"),
    "a late dim": ({"bias": torch.ones(B, 3, S)}, "say so by dims={'bias': its dim, or None}"),
    "other rows of any name": ({"table": torch.ones(5, S)}, "table of shape (5, 8) may or may not run along"),
    "dims of nothing": (
        lambda cp: cp.shard_batch({"input_ids": IDS}, dims={"label": 1}),
        "dims must name entries of the batch other than attention_mask, got 'label'",
    ),
    "dims of the mask": (
        lambda cp: cp.shard_batch({"attention_mask": RIGHT}, dims={"attention_mask": 1}),
        "other than attention_mask, got 'attention_mask'",
    ),
    "another padding": (
        lambda cp: cp.shard_batch({}, padding="drop"),
        "padding must be one of refuse, mask, got 'drop'",
    ),
    "no labels": (
        lambda cp: cp.shard_batch({"input_ids": IDS}, shift_labels=True),
        "shift_labels=True makes them from",
    ),
    "shards": (lambda cp: cp.shard_batch({"input_ids": cp.shard(IDS)}), "input_ids: tensor is a shard already"),
    "rows of the mask": (
        lambda cp: cp.with_mask(CAUSAL & KeyPadding([8, 5, 5])).shard_batch({"input_ids": IDS}),
        "the session's mask has 3 batch rows, the batch 2",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_told_is_refused(name):
    wrong, message = WRONG[name]
    act = wrong if callable(wrong) else lambda cp: cp.shard_batch({"input_ids": IDS, **wrong})

    def rank(cp):
        with pytest.raises(ShardError) as error:
            act(cp)
        assert message in str(error.value)

    on_two(rank)


def test_dims_tell_what_names_and_shapes_do_not():
    square = torch.rand(S, S)

    def rank(cp):
        batch = {"input_ids": IDS, "bias": square, "table": square, "labels": torch.tensor([0, 1])}
        found = cp.shard_batch(batch, dims={"bias": 1, "table": None, "labels": None})
        assert torch.equal(found["bias"], cp.shard(square, dim=1))
        assert found["table"] is square
        assert found["labels"] is batch["labels"]
        late = cp.shard_batch({"position_ids": torch.arange(3 * S).view(S, 3)}, dims={"position_ids": 0})
        assert torch.equal(late["position_ids"], cp.shard(torch.arange(3 * S).view(S, 3), dim=0))

    on_two(rank)


def test_as_many_rows_as_tokens_are_no_reason_to_guess():
    def rank(world):
        cp, square = ContextParallel(world, seq_len=2, mask=CAUSAL), IDS[:, :2]
        assert torch.equal(cp.shard_batch({"input_ids": square})["input_ids"], cp.shard(square))
        with pytest.raises(ShardError, match="may or may not run along the sequence of 2 tokens"):
            cp.shard_batch({"input_ids": square, "classes": torch.tensor([0, 1])})

    loopback(2).run(rank)
