"""Positions in a place of blocks, as values: what they say, refuse and carry elsewhere."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from routeplane.errors import DataError, ErrorKind, UsageError
from routeplane.record.interfaces import BlockName, KeyMemory, Position
from routeplane.testing.builders import watermarked_record, watermarked_spec

NAMES = st.text(st.characters(codec="utf-8"), min_size=1, max_size=8)
POSITIONS = st.builds(
    Position,
    place=NAMES,
    next=st.dictionaries(NAMES, st.integers(0, 2**63 - 1), max_size=4),
    last=st.none() | NAMES,
)


@given(position=POSITIONS)
def test_positions_travel_as_json_and_pickled(position: Position) -> None:
    """Both forms give an equal position back."""
    assert position == Position.from_json(position.to_json())
    assert position == pickle.loads(pickle.dumps(position))


def test_a_position_moves_one_producer() -> None:
    """Passing a block moves its producer behind it, and leaves the others where they stood."""
    before = Position(place="x", next={"p": 4, "q": 2}, last="p")
    after = before.after(BlockName("q", 2))
    assert (4, 3, 0, "q") == (after.number("p"), after.number("q"), after.number("r"), after.last)
    assert before == Position(place="x", next={"p": 4, "q": 2}, last="p")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"last":null,"next":{},"place":""}',
        '{"last":null,"next":{"p":-1},"place":"x"}',
        '{"last":null,"next":{"p":true},"place":"x"}',
        '{"last":7,"next":{},"place":"x"}',
        '{"last":null,"next":[],"place":"x"}',
        "[" * 100_000,
    ],
)
def test_another_text_is_refused(text: str) -> None:
    """Whatever ``to_json`` would not write is a UsageError."""
    with pytest.raises(UsageError, match="position"):
        Position.from_json(text)


def test_a_quarantined_record_and_the_good_one_are_repeats_of_each_other() -> None:
    """What was lost has no checksum to compare: either may come first, and neither is another record under its key."""
    good = watermarked_record(0, num_tokens=4, spec=watermarked_spec())
    lost = replace(good, attributes={"quarantined": "true"}, checksum=None)
    other = replace(good, attributes={"other": "1"}, checksum=None)
    for first, second in ((good, lost), (lost, good), (lost, lost)):
        memory = KeyMemory(b"")
        assert not memory.is_repeat(first, where="a")
        assert KeyMemory(memory.to_bytes()).is_repeat(second, where="b")
    memory = KeyMemory(b"")
    memory.is_repeat(good, where="a")
    memory.is_repeat(lost, where="b")
    with pytest.raises(DataError) as caught:  # what is remembered is the good one
        memory.is_repeat(other, where="c")
    assert ErrorKind.DUPLICATE_KEY == caught.value.kind
