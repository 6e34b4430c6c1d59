"""Single values from outside: exactly the type that the format stores, or a DataError. Never coerced, never
narrowed."""

from __future__ import annotations

from routeplane.errors import DataError, ErrorKind

__all__ = ["check_count", "check_optional_int64", "check_text"]


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
    """An int in ``[0, below)``; bool is no int here. Raises DataError."""
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
