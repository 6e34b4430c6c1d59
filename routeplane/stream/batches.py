"""The records of validated Arrow batches, checked one by one under a read policy, whatever carried the batches.

Owns what becomes of a bad record: raised, or set aside with its bytes. Knows no frames and no trailer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import pyarrow as pa

from routeplane.errors import DataError, ErrorKind, FormatError
from routeplane.record.codec import read_records, salvage
from routeplane.record.policy import Quarantined, ReadPolicy, StreamReport
from routeplane.record.record import RecordKey, RouteRecord
from routeplane.record.schema import StreamHeader
from routeplane.record.spec import RouteSpec

__all__ = ["BatchRecords", "RecordsOfBatches", "decoded"]


class BatchRecords:
    """Checks the records of one stream's batches. ``quarantined``: what was set aside so far, in order."""

    def __init__(self, header: StreamHeader, policy: ReadPolicy) -> None:
        self._header, self._policy = header, policy
        self._keys: set[RecordKey] = set()
        self._position = 0
        self.quarantined: tuple[Quarantined, ...] = ()

    def records(
        self,
        batch: pa.RecordBatch,
        *,
        select: RouteSpec | None = None,
        seen: Callable[[int, int], None] | None = None,
    ) -> Iterator[RouteRecord]:
        """The records of one validated batch; ``seen`` is told the checksum and tokens of each as they stand there.

        ``select``: where nobody asks for whole records to be verified, the layers that alone are copied and checked.
        Raises DataError for a bad record unless the policy is to quarantine it.
        """
        checksums = batch.column("checksum").to_pylist()
        tokens = batch.column("token_ids").value_lengths().to_pylist()
        reads = read_records(batch, self._header, verify=self._policy.verify, select=select)
        for index, read in enumerate(reads):
            if seen is not None:
                seen(checksums[index], tokens[index])
            error = read if isinstance(read, DataError) else self._fault(read)
            if error is not None and self._policy.on_corrupt == "raise":
                raise error
            record = read if error is None else self._set_aside(batch, index, error)
            self._position += 1
            if isinstance(record, RouteRecord):
                self._keys.add(record.key)
                yield record

    def _fault(self, record: RouteRecord) -> DataError | None:
        if record.key in self._keys:
            return DataError(f"expected each record once, got {record.key} twice", kind=ErrorKind.DUPLICATE_KEY)
        return None

    def _set_aside(self, batch: pa.RecordBatch, index: int, error: DataError) -> RouteRecord | None:
        """Keep the bytes, count, and give what can stand in: the record without its rows, or nothing."""
        kept = salvage(batch, index, header=self._header)
        if kept is not None and kept.key in self._keys:
            kept = None
        item = Quarantined(
            index=self._position,
            key=RecordKey(*(batch.column(name)[index].as_py() for name in RecordKey._fields)),
            error=error,
            raw=_one_row(batch, index),
            yielded=kept is not None,
        )
        self.quarantined = (*self.quarantined, item)
        return kept


class RecordsOfBatches:
    """The records of batches that came decoded, each validated in full before a buffer of it is viewed."""

    def __init__(self, batches: Iterable[pa.RecordBatch], header: StreamHeader, *, policy: ReadPolicy) -> None:
        self._batches = batches
        self._records = BatchRecords(header, policy)
        self._count = 0

    def __iter__(self) -> Iterator[RouteRecord]:
        for batch in self._batches:
            decoded(lambda batch=batch: batch.validate(full=True), "record batch")  # type: ignore[misc]
            self._count += 1
            yield from self._records.records(batch)

    def report(self) -> StreamReport:
        """Batches and quarantined records."""
        return replace(StreamReport(), batches=self._count, quarantined=self._records.quarantined)


def decoded(work: Callable[[], Any], what: str) -> Any:
    """Run a pyarrow decoder over bytes from outside; whatever it objects to is a damaged stream: FormatError."""
    try:
        return work()
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError, OverflowError) as error:
        raise FormatError(
            f"expected a valid Arrow {what}, got a damaged one: {error}", kind=ErrorKind.CORRUPT_BATCH
        ) from error


def _one_row(batch: pa.RecordBatch, index: int) -> bytes:
    """A row as an Arrow IPC stream of its own; a slice would keep, and pickle, the whole batch."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch.take(pa.array([index])))
    return bytes(sink.getvalue().to_pybytes())
