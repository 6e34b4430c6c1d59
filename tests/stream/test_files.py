"""A path appears whole or not at all; pipes and files of the caller's stay the caller's."""

from __future__ import annotations

import contextlib
import gc
import io
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from routeplane.errors import ErrorKind, TruncatedError, UsageError
from routeplane.record.record import RouteRecord
from routeplane.stream import new_stream, open_stream
from tests.stream.streams import SPEC, content, contents, record, stream_of

RECORDS = [record(sample, 4 + sample) for sample in range(3)]


def write(path: Path, found: list[RouteRecord] = RECORDS) -> None:
    """A whole stream at a path."""
    with new_stream(path, SPEC) as sink:
        for item in found:
            sink.write(item)


def fail_amid(path: Path) -> None:
    """Leave a stream by an exception after its first batch."""
    with new_stream(path, SPEC, max_bytes=1) as sink:
        sink.write(RECORDS[0])
        raise KeyError


def names(folder: Path) -> list[str]:
    """What lies in a folder, hidden files too."""
    return sorted(path.name for path in folder.iterdir())


# ----------------------------------------------------------------------------------------------------------------------
# Publication
# ----------------------------------------------------------------------------------------------------------------------


def test_nothing_shows_before_close(tmp_path: Path) -> None:
    """Until ``close`` nothing has the name; afterwards the stream has, and nothing else is left."""
    path = tmp_path / "a.arrows"
    sink = new_stream(path, SPEC, max_bytes=1)
    for item in RECORDS:
        sink.write(item)
        assert not path.exists()
    sink.close()

    assert names(tmp_path) == ["a.arrows"]
    assert contents(RECORDS) == contents(open_stream(path))


def test_the_name_may_be_text(tmp_path: Path) -> None:
    """A path may be given as text."""
    with new_stream(str(tmp_path / "a"), SPEC) as sink:
        sink.write(RECORDS[0])

    assert contents(RECORDS[:1]) == contents(open_stream(str(tmp_path / "a")))


@pytest.mark.parametrize("how", ["abort", "exception"])
def test_what_was_there_survives_an_abort(how: str, tmp_path: Path) -> None:
    """An abort, asked for or by an exception, leaves the old file, and no other."""
    path = tmp_path / "a.arrows"
    write(path, RECORDS[:1])
    if how == "abort":
        sink = new_stream(path, SPEC, max_bytes=1)
        sink.write(RECORDS[1])
        sink.abort()
        sink.abort()
        sink.close()
    else:
        with pytest.raises(KeyError):
            fail_amid(path)

    assert names(tmp_path) == ["a.arrows"]
    assert contents(RECORDS[:1]) == contents(open_stream(path))


def test_a_new_stream_replaces_the_old_one_for_new_readers_only(tmp_path: Path) -> None:
    """Who reads the old file goes on reading it while a new one takes its name."""
    path = tmp_path / "a.arrows"
    write(path)
    reader = iter(open_stream(path))
    first = next(reader)
    write(path, RECORDS[2:])

    assert contents(RECORDS) == contents([first, *reader])
    assert contents(RECORDS[2:]) == contents(open_stream(path))


CRASH = """
import os, sys
from routeplane.stream import new_stream
from tests.stream.streams import SPEC, record
sink = new_stream(sys.argv[1], SPEC, max_bytes=1)
for sample in range(50):
    sink.write(record(sample))
os._exit(3)
"""


def test_a_crash_leaves_nothing_under_the_name(tmp_path: Path) -> None:
    """A producer that dies before ``close``, its bytes on disk, has published nothing."""
    path = tmp_path / "a.arrows"
    write(path, RECORDS[:1])
    done = subprocess.run([sys.executable, "-c", CRASH, str(path)], cwd=Path(__file__).parents[2], check=False)

    assert done.returncode == 3
    assert contents(RECORDS[:1]) == contents(open_stream(path))
    (left,) = [name for name in names(tmp_path) if name != "a.arrows"]
    assert left.startswith(".a.arrows.")
    with pytest.raises(TruncatedError):
        open_stream(tmp_path / left)


def test_a_link_keeps_pointing(tmp_path: Path) -> None:
    """Writing to a symbolic link writes what it points to."""
    real, link = tmp_path / "real.arrows", tmp_path / "link.arrows"
    link.symlink_to(real)
    write(link)

    assert link.is_symlink()
    assert not real.is_symlink()
    assert contents(RECORDS) == contents(open_stream(real))


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    """A missing folder is the operating system's error, at once."""
    with pytest.raises(FileNotFoundError):
        new_stream(tmp_path / "no" / "a", SPEC)
    with pytest.raises(FileNotFoundError):
        open_stream(tmp_path / "no")


