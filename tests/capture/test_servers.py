"""Answers as further servers write them, from their documented or recorded shapes, and the one rule for their rows.

Axes: R rows, D decoder layers, L captured layers, K top-k slots.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from routeplane import assemble
from routeplane.capture import CaptureOptions
from routeplane.capture.http import messages
from routeplane.capture.layers import rows_from_slots
from routeplane.capture.wire import decode, encode
from routeplane.errors import CaptureError, DataError, ErrorKind, RouteplaneError, SpecError
from routeplane.record.calls import ModelCall
from routeplane.record.spec import RouteSpec
from tests.capture.payloads import SPEC, engine_rows
from tests.capture.reading import chunk_calls, gym_calls, response_calls, sglang_call

PROMPT, GENERATED = [5, 6, 7], [8, 9]
ROWS_RDK = engine_rows(4)
EXPECTED = ROWS_RDK[:, list(SPEC.layer_ids)].tolist()
CHOICE: dict[str, Any] = {"index": 0, "finish_reason": "stop"}


def sglang_text(rows: NDArray[Any] = ROWS_RDK) -> str:
    """SGLang's base64 of int32, without a header."""
    return base64.b64encode(np.ascontiguousarray(rows, dtype="<i4").tobytes()).decode()


def dynamo_object(rows: NDArray[Any] = ROWS_RDK, *, dtype: str | None = None) -> dict[str, Any]:
    """Dynamo's and verifiers' object: base85 of the array's bytes, with its shape."""
    sent = np.ascontiguousarray(rows, dtype=dtype or "int32")
    said = {} if dtype is None else {"dtype": dtype}
    return {"data": base64.b85encode(sent.tobytes()).decode(), "shape": list(sent.shape), **said}


# ----------------------------------------------------------------------------------------------------------------------
# Forms
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 7])
@pytest.mark.parametrize("dtype", [None, "uint8", "int16", "int32"])
def test_base85_is_told_from_base64_by_its_length(rows: int, dtype: str | None) -> None:
    """The same object in either alphabet gives the same array: shape and dtype say how long each text is."""
    sent = engine_rows(rows) % 100
    array = decode(dynamo_object(sent, dtype=dtype))

    np.testing.assert_array_equal(sent, array.routes)
    plain = sent.astype(dtype or "int32")
    np.testing.assert_array_equal(sent, decode(encode(plain, form="prime")).routes)


@pytest.mark.parametrize(
    "change",
    [
        {"data": "A" * 7},
        {"shape": [4, 4]},
        {"shape": [4, 4, 5]},
        {"dtype": "float32"},
        {"layers": 3},
        {"data": None},
        {"start": -1},
    ],
)
def test_an_object_that_contradicts_itself_is_refused(change: dict[str, Any]) -> None:
    """Shape, type and text must agree, whichever alphabet the text is in."""
    with pytest.raises(DataError):
        decode({**dynamo_object(), **change})


def test_a_pair_of_header_and_text_is_read() -> None:
    """rLLM's gateway: a JSON header and base64; a header that says nothing of the array is refused."""
    pair = encode(ROWS_RDK, form="pair")

    assert {"shape", "dtype"} == json.loads(pair[0]).keys()
    np.testing.assert_array_equal(ROWS_RDK, decode(pair).routes)
    for header in ("{}", "[1]", "{", '{"shape": [4, 4, 4]}', '{"shape": [4, 4, 4], "dtype": "float16"}'):
        with pytest.raises(DataError):
            decode([header, pair[1]])


@pytest.mark.parametrize("dtype", ["uint8", "int16", "int64"])
def test_arrays_of_the_same_process_are_read(dtype: str) -> None:
    """tunix, MaxText and ATOM give integer arrays; -1 in every slot is a row that is not to be replayed."""
    sent_RDK = ROWS_RDK.astype(dtype)
    if dtype != "uint8":
        sent_RDK[1] = -1
    answer = {"id": "r", "choices": [{**CHOICE, "token_ids": GENERATED, "routed_experts": sent_RDK}]}
    [call] = response_calls(answer, SPEC, weights_version=1, prompt_ids=PROMPT)

    expected = sent_RDK[:, list(SPEC.layer_ids)].astype(np.int16).tolist()
    assert expected == call.routes.tolist()  # type: ignore[union-attr]


