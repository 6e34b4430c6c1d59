"""SGLang's answers, built byte for byte as its source builds them, against plain references. No server runs.

Axes: R rows, D decoder layers, L captured layers, K top-k slots.
"""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from routeplane.capture.recorder import RouteRecorder
from routeplane.errors import CaptureError, DataError, ErrorKind, RouteplaneError, UsageError
from routeplane.record.assembly import assemble
from routeplane.record.spans import Sampling
from routeplane.record.spec import RouteSpec
from routeplane.record.validate import check_routes
from tests.capture.reading import sglang_call

SPEC = RouteSpec(num_experts=64, top_k=3, layer_ids=(1, 2, 4), model="m")
DEPTH = 5


def buffer(start: int, stop: int, *, shared: int = 0) -> NDArray[np.int32]:
    """The engine's rows ``[start, stop)``, ``[R, D, K + shared]``: ids say token and layer, dense slots are zero."""
    token_R, layer_D, slot_K = np.arange(start, stop), np.arange(DEPTH), np.arange(SPEC.top_k)
    mark_RDK = 1 + (11 * token_R[:, None, None] + 5 * layer_D[None, :, None] + 17 * slot_K) % 63
    rows_RDK: NDArray[np.int32] = mark_RDK.astype(np.int32)
    if shared:
        fused_RDX = np.broadcast_to(64 + np.arange(shared), (len(rows_RDK), DEPTH, shared))
        rows_RDK = np.concatenate([rows_RDK, fused_RDX.astype(np.int32)], axis=2)
    rows_RDK[:, [layer for layer in layer_D if layer not in SPEC.layer_ids]] = 0
    return rows_RDK


def answer(
    prompt: int, generated: int, *, start: int = 0, shared: int = 0, rows: NDArray[Any] | None = None, **info: Any
) -> dict[str, Any]:
    """What ``/generate`` gives for so many tokens, of which all but the last sampled have a row."""
    taken = buffer(start, prompt + generated - 1, shared=shared) if rows is None else rows
    return {
        "output_ids": list(range(100 + prompt, 100 + prompt + generated)),
        "meta_info": {
            "id": "r",
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "cached_tokens": 0,
            "finish_reason": {"type": "length", "length": generated},
            "output_token_logprobs": [[-0.5, 100 + prompt + index, None] for index in range(generated)],
            "routed_experts": base64.b64encode(taken.astype("<i4").tobytes()).decode(),
            **info,
        },
    }


def call(given: dict[str, Any], prompt: int, **options: Any) -> Any:
    """The call behind an answer for ``prompt`` tokens."""
    settings = {"decoder_layers": DEPTH, "weights_version": 2, **options}
    return sglang_call(given, SPEC, prompt_ids=range(100, 100 + prompt), **settings)


def truth(start: int, stop: int) -> list[Any]:
    """The captured layers of rows ``[start, stop)``."""
    listed: list[Any] = buffer(start, stop)[:, list(SPEC.layer_ids)].tolist()
    return listed


@given(st.integers(1, 12), st.integers(1, 12), st.data())
def test_rows_stand_where_the_request_began(prompt: int, generated: int, data: st.DataObject) -> None:
    """Whatever start length: rows of the captured layers from there on, tokens and log-probabilities beside them."""
    start = data.draw(st.integers(0, prompt))
    shared = data.draw(st.integers(0, 2))
    made = call(answer(prompt, generated, start=start, shared=shared), prompt, first_row=start, fused_shared=shared)

    assert truth(start, prompt + generated - 1) == made.routes.tolist()
    assert (start, prompt + generated - 1, "r", 2) == (
        made.first_row,
        made.rows_stop,
        made.call_id,
        made.weights_version,
    )
    assert list(range(100, 100 + prompt + generated)) == made.token_ids.tolist()
    assert [-0.5] * generated == made.logprobs.tolist()
    check_routes(made.routes, SPEC)


