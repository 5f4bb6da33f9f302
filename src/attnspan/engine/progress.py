"""A progress bar of finished samples, where it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from attnspan.engine.request import Request
from attnspan.errors import EngineError


@contextmanager
def progress_bar(requests: list[Request], wanted: bool) -> Iterator[Callable[[int], None]]:
    """A bar for ``with``: call what it gives with the number of samples that have finished since."""
    if not wanted:
        yield lambda count: None
        return
    try:
        from rich.progress import Progress
    except ImportError:
        raise EngineError('progress=True needs rich; run pip install "attnspan[cli]"') from None
    with Progress() as bar:
        task = bar.add_task("generating", total=sum(len(request.samples) for request in requests))
        yield lambda count: bar.advance(task, count)
