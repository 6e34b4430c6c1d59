"""vLLM's gates on rows that requests carry, against a Transformers forward under the same rows.

The evidence is log-probabilities, never the routes that the engine returns: it returns what it was told. Rows are
random, so that no router would choose them. One engine in the default layout of processes: chunks of 64 tokens, a KV
cache of 20 blocks, float32. Axes: S token positions, L captured layers, K slots.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from vllm import SamplingParams
from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

from routeplane import Capture, RouteRecord, Span
from routeplane.batch import collate
from routeplane.capture.vllm import forcing, generate_records, request_args
from routeplane.errors import CaptureError, UsageError
from routeplane.record.spec import MISSING
from routeplane.replay import transformers as gates
from tests.capture.vllm_engine import SPEC, VOCABULARY, Engine, running_engine

pytestmark = pytest.mark.vllm

WORKER = "routeplane.capture.vllm.forcing.FollowingWorker"
CHUNK, BLOCKS, LAYERS = 64, 20, len(SPEC.layer_ids)
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """An engine in a process of its own, whose gates follow."""
    before = os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"  # vLLM's default, which other engine tests turn off
    options = {
        "worker_extension_cls": WORKER,
        "enable_chunked_prefill": True,
        "max_num_batched_tokens": CHUNK,
        "num_gpu_blocks_override": BLOCKS,
        "max_num_seqs": 8,
    }
    with running_engine(tmp_path_factory.mktemp("followed"), **options) as running:
        running.llm.collective_rpc("routeplane_follow")
        yield running
        running.llm.llm_engine.engine_core.shutdown()
    if before is None:
        del os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"]
    else:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = before


# ---- requests and references ----------------------------------------------------------------------------------------


def random_record(seed: int, *, prompt: int, generated: int = 0, missing: tuple[int, ...] = ()) -> RouteRecord:
    """Random tokens with random rows; the last row is not fed, those of ``missing`` were lost."""
    rng = np.random.default_rng(seed)
    size = prompt + generated
    routes_SLK = (
        rng.random((size, LAYERS, SPEC.experts_per_layer[0])).argsort(axis=-1)[..., : SPEC.top_k].astype(np.int16)
    )
    routes_SLK[[*missing, size - 1]] = MISSING
    spans = [Span(start=0, stop=prompt, kind="prompt", call="c", weights_version=None)]
    if generated:
        spans.append(Span(start=prompt, stop=size, kind="generation", call="c", weights_version=3))
    states: list[tuple[Any, int | None]] = [("captured", 3)] * size
    for at in missing:
        states[at] = ("lost", None)
    states[-1] = ("not_fed", None)
    captures = [
        Capture(start=at, stop=at + 1, call="c", weights_version=version, state=state)
        for at, (state, version) in enumerate(states)
    ]
    return RouteRecord(
        sample_id=f"s{seed}",
        token_ids=rng.integers(10, VOCABULARY, size),
        routes=routes_SLK,
        spans=tuple(spans),
        captures=tuple(captures),
        spec=SPEC,
    )


def ask(engine: Engine, *given: RouteRecord | list[int], salt: bool = True, **sampling: Any) -> list[Any]:
    """Outputs in order; a record's tokens are the prompt, and its rows are followed."""
    inputs: list[dict[str, Any]] = []
    params = []
    for each in given:
        follow = each if isinstance(each, RouteRecord) else None
        extra = request_args(follow=follow, weights_version=3)
        one: dict[str, Any] = {"prompt_token_ids": each if follow is None else follow.token_ids.tolist()}
        if follow is not None and salt:
            one["cache_salt"] = extra["routeplane"]["follow"]["salt"]
        inputs.append(one)
        settings = {"max_tokens": 12, "temperature": 1.0, "logprobs": 0, "ignore_eos": True, **sampling}
        params.append(SamplingParams(detokenize=False, extra_args=None if follow is None else extra, **settings))
    found: list[Any] = engine.llm.generate(inputs, params, use_tqdm=False)
    return found


def counts_of(engine: Engine, output: Any) -> dict[str, Any]:
    """What the worker counted for a request."""
    [found] = engine.llm.collective_rpc("routeplane_follow_counts", args=([output.request_id],))
    counts: dict[str, Any] = found[output.request_id]
    return counts


def said_logprobs(output: Any) -> NDArray[Any]:
    """What the engine says of each token of prompt and answer, ``[S]``, NaN where it says nothing."""
    choice, prompt = output.outputs[0], output.prompt_token_ids
    found = np.full(len(prompt) + len(choice.token_ids), np.nan)
    for at, said in enumerate(output.prompt_logprobs or []):
        if said is not None:
            found[at] = said[prompt[at]].logprob
    for at, (token, said) in enumerate(zip(choice.token_ids, choice.logprobs, strict=True)):
        found[len(prompt) + at] = said[token].logprob
    return found


