"""The files of an archive: whole ones read and written, ranges of them, created once, listed, deleted.

A local folder here; what a URL names is ``objectstore``. Keys are relative paths with ``/``. A local file is written
under a temporary name, synced and renamed, so that it is there whole or not at all. Decides nothing about content.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Protocol

from routeplane.errors import ErrorKind, FormatError, StoreError, UsageError

__all__ = ["ArchiveStore", "LocalFolder"]

_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}
_TEMPORARY = ".partial"


class ArchiveStore(Protocol):
    """Where an archive lies."""

    @property
    def where(self) -> str:
        """Path or URL, for messages."""

    def read(self, key: str) -> bytes | None:
        """Return all bytes of a file, None where there is none."""

    def read_ranges(self, key: str, ranges: Sequence[tuple[int, int]], *, size: int) -> list[bytes] | None:
        """Return bytes ``[start, stop)`` of a file for each range; None where there is no file of that size."""

    def size(self, key: str) -> int | None:
        """Return the bytes of a file, None where there is none."""

    def write(self, key: str, data: bytes) -> None:
        """Write a file, whole. Raises StoreError where there is no space."""

    def create(self, key: str, data: bytes) -> bool:
        """Write a file that does not exist; False where another writer was first."""

    def names(self, folder: str) -> list[str]:
        """Return what lies directly in a folder ("" is the archive itself), sorted; nothing where there is none."""

    def modified(self, folder: str) -> float:
        """Return when a file below a folder was last written, in seconds since 1970; 0.0 where there is none."""

    def delete(self, key: str) -> None:
        """Delete a file, or a folder with everything in it; nothing where there is none."""


class LocalFolder:
    """An archive in a folder of this machine."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._root = Path(os.path.realpath(path))
        if self._root.is_file():
            raise FormatError(
                f"expected the folder of an archive, got a file @ {self._root}", kind=ErrorKind.NOT_ROUTEPLANE
            )

    @property
    def where(self) -> str:
        """The folder's path, links resolved."""
        return str(self._root)

    def read(self, key: str) -> bytes | None:
        """Return all bytes of a file, None where there is none."""
        try:
            return (self._root / key).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def read_ranges(self, key: str, ranges: Sequence[tuple[int, int]], *, size: int) -> list[bytes] | None:
        """Return bytes ``[start, stop)`` of a file for each range; None where there is no file of that size."""
        try:
            file = os.open(f"{self._root}/{key}", os.O_RDONLY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            return None
        try:
            if os.fstat(file).st_size != size:
                return None
            return [_read_range(file, start, stop) for start, stop in ranges]
        finally:
            os.close(file)

    def size(self, key: str) -> int | None:
        """Return the bytes of a file, None where there is none."""
        try:
            return os.stat(f"{self._root}/{key}").st_size
        except (FileNotFoundError, NotADirectoryError):
            return None

    def write(self, key: str, data: bytes) -> None:
        """Write a file under a temporary name, sync it, and rename it."""
        with self._written(key, data) as (temporary, path):
            os.replace(temporary, path)
            _sync(path.parent)

    def create(self, key: str, data: bytes) -> bool:
        """Write a file that does not exist: a hard link to a whole file fails where the name is taken."""
        with self._written(key, data) as (temporary, path):
            try:
                _link(temporary, path)
            except FileExistsError:
                return False
            _sync(path.parent)
            return True

    @contextlib.contextmanager
    def _written(self, key: str, data: bytes) -> Iterator[tuple[Path, Path]]:
        path = self._root / key
        temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}{_TEMPORARY}")
        try:
            _make_folders(path.parent)
            with open(temporary, "xb") as file:
                _write_all(file, data)
            yield temporary, path
        except OSError as error:
            if error.errno in _NO_SPACE:
                raise StoreError(
                    f"expected space for {len(data)} bytes, got {os.strerror(error.errno)} @ {path}",
                    kind=ErrorKind.NO_SPACE,
                ) from error
            raise
        finally:
            temporary.unlink(missing_ok=True)

    def names(self, folder: str) -> list[str]:
        """Return what lies directly in a folder, sorted; temporary files of writers left out."""
        try:
            return sorted(name for name in os.listdir(self._root / folder) if not name.endswith(_TEMPORARY))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def modified(self, folder: str) -> float:
        """Return when something in a folder was last written, created or deleted, in seconds since 1970."""
        latest = 0.0
        for path, _, names in os.walk(self._root / folder):
            for name in (".", *names):
                with contextlib.suppress(FileNotFoundError):
                    latest = max(latest, os.stat(os.path.join(path, name)).st_mtime)
        return latest

    def delete(self, key: str) -> None:
        """Delete a file or a folder; links are not followed."""
        path = self._root / key
        with contextlib.suppress(FileNotFoundError):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()


def _read_range(file: int, start: int, stop: int) -> bytes:
    data = os.pread(file, stop - start, start)
    while len(data) < stop - start:  # at most 2 GiB come at once
        more = os.pread(file, stop - start - len(data), start + len(data))
        if not more:
            break  # the file was cut since it was opened: checksums tell
        data += more
    return data


def _link(source: Path, target: Path) -> None:
    """Give a whole file a second name, unless that is taken."""
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        # no hard links here: take the name with an empty file, then put the whole one in its place
        target.touch(exist_ok=False)
        os.replace(source, target)


def _write_all(file: IO[bytes], data: bytes) -> None:
    taken = file.write(data)
    if taken != len(data):
        raise OSError(errno.ENOSPC, f"expected a file that takes {len(data)} bytes, got one that took {taken}")
    file.flush()
    os.fsync(file.fileno())


def _make_folders(path: Path) -> None:
    if path.is_dir():
        return
    if path.exists():
        raise UsageError(f"expected a folder, got a file @ {path}", kind=ErrorKind.ARGUMENT)
    _make_folders(path.parent)
    path.mkdir(exist_ok=True)
    _sync(path.parent)  # a folder's name is on disk only once the one above it is


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
