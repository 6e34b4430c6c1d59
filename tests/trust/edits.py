"""Edits of documents that campaigns share."""

from __future__ import annotations

import copy
import random
from typing import Any

__all__ = ["mutate"]

_LEAVES: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    2**70,
    1.5,
    float("nan"),
    "",
    "x",
    "nrlre1:int16:1x1x1:",
    [],
    [[]],
    {},
    {"a": 1},
)


def mutate(document: Any, rng: random.Random) -> Any:
    """A document with one to three of its places changed, removed or doubled."""
    changed = copy.deepcopy(document)
    for _ in range(rng.randint(1, 3)):
        place, key = _pick(changed, rng)
        if place is None:
            return rng.choice(_LEAVES)
        action = rng.randrange(4)
        if action == 0:
            place[key] = copy.deepcopy(rng.choice(_LEAVES))
        elif action == 1 and isinstance(place, dict):
            place[f"{key}_"] = place.pop(key)
        elif action == 2:
            del place[key]
        else:
            place[key] = [copy.deepcopy(place[key])] * 2
    return changed


def _pick(document: Any, rng: random.Random) -> tuple[Any, Any]:
    """A container somewhere in a document, and one of its keys."""
    found: list[tuple[Any, Any]] = []
    stack = [document]
    while stack:
        item = stack.pop()
        keys = (
            list(item) if isinstance(item, dict) else list(range(min(len(item), 4))) if isinstance(item, list) else []
        )
        found += [(item, key) for key in keys]
        stack += [item[key] for key in keys]
    return rng.choice(found) if found else (None, None)
