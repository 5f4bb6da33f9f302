"""What looks at other tokens without attention is refused: it would be computed of one rank's tokens, and wrong."""

import copy

import pytest
import transformers

from attnspan.integrations.huggingface import enable
from attnspan.testing import loopback
from tests.integrations.families import SIZES, batch, family
from tests.integrations.test_enabling import BERT, refusal


class Moved(transformers.LlamaModel):
    """Adds to every token the one before."""

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, **more):
        out = super().forward(input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, **more)
        out.last_hidden_state[:, 1:] += out.last_hidden_state.roll(1, 1)[:, 1:]
        return out


class First(transformers.LlamaModel):
    """Takes the first token for all."""

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, **more):
        out = super().forward(input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, **more)
        return out.last_hidden_state[:, 0]


class Mean(transformers.LlamaModel):
    """Takes the mean of all tokens, which its source does not tell."""

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, **more):
        out = super().forward(input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, **more)
        return out.last_hidden_state.mean(1)


class Tokens(transformers.LlamaModel):
    """Returns a tensor, of each token."""

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, **more):
        out = super().forward(input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, **more)
        return out.last_hidden_state


def mobile():
    sizes = {"embedding_size": 16, "intra_bottleneck_size": 32, "num_feedforward_networks": 1}
    return transformers.MobileBertForMaskedLM(transformers.MobileBertConfig(**BERT | sizes))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            mobile,
            "mobilebert.embeddings (MobileBertEmbeddings) looks at tokens beside a token's own, "
            "nn.functional.pad(inputs_embeds[:, 1:]",
        ),
        (
            lambda: Moved(transformers.LlamaConfig(**SIZES)),
            "the model (Moved) looks at tokens beside a token's own, out.last_hidden_state",
        ),
        (
            lambda: First(transformers.LlamaConfig(**SIZES)),
            "the model (First) looks at tokens beside a token's own, out.last_hidden_state[:, 0], which is not served",
        ),
    ],
    ids=["MobileBERT", "moved", "first"],
)
def test_a_module_that_mixes_tokens_is_refused(model, message):
    assert refusal(lambda world: enable(model(), world), ranks=1).startswith(message)


def text_model():
    """Its pooled output is one token's, at a place that is looked for."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    return transformers.Tipsv2TextModel(transformers.Tipsv2TextConfig(**sizes, num_attention_heads=4)).eval()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: Mean(transformers.LlamaConfig(**SIZES)), "the model returned 'a tensor' of shape (2, 32), which is"),
        (text_model, "the model returned 'pooler_output' of shape (2, 32), which is not of each token of a rank"),
    ],
    ids=["mean", "pooled"],
)
def test_an_output_of_all_tokens_is_refused(model, message):
    whole = model()

    def rank(world):
        built = copy.deepcopy(whole)
        enable(built, world)
        built(input_ids=batch()["input_ids"])

    assert refusal(rank).startswith(message)


def test_tensors_and_hidden_states_of_each_token_are_not_refused():
    whole = Tokens(transformers.LlamaConfig(**SIZES))

    def rank(world):
        tensor, model = copy.deepcopy(whole), family("llama")
        enable(tensor, world), enable(model, world)
        given = {"input_ids": batch()["input_ids"]}
        return tensor(**given).shape[1], model(**given, output_hidden_states=True).hidden_states[0].shape[1]

    assert loopback(2).run(rank) in ([(12, 12), (11, 11)], [(11, 11), (12, 12)])
