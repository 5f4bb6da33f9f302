"""`model.generate` over a PagedCache says what it says without: batches, padding, beams, guesses."""

import copy

import pytest
import torch
import transformers
from torch import nn

from attnspan.errors import ModelError, PageError, PoolExhausted
from attnspan.integrations.huggingface import PagedCache
from tests.engine.models import FAMILIES, prompts, tiny


def padded(lengths, seed=0):
    """Prompts of different lengths, padded on the left, and their attention mask."""
    longest = max(lengths)
    rows = [[0] * (longest - len(prompt)) + prompt for prompt in prompts(lengths, seed)]
    tokens = torch.tensor(rows)
    return tokens, (torch.arange(longest) >= longest - torch.tensor(lengths).unsqueeze(1)).long()


def both(model, lengths, pages=64, page_size=4, **options):
    """What is generated without and with pages."""
    tokens, mask = padded(lengths)
    options = {"attention_mask": mask, "max_new_tokens": 14, "do_sample": False, "pad_token_id": 0} | options
    cache = PagedCache(model, pages=pages, page_size=page_size)
    found = []
    for extra in ({}, {"past_key_values": cache}):
        torch.manual_seed(0)
        found.append(model.generate(tokens, **options, **extra))
    cache.allocator.check()
    return (*found, cache)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_padded_batch_is_continued_as_without_pages(family):
    plain, paged, cache = both(tiny(family), [9, 3, 14])
    assert torch.equal(plain, paged)
    assert cache.get_seq_length() == 14 + 14 - 1
    assert cache.allocator.stats().used == 3 * 7


@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": True, "temperature": 0.8, "num_return_sequences": 2},
        {"num_beams": 3},
        {"num_beams": 4, "num_return_sequences": 2},
    ],
    ids=["sampling", "beams", "several beams"],
)
def test_samples_and_beams_are_those_without_pages(options):
    plain, paged, _ = both(tiny("Llama"), [9, 3], pages=128, **options)
    assert torch.equal(plain, paged)


def test_copies_go_on_from_one_prompt_each_in_its_own_way():
    model, [begun, *ends] = tiny("Llama"), prompts([18, 5, 9])
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    cache = PagedCache(model, pages=32, page_size=4)
    with torch.no_grad():
        model(torch.tensor([begun]), past_key_values=cache)
    before = cache.allocator.stats().used
    for end in (*ends, ends[0]):
        tokens, own = torch.tensor([begun + end]), copy.deepcopy(cache)
        assert cache.allocator.stats().used == before
        plain = model.generate(tokens, attention_mask=torch.ones_like(tokens), **options)
        paged = model.generate(tokens, attention_mask=torch.ones_like(tokens), past_key_values=own, **options)
        assert torch.equal(plain, paged)
        assert (cache.length, own.length) == (18, tokens.shape[1] + 5)
        del own
        assert cache.allocator.stats().used == before  # it has given back what it wrote
    cache.reset()
    cache.allocator.check()
    assert cache.allocator.stats().used == 0


def test_a_cache_that_is_let_go_gives_back_its_pages_while_a_copy_lives():
    model = tiny("Llama")
    cache = PagedCache(model, pages=12, page_size=4)
    with torch.no_grad():
        model(torch.tensor(prompts([18])), past_key_values=cache)
    own = copy.deepcopy(cache)
    del cache
    own.allocator.check()
    assert own.allocator.stats().sequences == 1
    own.reset()
    assert own.allocator.stats().used == 0


def test_a_copy_of_a_cache_that_failed_halfway_is_refused_as_the_cache_is():
    model, cache = copy.deepcopy(tiny("Llama")), PagedCache(tiny("Llama"), pages=12, page_size=4)
    tokens = torch.tensor(prompts([6]))
    handle = model.model.layers[1].register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(MemoryError("planted")))
    with torch.no_grad(), pytest.raises(MemoryError):
        model(tokens, past_key_values=cache)
    handle.remove()
    for each in (copy.deepcopy(cache), cache):
        with (
            torch.no_grad(),
            pytest.raises(PageError, match=r"layer 1 holds 0 tokens, and layer 0 has 6: a call of the"),
        ):
            model(tokens, past_key_values=each)


def test_a_model_that_looks_ahead_is_refused():
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}
    model = transformers.BertForMaskedLM(transformers.BertConfig(**sizes, intermediate_size=48))
    with pytest.raises(ModelError, match=r"self has attention that looks ahead; PagedCache serves decoder-only models"):
        PagedCache(model, pages=8)


def test_guesses_of_an_assistant_are_taken_back():
    model, assistant = tiny("Llama"), tiny("Llama", num_hidden_layers=1)
    plain, paged, _ = both(model, [9], assistant_model=assistant)
    assert torch.equal(plain, paged)


def test_rows_of_a_beam_share_pages():
    cache = both(tiny("Llama"), [40], num_beams=4, max_new_tokens=8)[2]
    stats = cache.allocator.stats()
    assert stats.shared >= 10  # the prompt's
    assert stats.used < 4 * 12


