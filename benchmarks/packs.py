"""Packs of documents as training brings them: what planning is measured and tested on.

>>> sum(pack("pareto", 4096, 10, seed=3)), len(pack("lognormal", 4096, 10, seed=3))
(4096, 10)
"""

from __future__ import annotations

import random
from collections.abc import Callable

PACKS: dict[str, Callable[[random.Random], float]] = {
    "lognormal": lambda draw: draw.lognormvariate(0, 1),
    "narrow": lambda draw: draw.lognormvariate(0, 0.5),
    "wide": lambda draw: draw.lognormvariate(0, 1.5),
    "uniform": lambda draw: draw.uniform(0.02, 1),
    "pareto": lambda draw: draw.paretovariate(1.2),
    "two lengths": lambda draw: 50.0 if draw.random() < 0.1 else 1.0,
    "equal": lambda draw: 1.0,
}


def pack(name: str, seq_len: int, documents: int, seed: int) -> list[int]:
    """Lengths of documents, in random order, that sum to seq_len."""
    draw = random.Random(f"{name} {seed}")
    raw = [PACKS[name](draw) for _ in range(documents)]
    scale = (seq_len - documents) / sum(raw)
    lengths = [1 + int(value * scale) for value in raw]
    left = seq_len - sum(lengths)  # less than one token for each
    return [length + (i < left) for i, length in enumerate(lengths)]
