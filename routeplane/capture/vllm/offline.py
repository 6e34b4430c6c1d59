"""A ``vllm.LLM`` whose outputs carry routes, and records generated with it.

The engine reads its own environment. For the same records every run it must run in the caller's process
(``VLLM_ENABLE_V1_MULTIPROCESSING=0``): then all prompts wait before its first step, and its batches are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm import LLM, EngineArgs, SamplingParams

from routeplane.capture.requests import check_requests, sample_names
from routeplane.capture.vllm.geometry import captures_routes, model_config_of, require_moe
from routeplane.capture.vllm.outputs import record_output
from routeplane.capture.vllm.shipping import KEY, shipping_args
from routeplane.errors import CaptureError, ErrorKind, UsageError
from routeplane.record.interfaces import RouteTicket

if TYPE_CHECKING:
    from routeplane.record.record import RouteRecord
    from routeplane.record.spec import RouteSpec

__all__ = ["generate_records", "generate_tickets", "start_engine", "stop_engine"]

# Which arguments of the engine decide what its model is.
_MODEL_OPTIONS = ("dtype", "hf_overrides", "revision", "skip_tokenizer_init", "trust_remote_code")


def start_engine(
    model_dir: str, *, dtype: str = "bfloat16", seed: int = 0, max_model_len: int | None = None, **options: Any
) -> LLM:
    """A ``vllm.LLM`` whose outputs carry routes, with settings that also work on a CPU; token ids in, token ids out.

    ``model_dir``: a folder as ``save_pretrained`` writes it; no tokenizer is needed. ``max_model_len``: tokens per
    sequence, None takes the model's. ``options``: further arguments of ``LLM``, which override the settings made here.
    The caller owns the engine; its weights and KV cache are freed with it. vLLM seeds the global random state of the
    process that runs the model.

    Raises SpecError for a dense model, before any weight is loaded, and UsageError where ``options`` turn capture off.
    """
    if not options.setdefault("enable_return_routed_experts", True):
        raise UsageError("expected capture to be on, got enable_return_routed_experts=False", kind=ErrorKind.ARGUMENT)
    settings: dict[str, Any] = {
        "block_size": 32,  # the CPU backend asks for a multiple of 32, and its own default of 128 hardly ever hits
        "enforce_eager": True,  # compiling a graph costs more than a short run gives back
        # vLLM 0.30 and its kin rewind the generator of a request that has a seed after each chunk but the last, which a
        # CPU generator cannot do: the engine dies (v1/worker/gpu_model_runner.py, _bookkeeping_sync).
        "enable_chunked_prefill": False,
        "skip_tokenizer_init": True,
        "dtype": dtype,
        "seed": seed,
        "max_model_len": max_model_len,
        **options,
    }
    # vLLM finds out that there is nothing to capture only when all weights are loaded.
    about_model = {name: settings[name] for name in _MODEL_OPTIONS if name in settings}
    require_moe(EngineArgs(model=str(model_dir), **about_model).create_model_config())
    return LLM(str(model_dir), **settings)


def generate_records(
    llm: LLM,
    prompts: Sequence[Sequence[int]],
    *,
    spec: RouteSpec,
    max_tokens: int,
    temperature: float = 1.0,
    seed: int = 0,
    weights_version: int = 0,
    eos_token_id: int | None = None,
    sample_ids: Sequence[str] | None = None,
    progress: bool = False,
) -> list[RouteRecord]:
    """Sample from an engine and bring each sequence back as a record, with raw log-probabilities of what was sampled.

    Request i samples under ``seed + i``; ``temperature`` 0 decodes greedily. Only ``eos_token_id`` ends a sequence
    early, whatever the model's generation configuration says. ``sample_ids``: default ``sample-0``, ... ``progress``:
    vLLM's progress bar. The prefix cache is emptied first: a prompt that hits it is prefilled in another shape, so in
    low precision to other last bits, and its cached rows would be of unknown weights.

    Raises CaptureError where the engine runs without capture, UsageError for bad prompts, seeds or names, else as
    ``record_output``.
    """
    names = sample_names(sample_ids, len(prompts))
    check_requests(prompts, names, max_tokens=max_tokens, temperature=temperature, seed=seed)
    config = model_config_of(llm)
    if not captures_routes(llm):
        raise CaptureError(
            "expected an engine with enable_return_routed_experts=True, got one without", kind=ErrorKind.CAPTURE_OFF
        )
    llm.reset_prefix_cache()
    sampling = [
        _sampling(max_tokens=max_tokens, temperature=temperature, seed=seed + index, eos_token_id=eos_token_id)
        for index in range(len(prompts))
    ]
    outputs = llm.generate(_inputs(prompts), sampling, use_tqdm=progress)
    records: list[RouteRecord] = []
    for name, output in zip(names, outputs, strict=True):
        # The engine numbers requests over its lifetime; the sample's own name makes equal runs equal records.
        records += record_output(
            output,
            spec,
            sample_id=name,
            call_id=name,
            weights_version=weights_version,
            logprobs_mode=config.logprobs_mode,
        )
    return records


def generate_tickets(
    llm: LLM,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    temperature: float = 1.0,
    seed: int = 0,
    weights_version: int = 0,
    eos_token_id: int | None = None,
    sample_ids: Sequence[str] | None = None,
    progress: bool = False,
) -> list[RouteTicket]:
    """``generate_records`` with an engine whose scheduler writes (``RouteScheduler``): records go to its stream as
    sequences end, and what comes back says where they are.

    Raises CaptureError where an answer has no ticket: the engine has no writer, or it refused the sequence.
    """
    names = sample_names(sample_ids, len(prompts))
    check_requests(prompts, names, max_tokens=max_tokens, temperature=temperature, seed=seed)
    llm.reset_prefix_cache()
    sampling = []
    for index, name in enumerate(names):
        params = _sampling(max_tokens=max_tokens, temperature=temperature, seed=seed + index, eos_token_id=eos_token_id)
        params.extra_args = shipping_args(sample_id=name, weights_version=weights_version)
        sampling.append(params)
    outputs = llm.generate(_inputs(prompts), sampling, use_tqdm=progress)
    tickets = []
    for name, output in zip(names, outputs, strict=True):
        said = output.kv_transfer_params or {}
        if KEY not in said:
            raise CaptureError(
                f"expected a ticket of scheduler_cls='routeplane.capture.vllm.RouteScheduler', got "
                f"{said.get(f'{KEY}_error', 'none')} @ sample {name}",
                kind=ErrorKind.CAPTURE_OFF,
            )
        tickets.append(RouteTicket.from_json(said[KEY]))
    return tickets


def stop_engine(llm: LLM) -> None:
    """Shut the engine down, so that a writer inside it ends its stream: an abandoned ``LLM`` publishes nothing.

    Ends what all engines of one process share.
    """
    llm.llm_engine.engine_core.shutdown()


def _inputs(prompts: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    return [{"prompt_token_ids": [int(token) for token in prompt]} for prompt in prompts]


def _sampling(*, max_tokens: int, temperature: float, seed: int, eos_token_id: int | None) -> SamplingParams:
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        logprobs=0,
        ignore_eos=True,
        stop_token_ids=[] if eos_token_id is None else [eos_token_id],
        detokenize=False,
    )
