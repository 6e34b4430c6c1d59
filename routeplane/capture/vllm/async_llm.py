"""A thin wrapper around vLLM's ``AsyncLLM`` in a rollout worker: requests go in, records go into a route stream.

Rows come with a sequence's last output. Records are assembled and written in a thread of the wrapper's own, so that the
event loop goes on; a stream that is full makes ``generate`` and ``turn`` wait, hence whatever loop calls them. A
conversation asks the engine for the rows that it lacks and no others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import numpy as np
from vllm import RequestOutput, SamplingParams
from vllm.sampling_params import RequestOutputKind

from routeplane.capture.recorder import RouteRecorder, WeightsChange
from routeplane.capture.vllm.interface import captures_routes, model_config_of, spec_from_vllm
from routeplane.capture.vllm.outputs import OutputOptions, calls
from routeplane.errors import CaptureError, ErrorKind, refused
from routeplane.record.counts import Counts, rule
from routeplane.record.spans import Coverage

if TYPE_CHECKING:
    from types import TracebackType

    from routeplane.record.assembly import Assembly
    from routeplane.record.calls import ModelCall
    from routeplane.record.interfaces import RouteSink
    from routeplane.record.record import RouteRecord
    from routeplane.record.spec import RouteSpec

__all__ = ["Answer", "Conversation", "RouteWritingEngine", "WritingReport"]

# vLLM's own pause waits so long for outputs on their way through its tasks (async_llm.py, pause_generation).
_TRANSIT_SECONDS = 0.02


@dataclass(frozen=True, kw_only=True, slots=True)
class WritingReport(Counts):
    """What a RouteWritingEngine did so far.

    Args:
        calls: Requests that ended, each choice counted.
        records: Records written.
        rows_received: Rows that crossed from the engine, each counted each time; a row is one token in all layers.
        waits: Requests that were held back while the stream was full.
        overlap_rows: Rows captured twice and compared; one token in one layer.
        drift_rows: Of these, rows that differ as sets.
        weight_updates: Updates of weights.
        coverage: Of the records written.

    >>> WritingReport(calls=2).merge(WritingReport(calls=1)).scalars()["routeplane/writing_calls"]
    3.0
    """

    SCOPE: ClassVar[str] = "writing_"
    calls: int = 0
    records: int = field(default=0, metadata=rule(scalar=None))  # stands in the coverage's scalars
    rows_received: int = 0
    waits: int = 0
    overlap_rows: int = 0
    drift_rows: int = 0
    weight_updates: int = 0
    coverage: Coverage = field(default_factory=Coverage)


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What one request brought: vLLM's output of the whole, and its calls, one per choice.

    Example, inside a coroutine with a RouteWritingEngine::

        answer = await engine.generate([1, 2, 3], SamplingParams(max_tokens=8), sample_id="a")
        answer.token_ids, answer.calls[0].routes.shape
    """

    output: RequestOutput
    calls: tuple[ModelCall, ...]

    @property
    def token_ids(self) -> list[int]:
        """The generated tokens of the first choice."""
        return list(self.output.outputs[0].token_ids)


class _Flight:
    """A request on its way: tokens seen so far and weights that changed, by choice."""

    def __init__(self, prompt: int, weights_version: int | None, choices: int) -> None:
        self.prompt = prompt
        self.weights_version = weights_version
        self.seen = [0] * choices
        self.changes: list[list[WeightsChange]] = [[] for _ in range(choices)]

    def change(self, weights_version: int | None, seen: Sequence[int]) -> None:
        for changes, tokens in zip(self.changes, seen, strict=True):
            changes.append(WeightsChange(token=self.prompt + tokens, weights_version=weights_version))