def reference(model: Any, output: Any, routes_RLK: NDArray[Any] | None) -> NDArray[Any]:
    """Of each token, by one Transformers forward under these rows of its first tokens, live behind them."""
    tokens = np.asarray([*output.prompt_token_ids, *output.outputs[0].token_ids])
    ids = torch.tensor(tokens[None])
    with torch.no_grad():
        if routes_RLK is None:
            logits = model(ids).logits
        else:
            record = random_record(0, prompt=len(tokens))
            routes_SLK = SPEC.missing_rows(len(tokens))
            routes_SLK[: len(routes_RLK)] = routes_RLK
            gone = tuple(np.flatnonzero((routes_SLK[:, 0, 0] == MISSING)[:-1]).tolist())
            captures = random_record(0, prompt=len(tokens), missing=gone).captures
            record = replace(record, token_ids=tokens, routes=routes_SLK, captures=captures, checksum=None)
            batch = collate([record], SPEC)
            with gates.attach(model, SPEC) as replay, replay.replaying(batch):
                logits = model(**batch.model_inputs()).logits
    logprobs = torch.log_softmax(logits[0, :-1].float(), dim=-1).gather(-1, ids[0, 1:, None])[:, 0]
    return np.concatenate([[np.nan], logprobs.numpy()])


def distance(one: NDArray[Any], other: NDArray[Any]) -> float:
    """The largest absolute difference where both say something; at least one does."""
    assert np.isfinite(one).any()
    return float(np.nanmax(np.abs(one - other)))


def assert_followed(engine: Engine, output: Any, record: RouteRecord) -> None:
    """Within 1e-5 of the forward under the record's rows, and at least 100 times further from the live one."""
    said = said_logprobs(output)
    under = distance(said, reference(engine.model, output, record.routes))
    live = distance(said, reference(engine.model, output, None))
    assert under < TOLERANCE
    assert live > 100 * max(under, 1e-7)


# ---- the five shapes of a step --------------------------------------------------------------------------------------


def test_a_batch_of_several_in_chunks_and_decoded_behind_the_rows(engine: Engine) -> None:
    """150 tokens in chunks of 64, beside others and a live one; MISSING rows are live; what is counted adds up."""
    records = [
        random_record(1, prompt=150),
        random_record(2, prompt=20),
        random_record(3, prompt=33, missing=(4, 5, 30)),
        random_record(4, prompt=40, generated=20),
    ]
    alone = [12, 13, 14, 15, 16, 17] * 4
    outputs = ask(engine, *records, alone, prompt_logprobs=0)
    for output, record in zip(outputs, records, strict=False):
        assert_followed(engine, output, record)
        counts = counts_of(engine, output)
        present = int((record.routes[:, 0, 0] != MISSING).sum())
        fed = record.num_tokens + 12 - 1
        assert (present * LAYERS, (fed - present) * LAYERS) == (counts["forced"], counts["live"])
        assert (0, 0, "") == (counts["forced_at_fill"], counts["mixed"], counts["error"])
    assert distance(said_logprobs(outputs[-1]), reference(engine.model, outputs[-1], None)) < TOLERANCE


def test_a_live_request_beside_a_followed_one_equals_itself_alone(engine: Engine) -> None:
    """Greedy tokens, and log-probabilities to float32's last digits."""
    live = [11 + (37 * position) % 480 for position in range(30)]
    [alone] = ask(engine, live, temperature=0.0, prompt_logprobs=0)
    _, beside = ask(engine, random_record(5, prompt=50), live, temperature=0.0, prompt_logprobs=0)
    assert alone.outputs[0].token_ids == beside.outputs[0].token_ids
    assert distance(said_logprobs(alone), said_logprobs(beside)) < TOLERANCE


def test_preempted_requests_follow_again(engine: Engine) -> None:
    """Six requests that grow to 150 tokens do not fit into 640: rows are placed again by position."""
    records = [random_record(10 + at, prompt=60) for at in range(6)]
    outputs = ask(engine, *records, max_tokens=90)
    counts = [counts_of(engine, output) for output in outputs]
    for output, record in zip(outputs, records, strict=True):
        assert_followed(engine, output, record)
    fed = (60 + 90 - 1) * LAYERS
    computed = [each["forced"] + each["live"] for each in counts]
    assert max(computed) > fed  # something was computed twice, so that something was preempted
    assert [0] * 6 == [each["mixed"] for each in counts]


