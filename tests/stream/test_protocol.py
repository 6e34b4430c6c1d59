"""The trailer, the read policy and the report as values: what they say, refuse, add up to, and carry elsewhere."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from routeplane.errors import DataError, ErrorKind, FormatError, Problem, UsageError
from routeplane.record.batches import Trailer, TrailerCounter
from routeplane.record.policy import MAX_ALARMS, QuarantineEntry, ReadPolicy, RecordCounts
from routeplane.record.record import RecordKey, RouteRecord
from routeplane.record.spans import Coverage
from routeplane.stream import StreamReport, open_stream
from routeplane.testing.strategies import records, specs
from tests.format import reference
from tests.stream.streams import SPEC, record, stream_of

COUNTS = st.integers(0, 2**63 - 1)
TRAILERS = st.builds(Trailer, batches=COUNTS, records=COUNTS, tokens=COUNTS, digest=st.integers(0, 2**64 - 1))

# ----------------------------------------------------------------------------------------------------------------------
# Trailer
# ----------------------------------------------------------------------------------------------------------------------


@given(TRAILERS)
def test_trailer_round_trip(trailer: Trailer) -> None:
    """A trailer's JSON gives it back, and has the digest as 16 digits."""
    text = trailer.to_json()

    assert trailer == Trailer.from_json(text)
    assert len(json.loads(text)["digest"]) == 16


@given(TRAILERS, st.data())
def test_a_trailer_with_another_character(trailer: Trailer, data: st.DataObject) -> None:
    """One character changed: refused, or another trailer; never the same one in another spelling."""
    text = trailer.to_json()
    at = data.draw(st.integers(0, len(text) - 1))
    other = data.draw(
        st.characters(min_codepoint=33, max_codepoint=126).filter(lambda character: character != text[at])
    )
    try:
        found = Trailer.from_json(text[:at] + other + text[at + 1 :])
    except FormatError:
        return
    assert trailer != found


@given(
    specs(),
    st.sampled_from(["plain", "narrow"]),
    st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(1, 99))),
    COUNTS,
)
def test_counting(spec: Any, encoding: Any, records: list[tuple[int, int]], minor: int) -> None:
    """A counter says what passed, and its digest is the one that the specification gives."""
    version = f"1.{minor}"
    counter = TrailerCounter(spec, encoding, version=version)
    for checksum, tokens in records:
        counter.add_batch()
        counter.add_record(checksum, tokens)
    digest = reference.stream_digest(
        version,
        json.loads(spec.to_json()),
        encoding=encoding,
        checksums=[f"{checksum:016x}" for checksum, _ in records],
    )
    expected = {
        "batches": len(records),
        "records": len(records),
        "tokens": sum(n for _, n in records),
        "digest": digest,
    }

    assert expected == json.loads(counter.trailer().to_json())
    counter.check(counter.trailer())


def test_a_trailer_that_does_not_agree() -> None:
    """The error names what was counted and what came."""
    counter = TrailerCounter(SPEC, "plain")
    declared = counter.trailer()
    counter.add_record(7, 3)
    with pytest.raises(FormatError, match=r"records=0.*records=1") as caught:
        counter.check(declared)

    assert caught.value.kind is ErrorKind.TRAILER


# ----------------------------------------------------------------------------------------------------------------------
# Policy
# ----------------------------------------------------------------------------------------------------------------------

BAD_POLICIES: list[dict[str, Any]] = [
    {"on_truncated": "ignore"},
    {"on_truncated": None},
    {"on_truncated": True},
    {"on_corrupt": "keep"},
    {"on_corrupt": "skip"},
    {"on_alarm": "warn"},
    {"max_missing": -0.1},
    {"max_missing": 1.1},
    {"max_missing": float("nan")},
]


@pytest.mark.parametrize("policy", BAD_POLICIES, ids=str)
def test_bad_policies(policy: dict[str, Any]) -> None:
    """A policy that does not exist is refused before anything is opened, with those that do."""
    with pytest.raises(UsageError, match="expected") as caught:
        open_stream("/nowhere", **policy)

    assert caught.value.kind is ErrorKind.ARGUMENT


@pytest.mark.parametrize("share", [None, 0.0, 0.5, 1.0])
def test_good_policies(share: float | None) -> None:
    """Shares from nothing to everything are bounds."""
    assert share == ReadPolicy(max_missing=share).max_missing


# ----------------------------------------------------------------------------------------------------------------------
# Report
# ----------------------------------------------------------------------------------------------------------------------


