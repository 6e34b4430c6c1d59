"""Records rest: an archive in zarr v3, appended to by run, read at random, in a folder or behind a URL.

``save_archive`` writes, ``open_archive`` reads, ``verify`` lists damage, ``recover`` keeps what is intact, ``delete``
and ``compact`` remove records and runs. This file only picks the place. Needs the extra ``zarr``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

from routeplane.archive.layout import ARCHIVE_VERSION, DEFAULT_SHARD_BYTES, Commit, RunEntry
from routeplane.archive.reader import Archive, ArchiveReader, Catalog, newest
from routeplane.archive.store import ArchiveStore, LocalFolder
from routeplane.archive.upkeep import (
    ArchiveCheck,
    Compaction,
    Recovery,
    check_archive,
    compact_archive,
    delete_records,
    recover_records,
)
from routeplane.archive.writer import AddReport, ArchiveWriter, add_from
from routeplane.errors import Problem, refused
from routeplane.record.interfaces import BlockSource
from routeplane.record.policy import ReadPolicy
from routeplane.record.record import RouteRecord
from routeplane.record.spec import RouteSpec

__all__ = [
    "ARCHIVE_VERSION",
    "AddReport",
    "Archive",
    "ArchiveCheck",
    "ArchiveReader",
    "ArchiveWriter",
    "Commit",
    "Compaction",
    "Recovery",
    "RunEntry",
    "add_blocks",
    "compact",
    "delete",
    "new_run",
    "open_archive",
    "recover",
    "save_archive",
    "verify",
]

#: Seconds that an unfinished run may be silent before ``compact`` takes its writer for dead.
GRACE_S = 86_400.0


def save_archive(
    records: Iterable[RouteRecord],
    store: str | os.PathLike[str],
    *,
    spec: RouteSpec,
    run: str | None = None,
    attributes: Mapping[str, str] | None = None,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    options: Mapping[str, Any] | None = None,
) -> Commit:
    """Append records to an archive as one run, and commit; make the archive where there is none.

    All of them or none: until this returns, and if it raises or its process dies, the archive is what it was. The
    records are iterated once, and at most one shard of each array is held.

    Args:
        records: What to save; keys that the archive has are refused.
        store: As in ``new_run``, and so ``run``, ``attributes``, ``shard_bytes``, ``options``.
        spec: The geometry of all records of the archive.

    Returns:
        The commit. Keep its ``snapshot`` elsewhere to notice an archive that was set back.

    Raises:
        Exception: As ``new_run`` and ``RouteSink.write``; DataError (DUPLICATE_KEY) too where another writer committed
            one of these records meanwhile.

    >>> import tempfile
    >>> from routeplane.testing.builders import watermarked_record, watermarked_spec
    >>> spec = watermarked_spec()
    >>> records = [watermarked_record(index, num_tokens=20, spec=spec) for index in range(3)]
    >>> commit = save_archive(records, tempfile.mkdtemp(), spec=spec, run="step-1")
    >>> commit.number, [(run.name, run.records, run.tokens) for run in commit.runs]
    (1, [('step-1', 3, 60)])
    """
    with new_run(store, spec, run=run, attributes=attributes, shard_bytes=shard_bytes, options=options) as sink:
        for record in records:
            sink.write(record)
    if sink.commit is None:
        raise RuntimeError("a run that was closed has a commit")
    return sink.commit


def new_run(
    store: str | os.PathLike[str],
    spec: RouteSpec,
    *,
    run: str | None = None,
    attributes: Mapping[str, str] | None = None,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    options: Mapping[str, Any] | None = None,
) -> ArchiveWriter:
    """Make a RouteSink that appends one run to an archive; ``close`` commits it, ``abort`` leaves no trace of it.

    Writers may write at once: the later one to commit sees what the earlier did. What a dead writer left is not part of
    the archive, and ``compact`` deletes it.

    Args:
        store: A path, or the URL of an object store (``s3://``, ``gs://``, ``az://``).
        spec: The geometry of all records of the archive.
        run: The run's name, at most 100 letters, digits, ``_`` and ``-``; default one that no other has.
        attributes: Text about the run.
        shard_bytes: Bytes of one shard of routes before compression, which is what the writer holds.
        options: What ``obstore.store.from_url`` takes for a URL: credentials, endpoint, region.

    Returns:
        The sink. It owns no record: arrays are copied.

    Raises:
        FormatError: The place holds something else.
        SpecError: The archive is of another spec.
        StoreError: The name was committed (WRITER), or there is no space (NO_SPACE).
        UsageError: An argument cannot be served.

    >>> import tempfile
    >>> from routeplane.testing.builders import watermarked_record, watermarked_spec
    >>> spec = watermarked_spec()
    >>> with new_run(tempfile.mkdtemp(), spec, run="step-1") as sink:
    ...     sink.write(watermarked_record(0, num_tokens=20, spec=spec))
    >>> sink.commit.number
    1
    """
    return ArchiveWriter(_place(store, options), spec, run=run, attributes=attributes or {}, shard_bytes=shard_bytes)


def add_blocks(
    source: BlockSource,
    store: str | os.PathLike[str],
    *,
    blocks_per_run: int = 16,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    options: Mapping[str, Any] | None = None,
    progress: Callable[[int, int | None], None] | None = None,
) -> AddReport:
    """Add the blocks of a carrier to an archive, whole, and acknowledge them once they are committed.

    Each record is added once: a run says which position it reaches, so a process that died between a commit and its
    acknowledgement acknowledges when it is started again, and a record that comes again with the same checksum is
    counted and left out.

    Args:
        source: A carrier's reader, under a group of its own; it decides whether to wait for blocks that are still to
            come.
        store: As in ``new_run``, and so ``shard_bytes`` and ``options``.
        blocks_per_run: Blocks of one run, and so of one acknowledgement. The last run may have fewer.
        progress: Is told, after each run, how many records were added, and None for a total that is unknown.

    Returns:
        What was added.

    Raises:
        Exception: As ``new_run`` and the source; DataError (DUPLICATE_KEY) for a key that the archive has with another
            checksum. Runs that were committed stay.

    >>> import tempfile
    >>> from routeplane.stream import folder
    >>> from routeplane.testing.builders import watermarked_record, watermarked_spec
    >>> place, spec = tempfile.mkdtemp(), watermarked_spec()
    >>> with folder.open_writer(place, spec, run="r", producer="engine-0", groups=("archive",)) as writer:
    ...     writer.write(watermarked_record(0, num_tokens=20, spec=spec))
    >>> with folder.open_reader(place, group="archive", producers=1) as reader:
    ...     add_blocks(reader, tempfile.mkdtemp())
    AddReport(runs=1, blocks=1, records=1, repeats=0)
    """
    if blocks_per_run < 1:
        raise refused("blocks_per_run of at least 1", str(blocks_per_run))
    if not hasattr(source, "acknowledge"):
        raise refused("a reader of blocks (open_reader of a carrier makes one)", type(source).__name__)
    return add_from(
        _place(store, options), source, blocks_per_run=blocks_per_run, shard_bytes=shard_bytes, progress=progress
    )


def open_archive(
    store: str | os.PathLike[str],
    *,
    on_corrupt: Literal["raise", "quarantine"] = "raise",
    on_alarm: Literal["count", "raise", "ignore"] = "count",
    max_missing: float | None = None,
    verify: bool = True,
    expected_snapshot: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Archive:
    """Open the newest commit of an archive, as a lazy mapping from keys to records; reads three small files.

    Args:
        store: As in ``new_run``, and so ``options``.
        on_corrupt: As in ``open_stream``, and so ``on_alarm`` and ``max_missing``, for the sources that
            ``Archive.select`` gives.
        verify: False skips comparing record checksums, and no others.
        expected_snapshot: ``Archive.snapshot`` or ``Commit.snapshot`` of before. An archive that is neither there nor
            built on it is refused.

    Returns:
        The archive. It holds no file open and stays at its commit.

    Raises:
        FileNotFoundError: Nothing is there.
        FormatError: NOT_ROUTEPLANE for something else, VERSION for an archive of a later version, MANIFEST for a
            damaged one, ROLLED_BACK where commits were lost, TRUNCATED (TruncatedError) where nothing was ever
            committed.

    >>> import tempfile
    >>> from routeplane.testing.builders import watermarked_record, watermarked_spec
    >>> place, spec = tempfile.mkdtemp(), watermarked_spec()
    >>> record = watermarked_record(0, num_tokens=20, spec=spec)
    >>> commit = save_archive([record], place, spec=spec)
    >>> archive = open_archive(place, expected_snapshot=commit.snapshot)
    >>> archive.read(record.key, tokens=(4, 9)).routes.shape
    (5, 3, 4)
    """
    policy = ReadPolicy(on_corrupt=on_corrupt, on_alarm=on_alarm, max_missing=max_missing, verify=verify)
    place = _place(store, options)
    return Archive(Catalog(place, newest(place, expected_snapshot=expected_snapshot)), policy)


def verify(
    store: str | os.PathLike[str],
    *,
    expected_snapshot: str | None = None,
    look: Callable[[RouteRecord], Iterable[Problem]] | None = None,
    options: Mapping[str, Any] | None = None,
) -> ArchiveCheck:
    """Read everything, go on after damage, and list all of it with sample, token and layer; holds one record at a time.

    Args:
        store: As in ``new_run``, and so ``options``.
        expected_snapshot: As in ``open_archive``; what is wrong with it is listed.
        look: Is shown every intact record; what it finds is listed too.

    Returns:
        The verdict, every finding in it.

    Raises:
        FileNotFoundError: Nothing is there. Whatever is wrong with an archive is a finding.

    >>> import tempfile
    >>> from routeplane.testing.builders import watermarked_record, watermarked_spec
    >>> place, spec = tempfile.mkdtemp(), watermarked_spec()
    >>> commit = save_archive([watermarked_record(0, num_tokens=20, spec=spec)], place, spec=spec)
    >>> verify(place).intact, verify(place, expected_snapshot="7-0123456789abcdef").intact
    (True, False)
    """
    return check_archive(_place(store, options), expected_snapshot=expected_snapshot, look=look or _nothing)


def _nothing(record: RouteRecord) -> Iterable[Problem]:
    return ()


def recover(
    store: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    options: Mapping[str, Any] | None = None,
    target_options: Mapping[str, Any] | None = None,
) -> Recovery:
    """Copy what is intact to a new archive; the damaged one is left as it is.

    Intact records are copied as they are. Of a damaged one, the intact chunks are kept: rows in the others become
    MISSING, its captures say ``lost`` or ``partial``, and ``attributes["recovered"]`` is set. A record whose tokens or
    whose row of the record table are damaged is not kept, and counted.

    Args:
        store: The damaged archive, as in ``new_run``, and so ``options``.
        target: Where the new one goes, with its ``target_options``.

    Returns:
        What was copied.

    Raises:
        FormatError: No commit and no run manifest can be read.
        UsageError: ``target`` exists.

    >>> import tempfile
    >>> from routeplane.testing.builders import watermarked_record, watermarked_spec
    >>> place, spec = tempfile.mkdtemp(), watermarked_spec()
    >>> commit = save_archive([watermarked_record(0, num_tokens=20, spec=spec)], place, spec=spec)
    >>> found = recover(place, tempfile.mkdtemp())
    >>> found.intact, found.partial, found.lost
    (1, 0, 0)
    """
    return recover_records(_place(store, options), _place(target, target_options))


def delete(
    store: str | os.PathLike[str],
    *,
    keys: Iterable[tuple[str, int, int]] = (),
    runs: Iterable[str] = (),
    options: Mapping[str, Any] | None = None,
) -> Commit:
    """Commit an archive without some records and runs. Their bytes stay until ``compact``.

    Args:
        store: As in ``new_run``, and so ``options``.
        keys: Records, by ``(sample_id, attempt, segment)``.
        runs: Names of runs, whole.

    Returns:
        The commit. Who opened the archive before goes on reading the records until ``compact``.

    Raises:
        KeyError: The archive has no such record or run; nothing is deleted.
        DataError: A record that stays continues a deleted one (PREFIX); nothing is deleted.

    >>> import tempfile
    >>> from routeplane.testing.builders import watermarked_record, watermarked_spec
    >>> place, spec = tempfile.mkdtemp(), watermarked_spec()
    >>> records = [watermarked_record(index, num_tokens=20, spec=spec) for index in range(3)]
    >>> commit = save_archive(records, place, spec=spec, run="step-1")
    >>> delete(place, keys=[records[1].key]).runs[0].records
    2
    """
    return delete_records(_place(store, options), keys=list(keys), runs=list(runs))


def compact(
    store: str | os.PathLike[str],
    *,
    grace_s: float = GRACE_S,
    options: Mapping[str, Any] | None = None,
) -> Compaction:
    """Remove the bytes of deleted records and runs, of dead writers, and of commits before the newest.

    Runs that lost records are written again, and committed, before the old files go. A reader of an earlier commit
    meets LOST_FILE, never other rows: it opens the archive again.

    Args:
        store: As in ``new_run``, and so ``options``.
        grace_s: Seconds that a run which was never committed must have been silent before its writer counts as dead.

    Returns:
        What was removed.

    Raises:
        FormatError: A run that lost records is damaged: ``recover`` first.

    >>> import tempfile
    >>> from routeplane.testing.builders import watermarked_record, watermarked_spec
    >>> place, spec = tempfile.mkdtemp(), watermarked_spec()
    >>> records = [watermarked_record(index, num_tokens=20, spec=spec) for index in range(3)]
    >>> commit = save_archive(records, place, spec=spec, run="step-1")
    >>> commit = delete(place, keys=[records[1].key])
    >>> compact(place).records, len(open_archive(place))
    (1, 2)
    """
    return compact_archive(_place(store, options), grace_s=grace_s)


def _place(store: str | os.PathLike[str], options: Mapping[str, Any] | None) -> ArchiveStore:
    text = os.fspath(store)
    if "://" in text and not text.startswith("file://"):
        from routeplane.archive.objectstore import ObjectFolder

        return ObjectFolder(text, options=options or {})
    if options:
        raise refused("options for the URL of an object store alone", f"a path, {text}")
    return LocalFolder(text.removeprefix("file://"))
