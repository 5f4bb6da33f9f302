"""On a CUDA device: the same tokens, with and without graphs."""

import copy

import pytest

from attnspan.engine import Engine, SamplingParams
from attnspan.errors import EngineError
from tests.engine.models import FAMILIES, greedy, prompts, tiny


def precise(family):
    """In float64, so that no near tie is decided by rounding; grouped experts know no float64."""
    model = copy.deepcopy(tiny(family))
    return model if family == "GptOss" else model.double()


@pytest.mark.cuda
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_on_cuda_are_those_of_model_generate(family):
    model, plain, asked = precise(family).to("cuda"), precise(family), prompts([5, 17, 1, 40])
    engine = Engine(model, pages=64, page_size=16, max_tokens=32, max_sequences=8)
    answers = engine.generate(asked, SamplingParams(max_new_tokens=12))
    assert [answer.token_ids for answer in answers] == [greedy(plain, prompt, 12) for prompt in asked]
    engine.check()


@pytest.mark.cuda
@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Mistral", "Gemma3", "Phi3"])
def test_graphs_give_the_same_tokens_while_requests_come_and_go(family):
    model, asked = copy.deepcopy(tiny(family)).to("cuda"), prompts([5, 17, 1, 40, 3, 9])
    found = []
    for cuda_graphs in (False, True):
        engine = Engine(model, pages=40, page_size=16, max_tokens=32, max_sequences=4, cuda_graphs=cuda_graphs)
        requests = [engine.add(prompt, SamplingParams(max_new_tokens=9 + 3 * n)) for n, prompt in enumerate(asked)]
        while engine.unfinished:
            engine.step()
        found.append([request.token_ids for request in requests])
        engine.check()
    same = sum(a == b for a, b in zip(*found, strict=True))
    assert same >= len(asked) - 1  # float32, and padding may choose another kernel: a near tie may fall otherwise


def test_graphs_are_for_cuda():
    with pytest.raises(EngineError, match="cuda_graphs=True needs a model on a CUDA device, got one on cpu"):
        Engine(tiny("Llama"), pages=8, cuda_graphs=True)
