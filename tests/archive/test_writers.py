"""Writers that die, meet each other, or run out of space: the archive is what its last commit says.

Writers are real processes, killed with SIGKILL; full disks are a small tmpfs and a limit on the size of a file.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest

from routeplane.archive import compact, new_run, open_archive, save_archive, verify
from routeplane.archive.writer import ArchiveWriter
from routeplane.errors import DataError, ErrorKind, StoreError, TruncatedError, UsageError
from tests.archive.archives import SPEC, files, saved, sized
from tests.archive.writers import start
from tests.stream.streams import contents, record


@contextmanager
def writer(where: Path, *, first: int, count: int = 0, tokens: int = 300, run: str = "killed") -> Iterator[IO[str]]:
    """A process that writes; gives what it prints. Killed at the end, wherever it is then."""
    with start("write", where, first, count, tokens, run) as process:
        assert process.stdout is not None
        try:
            yield process.stdout
        finally:
            process.send_signal(signal.SIGKILL)


# ----------------------------------------------------------------------------------------------------------------------
# Killed
# ----------------------------------------------------------------------------------------------------------------------


def test_a_killed_writer_leaves_the_last_commit(tmp_path: Path) -> None:
    """Killed in the middle of a run, and again: what was committed reads whole, what was left over is listed, another
    writer of the same run is not disturbed, and compaction deletes what is left over."""
    records = sized([300, 5])
    where = saved(tmp_path / "a", records)
    for count in (1, 2):
        with writer(where, first=100) as told:
            for _ in range(12):
                told.readline()

        assert contents(records) == contents(open_archive(where).values())
        assert [("writer", "alarm")] * count == [(str(item.kind), item.severity) for item in verify(where).problems]
    later = sized([7], first=100)
    save_archive(later, where, spec=SPEC, run="killed")

    assert () == compact(where).folders
    assert 2 == len(compact(where, grace_s=0).folders)
    assert contents([*records, *later]) == contents(open_archive(where).values())
    assert () == verify(where).problems


def test_a_writer_killed_before_any_commit_leaves_no_archive(tmp_path: Path) -> None:
    """The place says that nothing was ever committed, and takes a new run."""
    where = tmp_path / "a"
    with writer(where, first=0) as told:
        told.readline()
    with pytest.raises(TruncatedError):
        open_archive(where)
    save_archive(sized([5]), where, spec=SPEC)
    assert 1 == len(open_archive(where))


@pytest.mark.parametrize("files_before_death", [0, 1, 2, 5, 8, 9, 10, 11, 12, 13, 14])
def test_killed_before_any_of_its_files(tmp_path: Path, files_before_death: int) -> None:
    """Death after any number of files, up to the commit itself, leaves the commit before; never a part of the run."""
    records = sized([20])
    where = saved(tmp_path / "a", records)
    done = os.fork()
    if done == 0:
        _write_and_die(where, files_before_death)
    _, status = os.waitpid(done, 0)

    assert signal.SIGKILL == os.WTERMSIG(status)
    assert contents(records) == contents(open_archive(where).values())
    assert contents(records) == contents(open_archive(where).select())
    assert not [problem for problem in verify(where).problems if problem.severity == "error"]


def _write_and_die(where: Path, files_before_death: int) -> None:
    """A run of some 13 files and a commit, by a process that kills itself when it is about to put one in its place."""
    put, made = os.replace, iter(range(files_before_death))

    def replace(source: str, target: str) -> None:
        if next(made, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        put(source, target)

    os.replace = replace  # type: ignore[assignment]
    os.link = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # the commit comes last of all
    save_archive(sized([900], first=50), where, spec=SPEC, run="killed", shard_bytes=1)


@pytest.mark.parametrize("gone", [["runs/zarr.json", "commits/zarr.json"], ["commits/zarr.json"]], ids=["both", "one"])
def test_the_next_writer_makes_what_the_first_died_before(tmp_path: Path, gone: list[str]) -> None:
    """Killed behind the root and before the groups below it, which plain zarr needs to walk an archive."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for where in (whole, cut):
        with new_run(where, SPEC, run="dies") as sink:
            sink.abort()
    for name in gone:
        (cut / name).unlink()
    for where in (whole, cut):
        saved(where, sized([5]))
    expected, found = (
        [path.relative_to(where).as_posix() for path in files(where) if "run-" not in path.as_posix()]
        for where in (whole, cut)
    )
    assert expected == found


