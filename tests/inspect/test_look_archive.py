"""What is said of archives: the numbers that a stream of the same records gives, and damage by sample, token and layer.

What damage an archive can have is ``tests/archive``'s; here is what of it reaches a person.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from routeplane.archive import ARCHIVE_VERSION, new_run, save_archive
from routeplane.errors import ErrorKind, FormatError
from routeplane.inspect.look import ArchiveSummary, StreamSummary, check
from routeplane.inspect.look import summarise as summarise_all
from routeplane.testing.builders import watermarked_record, watermarked_spec
from tests.archive.archives import flip, shard_files
from tests.inspect.containers import archived, streamed


def summarise(path: Path | str) -> StreamSummary | ArchiveSummary:
    """The summary of one source."""
    [found] = summarise_all(path)
    return found


SPEC = watermarked_spec(layers=(1, 2, 5), top_k=4)
RECORDS = [
    watermarked_record(0, num_tokens=5, spec=SPEC),
    watermarked_record(1, num_tokens=40, spec=SPEC),
    watermarked_record(2, num_tokens=20, spec=SPEC, missing=[4, (6, 2)]),
]


def test_an_archive_is_summed_up_as_a_stream_of_its_records(tmp_path: Path) -> None:
    """Geometry and counts are equal; besides, an archive has runs and a commit."""
    archive = summarise(archived(tmp_path / "run.zarr", RECORDS)).to_dict()
    stream = summarise(streamed(tmp_path / "run.arrows", RECORDS)).to_dict()
    both = archive.keys() & stream.keys() - {"path", "bytes"}
    assert {name: stream[name] for name in both} == {name: archive[name] for name in both}
    assert {"encoding", "batches", "quarantined", "damage"} == stream.keys() - archive.keys()
    assert (2, [1, 2], ARCHIVE_VERSION) == (archive["commit"], list(archive["runs"].values()), archive["archive"])
    assert archive == json.loads(json.dumps(archive))


def test_token_columns_of_all_runs_are_named(tmp_path: Path) -> None:
    """Runs may differ in theirs."""
    aged = [replace(record, columns={"age": np.arange(record.num_tokens)}, checksum=None) for record in RECORDS[1:]]
    save_archive(RECORDS[:1], tmp_path / "run.zarr", spec=SPEC)
    save_archive(aged, tmp_path / "run.zarr", spec=SPEC)
    assert ["age"] == summarise(tmp_path / "run.zarr").to_dict()["token_columns"]


def test_a_summary_reads_no_array(tmp_path: Path) -> None:
    """It is the same where all shards are gone: what they hold is ``check``'s."""
    place = Path(archived(tmp_path / "run.zarr", RECORDS))
    whole = summarise(place)
    for shard in place.glob("runs/*/*/c/**/*"):
        if shard.is_file():
            shard.unlink()
    assert whole == summarise(place)


def test_streams_go_to_the_forms_of_streams(tmp_path: Path) -> None:
    """A file is a stream, whatever its name."""
    place = streamed(tmp_path / "run.zarr", RECORDS)
    assert not isinstance(summarise(place), ArchiveSummary)
    assert check(place) == check(place)


def test_a_clean_archive_is_valid(tmp_path: Path) -> None:
    """The check is the one of a stream of its records, to the last count."""
    found = check(archived(tmp_path / "run.zarr", RECORDS))
    assert check(streamed(tmp_path / "run.arrows", RECORDS)) == found
    assert ("valid", 3, 65) == (found.verdict, found.records, found.tokens)


def test_damage_is_named_and_the_rest_is_counted(tmp_path: Path) -> None:
    """A flipped bit of one layer's chunk: sample, token and layer; the other run's records are intact."""
    place = tmp_path / "run.zarr"
    save_archive(RECORDS[:1], place, spec=SPEC, run="one")
    save_archive(RECORDS[1:2], place, spec=SPEC, run="two")
    flip(shard_files(place, run="two")[0], 5)
    found = check(place)
    assert [(ErrorKind.CORRUPT_CHUNK, "sample-1", 0, 1)] == [
        (problem.kind, problem.sample, problem.token, problem.layer) for problem in found.problems
    ]
    assert (2, 5, {"captured": 4, "not_fed": 1}) == (found.records, found.tokens, found.to_dict()["coverage"])
    assert not found.to_dict()["valid"]


def test_a_dead_writer_and_equal_rows_are_alarms(tmp_path: Path) -> None:
    """Neither makes an archive invalid; statistics are looked at as in a stream."""
    routes_SLK = RECORDS[1].routes.copy()
    routes_SLK[3:36] = routes_SLK[3]
    stuck = replace(RECORDS[1], routes=routes_SLK, checksum=None)
    place = tmp_path / "run.zarr"
    save_archive([RECORDS[0], stuck], place, spec=SPEC)
    with new_run(place, SPEC, run="dying") as sink:
        sink.write(RECORDS[2])
        found = check(place)
        sink.abort()
    assert [("alarm", ErrorKind.IDENTICAL_ROWS, "sample-1", 3), ("alarm", ErrorKind.WRITER, None, None)] == [
        (problem.severity, problem.kind, problem.sample, problem.token) for problem in found.problems
    ]
    assert found.to_dict()["valid"]


def test_another_file_and_a_missing_file_are_told_apart(tmp_path: Path) -> None:
    """Nothing is the system's error; something else is a finding of ``check``, and refused by ``summarise``."""
    for look in (check, summarise):
        with pytest.raises(FileNotFoundError):
            look(tmp_path)
    (tmp_path / "other").write_text("not ours")
    with pytest.raises(FormatError) as caught:
        summarise(tmp_path)
    assert ErrorKind.NOT_ROUTEPLANE == caught.value.kind
    assert [ErrorKind.NOT_ROUTEPLANE] == [problem.kind for problem in check(tmp_path).problems]
