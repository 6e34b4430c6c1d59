"""The verdict on a batch of records before any forward runs, in a form that ranks can reduce.

Pure functions of records; every source uses them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from routeplane.coverage import Coverage
from routeplane.errors import DataError, ErrorKind, Problem, UsageError
from routeplane.record import RecordKey, RouteRecord
from routeplane.spec import RouteSpec

__all__ = ["Admission", "admit"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Admission:
    """The verdict on a batch of records before any forward runs.

    ``code`` is 0 when admitted, else 1 plus the position of the first problem's kind in ErrorKind: ranks reduce it with
    max, and none enters a collective alone. Pickles.
    """

    admitted: bool
    code: int
    coverage: Coverage
    problems: tuple[Problem, ...] = ()

    def require(self) -> None:
        """Raise DataError, with all problems, where the batch was refused."""
        if not self.admitted:
            raise DataError.from_problems(self.problems, what="batch refused")


def admit(records: Sequence[RouteRecord], spec: RouteSpec, *, max_missing: float | None) -> Admission:
    """Judge records as one batch: geometry, keys, and the share of missing rows. Raises UsageError for a bad share."""
    if max_missing is not None and not 0.0 <= max_missing <= 1.0:
        raise UsageError(f"expected max_missing in [0, 1], got {max_missing}", kind=ErrorKind.ARGUMENT)
    problems: list[Problem] = []
    seen: set[RecordKey] = set()
    coverage = Coverage.of_records(record.captures for record in records)
    for record in records:
        for difference in spec.differences(record.spec):
            problems.append(Problem(kind=ErrorKind.SPEC_MISMATCH, message=difference, sample=record.sample_id))
        if record.key in seen:
            message = f"expected each record once, got {record.key} twice"
            problems.append(Problem(kind=ErrorKind.DUPLICATE_KEY, message=message, sample=record.sample_id))
        seen.add(record.key)
    if max_missing is not None and coverage.missing_share > max_missing:
        message = (
            f"expected at most {max_missing:.4f} of fed rows missing, got {coverage.missing_share:.4f} "
            f"({coverage.missing} of {coverage.fed})"
        )
        problems.append(Problem(kind=ErrorKind.ROUTES_MISSING, message=message))
    code = 1 + list(ErrorKind).index(problems[0].kind) if problems else 0
    return Admission(admitted=not problems, code=code, coverage=coverage, problems=tuple(problems))
