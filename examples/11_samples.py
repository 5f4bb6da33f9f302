"""Several samples from one prompt: forks share the prompt's pages, and copy one only when they write to it.

Run: python examples/11_samples.py
"""

import torch
from paging import cache, logits, tiny_model, without_pages

PROMPT = list(b"Four continuations of one and the same prompt, which is computed and stored once:")
SAMPLES, NEW_TOKENS = 4, 12

model = tiny_model()
allocator, pool, plan = cache()
first = allocator.add()
plan.step([(first, len(PROMPT))])
[after_prompt] = logits(model, pool, plan, PROMPT)
alone = allocator.stats().used

forks = [first, *allocator.fork(first, SAMPLES - 1)]
texts = {seq: list(PROMPT) for seq in forks}
generator = torch.Generator().manual_seed(1)
last = after_prompt.expand(SAMPLES, -1)
for _ in range(NEW_TOKENS):
    chosen = torch.multinomial(last.softmax(-1), 1, generator=generator).flatten().tolist()
    for seq, token in zip(forks, chosen, strict=True):
        texts[seq].append(token)
    # share=True: the pages of the prompt are read once for all four.
    plan.step([(seq, 1) for seq in forks], share=True)
    last = logits(model, pool, plan, chosen)
    assert plan.shared

stats = allocator.stats()
print(f"a prompt of {len(PROMPT)} tokens in {alone} pages; {SAMPLES} samples of {len(texts[first])} in {stats.used}")
print(f"without sharing: {SAMPLES * -(-len(texts[first]) // allocator.page_size)}")
for row, seq in enumerate(forks):
    error = (without_pages(model, texts[seq]) - last[row]).abs().max().item()
    print(f"sample {row}: {bytes(texts[seq][len(PROMPT) :])!r}, largest difference {error:.1e}")
    assert error < 1e-9
allocator.check()
