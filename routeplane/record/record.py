"""One finished sequence: its tokens, its routes, who sampled, who captured, and the checksum over all of it.

A RouteRecord that exists is valid: construction checks rows, spans, captures and coverage. Immutable; every method
returns a new record. Knows nothing of Arrow, files, streams or engines.

Axes: S token positions, L captured layers, K top-k slots.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Protocol, Self

import numpy as np

from routeplane.errors import DataError, ErrorKind, UsageError, check_type, refused
from routeplane.record.aligned import (
    AlignedColumn,
    aligned_columns,
    blank_weights,
    check_columns,
    hash_columns,
    have_rules,
)
from routeplane.record.checksum import CanonicalHash, hash_captures, hash_prefix, hash_spans, require_equal
from routeplane.record.counts import html_table
from routeplane.record.parse import as_integers, as_logprobs, check_count, check_text, settle
from routeplane.record.rows import StoredRows, canonical_blocks, pick_layers, widen
from routeplane.record.spans import (
    Capture,
    Coverage,
    Prefix,
    RecordKey,
    Span,
    check_cover,
    coverage_problems,
    cut,
    lose_rows,
    settle_partial,
    suffix_problems,
    unfed_start,
)
from routeplane.record.validate import find_problems, missing_rows

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from routeplane.record.spans import CaptureState, SpanKind
    from routeplane.record.spec import RouteSpec

__all__ = [
    "Prefix",
    "RecordKey",
    "RecordSource",
    "RouteRecord",
    "checked_records",
    "cut_record",
    "read_record",
    "text_map",
    "view_record",
]

_SLICE = re.compile(r"([0-9]{1,18}):([0-9]{1,18})")


@dataclass(frozen=True, kw_only=True, eq=False)
class RouteRecord:
    """One finished sequence of S tokens.

    ``token_ids``: int32 ``[S]``, the positions *fed*, after any placeholder expansion. ``routes``: int16
    ``[S - routes_start, L, K]``, one row per token and captured layer; rows that were not captured are MISSING (all
    -1). ``spans`` and ``captures`` each cover ``[0, S)``; what a capture declares must be what the rows show.
    ``routes_start`` above 0 needs a ``prefix`` that names the record holding the rows before it; ``token_ids`` and all
    columns of such a record may begin at ``routes_start`` too (``tokens_start``). ``logprobs``: float32 ``[S]``,
    ``logprobs[t]`` is for token t given those before it (so governed by ``routes[t-1]``), NaN where there is none.
    ``columns``: aligned columns of S entries by name; an array ``[S]`` becomes one that declares nothing. ``checksum``:
    None computes it; a given one is kept, and ``verify()`` compares.

    Arrays are kept as read-only views where their type already fits (the caller must not write to them afterwards) and
    copied where they had to be widened or narrowed. Raises DataError, with all findings, for anything illegal.

    >>> from routeplane import Capture, RouteSpec, Span
    >>> record = RouteRecord(
    ...     sample_id="s",
    ...     token_ids=[5, 6, 7],
    ...     routes=[[[3, 1]], [[0, 5]], [[-1, -1]]],
    ...     spans=[Span(start=0, stop=3, kind="generation", call="c", weights_version=1)],
    ...     captures=[
    ...         Capture(start=0, stop=2, call="c", weights_version=1, state="captured"),
    ...         Capture(start=2, stop=3, call="c", weights_version=None, state="not_fed"),
    ...     ],
    ...     spec=RouteSpec(num_experts=8, top_k=2, layer_ids=(0,)),
    ... )
    >>> record.key, record.coverage().missing_share, record.slice(1, 3).num_tokens
    (RecordKey(sample_id='s', attempt=0, segment=0), 0.0, 2)
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
    attributes: Mapping[str, str] = field(default_factory=dict)
    columns: Mapping[str, Any] = field(default_factory=dict)  # takes arrays too; AlignedColumn by name ever after
    # None asks for it to be computed; an int ever after. A factory: a class attribute would hide __getattr__
    checksum: Any = field(default_factory=lambda: None)

    if TYPE_CHECKING:  # no field: what construction leaves behind
        _rows: ClassVar[StoredRows]
        _source: ClassVar[tuple[RecordSource, int]]

    @property
    def _held(self) -> tuple[RecordSource, int] | None:
        """The reader's batch that the record is a view of, and its number there."""
        held: tuple[RecordSource, int] | None = vars(self).get("_source")
        return held

    def __post_init__(self) -> None:
        self._construct(as_integers(self.routes, np.int16, what="routes", ndim=3))

    def _construct(self, stored_SLK: NDArray[Any], *, verify: bool = False, select: RouteSpec | None = None) -> None:
        """Check everything and keep it, with the rows as they are stored; with ``verify``, the checksum too.

        ``select``: layers to keep, taken before any row is looked at.
        """
        self._check_identity()
        settle(self, token_ids=as_integers(self.token_ids, np.int32, what="token_ids", ndim=1))
        settle(self, spans=tuple(self.spans), captures=tuple(self.captures), attributes=text_map(self.attributes))
        self._check_lengths(len(stored_SLK))
        own = len(self.token_ids)
        if self.logprobs is not None:
            settle(self, logprobs=as_logprobs(self.logprobs, own))
        settle(self, columns=aligned_columns(self.columns, own))
        if select is not None:
            stored_SLK = self._take_layers(select, stored_SLK)
        out = self.hash_until_routes(stored_SLK.size) if verify or self.checksum is None else None
        rows = StoredRows.check(stored_SLK, self.spec, feed=None if out is None else out.part)
        if rows is None:
            self._refuse_rows(stored_SLK)
        self._hold(rows)
        self._check_content(rows)
        if out is not None:
            self.hash_from_routes_on(out)
            if self.checksum is None:
                settle(self, checksum=out.value())
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

    def _check_lengths(self, rows: int) -> None:
        """Spans and captures cover the record; tokens begin at its first or where the routes do; rows end with it."""
        own, start = len(self.token_ids), self.routes_start
        length = self.captures[-1].stop if self.captures else own
        if own != length and (start == 0 or own != length - start):
            length = own  # the intervals are at fault: they are measured against the tokens
        if length == 0:
            raise DataError(f"expected at least one token, got none @ sample {self.sample_id}", kind=ErrorKind.SHAPE)
        check_cover(self.spans, length, what=f"spans of sample {self.sample_id}")
        check_cover(self.captures, length, what=f"captures of sample {self.sample_id}")
        if rows != length - start:
            raise DataError(
                f"expected {max(length - start, 0)} rows ({length} tokens from {start}), got {rows} "
                f"@ sample {self.sample_id}",
                kind=ErrorKind.ROW_COUNT,
            )

    def _take_layers(self, spec: RouteSpec, stored_SLK: NDArray[Any]) -> NDArray[Any]:
        """Make this the record of a subset of layers, before its rows are checked; returns their rows."""
        slots = [self.spec.slot(layer) for layer in spec.layer_ids]
        picked_SLK = pick_layers(stored_SLK, slots)
        captures = settle_partial(self.captures, picked_SLK, routes_start=self.routes_start)
        settle(self, spec=spec, captures=captures, columns=_pick(self.columns, slots), checksum=None)
        return picked_SLK

    def _check_content(self, rows: StoredRows) -> None:
        """What captures and columns declare against the legal rows."""
        problems = list(
            coverage_problems(
                self.captures, rows.stored, routes_start=self.routes_start, sample=self.sample_id, absent=rows.absent
            )
        )
        problems += suffix_problems(self.captures, self.spans, cut="slice" in self.attributes, sample=self.sample_id)
        if problems:
            raise DataError.from_problems(problems, what="rows that contradict their captures")
        if self.columns and have_rules(self.columns):
            self._check_columns(rows)

    def _check_columns(self, rows: StoredRows) -> None:
        def sampled() -> NDArray[np.bool_]:
            return self.sampled_tokens()[self.tokens_start :]

        check_columns(
            self.columns,
            token_ids=self.token_ids,
            sampled=sampled,
            missing=lambda: missing_rows(rows.stored),
            row_shape=self.spec.row_shape,
            attributes=self.attributes,
            sample=self.sample_id,
        )
        mask, start = self.columns.get("loss_mask"), max(unfed_start(self.captures) - self.tokens_start, 0)
        if mask is not None and (mask.values[start:].astype(np.bool_) & ~sampled()[start:]).any():
            raise DataError(
                f"expected loss_mask 0 at tokens that were neither fed nor sampled, got others from token "
                f"{start + self.tokens_start} on @ sample {self.sample_id}",
                kind=ErrorKind.COVERAGE,
            )

    def _refuse_rows(self, stored_SLK: NDArray[Any]) -> NoReturn:
        routes_SLK = widen(stored_SLK, self.spec) if stored_SLK.dtype == np.uint8 else stored_SLK
        found = find_problems(routes_SLK, self.spec, first_token=self.routes_start, sample=self.sample_id)
        raise DataError.from_problems(found, what="illegal routes")

    def _hold(self, rows: StoredRows) -> None:
        vars(self).pop("routes", None)
        settle(self, _rows=rows)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            # narrow rows are widened when they are first asked for, which reading into a batch never does; a record of
            # a reader's batch is made without the objects that reading into a batch does not need
            own = vars(self)
            if name == "routes" and "_rows" in own:
                own[name] = own["_rows"].widened()
            elif name == "checksum" and "_source" in own:
                own[name] = self.compute_checksum()
            elif name in ("routes", "spans", "captures", "_rows") and "_source" in own:
                source, index = own["_source"]
                own[name] = source.part(name, index)
            else:
                raise AttributeError(f"expected an attribute of RouteRecord, got {name!r}")
            return own[name]

    @property
    def stored_routes(self) -> NDArray[Any]:
        """The rows as they are held, read-only: ``routes``, or the bytes of a ``narrow`` stream as ``rows.widen`` takes
        them.

        A record of a narrow stream widens its rows, into memory of its own, when ``routes`` is first asked for.
        """
        held = self._held
        return self._rows.stored if held is None else held[0].part("stored", held[1])

    @property
    def absent_tokens(self) -> NDArray[np.int64]:
        """Which rows of ``routes`` are MISSING in some layer: int64, ascending, read-only."""
        return self._rows.absent

    @property
    def key(self) -> RecordKey:
        """``(sample_id, attempt, segment)``."""
        return RecordKey(self.sample_id, self.attempt, self.segment)

    @property
    def num_tokens(self) -> int:
        """S, tokens that stand in the prefix's record included."""
        held = self._held
        return self.captures[-1].stop if held is None else held[0].length(held[1])

    @property
    def tokens_start(self) -> int:
        """Where ``token_ids`` and all columns begin: 0, or ``routes_start`` where those before stand in the prefix."""
        return self.num_tokens - len(self.token_ids)

    @property
    def nbytes(self) -> int:
        """Payload bytes of the arrays, routes as int16, owned by the record or shared."""
        arrays = [self.token_ids, *self.columns.values(), *(() if self.logprobs is None else (self.logprobs,))]
        return sum(int(array.nbytes) for array in arrays) + int(self._rows.stored.size) * 2

    @property
    def row_token_ids(self) -> NDArray[np.int32]:
        """The tokens of the record's own rows: int32 ``[S - routes_start]``, a read-only view."""
        return self.token_ids[self.routes_start - self.tokens_start :]

    def sampled_tokens(self) -> NDArray[np.bool_]:
        """Which tokens a policy sampled: a fresh bool array ``[S]``."""
        mask_S = np.zeros(self.num_tokens, dtype=np.bool_)
        for start, stop, kind in self.span_intervals():
            if kind == "generation":
                mask_S[start:stop] = True
        return mask_S

    def span_intervals(self) -> Iterable[tuple[int, int, SpanKind]]:
        """``(start, stop, kind)`` of each span, for readers that need no more of it."""
        held = self._held
        if held is not None:
            return held[0].span_intervals(held[1])
        return ((span.start, span.stop, span.kind) for span in self.spans)

    def capture_intervals(self) -> Iterable[tuple[int, int, CaptureState]]:
        """``(start, stop, state)`` of each capture, for readers that need no more of it."""
        held = self._held
        if held is not None:
            return held[0].capture_intervals(held[1])
        return ((capture.start, capture.stop, capture.state) for capture in self.captures)

    @property
    def seen_quiet(self) -> bool:
        """Whether its reader has looked for alarms, and found nothing suspect."""
        held = self._held
        return held is not None and held[0].quiet(held[1])

    @property
    def oldest_version(self) -> int | None:
        """The oldest weights that sampled a token of this record, or None where nothing was sampled or one is unknown.

        The age of a record is the trainer's version less this.
        """
        found = [span.weights_version for span in self.spans if span.kind == "generation"]
        known = [version for version in found if version is not None]
        return min(known) if known and len(known) == len(found) else None

    def attach_columns(self, columns: Mapping[str, Any]) -> RouteRecord:
        """Give the record columns that the trainer made, such as advantages.

        ``columns``: aligned columns of S entries by name, or arrays ``[S]``, which declare nothing.

        Returns a record with a checksum of its own, which shares this one's arrays. Raises ChecksumError where this
        record's content is not what its checksum says, UsageError (ARGUMENT) for a name that the record has, and
        DataError as the constructor.

        >>> from routeplane.testing.builders import watermarked_record, watermarked_spec
        >>> record = watermarked_record(0, num_tokens=3, spec=watermarked_spec())
        >>> own = record.attach_columns({"advantages": np.full(3, 0.5, dtype=np.float32)})
        >>> own.columns["advantages"].values.tolist()
        [0.5, 0.5, 0.5]
        """
        taken = sorted(self.columns.keys() & columns.keys())
        if taken:
            raise refused("names of columns that the record does not have", f"{taken} @ sample {self._name()}")
        return replace(self.verify(), columns={**self.columns, **columns}, checksum=None)

    def coverage(self) -> Coverage:
        """Rows by capture state."""
        return Coverage.of(self.captures)

    def __repr__(self) -> str:
        states = ", ".join(f"{count} {state}" for state, count in self.coverage().rows.items() if count)
        return f"RouteRecord({self._name()}: {self.num_tokens} tokens, {self._layout()}, {states})"

    def _name(self) -> str:
        return "/".join(map(str, self.key))

    def _layout(self) -> str:
        return "{} layers x {}".format(*self.spec.row_shape)

    def _repr_html_(self) -> str:
        facts: dict[str, object] = {"tokens": self.num_tokens, "a row": self._layout()}
        if self.prefix is not None:
            facts["rows before"] = f"{self.routes_start} in {self.prefix.sample_id}"
        for span in self.spans:
            said = f"{span.kind}, call {span.call}, weights {span.weights_version}"
            facts[f"tokens {span.start} to {span.stop - 1}"] = said
        for capture in self.captures:
            said = f"{capture.state}, call {capture.call}, weights {capture.weights_version}"
            facts[f"rows {capture.start} to {capture.stop - 1}"] = said
        columns = {name: str(column.type) for name, column in self.columns.items()}
        return html_table(f"RouteRecord {self._name()}", {**facts, **columns, **self.attributes})

    def compute_checksum(self) -> int:
        """xxh3-64 of the canonical bytes of this content, whatever ``checksum`` says."""
        out = self.hash_until_routes(self._rows.stored.size)
        for part_SLK in canonical_blocks(self._rows.stored, self.spec):
            out.part(part_SLK)
        self.hash_from_routes_on(out)
        return out.value()

    def hash_until_routes(self, ids: int) -> CanonicalHash:
        """A hash of the columns before the routes, which come next, ``ids`` of them as int16, by ``part``."""
        out = CanonicalHash(self.spec.digest)
        out.text("sample_id", self.sample_id)
        out.int32("attempt", self.attempt)
        out.int32("segment", self.segment)
        out.text("group", self.group)
        out.array("token_ids", self.token_ids)
        out.int64("routes_start", self.routes_start)
        out.begin_array("routes", int(ids) * 2)
        return out

    def hash_from_routes_on(self, out: CanonicalHash) -> None:
        """Add the columns behind the routes."""
        hash_prefix(out, self.prefix)
        held = self._held
        if held is not None:
            held[0].hash_intervals(out, held[1])
        else:
            hash_spans(out, self.spans)
            hash_captures(out, self.captures)
        out.array("logprobs", self.logprobs)
        out.text_map("attributes", self.attributes)
        hash_columns(out, self.columns)

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
        rows = len(self._rows)
        return replace(
            self,
            routes=self.spec.missing_rows(rows),
            captures=lose_rows(self.captures, start=self.routes_start),
            columns=blank_weights(self.columns, own=rows),
            checksum=None,
        )

    def _interval(self, start: int, stop: int) -> tuple[int, int]:
        start, stop = operator.index(start), operator.index(stop)
        if not 0 <= start < stop <= self.num_tokens:
            raise refused(f"0 <= start < stop <= {self.num_tokens}", f"[{start}, {stop}) @ sample {self.sample_id}")
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
        first_row = max(start - self.routes_start, 0)
        # where tokens begin with the routes, they do so in the part
        own = slice(max(start - self.tokens_start, 0), max(stop - self.tokens_start, 0))
        return self._derived(
            self._rows.cut(first_row, max(stop - self.routes_start, 0)),
            token_ids=self.token_ids[own],
            routes_start=routes_start,
            prefix=prefix,
            spans=cut(self.spans, start=start, stop=stop),
            captures=cut(self.captures, start=start, stop=stop),
            logprobs=None if self.logprobs is None else self.logprobs[own],
            attributes=MappingProxyType({**self.attributes, "slice": f"{origin + start}:{origin + stop}"}),
            columns=MappingProxyType({name: values[own] for name, values in self.columns.items()}),
        )

    def _selected(self, spec: RouteSpec) -> RouteRecord:
        rows = self._rows.pick(spec)
        captures = settle_partial(self.captures, rows.stored, routes_start=self.routes_start)
        slots = [self.spec.slot(layer) for layer in spec.layer_ids]
        return self._derived(rows, spec=spec, captures=captures, columns=_pick(self.columns, slots))

    def _derived(self, rows: StoredRows, **changes: Any) -> RouteRecord:
        """This record with rows that were checked, and fields that follow from its own; the checksum is new."""
        made = object.__new__(RouteRecord)
        kept = [item.name for item in fields(self) if item.name not in ("routes", "checksum")]
        settle(made, **{name: getattr(self, name) for name in kept})
        settle(made, **changes)
        made._hold(rows)
        settle(made, checksum=made.compute_checksum())
        return made

    def __reduce__(self) -> tuple[object, ...]:
        # Read-only mappings do not pickle; going through the constructor also validates what another process sent.
        content = {item.name: getattr(self, item.name) for item in fields(self)}
        content["attributes"], content["columns"] = dict(self.attributes), dict(self.columns)
        return _rebuild, (content,)


