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
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Self

import numpy as np

from routeplane.errors import DataError, ErrorKind, UsageError
from routeplane.record.checksum import CanonicalHash, hash_captures, hash_prefix, hash_spans, require_equal
from routeplane.record.coverage import Coverage, coverage_problems, lose_rows, settle_partial
from routeplane.record.parse import as_integers, as_logprobs, as_token_columns, check_count, check_text, frozen_view
from routeplane.record.rows import absent_tokens, canonical_blocks, pick_layers, survey, widen, widen_legal
from routeplane.record.spans import Capture, Prefix, RecordKey, Span, check_cover, cut
from routeplane.record.validate import find_problems

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from routeplane.record.spec import RouteSpec

__all__ = ["Prefix", "RecordKey", "RouteRecord", "cut_record", "read_record"]

_SLICE = re.compile(r"([0-9]{1,18}):([0-9]{1,18})")


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

    if TYPE_CHECKING:  # no fields: what construction leaves behind
        _stored: ClassVar[NDArray[Any]]
        _absent: ClassVar[NDArray[np.int64]]

    def __post_init__(self) -> None:
        self._check_identity()
        self._hold(as_integers(self.routes, np.int16, what="routes", ndim=3))
        self._admit(verify=False)

    def _admit(self, *, verify: bool, select: RouteSpec | None = None) -> None:
        """Check all but the identity and the type of ``_stored``, the rows as they are held; with ``verify``, the
        checksum too. ``select``: layers to keep, taken before any row is looked at."""
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
        self._check_count(length)
        if select is not None:
            stored_SLK, captures = self._layers(select)
            vars(self).update(spec=select, captures=captures, checksum=None)
            self._hold(stored_SLK)
        out = self._check_routes(hashed=verify or self.checksum is None)
        if self.checksum is None and out is not None:
            put(self, "checksum", out.value())
        check_count(self.checksum, "checksum", below=2**64)
        if verify and out is not None:
            require_equal(self.checksum, out.value(), where=f"sample {self.key}", sample=self.sample_id)

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

    def _check_count(self, length: int) -> None:
        expected, got = length - self.routes_start, len(self._stored)
        if got != expected:
            raise DataError(
                f"expected {max(expected, 0)} rows ({length} tokens from {self.routes_start}), got {got} "
                f"@ sample {self.sample_id}",
                kind=ErrorKind.ROW_COUNT,
            )

    def _check_routes(self, *, hashed: bool) -> CanonicalHash | None:
        """Check the rows, and hash the record on the way: one read of the rows from memory serves both."""
        stored_SLK = self._stored
        out = self._hash_until_routes() if hashed else None
        absent_N = survey(stored_SLK, self.spec, feed=None if out is None else out.part)
        if absent_N is None:
            self._refuse_rows()
        object.__setattr__(self, "_absent", frozen_view(absent_N))
        problems = list(
            coverage_problems(
                self.captures, stored_SLK, routes_start=self.routes_start, sample=self.sample_id, absent=absent_N
            )
        )
        if problems:
            raise DataError.from_problems(problems, what="rows that contradict their captures")
        if out is not None:
            self._hash_from_routes_on(out)
        return out

    def _refuse_rows(self) -> NoReturn:
        routes_SLK = widen(self._stored, self.spec) if self._stored.dtype == np.uint8 else self._stored
        found = find_problems(routes_SLK, self.spec, first_token=self.routes_start, sample=self.sample_id)
        raise DataError.from_problems(found, what="illegal routes")

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            # narrow rows are widened when they are first asked for, which a reader's own way to a batch never does
            if name != "routes" or "_stored" not in vars(self):
                raise AttributeError(f"expected an attribute of RouteRecord, got {name!r}")
            object.__setattr__(self, name, frozen_view(widen_legal(self._stored, self.spec)))
            return vars(self)[name]

    @property
    def stored_routes(self) -> NDArray[Any]:
        """The rows as they are held, read-only: ``routes``, or the bytes of a ``narrow`` stream as ``rows.widen`` takes
        them.

        A record of a narrow stream widens its rows, into memory of its own, when ``routes`` is first asked for.
        """
        return self._stored

    @property
    def absent_tokens(self) -> NDArray[np.int64]:
        """Which rows of ``routes`` are MISSING in some layer: int64, ascending, read-only."""
        return self._absent

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
        """Payload bytes of the arrays, routes as int16, whoever owns them."""
        arrays = [self.token_ids, *self.columns.values(), *(() if self.logprobs is None else (self.logprobs,))]
        return sum(int(array.nbytes) for array in arrays) + int(self._stored.size) * 2

    def coverage(self) -> Coverage:
        """Rows by capture state."""
        return Coverage.of(self.captures)

    def compute_checksum(self) -> int:
        """xxh3-64 of the canonical bytes of this content, whatever ``checksum`` says."""
        out = self._hash_until_routes()
        for part_SLK in canonical_blocks(self._stored, self.spec):
            out.part(part_SLK)
        self._hash_from_routes_on(out)
        return out.value()

    def _hash_until_routes(self) -> CanonicalHash:
        """A hash of the columns before the routes, which come next, as int16, by ``part``."""
        out = CanonicalHash(self.spec.digest)
        out.text("sample_id", self.sample_id)
        out.int32("attempt", self.attempt)
        out.int32("segment", self.segment)
        out.text("group", self.group)
        out.array("token_ids", self.token_ids)
        out.int64("routes_start", self.routes_start)
        out.begin_array("routes", int(self._stored.size) * 2)
        return out

    def _hash_from_routes_on(self, out: CanonicalHash) -> None:
        hash_prefix(out, self.prefix)
        hash_spans(out, self.spans)
        hash_captures(out, self.captures)
        out.array("logprobs", self.logprobs)
        out.text_map("attributes", self.attributes)
        for name, values in self.columns.items():
            out.token_column(name, values)

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
        start, stop = self._interval(start, stop)
        return self.verify()._sliced(start, stop)

    def select(self, layer_ids: Iterable[int]) -> RouteRecord:
        """A subset of layers; verifies first, new spec and checksum. Copies the chosen layers."""
        return self.verify()._selected(self.spec.select(layer_ids))

    def without_routes(self) -> RouteRecord:
        """The same tokens with every row MISSING and captured state ``lost``: what quarantine leaves of a record."""
        return replace(
            self,
            routes=self.spec.missing_rows(len(self.routes)),
            captures=lose_rows(self.captures, self.routes_start),
            checksum=None,
        )

    def _interval(self, start: int, stop: int) -> tuple[int, int]:
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
        return start, stop

    def _sliced(self, start: int, stop: int) -> RouteRecord:
        routes_start = min(self.routes_start, stop) if start == 0 else 0
        prefix = replace(self.prefix, stop=routes_start) if self.prefix is not None and routes_start else None
        origin = int(self.attributes["slice"].split(":")[0]) if "slice" in self.attributes else 0
        first_row = start + routes_start - self.routes_start
        return self._derived(
            self._stored[max(first_row, 0) : max(stop - self.routes_start, 0)],
            token_ids=self.token_ids[start:stop],
            routes_start=routes_start,
            prefix=prefix,
            spans=cut(self.spans, start=start, stop=stop),
            captures=cut(self.captures, start=start, stop=stop),
            logprobs=None if self.logprobs is None else self.logprobs[start:stop],
            attributes=MappingProxyType({**self.attributes, "slice": f"{origin + start}:{origin + stop}"}),
            columns=MappingProxyType({name: values[start:stop] for name, values in self.columns.items()}),
        )

    def _selected(self, spec: RouteSpec) -> RouteRecord:
        stored_SLK, captures = self._layers(spec)
        return self._derived(stored_SLK, spec=spec, captures=captures)

    def _layers(self, spec: RouteSpec) -> tuple[NDArray[Any], tuple[Capture, ...]]:
        """Rows and captures of a subset of layers."""
        stored_SLK = pick_layers(self._stored, [self.spec.slot(layer) for layer in spec.layer_ids])
        return stored_SLK, settle_partial(self.captures, stored_SLK, routes_start=self.routes_start)

    def _derived(self, stored_SLK: NDArray[Any], **changes: Any) -> RouteRecord:
        """This record with some of its own rows, and fields that follow from its own: all of it was checked, and is not
        checked again. The checksum is new."""
        made = object.__new__(RouteRecord)
        vars(made).update(vars(self), **changes, _absent=frozen_view(absent_tokens(stored_SLK)))
        made._hold(stored_SLK)
        vars(made).update(checksum=made.compute_checksum())
        return made

    def _hold(self, stored_SLK: NDArray[Any]) -> None:
        content, held = vars(self), frozen_view(stored_SLK)
        content.pop("routes", None)
        content.update({"_stored": held} if held.dtype == np.uint8 else {"_stored": held, "routes": held})

    def __reduce__(self) -> tuple[object, ...]:
        # Read-only mappings do not pickle; going through the constructor also validates what another process sent.
        content = {item.name: getattr(self, item.name) for item in fields(self)}
        content["attributes"], content["columns"] = dict(self.attributes), dict(self.columns)
        return _rebuild, (content,)


