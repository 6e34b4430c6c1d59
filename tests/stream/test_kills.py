"""Folders of blocks whose producers and readers are really killed, stopped and forked."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from routeplane.errors import ErrorKind, RouteplaneError, TransportError, UsageError
from routeplane.record.interfaces import BlockName
from routeplane.stream import folder
from routeplane.stream.blocks import BlockLimits, ReadOptions
from routeplane.testing.builders import SPEC, facts, sample
from tests.stream.folder_processes import Actor, name_of, read, write
from tests.stream.kill_matrix import CARRIERS, run

COUNT = 40


@pytest.mark.parametrize("way", ["kill", "fork", "delete"])
def test_killed_processes_go_on(tmp_path: Path, way: str) -> None:
    """Random kills of two producers and a reader: nothing lost, torn or stuck, no repeats of what was acknowledged."""
    figures = run("folder", way, {"place": tmp_path / "place"}, tmp_path, kills=6, seed=0)
    assert figures.holds, figures


@pytest.mark.nightly
@pytest.mark.parametrize("carrier", CARRIERS)
def test_a_thousand_kills(carrier: str) -> None:
    """The share of one carrier in ``python -m tests.stream.kill_matrix``, in a process that only forks."""
    command = [sys.executable, "-m", "tests.stream.kill_matrix", "--carriers", carrier]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert 0 == done.returncode, done.stdout + done.stderr[-2_000:]


def test_a_killed_reader_is_given_it_again(tmp_path: Path) -> None:
    """A reader that is killed loses nothing; at most its last block comes again."""
    place = tmp_path / "place"
    limits = BlockLimits(block_bytes=1, max_bytes=2**24, sync=False)
    Actor(tmp_path / "p", write(place, "p", count=COUNT, tokens=9, limits=limits))._run([])
    reader = Actor(tmp_path / "reader", read(place, ["p"]))
    reader.start()
    while len(reader.lines()) < 5:
        time.sleep(0.001)
    reader.kill()
    reader.start()
    reader.join()
    came = [line for line in reader.lines() if " " in line]
    assert {name_of("p", index) for index in range(COUNT)} == {line.split()[1] for line in came}
    assert len(came) <= COUNT + 1


def test_a_stopped_producer_is_alive(tmp_path: Path) -> None:
    """SIGSTOP is not death: its name stays taken, and a reader waits instead of calling it vanished."""
    place = tmp_path / "place"
    limits = BlockLimits(block_bytes=1, max_bytes=2**30, sync=False)
    producer = Actor(tmp_path / "p", write(place, "p", count=10**6, tokens=9, limits=limits))
    producer.start()
    while not producer.lines():
        time.sleep(0.001)
    assert producer.process is not None
    assert producer.process.pid is not None
    os.kill(producer.process.pid, signal.SIGSTOP)
    try:
        with pytest.raises(UsageError) as caught:
            folder.open_writer(place, SPEC, run="kills", producer="p")
        assert ErrorKind.PRODUCER_TAKEN == caught.value.kind
        options = ReadOptions(on_vanished="raise", grace_s=0.0, timeout_s=0.3)
        with folder.open_reader(place, producers=1, options=options) as reader:
            with pytest.raises(TransportError) as waited:
                list(reader)
        assert ErrorKind.TIMED_OUT == waited.value.kind
    finally:
        producer.kill()


def test_a_forked_child_holds_no_name(tmp_path: Path) -> None:
    """A child that outlives its producer does not keep the name, and may not write in its place."""
    place = tmp_path / "place"
    heard, told = os.pipe()
    parent = os.fork()
    if parent == 0:  # the producer: forks a child that lives on, and dies
        writer = folder.open_writer(place, SPEC, run="kills", producer="p")
        writer.write(sample(0))
        writer.flush()
        if os.fork() == 0:
            try:
                writer.write(sample(1))
                writer.flush()
                found = b"wrote"
            except UsageError:
                found = b"refused"
            os.write(told, found)
            time.sleep(5.0)
        os._exit(0)
    os.waitpid(parent, 0)
    assert b"refused" == os.read(heard, 16)
    with folder.open_writer(place, SPEC, run="kills", producer="p") as writer:
        writer.write(sample(2))
    with folder.open_reader(place, producers=1) as reader:
        assert facts([sample(0), sample(2)]) == facts(list(reader))
    for end in (heard, told):
        os.close(end)


def test_a_crash_between_number_and_block_leaves_a_void_number(tmp_path: Path) -> None:
    """The number that was stored and has no block is never used, and readers pass it."""
    place = tmp_path / "place"
    limits = BlockLimits(block_bytes=1, max_bytes=2**24)
    writer = folder.open_writer(place, SPEC, run="kills", producer="p", limits=limits)
    writer.write(sample(0))
    slot: Any = writer._slot
    slot._next = 2
    slot._store_number()
    (place / "producers" / "p" / ".000000001.tmp").write_bytes(b"half a block")
    slot.release()
    with folder.open_writer(place, SPEC, run="kills", producer="p", limits=limits) as again:
        again.write(sample(1))
    with folder.open_reader(place, producers=1) as reader:
        assert facts([sample(0), sample(1)]) == facts(list(reader))
        assert 3 == reader.position().number("p")


def test_blocks_that_disappear_are_expired_also_the_last(tmp_path: Path) -> None:
    """Every sealed block that is deleted by hand is missed, also when the producer was restarted since."""
    place = tmp_path / "place"
    limits = BlockLimits(block_bytes=1, max_bytes=2**24)
    writer = folder.open_writer(place, SPEC, run="kills", producer="p", limits=limits)
    for index in range(3):
        writer.write(sample(index))
    writer._slot.release()
    for path in place.rglob("*.arrows"):
        path.unlink()
    with folder.open_writer(place, SPEC, run="kills", producer="p", limits=limits) as again:
        again.write(sample(3))
    store = folder.FolderStore(place, group="default")
    assert ["expired"] * 3 + ["sealed", "closed"] == [store.state(BlockName("p", number)) for number in range(5)]
    store.release()


@pytest.mark.parametrize("name", ["manifest.json", "producers/p/number.json", "groups/default/position.json"])
@pytest.mark.parametrize("damage", ["flip", "empty", "other"])
def test_a_damaged_file_is_refused(tmp_path: Path, name: str, damage: str) -> None:
    """Every file of a place carries a checksum: damage is an error with a kind, never another meaning."""
    place = tmp_path / "place"
    with folder.open_writer(place, SPEC, run="kills", producer="p") as writer:
        writer.write(sample(0))
    with folder.open_reader(place, producers=1) as reader:
        list(reader)
    path = place / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes({"flip": bytes(data), "empty": b"", "other": b'{"next": 7}'}[damage])
    with pytest.raises(RouteplaneError):
        _use(place)


def test_a_truncated_or_rewritten_block_is_an_error_and_not_a_signal(tmp_path: Path) -> None:
    """On /dev/shm: what a trainer holds stays as it was verified, and a block that was cut is an error of its kind."""

    def consume(say: Callable[[str], None], before: list[str]) -> None:
        del before
        with folder.open_reader(place, producers=1) as reader:
            records = iter(reader)
            first = next(records)
            paths = sorted(place.rglob("*.arrows"))
            paths[0].write_bytes(bytes(paths[0].stat().st_size))
            os.truncate(paths[0], 10)
            os.truncate(paths[1], paths[1].stat().st_size // 2)
            say(f"{first.verify().checksum}")
            try:
                next(records)
            except RouteplaneError as error:
                say(f"{error.kind}")

    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        place, limits = Path(name) / "place", BlockLimits(block_bytes=1, max_bytes=2**24, sync=False)
        with folder.open_writer(place, SPEC, run="run", producer="p", limits=limits) as writer:
            for index in range(2):
                writer.write(sample(index, tokens=2_000))
        reader = Actor(tmp_path / "reader", consume)
        reader.start()
        reader.join()
    assert reader.is_done  # a signal would be another exit code
    assert [f"{sample(0, tokens=2_000).checksum}", "truncated"] == reader.lines()


def _use(place: Path) -> None:
    with folder.open_reader(place, producers=1) as reader:
        list(reader)
        reader.acknowledge(reader.position())
    folder.open_writer(place, SPEC, run="kills", producer="p", groups=("default",))
