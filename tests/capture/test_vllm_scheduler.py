"""The writer inside the real engine, in this process, against a Transformers forward of the same weights.

A sequence's answer comes when its block is sealed, so records can be read while the engine runs.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllm import RequestOutput, SamplingParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler

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

    def blocks(self) -> list[Path]:
        """The blocks that are sealed, in order."""
        assert self.scheduler._writer.flush(timeout_s=30)
        return sorted(self.folder.glob("*.arrows"))

    def newest(self, count: int = 1) -> list[RouteRecord]:
        """The last records."""
        return [record for path in self.blocks() for record in open_stream(path)][-count:]


def writer_options(folder: Path, **changes: Any) -> dict[str, Any]:
    """Engine options with a writer into a folder."""
    config = {"place": str(folder), "run": "r", "carrier": "tests.capture.block_files.open_writer", **changes}
    return {"scheduler_cls": SCHEDULER, "additional_config": {"routeplane": config}}


@pytest.fixture(scope="module")
def writing(tmp_path_factory: pytest.TempPathFactory, engines_of_process: list[Any]) -> Iterator[Writing]:
    """One engine for all tests here."""
    folder = tmp_path_factory.mktemp("streams")
    with running_engine(tmp_path_factory.mktemp("qwen3_moe"), **writer_options(folder)) as engine:
        engines_of_process.append(engine.llm)
        made = Writing(engine=engine, folder=folder)
        yield made
        made.scheduler.shutdown()


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
    assert (0, 21, f"r/{writing.blocks()[-1].name}") == (ticket.start, ticket.stop, ticket.stream)
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
    """Each of several sequences has its index in its name, and the answer has the tickets of all."""
    [output] = writing.ask(SHORT, shipping={"sample_id": "c"}, n=2)
    records = {record.sample_id: record for record in writing.newest(2)}

    assert {"c/0", "c/1"} == set(records)
    tickets = output.kv_transfer_params["routeplane_choices"]
    assert {"0": "c/0", "1": "c/1"} == {at: RouteTicket.from_json(one).key.sample_id for at, one in tickets.items()}
    for choice in output.outputs:
        record = records[f"c/{choice.index}"]
        assert ("c", [*SHORT, *choice.token_ids]) == (record.group, record.token_ids.tolist())
        assert_equals_reference(record, writing.engine.model)


def test_requests_that_ask_for_nothing_ship_nothing(writing: Writing) -> None:
    """Judge traffic brings neither record nor rows, and is counted; a probe's rows stay in its answer."""
    before, report = writing.blocks(), writing.scheduler.routes_report()
    [judged] = writing.ask(SHORT, shipping={"capture": False})
    [inline] = writing.ask(SHORT, shipping={"inline": True})

    assert (None, None) == (judged.outputs[0].routed_experts, judged.kv_transfer_params)
    assert (21, 4, 4) == inline.outputs[0].routed_experts.shape
    assert before == writing.blocks()
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
    writing.scheduler.set_version(4)
    writing.ask(LONG, shipping={"sample_id": "p0"})
    writing.ask([*LONG[:70], 400, 401], shipping={"sample_id": "p1", "weights_version": 4})
    [record] = writing.newest()

    assert [(0, 64, "cached", None), (64, 83, "captured", 4), (83, 84, "not_fed", None)] == states(record)
    assert_equals_reference(record, writing.engine.model)


def test_a_trimmed_prompt_is_not_captured_before_its_start(writing: Writing) -> None:
    """``routed_experts_prompt_start`` is the record's first row and the ticket's start."""
    writing.engine.llm.reset_prefix_cache()
    writing.scheduler.set_version(9)
    [output] = writing.ask(LONG, shipping={"sample_id": "t"}, routed_experts_prompt_start=40)
    [record] = writing.newest()

    assert [(0, 40, "not_captured", None), (40, 86, "captured", 9), (86, 87, "not_fed", None)] == states(record)
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
    """Add a request to the engine, whose weights it names, and return the engine, to be stepped by hand."""
    if weights_version == 1 or name == "reloaded":
        writing.scheduler.set_version(weights_version)
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


def version_stops(record: RouteRecord) -> list[tuple[int, int | None]]:
    """Where spans stop, with their versions."""
    return [(span.stop, span.weights_version) for span in record.spans]


