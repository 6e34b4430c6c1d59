"""An archive as a mapping from keys to records, and as a source that trainers iterate.

``Archive`` pins the commit that was newest when it was opened: what is appended later is seen by opening again. Knows
how records are found (``catalog``) and put together (``assemble``); decides what is done with damaged ones.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from routeplane.archive.assemble import Piece, build, read_record, read_rows, token_ranges
from routeplane.archive.catalog import Catalog, Run
from routeplane.archive.table import Row, encode_rows
from routeplane.errors import DataError, FormatError, refused
from routeplane.record.coverage import Coverage, lose_rows
from routeplane.record.policy import ReadPolicy
from routeplane.record.record import RecordKey, RouteRecord
from routeplane.record.transfer import RecordReader

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from routeplane.archive.manifest import RunEntry
    from routeplane.record.spec import RouteSpec

__all__ = ["Archive", "ArchiveReader"]


class Archive(Mapping[RecordKey, RouteRecord]):
    """The records of one commit. Made by ``open_archive``; holds no file open, and needs no closing.

    A mapping: ``archive[key]`` reads one record (a plain ``(sample_id, attempt, segment)`` is a key too), verified by
    its checksum; iteration gives keys in the order of saving, and reads the record tables alone.

    Raises, while reading: FormatError (LOST_FILE, CORRUPT_CHUNK, MANIFEST) for what was damaged, DataError for a record
    that is not what it was.
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

    def attributes(self, run: str) -> Mapping[str, str]:
        """What was said of a run when it was saved. Raises KeyError."""
        for found in self.catalog.runs:
            if found.entry.name == run:
                return found.manifest.attributes
        raise KeyError(run)

    def columns(self, run: str) -> tuple[tuple[str, str], ...]:
        """The token columns of a run's records, as name and numpy's name of the type. Raises KeyError."""
        for found in self.catalog.runs:
            if found.entry.name == run:
                arrays = found.manifest.arrays
                return tuple(
                    (name, str(arrays[f"columns/{index}"].document["data_type"]))
                    for index, name in enumerate(found.manifest.columns)
                )
        raise KeyError(run)

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
        record = read_record(run, row, tokens=tokens, layers=layer_ids)
        return record.verify() if self._policy.verify and record.checksum == row.checksum else record

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
    """The RouteSource of an archive. Iterate once."""

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
            record = read_record(run, row, tokens=tokens, layers=layers)
            whole = tokens is None and layers is None
            return record.verify() if whole and self._policy.verify else record
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
        ranges = token_ranges(run, row, piece=piece)
        record = build(
            run,
            replace(row, captures=lose_rows(row.captures, row.routes_start)),
            piece=piece,
            beside={wanted.array: values for wanted, values in zip(ranges, run.chunks.read(ranges), strict=True)},
            routes=run.spec.missing_rows(piece.last_row - piece.first_row),
            changes={"checksum": None},
        )
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
