"""Forked processes that write to and read from a folder of blocks, to be killed; each appends lines to a log.

A writer seals each record as a block and logs its number when ``write`` has returned. A reader logs each record's
checksum and name, and ``complete``.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

from routeplane.stream import folder
from routeplane.stream.blocks import BlockLimits, ReadOptions
from routeplane.testing.builders import SPEC, sample

__all__ = ["Actor", "name_of", "read", "write"]

_FORK = multiprocessing.get_context("fork")


class Actor:
    """A process of one role that may be started again and again, and the log that all of them append to."""

    def __init__(self, log: Path, work: Callable[[Callable[[str], None], list[str]], None]) -> None:
        self.log, self._work = log, work
        self.process: BaseProcess | None = None

    def lines(self) -> list[str]:
        """What was logged so far."""
        return self.log.read_text().split("\n")[:-1] if self.log.exists() else []

    def start(self) -> None:
        """Start a process; it is told what was logged before."""
        self.process = _FORK.Process(target=self._run, args=(self.lines(),))
        self.process.start()

    def _run(self, before: list[str]) -> None:
        descriptor = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

        def say(line: str) -> None:
            os.write(descriptor, f"{line}\n".encode())

        self._work(say, before)

    @property
    def is_done(self) -> bool:
        """Whether it ended by itself."""
        return self.process is not None and self.process.exitcode == 0

    def kill(self) -> None:
        """Kill it, and wait for its end."""
        if self.process is not None:
            self.process.kill()
            self.process.join()

    def join(self) -> None:
        """Wait for its end."""
        if self.process is not None:
            self.process.join(60.0)


def name_of(producer: str, index: int) -> str:
    """The sample id of a producer's record."""
    return f"{producer}-{index}"


def write(
    place: Path, producer: str, *, count: int, tokens: int, limits: BlockLimits
) -> Callable[[Callable[[str], None], list[str]], None]:
    """The work of a writer: go on behind the last record that was logged."""

    def work(say: Callable[[str], None], before: list[str]) -> None:
        first = int(before[-1]) + 1 if before else 0
        with folder.open_writer(place, SPEC, run="kills", producer=producer, limits=limits) as writer:
            for index in range(first, count):
                writer.write(sample(index, tokens=tokens, sample_id=name_of(producer, index)))
                say(f"{index}")

    return work


def read(place: Path, producers: list[str]) -> Callable[[Callable[[str], None], list[str]], None]:
    """The work of a reader: everything that was not acknowledged."""

    def work(say: Callable[[str], None], before: list[str]) -> None:
        del before
        options = ReadOptions(on_vanished="wait", timeout_s=60.0)
        with folder.open_reader(place, producers=producers, options=options) as reader:
            for record in reader:
                say(f"{record.checksum:016x} {record.sample_id}")
            say("complete" if reader.report().complete else "incomplete")

    return work
