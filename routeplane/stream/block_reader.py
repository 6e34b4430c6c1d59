"""Reading the blocks of a place: order, waits, acknowledgement, and the records of one block, whole or cut.

A carrier adds a ``BlockStore``: where blocks lie, and what is known of a producer. Knows no files and no network.
"""

from __future__ import annotations

import json
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa

from routeplane.errors import DataError, ErrorKind, FormatError, TruncatedError, UsageError, refused
from routeplane.record.interfaces import BlockName, KeyMemory, Position
from routeplane.record.policy import Quarantine, ReadPolicy
from routeplane.record.prefixes import join_prefix
from routeplane.record.record import RecordKey, RouteRecord
from routeplane.record.schema import Encoding
from routeplane.record.transfer import RecordReader
from routeplane.stream import blocks
from routeplane.stream.files import frames_of
from routeplane.stream.ipc import IpcReader

if TYPE_CHECKING:
    from routeplane.record.spec import RouteSpec

__all__ = [
    "BlockPart",
    "BlockReader",
    "BlockRecords",
    "BlockStore",
    "Carrier",
    "cut_block",
    "parse_leans",
    "sealed_cut",
]


class BlockStore(ABC):
    """Where the blocks of a place lie, for one reader; carriers implement it. Pickles; a copy holds no group."""

    #: What the place declares.
    manifest: blocks.Manifest

    @abstractmethod
    def producers(self) -> list[str]:
        """The producers that ever opened the place, sorted."""

    @abstractmethod
    def state(self, name: BlockName) -> blocks.BlockState:
        """What can be said of a block now."""

    @abstractmethod
    def last_number(self, producer: str) -> int:
        """The number behind the producer's last sealed block; 0 for an unknown producer."""

    @abstractmethod
    def read(self, name: BlockName) -> pa.Buffer:
        """The bytes of a sealed block, in memory that no other process can change. Raises DataError (EXPIRED)."""

    def cut(self, name: BlockName, part: BlockPart) -> list[RouteRecord]:
        """Records of one block, cut; a carrier that can do so where the block lies overrides this."""
        return cut_block(self.read(name), part, read=self.reads(name))

    def reads(self, name: BlockName) -> Callable[[int], pa.Buffer]:
        """Give the bytes of another block of the same producer, by its number."""
        return lambda number: self.read(BlockName(name.producer, number))

    @abstractmethod
    def load_position(self) -> Position:
        """What the group acknowledged."""

    @abstractmethod
    def save_position(self, position: Position) -> None:
        """Store what the group acknowledged; a copy is never asked to."""

    @abstractmethod
    def release(self) -> None:
        """Give the group up. Idempotent."""