def test_a_prefix_hit_under_the_same_rows_is_counted_apart(engine: Engine) -> None:
    """The second time the cached blocks skip compute: forced at fill, and the answer follows the rows as before."""
    record = random_record(20, prompt=100)
    [first] = ask(engine, record)
    [again] = ask(engine, record)
    assert (0, 96) == (first.num_cached_tokens, again.num_cached_tokens)
    counts = counts_of(engine, again)
    assert (96 * LAYERS, 3 * LAYERS, 0) == (counts["forced_at_fill"], counts["forced"], counts["mixed"])
    assert_followed(engine, again, record)


def test_forced_and_live_blocks_never_mix(engine: Engine) -> None:
    """The same tokens without rows, or with others, find nothing in the cache; without a salt it is found out."""
    record = random_record(21, prompt=100)
    other = replace(record, routes=random_record(22, prompt=100).routes, checksum=None)
    [first] = ask(engine, record)
    [live] = ask(engine, record.token_ids.tolist())
    [second] = ask(engine, other)
    assert [0, 0, 0] == [output.num_cached_tokens for output in (first, live, second)]
    assert_followed(engine, second, other)
    assert distance(said_logprobs(live), reference(engine.model, live, None)) < TOLERANCE
    [careless] = ask(engine, record, salt=False)
    assert 96 == careless.num_cached_tokens
    assert 96 * LAYERS == counts_of(engine, careless)["mixed"]


# ---- resuming -------------------------------------------------------------------------------------------------------


