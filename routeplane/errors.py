"""What can go wrong, grouped by what the catcher would do about it.

    RouteplaneError
    |- DataError         (ValueError)    the records are bad: drop, quarantine or re-roll them
    |  `- ChecksumError
    |- FormatError       (ValueError)    the container is unreadable: fetch or write it again
    |  `- TruncatedError (EOFError)      ... it ended early: the producer died or is still writing
    |- SpecError         (ValueError)    geometries disagree or are unknown: fix the configuration
    |- UsageError        (ValueError)    a call was made with arguments that cannot be served: fix the code
    |- StoreError        (OSError)       storage refused: free space, or have one writer, and try again
    |- CaptureError      (RuntimeError)  the engine does not deliver routes: fix its flags or version
    |- ReplayError       (RuntimeError)  gates and rows are wired wrongly: stop the step
    |- FleetError        (RuntimeError)  a part of the fleet did not come up, or went: see its machine, start it again
    |- TransportError    (OSError)       connection lost, timeout or no space: send again what was not acknowledged
    `- MissingExtraError (ImportError)   an optional dependency is absent: install the named extra

Every error carries a stable ``kind`` and all ``problems`` that were found, and pickles with both (errors cross
process and Ray boundaries). Messages say what was expected, what came, and where. This module imports nothing.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Literal, Self

__all__ = [
    "CaptureError",
    "ChecksumError",
    "DataError",
    "ErrorKind",
    "FleetError",
    "FormatError",
    "MissingExtraError",
    "Problem",
    "ReplayError",
    "RouteplaneError",
    "SpecError",
    "StoreError",
    "TransportError",
    "TruncatedError",
    "UsageError",
    "check_type",
    "naming_stream",
    "refused",
]


class ErrorKind(StrEnum):
    """What exactly went wrong. Append-only: a value, once released, keeps its meaning and its place.

    >>> ErrorKind.DUPLICATE_ID.value
    'duplicate_id'
    """

    # rows
    PARTIAL_ROW = "partial_row"  # some ids of a row are negative, or negative but not -1
    ID_OUT_OF_RANGE = "id_out_of_range"
    DUPLICATE_ID = "duplicate_id"
    # records
    SHAPE = "shape"
    DTYPE = "dtype"
    VALUE_RANGE = "value_range"  # a value does not fit the type it is stored in
    SPANS = "spans"
    COVERAGE = "coverage"  # rows present or absent against what the captures declare
    ROW_COUNT = "row_count"
    TOKEN_MISMATCH = "token_mismatch"
    CHECKSUM = "checksum"
    PREFIX = "prefix"
    DUPLICATE_KEY = "duplicate_key"
    TOKEN_COLUMN = "token_column"
    # calls
    CONTEXT_BREAK = "context_break"
    ROUTES_MISSING = "routes_missing"
    MEDIA = "media"
    LAYERS = "layers"
    # alarms: statistics that a healthy capture does not show
    CONSTANT_LAYER = "constant_layer"
    IDENTICAL_ROWS = "identical_rows"
    ENTROPY_COLLAPSE = "entropy_collapse"
    # containers
    NOT_ARROW = "not_arrow"
    NOT_ROUTEPLANE = "not_routeplane"
    VERSION = "version"
    SCHEMA = "schema"
    ENCODING = "encoding"
    COMPRESSED = "compressed"
    TRUNCATED = "truncated"
    TRAILER = "trailer"
    CORRUPT_BATCH = "corrupt_batch"
    # geometry
    DENSE_MODEL = "dense_model"
    UNKNOWN_ARCHITECTURE = "unknown_architecture"
    UNSUPPORTED_GEOMETRY = "unsupported_geometry"
    SPEC_MISMATCH = "spec_mismatch"
    SPEC_INVALID = "spec_invalid"
    # use
    ARGUMENT = "argument"
    CLOSED = "closed"
    TOO_LONG = "too_long"
    MISSING_EXTRA = "missing_extra"
    CHILD_FAILED = "child_failed"  # a process of ours ended without its result
    # engine
    CAPTURE_OFF = "capture_off"
    DENSE_SLOT = "dense_slot"  # a dense layer's slot holds ids
    UNCAPTURED_SLOT = "uncaptured_slot"  # an MoE layer's slot is all zero
    # replay
    NO_SEAM = "no_seam"
    GATE_NOT_CONSUMED = "gate_not_consumed"
    GATE_FIRED = "gate_fired"  # a gate fired where it must not, or more often than the others
    UNBOUND_RECOMPUTE = "unbound_recompute"
    DETACHED = "detached"
    FLIPPED_SHARE = "flipped_share"  # more forced rows than a limit allows differ from the gates' own choice
    # fleet
    NO_PORT = "no_port"
    NOT_READY = "not_ready"  # it did not answer in its time
    START_FAILED = "start_failed"  # some task of a plan failed; the problems name each
    PLAN = "plan"  # tasks that wait for each other, or for one that is not there
    ACTOR_LOST = "actor_lost"  # its process is gone
    ACTOR_FAILED = "actor_failed"  # it raised what is none of ours
    ENVIRONMENT = "environment"  # an environment's own code failed, or was called out of turn
    # delivery
    PRODUCER_TAKEN = "producer_taken"  # a producer of that name is alive
    GROUP_TAKEN = "group_taken"  # a reader of that group is alive
    VANISHED = "vanished"  # the producer died without an end
    ABORTED = "aborted"  # the producer said that there is no whole stream
    EXPIRED = "expired"  # a block that a position points at was deleted
    CONNECTION = "connection"  # cut, refused, or the other side left
    TOO_LARGE = "too_large"  # one message above a limit
    TIMED_OUT = "timed_out"
    UNAUTHENTICATED = "unauthenticated"
    # rows again
    ROW_CONFLICT = "row_conflict"  # an engine gives a token other rows than when it is read again
    # archives
    MANIFEST = "manifest"  # what an archive says of itself is damaged or absent
    LOST_FILE = "lost_file"  # a file that a manifest names is absent, empty, or of another size
    CORRUPT_CHUNK = "corrupt_chunk"
    NO_SPACE = "no_space"
    WRITER = "writer"  # another writer holds the name
    ROLLED_BACK = "rolled_back"  # a commit of an archive was lost, or the archive was set back
    STORAGE = "storage"  # an object store did not answer, or refused
    # replay again
    PACKING = "packing"  # a model that mixes packed sequences
    # alarms again
    UNUSED_EXPERTS = "unused_experts"  # no layer uses the upper half of its experts


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One finding. ``error`` findings make data unusable; ``alarm`` findings are statistics to look at.

    ``token`` is an absolute position in the record, ``layer`` a decoder-layer id; ``None`` where it does not apply.

    >>> str(Problem(kind=ErrorKind.CHECKSUM, message="expected 1, got 2", sample="a/0/0", token=5))
    'expected 1, got 2 @ sample a/0/0, token 5'
    """

    kind: ErrorKind
    message: str
    sample: str | None = None
    token: int | None = None
    layer: int | None = None
    severity: Literal["error", "alarm"] = "error"

    def to_dict(self) -> dict[str, object]:
        """JSON-ready."""
        return {**asdict(self), "kind": str(self.kind)}

    def __str__(self) -> str:
        where = [
            f"{name} {value}"
            for name, value in (("sample", self.sample), ("token", self.token), ("layer", self.layer))
            if value is not None
        ]
        return f"{self.message} @ {', '.join(where)}" if where else self.message


