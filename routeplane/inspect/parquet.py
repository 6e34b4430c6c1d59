"""Records as Parquet, one row each, under the schema of a stream: for tables, SQL and whoever reads no Arrow stream.

Owns the file: row groups of bounded size, page checksums, and the trailer in the footer's metadata. What a row means,
and whether it is legal, is ``columns`` and ``record``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from routeplane.errors import DataError, ErrorKind, FormatError
from routeplane.record.codec import read_records
from routeplane.record.policy import ReadPolicy
from routeplane.record.record import RouteRecord
from routeplane.record.schema import Encoding, StreamHeader, parse_schema
from routeplane.record.transfer import RecordReader
from routeplane.stream.batching import DEFAULT_MAX_BYTES, TRAILER_KEY, BatchWriter, Trailer, TrailerCounter
from routeplane.stream.files import Target

if TYPE_CHECKING:
    import os

    from routeplane.record.spec import RouteSpec

__all__ = ["ParquetReader", "ParquetWriter"]


class ParquetWriter(BatchWriter):
    """The RouteSink of one Parquet file; the target is its until ``close`` or ``abort``."""

    def __init__(
        self, target: Target, spec: RouteSpec, *, encoding: Encoding, max_bytes: int = DEFAULT_MAX_BYTES
    ) -> None:
        super().__init__(spec, encoding=encoding, max_bytes=max_bytes)
        self._target = target
        self._file: Any = None

    def _send(self, batch: pa.RecordBatch) -> None:
        self._writer().write_batch(batch, row_group_size=batch.num_rows)

    def _writer(self) -> Any:
        if self._file is None:
            self._file = pq.ParquetWriter(
                self._target.file,
                self._schema(),
                compression="zstd",
                compression_level=1,
                use_dictionary=False,
                write_page_checksum=True,
            )
        return self._file

    def _finish(self) -> None:
        self._flush()
        writer = self._writer()
        writer.add_key_value_metadata({TRAILER_KEY: self._counter.trailer().to_json()})
        writer.close()
        self._target.publish()

    def _discard(self) -> None:
        self._held = []
        if self._file is not None:
            self._file.is_open = False  # else it would write a footer when it is collected, into a closed file
        self._target.discard()


class ParquetReader(RecordReader):
    """The RouteSource of one Parquet file that ``ParquetWriter`` wrote. Holds one row group."""

    def __init__(self, path: str | os.PathLike[str], *, policy: ReadPolicy) -> None:
        self._where = str(path)
        with open(path, "rb"):
            pass  # the system's own error for what is no file or may not be read, of which pyarrow's says no kind
        self._file: Any = self._decode(
            lambda: pq.ParquetFile(path, page_checksum_verification=True, arrow_extensions_enabled=True)
        )
        schema = self._decode(lambda: self._file.schema_arrow)
        self._header: StreamHeader = parse_schema(schema)
        self._declared = self._trailer()
        super().__init__(self._header.spec, policy)

    @property
    def digest(self) -> str:
        """The trailer's digest as 16 hex digits."""
        return f"{self._declared.digest:016x}"

    @property
    def total_records(self) -> int:
        """Records of the file."""
        return self._declared.records

    def close(self) -> None:
        """Close the file."""
        super().close()
        self._file.close()

    def _trailer(self) -> Trailer:
        found = self._decode(lambda: self._file.metadata.metadata or {})
        key = TRAILER_KEY.encode()
        if key not in found:
            raise FormatError(
                f"expected the metadata {TRAILER_KEY}, got none @ {self._where}",
                kind=ErrorKind.NOT_ROUTEPLANE,
            )
        return Trailer.from_json(found[key].decode("utf-8", "replace"))

    def _arrive(self) -> Iterator[RouteRecord]:
        counter = TrailerCounter(self._header.spec, self._header.encoding, version=self._header.version)
        for index in range(self._file.num_row_groups):
            counter.add_batch()
            for batch in self._decode(lambda index=index: self._batches(index)):  # type: ignore[misc]
                for read in read_records(batch, self._header):
                    if isinstance(read, DataError):
                        raise read
                    counter.add_record(read.checksum, read.num_tokens)
                    yield read.verify() if self._policy.verify else read
        counter.check(self._declared)

    def _batches(self, index: int) -> list[pa.RecordBatch]:
        batches: list[pa.RecordBatch] = self._file.read_row_group(index).combine_chunks().to_batches()
        for batch in batches:
            batch.validate(full=True)
        return batches

    def _decode(self, work: Callable[[], Any]) -> Any:
        """Run a pyarrow decoder over bytes from outside; whatever it objects to is a damaged file."""
        try:
            return work()
        except (pa.ArrowException, OSError, ValueError, KeyError, TypeError, OverflowError) as error:
            if getattr(error, "errno", None) is not None:
                raise  # the system's own; pyarrow's for a damaged file have none
            raise FormatError(
                f"expected a whole Parquet file, got a damaged one: {error} @ {self._where}",
                kind=ErrorKind.CORRUPT_BATCH,
            ) from error
