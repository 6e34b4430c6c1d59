"""Records come to rest: one run of an archive, written beside what is there and added to it by one commit.

Owns the order of writing: shards, record tables, documents, the run's manifest, the commit. Until the last of these is
there, the archive is what it was. Holds one shard of each array and one file of the record table, whatever the run's
length.

Axes: T rows or tokens of a run, L captured layers, K top-k slots.
"""

from __future__ import annotations

import contextlib
import json
import uuid
from array import array
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from routeplane.archive.catalog import Catalog
from routeplane.archive.commits import begin, newest, publish
from routeplane.archive.layout import (
    COMMITS,
    DEFAULT_SHARD_BYTES,
    ROOT,
    check_run_name,
    group_document,
    places_layout,
    routes_layout,
    run_folder,
    run_key,
    token_layout,
)
from routeplane.archive.manifest import ArrayEntry, RunEntry, RunManifest, TablePart, file_hash
from routeplane.archive.shards import ShardWriter
from routeplane.archive.table import PART_ENTRIES, PART_RECORDS, Row, encode_rows, key_hash, row_of
from routeplane.errors import DataError, ErrorKind, FormatError, StoreError, TruncatedError
from routeplane.record.parse import check_text
from routeplane.record.transfer import RecordWriter

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from routeplane.archive.manifest import Commit
    from routeplane.archive.store import ArchiveStore
    from routeplane.record.record import RouteRecord
    from routeplane.record.spec import RouteSpec

__all__ = ["ArchiveWriter"]


class ArchiveWriter(RecordWriter):
    """The RouteSink of one run. ``close`` commits; ``abort``, and a process that dies, leave the archive as it was.

    Made by ``new_run``. A record whose key the archive has already is refused.
    """

    def __init__(
        self,
        store: ArchiveStore,
        spec: RouteSpec,
        *,
        run: str | None,
        attributes: Mapping[str, str],
        shard_bytes: int = DEFAULT_SHARD_BYTES,
        options: Mapping[str, Any],
    ) -> None:
        super().__init__(spec, max_bytes=shard_bytes)
        self._run = uuid.uuid4().hex if run is None else run
        check_run_name(self._run)
        self._attributes = {
            check_text(key, "an attribute's name"): check_text(value, f"attribute {key!r}", empty=True)
            for key, value in attributes.items()
        }
        self._store, self._options = store, options
        self._base = begin(store, spec)
        self._known = Catalog(store, self._base, options=options)
        self._held = contextlib.ExitStack()
        self._claim()
        self._routes = self._array("routes", routes_layout(spec, shard_bytes=shard_bytes))
        self._places = self._array("records", places_layout())
        self._beside: dict[str, ShardWriter] = {}
        self._columns: dict[str, np.dtype[Any]] | None = None
        self._table = _TableWriter(self._put_file)
        self._tokens = 0
        self._digest = xxhash.xxh3_64()
        self._publishing = False
        self.commit: Commit | None = None

    @property
    def run(self) -> str:
        """The name of the run."""
        return self._run

    def _claim(self) -> None:
        """Be the one writer of this run's files. What a dead writer of the same name left is deleted."""
        if not self._held.enter_context(self._store.claim(f"{COMMITS}/{self._run}.lock")):
            self._open = False
            raise StoreError(
                f"expected a run that nobody writes, got {self._run}, which another writer holds @ {self._store.where}",
                kind=ErrorKind.WRITER,
            )
        if any(entry.name == self._run for entry in begin(self._store, self._spec).runs):
            self._held.close()
            self._open = False
            raise StoreError(
                f"expected the name of a new run, got {self._run}, which was committed @ {self._store.where}",
                kind=ErrorKind.WRITER,
            )
        self._store.delete(run_folder(self._run))

    def _array(self, name: str, layout: Any) -> ShardWriter:
        return ShardWriter(layout, put=lambda key, data: self._put_file(f"{name}/{key}", data))

    def _put_file(self, key: str, data: bytes) -> None:
        self._store.write(run_key(self._run, key), data)

    # -- one record --------------------------------------------------------------------------------------------------

    def _check(self, record: RouteRecord) -> None:
        _check_storable(record)
        columns = {name: values.dtype for name, values in record.columns.items()}
        if self._columns is not None and columns != self._columns:
            expected, got = (
                ", ".join(f"{name} {kind}" for name, kind in each.items()) or "none"
                for each in (self._columns, columns)
            )
            raise DataError(
                f"expected token columns ({expected}), got ({got}) @ sample {record.key}", kind=ErrorKind.TOKEN_COLUMN
            )
        if self._known.find(record.key) is not None:
            raise DataError(
                f"expected each record once, got {record.key}, which the archive has", kind=ErrorKind.DUPLICATE_KEY
            )

    def _put(self, record: RouteRecord) -> None:
        if self._columns is None:
            self._columns = {name: values.dtype for name, values in record.columns.items()}
        row = row_of(record, token_start=self._tokens, row_start=self._routes.rows)
        self._put_beside("token_ids", record.token_ids)
        if record.logprobs is not None:
            self._put_beside("logprobs", record.logprobs)
        for index, values in enumerate(record.columns.values()):
            self._put_beside(f"columns/{index}", values.array())
        # legal ids of a narrow spec are at most 255, and -1 becomes 0xFF: the wrap is the encoding
        self._routes.append(record.routes)
        self._tokens += record.num_tokens
        self._digest.update(record.checksum.to_bytes(8, "little"))
        self._places.append(np.asarray([row.place], dtype=np.int64))
        self._table.append(row)

    def _put_beside(self, name: str, values: NDArray[Any]) -> None:
        """Tokens' values behind those of the records before; where these had none, the fill value stands."""
        if name not in self._beside:
            self._beside[name] = self._array(name, token_layout(values.dtype.newbyteorder("=")))
        beside = self._beside[name]
        beside.append_fill(self._tokens - beside.rows)
        beside.append(values)

    # -- the end -----------------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        entry = self._seal() if self._tokens else None
        self._publishing = True
        self.commit = publish(self._store, self._base, run=entry, check=self._check_against)
        self._held.close()

    def _seal(self) -> RunEntry:
        """Write what is held, then the documents, then the manifest that names all of it."""
        for beside in self._beside.values():
            beside.append_fill(self._tokens - beside.rows)
        arrays = {"routes": self._routes, "records": self._places, **self._beside}
        for each in arrays.values():
            each.finish()
        self._table.finish()
        keys = np.asarray(self._table.keys).astype("<u8").tobytes()
        self._put_file("records/keys.u64", keys)
        manifest = RunManifest(
            name=self._run,
            records=len(self._table.keys),
            tokens=self._tokens,
            rows=self._routes.rows,
            digest=f"{self._digest.intdigest():016x}",
            columns=tuple(self._columns or ()),
            arrays={
                name: ArrayEntry(document=each.layout.document(each.rows), shards=tuple(each.shards))
                for name, each in arrays.items()
            },
            parts=tuple(self._table.parts),
            keys=file_hash(keys),
            attributes=self._attributes,
        )
        for name, entry in manifest.arrays.items():
            self._put_document(name, dict(entry.document))
        for group in ("", *(("columns",) if self._columns else ())):
            self._put_document(group, group_document({}))
        data = manifest.to_json()
        self._put_file("records/manifest.json", data)
        return RunEntry(
            name=self._run,
            records=manifest.records,
            tokens=manifest.tokens,
            rows=manifest.rows,
            bytes=manifest.nbytes,
            digest=manifest.digest,
            manifest=file_hash(data),
        )

    def _put_document(self, folder: str, document: Mapping[str, Any]) -> None:
        self._put_file(f"{folder}/{ROOT}".lstrip("/"), json.dumps(document).encode())

    def _check_against(self, commit: Commit) -> None:
        """Another writer committed meanwhile: none of its records may be one of ours."""
        self._spec.require_same_geometry(commit.spec, where=self._store.where)
        found = Catalog(self._store, commit, options=self._options)
        for key in self._keys:
            if found.find(key) is not None:
                raise DataError(
                    f"expected each record once, got {key}, which another writer committed meanwhile",
                    kind=ErrorKind.DUPLICATE_KEY,
                )

    def _discard(self) -> None:
        try:
            if not self._may_be_committed():
                self._store.delete(run_folder(self._run))
        finally:
            self._held.close()

    def _may_be_committed(self) -> bool:
        """Whether the commit may be out, though what came behind it failed: then the run's files must stay."""
        if not self._publishing:
            return False
        try:
            return any(entry.name == self._run for entry in newest(self._store).runs)
        except TruncatedError:
            return False  # there is no commit at all
        except (FormatError, OSError):
            return True


