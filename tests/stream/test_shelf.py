"""Letting go: what was retired is in no list that grows, counts once, and nobody is waited for on its account."""

from __future__ import annotations

import pytest

from routeplane.stream.ledger import Ledger
from tests.stream.test_ledger import BLOCK, block


def test_kept_blocks_that_were_retired_leave_nothing_behind() -> None:
    """A ledger that keeps what was acknowledged, and is rid of it by retiring alone, is no larger after a thousand
    blocks than after one."""
    ledger = Ledger(max_bytes=10 * BLOCK, keep=True)
    session, member = ledger.attach("p"), ledger.join("default", "c")
    for sequence in range(1_000):
        ledger.put(session, block("p", sequence, version=sequence))
        ledger.take(member)
        ledger.acknowledge(member, producer="p", through=sequence + 1)
        ledger.retire(below=sequence + 1)
        ledger.released()
    assert 0 == len(ledger._shelf._done) == len(ledger._shelf._places) == len(ledger._shelf._rows["p"].blocks)


def test_what_was_retired_is_not_withdrawn_too() -> None:
    """Blocks that came are retired, or withdrawn by an abort: each counts once."""
    ledger = Ledger(max_bytes=10 * BLOCK)
    session = ledger.attach("p")
    for sequence, version in enumerate([5, 1, 5, 1]):
        ledger.put(session, block("p", sequence, version=version))
    ledger.retire(below=2)
    ledger.abort(session)
    report = ledger.report()
    assert (4, 2, 2) == (report.blocks, report.retired, report.withdrawn)


@pytest.mark.parametrize("out", [0, 1, 3])
def test_nobody_is_asked_to_read_what_was_retired(out: int) -> None:
    """A producer that waits for its blocks to be acknowledged, all of them retired, waits no longer; also where some
    are out with a consumer."""
    ledger = Ledger(max_bytes=10 * BLOCK)
    session, member = ledger.attach("p"), ledger.join("default", "c")
    for sequence in range(4):
        ledger.put(session, block("p", sequence, version=1))
    ledger.take(member, max_blocks=out)
    ledger.retire(below=2)
    assert 4 == ledger.heartbeat(session).acknowledged
    ledger.acknowledge(member, producer="p", through=out)
    assert 0 == ledger.report().unacknowledged_blocks
