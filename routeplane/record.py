"""One finished sequence: its tokens, its routes, who sampled, who captured, and the checksum over all of it.

A RouteRecord that exists is valid: construction checks rows, spans, captures and coverage. Immutable; every method
returns a new record. Knows nothing of Arrow, files, streams or engines.

Axes: S token positions, L captured layers, K top-k slots.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np

from routeplane.arrays import as_integers, as_logprobs, as_token_columns
from routeplane.checksum import CanonicalHash, require_equal
from routeplane.coverage import Coverage, coverage_problems, lose_rows, settle_partial
from routeplane.errors import DataError, ErrorKind, UsageError
from routeplane.scalars import check_count, check_text
from routeplane.spans import Capture, Span, check_cover, cut
from routeplane.validate import check_routes

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from routeplane.spec import RouteSpec

__all__ = ["Prefix", "RecordKey", "RouteRecord"]

_SLICE = re.compile(r"([0-9]{1,18}):([0-9]{1,18})")


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


def _no_text() -> Mapping[str, str]:
    return MappingProxyType({})


@dataclass(frozen=True, kw_only=True, eq=False)
class RouteRecord:
    """One finished sequence of S tokens.

    ``token_ids``: int32 ``[S]``, the positions *fed*, after any placeholder expansion. ``routes``: int16
    ``[S - routes_start, L, K]``, one row per token and captured layer; rows that were not captured are MISSING (all
    -1). ``spans`` and ``captures`` each cover ``[0, S)``; what a capture declares must be what the rows show.
    ``routes_start`` above 0 needs a ``prefix`` that names the record holding the rows before it. ``logprobs``: float32
    ``[S]``, ``logprobs[t]`` is for token t given those before it (so governed by ``routes[t-1]``), NaN where there is
    none. ``columns``: further token-aligned arrays ``[S]``. ``checksum``: None computes it; a given one is kept, and
    ``verify()`` compares.

    Arrays are kept as read-only views where their type already fits (the caller must not write to them afterwards) and
    copied where they had to be widened or narrowed. Raises DataError, with all findings, for anything illegal.
    """

    sample_id: str
    attempt: int = 0
    segment: int = 0
    group: str | None = None
    token_ids: NDArray[Any]
    routes: NDArray[Any]
    routes_start: int = 0
    prefix: Prefix | None = None
    spans: tuple[Span, ...]
    captures: tuple[Capture, ...]
    spec: RouteSpec
    logprobs: NDArray[Any] | None = None
    attributes: Mapping[str, str] = field(default_factory=_no_text)
    columns: Mapping[str, NDArray[Any]] = field(default_factory=lambda: MappingProxyType({}))
    checksum: Any = None  # None asks for it to be computed; an int ever after

    def __post_init__(self) -> None:
        self._check_identity()
        put = object.__setattr__
        put(self, "token_ids", as_integers(self.token_ids, np.int32, what="token_ids", ndim=1))
        length = len(self.token_ids)
        if length == 0:
            raise DataError(f"expected at least one token, got none @ sample {self.sample_id}", kind=ErrorKind.SHAPE)
        put(self, "spans", tuple(self.spans))
        put(self, "captures", tuple(self.captures))
        check_cover(self.spans, length, what=f"spans of sample {self.sample_id}")
        check_cover(self.captures, length, what=f"captures of sample {self.sample_id}")
        if self.logprobs is not None:
            put(self, "logprobs", as_logprobs(self.logprobs, length))
        put(self, "columns", as_token_columns(self.columns, length))
        put(self, "attributes", _text_map(self.attributes))
        self._check_routes(length)
        if self.checksum is None:
            put(self, "checksum", self.compute_checksum())
        check_count(self.checksum, "checksum", below=2**64)

    def _check_identity(self) -> None:
        check_text(self.sample_id, "sample_id")
        if self.group is not None:
            check_text(self.group, "group")
        for name in ("attempt", "segment"):
            check_count(getattr(self, name), name, below=2**31)
        check_count(self.routes_start, "routes_start", below=2**63)
        if (self.prefix is None) != (self.routes_start == 0):
            raise DataError(
                f"expected a prefix exactly where routes_start > 0, got routes_start={self.routes_start} and "
                f"prefix={self.prefix} @ sample {self.sample_id}",
                kind=ErrorKind.PREFIX,
            )
        if self.prefix is not None and self.prefix.stop != self.routes_start:
            raise DataError(
                f"expected prefix.stop == routes_start == {self.routes_start}, got {self.prefix.stop} "
                f"@ sample {self.sample_id}",
                kind=ErrorKind.PREFIX,
            )

    def _check_routes(self, length: int) -> None:
        routes_SLK = as_integers(self.routes, np.int16, what="routes", ndim=3)
        object.__setattr__(self, "routes", routes_SLK)
        expected = length - self.routes_start
        if len(routes_SLK) != expected or expected < 0:
            raise DataError(
                f"expected {max(expected, 0)} rows ({length} tokens from {self.routes_start}), got {len(routes_SLK)} "
                f"@ sample {self.sample_id}",
                kind=ErrorKind.ROW_COUNT,
            )
        check_routes(routes_SLK, self.spec, first_token=self.routes_start, sample=self.sample_id)
        problems = list(
            coverage_problems(self.captures, routes_SLK, routes_start=self.routes_start, sample=self.sample_id)
        )
        if problems:
            raise DataError.from_problems(problems, what="rows that contradict their captures")

    @property
    def key(self) -> RecordKey:
        """``(sample_id, attempt, segment)``."""
        return RecordKey(self.sample_id, self.attempt, self.segment)

    @property
    def num_tokens(self) -> int:
        """S."""
        return len(self.token_ids)

    @property
    def nbytes(self) -> int:
        """Payload bytes of the arrays, whoever owns them."""
        arrays: list[NDArray[Any]] = [self.token_ids, self.routes, *self.columns.values()]
        return sum(array.nbytes for array in arrays) + (0 if self.logprobs is None else self.logprobs.nbytes)

    def coverage(self) -> Coverage:
        """Rows by capture state."""
        return Coverage.of(self.captures)

    def compute_checksum(self) -> int:
        """xxh3-64 of the canonical bytes of this content, whatever ``checksum`` says."""
        out = CanonicalHash(self.spec.digest)
        out.text("sample_id", self.sample_id)
        out.int32("attempt", self.attempt)
        out.int32("segment", self.segment)
        out.text("group", self.group)
        out.array("token_ids", self.token_ids)
        out.int64("routes_start", self.routes_start)
        out.array("routes", self.routes)
        _hash_prefix(out, self.prefix)
        _hash_spans(out, self.spans)
        _hash_captures(out, self.captures)
        out.array("logprobs", self.logprobs)
        out.text_map("attributes", self.attributes)
        for name, values in self.columns.items():
            out.token_column(name, values)
        return out.value()

    def verify(self) -> Self:
        """Raise ChecksumError unless the content is what the checksum was made over; return the record itself."""
        require_equal(self.checksum, self.compute_checksum(), where=f"sample {self.key}", sample=self.sample_id)
        return self

    def equals(self, other: RouteRecord) -> bool:
        """Whether both hold the same content under the same spec (NaN equals NaN; stored checksums are not
        consulted)."""
        return self.spec == other.spec and self.compute_checksum() == other.compute_checksum()

    def slice(self, start: int, stop: int) -> RouteRecord:
        """Tokens ``[start, stop)`` as a record of their own, cut in every column alike; verifies first, new checksum.

        ``attributes["slice"]`` says which positions of the original these are. Shares memory. Raises UsageError where
        the interval is empty, outside, or begins inside rows that stand in another record (``resolve`` it first).
        """
        start, stop = operator.index(start), operator.index(stop)
        if not 0 <= start < stop <= self.num_tokens:
            raise UsageError(
                f"expected 0 <= start < stop <= {self.num_tokens}, got [{start}, {stop}) @ sample {self.sample_id}",
                kind=ErrorKind.ARGUMENT,
            )
        if 0 < start < self.routes_start:
            raise UsageError(
                f"expected a resolved record to slice from {start}, got rows only from {self.routes_start} "
                f"@ sample {self.sample_id}",
                kind=ErrorKind.PREFIX,
            )
        self.verify()
        routes_start = min(self.routes_start, stop) if start == 0 else 0
        prefix = replace(self.prefix, stop=routes_start) if self.prefix is not None and routes_start else None
        origin = int(self.attributes["slice"].split(":")[0]) if "slice" in self.attributes else 0
        first_row = start + routes_start - self.routes_start
        return replace(
            self,
            token_ids=self.token_ids[start:stop],
            routes=self.routes[max(first_row, 0) : max(stop - self.routes_start, 0)],
            routes_start=routes_start,
            prefix=prefix,
            spans=cut(self.spans, start=start, stop=stop),
            captures=cut(self.captures, start=start, stop=stop),
            logprobs=None if self.logprobs is None else self.logprobs[start:stop],
            attributes={**self.attributes, "slice": f"{origin + start}:{origin + stop}"},
            columns={name: values[start:stop] for name, values in self.columns.items()},
            checksum=None,
        )

    def select(self, layer_ids: Iterable[int]) -> RouteRecord:
        """A subset of layers; verifies first, new spec and checksum. Copies the chosen layers."""
        self.verify()
        spec = self.spec.select(layer_ids)
        slots = [self.spec.slot(layer) for layer in spec.layer_ids]
        routes_SLK = np.ascontiguousarray(self.routes[:, slots])
        captures = settle_partial(self.captures, routes_SLK, routes_start=self.routes_start)
        return replace(self, spec=spec, routes=routes_SLK, captures=captures, checksum=None)

    def without_routes(self) -> RouteRecord:
        """The same tokens with every row MISSING and captured state ``lost``: what quarantine leaves of a record."""
        return replace(
            self,
            routes=self.spec.missing_rows(len(self.routes)),
            captures=lose_rows(self.captures, self.routes_start),
            checksum=None,
        )

    def __reduce__(self) -> tuple[object, ...]:
        # Read-only mappings do not pickle; going through the constructor also validates what another process sent.
        content = {item.name: getattr(self, item.name) for item in fields(self)}
        content["attributes"], content["columns"] = dict(self.attributes), dict(self.columns)
        return _rebuild, (content,)


def _rebuild(content: dict[str, Any]) -> RouteRecord:
    return RouteRecord(**content)


def _hash_prefix(out: CanonicalHash, prefix: Prefix | None) -> None:
    if prefix is None:
        return out.null("prefix")
    out.begin_list("prefix", 1)
    out.text("sample_id", prefix.sample_id)
    out.int32("attempt", prefix.attempt)
    out.int32("segment", prefix.segment)
    out.int64("stop", prefix.stop)
    out.uint64("checksum", prefix.checksum)
    return None


def _hash_spans(out: CanonicalHash, spans: tuple[Span, ...]) -> None:
    out.begin_list("spans", len(spans))
    for span in spans:
        out.int64("start", span.start)
        out.int64("stop", span.stop)
        out.text("kind", span.kind)
        out.text("role", span.role)
        out.text("call", span.call)
        out.int64("weights_version", span.weights_version)


def _hash_captures(out: CanonicalHash, captures: tuple[Capture, ...]) -> None:
    out.begin_list("captures", len(captures))
    for capture in captures:
        out.int64("start", capture.start)
        out.int64("stop", capture.stop)
        out.text("state", capture.state)
        out.text("call", capture.call)
        out.int64("weights_version", capture.weights_version)


def _text_map(entries: Mapping[str, str] | None) -> Mapping[str, str]:
    checked = dict(entries or {})
    for key, value in checked.items():
        check_text(key, "an attribute's name")
        check_text(value, f"attribute {key!r}", empty=True)
    if "slice" in checked and not _SLICE.fullmatch(checked["slice"]):
        raise DataError(f"expected attribute 'slice' as start:stop, got {checked['slice']!r}", kind=ErrorKind.DTYPE)
    return MappingProxyType(checked)
