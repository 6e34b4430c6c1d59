"""Where everything of an archive stands, and what its arrays look like: names, versions, zarr documents.

Pure values; no IO. ``docs/reference/archive-format.md`` says the same for readers without this library.

Axes: T rows or tokens of a run, L captured layers, K top-k slots.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from routeplane.errors import ErrorKind, FormatError, refused
from routeplane.record.spec import MISSING, NARROW_MISSING

if TYPE_CHECKING:
    from routeplane.record.spec import RouteSpec

__all__ = [
    "ARCHIVE_VERSION",
    "CHUNK_ROWS",
    "CHUNK_TOKENS",
    "COMMITS",
    "DEFAULT_SHARD_BYTES",
    "ROOT",
    "ArrayLayout",
    "check_run_name",
    "check_version",
    "commit_key",
    "group_document",
    "leaf_document",
    "places_layout",
    "routes_layout",
    "run_folder",
    "run_key",
    "token_layout",
]

#: Version of the archive's layout. A reader of major N reads N and N - 1; the records inside have the format's own.
ARCHIVE_VERSION = "1.0"
#: Rows of one chunk of ``routes``: the unit of reading, and of damage (design section "archive").
CHUNK_ROWS = 512
#: Tokens of one chunk of the arrays without layers: 16 KiB of token ids.
CHUNK_TOKENS = 4_096
#: Uncompressed bytes of one shard of ``routes``, at most, where one row of chunks is not larger. What a writer holds.
DEFAULT_SHARD_BYTES = 32 * 2**20
#: Chunks of one shard, at most: its index, 16 bytes per chunk, is read whole whenever something of it is.
_MAX_SHARD_CHUNKS = 8_192

ROOT = "zarr.json"
COMMITS = "commits"

_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")
_VERSION = re.compile(r"(0|[1-9][0-9]{0,8})\.(0|[1-9][0-9]{0,8})")


def run_folder(run: str) -> str:
    """The key of a run."""
    return f"runs/{run}"


def run_key(run: str, path: str) -> str:
    """The key of something inside a run."""
    return f"runs/{run}/{path}"


def commit_key(number: int) -> str:
    """The key of a commit; names sort as numbers do."""
    return f"{COMMITS}/{number:010d}.json"


def check_run_name(name: str) -> None:
    """Raise UsageError for a name that is no folder of its own on every store."""
    if not _RUN_NAME.fullmatch(name):
        raise refused(
            "a run name of at most 100 letters, digits, _ and -, beginning with one of the former", repr(name)
        )


def check_version(text: Any, *, where: str) -> None:
    """Raise FormatError (VERSION) for an archive that this reader does not know."""
    if not isinstance(text, str) or not _VERSION.fullmatch(text):
        raise FormatError(
            f"expected an archive version like {ARCHIVE_VERSION}, got {text!r} @ {where}", kind=ErrorKind.VERSION
        )
    if text.partition(".")[0] != ARCHIVE_VERSION.partition(".")[0]:
        raise FormatError(
            f"expected archive version {ARCHIVE_VERSION.partition('.')[0]}.x, got {text}: read it with the routeplane "
            f"that wrote it, or a newer one @ {where}",
            kind=ErrorKind.VERSION,
        )


def group_document(attributes: dict[str, Any]) -> dict[str, Any]:
    """``zarr.json`` of a group."""
    return {"zarr_format": 3, "node_type": "group", "attributes": attributes}


def leaf_document() -> dict[str, Any]:
    """``zarr.json`` of an array without elements: below it zarr looks for no members, so other files may lie there."""
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [0],
        "data_type": "uint8",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [1]}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": 0,
        "codecs": [{"name": "bytes"}],
        "attributes": {},
        "storage_transformers": [],
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class ArrayLayout:
    """One zarr array of a run: ``[T, *trailing]``, cut along the first axis into chunks, and these into shards.

    ``shard_rows`` is a multiple of ``chunk_rows``. ``split``: whether each layer has chunks of its own. ``fill`` is
    what a row that was never written reads as: never an expert.
    """

    dtype: np.dtype[Any]
    fill: Any
    axes: tuple[str, ...]
    trailing: tuple[int, ...]
    chunk_rows: int
    shard_rows: int
    split: bool = False

    @property
    def chunk_shape(self) -> tuple[int, ...]:
        """What is compressed, and checked, as one."""
        return (self.chunk_rows, 1, *self.trailing[1:]) if self.split else (self.chunk_rows, *self.trailing)

    @property
    def columns(self) -> int:
        """Chunks beside each other in a shard: L, or 1."""
        return self.trailing[0] if self.split else 1

    def document(self, rows: int) -> dict[str, Any]:
        """``zarr.json`` of the array with that many rows."""
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
        """The key of one shard below the array's."""
        return "/".join(("c", str(index), *("0" for _ in self.trailing)))


def _sharding(chunk_shape: tuple[int, ...]) -> dict[str, Any]:
    little = {"name": "bytes", "configuration": {"endian": "little"}}
    return {
        "name": "sharding_indexed",
        "configuration": {
            "chunk_shape": list(chunk_shape),
            # Two checksums. crc32c is what zarr compares, before it decompresses anything; zarrs (0.2.3) compares it
            # where a shard is read whole, and leaves it out where a part is. zstd's own is compared by every decoder.
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
    """``routes`` ``[T, L, K]``: one byte per id where the narrow encoding allows it, chunks of (512 rows, one
    layer)."""
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
        split=True,
    )


def token_layout(dtype: np.dtype[Any], *, shard_bytes: int = DEFAULT_SHARD_BYTES) -> ArrayLayout:
    """An array ``[T]`` beside the routes: token ids, log-probabilities, a token column."""
    chunks = min(shard_bytes // (4 * CHUNK_TOKENS * dtype.itemsize), 128)
    return ArrayLayout(
        dtype=dtype,
        fill=_no_value(dtype),
        axes=("tokens",),
        trailing=(),
        chunk_rows=CHUNK_TOKENS,
        shard_rows=CHUNK_TOKENS * max(1, chunks),
    )


def places_layout() -> ArrayLayout:
    """``records`` ``[records, 4]``: where each record stands, for readers that know zarr and no Parquet."""
    return ArrayLayout(
        dtype=np.dtype(np.int64),
        fill=-1,
        axes=("records", "token_start num_tokens row_start routes_start"),
        trailing=(4,),
        chunk_rows=CHUNK_TOKENS,
        shard_rows=CHUNK_TOKENS * 16,
    )


def _no_value(dtype: np.dtype[Any]) -> Any:
    if dtype.kind == "f":
        return "NaN"
    if dtype.kind == "b":
        return False
    return -1 if dtype.kind == "i" else int(np.iinfo(dtype).max)
