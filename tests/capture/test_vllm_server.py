"""A real vLLM server behind the middleware, driven with the openai client through conversations of three tool calls.

One server; the fixture holds every exchange, and tests look at them. The same conversation in the engine of this
process is the reference.

Axes: S tokens, R rows, L captured layers, K top-k slots.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from routeplane import assemble, open_stream
from routeplane.capture import vllm as capture
from routeplane.capture.http import TicketStore
from routeplane.capture.http.middleware import HEADER
from routeplane.capture.vllm import OutputOptions
from routeplane.errors import CaptureError, ErrorKind
from routeplane.record.calls import ModelCall
from routeplane.record.record import RouteRecord
from tests.capture.reading import chunk_calls, gym_calls, response_calls
from tests.capture.tiny_server import TOOLS, WORDS, running_server, tool_result, write_model
from tests.capture.vllm_engine import SPEC, Engine, reference_rows

pytestmark = pytest.mark.vllm

TURNS, NEW_TOKENS = 3, 7
FIRST = [{"role": "system", "content": "w40 w41"}, {"role": "user", "content": "w100 w101 w102"}]


@dataclass(frozen=True, kw_only=True)
class Talk:
    """What was said: the replies of three turns by form, other replies by name, and the store that the tickets' stream
    filled."""

    model: Any
    turns: dict[str, list[Any]]
    replies: dict[str, Any]
    store: TicketStore


@pytest.fixture(scope="module")
def talk(tmp_path_factory: pytest.TempPathFactory) -> Talk:
    """Everything that is asked of the server, which is gone when the tests begin."""
    folder = tmp_path_factory.mktemp("server")
    (folder / "model").mkdir()
    model = write_model(folder / "model")
    os.mkfifo(folder / "fifo")
    store = TicketStore(SPEC, stream="rollouts")
    stream = threading.Thread(target=_fill, args=(store, folder / "fifo"), daemon=True)
    stream.start()
    with running_server(folder / "model", fifo=folder / "fifo", log=folder / "log") as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        turns = {form: _converse(client, form) for form in ("npy", "trimmed", "ticket", "nemo", "nemo-lists")}
        replies = {
            "two": _ask(client, FIRST, form="npy", n=2),
            "silent": _ask(client, FIRST, form=None),
            # words are "w20 w21 ...": from the third token on, this string ends the text with the next word
            "stopped": client.completions.create(
                model="tiny",
                prompt=[13, 100, 101, 102],
                max_tokens=NEW_TOKENS,
                temperature=1.0,
                seed=7,
                logprobs=0,
                stop=[" w"],
                extra_body={"allowed_token_ids": WORDS, "return_token_ids": True, "min_tokens": 2},
                extra_headers={HEADER: "npy"},
            ),
            "stream": list(_ask(client, FIRST, form="npy", stream=True)),
            "generate": client.post(
                f"{server.url}/inference/v1/generate",
                cast_to=object,
                body={"token_ids": [13, 100, 101], "sampling_params": {"max_tokens": 4, "temperature": 1.0, "seed": 7}},
                options={"headers": {HEADER: "npy"}},
            ),
        }
    # the middleware closes its sink when the server shuts down
    stream.join()
    return Talk(model=model, turns=turns, replies=replies, store=store)


def _fill(store: TicketStore, fifo: Path) -> None:
    with open_stream(fifo) as records:
        store.receive(records)


def _ask(client: openai.OpenAI, messages: list[Any], *, form: str | None, start: int = 0, **options: Any) -> Any:
    body = {
        "allowed_token_ids": WORDS,
        "ignore_eos": True,
        "return_token_ids": form in ("npy", "trimmed"),
        "routed_experts_prompt_start": start,
    }
    return client.chat.completions.create(
        model="tiny",
        messages=messages,
        tools=TOOLS,  # type: ignore[arg-type]
        max_tokens=NEW_TOKENS,
        temperature=1.0,
        seed=7,
        logprobs=True,
        extra_body=body,
        extra_headers={} if form is None else {HEADER: "npy" if form == "trimmed" else form},
        **options,
    )


def _converse(client: openai.OpenAI, form: str) -> list[Any]:
    messages: list[Any] = list(FIRST)
    replies: list[Any] = []
    for turn in range(TURNS):
        known = len(replies[-1].prompt_token_ids) + NEW_TOKENS - 1 if replies and form == "trimmed" else 0
        replies.append(_ask(client, messages, form=form, start=known))
        messages += tool_result(replies[-1], f"w{200 + turn} w210")
    return replies


def calls_of(talk: Talk, form: str) -> list[ModelCall]:
    """The calls of a conversation."""
    found: list[ModelCall] = []
    for turn, reply in enumerate(talk.turns[form]):
        start = found[-1].num_tokens - 1 if form == "trimmed" and turn else None
        options: dict[str, Any] = {"redeem": talk.store.redeem} if form == "ticket" else {}
        if form.startswith("nemo"):
            options = {"axis": "captured"}
        found += response_calls(
            reply, SPEC, weights_version=1, call_id=f"turn-{turn}", cached=0, first_row=start, **options
        )
    return found


@pytest.fixture(scope="module")
def records(talk: Talk) -> dict[str, RouteRecord]:
    """One record per form."""
    made: dict[str, RouteRecord] = {}
    for form in talk.turns:
        [made[form]] = assemble(calls_of(talk, form), SPEC, sample_id="s", on_missing="raise").records
    return made


def sets(record: RouteRecord) -> Any:
    """The rows as sets."""
    return np.sort(record.routes, axis=2)


# ----------------------------------------------------------------------------------------------------------------------
# The conversation
# ----------------------------------------------------------------------------------------------------------------------


def test_the_record_of_responses_is_that_of_the_engine(engine: Engine, records: dict[str, RouteRecord]) -> None:
    """The record from HTTP responses has, row by row, what the engine of this process gives for the conversation."""
    from_http = records["npy"]
    calls: list[ModelCall] = []
    spans = [span for span in from_http.spans if span.kind == "generation"]
    for turn, span in enumerate(spans):
        prompt = from_http.token_ids[: span.start].tolist()
        [output] = engine.ask(prompt, max_tokens=NEW_TOKENS, allowed_token_ids=WORDS)
        calls += capture.calls(output, SPEC, weights_version=1, call_id=f"turn-{turn}", options=OutputOptions(cached=0))
    [in_process] = assemble(calls, SPEC, sample_id="s", on_missing="raise").records

    np.testing.assert_array_equal(in_process.token_ids, from_http.token_ids)
    np.testing.assert_array_equal(sets(in_process), sets(from_http))
    np.testing.assert_allclose(in_process.logprobs, from_http.logprobs, atol=1e-4)  # type: ignore[arg-type]
    assert in_process.spans == from_http.spans
    assert in_process.captures == from_http.captures


def test_the_rows_are_those_of_an_independent_forward(talk: Talk, records: dict[str, RouteRecord]) -> None:
    """Transformers chooses the same experts for every token that was fed."""
    record = records["npy"]

    assert reference_rows(talk.model, record.token_ids)[:-1] == sets(record)[:-1].tolist()
    assert TURNS == len([span for span in record.spans if span.kind == "generation"])


@pytest.mark.parametrize("form", ["trimmed", "ticket", "nemo", "nemo-lists"])
def test_every_form_gives_the_same_record(form: str, records: dict[str, RouteRecord]) -> None:
    """Trimmed to what is new, as our text, as tickets redeemed from the stream, on the message: tokens and rows
    alike."""
    np.testing.assert_array_equal(records["npy"].token_ids, records[form].token_ids)
    np.testing.assert_array_equal(sets(records["npy"]), sets(records[form]))
    assert records["npy"].spans == records[form].spans


def test_tickets_are_small_and_carry_no_token(talk: Talk) -> None:
    """What a hop carries of a call's routes is its ticket."""
    for reply in talk.turns["ticket"]:
        document = reply.model_dump()
        assert len(document["choices"][0]["routed_experts"].encode()) <= 256
        assert "prompt_token_ids" not in document
        assert "token_ids" not in document["choices"][0]


