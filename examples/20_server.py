"""A server on four ranks, and OpenAI's client: a prompt longer than a rank holds, a chat in a stream, clients at once.

The ranks are virtual, threads of this process. From a terminal: attnspan serve --model PATH --ranks 4

Run: python examples/20_server.py
"""

import asyncio

import torch
from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from tiny_text import text, tokenizer_of
from transformers import LlamaConfig, LlamaForCausalLM

from attnspan import Engine, SamplingParams
from attnspan.engine import follow
from attnspan.server import Server, ServerConfig
from attnspan.testing import loopback

RANKS, PAGES, PAGE_SIZE = 4, 16, 16
LONG = "A prompt that is longer than the pages of one rank, and so it is spread over all of them. " * 12
QUESTION = [{"role": "user", "content": "What is a mask?"}]

torch.manual_seed(0)  # random weights: what it says is nonsense, and the same every time
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=512, eos_token_id=None, **sizes)).eval()
tokenizer = tokenizer_of(text()[:50_000])
tokenizer.chat_template = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"
)


async def talk(address):
    """What a client does."""
    plain = DefaultAsyncHttpxClient(trust_env=False)  # it is on this machine: no proxy is asked
    async with AsyncOpenAI(base_url=f"{address}/v1", api_key="secret", http_client=plain) as client:
        print("models:", [each.id async for each in client.models.list()])

        # 1. A completion, of a prompt that no rank could hold.
        answer = await client.completions.create(model="tiny", prompt=LONG, max_tokens=16)
        print(f"{answer.usage.prompt_tokens} tokens of prompt, {PAGES * PAGE_SIZE} fit on a rank")
        assert answer.usage.prompt_tokens > PAGES * PAGE_SIZE

        # 2. A chat, as it comes.
        said = ""
        options = {"max_tokens": 30, "temperature": 0.8, "seed": 1}
        async for chunk in await client.chat.completions.create(
            model="tiny", messages=QUESTION, stream=True, **options
        ):
            said += chunk.choices[0].delta.content or ""
        print(f"streamed: {said!r}")
        whole = await client.chat.completions.create(model="tiny", messages=QUESTION, **options)
        assert said == whole.choices[0].message.content

        # 3. Many at once: each is answered as if it were alone.
        prompts = [f"Attention over {n} ranks" for n in range(20)]
        calls = (client.completions.create(model="tiny", prompt=each, max_tokens=8) for each in prompts)
        answers = await asyncio.gather(*calls)
        return answer.choices[0].text, [each.choices[0].text for each in answers], prompts


def rank(world):
    """What every rank does: rank 0 listens, the others follow."""
    engine = Engine(model, pages=PAGES, page_size=PAGE_SIZE, mesh=world, tokenizer=tokenizer)
    if world.rank:
        return follow(engine)
    with Server(engine, tokenizer, ServerConfig(model="tiny", port=0, api_keys=["secret"])) as server:
        print(f"{engine!r}, listening on {server.address}")
        found = asyncio.run(talk(server.address))
        print(server.engine.stats())
    return found


long, short, prompts = loopback(RANKS).run(rank)[0]
alone = Engine(model, pages=128, tokenizer=tokenizer)
assert long == alone.generate([LONG], SamplingParams(max_new_tokens=16))[0].text
assert short == [answer.text for answer in alone.generate(prompts, SamplingParams(max_new_tokens=8))]
print("the answers are those of an engine on one rank")
