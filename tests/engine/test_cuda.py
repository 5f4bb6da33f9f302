"""On a CUDA device: tokens that the model says, with and without graphs, on one rank and over several.

Arithmetic there is not that of the CPU, and a near tie may fall otherwise, after which everything else differs. So each
token that was said is held to what the plain model on the CPU makes of the same prompt and the tokens said before it:
it must be the likeliest, and as likely as the engine says.
"""

import copy
import gc
import weakref

import pytest
import torch

from attnspan import Engine, SamplingParams
from attnspan.errors import EngineError
from attnspan.integrations.huggingface import PagedCache
from attnspan.testing import loopback
from tests.devices import on_every_device
from tests.engine.models import FAMILIES, logprobs_of, prompts, tiny

# Logits are of size 10, and float32 is somewhere in all of them, in transformers' softmax at least: rounding comes to
# 1e-5. A scale that is off by a tenth, a window by one key, or a soft-cap left out come to 0.05 or more.
ROUNDING = 1e-4

BY_GRAPHS = [family for family in FAMILIES if family not in ("Gemma2", "GptOss")]


def precise(family):
    """In float64, so that hardly a tie is near; grouped experts know no float64."""
    model = copy.deepcopy(tiny(family))
    return model if family == "GptOss" else model.double()


def check_said(family, requests):
    plain = precise(family)
    for request in requests:
        said = torch.tensor(request.token_ids)
        assert len(said) == request.params.max_new_tokens
        logprobs = logprobs_of(plain, request.prompt, request.token_ids)
        own = logprobs.gather(1, said.unsqueeze(1)).squeeze(1)
        assert (logprobs.amax(-1) - own).max() < ROUNDING
        assert (own - torch.tensor(request.logprobs)).abs().max() < ROUNDING


@pytest.mark.parametrize("family", FAMILIES)
@on_every_device
def test_every_token_is_the_likeliest_by_the_plain_model(family, device):
    model, asked = precise(family).to(device), prompts([5, 17, 1, 40])
    engine = Engine(model, pages=64, page_size=16, max_tokens=32, max_sequences=8)
    check_said(family, engine.generate(asked, SamplingParams(logprobs=True, max_new_tokens=12)))
    engine.check()


@pytest.mark.parametrize(
    "device",
    [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.cuda)],  # test_ranks.py
)
@pytest.mark.parametrize("family", FAMILIES)
def test_over_ranks_too(family, device):
    """One prompt under context parallelism, two in chunks; keys in pages of three ranks."""
    model, asked = copy.deepcopy(tiny(family)).to(device), prompts([5, 17, 40])

    def rank(world):
        engine = Engine(
            model, mesh=world, pages=40, page_size=16, max_tokens=16, max_sequences=4, context_parallel_from=20
        )
        requests = engine.generate(asked, SamplingParams(logprobs=True, max_new_tokens=9))
        engine.check()
        return requests

    first, *others = loopback(3, device).run(rank)
    check_said(family, first)
    for each in others:
        assert [request.token_ids for request in each] == [request.token_ids for request in first]


@on_every_device
@pytest.mark.parametrize("host_pages", [0, 30])
def test_a_pool_so_small_that_samples_must_wait(host_pages, device):
    model, asked = copy.deepcopy(tiny("Llama")).to(device), prompts([20, 30, 12, 7, 40])
    engine = Engine(model, pages=5, page_size=16, max_tokens=32, max_sequences=4, host_pages=host_pages)
    check_said("Llama", engine.generate(asked, SamplingParams(logprobs=True, max_new_tokens=30)))
    assert engine.counts.swapped_out if host_pages else engine.counts.recomputed
    engine.check()


@on_every_device
@pytest.mark.parametrize("family", ["Llama", "Gemma3"])
def test_generate_over_a_paged_cache(family, device):
    model, [prompt] = precise(family).to(device), prompts([17])
    cache = PagedCache(model, pages=64, page_size=4)
    tokens = torch.tensor([prompt], device=device)
    said = model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        past_key_values=cache,
        max_new_tokens=14,
        do_sample=False,
        pad_token_id=0,
    )[0, len(prompt) :].cpu()
    logprobs = logprobs_of(precise(family), prompt, said.tolist())
    assert (logprobs.amax(-1) - logprobs.gather(1, said.unsqueeze(1)).squeeze(1)).max() < ROUNDING


@pytest.mark.cuda
@pytest.mark.parametrize("family", FAMILIES)
def test_single_precision(family):
    model, asked = copy.deepcopy(tiny(family)).to("cuda"), prompts([5, 17, 1, 40])
    engine = Engine(model, pages=64, page_size=16, max_tokens=32, max_sequences=8)
    check_said(family, engine.generate(asked, SamplingParams(logprobs=True, max_new_tokens=12)))


