"""Which engine can do what, as the tests saw it: the table behind ``docs/reference/engines.md``.

``pytest --engine-matrix`` notes what became of each test below, under the version of the engine that ran, in
``tests/data/engine-outcomes.json``; ``python -m tests.engine_matrix`` writes the page from it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from tests.vllm_wheels import SIGNATURES, drift_of

__all__ = ["FAULTS", "FEATURES", "FIGURES", "OUTCOMES", "PAGE", "cell_of", "render"]

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference" / "engines.md"
OUTCOMES = ROOT / "tests" / "data" / "engine-outcomes.json"
#: What ``make engine-faults`` printed, by fault.
FAULTS = ROOT / "tests" / "data" / "engine-faults.json"
FIGURES = ("tickets", "readable", "cut off", "overwritten", "wrong version")

_OUT, _LLM, _IN, _ASYNC, _PROBE, _FAMILY, _WEIGHTS = (
    f"tests/capture/test_vllm{name}.py::"
    for name in ("_outputs", "", "_scheduler", "_async", "_probing", "_models", "_weights")
)

_SERVER = "tests/capture/test_engine_faults.py::"
_CONTRACT = "tests/capture/test_vllm_contract.py::Test"

#: Checks of ``EngineContract``, by what they are about.
_CHECKS: Mapping[str, str] = {
    "layers, slots and ids": "routes_come_in_the_layers_of_the_spec",
    "rows of prompt and generation": "rows_are_those_of_prompt_and_generation",
    "a row belongs to its token": "a_row_belongs_to_its_token",
    "prefix cache": "cached_prefixes_keep_their_rows",
    "several choices": "choices_have_rows_of_their_own",
    "stop strings and tokens": "stops_keep_rows_and_tokens_aligned",
    "aborts": "an_abort_leaves_no_rows_behind",
    "trims": "trims_leave_the_rows_of_what_is_left",
    "requests at once": "requests_at_once_keep_their_rows_apart",
}


def _contract(*suites: str) -> dict[str, tuple[str, ...]]:
    return {what: tuple(f"{_CONTRACT}{suite}::test_{name}" for suite in suites) for what, name in _CHECKS.items()}


#: Part -> feature -> the tests that show it.
FEATURES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "Outputs (`records`)": {
        "every row, at temperature 1": (f"{_LLM}test_generated_rows_and_logprobs_are_the_models",),
        "log-probabilities": (f"{_LLM}test_sampled_logprobs_are_picked_from_any_answer",),
        "several choices": (f"{_LLM}test_two_choices_are_two_samples_of_a_group",),
        "prefix cache: rows there, weights unknown": (f"{_LLM}test_a_shared_prefix_is_cached_and_its_rows_are_right",),
        "trimmed prompts": (f"{_LLM}test_a_trimmed_prompt_has_the_rest_of_the_rows",),
        "stop tokens, one token": (
            f"{_LLM}test_a_stop_token_ends_the_rows_before_it",
            f"{_LLM}test_one_token_has_the_rows_of_its_prompt",
        ),
        "chunked prefill": (f"{_LLM}test_a_prefill_in_chunks_leaves_no_seam",),
        "DELTA outputs read in time": (f"{_ASYNC}test_deltas_that_are_read_in_time_keep_their_rows",),
        "DELTA outputs merged: the loss is marked": (f"{_ASYNC}test_rows_lost_in_merged_deltas_are_marked",),
        "rows that are absent carry the reason": (f"{_OUT}test_rows_cut_short_are_declared",),
        "an engine without the flag is refused": (f"{_OUT}test_an_engine_without_capture_is_refused",),
    },
    "Beside the engine (`RouteWritingEngine`)": {
        "concurrent requests": (f"{_ASYNC}test_each_request_is_a_record_by_the_time_it_returns",),
        "30 turns, each row once": (f"{_ASYNC}test_a_conversation_moves_each_row_once",),
        "aborts": (f"{_ASYNC}test_an_abort_returns_what_there_is",),
        "weights updated in a pause": (f"{_ASYNC}test_an_update_cuts_the_sequence_in_flight_at_its_token",),
        "weights updated without one": (f"{_ASYNC}test_an_update_without_a_pause_leaves_tokens_of_unknown_weights",),
        "backpressure": (f"{_ASYNC}test_a_full_stream_holds_back_the_generation_loop",),
    },
    "Inside the engine (`RouteScheduler`)": {
        "records, tickets, no rows in answers": (f"{_IN}test_a_sequence_is_a_record_and_its_answer_a_ticket",),
        "no route byte on the engine's socket": (
            "tests/capture/test_vllm_socket.py::test_no_route_byte_crosses_with_the_writer_inside",
        ),
        "a batch of many": (f"{_IN}test_concurrent_sequences_keep_their_rows_apart",),
        "several choices": (f"{_IN}test_choices_are_samples_of_a_group",),
        "shipping by request": (f"{_IN}test_requests_that_ask_for_nothing_ship_nothing",),
        "prefix cache": (f"{_IN}test_a_shared_prefix_is_cached_inside_the_engine_too",),
        "trimmed prompts": (f"{_IN}test_a_trimmed_prompt_is_not_captured_before_its_start",),
        "preemption, also with the prefix cache off where the release allows that": (
            f"{_IN}test_preempted_sequences_have_the_rows_of_undisturbed_ones",
        ),
        "chunked prefill": (f"{_IN}test_a_prefill_in_chunks_leaves_no_seam_in_the_engine",),
        "aborts under way and before the first token": (
            f"{_IN}test_an_abort_under_way_keeps_its_rows",
            f"{_IN}test_an_abort_before_the_first_token_has_the_reason",
        ),
        "weights changed in a pause": (f"{_IN}test_weights_that_change_in_a_pause_cut_the_span",),
        "weights changed without one": (f"{_IN}test_weights_that_are_loaded_without_a_pause_are_not_the_old_version",),
        "shifted or stale rows refuse the start": (f"{_IN}test_a_vllm_that_drifted_is_refused_at_start",),
        "logits in the place of log-probabilities refuse the start": (
            f"{_IN}test_a_writer_that_cannot_write_stops_the_start",
        ),
        "routing weights: a batch, chunks, decoding, several choices": (
            f"{_WEIGHTS}test_a_batch_in_chunks_decoded_and_drawn_twice",
        ),
        "routing weights: prefix cache": (f"{_WEIGHTS}test_cached_tokens_have_the_weights_of_their_rows",),
        "routing weights: preemption, aborts": (
            f"{_WEIGHTS}test_preempted_requests_keep_their_weights",
            f"{_WEIGHTS}test_an_aborted_request_has_weights_where_it_has_rows",
        ),
        "routing weights: under rows that gates follow": (f"{_WEIGHTS}test_weights_of_rows_that_a_gate_was_given",),
        "routing weights that cannot be told refuse the start": (
            f"{_WEIGHTS}test_weights_that_cannot_be_told_are_refused",
            f"{_WEIGHTS}test_an_engine_whose_gates_may_be_passed_by_is_refused",
        ),
    },
    "A server, in the processes that it has": {
        "a ticket in every HTTP form; SIGTERM under load": (
            f"{_SERVER}test_every_form_has_tickets_that_outlive_the_server",
        ),
        "restarts, SIGTERM and SIGKILL: no ticket without its record": (
            f"{_SERVER}test_no_restart_overwrites_and_no_ticket_is_empty",
        ),
        "the consumer gone and back": (f"{_SERVER}test_a_consumer_that_comes_back_has_all_records",),
        "weights reloaded between and during requests, with and without a pause": (
            f"{_SERVER}test_rows_of_new_weights_never_have_the_old_version",
        ),
        "a full disk, then space": (f"{_SERVER}test_a_full_disk_holds_answers_until_there_is_space",),
        "two tensor-parallel ranks": (f"{_SERVER}test_tensor_parallel_ranks_are_one_engine",),
        "two data-parallel ranks": (f"{_SERVER}test_data_parallel_ranks_are_two_engines",),
    },
    "Contract (`EngineContract`) over its OpenAI server, alone and against Transformers": {
        **_contract("Server", "ServerAgainstTransformers"),
        "what it does not offer is routes in a stream and loading weights": (
            f"{_CONTRACT}Server::test_what_it_does_not_offer",
        ),
    },
    "Contract (`EngineContract`) over the engine of one process, against Transformers": {
        **{what: tests for what, tests in _contract("EngineOfThisProcess").items() if what != "aborts"},
        "what it does not offer is a stream, aborts and loading weights": (
            f"{_CONTRACT}EngineOfThisProcess::test_what_it_does_not_offer",
        ),
    },
    "Start-up": {
        "`spec_from_vllm`": (f"{_LLM}test_the_spec_comes_from_the_engines_own_configuration",),
        "`probe`": (f"{_PROBE}test_an_honest_capture_passes", f"{_PROBE}test_a_capture_that_lies_is_found"),
    },
    "Families": {
        "Mixtral, OLMoE, GPT-OSS, DeepSeek-V2": (f"{_FAMILY}test_rows_of_a_family_are_those_of_transformers",),
        "routing weights: Mixtral, Llama 4, GLM-4 (the router of DeepSeek-V3)": (
            f"{_WEIGHTS}test_weights_of_a_family",
        ),
    },
}

_HEAD = """# Engine matrix

