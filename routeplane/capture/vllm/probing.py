"""Whether an engine's rows are those of its tokens: the engine's own rows, compared with a second pass over them.

Releases, kernels and back ports differ in ways that no version number tells (vllm#54730), so an engine is asked. A few
tokens are generated, then all of them are fed as a prompt: a row that a token had when it was generated must be the row
that it has when it is read. A third prompt, equal up to one token, shows which row belongs to which token: rows before
that token stay, and its own row changes. No block of the prefix cache is filled or read. ``probe`` asks an engine from
outside; one with ``RouteScheduler`` asks itself before its first request.

Axes: R rows, L captured layers, K slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.request import Request

from routeplane.capture.layers import rows_from_layers
from routeplane.capture.vllm.interface import ids_of, model_config_of, request_args
from routeplane.capture.vllm.outputs import calls
from routeplane.errors import CaptureError, ErrorKind, Problem, RouteplaneError, refused
from routeplane.record.validate import as_float32, find_problems, illegal_weights

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from routeplane.record.spec import RouteSpec
    from routeplane.record.validate import WeightsMeaning

__all__ = ["ProbeReport", "SelfCheck", "probe", "probe_async"]

#: Fewer tokens than the smallest block of a KV cache, so that none of them can come from a prefix cache.
PROMPT, GENERATED = 10, 5
# From this token on the third prompt differs.
_DIFFERS = PROMPT // 2
_NAME = "routeplane-check-"


def check_prompts(vocabulary: int) -> tuple[list[int], list[int]]:
    """Choose the prompt to generate from, and one that is equal up to a token.

    Args:
        vocabulary: Number of token ids.

    Returns:
        Two lists of PROMPT different tokens from all over the vocabulary.
    """
    spread = np.linspace(1, vocabulary - 2, 2 * PROMPT).astype(np.int64).tolist()
    prompt, others = spread[::2], spread[1::2]
    return prompt, [*prompt[:_DIFFERS], *others[_DIFFERS:]]


def agreement(generated_RLK: NDArray[np.int16], read_RLK: NDArray[np.int16]) -> NDArray[np.float64]:
    """Compute the share of generated tokens' rows that are the same set when read, by layer: float64 ``[L]``."""
    share_L: NDArray[np.float64] = _same(generated_RLK[PROMPT:], read_RLK[PROMPT : len(generated_RLK)]).mean(axis=0)
    return share_L


class CheckRows(NamedTuple):
    """Rows ``[R, L, K]`` of the three passes.

    ``generated``: of the prompt and of the tokens generated from it. ``read``: of the same tokens as a prompt.
    ``other``: of the prompt that differs from a token on.
    """

    generated: NDArray[np.int16]
    read: NDArray[np.int16]
    other: NDArray[np.int16]


def require_capture(rows: CheckRows, spec: RouteSpec, *, min_agreement: float) -> None:
    """Judge the rows of the three passes.

    Args:
        rows: What came.
        spec: What the rows must be.
        min_agreement: Smallest share of equal rows in each layer. Chance gives about 0; float32 gives 1.0.

    Raises:
        CaptureError: With all findings: DENSE_SLOT and UNCAPTURED_SLOT (the engine's layers are not the spec's, or
            kernels wrote nothing), ID_OUT_OF_RANGE (physical ids), CONSTANT_LAYER, ROW_CONFLICT.
    """
    generated_RLK, read_RLK, other_RLK = rows
    problems = [*find_problems(read_RLK, spec), *find_problems(generated_RLK, spec), *_constant(read_RLK, spec)]
    problems += [
        Problem(
            kind=ErrorKind.ROW_CONFLICT,
            message=f"expected generated tokens to have the rows that they have when read, got {share:.0%} of them: "
            "another model's rows, another token's, or a buffer that is not refreshed",
            layer=layer,
        )
        for layer, share in zip(spec.layer_ids, agreement(generated_RLK, read_RLK), strict=True)
        if share < min_agreement
    ]
    problems += _shifted(generated_RLK[:PROMPT], other_RLK[:PROMPT], min_agreement=min_agreement)
    if problems:
        raise CaptureError.from_problems(problems, what="the engine's capture does not work")


