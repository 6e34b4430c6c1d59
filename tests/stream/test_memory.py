"""The stream inside a process promises what others do: order, an end that is an end, bounded memory, no deadlock."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from routeplane.errors import ErrorKind, TruncatedError, UsageError
from routeplane.record.record import RouteRecord
from routeplane.stream import MemoryStream, new_stream, open_stream
from tests.stream.streams import SPEC, contents, record, record_lists

RECORDS = [record(sample, 4 + sample) for sample in range(5)]
#: Far beyond what a waiting thread needs; a deadlock shows as a failure here, not as a run without an end.
PATIENCE = 30


@contextlib.contextmanager
def beside(work: Callable[[], object]) -> Iterator[list[BaseException]]:
    """Run ``work`` in a thread meanwhile; what it raised. Fails where it does not end."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001  whatever it is, the test looks at it
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    yield raised
    thread.join(PATIENCE)
    assert not thread.is_alive()


def write_all(sink: Any, found: list[RouteRecord] = RECORDS) -> None:
    """Write and close."""
    with sink:
        for item in found:
            sink.write(item)


@given(record_lists(), st.integers(1, 3_000))
def test_round_trip(drawn: tuple[Any, list[RouteRecord]], max_bytes: int) -> None:
    """Records come out as they went in, in order, whatever the bound; the very same objects, for nothing is encoded."""
    spec, found = drawn
    stream = MemoryStream()
    sink = new_stream(stream, spec, max_bytes=max_bytes)
    with beside(lambda: write_all(sink, found)) as raised:
        reader = open_stream(stream)
        came = list(reader)

    assert raised == []
    assert spec == reader.spec
    assert [id(item) for item in found] == [id(item) for item in came]
    assert (len(found), True) == (reader.report().records, reader.report().complete)


def test_a_reader_may_come_first() -> None:
    """Opening waits for the writer to appear, reading for its records."""
    stream = MemoryStream()
    found: list[RouteRecord] = []
    with beside(lambda: found.extend(open_stream(stream))) as raised:
        write_all(new_stream(stream, SPEC))

    assert raised == []
    assert contents(RECORDS) == contents(found)


def test_a_full_stream_blocks_the_writer() -> None:
    """A writer never holds more than the bound and one record: it waits for the reader, and goes on."""
    stream = MemoryStream()
    sink = new_stream(stream, SPEC, max_bytes=1)
    written: list[int] = []

    def work() -> None:
        for index, item in enumerate(RECORDS):
            sink.write(item)
            written.append(index)
        sink.close()

    with beside(work):
        ahead = []
        for index, _ in enumerate(open_stream(stream)):
            ahead.append(len(written) - index)
    # when record i is out, i + 1 were taken, one may lie in the stream, and one write may just have returned
    assert max(ahead) <= 2
    assert list(range(5)) == written


@pytest.mark.parametrize("policy", ["raise", "keep"])
def test_an_abort_is_no_end(policy: Any) -> None:
    """After an abort a reader is told so: by an error, or by its report."""
    stream = MemoryStream()
    sink = new_stream(stream, SPEC)
    sink.write(RECORDS[0])
    sink.abort()
    reader = open_stream(stream, on_truncated=policy)
    if policy == "raise":
        with pytest.raises(TruncatedError, match="abort"):
            list(reader)
    else:
        assert [] == list(reader)
        assert (True, False) == (reader.report().truncated, reader.report().complete)


def test_an_exception_aborts() -> None:
    """A producer that fails inside ``with`` has not closed."""
    stream = MemoryStream()

    def fail() -> None:
        with new_stream(stream, SPEC) as sink:
            sink.write(RECORDS[0])
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    with pytest.raises(TruncatedError):
        list(open_stream(stream))


def test_a_waiting_reader_hears_of_an_abort() -> None:
    """A reader that waits for the next record is not left waiting."""
    stream = MemoryStream()
    sink = new_stream(stream, SPEC)
    with beside(lambda: list(open_stream(stream))) as raised:
        sink.write(RECORDS[0])
        sink.abort()

    assert [TruncatedError] == [type(error) for error in raised]


def test_a_waiting_writer_hears_that_its_reader_left() -> None:
    """A writer that waits for room is told that no one reads any more, instead of waiting for ever."""
    stream = MemoryStream()
    sink = new_stream(stream, SPEC, max_bytes=1)
    with beside(lambda: write_all(sink)) as raised:
        with open_stream(stream) as reader:
            next(iter(reader))

    (error,) = raised
    assert isinstance(error, UsageError)
    assert error.kind is ErrorKind.CLOSED
    with pytest.raises(UsageError):
        sink.write(RECORDS[-1])


def test_one_writer() -> None:
    """A second writer would mix two streams."""
    stream = MemoryStream()
    new_stream(stream, SPEC)
    with pytest.raises(UsageError, match="one writer"):
        new_stream(stream, SPEC)


def test_close_keeps_what_is_not_read_yet() -> None:
    """Closing ends the writing, not the reading."""
    stream = MemoryStream()
    write_all(new_stream(stream, SPEC))

    assert contents(RECORDS) == contents(open_stream(stream))


def test_the_same_checks_at_the_edge() -> None:
    """Geometry and keys are checked on the way in, as by every sink, and a refusal leaves the stream open."""
    stream = MemoryStream()
    sink = new_stream(stream, SPEC)
    sink.write(RECORDS[0])
    with pytest.raises(ValueError, match="twice"):
        sink.write(RECORDS[0])
    with pytest.raises(ValueError, match="layer_ids"):
        sink.write(record(7, spec=SPEC.select([1])))
    sink.write(RECORDS[1])
    sink.close()

    assert contents(RECORDS[:2]) == contents(open_stream(stream))


def test_what_was_read_is_let_go() -> None:
    """A stream keeps nothing of a record that was acknowledged."""
    stream = MemoryStream()
    sink = new_stream(stream, SPEC)
    item = record(0, 500)
    gone = weakref.ref(item)
    sink.write(item)
    sink.write(record(1))
    del item
    with open_stream(stream) as reader:
        records = iter(reader)
        next(records)
        next(records)
        sink.write(record(2))  # with which the writer hears of it
        assert [None] == [gone()]