def test_weights_that_change_in_a_pause_cut_the_span(writing: Writing) -> None:
    """After a pause the version is unknown, until the next request says what runs."""
    engine = submit(writing, "two")
    for _ in range(6):
        engine.step()
    sequence = next(iter(writing.scheduler._writer.sequences.values()))
    writing.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    writing.scheduler.set_pause_state(PauseState.UNPAUSED)
    edge = sequence.changes[-1].token
    engine.step()
    assert None is sequence.changes[-1].weights_version
    submit(writing, "later", weights_version=2)
    while engine.has_unfinished_requests():
        engine.step()
    [record] = [one for one in writing.newest(2) if one.sample_id == "two"]

    assert ((75, None), (115, 2)) == (version_stops(record)[0], version_stops(record)[-1])
    assert (edge - 1, 114, "captured", 2) in states(record)
    assert_equals_reference(record, writing.engine.model)


def test_weights_that_are_loaded_without_a_pause_are_not_the_old_version(writing: Writing) -> None:
    """A call into the workers that may change them, under way: no token behind it has the old version."""
    llm = writing.engine.llm
    engine = submit(writing, "reloaded", weights_version=3)
    for _ in range(6):
        engine.step()
    sequence = next(iter(writing.scheduler._writer.sequences.values()))
    taken = sequence.num_tokens
    llm.collective_rpc(lambda worker: None)
    edge = sequence.changes[-1].token
    engine.step()
    assert {"routeplane/engine_lost": 0.0}.items() <= llm.collective_rpc("routeplane_report")[0].items()
    llm.collective_rpc("routeplane_set_version", args=(4,))
    while engine.has_unfinished_requests():
        engine.step()
    [record] = writing.newest()

    spans = version_stops(record)
    assert [(75, None), (taken, 3)] == spans[:2]
    assert ((edge, None) in spans, (115, 4)) == (edge > taken, spans[-1])
    assert 1 == writing.scheduler.routes_report().weight_updates
    assert_equals_reference(record, writing.engine.model)


# ----------------------------------------------------------------------------------------------------------------------
# What cannot be recorded is said, and the engine goes on
# ----------------------------------------------------------------------------------------------------------------------


BAD_EXTRA: dict[str, tuple[Any, str]] = {
    "an unknown key": ({"sampel_id": "x"}, "with keys of"),
    "no JSON": ("{", "as JSON"),
    "a number for a name": ({"sample_id": 3}, "sample_id"),
    "a negative attempt": ({"attempt": -1}, "attempt"),
    "choices, which the id tells": ({"choices": 3}, "with keys of"),
}


@pytest.mark.parametrize(("extra", "said"), BAD_EXTRA.values(), ids=BAD_EXTRA)
def test_a_request_that_asks_wrongly_is_told(writing: Writing, extra: Any, said: str) -> None:
    """The sequence is generated, its answer says why it has no record, and no rows leave unrecorded."""
    before = writing.blocks()
    [output] = writing.engine.ask(SHORT, extra_args={"routeplane": extra})

    assert said in output.kv_transfer_params["routeplane_error"]
    assert (12, None) == (len(output.outputs[0].token_ids), output.outputs[0].routed_experts)
    assert before == writing.blocks()


def test_what_an_http_client_sends_as_text_is_read(writing: Writing) -> None:
    """``vllm_xargs`` carries scalars, so the object comes as its JSON."""
    [output] = writing.engine.ask(SHORT, extra_args={"routeplane": json.dumps({"sample_id": "text"})})

    assert "text" == ticket_of(output).key.sample_id


def config(**changes: Any) -> dict[str, Any]:
    """An ``additional_config`` whose place is never opened."""
    return {"additional_config": {"routeplane": {"place": "x", "run": "r", **changes}}}


BAD_STARTS: dict[str, tuple[dict[str, Any], type[RouteplaneError], ErrorKind]] = {
    "no writer configured": ({"additional_config": {}}, UsageError, ErrorKind.ARGUMENT),
    "a carrier that is missing": (config(carrier="routeplane.stream.no_such"), UsageError, ErrorKind.ARGUMENT),
    "a module that is missing": (config(carrier="routeplane.nowhere.f"), UsageError, ErrorKind.ARGUMENT),
    "raw logits": ({**config(), "logprobs_mode": "raw_logits"}, UsageError, ErrorKind.ARGUMENT),
    "processed logits": ({**config(), "logprobs_mode": "processed_logits"}, UsageError, ErrorKind.ARGUMENT),
}


@pytest.mark.parametrize(
    ("options", "error", "kind"),
    [
        pytest.param(*case, id=name, marks=() if name == "raw logits" else pytest.mark.slow)
        for name, case in BAD_STARTS.items()
    ],
)
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


