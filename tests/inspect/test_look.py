"""What is said of streams at rest: clean ones, and ones with named damage, down to sample, token and layer.

Damage is done to the bytes of a real file: rows are watermarked, so that each stands in it once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from routeplane.errors import ErrorKind, FormatError, Problem
from routeplane.inspect.look import StreamCheck, StreamSummary, summarise
from routeplane.inspect.look import check as check_stream
from routeplane.record.record import Prefix, RouteRecord
from routeplane.stream import new_stream
from routeplane.testing.builders import watermark, watermarked_record, watermarked_spec
from tests.stream.streams import forge
from tests.stream.streams import record as narrow_record


def summarise_stream(path: Path | str) -> StreamSummary:
    """The summary of one stream."""
    [found] = summarise(path)
    assert isinstance(found, StreamSummary)
    return found


SPEC = watermarked_spec(layers=(1, 2, 5), top_k=4)
LENGTHS = (5, 40, 7)
RECORDS = tuple(watermarked_record(sample, num_tokens=size, spec=SPEC) for sample, size in enumerate(LENGTHS))


def written(path: Path, records: Sequence[RouteRecord] = RECORDS, **options: Any) -> bytes:
    """A stream file, and its bytes."""
    with new_stream(path, records[0].spec, **options) as sink:
        for record in records:
            sink.write(record)
    return path.read_bytes()


def row(sample: int, token: int, layer: int) -> bytes:
    """The watermarked row as it stands in a plain stream."""
    return watermark(sample, token, layer=layer, k=np.arange(SPEC.top_k)).tobytes()


def ids(*values: int) -> bytes:
    """A row of one's own making."""
    return np.array(values, dtype="<i2").tobytes()


def damaged(path: Path, changes: Sequence[tuple[bytes, bytes]], **options: Any) -> StreamCheck:
    """The check of a stream in which each of the given bytes, which stand there once, were replaced."""
    data = written(path, **options)
    for old, new in changes:
        assert (1, len(old)) == (data.count(old), len(new))
        data = data.replace(old, new)
    path.write_bytes(data)
    return check_stream(path)


def places(check: StreamCheck) -> list[tuple[str, str | None, int | None, int | None]]:
    """Kind, sample, token and layer of every problem."""
    return [(str(found.kind), found.sample, found.token, found.layer) for found in check.problems]


# ---- clean streams --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["plain", "auto"])
@pytest.mark.parametrize("max_bytes", [1, 2**20], ids=["many_batches", "one_batch"])
def test_a_clean_stream_is_valid(tmp_path: Path, encoding: str, max_bytes: int) -> None:
    """Nothing is found, and everything is counted."""
    records = RECORDS if encoding == "plain" else [narrow_record(sample) for sample in range(3)]
    written(tmp_path / "x.arrows", records, encoding=encoding, max_bytes=max_bytes)
    check, summary = check_stream(tmp_path / "x.arrows"), summarise_stream(tmp_path / "x.arrows")
    tokens = sum(record.num_tokens for record in records)
    assert ((), "valid", 3, tokens) == (check.problems, check.verdict, check.records, check.tokens)
    assert {"captured": tokens - 3, "not_fed": 3} == check.to_dict()["coverage"]
    expected = {"records": 3, "tokens": tokens, "complete": True, "quarantined": 0, "missing_share": 0.0}
    assert expected == {name: summary.to_dict()[name] for name in expected}
    assert (3 if max_bytes == 1 else 1) == summary.report.batches


def test_a_stream_without_records_is_valid(tmp_path: Path) -> None:
    """A trailer that counts nothing is a whole stream."""
    with new_stream(tmp_path / "x.arrows", SPEC):
        pass
    check = check_stream(tmp_path / "x.arrows")
    assert ((), 0, 0, {}) == (check.problems, check.records, check.tokens, check.to_dict()["coverage"])
    assert summarise_stream(tmp_path / "x.arrows").complete


def test_a_summary_says_what_the_schema_says(tmp_path: Path) -> None:
    """Geometry, encoding, token columns and size; all of it JSON."""
    records = [replace(record, columns={"age": np.arange(record.num_tokens)}, checksum=None) for record in RECORDS]
    data = written(tmp_path / "x.arrows", records)
    found = json.loads(json.dumps(summarise_stream(tmp_path / "x.arrows").to_dict()))
    expected = {
        "path": str(tmp_path / "x.arrows"),
        "bytes": len(data),
        "format": "1.1",
        "encoding": "plain",
        "model": "watermarked",
        "num_experts": SPEC.num_experts,
        "top_k": 4,
        "layers": 3,
        "layer_ids": [1, 2, 5],
        "token_columns": ["age"],
        "coverage": {"captured": sum(LENGTHS) - 3, "not_fed": 3},
    }
    assert expected == {name: found[name] for name in expected}


