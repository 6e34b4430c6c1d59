"""What ``assemble`` must give for a rollout, token by token, by loops over the truth: the reference of its tests."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from routeplane.record.spec import MISSING

if TYPE_CHECKING:
    from routeplane.record.record import RouteRecord
    from routeplane.testing.strategies import Rollout, Turn


@dataclass(kw_only=True)
class PlainSegment:
    """One segment as plain lists, an entry per token; rows are ``rows[token][slot]``, a list of K ids."""

    token_ids: list[int]
    rows: list[list[list[int]]]
    captures: list[tuple[str, str, int | None]] = field(default_factory=list)
    spans: list[tuple[str, str, int | None]] = field(default_factory=list)
    logprobs: list[str] | None = None
    columns: dict[str, list[str]] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)


def _rank(turn: Turn, token: int) -> int:
    """0: nothing came for this token, 1: some layers, 2: all."""
    brought = turn.brought_SL[token]
    return 2 if brought.all() else 1 if brought.any() else 0


def _rows(turn: Turn, token: int) -> list[list[int]]:
    missing = [MISSING] * turn.rows_SLK.shape[2]
    brought = turn.brought_SL[token].tolist()
    return [row if came else missing for row, came in zip(turn.rows_SLK[token].tolist(), brought, strict=True)]


def plain_segment(rollout: Rollout, index: int, *, keep_last: bool) -> PlainSegment:
    """Segment ``index`` of the record that a rollout must become."""
    turns = rollout.segment(index)
    token_ids = rollout.token_ids[index].tolist()
    missing = [[MISSING] * rollout.spec.top_k] * rollout.spec.num_layers
    found = PlainSegment(token_ids=token_ids, rows=[missing] * len(token_ids))
    for token in range(len(token_ids)):
        keeper = _walk(turns, token, found, keep_last=keep_last)
        found.captures.append(_capture(turns, token, keeper))
        version = found.captures[-1][2]
        if keeper is not None and keeper.call.cached and version is not None:
            place = next(place for place, turn in enumerate(turns) if turn is keeper)
            earlier = {turn.call.weights_version for turn in turns[:place]}
            found.counts["stale_kv_rows"] += bool(earlier - {None, version})
    _add_token_columns(turns, found)
    return found


def _walk(turns: tuple[Turn, ...], token: int, found: PlainSegment, *, keep_last: bool) -> Turn | None:
    """Which call's rows of a token stay; on the way, what was captured twice is compared."""
    keeper: Turn | None = None
    known = False  # whether a call before had this token
    for turn in turns:
        if token >= turn.call.num_tokens:
            continue
        rank, kept_rank = _rank(turn, token), 0 if keeper is None else _rank(keeper, token)
        if rank and keeper is None and known:
            found.counts["boundary_tokens"] += 1
        if rank and keeper is not None:
            for old, new in zip(found.rows[token], _rows(turn, token), strict=True):
                if MISSING not in (old[0], new[0]):
                    found.counts["overlap_rows"] += 1
                    found.counts["drift_rows"] += set(old) != set(new)
        if rank > kept_rank or (rank and rank == kept_rank and keep_last):
            found.counts["replaced_rows"] += keeper is not None
            keeper, found.rows[token] = turn, _rows(turn, token)
        known = True
    return keeper


def _capture(turns: tuple[Turn, ...], token: int, keeper: Turn | None) -> tuple[str, str, int | None]:
    if keeper is not None:
        call, cached = keeper.call, token < keeper.call.cached
        state = "partial" if _rank(keeper, token) == 1 else "cached" if cached else "captured"
        return state, call.call_id, None if cached else call.weights_version
    for place, turn in enumerate(turns):
        if token < turn.call.num_fed:
            trimmed = place > 0 and token < turn.call.first_row and bool(turn.brought_SL.any())
            return turn.call.loss or ("lost" if trimmed else "not_captured"), turn.call.call_id, None
    return "not_fed", turns[-1].call.call_id, None


def _add_token_columns(turns: tuple[Turn, ...], found: PlainSegment) -> None:
    """Spans, log-probabilities and columns: each token has those of the call that brought it."""
    logprobs: list[Any] = []
    for turn in turns:
        call, start = turn.call, len(found.spans)
        prompt = len(call.prompt_ids)
        found.spans += [("prompt", call.call_id, None)] * (prompt - start)
        found.spans += [("generation", call.call_id, call.weights_version)] * (call.num_tokens - prompt)
        logprobs += [np.float32("nan")] * (prompt - start)
        logprobs += [np.float32("nan")] * (call.num_tokens - prompt) if call.logprobs is None else list(call.logprobs)
        for name, values in call.columns.items():
            found.columns.setdefault(name, []).extend(repr(value) for value in values[start:])
    if any(turn.call.logprobs is not None for turn in turns):
        found.logprobs = [repr(value) for value in logprobs]


def plain_record(record: RouteRecord) -> PlainSegment:
    """An assembled record in the same plain form, without counts."""
    return PlainSegment(
        token_ids=record.token_ids.tolist(),
        rows=record.routes.tolist(),
        captures=[
            (capture.state, capture.call, capture.weights_version)
            for capture in record.captures
            for _ in range(capture.start, capture.stop)
        ],
        spans=[
            (span.kind, span.call, span.weights_version) for span in record.spans for _ in range(span.start, span.stop)
        ],
        logprobs=None if record.logprobs is None else [repr(value) for value in record.logprobs],
        columns={name: [repr(value) for value in values] for name, values in record.columns.items()},
    )
