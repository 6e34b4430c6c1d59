"""The real vLLM engine, in this process, against a Transformers forward of the same weights.

Run with the engine's environment (``make test`` sets it): one process, so that nothing is forked and batches repeat.

Axes: P prompt tokens, G generated tokens.
"""

from __future__ import annotations

import dataclasses
import pickle
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import LlamaConfig, LlamaForCausalLM
from vllm import EngineArgs

from routeplane.capture import vllm as capture
from routeplane.capture.vllm import OutputOptions, generate_records, spec_from_vllm, start_engine
from routeplane.errors import DataError, ErrorKind, SpecError, UsageError
from routeplane.stream import new_stream, open_stream
from tests.capture.vllm_engine import (
    LONG,
    SHORT,
    SPEC,
    Engine,
    assert_equals_reference,
    reference_logprobs,
    states,
)
from tests.meta.test_doctests import run_examples

pytestmark = pytest.mark.vllm


# ----------------------------------------------------------------------------------------------------------------------
# Geometry
# ----------------------------------------------------------------------------------------------------------------------


def test_the_spec_comes_from_the_engines_own_configuration(engine: Engine) -> None:
    """An engine and its configurations give one geometry: the MoE layers alone, by their decoder-layer index."""
    config = engine.llm.llm_engine.vllm_config

    assert SPEC == spec_from_vllm(engine.llm)
    assert SPEC == spec_from_vllm(config)
    assert SPEC == spec_from_vllm(config.model_config)


def test_a_dense_model_is_refused_before_its_weights_are_loaded(tmp_path: Path) -> None:
    """A folder with a configuration and no weights is enough for the error; nothing tries to load any."""
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    config.architectures = [LlamaForCausalLM.__name__]
    config.save_pretrained(tmp_path)

    with pytest.raises(SpecError, match="mixture-of-experts") as caught:
        start_engine(str(tmp_path))
    assert ErrorKind.DENSE_MODEL == caught.value.kind
    with pytest.raises(SpecError, match="LlamaForCausalLM") as caught:
        spec_from_vllm(EngineArgs(model=str(tmp_path), skip_tokenizer_init=True).create_model_config())
    assert ErrorKind.DENSE_MODEL == caught.value.kind


def test_a_spec_of_nothing_is_refused() -> None:
    """Another object than an engine is refused."""
    with pytest.raises(UsageError) as caught:
        spec_from_vllm(object())

    assert ErrorKind.ARGUMENT == caught.value.kind


# ----------------------------------------------------------------------------------------------------------------------
# generate_records
# ----------------------------------------------------------------------------------------------------------------------


def test_generated_rows_and_logprobs_are_the_models(engine: Engine) -> None:
    """Rows of every token and MoE layer equal Transformers' as sets, and so do the log-probabilities."""
    records = generate_records(
        engine.llm,
        [SHORT, LONG, SHORT[:1]],
        max_tokens=12,
        seed=3,
        weights_version=5,
        sample_ids=["a", "b", "c"],
    )

    assert ["a", "b", "c"] == [record.sample_id for record in records]
    for record, prompt in zip(records, [SHORT, LONG, SHORT[:1]], strict=True):
        length = len(prompt)
        assert prompt == record.token_ids[:length].tolist()
        assert_equals_reference(record, engine.model)
        assert [(0, length + 11, "captured", 5), (length + 11, length + 12, "not_fed", None)] == states(record)
        assert [("prompt", length, None), ("generation", length + 12, 5)] == [
            (span.kind, span.stop, span.weights_version) for span in record.spans
        ]
        assert {"logprobs_mode": "raw"} == dict(record.attributes)
        assert record.logprobs is not None
        assert np.isnan(record.logprobs[:length]).all()
        expected = reference_logprobs(engine.model, record.token_ids)[length:]
        np.testing.assert_allclose(record.logprobs[length:], expected, atol=1e-4)


