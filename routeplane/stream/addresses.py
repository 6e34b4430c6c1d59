"""What a transport is to ``new_stream`` and ``open_stream``, and how an address is written.

``scheme://host:port``, ``scheme:///path`` or ``scheme://name``, with ``?name=value`` behind. Which module serves which
scheme stands in ``routeplane.stream``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable
from urllib.parse import parse_qsl, unquote, urlsplit

from routeplane.errors import refused
from routeplane.stream.delivery import DEFAULT_GROUP

if TYPE_CHECKING:
    from routeplane.record.policy import ReadPolicy
    from routeplane.record.spec import RouteSpec
    from routeplane.record.transfer import RecordReader, RecordWriter

__all__ = ["Acknowledge", "Address", "SinkOptions", "SourceOptions", "Transport", "parse_address", "yes_or_no"]

#: who says that a block is done: asking for the next one, or a call
Acknowledge = Literal["auto", "manual"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SinkOptions:
    """What ``new_stream`` was given. ``encoding`` None: what suits the transport, ``auto`` on network hops.

    ``producer``: the name under which a producer goes on after a break; None makes one up. ``timeout_s``: longest wait
    for the other side or for room; None waits for ever.
    """

    encoding: Literal["plain", "narrow", "auto"] | None
    max_bytes: int
    producer: str | None = None
    timeout_s: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceOptions:
    """What ``open_stream`` was given beyond the policy; see ``BrokeredReader``."""

    group: str = DEFAULT_GROUP
    consumer: str | None = None
    acknowledge: Acknowledge = "auto"
    cursor: Mapping[str, int] | None = None
    timeout_s: float | None = None


@runtime_checkable
class Transport(Protocol):
    """A place that records go through; ``MemoryStream`` is one, and each scheme's module makes one of an address."""

    def new_sink(self, spec: RouteSpec, options: SinkOptions) -> RecordWriter:
        """A sink of this place."""

    def open_source(self, policy: ReadPolicy, options: SourceOptions) -> RecordReader:
        """A source of this place; waits until its spec is known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Address:
    """A parsed address. ``host`` without brackets, ``port`` None where there is none, ``path`` with its slash."""

    scheme: str
    host: str
    port: int | None
    path: str
    query: Mapping[str, str] = field(default_factory=dict)

    @property
    def location(self) -> str:
        """``host:port`` as networks write it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port is None else f"{host}:{self.port}"


def parse_address(text: str) -> Address:
    """Parse an address. Raises UsageError for what is none."""
    try:
        parts = urlsplit(text)
        port = parts.port
        query = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
    except ValueError as error:
        raise refused("an address as scheme://host:port or scheme:///path", f"{text!r} ({error})") from None
    if not parts.scheme or "://" not in text or parts.username is not None or parts.fragment:
        raise refused("an address as scheme://host:port or scheme:///path", repr(text))
    if len(dict(query)) < len(query):
        raise refused("each option of an address once", repr(text))
    return Address(
        scheme=parts.scheme, host=parts.hostname or "", port=port, path=unquote(parts.path), query=dict(query)
    )


def yes_or_no(address: Address, name: str, *, default: bool = True) -> bool:
    """An option of an address that is ``true`` or ``false``. Raises UsageError."""
    text = address.query.get(name, str(default).lower())
    if text not in ("true", "false"):
        raise refused(f"{name}=true or {name}=false", text)
    return text == "true"