def test_missing_rows_are_coverage_and_no_problem(tmp_path: Path) -> None:
    """Rows that were declared lost are counted, in a stream that is valid."""
    records = [watermarked_record(0, num_tokens=9, spec=SPEC, missing=[2, (4, 5)])]
    written(tmp_path / "x.arrows", records)
    check = check_stream(tmp_path / "x.arrows")
    assert ({"captured": 6, "partial": 1, "lost": 1, "not_fed": 1}, "valid") == (
        check.to_dict()["coverage"],
        check.verdict,
    )
    assert 2 / 8 == summarise_stream(tmp_path / "x.arrows").report.coverage.missing_share


# ---- illegal and changed rows ---------------------------------------------------------------------------------------

ROWS = {
    "duplicate": (ids(7, 7, 8, 9), ErrorKind.DUPLICATE_ID),
    "zeros": (ids(0, 0, 0, 0), ErrorKind.DUPLICATE_ID),
    "too_large": (ids(1, 2, 3, SPEC.experts_per_layer[0]), ErrorKind.ID_OUT_OF_RANGE),
    "partly_missing": (ids(-1, 2, 3, 4), ErrorKind.PARTIAL_ROW),
    "other_negative": (ids(-2, -2, -2, -2), ErrorKind.PARTIAL_ROW),
}


@pytest.mark.parametrize(("new", "kind"), ROWS.values(), ids=ROWS)
@pytest.mark.parametrize(("sample", "token", "layer"), [(0, 0, 1), (1, 23, 2), (2, 5, 5)])
def test_an_illegal_row_is_named(
    tmp_path: Path, new: bytes, kind: ErrorKind, sample: int, token: int, layer: int
) -> None:
    """Its sample, its token and its decoder layer; the other records are read as ever."""
    check = damaged(tmp_path / "x.arrows", [(row(sample, token, layer), new)])
    assert [(str(kind), f"sample-{sample}", token, layer)] == places(check)
    assert (3, sum(LENGTHS)) == (check.records, check.tokens)
    fed = LENGTHS[sample] - 1
    assert {"captured": sum(LENGTHS) - 3 - fed, "lost": fed, "not_fed": 3} == check.to_dict()["coverage"]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(
    bad=st.sets(
        st.sampled_from(
            [(s, t, layer) for s, size in enumerate(LENGTHS) for t in range(size - 1) for layer in SPEC.layer_ids]
        ),
        min_size=1,
    )
)
def test_every_illegal_row_is_found(tmp_path: Path, bad: set[tuple[int, int, int]]) -> None:
    """However many there are, in token order, and no other."""
    changes = [(row(*place), ids(7, 7, 8, 9)) for place in bad]
    check = damaged(tmp_path / "x.arrows", changes)
    assert [("duplicate_id", f"sample-{s}", token, layer) for s, token, layer in sorted(bad)] == places(check)


def test_no_number_of_illegal_rows_is_cut_short(tmp_path: Path) -> None:
    """117 bad rows in one record are 117 problems."""
    bad = [(1, token, layer) for token in range(39) for layer in SPEC.layer_ids]
    check = damaged(tmp_path / "x.arrows", [(row(*place), ids(7, 7, 8, 9)) for place in bad])
    assert ("117 errors, 0 alarms", bad[-1][1:]) == (check.verdict, places(check)[-1][2:])


def delta() -> RouteRecord:
    """Tokens 0..9 of which rows 4..9 stand here, the others in sample-0."""
    whole = watermarked_record(3, num_tokens=10, spec=SPEC)
    prefix = Prefix(sample_id="sample-0", stop=4, checksum=RECORDS[0].checksum)
    return replace(whole, routes=whole.routes[4:], routes_start=4, prefix=prefix, checksum=None)


def test_tokens_are_absolute_in_a_delta(tmp_path: Path) -> None:
    """A record whose first rows stand elsewhere counts its tokens from the beginning all the same."""
    changes = [(row(3, token, 2), ids(7, 7, 8, 9)) for token in (4, 6, 8)]
    check = damaged(tmp_path / "x.arrows", changes, records=[*RECORDS, delta()])
    assert [("duplicate_id", "sample-3", token, 2) for token in (4, 6, 8)] == places(check)


