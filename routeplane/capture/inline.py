"""Routes inside a response, our own form: a byte per id where the geometry allows, bound to its tokens by a checksum.

The text is padded base64 of 36 bytes of header and the payload, so that it begins with ``routeplane+1`` and is decoded
in one piece. The header: 9 bytes that spell this, the spec's digest and the checksum as u64, the first row and the
number of rows as u32, all little endian, and 3 zero bytes, which align the payload. The payload is the format's
``narrow`` encoding where the spec allows it (a MISSING row is K bytes 0xFF), else int16, little endian. The checksum
(xxh3-64, canonical bytes) covers spec digest, first row, all token ids of the call, and the payload: rows of another
choice or model are refused. Knows no response.

Axes: R rows, L captured layers, K top-k slots.
"""

from __future__ import annotations

import struct
from math import lcm
from typing import TYPE_CHECKING, Any

import numpy as np

from routeplane.capture.text64 import (
    MAX_ROWS,
    base64_length,
    check_axes,
    decode_base64,
    encode_base64,
    undecodable,
)
from routeplane.errors import DataError, ErrorKind, SpecError
from routeplane.record.checksum import CanonicalHash, require_equal
from routeplane.record.parse import as_integers, check_count, frozen_view
from routeplane.record.rows import lay_out
from routeplane.record.spec import MAX_EXPERTS, NARROW_MISSING
from routeplane.record.validate import check_routes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from routeplane.record.spec import RouteSpec

__all__ = ["INLINE_PREFIX", "decode_inline", "encode_inline"]

#: How text in the inline form begins.
INLINE_PREFIX = "routeplane+1"

_HEADER = struct.Struct("<9sQQII3s")
_MAGIC = decode_base64(INLINE_PREFIX)
_HEADER_TEXT = base64_length(_HEADER.size)
# Of the payload at a time, and no more than an eighth of a large one: inside a second-level cache, with its text and
# rows. Below the least, calls take longer than their work.
_PIECE_BYTES, _LEAST_PIECE_BYTES = 3 << 18, 3 << 12
# Rows of more than such a cache are written past it.
_CACHE_BYTES = 1 << 21


def encode_inline(routes: NDArray[np.int16], spec: RouteSpec, *, token_ids: NDArray[Any], first_row: int = 0) -> str:
    """The text for int16 rows ``[R, L, K]`` of tokens ``[first_row, first_row + R)`` of a call.

    ``token_ids``: all of the call, prompt and generated. Raises DataError for rows that are not legal under the spec:
    narrowed, they would be other rows; and for a ``first_row`` that is no token of it.
    """
    routes_RLK = as_integers(routes, np.int16, what="routes", ndim=3)
    check_count(first_row, "first_row", below=MAX_ROWS - len(routes_RLK) + 1)
    check_routes(routes_RLK, spec, first_token=first_row)
    # of a byte, -1 becomes 0xFF; legal ids are below 256
    wire = np.ascontiguousarray(routes_RLK.astype(_stored_type(spec), copy=False))
    payload = wire.reshape(-1).view(np.uint8)
    checksum = _checksum(payload, spec, token_ids=token_ids, first_row=first_row)
    header = _HEADER.pack(_MAGIC, spec.digest, checksum, first_row, len(wire), bytes(3))
    # the header is whole quanta of base64, so the two texts are the text of both
    return encode_base64(header) + encode_base64(payload.data)