def _shifted(prompt_RLK: NDArray[np.int16], other_RLK: NDArray[np.int16], *, min_agreement: float) -> list[Problem]:
    """Rows that do not change where the token does."""
    same_RL = _same(prompt_RLK, other_RLK)
    share = min(same_RL[:_DIFFERS].mean(), same_RL[_DIFFERS - 1].mean())
    if share < min_agreement:
        said = f"rows before token {_DIFFERS} not to change with it, got {share:.0%} of them unchanged"
    elif same_RL[_DIFFERS].all() and not same_RL[_DIFFERS:].all():
        said = f"the row of token {_DIFFERS} to change with the token, got the same row in every layer"
    else:
        return []
    message = f"expected {said}: rows that are shifted against their tokens"
    return [Problem(kind=ErrorKind.ROW_CONFLICT, message=message, token=_DIFFERS)]


def _same(left_RLK: NDArray[np.int16], right_RLK: NDArray[np.int16]) -> NDArray[np.bool_]:
    same_RL: NDArray[np.bool_] = (np.sort(left_RLK, axis=2) == np.sort(right_RLK, axis=2)).all(axis=2)
    return same_RL


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


# ---- from outside ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeReport:
    """What a probe saw.

    Args:
        rows: Number of rows that came.
        agreement: Share of rows (token and layer) of generated tokens that are the same set as when the tokens are read
            as a prompt; 1.0 in float32, less in low precision.

    >>> ProbeReport(rows=39, agreement=1.0).rows
    39
    """

    rows: int
    agreement: float


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

    >>> probe(llm, spec).agreement
    1.0
    """
    _check_share(min_agreement)
    prompt, other = check_prompts(model_config_of(engine).get_vocab_size())
    [first] = engine.generate([_salted(prompt, "generated")], _sampling(GENERATED), use_tqdm=False)
    tokens = [*prompt, *first.outputs[0].token_ids]
    [second] = engine.generate([_salted(tokens, "read")], _sampling(1), use_tqdm=False)
    [third] = engine.generate([_salted(other, "other")], _sampling(1), use_tqdm=False)
    return _judge((first, second, third), spec, min_agreement=min_agreement)


async def probe_async(engine: Any, spec: RouteSpec, *, min_agreement: float = 0.5) -> ProbeReport:
    """Generate a few tokens with an ``AsyncLLM`` and judge their rows.

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
    return _judge((first, second, third), spec, min_agreement=min_agreement)


async def _whole(engine: Any, prompt: dict[str, Any], sampling: SamplingParams, *, name: str) -> Any:
    outputs = [output async for output in engine.generate(prompt, sampling, f"routeplane-probe-{name}")]
    return outputs[-1]


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


def _judge(outputs: Sequence[Any], spec: RouteSpec, *, min_agreement: float) -> ProbeReport:
    rows = []
    for output in outputs:
        [call] = calls(output, spec, weights_version=None, call_id="probe")
        rows.append(call.routes if call.routes is not None else spec.missing_rows(0))
    found = CheckRows(*rows)
    require_capture(found, spec, min_agreement=min_agreement)
    return ProbeReport(rows=sum(map(len, rows)), agreement=float(agreement(found.generated, found.read).mean()))


# ---- inside a scheduler ---------------------------------------------------------------------------------------------


