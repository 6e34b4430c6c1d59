"""Records gathered into Arrow batches on their way out, whatever container takes the batches.

Owns what is held and when it is written, and the trailer's counts. Encoding is ``columns``; knows no frames, no files.
"""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import xxhash

from routeplane.errors import DataError, ErrorKind, FormatError
from routeplane.record.codec import column_types, write_batch
from routeplane.record.parse import check_count
from routeplane.record.schema import FORMAT_VERSION, Encoding, arrow_schema
from routeplane.record.transfer import RecordWriter

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pyarrow as pa

    from routeplane.record.record import RouteRecord
    from routeplane.record.spec import RouteSpec

__all__ = ["DEFAULT_MAX_BYTES", "TRAILER_KEY", "BatchWriter", "Trailer", "TrailerCounter"]

#: Payload bytes a writer holds before it writes a batch: framing costs nothing at this size, and memory little.
DEFAULT_MAX_BYTES = 32 * 2**20
# Arrow implementations exist that count the values of a batch in 32 bits (arrow-rs#5901); ours stay below.
_MAX_VALUES = 2**31 - 1


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
