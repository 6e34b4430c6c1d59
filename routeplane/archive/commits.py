"""The one thing of an archive that changes: which commit is the newest, and how the next one is published.

A commit is a file of its own, created exclusively under the next number, so that of two writers one is first and the
other sees it. Nothing that a commit names is ever written again.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from routeplane.archive.layout import (
    ARCHIVE_VERSION,
    COMMITS,
    ROOT,
    check_version,
    commit_key,
    group_document,
    leaf_document,
)
from routeplane.archive.manifest import Commit, RunEntry
from routeplane.errors import ErrorKind, FormatError, SpecError, TruncatedError
from routeplane.record.schema import FORMAT_VERSION

if TYPE_CHECKING:
    from routeplane.archive.store import ArchiveStore
    from routeplane.record.spec import RouteSpec

__all__ = ["begin", "check_root", "commit_numbers", "newest", "publish", "read_commit"]

#: Commits that are kept: what `recover` falls back to. Older ones say nothing that these do not.
_KEPT = 4
_NAME = re.compile(r"([0-9]{10})\.json")


def commit_numbers(store: ArchiveStore) -> list[int]:
    """The numbers of the commits that are there, ascending."""
    return sorted(int(found[1]) for name in store.names(COMMITS) if (found := _NAME.fullmatch(name)))


def read_commit(store: ArchiveStore, number: int) -> Commit | None:
    """One commit, None where it is gone. Raises FormatError."""
    key = commit_key(number)
    data = store.read(key)
    if data is None:
        return None
    commit = Commit.from_json(data, where=key)
    if commit.number != number:
        raise FormatError(f"expected commit {number}, got {commit.number} @ {key}", kind=ErrorKind.MANIFEST)
    return commit


def newest(store: ArchiveStore) -> Commit:
    """The newest commit. Raises FormatError for what is no archive, of another version, or damaged; TruncatedError for
    one whose first writer never came to its end."""
    check_root(store)
    while True:
        numbers = commit_numbers(store)
        if not numbers:
            raise TruncatedError(
                "expected a commit, got none: the first writer died, is still writing, or its commits were deleted "
                f"@ {store.where}",
                kind=ErrorKind.TRUNCATED,
            )
        commit = read_commit(store, numbers[-1])
        if commit is not None:  # else a writer went on meanwhile, and dropped this one
            _check_agrees(store, commit)
            return commit


def check_root(store: ArchiveStore) -> None:
    """Raise FormatError unless an archive of a known version lies here; FileNotFoundError where nothing does."""
    data = store.read(ROOT)
    if data is None:
        if not store.names(""):
            raise FileNotFoundError(f"expected an archive, got nothing @ {store.where}")
        raise FormatError(f"expected an archive, got a folder without {ROOT} @ {store.where}", kind=_FOREIGN)
    ours = _root_attributes(data, where=store.where)
    if ours is None:
        raise FormatError(f"expected an archive of routes, got another zarr group @ {store.where}", kind=_FOREIGN)
    check_version(ours.get("archive"), where=f"{store.where}/{ROOT}")


_FOREIGN = ErrorKind.NOT_ROUTEPLANE


def _root_attributes(data: bytes, *, where: str) -> dict[str, object] | None:
    try:
        attributes = json.loads(data)["attributes"]
        found = attributes.get("routeplane")
        return found if found is None else dict(found)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise FormatError(
            f"expected the document of a zarr group, got {data[:60]!r} ({error}) @ {where}/{ROOT}",
            kind=ErrorKind.MANIFEST,
        ) from None


def _root(spec: RouteSpec) -> bytes:
    ours = {"archive": ARCHIVE_VERSION, "format": FORMAT_VERSION, "spec": json.loads(spec.to_json())}
    return json.dumps(group_document({"routeplane": ours}), indent=1).encode()


def _check_agrees(store: ArchiveStore, commit: Commit) -> None:
    """The root's attributes are for readers without this library; a flip in them shows against the commit."""
    data = store.read(ROOT) or b""
    expected = json.loads(_root(commit.spec))
    if json.loads(data) != expected:
        raise FormatError(f"expected {expected}, got {data[:200]!r} @ {store.where}/{ROOT}", kind=ErrorKind.MANIFEST)


def begin(store: ArchiveStore, spec: RouteSpec) -> Commit:
    """The newest commit to append to; makes the archive where there is none.

    Raises FormatError for a folder that holds something else, SpecError for an archive of another spec.
    """
    if store.read(ROOT) is None:
        if store.names(""):
            raise FormatError(
                f"expected an archive or an empty place, got {store.names('')[:4]} @ {store.where}", kind=_FOREIGN
            )
        store.create(ROOT, _root(spec))
    check_root(store)
    commit = newest(store) if commit_numbers(store) else Commit(number=0, spec=spec)
    _check_agrees(store, commit)
    commit.spec.require_same_geometry(spec, where=store.where)
    if commit.spec != spec:
        raise SpecError(
            f"expected routes of model {commit.spec.model!r}, got {spec.model!r} @ {store.where}",
            kind=ErrorKind.SPEC_MISMATCH,
        )
    # also where whoever made the root died before these
    for key, document in ((f"runs/{ROOT}", group_document({})), (f"{COMMITS}/{ROOT}", leaf_document())):
        if store.size(key) is None:
            store.write(key, json.dumps(document).encode())
    return commit


def publish(store: ArchiveStore, base: Commit, *, run: RunEntry | None, check: Callable[[Commit], None]) -> Commit:
    """The next commit: that of ``base``, or what others made of it meanwhile, with one more run.

    ``check`` is asked before a run is added to a commit that is not ``base``; what it raises ends the attempt.
    """
    known = base
    while True:
        added = () if run is None else (run,)
        commit = replace(known, number=known.number + 1, runs=(*known.runs, *added))
        created = store.create(commit_key(commit.number), commit.to_json())
        known = newest(store)
        if created and run is not None and run in known.runs:
            _drop_old(store, known.number)
            return known  # this commit, or one that another writer built on it meanwhile
        if created and known.number == commit.number:
            return known
        if created:
            # so far behind that the number had been taken, and dropped since; the newest is never dropped, so it shows
            store.delete(commit_key(commit.number))
        check(known)


def _drop_old(store: ArchiveStore, number: int) -> None:
    with contextlib.suppress(OSError):  # the commit stands, whatever becomes of old ones
        for old in commit_numbers(store):
            if old <= number - _KEPT:
                store.delete(commit_key(old))
