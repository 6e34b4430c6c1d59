"""What an archive consists of, as values and bytes: names, zarr documents, the record table, manifests, commits.

No IO. Commits name runs, and each run's manifest names every file of the run with a checksum: a file that no manifest
names is not part of the archive, and a file that is named and absent was lost. ``docs/reference/archive-format.md``
says the same for readers without this library.

Axes: T rows or tokens of a run, L captured layers, K top-k slots.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash
from numpy.typing import NDArray

from routeplane.errors import DataError, ErrorKind, FormatError, RouteplaneError, SpecError, refused
from routeplane.record.aligned import ColumnType
from routeplane.record.parse import check_count, check_text
from routeplane.record.record import Prefix, RecordKey, RouteRecord
from routeplane.record.schema import CAPTURE_TYPE, FORMAT_VERSION, PREFIX_TYPE, SAMPLING_TYPE, SPAN_TYPES
from routeplane.record.spans import Capture, Sampling, Span
from routeplane.record.spec import MISSING, NARROW_MISSING, RouteSpec

__all__ = [
    "ARCHIVE_VERSION",
    "CHUNK_ROWS",
    "CHUNK_TOKENS",
    "COMMITS",
    "DEFAULT_SHARD_BYTES",
    "NEWEST",
    "PART_ENTRIES",
    "PART_RECORDS",
    "ROOT",
    "RUNS",
    "TABLE_SCHEMA",
    "ArrayEntry",
    "ArrayLayout",
    "Commit",
    "Row",
    "RunEntry",
    "RunManifest",
    "Shard",
    "TablePart",
    "TablePartReader",
    "check_run_name",
    "check_version",
    "column_layout",
    "commit_key",
    "encode_rows",
    "file_hash",
    "group_document",
    "key_hash",
    "leaf_document",
    "read_keys",
    "root_document",
    "routes_layout",
    "row_of",
    "run_attributes",
    "seal",
    "token_layout",
    "unseal",
]

# ----------------------------------------------------------------------------------------------------------------------
# Names and versions
# ----------------------------------------------------------------------------------------------------------------------

#: Version of the archive's layout. A reader of N.m reads N.0 to N.m; the records inside have the format's own version.
ARCHIVE_VERSION = "1.1"
ROOT = "zarr.json"
COMMITS = "commits"
RUNS = "runs"
#: Says which commit was published last, so that the loss of that commit shows.
NEWEST = f"{COMMITS}/newest.json"

_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")
_FOLDER = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,119}")
_VERSION = re.compile(r"(0|[1-9][0-9]{0,8})\.(0|[1-9][0-9]{0,8})")


def commit_key(number: int) -> str:
    """Return the key of a commit; names sort as numbers do."""
    return f"{COMMITS}/{number:010d}.json"


def check_run_name(name: str) -> None:
    """Raise UsageError for a name that cannot be a folder of its own on every store."""
    if not _RUN_NAME.fullmatch(name):
        raise refused(
            "a run name of at most 100 letters, digits, _ and -, beginning with one of the former", repr(name)
        )


def check_version(text: Any, *, where: str) -> None:
    """Raise FormatError (VERSION) for an archive of another major version, or of a later minor one."""
    if not isinstance(text, str) or not _VERSION.fullmatch(text):
        raise FormatError(
            f"expected an archive version like {ARCHIVE_VERSION}, got {text!r} @ {where}", kind=ErrorKind.VERSION
        )
    (major, minor), (ours, last) = (map(int, version.split(".")) for version in (text, ARCHIVE_VERSION))
    if major != ours or minor > last:
        raise FormatError(
            f"expected archive version {ours}.0 to {ARCHIVE_VERSION}, got {text}: read it with the routeplane that "
            f"wrote it, or a newer one @ {where}",
            kind=ErrorKind.VERSION,
        )


def file_hash(data: bytes | memoryview) -> str:
    """Return xxh3-64 of a file's bytes as 16 hex digits."""
    return f"{xxhash.xxh3_64_intdigest(data):016x}"


# ----------------------------------------------------------------------------------------------------------------------
# zarr
# ----------------------------------------------------------------------------------------------------------------------

