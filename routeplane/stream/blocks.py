"""What all carriers of blocks share: options, sealing records into blocks, reading blocks in order, acknowledgement.

A block is one whole v1 stream under a name, published at once. A carrier adds where blocks lie: a ``BlockStore`` for
readers and a ``ProducerSlot`` for a writer. Knows no files and no network.
"""

from __future__ import annotations

import json
import re
import time
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa
import xxhash

from routeplane.errors import DataError, ErrorKind, FormatError, TransportError, TruncatedError, UsageError, refused
from routeplane.record.codec import column_types, write_batch
from routeplane.record.interfaces import BlockName, Position
from routeplane.record.policy import Quarantine, ReadPolicy
from routeplane.record.record import RecordKey, RouteRecord
from routeplane.record.schema import Encoding
from routeplane.record.transfer import RecordReader, RecordWriter
from routeplane.stream.batches import TRAILER_KEY, TrailerCounter, trailer_batch
from routeplane.stream.files import frames_of
from routeplane.stream.ipc import IpcReader

if TYPE_CHECKING:
    from routeplane.record.spec import RouteSpec

__all__ = [
    "DEFAULT_GROUP",
    "REMEMBERED_KEYS",
    "BlockLimits",
    "BlockReader",
    "BlockState",
    "BlockStore",
    "BlockWriter",
    "Manifest",
    "ProducerSlot",
    "ReadOptions",
    "SealedBlock",
    "check_name",
    "fetch_records",
]

#: The group of a place that declares no others.
DEFAULT_GROUP = "default"
#: How many keys a reader remembers, and stores with its position, to find repeats.
REMEMBERED_KEYS = 1024
#: How many keys a writer remembers to refuse a record that it is given twice.
_WRITTEN_KEYS = 65_536
#: A place of another version is refused.
_PLACE_VERSION = "1"

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.0005, 0.02

