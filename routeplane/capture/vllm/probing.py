"""A few tokens that show, at start-up, whether an engine's capture works: rows, not promises.

The three passes of ``self_check``, asked of an engine from outside. An engine with ``RouteScheduler`` makes them itself
before its first request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from routeplane.capture.vllm.model_config import model_config_of
from routeplane.capture.vllm.outputs import calls
from routeplane.capture.vllm.self_check import GENERATED, CheckRows, agreement, check_prompts, require_capture
from routeplane.capture.vllm.writer_options import request_args
from routeplane.errors import refused

if TYPE_CHECKING:
    from routeplane.record.spec import RouteSpec

__all__ = ["ProbeReport", "probe", "probe_async"]

# Steps that a slow reader of a stream sleeps through.
_STREAMED = 24


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeReport:
    """What a probe saw.

    Args:
        rows: Number of rows that came.
        agreement: Share of rows (token and layer) of generated tokens that are the same set as when the tokens are read
            as a prompt; 1.0 in float32, less in low precision.
        deltas_keep_rows: Whether DELTA outputs that were merged for a slow reader still carry routes; None where it was
            not tried.

    Example:
        ``probe(llm, spec).agreement``
    """

    rows: int
    agreement: float
    deltas_keep_rows: bool | None = None


def probe(engine: Any, spec: RouteSpec, *, min_agreement: float = 0.5) -> ProbeReport:
    """Generate a few tokens with an ``LLM`` and judge their rows.

    Args:
        engine: The engine.
        spec: What its routes must mean.
        min_agreement: Smallest share of equal rows, in each layer, between tokens generated and the same tokens read.
            Chance gives about 0; a draft model's rows, rows of other tokens or of a buffer that is not refreshed are
            near it.

    Returns:
        What was seen. Raises CaptureError with all findings (see ``require_capture``; CAPTURE_OFF for no routes at
        all), SpecError or DataError for arrays of another shape.

    Example:
        ``report = probe(llm, spec_from_vllm(llm))``
    """
    _check_share(min_agreement)
    prompt, other = check_prompts(model_config_of(engine).get_vocab_size())
    [first] = engine.generate([_salted(prompt, "generated")], _sampling(GENERATED), use_tqdm=False)
    tokens = [*prompt, *first.outputs[0].token_ids]
    [second] = engine.generate([_salted(tokens, "read")], _sampling(1), use_tqdm=False)
    [third] = engine.generate([_salted(other, "other")], _sampling(1), use_tqdm=False)
    return _judge((first, second, third), spec, min_agreement=min_agreement)


async def probe_async(engine: Any, spec: RouteSpec, *, min_agreement: float = 0.5) -> ProbeReport:
    """Generate a few tokens with an ``AsyncLLM`` and judge their rows; tries a slow reader of DELTA outputs as well.

    Args:
        engine: The engine.
        spec: As in ``probe``.
        min_agreement: As in ``probe``.

    Returns:
        What was seen. Raises as ``probe``.

    Example:
        ``report = await probe_async(engine, spec)``
    """
    _check_share(min_agreement)
    prompt, other = check_prompts(model_config_of(engine).get_vocab_size())
    first = await _whole(engine, _salted(prompt, "generated"), _sampling(GENERATED), name="generated")
    tokens = [*prompt, *first.outputs[0].token_ids]
    second = await _whole(engine, _salted(tokens, "read"), _sampling(1), name="read")
    third = await _whole(engine, _salted(other, "other"), _sampling(1), name="other")
    kept = await _slow_reader(engine, prompt)
    return _judge((first, second, third), spec, min_agreement=min_agreement, deltas_keep_rows=kept)


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
    outputs: Sequence[Any], spec: RouteSpec, *, min_agreement: float, deltas_keep_rows: bool | None = None
) -> ProbeReport:
    rows = []
    for output in outputs:
        [call] = calls(output, spec, weights_version=None, call_id="probe")
        rows.append(call.routes if call.routes is not None else spec.missing_rows(0))
    found = CheckRows(*rows)
    require_capture(found, spec, min_agreement=min_agreement)
    return ProbeReport(
        rows=sum(map(len, rows)),
        agreement=float(agreement(found.generated, found.read).mean()),
        deltas_keep_rows=deltas_keep_rows,
    )
