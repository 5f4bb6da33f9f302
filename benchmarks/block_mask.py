"""How long BlockMasks take: from bands, beside torch's `create_block_mask`, which asks every pair; and back to bands.

    python benchmarks/block_mask.py                  # writes benchmarks/results/block_mask.md
    python benchmarks/block_mask.py --before SRC     # beside those of another version, whose src this is

Each measurement is a fresh process with one thread, so that the peak memory is its own (less what it had
before). Times are CPU seconds. Ours includes making the bands. torch runs eagerly, where S x S fits.
Ceiling: 100 times faster than torch wherever torch fits, and 1M tokens in under 10 s.

The way back is that of a session that is given a FlexAttention mask: a BlockMask, or a function alone (`MaskMod`), is
traced and becomes bands. Ceiling: 128k tokens in 1 s, and at most 2.5 times as long for twice the tokens.
"""

import datetime
import json
import os
import pathlib
import platform
import random
import resource
import subprocess
import sys
import time
from itertools import pairwise

MASKS = ("causal", "documents", "window")
LENGTHS = [1 << n for n in (13, 14, 15, 16, 17, 18, 20)]
TORCH_FITS = 1 << 15  # 32k: S x S bools take 1 GiB, and its block sums in int64 several more
CEILING_RATIO, CEILING_SECONDS = 100, 10
READ = ("documents", "shuffled ids", "window", "prefix")
READ_LENGTHS = [1 << n for n in (14, 15, 16, 17, 18)]
BEFORE_FITS = {"documents": 1 << 16, "shuffled ids": 0, "window": 1 << 15, "prefix": 1 << 15}  # S x S: a minute or so
CEILING_READ, CEILING_GROWTH = 1.0, 2.5
RESULT = pathlib.Path(__file__).parent / "results" / "block_mask.md"


def mask_of(name, length):
    from attnspan.masks import Causal, Documents, PrefixLM, SlidingWindow

    if name == "causal":
        return Causal()
    if name == "window":
        return SlidingWindow(4095)
    if name == "prefix":
        return PrefixLM(4000)
    return Causal() & Documents(document_lengths(length))


