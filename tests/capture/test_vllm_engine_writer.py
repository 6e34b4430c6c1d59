"""What a writer inside an engine is told, and what it keeps: configuration, requests, sinks. No engine runs.

Axes: R rows, D decoder layers, L captured layers, K slots.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from routeplane.capture.vllm.engine_writer import (
    KEY,
    EngineReport,
    EngineWriter,
    RequestOptions,
    WriterConfig,
    build_sink,
    request_args,
)
from routeplane.errors import ErrorKind, UsageError
from routeplane.record.spec import RouteSpec
from routeplane.stream import MemoryStream, open_stream

SPEC = RouteSpec(num_experts=16, top_k=2, layer_ids=(1, 2), model="m")
CONFIG = WriterConfig(sink="routeplane.stream.new_stream", target="x.arrows")


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
    """Through ``extra_args`` and through the text that HTTP carries; what is not said is the configuration's."""
    args = request_args(capture=capture, sample_id=sample_id, attempt=attempt, weights_version=version)
    expected = RequestOptions(capture=capture, sample_id=sample_id, attempt=attempt, weights_version=version)

    assert expected == RequestOptions.from_extra_args(args, config=CONFIG)
    assert expected == RequestOptions.from_extra_args({KEY: json.dumps(args[KEY])}, config=CONFIG)


def test_who_says_nothing_gets_the_configuration() -> None:
    """``default`` and ``weights_version`` are for requests without extra arguments."""
    skipping = WriterConfig(sink="a.b", target="x", default="skip", weights_version=3)

    assert RequestOptions(capture=False, weights_version=3) == RequestOptions.from_extra_args(None, config=skipping)
    assert RequestOptions(sample_id="s", weights_version=3) == RequestOptions.from_extra_args(
        request_args(sample_id="s"), config=skipping
    )


@pytest.mark.parametrize(
    ("options", "request_id", "name"),
    [
        (RequestOptions(), "7-0123abcd", ("7-0123abcd", None)),
        (RequestOptions(sample_id="s", group="g"), "1_7-0123abcd", ("s", "g")),
        (RequestOptions(sample_id="s", choices=3), "1_7-0123abcd", ("s/1", "s")),
        (RequestOptions(choices=3), "12_7-0123abcd", ("7-0123abcd/12", "7-0123abcd")),
        (RequestOptions(sample_id="s", group="g", choices=3), "0_x", ("s/0", "g")),
    ],
    ids=["nothing", "named", "a choice", "a choice without a name", "a choice in a group"],
)
def test_sequences_are_named(options: RequestOptions, request_id: str, name: tuple[str, str | None]) -> None:
    """A single sequence has the sample's name, one of several its index besides."""
    assert name == options.name_of(request_id)


BAD_CONFIG: dict[str, Any] = {
    "nothing": None,
    "another's": {"other": {}},
    "no sink": {KEY: {"target": "x"}},
    "no target": {KEY: {"sink": "a.b"}},
    "an unknown key": {KEY: {"sink": "a.b", "target": "x", "spec": 1}},
    "no dots": {KEY: {"sink": "open", "target": "x"}},
    "an expression": {KEY: {"sink": "os.system('x')", "target": "x"}},
    "a target without a name": {KEY: {"sink": "a.b", "target": 3}},
    "another default": {KEY: {"sink": "a.b", "target": "x", "default": "maybe"}},
    "streams of nothing": {KEY: {"sink": "a.b", "target": "x{index}", "records_per_stream": 0}},
    "streams of one name": {KEY: {"sink": "a.b", "target": "x", "records_per_stream": 2}},
    "a version of text": {KEY: {"sink": "a.b", "target": "x", "weights_version": "2"}},
    "options of text": {KEY: {"sink": "a.b", "target": "x", "options": "narrow"}},
}


@pytest.mark.parametrize("given_config", BAD_CONFIG.values(), ids=BAD_CONFIG)
def test_a_bad_configuration_is_refused(given_config: Any) -> None:
    """Each is a UsageError that names what was expected."""
    with pytest.raises(UsageError):
        WriterConfig.from_additional(given_config)


@pytest.mark.parametrize("name", ["routeplane.stream.nothing", "routeplane.nothing.f", "json.decoder.NaN"])
def test_a_sink_that_cannot_be_called_is_refused(name: str) -> None:
    """A dotted name must lead to a factory."""
    with pytest.raises(UsageError) as caught:
        build_sink(name, "x", spec=SPEC, options={})
    assert ErrorKind.ARGUMENT == caught.value.kind


# ----------------------------------------------------------------------------------------------------------------------
# The ledger
# ----------------------------------------------------------------------------------------------------------------------


def ledger(folder: Path, **changes: Any) -> EngineWriter:
    """A ledger of rank 3 that writes into a folder."""
    settings = {"sink": "routeplane.stream.new_stream", "target": str(folder / "r{rank}-{index}.arrows"), **changes}
    return EngineWriter(SPEC, WriterConfig(**settings), rank=3, logprobs_mode="raw_logprobs")


def fly(books: EngineWriter, name: str, *, generated: int, extra: Mapping[str, Any] | None = None) -> dict[str, str]:
    """A sequence of 4 prompt tokens and so many generated ones; returns what its answer says."""
    books.open(name, [1, 2, 3, 4], extra_args=extra)
    flight = books.flights[name]
    flight.cached = 0
    flight.add([10], layers_of(0, 4))
    for at in range(1, generated):
        flight.add([10 + at], layers_of(3 + at, 4 + at))
    return books.finish(name, "length")


