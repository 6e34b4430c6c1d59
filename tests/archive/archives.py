"""What the archive tests share: archives of records with something in every column, and where damage is done.

Axes: S tokens, L layers, K slots.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from routeplane.archive import save_archive
from routeplane.record.record import Prefix, RouteRecord
from routeplane.record.spec import RouteSpec
from tests.stream.streams import record

__all__ = ["SPEC", "WIDE", "files", "flip", "rich_records", "run_folder", "saved", "shard_files", "sized"]

#: One byte per id, three layers of which two are neighbours.
SPEC = RouteSpec(num_experts=64, top_k=2, layer_ids=(1, 4, 5), model="tests/archive")
#: Two bytes per id.
WIDE = RouteSpec(num_experts=400, top_k=3, layer_ids=(0, 2), model="tests/wide")


def sized(lengths: Sequence[int], *, first: int = 0, spec: RouteSpec = SPEC, **changes: Any) -> list[RouteRecord]:
    """One record of each length."""
    return [record(first + index, length, spec=spec, **changes) for index, length in enumerate(lengths)]


def rich_records(*, spec: RouteSpec = SPEC) -> list[RouteRecord]:
    """Records with a group, log-probabilities or none, token columns, attributes, a slice, and a shared prefix."""
    columns = {"a/b": np.arange(7, dtype=np.int16), "../c": np.asarray([True, False] * 3 + [True])}
    plain = record(1, 7, spec=spec, group="g", columns=columns, attributes={"k": "v", "slice": "5:12"})
    scored = record(
        2, 7, spec=spec, columns=columns, logprobs=np.asarray([np.nan, *[-1.5] * 6], dtype=np.float32), attempt=3
    )
    other = record(1, 7, spec=spec, columns=columns)
    shared = Prefix(sample_id="sample-1", stop=3, checksum=plain.checksum)
    tail = record(1, 7, spec=spec, columns=columns, segment=8, routes=other.routes[3:], routes_start=3, prefix=shared)
    return [plain, scored, tail]


def saved(where: Path, records: Sequence[RouteRecord], *, spec: RouteSpec = SPEC, **options: Any) -> Path:
    """An archive of one run called ``run`` with these records."""
    save_archive(records, where, spec=spec, **{"run": "run", **options})
    return where


def run_folder(where: Path, run: str = "run") -> Path:
    """The folder of a run; the name of a folder is the run's and a suffix."""
    (found,) = (where / "runs").glob(f"{run}-????????????")
    return found


def files(where: Path) -> list[Path]:
    """Every file of an archive, sorted."""
    return sorted(path for path in where.rglob("*") if path.is_file())


def shard_files(where: Path, array: str = "routes", *, run: str = "run") -> list[Path]:
    """The shards of an array, in order."""
    document = json.loads((run_folder(where, run) / array / "zarr.json").read_text())
    folder = run_folder(where, run) / array / "c"
    below = "/0" * (len(document["shape"]) - 1)
    return [Path(f"{folder}/{index}{below}") for index in range(len(os.listdir(folder)))]


def flip(path: Path, position: int, mask: int = 0x10) -> None:
    """Change bits of one byte; negative positions count from the end."""
    data = bytearray(path.read_bytes())
    data[position] ^= mask
    path.write_bytes(data)


def every_flip(size: int, *, step: int) -> Iterator[tuple[int, int]]:
    """Places of one flipped bit, all over a file; the bit goes round."""
    return ((position, 1 << position % 8) for position in range(0, size, step))
