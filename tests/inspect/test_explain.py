"""Explaining a token: the hops are the record's own, at the very token and layer that was asked about."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from routeplane.errors import ErrorKind, SpecError, UsageError
from routeplane.inspect.look import explain
from routeplane.record.record import Prefix, RouteRecord
from routeplane.testing import strategies
from routeplane.testing.builders import watermark, watermarked_record, watermarked_spec

SPEC = watermarked_spec()


@given(record=strategies.records(), data=st.data())
def test_what_is_said_is_what_the_record_holds(record: RouteRecord, data: st.DataObject) -> None:
    """Span, capture, ids of the row and of its neighbours, for any record and token."""
    token = data.draw(st.integers(0, record.num_tokens - 1))
    found = explain(record, token)
    assert found.span in record.spans
    assert found.capture in record.captures
    assert found.span.start <= token < found.span.stop
    assert found.capture.start <= token < found.capture.stop
    assert (int(record.token_ids[token]), True) == (found.token_id, found.intact)
    for slot, rows in enumerate(found.layers):
        assert record.spec.layer_ids[slot] == rows.layer
        for position, row in ((token - 1, rows.before), (token, rows.row), (token + 1, rows.after)):
            inside = record.routes_start <= position < record.num_tokens
            stored = record.routes[position - record.routes_start, slot].tolist() if inside else [-1]
            assert (None if stored[0] < 0 else tuple(stored)) == row


def test_the_row_is_the_one_of_that_sample_token_and_layer() -> None:
    """Watermarked ids name their place."""
    record = watermarked_record(3, num_tokens=12, spec=SPEC)
    (rows,) = explain(record, 7, layer_ids=(5,)).layers
    assert rows.row == tuple(watermark(3, 7, layer=5, k=range(4)).tolist())
    assert rows.before == tuple(watermark(3, 6, layer=5, k=range(4)).tolist())
    assert rows.after == tuple(watermark(3, 8, layer=5, k=range(4)).tolist())


def test_rows_that_stand_in_another_record_are_named_there() -> None:
    """A shared prompt's rows are not this record's."""
    whole = watermarked_record(0, num_tokens=8, spec=SPEC)
    prefix = Prefix(sample_id="shared", attempt=0, segment=0, stop=4, checksum=1)
    tail = replace(whole, routes=whole.routes[4:], routes_start=4, prefix=prefix, checksum=None)
    found = explain(tail, 2)
    assert "('shared', 0, 0)" in found.where
    assert {None} == {rows.row for rows in found.layers}
    assert "row 1 of this record" == explain(tail, 5).where


def test_a_changed_record_is_not_intact() -> None:
    """The checksum is compared, and the answer is part of the explanation rather than an error."""
    record = watermarked_record(0, num_tokens=8, spec=SPEC)
    changed = replace(record, token_ids=record.token_ids + 1)
    assert not explain(changed, 0).intact


def test_a_place_that_is_not_there_is_refused() -> None:
    """Tokens outside the record, layers outside the spec."""
    record = watermarked_record(0, num_tokens=8, spec=SPEC)
    for token in (-1, 8):
        with pytest.raises(UsageError, match=r"\[0, 8\)") as caught:
            explain(record, token)
        assert ErrorKind.ARGUMENT == caught.value.kind
    with pytest.raises(SpecError):
        explain(record, 0, layer_ids=(4,))
