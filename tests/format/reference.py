"""The checksums of format v1 a second time, written from ``docs/spec/v1.md`` alone: plain Python over JSON values.

Imports nothing of routeplane and no numpy, so that an error in the library's own is not repeated here. JSON forms: NaN
is null, a 64-bit checksum is 16 hex digits, a token column is ``{"type": ..., "values": [...]}``.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import xxhash

__all__ = ["call_bytes", "canonical_spec", "record_bytes", "spec_digest", "stream_digest", "xxh3"]

#: Format of ``struct`` and the bits of the one NaN, by the name of a value type (section 6.5).
_TYPES: Mapping[str, tuple[str, bytes]] = {
    "bool": ("?", b""),
    "int8": ("b", b""),
    "int16": ("h", b""),
    "int32": ("i", b""),
    "int64": ("q", b""),
    "uint8": ("B", b""),
    "uint16": ("H", b""),
    "uint32": ("I", b""),
    "uint64": ("Q", b""),
    "float16": ("e", bytes.fromhex("007e")),
    "float32": ("f", bytes.fromhex("0000c07f")),
    "float64": ("d", bytes.fromhex("000000000000f87f")),
}


def xxh3(data: bytes) -> str:
    """The hash as 16 hex digits."""
    return xxhash.xxh3_64_hexdigest(data)


def canonical_spec(spec: Mapping[str, Any]) -> str:
    """Canonical JSON of a spec (section 5)."""
    widths = spec["num_experts"]
    equal = isinstance(widths, list) and len(set(widths)) == 1
    document = {**spec, "num_experts": widths[0] if equal else widths}
    return json.dumps(document, sort_keys=True, separators=(",", ":"))


def spec_digest(spec: Mapping[str, Any]) -> str:
    """Digest of a spec (section 5)."""
    return xxh3(canonical_spec(spec).encode())


def record_bytes(spec: Mapping[str, Any], record: Mapping[str, Any]) -> bytes:
    """What a record's checksum is made over (section 8)."""
    prefix, spans, captures = record["prefix"], record["spans"], record["captures"]
    return b"".join(
        [
            _u64(int(spec_digest(spec), 16)),
            _text("sample_id", record["sample_id"]),
            _number("attempt", record["attempt"], "<i"),
            _number("segment", record["segment"], "<i"),
            _text("group", record["group"]),
            _numbers("token_ids", record["token_ids"], "int32"),
            _number("routes_start", record["routes_start"], "<q"),
            _numbers("routes", _flat(record["routes"]), "int16"),
            _null("prefix") if prefix is None else _entries("prefix", [_prefix(prefix)]),
            _entries("spans", [_span(span) for span in spans]),
            _entries("captures", [_interval(capture, ("state", "call")) for capture in captures]),
            _numbers("logprobs", record["logprobs"], "float32"),
            _text_map("attributes", record["attributes"]),
            _token_columns(record["columns"]),
        ]
    )


def call_bytes(call: Mapping[str, Any]) -> bytes:
    """What a call's checksum is made over (section 8.1)."""
    routes = call["routes"]
    return b"".join(
        [
            _u64(0),
            _text("call_id", call["call_id"]),
            _numbers("prompt_ids", call["prompt_ids"], "int32"),
            _numbers("generation_ids", call["generation_ids"], "int32"),
            _numbers("routes", None if routes is None else _flat(routes), "int16"),
            _number("first_row", call["first_row"], "<q"),
            _numbers("layer_ids", call["layer_ids"], "int64"),
            _number("weights_version", call["weights_version"], "<q"),
            _numbers("logprobs", call["logprobs"], "float32"),
            _entries("media", [_text("digest", digest) for digest in call["media"]]),
            _number("cached", call["cached"], "<q"),
            _text("loss", call["loss"]),
            _token_columns(call["columns"]),
        ]
    )


def stream_digest(version: str, spec: Mapping[str, Any], *, encoding: str, checksums: Iterable[str]) -> str:
    """The digest of a trailer (section 9)."""
    texts = b"".join(_str(text) for text in (version, canonical_spec(spec), encoding))
    return xxh3(texts + b"".join(_u64(int(checksum, 16)) for checksum in checksums))


