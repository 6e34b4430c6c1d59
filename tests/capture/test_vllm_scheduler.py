"""The writer inside the real engine, in this process, against a Transformers forward of the same weights.

Each record is a stream of its own (``records_per_stream=1``), so that it can be read while the engine runs.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm import RequestOutput, SamplingParams
from vllm.v1.core.sched.interface import PauseState

from routeplane.capture.vllm import RouteScheduler, probe, request_args, start_engine
from routeplane.errors import CaptureError, ErrorKind, RouteplaneError, UsageError
from routeplane.record.calls import ModelCall
from routeplane.record.interfaces import RouteTicket
from routeplane.record.record import RouteRecord
from routeplane.stream import open_stream
from tests.capture.vllm_engine import (
    LONG,
    SHORT,
    SPEC,
    Engine,
    assert_equals_reference,
    running_engine,
    states,
)

pytestmark = pytest.mark.vllm

SCHEDULER = "routeplane.capture.vllm.RouteScheduler"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Writing:
    """A running engine that writes, and the folder of its streams."""

    engine: Engine
    folder: Path

    @property
    def scheduler(self) -> Any:
        """The engine's scheduler, which lives in this process."""
        return self.engine.llm.llm_engine.engine_core.engine_core.scheduler

    def ask(self, *prompts: list[int], shipping: dict[str, Any], **sampling: Any) -> list[RequestOutput]:
        """Generate, with what the writer is told."""
        return self.engine.ask(*prompts, extra_args=request_args(**shipping), **sampling)

    def streams(self) -> list[Path]:
        """The streams that are whole, in order."""
        return sorted(self.folder.glob("*.arrows"))

    def newest(self, count: int = 1) -> list[RouteRecord]:
        """The last records, each read from a stream of its own."""
        return [record for path in self.streams()[-count:] for record in open_stream(path)]


def writer_options(folder: Path, **changes: Any) -> dict[str, Any]:
    """Engine options with a writer whose every record is a stream of its own."""
    config = {
        "sink": "routeplane.stream.new_stream",
        "target": str(folder / "r{rank}-{index}.arrows"),
        "options": {"encoding": "auto"},
        "records_per_stream": 1,
        **changes,
    }
    return {"scheduler_cls": SCHEDULER, "additional_config": {"routeplane": config}}


@pytest.fixture(scope="module")
def writing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Writing]:
    """One engine for all tests here."""
    folder = tmp_path_factory.mktemp("streams")
    with running_engine(tmp_path_factory.mktemp("qwen3_moe"), **writer_options(folder)) as engine:
        yield Writing(engine=engine, folder=folder)


def ticket_of(output: RequestOutput) -> RouteTicket:
    """The ticket in an answer."""
    return RouteTicket.from_json(output.kv_transfer_params["routeplane"])


# ----------------------------------------------------------------------------------------------------------------------
# What is written
# ----------------------------------------------------------------------------------------------------------------------


def test_a_sequence_is_a_record_and_its_answer_a_ticket(writing: Writing) -> None:
    """Rows, log-probabilities and versions are in the stream; the answer has none of them, and says where they are."""
    [output] = writing.ask(SHORT, shipping={"sample_id": "a", "attempt": 2, "group": "g", "weights_version": 5})
    [record] = writing.newest()
    ticket = ticket_of(output)

    assert output.outputs[0].routed_experts is None
    assert [*SHORT, *output.outputs[0].token_ids] == record.token_ids.tolist()
    assert_equals_reference(record, writing.engine.model)
    assert [(0, 21, "captured", 5), (21, 22, "not_fed", None)] == states(record)
    assert record.logprobs is not None
    sampled = [
        position[token].logprob
        for position, token in zip(output.outputs[0].logprobs, output.outputs[0].token_ids, strict=True)
    ]
    assert sampled == pytest.approx(record.logprobs[len(SHORT) :].tolist(), rel=1e-6)
    assert {"finish_reason": "length", "logprobs_mode": "raw"} == dict(record.attributes)
    assert ("a", 2, 0) == ticket.key == record.key
    assert (0, 21, str(writing.streams()[-1])) == (ticket.start, ticket.stop, ticket.stream)
    # the checksum is the call's, made again from what the record holds
    prompt = len(SHORT)
    call = ModelCall(
        prompt_ids=record.token_ids[:prompt],
        generation_ids=record.token_ids[prompt:],
        routes=record.routes[:21],
        layer_ids=SPEC.layer_ids,
        weights_version=5,
        call_id=ticket.call_id,
        logprobs=record.logprobs[prompt:],
    )
    assert call.checksum == ticket.checksum


