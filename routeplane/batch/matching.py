"""Records joined with a batch that the trainer made: by sample id, checked token by token.

Owns the proof that a record belongs to a row: identity of every real token. The plan that comes out puts routes where
the trainer's own batch has those tokens, whatever its padding, so that no index arithmetic is left to do. Numpy alone;
knows records and plans, no torch.

Axes: B sequences, S positions of a padded row, T packed rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from routeplane.batch.plan import TokenPlan
from routeplane.batch.slots import PADDING, check_offsets, running_sum
from routeplane.errors import DataError, ErrorKind, Problem, refused
from routeplane.record.counts import Counts
from routeplane.record.record import RecordKey
from routeplane.record.spans import PRESENT_STATES

if TYPE_CHECKING:
    from routeplane.record.record import RouteRecord

__all__ = ["JoinReport", "JoinResult", "join", "plan_of_rows"]


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinReport(Counts):
    """What ``join`` matched and what it passed over.

    ``sequences`` with a record, ``dummies`` without one, ``truncated`` sequences and the ``truncated_tokens`` that they
    lack, ``suffix_tokens`` that the trainer appended, and how many of these the policy sampled (``suffix_sampled``: at
    most one a sequence, which was never fed).
    """

    SCOPE: ClassVar[str] = "join_"
    sequences: int = 0
    dummies: int = 0
    truncated: int = 0
    truncated_tokens: int = 0
    suffix_tokens: int = 0
    suffix_sampled: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinResult:
    """The record of each of the trainer's sequences, and the plan that lays them out as the trainer did.

    ``collate(joined.records, spec, plan=joined.plan)`` makes the batch; ``shard=`` cuts it as the trainer cuts its own.
    A dummy sequence has no record: in the plan its length is 0 and its rows are padding.
    """

    records: tuple[RouteRecord, ...]
    plan: TokenPlan
    report: JoinReport


def join(
    batch_token_ids: Any,
    records: Iterable[RouteRecord],
    *,
    sample_ids: Sequence[str | RecordKey | None],
    pad_mask: Any = None,
    lengths: Any = None,
    cu_seqlens: Any = None,
    truncated: Literal["left", "right"] | None = None,
    sampled: Any = None,
) -> JoinResult:
    """Find the record of each sequence of a trainer's batch by its sample id, and check that the tokens are the same.

    ``batch_token_ids``: integers ``[B, S]``, ``[T]`` with ``cu_seqlens`` ``[B+1]``, a nested (jagged) tensor, or a list
    of arrays, one a sequence; anything numpy reads (a tensor on the CPU). ``sample_ids``: for each sequence, the id,
    the ``RecordKey`` where an id has several records, or None for a dummy sequence. Which rows are tokens is said by
    ``pad_mask`` (bool or 0 and 1, of the ids' shape, True at padding: the opposite of an attention mask) or ``lengths``
    (``[B]``, tokens from each sequence's first row on); by neither, all are. Padding ids are never compared. Records
    that no sequence names are left out.

    ``truncated``: which end of a record the trainer may have cut: its first (``"left"``) or last tokens (``"right"``);
    default: none may be missing. ``sampled``: tokens that the policy sampled, in the ids' form, as bool or 0 and 1:
    with it the trainer may have appended tokens, such as an end of sequence or an environment's answer. Their rows
    become padding, and nothing that an engine was fed hides among them: the record's last token was captured or never
    fed, and of all that was never fed, of the record and appended, at most the first token was sampled. (A mask that
    leaves out sampled tokens for other reasons, such as a truncated sample's, says nothing about them.) Default: no
    token may have been appended.

    Returns records, plan and a report of all that was passed over; shares the records. Raises UsageError for arguments
    that disagree; DataError with all findings: TOKEN_MISMATCH, which names the sample and its first differing token,
    ROUTES_MISSING for a sequence without a record, DUPLICATE_KEY for an id with several.

    >>> from routeplane.batch import join
    >>> from routeplane.testing.builders import watermarked_record, watermarked_spec
    >>> record = watermarked_record(0, num_tokens=4, spec=watermarked_spec())
    >>> ids = [list(record.token_ids[:3]) + [0], [0, 0, 0, 0]]
    >>> joined = join(ids, [record], sample_ids=["sample-0", None], lengths=[3, 0], truncated="right")
    >>> joined.plan.token_N.tolist(), joined.report.truncated_tokens
    ([0, 1, 2, -1, -1, -1, -1, -1], 1)
    """
    if truncated not in (None, "left", "right"):
        raise refused("truncated of (None, 'left', 'right')", f"{truncated}")
    ids, edges = _layout(batch_token_ids, cu_seqlens)
    if len(sample_ids) != len(edges) - 1:
        raise refused(f"a sample id for each of {len(edges) - 1} sequences", f"{len(sample_ids)}")
    real_N = _real_rows(ids, edges, pad_mask=pad_mask, lengths=lengths)
    sampled_N = None if sampled is None else _mask_of(sampled, ids, "sampled")
    table = _by_id(records)
    matches: list[_Match] = []
    problems: list[Problem] = []
    for sample, (start, stop) in zip(sample_ids, pairwise(edges.tolist()), strict=True):
        rows = start + np.flatnonzero(real_N[start:stop])
        policy = None if sampled_N is None else sampled_N[rows]
        found = _match(table, sample, ids.reshape(-1)[rows], rows=rows, truncated=truncated, sampled=policy)
        if isinstance(found, Problem):
            problems.append(found)
        else:
            matches.append(found)
    if problems:
        raise DataError.from_problems(tuple(problems), what="a batch that its records do not match")
    return JoinResult(
        records=tuple(match.record for match in matches if match.record is not None),
        plan=_plan(matches, ids.shape, edges),
        report=_report(matches),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Match:
    """A sequence's record (None: a dummy), its first token that the trainer kept, and the rows that hold its tokens."""

    record: RouteRecord | None
    first: int
    rows: NDArray[np.int64]
    appended: int
    sampled: int


def _match(
    table: Mapping[str, list[RouteRecord]],
    sample: str | RecordKey | None,
    tokens: NDArray[Any],
    *,
    rows: NDArray[np.int64],
    truncated: str | None,
    sampled: NDArray[np.bool_] | None,
) -> _Match | Problem:
    if sample is None:
        return _Match(record=None, first=0, rows=rows[:0], appended=0, sampled=0)
    record = _lookup(table, sample)
    if isinstance(record, Problem):
        return record
    ours, extra = record.num_tokens, max(len(tokens) - record.num_tokens, 0)
    if extra and (sampled is None or not _is_whole(record)):
        return _difference(record, record.token_ids, tokens, whole=sampled is None)
    first = ours - len(tokens) if truncated == "left" and not extra else 0
    kept = record.token_ids[first : first + len(tokens)] if truncated else record.token_ids
    shown = tokens[: len(tokens) - extra]
    if len(kept) != len(shown) or len(shown) == 0 or np.any(kept != shown):
        return _difference(record, kept, shown, first=first)
    policy = np.flatnonzero(sampled[ours:]) if extra and sampled is not None else rows[:0]
    # the last sampled token alone was not fed, and it is the first one that was not
    if len(policy) > 1 or (len(policy) == 1 and (policy[0] > 0 or record.captures[-1].state == "not_fed")):
        return _hidden(record, int(policy[-1]))
    return _Match(record=record, first=first, rows=rows[: len(shown)], appended=extra, sampled=len(policy))


def _hidden(record: RouteRecord, offset: int) -> Problem:
    """A token that was sampled behind the record's end, so that tokens before it were fed."""
    message = (
        f"expected appended tokens that no policy sampled behind record {record.key}, got a sampled one {offset + 1} "
        f"behind a last token that is {record.captures[-1].state}: rows before it were fed and lost"
    )
    return Problem(
        kind=ErrorKind.ROUTES_MISSING, message=message, sample=record.sample_id, token=record.num_tokens + offset
    )


def _is_whole(record: RouteRecord) -> bool:
    """Whether the record's last token was captured, or was never fed: nothing was lost behind it."""
    return record.captures[-1].state in (*PRESENT_STATES, "not_fed")


def _plan(matches: Sequence[_Match], shape: tuple[int, ...], edges: NDArray[np.int64]) -> TokenPlan:
    mask_N = np.zeros(int(edges[-1]), dtype=np.bool_)
    for match in matches:
        mask_N[match.rows] = True
    plan = TokenPlan.from_mask(mask_N.reshape(shape), edges=edges)
    firsts = np.asarray([match.first for match in matches], dtype=np.int64)
    sources = np.asarray([0 if match.record is None else match.record.num_tokens for match in matches], dtype=np.int64)
    token_N = np.where(plan.record_N == PADDING, PADDING, plan.token_N + firsts[plan.record_N])
    return replace(plan, token_N=token_N, sources=sources)


def _report(matches: Sequence[_Match]) -> JoinReport:
    lacking = [0 if match.record is None else match.record.num_tokens - len(match.rows) for match in matches]
    return JoinReport(
        sequences=sum(match.record is not None for match in matches),
        dummies=sum(match.record is None for match in matches),
        truncated=sum(count > 0 for count in lacking),
        truncated_tokens=sum(lacking),
        suffix_tokens=sum(match.appended for match in matches),
        suffix_sampled=sum(match.sampled for match in matches),
    )


def plan_of_rows(token_ids: Any, *, lengths: Any, cu_seqlens: Any, pad_mask: Any) -> TokenPlan:
    """The plan of a trainer's own batch; arguments as in ``join``. Tensors may be on any device."""
    on_host = (each.cpu() if hasattr(each, "cpu") else each for each in (token_ids, lengths, cu_seqlens, pad_mask))
    given, counts, offsets, mask = on_host
    ids, edges = _layout(given, offsets)
    if ids.ndim == 1 and mask is None and counts is None:
        return TokenPlan.from_cu_seqlens(edges)  # the same plan, without a mask of its rows
    real_N = _real_rows(ids, edges, pad_mask=mask, lengths=counts)
    return TokenPlan.from_mask(real_N.reshape(ids.shape), edges=edges)


def _layout(batch_token_ids: Any, cu_seqlens: Any) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """The ids, and the rows at which sequences begin and end."""
    given = batch_token_ids
    if getattr(given, "is_nested", False):
        cu_seqlens, given = _alone(cu_seqlens, "a nested tensor", given.offsets()), given.values()
    elif isinstance(given, list | tuple) and given and len({np.size(each) for each in given}) > 1:
        edges = running_sum(np.asarray([np.size(each) for each in given], dtype=np.int64))
        cu_seqlens, given = _alone(cu_seqlens, "a list of sequences", edges), np.concatenate(given)
    ids = np.asarray(given)
    if ids.dtype.kind not in "iu" or ids.ndim not in (1, 2) or ids.size == 0:
        raise refused("token ids as integers [B, S] or [T]", f"{ids.dtype} {list(ids.shape)}")
    if (ids.ndim == 1) != (cu_seqlens is not None):
        raise refused("cu_seqlens with packed ids [T], and with no others", f"ids of shape {list(ids.shape)}")
    if ids.ndim == 2:
        return ids, np.arange(len(ids) + 1, dtype=np.int64) * ids.shape[1]
    edges = check_offsets(cu_seqlens, "cu_seqlens")
    if edges[-1] != ids.size or np.any(np.diff(edges) < 1):
        raise refused(f"cu_seqlens rising from 0 to {ids.size}", f"{edges.tolist()}")
    return ids, edges


def _alone(cu_seqlens: Any, what: str, offsets: Any) -> Any:
    if cu_seqlens is not None:
        raise refused(f"no cu_seqlens with {what}, which has its own", "both")
    return offsets


def _real_rows(ids: NDArray[Any], edges: NDArray[np.int64], *, pad_mask: Any, lengths: Any) -> NDArray[np.bool_]:
    if pad_mask is not None and lengths is not None:
        raise refused("pad_mask or lengths", "both")
    if pad_mask is not None:
        return ~_mask_of(pad_mask, ids, "pad_mask")
    if lengths is None:
        return np.ones(ids.size, dtype=np.bool_)
    counts, widths = np.asarray(lengths), np.diff(edges)
    if counts.shape != widths.shape or counts.dtype.kind not in "iu" or np.any((counts < 0) | (counts > widths)):
        raise refused(f"lengths of {len(widths)} sequences within their {widths.tolist()} rows", f"{counts.tolist()}")
    offset_N = np.arange(ids.size) - np.repeat(edges[:-1], widths)
    real_N: NDArray[np.bool_] = offset_N < np.repeat(counts, widths)
    return real_N


def _mask_of(given: Any, ids: NDArray[Any], name: str) -> NDArray[np.bool_]:
    """A mask of the ids' form, as bool ``[N]``."""
    if getattr(given, "is_nested", False):
        given = given.values()
    elif isinstance(given, list | tuple) and ids.ndim == 1 and len(given) and np.ndim(given[0]):
        given = np.concatenate(given)
    mask = np.asarray(given)
    if mask.shape != ids.shape or not (
        mask.dtype == np.bool_ or (mask.dtype.kind in "iu" and np.isin(mask, (0, 1)).all())
    ):
        raise refused(f"{name} as bool, or 0 and 1, {list(ids.shape)}", f"{mask.dtype} {list(mask.shape)}")
    return np.asarray(mask.reshape(-1) != 0)


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


def _difference(
    record: RouteRecord, ours: NDArray[Any], theirs: NDArray[Any], *, first: int = 0, whole: bool = True
) -> Problem:
    """The first token in which a record and a sequence differ; ``first``: the record's token at ``ours[0]``."""
    shared = min(len(ours), len(theirs))
    differing = np.flatnonzero(ours[:shared] != theirs[:shared])
    token = int(differing[0]) if len(differing) else shared
    expected, got = (
        f"id {ids[token]}" if token < len(ids) else f"an end after {len(ids)} tokens" for ids in (ours, theirs)
    )
    more = "" if whole else f" (a record whose last token is {record.captures[-1].state} can have no suffix)"
    message = f"expected {expected} as in record {record.key}, got {got} in the batch{more}"
    return Problem(kind=ErrorKind.TOKEN_MISMATCH, message=message, sample=record.sample_id, token=first + token)