class RouteplaneError(Exception):
    """Base of all errors raised on purpose by routeplane.

    ``kind`` is stable across releases; ``problems`` holds every finding behind the error (possibly none).
    """

    def __init__(self, message: str, *, kind: ErrorKind, problems: Iterable[Problem] = ()) -> None:
        super().__init__(message)
        self.message = message
        self.kind = kind
        self.problems = tuple(problems)

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.message, self.kind, self.problems)

    @classmethod
    def from_problems(cls, problems: Iterable[Problem], *, what: str) -> RouteplaneError:
        """Build the error for a non-empty list of findings; the first one gives the kind."""
        found = tuple(problems)
        shown = "; ".join(str(problem) for problem in found[:4])
        more = f"; and {len(found) - 4} more" if len(found) > 4 else ""
        return cls(f"{what}: {shown}{more}", kind=found[0].kind, problems=found)

    def of_sample(self, sample: str) -> Self:
        """Return the same error with the sample named behind what the message names already.

        >>> DataError("expected 3 rows, got 2 @ call c", kind=ErrorKind.ROW_COUNT).of_sample("s").message
        'expected 3 rows, got 2 @ call c, sample s'
        """
        known = tuple(
            replace(problem, sample=sample) if problem.sample is None else problem for problem in self.problems
        )
        return self._at(f"sample {sample}", known)

    def of_stream(self, name: str) -> Self:
        """Return the same error with the stream named, for a caller that reads many.

        >>> TruncatedError("expected a trailer, got none", kind=ErrorKind.TRUNCATED).of_stream("a.arrows").message
        'expected a trailer, got none @ stream a.arrows'
        """
        return self if name in self.message else self._at(f"stream {name}", self.problems)

    def _at(self, place: str, problems: tuple[Problem, ...]) -> Self:
        named = f"{', ' if ' @ ' in self.message else ' @ '}{place}"
        if self.message.endswith(named):
            return self
        return type(self)(self.message + named, kind=self.kind, problems=problems)


