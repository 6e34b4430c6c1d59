"""Responses of OpenAI-compatible servers: every recorded exchange against its reference, and what is refused.

Axes: S tokens, R rows, L captured layers, K top-k slots.
"""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from routeplane import assemble
from routeplane.capture.http.tickets import TicketStore, issue_ticket
from routeplane.capture.wire import encode
from routeplane.errors import CaptureError, DataError, ErrorKind, RouteplaneError, UsageError
from routeplane.record.calls import ModelCall
from routeplane.record.record import RouteRecord
from routeplane.record.spans import Sampling
from tests.capture.payloads import SPEC, engine_rows
from tests.capture.reading import chunk_calls, response_calls
from tests.capture.recorded import GENERATIONS, Exchange, exchange, exchanges
from tests.turns import SPEC as TURNS
from tests.turns import turn

WHOLE = [
    pytest.param(one, id=f"{generation}, {one.name}")
    for generation in GENERATIONS
    for one in exchanges(generation)
    if isinstance(one.response, dict) and "HTTP" not in one.response
]


def read(one: Exchange, **options: Any) -> tuple[ModelCall, ...]:
    """The calls of a recorded response."""
    given: dict[str, Any] = {"first_row": one.first_row, "prompt_ids": one.prompt_ids, "weights_version": 3}
    return response_calls(one.response, one.spec, **{**given, **options})


# ----------------------------------------------------------------------------------------------------------------------
# Recorded exchanges
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("one", WHOLE)
def test_recorded_responses_are_their_reference(one: Exchange) -> None:
    """Ids, rows and log-probabilities of every choice: those that an independent forward of the weights gives."""
    calls = read(one)

    assert len(one.sequences) == len(calls)
    for index, call in enumerate(calls):
        assert one.sequences[index]["token_ids"] == call.token_ids.tolist()
        assert call.routes is not None
        assert one.reference(index, first_row=call.first_row) == np.sort(call.routes, axis=2).tolist()
        assert (one.first_row or 0, 3, None) == (call.first_row, call.weights_version, call.loss)
        asked = one.request.get("logprobs") is not None
        assert asked == (call.logprobs is not None)
    assert len({call.call_id for call in calls}) == len(calls)


@pytest.mark.parametrize("one", WHOLE)
def test_text_bytes_and_objects_are_the_same_response(one: Exchange) -> None:
    """JSON text, its bytes and a client's object give the very same calls as the mapping."""

    class Answer:
        def model_dump(self) -> Any:
            return one.response

    expected = [call.checksum for call in read(one)]
    for response in (json.dumps(one.response), json.dumps(one.response).encode(), Answer()):
        calls = response_calls(
            response, one.spec, weights_version=3, first_row=one.first_row, prompt_ids=one.prompt_ids
        )
        assert expected == [call.checksum for call in calls]


def conversation(generation: str, kind: str, *, on_missing: Any = "raise") -> RouteRecord:
    """The three recorded turns, assembled."""
    turns = [exchange(generation, f"turn {turn} of 3, {kind}") for turn in (1, 2, 3)]
    calls = [read(turn, call_id=f"turn-{index}", cached=0)[0] for index, turn in enumerate(turns)]
    [record] = assemble(calls, turns[0].spec, sample_id="s", on_missing=on_missing).records
    reference = turns[-1].reference(0)
    assert reference == np.sort(record.routes[:-1], axis=2).tolist()
    return record


@pytest.mark.parametrize("generation", GENERATIONS)
def test_trimmed_and_untrimmed_turns_are_the_same_record(generation: str) -> None:
    """Three turns, each sent whole or without the rows that are known: the same tokens, and the same rows as sets."""
    untrimmed = conversation(generation, "untrimmed")
    trimmed = conversation(generation, "trimmed to what is new")

    np.testing.assert_array_equal(untrimmed.token_ids, trimmed.token_ids)
    np.testing.assert_array_equal(np.sort(untrimmed.routes, axis=2), np.sort(trimmed.routes, axis=2))
    assert untrimmed.spans == trimmed.spans
    assert untrimmed.coverage() == trimmed.coverage()


