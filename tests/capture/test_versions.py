"""Weights versions that an answer names: spans of sampled tokens, text, retractions, and what contradicts the caller.

Axes: R rows, D decoder layers.
"""

from __future__ import annotations

import base64
import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from routeplane import assemble
from routeplane.capture.http.tickets import call_of_ticket, issue_ticket, ticket_of_record
from routeplane.capture.recorder import record_of_call
from routeplane.capture.wire import encode
from routeplane.errors import DataError, ErrorKind
from routeplane.record.calls import ModelCall
from routeplane.record.spans import stale_kv
from tests.capture.payloads import SPEC, engine_rows
from tests.capture.reading import chunk_calls, response_calls, sglang_call

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


@given(st.integers(1, 8), st.data())
def test_an_update_at_every_position_is_in_the_record(generated: int, data: st.DataObject) -> None:
    """Token by token: a sampled token has the version that its span names, and its row that of the token behind it."""
    changes = sorted(data.draw(st.sets(st.integers(1, generated - 1)))) if generated > 1 else []
    spans = [(7 + at, start, stop) for at, (start, stop) in enumerate(itertools.pairwise([0, *changes, generated]))]
    sampled = [version for version, start, stop in spans for _ in range(start, stop)]
    call = sglang(generated, weight_versions=spans_of(*((str(version), start, stop) for version, start, stop in spans)))
    record, ticket = issue_ticket(call, SPEC, stream="s")

    assert call.checksum == call_of_ticket(record, ticket).checksum
    for made in (*assemble([call], SPEC, sample_id="s").records, record_of_call(call, SPEC, sample_id="s"), record):
        versions = [span.weights_version for span in made.spans for _ in range(span.start, span.stop)]
        assert [*[None] * len(PROMPT), *sampled] == versions
        rows = [capture.weights_version for capture in made.captures for _ in range(capture.start, capture.stop)]
        assert [*[sampled[0]] * (len(PROMPT) - 1), *sampled, None] == rows
        # what new weights computed over the cache of old ones: from the first row of other weights on
        stale = [any(start <= token < stop for start, stop in stale_kv(made.captures)) for token in range(len(rows))]
        assert [row not in (None, rows[0]) for row in rows] == stale


@given(st.integers(1, 6), st.integers(0, 8), st.integers(0, 1), st.data())
def test_cached_and_retracted_rows_have_no_version(
    generated: int, cached: int, retractions: int, data: st.DataObject
) -> None:
    """Both makers of one-call records agree, and spans are those of the same answer without a cache or retractions."""
    at = data.draw(st.integers(0, generated - 1))
    spans = spans_of(("7", 0, at), ("8", at, generated)) if at else spans_of(("8", 0, generated))
    call = sglang(generated, weight_versions=spans, cached_tokens=cached, num_retractions=retractions)
    plain = record_of_call(sglang(generated, weight_versions=spans), SPEC, sample_id="s")
    record = record_of_call(call, SPEC, sample_id="s")
    [assembled] = assemble([call], SPEC, sample_id="s").records

    assert assembled.checksum == record.checksum
    assert plain.spans == record.spans
    sampled = [None] * len(PROMPT) + [7] * at + [8] * (generated - at)
    for capture in record.captures:
        for row in range(capture.start, capture.stop):
            unknown = row < min(cached, len(PROMPT)) or (retractions and at) or row == call.num_tokens - 1
            assert (None if unknown else sampled[max(row + 1, len(PROMPT))]) == capture.weights_version


@pytest.mark.parametrize("cached", [0, 5])
@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_cache_that_outlived_an_update_is_counted(cached: int, at: int) -> None:
    """Rows after an update in their call, and of a later call that found the first one's rows in the prefix cache; a
    call whose weights came back to the first version reads what others left there."""
    first = sglang(4, weight_versions=spans_of(("7", 0, at), ("8", at, 4)))
    tokens = first.token_ids.tolist()
    rows = engine_rows(len(tokens) + 2)[:, list(SPEC.layer_ids)].astype(np.int16)
    second = ModelCall(
        prompt_ids=np.asarray([*tokens, 30]),
        generation_ids=np.asarray([31, 32]),
        routes=rows,
        weights_version=8,
        call_id="second",
        cached=cached,
        layer_ids=SPEC.layer_ids,
    )
    made = assemble([first, second], SPEC, sample_id="s")

    # rows [at + 2, 6) of the first call; the second's are those of tokens 6, 7 and 8
    assert 4 - at + (3 if cached else 0) == made.report.stale_kv_rows
    [back] = assemble(
        [sglang(3, weight_versions=spans_of(("7", 0, 1), ("8", 1, 2), ("7", 2, 3)))], SPEC, sample_id="s"
    ).records
    assert [(3, 5)] == stale_kv(back.captures)
    [again] = assemble(
        [sglang(4, weight_versions=spans_of(("7", 0, at), ("8", at, 4)), num_retractions=1)], SPEC, sample_id="s"
    ).records
    assert [] == stale_kv(again.captures)


