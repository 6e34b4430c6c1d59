"""Streams, archives and Parquet hold the same records; a conversion into an archive that was stopped goes on."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import polars
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings

from routeplane.archive import open_archive, save_archive
from routeplane.cli.convert import convert, make_file, open_any
from routeplane.cli.main import main
from routeplane.errors import DataError, ErrorKind, FormatError, RouteplaneError, UsageError
from routeplane.inspect.export import ParquetReader
from routeplane.inspect.look import summarise
from routeplane.record.aligned import AlignedColumn
from routeplane.record.policy import ReadPolicy
from routeplane.record.record import RouteRecord
from routeplane.record.spec import RouteSpec
from routeplane.stream import new_stream, open_stream
from tests.archive.archives import SPEC, rich_records, sized
from tests.stream.streams import content, contents, record, record_lists

SUFFIXES = (".arrows", ".zarr", ".parquet")
WAYS = list(product(SUFFIXES, SUFFIXES))


def made(place: Path, records: list[RouteRecord], *, spec: RouteSpec = SPEC) -> Path:
    """A container of these records, of the kind that the suffix names."""
    if place.suffix == ".zarr":
        save_archive(records, place, spec=spec)
    else:
        with make_file(str(place), spec, encoding="auto") as sink:
            for item in records:
                sink.write(item)
    return place


def read(place: Path) -> list[RouteRecord]:
    """All records of a container."""
    return list(open_any(str(place)).records(skip=0))


# ----------------------------------------------------------------------------------------------------------------------
# The same records
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("start", "end"), WAYS, ids=["".join(way) for way in WAYS])
def test_every_way(tmp_path: Path, start: str, end: str) -> None:
    """From each kind into each: the same records, checksums and order, whatever their columns."""
    records = rich_records()
    source = made(tmp_path / f"a{start}", records)
    told: list[tuple[int, int | None]] = []
    done = convert(source, tmp_path / f"b{end}", progress=lambda *progress: told.append(progress))

    assert contents(records) == contents(read(tmp_path / f"b{end}"))
    assert [item.checksum for item in records] == [item.checksum for item in read(tmp_path / f"b{end}")]
    assert (3, 0) == (done.records, done.resumed)
    assert [(count, 3) for count in range(4)] == told
    assert sorted([f"a{start}", f"b{end}"]) == sorted(path.name for path in tmp_path.iterdir())


@settings(max_examples=15)
@given(drawn=record_lists(max_experts=400))
def test_parquet_holds_any_records(drawn: tuple[RouteSpec, list[RouteRecord]]) -> None:
    """All records, in either encoding that the spec allows, none of them included."""
    spec, records = drawn
    with TemporaryDirectory() as folder:
        place = made(Path(folder) / "a.parquet", records, spec=spec)
        assert contents(records) == contents(read(place))


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_unknown_entries_of_a_shaped_column_are_held(tmp_path: Path, suffix: str) -> None:
    """An unknown entry of three values is one null, though readers of Parquet call its values null too."""
    values = np.arange(5 * 3, dtype=np.int8).reshape(5, 3)
    known = np.asarray([True, False, True, False, False])
    column = AlignedColumn.of(values, aligned="fed", axes=("feature",), valid=known)
    held = replace(sized([5])[0], columns={"score": column}, checksum=None)

    (found,) = read(made(tmp_path / f"a{suffix}", [held]))

    assert [values[0].tolist(), None, values[2].tolist(), None, None] == found.columns["score"].tolist()
    assert held.checksum == found.verify().checksum


def test_parquet_is_one_row_per_record(tmp_path: Path) -> None:
    """Other readers see the columns of a stream."""
    records = sized([5, 6])
    place = made(tmp_path / "a.parquet", records)
    table = polars.read_parquet(place)

    assert [item.sample_id for item in records] == table["sample_id"].to_list()
    assert [item.token_ids.tolist() for item in records] == table["token_ids"].to_list()
    assert SPEC.to_json() == pq.read_schema(place).metadata[b"routeplane.spec"].decode()


@pytest.mark.parametrize("end", [".arrows", ".parquet"])
@pytest.mark.parametrize("encoding", ["plain", "narrow"])
def test_the_encoding_of_a_file_is_an_argument(tmp_path: Path, end: str, encoding: str) -> None:
    """As for a new stream."""
    source = made(tmp_path / "a.zarr", sized([5, 6]))
    convert(source, tmp_path / f"b{end}", encoding=encoding)  # type: ignore[arg-type]
    [found] = summarise(tmp_path / f"b{end}")

    assert encoding == found.to_dict()["encoding"]


# ----------------------------------------------------------------------------------------------------------------------
# Stopped, and gone on with
# ----------------------------------------------------------------------------------------------------------------------


class Stop(Exception):
    """What stops a conversion."""


def stopping(after: int) -> Callable[[int, int | None], None]:
    """Progress that stops after so many records."""

    def tell(done: int, total: int | None) -> None:
        if done == after:
            raise Stop

    return tell


@pytest.mark.parametrize(("start", "end"), WAYS, ids=["".join(way) for way in WAYS])
def test_a_stopped_conversion_goes_on(tmp_path: Path, start: str, end: str) -> None:
    """Into an archive, runs that are there are not made again; the result is as if it had never stopped."""
    records = sized([50] * 9)
    source, target = made(tmp_path / f"a{start}", records), tmp_path / f"b{end}"
    part = 2 * records[0].nbytes
    for after in (3, 6):
        with pytest.raises(Stop):
            convert(source, target, part_bytes=part, progress=stopping(after))
    assert (end == ".zarr") == target.exists()  # a file appears when it is complete
    seen: list[int] = []
    done = convert(source, target, part_bytes=part, progress=lambda count, total: seen.append(count))

    assert (9, done.resumed) == (done.records, seen[0])
    assert done.resumed in ((4, 5, 6) if end == ".zarr" else (0,))
    assert contents(records) == contents(read(target))
    assert sorted([f"a{start}", f"b{end}"]) == sorted(path.name for path in tmp_path.iterdir())


def test_a_killed_conversion_goes_on(tmp_path: Path) -> None:
    """The same for a process that was killed."""
    records = sized([400] * 12)
    source, target = made(tmp_path / "a.arrows", records), tmp_path / "b.zarr"
    program = (
        "import sys, time; from routeplane.cli.convert import convert\n"
        f"convert({str(source)!r}, {str(target)!r}, part_bytes={2 * records[0].nbytes}, "
        "progress=lambda done, total: print(done, flush=True))"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for _ in range(7):
            process.stdout.readline()
        process.send_signal(signal.SIGKILL)
    done = convert(source, target)

    assert done.resumed >= 4
    assert contents(records) == contents(open_archive(target).values())


def test_a_finished_conversion_into_an_archive_is_done(tmp_path: Path) -> None:
    """Called again it adds nothing; another source is appended."""
    first, second = sized([5, 6]), sized([7], first=2)
    target = tmp_path / "b.zarr"
    convert(made(tmp_path / "a.arrows", first), target)
    before = open_archive(target).commit
    done = convert(tmp_path / "a.arrows", target)
    assert (2, 2, before) == (done.records, done.resumed, open_archive(target).commit)

    convert(made(tmp_path / "c.parquet", second), target)
    assert contents([*first, *second]) == contents(open_archive(target).values())


# ----------------------------------------------------------------------------------------------------------------------
# Refused
# ----------------------------------------------------------------------------------------------------------------------


def test_a_file_that_is_there_is_kept(tmp_path: Path) -> None:
    """Unless told otherwise."""
    source = made(tmp_path / "a.zarr", sized([5, 6]))
    target = made(tmp_path / "b.arrows", sized([7]))
    before = target.read_bytes()
    with pytest.raises(UsageError):
        convert(source, target)
    assert before == target.read_bytes()
    convert(source, target, overwrite=True)
    assert 2 == len(read(target))


@pytest.mark.parametrize(("source", "target"), [("a.arrows", "b.txt"), ("a.arrows", "a.arrows")], ids=str)
def test_paths_that_cannot_be_served(tmp_path: Path, source: str, target: str) -> None:
    """Unknown suffixes, and a container into itself."""
    made(tmp_path / "a.arrows", sized([5]))
    with pytest.raises(UsageError):
        convert(tmp_path / source, tmp_path / target, overwrite=True)


@pytest.mark.parametrize("end", SUFFIXES)
def test_a_damaged_source_leaves_no_file(tmp_path: Path, end: str) -> None:
    """Its error comes, and nothing is taken for the result."""
    source = made(tmp_path / "a.arrows", sized([50, 60, 70]))
    data = bytearray(source.read_bytes())
    row = sized([50, 60, 70])[2].routes[3].astype(np.uint8).tobytes()
    at = data.index(row)
    data[at : at + 2] = data[at + 1], data[at]
    source.write_bytes(data)
    with pytest.raises(DataError) as caught:
        convert(source, tmp_path / f"b{end}")
    assert ErrorKind.CHECKSUM == caught.value.kind
    assert 1 == str(caught.value).count(f"stream {source}")
    if end != ".zarr":
        assert not (tmp_path / f"b{end}").exists()


def test_damaged_parquet_is_refused(tmp_path: Path) -> None:
    """A file that is cut or flipped gives a typed error, or the same records."""
    records = rich_records()
    place = made(tmp_path / "a.parquet", records)
    data = place.read_bytes()
    outcomes = set()
    for position in range(0, len(data), max(1, len(data) // 150)):
        damaged = bytearray(data)
        damaged[position] ^= 1 << position % 8
        place.write_bytes(damaged)
        try:
            outcomes.add("same" if contents(records) == contents(read(place)) else f"other content: {position}")
        except RouteplaneError:
            outcomes.add("refused")
    assert {"same", "refused"} == outcomes
    place.write_bytes(data[:-7])
    with pytest.raises(FormatError):
        read(place)


def test_parquet_of_others_is_refused(tmp_path: Path) -> None:
    """A table that no routeplane wrote, and a file that is none."""
    polars.DataFrame({"a": [1]}).write_parquet(tmp_path / "a.parquet")
    (tmp_path / "b.parquet").write_bytes(b"PAR1")
    for name, kind in (("a", ErrorKind.NOT_ROUTEPLANE), ("b", ErrorKind.CORRUPT_BATCH)):
        with pytest.raises(FormatError) as caught:
            ParquetReader(tmp_path / f"{name}.parquet", policy=ReadPolicy())
        assert kind == caught.value.kind
    with pytest.raises(FileNotFoundError):
        ParquetReader(tmp_path / "c.parquet", policy=ReadPolicy())


def test_a_parquet_writer_that_fails_leaves_nothing(tmp_path: Path) -> None:
    """An exception aborts, after row groups were written too."""
    with pytest.raises(DataError):
        made(tmp_path / "a.parquet", [record(1, 5, spec=SPEC), record(1, 5, spec=SPEC)])
    assert [] == list(tmp_path.iterdir())


# ----------------------------------------------------------------------------------------------------------------------
# The command
# ----------------------------------------------------------------------------------------------------------------------


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Figures on stdout, as text and as JSON; 2 where it could not run, 1 where the source is damaged."""
    source = made(tmp_path / "a.arrows", sized([5, 6]))
    assert 0 == main(arguments=["convert", str(source), str(tmp_path / "b.zarr"), "--json"])
    shown = capsys.readouterr()
    assert ({"records", "resumed", "bytes", "damaged"}, "") == (set(json.loads(shown.out)), shown.err)
    assert 0 == main(arguments=["convert", str(tmp_path / "b.zarr"), str(tmp_path / "c.parquet")])
    assert capsys.readouterr().out.startswith("2 records (0 of an earlier call), ")
    assert 2 == main(arguments=["convert", str(tmp_path / "b.zarr"), str(tmp_path / "c.parquet")])
    assert 0 == main(arguments=["convert", str(tmp_path / "b.zarr"), str(tmp_path / "c.parquet"), "--overwrite"])
    shutil.rmtree(tmp_path / "b.zarr" / "runs")
    assert 1 == main(arguments=["convert", str(tmp_path / "b.zarr"), str(tmp_path / "d.arrows")])
    assert contents(sized([5, 6])) == contents(read(tmp_path / "c.parquet"))
    assert content(sized([5])[0]) == content(read(source)[0])