@pytest.mark.parametrize("generation", GENERATIONS)
@pytest.mark.parametrize("name", ["chat, streamed", "completion, streamed"])
def test_streams_without_routes_are_refused_with_the_reason(generation: str, name: str) -> None:
    """vLLM streams carry ids and no routes: an error that says how to ask instead, and never a route-less call."""
    one = exchange(generation, name)

    with pytest.raises(CaptureError, match="stream=False") as caught:
        chunk_calls(one.response, one.spec, weights_version=3)
    assert ErrorKind.CAPTURE_OFF == caught.value.kind


@pytest.mark.parametrize("generation", GENERATIONS)
@pytest.mark.parametrize("spans", ["cumulative", "delta"])
def test_streamed_tokens_with_routes_at_the_end_are_the_whole_call(generation: str, spans: Any) -> None:
    """Token in, token out, streamed: the same rows as the response that came at once."""
    one, whole = exchange(generation, "token in, token out, streamed"), exchange(generation, "token in, token out")
    [call] = chunk_calls(one.response, one.spec, weights_version=3, spans=spans, prompt_ids=one.prompt_ids, call_id="c")

    assert one.sequences[0]["token_ids"] == call.token_ids.tolist()
    assert call.routes is not None
    assert one.reference(0) == np.sort(call.routes, axis=2).tolist()
    [at_once] = read(whole, call_id="c")
    np.testing.assert_array_equal(at_once.routes, call.routes)


@pytest.mark.parametrize("generation", GENERATIONS)
def test_a_server_error_is_reported_as_such(generation: str) -> None:
    """The answer to a trim past the prompt is reported as a server error, not as a response with missing routes."""
    one = exchange(generation, "trim past the prompt")

    with pytest.raises(UsageError, match="routed_experts_prompt_start must be between 0 and the prompt length"):
        response_calls(one.response["body"], one.spec, weights_version=3)


@pytest.mark.parametrize("first_row", [None, 2, 4])
def test_a_trim_that_was_forgotten_shows(first_row: int | None) -> None:
    """Rows that were trimmed by 3 do not pass as trimmed by anything else: their number says so."""
    one = exchange("0.30", "two prompts, three rows trimmed")

    with pytest.raises(DataError, match="routed_experts_prompt_start") as caught:
        read(one, first_row=first_row)
    assert ErrorKind.ROW_COUNT == caught.value.kind


# ----------------------------------------------------------------------------------------------------------------------
# What else a response may be
# ----------------------------------------------------------------------------------------------------------------------

PROMPT, GENERATED = [5, 6, 7], [8, 9]


def answer(**fields: Any) -> dict[str, Any]:
    """A completion of two choices with four rows each."""
    made = engine_rows(4)
    choice = {"finish_reason": "stop", "prompt_token_ids": PROMPT, "token_ids": GENERATED}
    first = {**choice, "index": 0, "routed_experts": encode(made, form="npy"), **fields}
    second = {**choice, "index": 1, "token_ids": [8, 10], "routed_experts": encode(made[::-1], form="npy")}
    return {"id": "r", "choices": [first, second]}


def test_choices_are_matched_by_index() -> None:
    """NeMo RL fact C-008: choices in another order go to their own index; no row is made up for the last token."""
    turned = answer()
    turned["choices"].reverse()
    first, second = response_calls(turned, SPEC, weights_version=1)

    assert ("r/0", "r/1") == (first.call_id, second.call_id)
    assert ([8, 9], [8, 10]) == (first.generation_ids.tolist(), second.generation_ids.tolist())
    np.testing.assert_array_equal(engine_rows(4)[:, [0, 2, 3]], first.routes)
    assert 4 == len(second.routes)  # type: ignore[arg-type]


