"""The files of an archive that a URL names, through obstore (S3, GCS, Azure); the verbs of ``store``.

Only importer of obstore. An object appears whole, and is created only where no other has its name: object stores
promise both. obstore's threads do not survive a fork, so a forked child is refused instead of waiting forever.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from routeplane.errors import ErrorKind, MissingExtraError, StoreError, UsageError, refused

try:
    import obstore
    from obstore.exceptions import AlreadyExistsError, BaseError
    from obstore.store import from_url
except ModuleNotFoundError as error:
    if error.name != "obstore":
        raise
    raise MissingExtraError(
        "routeplane.archive needs obstore for URLs: install the extra routeplane[zarr]", kind=ErrorKind.MISSING_EXTRA
    ) from error

__all__ = ["ObjectFolder"]

#: Wholly local to one process or to one store object: an archive there is gone with it.
_NOT_SHARED = ("memory://",)

T = TypeVar("T")


class ObjectFolder:
    """An archive behind a URL, such as ``s3://bucket/runs``. ``options``: what ``obstore.store.from_url`` takes."""

    def __init__(self, url: str, *, options: Mapping[str, Any]) -> None:
        self._url, self._process = url.rstrip("/"), os.getpid()
        if self._url.startswith(_NOT_SHARED):
            raise UsageError(f"expected the URL of an object store, got {url}", kind=ErrorKind.ARGUMENT)
        try:
            self._store = from_url(self._url, **options)
        except (BaseError, ValueError, TypeError) as error:
            raise refused("a URL that obstore knows", f"{url} ({_short(error)})") from error

    @property
    def where(self) -> str:
        """The URL."""
        return self._url

    def read(self, key: str) -> bytes | None:
        """Return all bytes of an object, None where there is none."""
        try:
            return self._ask(lambda: bytes(obstore.get(self._store, key).bytes()), key)
        except FileNotFoundError:
            return None

    def read_ranges(self, key: str, ranges: Sequence[tuple[int, int]], *, size: int) -> list[bytes] | None:
        """Return bytes ``[start, stop)`` of an object for each range, asked for at once.

        None where there is no object of that size, which is looked at only where the ranges cannot be read.
        """
        starts, stops = [start for start, _ in ranges], [stop for _, stop in ranges]
        try:
            found = self._ask(lambda: obstore.get_ranges(self._store, key, starts=starts, ends=stops), key)
            data = [bytes(item) for item in found]
            if [len(item) for item in data] == [stop - start for start, stop in ranges]:
                return data
        except FileNotFoundError:
            return None
        except StoreError:
            if self.size(key) == size:
                raise
        return None

    def size(self, key: str) -> int | None:
        """Return the bytes of an object, None where there is none."""
        try:
            return int(self._ask(lambda: obstore.head(self._store, key), key)["size"])
        except FileNotFoundError:
            return None

    def write(self, key: str, data: bytes) -> None:
        """Write an object."""
        self._ask(lambda: obstore.put(self._store, key, data), key)

    def create(self, key: str, data: bytes) -> bool:
        """Write an object that does not exist; False where another writer was first."""
        try:
            self._ask(lambda: obstore.put(self._store, key, data, mode="create"), key)
        except AlreadyExistsError:
            # a request that was sent twice meets its own object
            return self.read(key) == data
        return True

    def names(self, folder: str) -> list[str]:
        """Return what lies directly in a folder, sorted."""
        found = self._ask(lambda: obstore.list_with_delimiter(self._store, folder or None), folder)
        paths = [*found["common_prefixes"], *(item["path"] for item in found["objects"])]
        return sorted({path.rstrip("/").rpartition("/")[2] for path in paths})

    def modified(self, folder: str) -> float:
        """Return when an object below a folder was last written, in seconds since 1970; 0.0 where there is none."""
        return max((item["last_modified"].timestamp() for item in self._below(folder)), default=0.0)

    def delete(self, key: str) -> None:
        """Delete an object, and all below it."""
        paths = [item["path"] for item in self._below(key)]
        try:
            self._ask(lambda: obstore.delete(self._store, paths or [key]), key)
        except FileNotFoundError:
            return

    def _below(self, folder: str) -> list[Any]:
        return self._ask(lambda: [item for batch in obstore.list(self._store, folder) for item in batch], folder)

    def _ask(self, request: Callable[[], T], key: str) -> T:
        if os.getpid() != self._process:
            raise refused(f"the process that opened {self._url}", "a fork of it: start workers with 'spawn'")
        try:
            return request()
        except AlreadyExistsError:
            raise
        except BaseError as error:
            raise StoreError(
                f"expected the store to answer, got {_short(error)} @ {self._url}/{key}", kind=ErrorKind.STORAGE
            ) from error


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
