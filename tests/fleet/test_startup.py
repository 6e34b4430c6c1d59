"""Plans: as early as needs and resources allow, one failure takes all down, and nothing that is up is forgotten."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from routeplane.errors import ErrorKind, FleetError, UsageError
from routeplane.fleet.startup import Plan, Task, TaskContext, Timeline, start

Run = Callable[[TaskContext], Awaitable[object]]


class Log:
    """What happened, in order."""

    def __init__(self) -> None:
        self.entries: list[str] = []

    def task(self, name: str, **options: object) -> Task:
        """A task that gives way once between its begin and its end, and logs both, and its end of life."""

        async def run(context: TaskContext) -> str:
            self.entries.append(f"+{name}")
            context.defer(lambda: self.entries.append(f"x{name}"))
            await asyncio.sleep(0)
            self.entries.append(f"-{name}")
            return name.upper()

        return Task(name=name, run=run, **options)  # type: ignore[arg-type]


def failing(error: Exception) -> Run:
    """A task that fails at once."""

    async def run(context: TaskContext) -> None:
        raise error

    return run


async def forever(context: TaskContext) -> None:
    """A task that ends only by cancellation."""
    await asyncio.Event().wait()


# ----------------------------------------------------------------------------------------------------------------------
# Order
# ----------------------------------------------------------------------------------------------------------------------


def test_a_task_gets_the_results_of_what_it_needs_and_no_others() -> None:
    """Results travel by name along the needs."""
    log = Log()
    seen: dict[str, object] = {}

    async def look(context: TaskContext) -> None:
        seen.update(context.results)

    with start(Plan(tasks=(Task(name="last", run=look, needs=("a",)), log.task("a"), log.task("b")))) as fleet:
        assert {"a": "A"} == seen
        assert ("A", "B", None) == (fleet["a"], fleet["b"], fleet["last"])


def test_tasks_without_needs_run_at_the_same_time() -> None:
    """Two tasks that wait for one another's event both end: neither waits for the other's end."""
    first, second = asyncio.Event(), asyncio.Event()

    def meet(mine: asyncio.Event, theirs: asyncio.Event) -> Run:
        async def run(context: TaskContext) -> None:
            mine.set()
            await theirs.wait()

        return run

    with start(Plan(tasks=(Task(name="a", run=meet(first, second)), Task(name="b", run=meet(second, first))))) as fleet:
        assert {"done"} == {task.outcome for task in fleet.timeline.tasks}


def test_tasks_that_share_a_resource_run_in_the_plans_order() -> None:
    """Colocated tasks: the engine, then the trainer; the environment beside them."""
    log = Log()
    tasks = (
        log.task("engine", resources=("gpu",)),
        log.task("trainer", resources=("gpu",)),
        log.task("environment"),
    )
    with start(Plan(tasks=tasks)) as fleet:
        assert ["+engine", "+environment"] == log.entries[:2]
        assert log.entries.index("-engine") < log.entries.index("+trainer")
        assert "engine" == fleet.timeline["trainer"].waited_for


@st.composite
def plans(draw: st.DrawFn) -> list[tuple[str, tuple[str, ...], tuple[str, ...]]]:
    """Names, needs (on earlier names of a hidden order, so that there is no circle) and resources, shuffled."""
    names = [f"t{index}" for index in range(draw(st.integers(1, 7)))]
    rows = [
        (
            name,
            tuple(draw(st.lists(st.sampled_from(names[:position]), unique=True, max_size=3)) if position else ()),
            tuple(draw(st.lists(st.sampled_from(["g0", "g1"]), unique=True))),
        )
        for position, name in enumerate(names)
    ]
    return draw(st.permutations(rows))


@given(rows=plans())
def test_any_plan_comes_up_with_needs_and_resources_kept(
    rows: list[tuple[str, tuple[str, ...], tuple[str, ...]]],
) -> None:
    """Whatever the plan: needs end first, no two tasks hold one resource, closers run backwards, all of them."""
    log = Log()
    plan = Plan(tasks=tuple(log.task(name, needs=needs, resources=resources) for name, needs, resources in rows))
    with start(plan) as fleet:
        assert {name for name, _, _ in rows} == set(fleet.results)
    at = {entry: position for position, entry in enumerate(log.entries)}
    for name, needs, _ in rows:
        assert all(at[f"-{need}"] < at[f"+{name}"] for need in needs)
    holders = [(name, resource) for name, _, resources in rows for resource in resources]
    for name, resource in holders:
        for other, same in holders:
            if name != other and resource == same:
                assert at[f"-{name}"] < at[f"+{other}"] or at[f"-{other}"] < at[f"+{name}"]
    begun = [entry[1:] for entry in log.entries if entry[0] == "+"]
    assert [f"x{name}" for name in reversed(begun)] == [entry for entry in log.entries if entry[0] == "x"]


@pytest.mark.parametrize(
    ("tasks", "said"),
    [
        pytest.param((("a", ("b",)), ("b", ("a",))), "circle", id="circle"),
        pytest.param((("a", ("a",)),), "circle", id="itself"),
        pytest.param((("a", ("ghost",)),), "ghost", id="unknown-need"),
        pytest.param((("a", ()), ("a", ())), "twice", id="twice"),
        pytest.param((), "at least one", id="none"),
    ],
)
def test_a_plan_that_cannot_end_is_refused_before_anything_runs(
    tasks: tuple[tuple[str, tuple[str, ...]], ...], said: str
) -> None:
    """Circles, unknown needs and equal names are found in the plan itself."""
    with pytest.raises(UsageError, match=said) as caught:
        Plan(tasks=tuple(Task(name=name, run=forever, needs=needs) for name, needs in tasks))
    assert ErrorKind.PLAN == caught.value.kind


# ----------------------------------------------------------------------------------------------------------------------
# Failure
# ----------------------------------------------------------------------------------------------------------------------


def test_one_failure_cancels_the_rest_and_takes_down_what_is_up() -> None:
    """The error names the task and its cause; a running task ends, a waiting one never begins; closers run."""
    log = Log()
    cause = OSError("no such model")
    tasks = (
        log.task("plane"),
        Task(name="engine", run=failing(cause), needs=("plane",)),
        Task(name="trainer", run=forever),
        log.task("environment", needs=("engine",)),
    )
    with pytest.raises(FleetError, match="task engine: OSError: no such model") as caught:
        start(Plan(tasks=tasks))
    assert ErrorKind.START_FAILED == caught.value.kind
    assert "cancelled: trainer, environment" in str(caught.value)
    assert ["+plane", "-plane", "xplane"] == log.entries
    group = caught.value.__cause__
    assert isinstance(group, ExceptionGroup)
    assert (cause,) == group.exceptions


def test_every_failure_is_listed_with_its_cause() -> None:
    """Two tasks that fail of themselves are two problems."""
    tasks = (Task(name="a", run=failing(ValueError("one"))), Task(name="b", run=failing(KeyError("two"))))
    with pytest.raises(FleetError) as caught:
        start(Plan(tasks=tasks))
    assert ["task a: ValueError: one", "task b: KeyError: 'two'"] == [str(each) for each in caught.value.problems]


def test_what_exists_is_taken_down_even_where_its_task_has_not_ended() -> None:
    """A thing deferred by a task that is then cancelled is closed too."""
    closed: list[str] = []
    up = asyncio.Event()

    async def half(context: TaskContext) -> None:
        context.defer(lambda: closed.append("half"))
        up.set()
        await asyncio.Event().wait()

    async def fail(context: TaskContext) -> None:
        await up.wait()
        raise RuntimeError("late")

    with pytest.raises(FleetError, match="late"):
        start(Plan(tasks=(Task(name="half", run=half), Task(name="fail", run=fail))))
    assert ["half"] == closed


def test_a_closer_that_fails_hides_nothing_and_stops_no_other() -> None:
    """The first error stays the error; the closer's own stands beside it as a note."""
    log = Log()

    def bad() -> None:
        raise OSError("stuck")

    async def up(context: TaskContext) -> None:
        context.defer(bad, what="the socket")

    tasks = (
        log.task("plane"),
        Task(name="up", run=up, needs=("plane",)),
        Task(name="fail", run=failing(ValueError("first")), needs=("up",)),
    )
    with pytest.raises(FleetError, match="ValueError: first") as caught:
        start(Plan(tasks=tasks))
    assert ["while taking the fleet down: the socket: OSError: stuck"] == caught.value.__notes__
    assert "xplane" == log.entries[-1]


