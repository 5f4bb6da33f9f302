"""One process without init_process_group is a session of one rank: everything runs, and nothing changes."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

import attnspan as span
from attnspan import Engine, SamplingParams
from attnspan.errors import ModelError
from attnspan.integrations.huggingface import SpanTrainer, enable
from attnspan.integrations.huggingface.training import check_neighbours
from attnspan.testing import loopback
from tests.engine.models import VOCABULARY, greedy, tiny

CPU = torch.device("cpu")


class Rows(Dataset):
    """Rows of tokens that differ."""

    def __len__(self):
        return 6

    def __getitem__(self, index):
        tokens = (torch.arange(24) * 5 + index) % VOCABULARY
        return {"input_ids": tokens, "labels": tokens}


@pytest.fixture
def model():
    assert not dist.is_initialized()
    return copy.deepcopy(tiny("Llama")).requires_grad_(True)  # the tiny one is shared


def test_an_enabled_model_has_the_loss_and_gradients_that_it_had(model):
    tokens = Rows()[0]["input_ids"].unsqueeze(0)
    plain = copy.deepcopy(model)
    plain(input_ids=tokens, labels=tokens).loss.backward()
    handle = enable(model, CPU)
    model(input_ids=tokens, labels=tokens).loss.backward()
    assert handle.ranks == 1
    handle.disable()
    for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_trainer_has_the_losses_and_weights_of_transformers(model, tmp_path, accumulation):
    def trained(trainer, model):
        args = TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=3,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=accumulation,
            report_to=[],
            use_cpu=True,
            save_strategy="no",
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        return trainer(model=model, args=args, train_dataset=Rows()).train().training_loss

    plain = copy.deepcopy(model)
    expected = trained(Trainer, plain)
    enable(model, CPU)
    assert trained(SpanTrainer, model) == pytest.approx(expected, rel=1e-5)
    for found, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mesh", [CPU, None])
def test_an_engine_has_the_tokens_of_generate(mesh):
    model, prompts = tiny("Llama"), [[5, 6, 7], [8] * 20]
    answers = Engine(model, pages=64, mesh=mesh).generate(prompts, SamplingParams(max_new_tokens=8))
    assert [answer.token_ids for answer in answers] == [greedy(model, prompt, 8) for prompt in prompts]


def test_ranks_that_trainer_cannot_deal_to_are_refused(model):
    handle = enable(model, CPU)
    with pytest.raises(ModelError, match="the handle's session is of one of 2 processes alone"):
        check_neighbours(handle, 2)
    handle.disable()
    copies = [copy.deepcopy(model) for _ in range(2)]

    def rank(world):
        handle = enable(copies[world.rank], world)
        with pytest.raises(ModelError, match="the handle's ranks are virtual"):
            check_neighbours(handle, 2)
        handle.disable()

    loopback(2).run(rank)


def test_a_session_moves_nothing(model):
    cp = span.ContextParallel(CPU, seq_len=24, mask=span.Causal())
    query = torch.randn(1, 2, 24, 8)
    torch.testing.assert_close(
        cp.unshard(cp.attention(*cp.shard([query] * 3, dim=2)), dim=2),
        torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True),
    )
    assert sum(cp.report().received) == 0
    assert cp.positions.tolist() == list(range(24))
