"""Payloads in every wire form, good and malformed, big enough to tell what decoding allocates from an error's text.

Axes: R rows, D decoder layers (layer 1 is dense), L captured layers, K top-k slots.
"""

from __future__ import annotations

import base64
import io
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from routeplane.capture.wire import WireForm, encode
from routeplane.errors import ErrorKind
from routeplane.record.spec import RouteSpec

SPEC = RouteSpec(num_experts=200, top_k=4, layer_ids=(0, 2, 3), model="payloads")
ROWS = 12_000
TOKENS = np.arange(ROWS + 1, dtype=np.int32) % 500

Payload = Any


def engine_rows(rows: int = ROWS, spec: RouteSpec = SPEC, *, dtype: str = "u1") -> NDArray[Any]:
    """``[R, D, K]`` as an engine sends it: distinct non-zero ids that say row, layer and slot; dense ones zero."""
    depth = spec.layer_ids[-1] + 1
    ids_RDK: NDArray[Any] = 1 + (
        7 * np.arange(rows)[:, None, None] + 31 * np.arange(depth)[:, None] + np.arange(spec.top_k)
    ) % (min(spec.experts_per_layer) - spec.top_k)
    ids_RDK[:, [layer for layer in range(depth) if layer not in spec.layer_ids]] = 0
    return ids_RDK.astype(dtype)


def npy(array: NDArray[Any]) -> str:
    """As vLLM's server writes it."""
    file = io.BytesIO()
    np.save(file, array)
    return base64.b64encode(file.getvalue()).decode()


def npy_header(text: str, payload: bytes = b"") -> str:
    """A .npy file with a header of one's own."""
    return base64.b64encode(b"\x93NUMPY\1\0" + struct.pack("<H", len(text)) + text.encode() + payload).decode()


def changed(array: NDArray[Any], place: Any, value: int) -> NDArray[Any]:
    """A copy with one thing changed."""
    copied = array.copy()
    copied[place] = value
    return copied


def size_of(payload: Payload) -> int:
    """Bytes of a payload: of its text, or of its lists (ids are small and shared)."""
    if isinstance(payload, str | bytes):
        return len(payload)
    if isinstance(payload, dict):
        return sum(map(size_of, payload.values()))
    if isinstance(payload, list):
        return payload.__sizeof__() + sum(map(size_of, payload))
    return 8


@dataclass(frozen=True, kw_only=True)
class Malformed:
    """A malformed payload under SPEC, and how it is refused. ``form``: None leaves it to the first characters."""

    name: str
    payload: Payload
    kind: ErrorKind = ErrorKind.ENCODING
    form: WireForm | None = None


def malformed() -> Iterator[Malformed]:
    """Every case, form by form."""
    yield from _envelopes()
    yield from _files()
    yield from _objects()
    yield from _lists()
    yield from _plain()
    yield Malformed(name="no form: null", payload=None)
    yield Malformed(name="no form: a number", payload=7)
    yield Malformed(name="no form: other text", payload="A" * 100_000)
    yield Malformed(name="no form: empty text", payload="")


