"""One producer and one consumer over a two-way connection: an Arrow stream one way, acknowledgements the other.

The stream is the format's, byte for byte; an abort is a zero-row batch marked so. The other way go pairs of u64, little
endian: what is meant, and a number (``Note``). The writer holds every record until it is acknowledged. Where bytes run
is a ``Line``'s business: ``sockets`` and ``shared``.
"""

from __future__ import annotations

import contextlib
import enum
import struct
from collections import deque
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import pyarrow as pa

from routeplane.errors import DataError, ErrorKind, FormatError, TransportError, TruncatedError
from routeplane.record.policy import ReadPolicy
from routeplane.record.record import RecordKey, RouteRecord
from routeplane.stream.blocks import trailer_batch
from routeplane.stream.ipc import IpcReader, IpcWriter

if TYPE_CHECKING:
    from routeplane.record.schema import Encoding
    from routeplane.record.spec import RouteSpec
    from routeplane.stream.addresses import Acknowledge
    from routeplane.stream.frames import Frame

__all__ = ["ABORTED_KEY", "NOTE", "Back", "ConnectedReader", "ConnectedWriter", "Line", "Note", "Received"]

#: Metadata key of the zero-row batch that a producer sends when it aborts.
ABORTED_KEY = "routeplane.aborted"
#: What goes back to the producer: what is meant, and a number.
NOTE = struct.Struct("<QQ")
# Larger batches gain nothing, and a record of this size travels alone, which spares gathering it into fresh pages.
_BATCH_BYTES = 2 * 2**20


class Note(enum.IntEnum):
    """What a consumer tells its producer."""

    ACKNOWLEDGED = 0  # so many records, from the first of the connection
    ENDED = 1  # the trailer came and agrees; so many records, all acknowledged
    FREE = 2  # the memory at this offset may be written again
    WAITING = 3  # for the next message, after so many


class Line(Protocol):
    """A producer's end of a connection."""

    @property
    def file(self) -> Any:
        """A binary file that takes the stream, message by message: ``flush`` after each."""

    def notes(self, *, wait: bool) -> list[tuple[int, int]]:
        """What came back; with ``wait`` at least one. Raises TransportError where the other side is gone."""

    def publish(self) -> None:
        """Nothing: the trailer was sent."""

    def discard(self) -> None:
        """Close."""

    def close(self) -> None:
        """Close."""


