"""Streams under another schema than their spec gives them: refused by name, before any batch is looked at."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from routeplane.errors import ErrorKind, FormatError
from routeplane.record.aligned import ColumnType
from routeplane.record.codec import write_batch
from routeplane.record.schema import SPAN_TYPES, arrow_schema, row_type
from routeplane.record.spec import RouteSpec
from routeplane.stream import open_stream
from tests.stream.streams import SPEC, contents, forge, record, refusal, trailer_of

RECORDS = [record(sample, 4 + sample) for sample in range(3)]
BATCH = write_batch(RECORDS, SPEC, encoding="plain")
TRAILER = trailer_of(RECORDS)


def schema_with(change: Callable[[list[pa.Field]], list[pa.Field]], **metadata: str | None) -> bytes:
    """A stream without records under a changed schema; metadata by the last part of its key, None leaves it out."""
    given = dict(BATCH.schema.metadata)
    for name, value in metadata.items():
        given.pop(b"routeplane." + name.encode())
        if value is not None:
            given[b"routeplane." + name.encode()] = value.encode()
    schema = pa.schema(change(list(BATCH.schema)), metadata=given)
    return forge([], trailer=trailer_of([], batches=0), schema=schema)


def put(name: str, kind: pa.DataType) -> Callable[[list[pa.Field]], list[pa.Field]]:
    """The column of that name with another type."""
    return lambda fields: [pa.field(name, kind) if field.name == name else field for field in fields]


def tensor(value: pa.DataType, shape: list[int], **options: Any) -> pa.DataType:
    """A routes column of another tensor."""
    return pa.large_list(pa.fixed_shape_tensor(value, shape, **options))


NAMED = {"dim_names": ["layers", "topk"]}
FORGED_SCHEMAS: dict[str, tuple[Callable[[list[pa.Field]], list[pa.Field]], str]] = {
    "no columns": (lambda fields: [], "schema"),
    "a column less": (lambda fields: fields[:-1], "schema"),
    "the first column gone": (lambda fields: fields[1:], "schema"),
    "two columns swapped": (lambda fields: [fields[1], fields[0], *fields[2:]], "schema"),
    "spans and captures swapped": (lambda fields: [*fields[:8], fields[9], fields[8], *fields[10:]], "schema"),
    "a column renamed": (lambda fields: [pa.field("sample", pa.utf8()), *fields[1:]], "schema"),
    "a column in front": (lambda fields: [pa.field("row", pa.int64()), *fields], "schema"),
    "routes as int32": (put("routes", tensor(pa.int32(), [2, 2], **NAMED)), "schema"),
    "routes as uint8 under plain": (put("routes", tensor(pa.uint8(), [2, 2], **NAMED)), "schema"),
    "routes as uint16": (put("routes", tensor(pa.uint16(), [2, 2], **NAMED)), "schema"),
    "a layer more": (put("routes", tensor(pa.int16(), [3, 2], **NAMED)), "schema"),
    "a layer less": (put("routes", tensor(pa.int16(), [1, 2], **NAMED)), "schema"),
    "layers and slots of another split": (put("routes", tensor(pa.int16(), [1, 4], **NAMED)), "schema"),
    "unnamed axes": (put("routes", tensor(pa.int16(), [2, 2])), "schema"),
    "axes the other way": (put("routes", tensor(pa.int16(), [2, 2], dim_names=["topk", "layers"])), "schema"),
    "a permuted tensor": (put("routes", tensor(pa.int16(), [2, 2], permutation=[1, 0], **NAMED)), "schema"),
    "routes as plain lists": (put("routes", pa.large_list(pa.list_(pa.int16(), 4))), "schema"),
    "routes as nested lists": (put("routes", pa.list_(pa.list_(pa.list_(pa.int64())))), "schema"),
    "routes in 32-bit lists": (put("routes", pa.list_(row_type(SPEC, "plain"))), "schema"),
    "tokens as int64": (put("token_ids", pa.large_list(pa.int64())), "schema"),
    "tokens in 32-bit lists": (put("token_ids", pa.list_(pa.int32())), "schema"),
    "keys as large text": (put("sample_id", pa.large_utf8()), "schema"),
    "checksum as int64": (put("checksum", pa.int64()), "schema"),
    "log-probabilities as float64": (put("logprobs", pa.large_list(pa.float64())), "schema"),
    "a span member less": (put("spans", pa.list_(pa.struct(list(SPAN_TYPES["1.1"])[:-1]))), "schema"),
    "captures as spans": (put("captures", pa.list_(SPAN_TYPES["1.1"])), "schema"),
    "dictionary-encoded keys": (put("sample_id", pa.dictionary(pa.int32(), pa.utf8())), "schema"),
    "a scalar column more": (lambda fields: [*fields, pa.field("reward", pa.float32())], "token_column"),
    "a text token column": (lambda fields: [*fields, pa.field("w", pa.large_list(pa.utf8()))], "token_column"),
    "a nested token column": (
        lambda fields: [*fields, pa.field("w", pa.large_list(pa.list_(pa.int8())))],
        "token_column",
    ),
    "a token column in 32-bit lists": (lambda fields: [*fields, pa.field("w", pa.list_(pa.int8()))], "token_column"),
    "a token column of dictionaries": (
        lambda fields: [*fields, pa.field("w", pa.large_list(pa.dictionary(pa.int8(), pa.int32())))],
        "token_column",
    ),
    "a nameless token column": (lambda fields: [*fields, pa.field("", pa.large_list(pa.int8()))], "token_column"),
    "a token column twice": (lambda fields: [*fields, *2 * [pa.field("w", pa.large_list(pa.int8()))]], "schema"),
    "a fixed column again": (lambda fields: [*fields, pa.field("group", pa.large_list(pa.int8()))], "schema"),
}


@pytest.mark.parametrize("name", FORGED_SCHEMAS)
def test_forged_schemas(name: str) -> None:
    """A column too few, too many, elsewhere, or of another type is refused before any batch is looked at."""
    change, kind = FORGED_SCHEMAS[name]
    found = refusal(schema_with(change))

    assert (FormatError, kind) == (type(found), str(found.kind))


FORGED_METADATA: dict[str, tuple[dict[str, str | None], str]] = {
    "no format": ({"format": None}, "not_routeplane"),
    "no spec": ({"spec": None}, "not_routeplane"),
    "no encoding": ({"encoding": None}, "not_routeplane"),
    "unknown major version": ({"format": "2.0"}, "version"),
    "no version": ({"format": "new"}, "version"),
    "unknown encoding": ({"encoding": "zstd"}, "encoding"),
    "no encoding's name": ({"encoding": ""}, "encoding"),
    "narrow over int16": ({"encoding": "narrow"}, "schema"),
    "no spec's text": ({"spec": "{"}, "schema"),
    "another layer count": ({"spec": replace(SPEC, layer_ids=(1, 4, 5)).to_json()}, "schema"),
    "another top-k": ({"spec": replace(SPEC, top_k=3).to_json()}, "schema"),
    "physical ids": ({"spec": SPEC.to_json().replace("logical", "physical")}, "schema"),
}


@pytest.mark.parametrize("name", FORGED_METADATA)
def test_forged_metadata(name: str) -> None:
    """A stream says its version, spec and encoding, and they agree with its columns."""
    changes, kind = FORGED_METADATA[name]
    found = refusal(schema_with(lambda fields: fields, **changes))

    assert (FormatError, kind) == (type(found), str(found.kind))


FORGED_DECLARATIONS: dict[str, str] = {
    "no JSON": "{",
    "an array": "[]",
    "an absent column": '{"y":{"aligned":"fed","axes":[],"dtype":"int8","null":null,"shape":[]}}',
    "another type": '{"x":{"aligned":"fed","axes":[],"dtype":"int16","null":null,"shape":[]}}',
    "a list": '{"x":{"aligned":"fed","axes":["a"],"dtype":"int8","null":null,"shape":null}}',
    "a shape": '{"x":{"aligned":"fed","axes":["a"],"dtype":"int8","null":null,"shape":[2]}}',
    "no axis for a shape": '{"x":{"aligned":"fed","axes":[],"dtype":"int8","null":null,"shape":[2]}}',
    "a huge shape": '{"x":{"aligned":"fed","axes":["a"],"dtype":"int8","null":null,"shape":[99999999999999999999]}}',
    "a negative shape": '{"x":{"aligned":"fed","axes":["a"],"dtype":"int8","null":null,"shape":[-1]}}',
    "nothing aligned": '{"x":{"aligned":null,"axes":[],"dtype":"int8","null":null,"shape":[]}}',
    "an unknown alignment": '{"x":{"aligned":"both","axes":[],"dtype":"int8","null":null,"shape":[]}}',
    "an unknown rule for nulls": '{"x":{"aligned":"fed","axes":[],"dtype":"int8","null":"zero","shape":[]}}',
    "a member more": '{"x":{"aligned":"fed","axes":[],"dtype":"int8","null":null,"shape":[],"unit":"s"}}',
    "a member less": '{"x":{"aligned":"fed","axes":[],"dtype":"int8","null":null}}',
    "deep": "[" * 100_000,
}


@pytest.mark.parametrize("name", FORGED_DECLARATIONS)
def test_forged_declarations(name: str) -> None:
    """What the metadata says of a column is what the column is, or the stream is refused."""
    base = arrow_schema(SPEC, "plain", columns=[("x", ColumnType(dtype="int8"))])
    schema = base.with_metadata({**base.metadata, b"routeplane.columns": FORGED_DECLARATIONS[name]})
    found = refusal(forge([], trailer=None, schema=schema))

    assert (FormatError, ErrorKind.TOKEN_COLUMN) == (type(found), found.kind)


def test_lists_end_at_int32() -> None:
    """A column of lists whose ends are int64 is another type, although it can say the same."""
    kind = ColumnType(dtype="int8", ragged=True, aligned="fed", axes=("a",))
    base = arrow_schema(SPEC, "plain", columns=[("x", kind)])
    wide = base.set(len(base) - 1, pa.field("x", pa.large_list(pa.large_list(pa.int8()))))
    found = refusal(forge([], trailer=None, schema=wide))

    assert (FormatError, ErrorKind.TOKEN_COLUMN) == (type(found), found.kind)


def test_an_unknown_major_version_comes_first() -> None:
    """What another version's stream looks like, its end included, is its own business: the version is the error."""
    schema = pa.schema([pa.field("x", pa.int8())], metadata={**BATCH.schema.metadata, b"routeplane.format": b"2.0"})
    found = refusal(forge([], trailer=None, schema=schema))

    assert (FormatError, ErrorKind.VERSION) == (type(found), found.kind)
    assert "2.0" in str(found)
    assert "1.0, 1.1" in str(found)