def test_a_legal_change_is_a_checksum_problem(tmp_path: Path) -> None:
    """Another expert, token or log-probability: legal, not what was captured; a summary compares no checksum."""
    token_ids = np.array([2_001, 2_002, 2_003], dtype="<i4")
    for change in (
        (row(2, 3, 5), ids(4, 3, 2, 1)),
        (token_ids.tobytes(), token_ids[[0, 2, 1]].tobytes()),
        (np.float32(-3 - 4 / 1024).tobytes(), np.float32(-3).tobytes()),
    ):
        check = damaged(tmp_path / "x.arrows", [change])
        assert ([("checksum", "sample-2", None, None)], 3) == (places(check), check.records)
        assert 0 == summarise_stream(tmp_path / "x.arrows").to_dict()["quarantined"]


def test_rows_that_are_not_declared_missing_are_named(tmp_path: Path) -> None:
    """A token whose rows were wiped to MISSING contradicts its capture, also where only one layer was."""
    wiped = [(row(1, 11, layer), ids(-1, -1, -1, -1)) for layer in SPEC.layer_ids]
    assert [("coverage", "sample-1", 11, None)] == places(damaged(tmp_path / "x.arrows", wiped))
    assert [("coverage", "sample-1", 11, None)] == places(damaged(tmp_path / "x.arrows", wiped[:1]))


def test_problems_come_in_the_order_of_the_stream(tmp_path: Path) -> None:
    """Different damage in every record is found in one reading."""
    changes = [
        (row(2, 0, 5), ids(-1, 2, 3, 4)),
        (row(0, 1, 1), ids(4, 3, 2, 1)),
        (row(1, 4, 1), ids(1, 2, 3, 32_760)),
        (row(1, 3, 2), ids(7, 7, 8, 9)),
    ]
    for max_bytes in (1, 2**20):
        check = damaged(tmp_path / "x.arrows", changes, max_bytes=max_bytes)
        assert [
            ("checksum", "sample-0", None, None),
            ("duplicate_id", "sample-1", 3, 2),
            ("id_out_of_range", "sample-1", 4, 1),
            ("partial_row", "sample-2", 0, 5),
        ] == places(check)


# ---- damaged records ------------------------------------------------------------------------------------------------


def test_an_id_that_became_anothers_is_named_as_it_claims(tmp_path: Path) -> None:
    """The checksum covers the key: the second record of that name is the bad one, and replaces no other record."""
    check = damaged(tmp_path / "x.arrows", [(b"sample-0sample-1", b"sample-0sample-0")])
    assert [("checksum", "sample-0", None, None)] == places(check)
    assert 2 == check.records


def test_a_record_that_cannot_be_read_names_its_sample(tmp_path: Path) -> None:
    """Spans that leave a hole: no record stands in for it, and yet its name is known."""
    stops = np.array([2, 5, 20, 40, 3, 7], dtype="<i8")
    other = np.array([2, 5, 19, 40, 3, 7], dtype="<i8")
    check = damaged(tmp_path / "x.arrows", [(stops.tobytes(), other.tobytes())])
    assert [("spans", "sample-1", None, None)] == places(check)
    assert (2, LENGTHS[0] + LENGTHS[2]) == (check.records, check.tokens)


# ---- damaged containers ---------------------------------------------------------------------------------------------


def only(check: StreamCheck) -> Problem:
    """The one problem of a stream, which names no record."""
    (problem,) = check.problems
    assert (None, None, None, "error") == (problem.sample, problem.token, problem.layer, problem.severity)
    assert not check.to_dict()["valid"]
    return problem


def test_no_cut_of_a_stream_is_valid(tmp_path: Path) -> None:
    """Wherever the bytes end, that is the one problem, and what came whole is counted."""
    data = written(tmp_path / "x.arrows", max_bytes=1)
    counts = []
    for size in [*range(0, len(data), 61), len(data) - 8, len(data) - 1]:
        (tmp_path / "cut.arrows").write_bytes(data[:size])
        check = check_stream(tmp_path / "cut.arrows")
        assert ErrorKind.TRUNCATED == only(check).kind, size
        counts.append(check.records)
    assert (sorted(counts), {0, 1, 2, 3}) == (counts, set(counts))


