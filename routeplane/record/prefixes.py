"""A prompt that a group's records share is carried once: taking its rows out of the others, and joining them again.

Knows records only; where they came from, and go to, is the caller's business.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from routeplane.errors import DataError, ErrorKind, check_type
from routeplane.record.aligned import concatenate_columns
from routeplane.record.counts import Counts, rule
from routeplane.record.record import Prefix, RecordKey, RouteRecord, checked_records
from routeplane.record.spans import lose_rows

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["PromptReport", "SharedPrompts", "as_delta", "join_prefix", "resolve", "share_prompts", "verified_delta"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptReport(Counts):
    """What sharing prompts did. ``own``: records of a group whose prompt rows were like no other's."""

    shared: int = field(default=0, metadata=rule(scalar="prompts_shared"))
    own: int = field(default=0, metadata=rule(scalar="prompts_own"))
    rows: int = field(default=0, metadata=rule(scalar="prompt_rows_saved"))
    nbytes: int = field(default=0, metadata=rule(scalar="prompt_bytes_saved"))


@dataclass(frozen=True, kw_only=True)
class SharedPrompts:
    """Records in the order given, and what was done; ``resolve(records)`` gives the ones that were given."""

    records: tuple[RouteRecord, ...]
    report: PromptReport


def share_prompts(records: Iterable[RouteRecord]) -> SharedPrompts:
    """Refer to the prompt rows of an earlier record of the same group, where they are the same, token by token and row
    by row.

    The prompt is the first span, where that is one. Samples whose rows differ (another engine, a prefix cache, another
    version of the weights) keep their own; so do records without a group, and those that refer to another already.
    Verifies what it changes; checksums of deltas are new, ``resolve`` gives the old ones back.

    >>> from routeplane.testing.builders import watermarked_record, watermarked_spec
    >>> record = watermarked_record(0, num_tokens=6, spec=watermarked_spec())
    >>> group = [replace(record, sample_id=name, group="g", checksum=None) for name in ("a", "b")]
    >>> [one.routes_start for one in share_prompts(group).records]
    [0, 3]
    """
    holders: dict[tuple[str, int], list[RouteRecord]] = {}
    found: list[RouteRecord] = []
    report = PromptReport()
    for record in checked_records(records):
        stop = record.spans[0].stop if record.spans[0].kind == "prompt" else 0
        if record.group is None or record.prefix is not None or stop == 0:
            found.append(record)
            continue
        known = holders.setdefault((record.group, stop), [])
        holder = next((each for each in known if _same_prompt(each, record, stop=stop)), None)
        if holder is None:
            report = report.merge(PromptReport(own=1 if known else 0))
            known.append(record)
            found.append(record)
        else:
            found.append(_delta(record.verify(), holder, stop=stop))
            saved = found[-1].routes.nbytes
            report = report.merge(PromptReport(shared=1, rows=stop, nbytes=record.routes.nbytes - saved))
    return SharedPrompts(records=tuple(found), report=report)


def _same_prompt(holder: RouteRecord, record: RouteRecord, *, stop: int) -> bool:
    return (
        holder.spec == record.spec
        and _types(holder) == _types(record)
        and np.array_equal(holder.token_ids[:stop], record.token_ids[:stop])
        and np.array_equal(holder.routes[:stop], record.routes[:stop])
        and (
            holder.logprobs is None
            or record.logprobs is None
            or np.array_equal(_bits(holder.logprobs[:stop]), _bits(record.logprobs[:stop]))
        )
        and all(column[:stop].equals(holder.columns[name][:stop]) for name, column in record.columns.items())
    )


def as_delta(record: RouteRecord, base: RouteRecord, *, stored: RouteRecord | None = None) -> RouteRecord:
    """Refer to the rows that a record shares with the start of another one.

    Args:
        record: A whole record, such as a rollout after its next turn.
        base: The one it goes on from, whole, such as the same rollout a turn earlier.
        stored: ``base`` in the form that is stored beside the delta, where that is a delta itself; None: ``base``.

    Returns:
        The record from the first row on that differs: its tokens and columns begin there too. Itself where nothing is
        shared. Verifies ``record``; the checksum is new. Raises DataError (PREFIX) for a record that is a delta.

    >>> from routeplane.testing.builders import watermarked_record, watermarked_spec
    >>> longer, base = (watermarked_record(0, num_tokens=n, spec=watermarked_spec(), prompt_tokens=2) for n in (8, 5))
    >>> as_delta(longer, base).tokens_start
    4
    """
    for one in (record, base):
        check_type(one, RouteRecord, expected="a RouteRecord")
        if one.prefix is not None:
            raise DataError(f"expected whole records, got a delta @ sample {one.key}", kind=ErrorKind.PREFIX)
    holder = base if stored is None else stored
    if (holder.key, holder.num_tokens) != (base.key, base.num_tokens):
        raise DataError(f"expected {base.key} as it is stored, got {holder.key}", kind=ErrorKind.PREFIX)
    return verified_delta(record.verify(), base, stored=holder)


def verified_delta(record: RouteRecord, base: RouteRecord, *, stored: RouteRecord) -> RouteRecord:
    """``as_delta`` for a writer, which has verified both whole records a moment ago."""
    # a delta has a row and a token of its own
    stop = min(_shared_tokens(record, base), record.num_tokens - 1)
    return _delta(record, stored, stop=stop) if stop > 0 else record