def test_tensorrt_llm_counts_moe_layers_alone() -> None:
    """TensorRT-LLM: one slot per captured layer, -1 where its cache had no row; the axis is said, never guessed."""
    sent_RLK = ROWS_RDK[:, list(SPEC.layer_ids)].astype(np.int16)
    sent_RLK[0] = -1
    answer = {"id": "r", "choices": [{**CHOICE, "token_ids": GENERATED, "routed_experts": sent_RLK.tolist()}]}
    [call] = response_calls(answer, SPEC, weights_version=1, prompt_ids=PROMPT, axis="captured")
    [record] = assemble([call], SPEC, sample_id="s").records

    assert sent_RLK.tolist() == record.routes[:4].tolist()
    states = [capture.state for capture in record.captures for _ in range(capture.start, capture.stop)]
    # rows of the prompt but the last may come from a cache, so are of unknown weights
    assert ["not_captured", "cached", "captured", "captured", "not_fed"] == states
    with pytest.raises(SpecError):
        response_calls(answer, SPEC, weights_version=1, prompt_ids=PROMPT)


@pytest.mark.parametrize("dtype", ["int16", "int32"])
def test_tunix_slots_that_are_not_to_be_replayed_are_missing(dtype: str) -> None:
    """tunix and MaxText: -1 in every slot of a row leaves the token to the live router; beside ids it is refused."""
    sent_RDK = ROWS_RDK.astype(dtype)
    sent_RDK[2] = -1
    choice = {**CHOICE, "token_ids": GENERATED, "routed_experts": sent_RDK}
    [call] = response_calls({"choices": [choice]}, SPEC, weights_version=1, prompt_ids=PROMPT)
    [record] = assemble([call], SPEC, sample_id="s").records

    assert (record.routes[2] == -1).all()
    assert 0.25 == record.coverage().missing_share
    sent_RDK[3, 2, 1] = -1
    with pytest.raises(DataError) as caught:
        assemble(response_calls({"choices": [choice]}, SPEC, weights_version=1, prompt_ids=PROMPT), SPEC, sample_id="s")
    assert ErrorKind.PARTIAL_ROW == caught.value.kind


def test_jagged_batches_are_refused_by_name() -> None:
    """Rows of several samples in one field, of as many tokens as each has: the error says what came."""
    parts = [ROWS_RDK.astype(np.int64), ROWS_RDK[:2].astype(np.int64)]
    several = np.empty(2, dtype=object)
    several[:] = parts
    nested = torch.nested.nested_tensor([torch.as_tensor(part) for part in parts], layout=torch.jagged)
    batches: list[tuple[Any, str]] = [
        (nested, "jagged"),
        (several, "integer type, got object"),
        ([part.tolist() for part in parts], "rows of equal"),
    ]
    for batch, named in batches:
        with pytest.raises(DataError, match=named):
            response_calls(
                {"choices": [{**CHOICE, "token_ids": GENERATED, "routed_experts": batch}]},
                SPEC,
                weights_version=1,
                prompt_ids=PROMPT,
            )


# ----------------------------------------------------------------------------------------------------------------------
# Places
# ----------------------------------------------------------------------------------------------------------------------

