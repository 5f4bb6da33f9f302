"""What a server is told: its name, keys, hosts and limits, checked once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address

from attnspan.errors import EngineError, integer

LOCAL_NAMES = ("127.0.0.1", "localhost", "[::1]")


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Keys, hosts and limits of a server.

    `api_keys`: if there are any, requests must bring one; each has a prefix cache of its own unless
    `shared_prefix_cache`. Clients see `adapters` of the model as models of these names; `model` is then the base model.
    On a loopback address only `allowed_hosts` and names of this machine are answered, so that a
    web page elsewhere cannot reach the server under a name of its own; other addresses answer to any name unless
    `allowed_hosts` are given. Times are in seconds, sizes in bytes.

    >>> ServerConfig(model="llama", max_n=0)
    Traceback (most recent call last):
    attnspan.errors.EngineError: max_n must be a whole number >= 1, got 0
    """

    model: str
    adapters: Sequence[str] = field(default=(), kw_only=True)
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: Sequence[str] = ()
    shared_prefix_cache: bool = False
    allowed_hosts: Sequence[str] = ()
    max_body: int = 4 << 20
    max_new_tokens: int = 4096
    max_prompts: int = 64
    max_n: int = 16
    max_stop: int = 16
    max_grammar: int = 64 << 10
    grammar_timeout: float = 10.0
    max_connections: int = 1024
    receive_timeout: float = 30.0
    send_timeout: float = 30.0
    drain: float = 30.0

    def __post_init__(self) -> None:
        if len(self.models) != 1 + len(self.adapters) or not all(self.models):
            raise EngineError(
                f"adapters and the model must have names of their own, got {[self.model, *self.adapters]}"
            )
        whole = (
            "max_body", "max_new_tokens", "max_prompts", "max_n", "max_stop", "max_grammar", "max_connections",
        )  # fmt: skip
        for name in whole:
            integer(name, getattr(self, name), at_least=1, error=EngineError)
        integer("port", self.port, error=EngineError)
        if self.port > 65535:
            raise EngineError(f"port must be at most 65535, got {self.port}")
        for name in ("grammar_timeout", "receive_timeout", "send_timeout", "drain"):
            seconds = getattr(self, name)
            if type(seconds) not in (int, float) or not 0 <= seconds < 1e6:
                raise EngineError(f"{name} must be seconds, at least 0, got {seconds!r}")
        for key in self.api_keys:
            if not isinstance(key, str) or not key.isascii() or not key.isprintable() or key.strip() != key or not key:
                raise EngineError("api_keys must be printable ASCII texts without spaces around them; one is not")

    @property
    def models(self) -> dict[str, str | None]:
        """What clients call each model, and the adapter that its requests name.

        >>> ServerConfig("llama", adapters=["formal"]).models
        {'llama': '__base__', 'formal': 'formal'}
        """
        return {self.model: "__base__" if self.adapters else None} | {name: name for name in self.adapters}

    @property
    def hosts(self) -> tuple[str, ...] | None:
        """Names that requests may call this server by; None for any."""
        if self.host == "localhost" or _is_loopback(self.host):
            return (*LOCAL_NAMES, *self.allowed_hosts)
        return tuple(self.allowed_hosts) or None

    def __repr__(self) -> str:
        return f"ServerConfig({self.model!r}, {self.host}:{self.port}, {len(self.api_keys)} keys)"  # and not the keys


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
