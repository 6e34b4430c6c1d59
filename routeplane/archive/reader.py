"""The state of an archive, found and read: its newest commit, where each record stands, whole records and ranges.

``Archive`` is a mapping from keys to records, pinned to the commit that was newest when it was opened;
``ArchiveReader`` is the source that trainers iterate. Every file is compared with the checksum that the one above it
gives, from the commit down. Holds 16 bytes per record once a key was looked for, and record tables up to a bound.

Axes: S tokens of what is read, B records, L captured layers, K top-k slots.
"""

from __future__ import annotations

import io
import json
import re
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from routeplane.archive.layout import (
    COMMITS,
    NEWEST,
    ROOT,
    RUNS,
    TABLE_SCHEMA,
    Commit,
    Row,
    RunManifest,
    TablePartReader,
    check_version,
    commit_key,
    encode_rows,
    file_hash,
    key_hash,
    read_keys,
    root_document,
    unseal,
)
from routeplane.archive.shards import ChunkReader, Range, joined, neighbours
from routeplane.errors import DataError, ErrorKind, FormatError, TruncatedError, UsageError, refused
from routeplane.record.aligned import blank_weights, read_column
from routeplane.record.codec import widen
from routeplane.record.counts import html_table
from routeplane.record.policy import ReadPolicy
from routeplane.record.record import RecordKey, RouteRecord
from routeplane.record.record import read_record as make_record
from routeplane.record.spans import Coverage, cut, lose_rows, settle_partial
from routeplane.record.transfer import RecordReader

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from routeplane.archive.layout import RunEntry
    from routeplane.archive.store import ArchiveStore
    from routeplane.record.aligned import AlignedColumn, ColumnType
    from routeplane.record.record import Prefix
    from routeplane.record.spec import RouteSpec

__all__ = [
    "Archive",
    "ArchiveReader",
    "Catalog",
    "Piece",
    "Run",
    "beside_readers",
    "build",
    "check_root",
    "commit_numbers",
    "newest",
    "read_beside",
    "read_commit",
    "read_record",
    "route_ranges",
]

ROUTES, TOKENS, LOGPROBS = "routes", "token_ids", "logprobs"

# ----------------------------------------------------------------------------------------------------------------------
# The newest commit
# ----------------------------------------------------------------------------------------------------------------------

_NAME = re.compile(r"([0-9]{10})\.json")
_FOREIGN = ErrorKind.NOT_ROUTEPLANE


def commit_numbers(store: ArchiveStore) -> list[int]:
    """Return the numbers of the commits that are there, ascending."""
    return sorted(int(found[1]) for name in store.names(COMMITS) if (found := _NAME.fullmatch(name)))


def read_commit(store: ArchiveStore, number: int) -> Commit | None:
    """Return one commit, None where it is gone. Raises FormatError."""
    key = commit_key(number)
    data = store.read(key)
    if data is None:
        return None
    commit = Commit.from_json(data, where=key)
    if commit.number != number:
        raise FormatError(f"expected commit {number}, got {commit.number} @ {key}", kind=ErrorKind.MANIFEST)
    return commit


def newest(store: ArchiveStore, *, expected_snapshot: str | None = None) -> Commit:
    """Return the newest commit.

    Raises FormatError for what is not an archive, of another version, or damaged (MANIFEST), and where a commit that
    was published, or ``expected_snapshot``, is neither the newest nor one that it was built on (ROLLED_BACK);
    TruncatedError where nothing was ever committed.
    """
    check_root(store)
    published = _published(store)  # read first: commits that come later only add to it
    commit = _last(store)
    for what, snapshot in (("published", published), ("expected", expected_snapshot)):
        if snapshot is not None:
            _check_follows(commit, snapshot, what=what, where=store.where)
    if commit is None:
        raise TruncatedError(
            "expected a commit, got none: the first writer died, is still writing, or its commits were deleted "
            f"@ {store.where}",
            kind=ErrorKind.TRUNCATED,
        )
    _check_agrees(store, commit)
    return commit


