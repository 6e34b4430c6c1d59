"""A block as a whole Arrow IPC stream: schema, one batch, trailer. What is kept on disk, and what services carry.

Such a block says what it is and whether it is whole without anything around it; ``open_stream`` reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from routeplane.record.codec import write_batch
from routeplane.record.policy import ReadPolicy
from routeplane.record.schema import parse_schema
from routeplane.stream.batches import decoded
from routeplane.stream.batching import TRAILER_KEY, TrailerCounter
from routeplane.stream.files import frames_of
from routeplane.stream.ipc import IpcReader

if TYPE_CHECKING:
    from routeplane.record.record import RouteRecord
    from routeplane.record.schema import Encoding
    from routeplane.record.spec import RouteSpec

__all__ = ["IpcCodec", "batch_of_stream", "encode_block", "stream_of_batch", "trailer_batch"]


def trailer_batch(schema: pa.Schema) -> pa.RecordBatch:
    """The zero-row batch whose metadata is the trailer."""
    # schema.empty_table() fails on large_list<fixed_shape_tensor> (pyarrow 26); nulls of length 0 do not
    return pa.RecordBatch.from_arrays([pa.nulls(0, field.type) for field in schema], schema=schema)


def encode_block(records: Sequence[RouteRecord], spec: RouteSpec, *, encoding: Encoding) -> pa.Buffer:
    """Records, checked before, as a whole stream of one batch."""
    batch = write_batch(records, spec, encoding=encoding)
    counter = TrailerCounter(spec, encoding)
    counter.add_batch()
    for record in records:
        counter.add_record(record.checksum, record.num_tokens)
    return _framed(batch, counter)


def _framed(batch: pa.RecordBatch, counter: TrailerCounter) -> pa.Buffer:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
        writer.write_batch(trailer_batch(batch.schema), custom_metadata={TRAILER_KEY: counter.trailer().to_json()})
    return sink.getvalue()


def stream_of_batch(batch: pa.RecordBatch) -> pa.Buffer:
    """A validated batch that came by itself, as a whole stream."""
    header = parse_schema(batch.schema)
    counter = TrailerCounter(header.spec, header.encoding)
    counter.add_batch()
    tokens = batch.column("token_ids").value_lengths().to_pylist()
    for checksum, count in zip(batch.column("checksum").to_pylist(), tokens, strict=True):
        counter.add_record(checksum, count)
    return _framed(batch, counter)


def batch_of_stream(source: Any) -> pa.RecordBatch:
    """The one batch of a whole stream or file, validated; a view of it. Raises FormatError."""
    frames, _ = frames_of(source)
    schema_frame, batch_frame, *_ = frames
    schema = decoded(lambda: pa.ipc.read_schema(pa.ipc.read_message(schema_frame.data)), "schema")
    batch: pa.RecordBatch = decoded(
        lambda: pa.ipc.read_record_batch(pa.ipc.read_message(batch_frame.data), schema), "record batch"
    )
    decoded(lambda: batch.validate(full=True), "record batch")
    return batch


class IpcCodec:
    """Payloads are whole streams: buffers, or paths of files that hold them."""

    def __init__(self, spec: RouteSpec, *, encoding: Encoding) -> None:
        self._spec, self._encoding = spec, encoding

    def encode(self, records: Sequence[RouteRecord]) -> tuple[pa.Buffer, int]:
        """The records as a stream, and its size."""
        data = encode_block(records, self._spec, encoding=self._encoding)
        return data, data.size

    def open(self, payload: Any, policy: ReadPolicy) -> IpcReader:
        """The records of a stream or file, each a view of it where it is ``plain``."""
        frames, walkable = frames_of(payload)
        # whoever asks looks for alarms itself, and a block is whole or damaged
        return IpcReader(frames, replace(policy, on_alarm="ignore", on_truncated="raise"), walkable=walkable)
