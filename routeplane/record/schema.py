"""Format v1 in Arrow terms: RouteSpec <-> schema, the names of the encodings, the version rule.

Schemas are read and checked here as pure values, before any payload is touched. ``columns`` turns records into batches
of these schemas and back; ``stream`` frames them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import pyarrow as pa

from routeplane.errors import ErrorKind, FormatError, SpecError, UsageError
from routeplane.record.parse import RESERVED_COLUMNS
from routeplane.record.spec import RouteSpec

__all__ = [
    "CAPTURE_TYPE",
    "FORMAT_VERSION",
    "PREFIX_TYPE",
    "SPAN_TYPE",
    "Encoding",
    "StreamHeader",
    "arrow_schema",
    "choose_encoding",
    "parse_schema",
    "row_type",
]

#: Version of the format, not of the library. A reader of major N reads N and N - 1.
FORMAT_VERSION = "1.0"

Encoding = Literal["plain", "narrow"]

_VERSION = re.compile(r"(0|[1-9][0-9]{0,8})\.(0|[1-9][0-9]{0,8})")

_FORMAT_KEY, _SPEC_KEY, _ENCODING_KEY = b"routeplane.format", b"routeplane.spec", b"routeplane.encoding"

#: Who sampled: one entry of ``spans``.
SPAN_TYPE = pa.struct(
    [
        pa.field("start", pa.int64(), nullable=False),
        pa.field("stop", pa.int64(), nullable=False),
        pa.field("kind", pa.utf8(), nullable=False),
        pa.field("role", pa.utf8()),
        pa.field("call", pa.utf8(), nullable=False),
        pa.field("weights_version", pa.int64()),
    ]
)
#: Who captured: one entry of ``captures``.
CAPTURE_TYPE = pa.struct(
    [
        pa.field("start", pa.int64(), nullable=False),
        pa.field("stop", pa.int64(), nullable=False),
        pa.field("state", pa.utf8(), nullable=False),
        pa.field("call", pa.utf8(), nullable=False),
        pa.field("weights_version", pa.int64()),
    ]
)
#: Where the rows before ``routes_start`` stand.
PREFIX_TYPE = pa.struct(
    [
        pa.field("sample_id", pa.utf8(), nullable=False),
        pa.field("attempt", pa.int32(), nullable=False),
        pa.field("segment", pa.int32(), nullable=False),
        pa.field("stop", pa.int64(), nullable=False),
        pa.field("checksum", pa.uint64(), nullable=False),
    ]
)


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamHeader:
    """What a schema says before any record: the spec, the encoding, the version, and the token columns by name."""

    spec: RouteSpec
    encoding: Encoding
    version: str
    columns: tuple[tuple[str, pa.DataType], ...] = ()


def choose_encoding(wanted: str, spec: RouteSpec) -> Encoding:
    """``auto`` is narrow where the spec allows it. Raises UsageError for narrow where it does not, or another name."""
    if wanted == "auto":
        return "narrow" if spec.narrow_allowed else "plain"
    if wanted == "narrow" and not spec.narrow_allowed:
        raise UsageError(
            f"expected at most 256 experts for the narrow encoding (255 with top-1), got {spec.num_experts}",
            kind=ErrorKind.ENCODING,
        )
    if wanted == "narrow":
        return "narrow"
    if wanted == "plain":
        return "plain"
    raise UsageError(f"expected encoding plain, narrow or auto, got {wanted!r}", kind=ErrorKind.ENCODING)


def arrow_schema(spec: RouteSpec, encoding: Encoding, *, columns: Sequence[tuple[str, pa.DataType]] = ()) -> pa.Schema:
    """The schema of a stream; ``columns`` names the token columns and their value types."""
    return pa.schema(
        [
            pa.field("sample_id", pa.utf8(), nullable=False),
            pa.field("attempt", pa.int32(), nullable=False),
            pa.field("segment", pa.int32(), nullable=False),
            pa.field("group", pa.utf8()),
            pa.field("token_ids", pa.large_list(pa.int32()), nullable=False),
            pa.field("routes_start", pa.int64(), nullable=False),
            pa.field("routes", pa.large_list(row_type(spec, encoding)), nullable=False),
            pa.field("prefix", PREFIX_TYPE),
            pa.field("spans", pa.list_(SPAN_TYPE), nullable=False),
            pa.field("captures", pa.list_(CAPTURE_TYPE), nullable=False),
            pa.field("logprobs", pa.large_list(pa.float32())),
            pa.field("attributes", pa.map_(pa.utf8(), pa.utf8()), nullable=False),
            pa.field("checksum", pa.uint64(), nullable=False),
            *(pa.field(name, pa.large_list(value_type), nullable=False) for name, value_type in sorted(columns)),
        ],
        metadata={
            _FORMAT_KEY: FORMAT_VERSION,
            _SPEC_KEY: spec.to_json(),
            _ENCODING_KEY: encoding,
        },
    )


def row_type(spec: RouteSpec, encoding: Encoding) -> pa.FixedShapeTensorType:
    """One token's rows: a fixed-shape tensor ``[L, K]`` of int16 (plain) or uint8 (narrow)."""
    value = pa.uint8() if encoding == "narrow" else pa.int16()
    return pa.fixed_shape_tensor(value, list(spec.row_shape), dim_names=["layers", "topk"])


