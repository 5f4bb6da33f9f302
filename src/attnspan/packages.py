"""Packages that may be missing, or are called below what they document: what is here, and whether it is as it was read.

What leans on them is of one version, and an `Assumption` (assumptions.py) compares arguments before the first call.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from importlib import metadata


@cache
def installed_version(package: str) -> str | None:
    """The version of a package that is here, without importing it; None if there is none."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def takes(function: Callable[..., object], names: str) -> bool:
    """Whether a function has arguments of all these names, and needs no other.

    >>> takes(lambda q, k, scale=1.0: None, "q k scale"), takes(lambda q, k: None, "q"), takes(lambda q: None, "q k")
    (True, False, False)
    """
    found = inspect.signature(function).parameters
    open_ended = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    needed = {name for name, each in found.items() if each.default is each.empty and each.kind not in open_ended}
    return needed <= set(names.split()) <= set(found)


@cache
def has_triton() -> bool:
    """Whether Triton can be imported."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True