ENGINE_DATA = {
    "prompt_token_ids": PROMPT,
    "completion_token_ids": GENERATED,
    "completion_logprobs": [-0.5, -0.25],
    "routed_experts": dynamo_object(),
}
ANSWERS: dict[str, dict[str, Any]] = {
    "SGLang, per choice": {
        "choices": [
            {**CHOICE, "sgl_ext": {"routed_experts": sglang_text(), "input_ids": PROMPT, "output_ids": GENERATED}}
        ]
    },
    "SGLang, per response": {
        "choices": [CHOICE],
        "sglext": {"routed_experts": sglang_text(), "input_ids": PROMPT, "output_ids": GENERATED},
    },
    "Dynamo, engine data": {"choices": [CHOICE], "nvext": {"engine_data": ENGINE_DATA}},
    "Dynamo, beside engine data": {
        "choices": [CHOICE],
        "nvext": {
            "routed_experts": dynamo_object(dtype="uint8"),
            "engine_data": {name: value for name, value in ENGINE_DATA.items() if name != "routed_experts"},
        },
    },
    "Dynamo over SGLang": {
        "choices": [{**CHOICE, "token_ids": GENERATED}],
        "nvext": {"routed_experts": sglang_text()},
        "prompt_token_ids": PROMPT,
    },
    "LMDeploy, chat": {
        "choices": [{**CHOICE, "message": {"gen_tokens": GENERATED}, "routed_experts": ROWS_RDK.tolist()}],
    },
    "vLLM 0.21, split": {
        "prompt_token_ids": PROMPT,
        "prompt_routed_experts": encode(ROWS_RDK[:3], form="npy"),
        "choices": [{**CHOICE, "token_ids": GENERATED, "routed_experts": encode(ROWS_RDK[3:], form="npy")}],
    },
    "ids in log-probabilities": {
        "prompt_token_ids": PROMPT,
        "choices": [
            {
                **CHOICE,
                "logprobs": {"tokens": ["token_id:8", "token_id:9"], "token_logprobs": [-0.5, -0.25]},
                "routed_experts": encode(ROWS_RDK, form="npy"),
            }
        ],
    },
}


@pytest.mark.parametrize("name", ANSWERS)
def test_every_server_gives_the_same_call(name: str) -> None:
    """Wherever a server puts ids and routes, the call has the tokens, and the rows of the captured layers."""
    [call] = response_calls(ANSWERS[name], SPEC, weights_version=1, prompt_ids=PROMPT, cached=0)

    assert (PROMPT, GENERATED) == (call.prompt_ids.tolist(), call.generation_ids.tolist())
    assert EXPECTED == call.routes.tolist()  # type: ignore[union-attr]
    if "completion_logprobs" in json.dumps(ANSWERS[name]) or "log-prob" in name:
        assert [-0.5, -0.25] == call.logprobs.tolist()  # type: ignore[union-attr]


def test_layers_behind_the_last_router_need_the_depth() -> None:
    """SGLang's text has no header: with a dense layer behind the last router, the depth says where rows end."""
    deep_RDK = np.concatenate([ROWS_RDK, np.zeros_like(ROWS_RDK[:, :1])], axis=1)
    answer = {"choices": [{**CHOICE, "sgl_ext": {"routed_experts": sglang_text(deep_RDK)}, "token_ids": GENERATED}]}
    given: dict[str, Any] = {"weights_version": 1, "prompt_ids": PROMPT}

    [call] = response_calls(answer, SPEC, decoder_layers=5, **given)
    assert EXPECTED == call.routes.tolist()  # type: ignore[union-attr]
    with pytest.raises(RouteplaneError):
        response_calls(answer, SPEC, **given)


def test_a_chunk_of_its_own_carries_the_routes() -> None:
    """SGLang's stream: tokens, then a chunk without choices whose extension has the routes."""
    chunks: list[Any] = [
        {"id": "s", "choices": [{"index": 0, "token_ids": [8], "finish_reason": None}]},
        {"id": "s", "choices": [{"index": 0, "token_ids": [9], "finish_reason": "stop"}]},
        {"id": "s", "choices": [], "sgl_ext": {"routed_experts": sglang_text()}},
    ]
    on_choice = [*chunks[:1], {"id": "s", "choices": [{**chunks[1]["choices"][0], **chunks[2]}]}]
    on_choice[1]["choices"][0].pop("choices")
    for parts in (chunks, on_choice):
        [call] = chunk_calls(parts, SPEC, weights_version=1, prompt_ids=PROMPT)
        assert (GENERATED, EXPECTED) == (call.generation_ids.tolist(), call.routes.tolist())  # type: ignore[union-attr]


