"""Every call of a producer and of a consumer in turn is lost, or answered by nobody, or its service is killed.

What both see is as if nothing had happened: everything comes, once, in order; the end is told; nobody raises.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from routeplane.errors import ErrorKind, TruncatedError
from routeplane.stream import new_stream, open_stream
from routeplane.testing.contracts.samples import SPEC, facts, sample
from tests.stream.lossy import Loss, LossyPlane, read_all

RECORDS = [sample(index) for index in range(6)]  # three blocks
LOSSES: tuple[Loss, ...] = ("request", "answer", "service")


def history(plane: LossyPlane) -> None:
    """Write, close, and read in two groups; what all of this comes to must be what was written."""
    with new_stream(plane, SPEC, producer="p") as sink:
        for record in RECORDS:
            sink.write(record)
    for group in ("default", "audit"):
        came, _ = read_all(plane, group)
        assert facts(RECORDS) == facts(came)
    report = plane.gate.report()
    assert (0, 0) == (report.held_blocks, report.unacknowledged_blocks)
    plane.close()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> LossyPlane:
    """What happens where nothing is lost, for its numbers."""
    plane = LossyPlane(tmp_path_factory.mktemp("undisturbed") / "spool")
    history(plane)
    return plane


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("times", [1, 2, 3])
def test_each_call_is_lost(tmp_path: Path, undisturbed: LossyPlane, loss: Loss, times: int) -> None:
    """Each call, and so many from there on: the caller makes it again, and it counts once."""
    assert undisturbed.calls > 20
    for call in range(undisturbed.calls):
        history(LossyPlane(tmp_path / f"{call}", losses=dict.fromkeys(range(call, call + times), loss)))


def test_each_line_is_the_last(tmp_path: Path, undisturbed: LossyPlane) -> None:
    """A service that is killed after each line of its journal in turn, before anybody was told of it."""
    assert undisturbed.lines > 10
    for line in range(undisturbed.lines):
        history(LossyPlane(tmp_path / f"{line}", kills=frozenset({line, line + 4})))


@pytest.mark.parametrize("loss", ["request", "answer"])
def test_an_abort_is_lost(tmp_path: Path, loss: Loss) -> None:
    """It is said again: consumers are told at once, not that the producer is lost when its lease runs out."""
    plane = LossyPlane(tmp_path / "spool")
    sink = new_stream(plane, SPEC, producer="p")
    for record in RECORDS:
        sink.write(record)
    plane._losses = {plane.calls: loss}
    sink.abort()
    with open_stream(plane, timeout_s=0.0) as reader:
        with pytest.raises(TruncatedError) as caught:
            list(reader)
    plane.close()
    assert ErrorKind.ABORTED == caught.value.kind


@pytest.mark.parametrize("loss", LOSSES)
def test_a_consumer_is_not_heard_when_it_leaves(tmp_path: Path, loss: Loss) -> None:
    """It has everything and said so: that nobody hears it go is no error."""
    plane = LossyPlane(tmp_path / "spool")
    with new_stream(plane, SPEC, producer="p") as sink:
        sink.write(RECORDS[0])
    with open_stream(plane, consumer="c", timeout_s=0.0) as reader:
        assert facts(RECORDS[:1]) == facts(list(reader))
        plane._losses = {plane.calls: loss}
    assert reader.report().complete
    plane.close()


def test_a_producer_that_waits_for_long_is_cut_off_often() -> None:
    """Its way may break as often for each block that is acknowledged as for one that is sent."""
    plane = LossyPlane(None)
    asked = 0

    def others() -> None:
        """The way breaks five times; then each group is done with one more block."""
        nonlocal asked
        asked += 1
        if asked % 6:
            plane._losses = {plane.calls: "request"}
            return
        for group in ("default", "audit"):
            member = plane.gate.join(group, "c")
            [block] = plane.gate.take(member, timeout_s=0.0).blocks
            plane.gate.acknowledge(member, producer="p", through=block.sequence + 1)

    plane.while_waiting = others
    sink: Any = new_stream(plane, SPEC, producer="p")
    for record in RECORDS:
        sink.write(record)
    sink.close()
    assert () == sink.unacknowledged
    assert 0 == plane.gate.report().unacknowledged_blocks
