"""What all carriers of blocks share: options, sealing records into blocks, reading blocks in order, acknowledgement.

A block is one whole v1 stream under a name, published at once. A carrier adds where blocks lie: a ``BlockStore`` for
readers and a ``ProducerSlot`` for a writer. Knows no files and no network.

Rows that a record shares with an earlier one of its group, or of its sample, are stored once: it becomes a delta, and
its block's trailer names the blocks that it leans on. Those are kept for as long as it is. Readers join them again.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa

from routeplane.errors import DataError, ErrorKind, FormatError, TransportError, TruncatedError, UsageError, refused
from routeplane.record.codec import column_types, write_batch
from routeplane.record.interfaces import BlockName, KeyMemory, Position
from routeplane.record.policy import Quarantine, ReadPolicy
from routeplane.record.prefixes import join_prefix, verified_delta
from routeplane.record.record import RecordKey, RouteRecord
from routeplane.record.schema import Encoding, choose_encoding
from routeplane.record.transfer import RecordReader, RecordWriter
from routeplane.stream.batches import TRAILER_KEY, TrailerCounter, trailer_batch
from routeplane.stream.files import frames_of
from routeplane.stream.ipc import IpcReader

if TYPE_CHECKING:
    from routeplane.record.spec import RouteSpec

__all__ = [
    "DEFAULT_GROUP",
    "DEFAULT_LIMITS",
    "DEFAULT_OPTIONS",
    "DEFAULT_POLICY",
    "LEANS_KEY",
    "BlockLimits",
    "BlockPart",
    "BlockReader",
    "BlockRecords",
    "BlockState",
    "BlockStore",
    "BlockWriter",
    "Manifest",
    "ProducerSlot",
    "ReadOptions",
    "Retention",
    "SealedBlock",
    "check_name",
    "cut_block",
    "parse_leans",
    "sealed_cut",
]

#: The group of a place that declares no others.
DEFAULT_GROUP = "default"
#: Metadata key of a block's trailer where records are deltas: the numbers of all blocks that they lean on, as JSON.
LEANS_KEY = "routeplane.leans"
#: How many keys a writer remembers to refuse a record that it is given twice.
_WRITTEN_KEYS = 65_536
#: A place of another version is refused.
_PLACE_VERSION = "1"

#: Bytes of whole records that a writer holds to compare later ones with, and a reader to join later ones to.
_BASE_BYTES = 2**27
#: Of a producer's byte bound, the part that blocks may take which one block leans on.
_LEAN_SHARE = 8

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


DEFAULT_LIMITS, DEFAULT_OPTIONS, DEFAULT_POLICY = BlockLimits(), ReadOptions(), ReadPolicy()


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

    @classmethod
    def of(
        cls, spec: RouteSpec, *, run: str, groups: Sequence[str], encoding: Literal["plain", "narrow", "auto"]
    ) -> Manifest:
        """What an opener declares, under a new identifier. Raises UsageError."""
        checked = tuple(check_name(group, "group") for group in groups)
        if not checked or len(set(checked)) < len(checked):
            raise refused("at least one group, each once", f"{list(groups)}")
        chosen = choose_encoding(encoding, spec)
        return cls(place=secrets.token_hex(16), run=check_name(run, "run"), groups=checked, spec=spec, encoding=chosen)

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
    """One block before it is stored: a batch and its trailer.

    ``leans``: numbers of the producer's blocks that hold first rows of its records; None where all are whole.
    """

    batch: pa.RecordBatch
    trailer: str
    leans: tuple[int, ...] | None = None

    @classmethod
    def of(
        cls,
        records: Sequence[RouteRecord],
        spec: RouteSpec,
        *,
        encoding: Encoding,
        leans: tuple[int, ...] | None = None,
    ) -> SealedBlock:
        """Encode checked records."""
        counter = TrailerCounter(spec, encoding)
        counter.add_batch()
        for record in records:
            counter.add_record(record.checksum, len(record.token_ids))
        batch = write_batch(records, spec, encoding=encoding)
        return cls(batch=batch, trailer=counter.trailer().to_json(), leans=leans)

    def write_to(self, sink: Any) -> None:
        """Write the whole v1 stream to an Arrow output stream or a file."""
        metadata = {TRAILER_KEY: self.trailer}
        if self.leans is not None:
            metadata[LEANS_KEY] = json.dumps(self.leans)
        with pa.ipc.new_stream(sink, self.batch.schema) as writer:
            writer.write_batch(self.batch)
            writer.write_batch(trailer_batch(self.batch.schema), custom_metadata=metadata)

    def to_buffer(self) -> pa.Buffer:
        """The whole v1 stream in memory."""
        sink = pa.BufferOutputStream()
        self.write_to(sink)
        return sink.getvalue()


@dataclass(kw_only=True)
class Retention:
    """Which blocks of one producer are there: their bytes, and which others each leans on. Decides what may go."""

    max_bytes: int
    sizes: dict[int, int] = field(default_factory=dict)
    leans: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def add(self, number: int, size: int, leans: Sequence[int] | None) -> None:
        """A block was sealed."""
        self.sizes[number] = size
        if leans:
            self.leans[number] = tuple(leans)

    def drop(self, number: int) -> None:
        """A block was deleted."""
        self.sizes.pop(number, None)
        self.leans.pop(number, None)

    def all_leans(self, numbers: Iterable[int]) -> set[int]:
        """These blocks and all that they lean on; each block names all of its own."""
        return {found for number in numbers for found in (number, *self.leans.get(number, ()))}

    def may_lean(self, numbers: Iterable[int]) -> bool:
        """Whether a further block may lean on these: they are there, and small beside the bound."""
        found = self.all_leans(numbers)
        return found <= self.sizes.keys() and sum(self.sizes[each] for each in found) * _LEAN_SHARE <= self.max_bytes

    def has_space(self, size: int) -> bool:
        """Whether a block fits now; one that is larger than the bound goes alone."""
        return not self.sizes or sum(self.sizes.values()) + size <= self.max_bytes

    def next_to_delete(self, *, below: int, leans: Iterable[int] | None) -> int | None:
        """The oldest block that all groups acknowledged (those before ``below``) and that no other needs.

        ``leans``: what the block that waits for space leans on.
        """
        needed = self.all_leans({*(number for number in self.sizes if number >= below), *(leans or ())})
        return next((number for number in sorted(self.sizes) if number < below and number not in needed), None)


class ProducerSlot(ABC):
    """One producer's place to publish blocks; held by one living writer. Carriers implement it."""

    #: What is there, so that the writer knows which blocks its records may lean on.
    retention: Retention

    @abstractmethod
    def publish(self, block: SealedBlock) -> BlockName:
        """Store a block under the next number, whole or not at all; waits for space. Raises TransportError."""

    @abstractmethod
    def end(self, how: Literal["closed", "aborted"]) -> None:
        """State that no further block comes."""

    @abstractmethod
    def release(self) -> None:
        """Give the slot up; without ``end`` before, readers see a producer that vanished. Idempotent."""


