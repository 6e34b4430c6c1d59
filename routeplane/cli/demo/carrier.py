"""What carries the demo's stream where no file does: a Flight service, or a Ray cluster with a plane.

Run as ``python -m routeplane.cli.demo.carrier OPTIONS_JSON``; says its address as one line of JSON, serves until stdin
ends, and then says how many bytes it held.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence

from routeplane.cli.demo import DemoOptions

__all__ = ["main"]


@contextlib.contextmanager
def _flight() -> Iterator[tuple[str, Callable[[], int]]]:
    from routeplane.stream.flight_service import FlightService, ServiceOptions

    with FlightService(ServiceOptions()) as service:
        # the stages run one after the other, so the engine's writer must not wait for the trainer
        yield f"{service.location}?linger=false", lambda: service.report().peak_bytes


@contextlib.contextmanager
def _ray() -> Iterator[tuple[str, Callable[[], int]]]:
    from routeplane.stream.ray import PlaneOptions, RayPlane, connect

    cluster = connect("local", object_store_bytes=200 * 2**20)
    plane = RayPlane.create(PlaneOptions(max_bytes=100 * 2**20), name="demo", namespace="routeplane")
    plane.stats()  # it is there before anybody looks for it
    address = f"ray://demo?namespace=routeplane&address={cluster}&linger=false"
    yield address, lambda: plane.stats().peak_bytes
    plane.stop()


def main(arguments: Sequence[str]) -> None:
    """Run with the options given as JSON."""
    options = DemoOptions(**json.loads(arguments[0]))
    started = _ray if options.transport == "ray" else _flight
    with started() as (address, held_bytes):
        sys.stdout.write(json.dumps({"address": address}) + "\n")
        sys.stdout.flush()
        sys.stdin.read()
        sys.stdout.write(json.dumps({"stream_bytes": held_bytes()}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
