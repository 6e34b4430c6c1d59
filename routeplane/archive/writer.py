"""One run of an archive, written beside what is there and added to it by one commit; and how commits are published.

Owns the order of writing: shards, record tables, documents, the run's manifest, the commit. Until the last of these is
there, the archive is what it was. A commit is a file of its own, created exclusively under the next number, so that of
two writers one is first and the other sees it. Nothing that a commit names is ever written again. Holds one shard of
each array and one file of the record table, whatever the run's length.

Axes: T rows or tokens of a run, L captured layers, K top-k slots.
"""

from __future__ import annotations

import contextlib
import json
import uuid
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import xxhash

from routeplane.archive.layout import (
    COMMITS,
    DEFAULT_SHARD_BYTES,
    NEWEST,
    PART_ENTRIES,
    PART_RECORDS,
    ROOT,
    RUNS,
    ArrayEntry,
    Commit,
    RunEntry,
    RunManifest,
    TablePart,
    check_run_name,
    column_layout,
    commit_key,
    encode_rows,
    file_hash,
    group_document,
    key_hash,
    leaf_document,
    root_document,
    routes_layout,
    row_of,
    run_attributes,
    seal,
    token_layout,
)
from routeplane.archive.reader import Catalog, check_root, commit_numbers, newest
from routeplane.archive.shards import ShardWriter
from routeplane.errors import DataError, ErrorKind, FormatError, SpecError, StoreError, TruncatedError
from routeplane.record.counts import Counts
from routeplane.record.interfaces import Position
from routeplane.record.parse import check_text
from routeplane.record.transfer import RecordWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from routeplane.archive.layout import ArrayLayout, Row
    from routeplane.archive.store import ArchiveStore
    from routeplane.record.aligned import AlignedColumn, ColumnType
    from routeplane.record.interfaces import BlockName, BlockSource
    from routeplane.record.record import RecordKey, RouteRecord
    from routeplane.record.spec import RouteSpec

__all__ = ["AddReport", "ArchiveWriter", "RunFiles", "add_from", "begin", "drop_commits", "publish"]

# ----------------------------------------------------------------------------------------------------------------------
# Commits
# ----------------------------------------------------------------------------------------------------------------------

#: Commits that are kept: what `recover` falls back to. Older ones say nothing that these do not.
_KEPT = 4


def begin(store: ArchiveStore, spec: RouteSpec) -> Commit:
    """Return the newest commit to append to; make the archive where there is none.

    Raises FormatError for a folder that holds something else, SpecError for an archive of another spec.
    """
    if store.read(ROOT) is None:
        if store.names(""):
            raise FormatError(
                f"expected an archive or an empty place, got {store.names('')[:4]} @ {store.where}",
                kind=ErrorKind.NOT_ROUTEPLANE,
            )
        store.create(ROOT, json.dumps(root_document(spec), indent=1).encode())
    check_root(store)
    commit = newest(store) if commit_numbers(store) else Commit(number=0, spec=spec)
    check_spec(commit, spec, where=store.where)
    # also where the process that made the root died before these
    for key, document in ((f"{RUNS}/{ROOT}", group_document({})), (f"{COMMITS}/{ROOT}", leaf_document())):
        if store.size(key) is None:
            store.write(key, json.dumps(document).encode())
    return commit


def check_spec(commit: Commit, spec: RouteSpec, *, where: str) -> None:
    """Raise SpecError where a commit's records are of another spec."""
    commit.spec.require_same_geometry(spec, where=where)
    if commit.spec != spec:
        raise SpecError(
            f"expected routes of model {commit.spec.model!r}, got {spec.model!r} @ {where}",
            kind=ErrorKind.SPEC_MISMATCH,
        )


def publish(store: ArchiveStore, base: Commit, *, change: Callable[[Commit], tuple[RunEntry, ...]]) -> Commit:
    """Publish the next commit: ``change`` of ``base``, or of what other writers made of it meanwhile.

    ``change`` is asked for the runs of each attempt; what it raises ends it.
    """
    known = base
    while True:
        history = (*known.history, known.seal) if known.number else ()
        data = Commit(number=known.number + 1, spec=known.spec, runs=change(known), history=history).to_json()
        made = Commit.from_json(data, where=store.where)
        created = store.create(commit_key(made.number), data)
        known = newest(store)
        if created and known.follows(made.number, made.seal):
            with contextlib.suppress(OSError):  # the commit stands, also where these fail
                store.write(NEWEST, seal({"snapshot": known.snapshot}))
                drop_commits(store, before=known.number - _KEPT + 1)
            return made
        if created:
            # so far behind that the number had been taken, and dropped since; the newest is never dropped, so it shows
            store.delete(commit_key(made.number))


