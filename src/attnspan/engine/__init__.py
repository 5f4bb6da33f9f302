"""Generation: continuous batching of requests over a paged KV cache.

    llm_engine.py        generate and stream, on top of core.py
    async_engine.py      the same for asyncio: a thread owns the engine (stepping_thread.py), takes commands
                         (commands.py), and makes one step per round, as every rank does (engine_loop.py)
    core.py              add, step and cancel (request_table.py: unfinished requests)
    scheduler.py         the next batch; ints only, as in sample.py and kv_cache_manager.py
    model_runner.py      one call of the model over pages (model.py: the protocol of models)
    prompt_lookup.py     prompt-lookup speculation: drafts of the next tokens
    sampler.py           the next token, greedy or drawn (draws.py), after penalties and bans (logits_processor.py;
                         grammar.py: JSON schemas), for all rows of a batch at once (row_selection.py)
    output_processor.py  the outcome of a step: tokens, text (detokenizer.py), and why a sample ends
    cuda_graphs.py       decoding by CUDA graphs (warmup.py: captured in advance)
    in_flight.py         a step that the device computes while the host reports the previous one (host_tensor.py:
                         integers that a device fetches meanwhile)

    context_parallel_runner.py  prompts under context parallelism, pages spread over ranks
    rank_consensus.py           checks that all ranks do the same
    engine_ranks.py             which ranks share pages, and which share a tensor parallel model

    params.py, config.py  the options of a request and of an engine (prompts.py: inputs; request.py: results)
    pools.py              the page pools of layers and of recurrent states
    journal.py            a step is a transaction (call_lock.py: one call at a time)
    fingerprint.py        detects changes of the model
    stats.py              statistics (memory.py: how many pages fit into memory)

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
