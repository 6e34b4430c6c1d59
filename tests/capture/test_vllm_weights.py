"""Routing weights that a real vLLM engine records, against a Transformers forward with its gates on the same rows.

Engines have processes of their own, as vLLM has by default: chunks of 64 tokens, a KV cache of 20 blocks, float32. One
serves all shapes of a step; other families start one each. Axes: S token positions, R fed ones, L captured layers, K
slots.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray
from vllm import SamplingParams
from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

from routeplane import RouteRecord
from routeplane.batch import collate
from routeplane.capture.gates import find_gates
from routeplane.capture.vllm import WriterConfig, forcing, request_args, start_engine
from routeplane.capture.weights import find_weights
from routeplane.errors import CaptureError, UsageError
from routeplane.record.aligned import weights_column
from routeplane.record.prefixes import resolve
from routeplane.record.spec import MISSING
from routeplane.record.validate import WeightsMeaning, as_float32
from routeplane.replay import transformers as gates
from routeplane.stream import open_stream
from tests.capture.test_vllm_forced import PLAIN as PLAIN_ENGINE
from tests.capture.test_vllm_forced import UNFIT, WORKER, namespace, random_record
from tests.capture.test_vllm_forced import runner as engine_runner
from tests.capture.vllm_engine import FAMILY_SIZES, LONG, PLAIN_ROPE, QWEN3_MOE, SHORT

pytestmark = pytest.mark.vllm

TOLERANCE = 1e-5
PLAIN = WeightsMeaning(score="softmax", renormalised=True, scaling="none", multiplied="after", dtype="float32")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Running:
    """An engine that records weights, the folder of its blocks, and the same model in Transformers."""

    llm: Any
    folder: Path
    model: Any

    def ask(self, *prompts: list[int], extra: dict[str, Any] | None = None, **sampling: Any) -> list[Any]:
        """Outputs in order, at temperature 1."""
        options = {"max_tokens": 12, "temperature": 1.0, "logprobs": 0, "ignore_eos": True, **sampling}
        params = SamplingParams(detokenize=False, extra_args=extra or request_args(weights_version=3), **options)
        found: list[Any] = self.llm.generate([{"prompt_token_ids": one} for one in prompts], params, use_tqdm=False)
        return found

    def newest(self, count: int) -> list[RouteRecord]:
        """The last records; none was refused or lost."""
        assert [True] == self.llm.collective_rpc("routeplane_flush", kwargs={"timeout_s": 60.0})
        [report] = self.llm.collective_rpc("routeplane_report")
        assert not {key: value for key, value in report.items() if value and ("refused" in key or "_lost" in key)}
        blocks = sorted(self.folder.rglob("*.arrows"))
        found = resolve(record for path in blocks for record in open_stream(path))[-count:]
        assert count == len(found)
        return found


def start(folder: Path, model: Any, **options: Any) -> Running:
    """Start an engine over a model's weights."""
    model.eval().save_pretrained(folder / "model")
    config = {"place": str(folder / "place"), "run": "r", "route_weights": "float32"}
    settings: dict[str, Any] = {
        "dtype": "float32",
        "max_model_len": 256,
        "scheduler_cls": "routeplane.capture.vllm.RouteScheduler",
        "additional_config": {"routeplane": config},
        "enable_chunked_prefill": True,
        "max_num_batched_tokens": 64,
        "num_gpu_blocks_override": 20,
        "max_num_seqs": 8,
        **options,
    }
    return Running(llm=start_engine(str(folder / "model"), **settings), folder=folder / "place", model=model)


@pytest.fixture
def own_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's default, which other engine tests turn off."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """One of three MoE layers of four, whose gates also follow rows that a request carries."""
    torch.manual_seed(0)
    model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**QWEN3_MOE))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
        running = start(tmp_path_factory.mktemp("weights"), model, worker_extension_cls=WORKER)
        running.llm.collective_rpc("routeplane_follow")
        yield running
        running.llm.llm_engine.engine_core.shutdown()


# ---- references -----------------------------------------------------------------------------------------------------


