"""Consumers that are slow, that died and that left: who keeps what it was given, and who is forgotten."""

from __future__ import annotations

import pytest

from routeplane.errors import ErrorKind, UsageError
from routeplane.stream.ledger import Ledger
from tests.stream.test_ledger import BLOCK, LEASE, Clock, block


@pytest.fixture
def clock() -> Clock:
    """The ledger's clock."""
    return Clock()


@pytest.fixture
def ledger(clock: Clock) -> Ledger:
    """Two blocks of one producer, that closed."""
    made = Ledger(max_bytes=10 * BLOCK, lease_s=LEASE, clock=clock)
    session = made.attach("p")
    made.put(session, block("p", 0))
    made.put(session, block("p", 1))
    made.close(session, made.heartbeat(session).totals)
    return made


def test_a_dead_consumer_stands_in_for_nobody(ledger: Ledger, clock: Clock) -> None:
    """One that died with nothing in its hands is no reason to take from a slow one what it has."""
    ledger.join("default", "dead")
    clock.now += 10 * LEASE
    slow = ledger.join("default", "slow")
    assert 1 == len(ledger.take(slow))
    clock.now += 10 * LEASE
    ledger.tick()
    ledger.acknowledge(slow, producer="p", through=1)


def test_whoever_asks_is_alive(ledger: Ledger, clock: Clock) -> None:
    """A slow consumer that comes back before another one was given what it holds goes on with it."""
    slow = ledger.join("default", "slow")
    other = ledger.join("default", "other")
    ledger.take(slow)
    clock.now += 10 * LEASE
    ledger.acknowledge(slow, producer="p", through=1)
    ledger.take(slow)
    clock.now += 10 * LEASE
    assert [1] == [each.sequence for each in ledger.take(other)]
    with pytest.raises(UsageError) as caught:
        ledger.acknowledge(slow, producer="p", through=2)
    assert ErrorKind.FENCED == caught.value.kind


def test_nobody_wakes_up_for_a_lease_that_ran_out(ledger: Ledger, clock: Clock) -> None:
    """Whoever waits beside a slow consumer waits, and does not ask again and again."""
    slow = ledger.join("default", "slow")
    ledger.take(slow)
    assert ledger.until_deadline() == LEASE
    clock.now += 10 * LEASE
    ledger.tick()
    assert ledger.until_deadline() is None


def test_who_left_is_forgotten(ledger: Ledger) -> None:
    """Consumers come under names of their own and go: nothing of them stays, and none comes back as another."""
    first = ledger.join("default", "c")
    ledger.leave(first)
    for number in range(1_000):
        ledger.leave(ledger.join("default", f"c-{number}"))
    again = ledger.join("default", "c")
    assert 1 == len(ledger._groups["default"].members)
    with pytest.raises(UsageError) as caught:
        ledger.take(first)
    assert ErrorKind.FENCED == caught.value.kind
    ledger.leave(first)
    assert 2 == len(ledger.take(again, max_blocks=2))


def test_what_one_has_from_before_another_need_not_read(ledger: Ledger) -> None:
    """A consumer that comes back to a service made anew has blocks that are out with another one: once it says so, they
    come to nobody, whatever becomes of the other."""
    other = ledger.join("default", "other")
    assert 1 == len(ledger.take(other))
    ledger.join("default", "c", cursor={"p": 2})
    assert 0 == ledger.report().unacknowledged_blocks
    ledger.acknowledge(other, producer="p", through=1)
    ledger.leave(other)
    assert [] == ledger.take(ledger.join("default", "third"))
