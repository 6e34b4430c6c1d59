"""Records joined with a batch that the trainer made: by sample id, checked token by token.

Owns the proof that a record belongs to a row: identity of every real token. The plan that comes out puts routes where
the trainer's own batch has those tokens, whatever its padding, so that no index arithmetic is left to do. Numpy alone;
knows records and plans, no torch.

Axes: B sequences, S positions of a padded row, T packed rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from routeplane.batch.plan import TokenPlan
from routeplane.batch.slots import PADDING, running_sum
from routeplane.errors import DataError, ErrorKind, Problem, refused
from routeplane.record.record import RecordKey

if TYPE_CHECKING:
    from routeplane.record.record import RouteRecord

__all__ = ["Joined", "join"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Joined:
    """The record of each of the trainer's rows, and the plan that lays them out as the trainer did.

    ``collate(joined.records, spec, plan=joined.plan)`` makes the batch; ``shard=`` cuts it as the trainer cuts its own.
    """

    records: tuple[RouteRecord, ...]
    plan: TokenPlan


def join(
    batch_token_ids: Any,
    records: Iterable[RouteRecord],
    *,
    sample_ids: Sequence[str | RecordKey],
    pad_mask: Any = None,
    lengths: Any = None,
    cu_seqlens: Any = None,
) -> Joined:
    """Find the record of each sequence of a trainer's batch by its sample id, and check that the tokens are the same.

    ``batch_token_ids``: integers ``[B, S]``, or ``[T]`` with ``cu_seqlens`` ``[B+1]``; anything numpy reads (a tensor
    on the CPU). ``sample_ids``: for each sequence, the id, or the ``RecordKey`` where an id has several records. Which
    rows are tokens is said by ``pad_mask`` (bool, of the ids' shape, True at padding: the opposite of an attention
    mask) or ``lengths`` (``[B]``, tokens from each sequence's first row on); by neither, all are. Padding ids are never
    compared. Records that no sequence names are left out. Shares the records.

    Raises UsageError for arguments that disagree; DataError with all findings: TOKEN_MISMATCH, which names the sample
    and its first differing token, ROUTES_MISSING for a sequence without a record, DUPLICATE_KEY for an id with several.
    """
    ids, edges = _layout(batch_token_ids, cu_seqlens)
    if len(sample_ids) != len(edges) - 1:
        raise refused(f"a sample id for each of {len(edges) - 1} sequences", f"{len(sample_ids)}")
    real_N = _real_rows(ids, edges, pad_mask=pad_mask, lengths=lengths)
    table = _by_id(records)
    found: list[RouteRecord] = []
    problems: list[Problem] = []
    record_N = np.full(ids.size, PADDING, dtype=np.int64)
    token_N = np.full(ids.size, PADDING, dtype=np.int64)
    position_N = np.zeros(ids.size, dtype=np.int64)
    for index, (sample, (start, stop)) in enumerate(zip(sample_ids, pairwise(edges.tolist()), strict=True)):
        rows = start + np.flatnonzero(real_N[start:stop])
        match = _lookup(table, sample)
        problem = match if isinstance(match, Problem) else _difference(match, ids.reshape(-1)[rows])
        if problem is not None:
            problems.append(problem)
        elif not isinstance(match, Problem):
            found.append(match)
            record_N[rows], token_N[rows] = index, np.arange(len(rows))
            # padding inside and behind a sequence goes on counting; before it, 0
            position_N[start:stop] = np.maximum(np.arange(stop - start) - (rows[0] - start), 0)
            position_N[rows] = token_N[rows]
    if problems:
        raise DataError.from_problems(tuple(problems), what="a batch that its records do not match")
    counts = np.asarray([record.num_tokens for record in found], dtype=np.int64)
    plan = TokenPlan(
        layout="padded" if ids.ndim == 2 else "packed",
        shape=ids.shape,
        record_N=record_N,
        token_N=token_N,
        position_N=position_N,
        sources=counts,
        lengths=counts,
        cu_seqlens=running_sum(counts).astype(np.int32),
        cu_seqlens_padded=edges.astype(np.int32),
    )
    return Joined(records=tuple(found), plan=plan)


def _layout(batch_token_ids: Any, cu_seqlens: Any) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """The ids, and the rows at which sequences begin and end."""
    ids = np.asarray(batch_token_ids)
    if ids.dtype.kind not in "iu" or ids.ndim not in (1, 2) or ids.size == 0:
        raise refused("token ids as integers [B, S] or [T]", f"{ids.dtype} {list(ids.shape)}")
    if (ids.ndim == 1) != (cu_seqlens is not None):
        raise refused("cu_seqlens with packed ids [T], and with no others", f"ids of shape {list(ids.shape)}")
    if ids.ndim == 2:
        return ids, np.arange(len(ids) + 1, dtype=np.int64) * ids.shape[1]
    edges = np.asarray(cu_seqlens)
    whole = edges.ndim == 1 and edges.size > 1 and edges.dtype.kind in "iu"
    if not whole or edges[0] != 0 or edges[-1] != ids.size or np.any(np.diff(edges.astype(np.int64)) < 1):
        raise refused(f"cu_seqlens rising from 0 to {ids.size}", f"{edges.tolist()}")
    return ids, edges.astype(np.int64)


def _real_rows(ids: NDArray[Any], edges: NDArray[np.int64], *, pad_mask: Any, lengths: Any) -> NDArray[np.bool_]:
    if pad_mask is not None and lengths is not None:
        raise refused("pad_mask or lengths", "both")
    if pad_mask is not None:
        mask = np.asarray(pad_mask)
        if mask.dtype != np.bool_ or mask.shape != ids.shape:
            raise refused(f"pad_mask as bool {list(ids.shape)}", f"{mask.dtype} {list(mask.shape)}")
        return ~mask.reshape(-1)
    if lengths is None:
        return np.ones(ids.size, dtype=np.bool_)
    counts, widths = np.asarray(lengths), np.diff(edges)
    if counts.shape != widths.shape or counts.dtype.kind not in "iu" or np.any((counts < 0) | (counts > widths)):
        raise refused(f"lengths of {len(widths)} sequences within their {widths.tolist()} rows", f"{counts.tolist()}")
    offset_N = np.arange(ids.size) - np.repeat(edges[:-1], widths)
    real_N: NDArray[np.bool_] = offset_N < np.repeat(counts, widths)
    return real_N


def _by_id(records: Iterable[RouteRecord]) -> Mapping[str, list[RouteRecord]]:
    table: dict[str, list[RouteRecord]] = {}
    for record in records:
        table.setdefault(record.sample_id, []).append(record)
    return table


def _lookup(table: Mapping[str, list[RouteRecord]], sample: str | RecordKey) -> RouteRecord | Problem:
    name = sample.sample_id if isinstance(sample, RecordKey) else sample
    matches = [record for record in table.get(name, ()) if sample in (name, record.key)]
    if len(matches) == 1:
        return matches[0]
    if matches:
        keys = ", ".join(str(record.key) for record in matches)
        message = f"expected one record of this id (a RecordKey tells them apart), got {keys}"
        return Problem(kind=ErrorKind.DUPLICATE_KEY, message=message, sample=name)
    return Problem(kind=ErrorKind.ROUTES_MISSING, message=f"expected a record of {sample}, got none", sample=name)


def _difference(record: RouteRecord, tokens_S: NDArray[Any]) -> Problem | None:
    """The first token in which a record and a sequence differ, if any."""
    shared = min(record.num_tokens, len(tokens_S))
    differing = np.flatnonzero(record.token_ids[:shared] != tokens_S[:shared])
    if len(differing) == 0 and record.num_tokens == len(tokens_S):
        return None
    token = int(differing[0]) if len(differing) else shared
    ours, theirs = (
        f"id {values[token]}" if token < len(values) else f"an end after {len(values)} tokens"
        for values in (record.token_ids, tokens_S)
    )
    message = f"expected {ours} as in record {record.key}, got {theirs} in the batch"
    return Problem(kind=ErrorKind.TOKEN_MISMATCH, message=message, sample=record.sample_id, token=token)
