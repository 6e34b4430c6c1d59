"""What a reader does with what is wrong, and what it reports: read policy, quarantined records, counts.

Streams, carriers and archives share them. The one file here that touches a disk is the quarantine's.
"""

from __future__ import annotations

import operator
import tempfile
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import IO, ClassVar, Literal

from routeplane.errors import DataError, ErrorKind, Problem, UsageError, refused
from routeplane.record.counts import Counts, first_of, rule
from routeplane.record.record import RecordKey, RouteRecord
from routeplane.record.spans import STATES, Coverage

__all__ = [
    "MAX_ALARMS",
    "MAX_QUARANTINE_ENTRIES",
    "Quarantine",
    "QuarantineEntry",
    "QuarantineOptions",
    "ReadPolicy",
    "RecordCounts",
    "StreamReport",
]

#: Alarms that a report keeps word for word; the rest are counted.
MAX_ALARMS = 64
#: Quarantined records that a report names one by one; the rest are counted.
MAX_QUARANTINE_ENTRIES = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class QuarantineOptions:
    """Where the bytes of quarantined records are kept, and how many.

    Attributes:
        path: a file that is created for them and stays; None: a temporary file that goes with the reader.
        max_bytes: bound of that file; records beyond it are counted, and their bytes dropped.

    >>> QuarantineOptions(max_bytes=2**20).path is None
    True
    """

    path: str | None = None
    max_bytes: int = 64 * 2**20

    def __post_init__(self) -> None:
        if self.max_bytes < 0:
            raise UsageError(f"expected max_bytes of at least 0, got {self.max_bytes}", kind=ErrorKind.ARGUMENT)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadPolicy:
    """What a reader does with data that is wrong.

    Attributes:
        on_truncated: ``keep`` yields the whole records before a cut, and reports the cut.
        on_corrupt: ``quarantine`` replaces the rows of a bad record by MISSING, keeps its bytes and counts it; a
            damaged batch is passed over, and its records are counted.
        on_alarm: whether statistics of a broken capture are counted, raised, or not looked for.
        max_missing: largest share of fed rows that may be absent from a batch that ``admit`` lets pass; None: any.
        verify: whether record checksums are compared.
        quarantine: where quarantined bytes go; refused unless ``on_corrupt="quarantine"``.
        threads: how many threads check records ahead of the one that is asked for; 1: the caller's alone. What comes
            is the same.

    Raises UsageError for values that are not listed here.

    >>> ReadPolicy(on_corrupt="quarantine").max_missing is None
    True
    """

    on_truncated: Literal["raise", "keep"] = "raise"
    on_corrupt: Literal["raise", "quarantine"] = "raise"
    on_alarm: Literal["count", "raise", "ignore"] = "count"
    max_missing: float | None = None
    verify: bool = True
    quarantine: QuarantineOptions | None = None
    threads: int = 1

    def __post_init__(self) -> None:
        if isinstance(self.threads, bool) or not isinstance(self.threads, int) or self.threads < 1:
            raise UsageError(f"expected threads of at least 1, got {self.threads!r}", kind=ErrorKind.ARGUMENT)
        for name, allowed in (
            ("on_truncated", ("raise", "keep")),
            ("on_corrupt", ("raise", "quarantine")),
            ("on_alarm", ("count", "raise", "ignore")),
        ):
            if getattr(self, name) not in allowed:
                raise UsageError(f"expected {name} of {allowed}, got {getattr(self, name)!r}", kind=ErrorKind.ARGUMENT)
        if self.max_missing is not None and not 0.0 <= self.max_missing <= 1.0:
            raise UsageError(f"expected max_missing in [0, 1], got {self.max_missing}", kind=ErrorKind.ARGUMENT)
        if self.quarantine is not None and self.on_corrupt != "quarantine":
            raise refused("quarantine options with on_corrupt='quarantine'", f"them with {self.on_corrupt!r}")


@dataclass(frozen=True, kw_only=True, slots=True)
class QuarantineEntry:
    """One quarantined record, under the key it claims.

    Attributes:
        index: position of the record in its source, from 0.
        error: what is wrong with it.
        yielded: whether a copy with every row MISSING took its place; a record whose shape is unreadable has none.
        at: ``(offset, size)`` of its bytes in the quarantine file; None where the file was full.
    """

    index: int
    key: RecordKey
    error: DataError
    yielded: bool
    at: tuple[int, int] | None = None