def test_one_seed_gives_one_set_of_records(engine: Engine) -> None:
    """Equal arguments give equal records, checksums included, whatever the engine did before; another seed does not."""
    options: dict[str, Any] = {"max_tokens": 8, "temperature": 1.0}
    engine.llm.reset_prefix_cache()
    first = generate_records(engine.llm, [LONG, SHORT], seed=1, **options)
    other = generate_records(engine.llm, [LONG, SHORT], seed=2, **options)
    again = generate_records(engine.llm, [LONG, SHORT], seed=1, **options)

    assert [record.checksum for record in first] == [record.checksum for record in again]
    assert all(mine.equals(yours) for mine, yours in zip(first, again, strict=True))
    assert first[0].token_ids.tolist() != other[0].token_ids.tolist()
    assert ["sample-0", "sample-1"] == [record.sample_id for record in first]


def test_each_prompt_has_a_seed_of_its_own(engine: Engine) -> None:
    """Equal prompts of one call are sampled differently, and prompt i as the only prompt is under ``seed + i``."""
    both = generate_records(engine.llm, [SHORT, SHORT], max_tokens=8, seed=1)
    [second] = generate_records(engine.llm, [SHORT], max_tokens=8, seed=2)

    assert both[0].token_ids.tolist() != both[1].token_ids.tolist()
    assert second.token_ids.tolist() == both[1].token_ids.tolist()


def test_prompts_that_no_step_takes_at_once_wait(engine: Engine) -> None:
    """With more prompt tokens than a step's budget of 256 each prompt is fed whole, under its seed, to its own rows."""
    records = generate_records(engine.llm, [LONG[at:] for at in range(6)], max_tokens=4, seed=1)

    for record in records:
        assert_equals_reference(record, engine.model)


def test_only_the_given_token_ends_a_sequence(engine: Engine) -> None:
    """Without ``eos_token_id`` every sequence runs to its length; with it the token stands last, never fed."""
    [whole] = generate_records(engine.llm, [SHORT], max_tokens=12, seed=3)
    eos = int(whole.token_ids[len(SHORT) + 4])
    [ended] = generate_records(engine.llm, [SHORT], max_tokens=12, seed=3, eos_token_id=eos)

    stop = whole.token_ids.tolist().index(eos, len(SHORT)) + 1
    assert len(SHORT) + 12 == whole.num_tokens
    assert whole.token_ids[:stop].tolist() == ended.token_ids.tolist()
    assert_equals_reference(ended, engine.model)


BAD_REQUESTS: dict[str, dict[str, Any]] = {
    "no prompts": {"prompts": []},
    "an empty prompt": {"prompts": [SHORT, []]},
    "too few names": {"sample_ids": ["a"]},
    "one name twice": {"sample_ids": ["a", "a"]},
    "vLLM's word for no seed": {"seed": -1},
}


@pytest.mark.parametrize("change", BAD_REQUESTS.values(), ids=BAD_REQUESTS)
def test_bad_requests_are_refused(engine: Engine, change: dict[str, Any]) -> None:
    """Prompts, names and seeds are checked before anything is generated."""
    arguments: dict[str, Any] = {"prompts": [SHORT, SHORT], "max_tokens": 1, **change}

    with pytest.raises(UsageError) as caught:
        generate_records(engine.llm, arguments.pop("prompts"), **arguments)
    assert ErrorKind.ARGUMENT == caught.value.kind


def test_records_keep_their_checksum_on_the_way(engine: Engine, tmp_path: Path) -> None:
    """A record of the engine is the same after pickling and after a stream on disk; so is a call after pickling."""
    [record] = generate_records(engine.llm, [SHORT], max_tokens=4)
    [call] = capture.calls(engine.ask(SHORT)[0], SPEC, weights_version=1)
    with new_stream(tmp_path / "routes.arrows", SPEC) as sink:
        sink.write(record)
    with open_stream(tmp_path / "routes.arrows") as source:
        [read] = list(source)

    assert record.checksum == read.verify().checksum
    assert record.checksum == pickle.loads(pickle.dumps(record)).verify().checksum
    assert call.checksum == pickle.loads(pickle.dumps(call)).verify().checksum


