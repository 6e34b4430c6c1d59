"""Columns of every kind whose entries name their record and token, beside the plain Python values that they hold.

The oracle of the tests of aligned columns: ``entry`` says what an entry is; no array arithmetic is done here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from routeplane.record.aligned import AlignedColumn
from routeplane.record.record import RouteRecord
from routeplane.record.spec import RouteSpec
from routeplane.testing.builders import watermarked_record

__all__ = ["KINDS", "NARROW", "WIDE", "column", "column_record", "columns", "entry", "lists_of", "plain"]

#: Specs of which one has records of the narrow encoding.
NARROW = RouteSpec(num_experts=200, top_k=2, layer_ids=(1, 4), model="aligned")
WIDE = RouteSpec(num_experts=32_749, top_k=2, layer_ids=(1, 4), model="aligned")


def entry(seed: int, kind: str, token: int) -> Any:
    """The plain entry of one token."""
    known = (seed + token) % 4 != 1
    if kind == "number":
        return seed + token / 8
    if kind == "maybe":
        return seed + token if known else None
    if kind == "layers":
        return [[[seed + token, layer, slot] for slot in range(2)] for layer in (1, 4)]
    lists = [seed * 100 + token] * ((seed + token) % 3)
    return lists if kind == "lists" or known else None


KINDS = ("number", "maybe", "layers", "lists", "maybe_lists")


def column(seed: int, kind: str, tokens: range) -> AlignedColumn:
    """The column of the plain entries."""
    plain = [entry(seed, kind, token) for token in tokens]
    if kind == "number":
        return AlignedColumn.of(np.asarray(plain, dtype=np.float64), aligned="sampled")
    if kind == "maybe":
        known = np.asarray([one is not None for one in plain], dtype=np.bool_)
        return AlignedColumn.of(
            np.asarray([7 if one is None else one for one in plain], dtype=np.int64), aligned="fed", valid=known
        )
    if kind == "layers":
        values = np.asarray(plain, dtype=np.float32).reshape(len(plain), 2, 2, 3)
        return AlignedColumn.of(values, aligned="fed", axes=("layers", "topk", "feature"))
    return AlignedColumn.of_lists(plain, dtype="int32", aligned="sampled", nullable=kind == "maybe_lists")


def columns(seed: int, tokens: range) -> dict[str, AlignedColumn]:
    """One column of every kind."""
    return {kind: column(seed, kind, tokens) for kind in KINDS}


def plain(seed: int, tokens: range) -> dict[str, list[Any]]:
    """The same as lists."""
    return {kind: [entry(seed, kind, token) for token in tokens] for kind in KINDS}


def lists_of(record: RouteRecord) -> dict[str, list[Any]]:
    """All columns of a record as lists."""
    return {name: found.tolist() for name, found in record.columns.items()}


def column_record(seed: int, size: int, *, spec: RouteSpec = WIDE) -> RouteRecord:
    """A record of ``size`` tokens with every kind of column."""
    wide = watermarked_record(seed, num_tokens=size, spec=WIDE)
    routes_SLK = wide.routes if spec is WIDE else np.where(wide.routes < 0, -1, [[0, 199], [7, 3]]).astype(np.int16)
    return replace(wide, spec=spec, routes=routes_SLK, columns=columns(seed, range(size)), checksum=None)
