"""What of an archive is damaged, to the chunk.

Goes on after everything that can be wrong: a root, a commit, a run's manifest, a record table, a chunk. Each finding is
a Problem, with sample, token and layer where it has them. Reads one record at a time.

Axes: S tokens of a record, L captured layers, K top-k slots.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from routeplane.archive.assemble import Piece, read_record, route_ranges, token_ranges
from routeplane.archive.catalog import Catalog, Run
from routeplane.archive.chunks import Range
from routeplane.archive.commits import commit_numbers, newest, read_commit
from routeplane.archive.layout import ROOT, run_key
from routeplane.archive.manifest import Commit
from routeplane.archive.table import Row, TablePartReader, key_hash
from routeplane.errors import DataError, ErrorKind, FormatError, Problem
from routeplane.record.coverage import Coverage

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from routeplane.archive.store import ArchiveStore
    from routeplane.record.record import RouteRecord

__all__ = [
    "ArchiveCheck",
    "check_archive",
    "damaged_cells",
    "intact",
    "readable_commit",
    "record_problems",
    "rows_of",
]

Found = list[Problem]
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class ArchiveCheck:
    """The verdict on an archive. ``records`` and ``tokens`` count what is intact, ``damaged`` the records that are not.

    ``problems``: errors, and alarms for what is merely left over (files of a run that no commit names).
    """

    problems: tuple[Problem, ...]
    records: int = 0
    damaged: int = 0
    tokens: int = 0
    coverage: Coverage = field(default_factory=Coverage)

    @property
    def intact(self) -> bool:
        """Whether nothing was damaged or lost."""
        return not any(problem.severity == "error" for problem in self.problems)


# ----------------------------------------------------------------------------------------------------------------------
# The way down: root, commit, run, table, record
# ----------------------------------------------------------------------------------------------------------------------


def check_archive(
    store: ArchiveStore, *, options: Mapping[str, Any], look: Callable[[RouteRecord], Iterable[Problem]]
) -> ArchiveCheck:
    """Read everything and list what is wrong, and what ``look`` finds in intact records.

    Raises FileNotFoundError where nothing is.
    """
    problems: Found = []
    commit = readable_commit(store, problems)
    if commit is None:
        return ArchiveCheck(problems=tuple(problems))
    records = damaged = tokens = 0
    coverage = Coverage()
    for run in Catalog(store, commit, options=options).runs:
        for row in rows_of(run, problems):
            if row is None:
                damaged += 1
                continue
            record = intact(run, row)
            if isinstance(record, Exception):
                damaged += 1
                problems += record_problems(run, row, error=record)
                continue
            records, tokens = records + 1, tokens + record.num_tokens
            coverage = coverage.merge(record.coverage())
            problems += look(record)
        problems += _document_problems(store, run)
    problems += _leftovers(store, commit)
    return ArchiveCheck(problems=tuple(problems), records=records, damaged=damaged, tokens=tokens, coverage=coverage)


def readable_commit(store: ArchiveStore, problems: Found) -> Commit | None:
    """The newest commit that can be read; what is wrong on the way goes to ``problems``."""
    try:
        return newest(store)
    except FormatError as error:
        problems.append(_problem(error))
        if error.kind in (ErrorKind.NOT_ROUTEPLANE, ErrorKind.VERSION):
            return None
    for number in reversed(commit_numbers(store)):
        try:
            if (commit := read_commit(store, number)) is not None:
                return commit
        except FormatError as error:
            problems.append(_problem(error))
    return None


def rows_of(run: Run, problems: Found) -> Iterator[Row | None]:
    """The rows of a run's table; None for each record whose row cannot be read."""
    try:
        parts = run.manifest.parts
    except FormatError as error:
        problems.append(_problem(error))
        yield from itertools.repeat(None, run.entry.records)
        return
    keys = _or_none(run.keys, problems)
    first = 0
    for index, wanted in enumerate(parts):
        places = _or_none(partial(_places, run, first, first + wanted.records), problems)
        try:
            part = run.part(index)
        except FormatError as error:
            where = f"records {first} to {first + wanted.records - 1} of run {run.entry.name}"
            problems.append(_problem(error, what=f"{where}: "))
            yield from itertools.repeat(None, wanted.records)
        else:
            for local in range(wanted.records):
                known = None if keys is None else int(keys[first + local])
                row = _row(part, local, problems)
                if row is not None:
                    problems += _index_problems(row, known, None if places is None else places[local].tolist())
                yield row
        first += wanted.records


def _places(run: Run, first: int, last: int) -> NDArray[Any]:
    return run.chunks.read([Range(array="records", start=first, stop=last)])[0]


def _or_none(read: Callable[[], T], problems: Found) -> T | None:
    try:
        return read()
    except FormatError as error:
        problems.append(_problem(error))
        return None


