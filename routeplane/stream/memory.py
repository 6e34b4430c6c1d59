"""A stream inside one process: records handed from writer threads to reader threads, bounded in bytes.

The plainest brokered transport, and the reference that the others are compared with: no bytes are encoded, everything
else is promised alike.
"""

from __future__ import annotations

import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import pyarrow as pa

from routeplane.errors import ChecksumError, ErrorKind, UsageError
from routeplane.record.codec import write_batch
from routeplane.record.policy import Quarantined, ReadPolicy, StreamReport
from routeplane.record.record import RouteRecord
from routeplane.stream.addresses import SinkOptions, SourceOptions
from routeplane.stream.broker import Broker
from routeplane.stream.brokered import BrokeredReader, BrokeredWriter, Codec
from routeplane.stream.delivery import DEFAULT_GROUP, DeliveryReport
from routeplane.stream.ledger import Ledger

if TYPE_CHECKING:
    from routeplane.record.spec import RouteSpec

__all__ = ["LocalStream", "MemoryReader", "MemoryStream", "MemoryWriter"]


class LocalStream(ABC):
    """A place between ``new_stream`` and ``open_stream`` in one process; what is kept of records is a subclass's."""

    def __init__(self, *, producers: int | None, alone: bool) -> None:
        self._producers, self._alone = producers, alone
        self._changed = threading.Condition()
        self._names: set[str] = set()
        self._made: tuple[Broker, RouteSpec, Codec] | None = None

    @abstractmethod
    def _make(self, spec: RouteSpec, options: SinkOptions) -> tuple[Broker, RouteSpec, Codec]:
        """What the first writer brings about."""

    def new_sink(self, spec: RouteSpec, options: SinkOptions) -> MemoryWriter:
        """A sink of this stream. Raises UsageError for one too many, SpecError for another geometry."""
        with self._changed:
            name = options.producer or f"writer-{len(self._names)}"
            if self._producers is not None and len(self._names | {name}) > self._producers:
                many = "one writer" if self._producers == 1 else f"{self._producers} writers"
                raise UsageError(f"expected {many} of a {type(self).__name__}, got another", kind=ErrorKind.ARGUMENT)
            if self._made is None:
                self._made = self._make(spec, options)
            broker, known, codec = self._made
            known.require_same_geometry(spec, where="another writer of this stream")
            found = MemoryWriter(
                broker,
                spec,
                codec=codec,
                producer=name,
                block_bytes=self._block_bytes(options),
                timeout_s=options.timeout_s,
            )
            self._names.add(name)
            self._changed.notify_all()
        return found

    def _block_bytes(self, options: SinkOptions) -> int:
        """Payload that a writer gathers for a block; one record at least."""
        del options
        return 1

    def open_source(self, policy: ReadPolicy, options: SourceOptions) -> MemoryReader:
        """A source; waits for the first writer to appear."""
        broker, spec, codec = self._wait_made()
        return MemoryReader(broker, spec, codec=codec, policy=policy, options=options, alone=self._alone)

    def _wait_made(self) -> tuple[Broker, RouteSpec, Codec]:
        with self._changed:
            while self._made is None:
                self._changed.wait()
            return self._made

    def disconnect(self, writer: MemoryWriter) -> None:
        """A writer will not write any more, and did not close: its name is free, and its lease runs out."""
        self._wait_made()[0].disconnect(writer.session)

    def retire(self, *, below: int) -> int:
        """Let go of what no weights from ``below`` on sampled, acknowledged or not; how many blocks."""
        return self._wait_made()[0].retire(below=below)

    def seal(self) -> None:
        """No further writer will come."""
        self._wait_made()[0].seal()

    def report(self) -> DeliveryReport:
        """What was delivered and is held; waits for the first writer."""
        return self._wait_made()[0].report()


class MemoryStream(LocalStream):
    """The place between ``new_stream(stream, spec)`` and ``open_stream(stream)``; holds records by reference.

    By default one writer and one reader; a reader that goes before the end tells the writer so. With ``groups`` given,
    each group is given every record once, shared among its readers, and one that goes leaves the rest to the next.
    ``producers``: how many writers end the stream; None: ``seal()`` does. The first one's ``max_bytes`` is the bound.
    ``lease_s``: after so long without a sign of life a writer is lost; never by default, since a process does not lose
    its own threads.
    """

    def __init__(
        self,
        *,
        groups: Sequence[str] | None = None,
        producers: int | None = 1,
        lease_s: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(producers=producers, alone=groups is None)
        self._groups, self._lease_s, self._clock = groups or (DEFAULT_GROUP,), lease_s, clock

    def _make(self, spec: RouteSpec, options: SinkOptions) -> tuple[Broker, RouteSpec, Codec]:
        ledger = Ledger(
            max_bytes=options.max_bytes,
            groups=self._groups,
            producers=self._producers,
            lease_s=self._lease_s,
            clock=self._clock,
        )
        return Broker(ledger), spec, _Records()


class MemoryWriter(BrokeredWriter):
    """The RouteSink of a MemoryStream."""


class MemoryReader(BrokeredReader):
    """The RouteSource of a stream in this process. Of a MemoryStream it yields the writers' own (immutable) records,
    verified again."""

    def __init__(
        self,
        broker: Broker,
        spec: RouteSpec,
        *,
        codec: Codec,
        policy: ReadPolicy,
        options: SourceOptions,
        alone: bool,
    ) -> None:
        super().__init__(broker, spec, policy=policy, codec=codec, options=options)
        self._broker, self._alone = broker, alone

    def close(self) -> None:
        """Leave. A writer whose only reader this was, and that waits for room, is told that no one will read."""
        super().close()
        if self._alone:
            self._broker.shut("left by its reader")


class _Records:
    """Payloads are the records themselves."""

    def encode(self, records: Sequence[RouteRecord]) -> tuple[tuple[RouteRecord, ...], int]:
        return tuple(records), sum(record.nbytes for record in records)

    def open(self, payload: tuple[RouteRecord, ...], policy: ReadPolicy) -> _Checked:
        return _Checked(payload, policy)


class _Checked:
    """Records verified one by one; under ``quarantine`` a damaged one is replaced by one without its rows."""

    def __init__(self, records: tuple[RouteRecord, ...], policy: ReadPolicy) -> None:
        self._records, self._policy = records, policy
        self._report = StreamReport()

    def __iter__(self) -> Iterator[RouteRecord]:
        for index, record in enumerate(self._records):
            try:
                yield record.verify() if self._policy.verify else record
            except ChecksumError as error:
                if self._policy.on_corrupt == "raise":
                    raise
                yield self._set_aside(index, record, error)

    def _set_aside(self, index: int, record: RouteRecord, error: ChecksumError) -> RouteRecord:
        found = Quarantined(index=index, key=record.key, error=error, raw=_one_row(record), yielded=True)
        self._report = replace(self._report, quarantined=(*self._report.quarantined, found))
        bare = record.without_routes()
        return replace(bare, attributes={**bare.attributes, "quarantined": "true"}, checksum=None)

    def report(self) -> StreamReport:
        return self._report


def _one_row(record: RouteRecord) -> bytes:
    batch = write_batch([record], record.spec, encoding="plain")
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue().to_pybytes())
