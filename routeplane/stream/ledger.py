"""Who has sent what, who was given what, and what may be forgotten: the state behind every brokered transport.

Pure: no threads, no IO, a clock that is given. ``broker`` adds locks, waiting and the spool. Promises, for blocks that
were accepted: each consumer group is given each of them in the order of its producer, again only where it was not
acknowledged; a block leaves only after every group acknowledged it, or by ``abort`` or ``retire``, which are somebody's
decision and counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from routeplane.errors import ErrorKind, FormatError, UsageError, refused
from routeplane.stream.delivery import (
    DEFAULT_GROUP,
    Block,
    DeliveryReport,
    Durability,
    Membership,
    Progress,
    PutOutcome,
    Session,
    Totals,
)
from routeplane.stream.groups import Group, Member
from routeplane.stream.roster import LedgerState, Producer, ProducerState, Roster
from routeplane.stream.shelf import Shelf

if TYPE_CHECKING:
    from routeplane.record.record import RecordKey

__all__ = ["Ledger"]


class Ledger:
    """One stream with any number of producers and consumer groups. Not safe for several threads.

    ``max_bytes`` bounds what is held (one block alone may pass it). ``groups`` exist from the start, so that nothing
    leaves before they came; another one may join later, and begins with what is not acknowledged then. ``producers``:
    how many must end for the stream to end; None: ``seal`` ends it. ``lease_s``: after so long without a sign of life a
    producer is lost, and a consumer's blocks go to the next one of its group, where there is one. ``keep``:
    acknowledged blocks stay, for ``find``, until room is needed. ``durability="spool"``: whoever owns the ledger keeps
    blocks on disk before they are put, and producers may forget them then. ``first_epoch``: another for each ledger of
    a stream, so that sessions of an earlier one are known as such.
    """

    def __init__(
        self,
        *,
        max_bytes: int,
        groups: Sequence[str] = (DEFAULT_GROUP,),
        producers: int | None = 1,
        lease_s: float = 60.0,
        keep: bool = False,
        durability: Durability = "memory",
        first_epoch: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if max_bytes < 1 or not groups or lease_s <= 0 or (producers is not None and producers < 1):
            raise refused(
                "max_bytes, lease_s and producers above 0, and at least one group",
                f"{max_bytes}, {lease_s}, {producers} and {tuple(groups)}",
            )
        self._expected, self._lease_s, self._durable = producers, lease_s, durability == "spool"
        self._clock, self._time = clock, clock()
        self._shelf = Shelf(max_bytes=max_bytes, keep=keep)
        self._roster, self._first_epoch = Roster(first_epoch=first_epoch), first_epoch
        self._groups: dict[str, Group] = {name: Group() for name in groups}
        self._sealed, self._memberships, self._report = False, 0, DeliveryReport()
        # Before this no lease runs out: signs of life only become younger, and those of whoever comes are.
        self._due = self._time + lease_s

    def _count(self, **more: int) -> None:
        self._report = replace(
            self._report, **{name: getattr(self._report, name) + number for name, number in more.items()}
        )

    # -- time --------------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Let leases run out. Every call does so first; a waiting owner calls it when ``until_deadline`` has passed."""
        if self._now() < self._due:
            return
        if lost := self._roster.expire(self._time - self._lease_s):
            self._count(lost_producers=lost)
        for group in self._groups.values():
            group.expire(self._time - self._lease_s)
        self._due = min(self._signs_of_life(), default=self._time) + self._lease_s

    def _now(self) -> float:
        # A clock that goes back stands still here; one that leaps ahead ends leases, which loses no block: whoever was
        # taken for lost goes on, unless it was replaced.
        self._time = max(self._time, self._clock())
        return self._time

    def until_deadline(self) -> float | None:
        """Seconds until the next lease runs out, by the ledger's clock; None where none does."""
        # one that has run out, of a consumer that nobody stands in for, is nothing to wake up for
        ends = [end for seen in self._signs_of_life() if (end := seen + self._lease_s) > self._time]
        return max(0.001, min(ends) - self._time) if ends else None

    def _signs_of_life(self) -> list[float]:
        return sum((group.signs_of_life() for group in self._groups.values()), self._roster.signs_of_life())

    # -- producers ---------------------------------------------------------------------------------------------------

    def attach(self, producer: str, *, first: int = 0, before: Totals | None = None, again: bool = False) -> Session:
        """Begin, or go on, as a producer; ``first``: the oldest block that it still holds, ``before``: what all those
        below it held; ``again``: see ``Roster.attach``.

        A ledger that does not know the producer (it was made anew, without a spool) begins at ``first``. Raises
        UsageError where one of that name is alive, has ended, or holds only blocks behind a gap.
        """
        self.tick()
        if producer not in self._roster:
            if self._sealed:
                raise UsageError("expected an open stream, got one that was sealed", kind=ErrorKind.CLOSED)
            self._shelf.enter(producer, first)
            for group in self._groups.values():
                group.enter(producer, first)
        elif first > self._shelf.sent(producer):
            raise UsageError(
                f"expected producer {producer!r} to go on at block {self._shelf.sent(producer)}, got one that holds "
                f"blocks from {first} on",
                kind=ErrorKind.SEQUENCE,
            )
        epoch = self._roster.attach(producer, self._time, before=before or Totals(), again=again)
        return self._session(producer, epoch)

    def _session(self, producer: str, epoch: int) -> Session:
        return Session(
            producer=producer,
            epoch=epoch,
            next_sequence=self._shelf.sent(producer),
            acknowledged=self._shelf.sent(producer) if self._durable else self._shelf.settled(producer),
            totals=self._roster.totals(producer),
        )

    def _alive(self, session: Session) -> Producer:
        self.tick()
        return self._roster.alive(session, self._time)

    def heartbeat(self, session: Session) -> Session:
        """A sign of life; the session as it stands. Raises UsageError for one that was replaced."""
        self._alive(session)
        return self._session(session.producer, session.epoch)

    def disconnect(self, session: Session) -> None:
        """The way to a producer is gone: its name is free at once, and it is lost when its lease runs out."""
        self._roster.disconnect(session)

    def put(self, session: Session, block: Block) -> PutOutcome:
        """Take a block, whole or not at all. Raises UsageError or DataError, and then nothing of it was taken.

        A block that is there already is known by its number and digest: ``repeated``.
        """
        known = self._alive(session)
        if known.end != "open":
            raise UsageError(f"expected an open producer, got one that {known.end}", kind=ErrorKind.CLOSED)
        sent = self._shelf.sent(session.producer)
        if block.producer != session.producer or block.sequence > sent:
            raise UsageError(
                f"expected block {sent} of {session.producer!r}, got {block.sequence} of {block.producer!r}",
                kind=ErrorKind.SEQUENCE,
            )
        if block.sequence < sent:
            return self._repeated(block)
        self._shelf.check_new(block)
        if not self._shelf.has_room(block.nbytes):
            return "full"
        self._insert(block)
        known.totals = known.totals.plus(block)
        self._count(blocks=1, records=len(block.keys), tokens=block.tokens)
        return "accepted"

    def would_take(self, session: Session, block: Block) -> bool:
        """Whether ``put`` of this block would be ``accepted`` now; raises as it would. Changes no block's place."""
        known = self._alive(session)
        new = known.end == "open" and block.sequence == self._shelf.sent(session.producer)
        if new:
            self._shelf.check_new(block)
        return new and self._shelf.has_room(block.nbytes)

    def _repeated(self, block: Block) -> PutOutcome:
        if not self._shelf.is_same(block):
            raise UsageError(
                f"expected block {block.sequence} of {block.producer!r} as it was sent before, got other records",
                kind=ErrorKind.SEQUENCE,
            )
        self._count(repeated=1)
        return "repeated"

    def _insert(self, block: Block) -> None:
        self._shelf.insert(block.producer, block)
        for group in self._groups.values():
            group.arrived(block.producer, self._shelf.sent(block.producer))
        self._settle(block.producer)

    def close(self, session: Session, totals: Totals) -> None:
        """End a producer as whole; again is no error. Raises FormatError unless what ``totals`` counts was taken."""
        known = self._alive(session)
        if known.end == "aborted":
            raise UsageError("expected an open producer, got one that aborted", kind=ErrorKind.CLOSED)
        if totals != known.totals:
            raise FormatError(
                f"expected what the producer counts, {totals}, got {known.totals}", kind=ErrorKind.TRAILER
            )
        self._roster.end(session.producer, "closed")

    def abort(self, session: Session) -> None:
        """End a producer as not whole, and withdraw what no consumer was given yet; after an end it does nothing."""
        known = self._alive(session)
        if known.end != "open":
            return
        self._roster.end(session.producer, "aborted")
        given = max(group.cursors[session.producer].furthest for group in self._groups.values())
        self._count(aborted_producers=1, withdrawn=self._shelf.withdraw(session.producer, first=given))
        for group in self._groups.values():
            group.withdraw(session.producer, sent=given)

    def seal(self) -> None:
        """No further producer will come."""
        self._sealed = True

    # -- consumers ---------------------------------------------------------------------------------------------------

    def join(self, group: str, consumer: str, *, cursor: Mapping[str, int] | None = None) -> Membership:
        """Begin, or begin again, as a consumer of a group; what an earlier one of that name did not acknowledge is
        given out again.

        ``cursor``: producer -> the number below which the consumer has everything, for a ledger that was made anew.
        """
        self.tick()
        missed, is_new = 0, group not in self._groups
        found = self._groups.setdefault(group, Group())
        for name in self._roster if is_new else ():
            found.enter(name, self._shelf.settled(name))
            found.arrived(name, self._shelf.sent(name))
            missed += self._shelf.settled(name)
        found.leave(consumer)
        self._memberships += 1  # each its own number: nobody that left need be remembered
        epoch = self._first_epoch + self._memberships
        found.members[consumer] = Member(epoch=epoch, seen=self._time)
        for name, through in (cursor or {}).items():
            found.has(name, through)
            if name in self._roster:
                self._settle(name)
        return Membership(group=group, consumer=consumer, epoch=epoch, missed=missed)

    def done(self, group: str) -> dict[str, int]:
        """Producer -> below this a group needs nothing any more, or came too late."""
        return self._groups[group].done()

    def _present(self, member: Membership) -> Group:
        group = self._groups.get(member.group)
        found = None if group is None else group.members.get(member.consumer)
        if group is None or found is None or found.epoch != member.epoch:
            raise UsageError(
                f"expected a consumer of group {member.group!r}, got {member.consumer!r} that left, or was taken for "
                "lost: open the stream again",
                kind=ErrorKind.FENCED,
            )
        found.seen = self._now()  # before leases run out: who asks is alive
        self.tick()
        return group

    def take(self, member: Membership, *, max_blocks: int = 1) -> list[Block]:
        """The next blocks for a consumer, in order per producer; its own until acknowledged. Does not wait."""
        group = self._present(member)
        taken: list[Block] = []
        while len(taken) < max_blocks and (found := group.next_for(member.consumer)) is not None:
            block = self._shelf.at(found.producer, found.sequence)
            if block is None:  # retired meanwhile
                self._pass(group, found.producer)
                continue
            if found.again:
                self._count(redelivered=1)
            taken.append(block)
        return taken

    def acknowledge(self, member: Membership, *, producer: str, through: int) -> None:
        """A consumer is done with a producer's blocks below ``through``. Again is no error.

        Raises UsageError where they are not its own, for instance after its lease ran out.
        """
        group = self._present(member)
        if group.acknowledge(member.consumer, producer, through=through):
            self._pass(group, producer)

    def leave(self, member: Membership) -> None:
        """A consumer goes; what it did not acknowledge is given to the next. No error where it is gone already."""
        group = self._groups.get(member.group)
        found = group.members.get(member.consumer) if group is not None else None
        if group is not None and found is not None and found.epoch == member.epoch:
            group.leave(member.consumer)

    def progress(self, member: Membership) -> Progress:
        """Whether anything can still come for a consumer, and which producers did not end well."""
        group = self._present(member)
        all_here = self._sealed or (self._expected is not None and len(self._roster) >= self._expected)
        return Progress(
            # asked in this order, cursors are looked at only once all producers ended
            ended=all_here and self._roster.all_ended() and not group.has_rest(member.consumer),
            lost=self._roster.lost(),
            aborted=self._roster.aborted(),
        )

    # -- holding and letting go --------------------------------------------------------------------------------------

    def find(self, key: RecordKey) -> Block | None:
        """The block that holds a record, where it is held."""
        return self._shelf.find(key)

    def retire(self, *, below: int) -> int:
        """Let go of every block whose newest weights are below a version, acknowledged or not; how many.

        Later blocks of such weights are refused. Keys of retired records are forgotten, so that memory stays bounded.
        """
        self.tick()
        old = self._shelf.retire(below)
        for producer in {block.producer for block in old}:
            for group in self._groups.values():
                self._pass(group, producer)
        self._count(retired=len(old))
        return len(old)

    def released(self) -> list[Block]:
        """The blocks that left since the last call; their payloads are the owner's to free."""
        return self._shelf.released()

    def _pass(self, group: Group, producer: str) -> None:
        """Go on over blocks that left before this group came to them; then let go of what all groups are done with."""
        cursor = group.cursors[producer]
        through = cursor.acknowledged
        while through < cursor.sent and self._shelf.at(producer, through) is None:
            through += 1
        group.skip(producer, through=through)
        self._settle(producer)

    def _settle(self, producer: str) -> None:
        self._shelf.settle(producer, min(group.cursors[producer].acknowledged for group in self._groups.values()))

    def report(self) -> DeliveryReport:
        """Counts and gauges."""
        waiting = sum(self._shelf.sent(name) - self._shelf.settled(name) for name in self._roster)
        return replace(
            self._report,
            held_blocks=self._shelf.count,
            held_bytes=self._shelf.nbytes,
            unacknowledged_blocks=waiting,
            peak_bytes=self._shelf.peak_bytes,
        )

    # -- outliving ---------------------------------------------------------------------------------------------------

    def snapshot(self) -> LedgerState:
        """What must outlive this ledger, besides the blocks themselves."""
        return LedgerState(
            producers={
                name: ProducerState(
                    sent=self._shelf.sent(name),
                    settled=self._shelf.settled(name),
                    totals=known.totals,
                    end=known.end,
                )
                for name, known in self._roster.items()
            },
            groups={name: group.done() for name, group in self._groups.items()},
            places=self._shelf.places(),
            floor=self._shelf.floor,
            sealed=self._sealed,
        )

    def restore(self, state: LedgerState, blocks: Iterable[Block]) -> None:
        """Go on where another ledger stood; for a new one. ``blocks``: what was held from ``settled`` on, any order.

        Producers attach again, consumers join again; what was not acknowledged is given out again. A block that is not
        among ``blocks`` counts as retired.
        """
        held = {(block.producer, block.sequence): block for block in blocks}
        self._sealed = state.sealed
        for name, at in state.groups.items():
            group = self._groups.setdefault(name, Group())
            for producer, through in at.items():
                group.has(producer, through)
        for name, known in state.producers.items():
            self._roster.restore(name, totals=known.totals, end=known.end, seen=self._time)
            self._shelf.enter(name, known.settled)
            for sequence in range(known.settled, known.sent):
                self._shelf.insert(name, held.get((name, sequence)))
            for group in self._groups.values():
                group.enter(name, known.settled)
                group.arrived(name, known.sent)
        self._shelf.remember(state.places, floor=state.floor)
        for name in state.producers:
            for group in self._groups.values():
                self._pass(group, name)
