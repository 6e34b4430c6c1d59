"""Streams over Ray, on a real cluster: the contract, and what an object store adds.

Faults that kill the plane or its clients are in ``test_ray_faults``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import ray

from routeplane.record.spec import RouteSpec
from routeplane.stream import new_stream, open_stream
from routeplane.stream.ray import PlaneOptions, RayPlane
from routeplane.testing.contracts import DeliveryContract
from tests.ray_cluster import local_cluster

# one worker for all files that start a cluster: at most one at a time
pytestmark = pytest.mark.xdist_group("ray")


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """Ray, for all of this file."""
    with local_cluster():
        yield


@pytest.fixture(scope="module")
def plane(cluster: None) -> RayPlane:
    """One process for the planes of this file: to start one takes a second or two."""
    return RayPlane.create(PlaneOptions())


def begin_again(actor: Any, options: PlaneOptions) -> None:
    """A plane as it is when its process starts."""
    actor.__init__(options)


class TestRay(DeliveryContract):
    """The contract of brokered transports."""

    slack = 2**18

    @pytest.fixture(autouse=True)
    def _process(self, plane: RayPlane) -> None:
        self._plane = plane

    def place(self, tmp_path: Path, *, groups: Sequence[str] = ("default",), producers: int = 1) -> Any:
        """A plane, whose writers do not wait in ``close``: here one thread writes, closes, and then reads."""
        options = PlaneOptions(groups=tuple(groups), producers=producers, max_bytes=self.slack)
        ray.get(self._plane._actor.__ray_call__.remote(begin_again, options))
        return self._plane.lingering(False)

    def sink(self, place: Any, spec: RouteSpec, **options: Any) -> Any:
        """A producer."""
        return new_stream(place, spec, **options)

    def source(self, place: Any, **options: Any) -> Any:
        """A consumer."""
        return open_stream(place, **options)

    def lose(self, place: Any, sink: Any) -> None:
        """Nothing is heard of it, and half an hour passes at the plane."""
        sink._port.disconnect(sink.session)
        ray.get(place._actor.leap.remote(1_800.0))
