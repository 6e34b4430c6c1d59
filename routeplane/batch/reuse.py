"""Memory that batches take turns in: a collated batch writes into blocks that an earlier, released batch wrote into.

Owns who holds which block. Fresh pages cost more than filling them: a batch that is written into touched memory is laid
out several times faster. Knows numpy arrays and plans, and of a batch only that it has tensors; nothing is ever taken
back from a batch that was not released.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np

from routeplane.batch.batch import pinned_bytes
from routeplane.errors import ErrorKind, UsageError

if TYPE_CHECKING:
    import torch
    from numpy.typing import DTypeLike, NDArray

    from routeplane.batch.batch import RouteBatch
    from routeplane.batch.plan import TokenPlan
    from routeplane.record.spec import RouteSpec

__all__ = ["BatchBuffers", "Lease"]


class BatchBuffers:
    """A pool for ``collate(buffers=)`` and ``microbatches(buffers=)``. Safe for several threads; of one process.

    What the records' own arrays are laid out into is pooled: ``routes``, ``token_ids``, ``generation_mask``,
    ``logprobs``, ``columns`` and ``column_parts``. The rest (positions, pad mask, offsets: some hundredth of the
    routes) is fresh.

    A batch made with a pool is valid until ``release(batch)``, and no other live batch shares its memory. Releasing
    empties every tensor of the batch: a late use, a backward pass included, is an error of torch, and never another
    batch's data. Views made before (``layer(id)``) cannot be emptied; they must not outlive the batch. Nor must copies
    under way: wait for a ``to(device, non_blocking=True)`` before releasing what it reads. A batch that is dropped
    instead takes its memory along.

    The pool holds as much as was live at once, and grows to the largest batch.

    ``pin``: the pooled tensors are in page-locked memory, which ``to(device, non_blocking=True)`` copies from while the
    step runs; the fresh ones are not. Raises UsageError (ARGUMENT) where torch sees no accelerator.

    >>> from routeplane.batch import BatchOptions, collate
    >>> from routeplane.testing.builders import watermarked_record, watermarked_spec
    >>> spec = watermarked_spec()
    >>> record = watermarked_record(0, num_tokens=3, spec=spec)
    >>> buffers = BatchBuffers()
    >>> batch = collate([record], spec, options=BatchOptions(buffers=buffers))
    >>> buffers.nbytes > 0
    True
    >>> buffers.release(batch)
    """

    def __init__(self, *, pin: bool = False) -> None:
        if pin:
            pinned_bytes(1)  # refused now, not at the first batch
        self._allocate = pinned_bytes if pin else _plain_bytes
        self._lock = threading.Lock()
        self._free: list[Lease] = []
        # weak: a batch that is never released must not live for ever
        self._lent: WeakKeyDictionary[RouteBatch, Lease] = WeakKeyDictionary()

    @property
    def nbytes(self) -> int:
        """Bytes that the pool and its unreleased batches hold."""
        with self._lock:
            return sum(lease.nbytes for lease in (*self._free, *self._lent.values()))

    def lease(self) -> Lease:
        """Blocks for one batch alone: those of the batch released last, else an empty lease."""
        with self._lock:
            return self._free.pop() if self._free else Lease(self._allocate)

    def lend(self, lease: Lease, batch: RouteBatch) -> RouteBatch:
        """The batch, from here on the holder of what it was written into."""
        with self._lock:
            self._lent[batch] = lease
        return batch

    def release(self, batch: RouteBatch) -> None:
        """Empty the batch's tensors and take back its memory.

        Raises UsageError (CLOSED) for a batch that holds none of this pool: released already, or another one (what
        ``to`` and ``pin_memory`` return are batches of their own).
        """
        with self._lock:
            lease = self._lent.pop(batch, None)
        if lease is None:
            raise UsageError("expected a batch that holds memory of this pool, got another", kind=ErrorKind.CLOSED)
        for tensor in batch.tensors():
            _empty(tensor)
        lease.rewind()
        with self._lock:
            self._free.append(lease)

    def releasing(self, batches: Iterable[RouteBatch]) -> Generator[RouteBatch]:
        """The same batches, each released when the next one is asked for, and the last one at the end or on ``break``.

        For a loop that keeps no batch, prefetched or not.
        """
        for batch in batches:
            try:
                yield batch
            finally:
                self.release(batch)


class Lease:
    """The blocks of one batch, handed out in the order of asking; made by ``allocate``, which is given a size."""

    def __init__(self, allocate: Callable[[int], NDArray[np.uint8]]) -> None:
        self._allocate = allocate
        self._blocks: list[NDArray[np.uint8]] = []
        self._used = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return sum(block.nbytes for block in self._blocks)

    def rewind(self) -> None:
        """Begin again with the first block."""
        self._used = 0

    def gather(
        self,
        plan: TokenPlan,
        columns: Sequence[NDArray[Any]],
        *,
        fill: bool | int | float,
        dtype: DTypeLike | None = None,
        slots: Sequence[int] | None = None,
    ) -> NDArray[Any]:
        """``plan.gather`` into the next block: C-contiguous, every row written. Raises as it does."""
        first = columns[0]
        target = np.dtype(first.dtype if dtype is None else dtype).newbyteorder("=")
        trailing = first.shape[1:] if slots is None else (len(slots), *first.shape[2:])
        out = self.array((*plan.shape, *trailing), target)
        return plan.gather(columns, fill=fill, dtype=dtype, slots=slots, out=out)

    def gather_routes(
        self, plan: TokenPlan, columns: Sequence[NDArray[Any]], *, spec: RouteSpec, slots: Sequence[int] | None
    ) -> NDArray[np.int16]:
        """``plan.gather_routes`` into the next block. Raises as it does."""
        layers = spec.num_layers if slots is None else len(slots)
        out = self.array((*plan.shape, layers, spec.top_k), np.dtype(np.int16))
        return plan.gather_routes(columns, spec=spec, slots=slots, out=out)

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """An array over the next block, not yet written."""
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if self._used == len(self._blocks):
            self._blocks.append(self._allocate(size))
        elif self._blocks[self._used].nbytes < size:
            self._blocks[self._used] = self._allocate(size)
        block = self._blocks[self._used]
        self._used += 1
        return block[:size].view(dtype).reshape(shape)


def _plain_bytes(size: int) -> NDArray[np.uint8]:
    return np.empty(size, dtype=np.uint8)


def _empty(tensor: torch.Tensor) -> None:
    """Free a tensor's memory; every remaining reference to the tensor sees it empty."""
    if tensor.is_inference():
        tensor.data = tensor.new_empty(0)  # set_ is refused outside of inference mode; no backward can follow
    else:
        tensor.set_()  # type: ignore[call-overload]  # counts as a write, so that autograd refuses what it saved
