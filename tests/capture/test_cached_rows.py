"""What is asked of requests, and one form for what came from a cache."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from routeplane.capture.choices import cached_rows


@given(bound=st.integers(0, 12), first_row=st.integers(0, 8), count=st.integers(0, 8))
def test_cached_is_the_end_of_the_rows_that_came_from_a_cache(bound: int, first_row: int, count: int) -> None:
    """Counted row by row; 0 where there is none, whatever the bound."""
    rows = np.zeros((count, 1, 1), dtype=np.int16)
    from_cache = [position for position in range(first_row, first_row + count) if position < bound]
    expected = from_cache[-1] + 1 if from_cache else 0
    assert expected == cached_rows(bound, rows, first_row=first_row)


def test_a_call_without_rows_has_none_from_a_cache() -> None:
    """Whatever the engine says of its cache."""
    assert 0 == cached_rows(9, None, first_row=0)