class BlockReader(RecordReader):
    """The RouteSource and BlockSource of a carrier, for one group.

    Iterate it once for records: each block is read whole, verified, and acknowledged when the record behind it is asked
    for. Or use ``names``, ``open`` and ``fetch`` for blocks. Pickles; a copy reads blocks and acknowledges nothing.

    Args:
        producers: how many producers, or which names, are expected: the records are complete when all of them closed.
        follow: whether to wait for blocks that are still to come; False: what is sealed now.
    """

    def __init__(
        self,
        store: BlockStore,
        *,
        producers: int | Sequence[str],
        follow: bool = True,
        policy: ReadPolicy = blocks.DEFAULT_POLICY,
        options: blocks.ReadOptions = blocks.DEFAULT_OPTIONS,
    ) -> None:
        self._store, self._follow, self._options = store, follow, options
        self._pid: int | None = os.getpid()
        try:
            super().__init__(store.manifest.spec, policy)
            self._expected = _expected_producers(producers)
            self._acknowledged = self._reached = store.load_position()
        except BaseException:
            store.release()
            raise
        self._keys = KeyMemory(self._acknowledged.keys)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_pid": None}

    # -- blocks --------------------------------------------------------------------------------------------------------

    def position(self) -> Position:
        """Return what is acknowledged: where a reader of this group that starts now would begin."""
        return self._acknowledged

    @property
    def reached(self) -> Position:
        """The position behind the last block whose records were all yielded: what to acknowledge once they are safe."""
        return self._reached

    def acknowledge(self, position: Position) -> None:
        """State that everything before a position is done with; blocks that no group needs may be deleted.

        Raises UsageError for a position of another place, beyond what exists, or before what was acknowledged, and in a
        copy.
        """
        if self._closed or self._pid != os.getpid():
            raise UsageError(
                "expected the reader that holds the group, got a copy of it or a closed one", kind=ErrorKind.CLOSED
            )
        if position is not self._reached:  # what was read is there
            self._check_position(position)
        if any(position.number(name) < number for name, number in self._acknowledged.next.items()):
            raise refused(f"a position behind {self._acknowledged.to_json()}", position.to_json())
        self._store.save_position(position)
        self._acknowledged = position

    def _check_position(self, position: Position) -> None:
        place = self._store.manifest.place
        if position.place != place:
            raise refused(f"a position in the place {place}", f"one in {position.place}")
        for producer, number in position.next.items():
            last = self._store.last_number(producer)
            if number > last:
                raise refused(f"a position within the {last} blocks of {producer!r}", f"{number}")

    def names(self, *, position: Position | None = None) -> Iterator[BlockName]:
        """Yield the blocks behind a position in the order that it decides: producers by name, taking turns.

        A producer that is behind is waited for, so that every process sees the same order. Raises DataError (EXPIRED),
        TruncatedError (ABORTED, VANISHED), TransportError (TIMED_OUT), UsageError.
        """
        start = self._acknowledged if position is None else position
        self._check_position(start)  # now, not when the first name is asked for
        return self._names(start)

    def _names(self, position: Position) -> Iterator[BlockName]:
        turns = self._turns()
        while (name := turns.next(position, in_turn=True)) is not None:
            yield name
            position = position.after(name)

    def open(self, name: BlockName) -> BlockRecords:
        """Open one block as a source, under this reader's policy; the bytes are copied before they are verified."""
        return self._opened(name, self._policy)

    def _opened(self, name: BlockName, policy: ReadPolicy, quarantine: Quarantine | None = None) -> BlockRecords:
        return BlockRecords(self._store.read(name), policy, read=self._store.reads(name), quarantine=quarantine)

    def fetch(
        self,
        name: BlockName,
        *,
        keys: Sequence[RecordKey] | None = None,
        layer_ids: Sequence[int] | None = None,
        tokens: tuple[int, int] | None = None,
    ) -> list[RouteRecord]:
        """Read records of one block, verified whole and then cut, where the block lies if the carrier can.

        Raises DataError (EXPIRED, ROUTES_MISSING).
        """
        return self._store.cut(name, BlockPart.of(keys=keys, layer_ids=layer_ids, tokens=tokens))

    def _turns(self) -> _Turns:
        return _Turns(self._store, self._options, expected=self._expected, follow=self._follow)

    # -- records -------------------------------------------------------------------------------------------------------

    def _arrive(self) -> Iterator[RouteRecord]:
        turns = self._turns()
        self._reached = self._acknowledged
        try:
            while (name := turns.next(self._reached, in_turn=False)) is not None:
                yield from self._block_records(name)
                if self._closed:
                    return
                self._reached = self._reached.after(name, keys=self._keys.to_bytes())
                if self._options.acknowledge == "next":
                    self.acknowledge(self._reached)
            self._report = replace(self._report, complete=turns.complete)
        except TruncatedError:
            if self._policy.on_truncated == "raise":
                raise
            self._report = replace(self._report, truncated=True)

    def _block_records(self, name: BlockName) -> Iterator[RouteRecord]:
        # this reader looks for alarms itself
        block = self._opened(name, replace(self._policy, on_alarm="ignore"), self.quarantine)
        for record in block:
            if self._keys.is_repeat(record, where=f"block {name}"):
                self._count(repeats=1)
            else:
                yield record
        read = block.report()
        counted = ("batches", "skipped_batches", "skipped_records")
        self._count(**{name: getattr(read, name) for name in counted})

    def close(self) -> None:
        """Give the group up. Records already yielded stay valid; what was not acknowledged comes again."""
        super().close()
        self._store.release()


def _expected_producers(producers: int | Sequence[str]) -> int | tuple[str, ...]:
    if not isinstance(producers, int):
        producers = tuple(sorted({blocks.check_name(each, "producer") for each in producers}))
    if producers == () or (isinstance(producers, int) and producers < 1):
        raise refused("at least one producer", f"{producers}")
    return producers