# ----------------------------------------------------------------------------------------------------------------------
# records: what a request can ask for
# ----------------------------------------------------------------------------------------------------------------------


def test_one_token_has_the_rows_of_its_prompt(engine: Engine) -> None:
    """With one generated token every fed token is the prompt's."""
    [record] = capture.records(engine.ask(SHORT, max_tokens=1)[0], SPEC, sample_id="s", options=OutputOptions(cached=0))

    assert len(SHORT) + 1 == record.num_tokens
    assert [(0, len(SHORT), "captured", None), (len(SHORT), len(SHORT) + 1, "not_fed", None)] == states(record)
    assert_equals_reference(record, engine.model)


def test_two_choices_are_two_samples_of_a_group(engine: Engine) -> None:
    """Each choice has its own tokens and rows, its index in its name, and the group in common."""
    output = engine.ask(SHORT, n=2)[0]
    records = capture.records(output, SPEC, sample_id="s", weights_version=4)

    assert [("s/0", "s"), ("s/1", "s")] == [(record.sample_id, record.group) for record in records]
    assert [f"{output.request_id}/{index}" for index in (0, 1)] == [record.spans[0].call for record in records]
    assert records[0].token_ids.tolist() != records[1].token_ids.tolist()
    for record in records:
        assert_equals_reference(record, engine.model)
    named = capture.records(output, SPEC, group="g", call_id="turn")
    assert [(f"{output.request_id}/0", "g", "turn/0"), (f"{output.request_id}/1", "g", "turn/1")] == [
        (record.sample_id, record.group, record.spans[0].call) for record in named
    ]


def test_several_choices_never_claim_weights_for_a_prompt_that_may_be_cached(engine: Engine) -> None:
    """vLLM reports one choice's cached tokens, that of the last to end: any prompt row but the last may be cached."""
    output = engine.ask(LONG, n=2)[0]
    records = capture.records(output, SPEC, weights_version=4)
    told = capture.records(output, SPEC, weights_version=4, options=OutputOptions(cached=0))

    prompt, fed = len(LONG), len(LONG) + 11
    expected = [(0, prompt - 1, "cached", None), (prompt - 1, fed, "captured", 4), (fed, fed + 1, "not_fed", None)]
    assert [expected, expected] == [states(record) for record in records]
    assert [(0, fed, "captured", 4), (fed, fed + 1, "not_fed", None)] == states(told[0])


def test_a_shared_prefix_is_cached_and_its_rows_are_right(engine: Engine) -> None:
    """The second request takes 64 tokens from the prefix cache: same rows, but of weights of an unknown version."""
    engine.llm.reset_prefix_cache()
    engine.ask(LONG)
    output = engine.ask([*LONG[:70], 400, 401], seed=8)[0]
    [record] = capture.records(output, SPEC, weights_version=4)

    fed = record.num_tokens - 1
    assert 64 == output.num_cached_tokens
    assert [(0, 64, "cached", None), (64, fed, "captured", 4), (fed, fed + 1, "not_fed", None)] == states(record)
    assert_equals_reference(record, engine.model)


@pytest.mark.parametrize("first_row", [1, 5, 64, 75])
def test_a_trimmed_prompt_has_the_rest_of_the_rows(engine: Engine, first_row: int) -> None:
    """Rows from ``routed_experts_prompt_start`` on stand at their absolute place; those before are not captured."""
    output = engine.ask(LONG, routed_experts_prompt_start=first_row)[0]
    [record] = capture.records(output, SPEC, weights_version=4, options=OutputOptions(first_row=first_row, cached=0))

    fed = len(LONG) + 11
    expected = [
        (0, first_row, "not_captured", None),
        (first_row, fed, "captured", 4),
        (fed, fed + 1, "not_fed", None),
    ]
    assert expected == states(record)
    assert_equals_reference(record, engine.model, first_row=first_row)