def test_a_stream_cut_between_batches_is_truncated(tmp_path: Path) -> None:
    """Arrow's own reader takes it for whole; a summary says that it is not."""
    data = written(tmp_path / "x.arrows", max_bytes=1)
    cut = forge(_batches(data)[:2], trailer=None)
    assert 2 == sum(batch.num_rows for batch in _batches(cut))
    (tmp_path / "cut.arrows").write_bytes(cut)
    check, summary = check_stream(tmp_path / "cut.arrows"), summarise_stream(tmp_path / "cut.arrows")
    assert (ErrorKind.TRUNCATED, 2, 45) == (only(check).kind, check.records, check.tokens)
    assert (False, 2, 45) == (summary.complete, summary.to_dict()["records"], summary.to_dict()["tokens"])


def test_what_ended_the_reading_comes_last(tmp_path: Path) -> None:
    """A bad record before a cut is named before it."""
    damaged(tmp_path / "x.arrows", [(row(1, 3, 2), ids(7, 7, 8, 9))])
    (tmp_path / "x.arrows").write_bytes((tmp_path / "x.arrows").read_bytes()[:-8])
    assert ["duplicate_id", "truncated"] == [kind for kind, *_ in places(check_stream(tmp_path / "x.arrows"))]


def _batches(data: bytes) -> list[pa.RecordBatch]:
    with pa.ipc.open_stream(data) as reader:
        return list(reader)


def _as_version(text: bytes) -> Callable[[bytes], bytes]:
    old = b"\x03\x00\x00\x001.1\x00"
    return lambda data: data.replace(old, old.replace(b"1.1", text))


COMPRESSED = pa.ipc.IpcWriteOptions(compression="zstd")
#: Files that are no whole stream of a known version.
CONTAINERS: dict[str, tuple[ErrorKind, Callable[[bytes], bytes]]] = {
    "empty": (ErrorKind.TRUNCATED, lambda data: b""),
    "text": (ErrorKind.NOT_ARROW, lambda data: b"no Arrow stream at all"),
    "an_arrow_file": (ErrorKind.NOT_ARROW, lambda data: b"ARROW1\0\0" + data),
    "foreign": (ErrorKind.NOT_ROUTEPLANE, lambda data: forge([pa.record_batch({"routes": [1]})], trailer=None)),
    "the_next_version": (ErrorKind.VERSION, _as_version(b"2.0")),
    "no_version": (ErrorKind.VERSION, _as_version(b"x.y")),
    "compressed": (ErrorKind.COMPRESSED, lambda data: forge(_batches(data)[:1], trailer="{}", options=COMPRESSED)),
    "more_after_the_end": (ErrorKind.TRAILER, lambda data: data + b"\0"),
    "other_counts": (ErrorKind.TRAILER, lambda data: data.replace(b'"records":3', b'"records":4')),
}


@pytest.mark.parametrize(("kind", "change"), CONTAINERS.values(), ids=CONTAINERS)
def test_each_kind_of_broken_stream_has_its_own_kind_of_error(
    tmp_path: Path, kind: ErrorKind, change: Callable[[bytes], bytes]
) -> None:
    """One problem of that kind in a verdict like any other; a summary raises it, or says that it is not whole."""
    (tmp_path / "bad.arrows").write_bytes(change(written(tmp_path / "x.arrows")))
    assert kind == only(check_stream(tmp_path / "bad.arrows")).kind
    try:
        whole = summarise_stream(tmp_path / "bad.arrows").complete
    except FormatError:
        whole = False
    assert not whole


def test_a_damaged_batch_is_passed_over(tmp_path: Path) -> None:
    """Offsets that point outside are found before a buffer is viewed; the other batches count."""
    data = written(tmp_path / "x.arrows", max_bytes=1)
    offsets = np.array([0, 40], dtype="<i8").tobytes()
    at = data.index(offsets)
    (tmp_path / "x.arrows").write_bytes(data[:at] + np.array([0, 2**40], dtype="<i8").tobytes() + data[at + 16 :])
    check = check_stream(tmp_path / "x.arrows")
    assert (ErrorKind.CORRUPT_BATCH, 2) == (only(check).kind, check.records)


def test_a_flipped_bit_is_found_or_means_nothing(tmp_path: Path) -> None:
    """One bit anywhere: problems are found, or all is as it was (padding); nothing is raised."""
    data = written(tmp_path / "x.arrows", RECORDS[:1])
    clean = check_stream(tmp_path / "x.arrows").to_dict()
    outcomes = []
    for at in range(0, len(data), 17):
        (tmp_path / "x.arrows").write_bytes(data[:at] + bytes([data[at] ^ (1 << at % 8)]) + data[at + 1 :])
        found = check_stream(tmp_path / "x.arrows").to_dict()
        assert not found["valid"] or found == clean, at
        outcomes.append(found["valid"])
    assert sum(outcomes) < len(outcomes) / 2


