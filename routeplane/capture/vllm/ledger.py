"""What the writer inside an engine keeps of the requests in flight, and the records it makes of them.

Rows arrive step by step and are only kept; all that looks at them (layer axis, legality, checksum, stream) happens
once, when a sequence ends. Knows no vLLM: the scheduler hands in plain values. Used by one thread, the engine's.

Axes: R rows of one step, D decoder layers of the engine, L captured layers, K slots.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from routeplane.capture.layers import rows_from_layers
from routeplane.capture.recorder import WeightsChange, record_of_call, split_versions
from routeplane.capture.requests import cached_rows
from routeplane.capture.vllm.reports import LedgerReport
from routeplane.capture.vllm.shipping import Shipping, WriterConfig
from routeplane.errors import DataError, ErrorKind, RouteplaneError, refused
from routeplane.record.calls import ModelCall, RowLoss
from routeplane.record.coverage import Coverage
from routeplane.record.interfaces import RouteSink, RouteTicket

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from routeplane.record.record import RouteRecord
    from routeplane.record.spec import RouteSpec

__all__ = ["Flight", "RouteLedger", "build_sink"]

# Rows of so many steps are joined into one array: a row is a view of its step's array, which it would keep alive.
_JOIN_AFTER = 64
# Why rows are absent from a sequence that ended so; any other end brings them all.
_LOSS_OF: Mapping[str, RowLoss] = MappingProxyType({"abort": "aborted", "error": "lost"})


class Flight:
    """One sequence that the engine works on. Filled in place by the scheduler's loop, which has no time for calls."""

    __slots__ = ("cached", "changes", "first_row", "joined", "logprobs", "media", "prompt_ids", "refusal", "rows",
                 "shipping", "tokens", "waits_for_version")  # fmt: skip

    def __init__(
        self, shipping: Shipping, prompt_ids: Sequence[int], *, first_row: int, media: tuple[str, ...]
    ) -> None:
        self.shipping = shipping
        self.prompt_ids = prompt_ids
        self.first_row = first_row
        self.media = media
        self.tokens: list[int] = []
        self.rows: list[NDArray[Any]] = []
        self.joined: list[NDArray[Any]] = []
        self.logprobs: list[NDArray[Any]] = []
        self.cached: int | None = None
        self.changes: list[WeightsChange] = []
        self.waits_for_version = False
        self.refusal: RouteplaneError | None = None

    def add(self, token_ids: Sequence[int], rows_RDK: NDArray[Any] | None) -> None:
        """Tokens of one step and the rows that came with them; views of a step's array are kept for some steps only."""
        self.tokens += token_ids
        if rows_RDK is not None:
            self.rows.append(rows_RDK)
            if len(self.rows) >= _JOIN_AFTER:
                self.joined.append(np.concatenate(self.rows))
                self.rows.clear()

    def layers(self) -> NDArray[Any] | None:
        """All rows that came, ``[R, D, K]``; None where none did."""
        parts = [*self.joined, *self.rows]
        return np.concatenate(parts) if parts else None


