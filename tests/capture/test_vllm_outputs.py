"""Outputs of the real vLLM engine that lack something or lie, each refused or marked with its reason.

Most are copies of one good output with a field changed: an engine does not lose rows on request.

Axes: R rows, D decoder layers, K top-k slots.
"""

from __future__ import annotations

import copy
import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm import LLM, RequestOutput
from vllm.logprobs import Logprob

from routeplane.capture import vllm as capture
from routeplane.capture.vllm import OutputOptions, generate_records, start_engine
from routeplane.errors import CaptureError, DataError, ErrorKind, RouteplaneError, UsageError
from routeplane.record.calls import ModelCall
from tests.capture.test_servers import MATRIX
from tests.capture.vllm_engine import SHORT, SPEC, VOCABULARY, Engine, reference_rows, states

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def good(engine: Engine) -> RequestOutput:
    """One finished output of SHORT and 12 tokens; tests change copies of it."""
    return engine.ask(SHORT)[0]


def changed(output: RequestOutput, **fields: Any) -> RequestOutput:
    """The same output with other fields in its only choice."""
    copied = copy.copy(output)
    copied.outputs = [dataclasses.replace(output.outputs[0], **fields)]
    return copied


def test_a_logprob_is_found_by_its_token(good: RequestOutput) -> None:
    """The sampled token's value is taken wherever it stands among those of other tokens."""
    positions = [{VOCABULARY: Logprob(-0.5), **position} for position in good.outputs[0].logprobs]
    [plain] = capture.calls(good, SPEC, weights_version=1)
    [mixed] = capture.calls(changed(good, logprobs=positions), SPEC, weights_version=1)

    assert plain.checksum == mixed.checksum


def test_processed_logprobs_are_called_so(good: RequestOutput) -> None:
    """The mode of the engine becomes the record's attribute."""
    [record] = capture.records(good, SPEC, options=OutputOptions(logprobs_mode="processed_logprobs", media=["sha:1"]))

    assert {"logprobs_mode": "processed", "media": '["sha:1"]'} == dict(record.attributes)


def test_an_engine_without_capture_is_refused(engine: Engine) -> None:
    """A second engine of the same weights without the flag: both ways in name the flag, before or after generating."""
    bare = LLM(
        str(engine.folder),
        dtype="float32",
        block_size=32,
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=128,
    )
    off = dataclasses.replace(engine, llm=bare)

    with pytest.raises(CaptureError, match="enable_return_routed_experts") as caught:
        capture.records(off.ask(SHORT)[0], SPEC)
    assert ErrorKind.CAPTURE_OFF == caught.value.kind
    with pytest.raises(CaptureError, match="an engine with enable_return_routed_experts") as caught:
        generate_records(bare, [SHORT], max_tokens=1)
    assert ErrorKind.CAPTURE_OFF == caught.value.kind
    with pytest.raises(UsageError) as refused:
        start_engine(str(engine.folder), enable_return_routed_experts=False)
    assert ErrorKind.ARGUMENT == refused.value.kind


def test_an_abort_before_the_first_token_is_declared(good: RequestOutput) -> None:
    """Prompt tokens without rows are aborted ones; nothing is made up for them."""
    output = changed(good, token_ids=[], routed_experts=None, logprobs=None, finish_reason="abort")
    [record] = capture.records(output, SPEC, weights_version=4)

    assert [(0, 10, "aborted", None)] == states(record)
    assert (record.routes == -1).all()


@pytest.mark.parametrize(("reason", "state"), [("abort", "aborted"), ("error", "lost")])
def test_rows_cut_short_are_declared(engine: Engine, good: RequestOutput, reason: str, state: str) -> None:
    """What came before the end stays; rows that were fed and did not come carry the reason."""
    rows_RDK = good.outputs[0].routed_experts
    [record] = capture.records(
        changed(good, routed_experts=rows_RDK[:15], finish_reason=reason), SPEC, options=OutputOptions(cached=0)
    )

    assert [(0, 15, "captured", None), (15, 21, state, None), (21, 22, "not_fed", None)] == states(record)
    assert reference_rows(engine.model, record.token_ids)[:15] == np.sort(record.routes[:15], axis=2).tolist()