@pytest.mark.slow
def test_killed_at_any_time(tmp_path: Path) -> None:
    """Ten writers of small runs, killed after any number of lines: each run is there whole or not at all."""
    where = saved(tmp_path / "a", sized([5]))
    for attempt in range(10):
        with writer(where, first=1_000 * (attempt + 1), count=3, tokens=600, run=f"r{attempt}") as told:
            for _ in range(attempt % 6):
                told.readline()
        archive = open_archive(where)
        assert {3} >= {run.records for run in archive.runs if run.name != "run"}
        assert sum(run.records for run in archive.runs) == len(list(archive.values()))


def test_leaving_by_an_error_leaves_nothing(tmp_path: Path) -> None:
    """An exception among the records aborts: no file of the run stays."""
    where = saved(tmp_path / "a", sized([5]))
    before = files(where)

    def failing() -> Iterator[object]:
        yield from sized([600, 600], first=5)
        raise KeyError("the source failed")

    with pytest.raises(KeyError):
        save_archive(failing(), where, spec=SPEC, shard_bytes=1)  # type: ignore[arg-type]
    assert before == files(where)


def test_a_writer_that_ended_takes_no_more(tmp_path: Path) -> None:
    """Closed or aborted, once or twice."""
    sink = new_run(tmp_path / "a", SPEC)
    sink.close()
    sink.close()
    sink.abort()
    with pytest.raises(UsageError) as caught:
        sink.write(record(0, 5, spec=SPEC))
    assert ErrorKind.CLOSED == caught.value.kind


# ----------------------------------------------------------------------------------------------------------------------
# Two writers
# ----------------------------------------------------------------------------------------------------------------------


def test_one_run_per_name(tmp_path: Path) -> None:
    """Of two writers of one name the later one to commit is refused, and leaves nothing; a dead one is in no way."""
    where = tmp_path / "a"
    with writer(where, first=0, run="one") as told:
        told.readline()
    first, second = new_run(where, SPEC, run="one"), new_run(where, SPEC, run="one")
    for index, sink in enumerate((first, second)):
        sink.write(record(index, 5, spec=SPEC))
    second.close()
    for attempt in (first.close, lambda: new_run(where, SPEC, run="one")):
        with pytest.raises(StoreError) as caught:
            attempt()
        assert ErrorKind.WRITER == caught.value.kind
        assert isinstance(caught.value, OSError)

    assert ["sample-1"] == [key.sample_id for key in open_archive(where)]
    compact(where, grace_s=0)
    assert ["one"] == [path.name.rpartition("-")[0] for path in (where / "runs").glob("*-*")]


def test_files_deleted_before_the_commit_are_not_committed(tmp_path: Path) -> None:
    """A writer that was silent for so long that compaction took it for dead finds out when it commits."""
    where = saved(tmp_path / "a", sized([5]))
    sink = new_run(where, SPEC, run="slow", shard_bytes=1)
    sink.write(record(1, 900, spec=SPEC))
    assert 1 == len(compact(where, grace_s=0).folders)
    with pytest.raises(StoreError) as caught:
        sink.close()
    assert ErrorKind.WRITER == caught.value.kind
    assert () == verify(where).problems


def test_writers_of_different_runs_both_commit(tmp_path: Path) -> None:
    """Begun at the same commit, ended one after the other: no records are lost."""
    where = saved(tmp_path / "a", sized([5]))
    first, second = new_run(where, SPEC, run="first"), new_run(where, SPEC, run="second")
    first.write(record(1, 6, spec=SPEC))
    second.write(record(2, 7, spec=SPEC))
    second.close()
    first.close()

    assert ["sample-0", "sample-2", "sample-1"] == [key.sample_id for key in open_archive(where)]


