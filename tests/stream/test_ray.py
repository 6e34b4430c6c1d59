"""The carrier's contract on a real Ray cluster, and what Ray alone can lose."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from routeplane.errors import ErrorKind, TransportError, UsageError
from routeplane.record.interfaces import BlockName, Position
from routeplane.stream import ray as carrier
from routeplane.stream.blocks import Manifest
from routeplane.testing.builders import SPEC, facts, sample, watermarked_record, watermarked_spec
from routeplane.testing.contracts import CarrierContract
from tests.ray_cluster import local_cluster
from tests.stream.streams import flip_in_rows

# one worker for all files that start a cluster: at most one at a time
pytestmark = pytest.mark.xdist_group("ray")

_NAMES = (f"place-{number}" for number in itertools.count())


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """One small cluster for this file."""
    with local_cluster(object_store_bytes=200 * 2**20):
        yield


class TestRay(CarrierContract):
    """A place is an actor."""

    def place(self, tmp_path: Path) -> Any:
        """A name that no other test has."""
        return next(_NAMES)

    def release(self, place: Any) -> None:
        """End its actor."""
        carrier.delete_place(place)

    def writer(self, place: Any, **options: Any) -> Any:
        """A producer of this process."""
        return carrier.open_writer(place, SPEC, **options)

    def reader(self, place: Any, **options: Any) -> Any:
        """A reader of this process."""
        return carrier.open_reader(place, **options)

    def kill(self, place: Any, writer: Any) -> None:
        """The place sees a dead process as one that gave its name up."""
        writer._slot.release()

    def delete(self, place: Any, name: BlockName) -> None:
        """The actor forgets the reference."""
        actor = ray.get_actor(place, namespace=carrier.NAMESPACE)
        ray.get(actor.__ray_call__.remote(_dropped, *name))

    def damage(self, place: Any, name: BlockName) -> None:
        """Objects are immutable: another one takes the block's place."""
        actor = ray.get_actor(place, namespace=carrier.NAMESPACE)
        ray.get(actor.__ray_call__.remote(_damaged, *name))


def _dropped(actor: Any, producer: str, number: int) -> None:
    actor._producers[producer].references.pop(number)
    actor._producers[producer].retention.drop(number)


def _damaged(actor: Any, producer: str, number: int) -> None:
    blocks = actor._producers[producer].references
    data = flip_in_rows(bytes(ray.get(blocks[number])))
    blocks[number] = ray.put(np.frombuffer(data, dtype=np.uint8))


def write_and_die(place: str, count: int) -> None:
    """A producer that is killed after its last block is sealed."""
    writer = carrier.open_writer(place, SPEC, run="run", producer="p")
    for index in range(count):
        writer.write(sample(index))
        writer.flush()
    os.kill(os.getpid(), signal.SIGKILL)


def test_blocks_outlive_the_process_that_made_them() -> None:
    """The producer's process is killed: all sealed blocks are read, the producer counts as vanished, and may return."""
    place = next(_NAMES)
    with pytest.raises(ray.exceptions.RayError):
        ray.get(ray.remote(num_cpus=0, max_retries=0)(write_and_die).remote(place, 5))
    with carrier.open_reader(place, producers=1, follow=False) as reader:
        assert facts([sample(index) for index in range(5)]) == facts(list(reader))
        assert not reader.report().complete
        assert "vanished" == reader._store.state(BlockName("p", 5))
    with carrier.open_writer(place, SPEC, run="run", producer="p") as writer:
        writer.write(sample(5))
        assert BlockName("p", 5) == writer.flush()
    carrier.delete_place(place)


def test_a_place_whose_actor_died_is_lost_and_says_so() -> None:
    """Blocks are in memory: the error names the place."""
    place = next(_NAMES)
    writer = carrier.open_writer(place, SPEC, run="run", producer="p")
    writer.write(sample(0))
    reader = carrier.open_reader(place, producers=1)
    carrier.delete_place(place)
    with pytest.raises(TransportError, match=place) as caught:
        writer.flush()
    assert ErrorKind.CONNECTION == caught.value.kind
    with pytest.raises(TransportError, match=place):
        list(reader)


def test_a_cut_crosses_and_not_the_block() -> None:
    """The relay task sends one layer of two tokens; it is what a cut of the whole block gives, under a new checksum."""
    place = next(_NAMES)
    with carrier.open_writer(place, SPEC, run="run", producer="p") as writer:
        for index in range(4):
            writer.write(sample(index, tokens=8))
    layer = SPEC.layer_ids[1]
    with carrier.open_reader(place, producers=1) as reader:
        [name] = list(reader.names())
        key = sample(2).key
        [cut] = reader.fetch(name, keys=[key], layer_ids=[layer], tokens=(1, 3))
        [whole] = reader.fetch(name, keys=[key])
    assert whole.select([layer]).routes[1:3].tolist() == cut.routes.tolist()
    cut.verify()
    carrier.delete_place(place)


