"""Without `pages`, an engine takes a share of the memory that is free, on every rank as many pages as on any other."""

from types import SimpleNamespace

import pytest
import torch

from attnspan import Engine, EngineError, SamplingParams
from attnspan.engine import memory
from attnspan.engine.memory import FreeMemory
from attnspan.testing import loopback
from tests.engine.models import greedy, prompts, tiny

PAGE = 2 * 2 * 4 * 2 * 8 * 4  # layers, keys and values, slots, heads, dim, bytes


def engine(model="Llama", **options):
    return Engine(tiny(model), page_size=4, **options)


def pages_of(one):
    return [group.num_pages for group in one._scheduler.kv_cache.groups]


def has(monkeypatch, *frees, memories=None):
    """Ranks find so many bytes free, each its own, in one memory each or in those that are named."""
    found = list(zip(memories or map(str, range(len(frees))), frees, strict=True))
    monkeypatch.setattr(memory, "free_memory", lambda device: FreeMemory(*found.pop()))


@pytest.mark.parametrize(("options", "share"), [({}, 0.25), ({"memory_share": 0.9}, 0.9)])
@pytest.mark.parametrize("family", ["Llama", "Gemma3"])  # of one pool, and of two
def test_pages_take_their_share_and_no_page_more_would_fit(family, options, share, monkeypatch):
    has(monkeypatch, 10_000_000)
    one = engine(family, **options)
    taken = sum(x.nbytes for pool in one._pools.pools for x in (*pool.keys, *pool.values))
    assert taken <= share * 10_000_000 < taken + PAGE
    assert len(set(pages_of(one))) == 1
    [prompt] = prompts([9])
    assert one.generate([prompt], SamplingParams(max_new_tokens=4))[0].token_ids == greedy(tiny(family), prompt, 4)


def test_what_this_machine_has_is_found():
    one = engine(memory_share=1e-4)
    room = memory.free_memory(torch.device("cpu"))
    assert room.free > 2**28
    assert 0.2 < PAGE * pages_of(one)[0] / (1e-4 * room.free) < 5  # other processes come and go


def test_a_device_has_what_is_free_and_what_torch_keeps_unused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 9000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 500)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 200)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="GPU-7"))
    room = memory.free_memory(torch.device("cuda", 1))
    assert room.free == 1300
    assert room.memory.endswith("GPU-7")


def test_the_limit_of_a_control_group_counts(monkeypatch):
    files = {
        "/proc/meminfo": "MemTotal: 9 kB\nMemAvailable:    50 kB\n",
        "/sys/fs/cgroup/memory.max": "30000\n",
        "/sys/fs/cgroup/memory.current": "10000\n",
    }

    def read(path, *_, **__):
        if str(path) not in files:
            raise FileNotFoundError(path)
        return files[str(path)]

    monkeypatch.setattr(memory.Path, "read_text", read)
    assert memory.free_memory(torch.device("cpu")).free == 20000
    files["/sys/fs/cgroup/memory.max"] = "max\n"
    assert memory.free_memory(torch.device("cpu")).free == 50 * 1024
    files.clear()
    with pytest.raises(EngineError, match="pages must be given: the system does not say how much memory is available"):
        engine()


def test_all_ranks_take_as_many_as_the_one_with_the_least(monkeypatch):
    def rank(world):
        one = engine(mesh=world, memory_share=0.5)
        return pages_of(one), one.generate(prompts([9]), SamplingParams(max_new_tokens=4))[0].token_ids

    has(monkeypatch, 8_000_000, 4_000_000, 6_000_000)
    found = loopback(3).run(rank)
    assert found == [([4_000_000 // 2 // PAGE - 1], greedy(tiny("Llama"), prompts([9])[0], 4))] * 3
    has(monkeypatch, *[6_000_000] * 3, memories=["a", "b", "a"])  # two of them share one
    assert [pages for pages, _ in loopback(3).run(rank)] == [[3_000_000 // 2 // PAGE - 1]] * 3


def test_an_engine_for_which_one_long_sequence_would_not_fit_is_refused_with_figures(monkeypatch):
    has(monkeypatch, 4 * 127 * PAGE)
    with pytest.raises(
        EngineError,
        match=r"memory_share=0.25 of 0.00 GiB free for each rank on cpu holds 126 pages of 4 tokens, and one sequence "
        r"of 512 tokens needs 128 of 0.00 MiB; give pages= for shorter ones, a larger memory_share, or more ranks",
    ):
        engine()
    has(monkeypatch, 4 * 129 * PAGE)
    assert pages_of(engine()) == [128]


def test_no_more_pages_are_taken_than_could_be_used(monkeypatch):
    has(monkeypatch, 10**15)
    assert pages_of(engine(max_sequences=2)) == [2 * 2 * 128]


def test_what_one_rank_does_not_know_all_refuse(monkeypatch):
    unknown = [True, False]

    def room(device):
        if unknown.pop():
            raise EngineError("pages must be given: planted")
        return FreeMemory("a", 10**7)

    monkeypatch.setattr(memory, "free_memory", room)

    def rank(world):
        with pytest.raises(EngineError, match="pages must be given: planted"):
            engine(mesh=world)
        return True

    assert loopback(2).run(rank) == [True, True]


@pytest.mark.parametrize("share", [0, -1, 1.1, float("nan"), True, "1"])
def test_shares_that_make_no_sense_are_refused(share):
    with pytest.raises(EngineError, match="memory_share must be a number above 0 and at most 1, got"):
        engine(memory_share=share)


def test_pages_and_a_share_are_not_both_given():
    with pytest.raises(EngineError, match=r"give pages or memory_share, not both, got 64 and 0\.5"):
        engine(pages=64, memory_share=0.5)