def test_a_conversation_of_deltas_is_one_record() -> None:
    """Turns that ask from ``next_row`` on join without a row twice; a server that sends all anyhow is counted."""
    recorder = RouteRecorder(SPEC, sample_id="s")
    lengths = ((4, 3), (9, 2), (14, 4))
    for turn, (prompt, generated) in enumerate(lengths):
        start = recorder.next_row(range(100, 100 + prompt))
        recorder.add_call(call(answer(prompt, generated, start=start), prompt, first_row=start, call_id=f"c{turn}"))
    [record] = recorder.assembly().records
    assert truth(0, 17) == record.routes[:-1].tolist()

    whole = [
        call(answer(prompt, generated), prompt, call_id=f"c{turn}") for turn, (prompt, generated) in enumerate(lengths)
    ]
    made = assemble(whole, SPEC, sample_id="s")
    assert ((6 + 10) * 3, 0) == (made.report.overlap_rows, made.report.drift_rows)
    assert made.records[0].routes.tolist() == record.routes.tolist()


def test_a_prefill_lacks_its_last_row() -> None:
    """SGLang slices ``[:seqlen - 1]`` also where nothing was sampled (sglang#20964): that row is not captured."""
    made = call(answer(5, 0, rows=buffer(0, 4)), 5)
    [record] = assemble([made], SPEC, sample_id="s").records

    assert [(0, 4, "captured"), (4, 5, "not_captured")] == [(c.start, c.stop, c.state) for c in record.captures]


def test_rows_from_the_radix_cache_are_of_unknown_weights() -> None:
    """``cached_tokens`` rows are marked cached."""
    made = call(answer(6, 2, cached_tokens=4), 6)
    [record] = assemble([made], SPEC, sample_id="s").records

    assert [(0, 4, "cached", None), (4, 7, "captured", 2)] == [
        (c.start, c.stop, c.state, c.weights_version) for c in record.captures
    ][:2]


def test_an_abort_before_the_first_token_is_declared() -> None:
    """No token, no routes, an abort: every token aborted."""
    given = answer(5, 0, routed_experts=None, finish_reason={"type": "abort", "message": "gone"})
    [record] = assemble([call(given, 5)], SPEC, sample_id="s").records

    assert [(0, 5, "aborted")] == [(c.start, c.stop, c.state) for c in record.captures]


def test_absent_routes_are_what_the_caller_says() -> None:
    """A gateway that drops the field (sglang#20696) is refused, or marked by choice."""
    given = answer(5, 2, routed_experts=None)
    with pytest.raises(CaptureError, match="gateway") as caught:
        call(given, 5)
    assert ErrorKind.CAPTURE_OFF == caught.value.kind
    assert "lost" == call(given, 5, absent="lost").loss


def sevens(rows_RDK: NDArray[np.int32]) -> NDArray[np.int32]:
    """A dense slot that holds ids."""
    rows_RDK[2, 0] = 7
    return rows_RDK


def unwritten(rows_RDK: NDArray[np.int32]) -> NDArray[np.int32]:
    """An MoE layer that was never written."""
    rows_RDK[3, 2] = 0
    return rows_RDK