def drop_commits(store: ArchiveStore, *, before: int) -> None:
    """Delete the files of commits with smaller numbers."""
    for number in commit_numbers(store):
        if number < before:
            store.delete(commit_key(number))


# ----------------------------------------------------------------------------------------------------------------------
# The files of a run
# ----------------------------------------------------------------------------------------------------------------------


class RunFiles:
    """The files of one run, in a folder of its own; part of the archive only once a commit names them.

    The folder's name is the run's and a random suffix, so that no two writers meet in one.
    """

    def __init__(
        self,
        store: ArchiveStore,
        spec: RouteSpec,
        *,
        run: str,
        attributes: Mapping[str, str],
        shard_bytes: int = DEFAULT_SHARD_BYTES,
    ) -> None:
        self.run, self.folder = run, f"{run}-{uuid.uuid4().hex[:12]}"
        self._store, self._spec, self._attributes = store, spec, attributes
        self._routes = self._array("routes", routes_layout(spec, shard_bytes=shard_bytes))
        self._beside: dict[str, ShardWriter] = {}
        self.columns: dict[str, ColumnType] | None = None
        self._table = _TableWriter(self._put_file)
        self._tokens = self._all_tokens = 0
        self._digest = xxhash.xxh3_64()

    @property
    def tokens(self) -> int:
        """Tokens written."""
        return self._all_tokens

    @property
    def deleted(self) -> bool:
        """Whether the file that was written first is gone: ``compact`` took this writer for dead."""
        return self._store.size(f"{RUNS}/{self.folder}/{ROOT}") is None

    @property
    def key_hashes(self) -> NDArray[np.uint64]:
        """Of the records written, in order."""
        return np.asarray(self._table.keys, dtype=np.uint64)

    def write(self, record: RouteRecord) -> None:
        """Add one record, which was checked."""
        if self.columns is None:
            self._put_document(
                "", group_document(run_attributes(self._spec, run=self.run, attributes=self._attributes))
            )
            self.columns = {name: column.type for name, column in record.columns.items()}
        row = row_of(record, token_start=self._tokens, row_start=self._routes.rows)
        self._put_beside("token_ids", record.token_ids)
        if record.logprobs is not None:
            self._put_beside("logprobs", record.logprobs)
        for index, column in enumerate(record.columns.values()):
            self._put_column(index, column)
        # legal ids of a narrow spec are at most 255, and -1 becomes 0xFF: the wrap is the encoding
        self._routes.append(record.stored_routes)
        self._tokens += len(record.token_ids)
        self._all_tokens += record.num_tokens
        self._digest.update(record.checksum.to_bytes(8, "little"))
        self._table.append(row)

    def _put_column(self, index: int, column: AlignedColumn) -> None:
        name = f"columns/{index}"
        values = self._writer(name, column_layout(column.type, index=index))
        if column.offsets is not None:
            # where each list ends among all lists of the run; it begins where the one before it ends
            self._put_beside(f"{name}_ends", values.rows + column.offsets[1:])
        if column.valid is not None:
            self._put_beside(f"{name}_valid", column.valid)
        values.append(column.values)

    def _put_beside(self, name: str, values: NDArray[Any]) -> None:
        """Tokens' values behind those of the records before; where these had none, the fill value stands."""
        beside = self._writer(name, token_layout(values.dtype.newbyteorder("=")))
        beside.append_fill(self._tokens - beside.rows)
        beside.append(values)

    def _writer(self, name: str, layout: ArrayLayout) -> ShardWriter:
        if name not in self._beside:
            self._beside[name] = self._array(name, layout)
        return self._beside[name]

    def _array(self, name: str, layout: ArrayLayout) -> ShardWriter:
        return ShardWriter(layout, put=lambda key, data: self._put_file(f"{name}/{key}", data))

    def _put_file(self, key: str, data: bytes) -> None:
        self._store.write(f"{RUNS}/{self.folder}/{key}", data)

    def finish(self) -> RunEntry:
        """Write what is held, then the documents, then the manifest that names all of it."""
        if "logprobs" in self._beside:  # the last records may have none
            self._beside["logprobs"].append_fill(self._tokens - self._beside["logprobs"].rows)
        arrays = {"routes": self._routes, **self._beside}
        for each in arrays.values():
            each.finish()
        self._table.finish()
        keys = self.key_hashes.astype("<u8").tobytes()
        self._put_file("records/keys.u64", keys)
        manifest = RunManifest(
            name=self.run,
            records=len(self._table.keys),
            tokens=self._all_tokens,
            rows=self._routes.rows,
            digest=f"{self._digest.intdigest():016x}",
            columns=self.columns or {},
            arrays={
                name: ArrayEntry(document=each.layout.document(each.rows), shards=tuple(each.shards))
                for name, each in arrays.items()
            },
            parts=tuple(self._table.parts),
            keys=file_hash(keys),
            attributes=self._attributes,
        )
        for name, entry in manifest.arrays.items():
            self._put_document(name, entry.document)
        self._put_document("records", leaf_document())
        if manifest.columns:
            self._put_document("columns", group_document({}))
        data = manifest.to_json()
        self._put_file("records/manifest.json", data)
        counts = {name: getattr(manifest, name) for name in ("records", "tokens", "rows", "digest")}
        return RunEntry(name=self.run, folder=self.folder, bytes=manifest.nbytes, manifest=file_hash(data), **counts)

    def _put_document(self, folder: str, document: Mapping[str, Any]) -> None:
        self._put_file(f"{folder}/{ROOT}".lstrip("/"), json.dumps(dict(document)).encode())

    def delete(self) -> None:
        """Delete all of it."""
        self._store.delete(f"{RUNS}/{self.folder}")


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