def _last(store: ArchiveStore) -> Commit | None:
    """The commit of the highest number."""
    while numbers := commit_numbers(store):
        commit = read_commit(store, numbers[-1])
        if commit is not None:
            return commit
        # a writer went on meanwhile, and dropped this one
    return None


def _published(store: ArchiveStore) -> str | None:
    data = store.read(NEWEST)
    return None if data is None else str(unseal(data, where=NEWEST).get("snapshot"))


def _check_follows(commit: Commit | None, snapshot: str, *, what: str, where: str) -> None:
    number, _, expected = snapshot.partition("-")
    if not number.isdecimal() or not expected:
        raise refused("a snapshot as Archive.snapshot gives it", repr(snapshot))
    if commit is None or not commit.follows(int(number), expected):
        got = "no commit" if commit is None else commit.snapshot
        raise FormatError(
            f"expected the {what} snapshot {snapshot} or one built on it, got {got}: a commit was lost, or the archive "
            f"was set back @ {where}",
            kind=ErrorKind.ROLLED_BACK,
        )


def check_root(store: ArchiveStore) -> None:
    """Raise FormatError unless an archive of a known version lies here; FileNotFoundError where nothing does."""
    data = store.read(ROOT)
    if data is None:
        if not store.names(""):
            raise FileNotFoundError(f"expected an archive, got nothing @ {store.where}")
        raise FormatError(f"expected an archive, got a folder without {ROOT} @ {store.where}", kind=_FOREIGN)
    ours = _root_attributes(data, where=store.where)
    if ours is None:
        raise FormatError(f"expected an archive of routes, got another zarr group @ {store.where}", kind=_FOREIGN)
    check_version(ours.get("archive"), where=f"{store.where}/{ROOT}")


def _root_attributes(data: bytes, *, where: str) -> dict[str, Any] | None:
    try:
        attributes = json.loads(data)["attributes"]
        found = attributes.get("routeplane")
        return found if found is None else dict(found)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise FormatError(
            f"expected the document of a zarr group, got {data[:60]!r} ({error}) @ {where}/{ROOT}",
            kind=ErrorKind.MANIFEST,
        ) from None


def _check_agrees(store: ArchiveStore, commit: Commit) -> None:
    """The root's attributes are for readers without this library; a flip in them shows against the commit."""
    data = store.read(ROOT) or b""
    found, expected = json.loads(data), root_document(commit.spec)
    for document in (found, expected):  # versions of the first writer, which a later one may exceed
        ours = document.get("attributes", {}).get("routeplane", {})
        check_version(ours.pop("archive", None), where=f"{store.where}/{ROOT}")
        check_version(ours.pop("format", None), where=f"{store.where}/{ROOT}")
    if found != expected:
        raise FormatError(f"expected {expected}, got {data[:200]!r} @ {store.where}/{ROOT}", kind=ErrorKind.MANIFEST)


# ----------------------------------------------------------------------------------------------------------------------
# Where records stand
# ----------------------------------------------------------------------------------------------------------------------

#: Decoded record tables that are kept, and single rows.
_TABLE_BYTES = 64 * 2**20
_ROWS = 256


