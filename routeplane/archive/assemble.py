"""One record out of a run's arrays: whole, or a range of its tokens and layers, reading no chunk beyond it.

A range gives what ``record.slice(a, b).select(layers)`` gives of the whole record. Knows a row of the table and a
reader of chunks; no store.

Axes: S tokens of what is read, L captured layers, K top-k slots.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from routeplane.archive.chunks import Range
from routeplane.errors import ErrorKind, UsageError
from routeplane.record.codec import widen
from routeplane.record.coverage import settle_partial
from routeplane.record.record import RouteRecord
from routeplane.record.spans import cut

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from routeplane.archive.catalog import Run
    from routeplane.archive.table import Row
    from routeplane.record.record import Prefix
    from routeplane.record.spec import RouteSpec

__all__ = ["Piece", "build", "joined", "read_record", "read_rows", "route_ranges", "token_ranges"]

ROUTES, TOKENS, LOGPROBS = "routes", "token_ids", "logprobs"


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Tokens ``[start, stop)`` of a record, and where its rows stand in the run's routes."""

    start: int
    stop: int
    routes_start: int
    first_row: int
    last_row: int
    sliced: bool  # a range was asked for, be it all of them

    @classmethod
    def of(cls, row: Row, tokens: tuple[int, int] | None) -> Piece:
        """The whole record, or a range of its tokens, under the rules of ``RouteRecord.slice``. Raises UsageError."""
        start, stop = (0, row.num_tokens) if tokens is None else tokens
        if not 0 <= start < stop <= row.num_tokens:
            raise UsageError(
                f"expected 0 <= start < stop <= {row.num_tokens}, got [{start}, {stop}) @ sample {row.key}",
                kind=ErrorKind.ARGUMENT,
            )
        if 0 < start < row.routes_start:
            raise UsageError(
                f"expected rows from {start} on, got rows only from {row.routes_start}: those before stand in another "
                f"record @ sample {row.key}",
                kind=ErrorKind.PREFIX,
            )
        first, last = max(start - row.routes_start, 0), max(stop - row.routes_start, 0)
        return cls(
            start=start,
            stop=stop,
            routes_start=min(row.routes_start, stop) if start == 0 else 0,
            first_row=row.row_start + first,
            last_row=row.row_start + last,
            sliced=tokens is not None,
        )


def read_record(
    run: Run, row: Row, *, tokens: tuple[int, int] | None = None, layers: Sequence[int] | None = None
) -> RouteRecord:
    """The record, or the range of it. Whole ones carry the stored checksum, uncompared; ranges a new one.

    Raises FormatError for damaged chunks, DataError for rows that are illegal or contradict the captures, UsageError.
    """
    piece, slots = Piece.of(row, tokens), _slots(run.spec, layers)
    ranges = [*token_ranges(run, row, piece=piece), *route_ranges(piece, slots)]
    found = run.chunks.read(ranges)
    beside = {wanted.array: values for wanted, values in zip(ranges, found, strict=True) if wanted.array != ROUTES}
    stored = [values for wanted, values in zip(ranges, found, strict=True) if wanted.array == ROUTES]
    return build(run, row, piece=piece, beside=beside, routes=joined(stored, run.spec), slots=slots)


def read_rows(
    run: Run, row: Row, *, tokens: tuple[int, int] | None = None, layers: Sequence[int] | None = None
) -> NDArray[np.int16]:
    """The rows alone, int16 ``[rows, L, K]``, chunks checked and nothing else."""
    return joined(run.chunks.read(route_ranges(Piece.of(row, tokens), _slots(run.spec, layers))), run.spec)


def joined(stored: Sequence[NDArray[Any]], spec: RouteSpec) -> NDArray[np.int16]:
    """What was read of ``routes``, layer by layer or at once, as int16 ``[S, L, K]``."""
    stored_SLK = stored[0] if len(stored) == 1 else np.concatenate(stored, axis=1)
    return widen(stored_SLK, spec) if stored_SLK.dtype == np.uint8 else stored_SLK.astype(np.int16, copy=False)


def _slots(spec: RouteSpec, layers: Sequence[int] | None) -> list[int] | None:
    return None if layers is None else [spec.slot(layer) for layer in spec.select(layers).layer_ids]


def token_ranges(run: Run, row: Row, *, piece: Piece) -> list[Range]:
    """What of the arrays without layers belongs to a piece."""
    names = [TOKENS, *(f"columns/{index}" for index in range(len(run.manifest.columns)))]
    names += [LOGPROBS] if row.has_logprobs else []
    start, stop = row.token_start + piece.start, row.token_start + piece.stop
    return [Range(array=name, start=start, stop=stop) for name in names]


def route_ranges(piece: Piece, slots: Sequence[int] | None) -> list[Range]:
    """What of ``routes`` belongs to a piece; one range for each group of neighbouring layers."""
    groups = [None] if slots is None else list(_neighbours(slots))
    return [Range(array=ROUTES, start=piece.first_row, stop=piece.last_row, slots=group) for group in groups]


def _neighbours(slots: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Sorted slots as intervals: zarrs reads slices alone."""
    first = last = slots[0]
    for slot in slots[1:]:
        if slot != last + 1:
            yield first, last + 1
            first = slot
        last = slot
    yield first, last + 1


def build(
    run: Run,
    row: Row,
    *,
    piece: Piece,
    beside: dict[str, NDArray[Any]],
    routes: NDArray[np.int16],
    slots: Sequence[int] | None = None,
    changes: Mapping[str, Any] | None = None,
) -> RouteRecord:
    """The record of arrays that were read. ``beside``: key of an array without layers -> its values.

    ``changes``: fields that shall be other than the table has them; the checksum is then a new one.
    """
    spec = run.spec
    captures = cut(row.captures, start=piece.start, stop=piece.stop)
    if slots is not None:
        spec = spec.select(spec.layer_ids[slot] for slot in slots)
        captures = settle_partial(captures, routes, routes_start=piece.routes_start)
    columns = {name: beside[f"columns/{index}"] for index, name in enumerate(run.manifest.columns)}
    content: dict[str, Any] = {
        "sample_id": row.sample_id,
        "attempt": row.attempt,
        "segment": row.segment,
        "group": row.group,
        "token_ids": beside[TOKENS],
        "routes": routes,
        "routes_start": piece.routes_start,
        "prefix": _prefix(row, piece),
        "spans": cut(row.spans, start=piece.start, stop=piece.stop),
        "captures": captures,
        "spec": spec,
        "logprobs": beside.get(LOGPROBS),
        "attributes": _attributes(row, piece),
        "columns": columns,
        "checksum": None if piece.sliced or slots is not None or changes else row.checksum,
    }
    return RouteRecord(**{**content, **(changes or {})})


def _prefix(row: Row, piece: Piece) -> Prefix | None:
    return replace(row.prefix, stop=piece.routes_start) if row.prefix is not None and piece.routes_start else None


def _attributes(row: Row, piece: Piece) -> dict[str, str]:
    if not piece.sliced:
        return row.attributes
    origin = int(row.attributes["slice"].split(":")[0]) if "slice" in row.attributes else 0
    return {**row.attributes, "slice": f"{origin + piece.start}:{origin + piece.stop}"}