def read_record(stored: NDArray[Any], *, verify: bool, select: RouteSpec | None = None, **content: Any) -> RouteRecord:
    """A record of a reader, checked as any other, in one pass over its rows; they stay as they are ``stored``.

    ``stored``: int16, or narrow bytes, ``[S - routes_start, L, K]``; kept as a read-only view. ``content``: every field
    but ``routes``. ``verify``: compare the checksum too. ``select``, without ``verify``: the geometry of some of the
    layers, which are copied before any row is looked at, so that only these are; the checksum is new. Raises DataError
    as the constructor does, ChecksumError as ``verify`` does.
    """
    record = object.__new__(RouteRecord)
    vars(record).update(content)
    record._hold(stored)
    record._check_identity()
    record._admit(verify=verify, select=select)
    return record


def cut_record(
    record: RouteRecord, *, tokens: tuple[int, int] | None = None, spec: RouteSpec | None = None
) -> RouteRecord:
    """``slice`` and ``select`` for a reader, which has verified the record a moment ago (or was told not to).

    ``tokens``: an interval as ``slice`` takes it; ``spec``: the geometry to select, a subset of the record's layers.
    """
    part = record if tokens is None else record._sliced(*record._interval(*tokens))
    return part if spec is None or spec == part.spec else part._selected(spec)


def _rebuild(content: dict[str, Any]) -> RouteRecord:
    return RouteRecord(**content)


def _text_map(entries: Mapping[str, str] | None) -> Mapping[str, str]:
    checked = dict(entries or {})
    for key, value in checked.items():
        check_text(key, "an attribute's name")
        check_text(value, f"attribute {key!r}", empty=True)
    if "slice" in checked and not _SLICE.fullmatch(checked["slice"]):
        raise DataError(f"expected attribute 'slice' as start:stop, got {checked['slice']!r}", kind=ErrorKind.DTYPE)
    return MappingProxyType(checked)
