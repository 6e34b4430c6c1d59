"""Records move: one v1 stream over a file, a pipe, a socket or memory, and sealed blocks over carriers.

``new_stream(target, spec)`` gives a RouteSink, ``open_stream(source)`` a RouteSource. Sealed blocks, with several
producers and groups, are ``stream.folder`` and its siblings.
"""

from __future__ import annotations

import os
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

from routeplane.errors import naming_stream, refused
from routeplane.record.batches import DEFAULT_MAX_BYTES
from routeplane.record.interfaces import BlockName, RouteSink
from routeplane.record.policy import QuarantineOptions, ReadPolicy, StreamReport
from routeplane.record.schema import FORMAT_VERSION, check_version, choose_encoding
from routeplane.record.spec import RouteSpec
from routeplane.record.transfer import RecordReader, check_max_bytes
from routeplane.stream.blocks import BlockLimits, ReadOptions
from routeplane.stream.files import frames_of, target_of
from routeplane.stream.ipc import IpcReader, IpcWriter
from routeplane.stream.memory import MemoryStream
from routeplane.stream.sockets import Address, Listener, connect, listen, parse_address

__all__ = [
    "BlockLimits",
    "BlockName",
    "Listener",
    "MemoryStream",
    "QuarantineOptions",
    "ReadOptions",
    "ReadPolicy",
    "StreamReport",
    "listen",
    "new_stream",
    "open_stream",
]


def new_stream(
    target: Any,
    spec: RouteSpec,
    *,
    encoding: Literal["plain", "narrow", "auto"] | None = None,
    max_bytes: int = DEFAULT_MAX_BYTES,
    timeout_s: float | None = None,
    format: str = FORMAT_VERSION,
) -> RouteSink:
    """Open a sink for records of ``spec``.

    Args:
        target: a path or ``file://`` URL, a writable binary file, ``tcp://host:port``, ``unix:///path``, or a
            MemoryStream. A path is written under a temporary name and renamed by ``close``; leaving ``with`` by an
            exception publishes nothing. A file stays the caller's to close.
        encoding: by default ``plain``, over TCP ``auto``; refused for a MemoryStream, which encodes nothing.
        max_bytes: payload bytes held before a batch is written, or, for a MemoryStream, before ``write`` blocks.
        timeout_s: longest wait for the other side of a socket or a MemoryStream (None: no bound); refused elsewhere.
        format: ``1.0`` for readers that know no other, which refuses a record that needs more; for paths and files.

    Raises UsageError, TransportError.

    >>> import io
    >>> from routeplane import RouteSpec, new_stream, open_stream
    >>> spec = RouteSpec(num_experts=8, top_k=2, layer_ids=(0, 1), model="m")
    >>> file = io.BytesIO()
    >>> with new_stream(file, spec) as sink:
    ...     pass
    >>> with open_stream(file.getvalue()) as reader:
    ...     reader.spec == spec, list(reader)
    (True, [])
    """
    check_max_bytes(max_bytes)  # before a file is opened that would stay open
    target = _place_of(target)
    if format != FORMAT_VERSION and isinstance(target, MemoryStream | Address):
        raise refused(f"format {FORMAT_VERSION} for a transport", repr(format))
    check_version(format, spec=spec)  # like the encoding, before a file is opened
    if isinstance(target, MemoryStream):
        if encoding is not None:
            raise refused("no encoding for a MemoryStream, which encodes nothing", repr(encoding))
        return target.new_sink(spec, max_bytes=max_bytes, timeout_s=timeout_s)
    if isinstance(target, Address):
        return connect(target, spec, encoding=encoding, max_bytes=max_bytes, timeout_s=timeout_s)
    _refuse_timeout(timeout_s, target)
    chosen = choose_encoding("plain" if encoding is None else encoding, spec)
    return IpcWriter(target_of(target), spec, encoding=chosen, max_bytes=max_bytes, version=format)


def open_stream(
    source: Any,
    *,
    on_truncated: Literal["raise", "keep"] = "raise",
    on_corrupt: Literal["raise", "quarantine"] = "raise",
    on_alarm: Literal["count", "raise", "ignore"] = "count",
    max_missing: float | None = None,
    verify: bool = True,
    quarantine: QuarantineOptions | None = None,
    timeout_s: float | None = None,
) -> RecordReader:
    """Open the records of one stream.

    Args:
        source: a path or ``file://`` URL, bytes, a readable binary file, ``tcp://host:port``, ``unix:///path``, a
            Listener, or a MemoryStream. A path is mapped, and a missing trailer is found before the first record; a
            pipe tells only at its end. At an address this process listens for one stream. Archives, Parquet, folders of
            blocks, patterns and other URLs are ``routeplane.inspect.find_sources``'s.
        on_truncated, on_corrupt, on_alarm, max_missing, verify, quarantine: what to do with data that is wrong, as
            ``ReadPolicy`` says.
        timeout_s: longest wait for the other side of a socket or a MemoryStream (None: no bound); refused elsewhere.

    Raises FormatError (TruncatedError) for what is not a whole stream of a known version, DataError for a bad record,
    TransportError where the other side is gone, UsageError. Errors name the path, where there is one.

    >>> import io
    >>> from routeplane import new_stream, open_stream
    >>> from routeplane.testing.builders import watermarked_record, watermarked_spec
    >>> spec = watermarked_spec()
    >>> record = watermarked_record(0, num_tokens=3, spec=spec)
    >>> file = io.BytesIO()
    >>> with new_stream(file, spec) as sink:
    ...     sink.write(record)
    >>> with open_stream(file.getvalue()) as reader:
    ...     [read.num_tokens for read in reader], reader.report().complete
    ([3], True)
    """
    source = _place_of(source)
    policy = ReadPolicy(
        on_truncated=on_truncated,
        on_corrupt=on_corrupt,
        on_alarm=on_alarm,
        max_missing=max_missing,
        verify=verify,
        quarantine=quarantine,
    )
    if isinstance(source, MemoryStream | Listener):
        return source.open_source(policy, timeout_s=timeout_s)
    if isinstance(source, Address):
        with Listener(source) as listener:
            return listener.open_source(policy, timeout_s=timeout_s)
    _refuse_timeout(timeout_s, source)
    name = os.fsdecode(source) if isinstance(source, str | os.PathLike) else None
    with naming_stream(name):
        frames, walkable = frames_of(source, salvage=on_corrupt == "quarantine")
        return IpcReader(frames, policy, walkable=walkable, name=name)


def _place_of(place: Any) -> Any:
    """The path that a ``file://`` URL names, the address that another URL is; anything else as it is."""
    if not isinstance(place, str) or "://" not in place:
        return place
    return unquote(urlsplit(place).path) if place.startswith("file://") else parse_address(place)


def _refuse_timeout(timeout_s: float | None, place: Any) -> None:
    if timeout_s is not None:
        what = f"{type(place).__name__} {str(place)[:80]!r}"
        raise refused(f"no timeout_s for {what}, which is not waited for", f"{timeout_s}")
