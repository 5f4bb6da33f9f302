"""What a training script touches: see session.py for the way in."""

from attnspan.parallel.session import ContextParallel

__all__ = ["ContextParallel"]
