"""A ledger for several threads: locks, waiting with a bound, and durability. What every brokered transport runs.

Decides nothing: ``ledger`` does. A transport's service calls these methods from its handlers; ``ProducerPort`` and
``ConsumerPort`` are what ``brokered`` calls from the other side, and a Broker is both.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

from routeplane.errors import ErrorKind, TransportError, UsageError
from routeplane.stream.delivery import Block, DeliveryReport, Membership, Session, Taken, Totals

if TYPE_CHECKING:
    from routeplane.record.record import RecordKey
    from routeplane.stream.ledger import Ledger

__all__ = ["Broker", "ConsumerPort", "ProducerPort", "Store"]

Result = TypeVar("Result")


class ProducerPort(Protocol):
    """A producer's way to a ledger. Raises as ``Ledger``; TransportError where the way itself fails."""

    def attach(self, producer: str, *, first: int = 0, before: Totals | None = None) -> Session:
        """A session; see ``Ledger.attach``."""

    def put(self, session: Session, block: Block, *, timeout_s: float | None = None) -> Session:
        """Hand over a block, waiting for room; the session then."""

    def heartbeat(self, session: Session) -> Session:
        """A sign of life; the session as it stands."""

    def wait_acknowledged(self, session: Session, *, through: int, timeout_s: float | None = None) -> Session:
        """The session when every block below ``through`` may be forgotten."""

    def close(self, session: Session, *, totals: Totals) -> None:
        """End as whole."""

    def abort(self, session: Session) -> None:
        """End as not whole."""

    def disconnect(self, session: Session) -> None:
        """Go without an end; the name is free again."""


class ConsumerPort(Protocol):
    """A consumer's way to a ledger. Raises as ``Ledger``; TransportError where the way itself fails."""

    def join(self, group: str, consumer: str, *, cursor: Mapping[str, int] | None = None) -> Membership:
        """Begin in a group; see ``Ledger.join``."""

    def take(self, member: Membership, *, max_blocks: int = 1, timeout_s: float | None = None) -> Taken:
        """The next blocks, waiting for them or the end."""

    def acknowledge(self, member: Membership, *, producer: str, through: int) -> None:
        """Done with a producer's blocks below ``through``."""

    def leave(self, member: Membership) -> None:
        """Give back what was not acknowledged, and go."""


class Store(Protocol):
    """Where a ledger outlives its process. What a method was called with is on disk when it returns.

    Raises TransportError (NO_ROOM) where the disk is full, and then kept nothing of the call.
    """

    def keep(self, block: Block) -> Block:
        """Keep a block that is about to be accepted; the block as the ledger shall hold it."""

    def joined(self, group: str) -> None:
        """A group has come."""

    def attached(self, producer: str, *, first: int, before: Totals, owner: str | None) -> None:
        """A producer has come that begins at block ``first``; ``owner``: the name that its writer made up, if any."""

    def acknowledged(self, group: str, *, producer: str, through: int) -> None:
        """A group is done with a producer's blocks below ``through``."""

    def ended(self, producer: str, *, end: str, withdrawn: Sequence[Block]) -> None:
        """A producer closed or aborted; ``withdrawn`` never came."""

    def sealed(self) -> None:
        """No further producer will come."""

    def retired(self, below: int) -> None:
        """Weights below a version are no longer wanted."""

    def left(self, blocks: Sequence[Block]) -> None:
        """The ledger let go of blocks; called after the reason for it was kept."""


