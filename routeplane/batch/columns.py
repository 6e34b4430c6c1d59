"""What of each record goes into a batch: the checks before anything is allocated, and the columns that a plan cuts.

Entry t of a sampled column is about the logits at t-1. ``label_columns`` moves it there before a batch is cut, so that
it stands on the rank that has those logits, also at the edges of context-parallel chunks.

Numpy alone; trusts a RouteRecord. Knows records and geometries; knows no plan, no rank and no torch.

Axes: S tokens of a record, N rows of a batch, L layers, K top-k slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from routeplane.errors import DataError, ErrorKind, UsageError, check_type, refused
from routeplane.record.aligned import BFLOAT16_NAN, MASK_STATES, AlignedColumn, ColumnType, read_column
from routeplane.record.counts import Counts
from routeplane.record.record import RouteRecord
from routeplane.record.spans import STATES, Coverage, partial_states

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from routeplane.record.spans import Sampling
    from routeplane.record.spec import RouteSpec

__all__ = [
    "CHANGED_LOGITS",
    "NO_LABEL",
    "NO_STATE",
    "USES",
    "MaskCounts",
    "batch_columns",
    "check_fits",
    "check_pad_token",
    "check_whole",
    "column_fill",
    "count_states",
    "generated_tokens",
    "label_columns",
    "label_types",
    "layer_slots",
    "prompt_tokens",
    "scores",
    "settle_states",
    "states_of",
    "stored_rows",
    "weights_meaning_of",
]

#: The capture state of a row that is not a token.
NO_STATE = -1


def check_pad_token(pad_token_id: object) -> None:
    """Raise UsageError (ARGUMENT) unless this is a token id."""
    if isinstance(pad_token_id, bool) or not isinstance(pad_token_id, int) or not 0 <= pad_token_id < 2**31:
        raise refused("pad_token_id as a token id", f"{pad_token_id!r} (labels are the trainer's)")


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


def weights_meaning_of(records: Sequence[RouteRecord]) -> str | None:
    """What the routing weights of all records are; None without such a column. Raises DataError where they differ."""
    if "route_weights" not in records[0].columns:
        return None
    found = {record.attributes["weights_meaning"]: record.key for record in records}
    if len(found) > 1:
        raise DataError(
            f"expected route_weights of one meaning in a batch, got {sorted(found)} @ samples "
            f"{', '.join(map(str, found.values()))}",
            kind=ErrorKind.TOKEN_COLUMN,
        )
    return next(iter(found))


def _declared(name: str, kind: ColumnType) -> str:
    entry = "list" if kind.ragged else str(list(kind.shape)) if kind.shape else ""
    return " ".join(filter(None, (name, kind.dtype, entry, kind.aligned, "nullable" if kind.nullable else "")))


def column_fill(name: str, kind: ColumnType) -> float:
    """What a column holds at padding: NaN where its type has one and no mask says what is known, else 0."""
    if kind.nullable:
        return 0
    if name == "labels" and kind.dtype == "int64" and kind.aligned == "fed":
        return NO_LABEL
    return BFLOAT16_NAN if (name, kind.dtype) == ("route_weights", "uint16") else np.nan if "float" in kind.dtype else 0


def generated_tokens(record: RouteRecord) -> NDArray[np.bool_]:
    """Whether the policy sampled each token: bool ``[S]``."""
    return record.sampled_tokens()


def stored_rows(records: Sequence[RouteRecord]) -> list[NDArray[Any]]:
    """The rows of every record as they are held; all as int16 where some are."""
    stored = [record.stored_routes for record in records]
    return stored if len({rows.dtype for rows in stored}) == 1 else [record.routes for record in records]


def prompt_tokens(record: RouteRecord) -> int:
    """Tokens before the first one that the policy sampled; all of them where it sampled none.

    >>> from routeplane.testing.builders import watermarked_record, watermarked_spec
    >>> record = watermarked_record(0, num_tokens=5, spec=watermarked_spec())
    >>> prompt_tokens(record) == min(span.start for span in record.spans if span.kind == "generation")
    True
    """
    check_type(record, RouteRecord, expected="a RouteRecord")
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
    for start, stop, state in record.capture_intervals():
        states_S[start:stop] = STATES.index(state)
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


# ----------------------------------------------------------------------------------------------------------------------
# Labels: what each row's logits are scored on
# ----------------------------------------------------------------------------------------------------------------------

#: The label of a row that has none; what torch's cross entropy ignores.
NO_LABEL = -100
#: How a label can be scored as it was sampled, by its code in ``label_use``. ``none``: not sampled by a policy;
#: ``full``: over the whole vocabulary; ``listed``: over the ids in ``label_sampling_mask``; ``unmasked``: the engine
#: gave no whole list; ``unknown``: nor the temperature; ``greedy``: temperature 0; ``raw``: the record's
#: log-probabilities are those before temperature and filters.
USES = ("none", "full", "listed", "unmasked", "unknown", "greedy", "raw")
#: Added to the code where penalties, biases or processors changed the logits before they were filtered.
CHANGED_LOGITS = 8

_TYPES = {
    "labels": ColumnType(dtype="int64", aligned="fed"),
    "label_mask": ColumnType(dtype="bool", aligned="fed"),
    "label_logprobs": ColumnType(dtype="float32", aligned="fed"),
    "label_temperature": ColumnType(dtype="float32", aligned="fed"),
    "label_use": ColumnType(dtype="uint8", aligned="fed"),
}
_LISTS = "label_sampling_mask"


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskCounts(Counts):
    """Sampled tokens by how they can be scored as they were sampled; ``RouteBatch.mask_counts`` counts them.

    ``full``, ``listed``: exactly. ``unmasked``: some ids were filtered and the engine gave no whole list. ``unknown``:
    the temperature is not known. ``greedy``, ``raw``: refused by ``masks="apply"``. ``changed``: of all of these, those
    whose logits penalties, biases or processors changed.

    >>> counts = MaskCounts(full=1, listed=7, unmasked=2)
    >>> counts.unmasked_share
    0.2
    """

    SCOPE: ClassVar[str] = "mask_"
    full: int = 0
    listed: int = 0
    unmasked: int = 0
    unknown: int = 0
    greedy: int = 0
    raw: int = 0
    changed: int = 0

    @property
    def unmasked_share(self) -> float:
        """Share of the sampled tokens that cannot be scored as they were sampled; 0 where none was sampled."""
        usable = self.full + self.listed
        others = self.unmasked + self.unknown + self.greedy + self.raw
        return others / (usable + others) if others else 0.0

    def derived(self) -> dict[str, float]:
        """The share that ``require`` bounds."""
        return {"unmasked_share": self.unmasked_share}

    def require(self, *, max_unmasked: float) -> None:
        """Raise DataError (COVERAGE) where a larger share than this cannot be scored as it was sampled.

        >>> MaskCounts(listed=9, unmasked=1).require(max_unmasked=0.1)
        """
        if self.unmasked_share > max_unmasked:
            raise DataError(
                f"expected at most {max_unmasked:.2%} of the sampled tokens without a usable mask (max_unmasked), got "
                f"{self.unmasked_share:.2%}: {self}",
                kind=ErrorKind.COVERAGE,
            )


def label_types(columns: dict[str, ColumnType]) -> dict[str, ColumnType]:
    """The types of the columns that ``label_columns`` makes of records that have these."""
    own = dict(_TYPES)
    if "sampling_mask" in columns:
        own[_LISTS] = ColumnType(dtype="int32", ragged=True, aligned="fed", axes=("kept",))
    return own


def label_columns(records: Sequence[RouteRecord]) -> dict[str, list[AlignedColumn]]:
    """The columns of every record's labels, by name; see ``BatchOptions.labels``.

    Raises DataError (TOKEN_COLUMN) where a record has a column of such a name.
    """
    taken = {*_TYPES, _LISTS} & records[0].columns.keys()
    if taken:
        raise DataError(
            f"expected records without columns that labels are named by, got {sorted(taken)} @ sample {records[0].key}",
            kind=ErrorKind.TOKEN_COLUMN,
        )
    made = [_labels_of(record) for record in records]
    return {name: [each[name] for each in made] for name in made[0]}


def _labels_of(record: RouteRecord) -> dict[str, AlignedColumn]:
    tokens = record.num_tokens
    sampled_S, temperature_S, use_S = _sampled(record)
    logprobs_S = np.full(tokens, np.nan, dtype=np.float32) if record.logprobs is None else record.logprobs
    values = {
        "labels": _moved(record.token_ids.astype(np.int64), NO_LABEL),
        "label_mask": _moved(sampled_S, False),
        "label_logprobs": _moved(logprobs_S, np.nan),
        "label_temperature": _moved(temperature_S, np.nan),
        "label_use": _moved(use_S, 0),
    }
    made = {name: AlignedColumn.of(array, aligned="fed", name=name) for name, array in values.items()}
    lists = record.columns.get("sampling_mask")
    if lists is not None and lists.offsets is not None:
        # the list of token t stands at row t-1; the first token's is empty, since no policy sampled it
        offsets = np.append(lists.offsets[1:], lists.offsets[-1]) - lists.offsets[1]
        kind = label_types({"sampling_mask": lists.type})[_LISTS]
        made[_LISTS] = read_column(
            kind, lists.values[lists.offsets[1] :].astype(np.int32), offsets=offsets, valid=None, name=_LISTS
        )
    return made


def _moved(values_S: NDArray[Any], last: float) -> NDArray[Any]:
    moved_S = np.empty_like(values_S)
    moved_S[:-1] = values_S[1:]
    moved_S[-1] = last
    return moved_S


def _sampled(record: RouteRecord) -> tuple[NDArray[np.bool_], NDArray[np.float32], NDArray[np.uint8]]:
    """Which tokens a policy sampled, at which temperature, and how each can be scored; ``[S]`` each."""
    sampled_S = np.zeros(record.num_tokens, dtype=np.bool_)
    temperature_S = np.full(record.num_tokens, np.nan, dtype=np.float32)
    use_S = np.zeros(record.num_tokens, dtype=np.uint8)
    states = record.columns.get("sampling_mask_state")
    mode = record.attributes.get("logprobs_mode", "")
    for span in record.spans:
        if span.kind != "generation":
            continue
        own = slice(span.start, span.stop)
        sampled_S[own] = True
        if span.sampling is not None and span.sampling.temperature is not None:
            temperature_S[own] = span.sampling.temperature
        states_n = None if states is None else states.values[own]
        use_S[own] = _uses(span.sampling, states_n, mode=mode)
    return sampled_S, temperature_S, use_S


#: The code of a token with a known temperature, by what its list says.
_BY_STATE = np.array(
    [USES.index({"listed": "listed", "full": "full"}.get(state, "unmasked")) for state in MASK_STATES], dtype=np.uint8
)


def _uses(sampling: Sampling | None, states_n: NDArray[np.uint8] | None, *, mode: str) -> NDArray[np.uint8] | int:
    if sampling is None or sampling.temperature is None:
        return USES.index("unknown")
    changed = CHANGED_LOGITS if _changes_logits(sampling) else 0
    if sampling.temperature <= 0:
        return USES.index("greedy") | changed
    if (sampling.logprobs_mode or mode).startswith("raw"):
        return USES.index("raw") | changed
    if _keeps_all(sampling):
        return USES.index("full") | changed
    if states_n is None:
        return USES.index("unmasked") | changed
    found: NDArray[np.uint8] = _BY_STATE[states_n] | np.uint8(changed)
    return found


def _changes_logits(sampling: Sampling) -> bool:
    """Whether anything but temperature and filters acted; a value that is not known counts as none."""
    return bool(
        sampling.presence_penalty
        or sampling.frequency_penalty
        or sampling.repetition_penalty not in (None, 1.0)
        or sampling.logit_bias is not None
        or sampling.processors
    )


def _keeps_all(sampling: Sampling) -> bool:
    """Whether the parameters alone say that no id was filtered; vLLM and SGLang write "all" as top_k 0, -1 or 2**30."""
    top_k = sampling.top_k
    return sampling.top_p == 1.0 and not sampling.min_p and top_k is not None and not 0 < top_k < 2**30
