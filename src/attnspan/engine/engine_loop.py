"""The loop that every rank of an engine runs: each round executes the new commands, then makes one step.

[Note: over ranks] The ranks of an engine make the same calls in the same order. Rank 0 receives commands
(stepping_thread.py) and sends them to the others, which `follow`, at the beginning of each round. Without work it sends
an empty round every few seconds (`HEARTBEAT`), so that no rank waits longer than its group's timeout.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

from attnspan.engine.commands import AddCommand, CancelCommand, Command, decode_commands
from attnspan.engine.llm_engine import LLMEngine
from attnspan.engine.request import Request, Token
from attnspan.errors import EngineError

log = logging.getLogger("attnspan.engine")


class Round(NamedTuple):
    """What a round came to: calls that were added or refused, tokens, and why the step failed, if it did."""

    added: dict[int, list[Request]]
    refused: dict[int, Exception]
    tokens: list[Token]
    failed: BaseException | None


class EngineLoop:
    """What every rank does in a round: commands, then a step."""

    def __init__(self, engine: LLMEngine) -> None:
        self.engine = engine
        self.requests: dict[int, list[Request]] = {}  # by call; those that have not all ended
        self.stopped = False

    def round(self, commands: Sequence[Command]) -> Round:
        added, refused = dict[int, list[Request]](), dict[int, Exception]()
        for command in commands:
            if isinstance(command, AddCommand):
                try:
                    added[command.call] = self.requests[command.call] = self._add(command)
                except Exception as error:
                    refused[command.call] = error
            elif isinstance(command, CancelCommand):
                self._cancel(self.requests.pop(command.call, ()))
            else:
                self.stopped = True
                self._cancel_all()
        tokens, failed = list[Token](), None
        if self.engine.failure is not None:
            failed = self.engine.failure
        elif self.requests:
            try:
                tokens = self.engine.step()
            except BaseException as error:
                failed = error
                if self.engine.failure is None and not any(
                    request.error is error for requests in self.requests.values() for request in requests
                ):
                    self._cancel_all()
        for call in [call for call, requests in self.requests.items() if all(each.finished for each in requests)]:
            del self.requests[call]
        return Round(added, refused, tokens, failed)

    def _add(self, command: AddCommand) -> list[Request]:
        requests: list[Request] = []
        try:
            for prompt, params in zip(command.prompts, command.params, strict=True):
                requests.append(self.engine.add(prompt, params, salt=command.salt, priority=command.priority))
        except Exception:
            self._cancel(requests)
            raise
        return requests

    def _cancel(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if not request.finished:
                try:
                    self.engine.cancel(request)
                except Exception as error:  # its last text cannot be decoded; it has ended, and nobody asks
                    log.warning("request %s was cancelled: %s", request.number, error)

    def _cancel_all(self) -> None:
        for requests in self.requests.values():
            self._cancel(requests)
        self.requests.clear()


def follow(engine: LLMEngine) -> None:
    """Do what rank 0 does, until its `AsyncEngine` is shut down: what every other rank calls.

    Raises what ends the engine: a rank that is lost, or that fails.
    """
    transport = engine.transport
    if transport is None or transport.rank == 0:
        raise EngineError("follow is for the ranks beside rank 0; rank 0 makes an AsyncEngine of its engine")
    loop = EngineLoop(engine)
    while not loop.stopped:
        loop.round(decode_commands(transport.all_gather_bytes(b"", "commands of an engine")[0]))
        if engine.failure is not None:
            raise engine.failure