def meaning_of(record: RouteRecord) -> WeightsMeaning:
    """What the record says that its weights are."""
    return WeightsMeaning.from_text(record.attributes["weights_meaning"])


def said_weights(record: RouteRecord) -> NDArray[np.float32]:
    """The record's column ``[S, L, K]``."""
    return as_float32(record.columns["route_weights"].values)


def forced_weights(model: Any, record: RouteRecord) -> NDArray[np.float32]:
    """What Transformers' gates give the experts of the record's rows, as the record's meaning has it, ``[S, L, K]``."""
    sites = [site for site in find_weights(model, find_gates(model)) if site.gate.layer_id in record.spec.layer_ids]
    batch = collate([record], record.spec)
    routes_SLK = torch.from_numpy(record.routes.astype(np.int64)).clamp(min=0)
    seen: dict[int, NDArray[Any]] = {}

    def keep(slot: int, module: Any, args: Any, output: Any) -> None:
        site, meaning = sites[slot], meaning_of(record)
        weights_SK = site.read(output, routes_SLK[:, slot]).float().numpy()
        assert (False, site.meaning.ceiling / meaning.ceiling) == meaning.steps_to(site.meaning)
        seen[slot] = weights_SK * (meaning.ceiling / site.meaning.ceiling)

    with gates.attach(model, record.spec) as replay, replay.replaying(batch), torch.no_grad():
        handles = [site.module.register_forward_hook(partial(keep, slot)) for slot, site in enumerate(sites)]
        model(**batch.model_inputs())
    for handle in handles:
        handle.remove()
    return np.stack([seen[slot] for slot in range(len(sites))], axis=1)


def replayed_logprobs(model: Any, record: RouteRecord) -> NDArray[np.float32]:
    """Of each token but the first, under the record's routes and weights."""
    batch = collate([record], record.spec)
    with gates.attach(model, record.spec, weights="recorded") as replay, replay.replaying(batch), torch.no_grad():
        logits = model(**batch.model_inputs()).logits
    ids = torch.from_numpy(record.token_ids.astype(np.int64))
    logprobs: NDArray[np.float32] = (
        torch.log_softmax(logits[0, :-1].float(), -1).gather(-1, ids[1:, None])[:, 0].numpy()
    )
    return logprobs


def shifted(record: RouteRecord) -> RouteRecord:
    """Rows and weights of the token before; the first token has those of the last fed one."""
    fed = slice(0, record.num_tokens - 1)
    routes_SLK = record.routes.copy()
    routes_SLK[fed] = np.roll(record.routes[fed], 1, axis=0)
    weights = weights_column(np.roll(said_weights(record)[fed], 1, axis=0), tokens=record.num_tokens)
    return dataclasses.replace(record, routes=routes_SLK, columns={"route_weights": weights}, checksum=None)


def apart(record: RouteRecord, model: Any) -> tuple[float, float]:
    """How far weights are from Transformers', and sampled tokens' log-probabilities from those of the replay."""
    fed = record.num_tokens - 1
    weights = np.abs(said_weights(record)[:fed] - forced_weights(model, record)[:fed]).max()
    assert record.logprobs is not None
    logprobs = np.nanmax(np.abs(record.logprobs[1:] - replayed_logprobs(model, record)))
    return float(weights), float(logprobs)


def assert_weighed(record: RouteRecord, model: Any) -> str:
    """Within 1e-5 on every fed row and sampled token, NaN elsewhere; shifted rows are at least 100 times further.

    Returns the distances, for the report (``--junit-xml``).
    """
    assert (record.routes[:-1] != MISSING).all()
    assert np.isnan(said_weights(record)[-1]).all()
    found, control = apart(record, model), apart(shifted(record), model)
    assert max(found) < TOLERANCE
    assert min(control) > 100 * max(*found, 1e-7)
    return "weights {:.1e} (shifted {:.1e}), log-probabilities {:.1e} (shifted {:.1e})".format(
        *(each for pair in zip(found, control, strict=True) for each in pair)
    )


# ---- the shapes of a step -------------------------------------------------------------------------------------------