def read_named(store: ArchiveStore, key: str, *, expected: str) -> bytes:
    """Return a file whose hash is known. Raises FormatError: LOST_FILE where it is absent, CORRUPT_CHUNK where it
    differs."""
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

    def __init__(self, store: ArchiveStore, *, entry: RunEntry, spec: RouteSpec) -> None:
        self.entry, self.spec = entry, spec
        self.store = store
        self._manifest: RunManifest | None = None
        self._chunks: ChunkReader | None = None

    @property
    def manifest(self) -> RunManifest:
        """What the run consists of. Raises FormatError."""
        if self._manifest is None:
            key = self.entry.key("records/manifest.json")
            data = read_named(self.store, key, expected=self.entry.manifest)
            self._manifest = found = RunManifest.from_json(data, where=key)
            if found.records != self.entry.records + len(self.entry.removed):
                raise FormatError(
                    f"expected the records of {self.entry}, got {found.records} @ {key}", kind=ErrorKind.MANIFEST
                )
        return self._manifest

    @property
    def chunks(self) -> ChunkReader:
        """Its arrays."""
        if self._chunks is None:
            folder = f"{RUNS}/{self.entry.folder}"
            self._chunks = ChunkReader(self.store, folder=folder, arrays=dict(self.manifest.arrays))
        return self._chunks

    @property
    def positions(self) -> NDArray[np.int64]:
        """Positions in the run's tables of the records that were not deleted, ascending."""
        stored = np.arange(self.entry.records + len(self.entry.removed))
        return np.delete(stored, list(self.entry.removed))

    def keys(self) -> NDArray[np.uint64]:
        """Return the hashes of all its keys, deleted records included, in order."""
        if not self.manifest.records:
            return np.empty(0, dtype=np.uint64)
        key = self.entry.key("records/keys.u64")
        data = read_named(self.store, key, expected=self.manifest.keys)
        return read_keys(data, records=self.manifest.records, where=key)

    def part(self, index: int) -> TablePartReader:
        """Return one file of its record table."""
        wanted = self.manifest.parts[index]
        key = self.entry.key(f"records/{index:05d}.parquet")
        part = TablePartReader(read_named(self.store, key, expected=wanted.hash), where=key)
        if len(part) != wanted.records:
            raise FormatError(f"expected {wanted.records} records, got {len(part)} @ {key}", kind=ErrorKind.MANIFEST)
        return part

    def rows(self) -> Iterator[Row]:
        """Yield the rows of its record table, without deleted records. Raises FormatError."""
        removed, first = set(self.entry.removed), 0
        for index, wanted in enumerate(self.manifest.parts):
            part = self.part(index)
            yield from (part.row(local) for local in range(wanted.records) if first + local not in removed)
            first += wanted.records

    def table(self) -> pa.Table:
        """Return its record table, without deleted records: everything about a record but its arrays."""
        parts = [self.part(index).table for index in range(len(self.manifest.parts))]
        return pa.concat_tables(parts).take(self.positions) if parts else TABLE_SCHEMA.empty_table()


class Catalog:
    """The records of one commit, numbered from 0 over all runs in order, without deleted ones."""

    def __init__(self, store: ArchiveStore, commit: Commit) -> None:
        self.store, self.commit = store, commit
        self.runs = tuple(Run(store, entry=entry, spec=commit.spec) for entry in commit.runs)
        self._starts = [0, *accumulate(entry.records for entry in commit.runs)]
        self._sorted: tuple[NDArray[np.uint64], NDArray[np.int64]] | None = None
        self._parts: OrderedDict[tuple[int, int], TablePartReader] = OrderedDict()
        self._rows: OrderedDict[int, Row] = OrderedDict()

    def __len__(self) -> int:
        return self._starts[-1]

    def find(self, key: RecordKey) -> int | None:
        """Return the number of the record with that key, None where there is none."""
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
            keys = [run.keys()[run.positions] for run in self.runs]
            hashes_B = np.concatenate([*keys, np.empty(0, dtype=np.uint64)])
            order_B = np.argsort(hashes_B, kind="stable")
            self._sorted = hashes_B[order_B], order_B
        return self._sorted

    def row(self, number: int) -> tuple[Run, Row]:
        """Return the run and the row of one record. Raises FormatError where its table is damaged."""
        place, local = self._position(number)
        run = self.runs[place]
        if number in self._rows:
            self._rows.move_to_end(number)
            return run, self._rows[number]
        starts = [0, *accumulate(part.records for part in run.manifest.parts)]
        index = bisect_right(starts, local) - 1
        row = self._part(place, index).row(local - starts[index])
        self._rows[number] = row
        if len(self._rows) > _ROWS:
            self._rows.popitem(last=False)
        return run, row

    def position(self, number: int) -> tuple[Run, int]:
        """Return the run of one record, and its position in the run's tables."""
        place, local = self._position(number)
        return self.runs[place], local

    def _position(self, number: int) -> tuple[int, int]:
        place = bisect_right(self._starts, number) - 1
        local = number - self._starts[place]
        for removed in self.runs[place].entry.removed:
            if removed > local:
                break
            local += 1
        return place, local

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
        """Yield every record, in order."""
        for number in range(len(self)):
            yield self.row(number)