class _Turns:
    """Chooses the next block of a place, and waits for it."""

    def __init__(
        self, store: BlockStore, options: blocks.ReadOptions, *, expected: int | tuple[str, ...], follow: bool
    ) -> None:
        self._store, self._options, self._expected, self._follow = store, options, expected, follow
        self._known: list[str] = []
        self._dead_since: dict[str, float] = {}
        #: Whether all expected producers closed.
        self.complete = False

    def next(self, position: Position, *, in_turn: bool) -> BlockName | None:
        """The next block behind a position; None where every producer ended, or nothing is sealed and none follows.

        ``in_turn``: the order that the position decides; otherwise whichever is sealed first.
        """

        def look() -> BlockName | bool:
            return self._look(position, in_turn=in_turn) or self.complete or not self._follow

        expected = f"a block of {self._producers() or 'any producer'}"
        found = blocks.wait_until(look, self._options.timeout_s, expected=lambda: expected)
        return found if isinstance(found, BlockName) else None

    def _look(self, position: Position, *, in_turn: bool) -> BlockName | None:
        producers = self._producers()
        all_known = len(producers) == (self._expected if isinstance(self._expected, int) else len(self._expected))
        if in_turn and not all_known:
            return None
        closed = 0
        for producer in _rotated(producers, position.last):
            name, state = self._state(producer, position.number(producer))
            if state == "sealed":
                return name
            closed += state == "closed"
            if in_turn and state != "closed":
                return None
        self.complete = all_known and closed == len(producers)
        return None

    def _state(self, producer: str, number: int) -> tuple[BlockName, blocks.BlockState]:
        """The producer's first block from a number on that is not void, and its state. Raises for an end that fails."""
        while (state := self._store.state(name := BlockName(producer, number))) == "void":
            number += 1
        if state == "expired":
            raise DataError(
                f"expected block {name}, got none: it was deleted before this group acknowledged it",
                kind=ErrorKind.EXPIRED,
            )
        if state == "aborted":
            raise TruncatedError(f"expected producer {producer!r} to close, got its abort", kind=ErrorKind.ABORTED)
        if state != "vanished":
            self._dead_since.pop(producer, None)
            return name, state
        dead_s = time.monotonic() - self._dead_since.setdefault(producer, time.monotonic())
        if self._options.on_vanished == "raise" and dead_s >= self._options.grace_s:
            raise TruncatedError(
                f"expected producer {producer!r} to close, got none alive under that name for "
                f"{self._options.grace_s} s: start it again under the same name, and read on",
                kind=ErrorKind.VANISHED,
            )
        return name, state

    def _producers(self) -> list[str]:
        if not isinstance(self._expected, int):
            return list(self._expected)
        if len(self._known) < self._expected:
            self._known = self._store.producers()
        if len(self._known) > self._expected:
            raise refused(f"{self._expected} producers", f"{self._known}")
        return self._known


def _rotated(producers: list[str], last: str | None) -> list[str]:
    """The producers by name, beginning behind the one whose block came last."""
    at = 0 if last is None else next((i for i, name in enumerate(producers) if name > last), 0)
    return producers[at:] + producers[:at]


# -- one block ---------------------------------------------------------------------------------------------------------


class BlockRecords(IpcReader):
    """The records of one block in memory, each whole: deltas are joined with records of this block and of others.

    Args:
        read: gives the bytes of another block of the same producer, by its number.
    """

    def __init__(
        self,
        data: pa.Buffer,
        policy: ReadPolicy,
        *,
        read: Callable[[int], pa.Buffer],
        quarantine: Quarantine | None = None,
    ) -> None:
        frames, walkable = frames_of(data, salvage=policy.on_corrupt == "quarantine")
        # a block is whole or damaged
        super().__init__(frames, replace(policy, on_truncated="raise"), walkable=walkable, quarantine=quarantine)
        self._read, self._bases = read, dict[RecordKey, tuple[RouteRecord, RouteRecord]]()
        self.leans = parse_leans(self.trailer_metadata)

    def _arrive(self) -> Iterator[RouteRecord]:
        for stored in super()._arrive():
            try:
                whole = self._joined(stored)
            except DataError:
                if self._policy.on_corrupt == "raise":
                    raise
                self._count(skipped_records=1)
                continue
            # without leans no record is a delta: one that is, under a damaged trailer, has no base and was refused
            if self.leans is not None:
                self._bases[stored.key] = (stored, whole)
            yield whole

    def _joined(self, record: RouteRecord) -> RouteRecord:
        if record.prefix is None:
            return record
        if record.prefix.key not in self._bases:
            self._load_bases()
        if record.prefix.key not in self._bases:
            raise DataError(
                f"expected the record {record.prefix.key} that holds rows [0, {record.routes_start}) in the blocks "
                f"{list(self.leans or ())}, got none @ sample {record.key}",
                kind=ErrorKind.PREFIX,
            )
        stored, whole = self._bases[record.prefix.key]
        return join_prefix(record, stored=stored, whole=whole)

    def _load_bases(self) -> None:
        """Read the blocks that this one leans on, the oldest first: it names all that those lean on, too."""
        for number in self.leans or ():
            block = BlockRecords(self._read(number), replace(self._policy, on_alarm="ignore"), read=self._read)
            block._bases = self._bases
            for whole in block:
                self._bases.setdefault(whole.key, (whole, whole))

    def close(self) -> None:
        """Close the block. Records already yielded stay valid."""
        super().close()
        self._bases = {}

    def _early_selection(self) -> RouteSpec | None:
        # a delta is joined before it is cut
        return None if self.leans is not None else super()._early_selection()


