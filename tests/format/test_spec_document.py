"""The spec page and the JSON Schema say what the code does: columns, keys, states, limits, names.

The page is read as text: its tables, not its sentences. Both are compared with the code, so none drifts alone.
"""

from __future__ import annotations

import json
import re
from typing import Any, get_args

import jsonschema
import pyarrow as pa
import pytest

from routeplane.record.aligned import COLUMN_TYPES, ColumnType
from routeplane.record.batches import TRAILER_KEY, TrailerCounter
from routeplane.record.codec import column_types
from routeplane.record.interfaces import MAX_TICKET_BYTES, RouteTicket
from routeplane.record.parse import RESERVED_COLUMNS
from routeplane.record.record import RecordKey
from routeplane.record.schema import FORMAT_VERSION, FORMATS, Encoding, arrow_schema, row_type
from routeplane.record.spans import PRESENT_STATES, STATES, SpanKind
from routeplane.record.spec import MAX_EXPERTS, MAX_LAYERS, MAX_TOP_K, MISSING, NARROW_MISSING, RouteSpec
from routeplane.stream.frames import MAX_METADATA_BYTES
from tests.format.documents import SCHEMAS, load
from tests.format.test_golden import one_call, token_columns

SCHEMA: dict[str, Any] = load(SCHEMAS / "routeplane-v1.schema.json")
FORMAT: dict[str, Any] = SCHEMA["x-format"]
PAGE = (SCHEMAS.parents[1] / "docs" / "spec" / "v1.md").read_text(encoding="utf-8")
SPEC = RouteSpec(num_experts=8, top_k=2, layer_ids=(0, 3), model="m")
ENCODINGS: tuple[Encoding, ...] = get_args(Encoding)


