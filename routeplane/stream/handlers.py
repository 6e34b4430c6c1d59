"""What a network service does when it is asked by name: JSON in, JSON and batches out, over a gate.

Owns the stream's spec, encoding and token columns, which the first producer brings and all must share. Knows no
network; ``flight_service`` does.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from routeplane.errors import DataError, ErrorKind, FormatError, SpecError, TransportError, refused
from routeplane.record.record import RecordKey
from routeplane.record.schema import Encoding, StreamHeader, choose_encoding, parse_schema
from routeplane.record.spec import RouteSpec
from routeplane.stream import messages
from routeplane.stream.batches import decoded
from routeplane.stream.delivery import Block
from routeplane.stream.gate import Gate
from routeplane.stream.selection import Selection, check_block, cut_batch, keys_of

__all__ = ["Handlers"]

# A wait on the service's side ends after so long, and the client asks again: a client that left costs no thread.
_WAIT_S = 2.0


class Handlers:
    """What each named action does with a JSON object."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate
        self._changed = threading.Condition()
        known = gate.known()
        self._spec: RouteSpec | None = None if known is None else known[0]
        self._encoding: Encoding = "plain" if known is None else known[1]
        self._header: StreamHeader | None = None
        self._schema: pa.Schema | None = None
        if gate.restored is not None:
            self._header, self._schema = parse_schema(gate.restored.schema), gate.restored.schema

    # -- the stream's meaning ----------------------------------------------------------------------------------------

    def describe(self, document: Mapping[str, Any]) -> bytes:
        """Spec and encoding, once a producer brought them; an empty object where none did in time."""
        with self._changed:
            self._changed.wait_for(lambda: self._spec is not None, timeout=_wait(document))
            if self._spec is None:
                return messages.dump()
            return messages.dump(spec=self._spec.to_json(), encoding=self._encoding)

    def _adopt(self, spec: RouteSpec, encoding: Encoding) -> None:
        with self._changed:
            if self._spec is None:
                self.gate.note(spec, encoding)
                self._spec, self._encoding = spec, encoding
                self._changed.notify_all()
            if spec != self._spec or encoding != self._encoding:
                raise SpecError(
                    f"expected the stream's spec ({self._spec.model!r}) and encoding ({self._encoding}), got "
                    f"{spec.model!r} in {encoding}",
                    kind=ErrorKind.SPEC_MISMATCH,
                )

    def header_of(self, schema: pa.Schema) -> StreamHeader:
        """The header of a schema that a producer sends, which must be the stream's."""
        with self._changed:
            if self._header is not None and schema.equals(self._schema, check_metadata=True):
                return self._header
        header = parse_schema(schema)
        self._adopt(header.spec, header.encoding)
        with self._changed:
            if self._header is None:
                self._header, self._schema = header, schema
            if header.columns != self._header.columns:
                raise DataError(
                    f"expected the stream's token columns {self._header.columns}, got {header.columns}",
                    kind=ErrorKind.TOKEN_COLUMN,
                )
            return self._header

    def cut(self, blocks: Sequence[Block], selection: Selection) -> tuple[pa.Schema, list[tuple[Any, bytes]]]:
        """Blocks as what travels: batches, each with its JSON. A block with a bad record goes whole, for the consumer
        to deal with by its own policy."""
        if self._header is None:
            return pa.schema([]), []
        parts = []
        for block in blocks:
            batch, is_cut = block.payload, False
            if not selection.whole:
                batch, is_cut = self._cut_or_whole(block.payload, selection)
            parts.append((batch, messages.dump(block=messages.dump_block(block), cut=is_cut)))
        schemas = [batch.schema for batch, _ in parts]
        return (schemas[0] if schemas else self._schema), parts

    def _cut_or_whole(self, batch: pa.RecordBatch, selection: Selection) -> tuple[pa.RecordBatch, bool]:
        try:
            return cut_batch(batch, self._known(), selection=selection), True
        except DataError:
            return batch, False

    def _known(self) -> StreamHeader:
        if self._header is None:
            raise refused("a stream with records", "one that has none yet")
        return self._header

    # -- producers ---------------------------------------------------------------------------------------------------

    def attach(self, document: Mapping[str, Any]) -> bytes:
        """A session."""
        spec = RouteSpec.from_json(document["spec"])
        self._adopt(spec, choose_encoding(document["encoding"], spec))
        before = None if document.get("before") is None else messages.totals_of(document["before"])
        session = self.gate.attach_as(document["owner"], document["producer"], first=document["first"], before=before)
        return messages.dump(session=session)

    def reserve(self, document: Mapping[str, Any]) -> bytes:
        """Whether there is room for a block now."""
        session, block = messages.session_of(document["session"]), messages.block_of(document["block"])
        return messages.dump(room=self.gate.reserve(session, block, timeout_s=_wait(document)))

    def heartbeat(self, document: Mapping[str, Any]) -> bytes:
        """The session as it stands."""
        return messages.dump(session=self.gate.heartbeat(messages.session_of(document["session"])))

    def acknowledged(self, document: Mapping[str, Any]) -> bytes:
        """The session once everything below a number may be forgotten; an empty object where that took too long."""
        session = messages.session_of(document["session"])
        try:
            done = self.gate.wait_acknowledged(session, through=document["through"], timeout_s=_wait(document))
        except TransportError as error:
            if error.kind != ErrorKind.TIMED_OUT:
                raise
            return messages.dump()
        return messages.dump(session=done)

    def close(self, document: Mapping[str, Any]) -> bytes:
        """End a producer as whole."""
        self.gate.close(messages.session_of(document["session"]), totals=messages.totals_of(document["totals"]))
        return messages.dump()

    def abort(self, document: Mapping[str, Any]) -> bytes:
        """End a producer as not whole."""
        self.gate.abort(messages.session_of(document["session"]))
        return messages.dump()

    def disconnect(self, document: Mapping[str, Any]) -> bytes:
        """Free a producer's name."""
        self.gate.disconnect(messages.session_of(document["session"]))
        return messages.dump()

    def seal(self, document: Mapping[str, Any]) -> bytes:
        """No further producer will come."""
        self.gate.seal()
        return messages.dump()

    # -- consumers ---------------------------------------------------------------------------------------------------

    def join(self, document: Mapping[str, Any]) -> bytes:
        """A membership."""
        member = self.gate.join(document["group"], document["consumer"], cursor=document.get("cursor"))
        return messages.dump(member=member)

    def acknowledge(self, document: Mapping[str, Any]) -> bytes:
        """Done with a producer's blocks below a number."""
        member = messages.membership_of(document["member"])
        self.gate.acknowledge(member, producer=document["producer"], through=document["through"])
        return messages.dump()

    def leave(self, document: Mapping[str, Any]) -> bytes:
        """Leave a group."""
        self.gate.leave(messages.membership_of(document["member"]))
        return messages.dump()

    def retire(self, document: Mapping[str, Any]) -> bytes:
        """Let go of blocks of old weights."""
        retired = self.gate.retire(below=document["below"])
        return messages.dump(retired=retired)

    # -- people ------------------------------------------------------------------------------------------------------

    def health(self, document: Mapping[str, Any]) -> bytes:
        """That it answers."""
        return messages.dump(status="serving")

    def metrics(self, document: Mapping[str, Any]) -> bytes:
        """The delivery report."""
        return messages.dump(scalars=self.gate.report().scalars())

    # -- payloads ----------------------------------------------------------------------------------------------------

    def put(self, command: Mapping[str, Any], *, schema: pa.Schema, batch: pa.RecordBatch) -> bytes:
        """A block, room for which was reserved."""
        self.header_of(schema)
        decoded(lambda: batch.validate(full=True), "record batch")
        # the keys came with ``reserve``, and stand in the batch
        block = messages.block_of({**command["block"], "keys": keys_of(batch)}, payload=batch)
        if batch.nbytes > block.nbytes:
            raise FormatError(
                f"expected at most the {block.nbytes} bytes that were asked room for, got {batch.nbytes}",
                kind=ErrorKind.TOO_LARGE,
            )
        check_block(batch, block)
        session = self.gate.put(messages.session_of(command["session"]), block, timeout_s=_WAIT_S)
        return messages.dump(session=session)

    def take(self, command: Mapping[str, Any]) -> tuple[pa.Schema, list[tuple[Any, bytes]]]:
        """The next blocks of a consumer, and how far its stream is."""
        member = messages.membership_of(command["member"])
        taken = self.gate.take(member, max_blocks=command["max_blocks"], timeout_s=_wait(command))
        schema, parts = self.cut(taken.blocks, Selection(**command["selection"]))
        return schema, [*parts, (_nothing(schema), messages.dump(progress=taken.progress))]

    def fetch(self, command: Mapping[str, Any]) -> tuple[pa.Schema, list[tuple[Any, bytes]]]:
        """Records by key, for whoever holds a ticket. Takes nothing from anybody."""
        selection, header = Selection(**command["selection"]), self._known()
        batches = []
        for block, keys in self.gate.holding(RecordKey(*each) for each in command["keys"]):
            there = keys_of(block.payload)
            rows = sorted(there.index(key) for key in keys)
            batches.append(cut_batch(block.payload, header, selection=selection, rows=rows))
        schema = batches[0].schema if batches else self._schema
        return schema, [*((batch, messages.dump()) for batch in batches), (_nothing(schema), messages.dump(end=True))]


def _wait(document: Mapping[str, Any]) -> float:
    return float(min(max(float(document.get("wait_s", 0.0)), 0.0), _WAIT_S))


def _nothing(schema: pa.Schema) -> pa.RecordBatch:
    # schema.empty_table() fails on large_list<fixed_shape_tensor> (pyarrow 26); nulls of length 0 do not
    return pa.RecordBatch.from_arrays([pa.nulls(0, each.type) for each in schema], schema=schema)
