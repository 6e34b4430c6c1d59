"""Records, calls and specs of the library as plain JSON values, and back: what the golden and conformance files hold.

The JSON forms are those of ``schemas/v1/README.md``. Tests only.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from routeplane.record.aligned import AlignedColumn, ColumnType
from routeplane.record.calls import ModelCall
from routeplane.record.record import Prefix, RouteRecord
from routeplane.record.spans import Capture, Sampling, Span
from routeplane.record.spec import RouteSpec

__all__ = [
    "SCHEMAS",
    "call_of",
    "dump",
    "load",
    "record_json",
    "record_of",
    "routes_of",
    "spec_json",
    "spec_of",
]

#: The machine-readable side of format v1.
SCHEMAS = Path(__file__).parents[2] / "schemas" / "v1"

_SPAN = ("start", "stop", "kind", "role", "call", "weights_version")
_CAPTURE = ("start", "stop", "state", "call", "weights_version")


def load(path: Path) -> Any:
    """A JSON file."""
    return json.loads(path.read_text(encoding="utf-8"))


def dump(path: Path, document: object) -> None:
    """Write JSON that a person can read and a diff can show: innermost lists on one line."""
    path.write_text(_layout(document, 0) + "\n", encoding="utf-8")


def _layout(value: object, depth: int) -> str:
    flat = json.dumps(value, ensure_ascii=False)
    if not isinstance(value, dict | list) or len(flat) + 2 * depth <= 110:
        return flat
    inner = "  " * (depth + 1)
    if isinstance(value, dict):
        lines = [f"{inner}{json.dumps(key)}: {_layout(item, depth + 1)}" for key, item in value.items()]
        return "{\n" + ",\n".join(lines) + "\n" + "  " * depth + "}"
    return "[\n" + ",\n".join(inner + _layout(item, depth + 1) for item in value) + "\n" + "  " * depth + "]"


def spec_of(document: dict[str, Any]) -> RouteSpec:
    """The spec that a JSON object describes."""
    return RouteSpec.from_json(json.dumps(document))


def spec_json(spec: RouteSpec) -> dict[str, Any]:
    """The other way."""
    document: dict[str, Any] = json.loads(spec.to_json())
    return document


def routes_of(rows: list[Any], spec: RouteSpec, *, dtype: type[np.integer[Any]] = np.int16) -> NDArray[Any]:
    """Rows ``[S, L, K]`` as an array, of the right shape also where there are none."""
    return np.asarray(rows, dtype=dtype).reshape(len(rows), *spec.row_shape)


def record_of(document: dict[str, Any], spec: RouteSpec) -> RouteRecord:
    """The record that a JSON object describes; its ``checksum``, if any, is given, not computed."""
    prefix = document["prefix"]
    checksum = document.get("checksum")
    return RouteRecord(
        sample_id=document["sample_id"],
        attempt=document["attempt"],
        segment=document["segment"],
        group=document["group"],
        token_ids=np.asarray(document["token_ids"], dtype=np.int32),
        routes=routes_of(document["routes"], spec),
        routes_start=document["routes_start"],
        prefix=None if prefix is None else Prefix(**{**prefix, "checksum": int(prefix["checksum"], 16)}),
        spans=tuple(_span(span) for span in document["spans"]),
        captures=tuple(Capture(**capture) for capture in document["captures"]),
        spec=spec,
        logprobs=_floats(document["logprobs"]),
        attributes=document["attributes"],
        columns=_columns(document["columns"]),
        checksum=None if checksum is None else int(checksum, 16),
    )


def record_json(record: RouteRecord) -> dict[str, Any]:
    """Everything a record holds, without loss: floats are exact, NaN is null."""
    prefix = record.prefix
    return {
        "sample_id": record.sample_id,
        "attempt": record.attempt,
        "segment": record.segment,
        "group": record.group,
        "token_ids": record.token_ids.tolist(),
        "routes_start": record.routes_start,
        "routes": record.routes.tolist(),
        "prefix": None
        if prefix is None
        else {
            "sample_id": prefix.sample_id,
            "attempt": prefix.attempt,
            "segment": prefix.segment,
            "stop": prefix.stop,
            "checksum": f"{prefix.checksum:016x}",
        },
        "spans": [_span_json(item) for item in record.spans],
        "captures": [_members(item, _CAPTURE) for item in record.captures],
        "logprobs": None if record.logprobs is None else _plain(record.logprobs),
        "attributes": dict(record.attributes),
        "columns": {
            name: {"type": column.dtype.name, "values": _plain(column.values)}
            if column.type.plain
            else _declared_json(column)
            for name, column in record.columns.items()
        },
        "checksum": f"{record.checksum:016x}",
    }


def call_of(document: dict[str, Any], spec: RouteSpec | None = None) -> ModelCall:
    """The call that a JSON object describes; absent members take the defaults of ``ModelCall``."""
    known = dict(document)
    layers = known.get("layer_ids")
    rows = known.pop("routes")
    if rows is not None and not rows:
        rows = np.empty((0, *spec.row_shape) if spec is not None else (0, 1, 1), dtype=np.int16)
    known["prompt_ids"] = np.asarray(known["prompt_ids"], dtype=np.int32)
    known["generation_ids"] = np.asarray(known["generation_ids"], dtype=np.int32)
    known["layer_ids"] = None if layers is None else tuple(layers)
    known["logprobs"] = _floats(known.get("logprobs"))
    known["media"] = tuple(known.get("media", ()))
    known["columns"] = _columns(known.get("columns", {}))
    known.setdefault("weights_version", None)
    return ModelCall(routes=None if rows is None else np.asarray(rows, dtype=np.int16), **known)


def _members(item: object, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: getattr(item, name) for name in names}


def _floats(values: list[float | None] | None) -> NDArray[np.float32] | None:
    return None if values is None else np.asarray([np.nan if x is None else x for x in values], dtype=np.float32)


def _span(document: dict[str, Any]) -> Span:
    sampling = document.get("sampling")
    if sampling is not None:
        processors = sampling["processors"]
        sampling = Sampling(**{**sampling, "processors": None if processors is None else tuple(processors)})
    return Span(**{**document, "sampling": sampling})


def _span_json(span: Span) -> dict[str, Any]:
    found = _members(span, _SPAN)
    if span.sampling is not None:
        found["sampling"] = _members(span.sampling, tuple(Sampling.__dataclass_fields__))
        processors = span.sampling.processors
        found["sampling"]["processors"] = None if processors is None else list(processors)
    return found


def _columns(columns: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {
        name: _declared(column)
        if "aligned" in column
        else np.asarray([np.nan if x is None else x for x in column["values"]], dtype=column["type"])
        for name, column in columns.items()
    }


def _declared_json(column: AlignedColumn) -> dict[str, Any]:
    """What a column declares, its flat values, and where entries end and are known."""
    return {
        **column.type.to_document(),
        "values": _plain(column.values.reshape(-1)),
        "offsets": None if column.offsets is None else column.offsets.tolist(),
        "valid": None if column.valid is None else column.valid.tolist(),
    }


def _declared(document: dict[str, Any]) -> AlignedColumn:
    kind = ColumnType.from_document({key: document[key] for key in ("aligned", "axes", "dtype", "null", "shape")})
    flat = np.asarray([np.nan if x is None else x for x in document["values"]], dtype=kind.dtype)
    valid = None if document["valid"] is None else np.asarray(document["valid"], dtype=np.bool_)
    if kind.ragged:
        ends = document["offsets"]
        lists = [
            flat[start:stop] if valid is None or valid[place] else None
            for place, (start, stop) in enumerate(itertools.pairwise(ends))
        ]
        return AlignedColumn.of_lists(
            lists, dtype=kind.dtype, aligned=document["aligned"], axis=kind.axes[0], nullable=kind.nullable
        )
    shaped = flat.reshape(-1, *kind.shape)
    return AlignedColumn.of(shaped, aligned=document["aligned"], axes=kind.axes, valid=valid)


def _plain(values: NDArray[Any]) -> list[Any]:
    return [None if x != x else x for x in values.tolist()]
