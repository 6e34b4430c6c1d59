"""The forms in which servers put arrays of expert ids into JSON: a table from a form's name to its decode and encode.

Reading: a header is checked as text before its payload is decoded, the payload has exactly the bytes announced, in
little-endian order; integers only, rank 3, no cast. What comes back is the array as it was sent;
``layers.rows_from_axis`` gives its ids a meaning. Writing refuses any value that the form cannot carry.
Knows no tokens and no response.

Nothing is allocated on the word of a header: text must have exactly the length that its header's byte count makes it
have, looked at before it is decoded, so that decoding allocates three quarters of the text and nothing else.

The only importer of pybase64 (extra ``http``), which decodes some 50 times faster than the standard library, and is
used where it is installed; the same texts are accepted, and give the same bytes, without it.

Axes: R rows, D layers as the sender counts them, K slots of a row.
"""

from __future__ import annotations

import base64
import binascii
import io
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from itertools import chain
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeGuard, cast, get_args

import numpy as np

from routeplane.errors import DataError, ErrorKind, refused
from routeplane.record.parse import as_array, frozen_view
from routeplane.record.spec import MAX_LAYERS, MAX_TOP_K

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["WireArray", "WireForm", "decode", "decode_base64", "encode", "encode_base64", "form_of", "has_no_mark"]

#: vLLM's base64 ``.npy``; NeMo RL's envelope; an object with data, shape and dtype in base64 (prime-rl, LightLLM) or in
#: base85 (NVIDIA Dynamo, verifiers); a pair of a JSON header and base64 (rLLM); nested lists; SGLang's base64; an
#: integer array of the same process.
WireForm = Literal["npy", "nrlre1", "prime", "base85", "pair", "lists", "sglang", "array"]


class WireArray(NamedTuple):
    """What a payload holds: integers ``[R, D, K]`` as they were sent, and the token of row 0 where the form says it.

    >>> WireArray(np.zeros((2, 1, 1), dtype=np.uint8)).start is None
    True
    """

    routes: NDArray[Any]
    start: int | None = None


class _Shape(NamedTuple):
    """Layers and slots of a row, for forms that do not say them themselves."""

    layers: int
    slots: int


# ----------------------------------------------------------------------------------------------------------------------
# The two verbs
# ----------------------------------------------------------------------------------------------------------------------


def decode(value: object, *, form: WireForm | None = None, layers: int = 0, slots: int = 0) -> WireArray:
    """Decode a payload in any of the forms.

    Args:
        value: Text, an object or nested lists, as JSON gives them.
        form: The name of the form; None tells it by its type or first characters. SGLang's has no mark of its own.
        layers: Layers of a row, for forms without a header (SGLang) and for lists without rows.
        slots: Slots of a row, likewise.

    Returns:
        Read-only integers ``[R, D, K]`` in the type that was sent, over the decoded memory, and the token of row 0
        where the form says it. Raises DataError: ENCODING for what is not in the form, DTYPE for other than integers,
        SHAPE for another rank, VALUE_RANGE beyond int64. Raises UsageError for an unknown form.

    >>> array = decode("nrlre1:int16:1x1x2:AQACAA==")
    >>> array.routes.tolist(), array.start
    ([[[1, 2]]], None)
    """
    if form is not None and form not in get_args(WireForm):
        raise refused(f"form of {get_args(WireForm)}", repr(form))
    return _FORMS[form_of(value) if form is None else form].decode(value, _Shape(layers, slots))


