"""Plans: tasks with needs and resources, run as early as both allow, and taken down as one.

Owns order, cancellation and the timeline (what waited for what, and for how long). Knows neither Ray nor engines: a
task is a coroutine function that brings something up and says how it is taken down. No third party; asyncio does the
concurrency.

What makes it safe: a thing is registered with its closer at the moment it exists (``context.acquire``), not when its
task ends, so that failure, cancellation and interrupt at any phase find everything that is up. ``teardown`` closes it.

``check_setup`` compares what engine, environment, carrier and trainer do with routes, before anything loads. It is
pure. Each part alone would find its own mistake after minutes of loading, or never: an engine that captures for a
trainer that does not replay is slow and right.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, Self

from routeplane.errors import ErrorKind, FleetError, Problem, SpecError, UsageError
from routeplane.fleet.teardown import CLOSE_SECONDS, Closers, interrupts_noted
from routeplane.record.spec import RouteSpec

if TYPE_CHECKING:
    from types import TracebackType

    from routeplane.fleet.engine import EngineConfig

__all__ = [
    "Fleet",
    "Plan",
    "Setup",
    "Task",
    "TaskContext",
    "TaskTimes",
    "Timeline",
    "check_setup",
    "start",
    "start_async",
]

#: vLLM's own switch, which the engine's side sets from the spec.
_CAPTURE_OPTION = "enable_return_routed_experts"


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What the parts of a plan are configured to do with routes; a part that the plan does not have is left out.

    ``engines``: the shards. ``require_routes``: whether the environment demands routes (``EnvironmentConfig``); None
    without one. ``carried``: the geometry of the carrier between rollout and trainer. ``replay``: the geometry that the
    trainer attaches, None where it does not replay; ``trains``: False for a plan without a trainer. ``models``: the
    model's configuration (the mapping of ``config.json``) as each part has it, by the part's name.

    >>> from routeplane.fleet import EngineConfig
    >>> Setup(engines=(EngineConfig(model="/models/policy", spec=None),), require_routes=False).replay is None
    True
    """

    engines: tuple[EngineConfig, ...]
    require_routes: bool | None = None
    carried: RouteSpec | None = None
    replay: RouteSpec | None = None
    trains: bool = True
    models: Mapping[str, Mapping[str, Any]] | None = None


def check_setup(setup: Setup) -> None:
    """Raise where the parts of a set-up contradict each other, with the key to change.

    Raises UsageError (PLAN) for capture that no part uses, or that a part needs and no engine does; SpecError for parts
    of another geometry, one that the model's configuration does not have included.

    >>> from routeplane import RouteSpec
    >>> from routeplane.fleet import EngineConfig
    >>> spec = RouteSpec(num_experts=8, top_k=2, layer_ids=(0, 1))
    >>> engine = EngineConfig(model="/models/policy", spec=spec)
    >>> check_setup(Setup(engines=(engine,), require_routes=True, replay=spec))
    >>> check_setup(Setup(engines=(engine,), require_routes=True))
    Traceback (most recent call last):
    routeplane.errors.UsageError: expected a trainer that replays what is captured (Setup.replay), ...
    """
    captured = {engine.spec is not None for engine in setup.engines}
    if captured == {True, False}:
        raise _inconsistent("a spec in every engine's EngineConfig, or in none", "some")
    captures = captured == {True}
    for engine in setup.engines:
        switch = engine.options.get(_CAPTURE_OPTION)
        if switch is not None and bool(switch) != captures:
            raise _inconsistent(
                f"EngineConfig.options without {_CAPTURE_OPTION}, which follows from EngineConfig.spec", f"{switch!r}"
            )
    _check_uses(setup, captures)
    _check_geometry(setup)


def _inconsistent(expected: str, got: str) -> UsageError:
    return UsageError(f"expected {expected}, got {got}", kind=ErrorKind.PLAN)


def _check_uses(setup: Setup, captures: bool) -> None:
    if setup.require_routes is not None and setup.require_routes != captures:
        if captures:
            raise _inconsistent(
                "an environment that requires what the engine captures (build_environment_actor(captured=spec))",
                "captured=None",
            )
        raise _inconsistent("engines that capture what the environment requires (EngineConfig.spec)", "spec=None")
    if setup.trains and (setup.replay is not None) != captures:
        if captures:
            raise _inconsistent(
                "a trainer that replays what is captured (Setup.replay), or EngineConfig.spec=None", "no replay"
            )
        raise _inconsistent("engines that capture what the trainer replays (EngineConfig.spec)", "spec=None")
    if setup.carried is not None and not captures:
        raise _inconsistent("engines that capture what is carried (EngineConfig.spec)", "spec=None")


