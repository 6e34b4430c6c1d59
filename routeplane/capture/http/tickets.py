"""Tickets for calls: a few bytes of identity that hops carry, and the store that gives each call out once.

Owns how a call becomes a one-call record (which any route stream takes) and becomes that very call again: the ticket
has the call's checksum, and the call that is given out must have it. Knows no transport and no server; the reader of
the stream fills a store, or the store itself is the sink where both are one process.
"""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Self, get_args

from routeplane.capture import recorder
from routeplane.errors import DataError, ErrorKind, UsageError, check_type, refused
from routeplane.record.calls import ModelCall, RowLoss, VersionSpan
from routeplane.record.checksum import require_equal
from routeplane.record.counts import Counts
from routeplane.record.interfaces import RouteTicket
from routeplane.record.record import RecordKey, RouteRecord

if TYPE_CHECKING:
    from routeplane.record.spec import RouteSpec

__all__ = ["TicketReport", "TicketStore", "call_of_ticket", "issue_ticket", "ticket_of_record"]

#: Keys of redeemed and expired calls that a store remembers, to say what became of them.
_REMEMBERED = 4_096


def issue_ticket(call: ModelCall, spec: RouteSpec, *, stream: str) -> tuple[RouteRecord, RouteTicket]:
    """Make the record of a call, and the ticket with which its reader gets the call back.

    Args:
        call: A call; its ``call_id`` becomes the record's name.
        spec: The geometry of the record.
        stream: The name of the stream into which the record goes.

    Returns:
        The record under the key ``(call_id, 0, 0)``, and the ticket. The call that comes back is the same, but for what
        says nothing of a row: a version that no token and no row is of, a bound of the cache among rows that did not
        come. Raises as ``recorder.record_of_call``, and UsageError where names make the ticket too long.

    >>> from routeplane import ModelCall, RouteSpec
    >>> spec = RouteSpec(num_experts=8, top_k=2, layer_ids=(0,))
    >>> call = ModelCall(
    ...     prompt_ids=[5, 6], generation_ids=[7], routes=[[[3, 1]], [[0, 5]]], weights_version=4, call_id="c"
    ... )
    >>> record, ticket = issue_ticket(call, spec, stream="rollouts")
    >>> call_of_ticket(record, ticket).call_id == ticket.call_id
    True
    """
    check_type(call, ModelCall, expected="a ModelCall")
    record = recorder.record_of_call(call, spec, sample_id=call.call_id)
    return record, ticket_of_record(record, call, stream=stream)


def ticket_of_record(record: RouteRecord, call: ModelCall, *, stream: str) -> RouteTicket:
    """Make the ticket with which the reader of a one-call record gets its call back.

    Args:
        record: The record; its versions may have been cut since. The call that comes back has those of the tokens, or
            none where the rows' do not follow from them.
        call: The call that it was made of.
        stream: The name of the stream into which the record goes.

    Returns:
        The ticket. Raises UsageError where names make it too long.

    >>> from routeplane import ModelCall, RouteSpec
    >>> from routeplane.capture import record_of_call
    >>> spec = RouteSpec(num_experts=8, top_k=2, layer_ids=(0,))
    >>> call = ModelCall(
    ...     prompt_ids=[5, 6], generation_ids=[7], routes=[[[3, 1]], [[0, 5]]], weights_version=4, call_id="c"
    ... )
    >>> ticket_of_record(record_of_call(call, spec, sample_id="s"), call, stream="rollouts").key
    RecordKey(sample_id='s', attempt=0, segment=0)
    """
    if _is_plain(call, record):
        behind = call
    else:
        behind = _call_behind(record, call.call_id, start=call.first_row, stop=call.rows_stop)
    if call.layer_ids is None and behind is not call:
        # a call need not name the layers where they are the spec's; ``call_of_ticket`` looks for both
        behind = replace(behind, layer_ids=None, checksum=None)
    return RouteTicket(
        stream=stream,
        key=record.key,
        call_id=behind.call_id,
        start=behind.first_row,
        stop=behind.rows_stop,
        checksum=behind.checksum,
    )


