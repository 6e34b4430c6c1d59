"""What a reader does with a bad record when it may go on: rows MISSING, bytes aside, counted; the rest untouched."""

from __future__ import annotations

import contextlib
import io
import pickle
import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from routeplane.errors import ChecksumError, DataError, ErrorKind, FormatError
from routeplane.record.codec import write_batch
from routeplane.record.interfaces import Admission
from routeplane.record.record import Prefix, RouteRecord
from routeplane.stream import QuarantineOptions, StreamReport, open_stream
from routeplane.stream.frames import frames_of_buffer
from routeplane.stream.ipc import IpcReader
from tests.stream.streams import (
    SPEC,
    Encoding,
    content,
    contents,
    forge,
    forged_column,
    record,
    record_lists,
    stream_of,
    trailer_of,
)

RECORDS = [record(sample, 4 + sample, group="g") for sample in range(3)]


def damaged(data: bytes, found: RouteRecord, *, encoding: Encoding = "plain") -> bytes:
    """The stream with one bit of this record's rows flipped: another expert, and a legal row still."""
    rows = found.routes.astype(np.uint8) if encoding == "narrow" else found.routes
    at = data.index(rows.tobytes())
    return data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]


def read(data: bytes, **policy: Any) -> tuple[list[RouteRecord], StreamReport]:
    """The records under quarantine, and the report."""
    reader = open_stream(data, on_corrupt="quarantine", **policy)
    assert isinstance(reader, IpcReader)
    return list(reader), reader.report()


@pytest.mark.parametrize("encoding", ["plain", "narrow"])
@pytest.mark.parametrize("bad", [0, 1, 2])
def test_one_bad_record(bad: int, encoding: Encoding) -> None:
    """The bad record keeps its key and tokens, has no rows, says so, and is counted; the others are as they were."""
    data = damaged(stream_of(RECORDS, encoding=encoding), RECORDS[bad], encoding=encoding)
    found, report = read(data)

    assert contents(RECORDS[:bad] + RECORDS[bad + 1 :]) == contents(found[:bad] + found[bad + 1 :])
    assert RECORDS[bad].key == found[bad].key
    np.testing.assert_array_equal(RECORDS[bad].token_ids, found[bad].token_ids)
    assert (found[bad].routes == -1).all()
    assert ["lost", "not_fed"] == [capture.state for capture in found[bad].captures]
    assert found[bad].attributes["quarantined"] == "true"
    assert found[bad].verify().checksum != RECORDS[bad].checksum
    assert report.complete
    assert (3, 1) == (report.records, len(report.quarantined))
    assert report.scalars()["routeplane/stream_quarantined"] == 1.0
    assert report.coverage.count("lost") == len(RECORDS[bad].routes) - 1


@pytest.mark.parametrize("encoding", ["plain", "narrow"])
def test_the_bytes_are_kept_as_they_came(encoding: Encoding) -> None:
    """What was set aside can be decoded again, by any Arrow reader: the one row, its damage and its checksum."""
    data = damaged(stream_of(RECORDS, encoding=encoding), RECORDS[1], encoding=encoding)
    with open_stream(data, on_corrupt="quarantine") as reader:
        list(reader)
    (aside,) = reader.report().quarantined

    assert isinstance(aside.error, ChecksumError)
    assert (1, RECORDS[1].key, True) == (aside.index, aside.key, aside.yielded)
    with pa.ipc.open_stream(reader.quarantine.raw(aside)) as kept:
        row = kept.read_all()
    assert 1 == row.num_rows
    assert ["sample-1"] == row["sample_id"].to_pylist()
    assert [RECORDS[1].checksum] == row["checksum"].to_pylist()
    stored = row["routes"].chunk(0).flatten().storage.flatten().to_numpy().astype(np.int16)
    expected = RECORDS[1].routes.ravel()
    differs = (stored != np.where(expected == -1, 0xFF if encoding == "narrow" else -1, expected)).sum()
    assert differs == 1


def test_what_is_set_aside_is_small() -> None:
    """A report crosses processes: with one bad record of many it does not carry the batch, nor keep it alive."""
    many = [record(sample, 200) for sample in range(40)]
    data = damaged(stream_of(many), many[20])
    _, report = read(data)

    assert len(pickle.dumps(report)) < len(data) / 8
    again: StreamReport = pickle.loads(pickle.dumps(report))
    assert report.quarantined[0].key == again.quarantined[0].key
    assert report.coverage.rows == again.coverage.rows