def test_two_writers_of_one_name(tmp_path: Path) -> None:
    """Writers do not mix: the last to close has the name, whole."""
    path = tmp_path / "a.arrows"
    one, two = new_stream(path, SPEC, max_bytes=1), new_stream(path, SPEC, max_bytes=1)
    one.write(RECORDS[0])
    two.write(RECORDS[1])
    one.close()
    two.close()

    assert names(tmp_path) == ["a.arrows"]
    assert contents(RECORDS[1:2]) == contents(open_stream(path))


# ----------------------------------------------------------------------------------------------------------------------
# Disks that fail
# ----------------------------------------------------------------------------------------------------------------------

FULL = """
import contextlib, resource, signal, sys
from routeplane.stream import new_stream
from tests.stream.streams import SPEC, record
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (6_000, 6_000))
failed = 0
try:
    with new_stream(sys.argv[1], SPEC, max_bytes=int(sys.argv[2])) as sink:
        for sample in range(30):
            sink.write(record(sample, 40))
except OSError as error:
    failed = error.errno
sys.exit(failed)
"""


@pytest.mark.parametrize("max_bytes", [1, 2**20], ids=["while writing", "on close"])
def test_a_full_disk_publishes_nothing(max_bytes: int, tmp_path: Path) -> None:
    """Where the disk takes no more, the operating system's error comes out; the old file stays, and no other does."""
    path = tmp_path / "a.arrows"
    write(path, RECORDS[:1])
    command = [sys.executable, "-c", FULL, str(path), str(max_bytes)]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], check=False)

    assert done.returncode == 27  # EFBIG, which a limit of file size gives for a full disk
    assert names(tmp_path) == ["a.arrows"]
    assert contents(RECORDS[:1]) == contents(open_stream(path))


