"""A broker whose producers ask for room before they send: what a service runs whose payloads come over a network.

Without asking first, every producer that waits would have its block in the service's memory already, beside the bound.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from routeplane.errors import ErrorKind, UsageError
from routeplane.stream.broker import Broker
from routeplane.stream.delivery import Block, Session, Totals

if TYPE_CHECKING:
    from routeplane.stream.broker import Store
    from routeplane.stream.ledger import Ledger

__all__ = ["Gate"]

# A producer that asked and then sent nothing for so long is dead or stuck, and its room goes to others.
_PROMISE_S = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class _Promise:
    nbytes: int
    until: float


class Gate(Broker):
    """A Broker with ``reserve``. ``max_bytes`` is the ledger's; a block above ``max_message_bytes`` is refused."""

    def __init__(
        self,
        ledger: Ledger,
        *,
        max_bytes: int,
        max_message_bytes: int,
        store: Store | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(ledger, store=store)
        self._max_bytes, self._max_message_bytes = max_bytes, max_message_bytes
        self._promises: dict[str, _Promise] = {}
        self._owners: dict[str, tuple[str, Session]] = {}
        self._now = clock

    def attach_as(self, owner: str, producer: str, *, first: int = 0, before: Totals | None = None) -> Session:
        """See ``Broker.attach``. ``owner``: a name that one writer makes up; its own session, whose answer was lost or
        whose way was cut, is no other producer."""
        known = self._owners.get(producer)
        if known is not None and known[0] == owner:
            self.disconnect(known[1])
        session = self.attach(producer, first=first, before=before)
        self._owners[producer] = owner, session
        return session

    def reserve(self, session: Session, block: Block, *, timeout_s: float | None) -> bool:
        """Wait until there is room for a block, whose payload comes next; False where none was made in time.

        Raises as ``put`` would, before anything is sent; UsageError (TOO_LARGE) for a block above the limit.
        """
        if block.nbytes > self._max_message_bytes:
            raise UsageError(
                f"expected blocks of at most {self._max_message_bytes} bytes, got {block.nbytes}: write with a smaller "
                "max_bytes, or raise the limit of the service",
                kind=ErrorKind.TOO_LARGE,
            )
        with self._changed:
            return self._wait(lambda: self._promise(session, block), timeout_s)

    def _promise(self, session: Session, block: Block) -> bool:
        self._check_open()
        now = self._now()
        self._promises = {name: each for name, each in self._promises.items() if each.until > now}
        others = sum(each.nbytes for name, each in self._promises.items() if name != session.producer)
        if block.sequence < self._ledger.heartbeat(session).next_sequence:
            return True  # it is there already: put says so
        # with nothing held the ledger takes any one block; what is promised is as good as held
        fits = not others or others + block.nbytes <= self._max_bytes
        if not fits or not self._ledger.would_take(session, replace(block, nbytes=block.nbytes + others)):
            return False
        self._promises[session.producer] = _Promise(nbytes=block.nbytes, until=now + _PROMISE_S)
        return True

    def put(self, session: Session, block: Block, *, timeout_s: float | None = None) -> Session:
        """See ``Broker.put``; what was reserved for the block is used up."""
        try:
            return super().put(session, block, timeout_s=timeout_s)
        finally:
            self._forget(session)

    def disconnect(self, session: Session) -> None:
        """See ``Broker.disconnect``."""
        super().disconnect(session)
        self._forget(session)

    def _forget(self, session: Session) -> None:
        with self._changed:
            self._promises.pop(session.producer, None)
            self._changed.notify_all()
