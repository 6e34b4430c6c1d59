"""A broker whose producers ask for room before they send: what a service runs whose payloads come over a network.

Without asking first, every producer that waits would have its block in the service's memory already, beside the bound.
With a folder it is durable: what it accepted is on disk, and another one goes on where the folder stands.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from routeplane.errors import DataError, ErrorKind, UsageError, refused
from routeplane.stream.broker import Broker
from routeplane.stream.checkpoint import save_ledger
from routeplane.stream.delivery import DEFAULT_GROUP, Block, Session, Totals
from routeplane.stream.ledger import Ledger
from routeplane.stream.spool import Spool
from routeplane.stream.spooled import load_spec, save_spec, spooled_ledger

if TYPE_CHECKING:
    from routeplane.record.record import RecordKey
    from routeplane.record.schema import Encoding
    from routeplane.record.spec import RouteSpec

__all__ = ["Gate", "PlaneOptions"]

# A producer that asked and then sent nothing for so long is dead or stuck, and its room goes to others.
_PROMISE_S = 60.0


@dataclass(frozen=True, kw_only=True)
class PlaneOptions:
    """What a service holds, and for whom.

    ``max_bytes``: payload held before producers wait; ``max_message_bytes``: the largest block. ``groups``: consumer
    groups, each given every record; ``producers``: how many end the stream, None: ``seal`` does. ``lease_s``: after so
    long without a word a producer is lost. ``keep``: what was acknowledged stays, for readers by key, until room is
    needed. ``spool``: a folder in which everything accepted is kept until it was acknowledged (durability ``spool``);
    without one, producers hold it (durability ``memory``). Raises UsageError.
    """

    max_bytes: int = 2 * 2**30
    max_message_bytes: int = 256 * 2**20
    groups: tuple[str, ...] = (DEFAULT_GROUP,)
    producers: int | None = 1
    lease_s: float = 60.0
    keep: bool = False
    spool: str | None = None

    def __post_init__(self) -> None:
        if self.max_message_bytes < 1:
            raise refused("max_message_bytes of at least 1", str(self.max_message_bytes))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Promise:
    nbytes: int
    until: float


class Gate(Broker):
    """A Broker with ``reserve``. ``close_spool`` lets go of the folder, where there is one."""

    def __init__(
        self,
        options: PlaneOptions,
        *,
        to_bytes: Callable[[Any], Any],
        load: Callable[[Path], Any],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``to_bytes``, ``load``: between a payload and the whole Arrow stream that is its file in the folder."""
        self._options, self._to_bytes = options, to_bytes
        self._promises: dict[str, _Promise] = {}
        self._owners: dict[str, tuple[str, Session | None]] = {}
        common: dict[str, Any] = {
            "max_bytes": options.max_bytes,
            "groups": options.groups,
            "producers": options.producers,
            "lease_s": options.lease_s,
            "keep": options.keep,
            "clock": clock,
        }
        self._spool: Spool | None = None
        #: A payload that the folder brought back, or None.
        self.restored: Any = None

        def loaded(path: Path) -> Any:
            self.restored = load(path)
            return self.restored

        if options.spool is None:
            # sessions of a service that died are none of this one
            super().__init__(Ledger(**common, first_epoch=secrets.randbits(62)))
            return
        self._spool = Spool(options.spool, to_bytes=to_bytes, in_memory=True)
        try:
            super().__init__(spooled_ledger(self._spool, **common, load=loaded), store=self._spool)
            self._owners = {producer: (owner, None) for producer, owner in self._spool.owners.items()}
        except BaseException:
            self._spool.close()
            raise

    def known(self) -> tuple[RouteSpec, Encoding] | None:
        """What the folder says of its stream, if anything."""
        return None if self._options.spool is None else load_spec(Path(self._options.spool))

    def note(self, spec: RouteSpec, encoding: Encoding) -> None:
        """Note in the folder, where there is one, what the stream is of."""
        if self._options.spool is not None:
            save_spec(Path(self._options.spool), spec, encoding=encoding)

    def checkpoint(self, folder: Path, known: tuple[RouteSpec, Encoding] | None) -> int:
        """See ``save_ledger``. Everybody waits meanwhile."""
        with self._changed:
            return save_ledger(self._ledger, folder, to_bytes=self._to_bytes, known=known)

    def holding(self, keys: Iterable[RecordKey]) -> list[tuple[Block, list[RecordKey]]]:
        """The blocks that hold these records, each with the keys that it was asked for, in the order of asking.

        Raises DataError (ROUTES_MISSING) where one never came, or has left.
        """
        found: dict[tuple[str, int], tuple[Block, list[RecordKey]]] = {}
        for key in keys:
            block = self.find(key)
            if block is None:
                raise DataError(
                    f"expected a record that is held, got {key}, which never came, or left after it was acknowledged",
                    kind=ErrorKind.ROUTES_MISSING,
                )
            found.setdefault((block.producer, block.sequence), (block, []))[1].append(key)
        return list(found.values())

    def until_deadline(self) -> float | None:
        """Seconds until a lease runs out; None where none does."""
        with self._changed:
            return self._ledger.until_deadline()

    def close_spool(self) -> None:
        """Let go of the folder; what it holds stays."""
        if self._spool is not None:
            self._spool.close()

    def attach_as(self, owner: str, producer: str, *, first: int = 0, before: Totals | None = None) -> Session:
        """See ``Broker.attach``. ``owner``: a name that one writer makes up; its own session, whose answer was lost or
        whose way was cut, is no other producer. One whose end was taken, and not its answer, goes on to hear it, from
        another service over the same folder too."""
        last, session = self._owners.get(producer, (None, None))
        if last == owner and session is not None:
            self.disconnect(session)
        session = self.attach(producer, first=first, before=before, again=last == owner, owner=owner)
        self._owners[producer] = owner, session
        return session

    def reserve(self, session: Session, block: Block, *, timeout_s: float | None) -> bool:
        """Wait until there is room for a block, whose payload comes next; False where none was made in time.

        Raises as ``put`` would, before anything is sent; UsageError (TOO_LARGE) for a block above the limit.
        """
        if block.nbytes > self._options.max_message_bytes:
            raise UsageError(
                f"expected blocks of at most {self._options.max_message_bytes} bytes, got {block.nbytes}: write with a "
                "smaller max_bytes, or raise the limit of the service",
                kind=ErrorKind.TOO_LARGE,
            )
        with self._changed:
            return self._wait(lambda: self._promise(session, block), timeout_s)

    def _promise(self, session: Session, block: Block) -> bool:
        self._check_open()
        now = time.monotonic()
        self._promises = {name: each for name, each in self._promises.items() if each.until > now}
        others = sum(each.nbytes for name, each in self._promises.items() if name != session.producer)
        if block.sequence < self._ledger.heartbeat(session).next_sequence:
            return True  # it is there already: put says so
        # with nothing held the ledger takes any one block; what is promised is as good as held
        fits = not others or others + block.nbytes <= self._options.max_bytes
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