class RouteLedger:
    """Requests in flight by the engine's id, and the stream that their records go to.

    The sink is built at once, so that a bad configuration stops the engine's start and not its work. ``rank``: the
    data-parallel rank of this engine process. ``logprobs_mode``: the engine's.
    """

    def __init__(self, spec: RouteSpec, config: WriterConfig, *, rank: int, logprobs_mode: str) -> None:
        self.flights: dict[str, Flight] = {}
        self.inline: set[str] = set()  # requests whose rows stay in their answers
        self._spec, self._config, self._rank = spec, config, rank
        self._defaults = config  # what requests that are silent mean
        self._mode = logprobs_mode.removesuffix("_logprobs")
        self._index = self._in_stream = 0
        self._records = self._skipped = 0
        self._refusals: Counter[str] = Counter()
        self._rows: Counter[str] = Counter()
        self._sink: RouteSink | None = self._open_sink()

    def open(
        self,
        request_id: str,
        prompt_ids: Sequence[int] | None,
        *,
        extra_args: Mapping[str, Any] | None,
        first_row: int = 0,
        media: tuple[str, ...] = (),
    ) -> None:
        """A request enters. What cannot be recorded is remembered and said in its answer: the engine goes on."""
        refusal: RouteplaneError | None = None
        try:
            shipping = Shipping.from_extra_args(extra_args, config=self._defaults)
            shipping.name_of(request_id)
            if prompt_ids is None:
                raise refused("a prompt of token ids", f"embeddings @ request {request_id}")
        except RouteplaneError as error:
            shipping, refusal = Shipping(), error
        if shipping.inline:
            self.inline.add(request_id)
            return
        if not shipping.capture:
            self._skipped += 1
            return
        self._settle_versions(shipping.weights_version)
        flight = Flight(shipping, prompt_ids or (), first_row=first_row, media=media)
        flight.refusal = refusal
        self.flights[request_id] = flight

    def weights_may_have_changed(self) -> None:
        """The engine ran on after a pause: what is in flight is sampled by unknown weights, until a request says
        which. Requests that do not say are of unknown ones from now on: the configured version was that of the start.
        """
        self._defaults = replace(self._defaults, weights_version=None)
        for flight in self.flights.values():
            at = len(flight.prompt_ids) + len(flight.tokens)
            flight.changes.append(WeightsChange(token=at, weights_version=None))
            flight.waits_for_version = True

    def _settle_versions(self, weights_version: int | None) -> None:
        """Requests that come after a pause know the weights that run since."""
        if weights_version is None:
            return
        for flight in self.flights.values():
            if flight.waits_for_version:
                at = flight.changes[-1].token
                flight.changes[-1] = WeightsChange(token=at, weights_version=weights_version)
                flight.waits_for_version = False

    def finish(self, request_id: str, reason: str) -> dict[str, str]:
        """A sequence ends: its record goes to the stream. Returns what its answer says: ``routeplane`` with a ticket,
        ``routeplane_error`` with why there is no record, or nothing where none was asked for.

        Blocks while the stream is full. Errors of the transport itself (OSError) are the engine's to die of.
        """
        flight = self.flights.pop(request_id, None)
        if flight is None:
            self.inline.discard(request_id)
            return {}
        try:
            if flight.refusal is not None:
                raise flight.refusal
            call, record = self._record(flight, request_id, reason)
            ticket = self._ticket(call, record)
            self._write(record)
        except RouteplaneError as error:
            self._refusals[str(error.kind)] += 1
            return {"routeplane_error": str(error)}
        self._count(record)
        self._roll()
        return {"routeplane": ticket.to_json()}

    def _record(self, flight: Flight, request_id: str, reason: str) -> tuple[ModelCall, RouteRecord]:
        sample_id, group = flight.shipping.name_of(request_id)
        rows_RDK = flight.layers()
        prompt, fed = len(flight.prompt_ids), len(flight.prompt_ids) + max(len(flight.tokens) - 1, 0)
        came = 0 if rows_RDK is None else len(rows_RDK)
        loss = _LOSS_OF.get(reason) if came < fed - flight.first_row else None
        if rows_RDK is None and loss is None and flight.tokens:
            raise DataError(f"expected rows, got none @ request {request_id}", kind=ErrorKind.ROUTES_MISSING)
        routes_RLK = (
            None
            if rows_RDK is None
            else rows_from_layers(rows_RDK, self._spec, first_row=flight.first_row, call=sample_id)
        )
        cached = prompt - 1 if flight.cached is None else flight.cached
        call = ModelCall(
            prompt_ids=np.asarray(flight.prompt_ids),
            generation_ids=np.asarray(flight.tokens, dtype=np.int64),
            routes=routes_RLK,
            first_row=flight.first_row,
            layer_ids=self._spec.layer_ids,
            weights_version=flight.shipping.weights_version,
            call_id=sample_id,
            logprobs=np.concatenate(flight.logprobs) if flight.logprobs else None,
            media=flight.media,
            cached=cached_rows(cached, routes_RLK, first_row=flight.first_row),
            loss=loss,
        )
        record = record_of_call(
            call,
            self._spec,
            sample_id=sample_id,
            attempt=flight.shipping.attempt,
            group=group,
            attributes={"finish_reason": reason, **({"logprobs_mode": self._mode} if flight.logprobs else {})},
        )
        if flight.changes:
            record = split_versions(record, {call.call_id: flight.changes}, prompts={call.call_id: prompt})
        return call, record

    def _ticket(self, call: ModelCall, record: RouteRecord) -> RouteTicket:
        return RouteTicket(
            stream=self._config.stream_of(rank=self._rank, index=self._index),
            key=record.key,
            call_id=call.call_id,
            start=call.first_row,
            stop=call.rows_stop,
            checksum=call.checksum,
        )

    # ---- the stream ---------------------------------------------------------------------------------------------

    def _open_sink(self) -> RouteSink:
        config = self._config
        target = config.target_of(rank=self._rank, index=self._index)
        return build_sink(config.sink, target, spec=self._spec, options=config.options)

    def _write(self, record: RouteRecord) -> None:
        if self._sink is None:
            raise refused("a ledger that is open", f"a closed one @ sample {record.key}")
        self._sink.write(record)
        self._in_stream += 1

    def _roll(self) -> None:
        """Begin the next stream where this one has what it may hold."""
        if self._sink is None or self._config.records_per_stream is None:
            return
        if self._in_stream >= self._config.records_per_stream:
            self._sink.close()
            self._index, self._in_stream = self._index + 1, 0
            self._sink = self._open_sink()

    def close(self) -> None:
        """Record what is in flight as aborted, and end the stream. Idempotent."""
        for request_id in list(self.flights):
            self.finish(request_id, "abort")
        if self._sink is not None:
            self._sink.close()
            self._sink = None

    def report(self) -> LedgerReport:
        """What was done so far."""
        return LedgerReport(
            records=self._records,
            skipped=self._skipped,
            refusals=MappingProxyType(dict(self._refusals)),
            coverage=Coverage(records=self._records, rows=MappingProxyType(dict(self._rows))),
        )

    def _count(self, record: RouteRecord) -> None:
        self._records += 1
        for capture in record.captures:
            self._rows[capture.state] += capture.stop - capture.start


def build_sink(name: str, target: Any, *, spec: RouteSpec, options: Mapping[str, Any]) -> RouteSink:
    """The sink that the factory of a dotted name gives: ``factory(target, spec, **options)``. The caller closes it.

    Raises UsageError where the name leads to nothing that can be called, and whatever the factory raises.
    """
    module, _, attribute = name.rpartition(".")
    try:
        factory: Callable[..., RouteSink] | None = getattr(import_module(module), attribute, None)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        factory = None
    if not callable(factory):
        raise refused("sink as the dotted name of a factory", f"{name!r}, which is none")
    return factory(target, spec, **options)