def report(count: int, *, truncated: bool = False, complete: bool = True) -> StreamReport:
    """A report of some records with one of them set aside."""
    error = DataError("bad", kind=ErrorKind.CHECKSUM)
    entry = QuarantineEntry(index=count, key=RecordKey("s", 0, count), error=error, yielded=True)
    found = StreamReport(
        batches=count, quarantined_count=1, quarantined=(entry,), outside=1, truncated=truncated, complete=complete
    )
    counts = RecordCounts()
    for sample in range(count):
        counts.add(record(sample))
    return found.with_counts(counts)


@given(before=st.integers(0, 3), found=st.lists(records(), max_size=4))
def test_counting_records_reports_what_adding_them_one_by_one_does(before: int, found: list[RouteRecord]) -> None:
    """Counts of no record, or of many, on top of any report."""
    start, counts = report(before), RecordCounts()
    expected = start
    for each in found:
        one = RecordCounts()
        one.add(each)
        expected = expected.with_counts(one)
        counts.add(each)

    assert expected == start.with_counts(counts)
    assert found == [] or counts.coverage() == Coverage.of_records(each.captures for each in found)


def test_reports_add_up() -> None:
    """Reports of two streams, or of two ranks, are one: counts add, one cut stream cuts all, complete needs all."""
    whole = report(2).merge(report(3))

    assert (5, 5, 25) == (whole.batches, whole.records, whole.tokens)
    assert [2, 3] == [aside.index for aside in whole.quarantined]
    assert 2 == whole.outside
    assert Coverage.of(record(0).captures).count("captured") * 5 == whole.coverage.count("captured")
    assert (False, True) == (whole.truncated, whole.complete)
    cut = whole.merge(report(1, truncated=True, complete=False))
    assert (True, False) == (cut.truncated, cut.complete)
    assert whole.scalars() == report(3).merge(report(2)).scalars()


def test_alarms_add_up() -> None:
    """All alarms are counted; of many, the first are kept word for word, so that a report stays small."""
    alarm = Problem(kind=ErrorKind.CONSTANT_LAYER, message="constant", sample="s", layer=1, severity="alarm")
    many = report(1).with_alarms([alarm] * 50)
    both = many.merge(many)

    assert (50, 50) == (many.alarm_count, len(many.alarms))
    assert (100, MAX_ALARMS) == (both.alarm_count, len(both.alarms))
    assert 100.0 == both.scalars()["routeplane/stream_alarms"]
    assert 0 == report(1).with_alarms([]).alarm_count


def test_report_names_are_stable() -> None:
    """A metrics logger finds flat numbers under fixed names, with the prefix it asked for."""
    scalars = report(2).scalars(prefix="train/")

    assert {f"train/stream_{name}" for name in NAMES} == set(scalars)
    expected = {"batches": 2.0, "records": 2.0, "tokens": 10.0, "quarantined": 1.0, "alarms": 0.0, "truncated": 0.0}
    assert expected == {name: scalars[f"train/stream_{name}"] for name in expected}
    assert all(isinstance(value, float) for value in scalars.values())


NAMES = {
    "alarms",
    "batches",
    "missing_share",
    "outside_selection",
    "quarantine_dropped",
    "quarantined",
    "records",
    "repeats",
    "rows",
    "rows_aborted",
    "rows_cached",
    "rows_captured",
    "rows_lost",
    "rows_not_captured",
    "rows_not_fed",
    "rows_partial",
    "skipped_batches",
    "skipped_records",
    "tokens",
    "truncated",
}


def test_reports_cross_processes() -> None:
    """A report pickles, with what was set aside and why."""
    whole = report(2)
    again: StreamReport = pickle.loads(pickle.dumps(whole))

    assert whole.scalars() == again.scalars()
    assert (whole.quarantined[0].key, "bad", ErrorKind.CHECKSUM) == (
        again.quarantined[0].key,
        again.quarantined[0].error.message,
        again.quarantined[0].error.kind,
    )


def test_an_unread_stream_is_not_complete() -> None:
    """Complete means that the trailer was met: not before iteration, nor in the middle of it."""
    reader = open_stream(stream_of([record(0), record(1)]))
    assert not reader.report().complete
    iterator = iter(reader)
    next(iterator)
    assert (1, False) == (reader.report().records, reader.report().complete)
    list(iterator)
    assert (2, True) == (reader.report().records, reader.report().complete)
