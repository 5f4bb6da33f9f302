"""An engine over pages: requests that come and go, streams, samples, prompts that begin alike, and pages over ranks.

Run: python examples/15_engine.py
"""

import time

import torch
from tiny_text import trained

import attnspan as span
from attnspan import Engine, SamplingParams

PROMPTS = ["Attention over ranks", "A mask is", "The KV cache in pages", "Every rank", "```python\nimport"]
LONG = "A prompt that is longer than the pages of one rank, and so it is spread over all of them. " * 6

start = time.perf_counter()
model, tokenizer, first, last = trained(steps=160)
took = time.perf_counter() - start
print(
    f"{model.num_parameters():,} parameters have read this repository, loss {first:.2f} to {last:.2f}, in {took:.0f} s"
)
assert last < 0.75 * first

# 1. Many prompts at once: the tokens are those of model.generate, one prompt at a time.
engine = Engine(model, pages=256, tokenizer=tokenizer)
answers = engine.generate(PROMPTS, SamplingParams(max_new_tokens=24))
for prompt, answer in zip(PROMPTS, answers, strict=True):
    tokens = torch.tensor([answer.prompt])
    alone = model.generate(
        tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=24, do_sample=False, pad_token_id=0
    )
    assert answer.token_ids == alone[0, len(answer.prompt) :].tolist()
    print(f"  {prompt!r} -> {answer.text!r}")

# 2. A stream; and another request that joins while it goes on.
print("\nstreamed:", end=" ")
late = None
for token in engine.stream("The mask", SamplingParams(max_new_tokens=30, temperature=0.7, top_p=0.9, seed=1)):
    print(token.text, end="", flush=True)
    late = late or engine.add("A page", SamplingParams(max_new_tokens=10))
while engine.unfinished:
    engine.step()
print(f"\nmeanwhile: {late.text!r}")

# 3. Three samples of one prompt share its pages, and the next prompt that begins like it finds them.
before = engine.counts.tokens
[answer] = engine.generate([LONG], SamplingParams(max_new_tokens=8, temperature=0.8, seed=2, n=3))
print(
    f"\n{len(answer.prompt)} tokens of prompt, {len(answer.continuations)} samples, "
    f"{engine.counts.tokens - before} computed"
)
known = engine.counts.cached
[again] = engine.generate([LONG + " And"], SamplingParams(max_new_tokens=8))
print(f"the next one began with {engine.counts.cached - known} tokens that were there already")
assert engine.counts.cached > known

# 4. A pool so small that requests must wait for one another: the same tokens.
small = Engine(model, pages=6, tokenizer=tokenizer, max_sequences=4, max_tokens=16)
assert [a.token_ids for a in small.generate(PROMPTS, SamplingParams(max_new_tokens=24))] == [
    a.token_ids for a in answers
]
print(f"in six pages: {small.counts.recomputed} times a request had to start over; the same tokens")


# 5. Over ranks: a prompt that no rank could hold alone, computed by all of them, decoded over all of their pages.
def rank(world):
    spread = Engine(model, pages=8, mesh=world, tokenizer=tokenizer, context_parallel_from=64)
    return spread.generate([LONG], SamplingParams(max_new_tokens=12))[0].token_ids


[alone] = engine.generate([LONG], SamplingParams(max_new_tokens=12))
for found in span.testing.loopback(4).run(rank):
    assert found == alone.token_ids
print(f"on four ranks of 8 pages each, {len(alone.prompt)} tokens: {alone.text!r}, the same tokens as on one")
engine.check()
