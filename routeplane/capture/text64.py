"""Base64 and base85 in and out, strictly, and what a header from outside may announce.

Owns the rule that nothing is allocated on the word of a header: the text must have exactly the length that its header's
byte count makes it have, looked at before it is decoded, so decoding allocates three quarters of the text and nothing
else. Knows no form, no rows.

The only importer of pybase64 (extra ``http``), which decodes some 50 times faster than the standard library, and is
used where it is installed; the same texts are accepted, and give the same bytes, without it.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Sequence
from functools import cache
from math import prod
from typing import Any

from routeplane.errors import DataError, ErrorKind
from routeplane.record.spec import MAX_LAYERS, MAX_TOP_K

__all__ = [
    "MAX_ROWS",
    "base64_length",
    "base85_length",
    "check_axes",
    "decode_base64",
    "decode_base85",
    "encode_base64",
    "encode_base85",
    "undecodable",
]

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