def test_writers_at_once_lose_nothing(tmp_path: Path) -> None:
    """Eight writers that commit at the same time make eight commits."""
    where = saved(tmp_path / "a", sized([5]))
    sinks = [new_run(where, SPEC, run=f"r{index}") for index in range(8)]
    for index, sink in enumerate(sinks):
        sink.write(record(index + 1, 6, spec=SPEC))
    start = threading.Barrier(len(sinks))

    def commit(sink: ArchiveWriter) -> None:
        start.wait()
        sink.close()

    threads = [threading.Thread(target=commit, args=(sink,)) for sink in sinks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert {f"sample-{index}" for index in range(9)} == {item.sample_id for item in open_archive(where).values()}
    assert 9 == open_archive(where).commit


def test_a_writer_that_is_far_behind_loses_nothing(tmp_path: Path) -> None:
    """The number that it would take next was taken and dropped since: it goes on behind the newest."""
    where = saved(tmp_path / "a", sized([5]))
    late = new_run(where, SPEC, run="late")
    late.write(record(99, 6, spec=SPEC))
    for index in range(1, 9):
        save_archive(sized([5], first=index), where, spec=SPEC)
    late.close()
    archive = open_archive(where)

    assert (10, 10) == (archive.commit, len(archive))
    assert contents(archive.values())[-1]["sample_id"] == "sample-99"
    assert 4 == len(list((where / "commits").glob("0*.json")))


def test_a_failure_behind_the_commit_keeps_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted when the commit is out and before the writer knows: the run is committed, so its files stay."""
    where = saved(tmp_path / "a", sized([5]))
    sink = new_run(where, SPEC, run="second")
    sink.write(record(1, 6, spec=SPEC))
    link = os.link

    def interrupted(source: str, target: str) -> None:
        link(source, target)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "link", interrupted)
    with pytest.raises(KeyboardInterrupt):
        sink.close()

    assert contents(sized([5, 6])) == contents(open_archive(where).values())
    assert verify(where).intact


def test_the_same_record_by_two_writers_is_refused(tmp_path: Path) -> None:
    """Neither saw the other's record when it wrote its own; the later one to commit does, and commits nothing."""
    where = saved(tmp_path / "a", sized([5]))
    first, second = new_run(where, SPEC, run="first"), new_run(where, SPEC, run="second")
    for sink in (first, second):
        sink.write(record(1, 6, spec=SPEC))
    first.close()
    with pytest.raises(DataError) as caught:
        second.close()

    assert ErrorKind.DUPLICATE_KEY == caught.value.kind
    assert ["run", "first"] == [run.name for run in open_archive(where).runs]
    assert not list((where / "runs").glob("second-*"))


# ----------------------------------------------------------------------------------------------------------------------
# No space
# ----------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 512 KiB. Where it cannot be mounted, a limit on the size of files stands for it elsewhere."""
    where = tmp_path / "disk"
    where.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(where)], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip("no mounts here: test_a_limit_on_files_is_a_typed_error meets the same errors")
    try:
        yield where
    finally:
        subprocess.run(["umount", str(where)], check=True)


def test_a_full_disk_is_a_typed_error(small_disk: Path) -> None:
    """What was committed stays readable, the run leaves nothing, and there is space again for a smaller one."""
    records = sized([300])
    where = saved(small_disk / "a", records)
    before = files(where)
    with pytest.raises(StoreError) as caught:
        save_archive((record(index, 600, spec=SPEC) for index in range(1, 10_000)), where, spec=SPEC, shard_bytes=1)

    assert ErrorKind.NO_SPACE == caught.value.kind
    assert before == files(where)
    assert contents(records) == contents(open_archive(where).values())
    save_archive(sized([5], first=7), where, spec=SPEC)
    assert 2 == len(open_archive(where))


@contextmanager
def file_limit(size: int) -> Iterator[None]:
    """No file of this process grows beyond ``size``; the signal that would end it is ignored, so that writes fail."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("size", [64, 400, 1_000, 3_000], ids=["documents", "small files", "tables", "shards"])
def test_a_limit_on_files_is_a_typed_error(tmp_path: Path, size: int) -> None:
    """Whichever file is the one that does not fit."""
    records = sized([300])
    where = saved(tmp_path / "a", records)
    before = files(where)
    with file_limit(size), pytest.raises(StoreError) as caught:
        save_archive(sized([2_000], first=7), where, spec=SPEC)

    assert ErrorKind.NO_SPACE == caught.value.kind
    assert before == files(where)
    assert contents(records) == contents(open_archive(where).values())