BAD: dict[str, tuple[dict[str, Any], dict[str, Any], type[RouteplaneError], ErrorKind]] = {
    "no base64": (answer(5, 2, routed_experts="%%%"), {}, DataError, ErrorKind.ENCODING),
    "half a row": (answer(5, 2, routed_experts="AAAA"), {}, DataError, ErrorKind.ENCODING),
    "a number": (answer(5, 2, routed_experts=3), {}, DataError, ErrorKind.DTYPE),
    "other layers": (answer(5, 2), {"decoder_layers": 6, "first_row": 1}, CaptureError, ErrorKind.DENSE_SLOT),
    "a row short": (answer(5, 2, rows=buffer(0, 5)), {}, DataError, ErrorKind.ROW_COUNT),
    "a filled dense slot": (answer(5, 2, rows=sevens(buffer(0, 6))), {}, CaptureError, ErrorKind.DENSE_SLOT),
    "an empty MoE slot": (answer(5, 2, rows=unwritten(buffer(0, 6))), {}, CaptureError, ErrorKind.UNCAPTURED_SLOT),
    "no shared expert": (
        answer(5, 2, rows=np.concatenate([buffer(0, 6), buffer(0, 6)[:, :, :1]], axis=2)),
        {"fused_shared": 1},
        DataError,
        ErrorKind.ID_OUT_OF_RANGE,
    ),
    "another prompt": (answer(4, 2), {}, DataError, ErrorKind.TOKEN_MISMATCH),
    "tokens of others": (
        answer(5, 1, output_token_logprobs=[[-1.0, 7, None]]),
        {},
        DataError,
        ErrorKind.TOKEN_MISMATCH,
    ),
    "going on": (answer(5, 2, finish_reason=None), {}, UsageError, ErrorKind.ARGUMENT),
    "no answer": ({"text": "x"}, {}, UsageError, ErrorKind.ARGUMENT),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_answer_is_refused(name: str) -> None:
    """Each has its class and kind."""
    given, options, error, kind = BAD[name]

    with pytest.raises(error) as caught:
        call(given, 5, **options)
    assert kind == caught.value.kind


# ---- sampling masks -------------------------------------------------------------------------------------------------

HOW = Sampling(temperature=0.8, top_k=3, logprobs_mode="processed")


def masked(*, support: bool) -> dict[str, Any]:
    """An answer of two tokens, 103 and 104, with masks as 0.5.23 writes them: most likely first."""
    values = [[-0.2, -1.7], [0.0]] if support else [-1.7, 0.0]
    return answer(
        3,
        2,
        output_token_sampling_mask=[[105, 103], [104]],
        output_token_sampling_logprobs=values,
        output_token_sampling_mask_length=2,
    )


@pytest.mark.parametrize("support", [False, True])
def test_masks_come_with_the_log_probabilities_over_them(support: bool) -> None:
    """Kept ids ascend; the sampled tokens' values are those over the kept ids, not those over the vocabulary."""
    made = call(masked(support=support), 3, sampling=HOW, vocab_size=1000)
    assert [[], [], [], [103, 105], [104]] == made.columns["sampling_mask"].tolist()
    assert [0, 0, 0, 1, 1] == made.columns["sampling_mask_state"].tolist()
    assert np.asarray([-1.7, 0.0], dtype=np.float32).tolist() == made.logprobs.tolist()
    [record] = assemble([made], SPEC, sample_id="s").records
    assert HOW == record.spans[-1].sampling


BAD_MASKS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "no parameters": ({}, {"sampling": None}, "a temperature above 0 in the sampling parameters"),
    "greedy": ({}, {"sampling": Sampling(temperature=0.0, logprobs_mode="processed")}, "a temperature above 0"),
    "raw": ({}, {"sampling": Sampling(temperature=0.8, logprobs_mode="raw")}, "logprobs_mode 'processed'"),
    "two modes": ({}, {"logprobs_mode": "raw"}, "logprobs_mode as in sampling, 'processed', got 'raw'"),
    "too few": ({"output_token_sampling_mask": [[103]]}, {}, "for each of 2 tokens"),
    "no values": ({"output_token_sampling_logprobs": None}, {}, "for each of 2 tokens"),
    "other tokens": ({"output_token_sampling_mask": [[104], [103]]}, {}, "the sampled id 103 inside"),
    "beyond the vocabulary": ({}, {"vocab_size": 105}, "below 105"),
}


@pytest.mark.parametrize("case", BAD_MASKS)
def test_masks_that_cannot_be_used_are_refused(case: str) -> None:
    """By what they lack."""
    info, options, message = BAD_MASKS[case]
    given_answer = masked(support=False)
    given_answer["meta_info"] |= info
    with pytest.raises(RouteplaneError, match=message):
        call(given_answer, 3, **{"sampling": HOW, **options})
