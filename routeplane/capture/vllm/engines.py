"""vLLM engines of this process whose outputs carry routes: started, asked for a batch, stopped.

The engine reads its own environment. For the same records in every run it must run in the caller's process
(``VLLM_ENABLE_V1_MULTIPROCESSING=0``): then all prompts wait before its first step, and its batches are the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from vllm import LLM, EngineArgs, SamplingParams

from routeplane.capture.choices import check_requests, sample_names
from routeplane.capture.recorder import FollowedRows, extend, require_resumable
from routeplane.capture.vllm.interface import KEY, captures_routes, request_args, require_moe, spec_from_vllm
from routeplane.capture.vllm.outputs import calls as calls_of
from routeplane.capture.vllm.outputs import options_of, records
from routeplane.errors import CaptureError, ErrorKind, UsageError, refused
from routeplane.record.interfaces import RouteTicket
from routeplane.record.record import RouteRecord

if TYPE_CHECKING:
    from routeplane.record.spec import RouteSpec

__all__ = ["SETTINGS", "generate_records", "generate_tickets", "start_engine", "stop_engine"]

#: Settings that also work without a GPU.
SETTINGS: Mapping[str, Any] = {
    "block_size": 32,  # the CPU backend asks for a multiple of 32, and its own default of 128 hardly ever hits
    "enforce_eager": True,  # compiling a graph costs more than a short run gives back
    # vLLM 0.30 and its kin rewind the generator of a request that has a seed after each chunk but the last, which a CPU
    # generator cannot do: the engine dies (v1/worker/gpu_model_runner.py, _bookkeeping_sync).
    "enable_chunked_prefill": False,
}
# Which arguments of the engine decide what its model is.
_MODEL_OPTIONS = ("dtype", "hf_overrides", "revision", "skip_tokenizer_init", "trust_remote_code")


def start_engine(
    model_dir: str, *, dtype: str = "bfloat16", seed: int = 0, max_model_len: int | None = None, **options: Any
) -> LLM:
    """Start a ``vllm.LLM`` whose outputs carry routes: token ids in, token ids out.

    Args:
        model_dir: A folder as ``save_pretrained`` writes it; no tokenizer is needed.
        dtype: The weights' type.
        seed: vLLM seeds the global random state of the process that runs the model.
        max_model_len: Tokens per sequence; None takes the model's.
        options: Further arguments of ``LLM``, which override the settings made here.

    Returns:
        An engine that the caller owns; its weights and KV cache are freed with it.

    Raises:
        SpecError: A dense model, before any weight is loaded.
        UsageError: ``options`` turn capture off.

    Example:
        ``llm = start_engine("path/to/model", max_model_len=512)``
    """
    if not options.setdefault("enable_return_routed_experts", True):
        raise UsageError("expected capture to be on, got enable_return_routed_experts=False", kind=ErrorKind.ARGUMENT)
    settings = {"skip_tokenizer_init": True, **SETTINGS}
    settings |= {"dtype": dtype, "seed": seed, "max_model_len": max_model_len, **options}
    # vLLM finds out that there is nothing to capture only when all weights are loaded.
    about_model = {name: settings[name] for name in _MODEL_OPTIONS if name in settings}
    require_moe(EngineArgs(model=str(model_dir), **about_model).create_model_config())
    return LLM(str(model_dir), **settings)


def generate_records(
    llm: LLM,
    prompts: Sequence[Sequence[int] | RouteRecord],
    *,
    max_tokens: int,
    temperature: float = 1.0,
    seed: int = 0,
    weights_version: int = 0,
    eos_token_id: int | None = None,
    sample_ids: Sequence[str] | None = None,
) -> list[RouteRecord]:
    """Sample from an engine and read each sequence as a record; go on where records end.

    A prompt that is a record is fed again while the gates follow its rows; MISSING ones are live, and so are those
    behind. What comes back is that record, longer, as ``capture.transformers.records`` says. The engine needs
    ``worker_extension_cls="routeplane.capture.vllm.forcing.FollowingWorker"`` and ``enforce_eager=True`` for it. The
    attributes ``forced_rows``, ``live_rows`` and ``forced_at_fill_rows`` count what was computed (one token in one
    layer each; again where the engine preempted) and what stood in the KV cache.

    The prefix cache is emptied first: a prompt that hits it is prefilled in another shape, so in low precision to other
    last bits, and its cached rows would be of unknown weights.

    Args:
        llm: An engine that captures.
        prompts: Token ids, or records.
        max_tokens: Most tokens to generate per prompt, those of a record's last generation included.
        temperature: 0 decodes greedily.
        seed: Request i samples under ``seed + i``.
        weights_version: Version of the engine's weights.
        eos_token_id: The only token that ends a sequence early, whatever the model's generation configuration says.
        sample_ids: Names of the records; None: ``sample-0``, ..., or the record's own.

    Returns:
        One record per prompt, with raw log-probabilities of what was sampled. Raises CaptureError where the engine runs
        without capture, or did not follow rows; UsageError for bad prompts, seeds or names, or a record that cannot be
        gone on with; else as ``records``.

    >>> [record] = generate_records(llm, [[10, 11, 12]], max_tokens=4, weights_version=12)
    >>> record.num_tokens
    7
    """
    names = sample_names(sample_ids, len(prompts))
    if sample_ids is None:
        given = zip(prompts, names, strict=True)
        names = [each.sample_id if isinstance(each, RouteRecord) else name for each, name in given]
    tokens = [each.token_ids.tolist() if isinstance(each, RouteRecord) else each for each in prompts]
    check_requests(tokens, names, max_tokens=max_tokens, temperature=temperature, seed=seed)
    if not captures_routes(llm):
        raise CaptureError(
            "expected an engine with enable_return_routed_experts=True, got one without", kind=ErrorKind.CAPTURE_OFF
        )
    spec = spec_from_vllm(llm)
    batch = _Batch(max_tokens=max_tokens, temperature=temperature, seed=seed, eos_token_id=eos_token_id)
    options = options_of(llm, batch.params(0, None))
    extra = _follow(llm, prompts, spec, batch=batch, mode=options.logprobs_mode, weights_version=weights_version)
    outputs = batch.generate(llm, tokens, [each[0] for each in extra], had=[each[1] for each in extra])
    counts = _follow_counts(llm, [output.request_id for output, each in zip(outputs, extra, strict=True) if each[0]])
    made: list[RouteRecord] = []
    for name, before, output in zip(names, prompts, outputs, strict=True):
        # The engine numbers requests over its lifetime; the sample's own name makes equal runs equal records.
        if isinstance(before, RouteRecord):
            calls = len({span.call for span in before.spans})
            [call] = calls_of(output, spec, weights_version=weights_version, call_id=f"{name}#{calls}", options=options)
            salt = FollowedRows.of(before, weights_version=weights_version).salt
            said = {"cache_salt": salt, "logprobs_mode": options.logprobs_mode.removesuffix("_logprobs")}
            said |= {f"{key}_rows": str(counts[output.request_id][key]) for key in ("forced", "live", "forced_at_fill")}
            made.append(extend(replace(before, sample_id=name, checksum=None), call, attributes=said))
            continue
        made += records(output, spec, sample_id=name, call_id=name, weights_version=weights_version, options=options)
    return made


def _follow(
    llm: LLM,
    prompts: Sequence[Sequence[int] | RouteRecord],
    spec: RouteSpec,
    *,
    batch: _Batch,
    mode: str,
    weights_version: int,
) -> list[tuple[dict[str, Any] | None, int]]:
    """What each request carries, and how many tokens of its last generation it begins with; turns following on."""
    found: list[tuple[dict[str, Any] | None, int]] = []
    stops = [] if batch.eos_token_id is None else [batch.eos_token_id]
    for each in prompts:
        if not isinstance(each, RouteRecord):
            found.append((None, 0))
            continue
        start = require_resumable(
            each, spec, logprobs_mode=mode.removesuffix("_logprobs"), weights_version=weights_version, stops=stops
        )
        had = each.num_tokens - start
        if had >= batch.max_tokens:
            raise refused(f"max_tokens above {had}, which a record has generated already", repr(batch.max_tokens))
        found.append((request_args(follow=each, weights_version=weights_version), had))
    if any(extra for extra, _ in found):
        if not llm.llm_engine.vllm_config.parallel_config.worker_extension_cls:
            raise CaptureError(
                "expected an engine with worker_extension_cls='routeplane.capture.vllm.forcing.FollowingWorker', got "
                "one without, which would not follow rows",
                kind=ErrorKind.CAPTURE_OFF,
            )
        llm.collective_rpc("routeplane_follow")
    return found


def _follow_counts(llm: LLM, request_ids: list[str]) -> Mapping[str, Mapping[str, Any]]:
    """What became of requests with rows. Raises CaptureError where they were not followed."""
    if not request_ids:
        return {}
    counts: Mapping[str, Mapping[str, Any]] = llm.collective_rpc("routeplane_follow_counts", args=(request_ids,))[0]
    for request_id, said in counts.items():
        wrong = said["error"] or (f"{said['mixed']} rows in KV blocks of other routes" if said["mixed"] else "")
        if wrong:
            raise CaptureError(
                f"expected rows that were followed, got {wrong} @ request {request_id}", kind=ErrorKind.CAPTURE_OFF
            )
    return counts


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
) -> list[RouteTicket]:
    """Sample from an engine whose scheduler writes the records (``RouteScheduler``).

    Args:
        llm: An engine with ``scheduler_cls="routeplane.capture.vllm.RouteScheduler"``.
        prompts: Token ids; the other arguments are those of ``generate_records``.

    Returns:
        One ticket per prompt, which says where its record is. Raises CaptureError where an answer has no ticket: the
        engine has no writer, or it refused the sequence.

    Example:
        ``tickets = generate_tickets(llm, [[10, 11, 12]], max_tokens=64)``
    """
    names = sample_names(sample_ids, len(prompts))
    check_requests(prompts, names, max_tokens=max_tokens, temperature=temperature, seed=seed)
    extra = [request_args(sample_id=name, weights_version=weights_version) for name in names]
    batch = _Batch(max_tokens=max_tokens, temperature=temperature, seed=seed, eos_token_id=eos_token_id)
    return [_ticket(name, output) for name, output in zip(names, batch.generate(llm, prompts, extra), strict=True)]


def _ticket(name: str, output: Any) -> RouteTicket:
    answer = output.kv_transfer_params or {}
    if KEY not in answer:
        raise CaptureError(
            f"expected a ticket of scheduler_cls='routeplane.capture.vllm.RouteScheduler', got "
            f"{answer.get(f'{KEY}_error', 'none')} @ sample {name}",
            kind=ErrorKind.CAPTURE_OFF,
        )
    return RouteTicket.from_json(answer[KEY])


def stop_engine(llm: LLM) -> None:
    """Shut an engine down; a writer inside it seals its block and ends first.

    Args:
        llm: The engine. The call ends what all engines of one process share.

    Example:
        ``stop_engine(llm)``
    """
    if KEY in (llm.llm_engine.vllm_config.additional_config or {}):
        llm.collective_rpc("routeplane_close")
    llm.llm_engine.engine_core.shutdown()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Batch:
    """Settings of one batch; a fresh cache, a seed per prompt."""

    max_tokens: int
    temperature: float
    seed: int
    eos_token_id: int | None

    def generate(
        self,
        llm: LLM,
        prompts: Sequence[Sequence[int]],
        extra_args: Sequence[Any],
        had: Sequence[int] | None = None,
    ) -> list[Any]:
        llm.reset_prefix_cache()
        inputs: list[dict[str, Any]] = [{"prompt_token_ids": [int(token) for token in prompt]} for prompt in prompts]
        for one, extra in zip(inputs, extra_args, strict=True):
            if extra and extra[KEY].get("follow"):
                one["cache_salt"] = extra[KEY]["follow"]["salt"]
        before = [0] * len(inputs) if had is None else had
        params = [self.params(at, extra, had=before[at]) for at, extra in enumerate(extra_args)]
        made: list[Any] = llm.generate(inputs, params, use_tqdm=False)
        return made

    def params(self, index: int, extra_args: Any, *, had: int = 0) -> SamplingParams:
        """Of prompt ``index``, whose last ``had`` tokens were generated before."""
        return SamplingParams(
            max_tokens=self.max_tokens - had,
            temperature=self.temperature,
            seed=self.seed + index,
            logprobs=0,
            ignore_eos=True,
            stop_token_ids=[] if self.eos_token_id is None else [self.eos_token_id],
            detokenize=False,
            extra_args=extra_args,
        )
