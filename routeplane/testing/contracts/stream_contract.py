"""What every stream promises, as tests to inherit.

    class TestMine(StreamContract):
        def place(self, tmp_path): ...                    # a fresh place per test: whatever sink() and source() need
        def sink(self, place, spec, **options): ...       # new_stream(...)
        def source(self, place, **policy): ...            # open_stream(...)

``StreamContract`` holds for one producer and one consumer over anything, ``LiveContract`` where a reader may come
before the writer closed, ``CarrierContract`` (in ``delivery``) for carriers of blocks. A writer runs in a thread
beside its reader, as both would in processes of their own. Needs the extra ``testing``; knows base and stream.
"""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pytest

from routeplane.errors import ChecksumError, DataError, ErrorKind, FormatError, RouteplaneError, TruncatedError
from routeplane.record.prefixes import resolve
from routeplane.record.record import RouteRecord
from routeplane.record.spec import RouteSpec
from routeplane.testing.builders import (
    PATIENCE_S,
    SPEC,
    beforehand,
    beside,
    damaged,
    facts,
    group_of,
    sample,
)

__all__ = ["LiveContract", "StreamContract"]


class StreamContract(ABC):
    """One producer, one consumer. ``place`` is made per test; ``sink`` and ``source`` open its two ends.

    Example::

        class TestMyStream(StreamContract):
            def place(self, tmp_path): return tmp_path / "a.stream"
            def sink(self, place, spec, **options): return my_stream.sink(place, spec, **options)
            ...  # and ``source``; pytest collects the tests
    """

    #: Whether a reader may come before the writer closed; see ``LiveContract``.
    live: ClassVar[bool] = False

    @abstractmethod
    def place(self, tmp_path: Path) -> Any:
        """Somewhere fresh for one stream."""

    @abstractmethod
    def sink(self, place: Any, spec: RouteSpec, **options: Any) -> Any:
        """A RouteSink there; takes what ``new_stream`` takes."""

    @abstractmethod
    def source(self, place: Any, **policy: Any) -> Any:
        """A RouteSource there; takes what ``open_stream`` takes. Waits for the writer."""

    def release(self, place: Any) -> None:
        """Undo ``place``; called after each test. By default there is nothing to undo."""
        del place

    @pytest.fixture
    def at(self, tmp_path: Path) -> Iterator[Any]:
        """The place of a test."""
        place = self.place(tmp_path)
        yield place
        self.release(place)

    @contextlib.contextmanager
    def carried(
        self, place: Any, records: Sequence[RouteRecord], *, spec: RouteSpec = SPEC, abort: bool = False, **options: Any
    ) -> Iterator[list[BaseException]]:
        """Have the records written beside (or before, where the transport is not live), then closed or aborted."""

        def write() -> None:
            sink = self.sink(place, spec, **options)
            for record in records:
                sink.write(record)
            if abort:
                sink.abort()
            else:
                sink.close()

        with beside(write) if self.live else beforehand(write) as raised:
            yield raised

    # -- what arrives ------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("encoding", ["plain", "narrow", "auto"])
    def test_records_arrive_as_they_left(self, at: Any, encoding: str) -> None:
        """Order, content and checksums are the same on both sides, in every encoding."""
        self._check_round_trip(at, encoding=encoding)

    @pytest.mark.parametrize("max_bytes", [1, 500, 2**20])
    def test_records_arrive_whatever_the_bound(self, at: Any, max_bytes: int) -> None:
        """... and at every bound, from one record at a time to all at once."""
        self._check_round_trip(at, max_bytes=max_bytes)

    def _check_round_trip(self, at: Any, **options: Any) -> None:
        sent = [sample(index, tokens=2 + index) for index in range(8)]
        with self.carried(at, sent, **options) as raised:
            with self.source(at) as reader:
                came = list(reader)

        assert [] == raised
        assert SPEC == reader.spec
        assert facts(sent) == facts(came)
        report = reader.report()
        assert (len(sent), sum(record.num_tokens for record in sent)) == (report.records, report.tokens)
        assert (True, False) == (report.complete, report.truncated)

    def test_an_empty_stream_is_complete(self, at: Any) -> None:
        """A stream without records is complete and has its spec."""
        with self.carried(at, []):
            with self.source(at) as reader:
                assert [] == list(reader)
        assert SPEC == reader.spec
        assert reader.report().complete

    def test_records_are_read_only(self, at: Any) -> None:
        """Arrays of a received record refuse writes, since others may share their memory."""
        with self.carried(at, [sample(0)]):
            with self.source(at) as reader:
                (record,) = reader
        assert (False, False) == (record.routes.flags.writeable, record.token_ids.flags.writeable)

    def test_records_outlive_their_reader(self, at: Any) -> None:
        """What was yielded stays what it was, whatever comes after it and after the end."""
        sent = [sample(index, tokens=50) for index in range(12)]
        with self.carried(at, sent, max_bytes=500):
            with self.source(at) as reader:
                came = list(reader)
        assert facts(sent) == facts(came)

    def test_a_selection(self, at: Any) -> None:
        """Layers and tokens are cut as the records themselves would cut them; what lies outside is counted."""
        sent = [sample(index, tokens=2 + 2 * index) for index in range(4)]
        with self.carried(at, sent):
            with self.source(at) as reader:
                came = list(reader.select(layer_ids=[4, 1], tokens=(3, 6)))
        expected = [record.slice(3, min(6, record.num_tokens)).select([4, 1]) for record in sent[1:]]
        assert facts(expected) == facts(came)
        assert (SPEC.select([4, 1]), 1) == (reader.spec, reader.report().outside)

    def test_a_prompt_is_carried_once(self, at: Any) -> None:
        """Samples that refer to the prompt of another come with the reference, and resolve to whole records."""
        sent = group_of(4)
        with self.carried(at, sent):
            with self.source(at) as reader:
                came = list(reader)
        assert [record.prefix for record in sent] == [record.prefix for record in came]
        assert facts(resolve(sent)) == facts(resolve(came))

    # -- what is refused ---------------------------------------------------------------------------------------------

    def test_a_record_comes_once(self, at: Any) -> None:
        """A key that was written before is refused, nothing of it is written, and the stream goes on."""
        found: list[ErrorKind] = []

        def write() -> None:
            with self.sink(at, SPEC) as sink:
                sink.write(sample(0))
                for second in (sample(0), sample(0, tokens=9)):
                    with pytest.raises(DataError) as caught:
                        sink.write(second)
                    found.append(caught.value.kind)
                sink.write(sample(1))

        with beside(write) if self.live else beforehand(write):
            with self.source(at) as reader:
                came = list(reader)
        assert 2 * [ErrorKind.DUPLICATE_KEY] == found
        assert facts([sample(0), sample(1)]) == facts(came)

    def test_a_damaged_record_is_not_sent(self, at: Any) -> None:
        """The writer verifies before anything is written."""

        def write() -> None:
            with self.sink(at, SPEC) as sink:
                with pytest.raises(ChecksumError):
                    sink.write(damaged(sample(0), noticed=True))
                sink.write(sample(1))

        with beside(write) if self.live else beforehand(write):
            with self.source(at) as reader:
                assert facts([sample(1)]) == facts(list(reader))

    def test_another_geometry_is_refused(self, at: Any) -> None:
        """Records of another model do not fit."""

        def write() -> None:
            with self.sink(at, SPEC) as sink:
                with pytest.raises(RouteplaneError):
                    sink.write(sample(0, spec=SPEC.select([1])))

        with beside(write) if self.live else beforehand(write):
            with self.source(at) as reader:
                assert [] == list(reader)

    # -- ends --------------------------------------------------------------------------------------------------------

    def test_an_aborted_stream_is_refused(self, at: Any) -> None:
        """After an abort the reader raises; it never reports a complete stream."""
        with self.carried(at, [sample(index) for index in range(4)], abort=True, max_bytes=1):
            with pytest.raises((TruncatedError, FormatError, FileNotFoundError)):
                with self.source(at) as reader:
                    list(reader)

    def test_what_came_before_an_abort_may_be_kept(self, at: Any) -> None:
        """With ``on_truncated="keep"`` whole records come, in order, and the report says that it was cut.

        Where nothing at all was published there is nothing to open.
        """
        sent = [sample(index) for index in range(4)]
        with self.carried(at, sent, abort=True, max_bytes=1):
            with contextlib.suppress(FormatError, FileNotFoundError):
                with self.source(at, on_truncated="keep") as reader:
                    came = list(reader)
                    assert (True, False) == (reader.report().truncated, reader.report().complete)
                    assert facts(sent[: len(came)]) == facts(came)

    def test_an_exception_aborts(self, at: Any) -> None:
        """Leaving ``with`` by an exception aborts the stream instead of closing it."""

        def write() -> None:
            with contextlib.suppress(KeyError), self.sink(at, SPEC) as sink:
                sink.write(sample(0))
                raise KeyError

        with beside(write) if self.live else beforehand(write):
            with pytest.raises((TruncatedError, FormatError, FileNotFoundError)):
                with self.source(at) as reader:
                    list(reader)

    def test_after_the_end_nothing_is_written(self, at: Any) -> None:
        """A closed sink takes no record; closing again changes nothing."""

        def write() -> None:
            sink = self.sink(at, SPEC)
            sink.write(sample(0))
            sink.close()
            sink.close()
            sink.abort()
            with pytest.raises(ValueError, match="closed"):
                sink.write(sample(1))

        with beside(write) if self.live else beforehand(write):
            with self.source(at) as reader:
                assert facts([sample(0)]) == facts(list(reader))

    def test_one_iteration(self, at: Any) -> None:
        """A stream is read once: another iteration is refused, not empty."""
        with self.carried(at, [sample(0)]):
            with self.source(at) as reader:
                list(reader)
                with pytest.raises(ValueError, match="one iteration"):
                    iter(reader)

    # -- damage ------------------------------------------------------------------------------------------------------

    def test_damage_is_found_by_the_reader(self, at: Any) -> None:
        """Rows that are legal and not those that were captured are an error, which names the sample."""
        with self.carried(at, [sample(0), damaged(sample(1), noticed=False), sample(2)]):
            with self.source(at) as reader:
                with pytest.raises(ChecksumError, match="sample-1"):
                    list(reader)

    def test_damage_may_be_set_aside(self, at: Any) -> None:
        """With ``on_corrupt="quarantine"`` that record's rows are MISSING, its bytes kept, the rest as sent."""
        sent = [sample(0), damaged(sample(1), noticed=False), sample(2)]
        with self.carried(at, sent):
            with self.source(at, on_corrupt="quarantine") as reader:
                came = list(reader)
        assert facts([sent[0], sent[2]]) == facts([came[0], came[2]])
        assert sent[1].key == came[1].key
        assert (came[1].routes == -1).all()
        (entry,) = reader.report().quarantined
        assert (1, sent[1].key, True) == (entry.index, entry.key, entry.yielded)
        with pa.ipc.open_stream(reader.quarantine.raw(entry)) as raw:
            assert [sent[1].checksum] == raw.read_all().column("checksum").to_pylist()


