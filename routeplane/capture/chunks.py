"""Streamed responses turned into calls: chunks with ids and routes, joined by the tokens that they say they cover.

Owns the joining: a chunk's rows are the whole array so far (``cumulative``) or what is new (``delta``), and in either
case rows that come twice must be equal, holes and rows of tokens that no chunk brought are refused. What a server sends
in a chunk is read as ``openai`` reads a response.

Axes: R rows, L captured layers, K top-k slots.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from routeplane.capture.choices import Choice, Reading, call_of_choice
from routeplane.capture.forms import WireForm, read_routes
from routeplane.capture.openai import (
    as_document,
    as_list,
    as_mapping,
    choice_logprobs,
    finish_reason,
    refuse_server_error,
)
from routeplane.capture.wire import LayerAxis
from routeplane.errors import CaptureError, DataError, ErrorKind, refused
from routeplane.record.parse import as_integers

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from routeplane.record.calls import ModelCall
    from routeplane.record.spec import RouteSpec

__all__ = ["ChunkSpans", "calls_from_chunks"]

#: What the rows of a chunk cover: everything so far, or what is new.
ChunkSpans = Literal["cumulative", "delta"]

_WHY_ABSENT = (
    "no chunk carried any: this server sends routes with whole responses alone (vLLM: all but /inference/v1/generate), "
    "so ask with stream=False"
)


@dataclass(kw_only=True)
class _Sum:
    """What the chunks of one choice have brought so far."""

    prompt_ids: list[int] | None = None
    generation_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    first_row: int = 0
    parts: list[NDArray[np.int16]] = field(default_factory=list)
    has_ids: bool = False

    @property
    def rows(self) -> int:
        return sum(map(len, self.parts))


def calls_from_chunks(
    chunks: Iterable[object],
    spec: RouteSpec,
    *,
    weights_version: int | None,
    spans: ChunkSpans = "cumulative",
    prompt_ids: Sequence[int] | None = None,
    call_id: str | None = None,
    first_row: int | None = None,
    cached: int | None = None,
    axis: LayerAxis = "decoder",
    form: WireForm | None = None,
    media: Sequence[str] = (),
) -> tuple[ModelCall, ...]:
    """One call per choice of a streamed response, from all its chunks in the order they came.

    ``chunks``: as ``openai.calls_from_response`` takes a response. ``spans``: what the rows of a chunk cover; a form
    that names its first row (prime-rl's object) is held to it. Usage chunks without choices are passed over. The rest
    as ``calls_from_response``, and its errors; further DataError (ROW_COUNT) for a hole, TOKEN_MISMATCH for rows that
    come twice and differ.
    """
    if spans not in ("cumulative", "delta"):
        raise refused("spans of ('cumulative', 'delta')", repr(spans))
    sums: dict[int, _Sum] = {}
    name = call_id
    for chunk in chunks:
        document = as_document(chunk)
        refuse_server_error(document)
        name = name or str(document.get("id") or document.get("request_id") or "call")
        for choice in as_list(document.get("choices", []), "choices"):
            piece = as_mapping(choice, "a choice")
            index = piece.get("index", 0)
            if type(index) is not int:
                raise DataError(f"expected a choice's index as an int, got {index!r}", kind=ErrorKind.DTYPE)
            total = sums.setdefault(index, _Sum(prompt_ids=None if prompt_ids is None else list(prompt_ids)))
            where = f"{name}/{index}"
            _add_tokens(total, document, piece, where=where)
            _add_rows(total, piece, spec, spans=spans, first_row=first_row, axis=axis, form=form, where=where)
    if sorted(sums) != list(range(len(sums))) or not sums:
        raise DataError(f"expected chunks of choices 0, 1, ..., got {sorted(sums)}", kind=ErrorKind.SHAPE)
    reading = Reading(
        spec=spec, weights_version=weights_version, cached=cached, axis=axis, form=form, media=tuple(media)
    )
    return tuple(
        call_of_choice(_whole(sums[index], f"{name}/{index}" if len(sums) > 1 else str(name)), reading)
        for index in range(len(sums))
    )


def _add_tokens(total: _Sum, document: Mapping[str, Any], piece: Mapping[str, Any], *, where: str) -> None:
    delta = as_mapping(piece.get("delta"), "a delta")
    for place in (piece, delta, document):
        if place.get("prompt_token_ids") is not None:
            prompt = as_list(place["prompt_token_ids"], "prompt_token_ids")
            if total.prompt_ids is not None and total.prompt_ids != prompt:
                raise DataError(
                    f"expected one prompt throughout, got two @ call {where}", kind=ErrorKind.TOKEN_MISMATCH
                )
            total.prompt_ids = prompt
            break
    if total.finish_reason is not None and piece.get("token_ids"):
        raise DataError(f"expected no tokens behind the last chunk @ call {where}", kind=ErrorKind.TOKEN_MISMATCH)
    new = piece.get("token_ids")
    if new is not None:
        total.has_ids = True
        total.generation_ids += as_list(new, "token_ids")
        total.logprobs += choice_logprobs(piece.get("logprobs"), new, name=where) or []
    total.finish_reason = total.finish_reason or finish_reason(piece)


def _add_rows(
    total: _Sum,
    piece: Mapping[str, Any],
    spec: RouteSpec,
    *,
    spans: ChunkSpans,
    first_row: int | None,
    axis: LayerAxis,
    form: WireForm | None,
    where: str,
) -> None:
    value = piece.get("routed_experts")
    if value is None:
        return
    begins = total.first_row if total.parts else first_row
    # rows that a delta brings begin where those before it end, unless the form itself says where
    expected = begins if spans == "cumulative" or not total.parts else total.first_row + total.rows
    says_start = isinstance(value, Mapping)
    token_S = as_integers([*(total.prompt_ids or []), *total.generation_ids], np.int32, what="token ids", ndim=1)
    begin = None if says_start and total.parts else expected
    rows_RLK, start = read_routes(value, spec, token_ids=token_S, form=form, axis=axis, first_row=begin, call=where)
    if not total.parts:
        total.first_row = start
    held = total.first_row + total.rows
    if start > held or start < total.first_row or start + len(rows_RLK) > len(token_S):
        raise DataError(
            f"expected rows that go on from row {held} and reach token {len(token_S)} at most, got rows [{start}, "
            f"{start + len(rows_RLK)}) @ call {where}",
            kind=ErrorKind.ROW_COUNT,
        )
    twice = min(held - start, len(rows_RLK))
    if twice and not np.array_equal(_held(total, start, twice), rows_RLK[:twice]):
        raise DataError(
            f"expected rows that came twice to be equal, got others in [{start}, {start + twice}) @ call {where}",
            kind=ErrorKind.TOKEN_MISMATCH,
        )
    if len(rows_RLK) > twice or not total.parts:
        total.parts.append(rows_RLK[twice:])


def _held(total: _Sum, start: int, count: int) -> NDArray[np.int16]:
    at = start - total.first_row
    return np.concatenate(total.parts)[at : at + count]


def _whole(total: _Sum, name: str) -> Choice:
    if total.prompt_ids is None or not total.has_ids:
        which = "prompt" if total.prompt_ids is None else "generated"
        raise CaptureError(
            f"expected the {which} token ids in the chunks, got none: ask for them with return_token_ids @ call {name}",
            kind=ErrorKind.CAPTURE_OFF,
        )
    rows = (np.concatenate(total.parts), total.first_row) if total.parts else None
    return Choice(
        call_id=name,
        prompt_ids=total.prompt_ids,
        generation_ids=total.generation_ids,
        finish_reason=total.finish_reason,
        rows=rows,
        logprobs=total.logprobs or None,
        why_absent=_WHY_ABSENT,
    )
