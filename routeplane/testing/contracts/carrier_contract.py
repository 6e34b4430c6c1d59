"""What every carrier of blocks promises, as tests to inherit.

    class TestMine(CarrierContract):
        def place(self, tmp_path): ...                             # somewhere fresh
        def writer(self, place, **options): ...                    # <carrier>.open_writer(place, SPEC, **options)
        def reader(self, place, **options): ...                    # <carrier>.open_reader(place, **options)
        def kill(self, place, writer): ...                         # the writer's process dies without an end
        def delete(self, place, name): ...                         # a sealed block disappears
        def damage(self, place, name): ...                         # one bit of a sealed block's body flips

``writer`` is given ``run``, ``producer``, ``groups``, ``encoding`` and ``limits``; ``reader`` is given ``producers``
and any of ``group``, ``follow``, ``policy``, ``options``. A carrier that refuses a feature sets ``groups`` or
``producers`` to False; those tests then check the refusal. Each test is a line of the table in
``docs/explanation/delivery.md``. Needs the extra ``testing``.
"""

from __future__ import annotations

import json
import pickle
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from routeplane.errors import DataError, ErrorKind, RouteplaneError, TransportError, TruncatedError, UsageError
from routeplane.record.interfaces import BlockName, Position
from routeplane.record.policy import ReadPolicy
from routeplane.record.record import RouteRecord
from routeplane.stream.blocks import BlockLimits, ReadOptions
from routeplane.testing.builders import SPEC, beside, facts, group_of, sample, turns_of

__all__ = ["CarrierContract"]

#: One record per block, and space for all of them.
_EACH = BlockLimits(block_bytes=1, max_bytes=2**24, timeout_s=20.0)
_BY_CALL = ReadOptions(acknowledge="call", timeout_s=20.0)
_AT_ONCE = ReadOptions(on_vanished="raise", grace_s=0.0, timeout_s=20.0)