def test_a_ticket_keeps_versions() -> None:
    """What the writer knew stands, also where the caller says one version; rows of other weights make versions void."""
    call = sglang(3, weight_versions=spans_of(("7", 0, 1), ("8", 1, 3)))
    record, ticket = issue_ticket(call, SPEC, stream="s")
    choice = {"index": 0, "finish_reason": "stop", "token_ids": [10, 11, 12], "routed_experts": ticket.to_json()}
    [back] = response_calls(
        {"choices": [choice]},
        SPEC,
        prompt_ids=PROMPT,
        weights_version=9,
        redeem=lambda asked: call_of_ticket(record, asked),
    )
    assert (call.versions, None) == (back.versions, back.weights_version)

    captures = tuple(replace(capture, weights_version=None) for capture in record.captures)
    other = replace(record, captures=captures, checksum=None)
    assert () == call_of_ticket(other, ticket_of_record(other, call, stream="s")).versions


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
    two = sglang(3, weight_versions=spans_of(("v8", 0, 2), ("step-9", 2, 3)), **numbers)
    assert (None, ((3, 5, 8), (5, 6, 9))) == (two.weights_version, two.versions)
    assert 8 == sglang(3, version=8, weight_versions=spans_of(("v8", 0, 2), ("8", 2, 3)), **numbers).weights_version
    assert ((3, 4, None), (4, 6, 7)) == sglang(3, weight_versions=spans_of(("old", 0, 1), ("7", 1, 3))).versions
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
        [{"version": "7", "start": False, "end": 3}],
        [{"version": "7", "start": 0, "end": 3.0}],
        [{"version": "7", "start": 0, "end": "1"}, {"version": "8", "start": "1", "end": 3}],
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
    # SGLang's OpenAI endpoints: weights that were never given a version are "default"
    [named] = response_calls({"choices": [choice], "metadata": {"weight_version": "6"}}, SPEC, **given)
    assert 6 == named.weights_version
    [unset] = response_calls({"choices": [choice], "metadata": {"weight_version": "default"}}, SPEC, **given)
    assert unset.weights_version is None
    [two] = response_calls({"choices": [{**choice, "weight_versions": spans_of((4, 0, 1), (5, 1, 2))}]}, SPEC, **given)
    assert ((3, 4, 4), (4, 5, 5)) == two.versions


def test_a_stream_names_versions_in_its_last_chunk() -> None:
    """Spans of all tokens, as vLLM's last chunk has them; those of fewer tokens are not this request's."""
    first = {"index": 0, "finish_reason": None, "token_ids": [8], "weight_versions": None}
    rows = encode(engine_rows(4), form="npy")
    last = {"index": 0, "finish_reason": "length", "token_ids": [9], "routed_experts": rows}
    given: dict[str, Any] = {"prompt_ids": PROMPT, "weights_version": None}

    def chunks(*edges: tuple[int | str, int, int]) -> list[dict[str, Any]]:
        return [{"choices": [first]}, {"choices": [{**last, "weight_versions": spans_of(*edges)}]}]

    [call] = chunk_calls(chunks(("4", 0, 1), ("new", 1, 2)), SPEC, version_numbers={"new": 5}, **given)
    assert ((3, 4, 4), (4, 5, 5)) == call.versions
    with pytest.raises(DataError):
        chunk_calls(chunks(("4", 0, 1), ("5", 1, 2)), SPEC, **{**given, "weights_version": 4})
    with pytest.raises(DataError):
        chunk_calls(chunks(("5", 0, 1)), SPEC, **given)
