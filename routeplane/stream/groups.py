"""One consumer group: which block of which producer goes to whom next, and how far each producer is acknowledged.

Per producer a block is given out after the ones before it, and while a consumer holds unacknowledged blocks of a
producer no other consumer gets any of it: so order per producer holds across the whole group, also where a consumer
dies and another takes over. Pure; ``ledger`` owns the blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from routeplane.errors import ErrorKind, UsageError

__all__ = ["Cursor", "Given", "Group", "Member"]


class Given(NamedTuple):
    """A block that a consumer was just given. ``again``: it was out before, and came back unacknowledged."""

    producer: str
    sequence: int
    again: bool


@dataclass(kw_only=True, slots=True)
class Cursor:
    """Where a group stands with one producer: ``acknowledged <= following <= sent``.

    Blocks in ``[acknowledged, following)`` are out, all with ``holder``. ``furthest``: the highest ``following`` ever.
    """

    acknowledged: int
    following: int
    sent: int
    holder: str | None = None
    furthest: int = 0


@dataclass(kw_only=True, slots=True)
class Member:
    """A consumer of a group."""

    epoch: int
    seen: float
    held: set[str] = field(default_factory=set)  # producers of which it has blocks out
    ready: dict[str, None] = field(default_factory=dict)  # ... and of which there are more


class Group:
    """Cursors and members of one group. Producers with something to give stand in line, each for one block."""

    def __init__(self) -> None:
        self.cursors: dict[str, Cursor] = {}
        self.members: dict[str, Member] = {}
        self._ready: dict[str, None] = {}  # an ordered set: producers that nobody holds, with blocks to give
        self._known: dict[str, int] = {}  # producer -> below this the consumers say that they have everything

    def enter(self, producer: str, first: int) -> None:
        """Begin with a producer, at its block ``first``."""
        self.cursors[producer] = Cursor(acknowledged=first, following=first, sent=first, furthest=first)

    def arrived(self, producer: str, sent: int) -> None:
        """A producer's blocks below ``sent`` are there."""
        self.cursors[producer].sent = sent
        self.skip(producer, through=min(self._known.get(producer, 0), sent))
        self._line_up(producer)

    def has(self, producer: str, through: int) -> None:
        """A consumer has everything of a producer below ``through``, whether it is here, out with another one, or still
        comes again."""
        self._known[producer] = max(through, self._known.get(producer, 0))
        if producer in self.cursors:
            self.skip(producer, through=min(through, self.cursors[producer].sent))

    def done(self) -> dict[str, int]:
        """Producer -> below this the group needs nothing any more."""
        return self._known | {
            name: max(cursor.acknowledged, self._known.get(name, 0)) for name, cursor in self.cursors.items()
        }

    def _line_up(self, producer: str) -> None:
        cursor = self.cursors[producer]
        if cursor.following < cursor.sent:
            line = self._ready if cursor.holder is None else self.members[cursor.holder].ready
            line[producer] = None

    def next_for(self, consumer: str) -> Given | None:
        """The block that this consumer gets now, and that is out from here on. None: nothing yet."""
        member = self.members[consumer]
        for line in (member.ready, self._ready):
            if line:
                producer = next(iter(line))
                del line[producer]
                break
        else:
            return None
        cursor = self.cursors[producer]
        cursor.holder = consumer
        member.held.add(producer)
        given = Given(producer, cursor.following, cursor.following < cursor.furthest)
        cursor.following += 1
        cursor.furthest = max(cursor.furthest, cursor.following)
        self._line_up(producer)
        return given

    def acknowledge(self, consumer: str, producer: str, *, through: int) -> bool:
        """A consumer is done with a producer's blocks below ``through``; whether that is news.

        Raises UsageError for blocks that were not given to it.
        """
        cursor = self.cursors.get(producer)
        if cursor is not None and through <= cursor.acknowledged:
            return False
        if cursor is None or cursor.holder != consumer or through > cursor.following:
            raise UsageError(
                f"expected an acknowledgement of blocks that are out with {consumer!r}, got one of {producer!r} "
                f"below {through}",
                kind=ErrorKind.SEQUENCE,
            )
        cursor.acknowledged = through
        if cursor.acknowledged == cursor.following:
            self._let_go(producer, consumer)
        return True

    def skip(self, producer: str, *, through: int) -> None:
        """Blocks below ``through`` left, or are known to the consumers: go on behind them."""
        cursor = self.cursors[producer]
        if through <= cursor.acknowledged:
            return
        cursor.acknowledged = through
        cursor.following = max(cursor.following, through)
        cursor.furthest = max(cursor.furthest, cursor.following)
        if cursor.holder is not None and cursor.acknowledged == cursor.following:
            self._let_go(producer, cursor.holder)
        if cursor.following >= cursor.sent:
            self._ready.pop(producer, None)

    def withdraw(self, producer: str, *, sent: int) -> None:
        """A producer's blocks from ``sent`` on, which nobody was given, will not come after all."""
        cursor = self.cursors[producer]
        cursor.sent = sent
        if cursor.following >= sent:
            for line in (self._ready, *(member.ready for member in self.members.values())):
                line.pop(producer, None)

    def give_back(self, consumer: str) -> None:
        """A consumer is gone: what it did not acknowledge goes to the next that asks, oldest first."""
        member = self.members[consumer]
        for producer in sorted(member.held):
            cursor = self.cursors[producer]
            cursor.following = cursor.acknowledged
            self._let_go(producer, consumer)

    def leave(self, consumer: str) -> None:
        """A consumer goes, where it is here, and is forgotten."""
        if consumer in self.members:
            self.give_back(consumer)
            del self.members[consumer]

    def expire(self, seen_until: float) -> None:
        """Hand on what consumers hold that showed no sign of life since, where another one did: a slow consumer keeps
        what it has while nobody stands in for it, and one that died beside it stands in for nobody."""
        if any(member.seen > seen_until for member in self.members.values()):
            late = [name for name, member in self.members.items() if member.held and member.seen <= seen_until]
            for consumer in late:
                self.leave(consumer)

    def has_rest(self, consumer: str) -> bool:
        """Whether anything is here for a consumer, or may come back from another."""
        return any(
            cursor.following < cursor.sent or cursor.holder not in (None, consumer) for cursor in self.cursors.values()
        )

    def signs_of_life(self) -> list[float]:
        """When each consumer that holds something was seen last."""
        return [member.seen for member in self.members.values() if member.held]

    def _let_go(self, producer: str, consumer: str) -> None:
        member = self.members[consumer]
        self.cursors[producer].holder = None
        member.held.discard(producer)
        member.ready.pop(producer, None)
        self._line_up(producer)