def _is_plain(call: ModelCall, record: RouteRecord) -> bool:
    """Whether ``_call_behind`` would make the very call: nearly always, and it costs a second call to see it.

    The call is whole, of one version, with the rows of all layers; the record's captures still say the same.
    """
    if call.loss or call.first_row or call.versions or call.columns or call.rows != "but_last":
        return False
    if call.routes is None or not len(call.generation_ids) or call.layer_ids not in (None, record.spec.layer_ids):
        return False
    version = call.weights_version
    expected: list[tuple[str, int, int | None]] = [("cached", call.cached, None)] if call.cached else []
    expected += [("captured", call.rows_stop, version), ("not_fed", call.num_tokens, None)]
    return expected == [(one.state, one.stop, one.weights_version) for one in record.captures] and all(
        one.weights_version == version for one in record.spans if one.kind == "generation"
    )


def call_of_ticket(record: RouteRecord, ticket: RouteTicket) -> ModelCall:
    """Give back the call behind a one-call record, bit for bit.

    Args:
        record: The record that ``issue_ticket`` made.
        ticket: The ticket that it made with it.

    Returns:
        A call with the ticket's checksum, over the record's memory. Raises DataError (TOKEN_MISMATCH) for another
        record, (PREFIX) for one whose first rows stand in another, ChecksumError where the call is not the one that the
        ticket was made for.

    >>> from routeplane import ModelCall, RouteSpec
    >>> spec = RouteSpec(num_experts=8, top_k=2, layer_ids=(0,))
    >>> call = ModelCall(
    ...     prompt_ids=[5, 6], generation_ids=[7], routes=[[[3, 1]], [[0, 5]]], weights_version=4, call_id="c"
    ... )
    >>> record, ticket = issue_ticket(call, spec, stream="rollouts")
    >>> call_of_ticket(record, ticket).checksum == call.checksum
    True
    """
    if record.key != ticket.key or {capture.call for capture in record.captures} != {ticket.call_id}:
        raise DataError(
            f"expected the record of call {ticket.call_id}, got {record.key}", kind=ErrorKind.TOKEN_MISMATCH
        )
    if record.prefix is not None:
        raise DataError(
            f"expected a whole record of call {ticket.call_id} (a carrier's reader, or resolve(records), joins them), "
            f"got one whose first {record.routes_start} rows stand in {record.prefix.sample_id}",
            kind=ErrorKind.PREFIX,
        )
    call = _call_behind(record, ticket.call_id, start=ticket.start, stop=ticket.stop)
    if call.checksum != ticket.checksum:
        # a call need not name the layers where they are the spec's
        call = replace(call, layer_ids=None, checksum=None)
    require_equal(ticket.checksum, call.checksum, where=f"call {ticket.call_id}", sample=ticket.call_id)
    return call


def _call_behind(record: RouteRecord, call_id: str, *, start: int, stop: int) -> ModelCall:
    generated = [span for span in record.spans if span.kind == "generation"]
    prompt = generated[0].start if generated else record.num_tokens
    # rows lost behind the last that came may go on from lost ones among those that did
    behind = {capture.state for capture in record.captures if capture.stop > stop}
    lost: list[RowLoss] = [loss for loss in get_args(RowLoss) if loss in behind]
    versions = _versions(record)
    return ModelCall(
        prompt_ids=record.token_ids[:prompt],
        generation_ids=record.token_ids[prompt:],
        routes=record.routes[start:stop] if stop > start or not lost else None,
        first_row=start,
        layer_ids=record.spec.layer_ids,
        weights_version=None if versions else _only_version(record),
        versions=versions,
        sampling=generated[0].sampling if generated else None,
        call_id=call_id,
        logprobs=None if record.logprobs is None else record.logprobs[prompt:],
        media=tuple(json.loads(record.attributes["media"])) if "media" in record.attributes else (),
        cached=max((capture.stop for capture in record.captures if capture.state == "cached"), default=0),
        loss=lost[0] if lost else None,
        rows="all" if generated and record.captures[-1].state != "not_fed" else "but_last",
        columns=dict(record.columns),
    )