@pytest.mark.cuda
@pytest.mark.parametrize("family", BY_GRAPHS)
def test_by_graphs_while_requests_come_and_go(family):
    model, asked = copy.deepcopy(tiny(family)).to("cuda"), prompts([5, 17, 1, 40, 3, 9])
    engine = Engine(model, pages=40, page_size=16, max_tokens=32, max_sequences=4, cuda_graphs=True)
    requests = [
        engine.add(prompt, SamplingParams(logprobs=True, max_new_tokens=9 + 3 * n)) for n, prompt in enumerate(asked)
    ]
    while engine.unfinished:
        engine.step()
    engine.check()
    check_said(family, requests)
    assert set(engine._runner._graphs._captured) == {1, 2, 4}


@pytest.mark.cuda
def test_warming_up_notes_every_graph():
    model = copy.deepcopy(tiny("Llama")).to("cuda")
    engine = Engine(model, pages=64, max_tokens=32, max_sequences=20, cuda_graphs=True)
    engine.warm_up()
    noted = set(engine._runner._graphs._captured)
    assert noted == {1, 2, 4, 8, 16, 20}
    check_said("Llama", engine.generate(prompts([5, 17, 1]), SamplingParams(logprobs=True, max_new_tokens=9)))
    assert set(engine._runner._graphs._captured) == noted


@pytest.mark.cuda
def test_a_graph_serves_samples_that_grow_longer_than_they_were_when_it_was_noted():
    model = copy.deepcopy(tiny("Llama")).to("cuda")
    engine = Engine(model, pages=64, page_size=16, max_tokens=64, max_sequences=2, cuda_graphs=True)
    check_said("Llama", engine.generate(prompts([3, 11]), SamplingParams(logprobs=True, max_new_tokens=400)))


@pytest.mark.cuda
def test_an_engine_that_nobody_holds_may_be_freed_while_another_notes_a_graph():
    model = copy.deepcopy(tiny("Llama")).to("cuda")

    def answered():
        engine = Engine(model, pages=40, max_tokens=32, max_sequences=4, cuda_graphs=True)
        return engine, engine.generate(prompts([5, 17]), SamplingParams(logprobs=True, max_new_tokens=4))

    ring = [answered()[0]]
    ring.append(ring)  # only the collector frees what is in it
    gone, held, kept, there = weakref.ref(ring[0]), [ring], [], []
    del ring

    def makes_garbage(*_):
        if torch.cuda.is_current_stream_capturing():
            held.clear()
            kept.append([[] for _ in range(1_000_000)])  # reason enough for the collector to come by
            there.append(gone() is not None)

    hook = model.register_forward_pre_hook(makes_garbage)
    try:
        check_said("Llama", answered()[1])
    finally:
        hook.remove()
    assert there == [True]
    gc.collect()
    assert gone() is None


@pytest.mark.cuda
def test_soft_caps_are_refused_for_graphs_and_the_model_is_served_without():
    model = copy.deepcopy(tiny("Gemma2")).to("cuda")
    with pytest.raises(EngineError, match=r"cuda_graphs=True: layer 0 has a soft-cap"):
        Engine(model, pages=40, cuda_graphs=True)
    check_said(
        "Gemma2", Engine(model, pages=40).generate(prompts([5]), SamplingParams(logprobs=True, max_new_tokens=4))
    )


def test_graphs_are_for_cuda():
    with pytest.raises(EngineError, match="cuda_graphs=True needs a model on a CUDA device, got one on cpu"):
        Engine(tiny("Llama"), pages=8, cuda_graphs=True)


@pytest.mark.cuda
def test_graphs_are_captured_anew_when_the_model_is_another_one_and_kept_when_weights_are_written():
    model = copy.deepcopy(tiny("Llama")).to("cuda")
    engine = Engine(model, pages=64, max_tokens=32, max_sequences=4, cuda_graphs=True)
    [prompt], params = prompts([9]), SamplingParams(max_new_tokens=9)

    def said():
        plain = Engine(copy.deepcopy(model), pages=64, max_tokens=32, max_sequences=4)
        expected = plain.generate([prompt], params)[0].token_ids
        assert engine.generate([prompt], params)[0].token_ids == expected
        return tuple(expected), engine._runner._graphs._captured[1]

    first, graph = said()
    model.model.layers[0].mlp.up_proj.weight.data.neg_()
    second, same = said()
    assert same is graph
    model.model.layers[0].mlp.act_fn = torch.nn.ReLU()
    third, other = said()
    assert other is not graph
    weight = model.lm_head.weight
    weight.data = weight.data.flip(0).contiguous()  # elsewhere, and what was there may be anything
    fourth, last = said()
    assert last is not other
    assert len({first, second, third, fourth}) == 4