def test_nemo_messages_are_read_as_gym_items(talk: Talk, records: dict[str, RouteRecord]) -> None:
    """The message of each turn, as an output item, gives the record of the conversation."""
    for form in ("nemo", "nemo-lists"):
        items = [reply.model_dump()["choices"][0]["message"] for reply in talk.turns[form]]
        calls = gym_calls(items, SPEC, weights_version=1, axis="captured", cached=0)
        [record] = assemble(calls, SPEC, sample_id="s").records
        np.testing.assert_array_equal(sets(records["npy"]), sets(record))


def test_choices_of_one_request(talk: Talk) -> None:
    """Two choices: two calls of one prompt, each with the rows of its own tokens."""
    calls = response_calls(talk.replies["two"], SPEC, weights_version=1, cached=0)

    assert 2 == len(calls)
    for call in calls:
        assert call.routes is not None
        assert reference_rows(talk.model, call.token_ids)[:-1] == np.sort(call.routes, axis=2).tolist()


def test_who_asks_for_no_routes_gets_none(talk: Talk) -> None:
    """The engine captures for every request; the middleware ships for those that ask."""
    assert talk.replies["silent"].model_dump()["choices"][0].get("routed_experts") is None


def test_a_stream_has_no_routes_and_says_so(talk: Talk) -> None:
    """Chunks of a chat carry none: refused with the way to ask instead."""
    with pytest.raises(CaptureError, match="stream=False") as caught:
        chunk_calls(talk.replies["stream"], SPEC, weights_version=1)
    assert ErrorKind.CAPTURE_OFF == caught.value.kind


def test_a_stop_string_cuts_the_text_and_not_the_rows(talk: Talk) -> None:
    """The engine stops amid its tokens and trims the text; every token that was fed has its row, the last has none."""
    reply = talk.replies["stopped"]
    [call] = response_calls(reply, SPEC, weights_version=1, cached=0)

    assert "stop" == reply.choices[0].finish_reason
    assert len(reply.choices[0].text.split()) < len(call.generation_ids) < NEW_TOKENS
    assert call.routes is not None
    assert 4 + len(call.generation_ids) - 1 == len(call.routes)
    assert reference_rows(talk.model, call.token_ids)[:-1] == np.sort(call.routes, axis=2).tolist()


def test_token_in_token_out(talk: Talk) -> None:
    """The endpoint of ids alone goes through the same forms."""
    [call] = response_calls(talk.replies["generate"], SPEC, weights_version=1, cached=0, prompt_ids=[13, 100, 101])

    assert call.routes is not None
    assert reference_rows(talk.model, call.token_ids)[:-1] == np.sort(call.routes, axis=2).tolist()
