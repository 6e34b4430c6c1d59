"""Processes of this machine, as the kernel lists them: whose child is whose, who bears a mark, and whether it is gone.

Reads ``/proc``; knows no actor. Used so that a fleet that was taken down leaves no process behind. A mark is a variable
of the environment that a process was started with: its descendants inherit it, and keep it where it dies before them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["MARK", "Process", "children_of", "end_processes", "is_alive", "marked_with", "process_of"]

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
