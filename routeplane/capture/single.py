"""A record of one call, made directly: what writers inside and beside an engine do for every sequence that ends.

``assemble`` gives the same record and is the reference of this module's test; it joins any number of calls, and takes
several times as long for one. Knows no engine.

Axes: S token positions, R rows of the call, L captured layers, K top-k slots.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from routeplane.record.assembly import assemble
from routeplane.record.record import RouteRecord
from routeplane.record.spans import Capture, CaptureState, Span

if TYPE_CHECKING:
    from routeplane.record.calls import ModelCall
    from routeplane.record.spec import RouteSpec

__all__ = ["record_of_call"]


def record_of_call(
    call: ModelCall,
    spec: RouteSpec,
    *,
    sample_id: str,
    attempt: int = 0,
    group: str | None = None,
    attributes: Mapping[str, str] | None = None,
) -> RouteRecord:
    """``assemble([call], spec, ...).records[0]``, for a call that was made a moment ago: it is not verified again.

    The record owns its arrays. Errors as in ``assemble``.
    """
    routes_RLK = call.routes
    whole = routes_RLK is not None and call.layer_ids in (None, spec.layer_ids) and routes_RLK.size > 0
    # rows of another shape are assemble's to refuse: one layer would be broadcast to all of them
    if routes_RLK is None or not whole or routes_RLK.shape[1:] != spec.row_shape or routes_RLK.min() < 0:
        options = {"sample_id": sample_id, "attempt": attempt, "group": group, "attributes": attributes}
        return assemble([call], spec, **options).records[0]  # type: ignore[arg-type]  # a dict of mixed values
    routes_SLK = spec.missing_rows(call.num_tokens)
    routes_SLK[call.first_row : call.rows_stop] = routes_RLK
    return RouteRecord(
        sample_id=sample_id,
        attempt=attempt,
        group=group,
        token_ids=call.token_ids,
        routes=routes_SLK,
        spans=_spans(call),
        captures=_captures(call),
        spec=spec,
        logprobs=_logprobs(call),
        attributes={**(attributes or {}), **({"media": json.dumps(list(call.media))} if call.media else {})},
        columns={name: values.copy() for name, values in call.columns.items()},
    )


def _spans(call: ModelCall) -> tuple[Span, ...]:
    prompt, stop = len(call.prompt_ids), call.num_tokens
    spans = []
    if prompt:
        spans.append(Span(start=0, stop=prompt, kind="prompt", call=call.call_id, weights_version=None))
    if stop > prompt:
        version = call.weights_version
        spans.append(Span(start=prompt, stop=stop, kind="generation", call=call.call_id, weights_version=version))
    return tuple(spans)


def _captures(call: ModelCall) -> tuple[Capture, ...]:
    absent: CaptureState = call.loss or "not_captured"
    # A call that generated nothing fed its whole prompt; otherwise its last token was only sampled.
    fed = call.num_tokens if len(call.generation_ids) == 0 else call.num_tokens - 1
    cached = min(max(call.cached, call.first_row), call.rows_stop)
    edges: tuple[tuple[int, CaptureState, int | None], ...] = (
        (call.first_row, absent, None),
        (cached, "cached", None),
        (call.rows_stop, "captured", call.weights_version),
        (max(fed, call.rows_stop), absent, None),
        (call.num_tokens, "not_fed", None),
    )
    captures, at = [], 0
    for stop, state, version in edges:
        if stop > at:
            captures.append(Capture(start=at, stop=stop, call=call.call_id, weights_version=version, state=state))
            at = stop
    return tuple(captures)


def _logprobs(call: ModelCall) -> np.ndarray[tuple[int], np.dtype[np.float32]] | None:
    if call.logprobs is None:
        return None
    logprobs_S = np.full(call.num_tokens, np.nan, dtype=np.float32)
    logprobs_S[len(call.prompt_ids) :] = call.logprobs
    return logprobs_S
