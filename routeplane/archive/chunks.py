"""Ranges of a run's arrays, read by zarr through the zarrs pipeline. Only importer of zarr and zarrs.

The pipeline is put into each array that is opened here, and zarr's configuration, which belongs to the whole process,
is left alone. A shard that is not there, or not of the size that the manifest gives, is an error before zarr sees it:
to zarr it would be the fill value.

Axes: T rows or tokens of a run, L captured layers, K top-k slots.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from routeplane.errors import ErrorKind, FormatError, MissingExtraError, UsageError

try:
    import zarr
    from zarr.core.codec_pipeline import BatchedCodecPipeline
    from zarr.core.sync import sync
    from zarr.storage import FsspecStore, LocalStore, StorePath
    from zarrs import ZarrsCodecPipeline
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] not in ("zarr", "zarrs", "fsspec"):
        raise
    raise MissingExtraError(
        "routeplane.archive needs zarr: pip install 'routeplane[zarr]'", kind=ErrorKind.MISSING_EXTRA
    ) from error

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from routeplane.archive.manifest import ArrayEntry
    from routeplane.archive.store import ArchiveStore

__all__ = ["ChunkReader", "Range", "zarr_store"]

_CHECKSUMS = "codec_pipeline.validate_checksums"


@dataclass(frozen=True, kw_only=True, slots=True)
class Range:
    """Rows ``[start, stop)`` of one array; of ``slots`` ``[first, last)`` of axis L where given."""

    array: str
    start: int
    stop: int
    slots: tuple[int, int] | None = None


def zarr_store(store: ArchiveStore, options: Mapping[str, Any]) -> Any:
    """The place as zarr knows it, read-only. ``options``: what fsspec takes for a URL."""
    if store.local:
        return LocalStore(store.where, read_only=True)
    return FsspecStore.from_url(store.where, storage_options=dict(options) or None, read_only=True)


class ChunkReader:
    """The arrays of one run. Safe for several threads."""

    def __init__(self, store: ArchiveStore, place: Any, *, folder: str, arrays: Mapping[str, ArrayEntry]) -> None:
        if zarr.config.get(_CHECKSUMS, True) is False:
            raise UsageError(
                f"expected zarr to compare checksums, got the configuration {_CHECKSUMS}=False: "
                "a damaged chunk would be decoded",
                kind=ErrorKind.ARGUMENT,
            )
        self._store, self._place, self._folder = store, place, folder
        self._entries = arrays
        self._arrays: dict[tuple[str, int], Any] = {}
        self._seen: set[str] = set()

    def read(self, ranges: Sequence[Range]) -> list[NDArray[Any]]:
        """The ranges, at once: arrays of their own memory.

        Raises FormatError: LOST_FILE where a shard is not what the manifest names, CORRUPT_CHUNK where a chunk or an
        index differs from its checksum.
        """
        for wanted in ranges:
            self._check_shards(wanted)
        try:
            found: list[NDArray[Any]] = sync(self._gather(ranges))
        except (OSError, RuntimeError, ValueError, KeyError, TypeError, IndexError, OverflowError) as error:
            if getattr(error, "errno", None) is not None:
                raise  # the system's own; zarrs raises a bare OSError for a checksum
            raise FormatError(
                f"expected intact chunks, got damage: {' '.join(str(error).split())[:300]} @ {self._folder} "
                + ", ".join(f"{wanted.array}[{wanted.start}:{wanted.stop}]" for wanted in ranges),
                kind=ErrorKind.CORRUPT_CHUNK,
            ) from error
        return found

    async def _gather(self, ranges: Sequence[Range]) -> list[NDArray[Any]]:
        return list(await asyncio.gather(*(self._one(wanted) for wanted in ranges)))

    async def _one(self, wanted: Range) -> NDArray[Any]:
        array = self._array(wanted.array)
        if wanted.start == wanted.stop:
            layers, *rest = (*array.shape[1:],) or (0,)
            width = layers if wanted.slots is None else wanted.slots[1] - wanted.slots[0]
            return np.empty((0, width, *rest) if array.ndim > 1 else (0,), dtype=array.dtype)
        rows = slice(wanted.start, wanted.stop)
        return np.asarray(await array.getitem(rows if wanted.slots is None else (rows, slice(*wanted.slots))))

    def _array(self, name: str) -> Any:
        # an array that was opened before a fork is another process's
        key = name, os.getpid()
        if key not in self._arrays:
            self._arrays[key] = _open(self._place, f"{self._folder}/{name}", self._entries[name].document)
        return self._arrays[key]

    def _check_shards(self, wanted: Range) -> None:
        entry = self._entries[wanted.array]
        if not 0 <= wanted.start <= wanted.stop <= entry.rows:
            raise FormatError(
                f"expected {wanted.array} of at least {wanted.stop} rows, got {entry.rows} @ {self._folder}",
                kind=ErrorKind.MANIFEST,
            )
        if wanted.start == wanted.stop:
            return
        for shard in range(wanted.start // entry.shard_rows, (wanted.stop - 1) // entry.shard_rows + 1):
            self._check_shard(f"{self._folder}/{wanted.array}/{entry.shard_key(shard)}", entry.shards[shard])

    def _check_shard(self, key: str, expected: int) -> None:
        if key in self._seen:
            return
        found = self._store.size(key)
        if found != expected:
            raise FormatError(
                f"expected a shard of {expected} bytes, got {'none' if found is None else found} @ {key}",
                kind=ErrorKind.LOST_FILE,
            )
        if not self._store.local:
            self._seen.add(key)  # asking again would cost a round trip per read


def _open(place: Any, path: str, document: Mapping[str, Any]) -> Any:
    metadata: Any = dict(document)
    array = zarr.AsyncArray(metadata=metadata, store_path=StorePath(place, path))
    pipeline: Any
    if _zarrs_works(place):
        pipeline = ZarrsCodecPipeline.from_array_metadata_and_store(array.metadata, place)
    else:
        pipeline = BatchedCodecPipeline.from_codecs(array.metadata.codecs)
    # zarr chooses by its configuration, and reads that once: in the constructor above
    object.__setattr__(array, "codec_pipeline", pipeline)
    return array


def _zarrs_works(place: Any) -> bool:
    """Whether zarrs can read here: from local files, in the process that began to use it.

    Its threads do not survive a fork, and reading in a forked child waits for them for ever.
    """
    return isinstance(place, LocalStore) and _first_process() == os.getpid()


@cache
def _first_process() -> int:
    return os.getpid()
