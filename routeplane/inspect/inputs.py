"""Where the inspection commands read from: streams, archives, and patterns over both, as one source.

Owns opening by what stands at a path, and finding a sample by its name. Decides nothing about data: readers refuse what
is bad. An archive is looked up and read in part, a stream is read through.
"""

from __future__ import annotations

import glob
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from routeplane.errors import ErrorKind, SpecError, UsageError
from routeplane.record.record import RecordKey, RouteRecord
from routeplane.stream import open_stream

if TYPE_CHECKING:
    from routeplane.archive import Archive
    from routeplane.record.spec import RouteSpec

__all__ = ["SourceSet", "find_sources", "is_archive", "is_wanted", "parse_sample"]

_WILDCARDS = frozenset("*?[")


def find_sources(patterns: Sequence[str]) -> SourceSet:
    """Paths, URLs and patterns, as one set of sources in sorted order. Opens each once to compare specs.

    A folder or URL is an archive, a file a stream; what exists under the very name is no pattern. Raises UsageError
    (ARGUMENT) for a pattern that matches nothing and for a pipe, which cannot be read twice, SpecError where two
    sources differ in geometry, and what opening raises.
    """
    paths: list[str] = []
    for pattern in patterns:
        matched = sorted(glob.glob(pattern)) if _is_pattern(pattern) else [pattern]
        if not matched:
            raise UsageError(f"expected a file that matches {pattern!r}, got none", kind=ErrorKind.ARGUMENT)
        paths += matched
    if not paths:
        raise UsageError("expected at least one stream or archive, got none", kind=ErrorKind.ARGUMENT)
    specs = [_spec_of(path) for path in paths]
    for path, spec in zip(paths, specs, strict=True):
        if spec != specs[0]:
            differences = "; ".join(specs[0].differences(spec))
            raise SpecError(
                f"expected sources of one spec, got another in {path} than in {paths[0]}: {differences}",
                kind=ErrorKind.SPEC_MISMATCH,
            )
    # one file under two names is read once
    once: dict[str, str] = {}
    for path in paths:
        once.setdefault(path if "://" in path else os.path.realpath(path), path)
    return SourceSet(paths=tuple(once.values()), spec=specs[0])


def _is_pattern(text: str) -> bool:
    # a shell that expanded a pattern hands over names, and as a pattern ``run[1]`` is ``run1``
    return bool(_WILDCARDS & set(text)) and "://" not in text and not os.path.lexists(text)


def parse_sample(text: str) -> tuple[str, int | None, int | None]:
    """``sample``, or ``sample/attempt/segment`` as reports print it; the id itself may hold slashes."""
    head, _, segment = text.rpartition("/")
    sample, _, attempt = head.rpartition("/")
    if sample and attempt.isdecimal() and segment.isdecimal():
        return sample, int(attempt), int(segment)
    return text, None, None


@dataclass(frozen=True, kw_only=True)
class SourceSet:
    """Streams and archives of one spec. Holds nothing open: every call opens, reads and closes."""

    paths: tuple[str, ...]
    spec: RouteSpec

    def records(
        self, *, layer_ids: Sequence[int] | None = None, samples: Sequence[str] | None = None
    ) -> Iterator[RouteRecord]:
        """Every record, or those of ``samples`` (as in ``parse_sample``); verified, some layers only where asked.

        Raises what the readers raise: FormatError, DataError, SpecError for a layer that is not there.
        """
        for path in self.paths:
            yield from self.records_of(path, layer_ids=layer_ids, samples=samples)

    def records_of(
        self, path: str, *, layer_ids: Sequence[int] | None = None, samples: Sequence[str] | None = None
    ) -> Iterator[RouteRecord]:
        """The same of one of ``paths``."""
        wanted = None if samples is None else [parse_sample(sample) for sample in samples]
        if is_archive(path):
            archive = _archive(path)
            if wanted is not None:
                for key in archive:
                    if is_wanted(key, wanted):
                        yield archive.read(key, layer_ids=layer_ids)
                return
            yield from archive.select(layer_ids=layer_ids)
            return
        with open_stream(path, on_alarm="ignore") as reader:
            if layer_ids is not None:
                reader.select(layer_ids=layer_ids)
            for record in reader:
                if wanted is None or is_wanted(record.key, wanted):
                    yield record

    def find(self, sample: str) -> RouteRecord:
        """One sample, as named by a person. Raises UsageError (ARGUMENT) where none, or more than one, has the name."""
        found: list[RouteRecord] = []
        for record in self.records(samples=[sample]):
            found.append(record)
            if len(found) > 1:
                keys = " and ".join("/".join(str(part) for part in each.key) for each in found)
                raise UsageError(
                    f"expected one record of sample {sample!r}, got {keys}: give attempt and segment too",
                    kind=ErrorKind.ARGUMENT,
                )
        if not found:
            raise UsageError(
                f"expected a record of sample {sample!r} in {', '.join(self.paths)}, got none", kind=ErrorKind.ARGUMENT
            )
        return found[0]

    def lookup(self) -> Archive | None:
        """The mapping from keys to records, where all is one archive."""
        return _archive(self.paths[0]) if len(self.paths) == 1 and is_archive(self.paths[0]) else None


def is_archive(path: str) -> bool:
    """Whether ``path`` names an archive: a URL, or a folder."""
    return "://" in path or Path(path).is_dir()


def _archive(path: str) -> Archive:
    from routeplane.archive import open_archive

    return open_archive(path)


def _spec_of(path: str) -> RouteSpec:
    if is_archive(path):
        return _archive(path).spec
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise UsageError(
            f"expected a file or an archive, which can be read again, got a pipe or a device @ {path}",
            kind=ErrorKind.ARGUMENT,
        )
    with open_stream(path, on_truncated="keep", on_alarm="ignore") as reader:
        return reader.spec


def is_wanted(key: RecordKey, wanted: Sequence[tuple[str, int | None, int | None]]) -> bool:
    """Whether a key is one of those that ``parse_sample`` gave."""
    return any(
        key.sample_id == sample and attempt in (None, key.attempt) and segment in (None, key.segment)
        for sample, attempt, segment in wanted
    )