class RouteWritingEngine:
    """An ``AsyncLLM`` whose finished sequences become records of a stream.

    ``engine``: started with ``enable_return_routed_experts=True``; stays the caller's to shut down. ``sink``: any
    RouteSink; ``close`` (or leaving ``async with``) ends it. ``weights_version``: of the weights that run now.
    ``max_waiting``: finished sequences that may wait for the stream before new requests are held back. ``spec``: None
    takes the engine's. Belongs to one event loop.

    Raises CaptureError where the engine does not capture, SpecError where the sink is of another geometry.

    >>> async def one_answer():
    ...     async with RouteWritingEngine(engine, sink, weights_version=12) as writer:
    ...         answer = await writer.generate([10, 11, 12], sampling, sample_id="prompt-7")
    ...     return len(answer.token_ids), writer.report().records
    >>> run(one_answer())
    (12, 1)
    """

    def __init__(
        self,
        engine: Any,
        sink: RouteSink,
        *,
        spec: RouteSpec | None = None,
        weights_version: int | None = 0,
        max_waiting: int = 8,
    ) -> None:
        if not captures_routes(engine):
            raise CaptureError(
                "expected an engine with enable_return_routed_experts=True, got one without", kind=ErrorKind.CAPTURE_OFF
            )
        if max_waiting < 1:
            raise refused("max_waiting of at least 1", repr(max_waiting))
        self._spec = spec_from_vllm(engine) if spec is None else spec
        sink.spec.require_same_geometry(self._spec, where="the sink")
        self._engine, self._sink = engine, sink
        self._logprobs_mode: str = model_config_of(engine).logprobs_mode
        self._version = weights_version
        self._flights: set[_Flight] = set()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="routeplane-writer")
        self._capacity = asyncio.Semaphore(max_waiting)
        self._report = WritingReport()

    @property
    def spec(self) -> RouteSpec:
        """The geometry of the records."""
        return self._sink.spec

    @property
    def weights_version(self) -> int | None:
        """Of the weights that run now; None while they are being changed under a running engine."""
        return self._version

    def report(self) -> WritingReport:
        """What was done so far."""
        return self._report

    # ---- requests -------------------------------------------------------------------------------------------------

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        sample_id: str,
        attempt: int = 0,
        group: str | None = None,
        media: Sequence[str] = (),
    ) -> Answer:
        """One request, and a record of each of its choices in the stream by the time this returns.

        Several choices are ``{sample_id}/{index}`` and share ``group``, by default ``sample_id``. Waits while the
        stream is full, without blocking the event loop. Errors as in ``calls``, and the sink's.
        """
        answer, changes = await self._ask(
            prompt_ids, sampling, call_id=f"{sample_id}/{attempt}", first_row=0, media=media
        )
        several = len(answer.calls) > 1
        for index, call in enumerate(answer.calls):
            recorder = RouteRecorder(
                self._spec,
                sample_id=f"{sample_id}/{index}" if several else sample_id,
                attempt=attempt,
                group=group if group is not None or not several else sample_id,
            )
            recorder.add_call(call, changes=changes[index])
            await self._write(recorder)
        return answer

    def conversation(
        self,
        sample_id: str,
        *,
        attempt: int = 0,
        group: str | None = None,
        overlap: Literal["keep_first", "keep_last"] = "keep_first",
        on_break: Literal["raise", "split"] = "raise",
    ) -> Conversation:
        """Several requests of one sample, joined into one record per unbroken context; policies as in ``assemble``."""
        return Conversation(
            self, sample_id, options={"attempt": attempt, "group": group, "overlap": overlap, "on_break": on_break}
        )

    async def abort(self, sample_id: str, *, attempt: int = 0) -> None:
        """End a sample's request early; its ``generate`` or ``turn`` returns with the tokens and rows so far."""
        await self._engine.abort(f"{sample_id}/{attempt}")

    async def _ask(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        call_id: str,
        first_row: int,
        media: Sequence[str],
        number: int | None = None,
    ) -> tuple[Answer, list[list[WeightsChange]]]:
        # CUMULATIVE: its outputs lose nothing where they are merged (DELTA loses the rows, up to 0.30), and the count
        # of tokens says where weights changed.
        params = copy(sampling)
        params.output_kind, params.routed_experts_prompt_start = RequestOutputKind.CUMULATIVE, first_row
        if self._capacity.locked():
            self._count(WritingReport(waits=1))
        async with self._capacity:
            pass
        flight = _Flight(len(prompt_ids), self._version, params.n)
        self._flights.add(flight)
        choices: dict[int, Any] = {}
        output: Any = None
        try:
            prompt = {"prompt_token_ids": [int(token) for token in prompt_ids]}
            async for output in self._engine.generate(prompt, params, call_id):
                for choice in output.outputs:
                    choices[choice.index] = choice
                    flight.seen[choice.index] = len(choice.token_ids)
        finally:
            self._flights.discard(flight)
        whole = copy(output)
        whole.outputs = [choices[index] for index in sorted(choices)]
        made = calls(
            whole,
            self._spec,
            weights_version=flight.weights_version,
            call_id=call_id if number is None else f"{call_id}/{number}",
            options=OutputOptions(first_row=first_row, logprobs_mode=self._logprobs_mode, media=tuple(media)),
        )
        rows = sum(0 if call.routes is None else len(call.routes) for call in made)
        self._count(WritingReport(calls=len(made), rows_received=rows))
        return Answer(output=whole, calls=made), flight.changes

    # ---- the stream -----------------------------------------------------------------------------------------------

    async def _write(self, recorder: RouteRecorder) -> tuple[RouteRecord, ...]:
        """Assemble and write in the writer's thread; new requests are held back while too many wait here."""
        mode = self._logprobs_mode.removesuffix("_logprobs")
        async with self._capacity:
            loop = asyncio.get_running_loop()
            made = await loop.run_in_executor(self._thread, _assemble_and_write, recorder, self._sink, mode)
        coverage = Coverage()
        for record in made.records:
            coverage = coverage.merge(record.coverage())
        counts = made.report
        self._count(
            WritingReport(
                records=len(made.records),
                overlap_rows=counts.overlap_rows,
                drift_rows=counts.drift_rows,
                coverage=coverage,
            )
        )
        return made.records

    def _count(self, found: WritingReport) -> None:
        self._report = self._report.merge(found)

    async def close(self) -> None:
        """Write the trailer and publish; idempotent. The engine stays open."""
        await asyncio.get_running_loop().run_in_executor(None, self._end, self._sink.close)

    async def discard(self) -> None:
        """Publish nothing; idempotent. The engine stays open."""
        await asyncio.get_running_loop().run_in_executor(None, self._end, self._sink.abort)

    def _end(self, how: Callable[[], None]) -> None:
        self._thread.shutdown(wait=True)
        how()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await (self.close() if kind is None else self.discard())

    # ---- weights --------------------------------------------------------------------------------------------------

    async def update_weights(
        self, apply: Callable[[], Awaitable[object]], *, weights_version: int, pause: bool = True
    ) -> None:
        """Run ``apply``, which loads new weights into the engine; sequences in flight go on under both versions.

        ``pause``: freeze them meanwhile, so that their spans are cut at the very token; without it, tokens that were
        sampled while weights changed are of an unknown version (null). The prefix cache is emptied where no sequence
        holds it; rows from it are of an unknown version anyhow. Rows that a sequence has already stay as they are.
        Where ``apply`` raises, the engine goes on under an unknown version.
        """
        if pause:
            await self._engine.pause_generation(mode="keep", clear_cache=False)
        before = {flight: tuple(flight.seen) for flight in self._flights}
        known: int | None = None  # should apply fail, it is unknown what runs
        self._version = None
        try:
            await apply()
            known = weights_version
        finally:
            await self._engine.reset_prefix_cache()
            if not pause:
                await self._engine.is_paused()  # answered after every output that was sampled before
                await asyncio.sleep(_TRANSIT_SECONDS)
            for flight in self._flights:
                if not pause:
                    flight.change(None, before.get(flight, (0,) * len(flight.seen)))
                flight.change(known, flight.seen)
            self._version = known
            if pause:
                await self._engine.resume_generation()
        self._count(WritingReport(weight_updates=1))