# ----------------------------------------------------------------------------------------------------------------------
# One record: whole, or a range of its tokens and layers
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Tokens ``[start, stop)`` of a record, and where its rows stand in the run's routes."""

    start: int
    stop: int
    routes_start: int
    first_row: int
    last_row: int
    first_token: int
    last_token: int
    sliced: bool  # a range was asked for, be it all of them

    @classmethod
    def of(cls, row: Row, tokens: tuple[int, int] | None) -> Piece:
        """The whole record, or a range of its tokens, under the rules of ``RouteRecord.slice``. Raises UsageError."""
        start, stop = (0, row.num_tokens) if tokens is None else tokens
        if not 0 <= start < stop <= row.num_tokens:
            raise refused(f"0 <= start < stop <= {row.num_tokens}", f"[{start}, {stop}) @ sample {row.key}")
        if 0 < start < row.routes_start:
            raise UsageError(
                f"expected rows from {start} on, got rows only from {row.routes_start}: those before stand in another "
                f"record @ sample {row.key}",
                kind=ErrorKind.PREFIX,
            )
        first, last = max(start - row.routes_start, 0), max(stop - row.routes_start, 0)
        return cls(
            start=start,
            stop=stop,
            routes_start=min(row.routes_start, stop) if start == 0 else 0,
            first_row=row.row_start + first,
            last_row=row.row_start + last,
            first_token=row.token_start + max(start - row.tokens_start, 0),
            last_token=row.token_start + max(stop - row.tokens_start, 0),
            sliced=tokens is not None,
        )


def read_record(
    run: Run,
    row: Row,
    *,
    tokens: tuple[int, int] | None = None,
    layers: Sequence[int] | None = None,
    verify: bool = False,
) -> RouteRecord:
    """Return the record, or the range of it. Whole ones carry the stored checksum, which ``verify`` compares; ranges
    get a new one.

    Raises FormatError for damaged chunks, DataError for rows that are illegal or contradict the captures, UsageError.
    """
    piece, slots = Piece.of(row, tokens), _slots(run.spec, layers)
    stored_SLK = joined([run.chunks.read(wanted) for wanted in route_ranges(piece, slots)])
    beside = read_beside(run, row, piece=piece, slots=slots)
    return build(run, row, piece=piece, beside=beside, stored=stored_SLK, slots=slots, verify=verify)


def read_rows(
    run: Run, row: Row, *, tokens: tuple[int, int] | None = None, layers: Sequence[int] | None = None
) -> NDArray[np.int16]:
    """Return the rows alone, int16 ``[rows, L, K]``, chunks checked and nothing else."""
    wanted = route_ranges(Piece.of(row, tokens), _slots(run.spec, layers))
    return widened(joined([run.chunks.read(each) for each in wanted]), run.spec)


def widened(stored_SLK: NDArray[Any], spec: RouteSpec) -> NDArray[np.int16]:
    """Return what was read of ``routes`` as int16 ``[S, L, K]``."""
    return widen(stored_SLK, spec) if stored_SLK.dtype == np.uint8 else stored_SLK.astype(np.int16, copy=False)


def _slots(spec: RouteSpec, layers: Sequence[int] | None) -> list[int] | None:
    return None if layers is None else [spec.slot(layer) for layer in spec.select(layers).layer_ids]


