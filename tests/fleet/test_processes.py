"""Processes: descendants are found, the ended are told from the living, and a number that came again is another one."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

from routeplane.fleet.teardown import MARK, children_of, end_processes, is_alive, marked_with, process_of
from tests.fleet.workers import has_ended

#: A process with a child of its own; both say that they are there, and wait.
PARENT = """
import subprocess, sys
command = [sys.executable, "-c", "import signal; print(flush=True); signal.pause()"]
child = subprocess.Popen(command, stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
input()
"""


def test_grandchildren_are_found_and_ended() -> None:
    """Those that do not end by themselves are killed, and named."""
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        grandchild = int(parent.stdout.readline())
        found = children_of(os.getpid())
        assert {parent.pid, grandchild} <= {process.pid for process in found}
        [below] = [process for process in children_of(parent.pid) if process.pid == grandchild]
        assert is_alive(below)
        assert (below,) == end_processes([below, below], patience=0.0)
        parent.kill()
    assert has_ended(below)
    assert () == end_processes([below])


def test_orphans_are_found_by_the_mark_that_they_inherited() -> None:
    """The parent is killed: a child with another parent is found by its environment, and another mark finds none."""
    environment = {**os.environ, MARK: f"test-{os.getpid()}"}
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        grandchild = int(parent.stdout.readline())
        assert {parent.pid, grandchild} == {process.pid for process in marked_with(f"test-{os.getpid()}")}
        parent.kill()
    [orphan] = [process for process in marked_with(f"test-{os.getpid()}") if is_alive(process)]
    assert grandchild == orphan.pid
    assert () == marked_with(f"test-{os.getpid()}-other")
    assert (orphan,) == end_processes([orphan], patience=0.0)
    assert has_ended(orphan)


def test_a_number_that_came_again_is_another_process() -> None:
    """Only the process that was started then is ended."""
    mine = process_of(os.getpid())
    assert mine is not None
    assert is_alive(mine)
    other = replace(mine, started=mine.started - 1)
    assert not is_alive(other)
    assert () == end_processes([other], patience=0.0)


def test_a_number_without_a_process_has_no_children() -> None:
    """A process that is not there."""
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        pass
    assert () == children_of(gone.pid)
    assert process_of(gone.pid) is None
