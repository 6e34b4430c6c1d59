"""Arrays from outside, narrowed to the type the format stores: min and max are looked at before every cast.

The one place where foreign integers and floats become int32 token ids, int16 routes and float32 log-probabilities.
Knows no record, no spec, no Arrow.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from routeplane.errors import DataError, ErrorKind

__all__ = [
    "RESERVED_COLUMNS",
    "as_array",
    "as_integers",
    "as_logprobs",
    "check_count",
    "check_optional_int64",
    "check_text",
    "frozen_view",
    "settle",
]


def check_text(value: object, name: str, *, empty: bool = False) -> str:
    """A string that utf-8 can carry (no lone surrogates), not empty unless ``empty``. Raises DataError."""
    if not isinstance(value, str) or not (value or empty):
        raise DataError(
            f"expected {name} as a {'' if empty else 'non-empty '}string, got {value!r}", kind=ErrorKind.DTYPE
        )
    try:
        value.encode()
    except UnicodeEncodeError:
        raise DataError(f"expected {name} as text that utf-8 can carry, got {value!r}", kind=ErrorKind.DTYPE) from None
    return value


def check_count(value: object, name: str, *, below: int) -> int:
    """An int in ``[0, below)``; a bool is refused. Raises DataError."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < below:
        raise DataError(f"expected {name} as an int in [0, {below}), got {value!r}", kind=ErrorKind.DTYPE)
    return value


def check_optional_int64(value: object, name: str) -> int | None:
    """An int64 or None. Raises DataError."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not -(2**63) <= value < 2**63:
        raise DataError(f"expected {name} as an int64 or None, got {value!r}", kind=ErrorKind.DTYPE)
    return value


#: Names an aligned column may not take: the format's own columns.
RESERVED_COLUMNS = frozenset(
    {
        "attempt",
        "attributes",
        "captures",
        "checksum",
        "group",
        "logprobs",
        "prefix",
        "routes",
        "routes_start",
        "sample_id",
        "segment",
        "spans",
        "token_ids",
    }
)


def settle(instance: object, **values: Any) -> None:
    """Give a frozen value its checked fields while it is being constructed; nothing else may call this."""
    for name, value in values.items():
        object.__setattr__(instance, name, value)


def frozen_view(values: NDArray[Any]) -> NDArray[Any]:
    """A read-only view; shares memory with ``values`` and keeps it alive."""
    view = values.view()
    view.flags.writeable = False
    return view


def as_integers(values: Any, dtype: type[np.signedinteger[Any]], *, what: str, ndim: int) -> NDArray[Any]:
    """``values`` as a C-contiguous read-only array of ``dtype``; a view of the input where no change is needed.

    Raises DataError for other than whole-number input (floats are never rounded), a wrong rank, or a value that does
    not fit ``dtype``.
    """
    if type(values) is np.ndarray and values.dtype == dtype and values.ndim == ndim and values.flags.c_contiguous:
        return frozen_view(values)  # nearly always
    if isinstance(values, list | tuple) and bool in map(type, values):
        # among integers, numpy makes True a 1
        raise DataError(f"expected {what} of an integer type, got a bool", kind=ErrorKind.DTYPE)
    array = as_array(values, what=what)
    if array.size == 0 and array.dtype.kind == "f" and not isinstance(values, np.ndarray):
        array = array.astype(dtype)  # an empty list has no type of its own
    if array.dtype.kind not in "iu":
        raise DataError(f"expected {what} of an integer type, got {array.dtype}", kind=ErrorKind.DTYPE)
    if array.ndim != ndim:
        raise DataError(f"expected {what} of rank {ndim}, got shape {list(array.shape)}", kind=ErrorKind.SHAPE)
    target = np.dtype(dtype)
    if array.dtype != target:
        bounds = np.iinfo(target)
        if array.size and not (int(array.min()) >= bounds.min and int(array.max()) <= bounds.max):
            raise DataError(
                f"expected {what} in [{bounds.min}, {bounds.max}], got [{array.min()}, {array.max()}]",
                kind=ErrorKind.VALUE_RANGE,
            )
        array = array.astype(target)
    return frozen_view(np.ascontiguousarray(array))


def as_logprobs(values: Any, length: int, *, what: str = "logprobs") -> NDArray[np.float32]:
    """``values`` as read-only float32 ``[length]``. NaN means none; positive values and infinities above are
    refused."""
    array = as_array(values, what=what)
    if array.dtype.kind != "f" and array.size:
        raise DataError(f"expected {what} of a float type, got {array.dtype}", kind=ErrorKind.DTYPE)
    if array.shape != (length,):
        raise DataError(f"expected {what} of shape [{length}], got {list(array.shape)}", kind=ErrorKind.SHAPE)
    # Engines round: a log-probability of a certain token can come out a few ulp above zero.
    if array.size and bool((array > 1e-3).any()):
        at = int((array > 1e-3).argmax())
        raise DataError(f"expected {what} of at most 0, got {array[at]} at entry {at}", kind=ErrorKind.VALUE_RANGE)
    finite = array[:0] if array.dtype == np.float32 else array[np.isfinite(array)]
    if finite.size and float(finite.min()) < float(np.finfo(np.float32).min):
        raise DataError(f"expected {what} that float32 can hold, got {finite.min()}", kind=ErrorKind.VALUE_RANGE)
    return frozen_view(np.ascontiguousarray(array, dtype=np.float32))


def as_array(values: Any, *, what: str) -> NDArray[Any]:
    """``values`` as numpy has them, a view where it can be.

    Raises DataError for what is not an array: ragged lists, a mask, a tensor that numpy cannot read (on a device,
    of a type it lacks, waiting for its gradient).
    """
    if isinstance(values, np.ma.MaskedArray):
        # what is masked would come out as the value behind the mask
        raise DataError(f"expected {what} without a mask, got a masked array", kind=ErrorKind.DTYPE)
    if getattr(values, "is_nested", False):
        raise DataError(
            f"expected {what} as one array, got a jagged tensor of several samples: give each sample's apart",
            kind=ErrorKind.SHAPE,
        )
    try:
        return np.asarray(values)
    except (ValueError, OverflowError, TypeError, RuntimeError) as error:
        kind = ErrorKind.DTYPE if isinstance(error, TypeError | RuntimeError) else ErrorKind.SHAPE
        raise DataError(f"expected {what} as one array, got what numpy refuses: {error}", kind=kind) from None