class CarrierContract(ABC):
    """Any number of producers and groups over one place; see the module.

    Example, for a carrier of one's own::

        class TestMyCarrier(CarrierContract):
            def place(self, tmp_path): return my_carrier.Place(tmp_path)
            def writer(self, place, **options): return my_carrier.open_writer(place, SPEC, **options)
            ...  # and the other abstract methods; pytest collects the tests
    """

    #: Whether a place may have several groups, and several producers.
    groups: ClassVar[bool] = True
    producers: ClassVar[bool] = True

    @abstractmethod
    def place(self, tmp_path: Path) -> Any:
        """Somewhere fresh for one place."""

    @abstractmethod
    def writer(self, place: Any, **options: Any) -> Any:
        """A writer there, of SPEC."""

    @abstractmethod
    def reader(self, place: Any, **options: Any) -> Any:
        """A reader there."""

    @abstractmethod
    def kill(self, place: Any, writer: Any) -> None:
        """The writer's process dies without an end."""

    @abstractmethod
    def delete(self, place: Any, name: BlockName) -> None:
        """A sealed block disappears."""

    @abstractmethod
    def damage(self, place: Any, name: BlockName) -> None:
        """One bit in the body of a sealed block flips."""

    def release(self, place: Any) -> None:
        """Undo ``place``; called after each test. By default there is nothing to undo."""
        del place

    @pytest.fixture
    def at(self, tmp_path: Path) -> Iterator[Any]:
        """The place of a test."""
        place = self.place(tmp_path)
        yield place
        self.release(place)

    def open_writer(self, place: Any, **options: Any) -> Any:
        """A writer whose every record is a block."""
        return self.writer(place, **{"run": "run", "producer": "p", "limits": _EACH, **options})

    def write(self, place: Any, records: Sequence[RouteRecord], *, close: bool = True, **options: Any) -> Any:
        """A writer with these records written, closed unless told otherwise."""
        writer = self.open_writer(place, **options)
        for record in records:
            writer.write(record)
        if close:
            writer.close()
        return writer

    def read(self, place: Any, **options: Any) -> list[RouteRecord]:
        """Everything that a reader yields; it must be complete."""
        with self.reader(place, **{"producers": 1, "options": _AT_ONCE, **options}) as reader:
            found = list(reader)
            assert reader.report().complete
        return found

    # -- what arrives --------------------------------------------------------------------------------------------------

    def test_records_arrive_as_they_left(self, at: Any) -> None:
        """Order, content and checksums are the same on both sides, whatever the block size."""
        sent = [sample(index, tokens=2 + index) for index in range(8)]
        self.write(at, sent, limits=BlockLimits(block_bytes=500, max_bytes=2**24))
        assert facts(sent) == facts(self.read(at))

    def test_no_records_are_complete(self, at: Any) -> None:
        """A producer that closes without a record ends as whole."""
        self.write(at, [])
        assert [] == self.read(at)

    def test_flush_seals_what_is_held(self, at: Any) -> None:
        """After ``flush`` a reader gets what was written before, while the writer goes on."""
        writer = self.open_writer(at, limits=BlockLimits(max_bytes=2**24))
        writer.write(sample(0))
        writer.write(sample(1))
        assert BlockName("p", 0) == writer.flush()
        assert writer.flush() is None
        with self.reader(at, producers=1, follow=False) as reader:
            assert facts([sample(0), sample(1)]) == facts(list(reader))
            assert not reader.report().complete
        writer.close()

    def test_a_reader_follows_its_producer(self, at: Any) -> None:
        """A reader that came early yields each block when it is sealed, and ends when the producer closes."""
        sent = [sample(index) for index in range(4)]
        with self.open_writer(at) as writer, self.reader(at, producers=1, options=_AT_ONCE) as reader:
            records = iter(reader)
            came = []
            for record in sent:
                writer.write(record)
                came.append(next(records))
            writer.close()
            assert [] == list(records)
        assert facts(sent) == facts(came)

    def test_each_producer_keeps_its_order(self, at: Any) -> None:
        """Records of several producers mix, each producer's in its order; the end comes with the last of them."""
        if not self.producers:
            self.write(at, [], close=False)
            with pytest.raises(UsageError):
                self.open_writer(at, producer="q")
            return
        parts = {name: [sample(10 * at_ + index) for index in range(6)] for at_, name in enumerate("pq")}
        for name, records in parts.items():
            self.write(at, records, producer=name)
        came = self.read(at, producers=["p", "q"])
        for records in parts.values():
            keys = {record.key for record in records}
            assert facts(records) == facts([record for record in came if record.key in keys])
        assert 12 == len(came)

    def test_every_group_is_given_every_record(self, at: Any) -> None:
        """What one group acknowledged stays for the other."""
        if not self.groups:
            with pytest.raises(UsageError):
                self.open_writer(at, groups=("train", "audit"))
            return
        sent = [sample(index) for index in range(5)]
        self.write(at, sent, groups=("train", "audit"))
        for group in ("train", "audit"):
            assert facts(sent) == facts(self.read(at, group=group))

    def test_fetch_cuts_a_block(self, at: Any) -> None:
        """Keys, layers and tokens of one block, as the records themselves would be cut."""
        sent = [sample(index, tokens=6) for index in range(3)]
        self.write(at, sent, limits=BlockLimits(max_bytes=2**24))
        with self.reader(at, producers=1) as reader:
            found = reader.fetch(BlockName("p", 0), keys=[sent[2].key, sent[0].key], layer_ids=[4, 1], tokens=(1, 3))
            with pytest.raises(DataError) as caught:
                reader.fetch(BlockName("p", 0), keys=[sample(9).key])
        assert facts([record.slice(1, 3).select([4, 1]) for record in (sent[2], sent[0])]) == facts(found)
        assert ErrorKind.ROUTES_MISSING == caught.value.kind

    # -- the place -----------------------------------------------------------------------------------------------------

    def test_another_run_is_refused(self, at: Any) -> None:
        """A place that holds another run is refused, and stays as it is."""
        self.write(at, [sample(0)])
        with pytest.raises(UsageError, match="run"):
            self.open_writer(at, run="another", producer="q")
        assert 1 == len(self.read(at))

    def test_another_geometry_is_refused(self, at: Any) -> None:
        """Records of another model do not fit the place's writer."""
        with self.open_writer(at) as writer, pytest.raises(RouteplaneError):
            writer.write(sample(0, spec=SPEC.select([1])))

    def test_an_undeclared_group_is_refused(self, at: Any) -> None:
        """A mistyped group is an error, and holds no producer back."""
        self.write(at, [sample(0)])
        for group in ("defualt", "../x", ""):
            with pytest.raises(UsageError):
                self.reader(at, producers=1, group=group)
        assert 1 == len(self.read(at))

    def test_one_living_writer_of_a_name(self, at: Any) -> None:
        """A second writer under a living producer's name is refused, and disturbs nothing."""
        first = self.write(at, [sample(0)], close=False)
        with pytest.raises(UsageError) as caught:
            self.open_writer(at)
        assert ErrorKind.PRODUCER_TAKEN == caught.value.kind
        first.write(sample(1))
        first.close()
        assert facts([sample(0), sample(1)]) == facts(self.read(at))

    def test_one_living_reader_of_a_group(self, at: Any) -> None:
        """A second reader of a group is refused while the first lives."""
        self.write(at, [sample(0)])
        with self.reader(at, producers=1):
            with pytest.raises(UsageError) as caught:
                self.reader(at, producers=1)
        assert ErrorKind.GROUP_TAKEN == caught.value.kind
        assert 1 == len(self.read(at))

    # -- numbers and restarts ------------------------------------------------------------------------------------------

    def test_a_restarted_producer_goes_on(self, at: Any) -> None:
        """Blocks of the second life follow those of the first; the reader that waited gets all of them."""
        first = self.write(at, [sample(0)], close=False)
        self.kill(at, first)
        self.write(at, [sample(1)])
        assert facts([sample(0), sample(1)]) == facts(self.read(at))

    def test_numbers_go_on_after_a_deletion(self, at: Any) -> None:
        """With all its blocks deleted, a restarted producer uses no number again: a reader loses nothing new."""
        first = self.write(at, [sample(0), sample(1)], close=False)
        with self.reader(at, producers=1, options=_BY_CALL) as reader:
            records = iter(reader)
            next(records), next(records)
            reader.acknowledge(reader.reached.after(BlockName("p", 1)))
        self.kill(at, first)
        for number in range(2):
            self.delete(at, BlockName("p", number))
        second = self.write(at, [sample(2)], close=False)
        second.close()
        with self.reader(at, producers=1, options=_AT_ONCE) as reader:
            assert facts([sample(2)]) == facts(list(reader))
            assert 3 == reader.position().number("p")

    def test_a_position_before_a_deleted_block_is_expired(self, at: Any) -> None:
        """A block that is gone before it was acknowledged is an error, never passed over."""
        writer = self.write(at, [sample(index) for index in range(3)], close=False)
        self.delete(at, BlockName("p", 0))
        with self.reader(at, producers=1, options=_AT_ONCE) as reader, pytest.raises(DataError) as caught:
            list(reader)
        assert ErrorKind.EXPIRED == caught.value.kind
        writer.close()

    def test_a_closed_producer_is_not_opened_again(self, at: Any) -> None:
        """A reader may have ended with it; another name goes on."""
        self.write(at, [sample(0)])
        with pytest.raises(UsageError, match="closed"):
            self.open_writer(at)

    # -- acknowledgement -----------------------------------------------------------------------------------------------

    def test_what_was_not_acknowledged_comes_again(self, at: Any) -> None:
        """By default asking for the next block acknowledges the last: a reader that dies gets its last block again."""
        sent = [sample(index) for index in range(6)]
        self.write(at, sent)
        with self.reader(at, producers=1, options=_AT_ONCE) as reader:
            records = iter(reader)
            first = [next(records) for _ in range(3)]
        assert facts(sent) == facts(first[:2] + self.read(at))

    def test_only_a_call_acknowledges(self, at: Any) -> None:
        """With ``acknowledge="call"`` everything comes again to each new reader until the call."""
        sent = [sample(index) for index in range(4)]
        self.write(at, sent)
        for _ in range(2):
            assert facts(sent) == facts(self.read(at, options=_BY_CALL))
        with self.reader(at, producers=1, options=_BY_CALL) as reader:
            records = iter(reader)
            for _ in range(3):
                next(records)
            reader.acknowledge(reader.reached)
        assert facts(sent[2:]) == facts(self.read(at, options=_BY_CALL))

    def test_a_position_of_another_place_is_refused(self, at: Any) -> None:
        """Positions carry the place's random identifier, and may not be beyond what exists or step back."""
        self.write(at, [sample(0), sample(1)])
        with self.reader(at, producers=1, options=_BY_CALL) as reader:
            here = reader.position()
            reader.acknowledge(here.after(BlockName("p", 0)))
            for wrong in (
                Position(place="0" * 32, next={"p": 1}),
                here.after(BlockName("p", 9)),
                here.after(BlockName("p", 10**6)),
                here,
            ):
                with pytest.raises(UsageError):
                    reader.acknowledge(wrong)
            with pytest.raises(UsageError):
                list(reader.names(position=Position(place="0" * 32)))
            assert 1 == reader.position().number("p")

    def test_the_position_decides_the_order(self, at: Any) -> None:
        """Every copy of a reader names the same blocks in the same order, and reads them; none acknowledges."""
        names = ["p", "q"] if self.producers else ["p"]
        for name in names:
            self.write(at, [sample(100 * ord(name) + index) for index in range(3)], producer=name)
        with self.reader(at, producers=names, options=_BY_CALL) as reader:
            copy = pickle.loads(pickle.dumps(reader))
            order = list(reader.names())
            assert order == list(copy.names())
            assert order[1:] == list(copy.names(position=reader.position().after(order[0])))
            assert [1] * len(order) == [len(list(copy.open(name))) for name in order]
            with pytest.raises(UsageError):
                copy.acknowledge(reader.position().after(order[0]))
        assert sorted(order) == [BlockName(name, number) for name in names for number in range(3)]

    # -- repeats -------------------------------------------------------------------------------------------------------

    def test_a_repeat_is_dropped_and_counted(self, at: Any) -> None:
        """Same key and checksum: once. Also where the reader was opened again in between."""
        first = self.write(at, [sample(0), sample(1)], close=False)
        self.kill(at, first)
        with self.reader(at, producers=1, options=_BY_CALL) as reader:
            records = iter(reader)
            next(records), next(records)
            reader.acknowledge(reader.reached)
        self.write(at, [sample(1), sample(0), sample(2)])
        with self.reader(at, producers=1, options=_AT_ONCE) as reader:
            came = list(reader)
            assert (2, True) == (reader.report().repeats, reader.report().complete)
        assert facts([sample(1), sample(2)]) == facts(came)

    def test_another_record_under_a_known_key_is_an_error(self, at: Any) -> None:
        """Same key, other checksum: ``duplicate_key``."""
        first = self.write(at, [sample(0)], close=False)
        self.kill(at, first)
        self.write(at, [sample(0, tokens=9)])
        with self.reader(at, producers=1) as reader, pytest.raises(DataError) as caught:
            list(reader)
        assert ErrorKind.DUPLICATE_KEY == caught.value.kind

    def test_a_damaged_record_that_is_written_again_is_a_repeat(self, at: Any) -> None:
        """Under ``quarantine`` one of a damaged record and the good one is given, whichever came first; no error."""
        sent = [sample(index, tokens=300) for index in range(2)]
        first = self.write(at, sent, close=False)
        self.kill(at, first)
        self.damage(at, BlockName("p", 1))
        self.write(at, [sent[1], sample(2)])
        with self.reader(at, producers=1, policy=ReadPolicy(on_corrupt="quarantine")) as reader:
            came = list(reader)
            report = reader.report()
        assert [sent[0].key, sent[1].key, sample(2).key] == sorted(record.key for record in came)
        assert 1 == report.quarantined_count + report.skipped_records
        assert report.quarantined_count == report.repeats

    # -- bounds --------------------------------------------------------------------------------------------------------

    def test_a_full_place_makes_write_wait(self, at: Any) -> None:
        """At the byte bound ``write`` waits until blocks were acknowledged; nothing is lost."""
        sent = [sample(index, tokens=200) for index in range(12)]
        limits = BlockLimits(block_bytes=1, max_bytes=4 * sent[0].nbytes + 8_192, timeout_s=60.0)
        with beside(lambda: self.write(at, sent, limits=limits)) as raised:
            came = self.read(at, options=ReadOptions(timeout_s=20.0))
        assert [] == raised
        assert facts(sent) == facts(came)

    def test_a_place_that_stays_full_is_an_error(self, at: Any) -> None:
        """Without a reader the wait ends with ``timed_out``, and what was sealed stays."""
        sent = [sample(index, tokens=200) for index in range(12)]
        limits = BlockLimits(block_bytes=1, max_bytes=2 * sent[0].nbytes + 4_096, timeout_s=0.05)
        with pytest.raises(TransportError) as caught:
            self.write(at, sent, limits=limits)
        assert ErrorKind.TIMED_OUT == caught.value.kind
        with self.reader(at, producers=1, follow=False) as reader:
            came = list(reader)
        assert 0 < len(came) < len(sent)
        assert facts(sent[: len(came)]) == facts(came)

    def test_only_blocks_that_all_groups_acknowledged_are_deleted(self, at: Any) -> None:
        """A slow group holds the producer back instead of losing blocks."""
        if not self.groups:
            pytest.skip("the carrier has one group")
        sent = [sample(index, tokens=200) for index in range(12)]
        limits = BlockLimits(block_bytes=1, max_bytes=4 * sent[0].nbytes + 8_192, timeout_s=60.0)
        came: dict[str, list[RouteRecord]] = {}

        def read(group: str) -> None:
            came[group] = self.read(at, group=group, options=ReadOptions(timeout_s=20.0))

        groups = ("train", "audit")
        with beside(lambda: self.write(at, sent, limits=limits, groups=groups)) as raised:
            with beside(lambda: read("train")) as first, beside(lambda: read("audit")) as second:
                pass
        assert [] == raised + first + second
        assert [facts(sent)] * 2 == [facts(found) for found in came.values()]

    # -- rows that records share ---------------------------------------------------------------------------------------

    def test_shared_rows_are_stored_once(self, at: Any) -> None:
        """A turn writes its new rows and tokens alone; the reader, its copies and ``fetch`` give the whole record."""
        sent = turns_of(6, tokens=300)
        self.write(at, sent)
        with self.reader(at, producers=1, options=_BY_CALL) as reader:
            names = list(reader.names())
            stored = sum(reader._store.read(name).size for name in names)
            assert stored < 1.1 * sent[-1].nbytes + 12_000 * len(names)
            copy = pickle.loads(pickle.dumps(reader))
            assert facts(sent[::-1]) == facts([record for name in names[::-1] for record in copy.open(name)])
            assert facts([sent[4].slice(250, 1_400).select([4])]) == facts(
                reader.fetch(names[4], keys=[sent[4].key], layer_ids=[4], tokens=(250, 1_400))
            )
            assert facts(sent) == facts(list(reader))

    def test_blocks_that_others_lean_on_are_kept(self, at: Any) -> None:
        """At the byte bound a block outlives its acknowledgement while another leans on it; a later block goes."""
        first, second = turns_of(2, tokens=2_000)
        others = [sample(index, tokens=2_000) for index in range(50, 57)]
        limits = BlockLimits(block_bytes=1, max_bytes=8 * (first.nbytes + 10_000), timeout_s=20.0)
        writer = self.write(at, [first, *others[:2]], close=False, limits=limits, encoding="plain")
        with self.reader(at, producers=1, options=ReadOptions(timeout_s=20.0)) as reader:
            records = iter(reader)
            came = [next(records) for _ in range(3)]
            for record in (second, *others[2:]):
                writer.write(record)
            writer.close()
            assert "sealed" == reader._store.state(BlockName("p", 0))
            assert "expired" == reader._store.state(BlockName("p", 1))
            came += records
        assert facts([first, *others[:2], second, *others[2:]]) == facts(came)

    def test_a_record_that_is_a_delta_is_refused(self, at: Any) -> None:
        """The record that holds its rows may be gone: the writer makes deltas itself."""
        with self.open_writer(at) as writer, pytest.raises(UsageError, match="whole records"):
            writer.write(group_of(2)[1])

    def test_a_damaged_base_leaves_rows_missing(self, at: Any) -> None:
        """Under ``quarantine`` the rows that stood in a damaged block are MISSING in what leaned on it, and counted."""
        sent = turns_of(2, tokens=600)
        self.write(at, sent)
        self.damage(at, BlockName("p", 0))
        with self.reader(at, producers=1) as reader, pytest.raises(RouteplaneError):
            list(reader)
        with self.reader(at, producers=1, policy=ReadPolicy(on_corrupt="quarantine")) as reader:
            came = list(reader)
            report = reader.report()
        assert 0 < report.quarantined_count + report.skipped_records
        for record in came:
            record.verify()
            assert (record.routes[:600] == -1).all()
        assert report.coverage.missing >= 599

    # -- ends ----------------------------------------------------------------------------------------------------------

    def test_an_abort_is_told(self, at: Any) -> None:
        """What was sealed comes, then an error that says ``aborted``."""
        writer = self.write(at, [sample(0)], close=False)
        writer.abort()
        self._ends_with(at, ErrorKind.ABORTED, [sample(0)])

    def test_a_vanished_producer_is_told(self, at: Any) -> None:
        """What was sealed comes, then an error that says ``vanished``, after the grace time."""
        self.kill(at, self.write(at, [sample(0)], close=False))
        self._ends_with(at, ErrorKind.VANISHED, [sample(0)])

    def _ends_with(self, at: Any, kind: ErrorKind, sent: Sequence[RouteRecord]) -> None:
        came: list[RouteRecord] = []
        with self.reader(at, producers=1, options=_AT_ONCE) as reader:
            with pytest.raises(TruncatedError) as caught:
                came.extend(reader)
        assert kind == caught.value.kind
        assert facts(sent) == facts(came)

    def test_a_vanished_producer_may_be_waited_for(self, at: Any) -> None:
        """With ``on_vanished="wait"`` the reader goes on when the producer was started again."""
        self.kill(at, self.write(at, [sample(0)], close=False))
        options = ReadOptions(on_vanished="wait", timeout_s=20.0)
        with self.reader(at, producers=1, options=options) as reader:
            records = iter(reader)
            came = [next(records)]
            with beside(lambda: self.write(at, [sample(1)])) as raised:
                came += list(records)
        assert [] == raised
        assert facts([sample(0), sample(1)]) == facts(came)

    def test_a_producer_that_never_comes_is_told(self, at: Any) -> None:
        """With a timeout, a producer that is expected and absent is an error, not an end."""
        self.write(at, [sample(0)])
        options = ReadOptions(timeout_s=0.05)
        with self.reader(at, producers=["p", "absent"], options=options) as reader, pytest.raises(RouteplaneError):
            list(reader)

    def test_more_producers_than_expected_are_refused(self, at: Any) -> None:
        """A number of producers is exact: a further one is an error, not a part that is silently left out."""
        if not self.producers:
            pytest.skip("the carrier has one producer")
        for name in "pq":
            self.write(at, [sample(ord(name))], producer=name)
        with self.reader(at, producers=1) as reader, pytest.raises(UsageError, match="1 producers"):
            list(reader)

    # -- damage --------------------------------------------------------------------------------------------------------

    def test_damage_is_found(self, at: Any) -> None:
        """A flipped bit in a block is an error under the default policy."""
        self.write(at, [sample(index, tokens=300) for index in range(3)])
        self.damage(at, BlockName("p", 1))
        with self.reader(at, producers=1) as reader, pytest.raises(RouteplaneError):
            list(reader)

    def test_damage_may_be_quarantined(self, at: Any) -> None:
        """Under ``quarantine`` the other blocks come whole, and what was damaged is counted."""
        sent = [sample(index, tokens=300) for index in range(3)]
        self.write(at, sent)
        self.damage(at, BlockName("p", 1))
        with self.reader(at, producers=1, policy=ReadPolicy(on_corrupt="quarantine")) as reader:
            came = list(reader)
            report = reader.report()
        keys = {sent[0].key, sent[2].key}
        assert facts([sent[0], sent[2]]) == facts([record for record in came if record.key in keys])
        assert 1 == report.quarantined_count + report.skipped_records

    def test_positions_are_plain_values(self, at: Any) -> None:
        """A position travels as JSON, so that a checkpoint can hold it."""
        self.write(at, [sample(0)])
        with self.reader(at, producers=1) as reader:
            list(reader)
            assert reader.position() == Position.from_json(json.dumps(json.loads(reader.position().to_json())))
