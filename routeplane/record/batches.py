"""Records to Arrow batches and back: gathering and the trailer on the way out, checks and quarantine on the way in.

Encoding is ``record.codec``; knows no frames and no files.
"""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import xxhash

from routeplane.errors import DataError, ErrorKind, FormatError
from routeplane.record.codec import (
    MAX_BATCH_VALUES,
    column_types,
    counted_values,
    read_records,
    require_version,
    salvage,
    write_batch,
)
from routeplane.record.parse import check_count
from routeplane.record.policy import Quarantine, ReadPolicy
from routeplane.record.record import RecordKey, RouteRecord
from routeplane.record.schema import FORMAT_VERSION, Encoding, StreamHeader, arrow_schema, check_version
from routeplane.record.transfer import RecordWriter

if TYPE_CHECKING:
    from routeplane.record.aligned import ColumnType
    from routeplane.record.spec import RouteSpec

__all__ = [
    "DEFAULT_MAX_BYTES",
    "TRAILER_KEY",
    "BatchRecords",
    "BatchWriter",
    "Trailer",
    "TrailerCounter",
    "decoded",
    "one_row",
    "trailer_batch",
]

#: Payload bytes a writer holds before it writes a batch: framing costs nothing at this size, and memory little.
DEFAULT_MAX_BYTES = 32 * 2**20

#: Metadata key of the zero-row batch that ends a stream.
TRAILER_KEY = "routeplane.trailer"

