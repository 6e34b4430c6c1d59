"""What delivery promises, as values: blocks, sessions, memberships, ends, counts; and what a producer still holds.

A *block* is what a producer hands over at once: whole records, numbered from 0 by their producer. ``ledger`` decides
with these values, ``broker`` waits, a transport carries payloads. Nothing here knows bytes, threads or sockets.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import xxhash

from routeplane.errors import DataError, ErrorKind, UsageError, refused
from routeplane.record.parse import check_count, check_text
from routeplane.record.record import RecordKey, RouteRecord

__all__ = [
    "DEFAULT_GROUP",
    "Block",
    "DeliveryReport",
    "Durability",
    "Membership",
    "Outbox",
    "Progress",
    "PutOutcome",
    "Session",
    "Taken",
    "Totals",
    "newest_version",
]

#: The consumer group of a stream that was given none.
DEFAULT_GROUP = "default"

#: When a producer may forget a block: ``spool`` after it is on disk, ``memory`` after every group acknowledged it.
Durability = Literal["spool", "memory"]

#: ``accepted``; ``repeated``: it is there already, from a producer that sends again; ``full``: try again later.
PutOutcome = Literal["accepted", "repeated", "full"]


def newest_version(record: RouteRecord) -> int | None:
    """The newest weights that sampled or captured any of a record; None where no version is known."""
    versions = [span.weights_version for span in record.spans] + [item.weights_version for item in record.captures]
    return max((version for version in versions if version is not None), default=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """Whole records of one producer. ``payload`` is the transport's own: records, bytes, a reference; never compared.

    ``digest``: xxh3-64 over the record checksums (u64, in order), so that a block sent again is known as the same.
    ``weights_version``: the newest among its records; None is never retired.
    """

    producer: str
    sequence: int
    keys: tuple[RecordKey, ...]
    tokens: int
    nbytes: int
    digest: int
    weights_version: int | None = None
    payload: Any = None

    def __post_init__(self) -> None:
        check_text(self.producer, "producer")
        for name, below in (("sequence", 2**63), ("tokens", 2**63), ("nbytes", 2**63), ("digest", 2**64)):
            check_count(getattr(self, name), name, below=below)
        if not self.keys or len(set(self.keys)) < len(self.keys):
            raise DataError(
                f"expected a block of records with different keys, got {self.keys[:4]}", kind=ErrorKind.DUPLICATE_KEY
            )

    @classmethod
    def of(cls, records: Sequence[RouteRecord], *, producer: str, sequence: int, payload: Any, nbytes: int) -> Block:
        """The block of these records; ``nbytes`` is what the payload takes where it is kept."""
        versions = [version for record in records if (version := newest_version(record)) is not None]
        digest = xxhash.xxh3_64()
        for record in records:
            digest.update(record.checksum.to_bytes(8, "little"))
        return cls(
            producer=producer,
            sequence=sequence,
            keys=tuple(record.key for record in records),
            tokens=sum(record.num_tokens for record in records),
            nbytes=nbytes,
            digest=digest.intdigest(),
            weights_version=max(versions, default=None),
            payload=payload,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Totals:
    """What a producer says that it sent, and what is compared at its end."""

    blocks: int = 0
    records: int = 0
    tokens: int = 0

    def plus(self, block: Block) -> Totals:
        """With one more block."""
        return Totals(blocks=self.blocks + 1, records=self.records + len(block.keys), tokens=self.tokens + block.tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class Session:
    """A producer's right to put. ``epoch`` grows with each session of a name, and the older ones are fenced off.

    ``next_sequence``: the block to send next; everything below it is there, and holds ``totals``. ``acknowledged``:
    everything below it may be forgotten.
    """

    producer: str
    epoch: int
    next_sequence: int
    acknowledged: int
    totals: Totals = field(default_factory=Totals)


@dataclass(frozen=True, kw_only=True, slots=True)
class Membership:
    """A consumer's right to take in a group. ``epoch`` as in Session. ``missed``: blocks gone before the group came."""

    group: str
    consumer: str
    epoch: int
    missed: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far a consumer's stream is. ``ended``: nothing will come for it any more, and nothing can come back to it.

    ``lost``: producers that vanished without an end; ``aborted``: those that said so. Neither is a whole stream.
    """

    ended: bool
    lost: tuple[str, ...] = ()
    aborted: tuple[str, ...] = ()

    @property
    def complete(self) -> bool:
        """Ended, and every producer closed."""
        return self.ended and not self.lost and not self.aborted


@dataclass(frozen=True, kw_only=True, slots=True)
class Taken:
    """What a consumer was given, and how far its stream is. No blocks before the end: none came in time."""

    blocks: tuple[Block, ...]
    progress: Progress


@dataclass(frozen=True, kw_only=True, slots=True)
class DeliveryReport:
    """What a ledger did and holds. Gauges are of now, the rest are counts since it was made."""

    blocks: int = 0
    records: int = 0
    tokens: int = 0
    repeated: int = 0
    redelivered: int = 0
    retired: int = 0
    withdrawn: int = 0
    lost_producers: int = 0
    aborted_producers: int = 0
    held_blocks: int = 0
    held_bytes: int = 0
    unacknowledged_blocks: int = 0
    peak_bytes: int = 0

    def merge(self, other: DeliveryReport) -> DeliveryReport:
        """The sums of both; the larger peak."""
        sums = {item.name: getattr(self, item.name) + getattr(other, item.name) for item in fields(self)}
        sums["peak_bytes"] = max(self.peak_bytes, other.peak_bytes)
        return DeliveryReport(**sums)

    def scalars(self, *, prefix: str = "routeplane/") -> dict[str, float]:
        """A flat dict with stable names for a metrics logger."""
        return {f"{prefix}delivery_{item.name}": float(getattr(self, item.name)) for item in fields(self)}


class Outbox:
    """What a producer holds until it is acknowledged: in order, bounded in bytes, sent again after a reconnect.

    Pure bookkeeping: the owner sends and waits. The bound is passed by one block at most, where the outbox is empty.
    ``first``: the number of the first block, where a producer goes on; ``before``: what those below it hold.
    """

    def __init__(self, *, max_bytes: int, first: int = 0, before: Totals | None = None) -> None:
        if max_bytes < 1:
            raise refused("max_bytes of at least 1", str(max_bytes))
        self._max_bytes = max_bytes
        self._blocks: deque[Block] = deque()
        self._next = first
        self._bytes = 0
        self._before = before or Totals()

    @property
    def pending(self) -> tuple[Block, ...]:
        """Blocks that nobody acknowledged, oldest first."""
        return tuple(self._blocks)

    @property
    def next_sequence(self) -> int:
        """The number of the block to add next."""
        return self._next

    @property
    def acknowledged(self) -> int:
        """Every block below this number was acknowledged."""
        return self._blocks[0].sequence if self._blocks else self._next

    @property
    def before(self) -> Totals:
        """What the acknowledged blocks held."""
        return self._before

    @property
    def totals(self) -> Totals:
        """What all blocks hold, acknowledged and pending."""
        total = self._before
        for block in self._blocks:
            total = total.plus(block)
        return total

    @property
    def nbytes(self) -> int:
        """Bytes of the pending blocks."""
        return self._bytes

    def has_room(self, nbytes: int) -> bool:
        """Whether a block of this size may be added now."""
        return not self._blocks or self._bytes + nbytes <= self._max_bytes

    def add(self, block: Block) -> None:
        """Hold one more. Raises UsageError for another number than the next, or without room."""
        if block.sequence != self._next:
            raise UsageError(f"expected block {self._next}, got {block.sequence}", kind=ErrorKind.SEQUENCE)
        if not self.has_room(block.nbytes):
            raise refused(f"a block within {self._max_bytes} bytes", f"{block.nbytes} beside {self._bytes} held")
        self._blocks.append(block)
        self._next += 1
        self._bytes += block.nbytes

    def acknowledge(self, through: int) -> list[Block]:
        """Let go of every block below ``through`` and return them; what is below already changes nothing.

        Raises UsageError where that was never sent.
        """
        if through > self._next:
            raise UsageError(
                f"expected an acknowledgement of at most {self._next} blocks, got {through}", kind=ErrorKind.SEQUENCE
            )
        done: list[Block] = []
        while self._blocks and self._blocks[0].sequence < through:
            block = self._blocks.popleft()
            self._bytes -= block.nbytes
            self._before = self._before.plus(block)
            done.append(block)
        return done

    def unsent(self, received: int) -> tuple[Block, ...]:
        """What to send to a receiver that has everything below ``received``: after a reconnect, for instance."""
        return tuple(block for block in self._blocks if block.sequence >= received)
