"""The writer inside an engine: sequences in flight, the versions of their weights, and the thread that writes records.

Rows come step by step and are only kept. When a sequence ends, it is handed to a thread, which does all that looks at
rows (layer axis, legality, checksum, block), seals the block, and only then has an answer for it: a ticket names a
record that can be read. Knows no vLLM: the scheduler hands in plain values.

Axes: R rows of one step, D decoder layers of the engine, L captured layers, K slots.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np

from routeplane.capture.choices import cached_rows, loss_of_rows
from routeplane.capture.http.tickets import ticket_of_record
from routeplane.capture.layers import rows_from_layers
from routeplane.capture.recorder import WeightsChange, record_of_call, split_versions
from routeplane.capture.vllm.interface import KEY, RequestOptions, WriterConfig, choice_of, ids_of
from routeplane.errors import DataError, ErrorKind, RouteplaneError, TransportError, refused
from routeplane.record.aligned import weights_column
from routeplane.record.calls import ModelCall, RowLoss
from routeplane.record.counts import Counts, add_by_key, rule
from routeplane.record.spans import Coverage

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from routeplane.record.record import RouteRecord
    from routeplane.record.spec import RouteSpec

__all__ = ["BlockWriter", "EngineReport", "EngineWriter", "RunningSequence", "open_carrier"]

# Rows of so many steps are joined into one array: a row is a view of its step's array, which it would keep alive.
_JOIN_AFTER = 64
# Why rows are absent from a sequence that ended so; any other end brings them all.
_LOSS_OF: Mapping[str, RowLoss] = MappingProxyType({"abort": "aborted", "error": "lost"})
# Requests whose answers can still be asked for by id.
_REMEMBERED = 4_096
# The longest pause between two tries to open a carrier that failed.
_LONGEST_PAUSE_S = 5.0
# How often counts of losses are logged.
_LOG_EVERY_S = 60.0


class BlockWriter(Protocol):
    """What a carrier opens for one producer. After an OSError (TransportError, StoreError) it takes no more records."""

    def write(self, record: RouteRecord) -> None:
        """Add a record to the block that is being filled."""

    def flush(self) -> object | None:
        """Publish the block, durably, and return its name; None where it holds no record."""

    def close(self) -> None:
        """Flush, and tell readers that this producer has ended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineReport(Counts):
    """What a writer inside an engine did so far.

    Args:
        skipped: Sequences whose request asked for no capture.
        pending: Sequences that ended and whose block is not sealed.
        lost: Records that the carrier did not take.
        reopened: Times that a carrier that failed was opened again.
        stale_versions: Requests that named other weights than those that run.
        weight_updates: Updates of weights that were seen.
        refusals: Sequences without a record, by the kind of error.
        coverage: Of the records written.

    >>> EngineReport(lost=1).merge(EngineReport(lost=2)).scalars()["routeplane/engine_lost"]
    3.0
    """

    SCOPE: ClassVar[str] = "engine_"
    skipped: int = 0
    pending: int = 0
    lost: int = 0
    reopened: int = 0
    stale_versions: int = 0
    weight_updates: int = 0
    refusals: Mapping[str, int] = field(
        default_factory=lambda: MappingProxyType({}), metadata=rule(scalar="refused", merge=add_by_key)
    )
    coverage: Coverage = field(default_factory=Coverage)

    @property
    def records(self) -> int:
        """Records written."""
        return self.coverage.records