def _envelopes() -> Iterator[Malformed]:
    good = encode(engine_rows().astype(np.int16), form="nrlre1")
    head, _, body = good.rpartition(":")
    headers = {
        "blank in a count": f"nrlre1:int16: {ROWS}x4x4",
        "plus sign": f"nrlre1:int16:+{ROWS}x4x4",
        "underscore": "nrlre1:int16:12_000x4x4",
        "negative": f"nrlre1:int16:-{ROWS}x-4x4",
        "two axes": f"nrlre1:int16:{ROWS}x16",
        "four axes": f"nrlre1:int16:1x{ROWS}x4x4",
        "no count": "nrlre1:int16:x4x4",
        "other digits": f"nrlre1:int16:\u0661{ROWS}x4x4",
        "int64": f"nrlre1:int64:{ROWS}x4x4",
        "uint8": f"nrlre1:uint8:{ROWS}x4x4",
        "float16": f"nrlre1:float16:{ROWS}x4x4",
        "upper case": f"NRLRE1:int16:{ROWS}x4x4",
        "later version": f"nrlre2:int16:{ROWS}x4x4",
        "more rows than came": f"nrlre1:int16:{2 * ROWS}x4x4",
        "a row short": f"nrlre1:int16:{ROWS - 1}x4x4",
        "wider than it came": f"nrlre1:int32:{ROWS}x4x4",
        "narrower than it came": f"nrlre1:int8:{ROWS}x4x4",
        "a thousand million rows": "nrlre1:int32:1999999999x4x4",
        "twenty digits": "nrlre1:int32:99999999999999999999x4x4",
        "layers without rows": "nrlre1:int16:0x4000000000x4",
        "top-k without rows": "nrlre1:int16:0x4x4000000000",
    }
    for name, header in headers.items():
        yield Malformed(name=f"nrlre1: {name}", payload=f"{header}:{body}", form="nrlre1")
    bodies = {
        "no payload": "",
        "cut": body[:-8],
        "cut inside a quantum": body[:-3],
        "longer": body + "AAAA",
        "line break inside": body[:76] + "\n" + body[77:],
        "blank at the end": body[:-1] + " ",
        "url alphabet": "-_" + body[2:],
        "padding inside": body[:8] + "A===" + body[12:],
        "outside ASCII": "é" + body[1:],
        "zero byte": "\0" + body[1:],
    }
    for name, text in bodies.items():
        yield Malformed(name=f"nrlre1: {name}", payload=f"{head}:{text}")
    yield Malformed(name="nrlre1: bytes", payload=good.encode(), kind=ErrorKind.DTYPE, form="nrlre1")
    yield Malformed(name="nrlre1: two colons less", payload=good.replace(":", "", 2), form="nrlre1")
    ids = engine_rows().astype(np.int16)
    for name, place, value, kind in (
        ("id of another router", (7, 2, 1), 200, ErrorKind.ID_OUT_OF_RANGE),
        ("id below -1", (7, 2, 1), -2, ErrorKind.PARTIAL_ROW),
        ("dense layer filled", (7, 1, 0), 3, ErrorKind.DENSE_SLOT),
        ("dense layer -1 beside ids", (7, 1), -1, ErrorKind.DENSE_SLOT),
        ("row never written", (9, 3), 0, ErrorKind.UNCAPTURED_SLOT),
    ):
        yield Malformed(name=f"nrlre1: {name}", payload=encode(changed(ids, place, value), form="nrlre1"), kind=kind)
    yield Malformed(name="nrlre1: MoE layers alone", payload=encode(ids[:, :3], form="nrlre1"), kind=ErrorKind.LAYERS)
    yield Malformed(name="nrlre1: other top-k", payload=encode(ids[:, :, :3], form="nrlre1"), kind=ErrorKind.SHAPE)


def _files() -> Iterator[Malformed]:
    ids = engine_rows()
    file = base64.b64decode(npy(ids))
    yield Malformed(name="npy: a byte short", payload=base64.b64encode(file[:-1]).decode())
    yield Malformed(name="npy: a byte more", payload=base64.b64encode(file + b"\0").decode())
    yield Malformed(name="npy: floats", payload=npy(ids.astype("f2")), kind=ErrorKind.DTYPE)
    yield Malformed(name="npy: booleans", payload=npy(ids.astype(bool)), kind=ErrorKind.DTYPE)
    yield Malformed(name="npy: rank 2", payload=npy(ids.reshape(ROWS, -1)), kind=ErrorKind.SHAPE)
    yield Malformed(name="npy: rank 4", payload=npy(ids[None]), kind=ErrorKind.SHAPE)
    announced = "{'descr': '<i8', 'fortran_order': False, 'shape': (%s), }\n"
    yield Malformed(name="npy: huge", payload=npy_header(announced % "2000000000, 4, 4", bytes(100_000)))
    yield Malformed(name="npy: huge and empty", payload=npy_header(announced % "0, 99999999999999999999, 4"))
    yield Malformed(name="npy: code", payload=npy_header("__import__('os').getcwd()\n", bytes(100_000)))
    big_endian = ids.astype(">u2")
    yield Malformed(name="npy: bytes swapped", payload=npy(big_endian.view("<u2")), kind=ErrorKind.ID_OUT_OF_RANGE)