@pytest.mark.parametrize(
    "prefix_cache",
    [pytest.param(True, id="prefix cache"), pytest.param(False, id="no prefix cache", marks=pytest.mark.slow)],
)
def test_preempted_sequences_have_the_rows_of_undisturbed_ones(
    writing: Writing, tmp_path: Path, prefix_cache: bool
) -> None:
    """With blocks for a third of them, eight sequences are preempted again and again: no row is lost or another's."""
    if not prefix_cache and find_spec("vllm.config.aux_output") is not None:
        pytest.skip("from 0.31 on, vLLM's capture needs the prefix cache, and its configuration says so")
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


# ----------------------------------------------------------------------------------------------------------------------
# Rows of a drifted vLLM
# ----------------------------------------------------------------------------------------------------------------------


class Shifting(AsyncScheduler):  # type: ignore[misc]  # vLLM's types are not followed
    """A vLLM whose rows stand one token late."""

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Roll each output's rows."""
        made = super().update_from_output(scheduler_output, model_runner_output)
        for output in (output for client in made.values() for output in client.outputs):
            if output.routed_experts is not None:
                output.routed_experts = np.roll(output.routed_experts, 1, axis=0)
        return made


class Stale(AsyncScheduler):  # type: ignore[misc]
    """A vLLM whose rows are those of the step before."""

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Swap each output's rows for the last of the step before."""
        self.before: dict[str, Any] = getattr(self, "before", {})
        made = super().update_from_output(scheduler_output, model_runner_output)
        for output in (output for client in made.values() for output in client.outputs):
            rows = output.routed_experts
            if rows is not None:
                output.routed_experts = self.before.get(output.request_id, rows)
                self.before[output.request_id] = rows[-1:]
        return made


class ShiftingWriter(RouteScheduler, Shifting):
    """The writer on a vLLM whose rows stand one token late."""


class StaleWriter(RouteScheduler, Stale):
    """The writer on a vLLM whose rows are a step old."""


class RenamedWriter(RouteScheduler):
    """The writer on a vLLM that renamed a parameter."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Scheduler, "finish_requests", lambda self, ids: [])
            super().__init__(*args, **kwargs)


DRIFTED = {
    "rows one token late": (ShiftingWriter, ErrorKind.ROW_CONFLICT, "capture does not work"),
    "rows a step old": (StaleWriter, ErrorKind.ROW_CONFLICT, "capture does not work"),
    "a renamed parameter": (RenamedWriter, ErrorKind.CAPTURE_OFF, "finish_requests has no request_ids"),
}


@pytest.mark.parametrize(("scheduler", "kind", "said"), DRIFTED.values(), ids=DRIFTED)
def test_a_vllm_that_drifted_is_refused_at_start(
    writing: Writing, tmp_path: Path, scheduler: Any, kind: ErrorKind, said: str
) -> None:
    """Before any request: shifted rows, stale rows and changed names never become records."""
    options = {**writer_options(tmp_path), "scheduler_cls": scheduler}
    with pytest.raises(CaptureError, match=said) as caught:
        start_engine(str(writing.engine.folder), dtype="float32", max_model_len=128, max_num_seqs=8, **options)
    assert kind == caught.value.kind
    assert [] == list(tmp_path.iterdir())


def test_rows_that_drift_under_way_end_the_engine(writing: Writing, tmp_path: Path) -> None:
    """The check is made again at intervals, among the requests."""
    options = {**writer_options(tmp_path, probe_every_s=1e-3), "scheduler_cls": ShiftingLater}
    llm = start_engine(str(writing.engine.folder), dtype="float32", max_model_len=128, max_num_seqs=8, **options)
    later = Writing(engine=dataclasses.replace(writing.engine, llm=llm), folder=tmp_path)
    later.ask(SHORT, shipping={"sample_id": "good"})
    [record] = later.newest()
    assert_equals_reference(record, writing.engine.model)
    later.scheduler.shifts = True
    with pytest.raises(CaptureError) as caught:
        later.ask(SHORT, SHORT, shipping={"sample_id": "bad"}, max_tokens=60)
    later.scheduler.shutdown()
    assert ErrorKind.ROW_CONFLICT == caught.value.kind


class Later(Shifting):
    """A vLLM that begins to shift when it is told."""

    shifts = False

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Shift, or not."""
        kind: Any = Shifting if self.shifts else AsyncScheduler
        return kind.update_from_output(self, scheduler_output, model_runner_output)


class ShiftingLater(RouteScheduler, Later):
    """The writer on it."""