def decode_inline(text: str, spec: RouteSpec, *, token_ids: NDArray[Any]) -> tuple[NDArray[np.int16], int]:
    """The rows, read-only int16 ``[R, L, K]``, and the token of the first one.

    Nothing is decoded before digest and length agree, nothing given away before the checksum does. The row rule is
    applied where a byte is no id of every layer, and in any case when a record is made. Raises SpecError
    (SPEC_MISMATCH) for another model's rows, ChecksumError for damage or other tokens, DataError for what is not in
    this form.
    """
    declared, first_row, shape = _read_header(text, spec)
    size = check_axes(shape, itemsize=_stored_type(spec).itemsize)
    if len(text) != _HEADER_TEXT + base64_length(size):
        raise undecodable(
            f"{_HEADER_TEXT + base64_length(size)} characters for {size} bytes behind the header", f"{len(text)}"
        )
    out = _hash(spec, token_ids=token_ids, first_row=first_row)
    out.begin_array("routes", size)
    routes_RLK = np.empty(shape, dtype=np.int16)
    slots, large = tuple(range(spec.num_layers)), routes_RLK.nbytes > _CACHE_BYTES
    # of bytes, 0xFF included, where one may be no id of some layer
    bound, largest = min(spec.experts_per_layer) if spec.narrow_allowed else MAX_EXPERTS, -1
    for at, rows_RLK in _pieces(text, size=size, spec=spec):
        out.part(rows_RLK)
        target_RLK = routes_RLK[at : at + len(rows_RLK)]
        lay_out(rows_RLK, spec, tokens=(0, len(rows_RLK)), slots=slots, out=target_RLK, past_caches=large)
        if bound <= NARROW_MISSING:
            largest = max(largest, int(rows_RLK.max(initial=0)))
    require_equal(declared, out.value(), where="inline routes", sample="inline routes")
    if largest >= bound:
        check_routes(routes_RLK, spec, first_token=first_row)
    return frozen_view(routes_RLK), first_row


def _read_header(text: str, spec: RouteSpec) -> tuple[int, int, tuple[int, int, int]]:
    """The checksum, the first row and the shape that a text announces, none of them believed yet."""
    if not isinstance(text, str):
        raise DataError(f"expected text in the inline form, got {type(text).__name__}", kind=ErrorKind.DTYPE)
    if len(text) < _HEADER_TEXT or not text.startswith(INLINE_PREFIX):
        raise undecodable(f"text that begins with {INLINE_PREFIX} and a header", repr(text[:_HEADER_TEXT]))
    header = decode_base64(text[:_HEADER_TEXT], size=_HEADER.size)
    _, digest, declared, first_row, rows, zeros = _HEADER.unpack(header)
    if digest != spec.digest:
        raise SpecError(
            f"expected routes of spec {spec.digest:016x} ({spec.model or 'unnamed'}), got those of {digest:016x}",
            kind=ErrorKind.SPEC_MISMATCH,
        )
    if first_row + rows > MAX_ROWS or any(zeros):
        raise undecodable(f"at most {MAX_ROWS} rows and three zero bytes", f"{rows} from {first_row}, {zeros!r}")
    return declared, first_row, (rows, *spec.row_shape)


def _stored_type(spec: RouteSpec) -> np.dtype[Any]:
    return np.dtype(np.uint8) if spec.narrow_allowed else np.dtype("<i2")


def _pieces(text: str, *, size: int, spec: RouteSpec) -> Iterator[tuple[int, NDArray[Any]]]:
    """The payload's rows as they are stored, ``[R, L, K]`` from the ``at``-th on.

    A piece is decoded, hashed and widened while it is in the cache: over memory that is fetched for the first time,
    passes over all of it take longer than the work.
    """
    stored = _stored_type(spec)
    row_bytes = spec.num_layers * spec.top_k * stored.itemsize
    quantum = lcm(3, row_bytes)  # whole quanta of base64, and whole rows
    step = quantum * max(1, min(_PIECE_BYTES, max(_LEAST_PIECE_BYTES, size // 8)) // quantum)
    for begin in range(0, size, step):
        nbytes = min(step, size - begin)
        start = _HEADER_TEXT + begin // 3 * 4
        content = decode_base64(text[start : start + base64_length(nbytes)], size=nbytes)
        yield begin // row_bytes, np.frombuffer(content, dtype=stored).reshape(-1, *spec.row_shape)


def _checksum(payload: NDArray[np.uint8], spec: RouteSpec, *, token_ids: NDArray[Any], first_row: int) -> int:
    out = _hash(spec, token_ids=token_ids, first_row=first_row)
    out.array("routes", payload)
    return out.value()


def _hash(spec: RouteSpec, *, token_ids: NDArray[Any], first_row: int) -> CanonicalHash:
    """What the payload is bound to; the payload comes last."""
    out = CanonicalHash(spec.digest)
    out.int64("first_row", first_row)
    out.array("token_ids", as_integers(token_ids, np.int32, what="token_ids", ndim=1))
    return out