def test_an_aborted_rollout_ends_with_the_log_probabilities_of_the_uninterrupted_one(engine: Engine) -> None:
    """Greedy, so that both draw the same tokens; behind rows that no router would choose, so that they matter."""
    start = [random_record(30, prompt=40), random_record(31, prompt=9)]
    whole = generate_records(engine.llm, start, max_tokens=110, temperature=0.0, weights_version=3)
    cut = [replace(record.slice(0, record.num_tokens - 10), logprobs=None, checksum=None) for record in whole]
    resumed = generate_records(engine.llm, cut, max_tokens=110, temperature=0.0, weights_version=3)
    for one, other, before in zip(whole, resumed, cut, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert np.array_equal(np.sort(one.routes), np.sort(other.routes))
        assert one.logprobs is not None
        assert other.logprobs is not None
        apart = np.abs(one.logprobs[-10:] - other.logprobs[-10:]).max()
        assert apart < TOLERANCE
        assert str(before.num_tokens * LAYERS) == other.attributes["forced_rows"]
        assert str(9 * LAYERS) == other.attributes["live_rows"]
        assert one.attributes["cache_salt"] == other.attributes["cache_salt"]  # a descendant inherits it
        assert other.key == before.key


# ---- what is refused ------------------------------------------------------------------------------------------------


def test_rows_that_do_not_fit_are_not_followed_and_said_so(engine: Engine) -> None:
    """Another geometry: the engine lives, the request's counts have the reason."""
    record = random_record(40, prompt=20).select(SPEC.layer_ids[:2])
    [output] = ask(engine, record, prompt_logprobs=0)
    counts = counts_of(engine, output)
    assert "expected rows of layers" in counts["error"]
    assert (0, 0) == (counts["forced"], counts["live"])
    assert distance(said_logprobs(output), reference(engine.model, output, None)) < TOLERANCE


def test_a_record_that_cannot_be_gone_on_with_is_refused(engine: Engine) -> None:
    """Before anything is sent."""
    record = random_record(41, prompt=20, generated=10)
    with pytest.raises(UsageError, match="above 10"):
        generate_records(engine.llm, [record], max_tokens=10, weights_version=3)
    with pytest.raises(UsageError, match="weights up to 2"):
        generate_records(engine.llm, [record], max_tokens=20, weights_version=2)


def test_an_engine_without_the_extension_is_refused(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would answer as if there were no rows."""
    monkeypatch.setattr(engine.llm.llm_engine.vllm_config.parallel_config, "worker_extension_cls", "")
    with pytest.raises(CaptureError, match="worker_extension_cls"):
        generate_records(engine.llm, [random_record(50, prompt=9)], max_tokens=4, weights_version=3)


PLAIN: dict[str, Any] = {
    "parallel_config": {
        "pipeline_parallel_size": 1,
        "data_parallel_size": 1,
        "decode_context_parallel_size": 1,
        "use_ubatching": False,
    },
    "speculative_config": None,
    "kv_transfer_config": None,
    "model_config": {"enforce_eager": True},
}
#: what differs from a plain engine, and what the refusal names
UNFIT: dict[str, dict[str, Any]] = {
    "pipeline parallelism": {"parallel_config": {**PLAIN["parallel_config"], "pipeline_parallel_size": 2}},
    "data parallelism": {"parallel_config": {**PLAIN["parallel_config"], "data_parallel_size": 2}},
    "context parallelism": {"parallel_config": {**PLAIN["parallel_config"], "decode_context_parallel_size": 2}},
    "microbatches": {"parallel_config": {**PLAIN["parallel_config"], "use_ubatching": True}},
    "speculative": {"speculative_config": object()},
    "KV connector": {"kv_transfer_config": object()},
    "graphs": {"model_config": {"enforce_eager": False}},
}


def namespace(document: Any) -> Any:
    """The same with attributes."""
    return SimpleNamespace(**{k: namespace(v) for k, v in document.items()}) if isinstance(document, dict) else document


def runner(groups: int = 1) -> Any:
    """As much of a model runner as the check looks at."""
    cache = SimpleNamespace(kv_cache_groups=[None] * groups)
    return SimpleNamespace(device=None, input_batch=None, kv_cache_config=cache, model=None, requests={})


@pytest.mark.parametrize("reason", UNFIT)
def test_an_engine_whose_tokens_would_not_meet_their_rows_is_refused(reason: str) -> None:
    """By its configuration, before anything is hooked."""
    forcing.require_plain(namespace(PLAIN), runner())
    with pytest.raises(CaptureError, match=reason):
        forcing.require_plain(namespace({**PLAIN, **UNFIT[reason]}), runner())


def test_an_engine_of_another_build_is_refused() -> None:
    """Several kinds of KV cache; another model runner; a kernel that routes by itself; no router at all."""
    with pytest.raises(CaptureError, match="kinds of KV cache"):
        forcing.require_plain(namespace(PLAIN), runner(2))
    with pytest.raises(CaptureError, match="model runner"):
        forcing.require_plain(namespace(PLAIN), SimpleNamespace(device=None))
    with pytest.raises(CaptureError, match="model with routers"):
        dict(forcing.routers_of(torch.nn.Linear(2, 2)))


# ---- weights of ids that a router did not choose --------------------------------------------------------------------

SIGMOID = {"scoring_func": "sigmoid", "use_grouped_topk": True, "num_expert_group": 4, "topk_group": 2}
ROUTERS: dict[str, tuple[dict[str, Any], str, bool, float]] = {
    "qwen3": ({"renormalize": True}, "softmax", True, 1.0),
    "olmoe": ({"renormalize": False}, "softmax", False, 1.0),
    "deepseek_v3": (
        {**SIGMOID, "renormalize": True, "routed_scaling_factor": 2.5, "e_score_correction_bias": torch.arange(16) / 9},
        "sigmoid",
        True,
        2.5,
    ),
    "deepseek_v2": (
        {**SIGMOID, "scoring_func": "softmax", "renormalize": False, "routed_scaling_factor": 16.0},
        "softmax",
        False,
        16.0,
    ),
}


@pytest.mark.parametrize("name", ROUTERS)
def test_weights_follow_the_rule_of_the_router(name: str) -> None:
    """For ids that it did not choose: scores of the logits at these ids, normalised and scaled as the family does."""
    options, score, renormalised, factor = ROUTERS[name]
    router = CPURouter(top_k=4, global_num_experts=16, **options)
    weigh = forcing.weigher_of(router, 0, width=8, model=torch.nn.Linear(8, 8))
    logits_NE = torch.randn(5, 16, generator=torch.Generator().manual_seed(1))
    ids_NK = torch.rand(5, 16, generator=torch.Generator().manual_seed(2)).argsort(dim=-1)[:, :4]
    scores_NE = logits_NE.exp() / logits_NE.exp().sum(-1, keepdim=True)
    if score == "sigmoid":
        scores_NE = 1 / (1 + (-logits_NE).exp())
    expected_NK = torch.stack([scores_NE[row, ids_NK[row]] for row in range(5)])
    if renormalised:
        expected_NK = expected_NK / expected_NK.sum(-1, keepdim=True)
    torch.testing.assert_close(weigh(logits_NE, ids_NK), expected_NK * factor, rtol=1e-5, atol=1e-6)


def test_a_router_of_another_rule_is_refused() -> None:
    """Equal weights whatever the logits, as of a router of its own."""

    def even(hidden_states: Any, gating_output: torch.Tensor, topk: int, renormalize: bool) -> Any:
        ids_NK = gating_output.topk(topk).indices
        return gating_output.gather(-1, ids_NK) ** 2, ids_NK

    router = CPURouter(top_k=4, global_num_experts=16, custom_routing_function=even)
    with pytest.raises(CaptureError, match="another rule"):
        forcing.weigher_of(router, 0, width=8, model=torch.nn.Linear(8, 8))