def test_a_whole_prompt_trimmed_from_one_token_leaves_no_row(engine: Engine) -> None:
    """P rows left out and one token sampled: no row came, which is an answer and no failure of the capture."""
    output = engine.ask(SHORT, max_tokens=1, routed_experts_prompt_start=len(SHORT))[0]
    [record] = capture.records(output, SPEC, options=OutputOptions(first_row=len(SHORT)))

    assert [(0, 10, "not_captured", None), (10, 11, "not_fed", None)] == states(record)


@pytest.mark.parametrize("first_row", [0, 4, 6])
def test_a_trim_that_was_not_told_is_refused(engine: Engine, first_row: int) -> None:
    """The row count shows that ``first_row`` is not what the request said."""
    output = engine.ask(SHORT, routed_experts_prompt_start=5)[0]

    with pytest.raises(DataError, match="routed_experts_prompt_start") as caught:
        capture.records(output, SPEC, options=OutputOptions(first_row=first_row))
    assert ErrorKind.ROW_COUNT == caught.value.kind


def test_a_stop_token_ends_the_rows_before_it(engine: Engine) -> None:
    """The token that stopped the sequence was sampled and never fed."""
    output = engine.ask(SHORT, max_tokens=40, stop_token_ids=list(range(100, 220)), ignore_eos=False)[0]
    [record] = capture.records(output, SPEC, weights_version=1)

    assert ("stop", output.outputs[0].stop_reason) == (output.outputs[0].finish_reason, int(record.token_ids[-1]))
    assert_equals_reference(record, engine.model)


@pytest.mark.parametrize("sampling", [{"flat_logprobs": True}, {"logprobs": 3}], ids=["flat", "top 3"])
def test_sampled_logprobs_are_picked_from_any_answer(engine: Engine, sampling: dict[str, Any]) -> None:
    """Whether vLLM lists more tokens or a flat structure, the record holds the sampled token's value."""
    [record] = capture.records(engine.ask(SHORT, **sampling)[0], SPEC)

    assert record.logprobs is not None
    expected = reference_logprobs(engine.model, record.token_ids)[len(SHORT) :]
    np.testing.assert_allclose(record.logprobs[len(SHORT) :], expected, atol=1e-4)


def test_no_logprobs_asked_none_recorded(engine: Engine) -> None:
    """Without log-probabilities there is neither a column nor a mode."""
    [record] = capture.records(
        engine.ask(SHORT, logprobs=None)[0], SPEC, options=OutputOptions(logprobs_mode="processed_logprobs")
    )

    assert (None, {}) == (record.logprobs, dict(record.attributes))


@pytest.mark.parametrize("name", ["engines", "outputs", "probing"])
def test_the_examples_of_a_file_run(engine: Engine, name: str) -> None:
    """What its docstrings show is what happens, with an engine, its spec and an output at hand."""
    module = import_module(f"routeplane.capture.vllm.{name}")
    given = {"llm": engine.llm, "spec": SPEC, "output": engine.ask(SHORT)[0]}

    count, failures = run_examples(module, module.__name__, given)
    assert ([], True) == (failures, count > 0)


def test_a_prefill_in_chunks_leaves_no_seam(engine: Engine) -> None:
    """Prompts that are fed 16 tokens at a time have the rows of prompts that are fed whole."""
    options: dict[str, Any] = {"dtype": "float32", "max_model_len": 128, "max_num_seqs": 8}
    llm = start_engine(str(engine.folder), enable_chunked_prefill=True, max_num_batched_tokens=16, **options)
    # without a seed: see start_engine
    outputs = dataclasses.replace(engine, llm=llm).ask(LONG, SHORT, LONG[5:60], seed=None)

    for output in outputs:
        [record] = capture.records(output, SPEC)
        assert_equals_reference(record, engine.model)
