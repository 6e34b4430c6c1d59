"""Upkeep of an archive: list what is damaged, copy what is intact, delete records and runs, compact.

``verify`` goes on after everything that can be wrong: a root, a commit, a run's manifest, a record table, a chunk.
Each finding is a Problem, with sample, token and layer where it has them. ``recover`` writes a new archive and never
the damaged one. ``delete`` is a commit; ``compact`` removes the bytes. All of them read one record at a time.

Axes: S tokens of a record, L captured layers, K top-k slots.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar, TypeVar

import numpy as np
import xxhash

from routeplane.archive.layout import (
    ROOT,
    RUNS,
    Commit,
    Row,
    RunEntry,
    RunManifest,
    TablePartReader,
    file_hash,
    key_hash,
)
from routeplane.archive.reader import (
    Catalog,
    Piece,
    Run,
    beside_readers,
    build,
    check_root,
    commit_numbers,
    newest,
    read_beside,
    read_commit,
    read_record,
    route_ranges,
    widened,
)
from routeplane.archive.shards import Range
from routeplane.archive.writer import ArchiveWriter, RunFiles, drop_commits, publish
from routeplane.errors import ChecksumError, DataError, ErrorKind, FormatError, Problem, refused
from routeplane.record.aligned import BFLOAT16_NAN, AlignedColumn
from routeplane.record.counts import Counts, rule
from routeplane.record.record import RecordKey
from routeplane.record.spans import PRESENT_STATES, STATES, Capture, Coverage, partial_states
from routeplane.record.spec import RouteSpec
from routeplane.record.validate import missing_rows

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from routeplane.archive.store import ArchiveStore
    from routeplane.record.record import RouteRecord

__all__ = [
    "ArchiveCheck",
    "Compaction",
    "Recovery",
    "check_archive",
    "compact_archive",
    "delete_records",
    "recover_records",
]

Found = list[Problem]
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class ArchiveCheck(Counts):
    """The verdict on an archive. ``records`` and ``tokens`` count what is intact, ``damaged`` the records that are not.

    ``problems``: errors, and alarms for what is merely left over (files of a run that no commit names).

    >>> ArchiveCheck(records=3).intact
    True
    """

    SCOPE: ClassVar[str] = "archive_"

    problems: tuple[Problem, ...] = ()
    records: int = field(default=0, metadata=rule(scalar=None))  # the coverage's own
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
    store: ArchiveStore, *, expected_snapshot: str | None, look: Callable[[RouteRecord], Iterable[Problem]]
) -> ArchiveCheck:
    """Read everything and list what is wrong, and what ``look`` finds in intact records.

    Raises FileNotFoundError where nothing is.
    """
    problems: Found = []
    commit = readable_commit(store, problems, expected_snapshot=expected_snapshot)
    if commit is None:
        return ArchiveCheck(problems=tuple(problems))
    records = damaged = tokens = 0
    coverage = Coverage()
    for run in Catalog(store, commit).runs:
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


def readable_commit(store: ArchiveStore, problems: Found, *, expected_snapshot: str | None = None) -> Commit | None:
    """Return the newest commit that can be read; what is wrong on the way goes to ``problems``."""
    try:
        return newest(store, expected_snapshot=expected_snapshot)
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
    removed, first = set(run.entry.removed), 0
    for index, wanted in enumerate(parts):
        numbers = [number for number in range(first, first + wanted.records) if number not in removed]
        try:
            part = run.part(index)
        except FormatError as error:
            where = f"records {first} to {first + wanted.records - 1} of run {run.entry.name}"
            problems.append(_problem(error, what=f"{where}: "))
            yield from itertools.repeat(None, len(numbers))
        else:
            for number in numbers:
                row = _row(part, number - first, problems)
                if row is not None and keys is not None and int(keys[number]) != key_hash(row.key):
                    message = f"expected a key that hashes to {keys[number]}, got {key_hash(row.key)}"
                    problems.append(Problem(kind=ErrorKind.MANIFEST, message=message, sample=row.sample_id))
                yield row
        first += wanted.records


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


def intact(run: Run, row: Row) -> RouteRecord | DataError | FormatError:
    """The record, verified, or what is wrong with it."""
    try:
        return read_record(run, row, verify=True)
    except (DataError, FormatError) as error:
        return error


def _document_problems(store: ArchiveStore, run: Run) -> Iterator[Problem]:
    """Arrays whose ``zarr.json`` is not the manifest's: harmless here, and wrong for readers without this library."""
    try:
        arrays = run.manifest.arrays
    except FormatError:
        return  # told already
    for name, entry in arrays.items():
        key = run.entry.key(f"{name}/{ROOT}")
        data = store.read(key)
        try:
            same = data is not None and json.loads(data) == entry.document
        except ValueError:
            same = False
        if not same:
            got = "none" if data is None else repr(data[:40])
            yield Problem(kind=ErrorKind.MANIFEST, message=f"expected the document of array {name}, got {got} @ {key}")