def test_an_abort_with_all_its_rows_lacks_nothing(good: RequestOutput) -> None:
    """A request that was aborted after some tokens brought a row for each one fed: no loss is declared."""
    [call] = capture.calls(changed(good, finish_reason="abort"), SPEC, weights_version=1)

    assert (None, 21) == (call.loss, call.rows_stop)


def with_versions(output: RequestOutput, *edges: tuple[str, int, int]) -> RequestOutput:
    """The same output as vLLM 0.32 gives it: with spans of the weights that sampled its tokens."""
    copied = changed(output)
    spans = [SimpleNamespace(version=name, start=start, end=stop) for name, start, stop in edges]
    copied.outputs[0].weight_versions = spans
    return copied


def test_an_update_at_every_position_is_in_the_call(good: RequestOutput) -> None:
    """Spans of the output's tokens become those of the call; a contradiction with the caller is refused."""
    prompt, generated = len(SHORT), len(good.outputs[0].token_ids)
    for at in range(1, generated):
        straddling = with_versions(good, ("7", 0, at), ("v8", at, generated))
        options = OutputOptions(version_numbers={"v8": 8})
        [call] = capture.calls(straddling, SPEC, weights_version=None, options=options)
        assert ((prompt, prompt + at, 7), (prompt + at, prompt + generated, 8)) == call.versions
        with pytest.raises(DataError) as caught:
            capture.calls(straddling, SPEC, weights_version=7, options=options)
        assert ErrorKind.SPANS == caught.value.kind
    [unset] = capture.calls(with_versions(good, ("default", 0, generated)), SPEC, weights_version=5)
    assert (5, ()) == (unset.weights_version, unset.versions)


def test_rows_of_other_tokens_never_pass(good: RequestOutput) -> None:
    """The matrix of every reader: a request that began at row 2, read with another first row, with a row added."""
    rows_RDK = good.outputs[0].routed_experts[2:].astype(np.int16)
    pads = {"zeros": np.zeros_like(rows_RDK[:1]), "minus one": np.full_like(rows_RDK[:1], -1), "legal": rows_RDK[-1:]}
    [truth] = capture.records(good, SPEC)
    for error, place, pad in MATRIX:
        ends = {"none": [rows_RDK], "in front": [pads.get(pad), rows_RDK], "behind": [rows_RDK, pads.get(pad)]}
        sent = changed(good, routed_experts=np.concatenate(ends[place]))
        options = OutputOptions(first_row=2 + error)
        if (error, place) == (0, "none"):
            [record] = capture.records(sent, SPEC, options=options)
            assert truth.routes[2:].tolist() == record.routes[2:].tolist()
            continue
        with pytest.raises(RouteplaneError):
            capture.records(sent, SPEC, options=options)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bad:
    """A change to a good output of SHORT + 12 tokens, and how the result is refused."""

    name: str
    change: Any
    error: type[RouteplaneError]
    kind: ErrorKind
    where: str = "call "
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


def rows_with(token: int, layer: int, ids: int | list[int]) -> Any:
    """A change that writes ids into one row."""

    def change(choice: Any) -> dict[str, Any]:
        rows_RDK = choice.routed_experts.copy()
        rows_RDK[token, layer] = ids
        return {"routed_experts": rows_RDK}

    return change


