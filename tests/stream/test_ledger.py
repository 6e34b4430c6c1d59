"""The ledger against a plain reference: whatever producers and consumers do, each group gets each block once, in order.

The reference keeps everything for ever: lists of what was accepted, given and acknowledged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from routeplane.errors import ErrorKind, RouteplaneError
from routeplane.record.record import RecordKey
from routeplane.stream.delivery import Block, Membership, Session, Totals
from routeplane.stream.ledger import Ledger

Result = TypeVar("Result")

LEASE = 10.0
RARE = ["come", "break", "join", "leave", "clock", "retire", "restart", "end"]
BLOCK = 100


def block(producer: str, sequence: int, *, version: int | None = None, name: str = "", nbytes: int = BLOCK) -> Block:
    """A block of two records whose keys name producer and number."""
    stem = name or f"{producer}-{sequence}"
    return Block(
        producer=producer,
        sequence=sequence,
        keys=(RecordKey(stem, 0, 0), RecordKey(stem, 0, 1)),
        tokens=7,
        nbytes=nbytes,
        digest=hash(stem) % 2**64,
        weights_version=version,
        payload=stem,
    )


class Clock:
    """A clock that a test moves, forwards and backwards."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        """Now."""
        return self.now


def attempt(work: Callable[[], Result]) -> tuple[Result | None, ErrorKind | None]:
    """What a call gives, or the kind of its refusal."""
    try:
        return work(), None
    except RouteplaneError as error:
        return None, error.kind


class Delivery(RuleBasedStateMachine):
    """Producers and consumers that come, go, die and return; room that runs out; clocks that jump; restarts."""

    PRODUCERS, GROUPS, CONSUMERS = ("p", "q"), ("train", "audit"), ("a", "b")

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.made = 0
        self.sessions: dict[str, Session] = {}
        self.accepted: dict[str, list[Block]] = {name: [] for name in self.PRODUCERS}
        self.gone: set[tuple[str, int]] = set()  # retired, or withdrawn
        self.ended: set[str] = set()
        self.members: dict[tuple[str, str], Membership] = {}
        self.out: dict[tuple[str, str], list[Block]] = {}
        self.acknowledged: dict[str, dict[str, int]] = {group: {} for group in self.GROUPS}
        self.given: dict[str, set[tuple[str, int]]] = {group: set() for group in self.GROUPS}
        self.floor = -1
        self.steps = 0

    def new_ledger(self) -> Ledger:
        """A ledger of the same stream."""
        self.made += 1
        return Ledger(
            max_bytes=4 * BLOCK,
            groups=self.GROUPS,
            producers=len(self.PRODUCERS),
            lease_s=LEASE,
            keep=self.keep,
            first_epoch=1_000 * self.made,
            clock=self.clock,
        )

    @initialize(keep=st.booleans())
    def begin(self, keep: bool) -> None:
        """Begin with an empty ledger, that keeps what is done or not."""
        self.keep = keep
        self.ledger = self.new_ledger()

    # -- producers -------------------------------------------------------------------------------------------------

    def attach(self, name: str) -> None:
        """A name is free where its producer went or was lost, and never where it ended."""
        old = self.sessions.get(name)
        session, kind = attempt(lambda: self.ledger.attach(name))
        if session is None:
            assert kind is (ErrorKind.CLOSED if name in self.ended else ErrorKind.PRODUCER_TAKEN)
            assert name in self.ended or old is not None
            return
        assert len(self.accepted[name]) == session.next_sequence
        assert old is None or old.epoch < session.epoch
        self.sessions[name] = session

    def put(self, name: str, version: int | None, back: int) -> None:
        """A block is taken whole, known again, refused, or must wait; and it waits only where there is no room."""
        if name in self.ended:
            return
        if name not in self.sessions:
            self.attach(name)
        session = self.sessions[name]
        there = self.accepted[name]
        sequence = max(len(there) - back, 0)
        sent = there[sequence] if sequence < len(there) else block(name, sequence, version=version)
        held = self.ledger.report().held_bytes
        outcome, kind = attempt(lambda: self.ledger.put(session, sent))
        if outcome is None:
            assert kind is ErrorKind.FENCED or (kind is ErrorKind.RETIRED and (sent.weights_version or 0) < self.floor)
            return
        if sequence < len(there):
            assert outcome == "repeated"
        elif outcome == "full":
            assert held + BLOCK > 4 * BLOCK
        else:
            there.append(sent)

    def disconnect(self, name: str) -> None:
        """A connection breaks."""
        if name in self.sessions:
            self.ledger.disconnect(self.sessions[name])

    def close(self, name: str, wrong: bool) -> None:
        """An end is an end only with the right counts."""
        if name not in self.sessions or name in self.ended:
            return
        count = len(self.accepted[name]) + wrong
        totals = Totals(blocks=count, records=2 * count, tokens=7 * count)
        _, kind = attempt(lambda: self.ledger.close(self.sessions[name], totals))
        if kind is None:
            self.ended.add(name)
        assert kind is ErrorKind.FENCED or kind is (ErrorKind.TRAILER if wrong else None)

    def abort(self, name: str) -> None:
        """Nothing that no one was given is given after an abort."""
        if name not in self.sessions or name in self.ended:
            return
        _, kind = attempt(lambda: self.ledger.abort(self.sessions[name]))
        if kind is not None:
            assert kind is ErrorKind.FENCED
            return
        given = [sequence for seen in self.given.values() for producer, sequence in seen if producer == name]
        stop = max([*given, *(at[name] - 1 for at in self.acknowledged.values() if name in at)], default=-1) + 1
        # what a retired block stood before may count as given
        while stop < len(self.accepted[name]) and (name, stop) in self.gone:
            stop += 1
        self.gone |= {(name, sequence) for sequence in range(stop, len(self.accepted[name]))}
        self.ended.add(name)

    # -- consumers -------------------------------------------------------------------------------------------------

    def join(self, group: str, consumer: str) -> None:
        """A consumer comes, or comes again after it died."""
        self.members[group, consumer] = self.ledger.join(group, consumer)
        self.out[group, consumer] = []

    def take(self, group: str, consumer: str, count: int) -> None:
        """What is given was accepted, not acknowledged, next in its producer's order, and with nobody else."""
        if (group, consumer) not in self.members:
            self.join(group, consumer)
        member = self.members[group, consumer]
        taken, kind = attempt(lambda: self.ledger.take(member, max_blocks=count))
        if taken is None:
            assert kind is ErrorKind.FENCED
            del self.members[group, consumer], self.out[group, consumer]
            return
        for each in taken:
            assert each is self.accepted[each.producer][each.sequence] or each.payload == (
                self.accepted[each.producer][each.sequence].payload
            )
            assert (each.producer, each.sequence) not in self.gone
            held = self.out[group, consumer]
            before = [other.sequence for other in held if other.producer == each.producer]
            first = self.acknowledged[group].get(each.producer, 0)
            expected = max(before, default=first - 1) + 1
            while (each.producer, expected) in self.gone:
                expected += 1
            assert expected == each.sequence
            held.append(each)
            self.given[group].add((each.producer, each.sequence))

    def acknowledge(self, data: st.DataObject) -> None:
        """What a consumer was given, it acknowledges; later ones imply the earlier."""
        group, consumer = data.draw(st.sampled_from([who for who, held in self.out.items() if held]))
        held = self.out[group, consumer]
        done = data.draw(st.sampled_from(held))
        member, through = self.members[group, consumer], done.sequence + 1
        _, kind = attempt(lambda: self.ledger.acknowledge(member, producer=done.producer, through=through))
        if kind is not None:
            assert kind is ErrorKind.FENCED or (
                kind is ErrorKind.SEQUENCE and (done.producer, done.sequence) in self.gone
            )
            return
        at = self.acknowledged[group]
        at[done.producer] = max(at.get(done.producer, 0), done.sequence + 1)
        self.out[group, consumer] = [
            other for other in held if other.producer != done.producer or other.sequence > done.sequence
        ]

    def leave(self, group: str, consumer: str) -> None:
        """A consumer goes in peace."""
        member = self.members.pop((group, consumer), None)
        if member is not None:
            self.ledger.leave(member)
            del self.out[group, consumer]

    # -- the rest --------------------------------------------------------------------------------------------------

    def move_the_clock(self, by: float) -> None:
        """Time passes; a clock leaps, or is set back."""
        self.clock.now += by

    def retire(self, below: int) -> None:
        """Old weights are no longer wanted."""
        self.ledger.retire(below=below)
        self.floor = max(self.floor, below)
        for blocks in self.accepted.values():
            for each in blocks:
                if each.weights_version is not None and each.weights_version < self.floor:
                    self.gone.add((each.producer, each.sequence))

    def restart(self) -> None:
        """Another process goes on from what was on disk."""
        state = self.ledger.snapshot()
        held = [each for blocks in self.accepted.values() for each in blocks]
        held = [each for each in held if each.sequence >= state.producers[each.producer].settled]
        held = [each for each in held if (each.producer, each.sequence) not in self.gone]
        self.ledger = self.new_ledger()
        self.ledger.restore(state, held)
        self.sessions, self.members, self.out = {}, {}, {}
        self.given = {group: set() for group in self.GROUPS}

    # One rule, since hypothesis would leave out most of several in each run, and only together they go anywhere.
    @rule(data=st.data())
    def act(self, data: st.DataObject) -> None:
        """Put, take and acknowledge, and now and then something else."""
        what = data.draw(st.sampled_from(["put"] * 8 + ["take"] * 8 + ["acknowledge"] * 6 + RARE))
        name, group = data.draw(st.sampled_from(self.PRODUCERS)), data.draw(st.sampled_from(self.GROUPS))
        consumer = data.draw(st.sampled_from(self.CONSUMERS))
        match what:
            case "put":
                version, back = (
                    data.draw(st.sampled_from([None, None, 1, 3, 5])),
                    data.draw(st.sampled_from([0, 0, 0, 1, 2])),
                )
                self.put(name, version, back)
            case "take":
                self.take(group, consumer, data.draw(st.integers(1, 3)))
            case "acknowledge" if any(self.out.values()):
                self.acknowledge(data)
            case "come":
                self.attach(name)
            case "break":
                self.disconnect(name)
            case "join":
                self.join(group, consumer)
            case "leave":
                self.leave(group, consumer)
            case "clock":
                self.move_the_clock(data.draw(st.sampled_from([-500.0, 1.0, 4.0, 11.0, 1e6])))
            case "retire":
                self.retire(data.draw(st.integers(0, 4)))
            case "restart":
                self.restart()
            case "end" if self.steps > 15:
                if data.draw(st.booleans()):
                    self.abort(name)
                else:
                    self.close(name, data.draw(st.booleans()))

    @invariant()
    def holds_no_more_than_the_bound(self) -> None:
        """Memory is bounded, and nothing unacknowledged has left it."""
        self.steps += 1
        if not hasattr(self, "ledger"):
            return
        report = self.ledger.report()
        assert report.held_bytes <= 4 * BLOCK
        assert report.held_bytes == BLOCK * report.held_blocks
        for name, blocks in self.accepted.items():
            done = min(at.get(name, 0) for at in self.acknowledged.values())
            for each in blocks[done:]:
                if (name, each.sequence) not in self.gone:
                    found = self.ledger.find(each.keys[1])
                    assert found is not None
                    assert each.payload == found.payload

    def teardown(self) -> None:
        """In the end every group gets the rest, each record once, in order."""
        if not hasattr(self, "ledger"):
            return
        for group in self.GROUPS:
            for consumer in self.CONSUMERS:
                if (group, consumer) in self.members:
                    self.ledger.leave(self.members[group, consumer])
            member = self.ledger.join(group, "last")
            rest: dict[str, list[int]] = {name: [] for name in self.PRODUCERS}
            while taken := self.ledger.take(member):
                rest[taken[0].producer].append(taken[0].sequence)
                self.ledger.acknowledge(member, producer=taken[0].producer, through=taken[0].sequence + 1)
            for name, blocks in self.accepted.items():
                first = self.acknowledged[group].get(name, 0)
                assert [n for n in range(first, len(blocks)) if (name, n) not in self.gone] == rest[name]
        assert 0 == self.ledger.report().unacknowledged_blocks


Delivery.TestCase.settings = settings(max_examples=80, stateful_step_count=60)
TestDelivery = Delivery.TestCase