class _TableWriter:
    """The record table, in files of bounded size."""

    def __init__(self, put: Callable[[str, bytes], None]) -> None:
        self.parts: list[TablePart] = []
        self.keys = array("Q")
        self._put = put
        self._rows: list[Row] = []
        self._entries = 0

    def append(self, row: Row) -> None:
        """Take one row."""
        self._rows.append(row)
        self.keys.append(key_hash(row.key))
        self._entries += len(row.spans) + len(row.captures)
        if len(self._rows) >= PART_RECORDS or self._entries >= PART_ENTRIES:
            self.finish()

    def finish(self) -> None:
        """Write what is held as a file."""
        if not self._rows:
            return
        data = encode_rows(self._rows)
        self._put(f"records/{len(self.parts):05d}.parquet", data)
        self.parts.append(TablePart(records=len(self._rows), bytes=len(data), hash=file_hash(data)))
        self._rows, self._entries = [], 0


def _check_storable(record: RouteRecord) -> None:
    """Raise DataError for what only streams carry: columns that declare something, sampling parameters, lean deltas."""
    declared = [name for name, column in record.columns.items() if not column.type.plain]
    needs = {
        f"columns without a declaration, got {declared}": bool(declared),
        "spans without sampling parameters": any(span.sampling is not None for span in record.spans),
        "a resolved record, or one with all its tokens": record.tokens_start > 0,
    }
    for expected, broken in needs.items():
        if broken:
            raise DataError(f"expected {expected} @ sample {record.key}", kind=ErrorKind.TOKEN_COLUMN)
