"""Which records an archive holds and where: a commit, its runs' manifests, keys and record tables, read when asked for.

Every file is compared with the hash that the one above it gives, from the commit down. Holds 16 bytes per record once a
key was looked for, and record tables up to a bound.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

from routeplane.archive.chunks import ChunkReader, zarr_store
from routeplane.archive.layout import run_folder, run_key
from routeplane.archive.manifest import Commit, RunEntry, RunManifest, file_hash
from routeplane.archive.table import Row, TablePartReader, key_hash, read_keys
from routeplane.errors import ErrorKind, FormatError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from routeplane.archive.store import ArchiveStore
    from routeplane.record.record import RecordKey
    from routeplane.record.spec import RouteSpec

__all__ = ["Catalog", "Run", "read_named"]

#: Decoded record tables that are kept, and single rows.
_TABLE_BYTES = 64 * 2**20
_ROWS = 256


def read_named(store: ArchiveStore, key: str, *, expected: str) -> bytes:
    """A file whose hash is known. Raises FormatError: LOST_FILE where it is absent, CORRUPT_CHUNK where it differs."""
    data = store.read(key)
    if not data:
        raise FormatError(
            f"expected a file, got {'none' if data is None else 'an empty one'} @ {key}", kind=ErrorKind.LOST_FILE
        )
    if file_hash(data) != expected:
        raise FormatError(f"expected xxh3 {expected}, got {file_hash(data)} @ {key}", kind=ErrorKind.CORRUPT_CHUNK)
    return data


class Run:
    """One run of a commit: its manifest and its arrays, each opened on first use."""

    def __init__(self, store: ArchiveStore, place: Any, *, entry: RunEntry, spec: RouteSpec) -> None:
        self.entry, self.spec = entry, spec
        self._store, self._place = store, place
        self._manifest: RunManifest | None = None
        self._chunks: ChunkReader | None = None

    @property
    def manifest(self) -> RunManifest:
        """What the run consists of. Raises FormatError."""
        if self._manifest is None:
            key = run_key(self.entry.name, "records/manifest.json")
            data = read_named(self._store, key, expected=self.entry.manifest)
            self._manifest = RunManifest.from_json(data, where=key)
            found = (self._manifest.records, self._manifest.tokens, self._manifest.rows)
            if found != (self.entry.records, self.entry.tokens, self.entry.rows):
                raise FormatError(f"expected the counts of {self.entry}, got {found} @ {key}", kind=ErrorKind.MANIFEST)
        return self._manifest

    @property
    def chunks(self) -> ChunkReader:
        """Its arrays."""
        if self._chunks is None:
            self._chunks = ChunkReader(
                self._store, self._place, folder=run_folder(self.entry.name), arrays=self.manifest.arrays
            )
        return self._chunks

    def keys(self) -> NDArray[np.uint64]:
        """The hashes of its keys, in order."""
        if not self.entry.records:
            return np.empty(0, dtype=np.uint64)
        key = run_key(self.entry.name, "records/keys.u64")
        data = read_named(self._store, key, expected=self.manifest.keys)
        return read_keys(data, records=self.entry.records, where=key)

    def part(self, index: int) -> TablePartReader:
        """One file of its record table."""
        wanted = self.manifest.parts[index]
        key = run_key(self.entry.name, f"records/{index:05d}.parquet")
        part = TablePartReader(read_named(self._store, key, expected=wanted.hash), where=key)
        if len(part) != wanted.records:
            raise FormatError(f"expected {wanted.records} records, got {len(part)} @ {key}", kind=ErrorKind.MANIFEST)
        return part


class Catalog:
    """The records of one commit, numbered from 0 over all runs in order."""

    def __init__(self, store: ArchiveStore, commit: Commit, *, options: Mapping[str, Any]) -> None:
        self.store, self.commit = store, commit
        place = zarr_store(store, options)
        self.runs = tuple(Run(store, place, entry=entry, spec=commit.spec) for entry in commit.runs)
        self._starts = [0, *accumulate(entry.records for entry in commit.runs)]
        self._sorted: tuple[NDArray[np.uint64], NDArray[np.int64]] | None = None
        self._parts: OrderedDict[tuple[int, int], TablePartReader] = OrderedDict()
        self._rows: OrderedDict[int, Row] = OrderedDict()

    def __len__(self) -> int:
        return self._starts[-1]

    def find(self, key: RecordKey) -> int | None:
        """The number of the record with that key, None where there is none."""
        hashes_B, order_B = self._index()
        wanted = np.uint64(key_hash(key))
        at = int(np.searchsorted(hashes_B, wanted))
        while at < len(hashes_B) and hashes_B[at] == wanted:
            number = int(order_B[at])
            if self.row(number)[1].key == key:
                return number
            at += 1
        return None

    def _index(self) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
        if self._sorted is None:
            keys = [run.keys() for run in self.runs]
            hashes_B = np.concatenate([*keys, np.empty(0, dtype=np.uint64)])
            order_B = np.argsort(hashes_B, kind="stable")
            self._sorted = hashes_B[order_B], order_B
        return self._sorted

    def row(self, number: int) -> tuple[Run, Row]:
        """The run and the row of one record. Raises FormatError where its table is damaged."""
        place = bisect_right(self._starts, number) - 1
        run = self.runs[place]
        if number in self._rows:
            self._rows.move_to_end(number)
            return run, self._rows[number]
        starts = [0, *accumulate(part.records for part in run.manifest.parts)]
        local = number - self._starts[place]
        index = bisect_right(starts, local) - 1
        row = self._part(place, index).row(local - starts[index])
        self._rows[number] = row
        if len(self._rows) > _ROWS:
            self._rows.popitem(last=False)
        return run, row

    def _part(self, place: int, index: int) -> TablePartReader:
        key = place, index
        if key in self._parts:
            self._parts.move_to_end(key)
            return self._parts[key]
        self._parts[key] = part = self.runs[place].part(index)
        while len(self._parts) > 1 and sum(each.nbytes for each in self._parts.values()) > _TABLE_BYTES:
            self._parts.popitem(last=False)
        return part

    def rows(self) -> Iterator[tuple[Run, Row]]:
        """Every record, in order."""
        for number in range(len(self)):
            yield self.row(number)
