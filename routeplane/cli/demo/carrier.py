"""What carries the demo's stream from the engine to the trainer: a file, or a folder of sealed blocks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from routeplane.stream import folder, new_stream, open_stream

if TYPE_CHECKING:
    from routeplane.record.interfaces import RouteSink
    from routeplane.record.spec import RouteSpec
    from routeplane.record.transfer import RecordReader

__all__ = ["carried_bytes", "engine_writer", "open_sink", "open_source"]

_RUN, _PRODUCER = "demo", "engine"


def open_sink(path: str, spec: RouteSpec, *, transport: str) -> RouteSink:
    """Open the sink that the engine's stage writes to."""
    if transport == "folder":
        return folder.open_writer(path, spec, run=_RUN, producer=_PRODUCER)
    return new_stream(path, spec, encoding="auto")


def open_source(path: str, *, transport: str) -> RecordReader:
    """Open the source that the trainer's stage reads."""
    if transport == "folder":
        return folder.open_reader(path, producers=1)
    return open_stream(path)


def engine_writer(path: str) -> dict[str, Any]:
    """Return what the writer inside an engine is told."""
    return {"place": path, "run": _RUN, "producer": _PRODUCER}


def carried_bytes(stream: str) -> int:
    """Return the bytes of the stream's files."""
    path = Path(stream)
    return sum(file.stat().st_size for file in ([path] if path.is_file() else path.rglob("*.arrows")))
