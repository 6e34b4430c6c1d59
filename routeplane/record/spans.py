"""Who sampled which tokens (Span), who captured which rows (Capture), and the counts by state (Coverage).

Intervals are ``[start, stop)`` of token positions of one record, ordered, contiguous, and cover it. Below them: rows
against what their captures declare, and the counts that every report carries. Pure values and pure functions of
captures and arrays; knows no record, no Arrow and no IO. Axes: S tokens, L captured layers, K top-k slots.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from routeplane.errors import DataError, ErrorKind, Problem, UsageError
from routeplane.record.counts import Counts, add_by_key, rule
from routeplane.record.parse import check_count, check_optional_int64, check_text
from routeplane.record.validate import missing_rows

__all__ = [
    "PRESENT_STATES",
    "SAMPLING_FLOATS",
    "STATES",
    "Capture",
    "CaptureState",
    "Coverage",
    "Prefix",
    "RecordKey",
    "Sampling",
    "Span",
    "SpanKind",
    "check_cover",
    "coverage_problems",
    "cut",
    "lose_rows",
    "partial_states",
    "settle_partial",
    "stale_kv",
    "suffix_problems",
    "unfed_start",
]


class RecordKey(NamedTuple):
    """What makes a record one of its kind: a sample, its attempt, and the segment after a context break.

    >>> str(RecordKey("prompt-7", attempt=1, segment=0))
    'prompt-7/1/0'
    """

    sample_id: str
    attempt: int
    segment: int

    def __str__(self) -> str:
        return f"{self.sample_id}/{self.attempt}/{self.segment}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Prefix:
    """Where the rows before ``routes_start`` stand: rows ``[0, stop)`` of another record, known by its checksum.

    >>> Prefix(sample_id="prompt-7", stop=3, checksum=17).key
    RecordKey(sample_id='prompt-7', attempt=0, segment=0)
    """

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


SpanKind = Literal["prompt", "generation"]
CaptureState = Literal["captured", "cached", "partial", "not_fed", "aborted", "lost", "not_captured"]

#: All capture states, in the order in which the format lists them.
STATES: tuple[CaptureState, ...] = get_args(CaptureState)
_KINDS: tuple[SpanKind, ...] = get_args(SpanKind)
#: States whose rows carry ids in every layer.
PRESENT_STATES: frozenset[CaptureState] = frozenset({"captured", "cached"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How an engine sampled the tokens of a span; None throughout stands for "not known".

    ``logit_bias``: a digest of the biases, not the biases. ``processors``: names of logits processors, in order.
    ``logprobs_mode``: ``raw`` or ``processed``. Raises DataError.

    >>> Sampling(temperature=0.7, top_p=0.95).top_k is None
    True
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: str | None = None
    processors: tuple[str, ...] | None = None
    logprobs_mode: str | None = None

    def __post_init__(self) -> None:
        for name in SAMPLING_FLOATS:
            value = getattr(self, name)
            if value is not None and (type(value) is not float or not math.isfinite(value)):
                raise DataError(
                    f"expected Sampling.{name} as a finite float or None, got {value!r}", kind=ErrorKind.DTYPE
                )
        check_optional_int64(self.top_k, "Sampling.top_k")
        for name in ("logit_bias", "logprobs_mode"):
            if getattr(self, name) is not None:
                check_text(getattr(self, name), f"Sampling.{name}")
        if self.processors is not None:
            if not isinstance(self.processors, tuple):
                raise DataError(
                    f"expected Sampling.processors as a tuple, got {self.processors!r}", kind=ErrorKind.DTYPE
                )
            for processor in self.processors:
                check_text(processor, "a name in Sampling.processors")


#: The members of ``Sampling`` that are float64.
SAMPLING_FLOATS = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """Who *sampled* tokens ``[start, stop)``.

    ``kind``: prompt or generation. ``role``: a chat role, or None. ``call``: id of the call that brought the tokens.
    ``weights_version``: the policy that sampled them; None for tokens no policy sampled. ``sampling``: with which
    parameters, at generated tokens alone (format 1.1). Raises DataError.

    >>> Span(start=3, stop=8, kind="generation", call="c", weights_version=12).stop
    8
    """

    start: int
    stop: int
    kind: SpanKind
    role: str | None = None
    call: str
    weights_version: int | None
    sampling: Sampling | None = None

    def __post_init__(self) -> None:
        _check_interval(self)
        if self.sampling is not None and (self.kind != "generation" or not isinstance(self.sampling, Sampling)):
            raise DataError(
                f"expected a Sampling at generated tokens alone, got {self.sampling!r} at {self.kind}",
                kind=ErrorKind.SPANS,
            )
        if self.kind not in _KINDS:
            raise DataError(f"expected a span kind of {_KINDS}, got {self.kind!r}", kind=ErrorKind.SPANS)
        if self.role is not None:
            check_text(self.role, "Span.role", empty=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Capture:
    """Who *captured* the rows ``[start, stop)``, and how.

    ``weights_version``: of the weights that routed; None where unknown (a prefix cache that outlived an update, tokens
    near an unpaused update) and for rows that are not there. ``state``: one of STATES. Raises DataError.

    >>> Capture(start=7, stop=8, call="c", weights_version=None, state="not_fed").state
    'not_fed'
    """

    start: int
    stop: int
    call: str
    weights_version: int | None
    state: CaptureState

    def __post_init__(self) -> None:
        _check_interval(self)
        if self.state not in STATES:
            raise DataError(f"expected a capture state of {STATES}, got {self.state!r}", kind=ErrorKind.COVERAGE)


Interval = TypeVar("Interval", Span, Capture)


def _check_interval(item: Span | Capture) -> None:
    start, stop, version = item.start, item.stop, item.weights_version
    if (
        type(start) is type(stop) is int
        and 0 <= start < stop < 2**63
        and type(item.call) is str
        and item.call.isascii()
        and (version is None or (type(version) is int and -(2**63) <= version < 2**63))
    ):
        return  # nearly always
    name = type(item).__name__
    for key in ("start", "stop"):
        check_count(getattr(item, key), f"{name}.{key}", below=2**63)
    if not item.start < item.stop:
        raise DataError(f"expected start < stop, got {name} [{item.start}, {item.stop})", kind=ErrorKind.SPANS)
    check_text(item.call, f"{name}.call", empty=True)
    check_optional_int64(item.weights_version, f"{name}.weights_version")


def check_cover(intervals: Sequence[Interval], length: int, *, what: str) -> None:
    """Raise DataError unless the intervals are ordered, contiguous and cover ``[0, length)``."""
    at = 0
    for item in intervals:
        if item.start != at:
            raise DataError(
                f"expected {what} contiguous from token {at}, got [{item.start}, {item.stop})", kind=ErrorKind.SPANS
            )
        at = item.stop
    if at != length:
        raise DataError(f"expected {what} that cover {length} tokens, got {at}", kind=ErrorKind.SPANS)


def cut(intervals: Iterable[Interval], *, start: int, stop: int) -> tuple[Interval, ...]:
    """The parts of the intervals inside ``[start, stop)``, shifted so that ``start`` becomes 0."""
    return tuple(
        replace(item, start=max(item.start, start) - start, stop=min(item.stop, stop) - start)
        for item in intervals
        if item.start < stop and item.stop > start
    )


# by the number of yes-answers to: is any layer missing? are all?
_SETTLED = np.asarray([STATES.index(state) for state in ("captured", "partial", "not_captured")], dtype=np.int8)

_STATES = frozenset(STATES)


def _no_rows() -> Mapping[str, int]:
    return MappingProxyType({})


@dataclass(frozen=True, kw_only=True, slots=True)
class Coverage(Counts):
    """Rows by capture state, counted in tokens (one token is one row in each layer).

    ``rows``: counts by state, read-only. Raises UsageError (ARGUMENT) for a state that is not in STATES.

    >>> Coverage(records=1, rows={"captured": 6, "lost": 2, "not_fed": 4}).missing_share
    0.25
    """

    records: int = 0
    rows: Mapping[str, int] = field(default_factory=_no_rows, metadata=rule(scalar=None, merge=add_by_key))

    def __post_init__(self) -> None:
        if not self.rows.keys() <= _STATES:
            raise UsageError(f"expected counts by state of {STATES}, got {sorted(self.rows)}", kind=ErrorKind.ARGUMENT)

    @classmethod
    def of(cls, captures: Iterable[Capture]) -> Coverage:
        """Count the rows of one record."""
        return cls.of_records((captures,))

    @classmethod
    def of_records(cls, records: Iterable[Iterable[Capture]]) -> Coverage:
        """Count the rows of records, each given by its captures: their merged counts, in one go."""
        rows: dict[str, int] = dict.fromkeys(STATES, 0)
        number = 0
        for captures in records:
            number += 1
            for capture in captures:
                rows[capture.state] += capture.stop - capture.start
        return cls(records=number, rows=MappingProxyType(rows)) if number else cls()

    def count(self, state: CaptureState) -> int:
        """Rows in one state."""
        return self.rows.get(state, 0)

    @property
    def total(self) -> int:
        """All rows, which is all tokens."""
        return sum(self.rows.values())

    @property
    def fed(self) -> int:
        """Rows that an engine computed, whether or not they arrived."""
        return self.total - self.count("not_fed")

    @property
    def missing(self) -> int:
        """Rows that were fed and yet are not there, or not in every layer: what replay leaves to the live router."""
        return sum(count for state, count in self.rows.items() if state not in PRESENT_STATES and state != "not_fed")

    @property
    def missing_share(self) -> float:
        """``missing / fed``; 0.0 where nothing was fed."""
        return self.missing / self.fed if self.fed else 0.0

    def derived(self) -> dict[str, float]:
        """Rows by state, all rows, and the share that is missing."""
        states: dict[str, float] = {f"rows_{state}": float(self.count(state)) for state in STATES}
        return states | {"rows": float(self.total), "missing_share": self.missing_share}


def coverage_problems(
    captures: Iterable[Capture],
    routes_SLK: NDArray[Any],
    *,
    routes_start: int,
    sample: str,
    absent: NDArray[np.int64] | None = None,
) -> Iterator[Problem]:
    """Where legal rows ``[S - routes_start, L, K]`` contradict what their captures declare, one finding per capture.

    ``routes_SLK``: int16 or narrow. ``absent``: the rows, ascending, that ``rows.absent_tokens`` finds in them, where
    the caller knows them.
    """
    absent_N = np.flatnonzero(missing_rows(routes_SLK).any(axis=1)) if absent is None else absent
    for capture in captures:
        start, stop = max(capture.start, routes_start), capture.stop
        if start >= stop:
            continue
        # a search of its own: numpy's costs more than all else that is done for a capture without absent rows
        first = bisect_left(absent_N, start - routes_start)
        if capture.state in PRESENT_STATES and (first == len(absent_N) or absent_N[first] >= stop - routes_start):
            continue  # nearly always
        rows_SL = missing_rows(routes_SLK[start - routes_start : stop - routes_start])
        if capture.state in PRESENT_STATES:
            wrong_S, expected = rows_SL.any(axis=1), "ids in every layer"
        elif capture.state == "partial":
            wrong_S, expected = rows_SL.all(axis=1) | ~rows_SL.any(axis=1), "ids in some layers, not all"
        else:
            wrong_S, expected = ~rows_SL.all(axis=1), "no ids"
        if wrong_S.any():
            token = start + int(wrong_S.argmax())
            message = (
                f"expected {expected} where the capture says {capture.state}, got {int(wrong_S.sum())} rows otherwise"
            )
            yield Problem(kind=ErrorKind.COVERAGE, message=message, sample=sample, token=token)


def suffix_problems(captures: Sequence[Capture], spans: Sequence[Span], *, cut: bool, sample: str) -> Iterator[Problem]:
    """Where ``not_fed`` stands for tokens that an engine must have fed: one finding at most.

    An engine feeds every token but the last it sampled, and what an environment or a template appended behind it: so
    ``not_fed`` rows end the record, and hold at most one generated token, which is their first. ``cut``: whether the
    record is a slice of another; one that is not, without any generated token, has its last token alone not fed.
    Anything else that is absent was lost, and counts.
    """
    first = next((place for place, capture in enumerate(captures) if capture.state == "not_fed"), None)
    if first is None:
        return
    start, length = captures[first].start, captures[-1].stop
    generated = [span.stop for span in spans if span.kind == "generation"]
    ends = all(capture.state == "not_fed" for capture in captures[first:])
    if ends and (generated or cut or start == length - 1) and all(stop <= start + 1 for stop in generated):
        return
    message = (
        f"expected not_fed from the last sampled token on, to the end of the record's {length} tokens, got it from "
        f"token {start} (tokens were sampled up to {max(generated, default=None)})"
    )
    yield Problem(kind=ErrorKind.COVERAGE, message=message, sample=sample, token=start)


def unfed_start(captures: Sequence[Capture]) -> int:
    """Where the rows that were never fed begin; the number of tokens where all were."""
    return next((capture.start for capture in captures if capture.state == "not_fed"), captures[-1].stop)


def stale_kv(captures: Iterable[Capture]) -> list[tuple[int, int]]:
    """List the rows that new weights computed over a KV cache that old ones had filled.

    A call that goes on after an update reads what its earlier tokens left in the cache, so from the first row of other
    weights on a difference to a trainer's forward need not be one of numerics. Rows that an engine computed again after
    an update have no known version, and are none of these.

    Args:
        captures: Those of one record.

    Returns:
        ``[start, stop)`` of tokens, in order and apart.

    >>> rows = {"call": "c", "state": "captured"}
    >>> first, second = (Capture(start=at, stop=at + 3, weights_version=7 + at, **rows) for at in (0, 3))
    >>> stale_kv([first, second])
    [(3, 6)]
    """
    first: dict[str, int] = {}
    changed: set[str] = set()
    found: list[tuple[int, int]] = []
    for capture in captures:
        if capture.state not in ("captured", "partial") or capture.weights_version is None:
            continue
        if first.setdefault(capture.call, capture.weights_version) != capture.weights_version:
            changed.add(capture.call)
        if capture.call in changed:
            joined = bool(found) and found[-1][1] == capture.start
            found[-1 if joined else len(found) :] = [(found[-1][0] if joined else capture.start, capture.stop)]
    return found


def settle_partial(captures: Iterable[Capture], routes_SLK: NDArray[Any], *, routes_start: int) -> tuple[Capture, ...]:
    """Captures after layers were dropped: a partial row may have become whole, or may have lost all it had.

    Rows before ``routes_start`` stand in another record and stay as declared.
    """
    settled: list[Capture] = []
    for capture in captures:
        first = max(capture.start, routes_start)
        if capture.state != "partial" or first >= capture.stop:
            settled.append(capture)
            continue
        if capture.start < first:
            settled.append(replace(capture, stop=first))
        states_S = partial_states(routes_SLK[first - routes_start : capture.stop - routes_start])
        edges = [0, *(np.flatnonzero(np.diff(states_S)) + 1).tolist(), len(states_S)]
        for a, b in itertools.pairwise(edges):
            state = STATES[int(states_S[a])]
            version = None if state == "not_captured" else capture.weights_version
            settled.append(replace(capture, start=first + a, stop=first + b, state=state, weights_version=version))
    return tuple(settled)


def partial_states(routes_SLK: NDArray[Any]) -> NDArray[np.int8]:
    """What tokens captured in part are over the layers that are left: places in ``STATES``, int8 ``[S]``.

    Whole (captured), still partial, or without any row (not captured).
    """
    missing_SL = missing_rows(routes_SLK)
    return np.asarray(_SETTLED[missing_SL.any(axis=1).astype(np.int8) + missing_SL.all(axis=1)])


def lose_rows(captures: Iterable[Capture], *, start: int = 0, stop: int | None = None) -> tuple[Capture, ...]:
    """Captures of a record whose rows ``[start, stop)`` were discarded: everything fed there is ``lost``."""
    kept: list[Capture] = []
    for capture in captures:
        first = max(capture.start, start)
        last = capture.stop if stop is None else min(capture.stop, stop)
        if capture.state == "not_fed" or first >= last:
            kept.append(capture)
            continue
        if capture.start < first:
            kept.append(replace(capture, stop=first))
        kept.append(replace(capture, start=first, stop=last, state="lost", weights_version=None))
        if last < capture.stop:
            kept.append(replace(capture, start=last))
    return tuple(kept)