class Flaky(io.BytesIO):
    """A file whose n-th write takes half and fails; every later one succeeds."""

    def __init__(self, fail_at: int) -> None:
        super().__init__()
        self.writes = 0
        self.fail_at = fail_at

    def write(self, data: object, /) -> int:
        """As a file does."""
        self.writes += 1
        whole = bytes(data)  # type: ignore[call-overload]  # any buffer
        if self.writes == self.fail_at:
            super().write(whole[: len(whole) // 2])
            raise OSError(28, "No space left on device")
        return super().write(whole)


def test_a_failed_write_is_the_end_of_the_stream() -> None:
    """Wherever a write fails, and whatever the caller then tries, no half batch is ever followed by a trailer."""
    count = Flaky(0)
    with new_stream(count, SPEC, max_bytes=1) as sink:
        for item in RECORDS:
            sink.write(item)
    assert count.writes > 20
    for fail_at in range(1, count.writes + 1):
        file = Flaky(fail_at)
        sink = new_stream(file, SPEC, max_bytes=1)
        errors = 0
        for item in RECORDS:
            try:
                sink.write(item)
            except (OSError, UsageError):
                errors += 1
        for _ in range(2):
            try:
                sink.close()
            except OSError:
                errors += 1
        assert errors > 0
        with pytest.raises(TruncatedError):
            list(open_stream(file.getvalue()))


def test_a_refused_record_leaves_the_stream_open(tmp_path: Path) -> None:
    """A record that is refused before it is written leaves the stream open and whole."""
    path = tmp_path / "a.arrows"
    with new_stream(path, SPEC, max_bytes=1) as sink:
        sink.write(RECORDS[0])
        with pytest.raises(ValueError, match="twice"):
            sink.write(RECORDS[0])
        with pytest.raises(ValueError, match="token columns"):
            sink.write(record(9, columns={"w": np.arange(5)}))
        sink.write(RECORDS[1])

    assert contents(RECORDS[:2]) == contents(open_stream(path))


# ----------------------------------------------------------------------------------------------------------------------
# Pipes and files of the caller's
# ----------------------------------------------------------------------------------------------------------------------


def test_a_fifo_stays_one(tmp_path: Path) -> None:
    """A named pipe is written and read in place; it is still a pipe afterwards."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = threading.Thread(target=write, args=(path,))
    writer.start()
    found = list(open_stream(path))
    writer.join()

    assert contents(RECORDS) == contents(found)
    assert path.is_fifo()
    assert names(tmp_path) == ["pipe"]


def test_a_batch_leaves_through_a_fifo_when_it_was_written(tmp_path: Path) -> None:
    """Nothing waits in a buffer for the next one: the reader has the record while the writer is still open."""
    path = tmp_path / "fifo"
    os.mkfifo(path)
    came: list[str] = []
    first = threading.Event()

    def read() -> None:
        with open(path, "rb", buffering=0) as file:
            for item in open_stream(file):
                came.append(item.sample_id)
                first.set()

    reading = threading.Thread(target=read)
    reading.start()
    with new_stream(path, SPEC, max_bytes=1) as sink:
        sink.write(RECORDS[0])
        assert first.wait(30)
    reading.join()
    assert [RECORDS[0].sample_id] == came


def test_a_descriptor_has_a_path(tmp_path: Path) -> None:
    """What a shell's ``>(...)`` gives, and ``/dev/stdout`` in a pipe: a name that resolves to none."""
    reading, writing = os.pipe()
    found: list[RouteRecord] = []

    def read() -> None:
        with open(reading, "rb") as file:
            found.extend(open_stream(file))

    reader = threading.Thread(target=read)
    reader.start()
    try:
        write(Path(f"/dev/fd/{writing}"))
    finally:
        os.close(writing)
        reader.join()
    assert contents(RECORDS) == contents(found)


def test_an_abort_down_a_fifo_is_seen(tmp_path: Path) -> None:
    """What went down a pipe cannot be taken back; without a trailer no reader takes it for whole."""
    path = tmp_path / "pipe"
    os.mkfifo(path)

    def run() -> None:
        with contextlib.suppress(KeyError):
            fail_amid(path)

    writer = threading.Thread(target=run)
    writer.start()
    reader = iter(open_stream(path))
    assert content(RECORDS[0]) == content(next(reader))
    with pytest.raises(TruncatedError):
        next(reader)
    writer.join()


@pytest.mark.parametrize("end", ["close", "abort"])
def test_the_callers_file_stays_open(end: str) -> None:
    """A file that the caller opened is flushed, not closed; after an abort it has no end of a stream."""
    file = io.BytesIO()
    sink = new_stream(file, SPEC, max_bytes=1)
    sink.write(RECORDS[0])
    getattr(sink, end)()
    del sink
    gc.collect()

    assert not file.closed
    assert (end == "close") == file.getvalue().endswith(b"\xff\xff\xff\xff\0\0\0\0")
    file.write(b"more")


class Grudging(io.RawIOBase):
    """A raw file, as an unbuffered pipe or socket is: a write may take fewer bytes than it is given."""

    def __init__(self) -> None:
        self.data = bytearray()

    def writable(self) -> bool:
        """It is."""
        return True

    def write(self, data: object, /) -> int:
        """At most 100 bytes."""
        taken = bytes(data)[:100]  # type: ignore[call-overload]  # any buffer
        self.data += taken
        return len(taken)


def test_short_writes_are_completed() -> None:
    """Every byte arrives, however few the file takes at a time."""
    file = Grudging()
    with new_stream(file, SPEC) as sink:
        for item in RECORDS:
            sink.write(item)

    assert stream_of(RECORDS) == bytes(file.data)


class Bare:
    """Nothing but ``write``."""

    def __init__(self) -> None:
        self.data = b""

    def write(self, data: object, /) -> int:
        """Take everything."""
        self.data += bytes(data)  # type: ignore[call-overload]  # any buffer
        return memoryview(data).nbytes  # type: ignore[arg-type]  # any buffer


def test_write_is_enough() -> None:
    """An object with ``write`` is a sink."""
    file = Bare()
    with new_stream(file, SPEC) as sink:
        sink.write(RECORDS[0])

    assert contents(RECORDS[:1]) == contents(open_stream(file.data))


@pytest.mark.parametrize("other", [None, 7, {"a": 1}, ["a"]], ids=repr)
def test_what_is_neither_path_nor_file(other: object) -> None:
    """Anything else is a mistake of the caller's, named."""
    with pytest.raises(UsageError) as caught:
        new_stream(other, SPEC)
    assert caught.value.kind is ErrorKind.ARGUMENT
    with pytest.raises(UsageError):
        open_stream(other)