def _row(part: TablePartReader, index: int, problems: Found) -> Row | None:
    try:
        return part.row(index)
    except DataError as error:
        problems.append(_problem(error))
        return None


def _index_problems(row: Row, known: int | None, place: list[int] | None) -> Iterator[Problem]:
    """Where a row of the table contradicts what stands beside it for faster finding."""
    for what, expected, got in (("a key that hashes to", known, key_hash(row.key)), ("places", place, list(row.place))):
        if expected is not None and expected != got:
            message = f"expected {what} {expected}, got {got}"
            yield Problem(kind=ErrorKind.MANIFEST, message=message, sample=row.sample_id)


def intact(run: Run, row: Row) -> RouteRecord | DataError | FormatError:
    """The record, verified, or what is wrong with it."""
    try:
        return read_record(run, row).verify()
    except (DataError, FormatError) as error:
        return error


def _document_problems(store: ArchiveStore, run: Run) -> Iterator[Problem]:
    """Arrays whose ``zarr.json`` is not the manifest's: harmless here, and wrong for readers without this library."""
    try:
        arrays = run.manifest.arrays
    except FormatError:
        return  # told already
    for name, entry in arrays.items():
        key = run_key(run.entry.name, f"{name}/{ROOT}")
        data = store.read(key)
        try:
            same = data is not None and json.loads(data) == entry.document
        except ValueError:
            same = False
        if not same:
            got = "none" if data is None else repr(data[:40])
            yield Problem(kind=ErrorKind.MANIFEST, message=f"expected the document of array {name}, got {got} @ {key}")


def _leftovers(store: ArchiveStore, commit: Commit) -> Iterator[Problem]:
    known = {entry.name for entry in commit.runs}
    for name in store.names("runs"):
        if name not in known and name != ROOT:
            message = f"expected runs that a commit names, got {name}: its writer died or is still writing"
            yield Problem(kind=ErrorKind.WRITER, message=message, severity="alarm")


def _problem(error: DataError | FormatError, *, what: str = "") -> Problem:
    return Problem(kind=error.kind, message=f"{what}{error.message}")


# ----------------------------------------------------------------------------------------------------------------------
# One record, chunk by chunk
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class _Cell:
    """A damaged chunk's share of one record: its own rows ``[first, last)``, of one slot or of all."""

    first: int
    last: int
    slot: int | None
    error: FormatError


def record_problems(run: Run, row: Row, *, error: DataError | FormatError) -> Iterator[Problem]:
    """Every damaged chunk of a record; where all chunks are intact, what the record itself says."""
    found = False
    for name, wrong in _damaged_columns(run, row):
        found = True
        yield Problem(kind=wrong.kind, message=f"{name}: {wrong.message}", sample=row.sample_id)
    for cell in damaged_cells(run, row):
        found = True
        yield Problem(
            kind=cell.error.kind,
            message=f"tokens {row.routes_start + cell.first} to {row.routes_start + cell.last - 1}: "
            f"{cell.error.message}",
            sample=row.sample_id,
            token=row.routes_start + cell.first,
            layer=None if cell.slot is None else run.spec.layer_ids[cell.slot],
        )
    if not found:
        listed = error.problems or (Problem(kind=error.kind, message=error.message),)
        yield from (replace(each, sample=row.sample_id) for each in listed)


def _damaged_columns(run: Run, row: Row) -> Iterator[tuple[str, FormatError]]:
    for wanted in token_ranges(run, row, piece=Piece.of(row, None)):
        error = _refusal(run, wanted)
        if error is not None:
            yield wanted.array, error


def damaged_cells(run: Run, row: Row) -> Iterator[_Cell]:
    """Damaged chunks of ``routes``: first all layers of 512 rows at once, then layer by layer where that fails."""
    chunk_rows = run.manifest.arrays["routes"].chunk_rows
    stop = row.row_start + row.num_rows
    for start in range(row.row_start // chunk_rows * chunk_rows, stop, chunk_rows):
        first, last = max(start, row.row_start), min(start + chunk_rows, stop)
        (whole,) = route_ranges(replace(Piece.of(row, None), first_row=first, last_row=last), None)
        error = _refusal(run, whole)
        if error is None:
            continue
        by_slot = {
            slot: wrong
            for slot in range(run.spec.num_layers)
            if (wrong := _refusal(run, replace(whole, slots=(slot, slot + 1)))) is not None
        }
        place = {"first": first - row.row_start, "last": last - row.row_start}
        if len(by_slot) in (0, run.spec.num_layers):
            yield _Cell(**place, slot=None, error=error)
        else:
            yield from (_Cell(**place, slot=slot, error=wrong) for slot, wrong in by_slot.items())


def _refusal(run: Run, wanted: Range) -> FormatError | None:
    try:
        run.chunks.read([wanted])
    except FormatError as error:
        return error
    return None
