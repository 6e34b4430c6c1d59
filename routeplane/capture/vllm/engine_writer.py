"""The writer inside an engine: what it is told, what it keeps of sequences in flight, the records it makes of them.

``additional_config={"routeplane": {...}}`` of the engine becomes a ``WriterConfig``;
``SamplingParams.extra_args={"routeplane": {...}}`` of a request, which HTTP clients send as ``vllm_xargs``, becomes
``RequestOptions``. Rows come step by step and are only kept; all that looks at them (layer axis, legality, checksum,
stream) happens once, when a sequence ends. Knows no vLLM: the scheduler hands in plain values. Used by one thread, the
engine's.

Axes: R rows of one step, D decoder layers of the engine, L captured layers, K slots.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from routeplane.capture.choices import cached_rows
from routeplane.capture.layers import rows_from_layers
from routeplane.capture.recorder import WeightsChange, record_of_call, split_versions
from routeplane.errors import DataError, ErrorKind, RouteplaneError, UsageError, refused
from routeplane.record.calls import ModelCall, RowLoss
from routeplane.record.coverage import Coverage
from routeplane.record.interfaces import RouteSink, RouteTicket
from routeplane.record.parse import check_count, check_optional_int64, check_text

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from routeplane.record.record import RouteRecord
    from routeplane.record.spec import RouteSpec

__all__ = [
    "KEY",
    "EngineReport",
    "EngineWriter",
    "Flight",
    "RequestOptions",
    "WriterConfig",
    "build_sink",
    "request_args",
]

#: Where both stand: in ``additional_config``, in ``extra_args``, and in the answer's ``kv_transfer_params``.
KEY = "routeplane"

# a child of a request with several choices: vllm/v1/engine/parallel_sampling.py, ParentRequest.get_child_info
_CHILD = re.compile(r"([0-9]+)_.+", re.DOTALL)


def _no_options() -> Mapping[str, Any]:
    return MappingProxyType({})


@dataclass(frozen=True, kw_only=True, slots=True)
class WriterConfig:
    """Where an engine's records go.

    ``sink``: dotted name of a factory, called as ``factory(target, spec, **options)``, that gives a RouteSink;
    ``routeplane.stream.new_stream`` takes a path. ``target``: its first argument; in a text, ``{rank}`` is the
    data-parallel rank (several engine processes may not share a stream) and ``{index}`` the number of the stream.
    ``stream``: what tickets call the stream, same placeholders; None takes the target. ``records_per_stream``: a new
    stream begins after so many records, so that a reader gets them while the engine runs; None: one until the engine
    ends. ``default``: what becomes of requests that say nothing. ``weights_version``: of requests that do not say, up
    to the first pause of the engine, after which it is unknown.
    """

    sink: str
    target: Any
    options: Mapping[str, Any] = field(default_factory=_no_options)
    stream: str | None = None
    records_per_stream: int | None = None
    default: Literal["ship", "skip"] = "ship"
    weights_version: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.sink, str) or not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)+", self.sink):
            raise refused("sink as the dotted name of a factory", repr(self.sink))
        if self.stream is None and not isinstance(self.target, str):
            raise refused("a name of the stream where its target is not text", repr(self.target))
        if not isinstance(self.options, Mapping):
            raise refused("options as a mapping", repr(self.options))
        if self.default not in ("ship", "skip"):
            raise refused("default of ('ship', 'skip')", repr(self.default))
        if self.records_per_stream is not None:
            _checked(check_count, self.records_per_stream, "records_per_stream", below=2**63)
            if self.records_per_stream == 0 or "{index}" not in str(self.target):
                raise refused("records_per_stream of at least 1 and {index} in the target", repr(self.target))
        _checked(check_optional_int64, self.weights_version, "weights_version")

    @classmethod
    def from_additional(cls, additional_config: object) -> WriterConfig:
        """The part of vLLM's ``additional_config`` that is ours. Raises UsageError naming what is absent or unknown."""
        given = additional_config.get(KEY) if isinstance(additional_config, Mapping) else None
        if given is None:
            raise refused(f"additional_config={{{KEY!r}: {{'sink': ..., 'target': ...}}}}", repr(additional_config))
        return cls(**_known(cls, given, "additional_config"))

    def target_of(self, *, rank: int, index: int) -> Any:
        """The factory's first argument for one stream of one engine process."""
        return _filled(self.target, rank=rank, index=index) if isinstance(self.target, str) else self.target

    def stream_of(self, *, rank: int, index: int) -> str:
        """What tickets call that stream."""
        return _filled(self.target if self.stream is None else self.stream, rank=rank, index=index)


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestOptions:
    """What one request asks of the writer.

    ``capture``: whether its rows are shipped at all; validation and judge traffic says False. ``inline``: leave them in
    the answer, as an engine without a writer does, and write no record (a probe). ``sample_id``: None takes
    the engine's own request id, which is unique. ``choices``: the request's n; each of several choices is recorded as
    ``{sample_id}/{index}`` in one group. ``weights_version``: of the weights when it was sent.
    """

    capture: bool = True
    inline: bool = False
    sample_id: str | None = None
    attempt: int = 0
    group: str | None = None
    choices: int = 1
    weights_version: int | None = None

    def __post_init__(self) -> None:
        for name in ("capture", "inline"):
            if not isinstance(getattr(self, name), bool):
                raise refused(f"{name} as true or false", repr(getattr(self, name)))
        for name in ("sample_id", "group"):
            if getattr(self, name) is not None:
                _checked(check_text, getattr(self, name), name)
        _checked(check_count, self.attempt, "attempt", below=2**31)
        _checked(check_count, self.choices, "choices", below=2**31)
        _checked(check_optional_int64, self.weights_version, "weights_version")

    @classmethod
    def from_extra_args(cls, extra_args: Mapping[str, Any] | None, *, config: WriterConfig) -> RequestOptions:
        """What a request's ``extra_args`` say; ``config`` where they are silent. Raises UsageError.

        HTTP carries scalars only (``vllm_xargs``): there the object travels as its JSON text.
        """
        given = (extra_args or {}).get(KEY)
        if given is None:
            return cls(capture=config.default == "ship", weights_version=config.weights_version)
        if isinstance(given, str):
            try:
                given = json.loads(given)
            except (ValueError, RecursionError):
                raise refused(f"extra_args[{KEY!r}] as JSON", repr(given[:80])) from None
        return cls(**{"weights_version": config.weights_version, **_known(cls, given, "extra_args")})

    def name_of(self, request_id: str) -> tuple[str, str | None]:
        """``(sample_id, group)`` of one of the request's sequences, by the id that the engine runs it under."""
        if self.choices <= 1:
            return self.sample_id if self.sample_id is not None else request_id, self.group
        child = _CHILD.fullmatch(request_id)
        if child is None:
            raise refused(f"one of {self.choices} choices, as {{index}}_{{id}}", repr(request_id))
        stem = self.sample_id if self.sample_id is not None else request_id.partition("_")[2]
        return f"{stem}/{int(child[1])}", self.group if self.group is not None else stem


