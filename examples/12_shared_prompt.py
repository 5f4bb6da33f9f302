"""A system prompt that many requests begin with: its pages are found by their content, for each tenant its own.

Run: python examples/12_shared_prompt.py
"""

import torch
from paging import cache, logits, tiny_model, without_pages

import attnspan as span

SYSTEM = list(b"You are a careful assistant. You answer exactly, or you refuse and say why. ")
PAGE = b"What is a page, and whose is it when its sequence ends?"
SLOT = b"What is a slot, and whose is it when its page is shared?"
REQUESTS = [("a", PAGE), ("a", SLOT), ("b", PAGE), ("a", PAGE)]

model = tiny_model()
allocator, pool, plan = cache()
prefixes = span.PrefixCache(allocator)

for tenant, question in REQUESTS:
    prompt = SYSTEM + list(question)
    seq, known = prefixes.add(prompt, salt=tenant)  # a sequence that holds the first tokens already
    plan.step([(seq, len(prompt) - known)])
    [last] = logits(model, pool, plan, prompt[known:])
    prefixes.insert(seq, prompt, salt=tenant)
    error = (without_pages(model, prompt) - last).abs().max().item()
    print(f"tenant {tenant}: {known:3} of {len(prompt)} tokens were there, largest difference {error:.1e}")
    assert error < 1e-9
    allocator.free(seq)  # its pages stay, and can be found, until others need them

print(f"hit rate {prefixes.metrics.hit_rate:.0%}, {len(prefixes)} pages kept, {allocator.free_pages} free")
assert prefixes.metrics.partial_hits  # questions that differ in the middle of a page share its beginning

# A pool that runs short takes back what was used longest ago.
long = allocator.add()
allocator.step([(long, allocator.page_size * (allocator.free_pages + len(prefixes) - 2))])
print(f"after a long request: {len(prefixes)} pages kept, {prefixes.metrics.evicted_pages} given up")
prefixes.check()
assert torch.isfinite(last).all()