# ----------------------------------------------------------------------------------------------------------------------
# The sink
# ----------------------------------------------------------------------------------------------------------------------


class ArchiveWriter(RecordWriter):
    """The RouteSink of one run. ``close`` commits; ``abort``, and a process that dies, leave the archive as it was.

    Made by ``new_run``. A record whose key the archive has already is refused.

    Example: see ``new_run``.
    """

    def __init__(
        self,
        store: ArchiveStore,
        spec: RouteSpec,
        *,
        run: str | None,
        attributes: Mapping[str, str],
        shard_bytes: int = DEFAULT_SHARD_BYTES,
    ) -> None:
        super().__init__(spec, max_bytes=shard_bytes)
        name = uuid.uuid4().hex if run is None else run
        check_run_name(name)
        checked = {
            check_text(key, "an attribute's name"): check_text(value, f"attribute {key!r}", empty=True)
            for key, value in attributes.items()
        }
        self._store = store
        self._base = begin(store, spec)
        self._known = Catalog(store, self._base)
        self._files = RunFiles(store, spec, run=name, attributes=checked, shard_bytes=shard_bytes)
        self._refuse_name(self._base)
        self._publishing = False
        self.commit: Commit | None = None

    @property
    def run(self) -> str:
        """The name of the run."""
        return self._files.run

    def _refuse_name(self, commit: Commit) -> None:
        if any(entry.name == self.run for entry in commit.runs):
            self._open = False
            raise StoreError(
                f"expected the name of a new run, got {self.run}, which was committed @ {self._store.where}",
                kind=ErrorKind.WRITER,
            )

    def _check(self, record: RouteRecord) -> None:
        columns = {name: column.type for name, column in record.columns.items()}
        known = self._files.columns
        if known is not None and columns != known:
            expected, got = (
                "; ".join(f"{name} {kind}" for name, kind in each.items()) or "none" for each in (known, columns)
            )
            raise DataError(
                f"expected token columns ({expected}), got ({got}) @ sample {record.key}", kind=ErrorKind.TOKEN_COLUMN
            )
        if self._known.find(record.key) is not None:
            raise DataError(
                f"expected each record once, got {record.key}, which the archive has", kind=ErrorKind.DUPLICATE_KEY
            )

    def checksum_of(self, key: RecordKey) -> int | None:
        """Return the checksum of a record that the archive had when this run began, None where it has none."""
        number = self._known.find(key)
        return None if number is None else self._known.row(number)[1].checksum

    def _put(self, record: RouteRecord) -> None:
        self._files.write(record)

    def _finish(self) -> None:
        entry = self._files.finish() if self._files.tokens else None
        self._publishing = True
        self.commit = publish(self._store, self._base, change=lambda commit: self._added(commit, entry))

    def _added(self, commit: Commit, entry: RunEntry | None) -> tuple[RunEntry, ...]:
        """The runs of a commit and this one; no record of a run that came since may be one of ours."""
        check_spec(commit, self._spec, where=self._store.where)
        self._refuse_name(commit)
        if entry is None:
            return commit.runs
        if self._files.deleted:
            raise StoreError(
                f"expected the files of run {self.run}, got none: they were deleted before it was committed "
                f"@ {self._store.where}",
                kind=ErrorKind.WRITER,
            )
        folders = {known.folder for known in self._base.runs}
        others = tuple(other for other in commit.runs if other.folder not in folders)
        found = Catalog(self._store, replace(commit, runs=others))
        for key in self._keys if others else ():
            self._refuse_key(found, key)
        return (*commit.runs, entry)

    def _refuse_key(self, found: Catalog, key: RecordKey) -> None:
        if found.find(key) is not None:
            raise DataError(
                f"expected each record once, got {key}, which another writer committed meanwhile",
                kind=ErrorKind.DUPLICATE_KEY,
            )

    def _discard(self) -> None:
        if not self._may_be_committed():
            self._files.delete()

    def _may_be_committed(self) -> bool:
        """Whether the commit may be out, though what came behind it failed: then the run's files must stay."""
        if not self._publishing:
            return False
        try:
            return any(entry.folder == self._files.folder for entry in newest(self._store).runs)
        except TruncatedError:
            return False  # there is no commit at all
        except (FormatError, OSError):
            return True


