"""A carrier for the tests of the engine's writer: one stream per block in a folder, with faults by switch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from routeplane.record.record import RouteRecord
from routeplane.record.spec import RouteSpec
from routeplane.stream import new_stream, open_stream

__all__ = ["BlockFiles", "open_writer", "records_of"]


class BlockFiles:
    """Blocks ``{run}-{producer}-{number}.arrows``. While ``{folder}/full`` exists, sealing fails as on a full disk."""

    def __init__(self, folder: Path, spec: RouteSpec, stem: str) -> None:
        self.folder, self.spec, self.stem = folder, spec, stem
        self.sink: Any = None
        self.records = 0

    def write(self, record: RouteRecord) -> None:
        """Add a record to the present block."""
        if self.sink is None:
            number = len(list(self.folder.glob(f"{self.stem}-*.arrows")))
            self.path = self.folder / f"{self.stem}-{number:06d}.arrows"
            self.sink = new_stream(self.path, self.spec)
        self.sink.write(record)
        self.records += 1

    def flush(self) -> str | None:
        """Publish the present block."""
        if (self.folder / "full").exists():
            if self.sink is not None:
                self.sink.abort()
            raise OSError(28, "No space left on device")
        if self.sink is None:
            return None
        self.sink.close()
        self.sink = None
        return self.path.name

    def close(self) -> None:
        """Seal, and mark the end."""
        self.flush()
        (self.folder / f"{self.stem}.closed").touch()


def open_writer(place: str, spec: RouteSpec, *, run: str, producer: str) -> BlockFiles:
    """What a ``WriterConfig`` names as its carrier."""
    return BlockFiles(Path(place), spec, f"{run}-{producer}")


def records_of(folder: Path) -> dict[str, RouteRecord]:
    """All records of all blocks, by sample."""
    blocks = sorted(folder.glob("*.arrows"))
    return {record.sample_id: record for block in blocks for record in open_stream(block)}