class SelfCheck:
    """The three passes as requests of a scheduler's own, whose outputs it takes before any client sees them."""

    def __init__(
        self, spec: RouteSpec, *, vocabulary: int, min_agreement: float = 0.5, weights: WeightsMeaning | None = None
    ) -> None:
        self._spec, self._min_agreement, self._weights = spec, min_agreement, weights
        self._prompt, self._other = check_prompts(vocabulary)
        self._rows: dict[str, list[NDArray[Any]]] = {}
        self._tokens: list[int] = []
        self._open: set[str] = set()
        self._read_begun = False
        self._number = 0

    @property
    def running(self) -> bool:
        """Whether requests are on their way."""
        return bool(self._rows)

    def begin(self) -> list[Request]:
        """Make the first two requests."""
        self._number += 1
        self._rows, self._tokens, self._read_begun = {"generated": [], "other": []}, [], False
        return [self._request("generated", self._prompt, GENERATED), self._request("other", self._other, 1)]

    def takes(self, output: Any) -> bool:
        """Take an output that belongs to a request of this check; whether it did."""
        if not self._open or output.request_id not in self._open:
            return False
        part = output.request_id.rpartition("-")[2]
        if output.routed_experts is not None:
            self._rows[part].append(np.array(output.routed_experts))
        if part == "generated":
            self._tokens += output.new_token_ids
        if output.finish_reason is not None:
            self._open.discard(output.request_id)
        return True

    def next_requests(self) -> list[Request]:
        """Make the request that reads what was generated, once that is there."""
        if self._read_begun or any(name.endswith("generated") for name in self._open) or not self._tokens:
            return []
        self._read_begun = True
        self._rows["read"] = []
        return [self._request("read", [*self._prompt, *self._tokens], 1)]

    @property
    def done(self) -> bool:
        """Whether all three passes have ended and wait for ``require``."""
        return self._read_begun and not self._open

    def require(self) -> None:
        """Judge what came, and begin from an empty state. Raises CaptureError with all findings."""
        rows, self._rows = self._rows, {}
        try:
            generated, read, other = (self._narrow(rows[part], part) for part in ("generated", "read", "other"))
        except RouteplaneError as error:
            if isinstance(error, CaptureError):
                raise
            raise CaptureError(f"the engine's capture does not work: {error}", kind=error.kind) from error
        require_capture(CheckRows(generated, read, other), self._spec, min_agreement=self._min_agreement)

    def _narrow(self, parts: Sequence[NDArray[Any]], name: str) -> NDArray[np.int16]:
        expected = PROMPT if name == "other" else PROMPT + GENERATED - (name == "generated")
        rows_RDK: NDArray[Any] = np.concatenate(parts) if parts else np.empty((0, 0, 0))
        if len(rows_RDK) != expected:
            raise CaptureError(
                f"expected {expected} rows of {PROMPT} tokens and those generated, got {len(rows_RDK)} @ {name}",
                kind=ErrorKind.CAPTURE_OFF if len(rows_RDK) == 0 else ErrorKind.ROW_COUNT,
            )
        if self._weights is not None:
            weights_RLK = rows_RDK["weights"][:, list(self._spec.layer_ids)]
            wrong_RL = illegal_weights(weights_RLK, np.zeros(weights_RLK.shape[:2], dtype=bool), meaning=self._weights)
            if wrong_RL.any():
                row, slot = np.argwhere(wrong_RL)[0]
                raise CaptureError(
                    f"expected weights as {self._weights.to_text()} says, got "
                    f"{as_float32(weights_RLK[row, slot]).tolist()} @ row {row}, layer {self._spec.layer_ids[slot]}",
                    kind=ErrorKind.CAPTURE_OFF,
                )
        return rows_from_layers(ids_of(rows_RDK), self._spec, call=f"{_NAME}{name}")

    def forget(self, request_id: str) -> None:
        """End the check without a verdict where one of its requests was aborted."""
        if request_id in self._open:
            self._open.clear()
            self._rows, self._read_begun = {}, False

    def _request(self, part: str, token_ids: Sequence[int], max_tokens: int) -> Request:
        name = f"{_NAME}{self._number}-{part}"
        self._open.add(name)
        # sampled, since greedy decoding may repeat one token
        sampling = SamplingParams(max_tokens=max_tokens, temperature=1.0, ignore_eos=True, detokenize=False)
        return Request(request_id=name, prompt_token_ids=list(token_ids), sampling_params=sampling, pooling_params=None)