def test_a_clean_exit_reports_the_closers_that_failed() -> None:
    """Nothing else went wrong: then what failed to close is the error, after all closers ran."""
    log = Log()

    def bad() -> None:
        raise OSError("stuck")

    async def up(context: TaskContext) -> None:
        context.defer(bad)

    fleet = start(Plan(tasks=(log.task("plane"), Task(name="up", run=up, needs=("plane",)))))
    with pytest.raises(FleetError, match="up: OSError: stuck") as caught:
        fleet.close()
    assert ErrorKind.CLOSED == caught.value.kind
    assert "xplane" == log.entries[-1]
    fleet.close()


def test_the_body_of_with_keeps_its_own_error() -> None:
    """An error in the user's code leaves ``with`` as it is."""
    log = Log()
    with pytest.raises(ZeroDivisionError), start(Plan(tasks=(log.task("plane"),))):
        raise ZeroDivisionError
    assert "xplane" == log.entries[-1]


def test_a_task_that_never_answers_ends_in_its_time() -> None:
    """The error names the task and its bound."""
    with pytest.raises(FleetError, match=r"task slow: FleetError: expected task slow to end within 0\.01 s"):
        start(Plan(tasks=(Task(name="slow", run=forever, timeout=0.01),)))


def test_a_timeout_of_the_tasks_own_is_told_as_it_is() -> None:
    """A TimeoutError from inside is not mistaken for the plan's bound."""
    with pytest.raises(FleetError, match="TimeoutError: of its own"):
        start(Plan(tasks=(Task(name="a", run=failing(TimeoutError("of its own")), timeout=60),)))


