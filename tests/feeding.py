"""What the tests of feeding share: small streams in files and in memory, workers without processes, records by number.

Every record says by its watermark which one it is.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from routeplane import new_stream
from routeplane.batch.dataset import RecordDataset
from routeplane.record.interfaces import Admission, admit
from routeplane.stream import StreamReport
from routeplane.testing.builders import watermarked_record, watermarked_spec

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from routeplane.record.record import RouteRecord
    from routeplane.record.spec import RouteSpec

__all__ = [
    "NUMBERS",
    "RECORDS",
    "SIZES",
    "SPEC",
    "TOTAL",
    "MemoryOpener",
    "groups",
    "indices",
    "save",
    "split",
    "take",
    "worker",
    "write",
    "write_all",
]

SPEC = watermarked_spec()
#: records of each stream; one has none
SIZES = (3, 0, 4, 2)
TOTAL = sum(SIZES)
RECORDS = [watermarked_record(sample, num_tokens=3 + sample % 4, spec=SPEC) for sample in range(TOTAL)]


def groups() -> list[list[RouteRecord]]:
    """The records of each stream."""
    edges = [sum(SIZES[:at]) for at in range(len(SIZES) + 1)]
    return [RECORDS[start:stop] for start, stop in pairwise(edges)]


def write(path: Path, records: Iterable[RouteRecord], *, spec: RouteSpec = SPEC) -> str:
    """A stream of these records."""
    with new_stream(path, spec) as sink:
        for record in records:
            sink.write(record)
    return str(path)


def write_all(folder: Path) -> list[str]:
    """All the streams, as files."""
    return [write(folder / f"{at}.arrows", records) for at, records in enumerate(groups())]


@dataclass
class MemorySource:
    """A source without files, so that properties can try many splits. Says whether it was closed."""

    records: list[RouteRecord]
    digest: str | None
    spec: RouteSpec = SPEC
    read: int = 0
    closed: bool = False

    def __iter__(self) -> Iterator[RouteRecord]:
        for record in self.records:
            self.read += 1
            yield record

    def select(self, *, layer_ids: Sequence[int] | None = None, tokens: tuple[int, int] | None = None) -> MemorySource:
        """Not asked for here."""
        raise NotImplementedError

    def admit(self, records: Sequence[RouteRecord]) -> Admission:
        """Admit all."""
        return admit(records, self.spec, max_missing=None)

    def report(self) -> StreamReport:
        """What was read."""
        return StreamReport(records=self.read)

    def close(self) -> None:
        """Close."""
        self.closed = True


@dataclass
class MemoryOpener:
    """Opens the streams by their number, and keeps every source that it opened."""

    digest: str | None = "0" * 16
    opened: list[MemorySource] = field(default_factory=list)

    def __call__(self, path: str) -> MemorySource:
        """The source of that number."""
        self.opened.append(MemorySource(groups()[int(path)], self.digest))
        return self.opened[-1]


NUMBERS = [str(at) for at in range(len(SIZES))]


@contextmanager
def worker(at: int, count: int) -> Iterator[None]:
    """As inside worker ``at`` of ``count`` of a DataLoader; with none, as outside. A real loader has a test below."""
    with pytest.MonkeyPatch.context() as patch:
        info = SimpleNamespace(id=at, num_workers=count) if count else None
        patch.setattr("routeplane.batch.dataset.get_worker_info", lambda: info)
        yield


def indices(records: Iterable[RouteRecord]) -> list[int]:
    """Which of RECORDS these are; by content, not by name alone."""
    found = []
    for record in records:
        index = int(record.sample_id.removeprefix("sample-"))
        assert record.equals(RECORDS[index])
        found.append(index)
    return found


def split(
    rank: int, world_size: int, *, place: tuple[int, int] = (0, 0), state: dict[str, Any] | None = None
) -> list[int]:
    """What a rank reads, or one of its workers; from a state on."""
    dataset = RecordDataset(NUMBERS, MemoryOpener(), rank=rank, world_size=world_size)
    if state is not None:
        dataset.load_state_dict(state)
    with worker(*place):
        return indices(dataset)


def save(dataset: RecordDataset, *, consumed: int | None = None) -> dict[str, Any]:
    """A state as it comes back from a JSON file."""
    state: dict[str, Any] = json.loads(json.dumps(dataset.state_dict(consumed=consumed)))
    return state


def take(records: Iterator[RouteRecord], count: int) -> list[int]:
    """The next few, and no further."""
    return indices(next(records) for _ in range(count))
