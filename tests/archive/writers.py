"""What another process does to an archive in these tests: write until it is killed, or until the disk is full.

A program: ``python writers.py WHERE FIRST COUNT TOKENS [RUN]`` appends one run of COUNT records (0: without end), and
prints a line after each and one after the commit.
"""

from __future__ import annotations

import io
import itertools
import sys

from routeplane.archive import new_run
from tests.archive.archives import SPEC
from tests.stream.streams import record


def main(where: str, *, first: int, count: int, tokens: int, run: str | None) -> None:
    """Write and tell."""
    with new_run(where, SPEC, run=run, shard_bytes=1) as sink:
        sys.stdout.write("open\n")
        for index in itertools.islice(itertools.count(first), count or None):
            sink.write(record(index, tokens, spec=SPEC))
            sys.stdout.write(f"{index}\n")
    sys.stdout.write("committed\n")


if __name__ == "__main__":
    assert isinstance(sys.stdout, io.TextIOWrapper)
    sys.stdout.reconfigure(line_buffering=True)
    main(
        sys.argv[1],
        first=int(sys.argv[2]),
        count=int(sys.argv[3]),
        tokens=int(sys.argv[4]),
        run=sys.argv[5] if len(sys.argv) > 5 else None,
    )