class Quarantine:
    """The quarantined records of one reader: entries in memory up to a bound, bytes in a file up to another.

    Owns the file, which is closed with this object. Each record's bytes are an Arrow IPC stream of its one row, as it
    came; ``raw`` reads them again. Not safe for several threads.

    >>> quarantine = Quarantine(QuarantineOptions(max_bytes=4))
    >>> error = DataError("bad", kind=ErrorKind.CHECKSUM)
    >>> for index, raw in enumerate([b"abc", b"de"]):
    ...     quarantine.add(raw, index=index, key=RecordKey(f"s{index}", 0, 0), error=error, yielded=True)
    >>> quarantine.count, quarantine.dropped, quarantine.raw(quarantine.entries[0])
    (2, 1, b'abc')
    """

    def __init__(self, options: QuarantineOptions | None) -> None:
        self._options = options or QuarantineOptions()
        self._file: IO[bytes] | None = None
        self._size = 0
        self._entries: list[QuarantineEntry] = []
        self.count = self.dropped = 0

    @property
    def entries(self) -> tuple[QuarantineEntry, ...]:
        """The first MAX_QUARANTINE_ENTRIES records."""
        return tuple(self._entries)

    def add(self, raw: bytes, *, index: int, key: RecordKey, error: DataError, yielded: bool) -> None:
        """Count one record, and keep its bytes where the bound allows."""
        self.count += 1
        at = None
        if self._size + len(raw) <= self._options.max_bytes:
            file = self._opened()
            file.seek(self._size)
            file.write(raw)
            at = (self._size, len(raw))
            self._size += len(raw)
        else:
            self.dropped += 1
        if len(self._entries) < MAX_QUARANTINE_ENTRIES:
            self._entries.append(QuarantineEntry(index=index, key=key, error=error, yielded=yielded, at=at))

    def raw(self, entry: QuarantineEntry) -> bytes | None:
        """Return the bytes of a record; None where they were dropped."""
        if entry.at is None:
            return None
        file = self._opened()
        file.seek(entry.at[0])
        return file.read(entry.at[1])

    def _opened(self) -> IO[bytes]:
        if self._file is None:
            path = self._options.path
            file: IO[bytes] = (
                tempfile.TemporaryFile(buffering=0) if path is None else open(path, "x+b", buffering=0)  # noqa: SIM115
            )
            weakref.finalize(self, file.close)
            self._file = file
        return self._file


class RecordCounts:
    """Records as they pass, counted without a report for each; ``StreamReport.with_counts`` makes one."""

    def __init__(self) -> None:
        self.records = self.tokens = 0
        self._rows: dict[str, int] = dict.fromkeys(STATES, 0)

    def add(self, record: RouteRecord) -> None:
        """Count one record."""
        self.records += 1
        self.tokens += record.num_tokens
        for start, stop, state in record.capture_intervals():
            self._rows[state] += stop - start

    def coverage(self) -> Coverage:
        """Rows by capture state."""
        return Coverage(records=self.records, rows=MappingProxyType(dict(self._rows)))


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamReport(Counts):
    """What a reader saw so far. Merged, it is truncated if either was, and complete if both were.

    >>> report = StreamReport(batches=1, records=2, tokens=9)
    >>> report.scalars()["routeplane/stream_tokens"]
    9.0
    """

    SCOPE: ClassVar[str] = "stream_"

    batches: int = 0
    records: int = field(default=0, metadata=rule(scalar=None))  # the coverage's own
    tokens: int = 0
    quarantined_count: int = field(default=0, metadata=rule(scalar="quarantined"))
    #: the first MAX_QUARANTINE_ENTRIES of them
    quarantined: tuple[QuarantineEntry, ...] = field(
        default=(), metadata=rule(scalar=None, merge=first_of(MAX_QUARANTINE_ENTRIES))
    )
    quarantine_dropped: int = 0  # records whose bytes the quarantine file had no space for
    skipped_batches: int = 0  # damaged batches that were passed over
    skipped_records: int = 0  # what the passed-over batches held, by their headers or by the trailer
    repeats: int = 0  # records that came before with the same checksum, and were dropped
    alarm_count: int = field(default=0, metadata=rule(scalar="alarms"))
    #: the first MAX_ALARMS of them
    alarms: tuple[Problem, ...] = field(default=(), metadata=rule(scalar=None, merge=first_of(MAX_ALARMS)))
    outside: int = field(default=0, metadata=rule(scalar="outside_selection"))  # no token in the selected range
    truncated: bool = field(default=False, metadata=rule(merge=operator.or_))
    #: the trailer was reached and agrees
    complete: bool = field(default=False, metadata=rule(scalar=None, merge=operator.and_))
    coverage: Coverage = field(default_factory=Coverage)

    def with_counts(self, counts: RecordCounts) -> StreamReport:
        """The report after the records that were counted."""
        if counts.records == 0:
            return self
        return replace(
            self,
            records=self.records + counts.records,
            tokens=self.tokens + counts.tokens,
            coverage=self.coverage.merge(counts.coverage()),
        )

    def with_quarantine(self, quarantine: Quarantine) -> StreamReport:
        """The report with what was quarantined so far."""
        if quarantine.count == self.quarantined_count:
            return self
        return replace(
            self,
            quarantined_count=quarantine.count,
            quarantined=quarantine.entries,
            quarantine_dropped=quarantine.dropped,
        )

    def with_alarms(self, found: Sequence[Problem]) -> StreamReport:
        """The report after some more alarms; all are counted, the first are kept."""
        if not found:
            return self
        kept = (*self.alarms, *found)[:MAX_ALARMS]
        return replace(self, alarm_count=self.alarm_count + len(found), alarms=kept)
