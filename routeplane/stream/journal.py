"""An append-only file of JSON lines that survives its writer: each line is on disk when ``append`` returns.

A line that a crash cut is no line. Room is taken from the disk ahead, so that small lines still go in when the disk is
full: whoever frees room writes one first. Knows nothing of what the lines say.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from routeplane.errors import ErrorKind, FormatError, TransportError, UsageError
from routeplane.stream.files import PublishedPath

__all__ = ["Journal", "no_room", "read_journal"]

# Room for some thousand acknowledgements, taken again when half of it is used.
_SPARE = 128 * 1024


def no_room(path: Path, error: OSError) -> TransportError:
    """The error for a disk that is full, or fails otherwise; for ``raise``."""
    return TransportError(
        f"expected room on the disk of {path}, got {error.strerror or error}: nothing of this was kept; make room, and "
        "send what was not acknowledged again",
        kind=ErrorKind.NO_ROOM,
    )


def read_journal(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a journal; none where there is no file. Raises FormatError for a line that is no JSON object."""
    if not path.exists():
        return
    data = path.read_bytes().rstrip(b"\0")
    whole = data[: data.rfind(b"\n") + 1]
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise FormatError(
                f"expected JSON, got {line[:80]!r} @ {path}, line {number} ({error})", kind=ErrorKind.CORRUPT_BATCH
            ) from None
        yield entry


class Journal:
    """The one writer of a journal. Begins with ``entries``, which replace what the file held, at once or not at all."""

    def __init__(self, path: Path, *, entries: Iterable[Mapping[str, Any]] = ()) -> None:
        self._path = path
        target = PublishedPath(path)
        try:
            for entry in entries:
                target.file.write(_line(entry))
            target.publish()
        except OSError as error:
            target.discard()
            raise no_room(path, error) from error
        self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._size = os.fstat(self._file).st_size
        self._taken = self._size
        self.reserve(0)

    def reserve(self, nbytes: int) -> None:
        """Have room for a line of ``nbytes`` and a good many small ones. Raises as ``append``."""
        self._check_open()
        wanted = self._size + nbytes + _SPARE
        if wanted - self._taken > _SPARE // 2 or nbytes > self._taken - self._size:
            try:
                os.posix_fallocate(self._file, self._taken, wanted - self._taken)
            except OSError as error:
                raise no_room(self._path, error) from error
            self._taken = wanted

    def append(self, entry: Mapping[str, Any]) -> None:
        """Keep a line. Raises TransportError (NO_ROOM), UsageError (CLOSED), and then there is none of it."""
        self._check_open()
        line = _line(entry)
        try:
            written = os.pwrite(self._file, line, self._size)
            if written < len(line):
                raise OSError(f"{written} of {len(line)} bytes written")
            os.fdatasync(self._file)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.pwrite(self._file, bytes(len(line)), self._size)
            raise no_room(self._path, error) from error
        self._size += len(line)

    def _check_open(self) -> None:
        if self._file < 0:
            raise UsageError(
                f"expected {self._path.parent} to be ours, got a folder that was let go of: open the folder again",
                kind=ErrorKind.CLOSED,
            )

    def close(self) -> None:
        """Close the file; what is in it stays. Again is no error."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _line(entry: Mapping[str, Any]) -> bytes:
    return json.dumps(entry, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode() + b"\n"
