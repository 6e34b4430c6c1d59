"""Records, calls and specs of the library as plain JSON values, and back: what the golden and conformance files hold.

The JSON forms are those of ``schemas/v1/README.md``. Tests only.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from routeplane.record.calls import ModelCall
from routeplane.record.record import Prefix, RouteRecord
from routeplane.record.spans import Capture, Span
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
        spans=tuple(Span(**span) for span in document["spans"]),
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
        "spans": [_members(item, _SPAN) for item in record.spans],
        "captures": [_members(item, _CAPTURE) for item in record.captures],
        "logprobs": None if record.logprobs is None else _plain(record.logprobs),
        "attributes": dict(record.attributes),
        "columns": {
            name: {"type": values.dtype.name, "values": _plain(values)} for name, values in record.columns.items()
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


def _columns(columns: dict[str, dict[str, Any]]) -> dict[str, NDArray[Any]]:
    return {
        name: np.asarray([np.nan if x is None else x for x in column["values"]], dtype=column["type"])
        for name, column in columns.items()
    }


def _plain(values: NDArray[Any]) -> list[Any]:
    return [None if x != x else x for x in values.tolist()]