def test_concurrent_sequences_keep_their_rows_apart(writing: Writing) -> None:
    """Sixteen sequences of different lengths in one batch: every record is its own sequence's."""
    prompts = [LONG[at : at + 5 + at] for at in range(16)]
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    params = [
        SamplingParams(
            max_tokens=6 + index,
            temperature=1.0,
            seed=index,
            ignore_eos=True,
            detokenize=False,
            extra_args=request_args(sample_id=f"many-{index}"),
        )
        for index in range(len(prompts))
    ]
    outputs = writing.engine.llm.generate(inputs, params, use_tqdm=False)
    records = {record.sample_id: record for record in writing.newest(16)}

    for index, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        record = records[f"many-{index}"]
        assert [*prompt, *output.outputs[0].token_ids] == record.token_ids.tolist()
        assert_equals_reference(record, writing.engine.model)
        assert record.logprobs is None


def test_choices_are_samples_of_a_group(writing: Writing) -> None:
    """With ``choices`` told, each of several sequences has its index in its name."""
    [output] = writing.ask(SHORT, shipping={"sample_id": "c", "choices": 2}, n=2)
    records = {record.sample_id: record for record in writing.newest(2)}

    assert {"c/0", "c/1"} == set(records)
    for choice in output.outputs:
        record = records[f"c/{choice.index}"]
        assert ("c", [*SHORT, *choice.token_ids]) == (record.group, record.token_ids.tolist())
        assert_equals_reference(record, writing.engine.model)


def test_requests_that_ask_for_nothing_ship_nothing(writing: Writing) -> None:
    """Judge traffic brings neither record nor rows, and is counted; a probe's rows stay in its answer."""
    before, report = writing.streams(), writing.scheduler.routes_report()
    [judged] = writing.ask(SHORT, shipping={"capture": False})
    [inline] = writing.ask(SHORT, shipping={"inline": True})

    assert (None, None) == (judged.outputs[0].routed_experts, judged.kv_transfer_params)
    assert (21, 4, 4) == inline.outputs[0].routed_experts.shape
    assert before == writing.streams()
    assert report.skipped + 1 == writing.scheduler.routes_report().skipped
    assert set() == writing.scheduler._writer.inline
    assert 1.0 == probe(writing.engine.llm, SPEC).agreement


def test_who_says_nothing_is_recorded_under_the_engines_id(writing: Writing) -> None:
    """Without extra arguments a sequence has the engine's request id, which is unique."""
    output = writing.engine.ask(SHORT)[0]
    [record] = writing.newest()

    assert record.sample_id == ticket_of(output).key.sample_id
    assert record.sample_id.startswith(output.request_id)
    assert_equals_reference(record, writing.engine.model)


def test_a_shared_prefix_is_cached_inside_the_engine_too(writing: Writing) -> None:
    """Rows from the prefix cache are there, right, and of unknown weights."""
    writing.engine.llm.reset_prefix_cache()
    writing.ask(LONG, shipping={"sample_id": "p0"})
    writing.ask([*LONG[:70], 400, 401], shipping={"sample_id": "p1", "weights_version": 4})
    [record] = writing.newest()

    assert [(0, 64, "cached", None), (64, 83, "captured", 4), (83, 84, "not_fed", None)] == states(record)
    assert_equals_reference(record, writing.engine.model)


def test_a_trimmed_prompt_is_not_captured_before_its_start(writing: Writing) -> None:
    """``routed_experts_prompt_start`` is the record's first row and the ticket's start."""
    writing.engine.llm.reset_prefix_cache()
    [output] = writing.ask(LONG, shipping={"sample_id": "t"}, routed_experts_prompt_start=40)
    [record] = writing.newest()

    assert [(0, 40, "not_captured", None), (40, 86, "captured", None), (86, 87, "not_fed", None)] == states(record)
    assert 40 == ticket_of(output).start
    assert_equals_reference(record, writing.engine.model, first_row=40)


def test_a_stop_token_and_one_token(writing: Writing) -> None:
    """A stop token ends the rows before it; one generated token has the prompt's rows."""
    writing.ask(
        SHORT, shipping={"sample_id": "s"}, max_tokens=40, stop_token_ids=list(range(100, 220)), ignore_eos=False
    )
    writing.ask(SHORT, shipping={"sample_id": "1"}, max_tokens=1)
    stopped, single = writing.newest(2)

    assert ("stop", len(SHORT) + 1) == (stopped.attributes["finish_reason"], single.num_tokens)
    assert_equals_reference(stopped, writing.engine.model)
    assert_equals_reference(single, writing.engine.model)


# ----------------------------------------------------------------------------------------------------------------------
# Ends from outside
# ----------------------------------------------------------------------------------------------------------------------


