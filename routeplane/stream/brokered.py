"""Writing to, and reading from, a ledger that may be elsewhere: the ends of every brokered transport.

A transport gives a port (its way to the broker) and a codec (what a block's payload is). Everything promised about
order, acknowledgement, sending again, ends and counts happens here, once.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from routeplane.errors import ErrorKind, RouteplaneError, TransportError, TruncatedError, UsageError, refused
from routeplane.record.record import RouteRecord
from routeplane.record.transfer import RecordReader, RecordWriter
from routeplane.stream.delivery import Block, Outbox, Session

if TYPE_CHECKING:
    from routeplane.record.policy import ReadPolicy, StreamReport
    from routeplane.record.spec import RouteSpec
    from routeplane.stream.addresses import SourceOptions
    from routeplane.stream.broker import ConsumerPort, ProducerPort
    from routeplane.stream.delivery import Membership, Progress

__all__ = ["BlockReader", "BrokeredReader", "BrokeredWriter", "Codec"]

#: ``auto``: a block is acknowledged when the record behind its last one is asked for; ``manual``: by ``acknowledge()``.

# Outboxes are bounded by the broker, which holds the same blocks: none of their own.
_UNBOUNDED = 2**62


class BlockReader(Protocol):
    """The records of one block, checked under a policy, and what was seen. An ``IpcReader`` is one."""

    def __iter__(self) -> Iterator[RouteRecord]: ...

    def report(self) -> StreamReport:
        """What was read so far; of its counts ``batches`` and ``quarantined`` are used."""


class Codec(Protocol):
    """What the payload of a transport's blocks is."""

    def encode(self, records: Sequence[RouteRecord]) -> tuple[Any, int]:
        """A payload, and how many bytes it takes where it is kept."""

    def open(self, payload: Any, policy: ReadPolicy) -> BlockReader:
        """The records of a payload. Alarms and selection are not its business."""


class BrokeredWriter(RecordWriter):
    """The RouteSink of a producer. Records are held up to ``block_bytes`` and put as one block.

    Where the way to the broker fails it is taken again, up to ``retries`` times per block, and what was not
    acknowledged is sent again; the broker knows what it has. ``linger``: ``close`` returns when nothing can be lost any
    more, that is, when all was acknowledged.
    """

    def __init__(
        self,
        port: ProducerPort,
        spec: RouteSpec,
        *,
        codec: Codec,
        producer: str,
        block_bytes: int,
        timeout_s: float | None = None,
        retries: int = 0,
        linger: bool = False,
    ) -> None:
        super().__init__(spec, max_bytes=block_bytes)
        self._port, self._codec, self._producer = port, codec, producer
        self._timeout_s, self._retries, self._linger = timeout_s, retries, linger
        self._held: list[RouteRecord] = []
        self._held_bytes = 0
        self._session: Session = port.attach(producer)
        # an earlier process may have sent some under this name
        first, before = self._session.next_sequence, self._session.totals
        self._outbox = Outbox(max_bytes=_UNBOUNDED, first=first, before=before)

    @property
    def unacknowledged(self) -> tuple[Block, ...]:
        """Blocks that are lost where the broker is: send their records again, on a new stream, after a failure."""
        return self._outbox.pending

    @property
    def session(self) -> Session:
        """The session as the broker told it last."""
        return self._session

    def heartbeat(self) -> None:
        """A sign of life, for producers that are silent for longer than the lease. From any thread."""
        self._port.heartbeat(self._session)

    def flush(self) -> None:
        """Put what is held as a block. Raises as ``write``."""
        if self._held:
            payload, nbytes = self._codec.encode(self._held)
            block = Block.of(
                self._held, producer=self._producer, sequence=self._outbox.next_sequence, payload=payload, nbytes=nbytes
            )
            self._outbox.add(block)
            self._held, self._held_bytes = [], 0
            self._send()

    def _check(self, record: RouteRecord) -> None:
        """Nothing beyond the rest."""

    def _put(self, record: RouteRecord) -> None:
        self._held.append(record)
        self._held_bytes += record.nbytes
        if self._held_bytes >= self._max_bytes:
            self.flush()

    def _send(self, then: Callable[[], None] = lambda: None) -> None:
        """Put what the broker does not have, and then the rest; over a new session where the old one broke."""
        broken: RouteplaneError | None = None
        for attempt in range(self._retries + 1):
            try:
                if broken is not None:
                    self._session = self._again(broken)
                for block in self._outbox.unsent(self._session.next_sequence):
                    self._session = self._port.put(self._session, block, timeout_s=self._timeout_s)
                self._outbox.acknowledge(self._session.acknowledged)
                then()
                return
            except (TransportError, UsageError) as error:
                if error.kind not in (ErrorKind.CONNECTION, ErrorKind.FENCED) or attempt == self._retries:
                    raise
                if error is broken:
                    raise
                broken = error

    def _again(self, broken: RouteplaneError) -> Session:
        """Another session. A broker that was made anew does not know the old one either, but lets this one begin."""
        try:
            return self._port.attach(self._producer, first=self._outbox.acknowledged, before=self._outbox.before)
        except UsageError:
            raise broken from None  # somebody else goes on under this name

    def _finish(self) -> None:
        self.flush()
        self._send(self._end)
        # block by block: consumers may take days, and a way that breaks once a day is no way that fails
        while self._linger and self._outbox.pending:
            self._send(self._end)

    def _end(self) -> None:
        self._port.close(self._session, totals=self._outbox.totals)
        if self._linger:
            through = min(self._outbox.acknowledged + 1, self._outbox.next_sequence)
            session = self._port.wait_acknowledged(self._session, through=through, timeout_s=self._timeout_s)
            self._outbox.acknowledge(session.acknowledged)

    def _fail(self) -> None:
        self._held = []
        self._say(self._port.disconnect)

    def _discard(self) -> None:
        self._held = []
        self._say(self._port.abort)

    def _say(self, last: Callable[[Session], None]) -> None:
        """A last word, once more where the way broke meanwhile: unsaid, the name is taken until the lease runs out."""
        for _ in range(2):
            try:
                return last(self._session)
            except (TransportError, UsageError) as error:
                # The broker is gone, or took this producer for lost: consumers are told so without us.
                if error.kind is not ErrorKind.CONNECTION:
                    return None
        return None