def parse_leans(metadata: Mapping[str, str]) -> tuple[int, ...] | None:
    """Which blocks a trailer's metadata names; None where no record is a delta. Raises FormatError."""
    text = metadata.get(blocks.LEANS_KEY)
    if text is None:
        return None
    try:
        numbers = json.loads(text)
        if not all(isinstance(number, int) and number >= 0 for number in numbers):
            raise ValueError("other values than numbers")
    except (TypeError, ValueError, RecursionError) as error:
        raise FormatError(f"expected numbers of blocks, got {text[:80]!r} ({error})", kind=ErrorKind.TRAILER) from None
    return tuple(sorted(numbers))


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockPart:
    """What of a block is wanted: records (None: all), layers and tokens as in ``RouteSource.select``."""

    keys: tuple[RecordKey, ...] | None = None
    layer_ids: tuple[int, ...] | None = None
    tokens: tuple[int, int] | None = None

    @classmethod
    def of(cls, *, keys: Any = None, layer_ids: Any = None, tokens: Any = None) -> BlockPart:
        """Narrow what a caller, or another process, asks for. Raises UsageError."""
        try:
            return cls(
                keys=None if keys is None else tuple(RecordKey(str(name), int(a), int(s)) for name, a, s in keys),
                layer_ids=None if layer_ids is None else tuple(map(int, layer_ids)),
                tokens=None if tokens is None else (int(tokens[0]), int(tokens[1])),
            )
        except (KeyError, IndexError, TypeError, ValueError, OverflowError) as error:
            asked = f"{keys}, {layer_ids}, {tokens}"
            raise refused("keys, layers and tokens [a, b) of a block", f"{asked[:80]} ({error})") from None

    def to_json(self) -> str:
        """Plain values, for a carrier that asks another process to cut."""
        return json.dumps({"keys": self.keys, "layer_ids": self.layer_ids, "tokens": self.tokens})

    @classmethod
    def from_json(cls, text: str | bytes) -> BlockPart:
        """Parse ``to_json``. Raises UsageError."""
        try:
            return cls.of(**json.loads(text))
        except (TypeError, ValueError, RecursionError) as error:
            raise refused("a part of a block as JSON", f"{str(text)[:80]!r} ({error})") from None


def cut_block(data: pa.Buffer, part: BlockPart, *, read: Callable[[int], pa.Buffer]) -> list[RouteRecord]:
    """Read records of a block in memory: verified whole, then cut, each under a new checksum where it was cut.

    Args:
        data: the bytes of a block.
        part: what is wanted; records come in the order of its keys.
        read: as in ``BlockRecords``.

    Raises DataError (ROUTES_MISSING) for a key that is not in the block.
    """
    with BlockRecords(data, ReadPolicy(on_alarm="ignore"), read=read) as reader:
        reader.select(layer_ids=part.layer_ids, tokens=part.tokens)
        found = {record.key: record for record in reader}
    if part.keys is None:
        return list(found.values())
    absent = [key for key in part.keys if key not in found]
    if absent:
        raise DataError(
            f"expected the records {list(map(str, absent[:4]))} in the block, got {len(found)} others",
            kind=ErrorKind.ROUTES_MISSING,
        )
    return [found[key] for key in part.keys]


