"""What every brokered transport promises beyond ``LiveContract``: groups, acknowledgement, producers that vanish.

class TestMine(DeliveryContract):
    def place(self, tmp_path, *, groups=("default",), producers=1): ...
    def sink(self, place, spec, **options): ...       # new_stream(...)
    def source(self, place, **options): ...           # open_stream(...)
    def lose(self, place, sink): ...                  # the producer of this sink vanishes, and its lease runs out
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from routeplane.errors import DataError, ErrorKind, TruncatedError, UsageError
from routeplane.record.record import RouteRecord
from routeplane.stream.delivery import DEFAULT_GROUP
from routeplane.testing.contracts.samples import SPEC, beside, facts, sample
from routeplane.testing.contracts.stream import LiveContract

__all__ = ["DeliveryContract"]

# Large enough that nobody waits where a test is not about waiting.
_ROOM = 2**22


class DeliveryContract(LiveContract):
    """Any number of producers, groups and consumers. One record may be one block, or several."""

    @abstractmethod
    def place(self, tmp_path: Path, *, groups: Sequence[str] = (DEFAULT_GROUP,), producers: int = 1) -> Any:
        """Somewhere fresh for one stream with these groups, that ends with so many producers."""

    @abstractmethod
    def lose(self, place: Any, sink: Any) -> None:
        """The producer of a sink vanishes without a word, and is taken for lost."""

    @pytest.fixture
    def two_groups(self, tmp_path: Path) -> Iterator[Any]:
        """A place with the groups ``train`` and ``audit``."""
        place = self.place(tmp_path, groups=("train", "audit"))
        yield place
        self.release(place)

    @pytest.fixture
    def two_producers(self, tmp_path: Path) -> Iterator[Any]:
        """A place that two producers end."""
        place = self.place(tmp_path, producers=2)
        yield place
        self.release(place)

    def write(
        self, place: Any, records: Sequence[RouteRecord], *, producer: str | None = None, close: bool = True
    ) -> Any:
        """A sink with these records written, one block each, and closed unless told otherwise."""
        sink = self.sink(place, SPEC, producer=producer, max_bytes=_ROOM)
        for record in records:
            sink.write(record)
            sink.flush()
        if close:
            sink.close()
        return sink

    # -- groups ------------------------------------------------------------------------------------------------------

    def test_every_group_is_given_every_record_once(self, two_groups: Any) -> None:
        """Groups do not take from each other; what one acknowledged stays for the other."""
        sent = [sample(index) for index in range(5)]
        self.write(two_groups, sent)
        for group in ("train", "audit"):
            with self.source(two_groups, group=group) as reader:
                assert facts(sent) == facts(list(reader))
            assert reader.report().complete

    def test_consumers_of_a_group_share(self, at: Any) -> None:
        """Two consumers at once: each record goes to one of them, in the producer's order for both."""
        sent = [sample(index) for index in range(12)]
        came: dict[str, list[RouteRecord]] = {"a": [], "b": []}

        def read(name: str) -> None:
            with self.source(at, consumer=name) as reader:
                came[name].extend(reader)

        with beside(lambda: read("a")) as first, beside(lambda: read("b")) as second:
            self.write(at, sent)
        assert [] == first + second
        ids = [[int(record.token_ids[0]) for record in found] for found in came.values()]
        assert [sorted(found) for found in ids] == ids
        assert [int(record.token_ids[0]) for record in sent] == sorted(ids[0] + ids[1])

    # -- acknowledgement ---------------------------------------------------------------------------------------------

    def test_what_was_not_acknowledged_comes_again(self, at: Any) -> None:
        """A consumer that goes after reading and before acknowledging loses nothing, and repeats nothing."""
        sent = [sample(index) for index in range(6)]
        self.write(at, sent)
        with self.source(at, acknowledge="manual") as reader:
            records = iter(reader)
            for _ in range(3):
                next(records)
            reader.acknowledge()  # two of them: the third may not be all of its block yet
            next(records)
        with self.source(at) as reader:
            rest = list(reader)
        assert facts(sent[2:]) == facts(rest)

    def test_a_consumer_comes_back_under_its_name(self, at: Any) -> None:
        """A consumer that died without leaving, and starts again, is given at once what it had not acknowledged."""
        sent = [sample(index) for index in range(4)]
        self.write(at, sent)
        dead = iter(self.source(at, consumer="trainer-0"))
        next(dead)
        with self.source(at, consumer="trainer-0") as reader:
            assert facts(sent) == facts(list(reader))
        with pytest.raises(UsageError) as caught:
            list(dead)
        assert caught.value.kind is ErrorKind.FENCED

    def test_an_acknowledged_record_never_comes_again(self, at: Any) -> None:
        """Reading by itself acknowledges: what another consumer gets is the rest."""
        sent = [sample(index) for index in range(6)]
        self.write(at, sent)
        with self.source(at) as reader:
            records = iter(reader)
            first = [next(records) for _ in range(3)]
        with self.source(at) as reader:
            rest = list(reader)
        # the third was yielded, and nobody asked for what is behind it
        assert facts(sent) == facts(first[:2] + rest)

    # -- producers ---------------------------------------------------------------------------------------------------

    def test_each_producer_keeps_its_order(self, two_producers: Any) -> None:
        """Records of several producers mingle, each one's in its order; the end comes with the last of them."""
        parts = {name: [sample(10 * at + index) for index in range(6)] for at, name in enumerate("pq")}
        came: list[RouteRecord] = []

        def read() -> None:
            with self.source(two_producers) as reader:
                came.extend(reader)
                assert reader.report().complete

        with beside(read) as raised:
            for name, records in parts.items():
                self.write(two_producers, records, producer=name)
        assert [] == raised
        for records in parts.values():
            keys = {record.key for record in records}
            assert facts(records) == facts([record for record in came if record.key in keys])

    def test_one_producer_of_a_name(self, two_producers: Any) -> None:
        """A second one under a living producer's name is refused, and disturbs nothing."""
        first = self.write(two_producers, [sample(0)], producer="p", close=False)
        with pytest.raises(UsageError) as caught:
            self.write(two_producers, [sample(1)], producer="p")
        assert caught.value.kind is ErrorKind.PRODUCER_TAKEN
        first.write(sample(2))
        first.close()
        self.write(two_producers, [sample(3)], producer="q")
        with self.source(two_producers) as reader:
            assert facts([sample(0), sample(2), sample(3)]) == facts(
                sorted(reader, key=lambda record: record.sample_id)
            )

    def test_a_record_comes_from_one_producer(self, two_producers: Any) -> None:
        """A key that another producer sent is refused; the other's record stands."""
        self.write(two_producers, [sample(0)], producer="p")
        with pytest.raises(DataError) as caught:
            self.write(two_producers, [sample(0)], producer="q")
        assert caught.value.kind is ErrorKind.DUPLICATE_KEY

    # -- ends --------------------------------------------------------------------------------------------------------

    def test_a_lost_producer_is_no_end(self, at: Any) -> None:
        """Of a producer that vanished all comes that was accepted, then an error that says what to do."""
        sent = [sample(index) for index in range(3)]
        sink = self.write(at, sent, producer="p", close=False)
        self.lose(at, sink)
        came: list[RouteRecord] = []
        with self.source(at) as reader:
            with pytest.raises(TruncatedError, match="'p' lost: run") as caught:
                came.extend(reader)
        assert caught.value.kind is ErrorKind.PRODUCER_LOST
        assert facts(sent) == facts(came)

    def test_a_lost_producer_is_told_from_an_aborted_one(self, at: Any) -> None:
        """An abort says so, and withdraws what nobody was given."""
        sink = self.write(at, [sample(0)], producer="p", close=False)
        sink.abort()
        with self.source(at) as reader:
            with pytest.raises(TruncatedError, match="'p' aborted") as caught:
                list(reader)
        assert caught.value.kind is ErrorKind.ABORTED

    def test_a_lost_producer_goes_on(self, at: Any) -> None:
        """Another process under the lost one's name goes on behind what was accepted; the lost one is fenced off."""
        lost = self.write(at, [sample(0)], producer="p", close=False)
        self.lose(at, lost)
        with self.source(at) as reader:
            records = iter(reader)
            came = [next(records)]
            self.write(at, [sample(1)], producer="p", close=False)
            came.append(next(records))
        assert facts([sample(0), sample(1)]) == facts(came)
        with pytest.raises(UsageError) as caught:
            lost.close()
        assert caught.value.kind is ErrorKind.FENCED