@pytest.mark.parametrize("indices", [(0, 0), (1, 2), (0, None), (-1, 0), (0, True)])
def test_choices_that_are_no_bijection_are_refused(indices: tuple[Any, Any]) -> None:
    """NeMo RL facts C-011 and C-016: an index twice or missing, before anything is read."""
    given = answer()
    for choice, index in zip(given["choices"], indices, strict=True):
        choice["index"] = index

    with pytest.raises(DataError, match="each once"):
        response_calls(given, SPEC, weights_version=1)


def test_tool_calls_change_nothing() -> None:
    """Routes stand beside a message without content, whose tokens were a tool call."""
    message = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function"}]}
    plain, _ = response_calls(answer(), SPEC, weights_version=1)
    called, _ = response_calls(answer(message=message, finish_reason="tool_calls"), SPEC, weights_version=1)

    assert plain.checksum == called.checksum


@dataclass(frozen=True, kw_only=True)
class Bad:
    """A change to the first choice, and how the response is refused."""

    name: str
    change: dict[str, Any]
    error: type[RouteplaneError]
    kind: ErrorKind
    says: str = ""


BAD = (
    Bad(
        name="no routes",
        change={"routed_experts": None},
        error=CaptureError,
        kind=ErrorKind.CAPTURE_OFF,
        says="--enable-return-routed-experts",
    ),
    Bad(
        name="no routes, aborted after a token",
        change={"routed_experts": None, "finish_reason": "abort"},
        error=CaptureError,
        kind=ErrorKind.CAPTURE_OFF,
    ),
    Bad(
        name="no routes, no tokens, not aborted",
        change={"routed_experts": None, "token_ids": []},
        error=CaptureError,
        kind=ErrorKind.CAPTURE_OFF,
    ),
    Bad(
        name="no generated ids",
        change={"token_ids": None},
        error=CaptureError,
        kind=ErrorKind.CAPTURE_OFF,
        says="return_token_ids",
    ),
    Bad(
        name="no prompt ids",
        change={"prompt_token_ids": None},
        error=CaptureError,
        kind=ErrorKind.CAPTURE_OFF,
        says="return_token_ids",
    ),
    Bad(name="goes on", change={"finish_reason": None}, error=UsageError, kind=ErrorKind.ARGUMENT),
    Bad(name="a row less", change={"token_ids": [8, 9, 10]}, error=DataError, kind=ErrorKind.ROW_COUNT),
    Bad(name="two rows more", change={"token_ids": []}, error=DataError, kind=ErrorKind.ROW_COUNT),
    Bad(
        name="logprobs of fewer", change={"logprobs": {"token_logprobs": [-1.0]}}, error=DataError, kind=ErrorKind.SHAPE
    ),
    Bad(
        name="logprobs without a number",
        change={"logprobs": {"token_logprobs": [None, -1.0]}},
        error=DataError,
        kind=ErrorKind.DTYPE,
    ),
    Bad(
        name="logprobs of other tokens",
        change={"logprobs": {"tokens": ["token_id:8", "token_id:7"], "token_logprobs": [-1.0, -1.0]}},
        error=DataError,
        kind=ErrorKind.TOKEN_MISMATCH,
    ),
    Bad(
        name="a log-probability below float32",
        change={"logprobs": {"token_logprobs": [-1e300, -1.0]}},
        error=DataError,
        kind=ErrorKind.VALUE_RANGE,
        says="float32",
    ),
    Bad(
        name="a log-probability below any float",
        change={"logprobs": {"token_logprobs": [-(10**400), -1.0]}},
        error=DataError,
        kind=ErrorKind.VALUE_RANGE,
    ),
    Bad(
        name="one log-probability for all",
        change={"message": {"generation_log_probs": -0.5}},
        error=DataError,
        kind=ErrorKind.DTYPE,
        says="as a list",
    ),
    Bad(name="ids as text", change={"token_ids": "8 9"}, error=DataError, kind=ErrorKind.DTYPE),
    Bad(name="ids as floats", change={"token_ids": [8.0, 9.0]}, error=DataError, kind=ErrorKind.DTYPE),
    Bad(name="a bool among ids", change={"token_ids": [True, 9]}, error=DataError, kind=ErrorKind.DTYPE),
    Bad(name="a bool in the prompt", change={"prompt_token_ids": [5, True, 7]}, error=DataError, kind=ErrorKind.DTYPE),
    Bad(
        name="routes as a tuple",
        change={"routed_experts": (encode(engine_rows(4), form="lists"), 0)},
        error=DataError,
        kind=ErrorKind.ENCODING,
    ),
    Bad(name="message as text", change={"message": "hello"}, error=DataError, kind=ErrorKind.DTYPE),
    Bad(name="logprobs as text", change={"logprobs": "none"}, error=DataError, kind=ErrorKind.DTYPE),
    Bad(name="finish reason as list", change={"finish_reason": ["stop"]}, error=DataError, kind=ErrorKind.DTYPE),
    Bad(
        name="a ticket and no way to redeem it",
        change={"routed_experts": '{"call":"r"}'},
        error=UsageError,
        kind=ErrorKind.ARGUMENT,
        says="redeem",
    ),
)


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.name)
def test_what_contradicts_itself_is_refused(bad: Bad) -> None:
    """Absent ids or routes name the flag to set; nothing is guessed, cut or filled."""
    with pytest.raises(bad.error, match=bad.says or None) as caught:
        response_calls(answer(**bad.change), SPEC, weights_version=1)

    assert bad.kind == caught.value.kind


