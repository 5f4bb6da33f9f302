"""torch.compile around an enabled model, or in it: the answers of one device, and batches of other documents do not
compile anew.
"""

import warnings
from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from transformers.masking_utils import and_masks, causal_mask_function, chunked_overlay, sliding_window_overlay

from attnspan.integrations.huggingface import enable
from attnspan.integrations.huggingface.masking import requested_mask
from attnspan.testing import loopback
from tests.integrations import images
from tests.integrations.families import BOUND, answers, batch, family, gradients, off, one_device


def layers(model, backend):
    for layer in model.model.layers:
        layer.compile(fullgraph=True, backend=backend)
    return model


def base(model, backend):
    model.model.compile(fullgraph=True, backend=backend)
    return model


def whole(model, backend):
    """Not in one graph: a batch is cut between two."""
    return torch.compile(model, backend=backend)


def packed(name, seed):
    lengths = [5, 11 - seed, 7 + seed], [20 - seed, 1 + seed, 2]
    positions = [torch.cat([torch.arange(length) for length in row]) for row in lengths]
    return batch(name, seed=seed) | {"position_ids": torch.stack(positions)}


@pytest.fixture(autouse=True)
def _afresh():
    torch._dynamo.reset()
    with warnings.catch_warnings():
        # Dynamo looks at an input's .grad, whatever the input is.
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf", UserWarning)
        yield
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("name", "how", "graphs"),
    [
        ("llama", whole, 1),
        pytest.param("gemma2", base, 1, marks=pytest.mark.slow),
        pytest.param("llama4", whole, 1, marks=pytest.mark.slow),
        ("gemma3", layers, 2),
    ],
)
def test_a_compiled_model_answers_as_on_one_device(name, how, graphs):
    givens = [packed(name, seed) for seed in range(3)]
    true = [one_device(name, given, use_cache=False) for given in givens]
    counter = CompileCounterWithBackend("aot_eager")

    def rank(world):  # one: dynamo is not for threads
        model, found = family(name), []
        with enable(model, world) as handle:
            run = how(model, counter)
            for given in givens:
                model.zero_grad()
                out = run(**given)
                out.loss.backward()
                handle.session.average_gradients(model)
                found.append((out.loss.detach(), handle.unshard(out.logits.detach()), gradients(model)))
            handle.assert_used(passes=3)
        return found

    (found,) = loopback(1).run(rank)
    for one, other in zip(found, true, strict=True):
        assert off(one, other)[0] < BOUND
    assert counter.frame_count == graphs


@pytest.mark.parametrize(
    ("function", "asked"),
    [
        (causal_mask_function, {}),
        (and_masks(sliding_window_overlay(4), causal_mask_function), {"local_size": 4}),
        (and_masks(chunked_overlay(5, torch.zeros(1).long()), causal_mask_function), {"local_size": 5}),
    ],
)
def test_compiled_code_knows_a_mask_by_its_arguments(monkeypatch, function, asked):
    config = SimpleNamespace(sliding_window=4, attention_chunk_size=5)
    by_function = requested_mask(1, 9, 9, mask_function=function, config=config, allow_is_causal_skip=True, **asked)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert by_function == requested_mask(1, 9, 9, config=config, allow_is_causal_skip=True, **asked)


@pytest.mark.parametrize(
    ("name", "how"),
    [("gemma3", "layers"), *(pytest.param(name, "model", marks=pytest.mark.slow) for name in ("gemma3", "llava"))],
)
def test_a_compiled_model_of_images_answers_as_on_one_device(name, how):
    givens = [images.batch(name, seed=seed, images=rows) for seed, rows in enumerate([((2, 11), (6,)), ((), (4, 15))])]
    true = [answers(images.family(name), given, use_cache=False) for given in givens]

    def rank(world):
        model, found = images.family(name), []
        with enable(model, world):
            run = torch.compile(model, backend="aot_eager") if how == "model" else model
            for layer in model.model.language_model.layers if how == "layers" else ():
                layer.compile(fullgraph=True, backend="aot_eager")
            for given in givens:
                model.zero_grad()
                out = run(**given)
                out.loss.backward()
                found.append((out.loss.detach(), out.logits.detach(), gradients(model)))
        return found

    for found, wanted in zip(loopback(1).run(rank)[0], true, strict=True):
        assert off(found, wanted)[0] < BOUND
