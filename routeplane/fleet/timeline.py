"""What waited for what, and for how long: the timeline of a start-up, as plain values.

Owns times and what follows from them. Knows no task's work, draws nothing, reads no clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["Outcome", "TaskTimes", "Timeline"]

Outcome = Literal["waiting", "running", "done", "failed", "cancelled"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskTimes:
    """One task; times in seconds since the start-up began, None where it has not come to that.

    ``waits``: the tasks that had to end first; ``waited_for``: the one of them that ended last, None if it waited for
    none.
    """

    name: str
    waits: tuple[str, ...] = ()
    waited_for: str | None = None
    started: float | None = None
    ended: float | None = None
    outcome: Outcome = "waiting"

    @property
    def seconds(self) -> float:
        """How long it ran; 0.0 if it has not ended."""
        return 0.0 if self.started is None or self.ended is None else self.ended - self.started

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, times to the millisecond."""
        return {
            "name": self.name,
            "waits": list(self.waits),
            "waited_for": self.waited_for,
            "started": None if self.started is None else round(self.started, 3),
            "ended": None if self.ended is None else round(self.ended, 3),
            "outcome": self.outcome,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """All tasks of a start-up, in the order in which they could run."""

    tasks: tuple[TaskTimes, ...] = ()

    def __getitem__(self, name: str) -> TaskTimes:
        return next(task for task in self.tasks if task.name == name)

    @property
    def seconds(self) -> float:
        """Wall time until the last task ended."""
        return max((task.ended for task in self.tasks if task.ended is not None), default=0.0)

    @property
    def serial_seconds(self) -> float:
        """What the tasks took together: the wall time had they run one after another."""
        return sum(task.seconds for task in self.tasks)

    def critical_path(self) -> tuple[str, ...]:
        """The chain of tasks that decided the wall time, first to last: each started when the one before it ended."""
        times = {task.name: task for task in self.tasks}
        last = max((task for task in self.tasks if task.ended is not None), key=_ended, default=None)
        chain: list[str] = []
        while last is not None:
            chain.append(last.name)
            last = times[last.waited_for] if last.waited_for is not None else None
        return tuple(reversed(chain))

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "seconds": round(self.seconds, 3),
            "serial_seconds": round(self.serial_seconds, 3),
            "critical_path": list(self.critical_path()),
            "tasks": [task.to_dict() for task in self.tasks],
        }

    def scalars(self, *, prefix: str = "routeplane/") -> dict[str, float]:
        """A flat dict with stable names for a metrics logger: seconds in all, and by task."""
        return {
            f"{prefix}fleet_start_seconds": self.seconds,
            f"{prefix}fleet_start_serial_seconds": self.serial_seconds,
            **{f"{prefix}fleet_start_{task.name}_seconds": task.seconds for task in self.tasks},
        }


def _ended(task: TaskTimes) -> float:
    return task.ended or 0.0