def test_rows_of_any_number_of_steps_are_all_there(tmp_path: Path) -> None:
    """Longer than what is kept as views of single steps: every row at its token."""
    books = ledger(tmp_path, target=str(tmp_path / "one.arrows"))
    for generated in (1, 2, 63, 64, 65, 300):
        assert "routeplane" in fly(books, f"s{generated}", generated=generated)
    books.close()
    books.close()

    for record in open_stream(tmp_path / "one.arrows"):
        assert layers_of(0, record.num_tokens - 1)[:, 1:].tolist() == record.routes[:-1].tolist()
    assert 6 == books.report().records


def test_streams_roll_and_wear_rank_and_index(tmp_path: Path) -> None:
    """Two records per stream: each stream is whole when the next begins, and tickets name the right one."""
    books = ledger(tmp_path, records_per_stream=2, stream="s-{rank}-{index}")
    tickets = [json.loads(fly(books, f"s{index}", generated=3)["routeplane"]) for index in range(5)]
    books.close()

    assert ["s-3-000000"] * 2 + ["s-3-000001"] * 2 + ["s-3-000002"] == [ticket["stream"] for ticket in tickets]
    held = [len(list(open_stream(path))) for path in sorted(tmp_path.glob("r3-*.arrows"))]
    assert [2, 2, 1] == held


def test_the_configured_version_ends_with_a_pause(tmp_path: Path) -> None:
    """After it, silent requests are of unknown weights and tell nothing of those in flight; one that says so does."""
    books = ledger(tmp_path, target=str(tmp_path / "one.arrows"), weights_version=5)
    books.open("a", [1, 2, 3, 4], extra_args=None)
    books.flights["a"].cached = 0
    books.flights["a"].add([10, 11], layers_of(0, 5))
    books.weights_may_have_changed()
    books.flights["a"].add([12], layers_of(5, 6))
    fly(books, "silent", generated=2)
    books.weights_may_have_changed()
    books.flights["a"].add([13], layers_of(6, 7))
    fly(books, "saying", generated=2, extra=request_args(sample_id="saying", weights_version=6))
    books.finish("a", "length")
    books.close()
    records = {record.sample_id: record for record in open_stream(tmp_path / "one.arrows")}

    spans = {name: [(one.stop, one.weights_version) for one in record.spans] for name, record in records.items()}
    assert [(4, None), (6, 5), (7, None), (8, 6)] == spans["a"]
    assert [(4, None), (6, None)] == spans["silent"]
    assert [(4, None), (6, 6)] == spans["saying"]
    captures = [(one.stop, one.weights_version) for one in records["a"].captures]
    assert [(5, 5), (6, None), (7, 6), (8, None)] == captures


def test_what_is_in_flight_at_the_end_is_aborted(tmp_path: Path) -> None:
    """Closing records unfinished sequences with the reason, before the trailer."""
    books = ledger(tmp_path, target=str(tmp_path / "one.arrows"))
    books.open("a", [1, 2, 3, 4], extra_args=None)
    books.flights["a"].add([10, 11], layers_of(0, 4))
    books.open("b", [1, 2, 3, 4], extra_args=None)
    books.close()
    records = {record.sample_id: record for record in open_stream(tmp_path / "one.arrows")}

    states = {name: [(one.stop, one.state) for one in record.captures] for name, record in records.items()}
    assert {"a": [(3, "cached"), (4, "captured"), (5, "aborted"), (6, "not_fed")], "b": [(4, "aborted")]} == states


def test_a_sequence_without_rows_is_refused_and_the_stream_goes_on(tmp_path: Path) -> None:
    """No rows where there should be some, and zeros where ids should be: said, counted, never written."""
    books = ledger(tmp_path, target=str(tmp_path / "one.arrows"))
    books.open("none", [1, 2], extra_args=None)
    books.flights["none"].tokens += [3]
    assert "expected rows" in books.finish("none", "length")["routeplane_error"]
    books.open("zeros", [1, 2], extra_args=None)
    books.flights["zeros"].add([3], np.zeros((2, 3, 2), dtype=np.uint8))
    assert "zeros in" in books.finish("zeros", "length")["routeplane_error"]
    fly(books, "good", generated=2)
    books.close()

    assert ["good"] == [record.sample_id for record in open_stream(tmp_path / "one.arrows")]
    assert {"routes_missing": 1, "uncaptured_slot": 1} == dict(books.report().refusals)
    assert "closed" in fly(books, "late", generated=2)["routeplane_error"]


def test_a_sink_may_be_anything(tmp_path: Path) -> None:
    """The factory gets the target as it is configured, and tickets the name that goes with it."""
    stream = MemoryStream()
    books = ledger(tmp_path, target=stream, stream="memory")
    said = fly(books, "s", generated=2, extra=request_args(sample_id="a", weights_version=5))
    books.close()
    [record] = open_stream(stream)

    assert ("memory", ["a", 0, 0]) == (json.loads(said["routeplane"])["stream"], json.loads(said["routeplane"])["key"])
    assert [(5, 5), (6, None)] == [(one.stop, one.weights_version) for one in record.captures]


def test_reports_merge() -> None:
    """Counts add up over engines and ranks."""
    left = EngineReport(records=1, skipped=2, refusals={"a": 1})
    right = EngineReport(records=3, refusals={"a": 1, "b": 4})
    both = left.merge(right)

    assert (4, 2, {"a": 2, "b": 4}) == (both.records, both.skipped, dict(both.refusals))
    assert 6.0 == both.scalars()["routeplane/engine_refused"]
