"""What every transport promises: the trailer that makes an end an end, the read policy, and the report.

Pure values and counters; no IO. ``ipc`` and ``memory`` stand on it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal

import xxhash

from routeplane.errors import DataError, ErrorKind, FormatError, Problem, UsageError
from routeplane.record.coverage import Coverage
from routeplane.record.parse import check_count
from routeplane.record.record import RecordKey, RouteRecord
from routeplane.record.schema import FORMAT_VERSION, Encoding
from routeplane.record.spans import STATES
from routeplane.record.spec import RouteSpec

__all__ = [
    "MAX_ALARMS",
    "TRAILER_KEY",
    "Quarantined",
    "ReadPolicy",
    "RecordCounts",
    "StreamReport",
    "Trailer",
    "TrailerCounter",
]

#: Metadata key of the zero-row batch that ends a stream.
TRAILER_KEY = "routeplane.trailer"
#: Alarms that a report keeps word for word; the rest are counted.
MAX_ALARMS = 64

_DIGEST = re.compile("[0-9a-f]{16}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Trailer:
    """What a complete stream held. An Arrow stream cut at a batch boundary reads as complete; one of ours does not."""

    batches: int
    records: int
    tokens: int
    digest: int

    def to_json(self) -> str:
        """Canonical JSON; the digest as 16 hex digits."""
        document = {
            "batches": self.batches,
            "digest": f"{self.digest:016x}",
            "records": self.records,
            "tokens": self.tokens,
        }
        return json.dumps(document, sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Trailer:
        """Parse what ``to_json`` wrote. Raises FormatError."""
        try:
            document: Any = json.loads(text)
            counts = {name: check_count(document[name], name, below=2**63) for name in ("batches", "records", "tokens")}
            digits = document["digest"]
            if set(document) != {*counts, "digest"} or not _DIGEST.fullmatch(digits):
                raise ValueError("other keys, or a digest that is not 16 hex digits")
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise FormatError(
                f"expected a trailer as JSON, got {text[:120]!r} ({error})", kind=ErrorKind.TRAILER
            ) from None
        return cls(**counts, digest=int(digits, 16))


class TrailerCounter:
    """Counts and digests what passes; both ends run one and must agree.

    Digest: xxh3-64 over format, spec and encoding (each as u64 length and bytes), then the record checksums as u64 in
    order.
    """

    def __init__(self, spec: RouteSpec, encoding: Encoding, *, version: str = FORMAT_VERSION) -> None:
        self._hash = xxhash.xxh3_64()
        for text in (version, spec.to_json(), encoding):
            data = text.encode()
            self._hash.update(len(data).to_bytes(8, "little") + data)
        self._batches = self._records = self._tokens = 0

    def add_batch(self) -> None:
        """Count one batch."""
        self._batches += 1

    def add_record(self, checksum: int, tokens: int) -> None:
        """Count one record; ``checksum`` as it stands in the stream."""
        self._hash.update(checksum.to_bytes(8, "little"))
        self._records += 1
        self._tokens += tokens

    def trailer(self) -> Trailer:
        """The trailer for what passed so far."""
        return Trailer(batches=self._batches, records=self._records, tokens=self._tokens, digest=self._hash.intdigest())

    def check(self, declared: Trailer) -> None:
        """Raise FormatError unless exactly what ``declared`` counts has passed."""
        found = self.trailer()
        if found != declared:
            raise FormatError(f"expected what the trailer counts, {declared}, got {found}", kind=ErrorKind.TRAILER)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadPolicy:
    """What a reader does with what is wrong. ``max_missing``: largest share of fed rows that may be absent, or None."""

    on_truncated: Literal["raise", "keep"] = "raise"
    on_corrupt: Literal["raise", "quarantine"] = "raise"
    on_alarm: Literal["count", "raise", "ignore"] = "count"
    max_missing: float | None = None
    verify: bool = True

    def __post_init__(self) -> None:
        for name, allowed in (
            ("on_truncated", ("raise", "keep")),
            ("on_corrupt", ("raise", "quarantine")),
            ("on_alarm", ("count", "raise", "ignore")),
        ):
            if getattr(self, name) not in allowed:
                raise UsageError(f"expected {name} of {allowed}, got {getattr(self, name)!r}", kind=ErrorKind.ARGUMENT)
        if self.max_missing is not None and not 0.0 <= self.max_missing <= 1.0:
            raise UsageError(f"expected max_missing in [0, 1], got {self.max_missing}", kind=ErrorKind.ARGUMENT)


@dataclass(frozen=True, kw_only=True, slots=True)
class Quarantined:
    """A record set aside, under the key it claims. ``index`` counts records of the stream from 0; ``raw`` is an Arrow
    IPC stream of its one row as it came, in memory of its own.

    ``yielded``: whether a copy with every row MISSING took its place; a record whose very shape is unreadable has none.
    """

    index: int
    key: RecordKey
    error: DataError
    raw: bytes
    yielded: bool


class RecordCounts:
    """Records as they pass, counted without a report for each; ``StreamReport.with_counts`` makes one."""

    def __init__(self) -> None:
        self.records = self.tokens = 0
        self._rows: dict[str, int] = dict.fromkeys(STATES, 0)

    def add(self, record: RouteRecord) -> None:
        """Count one record."""
        self.records += 1
        self.tokens += record.num_tokens
        for capture in record.captures:
            self._rows[capture.state] += capture.stop - capture.start

    def coverage(self) -> Coverage:
        """Rows by capture state."""
        return Coverage(records=self.records, rows=MappingProxyType(dict(self._rows)))


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamReport:
    """What a reader saw so far."""

    batches: int = 0
    records: int = 0
    tokens: int = 0
    quarantined: tuple[Quarantined, ...] = ()
    alarm_count: int = 0
    alarms: tuple[Problem, ...] = ()  # the first MAX_ALARMS of them
    outside: int = 0  # records with no token in the selected range
    truncated: bool = False
    complete: bool = False  # the trailer was reached and agrees
    coverage: Coverage = field(default_factory=Coverage)

    def with_record(self, record: RouteRecord) -> StreamReport:
        """The report after one more record."""
        return replace(
            self,
            records=self.records + 1,
            tokens=self.tokens + record.num_tokens,
            coverage=self.coverage.merge(record.coverage()),
        )

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

    def with_alarms(self, found: Sequence[Problem]) -> StreamReport:
        """The report after some more alarms; all are counted, the first are kept."""
        if not found:
            return self
        kept = (*self.alarms, *found)[:MAX_ALARMS]
        return replace(self, alarm_count=self.alarm_count + len(found), alarms=kept)

    def merge(self, other: StreamReport) -> StreamReport:
        """The counts of both; truncated if either is, complete if both are."""
        return StreamReport(
            batches=self.batches + other.batches,
            records=self.records + other.records,
            tokens=self.tokens + other.tokens,
            quarantined=self.quarantined + other.quarantined,
            alarm_count=self.alarm_count + other.alarm_count,
            alarms=(*self.alarms, *other.alarms)[:MAX_ALARMS],
            outside=self.outside + other.outside,
            truncated=self.truncated or other.truncated,
            complete=self.complete and other.complete,
            coverage=self.coverage.merge(other.coverage),
        )

    def scalars(self, *, prefix: str = "routeplane/") -> dict[str, float]:
        """A flat dict with stable names for a metrics logger."""
        return {
            **self.coverage.scalars(prefix=f"{prefix}stream_"),
            f"{prefix}stream_batches": float(self.batches),
            f"{prefix}stream_tokens": float(self.tokens),
            f"{prefix}stream_quarantined": float(len(self.quarantined)),
            f"{prefix}stream_alarms": float(self.alarm_count),
            f"{prefix}stream_outside_selection": float(self.outside),
            f"{prefix}stream_truncated": float(self.truncated),
        }
