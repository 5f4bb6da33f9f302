"""How many parts `decode` cuts keys into: whole waves of programs, on a device of 132 multiprocessors.

Of steps with long rows, programs are (key head, row) pairs, eight key heads; a wave is what the device holds at once.
"""

from types import SimpleNamespace

import pytest
import torch

from attnspan.paged.kernels import decode

TUNING = decode.DecodeTuning()
WAVE = 132 * TUNING.resident


@pytest.fixture(autouse=True)
def device(monkeypatch):
    monkeypatch.setattr(decode, "_multiprocessors", lambda device: 132)


def splits(rows, longest):
    """Of a step that a graph may repeat, so that only the longest allowed is known."""
    tables = torch.empty(rows, longest // 16, device="meta")
    metadata = SimpleNamespace(
        query_lens=(1,) * rows, tables=tables, page_size=16, for_graphs=True, once=lambda what, work: 0
    )
    metadata.spans = ()
    return decode._splits(metadata, 8 * rows, torch.device("cuda"), TUNING)


@pytest.mark.parametrize("key_heads", [1, 2, 8, 12, 132, 1000])
def test_shares_are_one_wave(key_heads):
    found = decode._shares(key_heads, torch.device("cuda"), TUNING)
    assert found == 1 or WAVE - key_heads < key_heads * found <= WAVE


@pytest.mark.parametrize("longest", [32768, 131072, 1 << 20])
def test_a_row_that_is_alone_is_one_wave(longest):
    assert 0.97 * WAVE <= 8 * splits(1, longest) <= WAVE


@pytest.mark.parametrize("rows", [2, 3, 4, 7, 16, 32, 33, 64])
def test_several_rows_are_several_waves_and_the_last_is_nearly_full(rows):
    waves = 8 * rows * splits(rows, 131072) / WAVE
    assert 1.9 <= waves <= TUNING.waves
    assert waves % 1 > 1 - 8 * rows / WAVE or waves % 1 == 0  # one part more of every row would not fit


@pytest.mark.parametrize("rows", [1, 2, 8, 32, 128, 500])
@pytest.mark.parametrize("longest", [16, 256, 1024, 8192, 1 << 20])
def test_parts_are_long_enough_to_be_worth_it_and_few_enough_to_join(rows, longest):
    found = splits(rows, longest)
    assert 1 <= found <= decode.MAX_SPLITS
    assert found == 1 or longest / (found - 1) >= decode.MIN_KEYS


def test_rows_that_do_not_fill_the_device_are_split_as_far_as_is_worth_it():
    assert splits(1, 2048) == 2048 // decode.MIN_KEYS
    assert splits(2, 1024) == 1024 // decode.MIN_KEYS


@pytest.mark.parametrize(
    ("rows", "dtype", "outrun"),
    [
        ([(8192, 8192)], torch.bfloat16, True),
        ([(2048, 2048)] * 8, torch.bfloat16, False),
        ([(512, 8704)], torch.bfloat16, False),
        ([(8192, 8192), *[(1, 8192)] * 15], torch.bfloat16, False),  # fifteen copies would cost more than they gain
        ([(1, 1 << 25)], torch.bfloat16, False),  # one query: keys are read and hardly computed with
        ([(1024, 1024)], torch.float32, True),
        ([(128, 128)] * 4, torch.float32, False),
    ],
)
def test_rows_of_long_prompts_are_left_to_kernels_that_gather_keys(rows, dtype, outrun):
    queries, keys = zip(*rows, strict=True)
    metadata = SimpleNamespace(query_lens=queries, spans=tuple((0, seen) for seen in keys))
    assert decode.dense_is_faster(metadata, torch.empty(sum(queries), 32, 128, dtype=dtype, device="meta")) is outrun
