"""Presence by content: rows that are all MISSING are no capture, in any reader, unless the caller declares why.

Axes: R rows, D decoder layers, K top-k slots.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from routeplane.capture import CaptureOptions, sglang
from routeplane.capture.http import chunks, gym, messages, openai
from routeplane.capture.wire import encode
from routeplane.errors import CaptureError, DataError, ErrorKind, UsageError
from routeplane.record.assembly import UnfedTokens
from routeplane.record.calls import ModelCall
from tests.capture.payloads import SPEC, engine_rows

PROMPT, GENERATED = [5, 6, 7], [8, 9]
ROWS = 4

Read = Callable[[NDArray[Any], CaptureOptions], tuple[ModelCall | UnfedTokens, ...]]


def _choice(rows_RDK: NDArray[Any]) -> dict[str, Any]:
    routes = encode(rows_RDK.astype(np.int16), form="nrlre1")
    return {"index": 0, "finish_reason": "stop", "token_ids": GENERATED, "routed_experts": routes}


def _response(rows_RDK: NDArray[Any], options: CaptureOptions) -> Any:
    answer = {"choices": [_choice(rows_RDK)]}
    return openai.calls(answer, SPEC, weights_version=1, prompt_ids=PROMPT, options=options)


def _stream(rows_RDK: NDArray[Any], options: CaptureOptions) -> Any:
    parts = [{"choices": [_choice(rows_RDK)]}]
    return chunks.calls(parts, SPEC, weights_version=1, prompt_ids=PROMPT, options=options)


def _sglang(rows_RDK: NDArray[Any], options: CaptureOptions) -> Any:
    info = {"id": "r", "finish_reason": {"type": "stop"}, "routed_experts": encode(rows_RDK, form="sglang")}
    answer = {"output_ids": GENERATED, "meta_info": info}
    return sglang.calls(answer, SPEC, prompt_ids=PROMPT, weights_version=1, options=options)


def _gym(rows_RDK: NDArray[Any], options: CaptureOptions) -> Any:
    filled_RDK = np.concatenate([rows_RDK, engine_rows(1)])  # the last row is the harness's, and always there
    routes = encode(filled_RDK.astype(np.int16), form="nrlre1")
    item = {"prompt_token_ids": PROMPT, "generation_token_ids": GENERATED, "routed_experts": routes}
    return gym.calls([item], SPEC, weights_version=1, options=options)


def _log(rows_RDK: NDArray[Any], options: CaptureOptions) -> Any:
    rows_RLK = np.concatenate([rows_RDK, engine_rows(1)])[:, list(SPEC.layer_ids)].astype(np.int16)
    log = [
        {"role": "user", "token_ids": np.asarray(PROMPT), "routed_experts": rows_RLK[:3]},
        {"role": "assistant", "token_ids": np.asarray(GENERATED), "routed_experts": rows_RLK[3:]},
    ]
    return messages.calls(log, SPEC, weights_version=1, options=options)


READERS: dict[str, Read] = {
    "response": _response,
    "stream": _stream,
    "SGLang": _sglang,
    "NeMo Gym": _gym,
    "message log": _log,
}


def rows(*, missing: int = 0) -> NDArray[Any]:
    """Four rows, the first of which are -1 in every slot."""
    rows_RDK = engine_rows(ROWS).astype(np.int32)
    rows_RDK[:missing] = -1
    return rows_RDK


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_rows_without_ids_are_refused(read: Read) -> None:
    """Under the default, and under any bound: what has no content is not there."""
    for options in (CaptureOptions(), CaptureOptions(max_missing_share=1.0)):
        with pytest.raises(CaptureError, match="4 rows that are all -1") as caught:
            read(rows(missing=ROWS), options)
        assert ErrorKind.CAPTURE_OFF == caught.value.kind


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_rows_without_ids_may_be_declared(read: Read) -> None:
    """The declaration becomes the call's loss; a call with ids keeps none."""
    for count, loss in ((ROWS, "lost"), (ROWS - 1, None), (0, None)):
        [call] = read(rows(missing=count), CaptureOptions(absent="lost"))
        assert isinstance(call, ModelCall)
        assert loss == call.loss


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_the_share_of_missing_rows_has_a_bound(read: Read) -> None:
    """One of four rows is a quarter; without a bound any share but all is taken."""
    for missing in range(ROWS):
        for bound in (None, 0.0, 0.25, 0.5, 1.0):
            if bound is None or missing <= bound * ROWS:
                assert ROWS == read(rows(missing=missing), CaptureOptions(max_missing_share=bound))[0].num_tokens - 1  # type: ignore[union-attr]
                continue
            with pytest.raises(DataError, match=f"got {missing} of 4") as caught:
                read(rows(missing=missing), CaptureOptions(max_missing_share=bound))
            assert ErrorKind.ROUTES_MISSING == caught.value.kind


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_a_share_is_between_none_and_all(share: float) -> None:
    """Anything else is refused where the options are made."""
    with pytest.raises(UsageError):
        CaptureOptions(max_missing_share=share)


def test_an_empty_list_is_not_told_of_a_first_row() -> None:
    """The field holds no row: capture is what failed, not the first row that was asked for."""
    given: tuple[Any, ...] = ([], "")
    for routes in given:
        answer = {"choices": [{**_choice(rows()), "routed_experts": routes}]}
        with pytest.raises(DataError) as caught:
            openai.calls(answer, SPEC, weights_version=1, prompt_ids=PROMPT)
        assert "routed_experts_prompt_start" not in caught.value.message
    with pytest.raises(DataError, match="holds no row"):
        gym.calls(
            [{"prompt_token_ids": PROMPT, "generation_token_ids": GENERATED, "routed_experts": []}],
            SPEC,
            weights_version=1,
        )


def test_a_log_counts_tokens_from_its_beginning() -> None:
    """An id that the router does not have, in the second message: the error names the log's token."""
    rows_RLK = engine_rows(5)[:, list(SPEC.layer_ids)].astype(np.int16)
    rows_RLK[4, 1, 0] = 250
    log = [
        {"role": "user", "token_ids": np.asarray(PROMPT), "routed_experts": rows_RLK[:3]},
        {
            "role": "assistant",
            "token_ids": np.asarray([8, 9, 10]),
            "routed_experts": np.concatenate([rows_RLK[3:], rows_RLK[:1]]),
        },
    ]
    with pytest.raises(DataError) as caught:
        messages.calls(log, SPEC, weights_version=1)

    assert [4] == [problem.token for problem in caught.value.problems]
