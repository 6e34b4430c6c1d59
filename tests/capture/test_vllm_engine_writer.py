"""What a writer inside an engine is told, and what it makes of sequences: requests, versions, blocks. No engine runs.

Axes: R rows, D decoder layers, L captured layers, K slots.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from routeplane.capture import CaptureOptions
from routeplane.capture.http import openai
from routeplane.capture.http.tickets import call_of_ticket
from routeplane.capture.vllm.engine_writer import EngineReport, EngineWriter, open_carrier
from routeplane.capture.vllm.interface import KEY, RequestOptions, WriterConfig, request_args
from routeplane.capture.wire import encode
from routeplane.errors import DataError, ErrorKind, RouteplaneError, TransportError, UsageError
from routeplane.record.interfaces import RouteTicket
from routeplane.record.record import RouteRecord
from routeplane.record.spans import Coverage
from routeplane.record.spec import RouteSpec
from routeplane.stream import open_stream
from routeplane.stream.folder import open_reader
from tests.capture.block_files import records_of

SPEC = RouteSpec(num_experts=16, top_k=2, layer_ids=(1, 2), model="m")
CARRIER = "tests.capture.block_files.open_writer"


def layers_of(start: int, stop: int) -> np.ndarray[Any, Any]:
    """An engine's rows ``[R, D, K]`` of tokens ``[start, stop)``: distinct ids, the first of three layers dense."""
    token_R = np.arange(start, stop)
    rows_RDK = np.zeros((len(token_R), 3, 2), dtype=np.uint8)
    for layer in (1, 2):
        rows_RDK[:, layer, 0] = 1 + (token_R + layer) % 7
        rows_RDK[:, layer, 1] = 8 + (3 * token_R + layer) % 7
    return rows_RDK


# ----------------------------------------------------------------------------------------------------------------------
# Requests
# ----------------------------------------------------------------------------------------------------------------------


@given(
    st.booleans(),
    st.one_of(st.none(), st.text(min_size=1).filter(str.isprintable)),
    st.integers(0, 2**31 - 1),
    st.one_of(st.none(), st.integers(0, 99)),
)
def test_what_a_request_says_arrives(capture: bool, sample_id: str | None, attempt: int, version: int | None) -> None:
    """Through ``extra_args`` and through the text that HTTP carries."""
    args = request_args(capture=capture, sample_id=sample_id, attempt=attempt, weights_version=version)
    expected = RequestOptions(capture=capture, sample_id=sample_id, attempt=attempt, weights_version=version)

    assert expected == RequestOptions.from_extra_args(args)
    assert expected == RequestOptions.from_extra_args({KEY: json.dumps(args[KEY])})


def test_silent_requests_get_the_configured_default() -> None:
    """``default`` is for requests without extra arguments."""
    assert RequestOptions(capture=False) == RequestOptions.from_extra_args(None, default="skip")
    assert RequestOptions(sample_id="s") == RequestOptions.from_extra_args(request_args(sample_id="s"), default="skip")


@pytest.mark.parametrize(
    ("options", "request_id", "name"),
    [
        (RequestOptions(), "7-0123abcd", ("7-0123abcd", None)),
        (RequestOptions(sample_id="s", group="g"), "7-0123abcd", ("s", "g")),
        (RequestOptions(sample_id="s"), "1_7-0123abcd", ("s/1", "s")),
        (RequestOptions(), "12_7-0123abcd", ("7/12", "7")),
        (RequestOptions(sample_id="s", group="g"), "0_x-0123abcd", ("s/0", "g")),
        (RequestOptions(sample_id="s"), "0_x", ("s", None)),
    ],
    ids=["nothing", "named", "a choice", "a choice without a name", "a choice in a group", "not vLLM's id"],
)
def test_sequences_are_named(options: RequestOptions, request_id: str, name: tuple[str, str | None]) -> None:
    """A single sequence has the sample's name, one of several its index besides, which stands in the request's id."""
    assert name == options.name_of(request_id)


BAD_CONFIG: dict[str, Any] = {
    "nothing": None,
    "another's": {"other": {}},
    "no place": {KEY: {"run": "r"}},
    "no run": {KEY: {"place": "x"}},
    "an unknown key": {KEY: {"place": "x", "run": "r", "spec": 1}},
    "no dots": {KEY: {"place": "x", "run": "r", "carrier": "open"}},
    "an expression": {KEY: {"place": "x", "run": "r", "carrier": "os.system('x')"}},
    "a place that is a number": {KEY: {"place": 3, "run": "r"}},
    "another default": {KEY: {"place": "x", "run": "r", "default": "maybe"}},
    "another policy": {KEY: {"place": "x", "run": "r", "on_full": "drop"}},
    "no time at all": {KEY: {"place": "x", "run": "r", "block_age_s": 0}},
    "a version of text": {KEY: {"place": "x", "run": "r", "weights_version": "2"}},
    "options of text": {KEY: {"place": "x", "run": "r", "options": "narrow"}},
}


