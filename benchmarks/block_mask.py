"""How long a BlockMask takes from bands, beside torch's `create_block_mask`, which asks every pair.

    python benchmarks/block_mask.py            # writes benchmarks/results/block_mask.md

Each measurement is a fresh process with one thread, so that the peak memory is its own (less what it had
before). Times are CPU seconds. Ours includes making the bands. torch runs eagerly, where S x S fits.
Ceiling: 100 times faster than torch wherever torch fits, and 1M tokens in under 10 s.
"""

import datetime
import json
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
RESULT = pathlib.Path(__file__).parent / "results" / "block_mask.md"


def mask_of(name, length):
    from attnspan.masks import Causal, Documents, SlidingWindow

    if name == "causal":
        return Causal()
    if name == "window":
        return SlidingWindow(4095)
    cuts = sorted(random.Random(0).sample(range(1, length), length // 1024 - 1))  # documents of 1k on average
    edges = [0, *cuts, length]
    return Causal() & Documents([stop - start for start, stop in pairwise(edges)])


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


def in_a_fresh_process(name, length, maker):
    command = [sys.executable, __file__, "--one", name, str(length), maker]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main():
    import torch

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
- command: `python benchmarks/block_mask.py`
- blocks of 128; documents of 1k tokens on average, causal; window of 4096 tokens, causal. Best of 3 for ours,
  one run of torch's (eager, where S x S fits). Times are CPU time. Peak is the growth of the process.
- ceiling: {CEILING_RATIO}x faster than torch, {CEILING_SECONDS} s at 1M: {"met" if met else "NOT MET"}

| mask | tokens | ours, ms | torch, ms | torch / ours | our peak, MiB | its peak, MiB | BlockMask, MiB |
|---|---|---|---|---|---|---|---|
"""
        + "\n".join(lines)
        + "\n"
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(measure(sys.argv[2], int(sys.argv[3]), sys.argv[4])))
    else:
        main()
