"""What another process does to an archive in these tests: write until it is killed, or commit run after run.

Programs: ``python writers.py write WHERE FIRST COUNT TOKENS RUN`` appends one run of COUNT records (0: without end),
and prints a line after each and one after the commit. ``python writers.py commit WHERE FIRST COUNT`` saves COUNT runs
of one record, and prints the keys that were acknowledged. ``python writers.py add WHERE PLACE DIES_AT`` adds the blocks
of a folder, two a run, and kills itself where it would send acknowledgement DIES_AT (-1: never). ``OPTIONS`` in the
environment: JSON for an object store.
"""

from __future__ import annotations

import io
import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from routeplane.archive import add_blocks, new_run, save_archive
from routeplane.record.interfaces import Position
from routeplane.stream import folder
from tests.archive.archives import SPEC
from tests.stream.streams import record

__all__ = ["start"]


def start(*arguments: object, options: dict[str, Any] | None = None) -> subprocess.Popen[str]:
    """Start one of the programs; its lines come from ``stdout``."""
    command = [sys.executable, str(Path(__file__)), *map(str, arguments)]
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "OPTIONS": json.dumps(options),
    }
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def write(where: str, *, first: int, count: int, tokens: int, run: str, options: Any) -> None:
    """Write one run and tell."""
    with new_run(where, SPEC, run=run, shard_bytes=1, options=options) as sink:
        sys.stdout.write("open\n")
        for index in itertools.islice(itertools.count(first), count or None):
            sink.write(record(index, tokens, spec=SPEC))
            sys.stdout.write(f"{index}\n")
    sys.stdout.write("committed\n")


def commit(where: str, *, first: int, count: int, options: Any) -> None:
    """Save runs of one record each, and tell what was acknowledged."""
    for index in range(first, first + count):
        save_archive([record(index, 5, spec=SPEC)], where, spec=SPEC, run=f"run-{index}", options=options)
        sys.stdout.write(f"{index}\n")


def add(where: str, *, place: str, dies_at: int, options: Any) -> None:
    """Add blocks, and die behind a commit."""
    with folder.open_reader(place, group="archive", producers=2, follow=False) as reader:
        acknowledge, sent = reader.acknowledge, itertools.count()

        def acknowledge_or_die(position: Position) -> None:
            if next(sent) == dies_at:
                os.kill(os.getpid(), signal.SIGKILL)
            acknowledge(position)
            sys.stdout.write("acknowledged\n")

        setattr(reader, "acknowledge", acknowledge_or_die)  # noqa: B010  mypy refuses to assign to a method
        add_blocks(reader, where, blocks_per_run=2, options=options)


def main() -> None:
    """Run what the arguments say."""
    assert isinstance(sys.stdout, io.TextIOWrapper)
    sys.stdout.reconfigure(line_buffering=True)
    options = json.loads(os.environ["OPTIONS"])
    program, where, *rest = sys.argv[1:]
    if program == "commit":
        commit(where, first=int(rest[0]), count=int(rest[1]), options=options)
    elif program == "add":
        add(where, place=rest[0], dies_at=int(rest[1]), options=options)
    else:
        first, count, tokens = map(int, rest[:3])
        write(where, first=first, count=count, tokens=tokens, run=rest[3], options=options)


if __name__ == "__main__":
    main()