def test_a_foreign_stream_is_named_as_one() -> None:
    """Another program's Arrow stream is not reported as a cut stream of ours."""
    found = refusal(forge([pa.record_batch({"x": pa.array([1, 2])})], trailer=None))

    assert (FormatError, ErrorKind.NOT_ROUTEPLANE) == (type(found), found.kind)


def test_a_later_minor_version_is_refused() -> None:
    """A minor version above the reader's own may mean anything: the error names both."""
    schema = BATCH.schema.with_metadata({**BATCH.schema.metadata, b"routeplane.format": b"1.7"})
    later = pa.RecordBatch.from_arrays(BATCH.columns, schema=schema)
    found = refusal(forge([later], trailer=trailer_of(RECORDS, version="1.7")))

    assert (FormatError, ErrorKind.VERSION) == (type(found), found.kind)
    assert "1.7" in str(found)
    assert "1.1" in str(found)


def test_unknown_metadata_is_passed_over() -> None:
    """Metadata that this reader does not know reads."""
    schema = BATCH.schema.with_metadata({**BATCH.schema.metadata, b"routeplane.more": b"\xff\xfe"})
    again = pa.RecordBatch.from_arrays(BATCH.columns, schema=schema)

    assert contents(RECORDS) == contents(open_stream(forge([again], trailer=TRAILER)))