def test_several_sglang_answers_are_several_calls() -> None:
    """``n`` above 1 gives a list of answers; each is a call of its own."""
    from routeplane.capture import sglang

    info = {"id": "r", "finish_reason": {"type": "stop"}, "routed_experts": sglang_text()}
    answers = [{"output_ids": GENERATED, "meta_info": info}, {"output_ids": [8, 10], "meta_info": info}]
    first, second = sglang.calls(answers, SPEC, prompt_ids=PROMPT, weights_version=1)

    assert ("r/0", "r/1") == (first.call_id, second.call_id)
    assert [8, 10] == second.generation_ids.tolist()
    records = sglang.records(answers, SPEC, sample_id="s", prompt_ids=PROMPT, weights_version=1)
    assert [("s/0", "s"), ("s/1", "s")] == [(record.sample_id, record.group) for record in records]


# ----------------------------------------------------------------------------------------------------------------------
# What is refused says why
# ----------------------------------------------------------------------------------------------------------------------


def refusal(answer: Any, **given: Any) -> RouteplaneError:
    """The error that reading an answer raises."""
    with pytest.raises(RouteplaneError) as caught:
        response_calls(answer, SPEC, **{"weights_version": 1, "prompt_ids": PROMPT, **given})
    return caught.value


def test_routes_in_an_unknown_place_are_named() -> None:
    """The flag is the hint only where no key holds anything like routes; else the key is."""
    bare = {"choices": [{**CHOICE, "token_ids": GENERATED}]}
    elsewhere = {"choices": [{**CHOICE, "token_ids": GENERATED, "moe": {"expert_indices": [[1, 2]]}}]}

    assert "--enable-return-routed-experts" in refusal(bare).message
    said = refusal(elsewhere).message
    assert "choices[0].moe.expert_indices" in said
    assert "--enable-return" not in said


def test_an_aborted_answer_is_not_told_of_a_flag() -> None:
    """Tokens, no routes, an abort: the reason is the abort, and how to declare it is said."""
    answer = {"choices": [{"index": 0, "finish_reason": "abort", "token_ids": GENERATED}]}
    error = refusal(answer)

    assert ErrorKind.CAPTURE_OFF == error.kind
    assert "absent='aborted'" in error.message
    assert "--enable" not in error.message
    [call] = response_calls(answer, SPEC, weights_version=1, prompt_ids=PROMPT, absent="aborted")
    assert ("aborted", None) == (call.loss, call.routes)


@pytest.mark.parametrize(
    ("extension", "says"),
    [({"sgl_ext": {"routed_experts": sglang_text()}}, "sglext"), ({"nvext": {"x": 1}}, "nvext.extra_fields")],
)
def test_absent_ids_are_asked_for_in_the_servers_own_terms(extension: dict[str, Any], says: str) -> None:
    """SGLang and Dynamo have no return_token_ids: the error names what they have."""
    error = refusal({"choices": [{**CHOICE, **extension}]})

    assert says in error.message
    assert "return_token_ids" not in error.message


def test_null_choices_and_lists_of_answers_are_named() -> None:
    """``choices=null`` and a list of responses are refused for what they are."""
    assert "got None" in refusal({"choices": None}).message
    assert "a list of 2" in refusal([{"choices": []}, {"choices": []}]).message


def test_prompt_rows_that_do_not_reach_the_prompt_are_refused() -> None:
    """The two parts of a split answer must meet at the first generated token."""
    answer = {**ANSWERS["vLLM 0.21, split"], "prompt_routed_experts": encode(ROWS_RDK[:2], form="npy")}

    assert ErrorKind.ROW_COUNT == refusal(answer).kind