def _objects() -> Iterator[Malformed]:
    good = encode(engine_rows(), form="prime")
    fields: dict[str, Any] = {
        "dtype float32": {"dtype": "float32"},
        "dtype object": {"dtype": "object"},
        "dtype null": {"dtype": None},
    }
    for name, change in fields.items():
        yield Malformed(name=f"prime: {name}", payload={**good, **change}, kind=ErrorKind.DTYPE)
    changes: dict[str, dict[str, Any]] = {
        "wider dtype": {"dtype": "uint16"},
        "shape of floats": {"shape": [float(ROWS), 4, 4]},
        "shape with a bool": {"shape": [ROWS, 4, True]},
        "shape as text": {"shape": f"{ROWS},4,4"},
        "negative side": {"shape": [-ROWS, -4, 4]},
        "more rows": {"shape": [2 * ROWS, 4, 4]},
        "huge and empty": {"shape": [0, 2**40, 4], "data": ""},
        "start null": {"start": None},
        "start negative": {"start": -1},
        "start a bool": {"start": True},
        "a key more": {"layers": [0, 2, 3]},
    }
    for name, change in changes.items():
        yield Malformed(name=f"prime: {name}", payload={**good, **change})
    yield Malformed(name="prime: rank 2", payload={**good, "shape": [ROWS, 16]}, kind=ErrorKind.SHAPE)
    yield Malformed(name="prime: data is bytes", payload={**good, "data": b"AAAA"}, kind=ErrorKind.DTYPE)
    for key in ("data", "shape", "dtype"):
        yield Malformed(name=f"prime: no {key}", payload={name: good[name] for name in good if name != key})


def _lists() -> Iterator[Malformed]:
    rows = engine_rows(2_000).tolist()

    def with_row(row: object) -> list[object]:
        return [*rows[:-1], row]

    layer = rows[0][0]
    yield Malformed(name="lists: rank 2", payload=rows[0], kind=ErrorKind.SHAPE)
    yield Malformed(name="lists: rank 4", payload=[rows], kind=ErrorKind.DTYPE)
    yield Malformed(name="lists: flat", payload=layer, kind=ErrorKind.SHAPE)
    yield Malformed(name="lists: a layer less", payload=with_row(rows[-1][:-1]), kind=ErrorKind.SHAPE)
    yield Malformed(name="lists: an id less", payload=with_row([*rows[-1][:-1], [1, 2, 3]]), kind=ErrorKind.SHAPE)
    yield Malformed(name="lists: a float", payload=with_row([*rows[-1][:-1], [1.0, 2, 3, 4]]), kind=ErrorKind.DTYPE)
    yield Malformed(name="lists: a bool", payload=with_row([*rows[-1][:-1], [True, 2, 3, 4]]), kind=ErrorKind.DTYPE)
    yield Malformed(name="lists: null", payload=with_row([*rows[-1][:-1], [None, 2, 3, 4]]), kind=ErrorKind.DTYPE)
    yield Malformed(name="lists: a null row", payload=with_row(None), kind=ErrorKind.SHAPE)
    yield Malformed(name="lists: text", payload=with_row("row"), kind=ErrorKind.SHAPE)
    big = with_row([*rows[-1][:-1], [2**70, 2, 3, 4]])
    yield Malformed(name="lists: beyond int64", payload=big, kind=ErrorKind.VALUE_RANGE)
    wide = with_row([*rows[-1][:-1], [2**40, 2, 3, 4]])
    yield Malformed(name="lists: beyond the router", payload=wide, kind=ErrorKind.ID_OUT_OF_RANGE)


def _plain() -> Iterator[Malformed]:
    text = encode(engine_rows(), form="sglang")
    yield Malformed(name="sglang: a row cut", payload=text[:-8], form="sglang")
    yield Malformed(
        name="sglang: three layers", payload=encode(engine_rows()[:4_001, :3], form="sglang"), form="sglang"
    )
    yield Malformed(name="sglang: no text", payload=[1], form="sglang", kind=ErrorKind.DTYPE)
    swapped = base64.b64encode(engine_rows().astype(">i4").tobytes()).decode()
    yield Malformed(name="sglang: bytes swapped", payload=swapped, form="sglang", kind=ErrorKind.ID_OUT_OF_RANGE)
    yield Malformed(name="sglang: spare bits", payload="AAAB" * 1_000 + "AB==", form="sglang")


MALFORMED = tuple(malformed())