def encode(routes: NDArray[Any], *, form: WireForm, dtype: str | None = None, start: int | None = None) -> Any:
    """Encode integers ``[R, D, K]`` in one of the forms, as the form's own writer does.

    Args:
        routes: An integer array of rank 3; it is not kept.
        form: The name of the form.
        dtype: The type on the wire, for ``nrlre1`` alone: int8, int16 (None) or int32. The other forms send the
            array's own type, SGLang's int32.
        start: The token of row 0, for ``prime`` alone.

    Returns:
        Text, an object (``prime``) or nested lists, some 30 bytes of memory per id. Raises UsageError for another rank
        or type and for an option that the form does not have, DataError (VALUE_RANGE) for ids that do not fit.

    >>> encode(np.asarray([[[1, 2]]]), form="nrlre1")
    'nrlre1:int16:1x1x2:AQACAA=='
    """
    if form not in get_args(WireForm):
        raise refused(f"form of {get_args(WireForm)}", repr(form))
    options = {name: value for name, value in (("dtype", dtype), ("start", start)) if value is not None}
    for name in options.keys() - _FORMS[form].options:
        raise refused(f"no {name} for the form {form!r}, which does not carry it", repr(options[name]))
    if routes.dtype.kind not in "iu" or routes.ndim != 3:
        raise refused("an integer array of rank 3", f"{routes.dtype} {list(routes.shape)}")
    return _FORMS[form].encode(routes, **options)


def form_of(value: object) -> WireForm:
    """Name the form of a payload, by its type or first characters. Raises DataError (ENCODING) for any other.

    >>> form_of([[[3, 1]]]), form_of("nrlre1:int16:0x3x2:")
    ('lists', 'nrlre1')
    """
    if isinstance(value, str):
        for name, form in _FORMS.items():
            if form.prefix and value.startswith(form.prefix):
                return name
    elif isinstance(value, Mapping):
        return _form_of_object(value)
    elif isinstance(value, list):
        return "pair" if len(value) == 2 and isinstance(value[0], str) else "lists"
    elif hasattr(value, "shape") and hasattr(value, "dtype"):
        return "array"
    raise DataError(
        "expected routes as text that begins as vLLM's .npy or with nrlre1:, as an object, a pair of header and text, "
        f"nested lists or an array, got {_kind(value)} {str(value)[:40]!r} (SGLang's base64 has no mark of its own: "
        "form='sglang')",
        kind=ErrorKind.ENCODING,
    )


def has_no_mark(text: str) -> bool:
    """Whether text begins as none of the forms that have a mark.

    >>> has_no_mark("AwAAAAEAAAA="), has_no_mark("nrlre1:int16:0x3x2:")
    (True, False)
    """
    return not any(form.prefix and text.startswith(form.prefix) for form in _FORMS.values())


def _form_of_object(value: Mapping[Any, Any]) -> WireForm:
    """base64 and base85 have different lengths for the same bytes; which one it is follows from shape and dtype."""
    data, sides = value.get("data"), value.get("shape")
    if not isinstance(data, str) or not _are_sides(sides):
        return "prime"
    count = prod(sides)
    name = value.get("dtype")
    if name is None:
        return "base85" if len(data) == base85_length(4 * count) else "prime"
    size = count * np.dtype(name).itemsize if name in _PRIME_DTYPES else -1
    return "base85" if len(data) == base85_length(size) != base64_length(size) else "prime"


# ----------------------------------------------------------------------------------------------------------------------
# npy: vLLM's base64 of a .npy file
# ----------------------------------------------------------------------------------------------------------------------

_MAGIC = b"\x93NUMPY"
# base64 of the first six bytes of every .npy file
_NPY_PREFIX = "k05VTVBZ"
# np.save writes 118 bytes for rank 3; a structured type, which is refused anyhow, needs more.
_MAX_HEADER = 4_096
_HEADER = re.compile(rb"\{'descr': '([^']*)', 'fortran_order': (True|False), 'shape': \(([0-9, ]*)\),? *\} *\n")
_INTEGER = re.compile(r"[<>|][iu][1248]")