@given(record_lists(), st.data(), st.sampled_from(["plain", "narrow"]))
def test_any_record_may_be_bad(drawn: tuple[Any, list[RouteRecord]], data: st.DataObject, encoding: Encoding) -> None:
    """Whichever records' checksums do not match, these and no others lose their rows; all keep tokens and order."""
    spec, found = drawn
    bad = data.draw(st.sets(st.sampled_from(range(len(found))))) if found else set()
    sums = [item.checksum ^ (index in bad) for index, item in enumerate(found)]
    stored = [replace(item, checksum=checksum) for item, checksum in zip(found, sums, strict=True)]
    batches = [write_batch(stored, spec, encoding=encoding)] if stored else []
    schema = write_batch([], spec, encoding=encoding).schema if not stored else None
    trailer = trailer_of(stored, spec=spec, encoding=encoding, batches=len(batches))
    came, report = read(forge(batches, trailer=trailer, schema=schema))

    assert [item.key for item in found] == [item.key for item in came]
    assert sorted(bad) == [aside.index for aside in report.quarantined]
    for index, (item, other) in enumerate(zip(found, came, strict=True)):
        if index not in bad:
            assert content(item) == content(other)
            continue
        np.testing.assert_array_equal(item.token_ids, other.token_ids)
        assert len(item.routes) == len(other.routes)
        assert (other.routes == -1).all()
        assert {**item.attributes, "quarantined": "true"} == other.attributes
        assert item.spans == other.spans


# ----------------------------------------------------------------------------------------------------------------------
# Records that cannot stand in for themselves
# ----------------------------------------------------------------------------------------------------------------------

