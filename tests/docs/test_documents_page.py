"""docs/documents.md tells the truth: its code runs as it stands, and gives what one device gives."""

import torch
import torch.nn.functional as F

import attnspan as span
from attnspan.testing import loopback
from tests import oracle
from tests.docs.pages import blocks
from tests.parallel.model import VOCAB


class Model(torch.nn.Module):
    """One layer that calls SDPA, with learned positions."""

    def __init__(self):
        super().__init__()
        self.tokens, self.places = torch.nn.Embedding(VOCAB, 16), torch.nn.Embedding(2048, 16)

    def forward(self, tokens, positions, mask=None):
        x = (self.tokens(tokens) + self.places(positions)).unsqueeze(1)
        out = F.scaled_dot_product_attention(x, x, x, attn_mask=mask, is_causal=mask is None)
        return out.squeeze(1) @ self.tokens.weight.T


def test_labels_end_with_documents_and_work_is_balanced():
    page = blocks("documents.md")
    tokens = torch.arange(2048).view(1, -1)
    ends = torch.tensor(page["LENGTHS"]).cumsum(0) - 1
    expected = F.pad(tokens[:, 1:], (0, 1))
    expected[0, ends] = -100
    for labels, positions, imbalance in loopback(4).run(lambda world: page["labels_and_positions"](world, tokens)):
        assert torch.equal(labels, expected)
        assert torch.equal(positions, tokens)
        assert imbalance <= 1.02
    assert page["by_positions"] == page["by_ids"] == span.Documents([[3, 2, 1]])
    assert torch.equal(page["by_offsets"].dense(6), page["by_ids"].dense(6))


def test_losses_of_packs_are_those_of_one_device():
    page, model = blocks("documents.md"), Model().requires_grad_(False)
    random = torch.Generator().manual_seed(0)
    packs = [(torch.randint(VOCAB, (1, 2048), generator=random), lengths) for lengths in ([900, 1148], [1, 2000, 47])]

    def one_device(tokens, lengths):
        logits = model(tokens, torch.arange(2048), (span.Causal() & span.Documents(lengths)).dense(2048))
        labels = F.pad(tokens[:, 1:], (0, 1))
        labels[0, torch.tensor(lengths).cumsum(0) - 1] = -100
        return F.cross_entropy(logits.transpose(1, 2), labels)

    expected = [one_device(*pack) for pack in packs]
    for found in loopback(3).run(lambda world: list(page["losses"](world, model, packs))):
        torch.testing.assert_close(found, expected)


def test_a_window_receives_its_halo_and_layers_that_differ_are_exact():
    page = blocks("documents.md")
    assert page["received"] == 127
    whole = [torch.randn(1, 2, 2048, 8, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    first, _ = oracle.attention(*whole, (page["WINDOW"] & span.Documents(page["LENGTHS"])).dense(2048), 8**-0.5)
    expected, _ = oracle.attention(first.float(), *whole[1:], page["MASK"].dense(2048), 8**-0.5)
    for found in loopback(2).run(lambda world: page["layer_by_layer"](world, *whole)):
        torch.testing.assert_close(
            found.double(), expected, rtol=0, atol=1e-5
        )  # two layers of 2e-6, and rounding between