def _decode_npy(text: Any, shape: _Shape) -> WireArray:
    """The header is read as text and never evaluated, and nothing is allocated beyond the decoded text."""
    _require_text(text, "base64 text of a .npy file", also=bytes)
    content = decode_base64(text)
    start, stop = _header_bounds(content)
    descr, fortran, sides = _parse_header(content[start:stop])
    dtype = np.dtype(descr)
    expected, got = prod(sides) * dtype.itemsize, len(content) - stop
    if expected != got:
        raise undecodable(f"{expected} bytes for {descr} {list(sides)}", f"{got}")
    flat = np.frombuffer(content, dtype=dtype, count=prod(sides), offset=stop)
    return WireArray(flat.reshape(sides, order="F" if fortran else "C"))


def _header_bounds(content: bytes) -> tuple[int, int]:
    """Where the header's text begins and ends; the end lies within ``content``."""
    if content[:6] != _MAGIC or len(content) < 12:
        raise undecodable("a .npy file", f"{len(content)} bytes that begin with {content[:6]!r}")
    version = content[6], content[7]
    if version not in ((1, 0), (2, 0)):
        raise undecodable("a .npy file of version 1.0 or 2.0", f"{version[0]}.{version[1]}")
    start = 10 if version == (1, 0) else 12
    length = int.from_bytes(content[8:start], "little")
    if length > min(_MAX_HEADER, len(content) - start):
        raise undecodable(f"a .npy header of at most {min(_MAX_HEADER, len(content) - start)} bytes", f"{length}")
    return start, start + length


def _parse_header(header: bytes) -> tuple[str, bool, tuple[int, ...]]:
    found = _HEADER.fullmatch(header)
    if found is None:
        raise undecodable("a .npy header with descr, fortran_order and shape", repr(header[:120]))
    descr = found[1].decode("latin-1")
    if _INTEGER.fullmatch(descr) is None:
        raise DataError(f"expected routes of an integer type, got {descr!r}", kind=ErrorKind.DTYPE)
    parts = [part for part in found[3].decode("latin-1").split(",") if part.strip()]
    if len(parts) != 3 or not all(part.strip().isdecimal() for part in parts):
        raise DataError(
            f"expected routes [rows, decoder layers, top_k], got shape {found[3].decode('latin-1')}",
            kind=ErrorKind.SHAPE,
        )
    sides = tuple(int(part) for part in parts)
    check_axes(sides, itemsize=np.dtype(descr).itemsize)
    return descr, found[2] == b"True", sides


def _encode_npy(routes: NDArray[Any]) -> str:
    file = io.BytesIO()
    np.save(file, routes, allow_pickle=False)
    return encode_base64(file.getbuffer())


# ----------------------------------------------------------------------------------------------------------------------
# nrlre1: NeMo RL's envelope nrlre1:<dtype>:<R>x<D>x<K>:<base64>
# ----------------------------------------------------------------------------------------------------------------------

# int() would also take blanks, signs and underscores; a count of rows has ten digits at most
_NRLRE1 = re.compile(r"nrlre1:(int8|int16|int32):([0-9]{1,10})x([0-9]{1,10})x([0-9]{1,10}):")
_NRLRE1_HEADER = 64


def _decode_nrlre1(text: Any, shape: _Shape) -> WireArray:
    _require_text(text, "an nrlre1 envelope")
    header = _NRLRE1.match(text[:_NRLRE1_HEADER])
    if header is None:
        expected = "nrlre1:<dtype>:<rows>x<layers>x<top_k>:<base64>, its dtype int8, int16 or int32"
        raise undecodable(expected, repr(text[:_NRLRE1_HEADER]))
    dtype = np.dtype(header[1]).newbyteorder("<")
    sides = int(header[2]), int(header[3]), int(header[4])
    size = check_axes(sides, itemsize=dtype.itemsize)
    return WireArray(_from_base64(text[header.end() :], dtype, shape=sides, size=size))