@pytest.mark.parametrize("given_config", BAD_CONFIG.values(), ids=BAD_CONFIG)
def test_a_bad_configuration_is_refused(given_config: Any) -> None:
    """Each is a UsageError that names what was expected."""
    with pytest.raises(UsageError):
        WriterConfig.from_additional(given_config)


@pytest.mark.parametrize("name", ["routeplane.stream.nothing", "routeplane.nothing.f", "json.decoder.NaN"])
def test_a_carrier_that_cannot_be_called_is_refused(name: str) -> None:
    """A dotted name must lead to a function."""
    with pytest.raises(UsageError) as caught:
        open_carrier(WriterConfig(place="x", run="r", carrier=name), SPEC, producer="p")
    assert ErrorKind.ARGUMENT == caught.value.kind


# ----------------------------------------------------------------------------------------------------------------------
# Records
# ----------------------------------------------------------------------------------------------------------------------


def writer_into(folder: Path, **changes: Any) -> EngineWriter:
    """A writer of rank 3 that writes into a folder."""
    settings = {"place": str(folder), "run": "r", "carrier": CARRIER, **changes}
    return EngineWriter(SPEC, WriterConfig(**settings), rank=3, logprobs_mode="raw_logprobs")


def begin(writer: EngineWriter, name: str, *, generated: int, extra: Mapping[str, Any] | None = None) -> None:
    """A sequence of 4 prompt tokens and so many generated ones, which goes on."""
    writer.open(name, [1, 2, 3, 4], extra_args=extra)
    sequence = writer.sequences[name]
    sequence.cached = 0
    sequence.add([10], layers_of(0, 4))
    for at in range(1, generated):
        sequence.add([10 + at], layers_of(3 + at, 4 + at))


def answer(writer: EngineWriter, name: str) -> dict[str, Any]:
    """Wait for what a sequence's answer says."""
    for _ in range(200):
        for request_id, said in writer.take_answers(wait_s=0.05):
            if request_id == name:
                return said
    raise AssertionError(f"no answer for {name}")


