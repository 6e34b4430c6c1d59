"""Records move: one pair of verbs for every transport.

``new_stream(sink, spec)`` gives a RouteSink, ``open_stream(source)`` a RouteSource. This file only picks the transport.
"""

from __future__ import annotations

from typing import Any, Literal

from routeplane.ports import RouteSink
from routeplane.schema import choose_encoding
from routeplane.spec import RouteSpec
from routeplane.stream.endpoints import check_max_bytes
from routeplane.stream.files import frames_of, target_of
from routeplane.stream.ipc import DEFAULT_MAX_BYTES, IpcReader, IpcWriter
from routeplane.stream.memory import MemoryReader, MemoryStream
from routeplane.stream.protocol import ReadPolicy, StreamReport

__all__ = ["IpcReader", "IpcWriter", "MemoryStream", "StreamReport", "new_stream", "open_stream"]


def new_stream(
    sink: Any,
    spec: RouteSpec,
    *,
    encoding: Literal["plain", "narrow", "auto"] = "plain",
    max_bytes: int = DEFAULT_MAX_BYTES,
) -> RouteSink:
    """A sink for records of ``spec``: a path, a writable binary file, or a MemoryStream.

    A path is written under a temporary name and renamed by ``close``; leaving ``with`` by an exception publishes
    nothing. A file stays the caller's to close. ``max_bytes``: payload held before a batch is written, or, for a
    MemoryStream, before ``write`` blocks. Raises UsageError.
    """
    if isinstance(sink, MemoryStream):
        return sink.writer(spec, max_bytes=max_bytes)
    chosen = choose_encoding(encoding, spec)
    check_max_bytes(max_bytes)  # before a file is opened that nobody would close
    return IpcWriter(target_of(sink), spec, encoding=chosen, max_bytes=max_bytes)


def open_stream(
    source: Any,
    *,
    on_truncated: Literal["raise", "keep"] = "raise",
    on_corrupt: Literal["raise", "quarantine"] = "raise",
    on_alarm: Literal["count", "raise", "ignore"] = "count",
    max_missing: float | None = None,
    verify: bool = True,
) -> IpcReader | MemoryReader:
    """The records of a path, bytes, a readable binary file, or a MemoryStream.

    A path is mapped, and a missing trailer is found before the first record; a pipe tells only at its end.
    ``on_truncated="keep"`` yields what came whole and reports the cut. ``on_corrupt="quarantine"`` replaces the rows of
    a bad record by MISSING, keeps its bytes aside and counts it. ``on_alarm``: whether statistics of a broken capture
    (``alarms.find_alarms``) are counted, raised, or not looked for. ``max_missing``: largest share of fed rows that
    may be absent from a batch that ``admit`` (and so ``microbatches``) lets pass. ``verify=False`` skips comparing
    checksums, nothing else.

    Raises FormatError (TruncatedError) for what is no whole stream of a known version, DataError for a bad record.
    """
    policy = ReadPolicy(
        on_truncated=on_truncated, on_corrupt=on_corrupt, on_alarm=on_alarm, max_missing=max_missing, verify=verify
    )
    if isinstance(source, MemoryStream):
        return source.reader(policy)
    frames, walkable = frames_of(source)
    return IpcReader(frames, policy, walkable=walkable)