What the tests saw, by version of vLLM: `python -m tests.engine_matrix` writes this page from the outcomes that
`pytest --engine-matrix` left in `tests/data/engine-outcomes.json`.
All of it ran on a CPU with tiny seeded models, rows compared with a Transformers forward of the same weights.

Data-parallel ranks ran with two collectives for experts that vLLM's CPU build lacks
(`tests/capture/cpu_collectives.py`).

**yes**: every test of the row passed. **no**: one failed. **-**: not run on this version, or what this version refuses.
"""

_TAIL = """
## Faults

The last `make engine-faults`, on 0.30.0: times that a fault fell on a server under load, tickets that clients had by
then, records that these tickets led to, choices that were cut off without a ticket, files of earlier servers that were
overwritten, and rows of other weights than their version names.

| fault | times | {figures} |
|---|---{rules}|
{faults}

## Names that the writer uses

Read from the wheels, without running them (`python -m tests.vllm_wheels`).
`pyproject.toml` allows the releases that have all.

| release | functions, parameters and attributes |
|---|---|
{wheels}

Recorded HTTP exchanges of 0.30 and 0.32 are decoded to their reference rows besides, without an engine
(`tests/capture/test_layers.py`, `tests/capture/test_openai.py`).
SGLang's answers are built from its source's format; no SGLang server ran (`tests/capture/test_sglang.py`).
"""


def cell_of(tests: tuple[str, ...], ran: Mapping[str, str]) -> str:
    """What one version says of one feature."""
    found = [ran.get(test) for test in tests]
    if None in found:
        return "-"
    return "yes" if set(found) == {"passed"} else "no"


def render(outcomes: Mapping[str, Mapping[str, str]], faults: Mapping[str, Mapping[str, int | None]]) -> str:
    """The page; ``outcomes``: version -> test -> outcome; ``faults``: fault -> figure -> sum."""
    versions = sorted(outcomes)
    lines = [_HEAD]
    for part, features in FEATURES.items():
        lines += [f"## {part}", "", f"| feature | {' | '.join(versions)} |", "|---" * (len(versions) + 1) + "|"]
        for feature, tests in features.items():
            cells = " | ".join(cell_of(tests, outcomes[version]) for version in versions)
            lines.append(f"| {feature} | {cells} |")
        lines.append("")
    read: Mapping[str, Mapping[str, list[str] | None]] = json.loads(SIGNATURES.read_text(encoding="utf-8"))
    wheels = "\n".join(
        f"| {version} | {'; '.join(drift_of(names)) or 'all there'} |" for version, names in read.items()
    )
    rows = "\n".join(
        f"| {fault} | {' | '.join('-' if sums[name] is None else str(sums[name]) for name in ('times', *FIGURES))} |"
        for fault, sums in faults.items()
    )
    rules = "|---" * len(FIGURES)
    return "\n".join(lines) + _TAIL.format(wheels=wheels, faults=rows, figures=" | ".join(FIGURES), rules=rules)


if __name__ == "__main__":
    noted = [json.loads(path.read_text(encoding="utf-8")) for path in (OUTCOMES, FAULTS)]
    PAGE.write_text(render(*noted), encoding="utf-8")