# ----------------------------------------------------------------------------------------------------------------------
# One rule for rows
# ----------------------------------------------------------------------------------------------------------------------

Reader = Callable[[NDArray[Any], int], ModelCall]


def _response(rows: NDArray[Any], first_row: int) -> ModelCall:
    answer = {"choices": [{**CHOICE, "token_ids": GENERATED, "routed_experts": encode(rows, form="npy")}]}
    return response_calls(answer, SPEC, weights_version=1, prompt_ids=PROMPT, first_row=first_row)[0]


def _message(rows: NDArray[Any], first_row: int) -> ModelCall:
    message = {"generation_token_ids": GENERATED, "routed_experts": encode(rows.astype(np.int16), form="nrlre1")}
    answer = {"choices": [{**CHOICE, "message": message}]}
    return response_calls(answer, SPEC, weights_version=1, prompt_ids=PROMPT, first_row=first_row)[0]


def _sglang(rows: NDArray[Any], first_row: int) -> ModelCall:
    info = {"id": "r", "finish_reason": {"type": "stop"}, "routed_experts": sglang_text(rows)}
    answer = {"output_ids": GENERATED, "meta_info": info}
    return sglang_call(answer, SPEC, prompt_ids=PROMPT, weights_version=1, first_row=first_row)


def _sglang_openai(rows: NDArray[Any], first_row: int) -> ModelCall:
    answer = {"choices": [{**CHOICE, "token_ids": GENERATED, "sgl_ext": {"routed_experts": sglang_text(rows)}}]}
    return response_calls(answer, SPEC, weights_version=1, prompt_ids=PROMPT, first_row=first_row)[0]


def _dynamo(rows: NDArray[Any], first_row: int) -> ModelCall:
    engine = {"completion_token_ids": GENERATED, "routed_experts": dynamo_object(rows)}
    answer = {"choices": [CHOICE], "nvext": {"engine_data": engine}}
    return response_calls(answer, SPEC, weights_version=1, prompt_ids=PROMPT, first_row=first_row)[0]


def _prime(rows: NDArray[Any], first_row: int) -> ModelCall:
    payload = {**encode(rows, form="prime"), "start": first_row}
    answer = {"choices": [{**CHOICE, "token_ids": GENERATED, "routed_experts": payload}]}
    return response_calls(answer, SPEC, weights_version=1, prompt_ids=PROMPT, first_row=first_row)[0]


def _stream(rows: NDArray[Any], first_row: int) -> ModelCall:
    parts = [{"choices": [{**CHOICE, "token_ids": GENERATED, "routed_experts": encode(rows, form="npy")}]}]
    return chunk_calls(parts, SPEC, weights_version=1, prompt_ids=PROMPT, first_row=first_row)[0]


def _gym(rows: NDArray[Any], first_row: int) -> ModelCall:
    whole = np.concatenate([ROWS_RDK[:first_row], rows, engine_rows(1)]).astype(np.int16)
    item = {"prompt_token_ids": PROMPT, "generation_token_ids": GENERATED, "routed_experts": whole.tolist()}
    return gym_calls([item], SPEC, weights_version=1)[0]


def _log(rows: NDArray[Any], first_row: int) -> ModelCall:
    whole = np.concatenate([ROWS_RDK[:first_row], rows, engine_rows(1)]).astype(np.int16)
    log = [
        {"role": "user", "token_ids": np.asarray(PROMPT), "routed_experts": whole[:3]},
        {"role": "assistant", "token_ids": np.asarray(GENERATED), "routed_experts": whole[3:]},
    ]
    [call] = messages.calls(log, SPEC, weights_version=1, options=CaptureOptions(axis="decoder"))
    return call  # type: ignore[return-value]