def join_prefix(record: RouteRecord, *, stored: RouteRecord, whole: RouteRecord) -> RouteRecord:
    """Join a delta with the record that holds its first rows, given as it is stored and whole.

    Where the latter was quarantined, its rows are MISSING, and so are those of the joined record, as ``lost``. Raises
    DataError (PREFIX) where it is another record, or has not so many tokens.
    """
    if stored.attributes.get("quarantined") != "true":
        _check_prefix(record, stored)
        return _joined(record, {whole.key: whole})
    if whole.routes_start or whole.num_tokens < record.routes_start:
        raise DataError(f"expected {whole.key} whole, got what was left of it @ {record.key}", kind=ErrorKind.PREFIX)
    joined = _joined(replace(record, captures=lose_rows(record.captures, stop=record.routes_start)), {whole.key: whole})
    return replace(joined, attributes={**joined.attributes, "quarantined": "true"}, checksum=None)


def _shared_tokens(record: RouteRecord, base: RouteRecord) -> int:
    """How many first tokens have equal ids, rows, log-probabilities and entries of every column."""
    if base.spec != record.spec or _types(base) != _types(record):
        return 0
    most = min(record.num_tokens, base.num_tokens)
    others = np.flatnonzero(record.token_ids[:most] != base.token_ids[:most])
    most = int(others[0]) if len(others) else most  # rows behind the first other token are not looked at
    differs_S = (record.routes[:most] != base.routes[:most]).any(axis=(1, 2))
    if record.logprobs is not None and base.logprobs is not None:
        differs_S |= _bits(record.logprobs[:most]) != _bits(base.logprobs[:most])
    most = int(differs_S.argmax()) if differs_S.any() else most
    low = 0
    while low < most:  # the largest number whose first entries are equal in every column
        middle = (low + most + 1) // 2
        if all(column[:middle].equals(base.columns[name][:middle]) for name, column in record.columns.items()):
            low = middle
        else:
            most = middle - 1
    return low


def _types(record: RouteRecord) -> tuple[object, ...]:
    return record.logprobs is None, *((name, column.type) for name, column in record.columns.items())


def _bits(values: NDArray[np.float32]) -> NDArray[np.uint32]:
    return np.where(np.isnan(values), np.uint32(0x7FC00000), values.view(np.uint32))


def _delta(record: RouteRecord, holder: RouteRecord, *, stop: int) -> RouteRecord:
    prefix = Prefix(
        sample_id=holder.sample_id,
        attempt=holder.attempt,
        segment=holder.segment,
        stop=stop,
        checksum=holder.checksum,
    )
    return replace(
        record,
        token_ids=record.token_ids[stop:],
        routes=record.routes[stop:],
        routes_start=stop,
        prefix=prefix,
        logprobs=None if record.logprobs is None else record.logprobs[stop:],
        columns={name: column[stop:] for name, column in record.columns.items()},
        checksum=None,
    )


def resolve(records: Iterable[RouteRecord]) -> list[RouteRecord]:
    """Join records whose first rows stand in another one; all must be among ``records``. Order and keys are kept.

    Verifies every input; the tokens of the shared prefix must be equal, the prefix's record must have the checksum that
    was named. Raises DataError: DUPLICATE_KEY, or PREFIX where the record is absent, another, or refers to itself.

    >>> from routeplane.testing.builders import watermarked_record, watermarked_spec
    >>> record = watermarked_record(0, num_tokens=6, spec=watermarked_spec())
    >>> group = [replace(record, sample_id=name, group="g", checksum=None) for name in ("a", "b")]
    >>> [one.routes_start for one in resolve(share_prompts(group).records)]
    [0, 0]
    """
    given = [record.verify() for record in checked_records(records)]
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
    holder, stop = whole[record.prefix.key], record.routes_start
    rows_SLK = np.concatenate([holder.routes[:stop], record.routes])
    found = {} if record.tokens_start == 0 else _first_tokens(record, holder)
    return replace(record, routes=rows_SLK, routes_start=0, prefix=None, checksum=None, **found)


def _first_tokens(record: RouteRecord, holder: RouteRecord) -> dict[str, Any]:
    """Tokens and columns that begin at ``routes_start``, joined with the first ones of the record that holds them."""
    stop = record.tokens_start
    if _types(holder) != _types(record):
        raise DataError(
            f"expected {holder.key} with the columns of its delta, {_types(record)}, got {_types(holder)} "
            f"@ sample {record.sample_id}",
            kind=ErrorKind.PREFIX,
        )
    where = f"sample {record.key}"
    return {
        "token_ids": np.concatenate([holder.token_ids[:stop], record.token_ids]),
        "logprobs": None
        if record.logprobs is None or holder.logprobs is None
        else np.concatenate([holder.logprobs[:stop], record.logprobs]),
        "columns": {
            name: concatenate_columns([holder.columns[name][:stop], column], name=name, where=where)
            for name, column in record.columns.items()
        },
    }


def _check_prefix(record: RouteRecord, holder: RouteRecord) -> None:
    stop = record.routes_start
    record.spec.require_same_geometry(holder.spec, where=f"prefix of sample {record.sample_id}")
    if record.prefix is None or holder.checksum != record.prefix.checksum:
        raise DataError(
            f"expected {holder.key} with the checksum named by the prefix, got {holder.checksum:016x} "
            f"@ sample {record.sample_id}",
            kind=ErrorKind.PREFIX,
        )
    # tokens that are not repeated are proved by the checksum of the record that holds them
    repeated = record.tokens_start == 0 and holder.tokens_start == 0
    if stop > holder.num_tokens or (repeated and not np.array_equal(holder.token_ids[:stop], record.token_ids[:stop])):
        raise DataError(
            f"expected {holder.key} to begin with the same {stop} tokens @ sample {record.sample_id}",
            kind=ErrorKind.PREFIX,
        )