def _encode_nrlre1(routes: NDArray[Any], dtype: str = "int16") -> str:
    if dtype not in ("int8", "int16", "int32"):
        raise refused("dtype of ('int8', 'int16', 'int32')", repr(dtype))
    narrowed_RDK = _narrowed(routes, np.dtype(dtype))
    rows, layers, slots = narrowed_RDK.shape
    return f"nrlre1:{dtype}:{rows}x{layers}x{slots}:{_to_base64(narrowed_RDK)}"


# ----------------------------------------------------------------------------------------------------------------------
# sglang: base64 of int32, little endian, without a header
# ----------------------------------------------------------------------------------------------------------------------


def _decode_sglang(text: Any, shape: _Shape) -> WireArray:
    _require_text(text, "base64 text of int32 ids", also=bytes)
    row = check_axes((1, shape.layers, shape.slots), itemsize=4)
    if row == 0:
        raise refused("at least one layer and one slot", f"layers={shape.layers}, slots={shape.slots}")
    data = decode_base64(text)
    if len(data) % row:
        expected = f"rows of {row} bytes (int32, {shape.layers} decoder layers, {shape.slots} slots)"
        raise undecodable(expected, f"{len(data)} bytes")
    return WireArray(frozen_view(np.frombuffer(data, dtype="<i4").reshape(-1, shape.layers, shape.slots)))


def _encode_sglang(routes: NDArray[Any]) -> str:
    return _to_base64(_narrowed(routes, np.dtype("<i4")))


# ----------------------------------------------------------------------------------------------------------------------
# prime: prime-rl's {"data": base64, "shape": [R, D, K], "dtype": name, "start": token of row 0}
# ----------------------------------------------------------------------------------------------------------------------

_PRIME_DTYPES = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "int64")


def _decode_prime(document: Any, shape: _Shape) -> WireArray:
    """An absent ``start`` is 0; an absent ``dtype`` is refused, since early senders meant uint8 and later ones do
    not."""
    if not isinstance(document, Mapping):
        raise DataError(f"expected an object with data, shape and dtype, got {_kind(document)}", kind=ErrorKind.DTYPE)
    keys = {key if isinstance(key, str) else repr(key) for key in document}
    if not {"data", "dtype", "shape"} <= keys <= {"data", "dtype", "shape", "start"}:
        raise undecodable("the keys data, dtype, shape and perhaps start", f"{sorted(keys)[:8]}")
    sides, start = document["shape"], document.get("start", 0)
    dtype, size = _announced(document["dtype"], sides)
    if not _is_position(start):
        raise undecodable("start as a token position", repr(start)[:40])
    _require_text(document["data"], "data as base64 text")
    return WireArray(_from_base64(document["data"], dtype, shape=tuple(sides), size=size), start)


def _announced(name: object, sides: object) -> tuple[np.dtype[Any], int]:
    """The type and the number of bytes that an object announces."""
    if not isinstance(name, str) or name not in _PRIME_DTYPES:
        raise DataError(f"expected a dtype of {_PRIME_DTYPES}, got {str(name)[:40]!r}", kind=ErrorKind.DTYPE)
    if not _are_sides(sides):
        raise undecodable("shape as a list of three whole numbers", repr(sides)[:80])
    dtype = np.dtype(name).newbyteorder("<")
    return dtype, check_axes(sides, itemsize=dtype.itemsize)


def _are_sides(sides: object) -> TypeGuard[list[int] | tuple[int, ...]]:
    return isinstance(sides, list | tuple) and all(type(side) is int for side in sides)


def _encode_prime(routes: NDArray[Any], start: int = 0) -> dict[str, Any]:
    if not _is_position(start):
        raise refused("start as a token position", repr(start)[:40])
    if routes.dtype.name not in _PRIME_DTYPES:
        raise refused(f"a dtype of {_PRIME_DTYPES}", str(routes.dtype))
    data = _to_base64(_narrowed(routes, routes.dtype.newbyteorder("<")))
    return {"data": data, "shape": list(routes.shape), "dtype": routes.dtype.name, "start": start}


def _is_position(start: object) -> bool:
    return type(start) is int and 0 <= start < 2**31


