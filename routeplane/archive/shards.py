"""Rows to the bytes of whole shards and back: cut into chunks, each compressed and checked, an index behind them.

The codec ``sharding_indexed`` of zarr v3, so that zarr reads what is written here. A shard is made once, in memory,
from rows that never change: its file is written whole, and the manifest knows its size and the checksum of its index.
A shard that differs from that is an error; to zarr it would be the fill value. Reading asks for the index and for the
chunks that hold the rows, in as few ranges as they lie in, and keeps indices up to a bound.

Axes: T rows of a shard, L layers, K top-k slots, N chunks.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from routeplane.archive.layout import ArrayLayout, Shard
from routeplane.errors import ErrorKind, FormatError, MissingExtraError

try:
    import google_crc32c
    from numcodecs import zstd
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] not in ("google_crc32c", "numcodecs"):
        raise
    raise MissingExtraError(
        "routeplane.archive needs numcodecs and google-crc32c: install the extra routeplane[zarr]",
        kind=ErrorKind.MISSING_EXTRA,
    ) from error

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from routeplane.archive.layout import ArrayEntry
    from routeplane.archive.store import ArchiveStore

__all__ = ["ChunkReader", "Range", "ShardWriter", "encode_shard", "joined", "neighbours"]

#: The index entry of a chunk that is not there (zarr v3, sharding codec).
_ABSENT = 2**64 - 1
#: Indices that a reader keeps: at most 128 KiB each.
_INDICES = 128
_ZSTD = pa.Codec("zstd")


# ----------------------------------------------------------------------------------------------------------------------
# Writing
# ----------------------------------------------------------------------------------------------------------------------


def encode_shard(rows: NDArray[Any], layout: ArrayLayout) -> bytes:
    """Return the bytes of one shard that holds ``rows`` ``[T, *trailing]``, T at most ``layout.shard_rows``.

    Its last chunk is padded with the fill value; chunks behind it are absent.
    """
    chunks = [chunk for block in _blocks(rows, layout) for chunk in _compressed(block, layout)]
    places = list(accumulate((len(chunk) for chunk in chunks), initial=0))
    index = np.full((layout.shard_chunks, 2), _ABSENT, dtype="<u8")
    index[: len(chunks), 0] = places[:-1]
    index[: len(chunks), 1] = [len(chunk) for chunk in chunks]
    return b"".join([*chunks, _checked(index.tobytes())])


def _blocks(rows: NDArray[Any], layout: ArrayLayout) -> Iterator[NDArray[Any]]:
    for start in range(0, len(rows), layout.chunk_rows):
        block = rows[start : start + layout.chunk_rows]
        if len(block) < layout.chunk_rows:
            whole = np.full((layout.chunk_rows, *layout.trailing), layout.fill_scalar, dtype=layout.dtype)
            whole[: len(block)] = block
            block = whole
        yield block


def _compressed(block: NDArray[Any], layout: ArrayLayout) -> Iterator[bytes]:
    little = block.astype(layout.dtype.newbyteorder("<"), copy=False)
    columns = np.ascontiguousarray(np.moveaxis(little, 1, 0)) if layout.split else little[None]
    for column in columns:
        yield _checked(
            bytes(zstd.compress(np.ascontiguousarray(column).reshape(-1).view(np.uint8), level=1, checksum=True))
        )


def _checked(data: bytes) -> bytes:
    """The bytes, and their crc32c behind them (zarr v3, codec ``crc32c``)."""
    return data + int(google_crc32c.value(data)).to_bytes(4, "little")


class ShardWriter:
    """One array of a run, row by row: holds less than a shard, and puts each shard as it fills.

    ``put`` takes the shard's key below the array's and its bytes.
    """

    def __init__(self, layout: ArrayLayout, *, put: Callable[[str, bytes], None]) -> None:
        self.layout = layout
        self.shards: list[Shard] = []
        self._put = put
        self._held = np.empty((layout.shard_rows, *layout.trailing), dtype=layout.dtype)
        self._count = 0
        self._flushed = 0

    @property
    def rows(self) -> int:
        """Rows given so far."""
        return self._flushed + self._count

    def append(self, rows: NDArray[Any]) -> None:
        """Copy rows ``[n, *trailing]``. They must fit the type: legal ids do, and -1 as a byte is 0xFF."""
        while len(rows):
            part = rows[: self.layout.shard_rows - self._count]
            self._held[self._count : self._count + len(part)] = part.astype(self.layout.dtype, copy=False)
            self._count += len(part)
            rows = rows[len(part) :]
            if self._count == self.layout.shard_rows:
                self._flush()

    def append_fill(self, count: int) -> None:
        """Add as many rows of the fill value."""
        step = self.layout.shard_rows
        for start in range(0, count, step):
            shape = (min(step, count - start), *self.layout.trailing)
            self.append(np.full(shape, self.layout.fill_scalar, dtype=self.layout.dtype))

    def finish(self) -> None:
        """Put what is held. A run of less than a shard gets shards of its own size."""
        if not self.shards:
            chunks = max(1, -(-self._count // self.layout.chunk_rows))
            self.layout = replace(self.layout, shard_rows=chunks * self.layout.chunk_rows)
        if self._count:
            self._flush()

    def _flush(self) -> None:
        data = encode_shard(self._held[: self._count], self.layout)
        self._put(self.layout.shard_key(len(self.shards)), data)
        self.shards.append(Shard(bytes=len(data), seal=int.from_bytes(data[-4:], "little")))
        self._flushed += self._count
        self._count = 0


# ----------------------------------------------------------------------------------------------------------------------
# Reading
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Range:
    """Rows ``[start, stop)`` of one array; of ``slots`` ``[first, last)`` of its second axis where given."""

    array: str
    start: int
    stop: int
    slots: tuple[int, int] | None = None


class ChunkReader:
    """The arrays of one run. ``folder``: their key. Safe for several threads, and after a fork."""

    def __init__(self, store: ArchiveStore, *, folder: str, arrays: dict[str, ArrayEntry]) -> None:
        self._store, self._folder, self._entries = store, folder, arrays
        self._layouts: dict[str, ArrayLayout] = {}
        self._indices: OrderedDict[tuple[str, int], NDArray[np.uint64]] = OrderedDict()

    def layout(self, array: str) -> ArrayLayout:
        """Return the layout of an array. Raises FormatError."""
        if array not in self._layouts:
            document = self._entries[array].document
            self._layouts[array] = ArrayLayout.of(document, where=f"{self._folder}/{array}")
        return self._layouts[array]

    def read(self, wanted: Range) -> NDArray[Any]:
        """Return the rows, in memory of their own, each chunk of them compared with its checksum.

        Raises FormatError: LOST_FILE where a shard is not what the manifest names, CORRUPT_CHUNK where a chunk or an
        index differs from its checksum.
        """
        layout = self.layout(wanted.array)
        rows = self._entries[wanted.array].rows
        if not 0 <= wanted.start <= wanted.stop <= rows:
            raise FormatError(
                f"expected {wanted.array} of at least {wanted.stop} rows, got {rows} @ {self._folder}",
                kind=ErrorKind.MANIFEST,
            )
        slots = range(layout.columns) if wanted.slots is None else range(*wanted.slots)
        blocks = range(wanted.start // layout.chunk_rows, -(-wanted.stop // layout.chunk_rows))
        if wanted.start == wanted.stop:
            blocks = range(0)
        inner = layout.trailing[1:] if layout.split else layout.trailing
        rows_T = np.empty((wanted.stop - wanted.start, len(slots), *inner), dtype=layout.dtype.newbyteorder("<"))
        for shard, part, first in _shards(blocks, layout):
            numbers = [block * layout.columns + slot for block in part for slot in slots]
            chunks_N = np.frombuffer(self._decoded(wanted.array, shard, numbers), dtype=rows_T.dtype)
            chunks_N = chunks_N.reshape(len(part), len(slots), layout.chunk_rows, *inner)
            for base, chunk in zip(blocks[first:], chunks_N, strict=False):
                _place(chunk, rows_T, start=base * layout.chunk_rows - wanted.start)
        return rows_T if layout.split else rows_T.reshape(-1, *layout.trailing)

    def _decoded(self, array: str, shard: int, numbers: Sequence[int]) -> pa.Buffer:
        """Decode chunks of one shard, numbered within it, one behind the other."""
        places_N = self._index(array, shard)[numbers]
        starts = places_N[:, 0].astype(np.int64)
        stops = starts + places_N[:, 1].astype(np.int64)
        # neighbours in the file are asked for at once
        edges = np.flatnonzero(np.append(True, starts[1:] != stops[:-1]))
        ranges = list(zip(starts[edges].tolist(), np.append(stops[edges[1:] - 1], stops[-1]).tolist(), strict=True))
        pieces = self._bytes(array, shard, ranges)
        bodies: list[bytes] = []
        for piece, first, last in zip(pieces, edges, [*edges[1:], len(numbers)], strict=True):
            origin = int(starts[first])
            bodies += (
                self._body(piece[start - origin : stop - origin], array)
                for start, stop in zip(starts[first:last].tolist(), stops[first:last].tolist(), strict=True)
            )
        layout = self.layout(array)
        size = len(numbers) * math.prod(layout.chunk_shape) * layout.dtype.itemsize
        # zstd frames behind each other are decoded as one: per call it makes a context that costs more than 4 KiB do
        try:
            return _ZSTD.decompress(b"".join(bodies), size)
        except (OSError, ValueError) as error:
            raise self._corrupt(f"{len(bodies)} chunks of {size} bytes, got {error}", array) from error

    def _body(self, chunk: bytes, array: str) -> bytes:
        """A chunk without its crc32c, compared with it."""
        body = chunk[:-4]
        if len(chunk) < 5 or int(google_crc32c.value(body)) != int.from_bytes(chunk[-4:], "little"):
            raise self._corrupt("a chunk that its crc32c stands for, got another", array)
        return body

    def _index(self, array: str, shard: int) -> NDArray[np.uint64]:
        """Where the chunks of a shard stand: uint64 ``[N, 2]``, first byte and length."""
        key = array, shard
        found = self._indices.get(key)
        if found is None:
            found = self._indices[key] = self._read_index(array, shard)
            while len(self._indices) > _INDICES:
                self._indices.popitem(last=False)
        return found

    def _read_index(self, array: str, shard: int) -> NDArray[np.uint64]:
        entry = self._entries[array].shards[shard]
        size = self.layout(array).shard_chunks * 16
        begin = entry.bytes - size - 4
        if begin < 0:
            raise self._corrupt(f"a shard with an index of {size} bytes, got {entry.bytes} in all", array)
        (data,) = self._bytes(array, shard, [(begin, entry.bytes)])
        found, expected = int(google_crc32c.value(data[:-4])), int.from_bytes(data[-4:], "little")
        if found != expected or entry.seal not in (None, expected):
            raise self._corrupt(f"an index of crc32c {entry.seal or expected}, got {found}", array)
        places_N = np.frombuffer(data[:-4], dtype="<u8").reshape(-1, 2)
        present_N = places_N[:, 0] != _ABSENT
        if (places_N[present_N].sum(axis=1) > begin).any() or (places_N[present_N] > begin).any():
            raise self._corrupt("chunks that lie in their shard, got others", array)
        return places_N

    def _bytes(self, array: str, shard: int, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        if any(stop - start < 0 or start < 0 for start, stop in ranges):
            raise self._corrupt("every chunk of the rows, got an index without some", array)
        entry = self._entries[array].shards[shard]
        key = f"{self._folder}/{array}/{self.layout(array).shard_key(shard)}"
        found = self._store.read_ranges(key, ranges, size=entry.bytes)
        if found is None:
            size = self._store.size(key)
            raise FormatError(
                f"expected a shard of {entry.bytes} bytes, got {'none' if size is None else size} @ {key}",
                kind=ErrorKind.LOST_FILE,
            )
        return found

    def _corrupt(self, text: str, array: str) -> FormatError:
        return FormatError(f"expected {text} @ {self._folder}/{array}", kind=ErrorKind.CORRUPT_CHUNK)


def _shards(blocks: range, layout: ArrayLayout) -> Iterator[tuple[int, range, int]]:
    """Each shard that holds some of the blocks, their numbers within it, and how many stood in shards before it."""
    each = layout.shard_rows // layout.chunk_rows
    block = blocks.start
    while block < blocks.stop:
        stop = min((block // each + 1) * each, blocks.stop)
        yield block // each, range(block % each, block % each + stop - block), block - blocks.start
        block = stop


def _place(chunk: NDArray[Any], rows_T: NDArray[Any], *, start: int) -> None:
    """Copy chunks beside each other, ``[slots, chunk_rows, ...]``, to rows ``[T, slots, ...]`` from ``start`` on."""
    first, last = max(start, 0), min(start + chunk.shape[1], len(rows_T))
    source, target = chunk[:, first - start : last - start], rows_T[first:last]
    if source.ndim == 3:  # one copy of K ids, not K copies
        whole = np.dtype((np.void, source.shape[2] * source.itemsize))
        source, target = source.view(whole), target.view(whole)
    target[:] = source.swapaxes(0, 1)


def neighbours(slots: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield ``[first, last)`` of each group of slots that follow each other: what one range reads."""
    first = last = slots[0]
    for slot in slots[1:]:
        if slot != last + 1:
            yield first, last + 1
            first = slot
        last = slot
    yield first, last + 1


def joined(found: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Put ranges of other slots of the same rows beside each other."""
    return found[0] if len(found) == 1 else np.concatenate(found, axis=1)