SPAN = {"start": 0, "stop": 4, "kind": "prompt", "role": None, "call": "c", "weights_version": None}
OTHERS = [[{**SPAN, "stop": item.num_tokens}] for item in RECORDS[1:]]
UNREADABLE: dict[str, tuple[str, Any]] = {
    "a null span": ("spans", [[None], *OTHERS]),
    "no spans": ("spans", [[], *OTHERS]),
    "spans that do not cover": ("spans", [[{**SPAN, "stop": 3}], *OTHERS]),
    "an unknown span kind": ("spans", [[{**SPAN, "kind": "x"}], *OTHERS]),
    "no tokens": ("token_ids", [[], RECORDS[1].token_ids, RECORDS[2].token_ids]),
    "an empty key": ("sample_id", ["", "sample-1", "sample-2"]),
    "a start behind the end": ("routes_start", [5, 0, 0]),
    "a start before the beginning": ("routes_start", [-20_000_000, 0, 0]),
    "a start without a prefix": ("routes_start", [1, 0, 0]),
    "an attribute twice": ("attributes", [[("a", "1"), ("a", "2")], [], []]),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_an_unreadable_record_is_counted_not_yielded(name: str) -> None:
    """Where tokens or spans are unreadable too, nothing stands in; the record is counted under its key."""
    column, values = UNREADABLE[name]
    data = forged_column(RECORDS, column, values)
    tracemalloc.start()
    found, report = read(data, on_truncated="keep", verify=False)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert [item.key for item in RECORDS[1:]] == [item.key for item in found]
    claimed = RECORDS[0].key._replace(sample_id="" if name == "an empty key" else "sample-0")
    assert [(0, claimed, False)] == [(aside.index, aside.key, aside.yielded) for aside in report.quarantined]
    assert peak < 4 * 2**20  # nothing is allocated for what the record claims to hold


def test_damaged_captures_are_no_loss() -> None:
    """Captures that contradict the rows cost the rows, not the tokens: what was fed is lost."""
    captures = [
        [{"start": 0, "stop": item.num_tokens, "state": "captured", "call": "c", "weights_version": None}]
        for item in RECORDS
    ]
    found, report = read(forged_column(RECORDS, "captures", captures))

    assert [item.key for item in RECORDS] == [item.key for item in found]
    assert [["lost"], ["lost"], ["lost"]] == [[capture.state for capture in item.captures] for item in found]
    assert [ErrorKind.COVERAGE] * 3 == [aside.error.kind for aside in report.quarantined]


def test_a_key_that_comes_twice() -> None:
    """The second record of a key is set aside whole: two records of one key are never handed on."""
    batch = write_batch(RECORDS, SPEC, encoding="plain")
    data = forge([batch, batch.slice(1, 1)], trailer=trailer_of([*RECORDS, RECORDS[1]], batches=2))
    found, report = read(data)

    assert contents(RECORDS) == contents(found)
    assert [(3, ErrorKind.DUPLICATE_KEY, False)] == [(a.index, a.error.kind, a.yielded) for a in report.quarantined]


def test_quarantined_twice() -> None:
    """A record that was quarantined before, was written again and is damaged again still keeps its tokens."""
    once, _ = read(damaged(stream_of(RECORDS), RECORDS[0]))
    again = replace(once[0], routes=RECORDS[0].routes, captures=RECORDS[0].captures, checksum=None)
    twice, report = read(damaged(stream_of([again]), again))

    assert [again.key] == [item.key for item in twice]
    assert twice[0].attributes["quarantined"] == "true"
    assert report.quarantined[0].yielded


def test_a_delta_keeps_what_stands_elsewhere() -> None:
    """A record whose first rows stand in another one loses its own rows only."""
    prefix = Prefix(sample_id="p", stop=2, checksum=5)
    delta = record(1, 5, routes=RECORDS[1].routes[2:], routes_start=2, prefix=prefix)
    (found,), _ = read(damaged(stream_of([delta]), delta))

    assert (2, prefix) == (found.routes_start, found.prefix)
    assert [("captured", 0, 2), ("lost", 2, 4), ("not_fed", 4, 5)] == [
        (c.state, c.start, c.stop) for c in found.captures
    ]


# ----------------------------------------------------------------------------------------------------------------------
# What quarantine is not for
# ----------------------------------------------------------------------------------------------------------------------


def test_containers_are_not_quarantined() -> None:
    """A damaged trailer or batch affects more than one record: it is raised under quarantine too."""
    data = stream_of(RECORDS)
    at = data.index(b'"digest":"') + 10
    other = data[:at] + (b"0" if data[at : at + 1] != b"0" else b"1") + data[at + 1 :]
    with pytest.raises(FormatError) as caught:
        read(other)

    assert caught.value.kind is ErrorKind.TRAILER


def test_raise_is_the_default() -> None:
    """Without being asked, the first bad record ends the reading."""
    data = damaged(stream_of(RECORDS), RECORDS[1])
    reader = iter(open_stream(data))

    assert content(RECORDS[0]) == content(next(reader))
    with pytest.raises(ChecksumError, match="sample-1"):
        next(reader)


def test_unverified_means_unverified_checksums_only() -> None:
    """``verify=False`` compares no checksums; an illegal row is refused all the same."""
    flipped = damaged(stream_of(RECORDS), RECORDS[1])
    illegal = RECORDS[1].routes.copy()
    illegal[0, 0] = 63
    at = flipped.index(RECORDS[2].routes.tobytes())
    twice = flipped[:at] + illegal[0].tobytes() + flipped[at + illegal[0].nbytes :]

    assert 3 == len(list(open_stream(flipped, verify=False)))
    with pytest.raises(ValueError, match="sample-2"):
        list(open_stream(twice, verify=False))


# ----------------------------------------------------------------------------------------------------------------------
# Alarms
# ----------------------------------------------------------------------------------------------------------------------


def stale(sample: int) -> RouteRecord:
    """Eighty different tokens with one and the same row: legal, verified, and no healthy capture."""
    rows = np.repeat(record(sample, 80).routes[:1], 80, axis=0)
    captured = (replace(record(sample, 81).captures[0], stop=80),)
    return record(sample, 80, routes=rows, captures=captured)


def test_alarms_are_counted() -> None:
    """A buffer that was never updated is counted, by kind, sample and token, and its records still come."""
    reader = open_stream(stream_of([record(0, 80), stale(1), stale(2)]))
    found = list(reader)
    report = reader.report()

    assert 3 == len(found)
    assert {"sample-1", "sample-2"} == {alarm.sample for alarm in report.alarms}
    assert {"alarm"} == {alarm.severity for alarm in report.alarms}
    assert ErrorKind.IDENTICAL_ROWS in {alarm.kind for alarm in report.alarms}
    assert report.alarm_count == len(report.alarms) == report.scalars()["routeplane/stream_alarms"]


def test_alarms_are_raised_or_ignored_by_choice() -> None:
    """What is a statistic to one is an error to another, and nothing to a third."""
    data = stream_of([record(0, 80), stale(1)])
    reader = iter(open_stream(data, on_alarm="raise"))
    assert content(record(0, 80)) == content(next(reader))
    with pytest.raises(DataError, match="sample-1"):
        next(reader)
    silent = open_stream(data, on_alarm="ignore")

    assert 2 == len(list(silent))
    assert 0 == silent.report().alarm_count


# ----------------------------------------------------------------------------------------------------------------------
# Batches before the forward
# ----------------------------------------------------------------------------------------------------------------------


def _admission(verdict: Admission) -> tuple[bool, int]:
    return verdict.admitted, verdict.code


@pytest.mark.parametrize(("share", "admitted"), [(None, True), (1.0, True), (0.34, True), (0.2, False), (0.0, False)])
def test_a_bound_on_missing_rows(share: float | None, admitted: bool) -> None:
    """Quarantined rows are missing: a batch with more than was allowed is refused, with a code that ranks reduce."""
    reader = open_stream(damaged(stream_of(RECORDS), RECORDS[1]), on_corrupt="quarantine", max_missing=share)
    verdict = reader.admit(list(reader))

    assert (4, 12) == (verdict.coverage.missing, verdict.coverage.fed)
    assert admitted == verdict.admitted == (verdict.code == 0)
    assert (verdict.admitted, verdict.code) == _admission(pickle.loads(pickle.dumps(verdict)))
    if not admitted:
        with pytest.raises(ValueError, match="missing"):
            verdict.require()


def test_a_batch_of_another_stream_is_refused() -> None:
    """Records of another geometry, or one twice, are found before any forward."""
    reader = open_stream(stream_of(RECORDS))
    found = list(reader)
    other = record(9, spec=replace(SPEC, num_experts=32))

    assert [ErrorKind.SPEC_MISMATCH] == [p.kind for p in reader.admit([*found, other]).problems]
    assert [ErrorKind.DUPLICATE_KEY] == [p.kind for p in reader.admit([*found, found[0]]).problems]
    assert reader.admit(found).admitted


def test_many_bad_records_are_kept_in_a_file_and_bounded() -> None:
    """Hundreds of bad records: all are counted, the first few thousand listed, bytes go to a file up to its bound."""
    many = [record(sample, 2_000) for sample in range(200)]
    data, at = bytearray(stream_of(many)), 0
    for one in many:
        at = data.index(one.routes.tobytes(), at)
        data[at] ^= 4
    size = len(data)
    list(open_stream(stream_of(many)))  # compiled loops are loaded
    reader = open_stream(bytes(data), on_corrupt="quarantine", quarantine=QuarantineOptions(max_bytes=2**20))
    tracemalloc.start()
    for _ in reader:
        pass
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    kept = [reader.quarantine.raw(entry) for entry in reader.report().quarantined]
    assert (200, 200 - reader.quarantine.dropped) == (reader.report().quarantined_count, sum(map(bool, kept)))
    assert 0 < sum(len(raw) for raw in kept if raw is not None) <= 2**20
    assert peak < size / 2


def test_one_flipped_bit_hides_one_batch_alone() -> None:
    """Whatever bit of a batch is flipped, header or body: the other batches come whole, and its record is counted."""
    data = stream_of(RECORDS, max_bytes=1)
    schema, *batches, _ = [frame.data.size for frame in frames_of_buffer(pa.py_buffer(data))]
    start, found = schema + batches[0], 0
    for at in [*range(8), *range(8, batches[1], 13)]:
        place, mask = start + at, 1 << at % 8
        came, report = read(data[:place] + bytes([data[place] ^ mask]) + data[place + 1 :])
        whole = [item for item in came if "quarantined" not in item.attributes]
        assert contents([RECORDS[0], RECORDS[2]]) == contents(item for item in whole if item.key != RECORDS[1].key), at
        assert len(whole) == 3 or 1 == report.skipped_records + report.quarantined_count, at
        found += len(whole) == 2
    assert found > len(batches)


@pytest.mark.parametrize("as_pipe", [False, True])
def test_a_bit_that_claims_compression_hides_one_batch_alone(as_pipe: bool) -> None:
    """A batch that claims to be compressed in a stream that is not is damaged; a compressed stream is refused."""
    data = stream_of(RECORDS, max_bytes=1)
    schema, *batches, _ = [frame.data.size for frame in frames_of_buffer(pa.py_buffer(data))]
    start, claims = schema + batches[0], []
    for bit in range(8 * (start + 8), 8 * (start + batches[1])):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        with contextlib.suppress(FormatError):
            if [frame.compressed for frame in frames_of_buffer(pa.py_buffer(bytes(flipped)))][2]:
                claims.append(bytes(flipped))
    assert claims
    for claim in claims:
        source = io.BytesIO(claim) if as_pipe else claim
        with open_stream(source, on_corrupt="quarantine") as reader:
            came = list(reader)
        assert contents([RECORDS[0], RECORDS[2]]) == contents(came)
        assert (1, 1) == (reader.report().skipped_batches, reader.report().skipped_records)