@dataclass(kw_only=True, slots=True)
class _Base:
    """A record that later ones may refer to: whole, as it is stored, and its block (None: the one being filled)."""

    whole: RouteRecord
    stored: RouteRecord
    number: int | None = None


class BlockWriter(RecordWriter):
    """The RouteSink of a carrier: gathers records, seals them into blocks, publishes each at once.

    ``flush`` seals what is held; after it returns, everything written is durable as the carrier's table says. ``close``
    does the same and ends the producer; leaving ``with`` by an exception aborts it. Blocks that were sealed before
    stay.
    """

    def __init__(self, slot: ProducerSlot, manifest: Manifest, *, limits: BlockLimits) -> None:
        super().__init__(manifest.spec, max_bytes=limits.block_bytes, max_keys=_WRITTEN_KEYS)
        self._slot, self._encoding = slot, manifest.encoding
        self._held: list[RouteRecord] = []
        self._held_bytes = self._base_bytes = 0
        self._columns: Any = None
        self._leans: set[int] | None = None
        self._bases: OrderedDict[str, _Base] = OrderedDict()  # the last record of each group, or sample

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
        # one that was written long ago may be gone; the columns of a block are its own
        if record.prefix is not None:
            raise refused(
                "whole records (resolve(records) joins them), which the writer makes deltas of", f"{record.key}"
            )

    def _put(self, record: RouteRecord) -> None:
        columns = column_types(record)
        if self._held and columns != self._columns:
            self._seal()
        self._columns = columns
        stored = self._without_known_rows(record)
        self._held.append(stored)
        self._held_bytes += stored.nbytes
        if self._held_bytes >= self._max_bytes:
            self._seal()

    def _without_known_rows(self, record: RouteRecord) -> RouteRecord:
        """The record as it is to be stored, and noted as the one that the next of its group may refer to."""
        name = record.sample_id if record.group is None else record.group
        base, stored = self._bases.get(name), record
        if base is not None and (base.number is None or self._slot.retention.may_lean([base.number])):
            stored = verified_delta(record, base.whole, stored=base.stored)
        if base is not None and stored is not record:
            self._leans = self._leans or set()
            self._leans |= set() if base.number is None else self._slot.retention.all_leans([base.number])
        self._note(name, _Base(whole=record, stored=stored))
        return stored

    def _note(self, name: str, base: _Base) -> None:
        old = self._bases.pop(name, None)
        self._base_bytes += base.whole.nbytes - (0 if old is None else old.whole.nbytes)
        self._bases[name] = base
        while self._base_bytes > _BASE_BYTES:
            self._base_bytes -= self._bases.popitem(last=False)[1].whole.nbytes

    def _seal(self) -> BlockName | None:
        if not self._held:
            return None
        leans = None if self._leans is None else tuple(sorted(self._leans))
        name = self._slot.publish(SealedBlock.of(self._held, self._spec, encoding=self._encoding, leans=leans))
        for base in self._bases.values():
            base.number = name.number if base.number is None else base.number
        self._held, self._held_bytes, self._leans = [], 0, None
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
        policy: ReadPolicy = DEFAULT_POLICY,
        options: ReadOptions = DEFAULT_OPTIONS,
    ) -> None:
        self._store, self._follow, self._options = store, follow, options
        try:
            super().__init__(store.manifest.spec, policy)
            self._expected = _expected_producers(producers)
            self._acknowledged = self._reached = store.load_position()
        except BaseException:
            store.release()
            raise
        self._keys = KeyMemory(self._acknowledged.keys)

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
        self._check_position(start)
        return self._names(start, in_turn=True)

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
        part = BlockPart(
            keys=None if keys is None else tuple(RecordKey(*key) for key in keys),
            layer_ids=None if layer_ids is None else tuple(layer_ids),
            tokens=tokens,
        )
        return self._store.cut(name, part)

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
                self._report = replace(self._report, repeats=self._report.repeats + 1)
            else:
                yield record
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


