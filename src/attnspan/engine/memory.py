"""Computes how many pages fit into memory, for engines without `pages`.

Pages take a share of the memory that is free when the engine is made, with the weights in place: what is left is for
activations, graphs and whatever else runs. On a CPU they take a smaller share of what the system has available. They
never take more than could be used. Ranks that share a device share that. Over ranks the number of pages is that of the
rank with the least room, as block tables are the same on all.
"""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from attnspan.engine.config import EngineConfig
from attnspan.engine.model import ModelInfo
from attnspan.engine.pools import Pools, pools_of
from attnspan.engine.rank_consensus import RankConsensus
from attnspan.errors import EngineError

SHARES = {"cuda": 0.9, "cpu": 0.25}
"""Of the memory that is free, by kind of device, where no share is given."""

MAX_PAGES = 1 << 20
"""Pages for a model without a last position."""


class FreeMemory(NamedTuple):
    """Free bytes, and the name of the memory: ranks with the same name share it."""

    memory: str
    free: int


def pages_that_fit(info: ModelInfo, config: EngineConfig, consensus: RankConsensus) -> int:
    """The number of pages for a share of the free memory; EngineError if one sequence of full length does not fit."""
    share = SHARES.get(info.device.type, SHARES["cpu"]) if config.memory_share is None else config.memory_share
    try:
        found: FreeMemory | EngineError = free_memory(info.device)
    except EngineError as unknown:
        found = unknown
    by_rank = [FreeMemory(*each) for each in consensus.gather(found, "free memory")]  # it travels as a list
    fixed, each = page_bytes(info, config, consensus.page_ranks)
    least = min(own.free / sum(other.memory == own.memory for other in by_rank) for own in by_rank)
    needed = _needed(info, config, consensus.page_ranks)
    most = 2 * config.max_sequences * needed if info.max_positions else MAX_PAGES  # half of them for cached prefixes
    pages = min(most, int((share * least - fixed) // each)) if each else most
    if pages < needed:
        longest = f"{info.max_positions} tokens" if info.max_positions else "any length"
        raise EngineError(
            f"memory_share={share:g} of {least / 2**30:.2f} GiB free for each rank on {info.device} holds "
            f"{max(pages, 0)} pages of {config.page_size} tokens, and one sequence of {longest} needs {needed} of "
            f"{each / 2**20:.2f} MiB; give pages= for shorter ones, a larger memory_share, or more ranks"
        )
    return pages


def free_memory(device: torch.device) -> FreeMemory:
    """The memory of a device that is free, or that torch keeps and does not use."""
    host = socket.gethostname()
    if device.type != "cuda":
        return FreeMemory(host, _available())
    free, _ = torch.cuda.mem_get_info(device)
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return FreeMemory(f"{host} {torch.cuda.get_device_properties(device).uuid}", free + kept)


def page_bytes(info: ModelInfo, config: EngineConfig, ranks: int) -> tuple[int, int]:
    """The bytes of no pages and of each, found on tensors without memory."""
    meta = replace(info, device=torch.device("meta"))
    options = [replace(config, pages=pages, memory_share=None, host_pages=0) for pages in (1, 2)]
    one, two = (_bytes_of(pools_of(meta, each, ranks)) for each in options)
    return 2 * one - two, two - one


def _bytes_of(pools: Pools) -> int:
    """The bytes of pages and of recurrent states, whose number does not depend on that of pages."""
    return sum(pool.nbytes for pool in pools.pools) + (0 if pools.states is None else pools.states.nbytes)


def _needed(info: ModelInfo, config: EngineConfig, ranks: int) -> int:
    """The pages of one sequence of full length; of a model without a last position, one."""
    size = config.page_size * ranks
    pages = -(-(info.max_positions or 1) // size)
    windows = [layer.window for layer in info.layers if layer.window is not None]
    if len(windows) < len(info.layers) or not windows:
        return pages
    return min(pages, (max(windows) + config.max_tokens - 2) // size + 2)  # kv_cache_manager.py: the most it needs


def _available() -> int:
    """Bytes that this process could still have, by what Linux says of the system and of its control group."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        [available] = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    except (OSError, ValueError):
        raise EngineError("pages must be given: the system does not say how much memory is available") from None
    try:
        group = Path("/sys/fs/cgroup")
        most, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
    except (OSError, ValueError):  # no such group, or no limit
        return available
    return min(available, max(0, most - used))
