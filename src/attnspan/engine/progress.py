"""A progress bar of finished samples, where it is asked for."""

from __future__ import annotations

from typing import Any

from attnspan.engine.request import Request
from attnspan.errors import EngineError


class ProgressBar:
    """A bar for ``with``; `advance` does nothing where none is wanted."""

    def __init__(self, requests: list[Request], wanted: bool) -> None:
        self._total = sum(len(request.samples) for request in requests)
        self._bar: Any = None
        self._task: Any = None
        if wanted:
            try:
                from rich.progress import Progress
            except ImportError:
                raise EngineError('progress=True needs rich; run pip install "attnspan[cli]"') from None
            self._bar = Progress()

    def __enter__(self) -> ProgressBar:
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task("generating", total=self._total)
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, count: int) -> None:
        if self._bar is not None and count:
            self._bar.advance(self._task, count)
