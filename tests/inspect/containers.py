"""The same records in each container that rests on a disk: in a stream, in an archive, and split over one of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from routeplane.archive import save_archive
from routeplane.record.record import RouteRecord
from routeplane.stream import new_stream

__all__ = ["PLACINGS", "archived", "streamed"]


def streamed(path: Path, records: Sequence[RouteRecord], *, max_bytes: int = 2**20) -> str:
    """A stream of these, one batch or as ``max_bytes`` cuts."""
    with new_stream(path, records[0].spec, max_bytes=max_bytes) as sink:
        for record in records:
            sink.write(record)
    return str(path)


def archived(path: Path, records: Sequence[RouteRecord]) -> str:
    """An archive of these, in two runs."""
    for part in (records[: len(records) // 2], records[len(records) // 2 :]):
        save_archive(part, path, spec=records[0].spec)
    return str(path)


def _in_stream(folder: Path, records: Sequence[RouteRecord]) -> list[str]:
    return [streamed(folder / "run.arrows", records, max_bytes=1)]


def _in_archive(folder: Path, records: Sequence[RouteRecord]) -> list[str]:
    return [archived(folder / "run.zarr", records)]


def _in_both(folder: Path, records: Sequence[RouteRecord]) -> list[str]:
    middle = len(records) // 2
    return [archived(folder / "a.zarr", records[:middle]), streamed(folder / "b.arrows", records[middle:])]


#: Name -> what lays records out below a folder and says where, in their order.
PLACINGS: dict[str, Callable[[Path, Sequence[RouteRecord]], list[str]]] = {
    "stream": _in_stream,
    "archive": _in_archive,
    "both": _in_both,
}