def route_ranges(piece: Piece, slots: Sequence[int] | None, *, array: str = ROUTES) -> list[Range]:
    """Return what of ``routes`` belongs to a piece; one range for each group of neighbouring layers."""
    groups = [None] if slots is None else list(neighbours(slots))
    return [Range(array=array, start=piece.first_row, stop=piece.last_row, slots=group) for group in groups]


def read_beside(run: Run, row: Row, *, piece: Piece, slots: Sequence[int] | None = None) -> dict[str, Any]:
    """Return everything of a piece that stands in arrays by token: token ids, log-probabilities, columns."""
    readers = beside_readers(run, row, piece=piece, slots=slots)
    found = {name: read() for name, read in readers.items()}
    columns = {name: found[f"column {name}"] for name in run.manifest.columns}
    return {"token_ids": found[TOKENS], "logprobs": found.get(LOGPROBS), "columns": columns}


def beside_readers(
    run: Run, row: Row, *, piece: Piece, slots: Sequence[int] | None = None
) -> dict[str, Callable[[], Any]]:
    """Return how each of these is read, by a name that findings give it."""
    names = [TOKENS, *([LOGPROBS] if row.has_logprobs else [])]
    readers: dict[str, Callable[[], Any]] = {name: partial(_read_tokens, run, name, piece) for name in names}
    for index, (name, kind) in enumerate(run.manifest.columns.items()):
        readers[f"column {name}"] = partial(_read_column, run, f"columns/{index}", kind, piece, slots)
    return readers


def _read_tokens(run: Run, array: str, piece: Piece) -> NDArray[Any]:
    return run.chunks.read(Range(array=array, start=piece.first_token, stop=piece.last_token))


def _read_column(run: Run, array: str, kind: ColumnType, piece: Piece, slots: Sequence[int] | None) -> AlignedColumn:
    valid = _read_tokens(run, f"{array}_valid", piece) if kind.nullable else None
    if kind.ragged:
        offsets = _read_offsets(run, f"{array}_ends", piece)
        values = run.chunks.read(Range(array=array, start=int(offsets[0]), stop=int(offsets[-1])))
        return read_column(kind, values, offsets=offsets - offsets[0], valid=valid, name=array)
    if slots is None or not run.chunks.layout(array).split:
        column = read_column(kind, _read_tokens(run, array, piece), offsets=None, valid=valid, name=array)
        return column if slots is None else column.pick_layers(slots)
    ranges = route_ranges(replace(piece, first_row=piece.first_token, last_row=piece.last_token), slots, array=array)
    values = joined([run.chunks.read(wanted) for wanted in ranges])
    return read_column(replace(kind, shape=values.shape[1:]), values, offsets=None, valid=valid, name=array)


def _read_offsets(run: Run, array: str, piece: Piece) -> NDArray[np.int64]:
    """Where the lists of a piece begin and end among all of the run."""
    before = max(piece.first_token - 1, 0)
    ends = run.chunks.read(Range(array=array, start=before, stop=max(piece.last_token, before)))
    if piece.first_token == 0:
        ends = np.concatenate([[0], ends])
    if not len(ends) or (np.diff(ends) < 0).any():
        raise FormatError(f"expected lists that follow each other, got others @ {array}", kind=ErrorKind.CORRUPT_CHUNK)
    return ends.astype(np.int64)


