"""Records rest: an archive in zarr v3, appended to by run, read at random, in a folder or behind a URL.

``save_archive`` writes, ``open_archive`` reads, ``verify`` looks for damage, ``recover`` keeps what is intact. This
file only picks the place. Needs the extra ``zarr``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

from routeplane.archive.catalog import Catalog
from routeplane.archive.commits import newest
from routeplane.archive.damage import ArchiveCheck, check_archive
from routeplane.archive.layout import ARCHIVE_VERSION, DEFAULT_SHARD_BYTES
from routeplane.archive.manifest import Commit, RunEntry
from routeplane.archive.reader import Archive, ArchiveReader
from routeplane.archive.recovery import Recovery, recover_records
from routeplane.archive.remote import RemoteFolder
from routeplane.archive.store import ArchiveStore, LocalFolder
from routeplane.archive.writer import ArchiveWriter
from routeplane.errors import Problem
from routeplane.record.policy import ReadPolicy
from routeplane.record.record import RouteRecord
from routeplane.record.spec import RouteSpec

__all__ = [
    "ARCHIVE_VERSION",
    "Archive",
    "ArchiveCheck",
    "ArchiveReader",
    "ArchiveWriter",
    "Commit",
    "Recovery",
    "RunEntry",
    "new_run",
    "open_archive",
    "recover",
    "save_archive",
    "verify",
]


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
    """Append records to the archive at ``store`` as one run, and commit; makes the archive where there is none.

    All of them or none: until this returns, and if it raises or its process dies, the archive is what it was. Arguments
    as in ``new_run``; returns the commit. The records are iterated once, and none is held.
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
    """A RouteSink that appends one run to an archive; ``close`` commits it, ``abort`` leaves no trace of it.

    ``store``: a path, or a URL that fsspec knows, with its ``options``. ``run``: the run's name, default one that no
    other has; while a writer lives, nobody else can write a run of its name, and files that a dead writer left under it
    are deleted. Writers of different runs may write at once: the later one to commit sees what the earlier did.
    ``attributes``: text about the run. ``shard_bytes``: of one shard of routes before compression, which is what is
    held.

    Raises FormatError for a place that holds something else, SpecError for an archive of another spec, StoreError for a
    run that another writer holds or that was committed (WRITER) and where there is no space (NO_SPACE), UsageError.
    """
    return ArchiveWriter(
        _place(store, options),
        spec,
        run=run,
        attributes=attributes or {},
        shard_bytes=shard_bytes,
        options=options or {},
    )


def open_archive(
    store: str | os.PathLike[str],
    *,
    on_corrupt: Literal["raise", "quarantine"] = "raise",
    on_alarm: Literal["count", "raise", "ignore"] = "count",
    max_missing: float | None = None,
    verify: bool = True,
    options: Mapping[str, Any] | None = None,
) -> Archive:
    """The newest commit of an archive, as a lazy mapping from keys to records; reads two small files.

    ``store``, ``options``: as in ``new_run``. The rest as in ``open_stream``, for the sources that ``select`` gives;
    ``verify=False`` skips comparing record checksums, and no others.

    Raises FileNotFoundError where nothing is, FormatError: NOT_ROUTEPLANE for something else, VERSION for an archive of
    a later version, MANIFEST for a damaged one, TRUNCATED (TruncatedError) where nothing was ever committed.
    """
    policy = ReadPolicy(on_corrupt=on_corrupt, on_alarm=on_alarm, max_missing=max_missing, verify=verify)
    place = _place(store, options)
    return Archive(Catalog(place, newest(place), options=options or {}), policy)


def verify(
    store: str | os.PathLike[str],
    *,
    options: Mapping[str, Any] | None = None,
    look: Callable[[RouteRecord], Iterable[Problem]] | None = None,
) -> ArchiveCheck:
    """Read everything, go on after damage, and list all of it with sample, token and layer.

    ``look``: is shown every intact record; what it finds is listed too. Holds one record at a time. Raises
    FileNotFoundError where nothing is; whatever is wrong with an archive is a finding.
    """
    return check_archive(_place(store, options), options=options or {}, look=look or _nothing)


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

    Intact records are copied as they are. Of a damaged one, whatever chunks are intact are kept: rows in the others
    become MISSING, its captures say ``lost`` or ``partial``, and ``attributes["recovered"]`` is set. A record whose
    tokens or whose row of the record table are damaged is not kept, and counted. Raises FormatError where no commit and
    no run manifest can be read, UsageError where ``target`` exists.
    """
    return recover_records(
        _place(store, options),
        _place(target, target_options),
        options=options or {},
        target_options=target_options or {},
    )


def _place(store: str | os.PathLike[str], options: Mapping[str, Any] | None) -> ArchiveStore:
    text = os.fspath(store)
    if "://" in text and not text.startswith("file://"):
        return RemoteFolder(text, options=options or {})
    return LocalFolder(text.removeprefix("file://"))
