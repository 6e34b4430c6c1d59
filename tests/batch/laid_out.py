"""Arguments of ``collate`` and ``microbatches`` from one flat table of them, as parametrised tests list them."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from routeplane.batch import BatchOptions

__all__ = ["laid_out"]

_OPTIONS = {item.name for item in fields(BatchOptions)}


def laid_out(given: dict[str, Any], /, **more: Any) -> dict[str, Any]:
    """The table with what BatchOptions holds under ``options``."""
    table = {**given, **more}
    plain = {name: value for name, value in table.items() if name not in _OPTIONS}
    return {**plain, "options": BatchOptions(**{name: value for name, value in table.items() if name in _OPTIONS})}
