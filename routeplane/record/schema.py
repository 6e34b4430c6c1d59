"""Format 1.1 in Arrow terms, and 1.0: RouteSpec <-> schema, columns, the names of the encodings, the version rule.

Schemas are read and checked here as pure values, before any payload is touched. ``columns`` turns records into batches
of these schemas and back; ``stream`` frames them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from routeplane.errors import DataError, ErrorKind, FormatError, SpecError, UsageError
from routeplane.record.aligned import ColumnType
from routeplane.record.parse import RESERVED_COLUMNS
from routeplane.record.spec import RouteSpec

__all__ = [
    "CAPTURE_TYPE",
    "FORMATS",
    "FORMAT_VERSION",
    "PREFIX_TYPE",
    "SAMPLING_TYPE",
    "SPAN_TYPES",
    "Encoding",
    "StreamHeader",
    "arrow_schema",
    "check_version",
    "choose_encoding",
    "column_arrow_type",
    "parse_schema",
    "row_type",
]

#: Version of the format, not of the library: what is written unless asked otherwise, and the newest that is read.
FORMAT_VERSION = "1.1"
#: Every version that is written and read.
FORMATS = ("1.0", "1.1")

Encoding = Literal["plain", "narrow"]

_VERSION = re.compile(r"(0|[1-9][0-9]{0,8})\.(0|[1-9][0-9]{0,8})")

_FORMAT_KEY, _SPEC_KEY, _ENCODING_KEY = b"routeplane.format", b"routeplane.spec", b"routeplane.encoding"
_COLUMNS_KEY = b"routeplane.columns"
# A declaration of some thousand columns; text beyond it is damage.
_MAX_DECLARATION = 2**20

#: With which parameters tokens were sampled; every member may be null.
SAMPLING_TYPE = pa.struct(
    [
        pa.field("temperature", pa.float64()),
        pa.field("top_p", pa.float64()),
        pa.field("top_k", pa.int64()),
        pa.field("min_p", pa.float64()),
        pa.field("presence_penalty", pa.float64()),
        pa.field("frequency_penalty", pa.float64()),
        pa.field("repetition_penalty", pa.float64()),
        pa.field("logit_bias", pa.utf8()),
        pa.field("processors", pa.list_(pa.utf8())),
        pa.field("logprobs_mode", pa.utf8()),
    ]
)
_SPAN_FIELDS = [
    pa.field("start", pa.int64(), nullable=False),
    pa.field("stop", pa.int64(), nullable=False),
    pa.field("kind", pa.utf8(), nullable=False),
    pa.field("role", pa.utf8()),
    pa.field("call", pa.utf8(), nullable=False),
    pa.field("weights_version", pa.int64()),
]
#: Who sampled: one entry of ``spans``, by version of the format.
SPAN_TYPES: Mapping[str, pa.StructType] = {
    "1.0": pa.struct(_SPAN_FIELDS),
    "1.1": pa.struct([*_SPAN_FIELDS, pa.field("sampling", SAMPLING_TYPE)]),
}
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
    """What a schema says before any record: the spec, the encoding, the version, and the aligned columns by name."""

    spec: RouteSpec
    encoding: Encoding
    version: str
    columns: tuple[tuple[str, ColumnType], ...] = ()


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


def arrow_schema(
    spec: RouteSpec,
    encoding: Encoding,
    *,
    columns: Sequence[tuple[str, ColumnType]] = (),
    version: str = FORMAT_VERSION,
) -> pa.Schema:
    """The schema of a stream; ``columns`` names the aligned columns and what they declare.

    Raises UsageError (VERSION) where ``version`` cannot say what spec or columns need.
    """
    check_version(version, spec=spec, columns=columns)
    declared = {name: kind.to_document() for name, kind in columns if not kind.plain}
    declaration = {_COLUMNS_KEY: json.dumps(declared, sort_keys=True, separators=(",", ":"))} if declared else {}
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
            pa.field("spans", pa.list_(SPAN_TYPES[version]), nullable=False),
            pa.field("captures", pa.list_(CAPTURE_TYPE), nullable=False),
            pa.field("logprobs", pa.large_list(pa.float32())),
            pa.field("attributes", pa.map_(pa.utf8(), pa.utf8()), nullable=False),
            pa.field("checksum", pa.uint64(), nullable=False),
            *(pa.field(name, column_arrow_type(kind), nullable=False) for name, kind in sorted(columns, key=_by_name)),
        ],
        metadata={
            _FORMAT_KEY: version,
            _SPEC_KEY: spec.to_json(),
            _ENCODING_KEY: encoding,
            **declaration,
        },
    )


def _by_name(column: tuple[str, ColumnType]) -> str:
    return column[0]


def check_version(version: str, *, spec: RouteSpec, columns: Sequence[tuple[str, ColumnType]] = ()) -> None:
    """Raise UsageError (VERSION) for a version that is not written, or that cannot say what spec or columns need."""
    if version not in FORMATS:
        raise UsageError(f"expected a format of {list(FORMATS)}, got {version!r}", kind=ErrorKind.VERSION)
    if version != "1.0":
        return
    needs = [f"column {name!r}, which declares {kind}" for name, kind in columns if not kind.plain]
    needs += [f"decoder_layers={spec.decoder_layers}"] if spec.decoder_layers is not None else []
    if needs:
        raise UsageError(f"expected format 1.1 for {needs[0]}, got 1.0", kind=ErrorKind.VERSION)


def column_arrow_type(kind: ColumnType) -> pa.DataType:
    """The Arrow type of a column: a list of numbers, of tensors of one shape, or of lists.

    A token's list ends at an int32: a mask of some ten ids a token would pay a fifth more for int64 ends.
    """
    value = pa.from_numpy_dtype(kind.dtype)
    if kind.ragged:
        return pa.large_list(pa.list_(value))
    if kind.shape:
        return pa.large_list(pa.fixed_shape_tensor(value, list(kind.shape), dim_names=list(kind.axes)))
    return pa.large_list(value)


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
    if version == "1.0" and spec.decoder_layers is not None:
        raise FormatError("expected a spec without decoder_layers in format 1.0, got one", kind=ErrorKind.SCHEMA)
    encoding = _check_encoding(metadata[_ENCODING_KEY], spec)
    declared = {} if version == "1.0" else _declarations(metadata.get(_COLUMNS_KEY, b"{}"))
    try:
        columns = _check_fields(schema, arrow_schema(spec, encoding, version=version), declared)
    except UnicodeDecodeError as error:  # pyarrow decodes names, of children too, only when asked for them
        raise FormatError(
            f"expected column names in utf-8, got a damaged one: {error}", kind=ErrorKind.SCHEMA
        ) from None
    return StreamHeader(spec=spec, encoding=encoding, version=version, columns=columns)


def _declarations(raw: bytes) -> dict[str, ColumnType]:
    """What the columns declare, by name. Raises FormatError."""
    try:
        document: Any = json.loads(raw[:_MAX_DECLARATION])
        if not isinstance(document, dict):
            raise ValueError(f"got {document!r}")
        return {name: ColumnType.from_document(entry) for name, entry in document.items()}
    except (ValueError, RecursionError, DataError) as error:
        raise FormatError(
            f"expected routeplane.columns as the declarations of columns, got what does not parse: {error}",
            kind=ErrorKind.TOKEN_COLUMN,
        ) from None


def _check_fields(
    schema: pa.Schema, fixed: pa.Schema, declared: Mapping[str, ColumnType]
) -> tuple[tuple[str, ColumnType], ...]:
    """Compare the format's own columns one by one; the rest are aligned columns."""
    names = schema.names
    if len(set(names)) != len(names):
        raise FormatError(f"expected each column once, got {names}", kind=ErrorKind.SCHEMA)
    for index, expected in enumerate(fixed):
        found = schema.field(index) if index < len(schema) else None
        if found is None or found.name != expected.name or not _same_type(found.type, expected.type):
            raise FormatError(
                f"expected column {index} to be {expected.name}: {expected.type}, got {found}", kind=ErrorKind.SCHEMA
            )
    extra = list(schema)[len(fixed) :]
    absent = sorted(set(declared) - {field.name for field in extra})
    if absent:
        raise FormatError(f"expected the declared columns {absent}, got none", kind=ErrorKind.TOKEN_COLUMN)
    return tuple(_aligned_column(field, declared.get(field.name)) for field in extra)


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
    if text not in FORMATS:
        raise FormatError(
            f"expected a format version of {', '.join(FORMATS)}, got {text}: read it with the routeplane that wrote "
            "it, or a newer one",
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


def _aligned_column(field: pa.Field, declared: ColumnType | None) -> tuple[str, ColumnType]:
    kind = field.type
    if declared is not None:
        fits, expected = _same_type(kind, column_arrow_type(declared)), f"{column_arrow_type(declared)}"
    else:
        numbers = pa.types.is_large_list(kind) and (
            pa.types.is_integer(kind.value_type)
            or pa.types.is_floating(kind.value_type)
            or pa.types.is_boolean(kind.value_type)
        )
        fits, expected = numbers, "a large_list of numbers or bools where it declares nothing"
        declared = ColumnType(dtype=np.dtype(kind.value_type.to_pandas_dtype()).name) if numbers else None
    if not fits or declared is None or not field.name or field.name in RESERVED_COLUMNS:
        raise FormatError(
            f"expected a column outside the format's own names, {expected}, got {field.name!r}: {kind}",
            kind=ErrorKind.TOKEN_COLUMN,
        )
    return field.name, declared
