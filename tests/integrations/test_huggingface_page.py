"""docs/huggingface.md tells the truth: its blocks are run as they stand, and give what one device gives."""

import re
import tempfile
import warnings
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader

from attnspan.testing import loopback
from tests.integrations import images
from tests.integrations.families import BOUND, answers, batch, family, gradients, off, one_device
from tests.integrations.test_training import Texts, joined, tolerant
from tests.processes import spawn

PAGE = Path(__file__).parents[2] / "docs" / "huggingface.md"


def blocks():
    """What the page's blocks define."""
    names = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL):
        exec(compile(block, PAGE.name, "exec"), names)
    return names


@pytest.fixture(scope="module")
def page():
    return blocks()


def test_a_step_is_that_of_one_device(page):
    true = one_device("llama", batch())

    def rank(world):
        model = family("llama")
        return page["step"](world, model, batch()), gradients(model)

    for loss, grads in loopback(3).run(rank):
        assert off((torch.tensor(loss), true[1], grads), true)[0] < BOUND


def test_a_step_with_images_is_that_of_one_device(page):
    given = images.batch("gemma3")
    true = answers(images.family("gemma3"), given, use_cache=False)

    def rank(world):
        model = images.family("gemma3")
        return page["ask"](world, model, given), gradients(model)

    for loss, grads in loopback(2).run(rank):
        assert off((torch.tensor(loss), true[1], grads), true)[0] < BOUND


def test_accumulated_batches_are_one_mean_over_their_tokens(page):
    givens = [batch(), batch(seed=1, length=17)]
    count = sum((given["labels"][:, 1:] != -100).sum() for given in givens)
    true = [one_device("llama", given, num_items_in_batch=count) for given in givens]
    summed = {name: true[0][2][name] + true[1][2][name] for name in true[0][2]}

    def rank(world):
        model = family("llama")
        return page["accumulate"](world, model, givens), gradients(model)

    for loss, grads in loopback(2).run(rank):
        assert off((torch.tensor(loss), true[0][1], grads), (true[0][0] + true[1][0], true[0][1], summed))[0] < BOUND


def test_layers_are_told(page):
    assert page["layers"](family("mistral"))[1] == (
        "model.layers.1.self_attn: 4 query heads, 2 key heads of 8, scale 0.354, causal, window 5"
    )


def test_evaluation_is_that_of_one_device(page):
    true = one_device("llama", batch())
    for perplexity, logits in loopback(2).run(lambda world: page["perplexity"](world, family("llama"), batch())):
        assert perplexity == pytest.approx(true[0].exp().item(), rel=1e-4)
        torch.testing.assert_close(logits, true[1], rtol=1e-4, atol=1e-4)  # float32 through two layers


def process(world):
    from accelerate import Accelerator
    from transformers import TrainingArguments

    tolerant()
    joined(world)
    page, mesh = blocks(), init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "cp"))
    model = family("llama")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    looped = page["loop"](Accelerator(cpu=True), mesh, model, optimizer, DataLoader(Texts(2), batch_size=2))
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder, max_steps=1, logging_steps=1, per_device_train_batch_size=2, save_strategy="no", report_to=[],
            use_cpu=True, disable_tqdm=True, log_level="error",
        )  # fmt: skip
        return looped, page["train"](mesh, family("llama"), args, Texts(2))


@pytest.mark.slow
def test_a_loop_and_a_trainer_begin_with_the_loss_of_one_device():
    with warnings.catch_warnings():
        tolerant()
        true = one_device("llama", next(iter(DataLoader(Texts(2), batch_size=2))))[0].item()
    for losses in spawn(2, process, timeout=120):
        assert losses == pytest.approx((true, true), rel=1e-4)
