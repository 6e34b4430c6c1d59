"""Faults of streams over Ray: actors that are killed. Nothing acknowledged is lost, and nothing comes twice.

Producers and consumers are actors of their own, so that killing one ends a process.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import ray

from routeplane.errors import DataError, ErrorKind, TransportError
from routeplane.record.policy import StreamReport
from routeplane.record.record import RecordKey, RouteRecord
from routeplane.stream import new_stream, open_stream
from routeplane.stream.ray import PlaneOptions, RayPlane
from routeplane.testing.contracts.samples import SPEC, beside, facts, sample
from tests.ray_cluster import local_cluster

# one worker for all files that start a cluster: at most one at a time
pytestmark = pytest.mark.xdist_group("ray")


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """Ray, for all of this file."""
    with local_cluster():
        yield


@pytest.fixture
def plane() -> Iterator[RayPlane]:
    """A plane for one producer; its writers do not wait in ``close``."""
    made = RayPlane.create(PlaneOptions(keep=True))
    yield made.lingering(False)
    made.stop()


class Peer:
    """A producer or consumer in a process of its own."""

    def produce(self, plane: RayPlane, indices: Sequence[int], *, close: bool) -> None:
        """Write records, two to a block."""
        self._sink = new_stream(plane, SPEC, producer="p", max_bytes=2 * sample(0).nbytes)
        for index in indices:
            self._sink.write(sample(index))
        if close:
            self._sink.close()

    def read(self, plane: RayPlane, count: int, *, acknowledge: bool) -> list[str]:
        """Read so many records and hold on."""
        reader: Any = open_stream(plane, consumer="c", acknowledge="manual")
        self._reader = reader
        records = iter(reader)
        found = [next(records).sample_id for _ in range(count)]
        if acknowledge:
            reader.acknowledge()
        return found


def peer() -> Any:
    """An actor that tests kill."""
    return ray.remote(Peer).options(num_cpus=0).remote()


def read_rest(plane: RayPlane) -> tuple[list[RouteRecord], StreamReport]:
    """The rest, and what was seen of it. A plane that was killed may answer once more before it dies."""
    for _ in range(64):
        try:
            opened: Any = open_stream(plane, consumer="c", acknowledge="manual")
            with opened as reader:
                return list(reader), reader.report()
        except TransportError as error:
            if error.kind is not ErrorKind.CONNECTION:
                raise
    raise AssertionError("expected an end within 64 connections")


def sent(count: int) -> list[RouteRecord]:
    """What ``produce`` writes."""
    return [sample(index) for index in range(count)]


def test_records_outlive_their_writer(plane: RayPlane) -> None:
    """The plane owns the objects: a producer that closed and died leaves everything readable."""
    writer = peer()
    ray.get(writer.produce.remote(plane, range(6), close=True))
    ray.kill(writer)

    with open_stream(plane) as reader:
        assert facts(sent(6)) == facts(list(reader))
    assert reader.report().complete


def test_a_killed_producer(plane: RayPlane) -> None:
    """What it was answered for is there, also where it was killed with a record in its hands; another one goes on."""
    writer = peer()
    ray.get(writer.produce.remote(plane, range(5), close=False))  # two blocks, and a record that is held
    ray.kill(writer)
    ray.get(plane._actor.leap.remote(1_800.0))

    with new_stream(plane, SPEC, producer="p") as sink:
        accepted = sink.session.totals.records  # type: ignore[attr-defined]
        assert accepted in (2, 4)  # the last put may have been under way
        for index in range(accepted, 7):
            sink.write(sample(index))
    with open_stream(plane) as reader:
        assert facts(sent(7)) == facts(list(reader))
    assert reader.report().complete


def test_a_killed_consumer(plane: RayPlane) -> None:
    """What it read and did not acknowledge comes to the next one; what it did acknowledge does not."""
    ray.get(peer().produce.remote(plane, range(8), close=True))
    consumer = peer()
    assert 5 == len(ray.get(consumer.read.remote(plane, 5, acknowledge=True)))  # acknowledges the two whole blocks
    ray.kill(consumer)

    with open_stream(plane, consumer="c") as reader:
        assert facts(sent(8)[4:]) == facts(list(reader))


def test_a_killed_plane_without_a_spool(plane: RayPlane) -> None:
    """Ray restarts it, empty. Producers send again what was not acknowledged, consumers go on by their cursor."""
    waiting = plane.lingering(True)
    came: list[RouteRecord] = []

    def produce() -> None:
        with new_stream(waiting, SPEC, producer="p", max_bytes=2 * sample(0).nbytes) as sink:
            for index in range(10):
                sink.write(sample(index))

    with beside(produce) as raised:
        reader: Any = open_stream(plane, acknowledge="manual", consumer="c")
        records = iter(reader)
        came = [next(records) for _ in range(5)][:4]
        reader.acknowledge()
        ray.kill(plane._actor, no_restart=False)
        with pytest.raises(TransportError) as caught:
            list(records)
        assert ErrorKind.CONNECTION == caught.value.kind
        with open_stream(plane, consumer="c", cursor=reader.cursor) as again:
            came += again
    assert [] == raised
    assert facts(sent(10)) == facts(came)


def test_a_killed_plane_with_a_spool(tmp_path: Path) -> None:
    """Ray restarts it with what it held: producers were answered once it was on disk, and need not come back."""
    plane = RayPlane.create(PlaneOptions(spool=str(tmp_path / "spool")))
    produce = peer()
    ray.get(produce.produce.remote(plane, range(9), close=True))  # its close does not wait for any consumer
    ray.kill(produce)
    reader: Any = open_stream(plane, acknowledge="manual", consumer="c")
    records = iter(reader)
    came = [next(records) for _ in range(5)][:4]
    reader.acknowledge()
    ray.kill(plane._actor, no_restart=False)

    rest, report = read_rest(plane)
    plane.stop()
    assert facts(sent(9)) == facts(came + rest)
    assert report.complete


def test_a_checkpoint_has_the_routes(plane: RayPlane, tmp_path: Path) -> None:
    """What no group acknowledged goes on from a folder, under the same numbers, after the plane was ended for good."""
    with new_stream(plane, SPEC, producer="p", max_bytes=2 * sample(0).nbytes) as sink:
        for item in sent(7):
            sink.write(item)
    reader: Any = open_stream(plane, acknowledge="manual", consumer="c")
    records = iter(reader)
    came = [next(records) for _ in range(3)][:2]
    reader.acknowledge()
    reader.close()

    assert 3 == plane.checkpoint(tmp_path / "saved")
    plane.stop()
    again = RayPlane.create(PlaneOptions(spool=str(tmp_path / "saved")))
    with open_stream(again) as rest:
        came += rest
    again.stop()
    assert facts(sent(7)) == facts(came)
    assert rest.report().complete


def test_what_is_gone_is_said_to_be_gone(plane: RayPlane) -> None:
    """A key that the plane never had, or let go, is an error that names it, not nothing."""
    ray.get(peer().produce.remote(plane, range(2), close=True))
    assert 2 == len(plane.fetch([sample(0).key, sample(1).key]))

    with pytest.raises(DataError, match="sample-9/0/0") as caught:
        plane.fetch([RecordKey("sample-9", 0, 0)])
    assert ErrorKind.ROUTES_MISSING == caught.value.kind