def _versions(record: RouteRecord) -> tuple[VersionSpan, ...]:
    """Versions by spans, where several sampled the tokens and those of the rows follow from them; else none."""
    spans = [(span.start, span.stop, span.weights_version) for span in record.spans if span.kind == "generation"]
    # the forward that sampled token t + 1 produced row t
    edges = [(0, *spans[0][1:]), *spans[1:]] if len(spans) > 1 else []
    follow = all(
        version == capture.weights_version or start - 1 >= capture.stop or stop - 1 <= capture.start
        for capture in record.captures
        if capture.state in ("captured", "partial")
        for start, stop, version in edges
    )
    return tuple(spans) if edges and follow else ()


def _only_version(record: RouteRecord) -> int | None:
    """The version of all tokens that were sampled and all rows that were captured; None where there are several: rows
    of new weights must not have the old."""
    found = {span.weights_version for span in record.spans if span.kind == "generation"}
    found |= {one.weights_version for one in record.captures if one.state in ("captured", "partial")}
    return found.pop() if len(found) == 1 else None


@dataclass(frozen=True, kw_only=True, slots=True)
class TicketReport(Counts):
    """What became of the calls that came to a store.

    >>> TicketReport(received=2).merge(TicketReport(received=1)).scalars()["routeplane/tickets_received"]
    3.0
    """

    SCOPE: ClassVar[str] = "tickets_"

    received: int = 0
    redeemed: int = 0
    expired: int = 0
    refused: int = 0  # tickets that no call answered: unknown, redeemed before, expired, of another stream or call
    held: int = 0
    held_bytes: int = 0


