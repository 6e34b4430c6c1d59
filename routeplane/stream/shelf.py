"""The blocks that a ledger holds: by producer and number, by record key, within a byte bound.

Decides nothing about who gets them. A block leaves when it is dropped: after every group is done with it (at once, or
with ``keep`` when room is needed), or because it was withdrawn or retired. Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from routeplane.errors import DataError, ErrorKind, UsageError
from routeplane.record.record import RecordKey
from routeplane.stream.delivery import Block

__all__ = ["Place", "Shelf"]


class Place(NamedTuple):
    """Where a record stands or stood, and its block's newest weights."""

    producer: str
    sequence: int
    weights_version: int | None


@dataclass(kw_only=True, slots=True)
class _Row:
    """Blocks ``[base, base + len(blocks))`` of a producer; a None has left. All groups are done below ``settled``."""

    base: int
    settled: int
    blocks: deque[Block | None] = field(default_factory=deque)


class Shelf:
    """Blocks of many producers. Keys are remembered after their blocks left, so that nothing comes twice."""

    def __init__(self, *, max_bytes: int, keep: bool) -> None:
        self._max_bytes, self._keep = max_bytes, keep
        self._rows: dict[str, _Row] = {}
        self._places: dict[RecordKey, Place] = {}
        self._done: deque[tuple[str, int]] = deque()  # settled and kept, oldest first
        self._left: list[Block] = []
        self._floor: int | None = None
        self.nbytes = self.peak_bytes = self.count = 0

    @property
    def floor(self) -> int | None:
        """The weights version below which nothing is taken."""
        return self._floor

    def places(self) -> dict[RecordKey, Place]:
        """A copy of every key that was taken and not forgotten."""
        return dict(self._places)

    def enter(self, producer: str, first: int) -> None:
        """A row for a producer whose next block is ``first``."""
        self._rows[producer] = _Row(base=first, settled=first)

    def sent(self, producer: str) -> int:
        """The number of the producer's next block."""
        row = self._rows[producer]
        return row.base + len(row.blocks)

    def settled(self, producer: str) -> int:
        """All groups are done with everything below this number."""
        return self._rows[producer].settled

    def at(self, producer: str, sequence: int) -> Block | None:
        """A block, or None where it has left or never came."""
        row = self._rows[producer]
        return row.blocks[sequence - row.base] if row.base <= sequence < self.sent(producer) else None

    def find(self, key: RecordKey) -> Block | None:
        """The block that holds a record, where it is held."""
        place = self._places.get(key)
        return None if place is None else self.at(place.producer, place.sequence)

    def __iter__(self) -> Iterator[Block]:
        return (block for row in self._rows.values() for block in row.blocks if block is not None)

    def check_new(self, block: Block) -> None:
        """Raise DataError where one of its records came before, UsageError where its weights are retired."""
        for key in block.keys:
            if key in self._places:
                raise DataError(
                    f"expected each record once, got {key} twice (before from producer {self._places[key].producer!r})",
                    kind=ErrorKind.DUPLICATE_KEY,
                )
        if self._floor is not None and block.weights_version is not None and block.weights_version < self._floor:
            raise UsageError(
                f"expected records of weights {self._floor} or newer, got {block.weights_version}",
                kind=ErrorKind.RETIRED,
            )

    def is_same(self, block: Block) -> bool:
        """Whether this block, or what is known of the one that stood here, has the same records."""
        there = self.at(block.producer, block.sequence)
        if there is not None:
            return there.digest == block.digest
        places = [self._places.get(key) for key in block.keys]
        return all(place is None or place[:2] == (block.producer, block.sequence) for place in places)

    def has_room(self, nbytes: int) -> bool:
        """Whether a block of this size may come, after kept ones made room. One alone may pass the bound."""
        while self.nbytes and self.nbytes + nbytes > self._max_bytes:
            if not self._done:
                return False
            producer, sequence = self._done.popleft()
            self.drop(producer, sequence)
            self._trim(producer)
        return True

    def insert(self, producer: str, block: Block | None) -> None:
        """The producer's next block; None: it came and has left."""
        self._rows[producer].blocks.append(block)
        if block is None:
            return
        self.nbytes += block.nbytes
        self.peak_bytes = max(self.peak_bytes, self.nbytes)
        self.count += 1
        for key in block.keys:
            self._places[key] = Place(producer, block.sequence, block.weights_version)

    def remember(self, places: Mapping[RecordKey, Place], *, floor: int | None) -> None:
        """Records that came before, whose blocks may have left; and the oldest weights that are wanted."""
        self._places.update(places)
        self._floor = floor

    def drop(self, producer: str, sequence: int, *, forget: bool = False) -> None:
        """Let a block go; with ``forget`` its records may come again."""
        row = self._rows[producer]
        block = self.at(producer, sequence)
        if block is None:
            return
        row.blocks[sequence - row.base] = None
        self.nbytes -= block.nbytes
        self.count -= 1
        self._left.append(block)
        for key in block.keys if forget else ():
            del self._places[key]

    def settle(self, producer: str, through: int) -> None:
        """Every group is done with a producer's blocks below ``through``."""
        row = self._rows[producer]
        for sequence in range(row.settled, through):
            if not self._keep:
                self.drop(producer, sequence)
            elif self.at(producer, sequence) is not None:
                self._done.append((producer, sequence))
        row.settled = max(row.settled, through)
        self._trim(producer)

    def withdraw(self, producer: str, *, first: int) -> int:
        """A producer's blocks from ``first`` on never came; how many there were."""
        row, count = self._rows[producer], self.count
        for sequence in range(first, self.sent(producer)):
            self.drop(producer, sequence, forget=True)
        while len(row.blocks) > max(first - row.base, 0):
            row.blocks.pop()
        return count - self.count

    def retire(self, below: int) -> list[Block]:
        """Let go of the blocks of older weights, forget their keys, and take no more of them; which left."""
        self._floor = below if self._floor is None else max(self._floor, below)
        old = [block for block in self if block.weights_version is not None and block.weights_version < below]
        for block in old:
            self.drop(block.producer, block.sequence)
        stale = [k for k, at in self._places.items() if at.weights_version is not None and at.weights_version < below]
        for key in stale:
            del self._places[key]
        for producer in {block.producer for block in old}:
            self._trim(producer)
        self._done = deque(each for each in self._done if self.at(*each) is not None)
        return old

    def released(self) -> list[Block]:
        """The blocks that left since the last call."""
        left, self._left = self._left, []
        return left

    def _trim(self, producer: str) -> None:
        row = self._rows[producer]
        while row.blocks and row.blocks[0] is None and row.base < row.settled:
            row.blocks.popleft()
            row.base += 1
