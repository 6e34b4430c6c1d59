"""What is up, and how it is taken down: last first, each closer once and bounded, whatever is interrupted meanwhile.

``Closers`` is filled while a plan starts and emptied once. A closer may be a function or a coroutine function. Work
that makes a thing in a thread is registered before it begins, so that a thing that appears after its task was cancelled
is closed too. Processes of this machine are found as the kernel lists them: whose child is whose, who bears a mark, and
whether one is gone. No third party.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from routeplane.errors import ErrorKind, Problem

if TYPE_CHECKING:
    from types import TracebackType

__all__ = [
    "CLOSE_SECONDS",
    "MARK",
    "Closers",
    "Process",
    "children_of",
    "end_processes",
    "interrupts_noted",
    "is_alive",
    "marked_with",
    "process_of",
]

#: The variable whose value marks a process and its descendants.
MARK = "ROUTEPLANE_ACTOR"
_PROC = Path("/proc")


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Process:
    """A process and no later one that got its number: ``started`` in clock ticks since boot."""

    pid: int
    started: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Entry:
    process: Process
    parent: int
    ended: bool


def process_of(pid: int) -> Process | None:
    """The process that has this number now; None where there is none, or no ``/proc``."""
    entry = _entry(pid)
    return None if entry is None else entry.process


def children_of(pid: int) -> tuple[Process, ...]:
    """All descendants of a process, nearest first; none where the machine has no ``/proc``."""
    entries = [entry for path in _PROC.glob("[0-9]*") if (entry := _entry(int(path.name))) is not None]
    found: list[Process] = []
    parents = {pid}
    while parents:
        children = [entry.process for entry in entries if entry.parent in parents]
        found += children
        parents = {child.pid for child in children}
    return tuple(found)


def marked_with(value: str) -> tuple[Process, ...]:
    """All processes of this user that were started with MARK set to ``value``, by number; none without ``/proc``."""
    sought = f"{MARK}={value}".encode()
    found = []
    for path in _PROC.glob("[0-9]*"):
        try:
            variables = (path / "environ").read_bytes().split(b"\0")
        except OSError:  # another user's, or it ended meanwhile
            continue
        entry = _entry(int(path.name)) if sought in variables else None
        if entry is not None:
            found.append(entry.process)
    return tuple(sorted(found))


def is_alive(process: Process) -> bool:
    """Whether it still runs; a zombie, which ended and was not waited for, does not."""
    entry = _entry(process.pid)
    return entry is not None and entry.process == process and not entry.ended


def end_processes(processes: Iterable[Process], *, patience: float = 5.0) -> tuple[Process, ...]:
    """Wait ``patience`` seconds for processes to end by themselves, then kill them; those that had to be killed.

    The caller vouches that they are its own: processes of actors that it started.
    """
    left = sorted(set(processes))
    deadline = time.monotonic() + patience
    while (left := [each for each in left if is_alive(each)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    for each in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(each.pid, signal.SIGKILL)
    return tuple(left)


def _entry(pid: int) -> _Entry | None:
    try:
        text = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:  # there is none, or it ended meanwhile
        return None
    # the name stands in parentheses and may hold any character; the fields behind it are numbered from 3 (proc(5))
    fields = text.rpartition(")")[2].split()
    return _Entry(
        process=Process(pid=pid, started=int(fields[19])), parent=int(fields[1]), ended=fields[0] in ("Z", "X")
    )


#: Seconds that one closer has, and that work which is still making something has, before the next one is called.
CLOSE_SECONDS = 30.0
#: How often a waiting main thread looks for a signal.
_POLL_SECONDS = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class _Closer:
    what: str
    close: Callable[[], object]
    timeout: float


class _Outcome:
    """What foreign code raised inside ``with``, kept for another thread: whatever it is, it goes no further here."""

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def __enter__(self) -> _Outcome:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self.error = error
        return True


class _Making:
    """A thread that makes one thing. ``abandoned``: the thing is closed by the thread itself when it appears."""

    def __init__(self, make: Callable[[], Any], closers: Closers, closer: Callable[[Any], _Closer]) -> None:
        self.value: Any = None
        self.error: BaseException | None = None
        self.what = closer(None).what
        self._make, self._closers, self._closer = make, closers, closer
        self._lock = threading.Lock()
        self._abandoned = self._ended = False
        self.thread = threading.Thread(target=self._run, name=f"routeplane-make-{self.what}", daemon=True)
        self._wake: Callable[[], object] = lambda: None

    def start(self, wake: Callable[[], object]) -> None:
        """Begin; ``wake`` is called once the thing exists or could not be made."""
        self._wake = wake
        self.thread.start()

    def abandon(self) -> bool:
        """Give up waiting; whether the thing does not exist yet."""
        with self._lock:
            self._abandoned = not self._ended
            return self._abandoned

    def _run(self) -> None:
        value: Any = None
        with _Outcome() as outcome:
            value = self._make()
        with self._lock:
            self.value, self.error, self._ended = value, outcome.error, True
            late = self._abandoned
            if self.error is None and not late:
                closer = self._closer(value)
                self._closers.add(closer.close, what=closer.what, timeout=closer.timeout)
        if self.error is None and late:
            with _Outcome():  # its start is over and was told that this is still being made
                _finished(self._closer(value).close())
        self._wake()


class Closers:
    """Closers in the order in which things came up.

    ``loop``: where the coroutine functions among them run, as long as it runs itself.

    Example::

        >>> closers = Closers()
        >>> closers.add(lambda: print("closed: a"), what="a")
        >>> closers.add(lambda: print("closed: b"), what="b")
        >>> closers.take_down()
        closed: b
        closed: a
        []
    """

    def __init__(self, *, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        self._closers: list[_Closer] = []
        self._making: list[_Making] = []

    def add(self, close: Callable[[], object], *, what: str, timeout: float = CLOSE_SECONDS) -> None:
        """Call ``close`` when everything comes down. Safe from any thread."""
        with self._lock:
            self._closers.append(_Closer(what=what, close=close, timeout=timeout))

    async def acquire(
        self, make: Callable[[], Any], close: Callable[[Any], object], *, what: str, timeout: float = CLOSE_SECONDS
    ) -> Any:
        """What ``make`` returns, registered with ``close`` at the moment it exists.

        ``make`` is a coroutine function, which undoes its own half-made work when it is cancelled, or a function, which
        runs in a thread of its own. ``close(value)`` may be a coroutine function. Raises what ``make`` raises.
        """

        def closer(value: Any) -> _Closer:
            return _Closer(what=what, close=lambda: close(value), timeout=timeout)

        if inspect.iscoroutinefunction(make):
            value = await make()
            self.add(closer(value).close, what=what, timeout=timeout)
            return value
        making = _Making(make, self, closer)
        loop, done = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the loop ended: teardown looks at the thread itself
                loop.call_soon_threadsafe(done.set)

        with self._lock:
            self._making.append(making)
        making.start(wake)
        await done.wait()
        if making.error is not None:
            raise making.error
        return making.value

    def take_down(self) -> list[Problem]:
        """Run every closer, last first, and empty the list; what failed or did not end. An interrupt ends nothing.

        Blocks for at most the sum of the closers' bounds. An interrupt that comes meanwhile is raised at the end.
        """
        problems: list[Problem] = []
        thread = threading.Thread(target=self._run_all, args=(problems,), name="routeplane-teardown")
        with interrupts_noted() as noted:
            thread.start()
            while thread.is_alive():
                thread.join(_POLL_SECONDS)
        if noted:
            raise KeyboardInterrupt(*[str(problem) for problem in problems])
        return problems

    async def take_down_in_loop(self) -> list[Problem]:
        """The same from a running loop, which goes on meanwhile; cancellation is remembered and raised at the end."""
        problems: list[Problem] = []
        loop, done = asyncio.get_running_loop(), asyncio.Event()

        def run() -> None:
            self._run_all(problems)
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(done.set)

        thread = threading.Thread(target=run, name="routeplane-teardown")
        thread.start()
        cancelled = False
        while not done.is_set():
            try:
                await done.wait()
            except asyncio.CancelledError:
                cancelled = True
        thread.join()  # it has said its last line
        if cancelled:
            raise asyncio.CancelledError(*[str(problem) for problem in problems])
        return problems

    def _run_all(self, problems: list[Problem]) -> None:
        with self._lock:
            making, self._making = self._making, []
        deadline = time.monotonic() + CLOSE_SECONDS
        for each in making:
            each.thread.join(max(0.0, deadline - time.monotonic()))
            if each.abandon():
                problems.append(_problem(each.what, f"expected to exist or fail within {CLOSE_SECONDS} s, got neither"))
        while True:
            with self._lock:
                closer = self._closers.pop() if self._closers else None
            if closer is None:
                return
            self._run_one(closer, problems)

    def _run_one(self, closer: _Closer, problems: list[Problem]) -> None:
        outcome = _Outcome()

        def run() -> None:
            with outcome:
                _finished(closer.close(), self._loop)

        thread = threading.Thread(target=run, name=f"routeplane-close-{closer.what}", daemon=True)
        thread.start()
        thread.join(closer.timeout)
        if thread.is_alive():
            problems.append(_problem(closer.what, f"expected to close within {closer.timeout} s, still closing"))
        elif outcome.error is not None:
            problems.append(_problem(closer.what, f"{type(outcome.error).__name__}: {outcome.error}"))


def _problem(what: str, message: str) -> Problem:
    return Problem(kind=ErrorKind.CLOSED, message=f"{what}: {message}")


def _finished(result: object, loop: asyncio.AbstractEventLoop | None = None) -> object:
    """The result of a closer; an awaitable one is awaited, in the loop that made it where that still runs."""
    if not inspect.isawaitable(result):
        return result

    async def wait() -> object:
        return await result

    if loop is not None and loop.is_running():
        return asyncio.run_coroutine_threadsafe(wait(), loop).result()
    return asyncio.run(wait())


@contextlib.contextmanager
def interrupts_noted(*, on_first: Callable[[], object] | None = None) -> Iterator[list[int]]:
    """Note SIGINT instead of raising KeyboardInterrupt, while the body runs; the list of what came.

    ``on_first``: called in the signal handler for the first one. Only the main thread receives signals: elsewhere, and
    where the handler is not Python's, nothing changes and the list stays empty.
    """
    noted: list[int] = []

    def note(number: int, _frame: object) -> None:
        noted.append(number)
        if on_first is not None and len(noted) == 1:
            on_first()

    main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGINT)
    if not main or before in (None, signal.SIG_IGN, signal.SIG_DFL):
        yield noted
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, before)