def test_a_batch_in_chunks_decoded_and_drawn_twice(
    engine: Running, record_testsuite_property: Callable[[str, object], None]
) -> None:
    """150 tokens in chunks of 64, beside others; two choices. Answers carry neither rows nor weights."""
    prompt = [11 + (37 * at) % 480 for at in range(150)]
    outputs = engine.ask(prompt, SHORT, LONG)
    assert [None] * 3 == [output.outputs[0].routed_experts for output in outputs]
    records = engine.newest(3)
    engine.ask(SHORT[::-1], n=2)
    for record in [*records, *engine.newest(2)]:
        assert PLAIN == meaning_of(record)
        record_testsuite_property(f"apart, qwen3, {record.num_tokens} tokens", assert_weighed(record, engine.model))


def test_cached_tokens_have_the_weights_of_their_rows(engine: Running) -> None:
    """No router is asked again: weights stand in the slots of the KV cache, as rows do."""
    prompt = [13 + (41 * at) % 470 for at in range(100)]
    engine.ask(prompt)
    [first] = engine.newest(1)
    [output] = engine.ask(prompt)
    [second] = engine.newest(1)
    assert 96 == output.num_cached_tokens == second.captures[0].stop
    assert "cached" == second.captures[0].state
    assert np.array_equal(said_weights(first)[:96], said_weights(second)[:96])
    assert_weighed(second, engine.model)


def test_preempted_requests_keep_their_weights(engine: Running) -> None:
    """Six that grow to 150 tokens do not fit into 640."""
    engine.ask(*([17 + seed + (29 * at) % 440 for at in range(60)] for seed in range(6)), max_tokens=90)
    for record in engine.newest(6):
        assert 150 == record.num_tokens
        assert max(apart(record, engine.model)) < TOLERANCE


def test_an_aborted_request_has_weights_where_it_has_rows(engine: Running) -> None:
    """The rest is NaN, and declared as aborted or not fed."""
    params = SamplingParams(max_tokens=100, ignore_eos=True, detokenize=False, extra_args=request_args())
    engine.llm.llm_engine.add_request("cut", {"prompt_token_ids": SHORT}, params)
    for _ in range(6):
        engine.llm.llm_engine.step()
    engine.llm.llm_engine.abort_request(["cut"])
    [record] = engine.newest(1)
    present_S = (record.routes != MISSING).all(axis=(1, 2))
    assert len(SHORT) <= present_S.sum() < record.num_tokens
    assert np.array_equal(present_S, ~np.isnan(said_weights(record)).any(axis=(1, 2)))
    ours, theirs = said_weights(record)[present_S], forced_weights(engine.model, record)[present_S]
    assert np.abs(ours - theirs).max() < TOLERANCE


def test_weights_of_rows_that_a_gate_was_given(engine: Running) -> None:
    """Random rows that no router would choose: recorded is what the experts got."""
    given = random_record(7, prompt=70)
    extra = request_args(follow=given, weights_version=3)
    params = SamplingParams(max_tokens=8, ignore_eos=True, detokenize=False, logprobs=0, extra_args=extra)
    prompt = {"prompt_token_ids": given.token_ids.tolist(), "cache_salt": extra["routeplane"]["follow"]["salt"]}
    engine.llm.generate([prompt], params, use_tqdm=False)
    [record] = engine.newest(1)
    assert np.array_equal(given.routes[:69], record.routes[:69])
    assert_weighed(record, engine.model)


# ---- families -------------------------------------------------------------------------------------------------------


def mixtral() -> Any:
    """Softmax over the chosen two."""
    config: dict[str, Any] = {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None, "head_dim": 32}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**FAMILY_SIZES, **config))


#: DeepSeek-V3's router: sigmoid, groups, and a factor on the output; ``biased`` adds the bias that selects.
V3_ROUTER: dict[str, Any] = {
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
}


def biased(model: Any) -> Any:
    """The model with a bias for each expert, behind its dense layer."""
    for layer in model.model.layers[1:]:
        layer.mlp.gate.e_score_correction_bias.copy_(0.1 * torch.randn(16))
    return model


