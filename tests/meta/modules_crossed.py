"""The modules that the data path crosses: a profile of ``open_stream(path)`` to the first packed microbatch.

``python -m tests.meta.modules_crossed FOLDER`` prints them, one a line. A process of its own: a profile sees what was
called, and what an earlier test filled is called no more.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

from routeplane import new_stream, open_stream
from routeplane.batch import microbatches
from routeplane.testing.builders import watermarked_record, watermarked_spec

__all__ = ["crossed"]


def _read(path: Path) -> None:
    with open_stream(path) as reader:
        next(iter(microbatches(reader, tokens=64, layout="packed")))


def crossed(folder: Path) -> list[str]:
    """The modules of routeplane of which a function ran, below the package, sorted."""
    spec = watermarked_spec(layers=(1, 2, 4), top_k=2)
    path = folder / "a.arrows"
    with new_stream(path, spec) as sink:
        for index in range(3):
            sink.write(watermarked_record(index, num_tokens=12, spec=spec))
    _read(path)  # imports run functions too
    found: set[str] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        _, below, module = frame.f_code.co_filename.rpartition("/routeplane/")
        if event == "call" and below:
            found.add(module)

    sys.setprofile(note)
    try:
        _read(path)
    finally:
        sys.setprofile(None)
    return sorted(found)


if __name__ == "__main__":
    sys.stdout.write("\n".join(crossed(Path(sys.argv[1]))) + "\n")