def test_duplicate_experts_are_refused_when_the_record_is_made() -> None:
    """Zeros in the dense layer, ids in range, and one expert twice: no record comes of it."""
    rows_RDK = engine_rows(4)
    rows_RDK[2, 3] = 9
    call, _ = response_calls(answer(routed_experts=encode(rows_RDK, form="npy")), SPEC, weights_version=1)

    with pytest.raises(DataError) as caught:
        assemble([call], SPEC, sample_id="s")
    assert (ErrorKind.DUPLICATE_ID, 2, 3) == (
        caught.value.kind,
        caught.value.problems[0].token,
        caught.value.problems[0].layer,
    )


@pytest.mark.parametrize(("reason", "loss"), [("abort", "aborted"), ("error", "lost")])
def test_an_abort_before_the_first_token_needs_no_routes(reason: str, loss: str) -> None:
    """The one case in which a choice may come without routes (field row 23: an empty completion loses nothing)."""
    call, _ = response_calls(answer(routed_experts=None, token_ids=[], finish_reason=reason), SPEC, weights_version=1)

    assert (loss, None, 0) == (call.loss, call.routes, call.cached)


def test_rows_that_an_abort_cut_short_are_declared() -> None:
    """Three rows of four after an abort: those that came, and the loss of the rest."""
    call, _ = response_calls(
        answer(routed_experts=encode(engine_rows(3), form="npy"), finish_reason="abort"), SPEC, weights_version=1
    )
    [record] = assemble([call], SPEC, sample_id="s").records

    assert 1 == record.coverage().count("aborted")


#: a row per token, the last one made up
NEMO_MESSAGE = {
    "prompt_token_ids": PROMPT,
    "generation_token_ids": GENERATED,
    "generation_log_probs": [-0.5, -0.25],
    "routed_experts": [*engine_rows(4).tolist(), [[0, 1, 2, 3]] * 4],
}


def test_routes_on_the_message_are_read_as_nemo_puts_them() -> None:
    """What NeMo RL writes on the message: ids, log-probabilities, routes; its last row is filler by position."""
    response = {"id": "n", "choices": [{"index": 0, "finish_reason": "stop", "message": NEMO_MESSAGE}]}

    [call] = response_calls(response, SPEC, weights_version=1, final_row="filler", cached=0)

    np.testing.assert_array_equal(engine_rows(4)[:, [0, 2, 3]], call.routes)
    assert [-0.5, -0.25] == call.logprobs.tolist()  # type: ignore[union-attr]
    # the same ids in the dense slot, which a captured row cannot have
    with pytest.raises(CaptureError, match="layer without a router"):
        response_calls(response, SPEC, weights_version=1, cached=0)