# ----------------------------------------------------------------------------------------------------------------------
# base85: {"data": base85, "shape": [R, D, K]}, int32 unless a dtype says otherwise (NVIDIA Dynamo, verifiers)
# ----------------------------------------------------------------------------------------------------------------------


def _decode_base85(document: Any, shape: _Shape) -> WireArray:
    if not isinstance(document, Mapping):
        raise DataError(f"expected an object with data and shape, got {_kind(document)}", kind=ErrorKind.DTYPE)
    keys = {key if isinstance(key, str) else repr(key) for key in document}
    if not {"data", "shape"} <= keys <= {"data", "dtype", "shape", "start"}:
        raise undecodable("the keys data, shape and perhaps dtype and start", f"{sorted(keys)[:8]}")
    name, sides, start = document.get("dtype", "int32"), document["shape"], document.get("start", 0)
    dtype, size = _announced(name, sides)
    if not _is_position(start):
        raise undecodable("start as a token position", repr(start)[:40])
    _require_text(document["data"], "data as base85 text")
    data = decode_base85(document["data"], size=size)
    return WireArray(
        frozen_view(np.frombuffer(data, dtype=dtype).reshape(sides)), start if "start" in document else None
    )


def _encode_base85(routes: NDArray[Any]) -> dict[str, Any]:
    data = encode_base85(np.ascontiguousarray(_narrowed(routes, np.dtype("<i4"))).tobytes())
    return {"data": data, "shape": list(routes.shape)}


# ----------------------------------------------------------------------------------------------------------------------
# pair: [JSON header with shape and dtype, base64] (rLLM)
# ----------------------------------------------------------------------------------------------------------------------


def _decode_pair(pair: Any, shape: _Shape) -> WireArray:
    if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(part, str) for part in pair):
        raise DataError(f"expected a pair of a JSON header and base64, got {_kind(pair)}", kind=ErrorKind.DTYPE)
    try:
        header = json.loads(pair[0]) if len(pair[0]) <= _MAX_HEADER else None
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict) or not {"shape", "dtype"} <= header.keys() <= {"shape", "dtype", "start"}:
        raise undecodable("a JSON header with shape and dtype", repr(pair[0][:80]))
    return _decode_prime({**header, "data": pair[1]}, shape)


def _encode_pair(routes: NDArray[Any]) -> list[str]:
    document = _encode_prime(routes)
    header = {"shape": document["shape"], "dtype": document["dtype"]}
    return [json.dumps(header), document["data"]]


# ----------------------------------------------------------------------------------------------------------------------
# array: integers of the same process
# ----------------------------------------------------------------------------------------------------------------------


def _decode_array(values: Any, shape: _Shape) -> WireArray:
    array = as_array(values, what="routes")
    if array.dtype.kind not in "iu":
        raise DataError(f"expected routes of an integer type, got {array.dtype}", kind=ErrorKind.DTYPE)
    if array.ndim != 3:
        raise DataError(f"expected routes [rows, layers, top_k], got shape {list(array.shape)}", kind=ErrorKind.SHAPE)
    return WireArray(frozen_view(array))


# ----------------------------------------------------------------------------------------------------------------------
# lists: nested lists of whole numbers, as JSON gives them
# ----------------------------------------------------------------------------------------------------------------------