def document_lengths(length):
    cuts = sorted(random.Random(0).sample(range(1, length), length // 1024 - 1))  # documents of 1k on average
    edges = [0, *cuts, length]
    return [stop - start for start, stop in pairwise(edges)]


def mask_mod_of(name, length):
    """The same mask, as a FlexAttention user writes it."""
    import torch

    lengths = torch.tensor(document_lengths(length))
    ids = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    order = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(0))[ids]
    return {
        "documents": lambda b, h, q, k: (q >= k) & (ids[q] == ids[k]),
        "shuffled ids": lambda b, h, q, k: (q >= k) & (order[q] == order[k]),
        "window": lambda b, h, q, k: (q >= k) & (q - k < 4096),
        "prefix": lambda b, h, q, k: (q >= k) | (k < 4000),
    }[name]


def measure(name, length, maker):
    """Seconds and bytes of one run, in this process. A small run first pays for imports."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask

    torch.set_num_threads(1)
    mask_of(name, 2048).block_mask(2048)
    mask = mask_of(name, length)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    if maker == "ours":
        block_mask = mask.block_mask(length)
    else:
        block_mask = create_block_mask(mask.mask_mod(length), 1, 1, length, length, device="cpu")
    seconds = time.process_time() - start
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    kept = sum(t.nbytes for t in block_mask.as_tuple(flatten=False) if isinstance(t, torch.Tensor))
    return {"seconds": seconds, "peak": peak, "kept": kept}


def measure_reading(name, length, source):
    """Seconds and bytes from a BlockMask or a function to bands, in this process, after a small run."""
    import torch

    torch.set_num_threads(1)
    read(name, 8192, source)()
    reading = read(name, length, source)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    cover = reading()
    seconds = time.process_time() - start
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert cover.is_exact, "these masks have few bands"
    assert sum(band.area for band in cover.certain) == mask_of(name, length).work(length), "the same pairs"
    return {"seconds": seconds, "peak": peak, "bands": len(cover.certain)}


def read(name, length, source):
    from attnspan.masks import Mask, MaskMod

    mask_mod = mask_mod_of(name, length)
    if source == "MaskMod":
        return lambda: MaskMod(mask_mod).cover(length)
    block_mask = mask_of(name, length).block_mask(length)
    block_mask.mask_mod = mask_mod
    return lambda: Mask.from_block_mask(block_mask).cover(length)


def in_a_fresh_process(name, length, maker, src=None):
    command = [sys.executable, __file__, "--one", name, str(length), maker]
    env = os.environ if src is None else {**os.environ, "PYTHONPATH": src}
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True, env=env).stdout)


def table_of_reading(before):
    """Rows of the second table, and whether the ceiling is met."""
    lines, met = [], True
    for source in ("BlockMask", "MaskMod"):
        for name in READ:
            last = None
            for length in READ_LENGTHS:
                runs = [in_a_fresh_process(name, length, source) for _ in range(3)]
                ours = min(runs, key=lambda run: run["seconds"])
                fits = before is not None and length <= BEFORE_FITS[name]
                was = in_a_fresh_process(name, length, source, before) if fits else None
                growth = ours["seconds"] / last if last else None
                met &= (length > 1 << 17 or ours["seconds"] <= CEILING_READ) and (growth or 0) <= CEILING_GROWTH
                last = ours["seconds"]
                cells = [
                    f"{source}, {name}",
                    f"{length // 1024}k",
                    f"{ours['seconds']:.3f}",
                    f"{growth:.2f}x" if growth else "-",
                    f"{ours['peak'] / 2**20:.0f}",
                    f"{ours['bands']}",
                    f"{was['seconds']:.1f}" if was else "-",
                    f"{was['peak'] / 2**20:.0f}" if was else "-",
                ]
                lines.append("| " + " | ".join(cells) + " |")
                print(lines[-1], flush=True)
    return lines, met


def main(before=None):
    import torch

    reading, read_met = table_of_reading(before)
    lines = []
    met = True
    for name in MASKS:
        for length in LENGTHS:
            runs = [in_a_fresh_process(name, length, "ours") for _ in range(3)]
            ours = min(runs, key=lambda run: run["seconds"])
            torchs = in_a_fresh_process(name, length, "torch") if length <= TORCH_FITS else None
            ratio = torchs["seconds"] / ours["seconds"] if torchs else None
            met &= ours["seconds"] < CEILING_SECONDS and (ratio is None or ratio > CEILING_RATIO)
            cells = [
                name,
                f"{length // 1024}k",
                f"{ours['seconds'] * 1e3:.1f}",
                f"{torchs['seconds'] * 1e3:.0f}" if torchs else "-",
                f"{ratio:.0f}x" if ratio else "-",
                f"{ours['peak'] / 2**20:.0f}",
                f"{torchs['peak'] / 2**20:.0f}" if torchs else "-",
                f"{ours['kept'] / 2**20:.1f}",
            ]
            lines.append("| " + " | ".join(cells) + " |")
            print(lines[-1], flush=True)
    about = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.split(":")[1].strip() for line in about if line.startswith("model name")), "unknown")
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(
        f"""# A BlockMask from bands, beside torch's create_block_mask

- date: {datetime.date.today()}
- hardware: CPU, one thread, {cpu}
- versions: torch {torch.__version__}, Python {platform.python_version()}
- command: `{" ".join(["python benchmarks/block_mask.py", *(["--before SRC"] if before else [])])}`
- blocks of 128; documents of 1k tokens on average, causal; window of 4096 tokens, causal. Best of 3 for ours,
  one run of torch's (eager, where S x S fits). Times are CPU time. Peak is the growth of the process.
- ceiling: {CEILING_RATIO}x faster than torch, {CEILING_SECONDS} s at 1M: {"met" if met else "NOT MET"}

| mask | tokens | ours, ms | torch, ms | torch / ours | our peak, MiB | its peak, MiB | BlockMask, MiB |
|---|---|---|---|---|---|---|---|
"""
        + "\n".join(lines)
        + f"""

## From a FlexAttention mask to bands

What a session pays once for a new BlockMask or `MaskMod`: the function is traced, and becomes bands. The BlockMask is
given; blocks of 128. Growth is over half the tokens. Before: version 0.3.0, which asked every pair of a `MaskMod`, and
wrote out a row of S keys for every query of a BlockMask; one run, where that takes a minute or so.

- shuffled ids: the same documents, whose ids are in no order; prefix of 4,000 tokens, causal after it
- ceiling: {CEILING_READ:.0f} s at 128k, {CEILING_GROWTH}x for twice the tokens: {"met" if read_met else "NOT MET"}

| mask | tokens | seconds | growth | peak, MiB | bands | before, seconds | before, peak, MiB |
|---|---|---|---|---|---|---|---|
"""
        + "\n".join(reading)
        + "\n"
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        name, length, what = sys.argv[2], int(sys.argv[3]), sys.argv[4]
        run = measure if what in ("ours", "torch") else measure_reading
        print(json.dumps(run(name, length, what)))
    else:
        main(before=sys.argv[2] if sys.argv[1:2] == ["--before"] else None)
