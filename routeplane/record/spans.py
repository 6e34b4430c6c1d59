"""Who sampled which tokens (Span) and who captured which rows (Capture).

Intervals are ``[start, stop)`` of token positions of one record, ordered, contiguous, and cover it. Pure values; knows
nothing of routes or Arrow.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypeVar, get_args

from routeplane.errors import DataError, ErrorKind
from routeplane.record.parse import check_count, check_optional_int64, check_text

__all__ = [
    "PRESENT_STATES",
    "SAMPLING_FLOATS",
    "STATES",
    "Capture",
    "CaptureState",
    "Prefix",
    "RecordKey",
    "Sampling",
    "Span",
    "SpanKind",
    "check_cover",
    "cut",
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
