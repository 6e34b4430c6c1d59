"""What a block is in Ray: one Arrow IPC stream with its trailer, as a uint8 array in the object store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import ray
from numpy.typing import NDArray

from routeplane.record.codec import write_batch
from routeplane.record.policy import ReadPolicy
from routeplane.record.record import RouteRecord
from routeplane.record.schema import Encoding
from routeplane.record.spec import RouteSpec
from routeplane.stream.frames import frames_of_buffer
from routeplane.stream.ipc import IpcReader, IpcWriter

__all__ = ["ObjectCodec", "opened", "stream_of"]

# Schema, trailer and the headers of their messages, for geometries of any size; a stream that needs more takes it.
_AROUND = 64 * 2**10


class ObjectCodec:
    """Payloads are references to arrays; those that are put are owned by the producer until the plane has its own."""

    def __init__(self, encoding: Encoding) -> None:
        self._encoding: Encoding = encoding
        self._scratch = np.empty(0, np.uint8)

    def encode(self, records: Sequence[RouteRecord]) -> tuple[Any, int]:
        """Copies the arrays into memory that the next block uses again, and from there into the object store: fresh
        memory would cost more than both."""
        needed = sum(record.nbytes for record in records) + _AROUND
        if self._scratch.nbytes < needed:
            self._scratch = np.empty(needed, np.uint8)
        array = stream_of(records, records[0].spec, encoding=self._encoding, into=self._scratch)
        return ray.put(array), array.nbytes

    def open(self, payload: Any, policy: ReadPolicy) -> IpcReader:
        """The records of a block; those of a plain one are views of the object store, which they keep alive."""
        array = payload if isinstance(payload, np.ndarray) else ray.get(payload)
        return opened(array, policy)


def stream_of(
    records: Sequence[RouteRecord], spec: RouteSpec, *, encoding: Encoding, into: NDArray[np.uint8] | None = None
) -> NDArray[np.uint8]:
    """Records as one Arrow IPC stream with its trailer: a view of ``into`` where that is large enough."""
    batch = write_batch(records, spec, encoding=encoding)
    size = pa.ipc.get_record_batch_size(batch) + _AROUND
    memory = into if into is not None and into.nbytes >= size else np.empty(size, np.uint8)
    target = _Memory(memory)
    with IpcWriter(target, spec, encoding=encoding, max_bytes=2**62) as writer:
        if records:
            writer.write_encoded(records, batch)
    return memory[: target.size]


def opened(array: NDArray[np.uint8], policy: ReadPolicy) -> IpcReader:
    """A reader of ``stream_of``, without copying."""
    return IpcReader(frames_of_buffer(pa.py_buffer(array)), policy, walkable=True)


class _Memory:
    """A target of fixed size that remembers how much was written."""

    def __init__(self, memory: NDArray[np.uint8]) -> None:
        self.file = pa.FixedSizeBufferWriter(pa.py_buffer(memory))
        self.size = 0

    def publish(self) -> None:
        """Nothing more will be written."""
        self.size = self.file.tell()

    def discard(self) -> None:
        """Nobody looks at it."""
