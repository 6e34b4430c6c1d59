"""Streams over Ray: an actor that owns the objects, so that they outlive whoever wrote them.

A block is one Arrow IPC stream with its trailer, as a uint8 array in the object store: put by its producer, and put
again by the plane, since Ray cannot recover an object whose owner died and has no way to hand ownership over. On the
plane's node reading copies nothing; elsewhere the plane cuts what was selected, and only that travels.

Ray reads its own environment; nothing here does.
"""

from __future__ import annotations

from routeplane.errors import ErrorKind, MissingExtraError

try:
    import ray as _ray  # noqa: F401  looked for here, so that its absence is told in one place
except ModuleNotFoundError as error:
    if error.name != "ray":
        raise
    raise MissingExtraError(
        "routeplane.stream.ray needs Ray: pip install 'routeplane[ray]'", kind=ErrorKind.MISSING_EXTRA
    ) from error

from routeplane.stream.gate import PlaneOptions
from routeplane.stream.ray.plane import RayPlane, RayReader, RayWriter, connect, transport

__all__ = ["PlaneOptions", "RayPlane", "RayReader", "RayWriter", "connect", "transport"]