class TicketStore:
    """Hold one-call records until their tickets come; each call is given out once, to the first that asks.

    A RouteSink, safe for several threads; the memory of a call is its record's.

    Args:
        spec: The geometry of the records.
        stream: The name that tickets carry.
        ttl: Seconds after which a record whose ticket did not come is dropped.
        max_bytes: Payload held at once; more is refused, since dropping a record that has a ticket would lose it.
        clock: Seconds that never go back.

    >>> from routeplane import ModelCall, RouteSpec
    >>> spec = RouteSpec(num_experts=8, top_k=2, layer_ids=(0,))
    >>> call = ModelCall(
    ...     prompt_ids=[5, 6], generation_ids=[7], routes=[[[3, 1]], [[0, 5]]], weights_version=4, call_id="c"
    ... )
    >>> store = TicketStore(spec, stream="rollouts")
    >>> record, ticket = issue_ticket(call, spec, stream="rollouts")
    >>> store.write(record)
    >>> store.redeem(ticket).checksum == ticket.checksum, store.report().redeemed
    (True, 1)
    """

    def __init__(
        self,
        spec: RouteSpec,
        *,
        stream: str,
        ttl: float = 600.0,
        max_bytes: int = 2**32,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not ttl > 0 or max_bytes < 1:
            raise refused("a ttl above 0 and max_bytes of at least 1", f"{ttl} and {max_bytes}")
        self._spec = spec
        self._stream = stream
        self._ttl = ttl
        self._max_bytes = max_bytes
        self._clock = clock
        self._lock = threading.Lock()
        self._held: OrderedDict[RecordKey, tuple[float, RouteRecord]] = OrderedDict()
        self._gone: OrderedDict[RecordKey, str] = OrderedDict()
        self._counts = dict.fromkeys(("received", "redeemed", "expired", "refused", "held_bytes"), 0)
        self._open = True

    @property
    def spec(self) -> RouteSpec:
        """The geometry of the records."""
        return self._spec

    @property
    def stream(self) -> str:
        """The name that tickets carry."""
        return self._stream

    def write(self, record: RouteRecord) -> None:
        """Take in one record. Raises SpecError for another geometry, DataError (DUPLICATE_KEY, CHECKSUM), UsageError
        (CLOSED; ARGUMENT where the store is full)."""
        self._spec.require_same_geometry(record.spec, where=f"sample {record.key}")
        record.verify()
        with self._lock:
            if not self._open:
                raise UsageError("expected an open ticket store, got one that was closed", kind=ErrorKind.CLOSED)
            self._drop_expired()
            if record.key in self._held or record.key in self._gone:
                raise DataError(f"expected each record once, got {record.key} twice", kind=ErrorKind.DUPLICATE_KEY)
            if self._counts["held_bytes"] + record.nbytes > self._max_bytes:
                raise refused(
                    f"at most max_bytes={self._max_bytes} in records whose tickets have not come",
                    f"{record.nbytes} bytes more than the {self._counts['held_bytes']} of {len(self._held)} records",
                )
            self._held[record.key] = self._clock() + self._ttl, record
            self._counts["received"] += 1
            self._counts["held_bytes"] += record.nbytes

    def receive(self, records: Iterable[RouteRecord]) -> int:
        """Take in all records of a source (an open stream) as they come; returns how many."""
        count = 0
        for record in records:
            self.write(record)
            count += 1
        return count

    def redeem(self, ticket: RouteTicket) -> ModelCall:
        """Give out the call of a ticket; from then on it is the caller's alone.

        Raises UsageError: CLOSED where the ticket expired or was redeemed, ARGUMENT where it is of another stream or of
        a record that has not come. ChecksumError where the record is another call's; then it stays.
        """
        with self._lock:
            self._drop_expired()
            if ticket.stream != self._stream or ticket.key not in self._held:
                self._counts["refused"] += 1
                raise self._unknown(ticket)
            _, record = self._held[ticket.key]
            try:
                call = call_of_ticket(record, ticket)
            except DataError:
                self._counts["refused"] += 1
                raise
            self._forget(ticket.key, "was redeemed")
            self._counts["redeemed"] += 1
            return call

    def report(self) -> TicketReport:
        """What was counted so far; records past their time are dropped first."""
        with self._lock:
            self._drop_expired()
            return TicketReport(held=len(self._held), **self._counts)

    def close(self) -> None:
        """Take in no more; what is held may still be redeemed. Idempotent."""
        with self._lock:
            self._open = False

    def abort(self) -> None:
        """Take in no more and drop what is held. Idempotent."""
        with self._lock:
            self._open = False
            for key in list(self._held):
                self._forget(key, "was dropped by abort")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    def _drop_expired(self) -> None:
        now = self._clock()
        while self._held:
            key, (until, _) = next(iter(self._held.items()))
            if until > now:
                return
            self._forget(key, "expired")
            self._counts["expired"] += 1

    def _forget(self, key: RecordKey, why: str) -> None:
        _, record = self._held.pop(key)
        self._counts["held_bytes"] -= record.nbytes
        self._gone[key] = why
        if len(self._gone) > _REMEMBERED:
            self._gone.popitem(last=False)

    def _unknown(self, ticket: RouteTicket) -> UsageError:
        if ticket.stream != self._stream:
            return refused(f"a ticket of stream {self._stream!r}", f"one of {ticket.stream!r} @ call {ticket.call_id}")
        why = self._gone.get(ticket.key)
        if why is not None:
            return UsageError(
                f"expected a ticket that is valid, got one that {why} @ call {ticket.call_id}", kind=ErrorKind.CLOSED
            )
        return refused("a ticket of a record that has come", f"call {ticket.call_id}, of which nothing is known (yet)")