def _check_geometry(setup: Setup) -> None:
    specs = {f"engine {shard}": engine.spec for shard, engine in enumerate(setup.engines)}
    specs |= {"carrier": setup.carried, "trainer": setup.replay}
    there = [(part, spec) for part, spec in specs.items() if spec is not None]
    for (first, left), (second, right) in itertools.pairwise(there):
        # a pipeline stage replays some of the layers
        own = left.select(right.layer_ids) if set(right.layer_ids) < set(left.layer_ids) else left
        own.require_same_geometry(right, where=f"{first} and {second}")
    for part, config in (setup.models or {}).items():
        model = RouteSpec.from_hf_config(config)
        for name, spec in there:
            lacking = sorted(set(spec.layer_ids) - set(model.layer_ids))
            if lacking:
                raise SpecError(
                    f"expected layers that the model of {part} routes in, got {lacking} @ {name}",
                    kind=ErrorKind.SPEC_MISMATCH,
                )
            model.select(spec.layer_ids).require_same_geometry(spec, where=f"model of {part} and {name}")


Outcome = Literal["waiting", "running", "done", "failed", "cancelled"]

#: Seconds that a cancelled task has to end; one that takes longer is told beside the error, and not waited for.
_END_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One thing that comes up.

    ``run(context)``: a coroutine function; its result is what other tasks and the fleet get under ``name``. ``needs``:
    names of tasks whose results it uses. ``resources``: names of what it has to itself while it runs (a GPU, a disk);
    tasks that share one run one after another, in the plan's order. ``timeout``: seconds, from when it starts.

    >>> async def load(context):
    ...     return f"engine at {context.results['reserved']}"
    >>> task = Task(name="engine", run=load, needs=("reserved",), resources=("gpu 0",), timeout=600)
    """

    name: str
    run: Callable[[TaskContext], Awaitable[Any]]
    needs: tuple[str, ...] = ()
    resources: tuple[str, ...] = ()
    timeout: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Tasks in the order in which those that share a resource run. Pure value; nothing runs yet.

    ``setup``: what the parts are configured to do with routes; ``start`` checks it before it runs any task.

    Raises UsageError (PLAN) for no task, a name that comes twice, a need that is not a task, and needs in a circle.

    >>> async def work(context):
    ...     return context.name
    >>> plan = Plan(tasks=(Task(name="trainer", run=work, needs=("engine",)), Task(name="engine", run=work)))
    >>> [task.name for task in plan.ordered()]
    ['engine', 'trainer']
    """

    tasks: tuple[Task, ...]
    setup: Setup | None = None

    def __post_init__(self) -> None:
        names = [task.name for task in self.tasks]
        if not names:
            raise UsageError("expected at least one task, got none", kind=ErrorKind.PLAN)
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise UsageError(f"expected task names that differ, got {', '.join(twice)} twice", kind=ErrorKind.PLAN)
        for task in self.tasks:
            unknown = [need for need in task.needs if need not in names]
            if unknown:
                raise UsageError(
                    f"expected needs among {', '.join(names)}, got {', '.join(unknown)} @ task {task.name}",
                    kind=ErrorKind.PLAN,
                )
        self.ordered()

    def ordered(self) -> tuple[Task, ...]:
        """The tasks, each after all that it needs, otherwise in the plan's order. Raises UsageError (PLAN)."""
        done: dict[str, Task] = {}
        while len(done) < len(self.tasks):
            ready = next(
                (task for task in self.tasks if task.name not in done and all(need in done for need in task.needs)),
                None,
            )
            if ready is None:
                circle = ", ".join(task.name for task in self.tasks if task.name not in done)
                raise UsageError(
                    f"expected needs without a circle, got one among (or before) {circle}", kind=ErrorKind.PLAN
                )
            done[ready.name] = ready
        return tuple(done.values())

    def waits(self) -> Mapping[str, tuple[str, ...]]:
        """For each task all tasks that end before it starts: its needs, and those before it on a shared resource."""
        ordered = self.ordered()
        return {
            task.name: tuple(
                before.name
                for before in ordered[:position]
                if before.name in task.needs or set(before.resources) & set(task.resources)
            )
            for position, task in enumerate(ordered)
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskTimes:
    """One task; times in seconds since the start-up began, None where it has not come to that.

    ``waits``: the tasks that had to end first; ``waited_for``: the one of them that ended last, None if it waited for
    none.
    """

    name: str
    waits: tuple[str, ...] = ()
    waited_for: str | None = None
    started: float | None = None
    ended: float | None = None
    outcome: Outcome = "waiting"

    @property
    def seconds(self) -> float:
        """How long it ran; 0.0 if it has not ended."""
        return 0.0 if self.started is None or self.ended is None else self.ended - self.started

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, times to the millisecond."""
        return {
            **asdict(self),
            "waits": list(self.waits),
            "started": None if self.started is None else round(self.started, 3),
            "ended": None if self.ended is None else round(self.ended, 3),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """All tasks of a start-up, in the order in which they could run.

    >>> Timeline(tasks=(TaskTimes(name="engine", started=0.0, ended=2.0), TaskTimes(name="trainer"))).seconds
    2.0
    """

    tasks: tuple[TaskTimes, ...] = ()

    def __getitem__(self, name: str) -> TaskTimes:
        return next(task for task in self.tasks if task.name == name)

    @property
    def seconds(self) -> float:
        """Wall time until the last task ended."""
        return max((task.ended for task in self.tasks if task.ended is not None), default=0.0)

    @property
    def task_seconds(self) -> float:
        """What the tasks' own times add up to. Tasks that ran side by side slowed each other: one after another they
        would have taken less, so this over ``seconds`` is not what overlapping gained.
        """
        return sum(task.seconds for task in self.tasks)

    def critical_path(self) -> tuple[str, ...]:
        """The chain of tasks that decided the wall time, first to last: each started when the one before it ended."""
        times = {task.name: task for task in self.tasks}
        last = max((task for task in self.tasks if task.ended is not None), key=_ended, default=None)
        chain: list[str] = []
        while last is not None:
            chain.append(last.name)
            last = times[last.waited_for] if last.waited_for is not None else None
        return tuple(reversed(chain))

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "seconds": round(self.seconds, 3),
            "task_seconds": round(self.task_seconds, 3),
            "critical_path": list(self.critical_path()),
            "tasks": [task.to_dict() for task in self.tasks],
        }

    def scalars(self, *, prefix: str = "routeplane/") -> dict[str, float]:
        """A flat dict with stable names for a metrics logger: seconds in all, and by task."""
        return {
            f"{prefix}fleet_start_seconds": self.seconds,
            f"{prefix}fleet_start_task_seconds": self.task_seconds,
            **{f"{prefix}fleet_start_{task.name}_seconds": task.seconds for task in self.tasks},
        }


def _ended(task: TaskTimes) -> float:
    return task.ended or 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskContext:
    """What a running task is given. ``results``: of the tasks that it needs, by name; read-only.

    >>> async def engine(context):
    ...     await context.acquire(lambda: "loaded", lambda thing: print("closed", thing))
    ...     return context.name
    >>> with start(Plan(tasks=(Task(name="engine", run=engine),))) as fleet:
    ...     print(fleet["engine"])
    engine
    closed loaded
    """

    name: str
    results: Mapping[str, Any]
    _closers: Closers = field(repr=False)

    async def acquire(
        self,
        make: Callable[[], Any],
        close: Callable[[Any], object],
        *,
        what: str | None = None,
        timeout: float = CLOSE_SECONDS,
    ) -> Any:
        """Make a thing and register how to close it, at the moment it exists. Returns the thing.

        ``make``: a function, which runs in a thread of its own, or a coroutine function, which undoes its own half-made
        work when it is cancelled. Where the task is cancelled while the thread runs, teardown waits for the thing and
        closes it. ``close(thing)``: a function or a coroutine function; it has ``timeout`` seconds. Raises what
        ``make`` raises.

        Example::

            endpoint = await context.acquire(lambda: reserve("127.0.0.1", (21_000, 22_000)), Endpoint.close)
        """
        return await self._closers.acquire(make, close, what=what or self.name, timeout=timeout)

    def defer(self, close: Callable[[], object], *, what: str | None = None, timeout: float = CLOSE_SECONDS) -> None:
        """Call ``close`` when the fleet comes down, for whatever reason; the last deferred goes first.

        For a thing that exists already: call it before anything else is awaited. ``close`` may be a coroutine function
        and may raise; it has ``timeout`` seconds. What it raises is told beside, never instead of, what brought the
        fleet down.
        """
        self._closers.add(close, what=what or self.name, timeout=timeout)


class Fleet:
    """What a plan brought up: ``results`` by task name, and the ``timeline``. Leaving ``with`` takes all of it down.

    >>> async def engine(context):
    ...     context.defer(lambda: print("down"))
    ...     return "up"
    >>> with start(Plan(tasks=(Task(name="engine", run=engine),))) as fleet:
    ...     print(fleet["engine"], fleet.timeline["engine"].outcome)
    up done
    down
    """

    def __init__(self, results: Mapping[str, Any], timeline: Timeline, *, closers: Closers) -> None:
        self.results: Mapping[str, Any] = MappingProxyType(dict(results))
        self.timeline = timeline
        self._closers = closers

    def __getitem__(self, name: str) -> Any:
        return self.results[name]

    def close(self) -> None:
        """Take everything down, last first. Idempotent. Every closer runs, also where SIGINT comes meanwhile.

        Raises FleetError (CLOSED) naming what failed to close or did not end in its time.
        """
        _require_clean(self._closers.take_down())

    async def aclose(self) -> None:
        """The same inside an event loop, which coroutine functions among the closers may need."""
        _require_clean(await self._closers.take_down_in_loop())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            _note(error, self._closers.take_down())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            await self.aclose()
        else:
            _note(error, await self._closers.take_down_in_loop())


def _require_clean(problems: list[Problem]) -> None:
    if problems:
        raise FleetError.from_problems(problems, what="expected a clean shutdown, got")


def _note(error: BaseException, problems: list[Problem]) -> None:
    for problem in problems:
        error.add_note(f"while taking the fleet down: {problem}")


def start(plan: Plan, *, on_change: Callable[[Timeline], object] | None = None) -> Fleet:
    """Run a plan from a program without an event loop. Returns the fleet; raises as ``start_async``.

    SIGINT cancels the start, takes down what is up and ends in KeyboardInterrupt; further ones are noted and end
    nothing. Threads that a task left in the loop's default executor (``asyncio.to_thread``) are not waited for:
    ``context.acquire`` runs work in threads that are.

    >>> async def engine(context):
    ...     raise OSError("no device")
    >>> start(Plan(tasks=(Task(name="engine", run=engine),)))
    Traceback (most recent call last):
    routeplane.errors.FleetError: expected 1 tasks to come up, got 1 failed: task engine: OSError: no device...
    """
    begun: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[Fleet]]] = []

    def cancel() -> None:
        for loop, main in begun:
            loop.call_soon_threadsafe(main.cancel)

    with interrupts_noted(on_first=cancel) as noted:
        loop = asyncio.new_event_loop()
        main = loop.create_task(start_async(plan, on_change=on_change))
        begun.append((loop, main))
        if noted:  # it came before there was a task to cancel
            main.cancel()
        try:
            fleet = loop.run_until_complete(main)
        except asyncio.CancelledError as error:
            if not noted:
                raise
            interrupt = KeyboardInterrupt()
            for note in getattr(error, "__notes__", ()):
                interrupt.add_note(note)
            raise interrupt from None
        finally:
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()
    if noted:  # it came when everything was up
        fleet.close()
        raise KeyboardInterrupt
    return fleet


async def start_async(plan: Plan, *, on_change: Callable[[Timeline], object] | None = None) -> Fleet:
    """Run every task as soon as what it waits for has ended; the fleet, once all are up.

    ``on_change``: called with the timeline so far when a task starts or ends, for a progress display. Where a task
    fails, the others are cancelled, everything acquired or deferred so far is closed, last first, and FleetError
    (START_FAILED) is raised with one problem for each task that failed of itself, from an ExceptionGroup of what they
    raised. Cancelled from outside, it closes in the same way. A set-up that contradicts itself is refused before any
    task runs, as ``check_setup`` says.

    >>> async def engine(context):
    ...     return "up"
    >>> async def main():
    ...     async with await start_async(Plan(tasks=(Task(name="engine", run=engine),))) as fleet:
    ...         return fleet["engine"]
    >>> asyncio.run(main())
    'up'
    """
    if plan.setup is not None:
        check_setup(plan.setup)
    run = _Run(plan, on_change)
    tasks = [asyncio.create_task(run.carry_out(task), name=task.name) for task in run.ordered]
    failed: dict[str, BaseException] = {}
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        await _end(tasks)
        ended = [task for task in tasks if task.done() and not task.cancelled()]
        failed = {task.get_name(): error for task in ended if (error := task.exception())}
        if failed:
            raise run.failure(failed) from BaseExceptionGroup("what the tasks raised", tuple(failed.values()))
    except BaseException as error:
        await _end(tasks)
        for task in tasks:
            if not task.done():
                error.add_note(f"task {task.get_name()} did not end within {_END_SECONDS} s of its cancellation")
            elif not failed and not task.cancelled() and (own := task.exception()) is not None:
                error.add_note(f"task {task.get_name()} failed meanwhile: {type(own).__name__}: {own}")
        _note(error, await run.closers.take_down_in_loop())
        raise
    return Fleet(run.results, run.timeline(), closers=run.closers)


async def _end(tasks: list[asyncio.Task[None]]) -> None:
    """Cancel what still runs and wait for its end; what the tasks raised stays with them."""
    for task in tasks:
        task.cancel()
    with contextlib.suppress(asyncio.CancelledError):  # the start is being cancelled already
        await asyncio.wait(tasks, timeout=_END_SECONDS)


class _Run:
    """One run of a plan: results, closers and times as they come."""

    def __init__(self, plan: Plan, on_change: Callable[[Timeline], object] | None) -> None:
        self.ordered = plan.ordered()
        self.results: dict[str, Any] = {}
        self.closers = Closers(loop=asyncio.get_running_loop())
        self._waits = plan.waits()
        self._ended = {task.name: asyncio.Event() for task in self.ordered}
        self._times = {task.name: TaskTimes(name=task.name, waits=self._waits[task.name]) for task in self.ordered}
        self._on_change = on_change
        self._began = time.monotonic()

    def timeline(self) -> Timeline:
        """The times so far."""
        return Timeline(tasks=tuple(self._times.values()))

    async def carry_out(self, task: Task) -> None:
        """Wait for what it waits for, run it, keep its result."""
        outcome: Outcome = "failed"
        try:
            for name in self._waits[task.name]:
                await self._ended[name].wait()
            self._note(task, started=self._now(), waited_for=self._last(task), outcome="running")
            context = TaskContext(
                name=task.name,
                results=MappingProxyType({need: self.results[need] for need in task.needs}),
                _closers=self.closers,
            )
            self.results[task.name] = await self._within(task, context)
            outcome = "done"
        except asyncio.CancelledError:
            outcome = "cancelled"
            raise
        finally:
            self._note(task, ended=self._now() if self._times[task.name].started is not None else None, outcome=outcome)
        self._ended[task.name].set()

    async def _within(self, task: Task, context: TaskContext) -> Any:
        timeout = asyncio.timeout(task.timeout)
        try:
            async with timeout:
                return await task.run(context)
        except TimeoutError as error:
            if not timeout.expired():  # the task's own
                raise
            raise FleetError(
                f"expected task {task.name} to end within {task.timeout} s, got no end", kind=ErrorKind.NOT_READY
            ) from error

    def failure(self, failed: Mapping[str, BaseException]) -> FleetError:
        """What is raised for the tasks that failed of themselves, by name."""
        problems = [
            Problem(kind=ErrorKind.START_FAILED, message=f"task {name}: {type(error).__name__}: {error}")
            for name, error in failed.items()
        ]
        stopped = [name for name, times in self._times.items() if times.outcome == "cancelled"]
        listed = "; ".join(problem.message for problem in problems)
        return FleetError(
            f"expected {len(self.ordered)} tasks to come up, got {len(problems)} failed: {listed} "
            f"(cancelled: {', '.join(stopped) or 'none'})",
            kind=ErrorKind.START_FAILED,
            problems=problems,
        )

    def _now(self) -> float:
        return time.monotonic() - self._began

    def _last(self, task: Task) -> str | None:
        return max(self._waits[task.name], key=lambda name: self._times[name].ended or 0.0, default=None)

    def _note(self, task: Task, **changes: Any) -> None:
        self._times[task.name] = replace(self._times[task.name], **changes)
        if self._on_change is not None:
            self._on_change(self.timeline())
