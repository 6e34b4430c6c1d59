"""Joining records whose first rows stand in another one (a prompt shared by a group is carried once).

Knows records only; where they came from is the caller's business.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np

from routeplane.errors import DataError, ErrorKind
from routeplane.record import RecordKey, RouteRecord

__all__ = ["resolve"]


def resolve(records: Iterable[RouteRecord]) -> list[RouteRecord]:
    """Join records whose first rows stand in another one; all must be among ``records``. Order and keys are kept.

    Verifies every input; the tokens of the shared prefix must be equal, the prefix's record must have the checksum that
    was named. Raises DataError: DUPLICATE_KEY, or PREFIX where the record is absent, another, or refers to itself.
    """
    given = [record.verify() for record in records]
    by_key: dict[RecordKey, RouteRecord] = {}
    for record in given:
        if record.key in by_key:
            raise DataError(f"expected each record once, got {record.key} twice", kind=ErrorKind.DUPLICATE_KEY)
        by_key[record.key] = record
    whole: dict[RecordKey, RouteRecord] = {}
    for record in given:
        for link in reversed(_chain(record, by_key, whole)):
            whole[link.key] = _joined(link, whole)
    return [whole[record.key] for record in given]


def _chain(
    record: RouteRecord, by_key: Mapping[RecordKey, RouteRecord], whole: Mapping[RecordKey, RouteRecord]
) -> list[RouteRecord]:
    """The record, the one that holds its prefix, and so on to the first that is whole or was joined already."""
    chain = [record]
    seen = {record.key}
    while (prefix := chain[-1].prefix) is not None and chain[-1].key not in whole:
        link = chain[-1]
        holder = by_key.get(prefix.key)
        if holder is None:
            raise DataError(
                f"expected the record {prefix.key} that holds rows [0, {link.routes_start}), got none "
                f"@ sample {link.sample_id}",
                kind=ErrorKind.PREFIX,
            )
        if holder.key in seen:
            raise DataError(f"expected prefixes that end, got a cycle through {holder.key}", kind=ErrorKind.PREFIX)
        _check_prefix(link, holder)
        seen.add(holder.key)
        chain.append(holder)
    return chain


def _joined(record: RouteRecord, whole: Mapping[RecordKey, RouteRecord]) -> RouteRecord:
    if record.key in whole:
        return whole[record.key]
    if record.prefix is None:
        return record
    shared_SLK = whole[record.prefix.key].routes[: record.routes_start]
    rows_SLK = np.concatenate([shared_SLK, record.routes])
    return replace(record, routes=rows_SLK, routes_start=0, prefix=None, checksum=None)


def _check_prefix(record: RouteRecord, holder: RouteRecord) -> None:
    stop = record.routes_start
    record.spec.require_same_geometry(holder.spec, where=f"prefix of sample {record.sample_id}")
    if record.prefix is None or holder.checksum != record.prefix.checksum:
        raise DataError(
            f"expected {holder.key} with the checksum named by the prefix, got {holder.checksum:016x} "
            f"@ sample {record.sample_id}",
            kind=ErrorKind.PREFIX,
        )
    if stop > holder.num_tokens or not np.array_equal(holder.token_ids[:stop], record.token_ids[:stop]):
        raise DataError(
            f"expected {holder.key} to begin with the same {stop} tokens @ sample {record.sample_id}",
            kind=ErrorKind.PREFIX,
        )