_DIGEST = re.compile("[0-9a-f]{16}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Trailer:
    """What a complete stream held. An Arrow stream cut at a batch boundary reads as complete; one of ours does not."""

    batches: int
    records: int
    tokens: int
    digest: int

    def to_json(self) -> str:
        """Canonical JSON; the digest as 16 hex digits."""
        document = {
            "batches": self.batches,
            "digest": f"{self.digest:016x}",
            "records": self.records,
            "tokens": self.tokens,
        }
        return json.dumps(document, sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Trailer:
        """Parse what ``to_json`` wrote. Raises FormatError."""
        try:
            document: Any = json.loads(text)
            counts = {name: check_count(document[name], name, below=2**63) for name in ("batches", "records", "tokens")}
            digits = document["digest"]
            if set(document) != {*counts, "digest"} or not _DIGEST.fullmatch(digits):
                raise ValueError("other keys, or a digest that is not 16 hex digits")
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise FormatError(
                f"expected a trailer as JSON, got {text[:120]!r} ({error})", kind=ErrorKind.TRAILER
            ) from None
        return cls(**counts, digest=int(digits, 16))


class TrailerCounter:
    """Counts and digests what passes; both ends run one and must agree.

    Digest: xxh3-64 over format, spec and encoding (each as u64 length and bytes), then the record checksums as u64 in
    order.
    """

    def __init__(self, spec: RouteSpec, encoding: Encoding, *, version: str = FORMAT_VERSION) -> None:
        self._hash = xxhash.xxh3_64()
        for text in (version, spec.to_json(), encoding):
            data = text.encode()
            self._hash.update(len(data).to_bytes(8, "little") + data)
        self._batches = self._records = self._tokens = 0

    def add_batch(self) -> None:
        """Count one batch."""
        self._batches += 1

    def add_record(self, checksum: int, tokens: int) -> None:
        """Count one record; ``checksum`` as it stands in the stream."""
        self._hash.update(checksum.to_bytes(8, "little"))
        self._records += 1
        self._tokens += tokens

    def trailer(self) -> Trailer:
        """The trailer for what passed so far."""
        return Trailer(batches=self._batches, records=self._records, tokens=self._tokens, digest=self._hash.intdigest())

    def check(self, declared: Trailer) -> None:
        """Raise FormatError unless exactly what ``declared`` counts has passed."""
        found = self.trailer()
        if found != declared:
            raise FormatError(f"expected what the trailer counts, {declared}, got {found}", kind=ErrorKind.TRAILER)


class BatchWriter(RecordWriter):
    """A RouteSink that holds records up to ``max_bytes`` of payload and writes them as one Arrow batch.

    Owns what is held, the token columns that all records of one stream share, and the trailer's counts; where a batch
    goes is the subclass's.
    """

    def __init__(
        self,
        spec: RouteSpec,
        *,
        encoding: Encoding,
        max_bytes: int,
        max_keys: int | None = None,
        version: str = FORMAT_VERSION,
    ) -> None:
        check_version(version, spec=spec)
        super().__init__(spec, max_bytes=max_bytes, max_keys=max_keys)
        self._encoding: Encoding = encoding
        self._version = version
        self._counter = TrailerCounter(spec, encoding, version=version)
        self._held: list[RouteRecord] = []
        self._held_bytes = 0
        self._held_values: Counter[str] = Counter()
        self._columns: tuple[tuple[str, ColumnType], ...] | None = None
        #: What ``write_batch`` did not copy, where the subclass writes it from where it lies.
        self._scattered: dict[tuple[int, int], list[Any]] | None = None

    def _check(self, record: RouteRecord) -> None:
        require_version(record, self._version)
        columns = column_types(record)
        if self._columns is not None and columns != self._columns:
            raise DataError(
                f"expected token columns {self._columns}, got {columns} @ sample {record.key}",
                kind=ErrorKind.TOKEN_COLUMN,
            )
        for name, values in counted_values(record).items():
            if values > MAX_BATCH_VALUES and name in record.columns:
                raise DataError(
                    f"expected at most {MAX_BATCH_VALUES} values in the lists of {name!r}, got {values} @ sample "
                    f"{record.key}",
                    kind=ErrorKind.TOKEN_COLUMN,
                )

    def _put(self, record: RouteRecord) -> None:
        values = counted_values(record)
        if self._held and any(self._held_values[name] + values[name] > MAX_BATCH_VALUES for name in values):
            self._flush()
        self._columns = column_types(record)
        self._held.append(record)
        self._held_bytes += record.nbytes
        self._held_values.update(values)
        if self._held_bytes >= self._max_bytes:
            self._flush()

    def _flush(self) -> None:
        """Write the held records as one batch, if any."""
        if self._held:
            self._send(
                write_batch(
                    self._held,
                    self._spec,
                    encoding=self._encoding,
                    version=self._version,
                    scattered=self._scattered,
                )
            )
            self._counter.add_batch()
            for record in self._held:
                self._counter.add_record(record.checksum, len(record.token_ids))
            self._held, self._held_bytes, self._held_values = [], 0, Counter()

    @abstractmethod
    def _send(self, batch: pa.RecordBatch) -> None:
        """Write one batch, under ``_schema()``."""

    def _schema(self) -> pa.Schema:
        return arrow_schema(self._spec, self._encoding, columns=self._columns or (), version=self._version)


def trailer_batch(schema: pa.Schema) -> pa.RecordBatch:
    """The zero-row batch whose custom metadata is the trailer."""
    # schema.empty_table() fails on large_list<fixed_shape_tensor> (pyarrow 26); nulls of length 0 do not
    return pa.RecordBatch.from_arrays([pa.nulls(0, field.type) for field in schema], schema=schema)


class BatchRecords:
    """Checks the records of one stream's batches; bad ones are raised, or go to the quarantine."""

    def __init__(self, header: StreamHeader, *, policy: ReadPolicy, quarantine: Quarantine) -> None:
        self._header, self._policy, self._quarantine = header, policy, quarantine
        self._keys: set[RecordKey] = set()
        self._position = 0

    def records(
        self,
        batch: pa.RecordBatch,
        *,
        select: RouteSpec | None = None,
        seen: Callable[[int, int], None] | None = None,
        threads: int = 1,
    ) -> Iterator[RouteRecord]:
        """The records of one validated batch; ``seen`` is told the checksum and tokens of each as they stand there.

        ``threads``: as in ``ReadPolicy``.
        ``select``: where whole records are not to be verified, the layers that alone are copied and checked.
        Raises DataError for a bad record unless the policy is to quarantine it.
        """
        checksums = batch.column("checksum").to_pylist()
        tokens = batch.column("token_ids").value_lengths().to_pylist()
        alarms = self._policy.on_alarm != "ignore"
        reads = read_records(
            batch, self._header, verify=self._policy.verify, select=select, alarms=alarms, threads=threads
        )
        for index, read in enumerate(reads):
            if seen is not None:
                seen(checksums[index], tokens[index])
            error = read if isinstance(read, DataError) else self._note(read)
            if error is not None and self._policy.on_corrupt == "raise":
                raise error
            record = read if error is None else self._set_aside(batch, index, error)
            self._position += 1
            if isinstance(record, RouteRecord):
                yield record

    def _note(self, record: RouteRecord) -> DataError | None:
        """Remember a record's key; what is wrong where it came before."""
        key, count = record.key, len(self._keys)
        self._keys.add(key)
        if len(self._keys) > count:
            return None
        return DataError(f"expected each record once, got {key} twice", kind=ErrorKind.DUPLICATE_KEY)

    def _set_aside(self, batch: pa.RecordBatch, index: int, error: DataError) -> RouteRecord | None:
        """Keep the bytes, count, and give what can stand in: the record without its rows, or nothing."""
        kept = salvage(batch, index, header=self._header)
        if kept is not None and self._note(kept) is not None:
            kept = None
        self._quarantine.add(
            one_row(batch, index),
            index=self._position,
            key=RecordKey(*(batch.column(name)[index].as_py() for name in RecordKey._fields)),
            error=error,
            yielded=kept is not None,
        )
        return kept


def decoded(work: Callable[[], Any], what: str) -> Any:
    """Run a pyarrow decoder over bytes from outside; whatever it objects to is a damaged stream: FormatError."""
    try:
        return work()
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError, OverflowError) as error:
        raise FormatError(
            f"expected a valid Arrow {what}, got a damaged one: {error}", kind=ErrorKind.CORRUPT_BATCH
        ) from error


def one_row(batch: pa.RecordBatch, index: int) -> bytes:
    """A row as an Arrow IPC stream of its own; a slice would keep, and pickle, the whole batch."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch.take(pa.array([index])))
    return bytes(sink.getvalue().to_pybytes())
