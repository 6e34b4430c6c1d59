"""Spans and captures: intervals that cover, and cuts that keep every token's label."""

from __future__ import annotations

import pickle
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from routeplane.errors import DataError, ErrorKind
from routeplane.record.spans import PRESENT_STATES, STATES, Capture, Prefix, Span, check_cover, cut

SPAN: dict[str, Any] = {"start": 0, "stop": 2, "kind": "prompt", "role": "user", "call": "c", "weights_version": 7}
CAPTURE: dict[str, Any] = {"start": 0, "stop": 2, "call": "c", "weights_version": 7, "state": "captured"}

# ----------------------------------------------------------------------------------------------------------------------
# Construction
# ----------------------------------------------------------------------------------------------------------------------

ILLEGAL: dict[str, tuple[dict[str, Any], ErrorKind]] = {
    "empty": ({"start": 2}, ErrorKind.SPANS),
    "reversed": ({"start": 3}, ErrorKind.SPANS),
    "negative": ({"start": -1}, ErrorKind.DTYPE),
    "fraction": ({"start": 0.0}, ErrorKind.DTYPE),
    "bool": ({"stop": True}, ErrorKind.DTYPE),
    "text": ({"stop": "2"}, ErrorKind.DTYPE),
    "stop_beyond_int64": ({"stop": 2**63}, ErrorKind.DTYPE),
    "call_none": ({"call": None}, ErrorKind.DTYPE),
    "call_not_utf8": ({"call": "\ud800"}, ErrorKind.DTYPE),
    "version_fraction": ({"weights_version": 1.0}, ErrorKind.DTYPE),
    "version_bool": ({"weights_version": True}, ErrorKind.DTYPE),
    "version_beyond_int64": ({"weights_version": 2**63}, ErrorKind.DTYPE),
}
ILLEGAL_SPAN = {
    **ILLEGAL,
    "kind_unknown": ({"kind": "tool"}, ErrorKind.SPANS),
    "kind_none": ({"kind": None}, ErrorKind.SPANS),
    "role_number": ({"role": 5}, ErrorKind.DTYPE),
    "role_not_utf8": ({"role": "\udfff"}, ErrorKind.DTYPE),
}
ILLEGAL_CAPTURE = {
    **ILLEGAL,
    "state_unknown": ({"state": "padded"}, ErrorKind.COVERAGE),
    "state_none": ({"state": None}, ErrorKind.COVERAGE),
}


@pytest.mark.parametrize(("change", "kind"), ILLEGAL_SPAN.values(), ids=ILLEGAL_SPAN)
def test_an_illegal_span_is_refused(change: dict[str, Any], kind: ErrorKind) -> None:
    """Each illegal value of a span has its kind, and the message says what came."""
    with pytest.raises(DataError, match=r"expected .*, got ") as caught:
        Span(**{**SPAN, **change})

    assert kind == caught.value.kind


@pytest.mark.parametrize(("change", "kind"), ILLEGAL_CAPTURE.values(), ids=ILLEGAL_CAPTURE)
def test_an_illegal_capture_is_refused(change: dict[str, Any], kind: ErrorKind) -> None:
    """Each illegal value of a capture has its kind, and the message says what came."""
    with pytest.raises(DataError, match=r"expected .*, got ") as caught:
        Capture(**{**CAPTURE, **change})

    assert kind == caught.value.kind


BOUNDS = {"attempt": 2**31, "segment": 2**31, "stop": 2**63, "checksum": 2**64}


@pytest.mark.parametrize("name", BOUNDS)
def test_a_prefix_is_named_by_numbers_of_the_format(name: str) -> None:
    """Each field takes what its type in the format holds, and one more is refused by name."""
    given: dict[str, Any] = {"sample_id": "s", "stop": 3, "checksum": 17}

    assert BOUNDS[name] - 1 == getattr(Prefix(**{**given, name: BOUNDS[name] - 1}), name)
    for value in (BOUNDS[name], -1, True):
        with pytest.raises(DataError, match=rf"prefix\.{name}") as caught:
            Prefix(**{**given, name: value})
        assert ErrorKind.DTYPE == caught.value.kind


