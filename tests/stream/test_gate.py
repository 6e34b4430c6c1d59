"""A broker behind a wire: a writer that lost an answer is heard again, and nobody else goes on under its name."""

from __future__ import annotations

from pathlib import Path

import pytest

from routeplane.errors import ErrorKind, TransportError, UsageError
from routeplane.stream.broker import Broker
from routeplane.stream.delivery import Totals
from routeplane.stream.gate import Gate, PlaneOptions
from routeplane.stream.ledger import Ledger
from routeplane.stream.spool import Spool


def gate(folder: Path | None = None) -> Gate:
    """For one producer."""
    options = PlaneOptions(spool=None if folder is None else str(folder))
    return Gate(options, to_bytes=lambda payload: payload, load=lambda path: path)


def test_an_end_whose_answer_was_lost_is_said_again() -> None:
    """The same writer comes back to the producer that ended, and may close it once more."""
    made = gate()
    made.close(made.attach_as("writer", "p"), totals=Totals())
    made.close(made.attach_as("writer", "p"), totals=Totals())


def test_an_end_whose_service_was_killed_is_said_again(tmp_path: Path) -> None:
    """The next service over the folder knows who closed, however often that one comes back, and after how many."""
    for _ in range(3):
        made = gate(tmp_path / "spool")
        for _ in range(2):
            made.close(made.attach_as("writer", "p"), totals=Totals())
        made.close_spool()


@pytest.mark.parametrize("restarted", [False, True])
def test_another_writer_finds_the_producer_ended(tmp_path: Path, restarted: bool) -> None:
    """Whoever did not begin it does not go on under its name."""
    made = gate(tmp_path / "spool")
    made.close(made.attach_as("writer", "p"), totals=Totals())
    if restarted:
        made.close_spool()
        made = gate(tmp_path / "spool")
    with pytest.raises(UsageError) as caught:
        made.attach_as("somebody else", "p")
    made.close_spool()
    assert ErrorKind.CLOSED == caught.value.kind


def test_a_writer_that_was_replaced_does_not_hear_of_the_others_end(tmp_path: Path) -> None:
    """Of two writers that wrote under a name, one after the other, the second is who ended it."""
    made = gate(tmp_path / "spool")
    made.disconnect(made.attach_as("first", "p"))
    made.close(made.attach_as("second", "p"), totals=Totals())
    made.close_spool()
    made = gate(tmp_path / "spool")
    with pytest.raises(UsageError) as caught:
        made.attach_as("first", "p")
    assert ErrorKind.CLOSED == caught.value.kind
    made.attach_as("second", "p")
    made.close_spool()


class _FullOnce(Spool):
    """A folder on a disk that is full for the first producer that comes, and not after."""

    full = True

    def attached(self, producer: str, *, first: int, before: Totals, owner: str | None = None) -> None:
        """See ``Store``."""
        if self.full:
            self.full = False
            raise TransportError("full", kind=ErrorKind.NO_ROOM)
        super().attached(producer, first=first, before=before, owner=owner)


def test_a_name_that_was_not_noted_is_free(tmp_path: Path) -> None:
    """Whoever was told that the disk is full was given no session, and may come again."""
    spool = _FullOnce(tmp_path / "spool")
    broker = Broker(Ledger(max_bytes=1), store=spool)
    with pytest.raises(TransportError):
        broker.attach("p")
    broker.attach("p")
    spool.close()