def _pick(columns: Mapping[str, AlignedColumn], slots: Sequence[int]) -> Mapping[str, AlignedColumn]:
    return MappingProxyType({name: column.pick_layers(slots) for name, column in columns.items()})


def read_record(stored: NDArray[Any], *, verify: bool, select: RouteSpec | None = None, **content: Any) -> RouteRecord:
    """A record of a reader, checked as any other, in one pass over its rows; they stay as they are ``stored``.

    ``stored``: int16, or narrow bytes, ``[S - routes_start, L, K]``; kept as a read-only view. ``content``: every field
    but ``routes``. ``verify``: compare the checksum too. ``select``, without ``verify``: the geometry of some of the
    layers, which are copied before any row is looked at, so that only these are; the checksum is new. Raises DataError
    as the constructor does, ChecksumError as ``verify`` does.
    """
    record = object.__new__(RouteRecord)
    settle(record, **content)
    record._construct(stored, verify=verify, select=select)
    return record


class RecordSource(Protocol):
    """A reader's batch whose records it has checked: what they are made of, when it is asked for."""

    def part(self, name: str, index: int) -> Any:
        """``spans``, ``captures``, ``routes``, ``_rows`` of a record, or its rows as they are ``stored``."""

    def length(self, index: int) -> int:
        """Its tokens."""

    def quiet(self, index: int) -> bool:
        """Whether it was looked at for alarms, and nothing was suspect."""

    def span_intervals(self, index: int) -> Iterable[tuple[int, int, SpanKind]]:
        """Start, stop and kind of its spans."""

    def capture_intervals(self, index: int) -> Iterable[tuple[int, int, CaptureState]]:
        """Start, stop and state of its captures."""

    def hash_intervals(self, out: CanonicalHash, index: int) -> None:
        """Add the items of its spans and captures."""


