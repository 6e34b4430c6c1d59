"""Which sequences share a microbatch: groups within a budget of rows, from lengths alone.

Pure functions; a row is a row of the whole batch, padding included, so that all ranks that cut it form the same groups.
Knows plans' options; knows no record and no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from routeplane.batch.plan import PlanOptions
from routeplane.batch.slots import check_lengths, require_positive
from routeplane.errors import ErrorKind, UsageError

__all__ = ["RankCounts", "budget_groups"]


def budget_groups(
    lengths: Sequence[int] | NDArray[np.integer[Any]],
    *,
    tokens: int,
    options: PlanOptions | None = None,
    sort: bool = False,
) -> list[tuple[int, ...]]:
    """Indices of the sequences of each group, ascending within a group; a plan of one has at most ``tokens`` rows.

    ``options``: how a group becomes rows (default: packed). ``sort=False``: groups of neighbours, in order, each as
    full as the next sequence allows. ``sort=True``: from the longest sequence on, each joins the first group that has
    room for it (first-fit decreasing), so that padded rows are of like lengths and packed ones leave few gaps; equal
    input gives equal groups on every rank. Raises UsageError: ARGUMENT, or TOO_LONG for a sequence no group can hold.
    """
    budget = require_positive(tokens, "tokens")
    layout = PlanOptions(layout="packed") if options is None else options
    lengths_B = check_lengths(lengths)
    order = np.argsort(-lengths_B, kind="stable") if sort else np.arange(len(lengths_B))
    groups: list[list[int]] = []
    rows: list[int] = []
    for index in order.tolist():
        length = int(lengths_B[index])
        alone = layout.rows_after(length, rows=0, count=0)
        if alone > budget:
            raise UsageError(
                f"expected sequences of at most {budget} rows, got {alone} @ sequence {index}", kind=ErrorKind.TOO_LONG
            )
        for at in range(0 if sort else max(len(groups) - 1, 0), len(groups)):
            joined = layout.rows_after(length, rows=rows[at], count=len(groups[at]))
            if joined <= budget:
                groups[at].append(index)
                rows[at] = joined
                break
        else:
            groups.append([index])
            rows.append(alone)
    return [tuple(sorted(group)) for group in groups]


class RankCounts:
    """How many groups each of several ranks comes to, from the lengths that it is dealt; for equal rounds on all.

    Each rank groups its own sequences, in order: neighbours, or, with ``held`` above 1, windows of so many at a time as
    ``budget_groups(sort=True)``. Raises UsageError as ``budget_groups``.
    """

    def __init__(self, ranks: int, *, tokens: int, options: PlanOptions, held: int = 1) -> None:
        self._tokens, self._options, self._held = tokens, options, held
        self._ranks = [_Rank(window=[]) for _ in range(ranks)]

    def add(self, rank: int, length: int) -> None:
        """Deal a sequence of ``length`` tokens to a rank."""
        state = self._ranks[rank]
        if self._held > 1:
            state.window.append(length)
            if len(state.window) == self._held:
                state.groups += self._windowed(state)
                state.window = []
            return
        joined = self._options.rows_after(length, rows=state.rows, count=state.count)
        if state.count == 0 or joined > self._tokens:
            joined = self._options.rows_after(length, rows=0, count=0)
            state.groups, state.count = state.groups + 1, 0
        state.rows, state.count = joined, state.count + 1

    def most(self) -> int:
        """Groups of the rank that has most, were there no more sequences."""
        return max(state.groups + self._windowed(state) for state in self._ranks)

    def _windowed(self, state: _Rank) -> int:
        if not state.window:
            return 0
        return len(budget_groups(state.window, tokens=self._tokens, options=self._options, sort=True))


@dataclass(kw_only=True)
class _Rank:
    """What one rank came to: whole groups, and the group (or the window) that still takes sequences."""

    window: list[int]
    groups: int = 0
    rows: int = 0
    count: int = 0