def test_streams_and_parquet_need_no_zarr(tmp_path: Path) -> None:
    """The extra is loaded only where an archive is meant."""
    with new_stream(tmp_path / "a.arrows", SPEC) as sink:
        sink.write(record(1, 5, spec=SPEC))
    program = (
        "import sys; from routeplane.cli.convert import convert\n"
        f"convert({str(tmp_path / 'a.arrows')!r}, {str(tmp_path / 'b.parquet')!r})\n"
        "print(sorted({'zarr', 'zarrs', 'fsspec', 'torch'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "[]\n" == done.stdout


def test_a_fifo_is_written_and_stays_one(tmp_path: Path) -> None:
    """As by a new stream: renamed into its place, a file would leave its reader waiting."""
    records = sized([5, 6])
    source, target = made(tmp_path / "a.zarr", records), tmp_path / "b.arrows"
    os.mkfifo(target)
    # opening does not wait for a peer: this descriptor has both ends, and the pipe's buffer takes all of it
    end = os.open(target, os.O_RDWR)
    try:
        convert(source, target, overwrite=True)
        came = os.read(end, 1 << 16)
    finally:
        os.close(end)
    assert target.is_fifo()
    assert contents(records) == contents(list(open_stream(came)))
    assert ["a.zarr", "b.arrows"] == sorted(path.name for path in tmp_path.iterdir())


def test_errors_of_the_system_are_not_reported_as_damage(tmp_path: Path) -> None:
    """A folder under the name of a Parquet file, and a name too long: the system's error, as for a stream."""
    (tmp_path / "a.parquet").mkdir()
    for name in ("a.parquet", "a" * 300 + ".parquet"):
        with pytest.raises(OSError, match=name) as caught:
            convert(tmp_path / name, tmp_path / "b.arrows")
        assert not isinstance(caught.value, RouteplaneError)


def test_the_command_takes_a_url(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On either side; nothing is written anywhere else."""
    records = sized([5, 6])
    source = made(tmp_path / "a.arrows", records)
    assert 0 == main(arguments=["convert", str(source), f"file://{tmp_path}/b.zarr"])
    assert 0 == main(arguments=["convert", f"file://{tmp_path}/b.zarr", str(tmp_path / "c.parquet")])
    assert contents(records) == contents(read(tmp_path / "b.zarr")) == contents(read(tmp_path / "c.parquet"))
    assert ["a.arrows", "b.zarr", "c.parquet"] == sorted(path.name for path in tmp_path.iterdir())
    capsys.readouterr()
