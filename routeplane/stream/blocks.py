"""What all carriers of blocks share: options, the manifest of a place, and sealing records into blocks.

A block is one whole v1 stream under a name, published at once. A carrier adds where blocks lie: a ``ProducerSlot`` for
a writer, and a ``BlockStore`` (``block_reader``) for readers. Knows no files and no network.

Rows that a record shares with an earlier one of its group, or of its sample, are stored once: it becomes a delta, and
its block's trailer names the blocks that it leans on. Those are kept for as long as it is. Readers join them again.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import time
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, get_args

import pyarrow as pa

from routeplane.errors import ErrorKind, FormatError, TransportError, UsageError, refused
from routeplane.record.batches import TRAILER_KEY, TrailerCounter, trailer_batch
from routeplane.record.codec import column_types, write_batch
from routeplane.record.interfaces import BlockName
from routeplane.record.policy import ReadPolicy
from routeplane.record.prefixes import verified_delta
from routeplane.record.record import RouteRecord
from routeplane.record.schema import Encoding, choose_encoding
from routeplane.record.spec import RouteSpec
from routeplane.record.transfer import RecordWriter
from routeplane.stream.files import WholeWrites

__all__ = [
    "DEFAULT_GROUP",
    "DEFAULT_LIMITS",
    "DEFAULT_OPTIONS",
    "DEFAULT_POLICY",
    "LEANS_KEY",
    "WARN_AFTER_S",
    "BlockLimits",
    "BlockState",
    "BlockWriter",
    "Manifest",
    "ProducerSlot",
    "ReadOptions",
    "Retention",
    "SealedBlock",
    "check_name",
    "group_taken",
    "producer_closed",
    "producer_taken",
    "space_for",
    "wait_until",
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

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.0005, 0.02
#: After how long a reader logs that its place is not there; engines take minutes to start, a mistyped name never comes.
WARN_AFTER_S = 10.0

_Found = TypeVar("_Found")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")

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
    def from_document(cls, document: Mapping[str, Any]) -> Manifest:
        """Parse ``to_document``. Raises FormatError for another version or other content."""
        version = document.get("version") if isinstance(document, Mapping) else document
        if version != _PLACE_VERSION:
            raise FormatError(
                f"expected a place of version {_PLACE_VERSION}, got {str(version)[:80]!r}", kind=ErrorKind.VERSION
            )
        try:
            if document["encoding"] not in get_args(Encoding) or not isinstance(document["groups"], list):
                raise TypeError("another encoding, or groups that are not a list")
            return cls(
                place=str(document["place"]),
                run=check_name(document["run"], "run"),
                groups=tuple(check_name(group, "group") for group in document["groups"]),
                spec=RouteSpec.from_json(json.dumps(document["spec"])),
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


# -- what carriers wait for and refuse ---------------------------------------------------------------------------------


def wait_until(
    ready: Callable[[], _Found | None],
    timeout_s: float | None,
    *,
    expected: Callable[[], str],
    warn_after_s: float | None = None,
) -> _Found:
    """Ask until an answer is true, less and less often, and return it. Raises TransportError (TIMED_OUT).

    ``warn_after_s``: when a wait that goes on is logged, once, for what may never come (a place that was mistyped).

    >>> wait_until(lambda: "here", 0.0, expected=lambda: "the truth")
    'here'
    """
    start, wait = time.monotonic(), _FIRST_WAIT_S
    while not (found := ready()):
        waited = time.monotonic() - start
        if timeout_s is not None and waited >= timeout_s:
            raise TransportError(f"expected {expected()} within {timeout_s} s, got none", kind=ErrorKind.TIMED_OUT)
        if warn_after_s is not None and waited >= warn_after_s:
            warn_after_s = None
            bound = "without a bound" if timeout_s is None else f"up to {timeout_s} s"
            logging.getLogger(__name__).warning("expected %s, got none yet; waiting %s", expected(), bound)
        time.sleep(wait)
        wait = min(2 * wait, _LONGEST_WAIT_S)
    return found


def space_for(size: int, *, groups: Sequence[str], limits: BlockLimits) -> str:
    """What a writer waits for at its byte bound."""
    return f"space for {size} bytes (the groups {list(groups)} have not all acknowledged what fills {limits.max_bytes})"


def producer_taken(producer: str, where: Any) -> UsageError:
    """The error for a second writer under the name of a living one."""
    message = f"expected no living writer of producer {producer!r}, got one @ {where}"
    return UsageError(message, kind=ErrorKind.PRODUCER_TAKEN)


def producer_closed(producer: str, where: Any) -> UsageError:
    """The error for a writer under a name that was closed."""
    return refused(
        f"a producer that has not closed (start a new name, or a new place) @ {where}", f"{producer!r}, which has"
    )


def group_taken(group: str, where: Any) -> UsageError:
    """The error for a second reader of a group."""
    return UsageError(
        f"expected no living reader of group {group!r}, got one @ {where}: data-parallel ranks use a group each, or "
        "one reader and a shard",
        kind=ErrorKind.GROUP_TAKEN,
    )


# -- writing -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class SealedBlock:
    """One block before it is stored: what writes its v1 stream to an Arrow output stream or a file.

    ``leans``: numbers of the producer's blocks that hold first rows of its records; None where all are whole.
    """

    write_to: Callable[[Any], object]
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
        metadata = {TRAILER_KEY: counter.trailer().to_json()}
        if leans is not None:
            metadata[LEANS_KEY] = json.dumps(leans)
        scattered: dict[Any, Any] = {}
        batch = write_batch(records, spec, encoding=encoding, scattered=scattered)

        def write_to(sink: Any) -> None:
            with pa.ipc.new_stream(WholeWrites(sink, scattered=scattered), batch.schema) as writer:
                writer.write_batch(batch)
                writer.write_batch(trailer_batch(batch.schema), custom_metadata=metadata)

        return cls(write_to=write_to, leans=leans)

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

    def add(self, number: int, size: int, *, leans: Sequence[int] | None) -> None:
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

    def make_space(
        self, size: int, leans: Iterable[int] | None, *, below: int, delete: Callable[[int], object]
    ) -> bool:
        """Delete the oldest blocks until one of ``size`` bytes, which leans on ``leans``, fits; return whether it does.

        Those stay that not all groups acknowledged (from ``below`` on), and those that another one needs.
        """
        needed = self.all_leans({*(number for number in self.sizes if number >= below), *(leans or ())})
        for number in sorted(self.sizes.keys() - needed):
            if self.has_space(size):
                break
            delete(number)
            self.drop(number)
        return self.has_space(size)


class ProducerSlot(ABC):
    """One producer's place to publish blocks; held by one living writer. Carriers implement it."""

    #: What the place declares.
    manifest: Manifest
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
        self._slot, self._encoding, self._pid = slot, manifest.encoding, os.getpid()
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
        base, stored = self._bases.pop(name, None), record
        if base is not None:
            self._base_bytes -= base.whole.nbytes
            leans = set() if base.number is None else self._slot.retention.all_leans([base.number])
            if base.number is None or self._slot.retention.may_lean([base.number]):
                stored = verified_delta(record, base.whole, stored=base.stored)
            if stored is not record:
                self._leans = leans.union(self._leans or ())
        self._bases[name] = _Base(whole=record, stored=stored)
        self._base_bytes += record.nbytes
        while self._base_bytes > _BASE_BYTES:
            self._base_bytes -= self._bases.popitem(last=False)[1].whole.nbytes
        return stored

    def _seal(self) -> BlockName | None:
        if self._pid != os.getpid():
            raise UsageError(
                "expected the process that opened the writer, got a forked child: open a writer of its own",
                kind=ErrorKind.CLOSED,
            )
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
        if self._pid == os.getpid():  # a forked child's copy ends nothing
            self._slot.end("aborted")
        self._fail()

    def _fail(self) -> None:
        self._held = []
        if self._pid == os.getpid():
            self._slot.release()  # not an end: a restarted producer goes on