class BrokeredReader(RecordReader):
    """The RouteSource of a consumer in a group. ``cursor`` is what to give to ``open_stream`` after a restart."""

    def __init__(
        self,
        port: ConsumerPort,
        spec: RouteSpec,
        *,
        policy: ReadPolicy,
        codec: Codec,
        options: SourceOptions,
        max_blocks: int = 1,
    ) -> None:
        if options.acknowledge not in ("auto", "manual"):
            raise refused("acknowledge='auto' or 'manual'", repr(options.acknowledge))
        super().__init__(spec, policy)
        self._port, self._codec = port, codec
        self._automatic, self._max_blocks = options.acknowledge == "auto", max_blocks
        self._timeout_s = options.timeout_s
        self._cursor: dict[str, int] = dict(options.cursor or {})
        self._read: dict[str, int] = {}  # producer -> below this everything was yielded, and not acknowledged
        # a name of its own unless it was given one: two readers of one name would take each other's blocks
        self._member: Membership = port.join(options.group, options.consumer or uuid.uuid4().hex, cursor=options.cursor)

    @property
    def cursor(self) -> Mapping[str, int]:
        """Producer -> the number below which this consumer acknowledged every block."""
        return dict(self._cursor)

    def acknowledge(self) -> None:
        """Done with every block whose records were all yielded: it is never given out again in this group.

        Keep what came of the records, and ``cursor``, before; a consumer that dies earlier is given them again.
        """
        for producer, through in self._read.items():
            self._port.acknowledge(self._member, producer=producer, through=through)
            self._cursor[producer] = through
        self._read = {}

    def close(self) -> None:
        """Leave the group; what was not acknowledged is given to the next. Records already yielded stay valid."""
        if not self._closed:
            super().close()
            # A broker that is gone has no members, and from one that is not reached the lease takes back what is out:
            # whoever has read everything is told nothing by a way that breaks then.
            with contextlib.suppress(TransportError):
                self._port.leave(self._member)

    def _arrive(self) -> Iterator[RouteRecord]:
        while not self._closed:
            taken = self._port.take(self._member, max_blocks=self._max_blocks, timeout_s=self._timeout_s)
            for block in taken.blocks:
                yield from self._records(block)
            if not taken.blocks:
                if taken.progress.ended:
                    return self._end(taken.progress)
                raise TransportError(
                    f"expected records, or the end, within {self._timeout_s} s, got neither: producers are slow, or "
                    "gone; ask again by opening the stream again",
                    kind=ErrorKind.TIMED_OUT,
                )
        return None

    def _records(self, block: Block) -> Iterator[RouteRecord]:
        reader = self._codec.open(block.payload, self._policy)
        before = self._counts.records
        yield from reader
        seen = reader.report()
        moved = [replace(item, index=before + item.index) for item in seen.quarantined]
        self._report = replace(
            self._report,
            batches=self._report.batches + max(seen.batches, 1),
            quarantined=(*self._report.quarantined, *moved),
        )
        self._read[block.producer] = block.sequence + 1
        if self._automatic:
            self.acknowledge()

    def _end(self, progress: Progress) -> None:
        if progress.complete:
            self._report = replace(self._report, complete=True)
            return
        if self._policy.on_truncated == "keep":
            self._report = replace(self._report, truncated=True)
            return
        if progress.aborted:
            raise TruncatedError(
                f"expected producers that close, got {', '.join(map(repr, progress.aborted))} aborted: what came is "
                "not the whole",
                kind=ErrorKind.ABORTED,
            )
        raise TruncatedError(
            f"expected producers that close, got {', '.join(map(repr, progress.lost))} lost: run them again under the "
            "same names; what they were acknowledged for is not lost",
            kind=ErrorKind.PRODUCER_LOST,
        )
