"""Rows to the bytes of whole shards: cut into chunks, each compressed and checked, an index behind them.

The codec ``sharding_indexed`` of zarr v3, written here and read by zarr. A shard is made once, in memory, from rows
that never change, so its file is written whole, its size is known, and no store needs to take it in parts.

Axes: T rows of a shard, L layers, K top-k slots.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import google_crc32c
import numpy as np
from numcodecs import zstd

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from routeplane.archive.layout import ArrayLayout

__all__ = ["ShardWriter", "encode_shard"]

#: The index entry of a chunk that is not there (zarr v3, sharding codec).
_ABSENT = 2**64 - 1


def encode_shard(rows: NDArray[Any], layout: ArrayLayout) -> bytes:
    """The bytes of one shard that holds ``rows`` ``[T, *trailing]``, T at most ``layout.shard_rows``.

    Its last chunk is padded with the fill value; chunks behind it are absent.
    """
    chunks = [chunk for block in _blocks(rows, layout) for chunk in _compressed(block, layout)]
    places = list(accumulate((len(chunk) for chunk in chunks), initial=0))
    index = np.full((layout.shard_rows // layout.chunk_rows * layout.columns, 2), _ABSENT, dtype="<u8")
    index[: len(chunks), 0] = places[:-1]
    index[: len(chunks), 1] = [len(chunk) for chunk in chunks]
    return b"".join([*chunks, _checked(index.tobytes())])


def _blocks(rows: NDArray[Any], layout: ArrayLayout) -> Iterator[NDArray[Any]]:
    for start in range(0, len(rows), layout.chunk_rows):
        block = rows[start : start + layout.chunk_rows]
        if len(block) < layout.chunk_rows:
            whole = np.full((layout.chunk_rows, *layout.trailing), _fill(layout), dtype=layout.dtype)
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


def _fill(layout: ArrayLayout) -> Any:
    return np.nan if layout.fill == "NaN" else layout.fill


class ShardWriter:
    """One array of a run, row by row: holds less than a shard, and puts each shard as it fills.

    ``put`` takes the shard's key below the array's and its bytes.
    """

    def __init__(self, layout: ArrayLayout, *, put: Callable[[str, bytes], None]) -> None:
        self.layout = layout
        self.shards: list[int] = []
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
        """As many rows of the fill value."""
        step = self.layout.shard_rows
        for start in range(0, count, step):
            shape = (min(step, count - start), *self.layout.trailing)
            self.append(np.full(shape, _fill(self.layout), dtype=self.layout.dtype))

    def finish(self) -> None:
        """Put what is held. A run of less than a shard gets shards of its own size."""
        if self._count and not self.shards:
            chunks = -(-self._count // self.layout.chunk_rows)
            self.layout = replace(self.layout, shard_rows=chunks * self.layout.chunk_rows)
        if self._count:
            self._flush()

    def _flush(self) -> None:
        data = encode_shard(self._held[: self._count], self.layout)
        self._put(self.layout.shard_key(len(self.shards)), data)
        self.shards.append(len(data))
        self._flushed += self._count
        self._count = 0