def build(
    run: Run,
    row: Row,
    *,
    piece: Piece,
    beside: Mapping[str, Any],
    stored: NDArray[Any],
    slots: Sequence[int] | None = None,
    changes: Mapping[str, Any] | None = None,
    verify: bool = False,
) -> RouteRecord:
    """Return the record of what was read. ``beside``: as ``read_beside`` gives it; ``stored``: rows as they are stored.

    ``changes``: fields that differ from the table's; the checksum is then a new one.
    """
    spec = run.spec
    captures = cut(row.captures, start=piece.start, stop=piece.stop)
    if slots is not None:
        spec = spec.select(spec.layer_ids[slot] for slot in slots)
        captures = settle_partial(captures, stored, routes_start=piece.routes_start)
    whole = not (piece.sliced or slots is not None or changes)
    content: dict[str, Any] = {
        "sample_id": row.sample_id,
        "attempt": row.attempt,
        "segment": row.segment,
        "group": row.group,
        "routes_start": piece.routes_start,
        "prefix": _prefix(row, piece),
        "spans": cut(row.spans, start=piece.start, stop=piece.stop),
        "captures": captures,
        "spec": spec,
        "attributes": _attributes(row, piece),
        "checksum": row.checksum if whole else None,
        **beside,
    }
    return make_record(stored, verify=whole and verify, **{**content, **(changes or {})})


def _prefix(row: Row, piece: Piece) -> Prefix | None:
    return replace(row.prefix, stop=piece.routes_start) if row.prefix is not None and piece.routes_start else None


def _attributes(row: Row, piece: Piece) -> dict[str, str]:
    if not piece.sliced:
        return row.attributes
    origin = int(row.attributes["slice"].split(":")[0]) if "slice" in row.attributes else 0
    return {**row.attributes, "slice": f"{origin + piece.start}:{origin + piece.stop}"}


# ----------------------------------------------------------------------------------------------------------------------
# The mapping and the source
# ----------------------------------------------------------------------------------------------------------------------


