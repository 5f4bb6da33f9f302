"""Two parameters of a test, of which the second takes turns: each row is tried with one daily, with all under `slow`.

@pytest.mark.parametrize(("name", "ranks"), in_turn(["llama", "bert"], [2, 4]))  # daily (llama, 2) and (bert, 4)
"""

import pytest


def in_turn(rows, columns, seldom=()):
    """Every pair, as pytest takes them; rows that are tried seldom are all under `slow`."""
    return [
        pytest.param(row, column, marks=[] if n % len(columns) == m and row not in seldom else [pytest.mark.slow])
        for n, row in enumerate(rows)
        for m, column in enumerate(columns)
    ]