#: Of a whole sequence, filler behind it: what another first row is to others is rows lost or doubled on the way here.
WHOLE = ("Gym", "message log")
READERS: dict[str, Reader] = {
    "Gym": _gym,
    "message log": _log,
    "response": _response,
    "message": _message,
    "SGLang": _sglang,
    "SGLang, OpenAI": _sglang_openai,
    "Dynamo": _dynamo,
    "prime-rl": _prime,
    "stream": _stream,
}


def _pads(rows: NDArray[Any]) -> dict[str, NDArray[Any]]:
    """What gateways and harnesses add: zeros, -1 in every slot, or a row like any other."""
    legal: NDArray[Any] = engine_rows(9)[8:9].astype(rows.dtype)
    return {"zeros": np.zeros_like(legal), "minus one": np.full_like(legal, -1, dtype=np.int16), "legal": legal}


#: A legal row added to a request that began one row later than it says looks like a request without either fault.
CANCELLING = {(-1, "in front", "legal"), (-1, "behind", "legal")}
MATRIX = [
    (error, place, pad)
    for error in (-2, -1, 0, 1, 2)
    for place, pads in (("none", ("none",)), ("in front", tuple(_pads(ROWS_RDK))), ("behind", tuple(_pads(ROWS_RDK))))
    for pad in pads
    if (error, place, pad) not in CANCELLING
]


def cases_of(name: str) -> list[tuple[int, str, str]]:
    """The matrix of a reader: all of it, or one fault at a time where rows lost on the way leave space for others."""
    return [case for case in MATRIX if name not in WHOLE or case[0] == 0 or case[1] == "none"]


def added(rows: NDArray[Any], place: str, pad: str) -> NDArray[Any]:
    """Rows with one more at an end."""
    if place == "none":
        return rows
    more = _pads(rows)[pad]
    return np.concatenate([more, rows] if place == "in front" else [rows, more])


def outcome(name: str, error: int, place: str, pad: str) -> str:
    """Rows of tokens 2 and 3 with these faults: "refused", "right", or "silent" where wrong rows passed for captured.

    A MISSING row does not count as wrong.
    """
    rows_RDK = added(ROWS_RDK[2:].astype(np.int16), place, pad)
    try:
        call = READERS[name](rows_RDK, 2 + error)
        [record] = assemble([call], SPEC, sample_id="s").records
    except RouteplaneError:
        return "refused"
    truth = [*EXPECTED, None]
    for token, row in enumerate(record.routes.tolist()):
        if record.routes[token].min() >= 0 and row != truth[token]:
            return "silent"
    return "right" if record.routes[2:4].tolist() == EXPECTED[2:] else "silent"


@pytest.mark.parametrize("name", READERS)
def test_rows_of_other_tokens_never_pass(name: str) -> None:
    """A request that began at row 2, read with another first row, with a row added at either end, or both."""
    found = {case: outcome(name, *case) for case in cases_of(name)}

    assert [] == [case for case, said in found.items() if said == "silent"]
    assert "right" == found[0, "none", "none"]


def test_a_form_that_names_its_start_shows_faults_that_cancel() -> None:
    """prime-rl's object says where it begins, so that a first row one too low is refused whatever was added."""
    for place in ("in front", "behind"):
        payload = {**encode(added(ROWS_RDK[2:], place, "legal"), form="prime"), "start": 2}
        answer = {"choices": [{**CHOICE, "token_ids": GENERATED, "routed_experts": payload}]}
        assert ErrorKind.ROW_COUNT == refusal(answer, first_row=1).kind


def test_a_prefill_of_gym_and_of_a_server_has_all_of_its_rows() -> None:
    """Where nothing was sampled the whole prompt was fed: P rows, and one fewer is refused."""
    answer = {"choices": [{**CHOICE, "token_ids": [], "routed_experts": encode(ROWS_RDK[:3], form="npy")}]}
    [call] = response_calls(answer, SPEC, weights_version=1, prompt_ids=PROMPT)
    assert 3 == call.rows_stop
    answer["choices"][0]["routed_experts"] = encode(ROWS_RDK[:2], form="npy")
    with pytest.raises(DataError):
        response_calls(answer, SPEC, weights_version=1, prompt_ids=PROMPT)