def test_a_rank_is_brought_the_cut_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank of CP2 x PP4: a stage's layers of half a record, at most 1.1x of their bytes besides a block's frame."""
    place, spec = next(_NAMES), watermarked_spec(layers=tuple(range(48)), top_k=8)
    sent = [watermarked_record(index, num_tokens=1_024, spec=spec) for index in range(4)]
    with carrier.open_writer(place, spec, run="run", producer="p") as writer:
        for record in sent:
            writer.write(record)
    came: list[int] = []
    got = carrier._got

    def counted(reference: Any, what: str) -> Any:
        value = got(reference, what)
        if what.startswith(("the cut", "block")):
            came.append(len(value))
        return value

    monkeypatch.setattr(carrier, "_got", counted)
    with carrier.open_reader(place, producers=1) as reader:
        name = next(reader.names())
        for stage in range(4):
            layers = spec.layer_ids[12 * stage : 12 * (stage + 1)]
            came.clear()
            (cut,) = reader.fetch(name, keys=[sent[stage].key], layer_ids=layers, tokens=(512, 1_024))
            assert sent[stage].slice(512, 1_024).select(layers).checksum == cut.checksum
            assert sum(came) <= 1.1 * cut.nbytes + 16_384
    carrier.delete_place(place)


# ----------------------------------------------------------------------------------------------------------------------
# What the actor says, asked in this process
# ----------------------------------------------------------------------------------------------------------------------


def kind_of(call: Callable[[], object]) -> ErrorKind:
    """The kind of the error that a call raises."""
    with pytest.raises(UsageError, match=r"'[pg]'") as caught:
        call()
    return caught.value.kind


def test_a_place_tells_names_and_blocks_apart() -> None:
    """Taken, closed, vanished and unknown names; blocks that are waited for, sealed and gone; strangers."""
    here = carrier._Owner.here()
    first, second, reader, stranger = (here._replace(token=token) for token in ("first", "second", "reader", "other"))
    dead = here._replace(pid=2**22 + 1)
    place = carrier._PlaceActor("name")
    declared = Manifest.of(SPEC, run="run", groups=["g"], encoding="auto")
    again = Manifest.of(SPEC, run="run", groups=["g"], encoding="auto")
    block = (ray.put(np.zeros(8, dtype=np.uint8)), 8)
    # a name that has not opened the place
    said: list[Any] = [place.manifest(), place.look("p", 0)[0], place.last_number("p")]
    assert [None, "waiting", 0] == said

    assert [declared] * 3 == [
        place.open_producer(declared, "p", first),
        place.open_producer(again, "q", first),
        place.manifest(),
    ]
    assert ErrorKind.PRODUCER_TAKEN is kind_of(lambda: place.open_producer(again, "p", second))
    assert ErrorKind.PRODUCER_TAKEN is kind_of(lambda: place.publish("p", stranger, block, None, 100))
    assert "waiting" == place.look("p", 0)[0]

    published = [place.publish("p", first, block, None, 8) for _ in range(2)]
    place.end("p", stranger, "closed")
    place.release(stranger)
    said = [None if each is None else each[0] for each in published]
    assert [0, None, "sealed", "waiting"] == [*said, place.look("p", 0)[0], place.look("p", 1)[0]]

    after = Position(place=declared.place, next={"p": 1})
    assert Position(place=declared.place) == place.open_group("g", reader)
    assert ErrorKind.GROUP_TAKEN is kind_of(lambda: place.open_group("g", stranger))
    assert ErrorKind.GROUP_TAKEN is kind_of(lambda: place.save_position("g", stranger, after))
    place.save_position("g", reader, after)
    # what the group acknowledged makes space
    assert 1 == place.publish("p", first, block, None, 8)[0]  # type: ignore[index]
    assert ["expired", "sealed", "waiting"] == [place.look("p", number)[0] for number in range(3)]

    place.release(first)
    place.release(reader)
    assert ("vanished", after) == (place.look("p", 2)[0], place.open_group("g", second))
    place.open_producer(again, "p", dead)
    assert "vanished" == place.look("p", 2)[0]
    place.end("p", dead, "closed")
    assert ("closed", 2) == (place.look("p", 2)[0], place.last_number("p"))
    assert ErrorKind.ARGUMENT is kind_of(lambda: place.open_producer(again, "p", here))


def test_a_process_that_ended_is_not_alive() -> None:
    """Another process under its number is another start; on a node that is gone, nothing lives."""
    here = carrier._Owner.here()

    assert [True, False, False, False] == [
        owner.is_alive()
        for owner in (here, here._replace(started=1), here._replace(pid=2**22 + 1), here._replace(node="0" * 56))
    ]


def test_deleting_a_place_that_is_not_there_is_not_an_error() -> None:
    """Nor twice."""
    carrier.delete_place("never-opened")


def _wait() -> None:
    time.sleep(60)


def test_what_a_task_does_not_bring_in_time_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reference whose task never ends."""
    monkeypatch.setattr(carrier, "_CALL_SECONDS", 0.05)
    waits = ray.remote(num_cpus=0)(_wait).remote()
    with pytest.raises(TransportError, match="a block within") as caught:
        carrier._got(waits, "a block")
    ray.cancel(waits, force=True)

    assert ErrorKind.TIMED_OUT == caught.value.kind