def test_the_prompt_of_the_request_must_be_the_responses() -> None:
    """A response of another request is refused by its tokens."""
    with pytest.raises(DataError) as caught:
        response_calls(answer(), SPEC, weights_version=1, prompt_ids=[5, 6, 8])
    assert ErrorKind.TOKEN_MISMATCH == caught.value.kind


@pytest.mark.parametrize(
    ("usage", "cached"),
    [
        (None, 2),
        ({"prompt_tokens_details": {"cached_tokens": 1}}, 1),
        ({"prompt_tokens_details": {"cached_tokens": 99}}, 3),
        ({"prompt_tokens_details": {"cached_tokens": -1}}, 0),
    ],
)
def test_what_may_come_from_a_prefix_cache_is_said(usage: Any, cached: int) -> None:
    """Of a single choice the server's number, and never a generated token; where it says nothing, all of the prompt
    but its last token."""
    single = answer()
    del single["choices"][1]
    [call] = response_calls({**single, "usage": usage}, SPEC, weights_version=1)

    assert cached == call.cached


def test_a_ticket_of_the_engines_own_writer_is_redeemed() -> None:
    """What RouteScheduler leaves beside the choices is a ticket like any other; what it refused is an error."""
    call = turn(0, 3, 2)
    store = TicketStore(TURNS, stream="s")
    record, issued = issue_ticket(call, TURNS, stream="s")
    store.write(record)
    choice = {"index": 0, "finish_reason": "stop", "token_ids": [3, 4], "routed_experts": None}
    said = {"id": "c", "prompt_token_ids": [0, 1, 2], "choices": [choice]}
    ticket = issued.to_json()

    [back] = response_calls(
        {**said, "kv_transfer_params": {"routeplane": ticket}}, TURNS, weights_version=9, redeem=store.redeem
    )
    np.testing.assert_array_equal(call.routes, back.routes)
    assert ("c", 0) == (back.call_id, back.weights_version)
    with pytest.raises(CaptureError, match="no space") as caught:
        response_calls({**said, "kv_transfer_params": {"routeplane_error": "no space"}}, TURNS, weights_version=9)
    assert ErrorKind.CAPTURE_OFF == caught.value.kind


@pytest.mark.parametrize("asked", [[0, 1, 2], [0, 1, 9], [0, 1], [0, 1, 2, 3]])
def test_a_ticket_without_ids_is_held_to_the_prompt(asked: list[int]) -> None:
    """The request's prompt ids may be given for a response that carries a ticket alone: its call must have them."""
    call = turn(0, 3, 2)
    store = TicketStore(TURNS, stream="s")
    record, issued = issue_ticket(call, TURNS, stream="s")
    store.write(record)
    choice = {"index": 0, "finish_reason": "stop", "routed_experts": issued.to_json()}
    given: dict[str, Any] = {"weights_version": 0, "redeem": store.redeem, "prompt_ids": asked}

    if asked == call.prompt_ids.tolist():
        [back] = response_calls({"id": call.call_id, "choices": [choice]}, TURNS, **given)
        assert call.checksum == back.checksum
        return
    with pytest.raises(DataError, match=f"expected the request's {len(asked)} prompt ids") as caught:
        response_calls({"id": call.call_id, "choices": [choice]}, TURNS, **given)
    assert ErrorKind.TOKEN_MISMATCH == caught.value.kind


def redeemed(call: ModelCall, choice: dict[str, Any], **options: Any) -> ModelCall:
    """The call behind the ticket of a choice."""
    store = TicketStore(TURNS, stream="s")
    record, issued = issue_ticket(call, TURNS, stream="s")
    store.write(record)
    ticket = issued.to_json()
    response = {"id": "c", "choices": [{"index": 0, "finish_reason": "stop", "routed_experts": ticket, **choice}]}
    [back] = response_calls(response, TURNS, weights_version=0, redeem=store.redeem, **options)
    return back


