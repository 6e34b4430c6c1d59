"""Exactness where threads, forks, interrupts, collected garbage and jumping clocks come in between.

Each test failed once without the guard that its docstring names. Beside these:

* real processes, killed and stopped: ``tests/stream/test_kills.py``, ``python -m tests.stream.kill_matrix``;
* writers and readers of archives, killed or forked: ``test_writers``, ``test_places``, ``test_archive`` there;
* forked and spawned loader workers: ``tests/batch/test_dataset*.py``;
* threads over one ticket store: ``tests/capture/test_tickets.py``; Ctrl-C in a fleet: ``tests/fleet/test_failures.py``.
"""

from __future__ import annotations

import gc
import itertools
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import pytest

from routeplane.errors import ErrorKind, RouteplaneError, TransportError, UsageError
from routeplane.record.interfaces import BlockName
from routeplane.record.policy import ReadPolicy
from routeplane.stream import folder
from routeplane.stream.blocks import BlockLimits, BlockWriter, Manifest, ReadOptions
from routeplane.stream.files import BufferPool
from routeplane.testing.builders import PATIENCE_S, SPEC, facts, sample

_EACH = BlockLimits(block_bytes=1, sync=False)
_WAITING = ReadOptions(on_vanished="wait")


def _writer(place: Path, producer: str = "p", **options: Any) -> Any:
    return folder.open_writer(place, SPEC, run="run", producer=producer, limits=_EACH, **options)


def _read(place: Path, on_truncated: Literal["raise", "keep"] = "raise") -> list[str]:
    policy = ReadPolicy(on_truncated=on_truncated)
    with folder.open_reader(place, producers=1, follow=False, policy=policy, options=_WAITING) as reader:
        return facts(list(reader))


def _at_once(count: int, work: Callable[[int], object]) -> list[object]:
    """What so many threads returned or raised, which began at one moment."""
    start, came = threading.Barrier(count), list[object]()

    def run(index: int) -> None:
        start.wait()
        try:
            came.append(work(index))
        except RouteplaneError as error:
            came.append(error)

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert len(came) == count, "expected every thread to end"
    return came


# ----------------------------------------------------------------------------------------------------------------------
# Interrupts
# ----------------------------------------------------------------------------------------------------------------------


@contextmanager
def _lines(at: int | None) -> Iterator[list[int]]:
    """Count the lines of carriers that run; KeyboardInterrupt before line number ``at``, where a signal might come."""
    seen = [0]

    def trace(frame: Any, event: str, argument: object) -> Any:
        del argument
        if "/routeplane/stream/" not in frame.f_code.co_filename:
            return None
        if event == "line":
            seen[0] += 1
            if seen[0] == at:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield seen
    finally:
        sys.settrace(before)


def _interrupted(place: Path, at: int, kept: list[Any]) -> None:
    """Write two records, and be interrupted in the second; the writer is kept, as a traceback would."""
    with _writer(place) as writer:
        kept.append(writer)
        writer.write(sample(0))
        with _lines(at):
            writer.write(sample(1))


def _lines_of_a_write(place: Path) -> int:
    """How many lines the write runs that ``_interrupted`` cuts."""
    with _writer(place) as writer:
        writer.write(sample(0))
        with _lines(None) as count:
            writer.write(sample(1))
    return count[0]


# an interrupt between a call of open() and the `with` that it stands in leaves a file to the garbage collector
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_at_any_line_of_a_write_loses_nothing(tmp_path: Path) -> None:
    """Whatever line of a write a signal comes at: the name is free again, and after a retry each record came once.

    Guards: a write that failed gives its slot up; a block's number is stored before the block is shown.
    """
    counts = [_lines_of_a_write(tmp_path / warm) for warm in ("cold", "warm")]
    # what the first write imports and caches, no later one runs again
    lines = range(1, counts[-1] + 1)
    assert len(lines) > 50
    kept: list[Any] = []
    for at in sorted(random.Random(0).sample(lines, 50)):
        place = tmp_path / str(at)
        with pytest.raises(KeyboardInterrupt):
            _interrupted(place, at, kept)
        came = _read(place, on_truncated="keep")
        with _writer(place) as writer:
            writer.write(sample(2))
            writer.write(sample(1))
        came += _read(place)

        assert sorted(facts([sample(index) for index in range(3)])) == sorted(came), f"line {at}"


# ----------------------------------------------------------------------------------------------------------------------
# Forks
# ----------------------------------------------------------------------------------------------------------------------