class LiveContract(StreamContract):
    """A reader may come before the writer closed.

    ``slack``: bytes that may lie in the transport beyond twice ``max_bytes``: the buffers of an operating system.
    ``slow_tokens``: tokens of the records with which that is tried.

    Example::

        class TestMySocket(LiveContract):
            ...  # the methods that StreamContract asks for
    """

    live = True
    slack: ClassVar[int] = 0
    slow_tokens: ClassVar[int] = 50

    def test_a_slow_reader_holds_the_writer(self, at: Any) -> None:
        """A writer is never further ahead of its reader than twice the bound (what it gathers, what is on its way), one
        record, and the transport's slack."""
        one = sample(0, tokens=self.slow_tokens).nbytes
        count = 16 + 2 * (self.slack // one)
        written: list[int] = []

        def write() -> None:
            with self.sink(at, SPEC, max_bytes=4 * one) as sink:
                for index in range(count):
                    sink.write(sample(index, tokens=self.slow_tokens))
                    written.append(index)

        ahead: list[int] = []
        with beside(write):
            with self.source(at) as reader:
                for index, _ in enumerate(reader):
                    ahead.append(len(written) - index)
        assert list(range(count)) == written
        assert max(ahead) <= 2 * 4 + 2 + self.slack // one

    def test_a_reader_may_come_first(self, at: Any) -> None:
        """Opening waits for the writer, reading for its records; the first comes before the second is written."""
        came: list[RouteRecord] = []
        first = threading.Event()

        def read() -> None:
            with self.source(at) as reader:
                for record in reader:
                    came.append(record)
                    first.set()

        with beside(read) as raised:
            with self.sink(at, SPEC, max_bytes=1) as sink:
                sink.write(sample(0))
                assert first.wait(PATIENCE_S)
                sink.write(sample(1))
        assert [] == raised
        assert facts([sample(0), sample(1)]) == facts(came)

    def test_a_waiting_reader_hears_of_an_abort(self, at: Any) -> None:
        """A reader that waits for the next record is not left waiting."""

        def read() -> None:
            with self.source(at) as reader:
                list(reader)

        with beside(read) as raised:
            sink = self.sink(at, SPEC, max_bytes=1)
            sink.write(sample(0))
            sink.abort()
        assert [True] == [isinstance(error, TruncatedError) for error in raised]
