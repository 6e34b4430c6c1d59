"""Memory that messages are received into, and that is used again: new pages cost several times what copying does.

A buffer returns to the pool when the last view of it is gone. So a record is never overwritten, and a reader that drops
its records is served from the same pages.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import numpy as np
import pyarrow as pa

__all__ = ["BufferPool", "Loan", "lend"]

# Arrow asks for buffers at multiples of 64 bytes.
_ALIGN = 64
# A buffer may be larger than what is asked for by this factor, so that ragged messages share buffers.
_SLACK = 4


class Loan:
    """Holds memory while any view of it lives; a finalizer returns it."""

    __slots__ = ("__weakref__", "owner")

    def __init__(self, owner: Any) -> None:
        self.owner = owner


def lend(memory: Any, loan: Loan) -> pa.Buffer:
    """A read-only Arrow buffer over a numpy byte array; every view of it, through Arrow and numpy, holds the loan."""
    return pa.foreign_buffer(memory.ctypes.data, memory.nbytes, base=loan)


class BufferPool:
    """Byte arrays that are lent and come back. Safe for several threads: a finalizer may run in any.

    ``max_idle_bytes``: what is kept for later; more goes back to the operating system.
    """

    def __init__(self, *, max_idle_bytes: int = 256 * 2**20) -> None:
        self._max_idle = max_idle_bytes
        self._lock = threading.RLock()  # a finalizer may run inside of a locked part of the same thread
        self._idle: list[Any] = []

    def take(self, nbytes: int) -> tuple[memoryview, pa.Buffer]:
        """Memory to write to, and the read-only buffer over it that decides how long it is lent."""
        whole = self._pick(nbytes)
        loan = Loan(whole)
        weakref.finalize(loan, self._give_back, whole).atexit = False
        memory = whole[:nbytes]
        return memoryview(memory), lend(memory, loan)

    @property
    def idle_bytes(self) -> int:
        """What lies ready."""
        with self._lock:
            return sum(each.nbytes for each in self._idle)

    def _pick(self, nbytes: int) -> Any:
        with self._lock:
            fitting = [at for at, each in enumerate(self._idle) if nbytes <= each.nbytes <= _SLACK * nbytes]
            if fitting:
                return self._idle.pop(min(fitting, key=lambda at: self._idle[at].nbytes))
        raw = np.empty(nbytes + _ALIGN, dtype=np.uint8)
        start = -raw.ctypes.data % _ALIGN
        return raw[start : start + max(nbytes, 1)]

    def _give_back(self, whole: Any) -> None:
        with self._lock:
            if self.idle_bytes + whole.nbytes <= self._max_idle:
                self._idle.append(whole)