def submit(writing: Writing, name: str, *, weights_version: int = 1) -> Any:
    """Add a request to the engine and return the engine, to be stepped by hand."""
    engine = writing.engine.llm.llm_engine
    params = SamplingParams(
        max_tokens=40,
        temperature=1.0,
        seed=7,
        ignore_eos=True,
        detokenize=False,
        extra_args=request_args(sample_id=name, weights_version=weights_version),
    )
    engine.add_request(name, {"prompt_token_ids": LONG}, params)
    return engine


def test_an_abort_under_way_keeps_its_rows(writing: Writing) -> None:
    """A request that is aborted after some steps leaves a record with the row of every token fed."""
    engine = submit(writing, "aborted")
    for _ in range(6):
        engine.step()
    engine.abort_request(["aborted"])
    [record] = writing.newest()

    assert ("aborted", "abort") == (record.sample_id, record.attributes["finish_reason"])
    assert len(LONG) + 2 <= record.num_tokens
    assert {"captured", "cached", "not_fed"} >= {state for _, _, state, _ in states(record)}
    assert_equals_reference(record, writing.engine.model)


def test_an_abort_before_the_first_token_has_the_reason(writing: Writing) -> None:
    """A request that never ran has a record without rows, every token of it aborted."""
    engine = submit(writing, "never")
    engine.abort_request(["never"])
    [record] = writing.newest()

    assert [(0, len(LONG), "aborted", None)] == states(record)
    assert (record.routes == -1).all()


def test_weights_that_change_in_a_pause_cut_the_span(writing: Writing) -> None:
    """After a pause the version is unknown, until the next request says what runs."""
    engine = submit(writing, "two")
    for _ in range(6):
        engine.step()
    flight = next(iter(writing.scheduler._writer.flights.values()))
    writing.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    writing.scheduler.set_pause_state(PauseState.UNPAUSED)
    edge = len(LONG) + len(flight.tokens)
    engine.step()
    assert [(edge, None)] == [(change.token, change.weights_version) for change in flight.changes]
    submit(writing, "later", weights_version=2)
    while engine.has_unfinished_requests():
        engine.step()
    [record] = [one for one in writing.newest(2) if one.sample_id == "two"]

    assert [(75, None), (edge, 1), (115, 2)] == [(span.stop, span.weights_version) for span in record.spans]
    assert (edge - 1, 114, "captured", 2) in states(record)
    assert_equals_reference(record, writing.engine.model)


# ----------------------------------------------------------------------------------------------------------------------
# What cannot be recorded is said, and the engine goes on
# ----------------------------------------------------------------------------------------------------------------------


BAD_EXTRA: dict[str, tuple[Any, str]] = {
    "an unknown key": ({"sampel_id": "x"}, "with keys of"),
    "no JSON": ("{", "as JSON"),
    "a number for a name": ({"sample_id": 3}, "sample_id"),
    "a negative attempt": ({"attempt": -1}, "attempt"),
    "choices of one": ({"choices": 3}, "one of 3 choices"),
}


@pytest.mark.parametrize(("extra", "said"), BAD_EXTRA.values(), ids=BAD_EXTRA)
def test_a_request_that_asks_wrongly_is_told(writing: Writing, extra: Any, said: str) -> None:
    """The sequence is generated, its answer says why it has no record, and no rows leave unrecorded."""
    before = writing.streams()
    [output] = writing.engine.ask(SHORT, extra_args={"routeplane": extra})

    assert said in output.kv_transfer_params["routeplane_error"]
    assert (12, None) == (len(output.outputs[0].token_ids), output.outputs[0].routed_experts)
    assert before == writing.streams()


def test_what_an_http_client_sends_as_text_is_read(writing: Writing) -> None:
    """``vllm_xargs`` carries scalars, so the object comes as its JSON."""
    [output] = writing.engine.ask(SHORT, extra_args={"routeplane": json.dumps({"sample_id": "text"})})

    assert "text" == ticket_of(output).key.sample_id


def test_one_name_twice_is_refused_where_one_stream_holds_both(writing: Writing, tmp_path: Path) -> None:
    """The second record of a key is an error in its answer and in the report; the stream keeps the first."""
    options = writer_options(tmp_path, records_per_stream=None, target=str(tmp_path / "all.arrows"))
    llm = start_engine(str(writing.engine.folder), dtype="float32", max_model_len=128, max_num_seqs=8, **options)
    twice = dataclasses.replace(writing, engine=dataclasses.replace(writing.engine, llm=llm))
    first, second = (twice.ask(SHORT, shipping={"sample_id": "same"})[0] for _ in range(2))
    report = twice.scheduler.routes_report()
    twice.scheduler.shutdown()
    [record] = open_stream(tmp_path / "all.arrows")

    assert "twice" in second.kv_transfer_params["routeplane_error"]
    assert record.key == ticket_of(first).key
    assert (1, {"duplicate_key": 1}) == (report.records, dict(report.refusals))


