"""SGLang's answers (``/generate`` with ``return_routed_experts``) turned into calls.

``meta_info["routed_experts"]`` is base64 of int32, little endian, without a header: rows of the tokens
``[routed_experts_start_len, prompt + completion - 1)``, each with a slot for every decoder layer, dense ones zero
(srt/state_capturer/routed_experts.py). A server that fuses shared experts into the routed ones appends their slots,
whose ids are E and above. Knows no SGLang package; nothing here opens a connection.

Axes: R rows, D decoder layers of the engine, L captured layers, K top-k slots.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from routeplane.capture.wire import rows_from_layers
from routeplane.errors import CaptureError, DataError, ErrorKind, UsageError, refused
from routeplane.record.calls import ModelCall, RowLoss

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from routeplane.record.spec import RouteSpec

__all__ = ["call_from_sglang"]

# A retracted or disconnected request ends as "abort" (srt/managers/schedule_batch.py, FINISH_ABORT).
_LOSS_OF: Mapping[str, RowLoss] = MappingProxyType({"abort": "aborted"})


def call_from_sglang(
    answer: Mapping[str, Any],
    spec: RouteSpec,
    *,
    prompt_ids: Sequence[int],
    decoder_layers: int,
    weights_version: int | None,
    call_id: str | None = None,
    first_row: int = 0,
    fused_shared: int = 0,
    absent: RowLoss | None = None,
    media: Sequence[str] = (),
) -> ModelCall:
    """The call behind one answer of ``/generate`` (a mapping with ``meta_info``), whole and not streamed.

    ``prompt_ids``: what was fed, after placeholders were expanded. ``decoder_layers``: D of the model. ``first_row``:
    the request's ``routed_experts_start_len``. ``fused_shared``: slots that the server appends to a row for fused
    shared experts; they are checked (ids of E and above) and dropped. ``absent``: what it means where tokens came
    without routes; None refuses. ``call_id``: None takes the answer's id.

    Rows are int16 of memory that the call owns. Raises CaptureError where there are no routes (CAPTURE_OFF) or no
    capture behind them (as ``wire.rows_from_layers``), DataError where text, rows, tokens or log-probabilities are not
    what they should be, UsageError for what is no such answer.
    """
    info = answer.get("meta_info") if isinstance(answer, Mapping) else None
    if not isinstance(info, Mapping):
        raise refused("an answer of SGLang with meta_info", type(answer).__name__)
    name = str(call_id if call_id is not None else info.get("id", ""))
    tokens, logprobs = _generated(answer, info, name)
    if info.get("prompt_tokens", len(prompt_ids)) != len(prompt_ids):
        raise DataError(
            f"expected {info['prompt_tokens']} prompt tokens, as the answer says, got {len(prompt_ids)} @ call {name}",
            kind=ErrorKind.TOKEN_MISMATCH,
        )
    reason = info.get("finish_reason")
    if reason is None:
        raise UsageError(f"expected a finished answer, got one that goes on @ call {name}", kind=ErrorKind.ARGUMENT)
    ended = str(reason.get("type")) if isinstance(reason, Mapping) else str(reason)
    text = info.get("routed_experts")
    loss = _LOSS_OF.get(ended)
    if text is None and not (loss is not None and not tokens) and absent is None:
        raise CaptureError(
            "expected routed_experts in meta_info, got None: start the server with --enable-return-routed-experts and "
            f"ask with return_routed_experts (a gateway may drop the field) @ call {name}",
            kind=ErrorKind.CAPTURE_OFF,
        )
    rows_RLK = None
    if text is not None:
        rows_RDK = _decoded(text, layers=decoder_layers, slots=spec.top_k + fused_shared, name=name)
        rows_RLK = rows_from_layers(
            _routed(rows_RDK, spec, fused_shared=fused_shared, name=name), spec, first_row=first_row, call=name
        )
    expected = len(prompt_ids) + max(len(tokens) - 1, 0) - first_row
    if rows_RLK is None and tokens:
        loss = absent
    elif rows_RLK is not None and len(rows_RLK) >= expected:
        loss = None
    return ModelCall(
        prompt_ids=np.asarray(prompt_ids, dtype=np.int64),
        generation_ids=np.asarray(tokens, dtype=np.int64),
        routes=rows_RLK,
        first_row=first_row,
        layer_ids=spec.layer_ids,
        weights_version=weights_version,
        call_id=name,
        logprobs=logprobs,
        media=tuple(media),
        cached=_cached(info, first_row=first_row, rows_RLK=rows_RLK),
        loss=loss,
    )


def _cached(info: Mapping[str, Any], *, first_row: int, rows_RLK: NDArray[np.int16] | None) -> int:
    """Prompt rows from the radix cache; the engine reports them as ``cached_tokens``."""
    return 0 if rows_RLK is None else min(int(info.get("cached_tokens", 0)), first_row + len(rows_RLK))


def _generated(
    answer: Mapping[str, Any], info: Mapping[str, Any], name: str
) -> tuple[list[int], NDArray[np.float32] | None]:
    """Sampled tokens, from ``output_ids`` or from the log-probabilities beside which they stand; the two must agree."""
    pairs = info.get("output_token_logprobs")
    given = answer.get("output_ids")
    if pairs is None and given is None:
        raise DataError(
            f"expected output_ids, or log-probabilities with their tokens, got neither @ call {name}",
            kind=ErrorKind.TOKEN_MISMATCH,
        )
    if pairs is None:
        return [int(token) for token in given or ()], None
    tokens = [int(pair[1]) for pair in pairs]
    if given is not None and tokens != [int(token) for token in given]:
        raise DataError(
            f"expected log-probabilities of the tokens {list(given)[:8]}, got those of {tokens[:8]} @ call {name}",
            kind=ErrorKind.TOKEN_MISMATCH,
        )
    return tokens, np.asarray([pair[0] for pair in pairs], dtype=np.float32)


def _decoded(text: object, *, layers: int, slots: int, name: str) -> NDArray[np.int32]:
    """int32 ``[R, D, slots]`` over the decoded bytes. Raises DataError (ENCODING) for what is no such text."""
    if not isinstance(text, str | bytes):
        raise DataError(f"expected base64 text, got {type(text).__name__} @ call {name}", kind=ErrorKind.DTYPE)
    try:
        content = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise DataError(f"expected base64 text, got {error} @ call {name}", kind=ErrorKind.ENCODING) from None
    row = 4 * layers * slots
    if len(content) % row:
        raise DataError(
            f"expected rows of {row} bytes ({layers} decoder layers, {slots} slots of int32), got {len(content)} bytes "
            f"@ call {name}",
            kind=ErrorKind.ENCODING,
        )
    return np.frombuffer(content, dtype="<i4").reshape(-1, layers, slots)


def _routed(rows_RDK: NDArray[np.int32], spec: RouteSpec, *, fused_shared: int, name: str) -> NDArray[np.int32]:
    """The routed slots alone. A shared expert among them, or a routed one among the shared, is not resolved but
    refused."""
    if fused_shared == 0:
        return rows_RDK
    widths = np.asarray(spec.experts_per_layer)
    shared_RLX = rows_RDK[:, list(spec.layer_ids), spec.top_k :]
    wrong_RL = (shared_RLX < widths[None, :, None]).any(axis=2)
    if wrong_RL.any():
        row, slot = np.argwhere(wrong_RL)[0]
        raise DataError(
            f"expected ids of shared experts, {int(widths[slot])} and above, in the last {fused_shared} slots, got "
            f"{shared_RLX[row, slot].tolist()} @ call {name}, row {row}, layer {spec.layer_ids[slot]}",
            kind=ErrorKind.ID_OUT_OF_RANGE,
        )
    return rows_RDK[:, :, : spec.top_k]
