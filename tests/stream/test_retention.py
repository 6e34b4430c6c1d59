"""Which blocks may go: pure decisions, against a plain reference."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from routeplane.stream.blocks import Retention


@given(data=st.data(), count=st.integers(1, 8))
def test_what_is_needed_stays(data: st.DataObject, count: int) -> None:
    """Deleting to the end leaves every unacknowledged block and all that these, or the one that waits, lean on."""
    held = Retention(max_bytes=1)
    leans: dict[int, set[int]] = {}
    for number in range(count):
        direct = data.draw(st.sets(st.integers(0, number - 1))) if number else set()
        leans[number] = held.all_leans(direct)
        held.add(number, 10, leans=tuple(leans[number]))
    below = data.draw(st.integers(0, count))
    waiting = data.draw(st.sets(st.integers(0, count - 1)))
    gone: list[int] = []
    held.make_space(1, waiting, below=below, delete=gone.append)
    needed = set(range(below, count)) | waiting | {base for n in (*range(below, count), *waiting) for base in leans[n]}
    assert needed == set(held.sizes)
    assert sorted(gone) == gone


def test_a_block_leans_on_little() -> None:
    """A chain of deltas ends before it could fill the place, and at blocks that are gone."""
    held = Retention(max_bytes=800)
    held.add(0, 60, leans=None)
    held.add(1, 40, leans=(0,))
    held.add(2, 1, leans=(0, 1))
    assert held.may_lean([1])
    assert not held.may_lean([2])
    held.drop(0)
    assert not held.may_lean([1])
    assert held.has_space(759)
    assert not held.has_space(760)
    assert Retention(max_bytes=1).has_space(10**9)
