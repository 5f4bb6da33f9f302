"""`attnspan.Engine`: generation with a transformers model, or with a model of your own.

The engine itself knows a protocol of four methods (engine/model.py). A transformers model is wrapped here in an object
that implements it; transformers is imported only then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from attnspan.engine import EngineConfig, LLMEngine, ServedModel
from attnspan.engine.detokenizer import Tokenizer
from attnspan.errors import ModelError
from attnspan.transports.group import Group

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Engine(LLMEngine):
    """Generation over `pages` pages of `page_size` tokens, with a transformers model or a `ServedModel`.

    Without `pages` they take `memory_share` of the memory that is free, by default 0.9 on CUDA and 0.25 on a CPU
    (engine/memory.py). `host_pages` more pages on the host hold preempted samples; without them, these are recomputed.
    A step has at most `max_sequences` samples and `max_tokens` tokens. With `mesh` (a DeviceMesh, a process group, a
    virtual world) every rank has that many pages, and prompts of `context_parallel_from` tokens or more are computed by
    all ranks together (engine/context_parallel_runner.py). `cuda_graphs` decodes by CUDA graphs
    (engine/cuda_graphs.py). Threads may share an engine of one rank (engine/call_lock.py).

    `states` is the number of recurrent states that the engine keeps, 2 x max_sequences if None. Those that no sample
    uses are snapshots for the prefix cache, one every `state_every` pages (engine/pools.py).

    `prompt_lookup_num_tokens` is the maximum number of draft tokens per step for prompt-lookup speculation. A draft
    token is accepted if it is the one that the model chooses (engine/prompt_lookup.py).

    With `kv_dtype` (torch.int8 or torch.float8_e4m3fn) keys and values are stored in 8 bits (paged/quantised.py).
    """

    def __init__(
        self,
        model: PreTrainedModel | nn.Module | ServedModel,
        *,
        pages: int | None = None,
        page_size: int = 16,
        mesh: Group = None,
        tokenizer: Tokenizer | None = None,
        host_pages: int = 0,
        max_sequences: int = 64,
        max_tokens: int = 512,
        context_parallel_from: int = 256,
        prefix_cache: bool = True,
        kernel: str = "auto",
        cuda_graphs: bool = False,
        memory_share: float | None = None,
        states: int | None = None,
        state_every: int = 16,
        prompt_lookup_num_tokens: int = 0,
        kv_dtype: torch.dtype | str | None = None,
    ) -> None:
        config = EngineConfig(
            pages=pages,
            page_size=page_size,
            host_pages=host_pages,
            max_sequences=max_sequences,
            max_tokens=max_tokens,
            context_parallel_from=context_parallel_from,
            prefix_cache=prefix_cache,
            kernel=kernel,
            cuda_graphs=cuda_graphs,
            memory_share=memory_share,
            states=states,
            state_every=state_every,
            prompt_lookup_num_tokens=prompt_lookup_num_tokens,
            kv_dtype=kv_dtype,
        )
        served = served_model(model, stacklevel=2, latents=not cuda_graphs)  # no kernel attends over them in a graph
        super().__init__(served, config, mesh=mesh, tokenizer=tokenizer)
        self.model = model


def served_model(
    model: PreTrainedModel | nn.Module | ServedModel, stacklevel: int = 1, *, latents: bool = True
) -> ServedModel:
    """The model itself if it implements `ServedModel`; else it is taken for a transformers model, and wrapped. Without
    `latents`, pages hold keys and values of layers that make them of latents."""
    if isinstance(model, ServedModel):
        return model
    if not hasattr(model, "config"):
        raise ModelError(
            f"model must be a transformers model, got {type(model).__name__}; to serve another, give it the "
            "four methods of attnspan.engine.ServedModel"
        )
    if getattr(model.config, "is_encoder_decoder", False):
        from attnspan.integrations.huggingface.encoder_decoder import EncoderDecoderModel

        return EncoderDecoderModel(cast("PreTrainedModel", model), stacklevel + 1)
    from attnspan.integrations.huggingface.transformers_model import TransformersModel

    return TransformersModel(cast("PreTrainedModel", model), stacklevel + 1, latents=latents)  # which checks it