def _decode_lists(rows: Any, shape: _Shape) -> WireArray:
    """D and K are the same throughout; no rows at all have neither, and take them from the caller."""
    if not isinstance(rows, list):
        raise DataError(f"expected nested lists [rows][layers][top_k], got {_kind(rows)}", kind=ErrorKind.DTYPE)
    layers = _one_length(rows, "rows of equal numbers of layers") if rows else shape.layers
    slots = _one_length(chain.from_iterable(rows), "layers of equal numbers of ids") if rows else shape.slots
    check_axes((len(rows), layers, slots), itemsize=8)
    ids = chain.from_iterable(chain.from_iterable(rows))
    for kind in set(map(type, ids)):
        if kind is not int:
            raise DataError(f"expected whole numbers as ids, got {kind.__name__}", kind=ErrorKind.DTYPE)
    flat = chain.from_iterable(chain.from_iterable(rows))
    try:
        array = np.fromiter(flat, dtype=np.int64, count=len(rows) * layers * slots)
    except OverflowError:
        raise DataError("expected ids that int64 can hold, got a larger one", kind=ErrorKind.VALUE_RANGE) from None
    return WireArray(frozen_view(array.reshape(len(rows), layers, slots)))


def _encode_lists(routes: NDArray[Any]) -> list[list[list[int]]]:
    return cast("list[list[list[int]]]", routes.tolist())


def _one_length(items: Iterable[object], what: str) -> int:
    length: int | None = None
    for item in items:
        if not isinstance(item, list):
            raise DataError(f"expected nested lists [rows][layers][top_k], got {_kind(item)}", kind=ErrorKind.SHAPE)
        if length is not None and len(item) != length:
            raise DataError(f"expected {what}, got {length} and {len(item)}", kind=ErrorKind.SHAPE)
        length = len(item)
    return length or 0


# ----------------------------------------------------------------------------------------------------------------------
# What several forms share
# ----------------------------------------------------------------------------------------------------------------------


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
    bounds = np.iinfo(dtype)
    if routes.size and not (bounds.min <= int(routes.min()) and int(routes.max()) <= bounds.max):
        raise DataError(
            f"expected ids in [{bounds.min}, {bounds.max}] for {dtype}, got [{routes.min()}, {routes.max()}]",
            kind=ErrorKind.VALUE_RANGE,
        )
    return routes.astype(dtype)


# ----------------------------------------------------------------------------------------------------------------------
# The table
# ----------------------------------------------------------------------------------------------------------------------


class _Form(NamedTuple):
    """How a form is read and written. ``prefix``: how its text begins, where it has a mark; ``options``: of encode."""

    decode: Callable[[Any, _Shape], WireArray]
    encode: Callable[..., Any]
    prefix: str = ""
    options: frozenset[str] = frozenset()


_FORMS: Mapping[WireForm, _Form] = MappingProxyType(
    {
        "npy": _Form(_decode_npy, _encode_npy, prefix=_NPY_PREFIX),
        "nrlre1": _Form(_decode_nrlre1, _encode_nrlre1, prefix="nrlre1:", options=frozenset({"dtype"})),
        "prime": _Form(_decode_prime, _encode_prime, options=frozenset({"start"})),
        "base85": _Form(_decode_base85, _encode_base85),
        "pair": _Form(_decode_pair, _encode_pair),
        "lists": _Form(_decode_lists, _encode_lists),
        "sglang": _Form(_decode_sglang, _encode_sglang),
        "array": _Form(_decode_array, frozen_view),
    }
)


# ----------------------------------------------------------------------------------------------------------------------
# Base64 and base85, strictly
# ----------------------------------------------------------------------------------------------------------------------

#: Rows that a header may announce: token positions are int32.
MAX_ROWS = 2**31 - 1


def undecodable(expected: str, got: str) -> DataError:
    """The DataError (ENCODING) for what is not in the form it claims; for ``raise``.

    >>> undecodable("base64 text", "'?'").message
    "expected base64 text, got '?'"
    """
    return DataError(f"expected {expected}, got {got}", kind=ErrorKind.ENCODING)


def check_axes(shape: Sequence[int], *, itemsize: int) -> int:
    """The bytes of rows ``[R, D, K]`` that a header announces. Raises DataError for what no engine sends.

    An axis of length 0 makes any others fit into no bytes, and numpy overflows over them; hence bounds for each axis.

    >>> check_axes([5, 4, 8], itemsize=2)
    320
    """
    if len(shape) != 3:
        raise DataError(f"expected routes [rows, layers, top_k], got shape {list(shape)}", kind=ErrorKind.SHAPE)
    most = (MAX_ROWS, MAX_LAYERS, MAX_TOP_K)
    if any(not 0 <= side <= bound for side, bound in zip(shape, most, strict=True)):
        raise undecodable(f"a shape of at most {list(most)}", f"{list(shape)}")
    return prod(shape) * itemsize


