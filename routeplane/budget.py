"""Which sequences share a microbatch: groups within a budget of rows, from lengths alone.

Pure functions; a row is a row of the whole batch, padding included, so that all ranks that cut it form the same groups.
Knows plans' options; knows no record and no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from routeplane.align import PlanOptions
from routeplane.errors import ErrorKind, UsageError
from routeplane.slots import check_lengths, require_positive

__all__ = ["budget_groups"]


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