def sealed_cut(data: pa.Buffer, part: BlockPart, *, read: Callable[[int], pa.Buffer], encoding: Encoding) -> pa.Buffer:
    """A block of what ``cut_block`` gives: what a relay sends."""
    records = cut_block(data, part, read=read)
    if not records:
        raise DataError("expected at least one record in the part, got none", kind=ErrorKind.ROUTES_MISSING)
    return blocks.SealedBlock.of(records, records[0].spec, encoding=encoding).to_buffer()


# -- a carrier ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Carrier:
    """One kind of place. The functions ``open_writer`` and ``open_reader`` of a carrier's module are this one's.

    Attributes:
        slot: takes a producer's name: ``(place, declared, *, producer, limits, **reached)``.
        store: takes a group, once the place is there: ``(place, *, group, timeout_s, **reached)``.
    """

    slot: Callable[..., blocks.ProducerSlot]
    store: Callable[..., BlockStore]

    def open_writer(
        self,
        place: Any,
        spec: RouteSpec,
        *,
        run: str,
        producer: str,
        groups: Sequence[str] = (blocks.DEFAULT_GROUP,),
        encoding: Literal["plain", "narrow", "auto"] = "auto",
        limits: blocks.BlockLimits = blocks.DEFAULT_LIMITS,
        **reached: Any,
    ) -> blocks.BlockWriter:
        """Open a place as one of its producers; the first opener creates it.

        Args:
            place: what the carrier's module says: a path, a name, an address.
            run: name of the run; a place of another run is refused.
            producer: name of this producer; one living writer per name. A restarted producer goes on where it stood.
            groups: every group that will read; a block is kept until all of them acknowledged it.
            encoding: of all blocks of the place.
            limits: block size, byte bound, fsync, timeout.
            reached: what the carrier's module asks for besides: ``store`` for Mooncake, ``access`` for Flight.

        Returns a RouteSink that the caller closes. Raises UsageError (PRODUCER_TAKEN for a name that is in use),
        SpecError for a place of another geometry, FormatError for damaged control data, StoreError for a file system
        without locks or space, TransportError where a server, an actor or a store does not answer.

        >>> import tempfile
        >>> from routeplane import RouteSpec
        >>> from routeplane.stream import folder
        >>> spec = RouteSpec(num_experts=8, top_k=2, layer_ids=(0, 1), model="m")
        >>> with tempfile.TemporaryDirectory() as place:
        ...     with folder.open_writer(place, spec, run="run-1", producer="engine-0") as writer:
        ...         pass
        ...     with folder.open_reader(place, producers=1) as reader:
        ...         list(reader), reader.report().complete
        ([], True)
        """
        declared = blocks.Manifest.of(spec, run=run, groups=groups, encoding=encoding)
        blocks.check_name(producer, "producer")
        slot = self.slot(place, declared, producer=producer, limits=limits, **reached)
        return blocks.BlockWriter(slot, slot.manifest, limits=limits)

    def open_reader(
        self,
        place: Any,
        *,
        producers: int | Sequence[str],
        group: str = blocks.DEFAULT_GROUP,
        follow: bool = True,
        policy: ReadPolicy = blocks.DEFAULT_POLICY,
        options: blocks.ReadOptions = blocks.DEFAULT_OPTIONS,
        **reached: Any,
    ) -> BlockReader:
        """Open a place as the one reader of a group; waits for the place to be created.

        After 10 s the logger ``routeplane.stream.blocks`` warns once of the wait, with what of the place exists: a
        mistyped path never comes. ``options.timeout_s`` bounds the wait.

        Args:
            place, reached: as ``open_writer``.
            producers: how many producers, or which names, are expected; complete means that all of them closed.
            group: a group that the place declares.
            follow: whether to wait for blocks that are still to come.
            policy: what to do with data that is wrong.
            options: acknowledgement, vanished producers, timeout.

        Returns a RouteSource and BlockSource that the caller closes; it pickles. Raises UsageError (GROUP_TAKEN for a
        group that has a living reader), FormatError for damaged control data, TransportError (TIMED_OUT; CONNECTION).
        """
        store = self.store(place, group=group, timeout_s=options.timeout_s if follow else 0.0, **reached)
        return BlockReader(store, producers=producers, follow=follow, policy=policy, options=options)