def _expected_producers(producers: int | Sequence[str]) -> int | tuple[str, ...]:
    names = (
        producers if isinstance(producers, int) else tuple(sorted({check_name(each, "producer") for each in producers}))
    )
    if names == () or (isinstance(names, int) and names < 1):
        raise refused("at least one producer", f"{producers}")
    return names


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
        if self.leans is None:
            yield from super()._arrive()
            return
        for stored in super()._arrive():
            try:
                whole = self._joined(stored)
            except DataError:
                if self._policy.on_corrupt == "raise":
                    raise
                self._report = replace(self._report, skipped_records=self._report.skipped_records + 1)
                continue
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
    text = metadata.get(LEANS_KEY)
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

    def to_json(self) -> str:
        """Plain values, for a carrier that asks another process to cut."""
        return json.dumps({"keys": self.keys, "layer_ids": self.layer_ids, "tokens": self.tokens})

    @classmethod
    def from_json(cls, text: str | bytes) -> BlockPart:
        """Parse ``to_json``. Raises UsageError."""
        try:
            found = json.loads(text)
            keys, layers, tokens = (found[name] for name in ("keys", "layer_ids", "tokens"))
            return cls(
                keys=None if keys is None else tuple(RecordKey(str(name), int(a), int(s)) for name, a, s in keys),
                layer_ids=None if layers is None else tuple(int(layer) for layer in layers),
                tokens=None if tokens is None else (int(tokens[0]), int(tokens[1])),
            )
        except (KeyError, IndexError, TypeError, ValueError, RecursionError) as error:
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
    return SealedBlock.of(records, records[0].spec, encoding=encoding).to_buffer()
