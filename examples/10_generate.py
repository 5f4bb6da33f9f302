"""Generation over pages: prompts of any length in one batch, sequences that come and go, nothing computed twice.

Run: python examples/10_generate.py
"""

import torch
from paging import cache, logits, tiny_model, without_pages

PROMPTS = [b"Attention is", b"Once upon a time there was a cache, and", b"2 + 2 ="]
NEW_TOKENS = 20

model = tiny_model()
allocator, pool, plan = cache()
texts = {}

# All prompts in one step: packed one after the other, each with its own positions and pages.
for prompt in PROMPTS[:2]:
    texts[allocator.add()] = list(prompt)
plan.step([(seq, len(text)) for seq, text in texts.items()])
print(plan)
last = logits(model, pool, plan, [token for text in texts.values() for token in text])

for step in range(NEW_TOKENS):
    for seq, chosen in zip(texts, last.argmax(-1).tolist(), strict=True):
        texts[seq].append(chosen)
    fed = {seq: text[-1:] for seq, text in texts.items()}
    if step == 5:  # a late prompt joins the others' decoding: the batch is ragged, and one step
        late = allocator.add()
        texts[late] = list(PROMPTS[2])
        fed[late] = texts[late]
    if step == 12:  # and the first to come leaves
        gone = next(iter(texts))
        finished = texts.pop(gone)
        fed.pop(gone)
        allocator.free(gone)
        assert torch.equal(without_pages(model, finished[:-1]).argmax(), torch.tensor(finished[-1]))
    plan.step([(seq, len(new)) for seq, new in fed.items()])
    last = logits(model, pool, plan, [token for new in fed.values() for token in new])

print(plan)
print(allocator.stats())
for seq, text in texts.items():
    error = (without_pages(model, text) - last[list(texts).index(seq)]).abs().max().item()
    print(f"sequence {seq}: {len(text)} tokens in pages {allocator.table(seq)}, largest difference {error:.1e}")
    assert error < 1e-9
allocator.check()
