"""Positions in a place of blocks, as values: what they say, refuse and carry elsewhere."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from typing import Any

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
    keys=st.binary(max_size=8),
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


GOOD: dict[str, Any] = json.loads(Position(place="x", next={"p": 4}, last="p", keys=b"1").to_json())
OTHER: dict[str, Any] = {
    "empty": "",
    "cut": json.dumps(GOOD)[:-1],
    "list": [],
    "nothing": {},
    "deep": "[" * 100_000,
    "without_keys": {name: value for name, value in GOOD.items() if name != "keys"},
    "more": {**GOOD, "more": 1},
    "keys_number": {**GOOD, "keys": 1},
    "keys_not_base64": {**GOOD, "keys": "MQ=!"},
    "place_empty": {**GOOD, "place": ""},
    "place_null": {**GOOD, "place": None},
    "last_number": {**GOOD, "last": 7},
    "last_empty": {**GOOD, "last": ""},
    "next_list": {**GOOD, "next": []},
    "producer_empty": {**GOOD, "next": {"": 1}},
    "number_negative": {**GOOD, "next": {"p": -1}},
    "number_bool": {**GOOD, "next": {"p": True}},
    "number_text": {**GOOD, "next": {"p": "4"}},
    "number_beyond_int64": {**GOOD, "next": {"p": 2**63}},
}


@pytest.mark.parametrize("document", OTHER.values(), ids=OTHER)
def test_another_text_is_refused(document: Any) -> None:
    """Whatever ``to_json`` would not write is a UsageError; one thing is wrong at a time."""
    text = document if isinstance(document, str) else json.dumps(document)
    with pytest.raises(UsageError, match="position as JSON") as caught:
        Position.from_json(text)

    assert ErrorKind.ARGUMENT == caught.value.kind
    assert Position(place="x", next={"p": 4}, last="p", keys=b"1") == Position.from_json(json.dumps(GOOD))


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