class Archive(Mapping[RecordKey, RouteRecord]):
    """The records of one commit. Made by ``open_archive``; holds no file open, and needs no closing.

    A mapping: ``archive[key]`` reads one record (a plain ``(sample_id, attempt, segment)`` is a key too), verified by
    its checksum; iteration gives keys in the order of saving, and reads the record tables alone.

    Raises, while reading: FormatError (LOST_FILE, CORRUPT_CHUNK, MANIFEST) for what was damaged, DataError for a record
    that is not what it was.

    Example: ``open_archive("rollouts.zarr")["sample-7", 0, 0]``.
    """

    def __init__(self, catalog: Catalog, policy: ReadPolicy) -> None:
        self.catalog, self._policy = catalog, policy

    @property
    def spec(self) -> RouteSpec:
        """The geometry of all records."""
        return self.catalog.commit.spec

    @property
    def commit(self) -> int:
        """The number of the commit that is read; 1 is the first."""
        return self.catalog.commit.number

    @property
    def snapshot(self) -> str:
        """The commit's number and checksum. ``open_archive(expected_snapshot=)`` refuses an archive that was set back
        behind it."""
        return self.catalog.commit.snapshot

    @property
    def runs(self) -> tuple[RunEntry, ...]:
        """The runs in order of saving, with what each holds."""
        return self.catalog.commit.runs

    @property
    def num_tokens(self) -> int:
        """Tokens of all records."""
        return sum(run.tokens for run in self.runs)

    @property
    def nbytes(self) -> int:
        """Bytes of shards and record tables, as stored."""
        return sum(run.bytes for run in self.runs)

    @property
    def digest(self) -> str:
        """Of all content, as 16 hex digits; equal for equal records in equal runs."""
        found = xxhash.xxh3_64(self.spec.to_json().encode())
        for run in self.runs:
            found.update(run.digest.encode())
        return found.hexdigest()

    def __repr__(self) -> str:
        return (
            f"Archive({self.catalog.store.where}, commit {self.commit}: {len(self)} records, {self.num_tokens} tokens "
            f"in {len(self.runs)} runs)"
        )

    def _repr_html_(self) -> str:
        runs = {run.name: f"{run.records:,} records, {run.tokens:,} tokens, {run.bytes:,} bytes" for run in self.runs}
        return html_table(repr(self), runs)

    def attributes(self, run: str) -> Mapping[str, str]:
        """Return what was said of a run when it was saved. Raises KeyError."""
        return self._run(run).manifest.attributes

    def group(self, run: str) -> str:
        """Return the path of a run's zarr group below the archive, for zarr and xarray. Raises KeyError."""
        return f"{RUNS}/{self._run(run).entry.folder}"

    def table(self) -> pa.Table:
        """Return the record table of all runs, for polars, DuckDB and pyarrow: one row per record, a column ``run``.

        Everything about a record but its arrays: key, group, spans, captures, prefix, attributes, checksum, and where
        its tokens (``token_start``, ``num_tokens``) and rows (``row_start``) stand in the run's arrays.
        """
        tables = [(run.entry.name, run.table()) for run in self.catalog.runs] or [("", TABLE_SCHEMA.empty_table())]
        return pa.concat_tables(
            [table.append_column("run", pa.array([name] * len(table), pa.utf8())) for name, table in tables]
        )

    def _run(self, name: str) -> Run:
        for found in self.catalog.runs:
            if found.entry.name == name:
                return found
        raise KeyError(name)

    def columns(self, run: str) -> tuple[tuple[str, ColumnType], ...]:
        """Return the aligned columns of a run's records, as name and type. Raises KeyError."""
        return tuple(self._run(run).manifest.columns.items())

    def coverage(self) -> Coverage:
        """Rows of all records by capture state, as the record tables say: no array is read."""
        return Coverage.of_records(row.captures for _, row in self.catalog.rows())

    def __len__(self) -> int:
        return len(self.catalog)

    def __iter__(self) -> Iterator[RecordKey]:
        return (row.key for _, row in self.catalog.rows())

    def __contains__(self, key: object) -> bool:
        return isinstance(key, tuple) and len(key) == 3 and self.catalog.find(RecordKey(*key)) is not None

    def __getitem__(self, key: tuple[str, int, int]) -> RouteRecord:
        return self.read(key)

    def read(
        self,
        key: tuple[str, int, int],
        *,
        tokens: tuple[int, int] | None = None,
        layer_ids: Sequence[int] | None = None,
    ) -> RouteRecord:
        """One record, or its tokens ``[a, b)``, or some of its layers; memory is the caller's.

        Equal to ``archive[key].slice(a, b).select(layer_ids)``, and reads only the chunks that hold it. A whole record
        is compared with its checksum; of a range the chunks are, and it gets a checksum of its own. Raises
        KeyError, UsageError for a range outside the record, SpecError for a layer that is not there, and as the class.
        """
        run, row = self._locate(key)
        return read_record(run, row, tokens=tokens, layers=layer_ids, verify=self._policy.verify)

    def read_rows(
        self,
        key: tuple[str, int, int],
        *,
        tokens: tuple[int, int] | None = None,
        layer_ids: Sequence[int] | None = None,
    ) -> NDArray[np.int16]:
        """The rows of a record, or of a range of it: int16 ``[S, L, K]``, checked chunk by chunk and no further."""
        run, row = self._locate(key)
        return read_rows(run, row, tokens=tokens, layers=layer_ids)

    def _locate(self, key: tuple[str, int, int]) -> tuple[Run, Row]:
        if not isinstance(key, tuple) or len(key) != len(RecordKey._fields):
            raise refused("a key (sample_id, attempt, segment)", f"{key!r:.80}")
        number = self.catalog.find(RecordKey(*key))
        if number is None:
            raise KeyError(RecordKey(*key))
        return self.catalog.row(number)

    def select(
        self,
        *,
        layer_ids: Sequence[int] | None = None,
        tokens: tuple[int, int] | None = None,
        records: tuple[int, int] | None = None,
    ) -> ArchiveReader:
        """The records as a RouteSource, in order of saving: what ``microbatches`` and ``RecordDataset`` take.

        ``records``: only those numbered ``[a, b)`` in that order, for several readers that share the work. Of other
        layers, tokens and records nothing is read. Each call gives a new reader, under the policy the archive was
        opened with. Raises UsageError for a range outside the archive, and as ``RouteSource.select``.
        """
        found = ArchiveReader(self, policy=self._policy, records=records)
        return found.select(layer_ids=layer_ids, tokens=tokens)


