"""The files of an archive that a URL names, through fsspec; the verbs of ``store``. Only importer of fsspec.

An object appears whole. What is created exclusively is so only where the file system knows how (object stores with
conditional writes, memory); others refuse, and so does this.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from routeplane.errors import ErrorKind, MissingExtraError, UsageError

try:
    import fsspec
except ModuleNotFoundError as error:
    if error.name != "fsspec":
        raise
    raise MissingExtraError(
        "routeplane.archive needs fsspec: pip install 'routeplane[zarr]'", kind=ErrorKind.MISSING_EXTRA
    ) from error

__all__ = ["RemoteFolder"]


class RemoteFolder:
    """An archive behind a URL, such as ``s3://bucket/run`` or ``memory://run``."""

    local = False

    def __init__(self, url: str, *, options: Mapping[str, Any]) -> None:
        self._url = url.rstrip("/")
        try:
            self._files, self._root = fsspec.core.url_to_fs(self._url, **options)
        except ImportError as error:
            raise MissingExtraError(
                f"expected the file system of {self._url}, got: {error}", kind=ErrorKind.MISSING_EXTRA
            ) from error
        except ValueError as error:
            raise UsageError(
                f"expected a URL that fsspec knows, got {self._url} ({error})", kind=ErrorKind.ARGUMENT
            ) from error
        self._root = self._root.rstrip("/")

    @property
    def where(self) -> str:
        """The URL."""
        return self._url

    def read(self, key: str) -> bytes | None:
        """All bytes of an object, None where there is none."""
        try:
            return bytes(self._files.cat_file(f"{self._root}/{key}"))
        except (FileNotFoundError, IsADirectoryError):
            return None

    def size(self, key: str) -> int | None:
        """Bytes of an object, None where there is none."""
        try:
            self._files.invalidate_cache()
            return int(self._files.info(f"{self._root}/{key}")["size"])
        except FileNotFoundError:
            return None

    def write(self, key: str, data: bytes) -> None:
        """Write an object."""
        self._files.makedirs(self._parent(key), exist_ok=True)
        self._files.pipe_file(f"{self._root}/{key}", data)

    def create(self, key: str, data: bytes) -> bool:
        """Write an object that does not exist. Raises UsageError where the file system cannot tell."""
        self._files.makedirs(self._parent(key), exist_ok=True)
        try:
            self._files.pipe_file(f"{self._root}/{key}", data, mode="create")
        except FileExistsError:
            return False
        except (NotImplementedError, TypeError) as error:
            raise UsageError(
                f"expected a file system that creates a file exclusively, got {type(self._files).__name__} ({error})",
                kind=ErrorKind.ARGUMENT,
            ) from error
        return True

    def names(self, folder: str) -> list[str]:
        """What lies directly in a folder, sorted."""
        path = f"{self._root}/{folder}".rstrip("/")
        self._files.invalidate_cache()
        try:
            found = self._files.ls(path, detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted({name.rstrip("/").rpartition("/")[2] for name in found if name.rstrip("/") != path})

    def delete(self, key: str) -> None:
        """Delete an object, or all below a prefix."""
        with contextlib.suppress(FileNotFoundError):
            self._files.rm(f"{self._root}/{key}", recursive=True)

    @contextlib.contextmanager
    def claim(self, key: str) -> Iterator[bool]:
        """Hold a name by an object of its own. One that a dead writer left stays until it is deleted."""
        if not self.create(key, b""):
            yield False
            return
        try:
            yield True
        finally:
            self.delete(key)

    def _parent(self, key: str) -> str:
        return f"{self._root}/{key}".rpartition("/")[0]
