"""RouteTicket: small, exact, and nothing else parses as one. (Sinks and sources have contract suites of their own.)"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from routeplane.errors import ErrorKind, UsageError
from routeplane.record.interfaces import MAX_TICKET_BYTES, RouteTicket
from routeplane.record.record import RecordKey
from routeplane.testing.strategies import names

TICKET = RouteTicket(
    stream="s", key=RecordKey("sample-1", 2, 3), call_id="call-0", start=4, stop=9, checksum=0xFEDCBA9876543210
)


@st.composite
def tickets(draw: st.DrawFn) -> RouteTicket:
    """Any ticket."""
    start = draw(st.integers(0, 2**62))
    return RouteTicket(
        stream=draw(names()),
        key=RecordKey(draw(names()), draw(st.integers(0, 2**31 - 1)), draw(st.integers(0, 2**31 - 1))),
        call_id=draw(names()),
        start=start,
        stop=start + draw(st.integers(0, 2**62)),
        checksum=draw(st.integers(0, 2**64 - 1)),
    )


@given(tickets())
def test_a_ticket_round_trips(ticket: RouteTicket) -> None:
    """Its JSON is canonical, at most 256 bytes, and parses back to the same ticket."""
    text = ticket.to_json()

    assert ticket == RouteTicket.from_json(text)
    assert len(text.encode()) <= MAX_TICKET_BYTES == 256
    assert text == json.dumps(json.loads(text), sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def test_the_json_is_pinned() -> None:
    """The wire form of a ticket; the checksum as hex, since JSON numbers lose 64-bit integers."""
    assert (
        '{"call":"call-0","checksum":"fedcba9876543210","key":["sample-1",2,3],"start":4,"stop":9,"stream":"s"}'
        == TICKET.to_json()
    )
    assert '"checksum":"0000000000000001"' in replace(TICKET, checksum=1).to_json()


@given(st.integers(100, 260), st.sampled_from(["a", "é", "漢", "\n", "😀"]))
def test_size_is_counted_in_bytes(size: int, letter: str) -> None:
    """A ticket of more than 256 bytes of UTF-8 is refused, at 256 it is not."""
    capacity = 256 - len(replace(TICKET, stream="x").to_json().encode()) + 1
    width = len(json.dumps(letter, ensure_ascii=False).encode()) - 2
    count = size // width
    assume(count > 0)
    if count * width <= capacity:
        assert replace(TICKET, stream=letter * count).to_json()
    else:
        with pytest.raises(UsageError, match="at most 256 bytes") as caught:
            replace(TICKET, stream=letter * count)
        assert ErrorKind.ARGUMENT == caught.value.kind


REFUSED: dict[str, dict[str, Any]] = {
    "stream_empty": {"stream": ""},
    "stream_null": {"stream": None},
    "stream_not_utf8": {"stream": "\ud800"},
    "call_number": {"call_id": 5},
    "key_too_short": {"key": ("s", 0)},
    "key_text": {"key": "abc"},
    "key_null": {"key": None},
    "key_fraction": {"key": ("s", 0.5, 0)},
    "key_negative": {"key": ("s", 0, -1)},
    "attempt_beyond_int32": {"key": ("s", 2**31, 0)},
    "segment_beyond_int32": {"key": ("s", 0, 2**31)},
    "start_negative": {"start": -1},
    "start_fraction": {"start": 4.0},
    "start_bool": {"start": True},
    "stop_before_start": {"stop": 3},
    "stop_beyond_int64": {"stop": 2**63},
    "checksum_negative": {"checksum": -1},
    "checksum_beyond_64_bits": {"checksum": 2**64},
    "checksum_text": {"checksum": "ff"},
}


@pytest.mark.parametrize("change", REFUSED.values(), ids=REFUSED)
def test_an_illegal_ticket_is_refused(change: dict[str, Any]) -> None:
    """Every field has its type and range."""
    with pytest.raises(UsageError) as caught:
        replace(TICKET, **change)

    assert ErrorKind.ARGUMENT == caught.value.kind


_DOCUMENT: dict[str, Any] = json.loads(TICKET.to_json())


def _with(**changes: Any) -> str:
    return json.dumps({**_DOCUMENT, **changes})


ILLEGAL_JSON: dict[str, str] = {
    "empty": "",
    "cut": TICKET.to_json()[:-1],
    "null": "null",
    "number": "5",
    "list": "[]",
    "deep": "[" * 100_000,
    "key_absent": json.dumps({name: value for name, value in _DOCUMENT.items() if name != "start"}),
    "key_unknown": _with(more=1),
    "start_fraction": _with(start=4.5),
    "start_text": _with(start="4"),
    "start_null": _with(start=None),
    "start_huge": TICKET.to_json().replace('"start":4', '"start":1e400'),
    "start_not_a_number": TICKET.to_json().replace('"start":4', '"start":NaN'),
    "key_text": _with(key="abc"),
    "key_object": _with(key={"a": 1, "b": 2, "c": 3}),
    "key_of_nulls": _with(key=["s", None, []]),
    "key_too_long": _with(key=["s", 0, 0, 0]),
    "call_null": _with(call=None),
    "checksum_number": _with(checksum=5),
    "checksum_short": _with(checksum="ff"),
    "checksum_signed": _with(checksum="-fedcba987654321"),
    "checksum_prefixed": _with(checksum="0xfedcba98765432"),
    "checksum_underscored": _with(checksum="fedcba98_7654321"),
    "checksum_upper": _with(checksum="FEDCBA9876543210"),
    "stop_before_start": _with(stop=3),
    "not_utf8": _with(stream="\ud800"),
    "too_large": _with(stream="x" * 300),
}


@pytest.mark.parametrize("text", ILLEGAL_JSON.values(), ids=ILLEGAL_JSON)
def test_malformed_tickets_are_refused(text: str) -> None:
    """Text from outside is a ticket, exactly, or a UsageError."""
    with pytest.raises(UsageError) as caught:
        RouteTicket.from_json(text)

    assert ErrorKind.ARGUMENT == caught.value.kind


def test_a_plain_tuple_is_a_key() -> None:
    """The key is a RecordKey, whatever triple it was given as."""
    key: Any = ("s", 0, 1)
    ticket = replace(TICKET, key=key)

    assert RecordKey("s", 0, 1) == ticket.key
    assert "s/0/1" == str(ticket.key)