def test_a_cache_goes_on_where_it_stopped_and_is_empty_after_reset():
    model = tiny("Llama")
    cache = PagedCache(model, pages=32, page_size=4)
    tokens = torch.tensor(prompts([7]))
    options = {"do_sample": False, "pad_token_id": 0}
    first = model.generate(tokens, past_key_values=cache, max_new_tokens=5, **options)
    second = model.generate(first, past_key_values=cache, max_new_tokens=5, **options)
    assert torch.equal(second, model.generate(tokens, max_new_tokens=10, **options))
    assert repr(cache) == "PagedCache(1 rows of 16 tokens in 4 of 32 pages)"
    cache.reset()
    assert cache.allocator.free_pages == 32
    assert cache.get_seq_length() == 0


def test_what_cannot_be_done_is_refused():
    model = tiny("Llama")
    cache = PagedCache(model, pages=3, page_size=4)
    tokens = torch.tensor(prompts([7]))
    options = {"do_sample": False, "pad_token_id": 0, "past_key_values": cache}
    with pytest.raises(PoolExhausted, match="1 pages needed, 0 free"):
        model.generate(tokens, max_new_tokens=9, **options)
    with pytest.raises(PageError, match=r"the cache holds a batch of 1, got one of 2; reset\(\) it first"):
        model(tokens.expand(2, -1), past_key_values=cache)
    with pytest.raises(PageError, match=r"tokens_to_remove must be 0 or less, as in crop\(-3\) .* got 4"):
        cache.crop(4)
    with pytest.raises(PageError, match="PagedCache does not offload layers"):
        cache.offload(0)
    cache.reset()
    assert model.generate(tokens, max_new_tokens=4, **options).shape == (1, 11)


def test_a_call_after_one_that_failed_halfway_is_refused_until_reset():
    model, tokens = copy.deepcopy(tiny("Llama")), torch.tensor(prompts([7]))
    cache = PagedCache(model, pages=16, page_size=4)
    model(tokens, past_key_values=cache)
    handle = model.model.layers[1].register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(MemoryError("planted")))
    with pytest.raises(MemoryError, match="planted"):
        model(tokens[:, :1], past_key_values=cache)
    handle.remove()
    with pytest.raises(PageError, match=r"layer 1 holds 7 tokens, and layer 0 has 8: .* failed halfway; reset\(\)"):
        model(tokens[:, :1], past_key_values=cache)
    cache.reset()
    torch.testing.assert_close(model(tokens, past_key_values=cache).logits, model(tokens).logits)


def test_keys_that_need_gradients_are_refused():
    model, tokens = copy.deepcopy(tiny("Llama")).requires_grad_(True), torch.tensor(prompts([7]))
    cache = PagedCache(model, pages=16)
    with pytest.raises(PageError, match=r"takes no keys that need gradients; call the model under torch.no_grad\(\)"):
        model(tokens, labels=tokens, past_key_values=cache)
    with torch.no_grad():
        found = model(tokens, past_key_values=cache).logits
        torch.testing.assert_close(found, model(tokens).logits)


LATENTS = {
    "q_lora_rank": 16, "kv_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 2, "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2,
    "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
def test_layers_that_hand_over_latents_are_served_with_pages_of_those(options):
    """DeepSeek-V3 was refused when it was first called: it hands over what its keys and values are made of."""
    torch.manual_seed(0)
    model = transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**LATENTS)).eval().requires_grad_(False)
    plain, paged, cache = both(model, [9, 3], pages=128, **options)
    assert torch.equal(plain, paged)
    assert [(layer.kv_heads, layer.head_dim, layer.value_dim) for layer in cache.pool.layers] == [(1, 24, 8)] * 2


def test_a_model_that_hands_over_what_pages_cannot_hold_is_refused_when_the_cache_is_made():
    model = copy.deepcopy(tiny("Llama"))
    layer = model.model.layers[1].self_attn
    own = layer.forward

    def of_other_heads(*args, past_key_values=None, **kwargs):
        past_key_values.update(torch.zeros(1, 2, 1, 8), torch.zeros(1, 1, 1, 8), 1)
        return own(*args, **kwargs)

    layer.forward = of_other_heads
    with pytest.raises(
        ModelError, match=r"layers.1.self_attn hands \(1, 2, 1, 8\) and \(1, 1, 1, 8\) to the cache for"
    ):
        PagedCache(model, pages=8)
    layer.forward = lambda *args, past_key_values=None, **kwargs: own(*args, **kwargs)
    with pytest.raises(ModelError, match=r"layers.1.self_attn hands nothing to the cache for one token"):
        PagedCache(model, pages=8)
    layer.forward = of_other_heads
    model.model.layers[1].self_attn = nn.Identity()
    model.model.layers[1].self_attn.forward = lambda hidden_states, **kwargs: of_other_heads(
        hidden_states=hidden_states, **kwargs
    )
    with pytest.raises(ModelError, match="2 layers hand something to the cache, and 1 attention layers are known"):
        PagedCache(model, pages=8)
