"""Layouts: who owns which positions. See layout.py for the idea."""

from attnspan.layouts.balanced import Balanced
from attnspan.layouts.contiguous import Contiguous
from attnspan.layouts.head_tail import HeadTail
from attnspan.layouts.layout import Layout
from attnspan.layouts.per_document import PerDocument
from attnspan.layouts.round_robin import RoundRobinByWork
from attnspan.layouts.run import Run
from attnspan.layouts.striped import Striped
from attnspan.layouts.traffic import moved

__all__ = ["Balanced", "Contiguous", "HeadTail", "Layout", "PerDocument", "RoundRobinByWork", "Run", "Striped", "moved"]
