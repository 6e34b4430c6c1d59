"""The producers of a stream: one session per name at a time, older ones fenced off, leases, ends. Pure.

Also the values in which a ledger outlives its process.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from routeplane.errors import ErrorKind, UsageError
from routeplane.record.record import RecordKey
from routeplane.stream.delivery import Session, Totals
from routeplane.stream.shelf import Place

__all__ = ["LedgerState", "Producer", "ProducerEnd", "ProducerState", "Roster"]

ProducerEnd = Literal["open", "closed", "aborted"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ProducerState:
    """What must outlive a ledger of a producer: its next block, the first that is not settled, counts and end."""

    sent: int
    settled: int
    totals: Totals
    end: ProducerEnd


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerState:
    """What must outlive a ledger, without payloads. ``groups``: group -> producer -> acknowledged below."""

    producers: Mapping[str, ProducerState]
    groups: Mapping[str, Mapping[str, int]]
    places: Mapping[RecordKey, Place]
    floor: int | None
    sealed: bool


@dataclass(kw_only=True, slots=True)
class Producer:
    """One producer. ``connected``: its name is taken; ``lost``: its lease ran out and nothing came since."""

    epoch: int
    seen: float
    totals: Totals = field(default_factory=Totals)
    end: ProducerEnd = "open"
    connected: bool = True
    lost: bool = False


class Roster:
    """Producers by name."""

    def __init__(self, *, first_epoch: int) -> None:
        self._first_epoch = first_epoch
        self._known: dict[str, Producer] = {}
        # What is asked at every call is counted: to look at a thousand producers each time cost more than the call.
        self._names: list[str] = []
        self._ended = self._lost = 0  # names from the first on that ended, which none takes back; producers lost now
        self._aborted: dict[str, None] = {}

    def __contains__(self, producer: object) -> bool:
        return producer in self._known

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)

    def items(self) -> Iterator[tuple[str, Producer]]:
        """Names and producers, in order of appearance."""
        yield from self._known.items()

    def attach(self, producer: str, now: float, *, before: Totals, again: bool) -> int:
        """A new session of a producer; its epoch. ``before``: what a new one sent elsewhere and need not repeat.
        ``again``: by the very one that had the last session, which may have ended without having heard so.

        Raises UsageError where one of that name is alive or has ended.
        """
        known = self._known.get(producer)
        if known is None:
            known = Producer(epoch=self._first_epoch, seen=now, totals=before, connected=False)
            self._enter(producer, known)
        if known.end != "open" and not again:
            raise UsageError(f"expected an open producer, got {producer!r} that {known.end}", kind=ErrorKind.CLOSED)
        if known.connected and not known.lost:
            raise UsageError(
                f"expected one producer {producer!r} at a time, got another: give each its own name",
                kind=ErrorKind.PRODUCER_TAKEN,
            )
        known.epoch += 1
        self._show(known, now)
        return known.epoch

    def _enter(self, producer: str, known: Producer) -> None:
        if producer not in self._known:
            self._names.append(producer)
        self._known[producer] = known

    def _show(self, known: Producer, now: float) -> None:
        self._lost -= known.lost
        known.seen, known.lost, known.connected = now, False, True

    def alive(self, session: Session, now: float) -> Producer:
        """The producer of a session, which has just shown itself. Raises UsageError for one that was replaced."""
        known = self._known.get(session.producer)
        if known is None or known.epoch != session.epoch:
            raise UsageError(
                f"expected the latest session of producer {session.producer!r}, got epoch {session.epoch}: "
                "it was taken for lost and replaced, or the ledger was made anew; open the stream again",
                kind=ErrorKind.FENCED,
            )
        self._show(known, now)
        return known

    def end(self, producer: str, how: ProducerEnd) -> None:
        """A producer that is alive closed or aborted."""
        self._known[producer].end = how
        if how == "aborted":
            self._aborted[producer] = None

    def totals(self, producer: str) -> Totals:
        """What a producer sent so far."""
        return self._known[producer].totals

    def disconnect(self, session: Session) -> None:
        """The way to a producer is gone, which is not yet its loss."""
        known = self._known.get(session.producer)
        if known is not None and known.epoch == session.epoch:
            known.connected = False

    def restore(self, producer: str, *, totals: Totals, end: ProducerEnd, seen: float) -> None:
        """A producer of an earlier ledger, not connected to this one."""
        self._enter(producer, Producer(epoch=self._first_epoch, seen=seen, totals=totals, connected=False))
        self.end(producer, end)

    def expire(self, seen_until: float) -> int:
        """Take for lost whoever showed no sign of life since; how many."""
        gone = [p for p in self._known.values() if p.end == "open" and not p.lost and p.seen <= seen_until]
        for producer in gone:
            producer.lost = True
        self._lost += len(gone)
        return len(gone)

    def signs_of_life(self) -> list[float]:
        """When each open producer that is not lost was seen last."""
        return [producer.seen for producer in self._known.values() if producer.end == "open" and not producer.lost]

    def all_ended(self) -> bool:
        """Whether each closed, aborted, or was lost."""
        while self._ended < len(self._names) and self._known[self._names[self._ended]].end != "open":
            self._ended += 1
        if not self._lost:
            return self._ended == len(self._names)
        return all(producer.end != "open" or producer.lost for producer in self._known.values())

    def lost(self) -> tuple[str, ...]:
        """Those taken for lost."""
        if not self._lost:
            return ()
        return tuple(name for name, producer in self._known.items() if producer.lost)

    def aborted(self) -> tuple[str, ...]:
        """Those that said that they are not whole, in that order."""
        return tuple(self._aborted)
