"""The canonical bytes of a record's lists and structs, field by field in the order of the format.

The grammar of each value is ``checksum``; the order of the columns is the record's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from routeplane.checksum import CanonicalHash
    from routeplane.keys import Prefix
    from routeplane.spans import Capture, Span

__all__ = ["hash_captures", "hash_prefix", "hash_spans"]


def hash_prefix(out: CanonicalHash, prefix: Prefix | None) -> None:
    """Where the rows before ``routes_start`` stand, or nothing."""
    if prefix is None:
        return out.null("prefix")
    out.begin_list("prefix", 1)
    out.text("sample_id", prefix.sample_id)
    out.int32("attempt", prefix.attempt)
    out.int32("segment", prefix.segment)
    out.int64("stop", prefix.stop)
    out.uint64("checksum", prefix.checksum)
    return None


def hash_spans(out: CanonicalHash, spans: tuple[Span, ...]) -> None:
    """Who sampled which tokens."""
    out.begin_list("spans", len(spans))
    for span in spans:
        out.int64("start", span.start)
        out.int64("stop", span.stop)
        out.text("kind", span.kind)
        out.text("role", span.role)
        out.text("call", span.call)
        out.int64("weights_version", span.weights_version)


def hash_captures(out: CanonicalHash, captures: tuple[Capture, ...]) -> None:
    """Who captured which rows."""
    out.begin_list("captures", len(captures))
    for capture in captures:
        out.int64("start", capture.start)
        out.int64("stop", capture.stop)
        out.text("state", capture.state)
        out.text("call", capture.call)
        out.int64("weights_version", capture.weights_version)
