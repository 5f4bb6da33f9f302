"""Commands that rank 0 sends to all ranks of an engine at the beginning of a round, and their serialization."""

from __future__ import annotations

import json
from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from attnspan.engine.params import SamplingParams
from attnspan.engine.prompts import Prompt


@dataclass(frozen=True, slots=True)
class AddCommand:
    """Add all of these prompts, or none."""

    call: int
    prompts: Sequence[Prompt]
    params: Sequence[SamplingParams | None]
    salt: Hashable
    priority: int


@dataclass(frozen=True, slots=True)
class CancelCommand:
    """End what is left of a call."""

    call: int


@dataclass(frozen=True, slots=True)
class StopCommand:
    """End all that is left, and the loop."""


Command = AddCommand | CancelCommand | StopCommand
KINDS = (AddCommand, CancelCommand, StopCommand)


def encode_commands(commands: Sequence[Command]) -> bytes:
    """Commands as they travel to other ranks. JSON, which can hold no code.

    >>> decode_commands(encode_commands([AddCommand(3, [[5, 6]], [SamplingParams(n=2)], "salt", 0), StopCommand()]))[1]
    StopCommand()
    """

    def fields(command: Command) -> list[Any]:
        if not isinstance(command, AddCommand):
            return [getattr(command, name) for name in command.__slots__]
        params = [None if each is None else asdict(each) for each in command.params]
        return [command.call, command.prompts, params, command.salt, command.priority]

    return json.dumps([[KINDS.index(type(command)), *fields(command)] for command in commands]).encode()


def decode_commands(content: bytes) -> list[Command]:
    """The commands that were encoded."""
    found: list[Command] = []
    for kind, *fields in json.loads(content):
        if KINDS[kind] is AddCommand:
            fields[2] = [None if each is None else SamplingParams(**each) for each in fields[2]]
        found.append(KINDS[kind](*fields))
    return found