def test_an_item_of_gym_takes_no_prepended_row() -> None:
    """A row per token is what Gym sends; a prepended one makes two more rows than were fed."""
    item = {
        "prompt_token_ids": PROMPT,
        "generation_token_ids": GENERATED,
        "generation_log_probs": [-0.5, -0.5],
        "routed_experts": np.concatenate([engine_rows(9)[8:], engine_rows(5)]).tolist(),
    }
    with pytest.raises(DataError):
        gym_calls([item], SPEC, weights_version=1)


# ----------------------------------------------------------------------------------------------------------------------
# Top-1 routers
# ----------------------------------------------------------------------------------------------------------------------

TOP_1 = RouteSpec(num_experts=16, top_k=1, layer_ids=tuple(range(6)))


@pytest.mark.parametrize("rows", [16, 32, 64, 200])
def test_a_layer_that_was_never_written_is_found_at_top_1(rows: int) -> None:
    """One layer of zeros among layers that vary is a capture that was not bound, at any length worth judging."""
    routes_RDK = np.random.default_rng(rows).integers(0, 16, (rows, 6, 1)).astype(np.uint8)
    routes_RDK[:, 1] = 0
    answer = {"choices": [{**CHOICE, "token_ids": [1], "routed_experts": encode(routes_RDK, form="npy")}]}
    with pytest.raises(CaptureError) as caught:
        response_calls(answer, TOP_1, weights_version=1, prompt_ids=list(range(rows)))
    assert (ErrorKind.UNCAPTURED_SLOT, [1]) == (
        caught.value.kind,
        [problem.layer for problem in caught.value.problems],
    )


@pytest.mark.parametrize("rows", [1, 5, 200])
def test_zeros_in_every_layer_are_no_choice_of_many_routers(rows: int) -> None:
    """Expert 0 in six layers of 16 experts at once happens once in 16 million tokens."""
    answer = {
        "choices": [
            {**CHOICE, "token_ids": [1], "routed_experts": encode(np.zeros((rows, 6, 1), np.uint8), form="npy")}
        ]
    }
    with pytest.raises(CaptureError):
        response_calls(answer, TOP_1, weights_version=1, prompt_ids=list(range(rows)))


@pytest.mark.parametrize("experts", [4, 16])
def test_honest_top_1_layers_pass(experts: int) -> None:
    """Choices that lean on few experts, also on expert 0, are no alarm: a layer of zeros among layers as lopsided."""
    rng = np.random.default_rng(experts)
    spec = RouteSpec(num_experts=experts, top_k=1, layer_ids=(0, 1, 2, 3))
    for length in (1, 5, 8, 12):
        routes_RLK = np.where(rng.random((length, 4, 1)) < 0.8, 0, rng.integers(0, experts, (length, 4, 1)))
        routes_RLK[:, 2] = 0
        assert length == len(rows_from_slots(routes_RLK.astype(np.uint8), spec))


def test_a_deep_layer_may_collapse_behind_repeated_tokens() -> None:
    """A record of vLLM, by its counts: 27 different rows, deeper layers with fewer experts, the deepest with one."""
    at_R = np.arange(27)
    shallow_R, middle_R, deep_R = at_R // 4, at_R % 4, np.where(at_R < 17, 2, at_R % 2)
    routes_RLK = np.stack([shallow_R, middle_R, deep_R, np.zeros(27)], axis=1)[:, :, None].astype(np.uint8)
    spec = RouteSpec(num_experts=8, top_k=1, layer_ids=(0, 1, 2, 3))

    assert routes_RLK.tolist() == rows_from_slots(routes_RLK, spec).tolist()
    with pytest.raises(CaptureError):  # the same zeros where no other layer leans on one expert
        rows_from_slots(np.where(np.arange(4)[:, None] == 2, routes_RLK[:, :1], routes_RLK), spec)