def view_record(
    source: RecordSource,
    index: int,
    *,
    columns: Mapping[str, AlignedColumn],
    slots: Sequence[int] | None = None,
    **content: Any,
) -> RouteRecord:
    """A record of a batch that checked all of it but ``columns``; without a prefix, ``content`` the other fields.

    ``slots``: the layers of ``columns`` that the record has; default all. Without a checksum in ``content``, it is
    computed when it is asked for. Raises DataError for columns that a record cannot have.
    """
    record = object.__new__(RouteRecord)
    vars(record).update(content, columns=_NO_COLUMNS, _source=(source, index))
    if columns:
        whole = aligned_columns(columns, record.num_tokens)
        settle(record, columns=whole if slots is None else _pick(whole, slots))
        if have_rules(columns):
            record._check_columns(record._rows)
    return record


_NO_COLUMNS: Mapping[str, AlignedColumn] = MappingProxyType({})


def checked_records(records: Iterable[RouteRecord]) -> Iterator[RouteRecord]:
    """Yield what a caller gave as records. Raises UsageError (ARGUMENT) for one that is none."""
    for record in records:
        check_type(record, RouteRecord, expected="a RouteRecord")
        yield record


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


def text_map(entries: Mapping[str, str] | None) -> Mapping[str, str]:
    """Attributes, checked, as a read-only copy. Raises DataError."""
    checked = dict(entries or {})
    for key, value in checked.items():
        check_text(key, "an attribute's name")
        check_text(value, f"attribute {key!r}", empty=True)
    if "slice" in checked and not _SLICE.fullmatch(checked["slice"]):
        raise DataError(f"expected attribute 'slice' as start:stop, got {checked['slice']!r}", kind=ErrorKind.DTYPE)
    return MappingProxyType(checked)