def section(title: str) -> str:
    """The text under a heading of the page, up to the next heading of any level."""
    found = re.search(rf"^#+ {re.escape(title)}\n(.*?)(?=^#|\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found is not None, title
    return found[1]


def table(title: str) -> list[list[str]]:
    """The cells of the first table under a heading, without the header; code marks removed."""
    rows = [line for line in section(title).splitlines() if line.startswith("|")]
    return [[cell.strip().replace("`", "") for cell in row.strip("|").split("|")] for row in rows[2:]]


def described(field: pa.Field, *, encoding: Encoding = "plain") -> dict[str, Any]:
    """An Arrow field in the words of the schema file."""
    kind, inner = field.type, None
    if pa.types.is_list(kind) and pa.types.is_struct(kind.value_type):
        name, inner = "list<struct>", kind.value_type
    elif pa.types.is_struct(kind):
        name, inner = "struct", kind
    elif pa.types.is_map(kind):
        name = f"map<{_word(kind.key_type)}, {_word(kind.item_type)}>"
    elif pa.types.is_list(kind):
        name = f"list<{_word(kind.value_type)}>"
    elif pa.types.is_large_list(kind):
        name = f"large_list<{_word(kind.value_type, encoding)}>"
    else:
        name = _word(kind)
    found: dict[str, Any] = {"name": field.name, "type": name, "nullable": field.nullable}
    if inner is not None:
        found["fields"] = [described(child) for child in inner]
    return found


def _word(kind: pa.DataType, encoding: Encoding = "plain") -> str:
    if kind.equals(row_type(SPEC, encoding)):
        return "fixed_shape_tensor<{encoding}, [L, K], dim_names=[layers, topk]>"
    return {"string": "utf8", "float": "float32", "halffloat": "float16", "double": "float64"}.get(str(kind), str(kind))


# ----------------------------------------------------------------------------------------------------------------------
# The schema file against the code
# ----------------------------------------------------------------------------------------------------------------------


def test_the_schema_is_a_schema() -> None:
    """The file is JSON Schema, and the documents that the code writes are of it."""
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    ticket = RouteTicket(stream="s", key=RecordKey("a", 0, 1), call_id="c", start=0, stop=3, checksum=2**64 - 1)
    trailer = TrailerCounter(SPEC, "plain").trailer()
    pruned = RouteSpec(num_experts=(8, 6), top_k=2, layer_ids=(0, 3))
    documents = (("spec", SPEC), ("spec", pruned), ("trailer", trailer), ("ticket", ticket))
    for name, document in documents:
        validator = jsonschema.Draft202012Validator({"$ref": f"#/$defs/{name}", "$defs": SCHEMA["$defs"]})
        validator.validate(json.loads(document.to_json()))


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_columns(encoding: Encoding) -> None:
    """Names, order, types and nullability of all columns and of their members are those that streams have."""
    assert FORMAT["columns"] == [described(field, encoding=encoding) for field in arrow_schema(SPEC, encoding)]
    value_type = arrow_schema(SPEC, encoding).field("routes").type.value_type.value_type
    assert FORMAT["encodings"][encoding] == str(value_type)


def test_names() -> None:
    """Version, metadata keys, encodings, kinds and states are those of the code."""
    assert FORMAT["version"] == FORMAT_VERSION
    assert FORMAT["versions"] == list(FORMATS)
    assert FORMAT["metadata"] == [key.decode() for key in arrow_schema(SPEC, "plain").metadata]
    assert FORMAT["trailer"] == TRAILER_KEY
    assert set(FORMAT["encodings"]) == set(ENCODINGS)
    assert FORMAT["span_kinds"] == list(get_args(SpanKind))
    assert list(FORMAT["capture_states"]) == list(STATES)
    assert {state for state, rows in FORMAT["capture_states"].items() if rows == "ids in every layer"} == PRESENT_STATES
    assert {"plain": MISSING, "narrow": NARROW_MISSING} == FORMAT["missing"]


def test_reserved_names() -> None:
    """What an aligned column may not be called: the fixed columns."""
    fixed = {column["name"] for column in FORMAT["columns"]}

    assert RESERVED_COLUMNS == fixed


def test_token_column_types() -> None:
    """Each type that the format lists can be written, and a token column is never null."""
    columns = token_columns(3)
    types = {kind.dtype for _, kind in column_types(one_call(SPEC, 3, sample=0, columns=columns))}

    assert set(FORMAT["token_columns"]["T"]) == types
    assert FORMAT["token_columns"]["T"] == list(COLUMN_TYPES)
    field = arrow_schema(SPEC, "plain", columns=[("x", ColumnType(dtype="int8"))]).field("x")
    assert FORMAT["token_columns"]["nullable"] == field.nullable
    assert FORMAT["token_columns"]["type"].replace("T", "int8") == described(field)["type"]


def test_limits() -> None:
    """Every limit of the file is the limit of the code, on both sides of the edge where a value object draws it."""
    limits = FORMAT["limits"]

    assert (MAX_EXPERTS, MAX_TOP_K, MAX_LAYERS) == (limits["num_experts"], limits["top_k"], limits["layers"])
    assert (MAX_METADATA_BYTES, MAX_TICKET_BYTES) == (limits["message_header_bytes"], limits["ticket_bytes"])
    for top_k, edge in ((2, limits["num_experts_narrow"]), (1, limits["num_experts_narrow_top_1"])):
        assert RouteSpec(num_experts=edge, top_k=top_k, layer_ids=(0,)).narrow_allowed
        assert not RouteSpec(num_experts=edge + 1, top_k=top_k, layer_ids=(0,)).narrow_allowed
    one_call(SPEC, 3, sample=0, attempt=limits["attempt"], segment=limits["segment"])
    for name in ("attempt", "segment"):
        with pytest.raises(ValueError, match=name):
            one_call(SPEC, 3, sample=0, **{name: limits[name] + 1})
    RouteSpec(num_experts=8, top_k=2, layer_ids=(limits["layer_id"],))
    with pytest.raises(ValueError, match="layer"):
        RouteSpec(num_experts=8, top_k=2, layer_ids=(limits["layer_id"] + 1,))


def test_definitions_have_the_same_limits() -> None:
    """The limits inside the definitions are those of the list."""
    definitions, limits = SCHEMA["$defs"], FORMAT["limits"]
    spec = definitions["spec"]["properties"]

    assert limits["num_experts"] == definitions["width"]["maximum"]
    assert limits["layers"] == spec["layer_ids"]["maxItems"] == spec["num_experts"]["oneOf"][1]["maxItems"]
    assert limits["top_k"] == spec["top_k"]["maximum"]
    assert limits["attempt"] == limits["segment"] == limits["layer_id"] == definitions["int31"]["maximum"]


# ----------------------------------------------------------------------------------------------------------------------
# The page against the schema file
# ----------------------------------------------------------------------------------------------------------------------


def test_page_columns() -> None:
    """The page's table lists the same columns, types and nullability, in order."""
    rows = table("6. Columns")
    kinds = {"struct": "struct (6.1)", "spans": "list<struct (6.2)>", "captures": "list<struct (6.3)>"}
    expected = [
        [
            str(index),
            column["name"],
            kinds.get(column["name"], kinds.get(column["type"], column["type"])).replace(
                "{encoding}", "int16 or uint8"
            ),
            "yes" if column["nullable"] else "no",
        ]
        for index, column in enumerate(FORMAT["columns"])
    ]

    assert expected == [row[:4] for row in rows]


@pytest.mark.parametrize(
    ("title", "name"), [("6.1 `prefix`", "prefix"), ("6.2 `spans`", "spans"), ("6.3 `captures`", "captures")]
)
def test_page_members(title: str, name: str) -> None:
    """The page lists the members of each struct with their types, in the order in which they are hashed."""
    sentence = re.search(r"^Members[^:]*: (.*?)\.\s", section(title), re.MULTILINE | re.DOTALL)
    (column,) = [column for column in FORMAT["columns"] if column["name"] == name]
    assert sentence is not None
    found = re.findall(r"`(\w+)` (\w+)( \(nullable\))?", sentence[1])

    assert [(m["name"], m["type"], " (nullable)" if m["nullable"] else "") for m in column["fields"]] == found


def test_page_tables() -> None:
    """Metadata keys, states, attributes, spec and trailer members of the page are those of the schema file."""
    definitions = SCHEMA["$defs"]

    assert FORMAT["metadata"] == [row[0] for row in table("4. Schema metadata")]
    assert list(FORMAT["capture_states"]) == [row[0] for row in table("6.3 `captures`")]
    for row in table("6.3 `captures`"):
        assert row[1].startswith(FORMAT["capture_states"][row[0]]), row
    assert FORMAT["attributes"] == [row[0] for row in table("6.6 Attributes with a meaning")]
    assert definitions["spec"]["required"] == [row[0] for row in table("5. The spec")]
    assert definitions["trailer"]["required"] == [row[0] for row in table("9. Trailer")]


def test_page_token_column_types() -> None:
    """The page lists the same value types of token columns."""
    sentence = re.search(r"value type T is one of (.*?):", section("6.5 Aligned columns"), re.DOTALL)
    assert sentence is not None

    assert FORMAT["token_columns"]["T"] == re.split(r",\s+", sentence[1])


def test_declarations_are_of_the_schema() -> None:
    """What a writer says of its columns is of the schema, and the schema knows every value type."""
    kinds = [
        ("a", ColumnType(dtype="float32", shape=(2, 4), aligned="fed", axes=("layers", "topk"))),
        ("b", ColumnType(dtype="int32", ragged=True, aligned="sampled", axes=("kept",), nullable=True)),
    ]
    raw = arrow_schema(SPEC, "plain", columns=kinds).metadata[b"routeplane.columns"]
    validator = jsonschema.Draft202012Validator({"$ref": "#/$defs/columns", "$defs": SCHEMA["$defs"]})
    validator.validate(json.loads(raw))
    entry = SCHEMA["$defs"]["columns"]["additionalProperties"]["properties"]

    assert list(COLUMN_TYPES) == entry["dtype"]["enum"]
    assert dict(kinds) == {name: ColumnType.from_document(one) for name, one in json.loads(raw).items()}


def test_page_limits() -> None:
    """The numbers in the page's table of limits are those of the schema file."""
    limits = FORMAT["limits"]
    top_1 = limits["num_experts_narrow_top_1"]
    rows = {row[0]: row[1] for row in table("13. Limits")}

    assert {
        "experts of a layer": f"{limits['num_experts']:,}",
        "experts of a layer under narrow": f"{limits['num_experts_narrow']}; {top_1} where K = 1",
        "top-k": f"{limits['top_k']}",
        "layers": f"{limits['layers']:,}",
        "layer id": "below 2^31",
        "message header": f"{limits['message_header_bytes']:,} bytes",
        "ticket": f"{limits['ticket_bytes']} bytes",
        "tokens of a record": "at least 1",
        "attempt, segment": "below 2^31",
    } == rows


def test_page_version() -> None:
    """The page is the one of this version."""
    assert f"Status: version {FORMAT_VERSION}" in PAGE
    assert f"`{FORMAT_VERSION}`" in section("4. Schema metadata")
