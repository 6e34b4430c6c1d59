"""Arrow IPC messages one by one, with the header read before the body is decoded.

The stream reader of pyarrow decodes a compressed body before it can be refused (one flipped bit once asked for
10 GB). Its message reader does not, but hides batch metadata, which holds the trailer. So frames are cut here, and the
few fields that decide are read from their flatbuffer headers; decoding stays with pyarrow. Field numbers are those of
Arrow's ``Message.fbs``.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa

from routeplane.errors import ErrorKind, FormatError, TruncatedError, UsageError

__all__ = ["Frame", "frames_of_buffer", "frames_of_file", "frames_received", "parse_metadata"]

#: Largest message header accepted: a batch of 100k records has some 2 kB of it, a schema of 4,096 layers some 60 kB.
MAX_METADATA_BYTES = 16 * 2**20
# A file is asked for no more at once, so that a flipped length takes no memory before its bytes come.
_READ_STEP = 16 * 2**20
_CONTINUATION, _MARK = 0xFFFFFFFF, b"\xff" * 4
_SCHEMA, _RECORD_BATCH = 1, 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Frame:
    """One encapsulated message: what its header says, and the whole of it, shared with the source where that is memory.

    ``rows``: what the header of a batch declares. A frame of kind ``damaged`` stands for bytes that are not a message.
    """

    kind: str  # "schema", "batch", "other" or "damaged"
    compressed: bool = False
    rows: int = 0
    body_length: int = 0
    metadata: dict[str, str] = field(default_factory=dict)
    data: pa.Buffer = field(default_factory=lambda: pa.py_buffer(b""))


def frames_of_buffer(buffer: pa.Buffer, *, salvage: bool = False) -> Iterator[Frame]:
    """Frames of an IPC stream in memory or a mapped file; zero copies. Ends after the end-of-stream mark.

    ``salvage``: damaged parts are passed over, each as one frame of kind ``damaged``. Behind a damaged header, the next
    place at which a batch's header stands is searched for (messages begin at multiples of 8 bytes). Raises
    TruncatedError where the bytes end early, FormatError where they are not an Arrow stream, or go on after its end.
    """
    view, source, at = memoryview(buffer), pa.BufferReader(buffer), 0
    while True:
        try:
            source.seek(at)
            found = _header(source.read, at)
            if found is None:
                break
            head, frame = found
            stop = at + len(head) + frame.body_length
            if stop > len(view):
                raise _truncated(f"a body of {frame.body_length} bytes", len(view) - at - len(head))
            # a length is damaged where no message begins behind it, and one begins inside of it
            unmarked = salvage and stop < len(view) and bytes(view[stop : stop + 4]) != _MARK
            if unmarked and _next_batch(view, at + 8) < stop:
                raise FormatError(f"expected a message of another length at byte {at}", kind=ErrorKind.NOT_ARROW)
        except FormatError as error:
            stop = _next_batch(view, at + 8) if salvage and at > 0 else len(view)
            # without a schema nothing can be read, and a cut is not a damaged batch
            if not salvage or at == 0 or (isinstance(error, TruncatedError) and stop == len(view)):
                raise
            frame = Frame(kind="damaged")
        yield replace(frame, data=buffer.slice(at, stop - at))
        at = stop
    if at + 8 < len(view):
        raise FormatError(
            f"expected nothing after the end-of-stream mark, got {len(view) - at - 8} bytes", kind=ErrorKind.TRAILER
        )


def frames_of_file(source: Any) -> Iterator[Frame]:
    """Frames of an IPC stream from a pipe, socket or file object, each copied into memory of its own.

    Reads nothing behind the end-of-stream mark. Raises as ``frames_of_buffer``.
    """

    def fill(memory: memoryview) -> int:
        came = 0
        while came < len(memory) and (part := source.read(min(len(memory) - came, _READ_STEP))):
            if not isinstance(part, bytes | bytearray | memoryview):
                raise UsageError(
                    f"expected a binary file, got one that reads {type(part).__name__}", kind=ErrorKind.ARGUMENT
                )
            memory[came : came + len(part)] = part
            came += len(part)
        return came

    def take(nbytes: int) -> tuple[memoryview, pa.Buffer]:
        data = pa.allocate_buffer(nbytes)
        return memoryview(data).cast("B"), data

    return frames_received(fill, take)


def _next_batch(view: memoryview, at: int) -> int:
    """Where the next whole record batch begins at or behind ``at``; the end of the view where there is none."""
    data = np.frombuffer(view, dtype="<u4", count=len(view) // 8 * 2).reshape(-1, 2)
    first = -(-at // 8)
    found = (data[first:, 0] == _CONTINUATION) & (data[first:, 1] <= MAX_METADATA_BYTES)
    for place in (8 * (first + np.flatnonzero(found))).tolist():
        with suppress(FormatError):
            body = place + 8 + int(data[place // 8, 1])
            header = parse_metadata(bytes(view[place + 8 : body]))
            if header.kind == "batch" and body + header.body_length <= len(view):
                return int(place)
    return len(view)


def frames_received(
    fill: Callable[[memoryview], int], take: Callable[[int], tuple[memoryview, pa.Buffer]], *, at: int = 0
) -> Iterator[Frame]:
    """Frames of a connection, each received straight into memory that ``take`` lends.

    ``fill`` fills what it is given, and says how much came before the end; ``take`` gives memory to write to, and the
    buffer that stands for it; pages of a claimed length are the system's until bytes come. Raises as
    ``frames_of_buffer``, and FormatError (TOO_LARGE) for a body that no memory can hold.
    """

    def read(nbytes: int) -> bytes:
        memory = bytearray(nbytes)
        return bytes(memory[: fill(memoryview(memory))])

    while (found := _header(read, at)) is not None:
        head, header = found
        try:
            memory, data = take(len(head) + header.body_length)
        except (MemoryError, OverflowError, ValueError) as error:
            raise FormatError(
                f"expected a body that memory can hold, got {header.body_length} bytes", kind=ErrorKind.TOO_LARGE
            ) from error
        memory[: len(head)] = head
        if (came := fill(memory[len(head) :])) < header.body_length:
            raise _truncated(f"a body of {header.body_length} bytes", came)
        del memory
        yield replace(header, data=data)
        at += data.size
        del data  # while the next one is waited for, only records hold the memory


def _header(read: Callable[[int], bytes], at: int) -> tuple[bytes, Frame] | None:
    """Prefix and header of the message at ``at``, and the frame without its data; None at the end-of-stream mark."""
    prefix = read(8)
    if len(prefix) < 8:
        raise _truncated("a message prefix of 8 bytes", len(prefix))
    mark, length = struct.unpack("<II", prefix)
    if mark != _CONTINUATION:
        raise FormatError(
            f"expected an Arrow IPC stream message at byte {at}, got {prefix.hex()}", kind=ErrorKind.NOT_ARROW
        )
    if length > MAX_METADATA_BYTES:
        raise FormatError(
            f"expected a message header of at most {MAX_METADATA_BYTES} bytes at byte {at}, got {length}",
            kind=ErrorKind.NOT_ARROW,
        )
    if length == 0:
        return None
    header = read(length)
    if len(header) < length:
        raise _truncated(f"a header of {length} bytes", len(header))
    return prefix + header, parse_metadata(header)


def _truncated(expected: str, got: int) -> TruncatedError:
    return TruncatedError(f"expected {expected}, got {got} before the stream ended", kind=ErrorKind.TRUNCATED)


def parse_metadata(raw: bytes) -> Frame:
    """A frame without its data, of a flatbuffer ``Message``; every offset is bounds-checked. Raises FormatError."""
    try:
        message = _Table(raw, struct.unpack_from("<I", raw, 0)[0])
        header_type = message.scalar(1, "<B", 0)
        body_length = message.scalar(3, "<q", 0)
        if body_length < 0:
            raise FormatError(f"expected a body length of at least 0, got {body_length}", kind=ErrorKind.NOT_ARROW)
        header = message.table(2)
        batch = header if header_type == _RECORD_BATCH else None
        return Frame(
            kind={_SCHEMA: "schema", _RECORD_BATCH: "batch"}.get(header_type, "other"),
            compressed=batch is not None and batch.table(3) is not None,
            rows=0 if batch is None else max(batch.scalar(0, "<q", 0), 0),
            body_length=body_length,
            metadata={entry.text(0): entry.text(1) for entry in message.tables(4)},
        )
    except (struct.error, UnicodeDecodeError) as error:
        raise FormatError(
            f"expected an Arrow message header, got a damaged one ({error})", kind=ErrorKind.NOT_ARROW
        ) from None


class _Table:
    """A flatbuffer table. ``struct.unpack_from`` raises struct.error for every read outside the buffer."""

    def __init__(self, raw: bytes, at: int) -> None:
        self._raw = raw
        self._at = at
        self._vtable = at - self._read("<i", at)
        self._vtable_size = self._read("<H", self._vtable)

    def _read(self, code: str, at: int) -> int:
        if at < 0:
            raise struct.error(f"offset {at} before the buffer")
        value: int = struct.unpack_from(code, self._raw, at)[0]
        return value

    def _field(self, index: int) -> int | None:
        entry = 4 + 2 * index
        if entry + 2 > self._vtable_size:
            return None
        offset = self._read("<H", self._vtable + entry)
        return self._at + offset if offset else None

    def scalar(self, index: int, code: str, default: int) -> int:
        at = self._field(index)
        return default if at is None else self._read(code, at)

    def table(self, index: int) -> _Table | None:
        at = self._field(index)
        return None if at is None else _Table(self._raw, at + self._read("<I", at))

    def tables(self, index: int) -> list[_Table]:
        at = self._field(index)
        if at is None:
            return []
        vector = at + self._read("<I", at)
        # each entry takes four bytes, so a damaged count cannot ask for more entries than the buffer has
        count = min(self._read("<I", vector), len(self._raw) // 4)
        entries = [vector + 4 + 4 * i for i in range(count)]
        return [_Table(self._raw, entry + self._read("<I", entry)) for entry in entries]

    def text(self, index: int) -> str:
        at = self._field(index)
        if at is None:
            return ""
        start = at + self._read("<I", at)
        length = self._read("<I", start)
        if start + 4 + length > len(self._raw):
            raise struct.error(f"text of {length} bytes outside the buffer")
        return self._raw[start + 4 : start + 4 + length].decode()
