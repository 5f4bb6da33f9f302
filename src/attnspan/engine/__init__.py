"""Generation: requests that come and go, batched step by step, over a KV cache in pages.

    engine.py      requests in, tokens out
    scheduler.py   who is computed next; ints only, as are sample.py and room.py
    runner.py      one call of the model over pages (served.py: how its attention gets there; look.py: if it may)
    sampler.py     the next token, by a number of the request's own
    detokenizer.py      text from tokens, and where it stops
    ranks_runner.py       prompts under context parallelism, pages over ranks (rank_consensus.py: that all do the same)
    cuda_graphs.py      decoding by CUDA graphs (warmup.py: noted beforehand)

Models are those of transformers, which is imported when an engine is made.
"""

from attnspan.engine.engine import Engine
from attnspan.engine.params import SamplingParams
from attnspan.engine.request import Continuation, Request, Token

__all__ = ["Continuation", "Engine", "Request", "SamplingParams", "Token"]