def _leftovers(store: ArchiveStore, commit: Commit) -> Iterator[Problem]:
    known = {entry.folder for entry in commit.runs}
    for name in store.names(RUNS):
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


def _damaged_columns(run: Run, row: Row) -> Iterator[tuple[str, FormatError | DataError]]:
    for name, read in beside_readers(run, row, piece=Piece.of(row, None)).items():
        try:
            read()
        except (DataError, FormatError) as error:
            yield name, error


def damaged_cells(run: Run, row: Row) -> Iterator[_Cell]:
    """Damaged chunks of ``routes``: first all layers of 512 rows at once, then layer by layer where that fails."""
    chunk_rows = run.chunks.layout("routes").chunk_rows
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
        run.chunks.read(wanted)
    except FormatError as error:
        return error
    return None


# ----------------------------------------------------------------------------------------------------------------------
# What is intact, in a new archive
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Recovery(Counts):
    """What was copied. ``intact``: records as they were; ``partial``: those of which some rows are kept; ``lost``:
    those of which nothing is.

    >>> Recovery(intact=2, lost=1).merge(Recovery(intact=1)).intact
    3
    """

    SCOPE: ClassVar[str] = "archive_recovered_"

    intact: int = 0
    partial: int = 0
    lost: int = 0
    problems: tuple[Problem, ...] = ()


def recover_records(store: ArchiveStore, target: ArchiveStore) -> Recovery:
    """Copy run by run into a new archive; see ``routeplane.archive.recover``."""
    if target.names(""):
        raise refused("a new place", f"one that holds something @ {target.where}")
    problems: Found = []
    commit = readable_commit(store, problems) or _rebuilt(store)
    counts = {"intact": 0, "partial": 0, "lost": 0}
    for run in Catalog(store, commit).runs:
        with ArchiveWriter(target, commit.spec, run=run.entry.name, attributes=_attributes(run)) as sink:
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
    for folder in store.names(RUNS):
        key = f"{RUNS}/{folder}/records/manifest.json"
        data = store.read(key)
        if data is None:
            continue
        manifest = RunManifest.from_json(data, where=key)
        counts = {what: getattr(manifest, what) for what in ("name", "records", "tokens", "rows", "digest")}
        entries.append(RunEntry(folder=folder, manifest=file_hash(data), bytes=manifest.nbytes, **counts))
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
        beside = read_beside(run, row, piece=piece)
        routes_SLK = _readable_rows(run, row)
        beside["columns"] = _blanked(beside["columns"], routes_SLK)
        changes = {
            "captures": _lose_missing(row.captures, routes_SLK, routes_start=row.routes_start),
            "attributes": {**row.attributes, "recovered": "true"},
            "checksum": None,
        }
        return "partial", build(run, row, piece=piece, beside=beside, stored=routes_SLK, changes=changes)
    except (DataError, FormatError):
        return "lost", None