class Broker:
    """A ledger behind a lock. With a ``store``, a block is on disk before it is accepted (durability ``spool``)."""

    def __init__(self, ledger: Ledger, *, store: Store | None = None) -> None:
        self._ledger, self._store = ledger, store
        self._changed = threading.Condition()
        self._shut: str | None = None
        self._for_good = True

    # -- producers ---------------------------------------------------------------------------------------------------

    def attach(
        self,
        producer: str,
        *,
        first: int = 0,
        before: Totals | None = None,
        again: bool = False,
        owner: str | None = None,
    ) -> Session:
        """See ``Ledger.attach``; ``owner``: see ``Store.attached``."""
        with self._changed:
            session = self._ledger.attach(producer, first=first, before=before, again=again)
            try:
                if self._store is not None:
                    self._store.attached(producer, first=first, before=before or Totals(), owner=owner)
            except TransportError:
                self._ledger.disconnect(session)  # which nobody was told of: the name is free
                raise
            self._changed.notify_all()
            return session

    def put(self, session: Session, block: Block, *, timeout_s: float | None = None) -> Session:
        """Take a block, waiting for room; the session as it stands then.

        Raises as ``Ledger.put``; TransportError (TIMED_OUT, NO_ROOM), UsageError (CLOSED) where nobody will read. In
        each case nothing of the block was taken.
        """
        with self._changed:
            if not self._wait(lambda: self._offer(session, block), timeout_s):
                raise TransportError(
                    f"expected room for {block.nbytes} bytes within {timeout_s} s, got none: consumers are slower than "
                    "producers, or gone; send the block again, or raise max_bytes",
                    kind=ErrorKind.TIMED_OUT,
                )
            self._changed.notify_all()
            return self._ledger.heartbeat(session)

    def _offer(self, session: Session, block: Block) -> bool:
        self._check_open()
        if self._store is not None and self._ledger.would_take(session, block):
            block = self._store.keep(block)
        taken = self._ledger.put(session, block) != "full"
        self._let_go()
        return taken

    def heartbeat(self, session: Session) -> Session:
        """See ``Ledger.heartbeat``."""
        return self._change(lambda: self._ledger.heartbeat(session))

    def wait_acknowledged(self, session: Session, *, through: int, timeout_s: float | None = None) -> Session:
        """The session when every block below ``through`` may be forgotten. Raises TransportError (TIMED_OUT)."""
        with self._changed:
            done = self._wait(lambda: self._ledger.heartbeat(session).acknowledged >= through, timeout_s)
            if not done:
                raise TransportError(
                    f"expected consumers to acknowledge {through} blocks within {timeout_s} s, got "
                    f"{self._ledger.heartbeat(session).acknowledged}",
                    kind=ErrorKind.TIMED_OUT,
                )
            return self._ledger.heartbeat(session)

    def close(self, session: Session, *, totals: Totals) -> None:
        """See ``Ledger.close``."""
        self._end(session, "closed", lambda: self._ledger.close(session, totals))

    def abort(self, session: Session) -> None:
        """See ``Ledger.abort``."""
        self._end(session, "aborted", lambda: self._ledger.abort(session))

    def _end(self, session: Session, end: str, work: Callable[[], None]) -> None:
        with self._changed:
            self._let_go()
            work()
            withdrawn = self._ledger.released()
            if self._store is not None:
                self._store.ended(session.producer, end=end, withdrawn=withdrawn)
            self._changed.notify_all()

    def disconnect(self, session: Session) -> None:
        """See ``Ledger.disconnect``."""
        self._change(lambda: self._ledger.disconnect(session))

    def seal(self) -> None:
        """See ``Ledger.seal``."""
        with self._changed:
            self._ledger.seal()
            if self._store is not None:
                self._store.sealed()
            self._changed.notify_all()

    # -- consumers ---------------------------------------------------------------------------------------------------

    def join(self, group: str, consumer: str, *, cursor: Mapping[str, int] | None = None) -> Membership:
        """See ``Ledger.join``."""
        with self._changed:
            member = self._ledger.join(group, consumer, cursor=cursor)
            if self._store is not None:
                self._store.joined(group)
                for producer, through in self._ledger.done(group).items():
                    self._store.acknowledged(group, producer=producer, through=through)
            self._let_go()
            self._changed.notify_all()
            return member

    def take(self, member: Membership, *, max_blocks: int = 1, timeout_s: float | None = None) -> Taken:
        """What is next for a consumer, waiting for it or for the end; after ``timeout_s`` no blocks."""
        found: list[Block] = []

        def ready() -> bool:
            self._check_open()
            found.extend(self._ledger.take(member, max_blocks=max_blocks))
            return bool(found) or self._ledger.progress(member).ended

        with self._changed:
            self._wait(ready, timeout_s)
            return Taken(blocks=tuple(found), progress=self._ledger.progress(member))

    def acknowledge(self, member: Membership, *, producer: str, through: int) -> None:
        """See ``Ledger.acknowledge``."""
        with self._changed:
            self._ledger.acknowledge(member, producer=producer, through=through)
            if self._store is not None:
                self._store.acknowledged(member.group, producer=producer, through=through)
            self._let_go()
            self._changed.notify_all()

    def leave(self, member: Membership) -> None:
        """See ``Ledger.leave``."""
        self._change(lambda: self._ledger.leave(member))

    # -- the owner ---------------------------------------------------------------------------------------------------

    def find(self, key: RecordKey) -> Block | None:
        """See ``Ledger.find``."""
        return self._change(lambda: self._ledger.find(key))

    def retire(self, *, below: int) -> int:
        """See ``Ledger.retire``."""
        with self._changed:
            count = self._ledger.retire(below=below)
            if self._store is not None:
                self._store.retired(below)
            self._let_go()
            self._changed.notify_all()
            return count

    def report(self) -> DeliveryReport:
        """See ``Ledger.report``."""
        return self._change(self._ledger.report)

    def released(self) -> list[Block]:
        """See ``Ledger.released``. What was not asked for is forgotten at the next change."""
        return self._change(self._ledger.released)

    def tick(self) -> None:
        """Look at the ledger's clock now, for owners of another clock than the machine's."""
        self._change(self._ledger.tick)

    def shut(self, why: str, *, for_good: bool = True) -> None:
        """Nobody will read, or write, any more: whoever waits, or comes, gets UsageError (CLOSED).

        Where another broker may go on, not ``for_good``, it is TransportError (CONNECTION), as where this one died.
        """
        with self._changed:
            if self._shut is None:
                self._shut, self._for_good = why, for_good
            self._changed.notify_all()

    def _check_open(self) -> None:
        if self._shut is not None and self._for_good:
            raise UsageError(f"expected an open stream, got one that was {self._shut}", kind=ErrorKind.CLOSED)
        if self._shut is not None:
            raise TransportError(
                f"expected a service, got one that was {self._shut}: start it again, and open the stream again under "
                "the same name; what was not acknowledged is sent again",
                kind=ErrorKind.CONNECTION,
            )

    def _let_go(self) -> None:
        # also where nobody is told: a list of what left would keep it all
        blocks = self._ledger.released()
        if self._store is not None and blocks:
            self._store.left(blocks)

    def _change(self, work: Callable[[], Result]) -> Result:
        with self._changed:
            result = work()
            self._changed.notify_all()
            return result

    def _wait(self, ready: Callable[[], bool], timeout_s: float | None) -> bool:
        """Wait until ``ready`` holds, with the lock held outside of the waiting; whether it came to hold in time."""
        end = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while not ready():
            left = end - time.monotonic()
            if left <= 0:
                return False
            lease = self._ledger.until_deadline()
            wait = min(left, math.inf if lease is None else lease)
            self._changed.wait(None if wait == math.inf else wait)
        return True
