"""What names a record: its key, and where the rows stand that it shares with another.

Pure values; knows no arrays and no spec.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from routeplane.scalars import check_count, check_text

__all__ = ["Prefix", "RecordKey"]


class RecordKey(NamedTuple):
    """What makes a record one of its kind: a sample, its attempt, and the segment after a context break."""

    sample_id: str
    attempt: int
    segment: int

    def __str__(self) -> str:
        return f"{self.sample_id}/{self.attempt}/{self.segment}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Prefix:
    """Where the rows before ``routes_start`` stand: rows ``[0, stop)`` of another record, known by its checksum."""

    sample_id: str
    attempt: int = 0
    segment: int = 0
    stop: int
    checksum: int

    def __post_init__(self) -> None:
        check_text(self.sample_id, "prefix.sample_id")
        for name, below in (("attempt", 2**31), ("segment", 2**31), ("stop", 2**63), ("checksum", 2**64)):
            check_count(getattr(self, name), f"prefix.{name}", below=below)

    @property
    def key(self) -> RecordKey:
        """The key of the record that holds the rows."""
        return RecordKey(self.sample_id, self.attempt, self.segment)