@pytest.mark.parametrize("ids", [{}, {"prompt_token_ids": [0, 1, 2], "token_ids": [3, 4]}], ids=["no ids", "ids"])
@pytest.mark.parametrize("own", [None, [-1.0, -2.0]], ids=["unknown to the writer", "its own"])
def test_log_probabilities_beside_a_ticket_are_no_other_tokens(ids: dict[str, Any], own: Any) -> None:
    """Named by ids that the response leaves to the ticket, or beside those ids: the call has the writer's, else those
    of a response that says which tokens they are of."""
    content = [{"token": f"token_id:{3 + at}", "logprob": -1.0 - at} for at in range(2)]
    back = redeemed(turn(0, 3, 2, logprobs=own), {"logprobs": {"content": content}, **ids})

    expected = [-1.0, -2.0] if own or ids else None
    assert expected == (None if back.logprobs is None else back.logprobs.tolist())


def test_media_are_those_of_the_ticket_or_of_the_caller() -> None:
    """A writer beside the engine knows no digests: the caller's become the call's, and are never dropped; where both
    know some, they must agree."""
    assert ("sha256:a",) == redeemed(turn(0, 3, 2), {}, media=["sha256:a"]).media
    assert ("sha256:a",) == redeemed(turn(0, 3, 2, media=("sha256:a",)), {}).media
    with pytest.raises(DataError) as caught:
        redeemed(turn(0, 3, 2, media=("sha256:a",)), {}, media=["sha256:b"])
    assert ErrorKind.MEDIA == caught.value.kind


# whole numbers past any float, and floats past float32, are JSON too
leaves = st.none() | st.booleans() | st.integers(-3, 300) | st.floats() | st.text(max_size=3)
leaves |= st.sampled_from([10**400, -(10**400), -1e300])
values = st.recursive(leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner))


@given(st.sampled_from(sorted(answer()["choices"][0])), values)
def test_a_changed_field_is_refused_or_read(name: str, value: object) -> None:
    """Whatever stands in a field of a choice, reading raises a typed error or gives calls."""
    with contextlib.suppress(RouteplaneError):
        response_calls(answer(**{name: value}), SPEC, weights_version=1)


@given(st.sampled_from(sorted(NEMO_MESSAGE)), values | st.lists(leaves, min_size=2, max_size=2))
def test_a_changed_field_of_a_message_is_refused_or_read(name: str, value: object) -> None:
    """The same of what NeMo RL puts on the message."""
    response = {"choices": [{"index": 0, "finish_reason": "stop", "message": {**NEMO_MESSAGE, name: value}}]}
    with contextlib.suppress(RouteplaneError):
        response_calls(response, SPEC, weights_version=1, final_row="filler")


@given(st.sampled_from(["index", "token_ids", "prompt_token_ids", "routed_experts", "logprobs", "delta"]), values)
def test_a_changed_field_of_a_chunk_is_refused_or_read(name: str, value: object) -> None:
    """The same of a chunk."""
    made = chunk([8], engine_rows(1), finish_reason="stop")
    made["choices"][0][name] = value
    with contextlib.suppress(RouteplaneError):
        chunk_calls([made], SPEC, weights_version=1, prompt_ids=[5])


@given(values)
def test_any_json_is_refused_or_read(document: object) -> None:
    """No JSON value makes reading raise anything but a typed error."""
    for text in (document, json.dumps(document)):
        with pytest.raises(RouteplaneError):
            response_calls(text, SPEC, weights_version=1)
        with pytest.raises(RouteplaneError):
            chunk_calls([text], SPEC, weights_version=1)


# ----------------------------------------------------------------------------------------------------------------------
# Chunks
# ----------------------------------------------------------------------------------------------------------------------


def write_npy(rows: NDArray[Any]) -> Any:
    """As vLLM writes it."""
    return encode(rows, form="npy")


