"""The types of transfer: sink, source, blocks with their positions, and the ticket that names rows from elsewhere.

Interfaces and values only. ``stream`` and ``archive`` implement them; ``capture`` and ``batch`` are given them.
"""

from __future__ import annotations

import base64
import json
import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self

import numpy as np

from routeplane.errors import DataError, ErrorKind, Problem, UsageError, refused
from routeplane.record.checksum import digest_of
from routeplane.record.parse import check_count, check_text
from routeplane.record.record import RecordKey, RouteRecord
from routeplane.record.spans import Coverage
from routeplane.record.spec import RouteSpec

if TYPE_CHECKING:
    from types import TracebackType

__all__ = [
    "MAX_TICKET_BYTES",
    "REMEMBERED_KEYS",
    "Admission",
    "BlockName",
    "BlockSource",
    "KeyMemory",
    "Position",
    "Report",
    "RouteSink",
    "RouteSource",
    "RouteTicket",
    "admit",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Admission:
    """The verdict on a batch of records before any forward runs.

    ``code`` is 0 when admitted, else 1 plus the position of the first problem's kind in ErrorKind: ranks reduce it with
    max, and none enters a collective alone. Pickles.
    """

    admitted: bool
    code: int
    coverage: Coverage
    problems: tuple[Problem, ...] = ()

    def require(self) -> None:
        """Raise DataError, with all problems, where the batch was refused."""
        if not self.admitted:
            raise DataError.from_problems(self.problems, what="batch refused")


def admit(records: Sequence[RouteRecord], spec: RouteSpec, *, max_missing: float | None) -> Admission:
    """Judge records as one batch: geometry, keys, and the share of missing rows. Raises UsageError for a bad share."""
    if max_missing is not None and not 0.0 <= max_missing <= 1.0:
        raise UsageError(f"expected max_missing in [0, 1], got {max_missing}", kind=ErrorKind.ARGUMENT)
    problems: list[Problem] = []
    seen: set[RecordKey] = set()
    coverage = Coverage.of_records(record.captures for record in records)
    for record in records:
        for difference in spec.differences(record.spec):
            problems.append(Problem(kind=ErrorKind.SPEC_MISMATCH, message=difference, sample=record.sample_id))
        if record.key in seen:
            message = f"expected each record once, got {record.key} twice"
            problems.append(Problem(kind=ErrorKind.DUPLICATE_KEY, message=message, sample=record.sample_id))
        seen.add(record.key)
    if max_missing is not None and coverage.missing_share > max_missing:
        message = (
            f"expected at most {max_missing:.4f} of fed rows missing, got {coverage.missing_share:.4f} "
            f"({coverage.missing} of {coverage.fed})"
        )
        problems.append(Problem(kind=ErrorKind.ROUTES_MISSING, message=message))
    code = 1 + list(ErrorKind).index(problems[0].kind) if problems else 0
    return Admission(admitted=not problems, code=code, coverage=coverage, problems=tuple(problems))


#: How many keys a reader of blocks remembers, and keeps with its position, to find repeats.
REMEMBERED_KEYS = 1024
# Remembered in place of the checksum of a quarantined record, which is not known.
_LOST = 0

#: A ticket rides in HTTP bodies and log lines; larger ones are refused.
MAX_TICKET_BYTES = 256

_CHECKSUM = re.compile("[0-9a-f]{16}")


class RouteSink(Protocol):
    """Where records go. ``write`` blocks at the sink's byte bound; leaving ``with`` by an exception aborts.

    >>> import io
    >>> from routeplane import new_stream
    >>> from routeplane.testing.builders import watermarked_record, watermarked_spec
    >>> with new_stream(io.BytesIO(), watermarked_spec()) as sink:
    ...     sink.write(watermarked_record(0, num_tokens=4, spec=sink.spec))
    """

    @property
    def spec(self) -> RouteSpec:
        """The geometry every record must have."""

    def write(self, record: RouteRecord) -> None:
        """Hand over one record; the sink does not modify it. Raises DataError or SpecError, and then wrote nothing."""

    def close(self) -> None:
        """Write the trailer and publish. Idempotent."""

    def abort(self) -> None:
        """Publish nothing. Idempotent; after ``close`` it does nothing."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Report(Protocol):
    """Counts that any metrics logger takes."""

    def scalars(self, *, prefix: str = "routeplane/") -> dict[str, float]:
        """A flat dict with stable names."""


class RouteSource(Protocol):
    """Where records come from: iterate once, in the producer's order.

    >>> import io
    >>> from routeplane import new_stream, open_stream
    >>> from routeplane.testing.builders import watermarked_record, watermarked_spec
    >>> with new_stream(target := io.BytesIO(), watermarked_spec()) as sink:
    ...     sink.write(watermarked_record(0, num_tokens=4, spec=sink.spec))
    >>> [record.num_tokens for record in open_stream(target.getvalue())]
    [4]
    """

    @property
    def spec(self) -> RouteSpec:
        """The geometry of the records."""

    def __iter__(self) -> Iterator[RouteRecord]: ...

    def select(self, *, layer_ids: Sequence[int] | None = None, tokens: tuple[int, int] | None = None) -> Self:
        """The same source restricted to layers and to positions ``[a, b)`` of every record; ask before iterating."""

    def admit(self, records: Sequence[RouteRecord]) -> Admission:
        """Judge records as one batch, under the source's policy; raises nothing."""

    def report(self) -> Report:
        """What was read so far."""


class BlockName(NamedTuple):
    """The name of a sealed block: its producer, and its number among that producer's blocks.

    >>> str(BlockName("engine-0", 7))
    'engine-0/000000007'
    """

    producer: str
    number: int

    def __str__(self) -> str:
        return f"{self.producer}/{self.number:09d}"


class KeyMemory:
    """The last REMEMBERED_KEYS records of a place that were read: what finds a record that was written twice.

    >>> from routeplane.testing.builders import watermarked_record, watermarked_spec
    >>> record, memory = watermarked_record(0, num_tokens=3, spec=watermarked_spec()), KeyMemory(b"")
    >>> memory.is_repeat(record, where="a"), KeyMemory(memory.to_bytes()).is_repeat(record, where="b")
    (False, True)
    """

    def __init__(self, data: bytes) -> None:
        """Remember what ``to_bytes`` gave: pairs of little-endian u64. Raises UsageError for other bytes."""
        if len(data) % 16:
            raise UsageError(f"expected keys as pairs of u64, got {len(data)} bytes", kind=ErrorKind.ARGUMENT)
        self._checksums: OrderedDict[int, int] = OrderedDict(np.frombuffer(data, dtype="<u8").reshape(-1, 2).tolist())

    def is_repeat(self, record: RouteRecord, *, where: str) -> bool:
        """Whether the record came before; remember it. Raises DataError for another record under its key.

        A quarantined record has lost what its checksum was of: a good one under its key is that record written again,
        and it is itself a repeat where a good one came before.
        """
        key = digest_of(json.dumps(record.key).encode())
        known = self._checksums.get(key)
        quarantined = record.attributes.get("quarantined") == "true"
        if known is not None and not quarantined and known not in (_LOST, record.checksum):
            raise DataError(
                f"expected {record.key} with the checksum {known:016x} that came before, got {record.checksum:016x} "
                f"@ {where}",
                kind=ErrorKind.DUPLICATE_KEY,
            )
        self._checksums[key] = record.checksum if not quarantined else _LOST if known is None else known
        if len(self._checksums) > REMEMBERED_KEYS:
            self._checksums.popitem(last=False)
        return known is not None

    def to_bytes(self) -> bytes:
        """Return what is remembered: the digest of each key and the checksum of its record."""
        return np.array(list(self._checksums.items()), dtype="<u8").tobytes()


@dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """Where a reader stands in a place of blocks: before which block of every producer.

    Attributes:
        place: identifier of the place, made when it was created; a position of another place is refused.
        next: producer -> number of the first block that is not behind the reader; absent producers stand at 0.
        last: the producer whose block was passed last; it decides whose turn comes next.
        keys: of the last records before it, as ``KeyMemory.to_bytes`` gives them.

    >>> start = Position(place="5f2c")
    >>> after = start.after(BlockName("engine-0", 0))
    >>> after.number("engine-0"), after.number("engine-1")
    (1, 0)
    >>> Position.from_json(after.to_json()) == after
    True
    """

    place: str
    next: Mapping[str, int] = field(default_factory=dict)
    last: str | None = None
    keys: bytes = field(default=b"", repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "next", MappingProxyType(dict(sorted(self.next.items()))))

    def __reduce__(self) -> tuple[Any, ...]:
        return Position.from_json, (self.to_json(),)  # a mapping proxy does not pickle

    def number(self, producer: str) -> int:
        """Return the number of the producer's first block that is not behind the reader."""
        return self.next.get(producer, 0)

    def after(self, name: BlockName, *, keys: bytes | None = None) -> Position:
        """Return the position behind a block. ``keys``: those remembered then; None: the same as here."""
        numbers = {**self.next, name.producer: name.number + 1}
        return Position(place=self.place, next=numbers, last=name.producer, keys=self.keys if keys is None else keys)

    def to_json(self) -> str:
        """Return compact JSON with sorted keys."""
        keys = base64.b64encode(self.keys).decode()
        document = {"keys": keys, "last": self.last, "next": dict(self.next), "place": self.place}
        return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> Position:
        """Parse what ``to_json`` wrote. Raises UsageError for anything else."""
        try:
            document: Any = json.loads(text)
            if set(document) != {"keys", "last", "next", "place"}:
                raise ValueError(f"keys {sorted(document)}")
            keys = base64.b64decode(document["keys"], validate=True)
            place, last = check_text(document["place"], "place"), document["last"]
            if last is not None:
                check_text(last, "last")
            numbers = {
                check_text(producer, "producer"): check_count(number, f"next[{producer!r}]", below=2**63)
                for producer, number in document["next"].items()
            }
        except (AttributeError, DataError, RecursionError, TypeError, ValueError) as error:
            raise refused("a position as JSON", f"{str(text)[:80]!r} ({error})") from None
        return cls(place=place, next=numbers, last=last, keys=keys)


class BlockSource(Protocol):
    """Sealed blocks under names, in a place that may grow. Pickles; each process opens blocks itself."""

    @property
    def spec(self) -> RouteSpec:
        """The geometry of the records."""

    def names(self, *, position: Position | None = None) -> Iterator[BlockName]:
        """The blocks behind a position (None: the acknowledged one), in an order that the position alone decides.

        Waits for blocks that are still to come, and ends where every expected producer has ended. Raises DataError
        (EXPIRED) where a block behind the position is gone, TruncatedError for a producer that ended otherwise than by
        ``close``.
        """

    def open(self, name: BlockName) -> RouteSource:
        """One block as a source, under the reader's policy; records are whole, wherever their first rows lie."""

    def fetch(
        self,
        name: BlockName,
        *,
        keys: Sequence[RecordKey] | None = None,
        layer_ids: Sequence[int] | None = None,
        tokens: tuple[int, int] | None = None,
    ) -> list[RouteRecord]:
        """Records of one block, whole or cut, under new checksums; the cut is made where the data lies."""

    def admit(self, records: Sequence[RouteRecord]) -> Admission:
        """Judge records as one batch, under the reader's policy; raises nothing."""

    def position(self) -> Position:
        """What is acknowledged: where a reader that starts now would begin."""

    def acknowledge(self, position: Position) -> None:
        """State that everything before a position is done with; blocks that no group needs may be deleted."""


def _is_key(value: object) -> bool:
    return isinstance(value, list) and len(value) == 3


@dataclass(frozen=True, kw_only=True, slots=True)
class RouteTicket:
    """Rows ``[start, stop)`` of one call, held by a stream; the owner of the stream redeems it.

    ``checksum`` is the call's. The JSON form has at most MAX_TICKET_BYTES bytes. Raises UsageError.

    >>> from routeplane import RecordKey
    >>> key = RecordKey("prompt-7", 0, 0)
    >>> ticket = RouteTicket(stream="run", key=key, call_id="c", start=0, stop=7, checksum=17)
    >>> RouteTicket.from_json(ticket.to_json()) == ticket
    True
    """

    stream: str
    key: RecordKey
    call_id: str
    start: int
    stop: int
    checksum: int

    def __post_init__(self) -> None:
        try:
            sample_id, attempt, segment = self.key
            check_text(self.stream, "stream")
            check_text(sample_id, "key[0]")
            check_text(self.call_id, "call_id")
            check_count(attempt, "key[1]", below=2**31)
            check_count(segment, "key[2]", below=2**31)
            check_count(self.start, "start", below=2**63)
            check_count(self.stop, "stop", below=2**63)
            check_count(self.checksum, "checksum", below=2**64)
        except (DataError, TypeError, ValueError) as error:
            raise UsageError(f"a ticket: {error}", kind=ErrorKind.ARGUMENT) from None
        object.__setattr__(self, "key", RecordKey(sample_id, attempt, segment))
        if self.start > self.stop:
            raise UsageError(f"expected start <= stop, got [{self.start}, {self.stop})", kind=ErrorKind.ARGUMENT)
        size = len(self.to_json().encode())
        if size > MAX_TICKET_BYTES:
            raise refused(f"a ticket of at most {MAX_TICKET_BYTES} bytes", f"{size} @ call {self.call_id}")

    def to_json(self) -> str:
        """Compact JSON with sorted keys; the checksum as 16 hex digits (JSON numbers lose 64-bit integers)."""
        document = {
            "call": self.call_id,
            "checksum": f"{self.checksum:016x}",
            "key": list(self.key),
            "start": self.start,
            "stop": self.stop,
            "stream": self.stream,
        }
        return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> RouteTicket:
        """Parse what ``to_json`` wrote, exactly. Raises UsageError for anything else."""
        try:
            document: Any = json.loads(text)
        except (TypeError, ValueError, RecursionError) as error:
            raise refused("a ticket as JSON", f"{str(text)[:80]!r} ({error})") from None
        keys = {"call", "checksum", "key", "start", "stop", "stream"}
        if not isinstance(document, dict) or set(document) != keys or not _is_key(document["key"]):
            raise refused(f"a ticket with the keys {sorted(keys)}", f"{text[:80]!r}")
        digits = document["checksum"]
        if not isinstance(digits, str) or not _CHECKSUM.fullmatch(digits):
            raise UsageError(f"expected a checksum of 16 hex digits, got {digits!r}", kind=ErrorKind.ARGUMENT)
        return cls(
            stream=document["stream"],
            key=RecordKey(*document["key"]),
            call_id=document["call"],
            start=document["start"],
            stop=document["stop"],
            checksum=int(digits, 16),
        )