class RunningSequence:
    """One sequence that the engine works on. Filled in place by the scheduler's loop, which has no time for calls."""

    __slots__ = ("cached", "changes", "first_row", "joined", "logprobs", "media", "nbytes", "options", "prompt_ids",
                 "refusal", "rows", "tokens", "waits_for_version", "weights_version")  # fmt: skip

    def __init__(
        self, options: RequestOptions, prompt_ids: Sequence[int], *, first_row: int, media: tuple[str, ...]
    ) -> None:
        self.options = options
        self.prompt_ids = prompt_ids
        self.first_row = first_row
        self.media = media
        self.weights_version = options.weights_version
        self.tokens: list[int] = []
        self.rows: list[NDArray[Any]] = []
        self.joined: list[NDArray[Any]] = []
        self.nbytes = 0
        self.logprobs: list[NDArray[Any]] = []
        self.cached: int | None = None
        self.changes: list[WeightsChange] = []
        self.waits_for_version = False
        self.refusal: RouteplaneError | None = None

    def add(self, token_ids: Sequence[int], rows_RDK: NDArray[Any] | None) -> None:
        """Keep the tokens of one step and the rows that came with them, as views for some steps only."""
        self.tokens += token_ids
        if rows_RDK is not None:
            self.rows.append(rows_RDK)
            self.nbytes += rows_RDK.nbytes
            if len(self.rows) >= _JOIN_AFTER:
                self.joined.append(np.concatenate(self.rows))
                self.rows.clear()

    def layers(self) -> NDArray[Any] | None:
        """Join all rows that came, ``[R, D, K]``; None where none did."""
        parts = [*self.joined, *self.rows]
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else None

    def drop_rows(self) -> None:
        """Forget the rows, which did not fit into the queue."""
        self.rows, self.joined, self.nbytes = [], [], 0

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens so far."""
        return len(self.prompt_ids) + len(self.tokens)


class EngineWriter:
    """The requests in flight by the engine's id, and the records that they become.

    The carrier is opened at once, so that a bad configuration stops the engine's start and not its work. The methods
    are the engine thread's, which also owns ``sequences`` and ``inline``.

    Args:
        spec: The geometry of the engine's model.
        config: Where records go.
        rank: Data-parallel rank of this engine process.
        logprobs_mode: The engine's.
        log: Takes a line for the engine's log.
        weights_meaning: What the weights are that stand beside the ids of rows; None where there are none.
    """

    def __init__(
        self,
        spec: RouteSpec,
        config: WriterConfig,
        *,
        rank: int,
        logprobs_mode: str,
        log: Callable[[str], None] = lambda line: None,
        weights_meaning: str | None = None,
    ) -> None:
        self.sequences: dict[str, RunningSequence] = {}
        self.inline: set[str] = set()  # requests whose rows stay in their answers
        self.versions = _Versions(config.weights_version)
        self._config = config
        self._skipped = 0
        self._tickets: OrderedDict[str, dict[int, str]] = OrderedDict()  # external id -> choice -> ticket
        build = _RecordBuilder(spec, config, mode=logprobs_mode.removesuffix("_logprobs"), meaning=weights_meaning)
        self._blocks = _BlockThread(
            lambda: open_carrier(config, spec, producer=config.producer_of(rank=rank)), build, config, log=log
        )

    # ---- requests -----------------------------------------------------------------------------------------------

    def open(
        self,
        request_id: str,
        prompt_ids: Sequence[int] | None,
        *,
        extra_args: Mapping[str, Any] | None,
        first_row: int = 0,
        media: tuple[str, ...] = (),
    ) -> None:
        """Begin a sequence. What cannot be recorded is remembered and said in its answer: the engine goes on."""
        refusal: RouteplaneError | None = None
        try:
            options = RequestOptions.from_extra_args(extra_args, default=self._config.default)
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
        sequence = RunningSequence(options, prompt_ids or (), first_row=first_row, media=media)
        sequence.refusal = refusal
        self.versions.begin(sequence, self.sequences.values())
        self.sequences[request_id] = sequence

    def finish(self, request_id: str, reason: str, *, answered: bool = True) -> bool:
        """End a sequence and hand it to the writer thread.

        Args:
            request_id: The engine's id.
            reason: Why it ended.
            answered: Whether an answer waits for the ticket.

        Returns:
            Whether ``take_answers`` will say what its answer must carry.
        """
        sequence = self.sequences.pop(request_id, None)
        if sequence is None:
            self.inline.discard(request_id)
            return False
        self._blocks.submit(_Job(request_id=request_id, sequence=sequence, reason=reason, answered=answered))
        return answered

    def take_answers(self, *, wait_s: float = 0.0) -> list[tuple[str, dict[str, Any]]]:
        """Take what the answers of ended sequences must carry.

        Args:
            wait_s: How long to wait for the first.

        Returns:
            Pairs of request id and additions to ``kv_transfer_params``: ``routeplane`` with a ticket and
            ``routeplane_choices`` with those of all choices so far, or ``routeplane_error`` with why there is no
            record, or ``routeplane_pending`` with the key of a record that is not sealed yet.
        """
        return [(request_id, self._answer(request_id, said)) for request_id, said in self._blocks.take(wait_s)]

    def _answer(self, request_id: str, said: dict[str, str]) -> dict[str, Any]:
        external, choice = choice_of(request_id)
        known = self._tickets.setdefault(external, {})
        self._tickets.move_to_end(external)
        while len(self._tickets) > _REMEMBERED:
            self._tickets.popitem(last=False)
        if KEY in said:
            known[choice or 0] = said[KEY]
        if choice is None:
            return dict(said)
        return {**said, f"{KEY}_choices": {str(index): ticket for index, ticket in sorted(known.items())}}

    def tickets_of(self, external_id: str, *, prompts: int = 1) -> dict[str, str]:
        """Find the tickets of a request that ended.

        Args:
            external_id: The id that the request came with.
            prompts: How many prompts it has at least; another data-parallel rank may have had some of them.

        Returns:
            Choice -> ticket as JSON; a request of several prompts (``{id}-0``, ``{id}-1``) has them as
            ``{prompt}.{choice}``.
        """
        found = {str(choice): ticket for choice, ticket in self._tickets.get(external_id, {}).items()}
        for prompt in range(_REMEMBERED):
            several = self._tickets.get(f"{external_id}-{prompt}")
            if several is None and prompt >= prompts:
                break
            found |= {f"{prompt}.{choice}": ticket for choice, ticket in (several or {}).items()}
        return found

    # ---- the thread ---------------------------------------------------------------------------------------------

    def flush(self, *, timeout_s: float) -> bool:
        """Seal everything that ended; whether that was done in time."""
        return self._blocks.flush(timeout_s)

    def close(self, *, end: bool = True, timeout_s: float = 10.0) -> None:
        """Record what is in flight as aborted, and seal. Idempotent.

        Args:
            end: Whether to tell readers that this producer has ended. One that has not goes on when it is started
                again, and until then counts as vanished.
            timeout_s: How long to wait for the carrier.
        """
        for request_id in list(self.sequences):
            self.finish(request_id, "abort", answered=False)
        self._blocks.close(timeout_s, end=end)

    def require_health(self) -> None:
        """Raise TransportError where records were lost and the configuration says that this ends the engine."""
        if self._config.on_loss == "fail" and self._blocks.lost:
            raise TransportError(
                f"expected every record to be written, got {self._blocks.lost} lost (on_loss='fail'): "
                f"{self._blocks.trouble}",
                kind=ErrorKind.CONNECTION,
            )

    def report(self) -> EngineReport:
        """Count what was done so far."""
        blocks = self._blocks
        return EngineReport(
            skipped=self._skipped,
            pending=blocks.pending,
            lost=blocks.lost,
            reopened=blocks.reopened,
            stale_versions=self.versions.stale,
            weight_updates=self.versions.updates,
            refusals=MappingProxyType(dict(blocks.refusals)),
            coverage=Coverage(records=blocks.records, rows=MappingProxyType(dict(blocks.rows))),
        )


# ---- versions -------------------------------------------------------------------------------------------------------


class _Versions:
    """Which weights sample, as far as is known. What is not known for certain is None, never the older version."""

    def __init__(self, configured: int | None) -> None:
        self._told = configured  # by the configuration or ``set_version``: what silent requests get
        self._newest = configured  # the newest that anyone named
        self._pending: str | None = None  # "pause" or "update": weights (may) have changed, to which is not known
        self._settled_in_pause = False
        self.stale = self.updates = 0

    def begin(self, sequence: RunningSequence, others: Any) -> None:
        """Give a new sequence its version; a version that it names may tell something of the others."""
        named = sequence.options.weights_version
        if named is None:
            sequence.weights_version = self._told
        elif self._is_stale(named):
            self.stale += 1
            sequence.weights_version = None
        else:
            self._announced(named, others)
        sequence.waits_for_version = self._pending is not None

    def _is_stale(self, named: int) -> bool:
        """Whether a request names weights that were replaced: by a newer version, or by an update that was seen."""
        if self._newest is None:
            return False
        return named < self._newest or (named == self._newest and self._pending == "update")

    def _announced(self, named: int, others: Any) -> None:
        if self._pending is not None:
            self._settle(named, others)
        elif self._newest is not None and named > self._newest:
            # weights changed and no update was seen: when is not known
            self._told = None
            for sequence in others:
                sequence.weights_version, sequence.changes = None, []
        self._newest = named

    def changed(self, kind: str, sequences: Mapping[str, RunningSequence], in_flight: Mapping[str, int | None]) -> None:
        """Weights were updated, or may have been.

        Args:
            kind: ``update``, or ``pause`` where the engine only ran on after a pause.
            sequences: Those in flight.
            in_flight: By request, the tokens that were sampled and not taken yet, None where nothing was computed.
        """
        self.updates += kind == "update"
        if kind == "pause" and self._settled_in_pause:
            return
        self._told, self._settled_in_pause = None, False
        self._pending = "update" if "update" in (kind, self._pending) else kind
        for request_id, sequence in sequences.items():
            pending = in_flight.get(request_id, 0)
            sequence.waits_for_version = True
            if pending is None:
                sequence.weights_version = None
                continue
            at = sequence.num_tokens
            # tokens on their way were sampled around the update
            edges = (at,) if not pending else (at, at + pending)
            sequence.changes += [WeightsChange(token=edge, weights_version=None) for edge in edges]

    def tell(self, version: int, sequences: Mapping[str, RunningSequence], *, paused: bool) -> None:
        """The weights that run now, from the side that loaded them."""
        if self._pending is None and self._told is not None and version != self._told:
            # changed at some time before: what was sampled since is of unknown weights
            for sequence in sequences.values():
                sequence.weights_version = None
                sequence.changes = [WeightsChange(token=sequence.num_tokens, weights_version=version)]
        self._settle(version, sequences.values())
        self._told = self._newest = version
        self._settled_in_pause = paused

    def _settle(self, version: int, sequences: Any) -> None:
        """What waits for a version has it from its last change on."""
        self._pending = None
        for sequence in sequences:
            if not sequence.waits_for_version:
                continue
            sequence.waits_for_version = False
            if sequence.changes:
                last = sequence.changes[-1]
                sequence.changes[-1] = WeightsChange(token=last.token, weights_version=version)
            else:
                sequence.weights_version = version


# ---- records --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class _Job:
    """A sequence that ended. ``submitted``: when, by the monotonic clock."""

    request_id: str
    sequence: RunningSequence
    reason: str
    answered: bool
    lost_rows: bool = False
    submitted: float = field(default_factory=time.monotonic)


class _RecordBuilder:
    """Makes a call and its record of a sequence that ended."""

    def __init__(self, spec: RouteSpec, config: WriterConfig, *, mode: str, meaning: str | None) -> None:
        self._spec, self._mode = spec, {"logprobs_mode": mode}
        self._said = {} if meaning is None else {"weights_meaning": meaning}
        kept = np.float32 if config.route_weights == "float32" else np.uint16
        self._no_weights_RLK = np.empty((0, *spec.row_shape), dtype=kept)

    def __call__(self, job: _Job) -> tuple[ModelCall, RouteRecord]:
        sequence = job.sequence
        if sequence.refusal is not None:
            raise sequence.refusal
        sample_id, group = sequence.options.name_of(job.request_id)
        call = self._call(job, sample_id)
        record = record_of_call(
            call,
            self._spec,
            sample_id=sample_id,
            attempt=sequence.options.attempt,
            group=group,
            attributes={**self._said, "finish_reason": job.reason, **(self._mode if sequence.logprobs else {})},
        )
        if sequence.changes:
            prompts = {call.call_id: len(sequence.prompt_ids)}
            record = split_versions(record, {call.call_id: sequence.changes}, prompts=prompts)
        return call, record

    def _call(self, job: _Job, name: str) -> ModelCall:
        sequence = job.sequence
        rows_RDK = sequence.layers()
        loss = "lost" if job.lost_rows else _LOSS_OF.get(job.reason)
        if rows_RDK is not None:
            loss = loss_of_rows(
                len(rows_RDK),
                prompt=len(sequence.prompt_ids),
                generated=len(sequence.tokens),
                first_row=sequence.first_row,
                declared=loss,
                call=name,
            )
        elif loss is None and sequence.tokens:
            raise DataError(f"expected rows, got none @ request {job.request_id}", kind=ErrorKind.ROUTES_MISSING)
        routes_RLK, weights_RLK, first = None, self._no_weights_RLK, sequence.first_row
        if rows_RDK is not None:
            routes_RLK = rows_from_layers(ids_of(rows_RDK), self._spec, first_row=first, call=name)
        columns = {}
        if self._said:
            weights_RLK = weights_RLK if rows_RDK is None else rows_RDK["weights"][:, list(self._spec.layer_ids)]
            columns["route_weights"] = weights_column(weights_RLK, tokens=sequence.num_tokens, first_row=first)
        cached = len(sequence.prompt_ids) - 1 if sequence.cached is None else sequence.cached
        return ModelCall(
            prompt_ids=np.asarray(sequence.prompt_ids),
            generation_ids=np.asarray(sequence.tokens, dtype=np.int64),
            routes=routes_RLK,
            first_row=first,
            layer_ids=self._spec.layer_ids,
            weights_version=sequence.weights_version,
            call_id=name,
            logprobs=np.concatenate(sequence.logprobs) if sequence.logprobs else None,
            media=sequence.media,
            cached=cached_rows(cached, routes_RLK, first_row=first),
            loss=loss,
            columns=columns,
        )


# ---- blocks ---------------------------------------------------------------------------------------------------------


class _BlockThread:
    """The thread between the engine and the carrier: a bounded queue in, answers out.

    Everything that is queued while a block is being sealed goes into the next one, so that one fsync serves many; so
    does what ended in the same step as the sequence that woke the thread, and came while its record was made.
    Records of the block that is being filled are kept until it is sealed: a carrier that fails is opened again, and
    gets them again.
    """

    def __init__(
        self,
        open_blocks: Callable[[], BlockWriter],
        build: _RecordBuilder,
        config: WriterConfig,
        *,
        log: Callable[[str], None],
    ) -> None:
        self._open, self._build, self._config, self._log = open_blocks, build, config, log
        self._changed = threading.Condition()
        self._jobs: deque[_Job] = deque()
        self._queued_bytes = 0
        self._answers: deque[tuple[str, dict[str, str]]] = deque()
        self._unanswered: OrderedDict[str, _Job] = OrderedDict()
        self._unsealed: list[tuple[_Job, ModelCall, RouteRecord]] = []
        self._closing = self._closed = self._ends = self._flush_wanted = False
        self.records = self.lost = self.reopened = self.pending = 0
        self.refusals: Counter[str] = Counter()
        self.rows: Counter[str] = Counter()
        self.trouble = ""
        self._logged = (0, 0, time.monotonic())
        self._blocks: BlockWriter | None = open_blocks()
        self._thread = threading.Thread(target=self._run, name="routeplane-writer", daemon=True)
        self._thread.start()

    # ---- the engine's side ----------------------------------------------------------------------------------------

    def submit(self, job: _Job) -> None:
        """Queue a sequence that ended; where the queue is full, as the configuration says."""
        limit = self._config.queue_bytes
        with self._changed:
            if self._closed:
                self._refuse(job, refused("a writer that is open", f"a closed one @ request {job.request_id}"))
                return
            full = self._queued_bytes and self._queued_bytes + job.sequence.nbytes > limit
            if full and self._config.on_full == "lose":
                job.sequence.drop_rows()
                job = _Job(request_id=job.request_id, sequence=job.sequence, reason=job.reason, answered=job.answered,
                           lost_rows=True)  # fmt: skip
            while self._queued_bytes and self._queued_bytes + job.sequence.nbytes > limit and not self._closed:
                self._changed.wait(0.1)
            self._jobs.append(job)
            self._queued_bytes += job.sequence.nbytes
            self.pending += 1
            if job.answered:
                self._unanswered[job.request_id] = job
            self._changed.notify_all()

    def take(self, wait_s: float) -> list[tuple[str, dict[str, str]]]:
        """Take the answers that are there, and those that have waited too long."""
        if not self._answers and not self._unanswered:
            return []
        with self._changed:
            if wait_s:
                self._changed.wait_for(lambda: self._answers, wait_s)
            self._give_up_waiting()
            found = list(self._answers)
            self._answers.clear()
        return found

    def _give_up_waiting(self) -> None:
        """Answers leave without a ticket when they have waited too long; the record is still to come."""
        oldest = time.monotonic() - self._config.wait_s
        while self._unanswered:
            request_id, job = next(iter(self._unanswered.items()))
            if job.submitted > oldest:
                return
            del self._unanswered[request_id]
            sample_id, _ = job.sequence.options.name_of(request_id)
            key = f'["{sample_id}",{job.sequence.options.attempt},0]'
            self._answers.append((request_id, {f"{KEY}_pending": key}))

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything that was queued is sealed."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self._flush_wanted = True
            self._changed.notify_all()
            while self.pending and time.monotonic() < deadline:
                self._changed.wait(min(0.05, timeout_s))
            return not self.pending

    def close(self, timeout_s: float, *, end: bool) -> None:
        with self._changed:
            self._closing, self._ends = True, end
            self._changed.notify_all()
        self._thread.join(timeout_s)

    # ---- the thread's side ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            for job in self._next_jobs():
                self._write(job)
            for job in self._queued_jobs():
                self._write(job)
            if self._unsealed and (self._must_seal() or self._closing):
                self._seal()
            self._log_losses()
            if self._closing and not self._jobs and not self._unsealed:
                break
        self._end()

    def _next_jobs(self) -> list[_Job]:
        """Wait for a job, or until a block is old; take jobs up to the size of a block."""
        with self._changed:
            if not self._jobs and not self._unsealed:
                self._flush_wanted = False  # there is nothing to seal: what was asked for is done
            if not self._jobs and not self._closing and not self._flush_wanted:
                self._changed.wait(self._config.block_age_s / 4 if self._unsealed else _LOG_EVERY_S)
        return self._queued_jobs()

    def _queued_jobs(self) -> list[_Job]:
        """Take what is queued, up to the size of a block."""
        taken: list[_Job] = []
        if not self._jobs:
            return taken
        size = self._unsealed_bytes()
        with self._changed:
            while self._jobs and size < self._config.block_bytes:
                taken.append(self._jobs.popleft())
                size += taken[-1].sequence.nbytes
                self._queued_bytes -= taken[-1].sequence.nbytes
            self._changed.notify_all()
        return taken

    def _must_seal(self) -> bool:
        """Whether an answer waits, or the block is full or old."""
        if self._flush_wanted or any(job.answered for job, _, _ in self._unsealed):
            return True
        age = time.monotonic() - self._unsealed[0][0].submitted
        return self._unsealed_bytes() >= self._config.block_bytes or age >= self._config.block_age_s

    def _unsealed_bytes(self) -> int:
        return sum(record.nbytes for _, _, record in self._unsealed)

    def _write(self, job: _Job) -> None:
        try:
            call, record = self._build(job)
        except RouteplaneError as error:
            with self._changed:
                self._refuse(job, error, queued=True)
            return
        try:
            self._require_open().write(record)
        except OSError as error:
            self._unsealed.append((job, call, record))
            self._recover(error)
        except RouteplaneError as error:  # of this record: a second one of its key, ids that make its ticket too long
            with self._changed:
                self._refuse(job, error, queued=True)
        else:
            self._unsealed.append((job, call, record))

    def _require_open(self) -> BlockWriter:
        if self._blocks is None:
            raise TransportError("expected an open carrier, got one that failed", kind=ErrorKind.CONNECTION)
        return self._blocks

    def _seal(self) -> None:
        try:
            name = self._require_open().flush()
        except OSError as error:
            self._recover(error)
            return
        self._publish(name)

    def _publish(self, name: object) -> None:
        """Answer for every record of a block that is sealed."""
        said = [(job, record, self._ticket(call, record, name)) for job, call, record in self._unsealed]
        with self._changed:
            for job, record, answer in said:
                self.records += 1
                for capture in record.captures:
                    self.rows[capture.state] += capture.stop - capture.start
                self._settle(job, answer)
            self._unsealed.clear()
            self._flush_wanted = False
            self._changed.notify_all()

    def _ticket(self, call: ModelCall, record: RouteRecord, name: object) -> dict[str, str]:
        try:
            ticket = ticket_of_record(record, call, stream=f"{self._config.run}/{name}")
        except RouteplaneError as error:  # ids that make it too long; the record is there
            return {f"{KEY}_error": str(error)}
        return {KEY: ticket.to_json()}

    def _recover(self, error: Exception) -> None:
        """Open the carrier again, and write again what was not sealed; what stays out too long is lost."""
        # what waited that long already has one more try
        deadline, pause = self._unsealed[0][0].submitted + self._config.retry_s, 0.1
        self.trouble = f"{type(error).__name__}: {error}"
        self._log(f"the carrier of routes failed, opening it again: {self.trouble}")
        while True:
            self._blocks = None
            try:
                self._blocks = self._open()
                self.reopened += 1
                for _, _, record in self._unsealed:
                    self._blocks.write(record)
                name = self._blocks.flush()
            except (OSError, RouteplaneError) as again:
                self.trouble = f"{type(again).__name__}: {again}"
                if time.monotonic() >= deadline or self._closing:
                    self._blocks = None
                    self._lose()
                    return
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_S)
            else:
                self._publish(name)
                return

    def _lose(self) -> None:
        with self._changed:
            for job, _, record in self._unsealed:
                self.lost += 1
                said = f"record {tuple(record.key)} is lost: {self.trouble}"
                self._settle(job, {f"{KEY}_error": said})
            self._unsealed.clear()
            self._flush_wanted = False
            self._changed.notify_all()

    def _refuse(self, job: _Job, error: RouteplaneError, *, queued: bool = False) -> None:
        self.refusals[str(error.kind)] += 1
        if queued:
            self._settle(job, {f"{KEY}_error": str(error)})
        elif job.answered:
            self._answers.append((job.request_id, {f"{KEY}_error": str(error)}))
        self._changed.notify_all()

    def _settle(self, job: _Job, answer: dict[str, str]) -> None:
        self.pending -= 1
        # an answer that waited too long has left
        if self._unanswered.pop(job.request_id, None) is not None:
            self._answers.append((job.request_id, answer))

    def _log_losses(self) -> None:
        lost, refused_, since = self._logged
        if time.monotonic() - since < _LOG_EVERY_S:
            return
        now = (self.lost, sum(self.refusals.values()), time.monotonic())
        self._logged = now
        if now[:2] != (lost, refused_) or self.trouble:
            self._log(
                f"routes: {self.records} records written, {now[0]} lost, {now[1]} refused {dict(self.refusals)}, "
                f"{self.pending} pending{', last trouble: ' + self.trouble if self.trouble else ''}"
            )
            self.trouble = ""

    def _end(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        blocks, self._blocks = self._blocks, None  # what is not ended is free for the next writer of this name
        if blocks is not None and self._ends:
            try:
                blocks.close()
            except (OSError, RouteplaneError) as error:
                self._log(f"the carrier of routes did not close: {type(error).__name__}: {error}")


def open_carrier(config: WriterConfig, spec: RouteSpec, *, producer: str) -> BlockWriter:
    """Open the place that a configuration names.

    Args:
        config: Names the carrier by its dotted name.
        spec: The geometry of the records.
        producer: The name to write under.

    Returns:
        What the carrier opened, which the caller closes. Raises UsageError where the name is not that of a function,
        and what the carrier raises.
    """
    module, _, attribute = config.carrier.rpartition(".")
    try:
        factory: Callable[..., BlockWriter] | None = getattr(import_module(module), attribute, None)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        factory = None
    if not callable(factory):
        raise refused("carrier as the dotted name of a function", repr(config.carrier))
    options = dict(config.options)
    limits = getattr(import_module(module), "BlockLimits", None)
    if limits is not None:
        # blocks are sealed here, where it is known who waits; the carrier only keeps its bound
        chosen = limits(**{**dict(config.limits), "block_bytes": 1})
        options["limits"] = replace(chosen, block_bytes=chosen.max_bytes)
    elif config.limits:
        raise refused(f"no limits, which {config.carrier} does not have", repr(dict(config.limits)))
    return factory(config.place, spec, run=config.run, producer=producer, **options)
