"""How every benchmark measures and what it says: one result shape, interleaved rounds, ratios.

Machines are shared and differ, so a benchmark compares ways to do the same work in the same run, and quotes the ratio.
Knows nothing of routeplane.
"""

from __future__ import annotations

import os
import platform
import time
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["Result", "machine", "relative_rates"]


@dataclass(frozen=True, kw_only=True)
class Result:
    """One measured number. ``bar``: what it must reach (None: no bar); ``peers``: the same unit for other ways."""

    name: str
    value: float
    unit: str
    bar: float | None = None
    higher_is_better: bool = True
    peers: Mapping[str, float] = field(default_factory=dict)

    @property
    def holds(self) -> bool | None:
        """Whether the bar is reached; None where there is none."""
        if self.bar is None:
            return None
        return self.value >= self.bar if self.higher_is_better else self.value <= self.bar

    def as_row(self, where: str) -> dict[str, Any]:
        """The object that stands in ``results.json``. A bar that is missed stays there as missed."""
        return {
            "name": self.name,
            "value": self.value,
            "unit": self.unit,
            "bar": self.bar,
            "holds": self.holds,
            "peers": dict(self.peers),
            "machine": where,
        }


def relative_rates(
    ways: Mapping[str, Callable[[], object]],
    *,
    yardstick: str,
    rounds: int = 9,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """How fast each way does the work, as a share of the yardstick's rate: medians over interleaved rounds.

    Each round runs every way once, one after the other, so that a busy neighbour slows all of them alike; a ratio is
    taken within its round. The order is another in each, since a way runs faster after one that left its data in the
    caches. One round before them is not counted: it touches the memory and fills the caches. ``clock``: work of one
    thread that waits for nothing is measured by ``time.process_time``, whatever else the machine does.
    """
    shares: dict[str, list[float]] = {name: [] for name in ways}
    order, shuffle = list(ways), Random(0).shuffle
    for counted in [False] + [True] * rounds:
        shuffle(order)
        seconds = {name: _seconds(ways[name], clock) for name in order}
        if counted:
            for name, spent in seconds.items():
                shares[name].append(seconds[yardstick] / spent)
    return {name: round(median(values), 4) for name, values in shares.items()}


def _seconds(work: Callable[[], object], clock: Callable[[], float]) -> float:
    start = clock()
    work()
    return clock() - start


def machine() -> str:
    """What ran it: processor, cores, Python and numpy. No name of a host."""
    model = platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        lines = info.read_text(encoding="utf-8").splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), model)
    return f"{model}, {os.cpu_count()} cores, Python {platform.python_version()}, numpy {np.__version__}"
