"""Streamed responses turned into calls: chunks with ids and routes, joined by the tokens that they say they cover.

Owns the joining: a chunk's rows are the whole array so far (``cumulative``) or what is new (``delta``), and in either
case rows that come twice must be equal, holes and rows of tokens that no chunk brought are refused. What a server sends
in a chunk is read as ``openai`` reads a response.

Axes: R rows, L captured layers, K top-k slots.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from routeplane.capture import choices
from routeplane.capture.choices import DEFAULTS, CaptureOptions, Choice
from routeplane.capture.http.openai import (
    Places,
    as_document,
    as_list,
    as_mapping,
    choice_logprobs,
    finish_reason,
    ids_of_logprobs,
    refuse_server_error,
)
from routeplane.errors import CaptureError, DataError, ErrorKind, refused

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from routeplane.record.calls import ModelCall
    from routeplane.record.record import RouteRecord
    from routeplane.record.spec import RouteSpec

__all__ = ["ChunkSpans", "calls", "records"]

#: What the rows of a chunk cover: everything so far, or what is new.
ChunkSpans = Literal["cumulative", "delta"]

_WHY_ABSENT = (
    "no chunk carried any: this server sends routes with whole responses alone (vLLM: all but /inference/v1/generate), "
    "so ask with stream=False"
)

_OPTIONS = (
    "absent",
    "axis",
    "cached",
    "decoder_layers",
    "form",
    "fused_shared",
    "logprobs_mode",
    "max_missing_share",
    "media",
    "sampling",
    "version_numbers",
    "vocab_size",
)


@dataclass(kw_only=True)
class _ChoiceStream:
    """What the chunks of one choice have brought so far."""

    prompt_ids: list[int] | None = None
    generation_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    kept: list[Any] = field(default_factory=list)
    finish_reason: str | None = None
    first_row: int = 0
    parts: list[NDArray[np.int16]] = field(default_factory=list)
    has_ids: bool = False
    weight_versions: Any = None

    @property
    def rows(self) -> int:
        return sum(map(len, self.parts))


def calls(
    chunks: Iterable[object],
    spec: RouteSpec,
    *,
    weights_version: int | None,
    spans: ChunkSpans = "cumulative",
    prompt_ids: Sequence[int] | None = None,
    call_id: str | None = None,
    first_row: int | None = None,
    options: CaptureOptions = DEFAULTS,
) -> tuple[ModelCall, ...]:
    """Read a streamed response, one call per choice.

    Args:
        chunks: All chunks in the order they came, each as ``openai.calls`` takes a response; chunks without choices
            (usage) are passed over.
        spec: The geometry of the rows.
        weights_version: Of the policy that sampled; None where unknown.
        spans: What the rows of a chunk cover. A form that names its first row (prime-rl's object) is held to it.
        prompt_ids: Of the request, needed where no chunk repeats them.
        call_id: None takes the response's.
        first_row: The request's ``routed_experts_prompt_start``.
        options: What the caller knows of the server.

    Returns:
        The calls. Raises as ``openai.calls``; further DataError (ROW_COUNT) for a hole, TOKEN_MISMATCH for rows that
        come twice and differ.

    >>> from routeplane import RouteSpec
    >>> rows = [[[3, 1]], [[0, 5]]]
    >>> chunks = [
    ...     {"id": "r", "choices": [{"index": 0, "token_ids": [7], "finish_reason": None}]},
    ...     {"id": "r", "choices": [{"index": 0, "token_ids": [], "finish_reason": "stop", "routed_experts": rows}]},
    ... ]
    >>> spec = RouteSpec(num_experts=8, top_k=2, layer_ids=(0,))
    >>> calls(chunks, spec, weights_version=4, prompt_ids=[5, 6])[0].rows_stop
    2
    """
    if spans not in get_args(ChunkSpans):
        raise refused(f"spans of {get_args(ChunkSpans)}", repr(spans))
    options.only(_OPTIONS, reader="a stream of chunks")
    streams: dict[int, _ChoiceStream] = {}
    name = call_id
    for chunk in chunks:
        document = as_document(chunk)
        refuse_server_error(document)
        name = name or str(document.get("id") or document.get("request_id") or "call")
        for stream, piece, places, where in _pieces(document, streams, prompt_ids, name=name):
            _add_tokens(stream, document, piece, where=where)
            # a server sends them with its last chunk, for all tokens
            versions = places.first(["weight_versions"])
            stream.weight_versions = stream.weight_versions if versions is None else versions
            _add_rows(stream, places, spec, spans=spans, first_row=first_row, options=options, where=where)
    if sorted(streams) != list(range(len(streams))) or not streams:
        raise DataError(f"expected chunks of choices 0, 1, ..., got {sorted(streams)}", kind=ErrorKind.SHAPE)
    return tuple(
        choices.call_of_choice(
            _whole(streams[index], f"{name}/{index}" if len(streams) > 1 else str(name)),
            spec,
            weights_version=weights_version,
            options=options,
        )
        for index in range(len(streams))
    )


def records(
    chunks: Iterable[object],
    spec: RouteSpec,
    *,
    sample_id: str,
    weights_version: int | None,
    spans: ChunkSpans = "cumulative",
    group: str | None = None,
    prompt_ids: Sequence[int] | None = None,
    options: CaptureOptions = DEFAULTS,
) -> tuple[RouteRecord, ...]:
    """Read a streamed response as one-call records, one per choice.

    Args:
        chunks: As ``calls``.
        spec: The geometry of the records.
        sample_id: The record's name; several choices are ``{sample_id}/0``, ``{sample_id}/1``, ...
        weights_version: Of the policy that sampled; None where unknown.
        spans: What the rows of a chunk cover.
        group: Ties the samples of one prompt; several choices have ``sample_id`` where it is None.
        prompt_ids: Of the request, as ``calls``.
        options: What the caller knows of the server.

    Returns:
        The records, which own their arrays. Raises as ``calls``.

    >>> from routeplane import RouteSpec
    >>> piece = {"index": 0, "token_ids": [7], "finish_reason": "stop", "routed_experts": [[[3, 1]], [[0, 5]]]}
    >>> spec = RouteSpec(num_experts=8, top_k=2, layer_ids=(0,))
    >>> records([{"id": "r", "choices": [piece]}], spec, sample_id="s", weights_version=4, prompt_ids=[5, 6])[0].key
    RecordKey(sample_id='s', attempt=0, segment=0)
    """
    found = calls(chunks, spec, weights_version=weights_version, spans=spans, prompt_ids=prompt_ids, options=options)
    return choices.records_of_calls(found, spec, sample_id=sample_id, attempt=0, group=group, options=options)


def _pieces(
    document: Mapping[str, Any], streams: dict[int, _ChoiceStream], prompt_ids: Sequence[int] | None, *, name: str
) -> Iterator[tuple[_ChoiceStream, Mapping[str, Any], Places, str]]:
    """What a chunk holds for each choice, with the stream that it belongs to."""
    found = as_list(document.get("choices", []), "choices")
    if not found and len(streams) == 1:
        # SGLang sends routes in a chunk of their own, which may have no choice
        [(index, stream)] = streams.items()
        yield stream, {}, Places.of(document, {}, alone=True), f"{name}/{index}"
    for choice in found:
        piece = as_mapping(choice, "a choice")
        index = piece.get("index", 0)
        if type(index) is not int:
            raise DataError(f"expected a choice's index as an int, got {index!r}", kind=ErrorKind.DTYPE)
        stream = streams.setdefault(index, _ChoiceStream(prompt_ids=None if prompt_ids is None else list(prompt_ids)))
        yield stream, piece, Places.of(document, piece, alone=len(found) == 1), f"{name}/{index}"


def _add_tokens(stream: _ChoiceStream, document: Mapping[str, Any], piece: Mapping[str, Any], *, where: str) -> None:
    delta = as_mapping(piece.get("delta"), "a delta")
    for place in (piece, delta, document):
        if place.get("prompt_token_ids") is not None:
            prompt = as_list(place["prompt_token_ids"], "prompt_token_ids")
            if stream.prompt_ids is not None and stream.prompt_ids != prompt:
                raise DataError(
                    f"expected one prompt throughout, got two @ call {where}", kind=ErrorKind.TOKEN_MISMATCH
                )
            stream.prompt_ids = prompt
            break
    if stream.finish_reason is not None and piece.get("token_ids"):
        raise DataError(f"expected no tokens behind the last chunk @ call {where}", kind=ErrorKind.TOKEN_MISMATCH)
    new = piece.get("token_ids")
    new = ids_of_logprobs(piece.get("logprobs")) if new is None else new
    if new is not None:
        stream.has_ids = True
        stream.generation_ids += as_list(new, "token_ids")
        stream.logprobs += choice_logprobs(piece.get("logprobs"), new, name=where) or []
    if piece.get("sampling_mask") is not None:
        stream.kept += as_list(piece["sampling_mask"], "sampling_mask")
    stream.finish_reason = stream.finish_reason or finish_reason(piece)


def _add_rows(
    stream: _ChoiceStream,
    places: Places,
    spec: RouteSpec,
    *,
    spans: ChunkSpans,
    first_row: int | None,
    options: CaptureOptions,
    where: str,
) -> None:
    value, form = places.routes()
    if value is None:
        return
    if options.form is None:
        options = replace(options, form=form)
    begins = stream.first_row if stream.parts else first_row
    # rows that a delta brings begin where those before it end, unless the form itself says where
    expected = begins if spans == "cumulative" or not stream.parts else stream.first_row + stream.rows
    says_start = isinstance(value, Mapping)
    tokens = len(stream.prompt_ids or ()) + len(stream.generation_ids)
    begin = None if says_start and stream.parts else expected
    rows_RLK, start = choices.read_rows(value, spec, options=options, first_row=begin, call=where)
    if not stream.parts:
        stream.first_row = start
    held = stream.first_row + stream.rows
    if start > held or start < stream.first_row or start + len(rows_RLK) > tokens:
        raise DataError(
            f"expected rows that go on from row {held} and reach token {tokens} at most, got rows [{start}, "
            f"{start + len(rows_RLK)}) @ call {where}",
            kind=ErrorKind.ROW_COUNT,
        )
    twice = min(held - start, len(rows_RLK))
    if twice and not np.array_equal(_held(stream, start, twice), rows_RLK[:twice]):
        raise DataError(
            f"expected rows that came twice to be equal, got others in [{start}, {start + twice}) @ call {where}",
            kind=ErrorKind.TOKEN_MISMATCH,
        )
    if len(rows_RLK) > twice or not stream.parts:
        stream.parts.append(rows_RLK[twice:])


def _held(stream: _ChoiceStream, start: int, count: int) -> NDArray[np.int16]:
    at = start - stream.first_row
    return np.concatenate(stream.parts)[at : at + count]


def _whole(stream: _ChoiceStream, name: str) -> Choice:
    if stream.prompt_ids is None or not stream.has_ids:
        which = "prompt" if stream.prompt_ids is None else "generated"
        raise CaptureError(
            f"expected the {which} token ids in the chunks, got none: ask for them with return_token_ids @ call {name}",
            kind=ErrorKind.CAPTURE_OFF,
        )
    rows = (np.concatenate(stream.parts), stream.first_row) if stream.parts else None
    return Choice(
        call_id=name,
        prompt_ids=stream.prompt_ids,
        generation_ids=stream.generation_ids,
        finish_reason=stream.finish_reason,
        rows=rows,
        logprobs=stream.logprobs or None,
        weight_versions=stream.weight_versions,
        kept=stream.kept or None,
        why_absent=_WHY_ABSENT,
    )