BAD_STARTS: dict[str, tuple[dict[str, Any], type[RouteplaneError], ErrorKind]] = {
    "no writer configured": ({"additional_config": {}}, UsageError, ErrorKind.ARGUMENT),
    "a sink that is none": (
        {"additional_config": {"routeplane": {"sink": "routeplane.stream.no_such", "target": "x"}}},
        UsageError,
        ErrorKind.ARGUMENT,
    ),
    "a module that is none": (
        {"additional_config": {"routeplane": {"sink": "routeplane.nowhere.f", "target": "x"}}},
        UsageError,
        ErrorKind.ARGUMENT,
    ),
}


@pytest.mark.parametrize(("options", "error", "kind"), BAD_STARTS.values(), ids=BAD_STARTS)
def test_a_writer_that_cannot_write_stops_the_start(
    writing: Writing, options: dict[str, Any], error: type[RouteplaneError], kind: ErrorKind
) -> None:
    """A bad configuration is found when the engine starts, not with its first answer."""
    with pytest.raises(error) as caught:
        start_engine(str(writing.engine.folder), dtype="float32", max_model_len=128, scheduler_cls=SCHEDULER, **options)
    assert kind == caught.value.kind


def test_an_engine_without_the_flag_is_refused(writing: Writing, tmp_path: Path) -> None:
    """A scheduler that would never see a row does not start."""
    from vllm import LLM

    with pytest.raises(CaptureError) as caught:
        LLM(
            str(writing.engine.folder),
            dtype="float32",
            block_size=32,
            enforce_eager=True,
            skip_tokenizer_init=True,
            max_model_len=128,
            **writer_options(tmp_path),
        )
    assert ErrorKind.CAPTURE_OFF == caught.value.kind


# ----------------------------------------------------------------------------------------------------------------------
# Preemption and chunks
# ----------------------------------------------------------------------------------------------------------------------


class CountingScheduler(RouteScheduler):
    """Counts how often a request was preempted."""

    preempted = 0

    def _preempt_request(self, *args: Any, **kwargs: Any) -> Any:
        self.preempted += 1
        return super()._preempt_request(*args, **kwargs)


@pytest.mark.parametrize("prefix_cache", [True, False], ids=["prefix cache", "no prefix cache"])
def test_preempted_sequences_have_the_rows_of_undisturbed_ones(
    writing: Writing, tmp_path: Path, prefix_cache: bool
) -> None:
    """With blocks for a third of them, eight sequences are preempted again and again: no row is lost or another's."""
    options = {**writer_options(tmp_path), "scheduler_cls": CountingScheduler}
    llm = start_engine(
        str(writing.engine.folder),
        dtype="float32",
        max_model_len=128,
        max_num_seqs=8,
        num_gpu_blocks_override=8,
        enable_prefix_caching=prefix_cache,
        **options,
    )
    small = Writing(engine=dataclasses.replace(writing.engine, llm=llm), folder=tmp_path)
    prompts = [LONG[at : at + 12] for at in range(8)]
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    params = [
        SamplingParams(
            max_tokens=60,
            temperature=1.0,
            seed=index,
            ignore_eos=True,
            detokenize=False,
            extra_args=request_args(sample_id=f"s{index}"),
        )
        for index in range(8)
    ]
    outputs = llm.generate(inputs, params, use_tqdm=False)
    records = {record.sample_id: record for record in small.newest(8)}
    small.scheduler.shutdown()

    assert small.scheduler.preempted >= 3
    for index, output in enumerate(outputs):
        record = records[f"s{index}"]
        assert [*prompts[index], *output.outputs[0].token_ids] == record.token_ids.tolist()
        assert_equals_reference(record, writing.engine.model)


def test_a_prefill_in_chunks_leaves_no_seam_in_the_engine(writing: Writing, tmp_path: Path) -> None:
    """Prompts fed 16 tokens at a time have the rows of prompts fed whole."""
    llm = start_engine(
        str(writing.engine.folder),
        dtype="float32",
        max_model_len=128,
        max_num_seqs=8,
        enable_chunked_prefill=True,
        max_num_batched_tokens=16,
        **writer_options(tmp_path),
    )
    chunked = Writing(engine=dataclasses.replace(writing.engine, llm=llm), folder=tmp_path)
    # without a seed: see start_engine
    chunked.engine.ask(LONG, SHORT, LONG[5:60], seed=None)

    records = chunked.newest(3)
    chunked.scheduler.shutdown()

    for record in records:
        assert_equals_reference(record, writing.engine.model)
