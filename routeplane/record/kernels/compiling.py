"""How loops are compiled here: by numba, kept on disk where that can be, without the interpreter's lock.

Knows no loop. numba's cache looks at the file of the function alone, so this may stand apart from what it decorates.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numba

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["compiled"]


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, compiled for the types of its first call, or loaded from what an earlier process compiled."""
    try:
        return numba.njit(cache=True, nogil=True)(function)
    except RuntimeError:  # neither the function's folder nor the user's cache can be written
        return numba.njit(nogil=True)(function)