# ---- alarms ---------------------------------------------------------------------------------------------------------


def stuck(*, first: int, count: int) -> RouteRecord:
    """sample-1 with equal rows in all layers for ``count`` tokens from ``first`` on."""
    record = RECORDS[1]
    routes_SLK = record.routes.copy()
    routes_SLK[first : first + count] = routes_SLK[first]
    return replace(record, routes=routes_SLK, checksum=None)


def test_alarms_are_listed_and_leave_a_stream_valid(tmp_path: Path) -> None:
    """A stale buffer's run is named with sample and token; it is an alarm, no error."""
    written(tmp_path / "x.arrows", [RECORDS[0], stuck(first=3, count=33)])
    check = check_stream(tmp_path / "x.arrows")
    assert [("identical_rows", "sample-1", 3, None)] == places(check)
    assert ("0 errors, 1 alarms", True) == (check.verdict, check.to_dict()["valid"])
    assert "alarm" == check.to_dict()["problems"][0]["severity"]


def test_an_alarm_in_a_delta_names_the_absolute_token(tmp_path: Path) -> None:
    """Rows that begin at token 2 alarm at the token's own number."""
    whole = stuck(first=5, count=34)
    prefix = Prefix(sample_id="sample-0", stop=2, checksum=1)
    record = replace(whole, routes=whole.routes[2:], routes_start=2, prefix=prefix, checksum=None)
    written(tmp_path / "x.arrows", [record])
    assert [("identical_rows", "sample-1", 5, None)] == places(check_stream(tmp_path / "x.arrows"))


def test_one_token_repeated_in_a_delta_raises_no_alarm(tmp_path: Path) -> None:
    """Equal rows of equal tokens are honest, also where rows begin later than tokens."""
    whole = watermarked_record(4, num_tokens=80, spec=SPEC, token_ids=[*range(40), *[7] * 40])
    routes_SLK = whole.routes[40:].copy()
    routes_SLK[:-1] = routes_SLK[0]
    prefix = Prefix(sample_id="sample-0", stop=40, checksum=1)
    written(tmp_path / "x.arrows", [replace(whole, routes=routes_SLK, routes_start=40, prefix=prefix, checksum=None)])
    assert "valid" == check_stream(tmp_path / "x.arrows").verdict


def test_a_constant_layer_is_named(tmp_path: Path) -> None:
    """One layer that never changes over many tokens, while others do."""
    record = watermarked_record(4, num_tokens=80, spec=SPEC)
    routes_SLK = record.routes.copy()
    routes_SLK[:-1, SPEC.slot(2)] = (1, 2, 3, 4)
    written(tmp_path / "x.arrows", [replace(record, routes=routes_SLK, checksum=None)])
    assert [("constant_layer", "sample-4", None, 2)] == places(check_stream(tmp_path / "x.arrows"))


def test_a_record_set_aside_raises_no_alarm(tmp_path: Path) -> None:
    """Its rows were dropped, so they are not examined."""
    records = [RECORDS[0], stuck(first=3, count=33)]
    check = damaged(tmp_path / "x.arrows", [(row(1, 1, 5), ids(7, 7, 8, 9))], records=records)
    assert [("duplicate_id", "sample-1", 1, 5)] == places(check)


# ---- other than paths -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("look", [check_stream, summarise_stream])
def test_files_that_are_not_there_raise_the_systems_error(tmp_path: Path, look: Any) -> None:
    """A missing file and an empty folder give no verdict on data."""
    for place in (tmp_path / "absent.arrows", tmp_path):
        with pytest.raises(FileNotFoundError):
            look(place)


def test_a_check_changes_nothing(tmp_path: Path) -> None:
    """The file's bytes and its folder are as before, also after damage was found."""
    damaged(tmp_path / "x.arrows", [(row(1, 3, 2), ids(7, 7, 8, 9))])
    before = (tmp_path / "x.arrows").read_bytes()
    check_stream(str(tmp_path / "x.arrows"))
    summarise_stream(str(tmp_path / "x.arrows"))
    assert (before, ["x.arrows"]) == ((tmp_path / "x.arrows").read_bytes(), [item.name for item in tmp_path.iterdir()])