# ----------------------------------------------------------------------------------------------------------------------
# Blocks of a carrier
# ----------------------------------------------------------------------------------------------------------------------

#: Attributes of a run that was made of blocks: the place they came from, and the position behind the last of them.
_PLACE, _POSITION = "blocks.place", "blocks.position"


@dataclass(frozen=True, kw_only=True, slots=True)
class AddReport(Counts):
    """What was added. ``repeats``: records that the archive had with the same checksum, and kept once.

    >>> AddReport(blocks=1, records=3).merge(AddReport(blocks=1, records=2)).records
    5
    """

    SCOPE: ClassVar[str] = "archive_added_"

    runs: int = 0
    blocks: int = 0
    records: int = 0
    repeats: int = 0


def add_from(
    store: ArchiveStore,
    source: BlockSource,
    *,
    blocks_per_run: int,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    progress: Callable[[int, int | None], None] | None = None,
) -> AddReport:
    """Add blocks as runs, and acknowledge each run's once it is committed; see ``routeplane.archive.add_blocks``."""
    position = _committed(store, source)
    if position is not None:
        source.acknowledge(position)  # committed by a process that died before it said so
    position = source.position()
    total = AddReport()
    for names in _groups(source.names(position=position), blocks_per_run):
        for name in names:
            position = position.after(name)
        total = total.merge(_add_run(store, source, names, position, shard_bytes=shard_bytes))
        source.acknowledge(position)
        if progress is not None:
            progress(total.records, None)
    return total


def _groups(names: Iterator[BlockName], size: int) -> Iterator[list[BlockName]]:
    held: list[BlockName] = []
    for name in names:
        held.append(name)
        if len(held) == size:
            yield held
            held = []
    if held:
        yield held


def _committed(store: ArchiveStore, source: BlockSource) -> Position | None:
    """The position behind the last block of this place that the archive holds."""
    place = source.position().place
    if store.read(ROOT) is None or not commit_numbers(store):
        return None
    for run in reversed(Catalog(store, newest(store)).runs):
        attributes = run.manifest.attributes
        if attributes.get(_PLACE) == place:
            return Position.from_json(attributes[_POSITION])
    return None


def _add_run(
    store: ArchiveStore, source: BlockSource, names: list[BlockName], position: Position, *, shard_bytes: int
) -> AddReport:
    attributes = {_PLACE: position.place, _POSITION: position.to_json()}
    checksums: dict[RecordKey, int] = {}
    repeats = 0
    with ArchiveWriter(store, source.spec, run=None, attributes=attributes, shard_bytes=shard_bytes) as sink:
        for name in names:
            for record in source.open(name):
                known = checksums.get(record.key, sink.checksum_of(record.key))
                if known == record.checksum:
                    repeats += 1
                    continue
                sink.write(record)  # refuses a known key with another checksum
                checksums[record.key] = record.checksum
    return AddReport(runs=1, blocks=len(names), records=len(checksums), repeats=repeats)