#: Rows of one chunk of ``routes``: the unit of reading, and of damage.
CHUNK_ROWS = 512
#: Tokens of one chunk of the arrays without layers: 16 KiB of token ids.
CHUNK_TOKENS = 4_096
#: Uncompressed bytes of one shard of ``routes``, at most, where one row of chunks is not larger. What a writer holds.
DEFAULT_SHARD_BYTES = 32 * 2**20
#: Chunks of one shard, at most: its index, 16 bytes per chunk, is read whole.
_MAX_SHARD_CHUNKS = 8_192


def group_document(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``zarr.json`` of a group."""
    return {"zarr_format": 3, "node_type": "group", "attributes": dict(attributes)}


def root_document(spec: RouteSpec) -> dict[str, Any]:
    """Return ``zarr.json`` of an archive."""
    ours = {"archive": ARCHIVE_VERSION, "format": FORMAT_VERSION, "spec": json.loads(spec.to_json())}
    return group_document({"routeplane": ours})


def run_attributes(spec: RouteSpec, *, run: str, attributes: Mapping[str, str]) -> dict[str, Any]:
    """Return the attributes of a run's zarr group: what a reader without this library needs to know of its arrays."""
    said = {"model": spec.model, "num_experts": list(spec.experts_per_layer), "layer_ids": list(spec.layer_ids)}
    return {
        "run": run,
        **said,
        "missing": NARROW_MISSING if spec.narrow_allowed else MISSING,
        "about": dict(attributes),
    }


def leaf_document() -> dict[str, Any]:
    """Return ``zarr.json`` of an array without elements: below it zarr looks for no members, so files may lie there."""
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [0],
        "data_type": "uint8",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [1]}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": 0,
        "codecs": [{"name": "bytes"}],
        "dimension_names": ["files"],
        "attributes": {},
        "storage_transformers": [],
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class ArrayLayout:
    """One zarr array of a run: ``[T, *trailing]``, cut along the first axis into chunks, and these into shards.

    ``shard_rows`` is a multiple of ``chunk_rows``. ``split``: each entry of the second axis has chunks of its own.
    ``fill``: what a row that was never written reads as, which is never an expert.
    """

    dtype: np.dtype[Any]
    fill: Any
    axes: tuple[str, ...]
    trailing: tuple[int, ...]
    chunk_rows: int
    shard_rows: int
    split: bool = False

    @classmethod
    def of(cls, document: Mapping[str, Any], *, where: str) -> ArrayLayout:
        """Return the layout that ``document`` describes. Raises FormatError for an array of any other codecs."""
        grid = document["chunk_grid"]["configuration"]["chunk_shape"]
        chunk = document["codecs"][0]["configuration"]["chunk_shape"]
        found = cls(
            dtype=np.dtype(document["data_type"]),
            fill=document["fill_value"],
            axes=tuple(document["dimension_names"]),
            trailing=tuple(document["shape"][1:]),
            chunk_rows=chunk[0],
            shard_rows=grid[0],
            split=chunk[1:] != document["shape"][1:],
        )
        if found.document(document["shape"][0]) != document:
            raise FormatError(f"expected an array as routeplane writes it, got {document} @ {where}", kind=_MANIFEST)
        return found

    @property
    def chunk_shape(self) -> tuple[int, ...]:
        """What is compressed, and checked, as one."""
        return (self.chunk_rows, 1, *self.trailing[1:]) if self.split else (self.chunk_rows, *self.trailing)

    @property
    def columns(self) -> int:
        """Chunks beside each other in a shard: the length of the second axis, or 1."""
        return self.trailing[0] if self.split else 1

    @property
    def shard_chunks(self) -> int:
        """Chunks of one shard."""
        return self.shard_rows // self.chunk_rows * self.columns

    @property
    def fill_scalar(self) -> Any:
        """``fill`` as numpy takes it."""
        return np.nan if self.fill == "NaN" else self.fill

    def document(self, rows: int) -> dict[str, Any]:
        """Return ``zarr.json`` of the array with that many rows."""
        return {
            "zarr_format": 3,
            "node_type": "array",
            "shape": [rows, *self.trailing],
            "data_type": self.dtype.name,
            "chunk_grid": {
                "name": "regular",
                "configuration": {"chunk_shape": [self.shard_rows, *self.trailing]},
            },
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
            "fill_value": self.fill,
            "codecs": [_sharding(self.chunk_shape)],
            "dimension_names": list(self.axes),
            "attributes": {},
            "storage_transformers": [],
        }

    def shard_key(self, index: int) -> str:
        """Return the key of one shard below the array's."""
        return "/".join(("c", str(index), *("0" for _ in self.trailing)))


