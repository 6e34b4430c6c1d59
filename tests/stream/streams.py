"""What the stream tests share: small records, whole streams as bytes, forged streams, and what counts as the same.

Axes: S tokens, L layers, K slots.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import strategies as st

from routeplane.errors import RouteplaneError
from routeplane.record.batches import TRAILER_KEY, Trailer, TrailerCounter
from routeplane.record.codec import column_types, write_batch
from routeplane.record.record import RouteRecord
from routeplane.record.schema import arrow_schema
from routeplane.record.spans import Capture, Span
from routeplane.record.spec import RouteSpec
from routeplane.stream import new_stream, open_stream
from routeplane.testing.strategies import records, specs
from tests.format.documents import record_json

__all__ = [
    "SPEC",
    "Encoding",
    "content",
    "contents",
    "flip_outcomes",
    "forge",
    "forged_column",
    "record",
    "record_lists",
    "refusal",
    "stream_of",
    "trailer_of",
]

Encoding = Literal["plain", "narrow"]

#: Narrow enough for either encoding.
SPEC = RouteSpec(num_experts=64, top_k=2, layer_ids=(1, 4), model="tests/stream")


def record(sample: int, tokens: int = 5, *, spec: RouteSpec = SPEC, **changes: Any) -> RouteRecord:
    """A record of one call whose rows tell sample, token and layer apart; the last token was not fed."""
    token_S = np.arange(tokens)[:, None, None]
    width_L1 = np.asarray(spec.experts_per_layer)[:, None]
    first_SL1 = 13 * sample + 3 * token_S + 7 * np.asarray(spec.layer_ids)[:, None]
    routes_SLK = ((first_SL1 + np.arange(spec.top_k)) % width_L1).astype(np.int16)
    routes_SLK[-1] = -1
    fed = [Capture(start=0, stop=tokens - 1, call="c0", weights_version=3, state="captured")] if tokens > 1 else []
    not_fed = Capture(start=tokens - 1, stop=tokens, call="c0", weights_version=None, state="not_fed")
    whole: dict[str, Any] = {
        "sample_id": f"sample-{sample}",
        "token_ids": 1_000 * sample + np.arange(tokens),
        "routes": routes_SLK,
        "spans": (Span(start=0, stop=tokens, kind="generation", role="assistant", call="c0", weights_version=3),),
        "captures": (*fed, not_fed),
        "spec": spec,
    }
    return RouteRecord(**{**whole, **changes})


@st.composite
def record_lists(draw: st.DrawFn, *, max_size: int = 4, max_experts: int = 256) -> tuple[RouteSpec, list[RouteRecord]]:
    """A spec that either encoding can carry, and records fit for one stream: unique keys, the same token columns."""
    spec = draw(specs(max_experts=max_experts).filter(lambda found: found.narrow_allowed))
    found = draw(st.lists(records(spec=spec), max_size=max_size, unique_by=lambda item: item.key))
    if any(column_types(item) != column_types(found[0]) for item in found):
        found = [replace(item, columns={}, checksum=None) for item in found]
    return spec, found


# ----------------------------------------------------------------------------------------------------------------------
# Streams as bytes
# ----------------------------------------------------------------------------------------------------------------------


def stream_of(found: Iterable[RouteRecord], *, spec: RouteSpec = SPEC, **options: Any) -> bytes:
    """A whole stream as the library writes it."""
    sink = io.BytesIO()
    with new_stream(sink, spec, **options) as writer:
        for item in found:
            writer.write(item)
    return sink.getvalue()


def trailer_of(
    found: Sequence[RouteRecord],
    *,
    spec: RouteSpec = SPEC,
    encoding: Encoding = "plain",
    batches: int = 1,
    **options: Any,
) -> Trailer:
    """The trailer that a stream of these records has."""
    counter = TrailerCounter(spec, encoding, **options)
    for _ in range(batches):
        counter.add_batch()
    for item in found:
        counter.add_record(item.checksum, len(item.token_ids))
    return counter.trailer()


def forge(
    batches: Sequence[pa.RecordBatch],
    *,
    trailer: Trailer | str | None,
    schema: pa.Schema | None = None,
    options: pa.ipc.IpcWriteOptions | None = None,
) -> bytes:
    """A stream of any batches under any schema, ended by any trailer or none."""
    found = batches[0].schema if schema is None else schema
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, found, options=options) as writer:
        for batch in batches:
            writer.write_batch(batch)
        if trailer is not None:
            text = trailer if isinstance(trailer, str) else trailer.to_json()
            empty = pa.RecordBatch.from_arrays([pa.nulls(0, field.type) for field in found], schema=found)
            writer.write_batch(empty, custom_metadata={TRAILER_KEY: text})
    return sink.getvalue()


def forged_column(found: Sequence[RouteRecord], name: str, values: Any, *, encoding: Encoding = "plain") -> bytes:
    """A stream in which one column holds something else, under the trailer of the true records (with its tokens)."""
    spec = found[0].spec
    batch = write_batch(found, spec, encoding=encoding)
    index = batch.schema.get_field_index(name)
    field = batch.schema.field(index)
    array = values if isinstance(values, pa.Array) else pa.array(values, field.type)
    arrays = [array if at == index else column for at, column in enumerate(batch.columns)]
    schema = arrow_schema(spec, encoding, columns=column_types(found[0]))
    schema = schema.set(index, pa.field(name, array.type, nullable=True))
    trailer = trailer_of(found, spec=spec, encoding=encoding)
    if name == "token_ids":
        trailer = replace(trailer, tokens=sum(array.value_lengths().fill_null(0).to_pylist()))
    return forge([pa.RecordBatch.from_arrays(arrays, schema=schema)], trailer=trailer)


# ----------------------------------------------------------------------------------------------------------------------
# The same, or refused
# ----------------------------------------------------------------------------------------------------------------------


def refusal(data: bytes, **policy: Any) -> RouteplaneError:
    """The error that reading gives, from bytes and from a file object alike."""
    found: list[RouteplaneError] = []
    for source in (data, io.BytesIO(data)):
        with pytest.raises(RouteplaneError) as caught:
            list(open_stream(source, **policy))
        found.append(caught.value)
    assert (type(found[0]), found[0].kind) == (type(found[1]), found[1].kind)
    assert re.search(r"(expected|needs) .*got ", str(found[0]), re.DOTALL)
    return found[0]


def content(item: RouteRecord) -> dict[str, Any]:
    """Everything a record says, types of token columns and the spec too, as values that compare."""
    return {**record_json(item), "spec": item.spec.to_json(), "type": f"{item.token_ids.dtype} {item.routes.dtype}"}


def contents(found: Iterable[RouteRecord]) -> list[dict[str, Any]]:
    """``content`` of each."""
    return [content(item) for item in found]


def flip_in_rows(data: bytes) -> bytes:
    """A stream with one bit flipped in the middle of a record's rows; as it is where no record has rows.

    The middle of the bytes may be anything else: a length, a part of the schema, padding.
    """
    with open_stream(data, on_alarm="ignore") as reader:
        stored = [np.ascontiguousarray(found.stored_routes) for found in reader]
    for rows in stored:
        for kind in (np.int16, np.uint8):  # plain, narrow
            written = rows.astype(kind).tobytes()
            if written and (at := data.find(written)) >= 0:
                changed = bytearray(data)
                changed[at + len(written) // 2] ^= 1
                return bytes(changed)
    return data


def flip_outcomes(data: bytes, places: Sequence[tuple[int, int]]) -> dict[str, list[tuple[int, int]]]:
    """What reading ``data`` gives with one byte changed, for each ``(position, mask)``; outcome -> places.

    ``same``, ``refused``, ``other content``, or the name of an error that is none of ours. Top-level and of plain
    values, so that it runs in a process of its own: what an unchecked buffer does to a reader is to abort.
    """
    expected = contents(open_stream(data))
    outcomes: dict[str, list[tuple[int, int]]] = {}
    for position, mask in places:
        damaged = bytearray(data)
        damaged[position] ^= mask
        try:
            outcome = "same" if expected == contents(open_stream(bytes(damaged))) else "other content"
        except RouteplaneError:
            outcome = "refused"
        except Exception as error:  # noqa: BLE001  whatever comes is the finding
            outcome = type(error).__name__
        outcomes.setdefault(outcome, []).append((position, mask))
    return outcomes
