"""A few tokens that show, at start-up, whether an engine's capture works: rows, not promises.

Releases, kernels and back ports differ in ways that no version number tells (vllm#54730), so an engine is asked. One
prompt is generated from, then all of its tokens are fed as a prompt: a row that a token had when it was generated must
be the row that it has when it is read.

Axes: R rows, L captured layers, K slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from routeplane.capture.vllm.engine_writer import request_args
from routeplane.capture.vllm.model_config import model_config_of
from routeplane.capture.vllm.outputs import calls
from routeplane.errors import CaptureError, ErrorKind, Problem, refused
from routeplane.record.validate import find_problems

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from routeplane.record.spec import RouteSpec

__all__ = ["ProbeReport", "probe", "probe_async"]

# Fewer tokens than the smallest block of a KV cache, so that none of them can come from a prefix cache.
_PROMPT, _GENERATED = 10, 5
# Steps that a slow reader of a stream sleeps through.
_STREAMED = 24


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeReport:
    """What a probe saw. ``agreement``: share of rows (token and layer) of generated tokens that are the same set as
    when the tokens are read as a prompt; 1.0 in float32, less in low precision. ``deltas_keep_rows``: whether DELTA
    outputs that were merged for a slow reader still carry routes; None where it was not tried."""

    rows: int
    agreement: float
    deltas_keep_rows: bool | None = None


def probe(engine: Any, spec: RouteSpec, *, min_agreement: float = 0.5) -> ProbeReport:
    """Generate a few tokens with an ``LLM`` and look at their rows.

    ``min_agreement``: smallest share of equal rows, in each layer, between tokens generated and the same tokens read.
    Chance gives about 0; a draft model's rows, rows of other tokens or of a buffer that is not refreshed are near it.

    Raises CaptureError with all findings: CAPTURE_OFF (no routes at all), DENSE_SLOT and UNCAPTURED_SLOT (the engine's
    layers are not the spec's, or kernels wrote nothing), ID_OUT_OF_RANGE (physical ids), CONSTANT_LAYER, ROW_CONFLICT.
    Raises SpecError or DataError for arrays of another shape.
    """
    _check_share(min_agreement)
    prompt, sampling = _prompt(engine), _sampling(_GENERATED)
    [first] = engine.generate([_salted(prompt, "generated")], sampling, use_tqdm=False)
    tokens = [*prompt, *first.outputs[0].token_ids]
    [second] = engine.generate([_salted(tokens, "read")], _sampling(1), use_tqdm=False)
    return _judge(first, second, spec, min_agreement=min_agreement)


async def probe_async(engine: Any, spec: RouteSpec, *, min_agreement: float = 0.5) -> ProbeReport:
    """``probe`` for an ``AsyncLLM``; tries a slow reader of DELTA outputs as well."""
    _check_share(min_agreement)
    prompt = _prompt(engine)
    first = await _whole(engine, _salted(prompt, "generated"), _sampling(_GENERATED), name="generated")
    tokens = [*prompt, *first.outputs[0].token_ids]
    second = await _whole(engine, _salted(tokens, "read"), _sampling(1), name="read")
    return _judge(first, second, spec, min_agreement=min_agreement, deltas_keep_rows=await _slow_reader(engine, prompt))


async def _whole(engine: Any, prompt: dict[str, Any], sampling: SamplingParams, *, name: str) -> Any:
    outputs = [output async for output in engine.generate(prompt, sampling, f"routeplane-probe-{name}")]
    return outputs[-1]


async def _slow_reader(engine: Any, prompt: Sequence[int]) -> bool:
    """Read a DELTA stream's first output, and the rest when another request of twice its length has ended."""
    sampling = _sampling(_STREAMED)
    sampling.output_kind = RequestOutputKind.DELTA
    stream = engine.generate(_salted(prompt, "streamed"), sampling, "routeplane-probe-streamed")
    await anext(stream)
    await _whole(engine, _salted(prompt, "waited"), _sampling(2 * _STREAMED), name="waited")
    rest = [output async for output in stream]
    return rest[-1].outputs[0].routed_experts is not None


def _check_share(min_agreement: float) -> None:
    if not 0.0 <= min_agreement <= 1.0:
        raise refused("min_agreement in [0, 1]", repr(min_agreement))


def _prompt(engine: Any) -> list[int]:
    """Different tokens from all over the vocabulary."""
    size = model_config_of(engine).get_vocab_size()
    return [int(token) for token in np.linspace(1, size - 2, _PROMPT).astype(np.int64)]


def _salted(token_ids: Sequence[int], salt: str) -> dict[str, Any]:
    return {"prompt_token_ids": list(token_ids), "cache_salt": f"routeplane-probe-{salt}"}


def _sampling(max_tokens: int) -> SamplingParams:
    """Sampled, since greedy decoding may repeat one token; all of it final."""
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=1.0,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        extra_args=request_args(inline=True),
    )


def _judge(
    first: Any, second: Any, spec: RouteSpec, *, min_agreement: float, deltas_keep_rows: bool | None = None
) -> ProbeReport:
    rows = []
    for output in (first, second):
        [call] = calls(output, spec, weights_version=None, call_id="probe")
        rows.append(call.routes if call.routes is not None else spec.missing_rows(0))
    generated_RLK, read_RLK = rows
    problems = [*find_problems(read_RLK, spec), *find_problems(generated_RLK, spec)]
    problems += _constant(read_RLK, spec)
    same_RL = (np.sort(generated_RLK[_PROMPT:], axis=2) == np.sort(read_RLK[_PROMPT : len(generated_RLK)], axis=2)).all(
        axis=2
    )
    problems += [
        Problem(
            kind=ErrorKind.ROW_CONFLICT,
            message=f"expected generated tokens to have the rows that they have when read, got {share:.0%} of them: "
            "another model's rows, another token's, or a buffer that is not refreshed",
            layer=layer,
        )
        for layer, share in zip(spec.layer_ids, same_RL.mean(axis=0), strict=True)
        if share < min_agreement
    ]
    if problems:
        raise CaptureError.from_problems(problems, what="the engine's capture does not work")
    return ProbeReport(
        rows=len(generated_RLK) + len(read_RLK), agreement=float(same_RL.mean()), deltas_keep_rows=deltas_keep_rows
    )


def _constant(rows_RLK: NDArray[np.int16], spec: RouteSpec) -> list[Problem]:
    """Layers in which different tokens all chose the same experts; with fewer experts than two rows, nothing tells."""
    ordered_RLK = np.sort(rows_RLK, axis=2)
    constant_L = (ordered_RLK == ordered_RLK[:1]).all(axis=(0, 2))
    return [
        Problem(
            kind=ErrorKind.CONSTANT_LAYER,
            message=f"expected different tokens to differ, got {ordered_RLK[0, slot].tolist()} for all {len(rows_RLK)}",
            layer=layer,
        )
        for slot, layer in enumerate(spec.layer_ids)
        if constant_L[slot] and spec.experts_per_layer[slot] >= 2 * spec.top_k
    ]
