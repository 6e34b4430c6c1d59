"""What of each record goes into a batch: the checks before anything is allocated, and the columns that a plan cuts.

Numpy alone; trusts a RouteRecord. Knows records and geometries; knows no plan, no rank and no torch.

Axes: S tokens of a record, N rows of a batch, L layers, K top-k slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from routeplane.errors import DataError, ErrorKind, UsageError
from routeplane.record.aligned import BFLOAT16_NAN, AlignedColumn, ColumnType
from routeplane.record.coverage import Coverage, partial_states
from routeplane.record.spans import STATES

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from routeplane.record.record import RouteRecord
    from routeplane.record.spec import RouteSpec

__all__ = [
    "NO_STATE",
    "batch_columns",
    "check_fits",
    "check_pad_token",
    "check_whole",
    "column_fill",
    "count_states",
    "generated_tokens",
    "layer_slots",
    "prompt_tokens",
    "scores",
    "settle_states",
    "states_of",
    "stored_rows",
]

#: The capture state of a row that is not a token.
NO_STATE = -1


def check_pad_token(pad_token_id: object) -> None:
    """Raise UsageError (ARGUMENT) unless this is a token id."""
    if isinstance(pad_token_id, bool) or not isinstance(pad_token_id, int) or not 0 <= pad_token_id < 2**31:
        raise UsageError(
            f"expected pad_token_id as a token id, got {pad_token_id!r} (labels are the trainer's)",
            kind=ErrorKind.ARGUMENT,
        )


def check_fits(record: RouteRecord, *, limit: int | None, what: str) -> None:
    """Raise UsageError (TOO_LONG) for a record of more than ``limit`` tokens; ``what`` names the limit's argument."""
    if limit is not None and record.num_tokens > limit:
        raise UsageError(
            f"expected records of at most {what}={limit} tokens, got {record.num_tokens} @ sample {record.key} "
            "(truncate= cuts them)",
            kind=ErrorKind.TOO_LONG,
        )


def check_whole(record: RouteRecord) -> None:
    """Raise DataError (PREFIX) for a record whose first rows stand in another one."""
    if record.prefix is not None:
        raise DataError(
            f"expected whole records (resolve(records) joins them), got rows from {record.routes_start} on with those "
            f"before in {record.prefix.key} @ sample {record.key}",
            kind=ErrorKind.PREFIX,
        )


def layer_slots(records: Sequence[RouteRecord], spec: RouteSpec) -> list[int] | None:
    """Positions on axis L of the wanted layers, None where these are all; raises SpecError for another geometry."""
    theirs = records[0].spec
    for record in records:
        theirs.require_same_geometry(record.spec, where=f"batch, sample {record.key}")
    subset = set(spec.layer_ids) < set(theirs.layer_ids)
    offered = theirs.select(spec.layer_ids) if subset else theirs
    spec.require_same_geometry(offered, where=f"batch, sample {records[0].key}")
    return [theirs.slot(layer) for layer in spec.layer_ids] if subset else None


def batch_columns(records: Sequence[RouteRecord], *, slots: list[int] | None) -> dict[str, list[AlignedColumn]]:
    """Each aligned column of every record, by name; raises DataError unless all records have the same, of one type.

    ``slots``: positions on axis L of the layers that the batch takes, None for all; an axis ``layers`` is cut likewise.
    """
    types = {name: column.type for name, column in records[0].columns.items()}
    for record in records:
        found = {name: column.type for name, column in record.columns.items()}
        if found != types:
            expected, got = (", ".join(_declared(*each) for each in kinds.items()) for kinds in (types, found))
            raise DataError(
                f"expected the token columns of the batch's first record ({expected or 'none'}), got ({got or 'none'}) "
                f"@ sample {record.key}",
                kind=ErrorKind.TOKEN_COLUMN,
            )
    columns = {name: [record.columns[name] for record in records] for name in types}
    if slots is None:
        return columns
    return {name: [column.pick_layers(slots) for column in each] for name, each in columns.items()}


def _declared(name: str, kind: ColumnType) -> str:
    entry = "list" if kind.ragged else str(list(kind.shape)) if kind.shape else ""
    return " ".join(filter(None, (name, kind.dtype, entry, kind.aligned, "nullable" if kind.nullable else "")))


def column_fill(name: str, kind: ColumnType) -> float:
    """What a column holds at padding: NaN where its type has one and no mask says what is known, else 0."""
    if kind.nullable:
        return 0
    return BFLOAT16_NAN if (name, kind.dtype) == ("route_weights", "uint16") else np.nan if "float" in kind.dtype else 0


def generated_tokens(record: RouteRecord) -> NDArray[np.bool_]:
    """Whether the policy sampled each token: bool ``[S]``."""
    mask_S = np.zeros(record.num_tokens, dtype=np.bool_)
    for span in record.spans:
        mask_S[span.start : span.stop] = span.kind == "generation"
    return mask_S


def stored_rows(records: Sequence[RouteRecord]) -> list[NDArray[Any]]:
    """The rows of every record as they are held; all as int16 where some are."""
    stored = [record.stored_routes for record in records]
    return stored if len({rows.dtype for rows in stored}) == 1 else [record.routes for record in records]


def prompt_tokens(record: RouteRecord) -> int:
    """Tokens before the first one that the policy sampled; all of them where it sampled none."""
    return min((span.start for span in record.spans if span.kind == "generation"), default=record.num_tokens)


def scores(records: Sequence[RouteRecord]) -> list[NDArray[np.float32]] | None:
    """Log-probabilities of every record, NaN where one has none; None where none has any."""
    if all(record.logprobs is None for record in records):
        return None
    none = np.float32(np.nan)
    return [
        np.broadcast_to(none, record.num_tokens) if record.logprobs is None else record.logprobs for record in records
    ]


# ----------------------------------------------------------------------------------------------------------------------
# Capture states, row by row
# ----------------------------------------------------------------------------------------------------------------------


def states_of(record: RouteRecord) -> NDArray[np.int8]:
    """Capture state of each token, as its place in ``spans.STATES``: int8 ``[S]``."""
    states_S = np.empty(record.num_tokens, dtype=np.int8)
    for capture in record.captures:
        states_S[capture.start : capture.stop] = STATES.index(capture.state)
    return states_S


def settle_states(
    states_N: NDArray[np.int8], rows: Callable[[NDArray[np.int64]], NDArray[np.int16]]
) -> NDArray[np.int8]:
    """States for the layers that are there: a row partial over all layers may be whole, or absent, over these.

    ``rows``: the routes ``[n, L, K]`` of rows by number; asked once, for the partial ones alone, where there are any.
    Returns the states themselves where nothing changes, else a copy.
    """
    partial = np.flatnonzero(states_N == STATES.index("partial"))
    if len(partial) == 0:
        return states_N
    settled_N = states_N.copy()
    settled_N[partial] = partial_states(rows(partial))
    return settled_N


def count_states(states_N: NDArray[np.int8], *, records: int) -> Coverage:
    """Rows by capture state; padding is not counted."""
    # a pass over bytes for each: bincount would make int64 of them first
    rows: dict[str, int] = {state: int(np.count_nonzero(states_N == place)) for place, state in enumerate(STATES)}
    return Coverage(records=records, rows=MappingProxyType(rows))