@contextmanager
def naming_stream(name: str | None) -> Generator[None]:
    """Name a stream in what its reader raises; None: a stream without a name, such as one in memory.

    >>> with naming_stream("a.arrows"):
    ...     raise TruncatedError("expected a trailer, got none", kind=ErrorKind.TRUNCATED)
    Traceback (most recent call last):
    routeplane.errors.TruncatedError: expected a trailer, got none @ stream a.arrows
    """
    try:
        yield
    except RouteplaneError as error:
        if name is None:
            raise
        raise error.of_stream(name) from error


def _rebuild(
    cls: type[RouteplaneError], message: str, kind: ErrorKind, problems: tuple[Problem, ...]
) -> RouteplaneError:
    return cls(message, kind=kind, problems=problems)


class DataError(RouteplaneError, ValueError):
    """Records or calls whose content is illegal or contradicts what they declare."""


class ChecksumError(DataError):
    """Content that differs from the checksum made at capture."""


class FormatError(RouteplaneError, ValueError):
    """A stream or archive that cannot be read as routeplane format."""


class TruncatedError(FormatError, EOFError):
    """A stream that ended before its trailer."""


class SpecError(RouteplaneError, ValueError):
    """A model geometry that is unknown, unsupported, or not the one expected."""


class UsageError(RouteplaneError, ValueError):
    """Arguments that cannot be served."""


class StoreError(RouteplaneError, OSError):
    """A storage that cannot take what is written: full, over its quota, or held by another writer."""


class CaptureError(RouteplaneError, RuntimeError):
    """An engine that does not deliver the routes it should."""


class ReplayError(RouteplaneError, RuntimeError):
    """Gates that did not receive, or did not consume, the rows meant for them."""


class FleetError(RouteplaneError, RuntimeError):
    """A port, process or actor that did not come up or did not stay: infrastructure, not data."""


class TransportError(RouteplaneError, OSError):
    """A transport lost its connection or timed out waiting for its peer or for space. No acknowledged data is lost."""


class MissingExtraError(RouteplaneError, ImportError):
    """An optional dependency is not installed; the message names the extra to install."""


def refused(expected: str, got: str) -> UsageError:
    """The UsageError (ARGUMENT) for an argument that cannot be served; for ``raise``."""
    return UsageError(f"expected {expected}, got {got}", kind=ErrorKind.ARGUMENT)


def check_type(value: object, types: type | tuple[type, ...], *, expected: str) -> None:
    """Raise UsageError (ARGUMENT) for an argument of another type, before an attribute that it lacks is asked for.

    >>> check_type([], dict, expected="counts by name")
    Traceback (most recent call last):
    routeplane.errors.UsageError: expected counts by name, got list
    """
    if not isinstance(value, types):
        raise refused(expected, type(value).__name__)