# -- reading a schema ------------------------------------------------------------------------------------------------


def parse_schema(schema: pa.Schema) -> StreamHeader:
    """Read and check a schema as a pure value, before any payload is touched. Raises FormatError."""
    metadata = schema.metadata or {}
    for key in (_FORMAT_KEY, _SPEC_KEY, _ENCODING_KEY):
        if key not in metadata:
            raise FormatError(
                f"expected the schema metadata {key.decode()}, got {sorted(map(repr, metadata))}",
                kind=ErrorKind.NOT_ROUTEPLANE,
            )
    version = _check_version(metadata[_FORMAT_KEY])
    try:
        spec = RouteSpec.from_json(metadata[_SPEC_KEY])
    except SpecError as error:
        raise FormatError(f"schema metadata routeplane.spec: {error}", kind=ErrorKind.SCHEMA) from error
    encoding = _check_encoding(metadata[_ENCODING_KEY], spec)
    try:
        columns = _check_fields(schema, arrow_schema(spec, encoding))
    except UnicodeDecodeError as error:  # pyarrow decodes names, of children too, only when asked for them
        raise FormatError(
            f"expected column names in utf-8, got a damaged one: {error}", kind=ErrorKind.SCHEMA
        ) from None
    return StreamHeader(spec=spec, encoding=encoding, version=version, columns=columns)


def _check_fields(schema: pa.Schema, fixed: pa.Schema) -> tuple[tuple[str, pa.DataType], ...]:
    """Compare the format's own columns one by one; the rest are token columns."""
    names = schema.names
    if len(set(names)) != len(names):
        raise FormatError(f"expected each column once, got {names}", kind=ErrorKind.SCHEMA)
    for index, expected in enumerate(fixed):
        found = schema.field(index) if index < len(schema) else None
        if found is None or found.name != expected.name or not _same_type(found.type, expected.type):
            raise FormatError(
                f"expected column {index} to be {expected.name}: {expected.type}, got {found}", kind=ErrorKind.SCHEMA
            )
    return tuple(_token_column(field) for field in list(schema)[len(fixed) :])


def _same_type(found: pa.DataType, expected: pa.DataType) -> bool:
    """Equal but for nullable flags (nulls themselves are refused) and the names of list and map children, which other
    writers choose otherwise."""
    if found.id != expected.id or found.num_fields != expected.num_fields:
        return False
    if expected.num_fields == 0 or isinstance(expected, pa.BaseExtensionType):
        return bool(found.equals(expected))
    return all(
        (found.field(at).name == expected.field(at).name or not pa.types.is_struct(expected))
        and _same_type(found.field(at).type, expected.field(at).type)
        for at in range(expected.num_fields)
    )


def _check_version(raw: bytes) -> str:
    text = raw.decode("ascii", "replace")
    if not _VERSION.fullmatch(text):
        raise FormatError(f"expected a format version like {FORMAT_VERSION}, got {text[:40]!r}", kind=ErrorKind.VERSION)
    if text.partition(".")[0] != FORMAT_VERSION.partition(".")[0]:
        raise FormatError(
            f"expected format version {FORMAT_VERSION.partition('.')[0]}.x, got {text}: "
            "read it with the routeplane that wrote it, or a newer one",
            kind=ErrorKind.VERSION,
        )
    return text


def _check_encoding(raw: bytes, spec: RouteSpec) -> Encoding:
    text = raw.decode("ascii", "replace")
    if text not in ("plain", "narrow") or (text == "narrow" and not spec.narrow_allowed):
        raise FormatError(
            f"expected encoding plain{', narrow' if spec.narrow_allowed else ''}, got {text!r}", kind=ErrorKind.ENCODING
        )
    return "narrow" if text == "narrow" else "plain"


def _token_column(field: pa.Field) -> tuple[str, pa.DataType]:
    kind = field.type
    fits = pa.types.is_large_list(kind) and (
        pa.types.is_integer(kind.value_type)
        or pa.types.is_floating(kind.value_type)
        or pa.types.is_boolean(kind.value_type)
    )
    if not fits or not field.name or field.name in RESERVED_COLUMNS:
        raise FormatError(
            f"expected a token column outside the format's own names, a large_list of numbers or bools, got "
            f"{field.name!r}: {kind}",
            kind=ErrorKind.TOKEN_COLUMN,
        )
    return field.name, kind.value_type