def glm4() -> Any:
    """DeepSeek-V3's router on ordinary attention."""
    config = transformers.Glm4MoeConfig(**{**FAMILY_SIZES, **V3_ROUTER, "head_dim": 32})
    return biased(transformers.Glm4MoeForCausalLM(config))


def deepseek_v3() -> Any:
    """The same router behind latent attention."""
    config: dict[str, Any] = {
        **V3_ROUTER,
        "scoring_func": "sigmoid",  # what real checkpoints say, and vLLM reads; Transformers has no such key
        "topk_method": "noaux_tc",
        "initializer_range": 0.15,  # or too few tokens choose other experts than their neighbours
        "kv_lora_rank": 512,  # with the next, the one size of the CPU's kernel for latent attention
        "qk_rope_head_dim": 64,
        "q_lora_rank": 32,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "num_key_value_heads": 4,
    }
    return biased(transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**{**FAMILY_SIZES, **config})))


def llama4() -> Any:
    """Sigmoid of the one that is chosen, multiplied before the expert; every second layer."""
    config: dict[str, Any] = {
        "num_local_experts": 8,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 2,
        "intermediate_size_mlp": 64,
        "head_dim": 32,
        "attention_chunk_size": None,
        "attn_temperature_tuning": False,
        "no_rope_layers": [1, 1, 1, 1],
    }
    model = transformers.Llama4ForCausalLM(
        transformers.Llama4TextConfig(**{**FAMILY_SIZES, **config, "num_hidden_layers": 4})
    )
    return model


GROUPS = dataclasses.replace(PLAIN, score="sigmoid", scaling="out", factor=2.5)
FAMILIES: dict[str, tuple[Callable[[], Any], WeightsMeaning, dict[str, Any]]] = {
    "mixtral": (mixtral, PLAIN, {}),
    "glm4_moe": (glm4, GROUPS, {}),
    # on a CPU vLLM turns chunks and the cache of prefixes off for latent attention
    "deepseek_v3": (deepseek_v3, GROUPS, {"max_num_batched_tokens": 256, **PLAIN_ROPE}),
    "llama4": (llama4, dataclasses.replace(PLAIN, score="sigmoid", renormalised=False, multiplied="before"), {}),
}


# each starts an engine; the family of the other tests is enough on every change
@pytest.mark.slow
@pytest.mark.usefixtures("own_processes")
@pytest.mark.parametrize("name", FAMILIES)
def test_weights_of_a_family(
    name: str, tmp_path: Path, record_testsuite_property: Callable[[str, object], None]
) -> None:
    """In a batch with chunks, decoded, and behind a prefix from the cache."""
    build, meaning, options = FAMILIES[name]
    torch.manual_seed(1)
    with torch.no_grad():
        model = build()
        model.model.embed_tokens.weight.mul_(20)  # or most tokens choose the same experts, which the engine refuses
    running = start(tmp_path, model, **options)
    try:
        prompt = [11 + (37 * at) % 480 for at in range(100)]
        running.ask(prompt, SHORT)
        [again] = running.ask(prompt)
        assert again.num_cached_tokens == (0 if options else 96)
        for record in running.newest(3):
            assert meaning == meaning_of(record)
            apart_by = assert_weighed(record, running.model)
            record_testsuite_property(f"apart, {name}, {record.num_tokens} tokens", apart_by)
    finally:
        running.llm.llm_engine.engine_core.shutdown()


# ---- what is refused ------------------------------------------------------------------------------------------------


def runner(*, factor: float = 1.0, parallel: bool = False, before: bool = False, **router: Any) -> Any:
    """A layer's runner around the engine's own router."""
    return SimpleNamespace(
        router=CPURouter(**{"top_k": 4, "global_num_experts": 16, **router}),
        moe_config=SimpleNamespace(is_sequence_parallel=parallel),
        routed_experts=SimpleNamespace(apply_router_weight_on_input=before),
        routed_scaling_factor=factor,
    )


