"""What an archive says of itself: commits name runs, and each run names every file that it consists of.

Pure values and their JSON, each with a checksum over its own canonical bytes; no IO. Files that a manifest does not
name are not part of the archive, whatever lies beside them; a file that it names and that is not there was lost.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import xxhash

from routeplane.archive.layout import ARCHIVE_VERSION, check_run_name, check_version
from routeplane.errors import DataError, ErrorKind, FormatError, RouteplaneError, SpecError
from routeplane.record.parse import check_count, check_text
from routeplane.record.schema import FORMAT_VERSION
from routeplane.record.spec import RouteSpec

__all__ = ["ArrayEntry", "Commit", "RunEntry", "RunManifest", "TablePart", "file_hash"]


def file_hash(data: bytes | memoryview) -> str:
    """xxh3-64 of a file's bytes as 16 hex digits."""
    return f"{xxhash.xxh3_64_intdigest(data):016x}"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunEntry:
    """One run as a commit names it. ``manifest``: the hash of the run's manifest file."""

    name: str
    records: int
    tokens: int
    rows: int
    bytes: int
    digest: str
    manifest: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Commit:
    """The state of an archive. ``number`` counts from 1; a commit holds all runs, those before it included."""

    number: int
    spec: RouteSpec
    runs: tuple[RunEntry, ...] = ()

    def to_json(self) -> bytes:
        """The bytes of the commit's file."""
        return _sealed(
            {
                "archive": ARCHIVE_VERSION,
                "format": FORMAT_VERSION,
                "number": self.number,
                "spec": json.loads(self.spec.to_json()),
                "runs": [{name: getattr(run, name) for name in RunEntry.__slots__} for run in self.runs],
            }
        )

    @classmethod
    def from_json(cls, data: bytes, *, where: str) -> Commit:
        """Parse what ``to_json`` wrote. Raises FormatError."""
        body = _unsealed(data, where=where)
        check_version(body.get("archive"), where=where)
        with _Parsing(where):
            spec = RouteSpec.from_json(json.dumps(body["spec"]))
            runs = tuple(RunEntry(**entry) for entry in body["runs"])
            for run in runs:
                check_run_name(run.name)
                for name in ("records", "tokens", "rows", "bytes"):
                    check_count(getattr(run, name), name, below=2**63)
                for name in ("digest", "manifest"):
                    check_text(getattr(run, name), name)
            return cls(number=check_count(body["number"], "number", below=10**10), spec=spec, runs=runs)


@dataclass(frozen=True, kw_only=True, slots=True)
class ArrayEntry:
    """One zarr array: its whole ``zarr.json``, and the bytes of each of its shards."""

    document: Mapping[str, Any]
    shards: tuple[int, ...]

    @property
    def rows(self) -> int:
        """Its length."""
        return int(self.document["shape"][0])

    @property
    def shard_rows(self) -> int:
        """Rows of one shard."""
        return int(self.document["chunk_grid"]["configuration"]["chunk_shape"][0])

    @property
    def chunk_rows(self) -> int:
        """Rows of one chunk."""
        return int(self.document["codecs"][0]["configuration"]["chunk_shape"][0])

    def shard_key(self, index: int) -> str:
        """The key of one shard below the array's."""
        return "/".join(("c", str(index), *("0" for _ in self.document["shape"][1:])))


@dataclass(frozen=True, kw_only=True, slots=True)
class TablePart:
    """One file of the record table."""

    records: int
    bytes: int
    hash: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RunManifest:
    """Everything a run consists of.

    ``arrays``: key below the run -> array. ``columns``: names of the token columns, in the order of the arrays
    ``columns/0``, ``columns/1``, ... (a name is any text, and no path). ``keys``: the hash of the file of key hashes.
    ``digest``: xxh3-64 over the record checksums in order. ``attributes``: text of whoever saved the run.
    """

    name: str
    records: int
    tokens: int
    rows: int
    digest: str
    columns: tuple[str, ...]
    arrays: Mapping[str, ArrayEntry]
    parts: tuple[TablePart, ...]
    keys: str
    attributes: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def nbytes(self) -> int:
        """Size of the shards and the record table."""
        return sum(sum(array.shards) for array in self.arrays.values()) + sum(part.bytes for part in self.parts)

    def to_json(self) -> bytes:
        """The bytes of the manifest's file."""
        return _sealed(
            {
                "archive": ARCHIVE_VERSION,
                "name": self.name,
                "records": self.records,
                "tokens": self.tokens,
                "rows": self.rows,
                "digest": self.digest,
                "columns": list(self.columns),
                "arrays": {
                    key: {"document": dict(array.document), "shards": list(array.shards)}
                    for key, array in self.arrays.items()
                },
                "parts": [[part.records, part.bytes, part.hash] for part in self.parts],
                "keys": self.keys,
                "attributes": dict(self.attributes),
            }
        )

    @classmethod
    def from_json(cls, data: bytes, *, where: str) -> RunManifest:
        """Parse what ``to_json`` wrote. Raises FormatError."""
        body = _unsealed(data, where=where)
        check_version(body.get("archive"), where=where)
        with _Parsing(where):
            return cls(
                name=body["name"],
                records=body["records"],
                tokens=body["tokens"],
                rows=body["rows"],
                digest=body["digest"],
                columns=tuple(body["columns"]),
                arrays=MappingProxyType(
                    {
                        key: ArrayEntry(document=entry["document"], shards=tuple(entry["shards"]))
                        for key, entry in body["arrays"].items()
                    }
                ),
                parts=tuple(TablePart(records=records, bytes=size, hash=seal) for records, size, seal in body["parts"]),
                keys=body["keys"],
                attributes=MappingProxyType(dict(body["attributes"])),
            )


class _Parsing:
    """Turns whatever a damaged document makes go wrong into one FormatError; a sealed one gives no cause."""

    def __init__(self, where: str) -> None:
        self._where = where

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, KeyError | TypeError | ValueError | AttributeError | DataError | SpecError):
            text = error.message if isinstance(error, RouteplaneError) else repr(error)
            raise FormatError(
                f"expected a manifest with its members, got {text} @ {self._where}", kind=ErrorKind.MANIFEST
            ) from error


def _canonical(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":")).encode("ascii")


def _sealed(body: dict[str, Any]) -> bytes:
    return _canonical({"body": body, "xxh3": file_hash(_canonical(body))}) + b"\n"


def _unsealed(data: bytes, *, where: str) -> dict[str, Any]:
    try:
        document = json.loads(data)
        body, seal = document["body"], document["xxh3"]
        if not isinstance(body, dict):
            raise TypeError(f"a body that is {type(body).__name__}")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise FormatError(
            f"expected a manifest as JSON, got {data[:60]!r} ({error}) @ {where}", kind=ErrorKind.MANIFEST
        ) from None
    # re-serialised: a flip in white space or in an escape changes no meaning
    if seal != file_hash(_canonical(body)):
        raise FormatError(
            f"expected a manifest of xxh3 {seal}, got {file_hash(_canonical(body))} @ {where}", kind=ErrorKind.MANIFEST
        )
    return body
