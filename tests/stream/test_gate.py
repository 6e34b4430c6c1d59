"""A broker behind a wire: a writer that lost an answer is heard again, and nobody else goes on under its name."""

from __future__ import annotations

import pytest

from routeplane.errors import ErrorKind, UsageError
from routeplane.stream.delivery import Totals
from routeplane.stream.gate import Gate, PlaneOptions


def gate() -> Gate:
    """Without a folder, for one producer."""
    return Gate(PlaneOptions(), to_bytes=lambda payload: payload, load=lambda path: path)


def test_an_end_whose_answer_was_lost_is_said_again() -> None:
    """The same writer comes back to the session that ended, and may close it once more."""
    made = gate()
    session = made.attach_as("writer", "p")
    made.close(session, totals=Totals())
    again = made.attach_as("writer", "p")
    assert session == again
    made.close(again, totals=Totals())


def test_another_writer_finds_the_producer_ended() -> None:
    """Whoever did not begin it does not go on under its name."""
    made = gate()
    made.close(made.attach_as("writer", "p"), totals=Totals())
    with pytest.raises(UsageError) as caught:
        made.attach_as("somebody else", "p")
    assert ErrorKind.CLOSED == caught.value.kind