def _in_child(work: Callable[[], object]) -> str:
    """What ``work`` raised in a forked child."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            work()
            said = "nothing"
        except BaseException as error:  # noqa: BLE001  the child ends here
            said = f"{type(error).__name__}: {error}"
        os.write(write, said.encode())
        os._exit(0)
    os.close(write)
    os.waitpid(pid, 0)
    with os.fdopen(read) as file:
        return file.read()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_child_neither_writes_nor_ends_its_parents_producer(tmp_path: Path) -> None:
    """A child has a copy of the writer: its writes are refused, and its abort ends nothing.

    Guards: the process's identifier in ``BlockWriter._seal`` and ``_discard``.
    """
    with _writer(tmp_path) as writer:
        writer.write(sample(0))
        refused = _in_child(lambda: writer.write(sample(1)))
        assert "nothing" == _in_child(writer.abort)
        assert facts([sample(0)]) == _read(tmp_path)  # an abort would raise
        writer.write(sample(2))

    assert "forked child" in refused
    assert facts([sample(2)]) == _read(tmp_path)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_child_acknowledges_nothing(tmp_path: Path) -> None:
    """What a loader's worker has read is not done with. Guard: the process's identifier in ``acknowledge``."""
    with _writer(tmp_path) as writer:
        writer.write(sample(0))
        writer.write(sample(1))
    with folder.open_reader(tmp_path, producers=1) as reader:
        behind = reader.position().after(BlockName("p", 0))
        refused = _in_child(lambda: reader.acknowledge(behind))
        assert 0 == reader.position().number("p")

    assert "the reader that holds the group" in refused
    assert 2 == len(_read(tmp_path))


# ----------------------------------------------------------------------------------------------------------------------
# Several at once
# ----------------------------------------------------------------------------------------------------------------------


def test_openers_at_once_agree_on_one_place(tmp_path: Path) -> None:
    """Producers that all found no manifest write one each: one wins, and all are in its place.

    Guard: the manifest is linked into place, which never replaces another opener's.
    """
    all_wrote, real = threading.Barrier(6), folder._store

    def store(path: Path, document: Any, *, sync: bool) -> None:
        real(path, document, sync=sync)
        if "manifest" in path.name:
            all_wrote.wait(PATIENCE_S)

    with mock.patch.object(folder, "_store", store):
        writers = _at_once(6, lambda index: _writer(tmp_path, f"p{index}"))
    for index, writer in enumerate(writers):
        assert isinstance(writer, BlockWriter), writer
        writer.write(sample(index))
        writer.close()

    with folder.open_reader(tmp_path, producers=6) as reader:
        assert {f"sample-{index}" for index in range(6)} == {record.sample_id for record in reader}
        manifests = {path.name for path in tmp_path.iterdir() if "manifest" in path.name}
    assert {"manifest.json"} == manifests


def test_declarations_at_once_are_one(tmp_path: Path) -> None:
    """Every opener is told the same identifier, whichever manifest won. Guard: as above."""
    all_wrote, real = threading.Barrier(6), folder._store

    def store(path: Path, document: Any, *, sync: bool) -> None:
        real(path, document, sync=sync)
        all_wrote.wait(PATIENCE_S)

    def declare(index: int) -> str:
        declared = Manifest.of(SPEC, run="run", groups=("default",), encoding="auto")
        return folder.declare_place(tmp_path, declared).place

    with mock.patch.object(folder, "_store", store):
        assert 1 == len(set(_at_once(6, declare)))


@pytest.mark.parametrize("side", ["reader", "writer"])
def test_one_of_several_wins(tmp_path: Path, side: str) -> None:
    """Threads that open one group, or one producer's name, at one moment: one has it, the others are told.

    Guard: the lock of the file.
    """
    _writer(tmp_path, "other").close()

    def open_one(index: int) -> object:
        del index
        return _writer(tmp_path) if side == "writer" else folder.open_reader(tmp_path, producers=1)

    came = _at_once(6, open_one)
    refused = [each.kind for each in came if isinstance(each, UsageError)]

    assert [ErrorKind.PRODUCER_TAKEN if side == "writer" else ErrorKind.GROUP_TAKEN] * 5 == refused
    for each in came:
        if not isinstance(each, UsageError):
            each.close()  # type: ignore[attr-defined]


# ----------------------------------------------------------------------------------------------------------------------
# Garbage, finalizers
# ----------------------------------------------------------------------------------------------------------------------


def test_a_reader_that_an_exception_left_behind_gives_its_group_up(tmp_path: Path) -> None:
    """A loop that failed without ``close``: once the exception's frames are collected, the group is free.

    Guard: the lock's finalizer.
    """
    with _writer(tmp_path) as writer:
        writer.write(sample(0))
        writer.write(sample(1))

    def fail() -> None:
        reader = folder.open_reader(tmp_path, producers=1)
        cycle: list[Any] = [reader]
        cycle.append(cycle)
        for _ in reader:
            raise ValueError("a consumer's own")

    with pytest.raises(ValueError, match="own") as caught:
        fail()
    with pytest.raises(UsageError):
        folder.open_reader(tmp_path, producers=1)
    del caught
    gc.collect()

    assert 2 == len(_read(tmp_path))


def test_memory_that_comes_back_inside_of_the_pool_does_not_wait_for_itself() -> None:
    """A finalizer may run at any allocation, also one of the pool's own thread. Guard: the lock can be taken twice."""
    pool = BufferPool()
    lent: list[Any] = [pool.take(1_000), pool.take(1_000)]
    lent.pop()

    class Collecting(list[Any]):
        """A list, in whose ``pop`` a buffer is collected."""

        def pop(self, *at: Any) -> Any:
            lent.clear()
            return super().pop(*at)

    pool._idle = Collecting(pool._idle)
    assert 1 == len(pool._idle)
    taking = threading.Thread(target=lambda: pool.take(1_000), daemon=True)
    taking.start()
    taking.join(PATIENCE_S)

    assert not taking.is_alive()
    assert pool.idle_bytes >= 1_000


# ----------------------------------------------------------------------------------------------------------------------
# Clocks
# ----------------------------------------------------------------------------------------------------------------------


def test_a_clock_that_jumps_ends_no_wait(tmp_path: Path) -> None:
    """The machine's time is set on by a day with each look: a dead producer's grace time has not passed.

    Guard: waits are measured by the monotonic clock.
    """
    writer = _writer(tmp_path)
    writer.write(sample(0))
    writer._slot.release()
    clock = mock.Mock(side_effect=itertools.count(0.0, 86_400.0))
    options = ReadOptions(on_vanished="raise", grace_s=3_600.0, timeout_s=0.2)
    with mock.patch.object(time, "time", clock):
        with (
            folder.open_reader(tmp_path, producers=1, options=options) as reader,
            pytest.raises(TransportError) as found,
        ):
            list(reader)

    assert ErrorKind.TIMED_OUT == found.value.kind
