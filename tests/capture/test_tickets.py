"""Tickets and the store that redeems them: the very call, once, in time, across a stream.

Axes: R rows, L captured layers, K top-k slots.
"""

from __future__ import annotations

import io
import threading
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from routeplane import new_stream, open_stream
from routeplane.capture.http.tickets import TicketStore, call_of_ticket, issue_ticket
from routeplane.errors import ChecksumError, DataError, ErrorKind, SpecError, UsageError
from routeplane.record.calls import ModelCall, RowLoss
from routeplane.record.interfaces import MAX_TICKET_BYTES, RouteTicket
from routeplane.record.record import RecordKey, RouteRecord
from routeplane.record.spec import MISSING
from routeplane.testing.builders import watermarked_spec
from tests.turns import SPEC, turn, watermarks


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        """Seconds."""
        return self.now


def store(**options: Any) -> tuple[TicketStore, Clock]:
    """A store of stream ``s`` and its clock."""
    clock = Clock()
    return TicketStore(SPEC, stream="s", clock=clock, **options), clock


def record_of(call: ModelCall) -> RouteRecord:
    """The record that goes into the stream."""
    return issue_ticket(call, SPEC, stream="s")[0]


def ticket_of(call: ModelCall) -> RouteTicket:
    """The ticket that goes to the client."""
    return issue_ticket(call, SPEC, stream="s")[1]


def issue(to: TicketStore, call: ModelCall) -> RouteTicket:
    """Hand in a call."""
    record, ticket = issue_ticket(call, SPEC, stream="s")
    to.write(record)
    return ticket


@given(
    prompt=st.integers(0, 5),
    generated=st.integers(0, 5),
    first=st.integers(0, 3),
    cached=st.integers(0, 5),
    data=st.data(),
)
def test_a_redeemed_call_is_the_very_call(
    prompt: int, generated: int, first: int, cached: int, data: st.DataObject
) -> None:
    """Whatever a server may make of a response, the call that comes back has the same checksum, through a stream
    too."""
    # a call without rows and without a generation has nothing that a version could be the version of
    assume(generated or prompt > first)
    rows = prompt + max(generated - 1, 0)
    fields: dict[str, Any] = {}
    if generated and data.draw(st.booleans()):
        loss = data.draw(st.sampled_from(["aborted", "lost"]))
        stop = data.draw(st.integers(0, rows))
        whole = turn(0, prompt, generated).routes
        assert whole is not None
        fields = {"routes": whole[:stop] if stop else None, "loss": loss} if stop < rows else {}
        first, rows = 0, stop if fields else rows
    if not fields:
        first = min(first, rows)
        whole = turn(0, prompt, generated).routes
        assert whole is not None
        fields = {"routes": whole[first:], "first_row": first}
    bound = min(cached, rows)
    call = turn(
        0,
        prompt,
        generated,
        **fields,
        layer_ids=data.draw(st.sampled_from([None, SPEC.layer_ids])),
        cached=bound if bound > first and generated else 0,
        logprobs=data.draw(st.sampled_from([None, np.full(generated, -0.5, np.float32)])),
        media=data.draw(st.sampled_from([(), ("sha:1",)])),
    )
    file = io.BytesIO()
    with new_stream(file, SPEC) as sink:
        sink.write(record_of(call))
    [record] = list(open_stream(file.getvalue()))
    ticket = RouteTicket.from_json(ticket_of(call).to_json())

    back = call_of_ticket(record, ticket)

    assert call.checksum == back.checksum == back.compute_checksum()
    assert len(ticket.to_json()) <= MAX_TICKET_BYTES


@given(data=st.data())
def test_every_issued_ticket_can_be_redeemed(data: st.DataObject) -> None:
    """Whatever rows are not there, before, among or behind those that came: the call that comes back has the same
    tokens, rows and record. A record does not hold what says nothing of a row, so the ticket is made for what it
    holds."""
    prompt, generated = data.draw(st.tuples(st.integers(0, 4), st.integers(0, 4)).filter(any))
    fed = prompt + max(generated - 1, 0)
    first, stop = sorted(data.draw(st.tuples(st.integers(0, fed), st.integers(0, fed))))
    loss = data.draw(st.sampled_from(get_args(RowLoss))) if stop < fed else None
    rows_RLK = watermarks(stop - first, first=first)
    for row in data.draw(st.sets(st.integers(0, stop - first - 1))) if stop > first else ():
        rows_RLK[row] = MISSING
    cached = data.draw(st.integers(0, stop))
    call = turn(
        0,
        prompt,
        generated,
        routes=rows_RLK,
        first_row=first,
        loss=loss,
        cached=cached if cached > first else 0,
        layer_ids=data.draw(st.sampled_from([None, SPEC.layer_ids])),
        weights_version=data.draw(st.sampled_from([None, 3])),
    )
    record, ticket = issue_ticket(call, SPEC, stream="s")

    back = call_of_ticket(record, ticket)

    assert (call.token_ids.tolist(), call.first_row, call.rows_stop, call.loss) == (
        back.token_ids.tolist(),
        back.first_row,
        back.rows_stop,
        back.loss,
    )
    np.testing.assert_array_equal(rows_RLK, rows_RLK[:0] if back.routes is None else back.routes)
    assert record.checksum == record_of(call).checksum == record_of(back).checksum


