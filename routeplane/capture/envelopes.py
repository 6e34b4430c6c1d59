"""Foreign encodings of routes, read and written strictly: what NeMo RL, SGLang, prime-rl and nested lists say.

Reading: the header is checked as text before its payload is decoded, the payload has exactly the bytes announced, in
little-endian order; integers only, rank 3, no cast. What comes back is the array as it was sent, and
``wire.rows_from_axis`` gives its ids a meaning. Writing refuses any value that the form cannot carry. Knows no spec, no
tokens.

Axes: R rows, D layers as the sender counts them, K top-k slots.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from routeplane.capture.text64 import base64_length, check_axes, decode_base64, encode_base64, undecodable
from routeplane.errors import DataError, ErrorKind, refused
from routeplane.record.parse import frozen_view

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "decode_lists",
    "decode_nrlre1",
    "decode_prime",
    "decode_sglang",
    "encode_lists",
    "encode_nrlre1",
    "encode_prime",
    "encode_sglang",
]

# int() would also take blanks, signs and underscores; a count of rows has ten digits at most
_NRLRE1 = re.compile(r"nrlre1:(int8|int16|int32):([0-9]{1,10})x([0-9]{1,10})x([0-9]{1,10}):")
_NRLRE1_HEADER = 64
_PRIME_DTYPES = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "int64")


def decode_nrlre1(text: str) -> NDArray[Any]:
    """NeMo RL's string envelope ``nrlre1:<dtype>:<R>x<D>x<K>:<base64>``, dtype int8, int16 or int32, little endian.

    Returns a read-only array ``[R, D, K]`` over the decoded bytes. Raises DataError (ENCODING; DTYPE for no string).
    """
    _require_text(text, "an nrlre1 envelope")
    header = _NRLRE1.match(text[:_NRLRE1_HEADER])
    if header is None:
        raise undecodable("nrlre1:<int8|int16|int32>:<rows>x<layers>x<top_k>:<base64>", repr(text[:_NRLRE1_HEADER]))
    dtype = np.dtype(header[1]).newbyteorder("<")
    shape = int(header[2]), int(header[3]), int(header[4])
    return _from_base64(text[header.end() :], dtype, shape=shape, size=check_axes(shape, itemsize=dtype.itemsize))


def encode_nrlre1(routes: NDArray[Any], *, dtype: Literal["int8", "int16", "int32"] = "int16") -> str:
    """The envelope of an integer array ``[R, D, K]``; int16 is what every reader of it takes.

    Raises UsageError for another rank, type or dtype, DataError (VALUE_RANGE) for ids that the dtype cannot hold.
    """
    if dtype not in ("int8", "int16", "int32"):
        raise refused("dtype of ('int8', 'int16', 'int32')", repr(dtype))
    narrowed_RDK = _narrowed(routes, np.dtype(dtype))
    rows, layers, top_k = narrowed_RDK.shape
    return f"nrlre1:{dtype}:{rows}x{layers}x{top_k}:{_to_base64(narrowed_RDK)}"


def decode_sglang(text: str | bytes, *, layers: int, top_k: int) -> NDArray[np.int32]:
    """SGLang's base64 of int32, little endian, without a header: how many layers and slots a row has, the caller says.

    Returns a read-only array ``[R, layers, top_k]`` over the decoded bytes. Raises DataError (ENCODING) where the bytes
    are no whole number of rows.
    """
    _require_text(text, "base64 of int32 ids", also=bytes)
    row = check_axes((1, layers, top_k), itemsize=4)
    if row == 0:
        raise refused("at least one layer and one slot", f"layers={layers}, top_k={top_k}")
    data = decode_base64(text)
    if len(data) % row:
        raise undecodable(f"whole rows of {row} bytes (int32, {layers} layers, top_k {top_k})", f"{len(data)} bytes")
    return frozen_view(np.frombuffer(data, dtype="<i4").reshape(-1, layers, top_k))


def encode_sglang(routes: NDArray[Any]) -> str:
    """Base64 of the ids of ``[R, D, K]`` as int32, little endian. Raises as ``encode_nrlre1``."""
    return _to_base64(_narrowed(routes, np.dtype("<i4")))


def decode_prime(document: Mapping[str, Any]) -> tuple[NDArray[Any], int]:
    """prime-rl's ``{"data": base64, "shape": [R, D, K], "dtype": name, "start": token of row 0}``.

    An absent ``start`` is 0; an absent ``dtype`` is refused, since early senders meant uint8 and later ones do not.
    Returns a read-only array ``[R, D, K]`` over the decoded bytes, and the start. Raises DataError.
    """
    if not isinstance(document, Mapping):
        raise DataError(f"expected an object with data, shape and dtype, got {_kind(document)}", kind=ErrorKind.DTYPE)
    keys = {key if isinstance(key, str) else repr(key) for key in document}
    if not {"data", "dtype", "shape"} <= keys <= {"data", "dtype", "shape", "start"}:
        raise undecodable("the keys data, dtype, shape and perhaps start", f"{sorted(keys)[:8]}")
    name, shape, start = document["dtype"], document["shape"], document.get("start", 0)
    if name not in _PRIME_DTYPES:
        raise DataError(f"expected a dtype of {_PRIME_DTYPES}, got {str(name)[:40]!r}", kind=ErrorKind.DTYPE)
    if not isinstance(shape, list | tuple) or not all(type(side) is int for side in shape):
        raise undecodable("shape as a list of three whole numbers", repr(shape)[:80])
    if not _is_position(start):
        raise undecodable("start as a token position", repr(start)[:40])
    _require_text(document["data"], "data as base64 text")
    dtype = np.dtype(name).newbyteorder("<")
    size = check_axes(shape, itemsize=dtype.itemsize)
    return _from_base64(document["data"], dtype, shape=tuple(shape), size=size), start


def encode_prime(routes: NDArray[Any], *, start: int = 0) -> dict[str, Any]:
    """The object that ``decode_prime`` reads, in the array's own integer type. Raises as ``encode_nrlre1``, and for no
    token position as ``start``."""
    if not _is_position(start):
        raise refused("start as a token position", repr(start)[:40])
    if routes.dtype.kind not in "iu" or routes.dtype.name not in _PRIME_DTYPES or routes.ndim != 3:
        raise refused(f"an array of rank 3 and a dtype of {_PRIME_DTYPES}", f"{routes.dtype} {list(routes.shape)}")
    data = _to_base64(_narrowed(routes, routes.dtype.newbyteorder("<")))
    return {"data": data, "shape": list(routes.shape), "dtype": routes.dtype.name, "start": start}


def _is_position(start: object) -> bool:
    return type(start) is int and 0 <= start < 2**31


def decode_lists(rows: object) -> NDArray[np.int64]:
    """Nested lists ``[R][D][K]`` of whole numbers (no bools, no floats), as JSON gives them.

    D and K are the same throughout; no rows at all have neither, and come back as ``[0, 0, 0]``. Returns a read-only
    int64 array of its own. Raises DataError: DTYPE for other leaves, SHAPE for another or a ragged nesting, VALUE_RANGE
    beyond int64.
    """
    if not isinstance(rows, list):
        raise DataError(f"expected nested lists [rows][layers][top_k], got {_kind(rows)}", kind=ErrorKind.DTYPE)
    layers = _one_length(rows, "rows of equal numbers of layers")
    top_k = _one_length(chain.from_iterable(rows), "layers of equal numbers of ids")
    check_axes((len(rows), layers, top_k), itemsize=8)
    ids = chain.from_iterable(chain.from_iterable(rows))
    for kind in set(map(type, ids)):
        if kind is not int:
            raise DataError(f"expected whole numbers as ids, got {kind.__name__}", kind=ErrorKind.DTYPE)
    flat = chain.from_iterable(chain.from_iterable(rows))
    try:
        array = np.fromiter(flat, dtype=np.int64, count=len(rows) * layers * top_k)
    except OverflowError:
        raise DataError("expected ids that int64 can hold, got a larger one", kind=ErrorKind.VALUE_RANGE) from None
    return frozen_view(array.reshape(len(rows), layers, top_k))


def encode_lists(routes: NDArray[Any]) -> list[list[list[int]]]:
    """Nested lists of an integer array ``[R, D, K]``: some 30 bytes of memory per id."""
    nested: list[list[list[int]]] = _narrowed(routes, routes.dtype).tolist()
    return nested


def _one_length(items: Iterable[object], what: str) -> int:
    length: int | None = None
    for item in items:
        if not isinstance(item, list):
            raise DataError(f"expected nested lists [rows][layers][top_k], got {_kind(item)}", kind=ErrorKind.SHAPE)
        if length is not None and len(item) != length:
            raise DataError(f"expected {what}, got {length} and {len(item)}", kind=ErrorKind.SHAPE)
        length = len(item)
    return length or 0


def _kind(value: object) -> str:
    return type(value).__name__


def _require_text(text: object, what: str, *, also: type = str) -> None:
    if not isinstance(text, str | also):
        raise DataError(f"expected {what}, got {_kind(text)}", kind=ErrorKind.DTYPE)


def _from_base64(text: str, dtype: np.dtype[Any], *, shape: tuple[int, ...], size: int) -> NDArray[Any]:
    if len(text) != base64_length(size):
        raise undecodable(f"{size} bytes for {dtype} {list(shape)}", f"{len(text)} characters of base64")
    return frozen_view(np.frombuffer(decode_base64(text, size=size), dtype=dtype).reshape(shape))


def _to_base64(routes: NDArray[Any]) -> str:
    return encode_base64(np.ascontiguousarray(routes).reshape(-1).view(np.uint8).data)


def _narrowed(routes: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """``routes`` as ``dtype``, after a look at its range."""
    if routes.dtype.kind not in "iu" or routes.ndim != 3:
        raise refused("an integer array of rank 3", f"{routes.dtype} {list(routes.shape)}")
    bounds = np.iinfo(dtype)
    if routes.size and not (bounds.min <= int(routes.min()) and int(routes.max()) <= bounds.max):
        raise DataError(
            f"expected ids in [{bounds.min}, {bounds.max}] for {dtype}, got [{routes.min()}, {routes.max()}]",
            kind=ErrorKind.VALUE_RANGE,
        )
    return routes.astype(dtype)
