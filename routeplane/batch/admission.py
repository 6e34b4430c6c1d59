"""One verdict of all ranks on the batches of a step, before any forward: force the routes, run live, or skip.

Owns the order in which ranks speak and what they agree on. The trainer's own group reduces; no process group is made
here, and no batch is changed. A rank whose data is bad says so where the others can hear it, instead of leaving them in
a collective.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from routeplane.errors import DataError, ErrorKind, RouteplaneError, SpecError, refused
from routeplane.record.spans import Coverage

if TYPE_CHECKING:
    from routeplane.batch.batch import RouteBatch
    from routeplane.record.spec import RouteSpec

__all__ = ["StepAction", "StepVerdict", "admit_step"]

StepAction = Literal["force", "live", "skip"]
_ACTIONS: tuple[StepAction, ...] = ("force", "live", "skip")


@dataclass(frozen=True, kw_only=True, slots=True)
class StepVerdict:
    """What every rank does with a step, and why.

    ``action``, ``kind``: the same on every rank: force the routes, run all forwards live, or skip the step, for the
    first kind of error on any rank (None where none was met; the ranks' numbers of batches may differ all the same).
    ``batches``: this rank's; empty where the step is skipped. ``error``: what this rank met, None where the others did.

    >>> StepVerdict(action="skip", kind=ErrorKind.CHECKSUM, batches=(), error=None).action
    'skip'
    """

    action: StepAction
    kind: ErrorKind | None
    batches: tuple[RouteBatch, ...]
    error: RouteplaneError | OSError | None


def admit_step(
    batches: Iterable[RouteBatch] | Callable[[], Iterable[RouteBatch]],
    spec: RouteSpec,
    *,
    reduce: Callable[[int], int],
    max_missing: float | None = None,
    fallback: Literal["live", "skip"] = "skip",
) -> StepVerdict:
    """Agree with all ranks on what a step does, before its first forward.

    ``batches``: this rank's microbatches of the step, ``microbatches(...)`` or a function that makes them (which may
    raise on the way). ``spec``: the geometry of the model that will follow them. ``reduce``: the maximum of an integer
    over the ranks, such as an ``all_reduce`` of the trainer's own group; called four times on every rank, whatever
    happens here. ``max_missing``: share of fed rows that may be missing. ``fallback``: what to do where batches exist
    on every rank and routes are bad on one: ``"live"`` for a trainer that can run them without replay, or ``"skip"``.
    Ranks with unequal numbers of batches skip.

    Returns the verdict and never raises for bad data. An error that is neither routeplane's nor the system's passes
    through, after this rank has told the others to skip.

    >>> from routeplane.batch import admit_step, microbatches
    >>> from routeplane.testing.builders import watermarked_record, watermarked_spec
    >>> spec = watermarked_spec()
    >>> records = [watermarked_record(sample, num_tokens=3, spec=spec) for sample in range(3)]
    >>> verdict = admit_step(microbatches(records, tokens=8, spec=spec), spec, reduce=lambda value: value)
    >>> verdict.action, len(verdict.batches)
    ('force', 2)
    """
    if fallback not in ("live", "skip"):
        raise refused("fallback of ('live', 'skip')", repr(fallback))
    made: list[RouteBatch] = []
    error: RouteplaneError | OSError | None = None
    finished = False
    try:
        made += batches() if callable(batches) else batches
        error = _refusal(made, spec, max_missing)
        finished = True
    except (RouteplaneError, OSError) as met:
        error, finished = met, True
        made = []
    finally:
        if not finished:  # a bug passes through, and the other ranks wait for this one
            _agree(reduce, level=2, kind=0, count=0)
    level = 0 if error is None else 1 if made and fallback == "live" else 2
    action, kind = _agree(reduce, level=level, kind=_code(error), count=len(made))
    return StepVerdict(action=action, kind=kind, batches=() if action == "skip" else tuple(made), error=error)


def _agree(reduce: Callable[[int], int], *, level: int, kind: int, count: int) -> tuple[StepAction, ErrorKind | None]:
    worst, first, most, least = reduce(level), reduce(kind), reduce(count), -reduce(-count)
    action = _ACTIONS[worst] if most == least else "skip"
    return action, None if first == 0 else list(ErrorKind)[first - 1]


def _code(error: RouteplaneError | OSError | None) -> int:
    if error is None:
        return 0
    return 1 + list(ErrorKind).index(error.kind if isinstance(error, RouteplaneError) else ErrorKind.CONNECTION)


def _refusal(batches: list[RouteBatch], spec: RouteSpec, max_missing: float | None) -> RouteplaneError | None:
    """Why these batches cannot be forced, if so."""
    for at, batch in enumerate(batches):
        apart = spec.differences(batch.spec)
        if apart:
            return SpecError(
                f"expected batches of {spec.model or 'the model'}, got {'; '.join(apart)} @ batch {at}",
                kind=ErrorKind.SPEC_MISMATCH,
            )
    coverage = Coverage()
    for batch in batches:
        coverage = coverage.merge(batch.coverage())
    if max_missing is not None and coverage.missing_share > max_missing:
        return DataError(
            f"expected at most {max_missing:.4f} of fed rows missing, got {coverage.missing_share:.4f}",
            kind=ErrorKind.ROUTES_MISSING,
        )
    return None