@pytest.mark.parametrize("version", [None, 0, -(2**63), 2**63 - 1])
def test_any_int64_is_a_version(version: int | None) -> None:
    """Versions are int64 or unknown; both kinds of interval pickle."""
    for item in (Span(**{**SPAN, "weights_version": version}), Capture(**{**CAPTURE, "weights_version": version})):
        assert item == pickle.loads(pickle.dumps(item))


def test_the_version_must_be_said() -> None:
    """An unknown version is None on purpose, never by omission."""
    with pytest.raises(TypeError, match="weights_version"):
        Span(start=0, stop=1, kind="prompt", call="c")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="weights_version"):
        Capture(start=0, stop=1, call="c", state="lost")  # type: ignore[call-arg]


def test_the_states_are_those_of_the_format() -> None:
    """Seven states in the format's order; rows stand in two of them."""
    assert ("captured", "cached", "partial", "not_fed", "aborted", "lost", "not_captured") == STATES
    assert {"captured", "cached"} == PRESENT_STATES


# ----------------------------------------------------------------------------------------------------------------------
# Covering and cutting
# ----------------------------------------------------------------------------------------------------------------------


def _span(start: int, stop: int, call: str = "c") -> Span:
    return Span(start=start, stop=stop, kind="prompt", call=call, weights_version=None)


@st.composite
def covers(draw: st.DrawFn) -> tuple[Span, ...]:
    """Contiguous spans from 0, each with a call of its own."""
    bounds = [0, *sorted(draw(st.sets(st.integers(1, 12), min_size=1, max_size=5)))]
    return tuple(_span(start, stop, f"call-{start}") for start, stop in pairwise(bounds))


@given(covers())
def test_a_cover_covers_its_length_only(spans: tuple[Span, ...]) -> None:
    """Contiguous intervals cover the length at which they end, and no other."""
    size = spans[-1].stop
    check_cover(spans, size, what="spans")
    for other in (size - 1, size + 1):
        with pytest.raises(DataError, match=rf"spans that cover {other} tokens, got {size}") as caught:
            check_cover(spans, other, what="spans")
        assert ErrorKind.SPANS == caught.value.kind


BAD_COVERS: dict[str, tuple[Span, ...]] = {
    "none": (),
    "gap": (_span(0, 2), _span(3, 4)),
    "overlap": (_span(0, 3), _span(2, 4)),
    "late_start": (_span(1, 4),),
    "out_of_order": (_span(2, 4), _span(0, 2)),
    "twice": (_span(0, 4), _span(0, 4)),
    "too_short": (_span(0, 3),),
    "too_long": (_span(0, 5),),
}


@pytest.mark.parametrize("spans", BAD_COVERS.values(), ids=BAD_COVERS)
def test_what_does_not_cover_is_refused(spans: tuple[Span, ...]) -> None:
    """Gaps, overlaps, disorder and wrong ends are errors, whatever else is right."""
    with pytest.raises(DataError, match="expected spans of s") as caught:
        check_cover(spans, 4, what="spans of s")

    assert ErrorKind.SPANS == caught.value.kind


@given(covers(), st.data())
def test_a_cut_keeps_each_tokens_label(spans: tuple[Span, ...], data: st.DataObject) -> None:
    """Labels of a cut are the labels of its tokens, and it covers the cut."""
    size = spans[-1].stop
    start = data.draw(st.integers(0, size - 1))
    stop = data.draw(st.integers(start + 1, size))
    found = cut(spans, start=start, stop=stop)
    labels = [span.call for span in spans for _ in range(span.start, span.stop)]
    check_cover(found, stop - start, what="cut")

    assert labels[start:stop] == [span.call for span in found for _ in range(span.start, span.stop)]
    assert spans == cut(spans, start=0, stop=size)