def test_a_ticket_is_redeemed_once() -> None:
    """The first to come owns the call; the second is told so."""
    at, _ = store()
    call = turn(0, 3, 2)
    ticket = issue(at, call)

    assert call.checksum == at.redeem(ticket).checksum
    with pytest.raises(UsageError, match="was redeemed") as caught:
        at.redeem(ticket)
    assert ErrorKind.CLOSED == caught.value.kind
    assert (1, 1, 1, 0, 0) == (
        at.report().received,
        at.report().redeemed,
        at.report().refused,
        at.report().held,
        at.report().held_bytes,
    )


def test_of_many_threads_one_gets_the_call() -> None:
    """Eight threads with the same ticket: one call, seven refusals."""
    at, _ = store()
    ticket = issue(at, turn(0, 3, 2))
    got: list[str] = []
    start = threading.Barrier(8)

    def run() -> None:
        start.wait()
        try:
            at.redeem(ticket)
            got.append("call")
        except UsageError:
            got.append("refused")

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert ["call", *["refused"] * 7] == sorted(got)


@pytest.mark.parametrize(("wait", "expired"), [(9.9, False), (10.0, True), (1e9, True)])
def test_tickets_expire(wait: float, expired: bool) -> None:
    """After ttl seconds the rows are gone, the memory with them, and the holder is told why."""
    at, clock = store(ttl=10.0)
    ticket = issue(at, turn(0, 3, 2))
    clock.now = wait

    if expired:
        with pytest.raises(UsageError, match="expired") as caught:
            at.redeem(ticket)
        assert ErrorKind.CLOSED == caught.value.kind
        assert (1, 0, 0) == (at.report().expired, at.report().held, at.report().held_bytes)
    else:
        assert "call-0" == at.redeem(ticket).call_id


def test_later_records_outlive_earlier_ones() -> None:
    """Each has its own time."""
    at, clock = store(ttl=10.0)
    first = issue(at, turn(0, 3, 2))
    clock.now = 6.0
    second = issue(at, turn(1, 3, 2))
    clock.now = 12.0

    assert 1 == at.report().held
    with pytest.raises(UsageError):
        at.redeem(first)
    assert "call-1" == at.redeem(second).call_id


def test_a_ticket_of_another_call_is_refused_and_loses_nothing() -> None:
    """A ticket whose checksum, rows or call are not the record's gets nothing; the right one still does."""
    at, _ = store()
    ticket = issue(at, turn(0, 3, 2))

    for changed in (
        replace(ticket, checksum=ticket.checksum ^ 1),
        replace(ticket, start=1),
        replace(ticket, stop=3),
    ):
        with pytest.raises((ChecksumError, DataError)):
            at.redeem(changed)
    with pytest.raises(DataError):
        at.redeem(replace(ticket, call_id="call-1"))
    for unknown in (replace(ticket, stream="t"), replace(ticket, key=RecordKey("call-7", 0, 0))):
        with pytest.raises(UsageError) as caught:
            at.redeem(unknown)
        assert ErrorKind.ARGUMENT == caught.value.kind
    assert 6 == at.report().refused
    assert "call-0" == at.redeem(ticket).call_id


def test_a_record_comes_once() -> None:
    """The same call twice is refused, also after it was redeemed."""
    at, _ = store()
    call = turn(0, 3, 2)
    ticket = issue(at, call)
    for _ in range(2):
        with pytest.raises(DataError) as caught:
            at.write(record_of(call))
        assert ErrorKind.DUPLICATE_KEY == caught.value.kind
        if at.report().held:
            at.redeem(ticket)


def test_a_full_store_refuses_rather_than_forgets() -> None:
    """What has a ticket is never dropped for what comes later."""
    record = record_of(turn(0, 3, 2))
    at, _ = store(max_bytes=record.nbytes)
    at.write(record)

    with pytest.raises(UsageError, match="tickets have not come"):
        at.write(record_of(turn(1, 3, 2)))
    assert "call-0" == at.redeem(ticket_of(turn(0, 3, 2))).call_id


def test_a_store_is_a_sink() -> None:
    """It is closed and aborted like any sink: closed, tickets still hold; aborted, nothing does."""
    at, _ = store()
    with at as sink:
        ticket = issue(sink, turn(0, 3, 2))
    with pytest.raises(UsageError) as caught:
        issue(at, turn(1, 3, 2))
    assert ErrorKind.CLOSED == caught.value.kind
    assert "call-0" == at.redeem(ticket).call_id

    other, _ = store()
    ticket = issue(other, turn(0, 3, 2))
    with pytest.raises(OSError, match="gone"), other:
        raise OSError("gone")
    with pytest.raises(UsageError, match="abort"):
        other.redeem(ticket)


def test_a_store_is_filled_from_a_stream() -> None:
    """Records that arrive by a stream are redeemed like those of the same process; other geometries are refused."""
    calls = [turn(index, 3, 2) for index in range(3)]
    file = io.BytesIO()
    with new_stream(file, SPEC) as sink:
        for call in calls:
            sink.write(record_of(call))
    at, _ = store()

    assert 3 == at.receive(open_stream(file.getvalue()))
    assert [call.checksum for call in calls] == [at.redeem(ticket_of(call)).checksum for call in calls]
    with pytest.raises(SpecError):
        TicketStore(watermarked_spec(), stream="s").receive(open_stream(file.getvalue()))


@pytest.mark.parametrize("options", [{"ttl": 0.0}, {"ttl": float("nan")}, {"max_bytes": 0}])
def test_a_store_that_could_hold_nothing_is_refused(options: dict[str, Any]) -> None:
    """No time, or no bytes."""
    with pytest.raises(UsageError):
        store(**options)
