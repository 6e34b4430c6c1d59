"""Where bytes go and come from: paths published by rename, pipes and files of the caller's, mapped memory, pools.

Decides nothing about their content. A pool is memory that messages are received into, and that is used again: new pages
cost several times what copying does. Its buffers return when the last view of them is gone, so a record is never
overwritten, and a reader that drops its records is served from the same pages.
"""

from __future__ import annotations

import contextlib
import os
import stat
import threading
import uuid
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from routeplane.errors import ErrorKind, UsageError
from routeplane.stream.frames import Frame, frames_of_buffer, frames_of_file

__all__ = ["BufferPool", "PublishedPath", "WholeWrites", "frames_of", "fsync", "target_of"]


def fsync(path: str | os.PathLike[str]) -> None:
    """Bring a file, or the names in a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class WholeWrites:
    """A place for the bytes of one stream: a binary file, pipe or socket that the caller opened and will close.

    ``write`` takes everything: raw files and sockets may take less, and pyarrow ignores the count. ``scattered``: what
    is written in place of a buffer at this address and of this size (``codec.write_batch``).
    """

    closed = False

    def __init__(self, file: Any, *, scattered: dict[tuple[int, int], list[Any]] | None = None) -> None:
        self._file, self.scattered = file, {} if scattered is None else scattered

    def write(self, data: Any) -> int:
        """Write all of it; return its size in bytes."""
        parts = self.scattered.get((data.address, data.size)) if isinstance(data, pa.Buffer) else None
        for part in parts or [data]:
            left = memoryview(part).cast("B") if len(part) else memoryview(b"")
            while left:
                taken = self._file.write(left)
                if not taken:
                    raise OSError(f"expected a file that takes {len(left)} more bytes, got one that took {taken}")
                left = left[taken:]
        return len(data)

    def flush(self) -> None:
        """Flush the file, where it buffers."""
        if hasattr(self._file, "flush"):
            self._file.flush()

    def publish(self) -> None:
        """Make everything written visible as whole; in a caller's file the trailer alone says that it is."""
        self.flush()

    def discard(self) -> None:
        """Leave nothing that could be taken for whole; in a caller's file no trailer is written."""


class PublishedPath(WholeWrites):
    """A path that appears complete or not at all: written under a temporary name beside it, renamed on ``publish``.

    A symbolic link is resolved first (replacing the link would leave its target stale). What exists and is not a
    regular file, such as a FIFO, is opened in place: ``os.replace`` would turn it into one.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        given = Path(path)
        self._in_place = given.exists() and not given.is_file()
        # what /dev/fd/N resolves to has no name that could be opened
        self._path = given if self._in_place else Path(os.path.realpath(path))
        self._written = self._path.with_name(f".{self._path.name}.{uuid.uuid4().hex}.tmp")
        # unbuffered in place: the reader of a FIFO is to have each batch when it was written
        super().__init__(open(path, "wb", 0) if self._in_place else open(self._written, "xb"))  # noqa: SIM115  closed below

    def publish(self) -> None:
        """Bring it to disk, close, and rename into place."""
        self._file.close()
        if not self._in_place:
            fsync(self._written)
            os.replace(self._written, self._path)
            fsync(self._path.parent)  # the rename itself survives a crash only once the folder is on disk

    def discard(self) -> None:
        """Close and remove the temporary file. A disk that cannot take the last buffered bytes does not stop that."""
        with contextlib.suppress(OSError):
            self._file.close()
        self._written.unlink(missing_ok=True)


def target_of(sink: Any) -> WholeWrites:
    """A path or a writable binary file as a target. Raises UsageError for anything else."""
    if isinstance(sink, str | os.PathLike):
        return PublishedPath(sink)
    if hasattr(sink, "write"):
        return WholeWrites(sink)
    raise UsageError(f"expected a path or a writable binary file, got {type(sink).__name__}", kind=ErrorKind.ARGUMENT)


def frames_of(source: Any, *, salvage: bool = False) -> tuple[Iterator[Frame], bool]:
    """Frames of a source, and whether all of it is there to be walked before anything is used.

    A regular path is mapped and bytes or buffers are shared (zero copies, walkable); a readable binary file, and a path
    that is not a regular file, are read as pipes (one copy). ``salvage``: damaged parts of what is walkable become
    frames of kind ``damaged``; a pipe cannot be searched. Raises FileNotFoundError, UsageError for anything else.
    """
    if isinstance(source, str | os.PathLike):
        path = Path(source)
        if not stat.S_ISREG(path.stat().st_mode):
            return _frames_of_pipe(path), False
        source = _mapped(path)
    if isinstance(source, bytes | bytearray | memoryview | pa.Buffer):
        return frames_of_buffer(pa.py_buffer(source), salvage=salvage), True
    if hasattr(source, "read"):
        return frames_of_file(source), False
    raise UsageError(
        f"expected a path, bytes or a readable binary file, got {type(source).__name__}", kind=ErrorKind.ARGUMENT
    )


def _mapped(path: Path) -> pa.Buffer:
    if path.stat().st_size == 0:
        return pa.py_buffer(b"")  # an empty file cannot be mapped
    with pa.memory_map(str(path), "r") as mapped:
        return mapped.read_buffer()  # keeps the mapping alive after the file is closed


def _frames_of_pipe(path: Path) -> Iterator[Frame]:
    with path.open("rb") as pipe:
        yield from frames_of_file(pipe)


# -- pools -------------------------------------------------------------------------------------------------------------

# Arrow asks for buffers at multiples of 64 bytes.
_ALIGN = 64
# A buffer may be larger than what is asked for by this factor, so that ragged messages share buffers.
_SLACK = 4
# What is kept for later; more goes back to the operating system.
_MAX_IDLE_BYTES = 256 * 2**20


class _Loan:
    """Stands for lent memory: every view of it, through Arrow and numpy, holds the loan."""


class BufferPool:
    """Byte arrays that are lent and come back. Safe for several threads: a finalizer may run in any."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a finalizer may run inside of a locked part of the same thread
        self._idle: list[Any] = []

    def __reduce__(self) -> Any:
        return type(self), ()  # a copy in another process has memory of its own

    def take(self, nbytes: int) -> tuple[memoryview, pa.Buffer]:
        """Memory to write to, and the read-only buffer over it that decides how long it is lent."""
        whole, loan = self._pick(nbytes), _Loan()
        weakref.finalize(loan, self._give_back, whole).atexit = False
        memory = whole[:nbytes]
        return memoryview(memory), pa.foreign_buffer(memory.ctypes.data, nbytes, base=loan)

    @property
    def idle_bytes(self) -> int:
        """What lies ready."""
        with self._lock:
            return sum(each.nbytes for each in self._idle)

    def _pick(self, nbytes: int) -> Any:
        with self._lock:
            fitting = [at for at, each in enumerate(self._idle) if nbytes <= each.nbytes <= _SLACK * nbytes]
            if fitting:
                return self._idle.pop(min(fitting, key=lambda at: self._idle[at].nbytes))
        raw = np.empty(nbytes + _ALIGN, dtype=np.uint8)
        start = -raw.ctypes.data % _ALIGN
        return raw[start : start + max(nbytes, 1)]

    def _give_back(self, whole: Any) -> None:
        with self._lock:
            if self.idle_bytes + whole.nbytes <= _MAX_IDLE_BYTES:
                self._idle.append(whole)
