"""A plane whose disk is full, in a process of its own: ``python -m tests.stream.full_disk TRANSPORT FOLDER``.

``FOLDER``: on a disk with room for some records. Ends with 0 where writing stopped with an error that says so, what was
acknowledged was served, and the room that this made was used.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from routeplane.errors import ErrorKind, TransportError
from routeplane.record.record import RouteRecord
from routeplane.stream import new_stream, open_stream
from routeplane.testing.contracts.samples import SPEC, facts, sample

__all__ = ["OPENED", "main"]


@contextmanager
def _spooled(folder: Path) -> Iterator[Callable[[], AbstractContextManager[Any]]]:
    from routeplane.stream.spooled import SpoolStream

    yield lambda: SpoolStream(folder)


@contextmanager
def _flight(folder: Path) -> Iterator[Callable[[], AbstractContextManager[Any]]]:
    from routeplane.stream.flight import FlightPlane
    from routeplane.stream.flight_service import FlightService, ServiceOptions

    with FlightService(ServiceOptions(spool=str(folder), producers=1)) as service:
        yield lambda: _same(FlightPlane(service.location))


@contextmanager
def _ray(folder: Path) -> Iterator[Callable[[], AbstractContextManager[Any]]]:
    from routeplane.stream.ray import PlaneOptions, RayPlane
    from tests.ray_cluster import local_cluster

    with local_cluster():
        plane = RayPlane.create(PlaneOptions(spool=str(folder), producers=1))
        yield lambda: _same(plane)
        plane.stop()


@contextmanager
def _same(plane: Any) -> Iterator[Any]:
    yield plane


#: Transport -> what gives, for a folder, the way to open a plane; a spool is opened twice, a service goes on.
OPENED = {"spool": _spooled, "flight": _flight, "ray": _ray}


def _write_all(sink: Any, records: Sequence[RouteRecord], written: list[RouteRecord]) -> None:
    for record in records:
        sink.write(record)
        written.append(record)


def main(transport: str, folder: str) -> None:
    """See the module."""
    records = [sample(index, tokens=1_500) for index in range(100)]
    with OPENED[transport](Path(folder, "spool")) as opened:
        with opened() as plane:
            sink = new_stream(plane, SPEC, producer="p", max_bytes=1)
            written: list[RouteRecord] = []
            with pytest.raises(TransportError, match="make room") as full:
                _write_all(sink, records, written)
            assert full.value.kind is ErrorKind.NO_ROOM
            assert 2 < len(written) < len(records)
        with opened() as plane:
            reader = open_stream(plane)
            came = iter(reader)
            first = []
            for _ in range(3):
                first += facts([next(came)])  # two of them acknowledged, and no record kept: there is room again
            again: Any = new_stream(plane, SPEC, producer="p", max_bytes=1)
            taken = again.session.next_sequence
            assert len(written) - 1 <= taken <= len(written)  # the last one may have been under way
            again.write(records[taken])
            again.close()
            rest = facts(list(came))
            assert first + rest == facts(records[: taken + 1])
            assert reader.report().complete


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
    sys.stdout.write("served again\n")
