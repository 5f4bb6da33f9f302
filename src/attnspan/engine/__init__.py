"""Generation: requests that come and go, batched step by step, over a KV cache in pages.

    llm_engine.py        generate and stream, over
    async_engine.py      the same for asyncio, over a thread that owns the engine (stepping_thread.py, which is told
                         commands.py and makes rounds, as every rank does: engine_loop.py)
    core.py              requests in, tokens out: add, step, cancel (request_table.py: those that are unfinished)
    scheduler.py         what is computed next; ints only, as are sample.py and kv_cache_manager.py
    model_runner.py      one call of the model over pages (model.py: what is asked of a model)
    prompt_lookup.py     drafts of the next tokens, from what the text repeats
    sampler.py           the next token, the likeliest or one drawn by a number of the request's own (draws.py), after
                         penalties and bans (logits_processor.py; grammar.py: so that an answer is JSON), for all rows
                         of a batch together (row_selection.py)
    output_processor.py  what a step came to: tokens, text (detokenizer.py), and why a sample ends
    cuda_graphs.py       decoding by CUDA graphs (warmup.py: captured beforehand)
    in_flight.py         a step that the device computes while the host reports the one before

    context_parallel_runner.py  prompts under context parallelism, pages over ranks
    rank_consensus.py           that all ranks do the same
    engine_ranks.py             which ranks share pages, and which a tensor parallel model

    params.py, config.py  what a request and an engine are asked for (prompts.py, request.py: what is made of prompts)
    pools.py              where each layer's keys and states are
    journal.py            a step is a transaction (owner.py: whose turn it is)
    fingerprint.py        what the model computes (progress.py: bars)
    stats.py              what an engine has done, in numbers (memory.py: how many pages there is room for)

Knows no model library. `attnspan.Engine` wraps transformers models (attnspan/generation.py).
"""

from attnspan.engine.async_engine import AnswerStream, AsyncEngine
from attnspan.engine.config import EngineConfig
from attnspan.engine.engine_loop import follow
from attnspan.engine.fingerprint import ModelFingerprint
from attnspan.engine.llm_engine import LLMEngine
from attnspan.engine.model import (
    EncodingModel,
    LatentHeads,
    LayerSpec,
    ModelInfo,
    NamesAdapters,
    PackedBatch,
    ServedModel,
    StateSpec,
    StepAttention,
)
from attnspan.engine.params import SamplingParams
from attnspan.engine.request import Continuation, Request, Token
from attnspan.engine.stats import EngineStats, Histogram
from attnspan.engine.stepping_thread import StreamedToken

__all__ = [
    "AnswerStream",
    "AsyncEngine",
    "Continuation",
    "EncodingModel",
    "EngineConfig",
    "EngineStats",
    "Histogram",
    "LLMEngine",
    "LatentHeads",
    "LayerSpec",
    "ModelFingerprint",
    "ModelInfo",
    "NamesAdapters",
    "PackedBatch",
    "Request",
    "SamplingParams",
    "ServedModel",
    "StateSpec",
    "StepAttention",
    "StreamedToken",
    "Token",
    "follow",
]
