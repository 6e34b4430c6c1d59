"""Records move: one pair of verbs for every transport.

``new_stream(sink, spec)`` gives a RouteSink, ``open_stream(source)`` a RouteSource. This file only picks the transport.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, Literal

from routeplane.errors import refused
from routeplane.record.interfaces import RouteSink
from routeplane.record.policy import ReadPolicy, StreamReport
from routeplane.record.schema import choose_encoding
from routeplane.record.spec import RouteSpec
from routeplane.record.transfer import RecordReader, check_max_bytes
from routeplane.stream.addresses import Acknowledge, SinkOptions, SourceOptions, Transport, parse_address
from routeplane.stream.batching import DEFAULT_MAX_BYTES
from routeplane.stream.delivery import DEFAULT_GROUP
from routeplane.stream.files import frames_of, target_of
from routeplane.stream.ipc import IpcReader, IpcWriter
from routeplane.stream.memory import MemoryStream

__all__ = ["IpcReader", "IpcWriter", "MemoryStream", "StreamReport", "new_stream", "open_stream"]

# Scheme of an address -> the module here whose ``transport(address)`` makes its Transport; imported on first use, for
# some need an extra.
_SCHEMES: Mapping[str, str] = {
    "grpc": "flight",
    "grpc+tls": "flight",
    "ray": "ray",
    "shm": "shared",
    "tcp": "sockets",
    "unix": "sockets",
}


def new_stream(
    sink: Any,
    spec: RouteSpec,
    *,
    encoding: Literal["plain", "narrow", "auto"] | None = None,
    max_bytes: int = DEFAULT_MAX_BYTES,
    producer: str | None = None,
    timeout_s: float | None = None,
) -> RouteSink:
    """A sink for records of ``spec``: a path, a writable binary file, an address (``scheme://...``) or a transport.

    A path is written under a temporary name and renamed by ``close``; leaving ``with`` by an exception publishes
    nothing. A file stays the caller's to close. ``encoding``: by default ``plain``, and ``auto`` on network hops.
    ``max_bytes``: payload held before a batch is written, or, for a MemoryStream, before ``write`` blocks.
    ``producer``: the name under which a producer may go on after a break; ``timeout_s``: the longest wait for the other
    side or for room (None: no bound); both for transports alone. Raises UsageError.
    """
    check_max_bytes(max_bytes)  # before a file is opened that nobody would close
    transport = _transport_of(sink)
    if transport is not None:
        options = SinkOptions(encoding=encoding, max_bytes=max_bytes, producer=producer, timeout_s=timeout_s)
        return transport.new_sink(spec, options)
    chosen = choose_encoding("plain" if encoding is None else encoding, spec)
    return IpcWriter(target_of(sink), spec, encoding=chosen, max_bytes=max_bytes)


def open_stream(
    source: Any,
    *,
    on_truncated: Literal["raise", "keep"] = "raise",
    on_corrupt: Literal["raise", "quarantine"] = "raise",
    on_alarm: Literal["count", "raise", "ignore"] = "count",
    max_missing: float | None = None,
    verify: bool = True,
    group: str = DEFAULT_GROUP,
    consumer: str | None = None,
    acknowledge: Acknowledge = "auto",
    cursor: Mapping[str, int] | None = None,
    timeout_s: float | None = None,
) -> RecordReader:
    """The records of a path, bytes, a readable binary file, an address (``scheme://...``) or a transport.

    A path is mapped, and a missing trailer is found before the first record; a pipe tells only at its end.
    ``on_truncated="keep"`` yields what came whole and reports the cut. ``on_corrupt="quarantine"`` replaces the rows of
    a bad record by MISSING, keeps its bytes aside and counts it. ``on_alarm``: whether statistics of a broken capture
    (``alarms.find_alarms``) are counted, raised, or not looked for. ``max_missing``: largest share of fed rows that
    may be absent from a batch that ``admit`` (and so ``microbatches``) lets pass. ``verify=False`` skips comparing
    checksums, nothing else.

    For transports alone: ``group`` and ``consumer`` (each group is given every record once; a consumer that comes back
    under its name is given at once what it did not acknowledge), ``acknowledge`` (``auto``: when the record behind is
    asked for; ``manual``: by ``reader.acknowledge()``), ``cursor`` (that of an earlier reader, after a restart of the
    other side), ``timeout_s`` (the longest wait for records; None: no bound).

    Raises FormatError (TruncatedError) for what is no whole stream of a known version, DataError for a bad record,
    TransportError where the other side is gone.
    """
    policy = ReadPolicy(
        on_truncated=on_truncated, on_corrupt=on_corrupt, on_alarm=on_alarm, max_missing=max_missing, verify=verify
    )
    transport = _transport_of(source)
    if transport is not None:
        options = SourceOptions(
            group=group, consumer=consumer, acknowledge=acknowledge, cursor=cursor, timeout_s=timeout_s
        )
        return transport.open_source(policy, options)
    frames, walkable = frames_of(source)
    return IpcReader(frames, policy, walkable=walkable)


def _transport_of(place: Any) -> Transport | None:
    """The transport that ``place`` is or names; None for paths, bytes and files."""
    if isinstance(place, Transport):
        return place
    if not isinstance(place, str) or "://" not in place:
        return None
    address = parse_address(place)
    if address.scheme not in _SCHEMES:
        raise refused(f"an address with one of the schemes {sorted(_SCHEMES)}", repr(place))
    made: Transport = importlib.import_module(f"{__name__}.{_SCHEMES[address.scheme]}").transport(address)
    return made
