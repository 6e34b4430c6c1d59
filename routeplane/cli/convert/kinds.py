"""Which container a path means, and how each is opened and made: streams, archives, Parquet.

By suffix: ``.arrows`` a stream, ``.zarr`` an archive, ``.parquet`` Parquet. An archive is loaded only where one is
meant, since it needs an extra.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, Literal

from routeplane.cli.convert.parquet import ParquetReader, ParquetWriter
from routeplane.errors import refused
from routeplane.record.policy import ReadPolicy
from routeplane.record.schema import choose_encoding
from routeplane.stream import new_stream, open_stream
from routeplane.stream.files import PublishedPath

if TYPE_CHECKING:
    from routeplane.record.interfaces import RouteSink
    from routeplane.record.record import RouteRecord
    from routeplane.record.spec import RouteSpec

__all__ = ["SUFFIXES", "Kind", "Opened", "kind_of", "make_file", "open_any"]

Kind = Literal["stream", "archive", "parquet"]

SUFFIXES: dict[str, Kind] = {".arrows": "stream", ".zarr": "archive", ".parquet": "parquet"}


def kind_of(place: str) -> Kind:
    """The container that a path's suffix names. Raises UsageError."""
    suffix = PurePosixPath(place.rstrip("/")).suffix
    if suffix not in SUFFIXES:
        raise refused(f"a path that ends in {', '.join(SUFFIXES)}", repr(place))
    return SUFFIXES[suffix]


@dataclass(frozen=True, kw_only=True, slots=True)
class Opened:
    """A source. ``digest``: names its content, None where only reading it can tell. ``total``: its records,
    likewise."""

    source: Any
    spec: RouteSpec
    digest: str | None
    total: int | None

    def records(self, *, skip: int) -> Iterator[RouteRecord]:
        """All records but the first ``skip``; an archive does not read these."""
        if hasattr(self.source, "keys"):
            return (self.source[key] for key in islice(self.source, skip, None))
        return islice(self.source, skip, None)


def open_any(place: str) -> Opened:
    """Open a stream, an archive or a Parquet file, checking everything. Raises as their readers do."""
    kind = kind_of(place)
    if kind == "archive":
        from routeplane.archive import open_archive

        archive = open_archive(place)
        return Opened(source=archive, spec=archive.spec, digest=archive.digest, total=len(archive))
    reader: Any
    if kind == "parquet":
        reader = ParquetReader(place, policy=ReadPolicy(on_alarm="ignore"))
    else:
        reader = open_stream(place, on_alarm="ignore")
    return Opened(source=reader, spec=reader.spec, digest=reader.digest, total=getattr(reader, "total_records", None))


def make_file(place: str, spec: RouteSpec, *, encoding: Literal["plain", "narrow", "auto"]) -> RouteSink:
    """A sink for a stream or a Parquet file, which appears when it is closed."""
    kind = kind_of(place)
    if kind == "archive":
        raise refused("a stream or a Parquet file", repr(place))
    if kind == "parquet":
        return ParquetWriter(PublishedPath(os.fspath(place)), spec, encoding=choose_encoding(encoding, spec))
    return new_stream(place, spec, encoding=encoding)