class ConnectedWriter(IpcWriter):
    """The RouteSink of a connection. At most ``max_bytes`` of records are on their way; no more than half of that, or
    2 MiB, is gathered for a batch. ``write``, ``drain`` and ``close`` wait for the consumer."""

    def __init__(self, line: Line, spec: RouteSpec, *, encoding: Encoding, max_bytes: int) -> None:
        super().__init__(line, spec, encoding=encoding, max_bytes=min(_BATCH_BYTES, max(max_bytes // 2, 1)))
        self._line, self._window = line, max_bytes
        self._unacknowledged: deque[RouteRecord] = deque()
        self._bytes = 0
        self._done = 0
        self._ended = False

    @property
    def unacknowledged(self) -> tuple[RouteRecord, ...]:
        """Records that no consumer has acknowledged, oldest first: write them again, on a new stream, after a
        failure. A consumer that did get them knows them by their keys."""
        return tuple(self._unacknowledged)

    def drain(self) -> None:
        """Send what is gathered, and return when everything written is acknowledged. Raises TransportError."""
        self._flush()
        while self._unacknowledged:
            self._hear(wait=True)

    def _put(self, record: RouteRecord) -> None:
        self._unacknowledged.append(record)
        self._bytes += record.nbytes
        super()._put(record)
        self._hear(wait=False)

    def _flush(self) -> None:
        while self._held and self._bytes - self._held_bytes > 0 and self._bytes > self._window:
            self._hear(wait=True)
        super()._flush()
        self._line.file.flush()

    def _hear(self, *, wait: bool) -> bool:
        """Take in what came back; whether anything did."""
        heard = self._line.notes(wait=wait)
        for what, number in heard:
            if what in (Note.ACKNOWLEDGED, Note.ENDED):
                self._let_go(number)
                self._ended = self._ended or what == Note.ENDED
        return bool(heard)

    def _let_go(self, through: int) -> None:
        if through > self._done + len(self._unacknowledged):
            raise FormatError(
                f"expected at most {self._done + len(self._unacknowledged)} records acknowledged, got {through}",
                kind=ErrorKind.SEQUENCE,
            )
        while self._done < through:
            self._bytes -= self._unacknowledged.popleft().nbytes
            self._done += 1

    def _finish(self) -> None:
        """Returns when all is acknowledged: then nothing of it can be lost any more."""
        super()._finish()
        self._line.file.flush()
        try:
            while not self._ended:
                self._hear(wait=True)
        except TransportError:
            if self._unacknowledged:
                raise
            # a consumer that acknowledged everything, and hung up before it came to the end, has lost nothing
        self._line.close()

    def _fail(self) -> None:
        self._held = []
        # a consumer that died may have acknowledged more than was heard
        with contextlib.suppress(TransportError):
            while self._hear(wait=False):
                pass
        self._line.discard()

    def _discard(self) -> None:
        self._held = []
        try:
            if self._ipc is not None:
                schema = self._schema()
                self._ipc.write_batch(trailer_batch(schema), custom_metadata={ABORTED_KEY: "1"})
                self._line.file.flush()
        except (OSError, pa.ArrowException):
            # the connection is what failed: a consumer is told by its end
            pass
        finally:
            self._line.discard()


class Received:
    """What a consumer has acknowledged, over all connections: what a producer sends again is known by its key."""

    def __init__(self, *, keys: Mapping[RecordKey, int] | None = None) -> None:
        self.checksums: dict[RecordKey, int] = dict(keys or {})

    def has(self, record: RouteRecord) -> bool:
        """Whether this very record was acknowledged. Raises DataError for another under the same key."""
        known = self.checksums.get(record.key)
        if known is not None and known != record.checksum:
            raise DataError(f"expected each record once, got {record.key} twice", kind=ErrorKind.DUPLICATE_KEY)
        return known is not None


class ConnectedReader(IpcReader):
    """The RouteSource of a connection. ``repeated``: records that came again and were not yielded."""

    def __init__(
        self,
        frames: Iterator[Frame],
        policy: ReadPolicy,
        *,
        back: Back,
        received: Received,
        acknowledge: Acknowledge,
    ) -> None:
        super().__init__(frames, policy, walkable=False)
        self._back, self._received = back, received
        self._automatic = acknowledge == "auto"
        self._yielded: dict[RecordKey, int] = {}
        self.repeated = 0

    def acknowledge(self) -> None:
        """Done with every record that was yielded: the producer may forget it."""
        self._received.checksums.update(self._yielded)
        self._yielded = {}
        ended = self._report.complete
        self._back.tell(Note.ENDED if ended else Note.ACKNOWLEDGED, self._counter.trailer().records)

    def close(self) -> None:
        """Hang up: a producer that is not done is told. Records already yielded stay valid."""
        super().close()
        self._back.close()

    def _arrive(self) -> Iterator[RouteRecord]:
        try:
            yield from super()._arrive()
            if self._automatic and self._report.complete:
                self.acknowledge()
        except TruncatedError as error:
            if error.kind is ErrorKind.ABORTED:
                raise
            raise TruncatedError(
                f"{error.message}: the producer is gone, or the connection was cut. Let it write again what is "
                "unacknowledged, and open a stream for that; nothing that was acknowledged comes twice",
                kind=ErrorKind.PRODUCER_LOST,
            ) from error

    def _batch(self, frame: Frame) -> pa.RecordBatch:
        if ABORTED_KEY in frame.metadata:
            raise TruncatedError(
                "expected a producer that closes, got one that aborted: what came is not the whole",
                kind=ErrorKind.ABORTED,
            )
        return super()._batch(frame)

    def _batch_records(self, batch: pa.RecordBatch) -> Iterator[RouteRecord]:
        for record in super()._batch_records(batch):
            if self._received.has(record):
                self.repeated += 1
                continue
            self._yielded[record.key] = record.checksum
            yield record
        if self._automatic:
            self.acknowledge()


class Back(Protocol):
    """A consumer's way back to its producer."""

    def tell(self, what: int, number: int) -> None:
        """Send a note; a producer that is gone is no error here, for the stream itself says so."""

    def close(self) -> None:
        """Hang up."""
