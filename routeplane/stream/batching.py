"""Records gathered into Arrow batches on their way out, whatever container takes the batches.

Owns what is held and when it is written, and the trailer's counts. Encoding is ``columns``; knows no frames, no files.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from routeplane.errors import DataError, ErrorKind
from routeplane.record.codec import column_types, write_batch
from routeplane.record.schema import Encoding, arrow_schema
from routeplane.record.transfer import RecordWriter
from routeplane.stream.trailer import TrailerCounter

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pyarrow as pa

    from routeplane.record.record import RouteRecord
    from routeplane.record.spec import RouteSpec

__all__ = ["DEFAULT_MAX_BYTES", "BatchWriter"]

#: Payload bytes a writer holds before it writes a batch: framing costs nothing at this size, and memory little.
DEFAULT_MAX_BYTES = 32 * 2**20
# Arrow implementations exist that count the values of a batch in 32 bits (arrow-rs#5901); ours stay below.
_MAX_VALUES = 2**31 - 1


class BatchWriter(RecordWriter):
    """A RouteSink that holds records up to ``max_bytes`` of payload and writes them as one Arrow batch.

    Owns what is held, the token columns that all records of one stream share, and the trailer's counts; where a batch
    goes is the subclass's.
    """

    def __init__(self, spec: RouteSpec, *, encoding: Encoding, max_bytes: int) -> None:
        super().__init__(spec, max_bytes=max_bytes)
        self._encoding: Encoding = encoding
        self._counter = TrailerCounter(spec, encoding)
        self._held: list[RouteRecord] = []
        self._held_bytes = self._held_values = 0
        self._columns: tuple[tuple[str, pa.DataType], ...] | None = None

    def _check(self, record: RouteRecord) -> None:
        columns = column_types(record)
        if self._columns is not None and columns != self._columns:
            raise DataError(
                f"expected token columns {self._columns}, got {columns} @ sample {record.key}",
                kind=ErrorKind.TOKEN_COLUMN,
            )

    def _put(self, record: RouteRecord) -> None:
        values = record.stored_routes.size  # not ``routes``, which would widen narrow rows to count them
        if self._held and self._held_values + values > _MAX_VALUES:
            self._flush()
        self._columns = column_types(record)
        self._held.append(record)
        self._held_bytes += record.nbytes
        self._held_values += values
        if self._held_bytes >= self._max_bytes:
            self._flush()

    def _flush(self) -> None:
        """Write the held records as one batch, if any."""
        if self._held:
            self._write(self._held, write_batch(self._held, self._spec, encoding=self._encoding))
            self._held, self._held_bytes, self._held_values = [], 0, 0

    def _write(self, records: Sequence[RouteRecord], batch: pa.RecordBatch) -> None:
        self._send(batch)
        self._counter.add_batch()
        for record in records:
            self._counter.add_record(record.checksum, record.num_tokens)

    @abstractmethod
    def _send(self, batch: pa.RecordBatch) -> None:
        """Write one batch, under ``_schema()``."""

    def _schema(self) -> pa.Schema:
        return arrow_schema(self._spec, self._encoding, columns=self._columns or ())