def base64_length(size: int) -> int:
    """Characters of padded base64 for ``size`` bytes.

    >>> base64_length(4)
    8
    """
    return (size + 2) // 3 * 4


def decode_base64(text: str | bytes | memoryview, *, size: int | None = None) -> bytes:
    """The bytes behind padded base64 of the standard alphabet, without blanks, line breaks or spare bits.

    ``size``: how many bytes there must be; the text's length is looked at first. The result belongs to the caller.
    Raises DataError (ENCODING).

    >>> decode_base64("AAEC", size=3)
    b'\\x00\\x01\\x02'
    """
    if size is not None and len(text) != base64_length(size):
        raise undecodable(f"base64 of {size} bytes in {base64_length(size)} characters", f"{len(text)}")
    try:
        data = _decode(text)
    except ValueError as error:  # binascii.Error is one; so is text outside ASCII
        raise undecodable("base64 text", str(error)) from None
    # Both decoders ignore the bits that padding leaves over; two texts for the same bytes are one too many.
    tail = len(data) - len(data) % 3 if len(data) % 3 else len(data) - 3
    if data and _encode(data[tail:]) != _ascii(text[-4:]):
        raise undecodable("base64 without spare bits", repr(text[-4:]))
    if size is not None and len(data) != size:
        raise undecodable(f"base64 of {size} bytes", f"{len(data)}")
    return data


def encode_base64(data: bytes | memoryview) -> str:
    """Padded base64 of the standard alphabet, without line breaks.

    >>> encode_base64(bytes([0, 1, 2]))
    'AAEC'
    """
    return _encode(data).decode("ascii")


def base85_length(size: int) -> int:
    """Characters of base85 for ``size`` bytes, without padding.

    >>> base85_length(4)
    5
    """
    return (5 * size + 3) // 4


def decode_base85(text: str, *, size: int) -> bytes:
    """The ``size`` bytes behind base85 of Python's alphabet. The text's length is looked at first. Raises DataError
    (ENCODING).

    >>> decode_base85(encode_base85(b"rows"), size=4)
    b'rows'
    """
    if len(text) != base85_length(size):
        raise undecodable(f"base85 of {size} bytes in {base85_length(size)} characters", f"{len(text)}")
    try:
        data = base64.b85decode(text)
    except ValueError as error:
        raise undecodable("base85 text", str(error)) from None
    if len(data) != size:
        raise undecodable(f"base85 of {size} bytes", f"{len(data)}")
    return data


def encode_base85(data: bytes) -> str:
    """Base85 of Python's alphabet, without padding.

    >>> len(encode_base85(bytes(4)))
    5
    """
    return base64.b85encode(data).decode("ascii")


def _ascii(text: str | bytes | memoryview) -> bytes:
    return text.encode("ascii") if isinstance(text, str) else bytes(text)


def _encode(data: bytes | memoryview) -> bytes:
    fast = _fast_codec()
    return binascii.b2a_base64(data, newline=False) if fast is None else fast[0](data)


def _decode(text: str | bytes | memoryview) -> bytes:
    fast = _fast_codec()
    return binascii.a2b_base64(text, strict_mode=True) if fast is None else fast[1](text, validate=True)


@cache
def _fast_codec() -> tuple[Callable[..., bytes], Callable[..., bytes]] | None:
    """Encode and decode of pybase64; None where it is not installed."""
    try:
        import pybase64
    except ModuleNotFoundError:
        return None
    codec: Any = pybase64
    return codec.b64encode, codec.b64decode