BAD = (
    Bad(name="unfinished", change=lambda choice: {"finish_reason": None}, error=UsageError, kind=ErrorKind.ARGUMENT),
    Bad(
        name="no routes",
        change=lambda choice: {"routed_experts": None},
        error=CaptureError,
        kind=ErrorKind.CAPTURE_OFF,
        where="enable_return_routed_experts",
    ),
    Bad(
        name="no routes, no tokens and no abort",
        change=lambda choice: {"routed_experts": None, "token_ids": [], "logprobs": None},
        error=CaptureError,
        kind=ErrorKind.CAPTURE_OFF,
        where="enable_return_routed_experts",
    ),
    Bad(
        name="no routes, aborted after tokens",
        change=lambda choice: {"routed_experts": None, "finish_reason": "abort"},
        error=CaptureError,
        kind=ErrorKind.CAPTURE_OFF,
        where="enable_return_routed_experts",
    ),
    Bad(
        name="a row short",
        change=lambda choice: {"routed_experts": choice.routed_experts[:-1]},
        error=DataError,
        kind=ErrorKind.ROW_COUNT,
        where="expected 21 rows .* got 20",
    ),
    Bad(
        name="a row too many",
        change=lambda choice: {"routed_experts": np.concatenate([choice.routed_experts, choice.routed_experts[-1:]])},
        error=DataError,
        kind=ErrorKind.ROW_COUNT,
        where="expected 21 rows .* got 22",
    ),
    Bad(
        name="a row too many of an abort",
        change=lambda choice: {
            "routed_experts": np.concatenate([choice.routed_experts, choice.routed_experts[-1:]]),
            "finish_reason": "abort",
        },
        error=DataError,
        kind=ErrorKind.ROW_COUNT,
        where="expected 21 rows .* got 22",
    ),
    Bad(
        name="the last DELTA alone",
        change=lambda choice: {"token_ids": choice.token_ids[-1:], "logprobs": choice.logprobs[-1:]},
        error=DataError,
        kind=ErrorKind.ROW_COUNT,
        where="DELTA",
    ),
    Bad(
        name="a filled dense slot",
        change=rows_with(6, 1, 3),
        error=CaptureError,
        kind=ErrorKind.DENSE_SLOT,
        where="token 6, layer 1",
    ),
    Bad(
        name="an empty MoE slot",
        change=rows_with(6, 2, 0),
        error=CaptureError,
        kind=ErrorKind.UNCAPTURED_SLOT,
        where="token 6, layer 2",
    ),
    Bad(
        name="a physical id",
        change=rows_with(6, 2, [1, 2, 3, 16]),
        error=DataError,
        kind=ErrorKind.ID_OUT_OF_RANGE,
        where="token 6, layer 2",
    ),
    Bad(
        name="an expert twice",
        change=rows_with(6, 3, [1, 2, 3, 1]),
        error=DataError,
        kind=ErrorKind.DUPLICATE_ID,
        where="token 6, layer 3",
    ),
    Bad(
        name="log-probabilities of other tokens",
        change=lambda choice: {"token_ids": [(token + 1) % VOCABULARY for token in choice.token_ids]},
        error=DataError,
        kind=ErrorKind.TOKEN_MISMATCH,
        where="generated token 0",
    ),
    Bad(
        name="a log-probability short",
        change=lambda choice: {"logprobs": choice.logprobs[:-1]},
        error=DataError,
        kind=ErrorKind.SHAPE,
    ),
    Bad(
        name="logits for log-probabilities",
        change=lambda choice: {},
        error=UsageError,
        kind=ErrorKind.ARGUMENT,
        where="raw_logits",
        options={"logprobs_mode": "raw_logits"},
    ),
)


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.name)
def test_what_an_output_lacks_is_an_error_of_its_own(good: RequestOutput, bad: Bad) -> None:
    """Routes that are absent, miscounted or foreign are refused with kind and place, never passed on."""
    output = changed(good, **bad.change(good.outputs[0]))

    with pytest.raises(bad.error, match=bad.where) as caught:
        capture.records(output, SPEC, options=OutputOptions(**bad.options))
    assert bad.kind == caught.value.kind


@pytest.mark.parametrize("wrong", [None, {"routed_experts": []}, ModelCall], ids=["None", "a mapping", "a class"])
def test_other_objects_than_outputs_are_refused(wrong: Any) -> None:
    """Only vLLM's own outputs are read."""
    with pytest.raises(UsageError) as caught:
        capture.records(wrong, SPEC)

    assert ErrorKind.ARGUMENT == caught.value.kind
