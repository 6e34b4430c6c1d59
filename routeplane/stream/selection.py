"""What of stored records is asked for: layers and a range of positions, cut where they are stored.

A record is verified whole before it is cut, and what is left has a checksum of its own. Pure; no IO.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from routeplane.errors import DataError, ErrorKind, FormatError, refused
from routeplane.record.codec import read_records, write_batch
from routeplane.record.record import RecordKey, RouteRecord
from routeplane.record.schema import StreamHeader
from routeplane.stream.delivery import Block

__all__ = ["Selection", "check_block", "cut_batch", "keys_of"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """Layers (None: all) and positions ``[a, b)`` (None: all). Raises UsageError for an empty range."""

    layer_ids: tuple[int, ...] | None = None
    tokens: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.layer_ids is not None:
            object.__setattr__(self, "layer_ids", tuple(self.layer_ids))
        if self.tokens is not None:
            start, stop = self.tokens
            if not 0 <= start < stop:
                raise refused("tokens [a, b) with 0 <= a < b", str(self.tokens))
            object.__setattr__(self, "tokens", (start, stop))

    @property
    def whole(self) -> bool:
        """Whether nothing is cut."""
        return self.layer_ids is None and self.tokens is None

    def cut(self, record: RouteRecord) -> RouteRecord | None:
        """The record cut; None where it has no token in the range. Verifies first."""
        if self.tokens is not None:
            start, stop = self.tokens[0], min(self.tokens[1], record.num_tokens)
            if start >= stop:
                return None
            record = record.slice(start, stop)
        return record if self.layer_ids is None else record.select(self.layer_ids)


def keys_of(batch: pa.RecordBatch) -> tuple[RecordKey, ...]:
    """The keys of a batch, in order."""
    columns = [batch.column(name).to_pylist() for name in RecordKey._fields]
    return tuple(RecordKey(*key) for key in zip(*columns, strict=True))


def cut_batch(
    batch: pa.RecordBatch, header: StreamHeader, *, selection: Selection, rows: Sequence[int] | None = None
) -> pa.RecordBatch:
    """Rows of a validated batch (None: all), cut, as a batch of its own memory. Raises DataError for a bad record."""
    chosen = batch if rows is None or len(rows) == batch.num_rows else batch.take(pa.array(rows, pa.int64()))
    if selection.whole:
        return chosen
    kept: list[RouteRecord] = []
    for read in read_records(chosen, header):
        if isinstance(read, DataError):
            raise read
        cut = selection.cut(read.verify())
        if cut is not None:
            kept.append(cut)
    spec = header.spec if selection.layer_ids is None else header.spec.select(selection.layer_ids)
    return write_batch(kept, spec, encoding=header.encoding)


def check_block(batch: pa.RecordBatch, block: Block) -> None:
    """Raise FormatError unless a validated batch holds what its block declares; its keys are those of the batch."""
    digest = xxhash.xxh3_64(batch.column("checksum").to_numpy(zero_copy_only=False).astype("<u8").tobytes())
    found = (digest.intdigest(), _sum(batch.column("token_ids").value_lengths()), _newest(batch))
    declared = (block.digest, block.tokens, block.weights_version)
    if found != declared:
        raise FormatError(
            f"expected what block {block.sequence} of {block.producer!r} declares, got other records",
            kind=ErrorKind.TRAILER,
        )


def _sum(values: pa.Array) -> int:
    return int(pc.sum(values).as_py() or 0)


def _newest(batch: pa.RecordBatch) -> int | None:
    versions: list[Any] = [
        pc.max(pc.struct_field(batch.column(name).flatten(), "weights_version")).as_py()
        for name in ("spans", "captures")
    ]
    return max((version for version in versions if version is not None), default=None)