INTERRUPTED = """
import asyncio, signal, sys
from routeplane.fleet.startup import Plan, Task, start

# a job in the background of a shell inherits SIGINT as ignored
signal.signal(signal.SIGINT, signal.default_int_handler)

def closer(name):
    return lambda: print("closed", name, flush=True)

async def up(context):
    context.defer(closer(context.name))

async def hang(context):
    context.defer(closer(context.name))
    print("ready", flush=True)
    await asyncio.Event().wait()

if sys.argv[1] == "starting":
    start(Plan(tasks=(Task(name="plane", run=up), Task(name="engine", run=hang, needs=("plane",)))))
else:
    with start(Plan(tasks=(Task(name="plane", run=up), Task(name="engine", run=up, needs=("plane",))))):
        print("ready", flush=True)
        while True:
            input()
"""


@pytest.mark.parametrize("phase", ["starting", "running"])
def test_an_interrupt_takes_down_what_is_up(phase: str, tmp_path: Path) -> None:
    """SIGINT while starting or running: every closer runs, last first, and the process ends by KeyboardInterrupt."""
    script = tmp_path / "start.py"
    script.write_text(INTERRUPTED)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(
        [sys.executable, str(script), phase],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert "ready\n" == process.stdout.readline()
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=30)
    assert "closed engine\nclosed plane\n" == output
    assert "KeyboardInterrupt" in errors


# ----------------------------------------------------------------------------------------------------------------------
# Timeline
# ----------------------------------------------------------------------------------------------------------------------


def test_the_timeline_names_the_chain_that_decided_the_wall_time() -> None:
    """The critical path follows the last to end back through what each waited for."""
    log = Log()
    changes: list[Timeline] = []
    tasks = (log.task("urls"), log.task("engine", needs=("urls",)), log.task("rollout", needs=("engine",)))
    with start(Plan(tasks=tasks), on_change=changes.append) as fleet:
        timeline = fleet.timeline
    assert ("urls", "engine", "rollout") == timeline.critical_path()
    assert timeline.seconds <= timeline["rollout"].seconds + timeline["rollout"].started  # type: ignore[operator]
    assert 6 == len(changes)
    assert ["running", "waiting", "waiting"] == [task.outcome for task in changes[0].tasks]
    assert set(timeline.scalars()) >= {"routeplane/fleet_start_seconds", "routeplane/fleet_start_engine_seconds"}


def test_an_empty_timeline_has_no_path_and_no_time() -> None:
    """Nothing ran."""
    assert ((), 0.0, 0.0) == (Timeline().critical_path(), Timeline().seconds, Timeline().task_seconds)