def told(module: Any, **factors: float) -> WeightsMeaning:
    """The meaning under a configuration with these factors."""
    return forcing.meaning_of(module, 5, width=8, model=torch.nn.Linear(8, 8), factors=factors)


GROUPED: dict[str, Any] = {"scoring_func": "sigmoid", "use_grouped_topk": True, "num_expert_group": 4, "topk_group": 2}


def test_the_factor_is_found_in_the_weights_or_on_the_output() -> None:
    """One of the two, as the engine was built."""
    inside = told(runner(**GROUPED, routed_scaling_factor=2.5), routed_scaling_factor=2.5)
    outside = told(runner(**GROUPED, factor=2.5), routed_scaling_factor=2.5)
    sigmoid = dataclasses.replace(PLAIN, score="sigmoid", factor=2.5, scaling="in")
    assert (sigmoid, dataclasses.replace(sigmoid, scaling="out")) == (inside, outside)
    assert dataclasses.replace(PLAIN, multiplied="before") == told(runner(before=True))


UNTOLD: dict[str, tuple[Any, dict[str, float], str]] = {
    "a factor that is nowhere": (runner(), {"router_scaling": 2.5}, "router_scaling"),
    "a factor twice": (
        runner(**GROUPED, routed_scaling_factor=2.5, factor=2.5),
        {"routed_scale": 2.5},
        "on the output",
    ),
    "one expert of weight 1": (runner(top_k=1), {}, "sigmoid.*renormalised True"),
    "all experts": (runner(top_k=16), {}, "softmax, renormalised False.*softmax, renormalised True"),
    "sequence parallelism": (runner(parallel=True), {}, "sequence parallelism"),
}


@pytest.mark.parametrize("name", UNTOLD)
def test_weights_that_cannot_be_told_are_refused(name: str) -> None:
    """At start-up, with what was seen and where."""
    module, factors, seen = UNTOLD[name]
    with pytest.raises(CaptureError, match=f"{seen}.*@ layer 5"):
        told(module, **factors)


def test_replicas_of_experts_are_refused() -> None:
    """Their weights belong to physical experts."""
    module = runner()
    module.router.eplb_state = object()
    with pytest.raises(CaptureError, match="EPLB"):
        told(module)


@pytest.mark.parametrize("reason", UNFIT)
def test_an_engine_whose_gates_may_be_passed_by_is_refused(reason: str) -> None:
    """As for following: by its configuration, before anything is hooked."""
    worker = SimpleNamespace(
        vllm_config=namespace({**PLAIN_ENGINE, **UNFIT[reason]}),
        model_runner=SimpleNamespace(**vars(engine_runner()), routed_experts_capturer=None, routed_experts_cpu=None),
    )
    with pytest.raises(CaptureError, match=reason):
        forcing.record_weights(worker, "float32")


def test_the_option_has_three_values() -> None:
    """Nothing, and two types."""
    with pytest.raises(UsageError, match="route_weights of"):
        WriterConfig(place="p", run="r", route_weights="float16")  # type: ignore[arg-type]


# ---- the two types --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", ["float32", "bfloat16"])
def test_bits_behind_the_ids_are_those_of_the_weights(kept: str) -> None:
    """float32 as it is; bfloat16 as torch rounds it, in the lower half of a slot. Rows of other tokens stay."""
    router = CPURouter(top_k=4, global_num_experts=16)
    logits_NE = torch.randn(5, 16)
    expected_NK, _ = router.select_experts(torch.zeros(5, 8), logits_NE)
    bits_TK = torch.zeros(7, 4, dtype=torch.int32)
    forcing._hook_weights(router, bits_TK, kept=kept, dtype="float32")
    weights_NK, _ = router.select_experts(torch.zeros(5, 8), logits_NE)
    assert torch.equal(expected_NK, weights_NK)
    found = bits_TK.view(torch.float32) if kept == "float32" else bits_TK.to(torch.int16).view(torch.bfloat16)
    assert torch.equal(expected_NK if kept == "float32" else expected_NK.to(torch.bfloat16), found[:5])
    assert not found[5:].any()