# ----------------------------------------------------------------------------------------------------------------------
# Items
# ----------------------------------------------------------------------------------------------------------------------


def _u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def _str(text: str) -> bytes:
    data = text.encode()
    return _u64(len(data)) + data


def _null(name: str) -> bytes:
    return _str(name) + b"\x01"


def _present(name: str, payload: bytes) -> bytes:
    return _str(name) + b"\x00" + _u64(len(payload)) + payload


def _text(name: str, value: str | None) -> bytes:
    return _null(name) if value is None else _present(name, value.encode())


def _number(name: str, value: int | None, code: str) -> bytes:
    return _null(name) if value is None else _present(name, struct.pack(code, value))


def _numbers(name: str, values: Sequence[Any] | None, kind: str) -> bytes:
    if values is None:
        return _null(name)
    code, nan = _TYPES[kind]
    return _present(name, b"".join(nan if value is None else struct.pack("<" + code, value) for value in values))


def _entries(name: str, entries: Sequence[bytes]) -> bytes:
    return _str(name) + b"\x00" + _u64(len(entries)) + b"".join(entries)


def _prefix(prefix: Mapping[str, Any]) -> bytes:
    return b"".join(
        [
            _text("sample_id", prefix["sample_id"]),
            _number("attempt", prefix["attempt"], "<i"),
            _number("segment", prefix["segment"], "<i"),
            _number("stop", prefix["stop"], "<q"),
            _number("checksum", int(prefix["checksum"], 16), "<Q"),
        ]
    )


def _interval(entry: Mapping[str, Any], texts: Sequence[str]) -> bytes:
    bounds = _number("start", entry["start"], "<q") + _number("stop", entry["stop"], "<q")
    named = b"".join(_text(name, entry[name]) for name in texts)
    return bounds + named + _number("weights_version", entry["weights_version"], "<q")


def _span(span: Mapping[str, Any]) -> bytes:
    sampling = span.get("sampling")
    return _interval(span, ("kind", "role", "call")) + (b"" if sampling is None else _sampling(sampling))


def _sampling(sampling: Mapping[str, Any]) -> bytes:
    """Section 6.2, members in order."""
    processors = sampling["processors"]
    names = _null("processors")
    if processors is not None:
        names = _entries("processors", [_text("name", name) for name in processors])
    floats = ("min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
    members = [
        _number("temperature", sampling["temperature"], "<d"),
        _number("top_p", sampling["top_p"], "<d"),
        _number("top_k", sampling["top_k"], "<q"),
        *(_number(name, sampling[name], "<d") for name in floats),
        _text("logit_bias", sampling["logit_bias"]),
        names,
        _text("logprobs_mode", sampling["logprobs_mode"]),
    ]
    return _entries("sampling", [b"".join(members)])


def _text_map(name: str, entries: Mapping[str, str]) -> bytes:
    ordered = sorted((key.encode(), value) for key, value in entries.items())
    return _entries(name, [_u64(len(key)) + key + _str(value) for key, value in ordered])


def _token_columns(columns: Mapping[str, Mapping[str, Any]]) -> bytes:
    return b"".join(_column(name, columns[name]) for name in sorted(columns))


def _column(name: str, column: Mapping[str, Any]) -> bytes:
    if "aligned" not in column:
        return _text("type", column["type"]) + _numbers(name, column["values"], column["type"])
    return b"".join(
        [
            _str("column") + b"\x00" + _u64(5),
            _text("type", column["dtype"]),
            _text("aligned", column["aligned"]),
            _entries("axes", [_text("axis", axis) for axis in column["axes"]]),
            _numbers("shape", column["shape"], "int64"),
            _numbers("valid", column["valid"], "bool"),
            _numbers("offsets", column["offsets"], "int64"),
            _numbers(name, column["values"], column["dtype"]),
        ]
    )


def _flat(routes_SLK: Sequence[Sequence[Sequence[int]]]) -> list[int]:
    return [expert for row_LK in routes_SLK for row_K in row_LK for expert in row_K]
