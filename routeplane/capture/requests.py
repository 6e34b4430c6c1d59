"""What every engine here asks of a request, checked before anything is generated, and what it says of its cache.

Values only; knows no engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from routeplane.errors import refused

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["cached_rows", "check_requests", "sample_names"]


def sample_names(given: Sequence[str] | None, count: int, *, stem: str = "sample") -> list[str]:
    """The caller's names, else ``sample-0``, ``sample-1``, ..."""
    return list(given) if given is not None else [f"{stem}-{index}" for index in range(count)]


def check_requests(
    prompts: Sequence[Sequence[int]], names: Sequence[str], *, max_tokens: int, temperature: float, seed: int
) -> None:
    """Raise UsageError for prompts, names or settings that no engine can serve as they stand."""
    if len(prompts) == 0 or any(len(prompt) == 0 for prompt in prompts):
        raise refused("prompts of at least one token each", "an empty one")
    for prompt in prompts:
        if not all(isinstance(token, int | np.integer) and token >= 0 for token in prompt):
            raise refused("prompts of non-negative token ids", repr(list(prompt)[:8]))
    if len(names) != len(prompts) or len(set(names)) != len(names):
        raise refused(f"{len(prompts)} different names", f"{len(names)}, {len(set(names))} of them different")
    if max_tokens < 1:
        raise refused("max_tokens of at least 1", repr(max_tokens))
    if not 0 <= temperature < float("inf"):
        raise refused("a finite temperature of at least 0", repr(temperature))
    if seed < 0:
        raise refused("a seed of at least 0", repr(seed))


def cached_rows(bound: int, rows_RLK: NDArray[Any] | None, *, first_row: int) -> int:
    """``ModelCall.cached`` where rows before ``bound`` may come from a prefix cache, and ``[first_row, ...)`` came.

    0 where none of the rows that came does, so that one call has one form (and checksum) whoever reads it.
    """
    if rows_RLK is None or len(rows_RLK) == 0 or bound <= first_row:
        return 0
    return min(bound, first_row + len(rows_RLK))
