"""Families on a CUDA device as on a CPU, over virtual ranks: what eager attention answers on one device."""

import pytest
import torch

from attnspan.integrations.huggingface import enable
from attnspan.testing import loopback
from tests.devices import on_every_device
from tests.integrations.families import BOUND, SPECS, answers, batch, enabled_answers, family, off, one_device

# Other kernels on another device, float32: twice the rounding of the CPU's own.
ELSEWHERE = 2 * BOUND


def moved(given, device):
    return {name: value.to(device) for name, value in given.items()}


def there(name, device, dtype=torch.float32):
    return family(name).to(device, dtype)


def back(found):
    loss, logits, grads = found
    return loss.cpu(), logits.cpu(), {name: grad if grad is None else grad.cpu() for name, grad in grads.items()}


def on_ranks(name, given, device, ranks, model=there):
    given = moved(given, device)
    return [
        back(each)
        for each in loopback(ranks, device).run(lambda world: enabled_answers(world, model(name, device), given))
    ]


@on_every_device
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("name", SPECS)
def test_a_family_answers_as_on_one_device(name, ranks, device):
    given = batch(name)
    true = one_device(name, given)
    for found in on_ranks(name, given, device, ranks):
        assert off(found, true)[0] < ELSEWHERE


@on_every_device
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt-oss"])
def test_documents_of_many_lengths(name, device):
    lengths = [5, 11, 7], [20, 1, 2]
    positions = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in lengths])
    given = batch(name) | {"position_ids": positions}
    true = on_ranks(name, given, "cpu", 1)[0]
    for found in on_ranks(name, given, device, 2):
        assert off(found, true)[0] < ELSEWHERE


@on_every_device
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt-oss", "bart"])
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_gradient_checkpointing(name, reentrant, device):
    given = batch(name)
    true = one_device(name, given)

    def checkpointed(name, device):
        model = there(name, device)
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        return model

    for found in on_ranks(name, given, device, 2, checkpointed):
        assert off(found, true)[0] < ELSEWHERE


@on_every_device
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt-oss"])
def test_half_precision_is_as_exact_as_one_devices(name, device):
    """By the loss and the logits; weights of this size round gradients by several percent on one device, too."""
    given = batch(name, length=61)
    true = one_device(name, given)
    one = back(answers(there(name, device, torch.bfloat16), moved(given, device)))
    for found in on_ranks(name, given, device, 3, lambda *where: there(*where, torch.bfloat16)):
        for mine, theirs, exact in zip(found[:2], one[:2], true[:2], strict=True):
            # Two ways to round differ by chance: by a quarter, over the logits; a loss is one number, within 2**-8.
            wrong, usual = ((each.double() - exact).square().mean().sqrt() for each in (mine, theirs))
            assert wrong <= 1.25 * usual + 2**-8 * exact.abs().max()


@on_every_device
def test_evaluation_with_autocast(device):
    given = batch("llama")
    true = one_device("llama", given)

    def rank(world):
        model = there("llama", device).eval()
        with enable(model, world, outputs="whole"), torch.inference_mode(), torch.autocast(device, torch.bfloat16):
            out = model(**moved(given, device))
        return out.loss.float().cpu(), out.logits.float().cpu()

    for loss, logits in loopback(2, device).run(rank):
        torch.testing.assert_close(loss, true[0], rtol=0.02, atol=0.02)  # bfloat16 has 8 bits
        torch.testing.assert_close(logits, true[1], rtol=0.05, atol=0.05 * true[1].abs().max().item())


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")  # not wanted: the bound is that of float32
def test_a_compiled_base_model_answers_as_on_one_device(name):
    given = batch(name)
    true = one_device(name, given)

    def compiled(name, device):
        model = there(name, device)
        model.model.compile(fullgraph=True)
        return model

    torch._dynamo.reset()
    [found] = on_ranks(name, given, "cuda", 1, compiled)  # one: dynamo is not for threads
    assert off(found, true)[0] < ELSEWHERE
