"""docs/quickstart.md tells the truth: its script runs as it stands, and trains alike on one rank and on two."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

from tests.pace import stretched

PAGE = Path(__file__).parents[2] / "docs" / "quickstart.md"


def losses(script, ranks):
    """The losses that the script prints on so many ranks, each started as torchrun does."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    group = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env=os.environ | group | {"RANK": str(rank), "CUDA_VISIBLE_DEVICES": ""},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        said = [process.communicate(timeout=stretched(120)) for process in started]
    finally:
        for process in started:
            process.kill()
    assert all(process.returncode == 0 for process in started), "\n".join(errors for _, errors in said)
    return [float(found) for found in re.findall(rf"step \d: loss ([\d.]+) on {ranks} ranks", said[0][0])]


def test_the_script_trains_alike_on_one_rank_and_on_two(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)[0])
    alone, both = losses(script, 1), losses(script, 2)
    assert len(alone) == 5
    assert alone[-1] < alone[0]
    assert max(abs(a - b) for a, b in zip(alone, both, strict=True)) <= 2e-4  # printed to four decimals
