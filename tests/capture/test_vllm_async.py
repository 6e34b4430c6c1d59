"""RouteWritingEngine around a real ``AsyncLLM``, whose engine runs in a process of its own.

One engine for the module, since it takes long to start. The reference is a Transformers forward of the same weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from vllm.sampling_params import RequestOutputKind

from routeplane.capture import vllm as capture
from routeplane.capture.vllm import (
    OutputOptions,
    RouteWritingEngine,
    async_llm,
    merge_deltas,
    probe_async,
    spec_from_vllm,
)
from routeplane.errors import CaptureError, DataError, ErrorKind, SpecError, UsageError
from routeplane.record.record import RouteRecord
from routeplane.record.spec import RouteSpec
from routeplane.stream import MemoryStream, new_stream, open_stream
from tests.capture.async_engine import AsyncEngine, running_async_engine, sampling
from tests.capture.vllm_engine import LONG, SHORT, SPEC, assert_equals_reference, states
from tests.meta.test_doctests import run_examples

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncEngine]:
    """One engine for all tests here."""
    with running_async_engine(tmp_path_factory.mktemp("qwen3_moe")) as running:
        yield running


@dataclass(kw_only=True)
class WriterFixture:
    """A writer, and a stream in memory that holds what it wrote."""

    writer: RouteWritingEngine
    stream: MemoryStream
    records: list[RouteRecord] = field(default_factory=list)

    async def until(self, tokens: int) -> None:
        """Wait until the only request in flight has so many tokens."""
        while not self.writer._flights or next(iter(self.writer._flights)).seen[0] < tokens:
            await asyncio.sleep(0)


@asynccontextmanager
async def open_writer(engine: AsyncEngine, **options: Any) -> AsyncIterator[WriterFixture]:
    """A writer into memory; its records are there when it is closed."""
    stream = MemoryStream()
    made = WriterFixture(writer=RouteWritingEngine(engine.llm, new_stream(stream, SPEC), **options), stream=stream)
    async with made.writer:
        yield made
    with open_stream(stream) as source:
        made.records += list(source)


def spans(record: RouteRecord) -> list[tuple[int, int | None]]:
    """``(stop, weights_version)`` of each span."""
    return [(span.stop, span.weights_version) for span in record.spans]


# ----------------------------------------------------------------------------------------------------------------------
# Requests
# ----------------------------------------------------------------------------------------------------------------------


def test_each_request_is_a_record_by_the_time_it_returns(engine: AsyncEngine) -> None:
    """Concurrent requests, one with two choices: rows, names, groups and versions are each their own."""

    async def job() -> WriterFixture:
        async with open_writer(engine, weights_version=3) as made:
            await asyncio.gather(
                made.writer.generate(SHORT, sampling(), sample_id="a"),
                made.writer.generate(LONG, sampling(max_tokens=20), sample_id="b", attempt=1, group="g"),
                made.writer.generate(SHORT[:4], sampling(n=2), sample_id="c"),
                made.writer.generate(SHORT, sampling(max_tokens=1, logprobs=None), sample_id="d"),
            )
            assert 5 == made.writer.report().records
        return made

    made = engine.run(job())
    records = {record.sample_id: record for record in made.records}

    assert [("a", 0, None), ("b", 1, "g"), ("c/0", 0, "c"), ("c/1", 0, "c"), ("d", 0, None)] == sorted(
        (record.sample_id, record.attempt, record.group) for record in made.records
    )
    for record in made.records:
        assert_equals_reference(record, engine.model)
    assert [(0, 21, "captured", 3), (21, 22, "not_fed", None)] == states(records["a"])
    assert ({"logprobs_mode": "raw"}, {}) == (dict(records["a"].attributes), dict(records["d"].attributes))


def test_a_conversation_moves_each_row_once(engine: AsyncEngine) -> None:
    """Thirty turns: as many rows cross as the conversation has fed tokens, and the record is whole."""

    async def job() -> tuple[WriterFixture, int]:
        async with open_writer(engine, weights_version=1) as made:
            talk = made.writer.conversation("c", group="g")
            context = list(SHORT)
            for turn in range(30):
                answer = await talk.turn(context, sampling(max_tokens=3, seed=turn))
                context += [*answer.token_ids, 40 + turn, 41 + turn]
            await talk.finish()
            return made, made.writer.report().rows_received

    made, moved = engine.run(job())
    [record] = made.records

    assert (record.num_tokens - 1, ("c", 0, 0), "g") == (moved, record.key, record.group)
    assert record.num_tokens - 1 == record.coverage().count("captured")
    assert 0 == made.writer.report().overlap_rows
    assert_equals_reference(record, engine.model)


def test_a_context_break_is_a_segment_by_choice(engine: AsyncEngine) -> None:
    """A turn that drops earlier tokens starts a segment with rows from its first token on, or is refused."""

    async def job(on_break: Any) -> WriterFixture:
        async with open_writer(engine) as made:
            talk = made.writer.conversation("c", on_break=on_break)
            await talk.turn(LONG, sampling(max_tokens=3))
            await talk.turn(SHORT, sampling(max_tokens=3))
            await talk.finish()
        return made

    made = engine.run(job("split"))

    assert [("c", 0, 0), ("c", 0, 1)] == [record.key for record in made.records]
    for record in made.records:
        assert_equals_reference(record, engine.model)
    with pytest.raises(DataError) as caught:
        engine.run(job("raise"))
    assert ErrorKind.CONTEXT_BREAK == caught.value.kind


def test_an_abort_returns_what_there_is(engine: AsyncEngine) -> None:
    """``abort`` ends a request early: its record has the tokens so far and a row for each one fed."""

    async def job() -> tuple[WriterFixture, Any]:
        async with open_writer(engine, weights_version=1) as made:
            task = asyncio.create_task(made.writer.generate(SHORT, sampling(max_tokens=200), sample_id="a"))
            await made.until(5)
            await made.writer.abort("a")
            return made, await task

    made, answer = engine.run(job())
    [record] = made.records

    assert "abort" == answer.output.outputs[0].finish_reason
    assert len(SHORT) + 5 <= record.num_tokens < len(SHORT) + 200
    assert_equals_reference(record, engine.model)


# ----------------------------------------------------------------------------------------------------------------------
# Weights that change
# ----------------------------------------------------------------------------------------------------------------------


def test_an_update_cuts_the_sequence_in_flight_at_its_token(engine: AsyncEngine) -> None:
    """Paused for the update: old version up to the token where it stopped, the new one after; never a gap."""

    async def job() -> WriterFixture:
        async with open_writer(engine, weights_version=1) as made:
            task = asyncio.create_task(made.writer.generate(SHORT, sampling(max_tokens=150), sample_id="a"))
            await made.until(10)
            await made.writer.update_weights(engine.llm.is_paused, weights_version=2)
            await task
            await made.writer.generate(SHORT, sampling(), sample_id="b")
            assert (2, 1) == (made.writer.weights_version, made.writer.report().weight_updates)
        return made

    made = engine.run(job())
    first, second = made.records
    (prompt, _), (edge, old), (stop, new) = spans(first)

    assert (10, 1, 160, 2) == (prompt, old, stop, new)
    assert 20 <= edge < 160
    assert [(0, edge - 1, "captured", 1), (edge - 1, 159, "captured", 2), (159, 160, "not_fed", None)] == states(first)
    assert [(10, None), (22, 2)] == spans(second)
    assert_equals_reference(first, engine.model)


def test_an_update_without_a_pause_leaves_tokens_of_unknown_weights(engine: AsyncEngine) -> None:
    """Between the old and the new version stand tokens of neither, as many as came meanwhile."""

    async def job() -> WriterFixture:
        async with open_writer(engine, weights_version=1) as made:
            task = asyncio.create_task(made.writer.generate(SHORT, sampling(max_tokens=200), sample_id="a"))
            await made.until(10)
            await made.writer.update_weights(engine.llm.is_paused, weights_version=2, pause=False)
            await task
        return made

    [record] = engine.run(job()).records

    assert [None, 1, None, 2] == [version for _, version in spans(record)]
    assert [1, None, 2, None] == [version for _, _, _, version in states(record)]
    assert_equals_reference(record, engine.model)


def test_an_update_that_fails_leaves_the_version_unknown(engine: AsyncEngine) -> None:
    """The engine goes on, the error is the caller's, and the weights are unknown."""

    async def fail() -> None:
        raise OSError("no such checkpoint")

    async def job() -> WriterFixture:
        async with open_writer(engine, weights_version=1) as made:
            with pytest.raises(OSError, match="no such checkpoint"):
                await made.writer.update_weights(fail, weights_version=2)
            await made.writer.generate(SHORT, sampling(), sample_id="b")
        return made

    [record] = engine.run(job()).records

    assert [(10, None), (22, None)] == spans(record)