#: ``sealed``: the block can be read. ``waiting``: its producer is alive and has not sealed it. ``void``: the number was
#: never used. ``closed``, ``aborted``: the producer ended before it. ``vanished``: the producer died without an end.
#: ``expired``: the block was there and is gone.
BlockState = Literal["sealed", "waiting", "void", "closed", "aborted", "vanished", "expired"]


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockLimits:
    """Bounds of a producer.

    Attributes:
        block_bytes: payload bytes after which a block is sealed.
        max_bytes: bytes of sealed blocks that this producer may have in the place before ``write`` waits; blocks that
            every group acknowledged are deleted when space is needed. A place holds at most this times its producers.
        sync: whether a sealed block is on disk (fsync) before ``flush`` or ``close`` returns, where a carrier has one.
        timeout_s: longest wait for space; None: no bound.

    >>> BlockLimits(block_bytes=2**20).sync
    True
    """

    block_bytes: int = 8 * 2**20
    max_bytes: int = 2**30
    sync: bool = True
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.block_bytes <= self.max_bytes:
            raise refused("1 <= block_bytes <= max_bytes", f"{self.block_bytes}, {self.max_bytes}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadOptions:
    """How a reader of a place acknowledges and waits.

    Attributes:
        acknowledge: ``next``: asking for the record behind a block acknowledges the block; ``call``: only
            ``reader.acknowledge(position)`` does.
        on_vanished: what happens when a producer died without an end: ``raise`` TruncatedError, or ``wait`` for its
            restart.
        grace_s: how long a producer may be dead before ``on_vanished="raise"`` raises.
        timeout_s: longest wait for a block; None: no bound.

    >>> ReadOptions(acknowledge="call").on_vanished
    'raise'
    """

    acknowledge: Literal["next", "call"] = "next"
    on_vanished: Literal["wait", "raise"] = "raise"
    grace_s: float = 30.0
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        for name, allowed in (("acknowledge", ("next", "call")), ("on_vanished", ("wait", "raise"))):
            if getattr(self, name) not in allowed:
                raise refused(f"{name} of {allowed}", repr(getattr(self, name)))


def check_name(value: str, what: str) -> str:
    """Return a name of a run, producer or group: 1 to 128 of letters, digits, ``_ . -``. Raises UsageError.

    >>> check_name("engine-0", "producer")
    'engine-0'
    """
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise refused(f"{what} of 1 to 128 letters, digits, '_', '.' or '-'", repr(value))
    return value


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """What the first opener of a place declares. ``place``: a random identifier, made then."""

    place: str
    run: str
    groups: tuple[str, ...]
    spec: RouteSpec
    encoding: Encoding

    def to_document(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "version": _PLACE_VERSION,
            "place": self.place,
            "run": self.run,
            "groups": list(self.groups),
            "spec": json.loads(self.spec.to_json()),
            "encoding": self.encoding,
        }

    @classmethod
    def from_document(cls, document: Mapping[str, Any], *, spec_type: type[RouteSpec]) -> Manifest:
        """Parse ``to_document``. Raises FormatError for another version or other content."""
        if document.get("version") != _PLACE_VERSION:
            raise FormatError(
                f"expected a place of version {_PLACE_VERSION}, got {document.get('version')!r}", kind=ErrorKind.VERSION
            )
        try:
            return cls(
                place=str(document["place"]),
                run=check_name(document["run"], "run"),
                groups=tuple(check_name(group, "group") for group in document["groups"]),
                spec=spec_type.from_json(json.dumps(document["spec"])),
                encoding=document["encoding"],
            )
        except (KeyError, TypeError, UsageError) as error:
            raise FormatError(
                f"expected a manifest, got {str(document)[:120]} ({error})", kind=ErrorKind.MANIFEST
            ) from None

    def require_same(self, declared: Manifest) -> None:
        """Raise UsageError or SpecError unless a later opener declares the same run, groups, spec and encoding."""
        for name, theirs, ours in (
            ("run", self.run, declared.run),
            ("groups", sorted(self.groups), sorted(declared.groups)),
            ("encoding", self.encoding, declared.encoding),
        ):
            if theirs != ours:
                raise refused(f"the {name} of the place, {theirs!r}", f"{ours!r}")
        self.spec.require_same_geometry(declared.spec, where="the place's manifest")

    def require_group(self, group: str) -> None:
        """Raise UsageError for a group that was not declared."""
        if group not in self.groups:
            raise refused(f"one of the declared groups {list(self.groups)}", repr(group))


# -- writing -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class SealedBlock:
    """One block before it is stored: a batch and its trailer. ``keys``: of its records, in order."""

    batch: pa.RecordBatch
    trailer: str
    keys: tuple[RecordKey, ...]

    @classmethod
    def of(cls, records: Sequence[RouteRecord], spec: RouteSpec, *, encoding: Encoding) -> SealedBlock:
        """Encode checked records."""
        batch = write_batch(records, spec, encoding=encoding)
        counter = TrailerCounter(spec, encoding)
        counter.add_batch()
        for record in records:
            counter.add_record(record.checksum, len(record.token_ids))
        keys = tuple(record.key for record in records)
        return cls(batch=batch, trailer=counter.trailer().to_json(), keys=keys)

    def write_to(self, sink: Any) -> None:
        """Write the whole v1 stream to an Arrow output stream or a file."""
        with pa.ipc.new_stream(sink, self.batch.schema) as writer:
            writer.write_batch(self.batch)
            writer.write_batch(trailer_batch(self.batch.schema), custom_metadata={TRAILER_KEY: self.trailer})

    def to_buffer(self) -> pa.Buffer:
        """The whole v1 stream in memory."""
        sink = pa.BufferOutputStream()
        self.write_to(sink)
        return sink.getvalue()


class ProducerSlot(ABC):
    """One producer's place to publish blocks; held by one living writer. Carriers implement it."""

    @abstractmethod
    def publish(self, block: SealedBlock) -> BlockName:
        """Store a block under the next number, whole or not at all; waits for space. Raises TransportError."""

    @abstractmethod
    def end(self, how: Literal["closed", "aborted"]) -> None:
        """State that no further block comes."""

    @abstractmethod
    def release(self) -> None:
        """Give the slot up; without ``end`` before, readers see a producer that vanished. Idempotent."""


class BlockWriter(RecordWriter):
    """The RouteSink of a carrier: gathers records, seals them into blocks, publishes each at once.

    ``flush`` seals what is held; after it returns, everything written is durable as the carrier's table says. ``close``
    does the same and ends the producer; leaving ``with`` by an exception aborts it. Blocks that were sealed before
    stay.
    """

    def __init__(self, slot: ProducerSlot, spec: RouteSpec, *, encoding: Encoding, limits: BlockLimits) -> None:
        super().__init__(spec, max_bytes=limits.block_bytes, max_keys=_WRITTEN_KEYS)
        self._slot, self._encoding = slot, encoding
        self._held: list[RouteRecord] = []
        self._held_bytes = 0
        self._columns: Any = None

    def flush(self) -> BlockName | None:
        """Seal what is held; return the name of the block, None where nothing was held. Raises TransportError."""
        if not self._open:
            raise UsageError("expected an open writer, got one that was closed or aborted", kind=ErrorKind.CLOSED)
        try:
            return self._seal()
        except BaseException:
            self._open = False
            self._fail()
            raise

    def _check(self, record: RouteRecord) -> None:
        del record  # the columns of a block are its own

    def _put(self, record: RouteRecord) -> None:
        columns = column_types(record)
        if self._held and columns != self._columns:
            self._seal()
        self._columns = columns
        self._held.append(record)
        self._held_bytes += record.nbytes
        if self._held_bytes >= self._max_bytes:
            self._seal()

    def _seal(self) -> BlockName | None:
        if not self._held:
            return None
        name = self._slot.publish(SealedBlock.of(self._held, self._spec, encoding=self._encoding))
        self._held, self._held_bytes = [], 0
        return name

    def _finish(self) -> None:
        self._seal()
        self._slot.end("closed")
        self._slot.release()

    def _discard(self) -> None:
        self._held = []
        self._slot.end("aborted")
        self._slot.release()

    def _fail(self) -> None:
        self._held = []
        self._slot.release()  # not an end: a restarted producer goes on


# -- reading -----------------------------------------------------------------------------------------------------------


class BlockStore(ABC):
    """Where the blocks of a place lie, for one reader; carriers implement it. Pickles; a copy holds no group."""

    @property
    @abstractmethod
    def manifest(self) -> Manifest:
        """What the place declares."""

    @abstractmethod
    def producers(self) -> list[str]:
        """The producers that ever opened the place, sorted."""

    @abstractmethod
    def state(self, name: BlockName) -> BlockState:
        """What can be said of a block now."""

    @abstractmethod
    def last_number(self, producer: str) -> int:
        """The number behind the producer's last sealed block; 0 for an unknown producer."""

    @abstractmethod
    def read(self, name: BlockName) -> pa.Buffer:
        """The bytes of a sealed block, in memory that no other process can change. Raises DataError (EXPIRED)."""

    @abstractmethod
    def load_position(self) -> tuple[Position, bytes]:
        """What the group acknowledged, and the remembered keys as ``save_position`` was given them."""

    @abstractmethod
    def save_position(self, position: Position, keys: bytes) -> None:
        """Store what the group acknowledged. Raises UsageError in a copy that does not hold the group."""

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
        policy: ReadPolicy,
        options: ReadOptions,
    ) -> None:
        super().__init__(store.manifest.spec, policy)
        self._store, self._follow, self._options = store, follow, options
        if isinstance(producers, int):
            if producers < 1:
                raise refused("at least one producer", f"{producers}")
            self._expected: tuple[str, ...] | int = producers
        else:
            self._expected = tuple(sorted({check_name(name, "producer") for name in producers}))
            if not self._expected:
                raise refused("at least one producer", "none")
        self._acknowledged, keys = store.load_position()
        self._seen, self._saved = _unpacked(keys), _unpacked(keys)
        self._passed: deque[tuple[BlockName, dict[int, int]]] = deque()
        self._reached = self._acknowledged

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

        Raises UsageError for a position of another place, beyond what exists, or before what was acknowledged.
        """
        self._check_position(position)
        if any(position.number(name) < number for name, number in self._acknowledged.next.items()):
            raise refused(f"a position behind {self._acknowledged.to_json()}", position.to_json())
        while self._passed and self._passed[0][0].number < position.number(self._passed[0][0].producer):
            _remember(self._saved, self._passed.popleft()[1])
        self._store.save_position(position, _packed(self._saved))
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
        self._check_position(start)
        return self._names(start, in_turn=True)

    def open(self, name: BlockName) -> IpcReader:
        """Open one block as a source, under this reader's policy; the bytes are copied before they are verified."""
        return self._opened(name, self._policy)

    def _opened(self, name: BlockName, policy: ReadPolicy, quarantine: Quarantine | None = None) -> IpcReader:
        frames, walkable = frames_of(self._store.read(name), salvage=policy.on_corrupt == "quarantine")
        # a block is whole or damaged
        return IpcReader(frames, replace(policy, on_truncated="raise"), walkable=walkable, quarantine=quarantine)

    def fetch(
        self,
        name: BlockName,
        *,
        keys: Sequence[RecordKey] | None = None,
        layer_ids: Sequence[int] | None = None,
        tokens: tuple[int, int] | None = None,
    ) -> list[RouteRecord]:
        """Read records of one block, verified whole and then cut. Raises DataError (EXPIRED, ROUTES_MISSING)."""
        return fetch_records(self._store.read(name), keys=keys, layer_ids=layer_ids, tokens=tokens)

    def _names(self, position: Position, *, in_turn: bool) -> Iterator[BlockName]:
        turns = _Turns(self._store, self._options, expected=self._expected, follow=self._follow)
        while (name := turns.next(position, in_turn=in_turn)) is not None:
            yield name
            position = position.after(name)

    # -- records -------------------------------------------------------------------------------------------------------

    def _arrive(self) -> Iterator[RouteRecord]:
        turns = _Turns(self._store, self._options, expected=self._expected, follow=self._follow)
        self._reached = self._acknowledged
        try:
            while (name := turns.next(self._reached, in_turn=False)) is not None:
                yield from self._block_records(name)
                if self._closed:
                    return
                self._reached = self._reached.after(name)
                if self._options.acknowledge == "next":
                    self.acknowledge(self._reached)
            self._report = replace(self._report, complete=turns.complete)
        except TruncatedError:
            if self._policy.on_truncated == "raise":
                raise
            self._report = replace(self._report, truncated=True)

    def _block_records(self, name: BlockName) -> Iterator[RouteRecord]:
        found: dict[int, int] = {}
        # this reader looks for alarms itself
        block = self._opened(name, replace(self._policy, on_alarm="ignore"), self.quarantine)
        for record in block:
            key = _key_digest(record.key)
            known = self._seen.get(key, found.get(key))
            if known == record.checksum:
                self._report = replace(self._report, repeats=self._report.repeats + 1)
                continue
            if known is not None:
                raise DataError(
                    f"expected {record.key} with the checksum {known:016x} that came before, got "
                    f"{record.checksum:016x} @ block {name}",
                    kind=ErrorKind.DUPLICATE_KEY,
                )
            found[key] = record.checksum
            yield record
        _remember(self._seen, found)
        self._passed.append((name, found))
        read = block.report()
        self._report = replace(
            self._report,
            batches=self._report.batches + read.batches,
            skipped_batches=self._report.skipped_batches + read.skipped_batches,
            skipped_records=self._report.skipped_records + read.skipped_records,
        )

    def close(self) -> None:
        """Give the group up. Records already yielded stay valid; what was not acknowledged comes again."""
        super().close()
        self._store.release()