def chunk(tokens: list[int], rows: NDArray[Any] | None, *, write: Callable[..., Any] = write_npy, **fields: Any) -> Any:
    """A chunk of one choice."""
    routes = None if rows is None else write(rows)
    return {"id": "c", "choices": [{"index": 0, "token_ids": tokens, "routed_experts": routes, **fields}]}


@given(st.data(), st.sampled_from(["cumulative", "delta", "start"]))
def test_chunks_are_joined_by_what_they_cover(data: st.DataObject, kind: str) -> None:
    """However a stream is cut, and wherever its rows begin, the call has the rows and tokens of the whole."""
    prompt, generated = 3, data.draw(st.integers(1, 6))
    first = data.draw(st.integers(0, prompt))
    rows_RDK = engine_rows(prompt + generated - 1)
    cuts = sorted(data.draw(st.sets(st.integers(1, generated))) | {generated})
    chunks, at, sent = [], 0, first
    for cut in cuts:
        stop = prompt + cut - 1
        begin = {"cumulative": first, "delta": sent, "start": data.draw(st.integers(first, sent))}[kind]

        def write(rows: NDArray[Any], start: int = begin) -> Any:
            return encode(rows, start=start, form="prime") if kind == "start" else encode(rows, form="npy")

        chunks.append(
            chunk(
                list(range(100 + at, 100 + cut)),
                rows_RDK[begin:stop],
                write=write,
                finish_reason="stop" if cut == generated else None,
            )
        )
        at, sent = cut, stop
    [call] = chunk_calls(
        chunks,
        SPEC,
        weights_version=1,
        prompt_ids=[1, 2, 3],
        first_row=first,
        spans="cumulative" if kind == "cumulative" else "delta",
    )

    np.testing.assert_array_equal(rows_RDK[first:, [0, 2, 3]], call.routes)
    assert (first, list(range(100, 100 + generated))) == (call.first_row, call.generation_ids.tolist())


def test_coalesced_deltas_with_all_rows_are_not_taken_twice() -> None:
    """Field row 7: two tokens with two rows, then one token with three: as deltas refused, as totals three rows."""
    rows_RDK = engine_rows(3)
    chunks = [chunk([8, 9], rows_RDK[:2]), chunk([10], rows_RDK, finish_reason="stop")]
    given: dict[str, Any] = {"weights_version": 1, "prompt_ids": [5]}

    with pytest.raises(DataError) as caught:
        chunk_calls(chunks, SPEC, spans="delta", **given)
    assert ErrorKind.ROW_COUNT == caught.value.kind
    [call] = chunk_calls(chunks, SPEC, **given)
    assert 3 == len(call.routes)  # type: ignore[arg-type]


CHUNKS = {
    "a hole": (
        [
            chunk([8], engine_rows(1)),
            chunk([9], engine_rows(1), write=lambda rows: encode(rows, start=2, form="prime")),
        ]
    ),
    "rows that changed": ([chunk([8], engine_rows(1)), chunk([9], engine_rows(2)[::-1])]),
    "rows before tokens": ([chunk([8], engine_rows(3))]),
    "rows before the first": (
        [
            chunk([8], engine_rows(1), write=lambda rows: encode(rows, start=1, form="prime")),
            chunk([9], engine_rows(1), write=lambda rows: encode(rows, start=0, form="prime")),
        ]
    ),
    "tokens after the end": ([chunk([8], engine_rows(1), finish_reason="stop"), chunk([9], engine_rows(2))]),
    "ids in lists of other lengths": ([chunk([8, [9, 10]], engine_rows(1), finish_reason="stop")]),  # type: ignore[list-item]
    "another prompt": ([chunk([8], engine_rows(1), prompt_token_ids=[6])]),
    "choice 1 alone": ([{"choices": [{"index": 1, "token_ids": [8]}]}]),
    "an index as text": ([{"choices": [{"index": "0", "token_ids": [8]}]}]),
    "no choices": ([{"id": "c", "choices": []}]),
}


@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS)
def test_chunks_that_do_not_join_are_refused(chunks: list[Any]) -> None:
    """A hole, rows that differ when they come again, rows or tokens out of place."""
    with pytest.raises(DataError):
        chunk_calls(copy.deepcopy(chunks), SPEC, weights_version=1, prompt_ids=[5])