def relabelled(change: Callable[[pa.Field], pa.Field]) -> bytes:
    """The stream of the records, its columns cast to fields that some other writer might declare."""
    schema = pa.schema([change(field) for field in BATCH.schema], metadata=BATCH.schema.metadata)
    arrays = [
        column if column.type.equals(field.type) else column.cast(field.type)
        for column, field in zip(BATCH.columns, schema, strict=True)
    ]
    return forge([pa.RecordBatch.from_arrays(arrays, schema=schema)], trailer=TRAILER)


def test_names_of_list_children_mean_nothing() -> None:
    """Writers call a list's child what they like."""
    element = pa.large_list(pa.field("element", pa.int32()))
    data = relabelled(lambda field: field.with_type(element) if field.name == "token_ids" else field)

    assert contents(RECORDS) == contents(open_stream(data))


def test_nullable_flags_mean_nothing() -> None:
    """Writers mark columns, list children and members nullable or not as their types do; nulls are what is refused."""
    children = {
        "token_ids": pa.large_list(pa.field("item", pa.int32(), nullable=False)),
        "spans": pa.list_(pa.struct([field.with_nullable(True) for field in SPAN_TYPES["1.1"]])),
    }
    data = relabelled(lambda field: pa.field(field.name, children.get(field.name, field.type), nullable=True))

    assert contents(RECORDS) == contents(open_stream(data))


def test_a_token_column_of_another_type() -> None:
    """The same bytes under another type of the same width are another content, in the schema alone as well."""
    marked = [record(7, columns={"w": np.asarray([-1, 0, 1, 2, 3], dtype=np.int32)})]
    batch = write_batch(marked, SPEC, encoding="plain")
    for other in (pa.uint32(), pa.float32()):
        schema = arrow_schema(SPEC, "plain", columns=[("w", ColumnType(dtype=np.dtype(other.to_pandas_dtype()).name))])
        values = pa.LargeListArray.from_arrays(batch.column("w").offsets, batch.column("w").values.view(other))
        turned = pa.RecordBatch.from_arrays([*batch.columns[:-1], values], schema=schema)

        assert refusal(forge([turned], trailer=trailer_of(marked))).kind is ErrorKind.CHECKSUM


def test_narrow_where_it_is_not_allowed() -> None:
    """257 experts do not fit a byte, whatever the data's maximum is."""
    wide = RouteSpec(num_experts=257, top_k=2, layer_ids=(0,))
    schema = pa.schema(
        list(arrow_schema(SPEC, "narrow")),
        metadata={**arrow_schema(SPEC, "narrow").metadata, b"routeplane.spec": wide.to_json().encode()},
    )

    assert refusal(forge([], trailer=None, schema=schema)).kind is ErrorKind.ENCODING