def _blanked(columns: Mapping[str, AlignedColumn], routes_SLK: NDArray[np.int16]) -> dict[str, AlignedColumn]:
    """The columns with NaN as the routing weights of rows that are MISSING."""
    found = dict(columns)
    if "route_weights" in found:
        weights = found["route_weights"]
        values = weights.values.copy()
        values[len(values) - len(routes_SLK) :][missing_rows(routes_SLK)] = (
            BFLOAT16_NAN if values.dtype == np.uint16 else np.nan
        )
        values.flags.writeable = False
        found["route_weights"] = replace(weights, values=values)
    return found


def _readable_rows(run: Run, row: Row) -> NDArray[np.int16]:
    """The rows of a record, those of damaged chunks MISSING."""
    spec = run.spec
    routes_SLK = spec.missing_rows(row.num_rows)
    bad = list(damaged_cells(run, row))
    if not bad:
        raise ChecksumError("expected a damaged chunk, got none: the record differs", kind=ErrorKind.CHECKSUM)
    chunk_rows = run.chunks.layout("routes").chunk_rows
    edges = sorted({0, row.num_rows, *range(-row.row_start % chunk_rows, row.num_rows, chunk_rows)})
    for first, last in itertools.pairwise(edges):
        lost = {cell.slot for cell in bad if cell.first == first}
        slots = [slot for slot in range(spec.num_layers) if slot not in lost]
        if None in lost or not slots:
            continue
        place = replace(Piece.of(row, None), first_row=row.row_start + first, last_row=row.row_start + last)
        found = [run.chunks.read(each) for each in route_ranges(place, slots)]
        routes_SLK[first:last, slots] = widened(np.concatenate(found, axis=1), spec)
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


# ----------------------------------------------------------------------------------------------------------------------
# Deletion
# ----------------------------------------------------------------------------------------------------------------------


def delete_records(store: ArchiveStore, *, keys: Sequence[tuple[str, int, int]], runs: Sequence[str]) -> Commit:
    """Commit an archive without some records and runs; see ``routeplane.archive.delete``."""
    wanted = [RecordKey(*key) for key in keys]
    return publish(store, newest(store), change=lambda commit: _without(store, commit, keys=wanted, runs=runs))


def _without(
    store: ArchiveStore, commit: Commit, *, keys: Sequence[RecordKey], runs: Sequence[str]
) -> tuple[RunEntry, ...]:
    absent = set(runs) - {entry.name for entry in commit.runs}
    if absent:
        raise KeyError(f"expected runs of the archive, got {sorted(absent)} @ {store.where}")
    catalog = Catalog(store, commit)
    removed: dict[str, set[int]] = {}
    for key in keys:
        number = catalog.find(key)
        if number is None:
            raise KeyError(key)
        run, position = catalog.position(number)
        removed.setdefault(run.entry.name, set()).add(position)
    _refuse_orphans(catalog, removed, runs=runs)
    kept = (
        _shortened(run, removed[run.entry.name]) if run.entry.name in removed else run.entry
        for run in catalog.runs
        if run.entry.name not in runs
    )
    return tuple(entry for entry in kept if entry is not None)


def _refuse_orphans(catalog: Catalog, removed: Mapping[str, set[int]], *, runs: Sequence[str]) -> None:
    """Raise DataError where a record that stays has rows in one that is deleted."""
    gone: set[tuple[str, int, int]] = set()
    needed: dict[tuple[str, int, int], str] = {}
    for run in catalog.runs:
        table = run.table().select(["sample_id", "attempt", "segment", "prefix"]).to_pylist()
        positions = run.positions.tolist()
        for position, row in zip(positions, table, strict=True):
            key = row["sample_id"], row["attempt"], row["segment"]
            if run.entry.name in runs or position in removed.get(run.entry.name, ()):
                gone.add(key)
            elif row["prefix"] is not None:
                prefix = row["prefix"]
                needed[prefix["sample_id"], prefix["attempt"], prefix["segment"]] = str(key)
    orphans = [f"{needed[key]} continues {key}" for key in sorted(gone & needed.keys())]
    if orphans:
        raise DataError(
            f"expected records that no other one continues, got {len(orphans)} that are continued: "
            f"{'; '.join(orphans[:4])}: delete these too",
            kind=ErrorKind.PREFIX,
        )