def test_chunks_that_say_where_they_begin_are_held_to_the_request() -> None:
    """Rows from token 0 on where the request left out two: refused, as a whole response is."""
    rows = encode(engine_rows(3), start=0, form="prime")
    said = chunk([8], engine_rows(3), write=lambda _: rows, finish_reason="stop")
    given: dict[str, Any] = {"weights_version": 1, "prompt_ids": [5, 6, 7], "first_row": 2}

    with pytest.raises(DataError, match="rows from token 2 on") as whole:
        response_calls(said, SPEC, **given)
    with pytest.raises(DataError, match="rows from token 2 on") as streamed:
        chunk_calls([said], SPEC, **given)
    assert {ErrorKind.ROW_COUNT} == {whole.value.kind, streamed.value.kind}


def test_sglang_rows_need_their_name() -> None:
    """SGLang's base64 has no mark; where it is named, a response of one layer per decoder layer is read."""
    call, _ = response_calls(
        {"choices": [{**one, "routed_experts": encode(engine_rows(4), form="sglang")} for one in answer()["choices"]]},
        SPEC,
        weights_version=1,
        form="sglang",
    )

    np.testing.assert_array_equal(engine_rows(4)[:, [0, 2, 3]], call.routes)


# ----------------------------------------------------------------------------------------------------------------------
# Sampling masks
# ----------------------------------------------------------------------------------------------------------------------

HOW = Sampling(temperature=0.8, top_k=5, logprobs_mode="processed")
VOCABULARY = 512


def masked(where: str) -> tuple[dict[str, Any], list[list[int]], list[int]]:
    """A recorded token-in, token-out answer of vLLM 0.32 with masks, where vLLM or SGLang's chat puts them."""
    one = exchange("0.32", "token in, token out")
    response = copy.deepcopy(one.response)
    [choice] = response["choices"]
    kept = [sorted({token, (token + 7) % VOCABULARY, at}) for at, token in enumerate(choice["token_ids"])]
    if where == "sampling_mask":
        choice["sampling_mask"] = kept
    else:
        choice["meta_info"] = {"output_token_sampling_mask": [ids[::-1] for ids in kept]}
    return response, kept, choice["token_ids"]


@pytest.mark.parametrize("where", ["sampling_mask", "meta_info"])
def test_masks_of_a_response_become_columns(where: str) -> None:
    """vLLM has them on the choice (0.30 and later), SGLang's chat in its meta_info; the caller tells the parameters."""
    one = exchange("0.32", "token in, token out")
    response, kept, tokens = masked(where)
    options: dict[str, Any] = {"weights_version": 3, "prompt_ids": one.prompt_ids}
    [call] = response_calls(response, one.spec, **options, sampling=HOW, vocab_size=VOCABULARY)
    assert kept == call.columns["sampling_mask"].tolist()[-len(tokens) :]
    assert HOW == call.sampling
    with pytest.raises(UsageError, match="beside masks, got none"):
        response_calls(response, one.spec, **options)


def test_masks_of_a_stream_are_joined() -> None:
    """Each chunk brings those of its tokens; a chunk that lacks them is refused, not taken for another's."""
    one = exchange("0.32", "token in, token out, streamed")
    _, kept, _ = masked("sampling_mask")
    parts = copy.deepcopy(one.response)
    for at, part in enumerate(parts):
        part["choices"][0]["sampling_mask"] = [kept[at]]
    options: dict[str, Any] = {"weights_version": 3, "prompt_ids": one.prompt_ids, "sampling": HOW}
    [call] = chunk_calls(parts, one.spec, **options)
    assert kept == call.columns["sampling_mask"].tolist()[-len(kept) :]
    parts[2]["choices"][0]["sampling_mask"] = None
    with pytest.raises(DataError, match="one list for each of 8 sampled tokens, got 7"):
        chunk_calls(parts, one.spec, **options)