def request_args(
    *,
    capture: bool = True,
    inline: bool = False,
    sample_id: str | None = None,
    attempt: int = 0,
    group: str | None = None,
    choices: int = 1,
    weights_version: int | None = None,
) -> dict[str, Any]:
    """``SamplingParams.extra_args`` for one request; fields as in ``RequestOptions``. Raises UsageError."""
    made = RequestOptions(
        capture=capture,
        inline=inline,
        sample_id=sample_id,
        attempt=attempt,
        group=group,
        choices=choices,
        weights_version=weights_version,
    )
    content = {item.name: getattr(made, item.name) for item in fields(made)}
    return {
        KEY: {
            name: value
            for name, value in content.items()
            if (value is not None and value is not False) or name == "capture"
        }
    }


def _known(cls: type[WriterConfig] | type[RequestOptions], given: object, where: str) -> dict[str, Any]:
    names = [item.name for item in fields(cls)]
    unknown = sorted(set(given) - set(names)) if isinstance(given, Mapping) else [given]
    required = {"sink", "target"} if cls is WriterConfig else set()
    if not isinstance(given, Mapping) or unknown or not required <= set(given):
        raise refused(f"{where}[{KEY!r}] with keys of {names}", repr(given)[:200])
    return dict(given)


def _checked(check: Any, value: object, name: str, **limits: Any) -> None:
    try:
        check(value, name, **limits)
    except DataError as error:
        raise UsageError(f"{KEY}: {error}", kind=error.kind) from None


def _filled(text: str, *, rank: int, index: int) -> str:
    return text.replace("{rank}", str(rank)).replace("{index}", f"{index:06d}")


def _none() -> Mapping[str, int]:
    return MappingProxyType({})


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineReport:
    """What a writer inside an engine did so far. ``refusals``: sequences without a record, by the kind of error."""

    records: int = 0
    skipped: int = 0  # sequences whose request asked for no capture
    refusals: Mapping[str, int] = field(default_factory=_none)
    coverage: Coverage = field(default_factory=Coverage)

    def merge(self, other: EngineReport) -> EngineReport:
        """The counts of both."""
        refusals = Counter(self.refusals)
        refusals.update(other.refusals)
        return EngineReport(
            records=self.records + other.records,
            skipped=self.skipped + other.skipped,
            refusals=MappingProxyType(dict(refusals)),
            coverage=self.coverage.merge(other.coverage),
        )

    def scalars(self, *, prefix: str = "routeplane/") -> dict[str, float]:
        """A flat dict with stable names for a metrics logger."""
        return {
            f"{prefix}engine_skipped": float(self.skipped),
            f"{prefix}engine_refused": float(sum(self.refusals.values())),
            **self.coverage.scalars(prefix=f"{prefix}engine_"),
        }


# Rows of so many steps are joined into one array: a row is a view of its step's array, which it would keep alive.
_JOIN_AFTER = 64
# Why rows are absent from a sequence that ended so; any other end brings them all.
_LOSS_OF: Mapping[str, RowLoss] = MappingProxyType({"abort": "aborted", "error": "lost"})


class Flight:
    """One sequence that the engine works on. Filled in place by the scheduler's loop, which has no time for calls."""

    __slots__ = (
        "cached",
        "changes",
        "first_row",
        "joined",
        "logprobs",
        "media",
        "options",
        "prompt_ids",
        "refusal",
        "rows",
        "tokens",
        "waits_for_version",
    )  # fmt: skip

    def __init__(
        self, options: RequestOptions, prompt_ids: Sequence[int], *, first_row: int, media: tuple[str, ...]
    ) -> None:
        self.options = options
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


class EngineWriter:
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
            options = RequestOptions.from_extra_args(extra_args, config=self._defaults)
            options.name_of(request_id)
            if prompt_ids is None:
                raise refused("a prompt of token ids", f"embeddings @ request {request_id}")
        except RouteplaneError as error:
            options, refusal = RequestOptions(), error
        if options.inline:
            self.inline.add(request_id)
            return
        if not options.capture:
            self._skipped += 1
            return
        self._settle_versions(options.weights_version)
        flight = Flight(options, prompt_ids or (), first_row=first_row, media=media)
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
        sample_id, group = flight.options.name_of(request_id)
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
            weights_version=flight.options.weights_version,
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
            attempt=flight.options.attempt,
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

    def report(self) -> EngineReport:
        """What was done so far."""
        return EngineReport(
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
