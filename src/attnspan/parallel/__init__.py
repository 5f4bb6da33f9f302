"""What a training script touches: see session.py for the way in, checking.py for the proof that it was used right."""

from typing import TYPE_CHECKING

from attnspan.parallel.batch import Batch
from attnspan.parallel.checking import check_model
from attnspan.parallel.session import ContextParallel

if TYPE_CHECKING:
    from attnspan.parallel.style import ContextParallelStyle

__all__ = ["Batch", "ContextParallel", "ContextParallelStyle", "check_model"]


def __getattr__(name: str) -> object:
    if name == "ContextParallelStyle":  # what it derives from takes torch longer to import than all of this package
        from attnspan.parallel.style import ContextParallelStyle

        return ContextParallelStyle
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