class ArchiveReader(RecordReader):
    """The RouteSource of an archive. Iterate once. Example: ``for record in archive.select(layer_ids=[4]): ...``."""

    def __init__(self, archive: Archive, *, policy: ReadPolicy, records: tuple[int, int] | None = None) -> None:
        super().__init__(archive.spec, policy)
        self._archive, self._catalog = archive, archive.catalog
        self._numbers = range(len(archive)) if records is None else range(*records)
        if self._numbers.start < 0 or self._numbers.stop > len(archive):
            raise refused(f"records [a, b) of {len(archive)}", f"{records}")

    @property
    def digest(self) -> str:
        """The archive's digest, known before anything is read."""
        return self._archive.digest

    def _arrive(self) -> Iterator[RouteRecord]:
        for index, number in enumerate(self._numbers):
            if self._closed:
                return
            run, row = self._catalog.row(number)
            tokens = self._range(row)
            if tokens is not None and tokens[0] >= tokens[1]:
                self._report = replace(self._report, outside=self._report.outside + 1)
                continue
            record = self._read(run, row, tokens=tokens, index=index)
            if record is not None:
                yield record
        self._report = replace(self._report, complete=True)

    def _cut(self, record: RouteRecord) -> RouteRecord:
        return record  # only the selection was read

    def _range(self, row: Row) -> tuple[int, int] | None:
        return None if self._tokens is None else (self._tokens[0], min(self._tokens[1], row.num_tokens))

    def _read(self, run: Run, row: Row, *, tokens: tuple[int, int] | None, index: int) -> RouteRecord | None:
        layers = self._layer_ids
        try:
            return read_record(run, row, tokens=tokens, layers=layers, verify=self._policy.verify)
        except (DataError, FormatError) as error:
            if self._policy.on_corrupt == "raise":
                raise
            return self._set_aside(run, row, error, tokens=tokens, index=index)

    def _set_aside(
        self, run: Run, row: Row, error: DataError | FormatError, *, tokens: tuple[int, int] | None, index: int
    ) -> RouteRecord | None:
        """Count, and give what can stand in: the record without its rows, or nothing."""
        kept = _without_rows(run, row, tokens=tokens, layers=self._layer_ids)
        reason = (
            error
            if isinstance(error, DataError)
            else DataError(error.message, kind=error.kind, problems=error.problems)
        )
        self.quarantine.add(_one_row(row), index=index, key=row.key, error=reason, yielded=kept is not None)
        return kept


def _without_rows(
    run: Run, row: Row, *, tokens: tuple[int, int] | None, layers: Sequence[int] | None
) -> RouteRecord | None:
    """The tokens with every row MISSING and marked ``lost``; None where they are damaged too."""
    try:
        piece = Piece.of(row, tokens)
        missing_SLK = run.spec.missing_rows(piece.last_row - piece.first_row)
        beside = read_beside(run, row, piece=piece)
        beside["columns"] = blank_weights(beside["columns"], own=len(missing_SLK))
        lost = replace(row, captures=lose_rows(row.captures, start=row.routes_start))
        record = build(run, lost, piece=piece, beside=beside, stored=missing_SLK, changes={"checksum": None})
        record = replace(record, attributes={**record.attributes, "quarantined": "true"}, checksum=None)
        return record if layers is None else record.select(layers)
    except (DataError, FormatError):
        return None


def _one_row(row: Row) -> bytes:
    """The record's row of the table as an Arrow IPC stream: what ``Quarantine.raw`` promises, without the rows."""
    table = pq.read_table(pa.BufferReader(encode_rows([row])))
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()