class Conversation:
    """One sample's turns, made by a RouteWritingEngine. Each asks the engine only for rows that no turn before
    brought.

    Example, inside a coroutine with a RouteWritingEngine::

        chat = engine.conversation("sample-0")
        answer = await chat.turn([1, 2, 3], SamplingParams(max_tokens=8))
        await chat.turn([1, 2, 3, *answer.token_ids, 9], SamplingParams(max_tokens=8))
    """

    def __init__(self, engine: RouteWritingEngine, sample_id: str, *, options: dict[str, Any]) -> None:
        self._engine = engine
        self._id = f"{sample_id}/{options['attempt']}"
        self._options = {"sample_id": sample_id, **options}
        self._recorder = RouteRecorder(engine.spec, **self._options)

    async def turn(self, prompt_ids: Sequence[int], sampling: SamplingParams, *, media: Sequence[str] = ()) -> Answer:
        """The next request: ``prompt_ids`` is the whole context, as the engine is fed it; one choice.

        Raises UsageError for several choices, else as ``RouteWritingEngine.generate``.
        """
        if sampling.n != 1:
            raise refused("one choice per turn", f"n={sampling.n}")
        answer, changes = await self._engine._ask(
            prompt_ids,
            sampling,
            call_id=self._id,
            first_row=self._recorder.next_row(np.asarray(prompt_ids), media=media),
            media=media,
            number=len(self._recorder.calls),
        )
        self._recorder.add_call(answer.calls[0], changes=changes[0])
        return answer

    async def finish(self) -> tuple[RouteRecord, ...]:
        """Write the records, one per unbroken context, and return them. Waits while the stream is full."""
        return await self._engine._write(self._recorder)


def _assemble_and_write(recorder: RouteRecorder, sink: RouteSink, mode: str) -> Assembly:
    scored = any(call.logprobs is not None for call in recorder.calls)
    made = recorder.assembly(attributes={"logprobs_mode": mode} if scored else None)
    for record in made.records:
        sink.write(record)
    return made