# ----------------------------------------------------------------------------------------------------------------------
# Backpressure
# ----------------------------------------------------------------------------------------------------------------------


def test_a_full_stream_holds_back_the_generation_loop(engine: AsyncEngine) -> None:
    """While no reader reads, finished requests wait for the stream and no new one starts; reading lets all through."""

    async def job() -> tuple[list[str], Any, int]:
        stream = MemoryStream()
        sink = new_stream(stream, SPEC, max_bytes=1)  # one record is let in, the next one waits
        writer = RouteWritingEngine(engine.llm, sink, max_waiting=1)
        tasks = [
            asyncio.create_task(writer.generate(SHORT, sampling(max_tokens=2), sample_id=f"s{index}"))
            for index in range(2)
        ]
        while not writer._capacity.locked() or writer.report().calls < 2 or writer.report().records < 1:
            await asyncio.sleep(0)
        late = asyncio.create_task(writer.generate(SHORT, sampling(max_tokens=2), sample_id="late"))
        for _ in range(3):
            await engine.llm.is_paused()  # the engine would have had time
        held = (writer.report().calls, late.done(), all(task.done() for task in tasks))
        names = asyncio.create_task(asyncio.to_thread(read_names, stream))
        await asyncio.gather(*tasks, late)
        await writer.close()
        assert (2, False, False) == held
        return await names, writer.report(), writer.report().waits

    names, report, waits = engine.run(job())

    assert {"s0", "s1", "late"} == set(names)
    assert (3, 1) == (report.records, waits)