def _shortened(run: Run, positions: set[int]) -> RunEntry | None:
    """The entry of a run without some records; None where none is left."""
    entry = run.entry
    removed = tuple(sorted({*entry.removed, *positions}))
    left = replace(entry, removed=removed, records=entry.records + len(entry.removed) - len(removed))
    if not left.records:
        return None
    table = Run(run.store, entry=left, spec=run.spec).table()
    digest, tokens = xxhash.xxh3_64(), table["num_tokens"].to_numpy()
    for checksum in table["checksum"].to_pylist():
        digest.update(checksum.to_bytes(8, "little"))
    rows = int((tokens - table["routes_start"].to_numpy()).sum())
    return replace(left, tokens=int(tokens.sum()), rows=rows, digest=f"{digest.intdigest():016x}")


# ----------------------------------------------------------------------------------------------------------------------
# Compaction
# ----------------------------------------------------------------------------------------------------------------------


def _last(_: str, later: str) -> str:
    return later


@dataclass(frozen=True, kw_only=True, slots=True)
class Compaction(Counts):
    """What was removed. ``rewritten``: names of runs that lost records; ``records``: those records; ``folders``: run
    folders that were deleted, those of dead writers among them; ``snapshot``: the archive's since, of the last call.

    >>> Compaction(records=2).merge(Compaction(records=1)).records
    3
    """

    SCOPE: ClassVar[str] = "archive_compacted_"

    rewritten: tuple[str, ...] = ()
    records: int = 0
    folders: tuple[str, ...] = ()
    snapshot: str = field(default="", metadata=rule(scalar=None, merge=_last))


def compact_archive(store: ArchiveStore, *, grace_s: float) -> Compaction:
    """Rewrite runs that have deleted records, and delete files that no commit names; see
    ``routeplane.archive.compact``."""
    base = newest(store)
    once = _folders_named(store)
    made: dict[str, RunEntry] = {}
    files: list[RunFiles] = []
    try:
        for run in Catalog(store, base).runs:
            if run.entry.removed:
                files.append(RunFiles(store, base.spec, run=run.entry.name, attributes=run.manifest.attributes))
                made[run.entry.manifest] = _copied(run, files[-1])
        # a run that lost more records meanwhile is left to the next call
        before = {entry.manifest: entry for entry in base.runs}
        commit = base
        if made:
            commit = publish(
                store,
                base,
                change=lambda found: tuple(
                    made[entry.manifest] if made.get(entry.manifest) and before[entry.manifest] == entry else entry
                    for entry in found.runs
                ),
            )
    except BaseException:
        for each in files:
            each.delete()
        raise
    named = {entry.folder for entry in newest(store).runs}
    drop_commits(store, before=commit.number)
    taken = tuple(entry for entry in made.values() if entry.folder in named)
    folders = tuple(
        name
        for name in store.names(RUNS)
        if name not in {*named, ROOT} and (name in once or _is_old(store, name, grace_s))
    )
    for folder in folders:
        store.delete(f"{RUNS}/{folder}")
    removed = {entry.name: len(entry.removed) for entry in base.runs}
    return Compaction(
        rewritten=tuple(entry.name for entry in taken),
        records=sum(removed[entry.name] for entry in taken),
        folders=folders,
        snapshot=commit.snapshot,
    )


def _copied(run: Run, files: RunFiles) -> RunEntry:
    """Write the records that are left of a run, verified."""
    for row in run.rows():
        files.write(read_record(run, row, verify=True))
    return files.finish()


def _folders_named(store: ArchiveStore) -> set[str]:
    """Folders of runs that a commit names or named: none of them is still being written."""
    commits = [read_commit(store, number) for number in commit_numbers(store)]
    return {entry.folder for commit in commits if commit is not None for entry in commit.runs}


def _is_old(store: ArchiveStore, folder: str, grace_s: float) -> bool:
    return store.modified(f"{RUNS}/{folder}") <= time.time() - grace_s