def run(writer: EngineWriter, name: str, *, generated: int, extra: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A whole sequence; returns what its answer says."""
    begin(writer, name, generated=generated, extra=extra)
    assert writer.finish(name, "length")
    return answer(writer, name)


def test_a_flush_of_nothing_lets_the_thread_wait(tmp_path: Path) -> None:
    """A thread that went round and round would hold the interpreter's lock against the engine's steps."""
    writer = writer_into(tmp_path)
    run(writer, "s", generated=2)
    rounds, take = [], writer._blocks._next_jobs

    def counted() -> Any:
        rounds.append(0)
        return take()

    writer._blocks._next_jobs = counted  # type: ignore[method-assign]
    assert writer.flush(timeout_s=20)
    threading.Event().wait(0.5)
    assert len(rounds) < 20
    writer.close()


def test_rows_of_any_number_of_steps_are_all_there(tmp_path: Path) -> None:
    """Longer than what is kept as views of single steps: every row at its token."""
    writer = writer_into(tmp_path)
    for generated in (1, 2, 63, 64, 65, 300):
        assert KEY in run(writer, f"s{generated}", generated=generated)
    writer.close()
    writer.close()
    records = records_of(tmp_path)

    for record in records.values():
        assert layers_of(0, record.num_tokens - 1)[:, 1:].tolist() == record.routes[:-1].tolist()
    assert 6 == writer.report().records == len(records)


def test_a_ticket_names_a_block_that_can_be_read(tmp_path: Path) -> None:
    """When the answer is there, so is the record, in the block that its ticket names; the ticket gives its call."""
    writer = writer_into(tmp_path)
    for index in range(5):
        ticket = RouteTicket.from_json(run(writer, f"s{index}", generated=3)[KEY])
        assert (tmp_path / ticket.stream.removeprefix("r/")).exists()
        call = call_of_ticket(records_of(tmp_path)[f"s{index}"], ticket)
        assert [10, 11, 12] == call.generation_ids.tolist()
    assert 0 == writer.report().pending
    writer.close()
    assert (tmp_path / "r-engine-3.closed").exists()


def test_ranks_on_one_place_and_a_restart_overwrite_nothing(tmp_path: Path) -> None:
    """Data-parallel ranks are producers of their own; a rank that starts again goes on behind its last block."""
    config = WriterConfig(place=str(tmp_path / "place"), run="r")
    tickets: list[RouteTicket] = []
    blocks: dict[Path, bytes] = {}
    for life in range(2):
        ranks = [EngineWriter(SPEC, config, rank=rank, logprobs_mode="raw_logprobs") for rank in (0, 1)]
        with pytest.raises(UsageError) as taken:
            EngineWriter(SPEC, config, rank=1, logprobs_mode="raw_logprobs")
        assert ErrorKind.PRODUCER_TAKEN == taken.value.kind
        for number in range(3):
            for rank, writer in enumerate(ranks):
                said = run(writer, f"{life}-{rank}-{number}", generated=2)
                tickets.append(RouteTicket.from_json(said[KEY]))
        for writer in ranks:
            writer.close(end=False)
        found = {path: path.read_bytes() for path in (tmp_path / "place").glob("producers/*/*.arrows")}
        assert blocks.items() <= found.items()
        blocks = found

    assert {"engine-0", "engine-1"} == {ticket.stream.split("/")[1] for ticket in tickets}
    for ticket in tickets:
        _, producer, block = ticket.stream.split("/")
        records = {one.key: one for one in open_stream(tmp_path / "place" / "producers" / producer / f"{block}.arrows")}
        assert [10, 11] == call_of_ticket(records[ticket.key], ticket).generation_ids.tolist()
    assert 12 == len(set(tickets))


def test_the_last_choice_has_the_tickets_of_all(tmp_path: Path) -> None:
    """The engine's front end passes on one choice's; and the request's id leads to all."""
    writer = writer_into(tmp_path)
    said: dict[str, Any] = {}
    for choice in (1, 0, 2):
        said = run(writer, f"{choice}_req-0123abcd", generated=2, extra=request_args(sample_id="s"))
    keys = {index: json.loads(ticket)["key"][0] for index, ticket in said[f"{KEY}_choices"].items()}
    writer.close()

    assert {"0": "s/0", "1": "s/1", "2": "s/2"} == keys
    assert set(keys) == set(writer.tickets_of("req"))
    assert {} == writer.tickets_of("another")


def test_prompts_that_another_rank_had_do_not_hide_those_behind_them(tmp_path: Path) -> None:
    """Of a request of three prompts, data-parallel ranks have some each."""
    writer = writer_into(tmp_path)
    for prompt in (1, 2):
        run(writer, f"req-{prompt}-0123abcd", generated=2)
    writer.close()

    assert {"1.0", "2.0"} == set(writer.tickets_of("req", prompts=2))


def test_tickets_of_choices_that_share_a_prompt_are_redeemed(tmp_path: Path) -> None:
    """A folder stores the rows of a prompt once; its reader gives whole records, and a delta says what it lacks."""
    config = WriterConfig(place=str(tmp_path / "place"), run="r")
    writer = EngineWriter(SPEC, config, rank=0, logprobs_mode="raw_logprobs")
    names = [f"{choice}_req-0123abcd" for choice in range(3)]
    for name in names:
        begin(writer, name, generated=2, extra=request_args(sample_id="s"))
    for name in names:
        writer.finish(name, "length")
    said: dict[str, Any] = {}
    while len(said) < 3:
        said |= dict(writer.take_answers(wait_s=0.05))
    writer.close()
    tickets = [RouteTicket.from_json(said[name][KEY]) for name in names]
    raw = {one.key: one for block in (tmp_path / "place").glob("producers/*/*.arrows") for one in open_stream(block)}
    with open_reader(tmp_path / "place", producers=1) as reader:
        whole = {record.key: record for record in reader}

    assert [[10, 11]] * 3 == [call_of_ticket(whole[one.key], one).generation_ids.tolist() for one in tickets]
    deltas = [one for one in tickets if raw[one.key].prefix is not None]
    assert 2 == len(deltas)
    with pytest.raises(DataError) as caught:
        call_of_ticket(raw[deltas[0].key], deltas[0])
    assert ErrorKind.PREFIX == caught.value.kind


def test_what_is_in_flight_at_the_end_is_aborted(tmp_path: Path) -> None:
    """Closing records unfinished sequences with the reason."""
    writer = writer_into(tmp_path)
    writer.open("a", [1, 2, 3, 4], extra_args=None)
    writer.sequences["a"].add([10, 11], layers_of(0, 4))
    writer.open("b", [1, 2, 3, 4], extra_args=None)
    writer.close()
    records = records_of(tmp_path)

    states = {name: [(one.stop, one.state) for one in record.captures] for name, record in records.items()}
    assert {"a": [(3, "cached"), (4, "captured"), (5, "aborted"), (6, "not_fed")], "b": [(4, "aborted")]} == states


def test_a_sequence_without_rows_is_refused_and_the_engine_goes_on(tmp_path: Path) -> None:
    """No rows where there should be some, and zeros where ids should be: said, counted, never written."""
    writer = writer_into(tmp_path)
    writer.open("none", [1, 2], extra_args=None)
    writer.sequences["none"].tokens += [3]
    writer.finish("none", "length")
    assert "expected rows" in answer(writer, "none")["routeplane_error"]
    writer.open("zeros", [1, 2], extra_args=None)
    writer.sequences["zeros"].add([3], np.zeros((2, 3, 2), dtype=np.uint8))
    writer.finish("zeros", "length")
    assert "zeros in" in answer(writer, "zeros")["routeplane_error"]
    run(writer, "good", generated=2)
    writer.close()

    assert ["good"] == list(records_of(tmp_path))
    assert {"routes_missing": 1, "uncaptured_slot": 1} == dict(writer.report().refusals)
    begin(writer, "late", generated=2)
    writer.finish("late", "length")
    assert "closed" in answer(writer, "late")["routeplane_error"]


@given(
    first_row=st.integers(0, 4),
    generated=st.integers(1, 3),
    off=st.integers(-2, 2),
    reason=st.sampled_from(["length", "stop", "abort"]),
)
def test_rows_that_are_off_are_refused_as_in_the_readers_of_answers(
    first_row: int, generated: int, off: int, reason: str
) -> None:
    """A row too many or too few, of a trimmed request too: the writer records what a reader of the answer takes."""
    rows_RDK = layers_of(first_row, max(first_row, 3 + generated + off))
    prompt, tokens = [1, 2, 3, 4], list(range(10, 10 + generated))
    choice = {"index": 0, "finish_reason": reason, "token_ids": tokens, "routed_experts": encode(rows_RDK, form="npy")}
    response = {"id": "r", "prompt_token_ids": prompt, "choices": [choice]}
    read: Any
    try:
        [read] = openai.calls(
            response, SPEC, weights_version=None, first_row=first_row, options=CaptureOptions(cached=0)
        )
    except RouteplaneError as error:
        read = error.kind
    with TemporaryDirectory() as place:
        writer = writer_into(Path(place))
        writer.open("r", prompt, extra_args=None, first_row=first_row)
        writer.sequences["r"].cached = 0
        writer.sequences["r"].add(tokens, rows_RDK)
        writer.finish("r", reason)
        said = answer(writer, "r")
        writer.close()
        record = records_of(Path(place)).get("r")
        refusals = dict(writer.report().refusals)

    if record is None:
        assert {str(read): 1} == refusals
    else:
        call = call_of_ticket(record, RouteTicket.from_json(said[KEY]))
        assert (read.first_row, read.rows_stop, read.loss) == (call.first_row, call.rows_stop, call.loss)


def test_an_aborted_request_is_sealed_by_age(tmp_path: Path) -> None:
    """No answer waits for it, so its block is sealed when it is old, and not before the writer ends."""
    writer = writer_into(tmp_path, block_age_s=0.05)
    begin(writer, "gone", generated=2)
    assert not writer.finish("gone", "abort", answered=False)
    for _ in range(100):
        if records_of(tmp_path):
            break
        time.sleep(0.02)
    assert ["gone"] == list(records_of(tmp_path))
    writer.close()


# ----------------------------------------------------------------------------------------------------------------------
# Versions
# ----------------------------------------------------------------------------------------------------------------------


def versions_of(record: RouteRecord) -> tuple[list[tuple[int, int | None]], list[tuple[int, int | None]]]:
    """Where spans and captures stop, with their versions."""
    return (
        [(one.stop, one.weights_version) for one in record.spans],
        [(one.stop, one.weights_version) for one in record.captures],
    )


def naming(version: int) -> dict[str, Any]:
    """A request that names its weights."""
    return request_args(weights_version=version)


def test_an_update_is_unknown_until_a_newer_version_is_named(tmp_path: Path) -> None:
    """What is in flight is cut at its token; a request of the old version, sent before, settles nothing."""
    writer = writer_into(tmp_path, weights_version=5)
    begin(writer, "a", generated=2)
    writer.versions.changed("update", writer.sequences, {"a": 0})
    writer.sequences["a"].add([12], layers_of(5, 6))
    run(writer, "stale", generated=2, extra=naming(5))
    run(writer, "silent", generated=2)
    writer.sequences["a"].add([13], layers_of(6, 7))
    run(writer, "new", generated=2, extra=naming(6))
    writer.finish("a", "length")
    writer.close()
    records = records_of(tmp_path)

    assert ([(4, None), (6, 5), (8, 6)], [(5, 5), (7, 6), (8, None)]) == versions_of(records["a"])
    ticket = RouteTicket.from_json(answer(writer, "a")[KEY])
    assert call_of_ticket(records["a"], ticket).weights_version is None  # a call has one version, and these are two
    assert [(4, None), (6, None)] == versions_of(records["stale"])[0] == versions_of(records["silent"])[0]
    assert [(4, None), (6, 6)] == versions_of(records["new"])[0]
    assert (1, 1) == (writer.report().stale_versions, writer.report().weight_updates)


def test_tokens_on_their_way_through_an_update_are_of_unknown_weights(tmp_path: Path) -> None:
    """Sampled before the update and taken after it: neither version."""
    writer = writer_into(tmp_path, weights_version=5)
    begin(writer, "a", generated=2)
    writer.versions.changed("update", writer.sequences, {"a": 1})
    writer.versions.tell(6, writer.sequences, paused=False)
    for at in (2, 3):
        writer.sequences["a"].add([10 + at], layers_of(3 + at, 4 + at))
    writer.finish("a", "length")
    writer.close()

    assert [(4, None), (6, 5), (7, None), (8, 6)] == versions_of(records_of(tmp_path)["a"])[0]


def test_a_request_that_waits_through_an_update_is_of_the_new_weights(tmp_path: Path) -> None:
    """Nothing of it was computed before."""
    writer = writer_into(tmp_path, weights_version=5)
    writer.open("queued", [1, 2, 3, 4], extra_args=None)
    writer.versions.changed("update", writer.sequences, {"queued": None})
    writer.versions.tell(6, writer.sequences, paused=True)
    writer.versions.changed("pause", writer.sequences, {"queued": None})
    writer.sequences["queued"].cached = 0
    writer.sequences["queued"].add([10], layers_of(0, 4))
    writer.finish("queued", "length")
    writer.close()

    assert ([(4, None), (5, 6)], [(4, 6), (5, None)]) == versions_of(records_of(tmp_path)["queued"])


def test_an_update_that_was_not_seen_makes_all_in_flight_unknown(tmp_path: Path) -> None:
    """A newer version is named, and no update was seen: when the weights changed is not known."""
    writer = writer_into(tmp_path, weights_version=5)
    begin(writer, "silent", generated=2)
    begin(writer, "saying", generated=2, extra=naming(5))
    run(writer, "newer", generated=2, extra=naming(6))
    run(writer, "late", generated=2)
    for name in ("silent", "saying"):
        writer.finish(name, "length")
    writer.close()
    records = records_of(tmp_path)

    for name in ("silent", "saying", "late"):
        assert [(4, None), (6, None)] == versions_of(records[name])[0]
    assert [(4, None), (6, 6)] == versions_of(records["newer"])[0]


def test_a_pause_without_an_update_may_go_on_with_the_version_before(tmp_path: Path) -> None:
    """Weights may have changed in it; a request that names the version before says that they have not."""
    writer = writer_into(tmp_path, weights_version=5)
    begin(writer, "a", generated=2)
    writer.versions.changed("pause", writer.sequences, {"a": 0})
    run(writer, "same", generated=2, extra=naming(5))
    writer.sequences["a"].add([12], layers_of(5, 6))
    writer.finish("a", "length")
    writer.close()

    assert [(4, None), (7, 5)] == versions_of(records_of(tmp_path)["a"])[0]


# ----------------------------------------------------------------------------------------------------------------------
# Carriers that fail
# ----------------------------------------------------------------------------------------------------------------------


def test_a_full_disk_holds_records_until_there_is_space(tmp_path: Path) -> None:
    """Nothing is lost: the carrier is opened again, and gets what was not sealed."""
    writer = writer_into(tmp_path)
    run(writer, "before", generated=2)
    (tmp_path / "full").touch()
    begin(writer, "during", generated=2)
    writer.finish("during", "length")
    while not writer.report().reopened:
        assert [] == writer.take_answers(wait_s=0.05)
    assert 1 == writer.report().pending
    (tmp_path / "full").unlink()
    assert KEY in answer(writer, "during")
    writer.close()

    assert {"before", "during"} == set(records_of(tmp_path))
    assert 0 == writer.report().lost


def test_what_stays_out_too_long_is_lost_and_counted(tmp_path: Path) -> None:
    """Its answer says so; the engine goes on, or ends where the configuration says that."""
    writer = writer_into(tmp_path, retry_s=0.2, on_loss="fail")
    writer.require_health()
    (tmp_path / "full").touch()
    said = run(writer, "gone", generated=2)
    (tmp_path / "full").unlink()
    assert "is lost" in said["routeplane_error"]
    with pytest.raises(TransportError, match="on_loss"):
        writer.require_health()
    assert KEY in run(writer, "after", generated=2)
    writer.close()

    assert (1, 1, ["after"]) == (writer.report().lost, writer.report().records, list(records_of(tmp_path)))


def test_an_answer_that_waited_too_long_leaves_without_a_ticket(tmp_path: Path) -> None:
    """It names the record that is still to come; the record comes."""
    writer = writer_into(tmp_path, wait_s=0.2)
    (tmp_path / "full").touch()
    said = run(writer, "slow", generated=2, extra=request_args(sample_id="slow"))
    assert {f"{KEY}_pending": '["slow",0,0]'} == said
    (tmp_path / "full").unlink()
    assert writer.flush(timeout_s=20)
    assert ["slow"] == list(records_of(tmp_path))
    writer.close()


class Gate:
    """A builder that waits until it is opened, so that a queue fills."""

    def __init__(self, build: Callable[[Any], Any]) -> None:
        self.build, self.opened, self.entered = build, threading.Event(), threading.Event()

    def __call__(self, job: Any) -> Any:
        """Wait, then build."""
        self.entered.set()
        assert self.opened.wait(10)
        return self.build(job)


def test_sequences_that_end_together_share_a_block(tmp_path: Path) -> None:
    """One fsync for all that end in a step: those that come while the first one's record is made do not wait for it."""
    writer = writer_into(tmp_path)
    gate = Gate(writer._blocks._build)
    writer._blocks._build = gate  # type: ignore[assignment]
    names = [f"s{number}" for number in range(8)]
    for name in names:
        begin(writer, name, generated=2)
        writer.finish(name, "length")
        assert gate.entered.wait(10)
    gate.opened.set()
    assert writer.flush(timeout_s=20)
    writer.close()

    assert (names, 1) == (list(records_of(tmp_path)), len(list(tmp_path.glob("*.arrows"))))


@pytest.mark.parametrize("policy", ["lose", "wait"])
def test_a_full_queue_follows_its_policy(tmp_path: Path, policy: Any) -> None:
    """``lose`` keeps the record and marks its rows lost; ``wait`` keeps every row and holds up the engine."""
    writer = writer_into(tmp_path, queue_bytes=40, on_full=policy)
    gate = Gate(writer._blocks._build)
    writer._blocks._build = gate  # type: ignore[assignment]
    begin(writer, "first", generated=2)
    writer.finish("first", "length")
    assert gate.entered.wait(10)
    begin(writer, "second", generated=2)
    writer.finish("second", "length")
    if policy == "wait":
        threading.Timer(0.2, gate.opened.set).start()
    begin(writer, "third", generated=2)
    writer.finish("third", "length")
    gate.opened.set()
    writer.close()
    records = records_of(tmp_path)

    lost = {name: [one.state for one in record.captures] for name, record in records.items()}
    whole = ["captured", "not_fed"]
    assert {"first": whole, "second": whole, "third": ["lost", "not_fed"] if policy == "lose" else whole} == lost


def test_reports_merge() -> None:
    """Counts add up over engines and ranks."""
    left = EngineReport(coverage=Coverage(records=1), skipped=2, refusals={"a": 1})
    right = EngineReport(coverage=Coverage(records=3), lost=4, refusals={"a": 1, "b": 4})
    both = left.merge(right)

    assert (4, 2, 4, {"a": 2, "b": 4}) == (both.records, both.skipped, both.lost, dict(both.refusals))
    assert 6.0 == both.scalars()["routeplane/engine_refused"]