def read_names(stream: MemoryStream) -> list[str]:
    """Read to the end in a thread of its own."""
    with open_stream(stream) as source:
        return [record.sample_id for record in source]


# ----------------------------------------------------------------------------------------------------------------------
# DELTA outputs, merged for a slow reader
# ----------------------------------------------------------------------------------------------------------------------


async def slow_reader(engine: AsyncEngine, prompt: Sequence[int]) -> list[Any]:
    """A stream of which the rest is read when a request of twice its length has ended: the rest comes as one."""
    stream = engine.llm.generate(
        {"prompt_token_ids": list(prompt)}, sampling(output_kind=RequestOutputKind.DELTA), "slow"
    )
    outputs = [await anext(stream)]
    kind = RequestOutputKind.FINAL_ONLY
    whole = engine.llm.generate({"prompt_token_ids": SHORT}, sampling(max_tokens=40, output_kind=kind), "waited")
    assert 1 == len([output async for output in whole])
    return outputs + [output async for output in stream]


def test_rows_lost_in_merged_deltas_are_marked(engine: AsyncEngine) -> None:
    """vLLM up to 0.30 loses the array: refused as it is, lost where capture is known to be on; tokens are whole."""
    outputs = engine.run(slow_reader(engine, LONG))
    whole = merge_deltas(outputs)

    assert len(outputs) < 12
    assert 12 == len(whole.outputs[0].token_ids)
    assert whole.outputs[0].routed_experts is None
    with pytest.raises(CaptureError) as caught:
        capture.records(whole, SPEC)
    assert ErrorKind.CAPTURE_OFF == caught.value.kind
    [record] = capture.records(whole, SPEC, weights_version=1, options=OutputOptions(absent="lost"))
    assert [(0, 86, "lost", None), (86, 87, "not_fed", None)] == states(record)
    assert (86, 1.0) == (record.coverage().count("lost"), record.coverage().missing_share)


def test_deltas_that_are_read_in_time_keep_their_rows(engine: AsyncEngine) -> None:
    """A reader that keeps up has the routes in the last output, and the merged whole has them too."""

    async def job() -> list[Any]:
        options = sampling(output_kind=RequestOutputKind.DELTA)
        return [one async for one in engine.llm.generate({"prompt_token_ids": SHORT}, options, "quick")]

    # on a busy machine even this reader falls behind at times
    runs = (engine.run(job()) for _ in range(50))
    outputs = next(run for run in runs if len(run) > 1 and run[-1].outputs[0].routed_experts is not None)
    [record] = capture.records(merge_deltas(outputs), SPEC)

    assert len(outputs) > 1
    assert record.logprobs is not None
    assert_equals_reference(record, engine.model)
    with pytest.raises(UsageError):
        merge_deltas([])
    with pytest.raises(DataError, match="DELTA"):
        capture.calls(outputs[-1], SPEC, weights_version=None)


# ----------------------------------------------------------------------------------------------------------------------
# Start-up
# ----------------------------------------------------------------------------------------------------------------------


def test_the_probe_sees_rows(engine: AsyncEngine) -> None:
    """In float32 all rows agree."""
    report = engine.run(probe_async(engine.llm, spec_from_vllm(engine.llm)))

    assert 1.0 == report.agreement


def test_what_cannot_work_is_refused_at_once(engine: AsyncEngine) -> None:
    """A sink of another geometry, no capacity at all, and several choices in a turn."""
    other = RouteSpec(num_experts=16, top_k=4, layer_ids=(0, 1, 2), model="other")

    async def job() -> None:
        with pytest.raises(SpecError) as mismatch:
            RouteWritingEngine(engine.llm, new_stream(MemoryStream(), other))
        assert ErrorKind.SPEC_MISMATCH == mismatch.value.kind
        with pytest.raises(UsageError):
            RouteWritingEngine(engine.llm, new_stream(MemoryStream(), SPEC), max_waiting=0)
        with pytest.raises(CaptureError):
            RouteWritingEngine(object(), new_stream(MemoryStream(), SPEC))
        async with open_writer(engine) as made:
            with pytest.raises(UsageError):
                await made.writer.conversation("c").turn(SHORT, sampling(n=2))

    engine.run(job())


def test_the_examples_of_the_file_run(engine: AsyncEngine) -> None:
    """What its docstrings show is what happens, with an engine, a sink and sampling parameters at hand."""
    given = {"engine": engine.llm, "sink": new_stream(MemoryStream(), SPEC), "sampling": sampling(), "run": engine.run}

    count, failures = run_examples(async_llm, async_llm.__name__, given)
    assert ([], True) == (failures, count > 0)
