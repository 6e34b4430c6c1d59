"""The files of an archive: whole ones read and written, created once, listed, deleted. Decides nothing about content.

A local folder here; what a URL names is ``remote``. Keys are relative paths with ``/``. A local file is written under a
temporary name, synced and renamed, so that it is there whole or not at all.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Protocol

from routeplane.errors import ErrorKind, FormatError, StoreError, UsageError

try:
    import fcntl
except ModuleNotFoundError:  # not everywhere; then a folder that exists stands for a writer that lives
    fcntl = None  # type: ignore[assignment]

__all__ = ["ArchiveStore", "LocalFolder"]

_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}
_TEMPORARY = ".partial"


class ArchiveStore(Protocol):
    """Where an archive lies."""

    @property
    def where(self) -> str:
        """Path or URL, for messages and for zarr."""

    @property
    def local(self) -> bool:
        """Whether asking for a file's size costs next to nothing."""

    def read(self, key: str) -> bytes | None:
        """All bytes of a file, None where there is none."""

    def size(self, key: str) -> int | None:
        """Bytes of a file, None where there is none."""

    def write(self, key: str, data: bytes) -> None:
        """Write a file, whole. Raises StoreError where there is no space."""

    def create(self, key: str, data: bytes) -> bool:
        """Write a file that does not exist; False where another writer was first."""

    def names(self, folder: str) -> list[str]:
        """What lies directly in a folder ("" is the archive itself), sorted; nothing where there is none."""

    def delete(self, key: str) -> None:
        """Delete a file, or a folder with everything in it; nothing where there is none."""

    def claim(self, key: str) -> contextlib.AbstractContextManager[bool]:
        """Hold the name for one writer while it lives; False where another one holds it."""


class LocalFolder:
    """An archive in a folder of this machine."""

    local = True

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
        """All bytes of a file, None where there is none."""
        try:
            return (self._root / key).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def size(self, key: str) -> int | None:
        """Bytes of a file, None where there is none."""
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
        """What lies directly in a folder, sorted; temporary files of writers left out."""
        try:
            return sorted(name for name in os.listdir(self._root / folder) if not name.endswith(_TEMPORARY))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def delete(self, key: str) -> None:
        """Delete a file or a folder; links are not followed."""
        path = self._root / key
        with contextlib.suppress(FileNotFoundError):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()

    @contextlib.contextmanager
    def claim(self, key: str) -> Iterator[bool]:
        """Hold a lock file, which the system lets go of when its process dies, however it dies."""
        path = self._root / key
        _make_folders(path.parent)
        with open(path, "ab") as file:
            if not _locked(file):
                yield False
                return
            try:
                yield True
            finally:
                path.unlink(missing_ok=True)


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


def _locked(file: IO[bytes]) -> bool:
    if fcntl is None:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True  # a file system without locks
    # who held it before may have deleted the name in between: then this lock is on nothing
    with contextlib.suppress(FileNotFoundError):
        return os.stat(file.name).st_ino == os.fstat(file.fileno()).st_ino
    return False


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