_MANIFEST = ErrorKind.MANIFEST


def _sharding(chunk_shape: tuple[int, ...]) -> dict[str, Any]:
    little = {"name": "bytes", "configuration": {"endian": "little"}}
    return {
        "name": "sharding_indexed",
        "configuration": {
            "chunk_shape": list(chunk_shape),
            # Two checksums. crc32c is compared here and by zarr, before anything is decompressed; zarrs (0.2.3) leaves
            # it out where it reads a part of a shard. zstd's own is compared by every decoder.
            "codecs": [
                little,
                {"name": "zstd", "configuration": {"level": 1, "checksum": True}},
                {"name": "crc32c"},
            ],
            "index_codecs": [little, {"name": "crc32c"}],
            "index_location": "end",
        },
    }


def routes_layout(spec: RouteSpec, *, shard_bytes: int = DEFAULT_SHARD_BYTES) -> ArrayLayout:
    """Return the layout of ``routes`` ``[T, L, K]``: one byte per id where the narrow encoding allows it, chunks of 512
    rows of one layer."""
    dtype: np.dtype[Any] = np.dtype(np.uint8 if spec.narrow_allowed else np.int16)
    layers, top_k = spec.row_shape
    rows = min(shard_bytes // (CHUNK_ROWS * layers * top_k * dtype.itemsize), _MAX_SHARD_CHUNKS // layers)
    return ArrayLayout(
        dtype=dtype,
        fill=NARROW_MISSING if spec.narrow_allowed else MISSING,
        axes=("rows", "layers", "topk"),
        trailing=(layers, top_k),
        chunk_rows=CHUNK_ROWS,
        shard_rows=CHUNK_ROWS * max(1, rows),
        split=layers > 1,
    )


def token_layout(dtype: np.dtype[Any], *, axis: str = "tokens", shard_bytes: int = DEFAULT_SHARD_BYTES) -> ArrayLayout:
    """Return the layout of an array ``[T]`` beside the routes: token ids, log-probabilities, a token column."""
    chunks = min(shard_bytes // (4 * CHUNK_TOKENS * dtype.itemsize), 128)
    return ArrayLayout(
        dtype=dtype,
        fill=_no_value(dtype),
        axes=(axis,),
        trailing=(),
        chunk_rows=CHUNK_TOKENS,
        shard_rows=CHUNK_TOKENS * max(1, chunks),
    )


def column_layout(kind: ColumnType, *, index: int, shard_bytes: int = DEFAULT_SHARD_BYTES) -> ArrayLayout:
    """Return the layout of the values of the ``index``-th aligned column: ``[T, *shape]``, or ``[N]`` of all lists.

    Where the first axis of an entry is ``layers``, each layer has chunks of its own, as in ``routes``.
    """
    dtype = np.dtype(kind.dtype)
    if not kind.shape:
        return token_layout(dtype, axis=f"{kind.axes[0]}_{index}" if kind.ragged else "tokens")
    split = kind.axes[0] == "layers" and kind.shape[0] > 1
    entry = int(np.prod(kind.shape)) * dtype.itemsize
    rows = CHUNK_ROWS if split else max(1, min(CHUNK_TOKENS, 2**18 // entry))
    chunks = min(shard_bytes // (rows * entry), _MAX_SHARD_CHUNKS // (kind.shape[0] if split else 1))
    return ArrayLayout(
        dtype=dtype,
        fill=_no_value(dtype),
        axes=("tokens", *kind.axes),
        trailing=kind.shape,
        chunk_rows=rows,
        shard_rows=rows * max(1, chunks),
        split=split,
    )


def _no_value(dtype: np.dtype[Any]) -> Any:
    if dtype.kind == "f":
        return "NaN"
    if dtype.kind == "b":
        return False
    return -1 if dtype.kind == "i" else int(np.iinfo(dtype).max)


# ----------------------------------------------------------------------------------------------------------------------
# Sealed documents
# ----------------------------------------------------------------------------------------------------------------------


def _canonical(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":")).encode("ascii")


def seal(body: Mapping[str, Any]) -> bytes:
    """Return the bytes of a document with a checksum over its canonical JSON."""
    return _canonical({"body": dict(body), "xxh3": file_hash(_canonical(body))}) + b"\n"


def unseal(data: bytes, *, where: str) -> dict[str, Any]:
    """Parse what ``seal`` wrote. Raises FormatError."""
    try:
        document = json.loads(data)
        body, expected = document["body"], document["xxh3"]
        if not isinstance(body, dict):
            raise TypeError(f"a body that is {type(body).__name__}")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise FormatError(f"expected a manifest as JSON, got {data[:60]!r} ({error}) @ {where}", kind=_MANIFEST) from (
            None
        )
    # serialised again: a flip in white space or in an escape changes no meaning
    if expected != file_hash(_canonical(body)):
        raise FormatError(
            f"expected a manifest of xxh3 {expected}, got {file_hash(_canonical(body))} @ {where}", kind=_MANIFEST
        )
    return body


class _Parser:
    """Turns what a senseless document raises into one FormatError."""

    def __init__(self, where: str) -> None:
        self._where = where

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, KeyError | TypeError | ValueError | AttributeError | IndexError | DataError | SpecError):
            text = error.message if isinstance(error, RouteplaneError) else repr(error)
            raise FormatError(
                f"expected a manifest with its members, got {text} @ {self._where}", kind=_MANIFEST
            ) from error


@dataclass(frozen=True, kw_only=True, slots=True)
class RunEntry:
    """One run as a commit names it.

    ``records``, ``tokens``, ``rows``: what can be read, so without deleted records. ``bytes``: of the files.
    ``digest``: xxh3-64 over the checksums of these records, in order. ``manifest``: the hash of the run's manifest
    file. ``folder``: below ``runs``. ``removed``: positions of deleted records, ascending; their bytes stay until
    ``compact``.

    >>> run = RunEntry(name="a", records=1, tokens=5, rows=5, bytes=90, digest="0", manifest="1", folder="a-1")
    >>> run.key("routes")
    'runs/a-1/routes'
    """

    name: str
    records: int
    tokens: int
    rows: int
    bytes: int
    digest: str
    manifest: str
    folder: str
    removed: tuple[int, ...] = ()

    def key(self, path: str) -> str:
        """Return the key of something inside the run."""
        return f"{RUNS}/{self.folder}/{path}"

    @classmethod
    def parse(cls, entry: Mapping[str, Any]) -> RunEntry:
        """Return the entry of a commit's JSON. Raises UsageError, DataError, TypeError for senseless ones."""
        run = cls(**{"folder": entry["name"], **entry, "removed": tuple(entry.get("removed", ()))})
        check_run_name(run.name)
        if not _FOLDER.fullmatch(run.folder):
            raise ValueError(f"a run in the folder {run.folder!r}")
        for name in ("records", "tokens", "rows", "bytes"):
            check_count(getattr(run, name), name, below=2**63)
        for name in ("digest", "manifest"):
            check_text(getattr(run, name), name)
        if list(run.removed) != sorted({check_count(item, "removed", below=2**63) for item in run.removed}):
            raise ValueError(f"positions that do not ascend: {run.removed}")
        return run


@dataclass(frozen=True, kw_only=True, slots=True)
class Commit:
    """The state of an archive. ``number`` counts from 1; a commit holds all runs, those before it included.

    ``history``: the seals of the commits before it, from number 1; an empty text where one is not known.

    >>> spec = RouteSpec(num_experts=8, top_k=2, layer_ids=(0,))
    >>> Commit(number=2, spec=spec, seal="5e").snapshot
    '2-5e'
    """

    number: int
    spec: RouteSpec
    runs: tuple[RunEntry, ...] = ()
    history: tuple[str, ...] = ()
    seal: str = ""

    @property
    def snapshot(self) -> str:
        """The number and the checksum of this state: what ``expected_snapshot=`` takes."""
        return f"{self.number}-{self.seal}"

    def follows(self, number: int, expected: str) -> bool:
        """Whether this commit is the one of that number and seal, or was built on it."""
        if number == self.number:
            return expected == self.seal
        return 0 < number < self.number and self.history[number - 1] in (expected, "")

    def to_json(self) -> bytes:
        """Return the bytes of the commit's file."""
        runs = [{name: getattr(run, name) for name in RunEntry.__slots__} for run in self.runs]
        return seal(
            {
                "archive": ARCHIVE_VERSION,
                "format": FORMAT_VERSION,
                "number": self.number,
                "spec": json.loads(self.spec.to_json()),
                "runs": [{**run, "removed": list(run["removed"])} for run in runs],
                "history": list(self.history),
            }
        )

    @classmethod
    def from_json(cls, data: bytes, *, where: str) -> Commit:
        """Parse what ``to_json`` wrote. Raises FormatError."""
        body = unseal(data, where=where)
        check_version(body.get("archive"), where=where)
        with _Parser(where):
            number = check_count(body["number"], "number", below=10**10)
            # archives of version 1.0 keep no history
            history = tuple(check_text(item, "a seal", empty=True) for item in body.get("history", [""] * (number - 1)))
            if number < 1 or len(history) != number - 1:
                raise ValueError(f"commit {number} with {len(history)} before it")
            return cls(
                number=number,
                spec=RouteSpec.from_json(json.dumps(body["spec"])),
                runs=tuple(RunEntry.parse(entry) for entry in body["runs"]),
                history=history,
                seal=file_hash(_canonical(body)),
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """One file of an array: its size in bytes, and the crc32c of its index (None: archives of version 1.0)."""

    bytes: int
    seal: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class ArrayEntry:
    """One zarr array: its whole ``zarr.json``, and its shards in order."""

    document: Mapping[str, Any]
    shards: tuple[Shard, ...]

    @property
    def rows(self) -> int:
        """Its length."""
        return int(self.document["shape"][0])

    @classmethod
    def parse(cls, entry: Mapping[str, Any]) -> ArrayEntry:
        """Return the entry of a manifest's JSON."""
        shards = [(item, None) if isinstance(item, int) else item for item in entry["shards"]]
        return cls(
            document=entry["document"], shards=tuple(Shard(bytes=size, seal=checksum) for size, checksum in shards)
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the entry as JSON."""
        return {"document": dict(self.document), "shards": [[shard.bytes, shard.seal] for shard in self.shards]}


@dataclass(frozen=True, kw_only=True, slots=True)
class TablePart:
    """One file of the record table."""

    records: int
    bytes: int
    hash: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RunManifest:
    """Everything a run consists of.

    ``arrays``: key below the run -> array. ``columns``: what each aligned column declares, by name, in the order of
    the arrays ``columns/0``, ``columns/1``, ... (a name is any text, not a path); lists have ``columns/0_ends`` beside
    their values, and columns with unknown entries ``columns/0_valid``.
    ``keys``: the hash of the file of key hashes.
    ``digest``: xxh3-64 over the record checksums in order. ``attributes``: text given when the run was saved.
    """

    name: str
    records: int
    tokens: int
    rows: int
    digest: str
    columns: Mapping[str, ColumnType]
    arrays: Mapping[str, ArrayEntry]
    parts: tuple[TablePart, ...]
    keys: str
    attributes: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def nbytes(self) -> int:
        """Size of the shards and the record table."""
        shards = (shard for array in self.arrays.values() for shard in array.shards)
        return sum(shard.bytes for shard in shards) + sum(part.bytes for part in self.parts)

    def to_json(self) -> bytes:
        """Return the bytes of the manifest's file."""
        plain = ("name", "records", "tokens", "rows", "digest", "keys")
        return seal(
            {
                "archive": ARCHIVE_VERSION,
                **{name: getattr(self, name) for name in plain},
                "columns": [[name, _column_document(kind)] for name, kind in self.columns.items()],
                "arrays": {key: array.to_dict() for key, array in self.arrays.items()},
                "parts": [[part.records, part.bytes, part.hash] for part in self.parts],
                "attributes": dict(self.attributes),
            }
        )

    @classmethod
    def from_json(cls, data: bytes, *, where: str) -> RunManifest:
        """Parse what ``to_json`` wrote. Raises FormatError."""
        body = unseal(data, where=where)
        check_version(body.get("archive"), where=where)
        plain = ("name", "records", "tokens", "rows", "digest", "keys")
        with _Parser(where):
            return cls(
                **{name: body[name] for name in plain},
                columns=MappingProxyType(dict(_columns(body))),
                arrays=MappingProxyType({key: ArrayEntry.parse(entry) for key, entry in body["arrays"].items()}),
                parts=tuple(
                    TablePart(records=records, bytes=size, hash=found) for records, size, found in body["parts"]
                ),
                attributes=MappingProxyType(dict(body["attributes"])),
            )


def _column_document(kind: ColumnType) -> Any:
    return kind.dtype if kind.plain else kind.to_document()


def _columns(body: Mapping[str, Any]) -> Iterator[tuple[str, ColumnType]]:
    for index, entry in enumerate(body["columns"]):
        if isinstance(entry, str):  # archives of version 1.0 name columns alone
            yield entry, ColumnType(dtype=body["arrays"][f"columns/{index}"]["document"]["data_type"])
            continue
        name, document = entry
        yield name, ColumnType(dtype=document) if isinstance(document, str) else ColumnType.from_document(document)


# ----------------------------------------------------------------------------------------------------------------------
# The record table
# ----------------------------------------------------------------------------------------------------------------------

#: Records of one file, at most; and entries of their spans and captures together, at most.
PART_RECORDS = 1_024
PART_ENTRIES = 65_536

#: Columns of the record table.
TABLE_SCHEMA = pa.schema(
    [
        pa.field("sample_id", pa.utf8(), nullable=False),
        pa.field("attempt", pa.int32(), nullable=False),
        pa.field("segment", pa.int32(), nullable=False),
        pa.field("group", pa.utf8()),
        pa.field("token_start", pa.int64(), nullable=False),
        pa.field("num_tokens", pa.int64(), nullable=False),
        pa.field("row_start", pa.int64(), nullable=False),
        pa.field("routes_start", pa.int64(), nullable=False),
        pa.field("tokens_start", pa.int64(), nullable=False),
        pa.field("prefix", PREFIX_TYPE),
        pa.field("spans", pa.list_(SPAN_TYPES["1.1"]), nullable=False),
        pa.field("captures", pa.list_(CAPTURE_TYPE), nullable=False),
        pa.field("has_logprobs", pa.bool_(), nullable=False),
        pa.field("attributes", pa.map_(pa.utf8(), pa.utf8()), nullable=False),
        pa.field("checksum", pa.uint64(), nullable=False),
    ]
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One record of S tokens (``num_tokens``) without its arrays.

    Its tokens from ``tokens_start`` on stand at ``[token_start, token_start + num_tokens - tokens_start)`` of the run's
    token arrays, its rows at ``[row_start, row_start + num_tokens - routes_start)`` of ``routes``.
    """

    sample_id: str
    attempt: int
    segment: int
    group: str | None
    token_start: int
    num_tokens: int
    row_start: int
    routes_start: int
    tokens_start: int
    prefix: Prefix | None
    spans: tuple[Span, ...]
    captures: tuple[Capture, ...]
    has_logprobs: bool
    attributes: dict[str, str]
    checksum: int

    @property
    def key(self) -> RecordKey:
        """``(sample_id, attempt, segment)``."""
        return RecordKey(self.sample_id, self.attempt, self.segment)

    @property
    def num_rows(self) -> int:
        """Rows of the record's own."""
        return self.num_tokens - self.routes_start


def key_hash(key: RecordKey) -> int:
    """Return xxh3-64 of sample id, attempt and segment, parted by U+0000."""
    return xxhash.xxh3_64_intdigest(f"{key.sample_id}\0{key.attempt}\0{key.segment}".encode(errors="surrogatepass"))


def read_keys(data: bytes, *, records: int, where: str) -> NDArray[np.uint64]:
    """Return the hashes of all keys of a run, in order. Raises FormatError."""
    if len(data) != 8 * records:
        raise FormatError(
            f"expected the hashes of {records} keys, got {len(data)} bytes @ {where}", kind=ErrorKind.MANIFEST
        )
    return np.frombuffer(data, dtype="<u8").astype(np.uint64, copy=False)


def row_of(record: RouteRecord, *, token_start: int, row_start: int) -> Row:
    """Return the row of a record whose arrays begin there."""
    return Row(
        sample_id=record.sample_id,
        attempt=record.attempt,
        segment=record.segment,
        group=record.group,
        token_start=token_start,
        num_tokens=record.num_tokens,
        row_start=row_start,
        routes_start=record.routes_start,
        tokens_start=record.tokens_start,
        prefix=record.prefix,
        spans=record.spans,
        captures=record.captures,
        has_logprobs=record.logprobs is not None,
        attributes=dict(record.attributes),
        checksum=record.checksum,
    )


def encode_rows(rows: Sequence[Row]) -> bytes:
    """Return one Parquet file of the rows, zstd inside, with page checksums for other readers."""
    sink = pa.BufferOutputStream()
    pq.write_table(_table(rows), sink, compression="zstd", write_page_checksum=True)
    return bytes(sink.getvalue().to_pybytes())


def _table(rows: Sequence[Row]) -> pa.Table:
    columns = {name: [getattr(row, name) for row in rows] for name in TABLE_SCHEMA.names}
    columns["prefix"] = [None if row.prefix is None else _members(row.prefix, PREFIX_TYPE) for row in rows]
    columns["spans"] = [[_span(item) for item in row.spans] for row in rows]
    columns["captures"] = [[_members(item, CAPTURE_TYPE) for item in row.captures] for row in rows]
    columns["attributes"] = [sorted(row.attributes.items()) for row in rows]
    return pa.table(columns, schema=TABLE_SCHEMA)


def _span(span: Span) -> dict[str, object]:
    members = _members(span, SPAN_TYPES["1.1"])
    if span.sampling is not None:
        members["sampling"] = _members(span.sampling, SAMPLING_TYPE)
    return members


def _members(item: Any, kind: pa.StructType) -> dict[str, object]:
    return {field.name: getattr(item, field.name) for field in kind}


class TablePartReader:
    """The rows of one file, decoded one by one."""

    def __init__(self, data: bytes, *, where: str) -> None:
        try:
            self.table = pq.read_table(pa.BufferReader(data), memory_map=False)
            self.table.validate(full=True)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise FormatError(
                f"expected a record table in Parquet, got a damaged one: {error} @ {where}",
                kind=ErrorKind.CORRUPT_BATCH,
            ) from error
        if not set(TABLE_SCHEMA.names) - {"tokens_start"} <= set(self.table.column_names):
            raise FormatError(
                f"expected the columns {TABLE_SCHEMA.names}, got {self.table.column_names} @ {where}",
                kind=ErrorKind.SCHEMA,
            )

        if self.table.schema != TABLE_SCHEMA:  # of archives of version 1.0
            self.table = _table([_row(entry) for entry in self.table.to_pylist()])

    def __len__(self) -> int:
        return int(self.table.num_rows)

    @property
    def nbytes(self) -> int:
        """Memory of the decoded columns."""
        return int(self.table.nbytes)

    def row(self, index: int) -> Row:
        """Return one row. Raises DataError for spans, captures or a prefix that are illegal."""
        (entry,) = self.table.slice(index, 1).to_pylist()
        return _row(entry)


def _row(entry: dict[str, Any]) -> Row:
    try:
        prefix = entry["prefix"]
        return Row(
            **{
                "tokens_start": 0,
                **{name: entry[name] for name in TABLE_SCHEMA.names if name in entry},
                "prefix": None if prefix is None else Prefix(**prefix),
                "spans": tuple(_read_span(item) for item in entry["spans"]),
                "captures": tuple(Capture(**item) for item in entry["captures"]),
                "attributes": dict(entry["attributes"]),
            }
        )
    except TypeError as error:
        raise DataError(f"expected a row without nulls, got one with ({error})", kind=ErrorKind.SCHEMA) from error


def _read_span(item: dict[str, Any]) -> Span:
    if item.get("sampling") is None:
        return Span(**item)
    sampling = dict(item["sampling"])
    if sampling["processors"] is not None:
        sampling["processors"] = tuple(sampling["processors"])
    return Span(**{**item, "sampling": Sampling(**sampling)})
