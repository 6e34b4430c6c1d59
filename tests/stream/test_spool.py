"""A folder whose process was killed between any two lines of its journal: the next one goes on where the lines end."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from routeplane.errors import ErrorKind, UsageError
from routeplane.stream import new_stream
from routeplane.stream.broker import Broker
from routeplane.stream.delivery import Session
from routeplane.stream.spool import Spool
from routeplane.stream.spooled import SpoolStream, spooled_ledger
from routeplane.testing.contracts.samples import SPEC, sample
from tests.stream.test_ledger import BLOCK, block


def opened(folder: Path, *, keep: bool = False) -> tuple[Broker, Spool]:
    """A broker over a folder, for two producers and two groups."""
    spool = Spool(folder, to_bytes=str.encode, in_memory=True)
    ledger = spooled_ledger(
        spool,
        max_bytes=100 * BLOCK,
        groups=("train", "audit"),
        producers=2,
        load=lambda path: path.read_text(),
        keep=keep,
    )
    return Broker(ledger, store=spool), spool


def put(broker: Broker, session: Session, sequence: int, *, version: int | None = None) -> Session:
    """One block, as the number says."""
    return broker.put(session, block(session.producer, sequence, version=version))


def given(broker: Broker, group: str, *, cursor: Mapping[str, int] | None = None) -> list[str]:
    """What a consumer gets that acknowledges nothing."""
    member = broker.join(group, "c", cursor=cursor)
    taken = [str(each.payload) for each in broker.take(member, max_blocks=100, timeout_s=0.0).blocks]
    broker.leave(member)
    return taken


def after_each_line(folder: Path, work: Callable[[Broker], object]) -> list[Path]:
    """Copies of the folder as a kill would leave it after each line that ``work`` appends; none for the last one."""
    broker, spool = opened(folder)
    copies: list[Path] = []
    append = spool._journal.append

    def copying(entry: Mapping[str, object]) -> None:
        append(entry)
        copies.append(folder.with_name(f"after-{len(copies)}"))
        shutil.copytree(folder, copies[-1])

    spool._journal.append = copying  # type: ignore[method-assign]
    work(broker)
    spool.close()
    return copies


def test_what_was_retired_stays_retired(tmp_path: Path) -> None:
    """Killed while it lets go of old weights, one after the other: none of them is given out by the next."""

    def work(broker: Broker) -> None:
        session = broker.attach("p")
        for sequence, version in enumerate([1, 1, 3]):
            put(broker, session, sequence, version=version)
        broker.retire(below=2)

    copies = after_each_line(tmp_path / "spool", work)
    seen = []
    for copy in copies:
        broker, spool = opened(copy)
        seen.append(given(broker, "train"))
        spool.close()
    assert seen[:4] == [[], ["p-0"], ["p-0", "p-1"], ["p-0", "p-1", "p-2"]]
    assert seen[4:] == [["p-2"]] * 3
    assert [] == list(copies[4].glob("p-p/*0.arrows"))


def test_older_weights_do_not_come_back(tmp_path: Path) -> None:
    """The newest weights ever asked for count, not those that were asked for last."""
    broker, spool = opened(tmp_path / "spool")
    broker.retire(below=5)
    broker.retire(below=3)
    spool.close()
    broker, spool = opened(tmp_path / "spool")
    session = broker.attach("p")
    with pytest.raises(UsageError) as caught:
        put(broker, session, 0, version=4)
    spool.close()
    assert ErrorKind.RETIRED == caught.value.kind


@pytest.mark.parametrize("before", [0, 1, 2, 4])
@pytest.mark.parametrize("having", [("train",), ("train", "audit")])
def test_a_consumer_that_has_more_than_is_here(tmp_path: Path, before: int, having: tuple[str, ...]) -> None:
    """What a consumer says that it has, from a service before, is not given out again, however often this one is killed
    before its producer has sent so far; and the producer goes on at the block that is not here."""
    folder = tmp_path / "spool"
    broker, spool = opened(folder)
    if before:
        session = broker.attach("p")
    for sequence in range(before - 1):
        session = put(broker, session, sequence)
    for group in having:
        assert [] == given(broker, group, cursor={"p": 3})
    spool.close()

    broker, spool = opened(folder)
    session = broker.attach("p")
    assert max(before - 1, 0) == session.next_sequence == session.totals.blocks
    for sequence in range(session.next_sequence, 4):
        session = put(broker, session, sequence)
    broker.close(session, totals=session.totals)
    for group in ("train", "audit"):
        assert (["p-3"] if group in having else ["p-0", "p-1", "p-2", "p-3"]) == given(broker, group)
    spool.close()


def test_a_group_that_came_late_misses_the_same_after_a_restart(tmp_path: Path) -> None:
    """Blocks that all groups before it were done with are none of its own, also where they are kept."""
    broker, spool = opened(tmp_path / "spool", keep=True)
    session = broker.attach("p")
    for sequence in range(3):
        session = put(broker, session, sequence)
    for group in ("train", "audit"):
        member = broker.join(group, "c")
        for each in broker.take(member, max_blocks=2, timeout_s=0.0).blocks:
            broker.acknowledge(member, producer="p", through=each.sequence + 1)
        broker.leave(member)
    assert ["p-2"] == given(broker, "late")
    spool.close()

    broker, spool = opened(tmp_path / "spool", keep=True)
    assert ["p-2"] == given(broker, "late")
    spool.close()


def test_a_folder_that_was_let_go_of(tmp_path: Path) -> None:
    """Letting go twice is no error, and whoever still writes is told that, not that the disk is full."""
    stream = SpoolStream(tmp_path / "spool")
    sink = new_stream(stream, SPEC)
    sink.write(sample(0))
    stream.close()
    stream.close()
    with pytest.raises(UsageError, match="open the folder again") as caught:
        sink.close()
    assert ErrorKind.CLOSED == caught.value.kind
