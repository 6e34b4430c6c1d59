"""A copy of what is intact: whole records as they are, damaged ones without the rows of their damaged chunks.

Knows what ``damage`` found; decides what can be kept of it. Writes a new archive and never the damaged one.

Axes: S tokens of a record, L captured layers, K top-k slots.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from routeplane.archive.assemble import Piece, build, joined, route_ranges, token_ranges
from routeplane.archive.catalog import Catalog, Run
from routeplane.archive.commits import check_root
from routeplane.archive.damage import damaged_cells, intact, readable_commit, record_problems, rows_of
from routeplane.archive.layout import ROOT, run_key
from routeplane.archive.manifest import Commit, RunEntry, RunManifest, file_hash
from routeplane.archive.writer import ArchiveWriter
from routeplane.errors import ChecksumError, DataError, ErrorKind, FormatError, Problem, UsageError
from routeplane.record.coverage import partial_states
from routeplane.record.spans import PRESENT_STATES, STATES, Capture
from routeplane.record.spec import RouteSpec

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from routeplane.archive.store import ArchiveStore
    from routeplane.archive.table import Row
    from routeplane.record.record import RouteRecord

__all__ = ["Recovery", "recover_records"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Recovery:
    """What was copied. ``intact``: records as they were; ``partial``: those of which some rows are kept; ``lost``:
    those of which nothing is."""

    intact: int
    partial: int
    lost: int
    problems: tuple[Problem, ...]


def recover_records(
    store: ArchiveStore, target: ArchiveStore, *, options: Mapping[str, Any], target_options: Mapping[str, Any]
) -> Recovery:
    """Copy run by run into a new archive; see ``routeplane.archive.recover``."""
    if target.names(""):
        raise UsageError(
            f"expected a new place, got one that holds something @ {target.where}", kind=ErrorKind.ARGUMENT
        )
    problems: list[Problem] = []
    commit = readable_commit(store, problems) or _rebuilt(store)
    counts = {"intact": 0, "partial": 0, "lost": 0}
    for run in Catalog(store, commit, options=options).runs:
        with ArchiveWriter(
            target, commit.spec, run=run.entry.name, attributes=_attributes(run), options=target_options
        ) as sink:
            for row in rows_of(run, problems):
                what, record = _salvaged(run, row, problems)
                counts[what] += 1
                if record is not None:
                    sink.write(record)
    return Recovery(**counts, problems=tuple(problems))


def _attributes(run: Run) -> Mapping[str, str]:
    try:
        return run.manifest.attributes
    except FormatError:
        return {}


def _rebuilt(store: ArchiveStore) -> Commit:
    """A commit of all runs whose manifests can be read, where no commit can be."""
    check_root(store)
    spec = json.loads(store.read(ROOT) or b"{}")["attributes"]["routeplane"]["spec"]
    entries = []
    for name in store.names("runs"):
        key = run_key(name, "records/manifest.json")
        data = store.read(key)
        if data is None:
            continue
        manifest = RunManifest.from_json(data, where=key)
        counts = {what: getattr(manifest, what) for what in ("records", "tokens", "rows", "digest")}
        entries.append(RunEntry(name=name, manifest=file_hash(data), bytes=manifest.nbytes, **counts))
    return Commit(number=1, spec=RouteSpec.from_json(json.dumps(spec)), runs=tuple(entries))


def _salvaged(run: Run, row: Row | None, problems: list[Problem]) -> tuple[str, RouteRecord | None]:
    if row is None:
        return "lost", None
    record = intact(run, row)
    if not isinstance(record, Exception):
        return "intact", record
    problems += record_problems(run, row, error=record)
    piece = Piece.of(row, None)
    try:
        ranges = token_ranges(run, row, piece=piece)
        beside = {wanted.array: values for wanted, values in zip(ranges, run.chunks.read(ranges), strict=True)}
        routes_SLK = _readable_rows(run, row)
        changes = {
            "captures": _lose_missing(row.captures, routes_SLK, routes_start=row.routes_start),
            "attributes": {**row.attributes, "recovered": "true"},
            "checksum": None,
        }
        return "partial", build(run, row, piece=piece, beside=beside, routes=routes_SLK, changes=changes)
    except (DataError, FormatError):
        return "lost", None


def _readable_rows(run: Run, row: Row) -> NDArray[np.int16]:
    """The rows of a record, those of damaged chunks MISSING."""
    spec = run.spec
    routes_SLK = spec.missing_rows(row.num_rows)
    bad = list(damaged_cells(run, row))
    if not bad:
        raise ChecksumError("expected a damaged chunk, got none: the record differs", kind=ErrorKind.CHECKSUM)
    chunk_rows = run.manifest.arrays["routes"].chunk_rows
    edges = sorted({0, row.num_rows, *range(-row.row_start % chunk_rows, row.num_rows, chunk_rows)})
    for first, last in itertools.pairwise(edges):
        lost = {cell.slot for cell in bad if cell.first == first}
        slots = [slot for slot in range(spec.num_layers) if slot not in lost]
        if None in lost or not slots:
            continue
        place = replace(Piece.of(row, None), first_row=row.row_start + first, last_row=row.row_start + last)
        routes_SLK[first:last, slots] = joined(run.chunks.read(route_ranges(place, slots)), spec)
    return routes_SLK


def _lose_missing(
    captures: tuple[Capture, ...], routes_SLK: NDArray[np.int16], *, routes_start: int
) -> Iterator[Capture]:
    """Captures for rows of which some are gone: tokens without any are lost, those with some are partial."""
    for capture in captures:
        first = max(capture.start, routes_start)
        if capture.state not in (*PRESENT_STATES, "partial") or first >= capture.stop:
            yield capture
            continue
        if capture.start < first:
            yield replace(capture, stop=first)
        states_S = partial_states(routes_SLK[first - routes_start : capture.stop - routes_start])
        edges = [0, *(np.flatnonzero(np.diff(states_S)) + 1).tolist(), len(states_S)]
        for a, b in itertools.pairwise(edges):
            found = STATES[int(states_S[a])]
            piece = replace(capture, start=first + a, stop=first + b)
            if found == "not_captured":
                yield replace(piece, state="lost", weights_version=None)
            else:
                yield replace(piece, state=capture.state if found == "captured" else "partial")
