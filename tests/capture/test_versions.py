"""Weights versions that an answer names: spans of sampled tokens, text, retractions, and what contradicts the caller.

Axes: R rows, D decoder layers.
"""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from routeplane import assemble
from routeplane.capture.wire import encode
from routeplane.errors import DataError, ErrorKind
from routeplane.record.calls import ModelCall
from tests.capture.payloads import SPEC, engine_rows
from tests.capture.reading import response_calls, sglang_call

PROMPT = [5, 6, 7]


def sglang(
    generated: int, *, version: int | None = None, options: dict[str, Any] | None = None, **info: Any
) -> ModelCall:
    """The call behind an SGLang answer of so many tokens."""
    rows = np.ascontiguousarray(engine_rows(len(PROMPT) + generated - 1), dtype="<i4")
    said = {
        "id": "r",
        "finish_reason": {"type": "stop"},
        "routed_experts": base64.b64encode(rows.tobytes()).decode(),
        "cached_tokens": 0,
        **info,
    }
    answer = {"output_ids": list(range(10, 10 + generated)), "meta_info": said}
    return sglang_call(answer, SPEC, prompt_ids=PROMPT, weights_version=version, **(options or {}))


def spans_of(*edges: tuple[int | str, int, int]) -> list[dict[str, Any]]:
    """SGLang's spans, over generated tokens."""
    return [{"version": name, "start": start, "end": stop} for name, start, stop in edges]


@given(st.integers(2, 8), st.data())
def test_an_update_at_every_position_leaves_the_version_unknown(generated: int, data: st.DataObject) -> None:
    """A call has one version: where an answer names several, none of them is every token's, and none is claimed."""
    at = data.draw(st.integers(1, generated - 1))
    call = sglang(generated, weight_versions=spans_of(("7", 0, at), ("8", at, generated)))
    [record] = assemble([call], SPEC, sample_id="s").records

    assert {None} == {span.weights_version for span in record.spans}
    assert {None} == {capture.weights_version for capture in record.captures}


def test_a_contradiction_with_the_caller_is_refused() -> None:
    """An answer of other weights than the caller says is an error."""
    for info in (
        {"weight_version": "8"},
        {"weight_versions": spans_of(("7", 0, 1), ("8", 1, 3))},
        {"weight_versions": spans_of(("a", 0, 1), ("b", 1, 3))},
    ):
        with pytest.raises(DataError) as caught:
            sglang(3, version=7, **info)
        assert ErrorKind.SPANS == caught.value.kind
    assert 7 == sglang(3, version=7, weight_version="7").weights_version
    assert 7 == sglang(3, weight_versions=spans_of(("7", 0, 3))).weights_version


def test_text_versions_have_the_numbers_that_the_caller_gives() -> None:
    """Text without a number is a version that is not known, and never another's."""
    numbers: dict[str, Any] = {"options": {"version_numbers": {"v8": 8, "step-9": 9}}}

    assert 8 == sglang(3, weight_version="v8", **numbers).weights_version
    assert sglang(3, weight_version="v7", **numbers).weights_version is None
    assert sglang(3, weight_version="default").weights_version is None
    assert 5 == sglang(3, version=5, weight_version="default").weights_version
    assert sglang(3, weight_versions=spans_of(("v8", 0, 2), ("step-9", 2, 3)), **numbers).weights_version is None
    with pytest.raises(DataError):
        sglang(3, version=9, weight_version="v8", **numbers)


@pytest.mark.parametrize(
    "spans",
    [
        spans_of(("7", 0, 2)),
        spans_of(("7", 0, 4)),
        spans_of(("7", 1, 3)),
        spans_of(("7", 0, 2), ("8", 1, 3)),
        spans_of(("7", 0, 0), ("8", 0, 3)),
        [],
        "7",
        [["7", 0, 3]],
        [{"version": True, "start": 0, "end": 3}],
        [{"version": "7", "start": "0", "end": 3}],
    ],
)
def test_spans_that_do_not_cover_the_tokens_are_refused(spans: Any) -> None:
    """A hole, an overlap, or another number of tokens means that spans and tokens are not the same request's."""
    with pytest.raises(DataError):
        sglang(3, weight_versions=spans)


@pytest.mark.parametrize("spans", [None, spans_of(("7", 0, 1), ("8", 1, 3)), spans_of(("7", 0, 3))])
def test_a_retraction_changes_captures_and_never_spans(spans: Any) -> None:
    """Rows that were computed again have no known version, unless one version sampled all; tokens keep theirs."""
    info = {"weight_version": "7"} if spans is None else {"weight_versions": spans}
    plain, again = sglang(3, **info), sglang(3, num_retractions=1, **info)
    [before] = assemble([plain], SPEC, sample_id="s").records
    [after] = assemble([again], SPEC, sample_id="s").records

    assert before.spans == after.spans
    np.testing.assert_array_equal(before.routes, after.routes)
    known = {capture.weights_version for capture in after.captures}
    assert ({7, None} if spans is not None and len(spans) == 1 else {None}) == known


def test_responses_name_versions_too() -> None:
    """A version on the response, or spans on a choice, of servers that speak OpenAI's protocol."""
    choice = {
        "index": 0,
        "finish_reason": "stop",
        "token_ids": [8, 9],
        "routed_experts": encode(engine_rows(4), form="npy"),
    }
    given: dict[str, Any] = {"prompt_ids": PROMPT, "weights_version": None}

    [one] = response_calls({"choices": [choice], "weight_version": "4"}, SPEC, **given)
    assert 4 == one.weights_version
    [two] = response_calls({"choices": [{**choice, "weight_versions": spans_of((4, 0, 1), (5, 1, 2))}]}, SPEC, **given)
    assert two.weights_version is None
