"""The producers of a stream: what is counted along the way is what looking at all of them would find."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from routeplane.errors import UsageError
from routeplane.stream.delivery import Session, Totals
from routeplane.stream.ledger import Ledger
from routeplane.stream.roster import Roster

LEASE_S = 10.0

steps = st.lists(
    st.tuples(
        st.sampled_from(["attach", "show", "closed", "aborted", "disconnect", "expire"]),
        st.integers(0, 4),
        st.floats(0.0, 7.0),
    ),
    max_size=40,
)


@given(steps=steps)
def test_counts_are_what_looking_at_every_producer_finds(steps: list[tuple[str, int, float]]) -> None:
    """Whether all ended, who is lost and who aborted agree with every producer's own state after any history."""
    roster, now = Roster(first_epoch=0), 0.0
    sessions: dict[str, Session] = {}
    for what, number, passed in steps:
        now += passed
        name = f"p{number}"
        try:
            if what == "attach":
                epoch = roster.attach(name, now, before=Totals(), again=False)
                sessions[name] = Session(producer=name, epoch=epoch, next_sequence=0, acknowledged=0)
            elif what == "expire":
                roster.expire(now - LEASE_S)
            elif what == "disconnect" and name in sessions:
                roster.disconnect(sessions[name])
            elif name in sessions:
                known = roster.alive(sessions[name], now)
                if what != "show" and known.end == "open":
                    roster.end(name, "closed" if what == "closed" else "aborted")
        except UsageError:
            continue  # a name that is taken, or ended: nothing changed
        found = dict(roster.items())
        open_names = [each for each, known in found.items() if known.end == "open"]
        assert all(found[each].lost for each in open_names) == roster.all_ended()
        assert tuple(each for each in open_names if found[each].lost) == roster.lost()
        assert {each for each, known in found.items() if known.end == "aborted"} == set(roster.aborted())


@given(
    steps=st.lists(st.tuples(st.sampled_from(["attach", "heartbeat", "report"]), st.integers(0, 3), st.floats(0, 6)))
)
def test_leases_run_out_when_the_clock_says_so(steps: list[tuple[str, int, float]]) -> None:
    """However seldom the ledger looks at everybody, a tick finds lost exactly those silent for a whole lease."""
    now = [0.0]
    ledger = Ledger(max_bytes=1, producers=None, lease_s=LEASE_S, clock=lambda: now[0])
    sessions: dict[str, Session] = {}
    seen: dict[str, float] = {}
    lost: set[str] = set()
    losses = 0
    for what, number, passed in steps:
        now[0] += passed
        name = f"p{number}"
        gone = {each for each, at in seen.items() if at <= now[0] - LEASE_S and each not in lost}
        lost |= gone
        losses += len(gone)
        if what == "attach" and (name not in seen or name in lost):
            sessions[name] = ledger.attach(name)
        elif what == "heartbeat" and name in sessions:
            ledger.heartbeat(sessions[name])
        else:
            ledger.tick()
            assert losses == ledger.report().lost_producers
            continue
        seen[name] = now[0]
        lost.discard(name)
        assert losses == ledger.report().lost_producers
