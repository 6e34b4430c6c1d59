"""Records move: one pair of verbs for every transport.

``new_stream(sink, spec)`` gives a RouteSink, ``open_stream(source)`` a RouteSource. This file only picks the transport.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, Literal

from routeplane.errors import ErrorKind, TruncatedError
from routeplane.ports import RouteSink
from routeplane.schema import choose_encoding
from routeplane.spec import RouteSpec
from routeplane.stream.files import frames_of, target_of
from routeplane.stream.frames import Frame
from routeplane.stream.ipc import DEFAULT_MAX_BYTES, IpcReader, IpcWriter
from routeplane.stream.memory import MemoryReader, MemoryStream
from routeplane.stream.protocol import TRAILER_KEY, ReadPolicy, StreamReport

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
    return IpcWriter(target_of(sink), spec, encoding=chosen, max_bytes=max_bytes)


def open_stream(
    source: Any,
    *,
    on_truncated: Literal["raise", "keep"] = "raise",
    on_corrupt: Literal["raise", "quarantine"] = "raise",
    max_missing: float | None = None,
    verify: bool = True,
) -> IpcReader | MemoryReader:
    """The records of a path, bytes, a readable binary file, or a MemoryStream.

    A path is mapped, and a missing trailer is found before the first record; a pipe tells only at its end.
    ``on_truncated="keep"`` yields what came whole and reports the cut. ``on_corrupt="quarantine"`` replaces the rows of a
    bad record by MISSING, keeps its bytes aside and counts it. ``max_missing``: largest share of fed rows that ``admit``
    lets pass. ``verify=False`` skips comparing checksums, nothing else.

    Raises FormatError (TruncatedError) for what is no whole stream of a known version, DataError for a bad record.
    """
    policy = ReadPolicy(on_truncated=on_truncated, on_corrupt=on_corrupt, max_missing=max_missing, verify=verify)
    if isinstance(source, MemoryStream):
        return source.reader(policy)
    frames, walkable = frames_of(source)
    return IpcReader(_known_whole(frames, policy) if walkable else frames, policy)


def _known_whole(frames: Iterator[Frame], policy: ReadPolicy) -> Iterator[Frame]:
    """Walk the frames of a source that can be walked, so that a cut shows before the first record.

    Headers alone are touched: their number, not their payload, is the cost.
    """
    walked: list[Frame] = []
    try:
        walked.extend(frames)
    except TruncatedError as error:
        if policy.on_truncated == "raise" or not walked:
            raise
        return itertools.chain(walked, _raising(error))
    if policy.on_truncated == "raise" and walked and TRAILER_KEY not in walked[-1].metadata:
        raise TruncatedError("expected a trailer, got the end of the stream", kind=ErrorKind.TRUNCATED)
    return iter(walked)


def _raising(error: TruncatedError) -> Iterator[Frame]:
    yield from ()
    raise error