def _key_digest(key: RecordKey) -> int:
    return xxhash.xxh3_64_intdigest(json.dumps(key).encode())


def _packed(keys: Mapping[int, int]) -> bytes:
    """Remembered keys as pairs of little-endian u64: digest of the key, checksum of the record."""
    return np.array(list(keys.items()), dtype="<u8").tobytes()


def _unpacked(data: bytes) -> OrderedDict[int, int]:
    if len(data) % 16:
        raise FormatError(f"expected pairs of u64, got {len(data)} bytes", kind=ErrorKind.MANIFEST)
    return OrderedDict(np.frombuffer(data, dtype="<u8").reshape(-1, 2).tolist())


def _remember(keys: OrderedDict[int, int], more: Mapping[int, int]) -> None:
    keys.update(more)
    while len(keys) > REMEMBERED_KEYS:
        keys.popitem(last=False)


class _Turns:
    """Chooses the next block of a place, and waits for it."""

    def __init__(
        self, store: BlockStore, options: ReadOptions, *, expected: int | tuple[str, ...], follow: bool
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
        began, wait = time.monotonic(), _FIRST_WAIT_S
        while True:
            name = self._look(position, in_turn=in_turn)
            if name is not None or self.complete or not self._follow:
                return name
            limit = self._options.timeout_s
            if limit is not None and time.monotonic() - began > limit:
                raise TransportError(
                    f"expected a block within {limit} s, got none of {self._producers() or 'any producer'}",
                    kind=ErrorKind.TIMED_OUT,
                )
            time.sleep(wait)
            wait = min(2 * wait, _LONGEST_WAIT_S)

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

    def _state(self, producer: str, number: int) -> tuple[BlockName, BlockState]:
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
        if state == "vanished":
            self._note_vanished(producer)
        else:
            self._dead_since.pop(producer, None)
        return name, state

    def _note_vanished(self, producer: str) -> None:
        since = self._dead_since.setdefault(producer, time.monotonic())
        if self._options.on_vanished == "raise" and time.monotonic() - since >= self._options.grace_s:
            raise TruncatedError(
                f"expected producer {producer!r} to close, got none alive under that name for "
                f"{self._options.grace_s} s: start it again under the same name, and read on",
                kind=ErrorKind.VANISHED,
            )

    def _producers(self) -> list[str]:
        if isinstance(self._expected, int):
            if len(self._known) < self._expected:
                self._known = self._store.producers()
            if len(self._known) > self._expected:
                raise refused(f"{self._expected} producers", f"{self._known}")
            return self._known
        return list(self._expected)


def _rotated(producers: list[str], last: str | None) -> list[str]:
    """The producers by name, beginning behind the one whose block came last."""
    at = 0 if last is None else next((i for i, name in enumerate(producers) if name > last), 0)
    return producers[at:] + producers[:at]


def fetch_records(
    data: pa.Buffer,
    *,
    keys: Sequence[RecordKey] | None = None,
    layer_ids: Sequence[int] | None = None,
    tokens: tuple[int, int] | None = None,
) -> list[RouteRecord]:
    """Read records of a block in memory: verified whole, then cut, each under a new checksum where it was cut.

    Args:
        data: the bytes of a block.
        keys: the records wanted, in this order; None: all.
        layer_ids, tokens: as in ``RouteSource.select``.

    Raises DataError (ROUTES_MISSING) for a key that is not in the block.
    """
    frames, walkable = frames_of(data)
    with IpcReader(frames, ReadPolicy(on_alarm="ignore"), walkable=walkable) as reader:
        reader.select(layer_ids=layer_ids, tokens=tokens)
        found = {record.key: record for record in reader}
    if keys is None:
        return list(found.values())
    absent = [key for key in keys if key not in found]
    if absent:
        raise DataError(
            f"expected the records {list(map(str, absent[:4]))} in the block, got {len(found)} others",
            kind=ErrorKind.ROUTES_MISSING,
        )
    return [found[RecordKey(*key)] for key in keys]
