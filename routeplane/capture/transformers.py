"""The embedded engine: a Transformers model that generates here, with its own gates read as it goes.

Rows are read where each gate selects (``gates``), by hooks on the gate instances, and placed by absolute position: the
prefill's rows are those of the left-padded prompts, every later forward brings one row per sequence. Nothing of the
model is changed, and the hooks are gone when the call returns. No server is needed, so this is also the reference that
other engines are compared with.

A request may be a record: its tokens are fed again, the gates follow its rows, and sampling goes on behind them.

Axes: B sequences, P prompt tokens (padded), G generated tokens, N token rows of one forward, L captured layers, K
slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import nn
from transformers import GenerationConfig, LogitsProcessor

from routeplane.capture.choices import check_requests, sample_names
from routeplane.capture.gates import find_gates
from routeplane.capture.recorder import extend, require_resumable
from routeplane.capture.selection import Gate, SelectionMode
from routeplane.capture.weights import WeightSite, find_weights, meaning_of
from routeplane.errors import CaptureError, ErrorKind, check_type, refused
from routeplane.record import spans
from routeplane.record.aligned import AlignedColumn, mask_columns, weights_column
from routeplane.record.assembly import assemble
from routeplane.record.calls import ModelCall
from routeplane.record.record import RouteRecord
from routeplane.record.spec import MISSING, RouteSpec
from routeplane.record.validate import missing_rows

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["GateTape", "Sampling", "calls", "records", "taping"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How tokens are drawn and when a sequence ends, whatever the model's generation configuration says.

    Attributes:
        route_weights: what records keep of the weights that the chosen experts got: None nothing; ``float32`` the
            router's own values (those of a router that computes in bfloat16 as bfloat16 bits, which loses nothing);
            ``bfloat16`` values rounded to bfloat16, half as large. Their meaning is observed, and kept beside them.
        temperature: 0 decodes greedily.
        top_p: Mass of the most likely tokens that are kept; 1 keeps all.
        top_k: How many of the most likely tokens are kept; 0 keeps all.
        min_p: Smallest probability that is kept, as a share of the largest; 0 keeps all.
        logprobs_mode: ``processed`` log-probabilities are those that tokens were drawn with, and records have sampling
            masks; ``raw`` ones are of the model's logits, so nothing may be cut then.
        eos_token_id: The only tokens that end a sequence early.
        pad_token_id: Fills prompts of a batch from the left; its rows are dropped.

    Raises UsageError for values out of range or unknown, cuts with raw log-probabilities, and processed ones without a
    temperature.

    >>> Sampling(temperature=0.8, top_p=0.9, logprobs_mode="processed").stops
    []
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    logprobs_mode: Literal["raw", "processed"] = "raw"
    eos_token_id: int | Sequence[int] | None = None
    pad_token_id: int = 0
    route_weights: Literal["float32", "bfloat16"] | None = None

    def __post_init__(self) -> None:
        if self.route_weights not in (None, "float32", "bfloat16"):
            raise refused("route_weights of (None, 'float32', 'bfloat16')", repr(self.route_weights))
        if self.logprobs_mode not in ("raw", "processed"):
            raise refused("logprobs_mode of ('raw', 'processed')", repr(self.logprobs_mode))
        if not (0 < self.top_p <= 1 and self.top_k >= 0 and 0 <= self.min_p < 1):
            raise refused(
                "top_p in (0, 1], top_k of at least 0 and min_p in [0, 1)", f"{self.top_p}, {self.top_k}, {self.min_p}"
            )
        cuts = (self.top_p, self.top_k, self.min_p) != (1, 0, 0)
        if cuts and self.logprobs_mode == "raw":
            raise refused("logprobs_mode='processed' where sampling cuts tokens", "'raw'")
        if self.logprobs_mode == "processed" and self.temperature == 0:
            raise refused("a temperature above 0 for processed log-probabilities", "0")

    @property
    def stops(self) -> list[int]:
        """The end tokens as a list."""
        ends = self.eos_token_id
        return [] if ends is None else [int(end) for end in np.atleast_1d(np.asarray(ends))]

    def of_span(self) -> spans.Sampling:
        """The parameters as a generated span holds them; there are no penalties, biases or other processors."""
        return spans.Sampling(
            temperature=float(self.temperature),
            top_p=float(self.top_p),
            top_k=int(self.top_k),
            min_p=float(self.min_p),
            presence_penalty=0.0,
            frequency_penalty=0.0,
            repetition_penalty=1.0,
            processors=(),
            logprobs_mode=self.logprobs_mode,
        )


class GateTape:
    """What a model's gates chose, forward by forward. Filled by ``taping``.

    >>> from routeplane import RouteSpec
    >>> tape = GateTape(RouteSpec(num_experts=8, top_k=2, layer_ids=(0,)))
    >>> tape.begin()
    >>> tape.add(0, torch.tensor([[3, 1]]))
    >>> tape.forwards()[0].tolist()
    [[[3, 1]]]
    """

    def __init__(self, spec: RouteSpec, *, follow: Sequence[NDArray[Any]] = ()) -> None:
        self._spec = spec
        self._follow = follow
        self._forwards: list[dict[int, torch.Tensor]] = []
        self._weights: list[dict[int, torch.Tensor]] = []
        #: what the weights are (``attributes["weights_meaning"]``); None where they are not kept
        self.weights_meaning: str | None = None

    def begin(self) -> None:
        """A forward of the whole model starts."""
        self._forwards.append({})
        self._weights.append({})

    def next_of(self, layer_ids: Sequence[int]) -> int:
        """Which of its layers a gate's next firing is. Raises CaptureError as ``add``, and for one that comes late."""
        step = self._forwards[-1] if self._forwards else {}
        layer_id = next((layer for layer in layer_ids if layer not in step), layer_ids[-1])
        if layer_id in step or (len(layer_ids) > 1 and layer_id < max(step, default=-1)):
            raise _other_firing(layer_id)
        return layer_id

    def weigh(self, layer_id: int, weights_NK: torch.Tensor) -> None:
        """Keep the weights of one gate's last choice, in the order of its ids and in their own type."""
        self._weights[-1][layer_id] = weights_NK.detach().to("cpu", copy=True)

    def weights(self, stored: Literal["float32", "bfloat16"]) -> list[NDArray[Any]]:
        """One array ``[N, L, K]`` per forward: float32, or uint16 bits of bfloat16 where the gates' type is that or
        ``stored`` asks for it, which rounds."""
        steps = [torch.stack([step[layer] for layer in self._spec.layer_ids], dim=1) for step in self._weights]
        if stored == "bfloat16" or any(step.dtype == torch.bfloat16 for step in steps):
            return [step.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16) for step in steps]
        return [step.float().numpy() for step in steps]

    def add(self, layer_id: int, indices_NK: torch.Tensor) -> None:
        """Keep one gate's choice of one forward; copied to the host as int32, so the model may reuse its own.

        Raises CaptureError for a layer that the forward has already, and outside of a forward: its rows would have no
        place.
        """
        if not self._forwards or layer_id in self._forwards[-1]:
            raise _other_firing(layer_id)
        self._forwards[-1][layer_id] = indices_NK.detach().to("cpu", torch.int32, copy=True)

    def choose(self, layer_id: int, live_NK: torch.Tensor) -> torch.Tensor | None:
        """Keep what a gate uses: the ids to follow, where this forward has some, else its own ``live_NK``.

        Returns int64 ``[N, K]``, or None where the gate is to go on with its own. Raises CaptureError for another
        number of rows than there are to follow (ROW_COUNT), else as ``add``.
        """
        number = len(self._forwards) - 1
        if not 0 <= number < len(self._follow):
            self.add(layer_id, live_NK)
            return None
        rows_NK = torch.from_numpy(np.ascontiguousarray(self._follow[number][:, self._spec.slot(layer_id)], np.int64))
        if rows_NK.shape != live_NK.shape:
            raise CaptureError(
                f"expected {len(rows_NK)} token rows in forward {number}, as there are to follow, got {len(live_NK)} "
                f"@ layer {layer_id}",
                kind=ErrorKind.ROW_COUNT,
            )
        rows_NK = rows_NK.to(live_NK.device)
        chosen_NK = torch.where(rows_NK != MISSING, rows_NK, live_NK.to(torch.int64))
        self.add(layer_id, chosen_NK)
        return chosen_NK

    def forwards(self) -> list[NDArray[np.int32]]:
        """One array ``[N, L, K]`` per forward, layers in spec order. Raises CaptureError where a gate stayed silent."""
        for number, step in enumerate(self._forwards):
            silent = [layer for layer in self._spec.layer_ids if layer not in step]
            if silent:
                raise CaptureError(
                    f"expected every gate to fire in every forward, got none from layers {silent} in forward {number}",
                    kind=ErrorKind.UNCAPTURED_SLOT,
                )
        return [torch.stack([step[layer] for layer in self._spec.layer_ids], dim=1).numpy() for step in self._forwards]


def _other_firing(layer_id: int) -> CaptureError:
    return CaptureError(
        "expected a forward of the model whose gates fire as when it was probed, as often and in that order, got "
        f"another firing @ layer {layer_id}",
        kind=ErrorKind.GATE_FIRED,
    )


@contextmanager
def taping(
    model: nn.Module,
    spec: RouteSpec,
    *,
    leave_live: Sequence[str] = (),
    follow: Sequence[NDArray[Any]] = (),
    weights: bool = False,
) -> Iterator[GateTape]:
    """Record every gate's choice in the forwards of a ``with`` body, which must be forwards of ``model`` itself.

    Gates are found by what they do (``routeplane.capture.gates``): the model is probed first, and left as it was.
    ``leave_live``: routers that are not recorded, as there. ``follow``: rows ``[N, L, K]`` of the first forwards, which
    the gates use instead of their own; a MISSING row, and every later forward, is live. ``weights``: whether to keep
    the weights of the chosen experts too; the tape says what they are (``weights_meaning``).

    Raises ReplayError (NO_SEAM) for a router whose selection cannot be read, or whose weights cannot be told, SpecError
    where the model's gates are not the spec's (layers, E, K).
    """
    check_type(model, nn.Module, expected="a model (torch.nn.Module)")
    gates = find_gates(model, leave_live=leave_live)
    spec.require_same_geometry(_spec_of(gates, spec), where="the model's gates")
    tape = GateTape(spec, follow=follow)
    sites: Sequence[WeightSite | None] = find_weights(model, gates) if weights else [None] * len(gates)
    known = [site for site in sites if site is not None]
    tape.weights_meaning = meaning_of(known).to_text() if known else None
    handles = [_inner_model(model, gates).register_forward_pre_hook(lambda module, args: tape.begin())]
    firings: dict[nn.Module, list[tuple[Gate, WeightSite | None]]] = {}
    for (gate, module), site in zip(gates, sites, strict=True):
        firings.setdefault(module, []).append((gate, site))
    for module, found in firings.items():
        handles += _tape_gate(found, module, tape=tape)
    try:
        yield tape
    finally:
        for handle in handles:
            handle.remove()


def _inner_model(model: nn.Module, gates: Sequence[tuple[Gate, nn.Module]]) -> nn.Module:
    """The innermost module whose one forward passes by every gate: a wrapper's ``generate`` may run an inner one."""
    wanted = {module for _, module in gates}
    while True:
        inner = next((each for each in model.children() if wanted <= set(each.modules())), None)
        if inner is None or isinstance(inner, nn.ModuleList | nn.ModuleDict) or inner in wanted:
            return model
        model = inner


def _spec_of(gates: Sequence[tuple[Gate, nn.Module]], spec: RouteSpec) -> RouteSpec:
    found = sorted((gate.layer_id, gate.num_experts, gate.top_k) for gate, _ in gates)
    layer_ids, widths, top_ks = zip(*found, strict=True)
    num_experts = widths[0] if len(set(widths)) == 1 else widths
    return RouteSpec(num_experts=num_experts, top_k=max(top_ks), layer_ids=layer_ids, model=spec.model)


def _tape_gate(firings: Sequence[tuple[Gate, WeightSite | None]], module: nn.Module, *, tape: GateTape) -> list[Any]:
    """Two hooks that watch the gate's selection while its forward runs; its answer stays its own, or the tape's.

    ``firings``: one for each time that the gate fires in a forward, in order.
    """
    by_layer = {gate.layer_id: site for gate, site in firings}
    open_modes: list[SelectionMode] = []
    used: list[tuple[int, torch.Tensor]] = []

    def keep(scores_NE: torch.Tensor, live: Callable[[], torch.Tensor]) -> torch.Tensor | None:
        layer_id = tape.next_of(list(by_layer))
        chosen_NK = tape.choose(layer_id, live())
        used[:] = [(layer_id, live() if chosen_NK is None else chosen_NK)]
        return chosen_NK

    def enter(module: nn.Module, args: object) -> None:
        open_modes.append(SelectionMode(firings[0][0], keep))
        open_modes[-1].__enter__()  # type: ignore[no-untyped-call]

    def leave(module: nn.Module, args: object, output: object) -> None:
        open_modes.pop().__exit__(None, None, None)  # type: ignore[no-untyped-call]
        if output is not None and used:
            layer_id, ids_NK = used.pop()
            if (site := by_layer[layer_id]) is not None:
                tape.weigh(layer_id, site.read(output, ids_NK))

    return [
        module.register_forward_pre_hook(enter),
        module.register_forward_hook(leave, prepend=True, always_call=True),
    ]


def calls(
    model: Any,
    prompts: Sequence[Sequence[int]],
    *,
    spec: RouteSpec,
    max_tokens: int,
    seed: int = 0,
    sampling: Sampling = Sampling(),
    weights_version: int = 0,
    call_ids: Sequence[str] | None = None,
) -> list[ModelCall]:
    """Sample from the model and return each sequence as a call, with log-probabilities of the sampled tokens.

    ``model``: a Transformers causal language model in evaluation mode. ``max_tokens``: most tokens generated for a
    prompt. ``seed``: of all draws; the global random state is left as it was. ``call_ids``: default ``call-0``, ...
    The calls own their arrays. With ``sampling.route_weights`` they have a column ``route_weights``; a call has no
    place to say what these are: ``records`` does, or ``assemble(attributes={"weights_meaning": ...})`` with the tape's.

    Raises UsageError for prompts, names or settings that cannot be served, else as ``taping``.
    """
    names = sample_names(call_ids, len(prompts), stem="call")
    requests = [_Request(prompt=list(prompt)) for prompt in prompts]
    answers = _generate(model, requests, spec=spec, max_tokens=max_tokens, seed=seed, sampling=sampling, names=names)
    return [
        _call(request, answer, spec=spec, sampling=sampling, weights_version=weights_version, name=name)
        for request, answer, name in zip(requests, answers, names, strict=True)
    ]


def records(
    model: Any,
    prompts: Sequence[Sequence[int] | RouteRecord],
    *,
    spec: RouteSpec,
    max_tokens: int,
    seed: int = 0,
    sampling: Sampling = Sampling(),
    weights_version: int = 0,
    sample_ids: Sequence[str] | None = None,
) -> list[RouteRecord]:
    """Sample as ``calls`` does and return each call as one record; go on where records end.

    A prompt that is a record is fed again: all before its last generation in one forward, the tokens of that generation
    one by one, as they were fed when they were sampled. The gates follow its rows; MISSING ones are live, and so are
    those behind. What comes back is that record, longer: its tokens, rows, spans and log-probabilities stay, and the
    attributes ``forced_rows`` and ``live_rows`` count what was fed, one token in one layer each. A record without
    log-probabilities gets those of this pass. Under the same weights, batch, seed and settings a record that was cut
    ends with the very bits of the one that was not; in another batch, kernels may round otherwise.

    ``max_tokens`` counts the tokens of the last generation that a record has. ``sample_ids``: default ``sample-0``,
    ..., or the record's own.

    Raises as ``calls``, and UsageError for a record that cannot be gone on with (one that ended, a delta, columns that
    have no value for new tokens, rows of later weights; any, with ``sampling.route_weights``), SpecError for one of
    another geometry.
    """
    names = sample_names(sample_ids, len(prompts))
    if sampling.route_weights is not None and any(isinstance(each, RouteRecord) for each in prompts):
        raise refused("route_weights=None where records are gone on with", repr(sampling.route_weights))
    if sample_ids is None:
        names = [
            each.sample_id if isinstance(each, RouteRecord) else name for each, name in zip(prompts, names, strict=True)
        ]
    requests = [
        _request_of(each, spec, sampling=sampling, weights_version=weights_version)
        if isinstance(each, RouteRecord)
        else _Request(prompt=list(each))
        for each in prompts
    ]
    answers = _generate(model, requests, spec=spec, max_tokens=max_tokens, seed=seed, sampling=sampling, names=names)
    attributes: dict[str, str] = {"logprobs_mode": sampling.logprobs_mode}
    made = []
    for before, request, answer, name in zip(prompts, requests, answers, names, strict=True):
        if isinstance(before, RouteRecord):
            made.append(_longer(replace(before, sample_id=name, checksum=None), answer, sampling, weights_version))
            continue
        call = _call(request, answer, spec=spec, sampling=sampling, weights_version=weights_version, name=name)
        meaning = {} if answer.weights is None else {"weights_meaning": answer.weights.meaning}
        made.append(assemble([call], spec, sample_id=name, attributes={**attributes, **meaning}).records[0])
    return made


# ---- one batch ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class _Request:
    """A prompt, fed in one forward; then tokens that were generated before, fed one by one; int16 rows ``[R, L, K]`` of
    the first tokens, to be followed."""

    prompt: list[int]
    generated: tuple[int, ...] = ()
    routes_RLK: NDArray[np.int16] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Weights:
    """Routing weights of the fed tokens, ``[R, L, K]`` as they are stored, and what they are."""

    values_RLK: NDArray[Any]
    meaning: str

    def column(self) -> AlignedColumn:
        """The column of a call, NaN at its last token, which was not fed."""
        return weights_column(self.values_RLK, tokens=len(self.values_RLK) + 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Answer:
    """What became of a request: all generated tokens ``[G]``, rows of the fed ones, log-probabilities ``[G]``, for each
    token the ids that it was drawn from (None: not known), and routing weights where they were asked for."""

    tokens_G: NDArray[np.int32]
    routes_RLK: NDArray[Any]
    logprobs_G: NDArray[np.float32]
    kept: list[Any] | None
    vocab_size: int
    weights: _Weights | None = None


class _Again(LogitsProcessor):
    """Leaves one token to draw where a request has it already; draws of the others take the same random numbers."""

    def __init__(self, requests: Sequence[_Request], width: int) -> None:
        self._requests = requests
        self._width = width

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        step = input_ids.shape[1] - self._width
        had = [(at, each.generated[step]) for at, each in enumerate(self._requests) if step < len(each.generated)]
        if not had:
            return scores
        rows, tokens = torch.tensor(had, device=scores.device).unbind(1)
        scores = scores.clone()
        scores[rows] = -torch.inf
        scores[rows, tokens] = 0.0
        return scores


def _generate(
    model: Any,
    requests: Sequence[_Request],
    *,
    spec: RouteSpec,
    max_tokens: int,
    seed: int,
    sampling: Sampling,
    names: Sequence[str],
) -> list[_Answer]:
    check_type(model, nn.Module, expected="a model (torch.nn.Module)")
    if model.training:
        raise refused(
            "a model in evaluation mode",
            "one that trains: its rows and log-probabilities are of dropped-out activations",
        )
    prompts = [request.prompt for request in requests]
    check_requests(prompts, names, max_tokens=max_tokens, temperature=sampling.temperature, seed=seed)
    had = max(len(request.generated) for request in requests)
    if had > max_tokens:
        raise refused(f"max_tokens of at least {had}, which a record has generated already", repr(max_tokens))
    inputs, mask = _left_padded(prompts, sampling.pad_token_id)
    width = inputs.shape[1]
    config = _generation_config(sampling, max_tokens=max_tokens)
    device = next(model.parameters()).device
    # manual_seed seeds every accelerator that is there, whichever the model is on
    devices = list(range(torch.accelerator.device_count()))
    with (
        taping(
            model,
            spec,
            follow=_rows_to_follow(requests, spec, width=width),
            weights=sampling.route_weights is not None,
        ) as tape,
        torch.random.fork_rng(devices=devices),
        torch.inference_mode(),
        _without_defaults(model),
    ):
        torch.manual_seed(seed)
        output = model.generate(
            inputs.to(device),
            attention_mask=mask.to(device),
            generation_config=config,
            logits_processor=[_Again(requests, width)] if had else [],
        )
    generated_BG = output.sequences[:, width:].cpu().numpy().astype(np.int32)
    # scores are what the sampler itself drew from: filtered logits, -inf outside of the kept ids
    logits = output.logits if output.scores is None else output.scores
    logprobs_BG = _sampled_logprobs(logits, output.sequences[:, width:])
    forwards = _checked_forwards(tape, rows=inputs.shape[0], width=width, steps=generated_BG.shape[1])
    steps = [] if sampling.route_weights is None else tape.weights(sampling.route_weights)
    found = []
    for index, prompt in enumerate(prompts):
        length = _generated_length(generated_BG[index], sampling.stops)
        weights = None
        if tape.weights_meaning is not None:
            values_RLK = _rows_of(steps, index, prompt=len(prompt), width=width, generated=length)
            weights = _Weights(values_RLK=values_RLK, meaning=tape.weights_meaning)
        found.append(
            _Answer(
                tokens_G=generated_BG[index, :length],
                routes_RLK=_rows_of(forwards, index, prompt=len(prompt), width=width, generated=length),
                logprobs_G=logprobs_BG[index, :length],
                kept=_kept(output.scores, index, length),
                vocab_size=logits[0].shape[-1],
                weights=weights,
            )
        )
    return found


def _rows_to_follow(requests: Sequence[_Request], spec: RouteSpec, *, width: int) -> list[NDArray[np.int16]]:
    """Rows of the prefill ``[B * width, L, K]`` and of each step ``[B, L, K]``, MISSING where a request has none."""
    reach = max(map(_reach, requests))
    if reach < 0:
        return []
    count = len(requests)
    prefill = spec.missing_rows(count * width).reshape(count, width, *spec.row_shape)
    steps = [spec.missing_rows(count) for _ in range(reach)]
    for index, request in enumerate(requests):
        if request.routes_RLK is None:
            continue
        size = len(request.prompt)
        head = request.routes_RLK[:size]
        prefill[index, width - size : width - size + len(head)] = head
        for step, row_LK in zip(steps, request.routes_RLK[size:], strict=False):
            step[index] = row_LK
    return [prefill.reshape(-1, *spec.row_shape), *steps]


def _reach(request: _Request) -> int:
    """How many steps behind the prefill have rows to follow; -1 where not even the prefill has."""
    return -1 if request.routes_RLK is None else max(len(request.routes_RLK) - len(request.prompt), 0)


def _call(
    request: _Request, answer: _Answer, *, spec: RouteSpec, sampling: Sampling, weights_version: int, name: str
) -> ModelCall:
    how, columns = sampling.of_span(), {}
    if answer.kept is not None:
        columns = mask_columns(
            answer.kept,
            answer.tokens_G,
            prompt=len(request.prompt),
            sampling=how,
            call=name,
            vocab_size=answer.vocab_size,
        )
    if answer.weights is not None:
        columns["route_weights"] = answer.weights.column()
    return ModelCall(
        prompt_ids=np.asarray(request.prompt, dtype=np.int32),
        generation_ids=answer.tokens_G,
        routes=answer.routes_RLK,
        layer_ids=spec.layer_ids,
        weights_version=weights_version,
        call_id=name,
        logprobs=answer.logprobs_G,
        columns=columns,
        sampling=how,
    )


# ---- going on where a record ends -----------------------------------------------------------------------------------


def _request_of(record: RouteRecord, spec: RouteSpec, *, sampling: Sampling, weights_version: int) -> _Request:
    """Verify a record and say what of it is fed how. Raises as ``records``."""
    start = require_resumable(
        record,
        spec,
        logprobs_mode=sampling.logprobs_mode,
        weights_version=weights_version,
        stops=sampling.stops,
    )
    tokens = record.token_ids.tolist()
    return _Request(prompt=tokens[:start], generated=tuple(tokens[start:]), routes_RLK=record.routes)


def _longer(record: RouteRecord, answer: _Answer, sampling: Sampling, weights_version: int) -> RouteRecord:
    """The record, and behind it what was sampled now."""
    size, had = record.num_tokens, record.num_tokens + len(answer.tokens_G) - len(answer.routes_RLK) - 1
    fresh = slice(had, None)
    routes_RLK = answer.routes_RLK.astype(np.int16)
    if had == len(answer.tokens_G):
        routes_RLK = np.concatenate([routes_RLK, record.routes[-1:]])  # the last token was not fed again
    call = _call(
        _Request(prompt=record.token_ids.tolist()),
        replace(
            answer,
            tokens_G=answer.tokens_G[fresh],
            routes_RLK=routes_RLK,
            logprobs_G=answer.logprobs_G[fresh],
            kept=None if answer.kept is None else answer.kept[fresh],
        ),
        spec=record.spec,
        sampling=sampling,
        weights_version=weights_version,
        name=f"{record.sample_id}#{len({span.call for span in record.spans})}",
    )
    known_S = np.full(size, np.nan, dtype=np.float32)
    if sampling.logprobs_mode == "raw":  # of processed ones only the token itself was left
        known_S[size - had :] = answer.logprobs_G[:had]
    fed = call.num_tokens - 1
    forced = int(np.count_nonzero(~missing_rows(record.routes[:fed])))
    counts = {"forced_rows": str(forced), "live_rows": str(fed * len(record.spec.layer_ids) - forced)}
    said = {"logprobs_mode": sampling.logprobs_mode, **counts}
    return extend(record, call, known=known_S, attributes=said)


# ---- a batch's arrays -----------------------------------------------------------------------------------------------


def _generation_config(sampling: Sampling, *, max_tokens: int) -> Any:
    """Sampling from what temperature, top-k, top-p and min-p leave, or greedy decoding."""
    settings: dict[str, Any] = {
        "max_new_tokens": max_tokens,
        "do_sample": sampling.temperature > 0,
        "eos_token_id": sampling.stops or None,
        "pad_token_id": sampling.pad_token_id,
        "use_cache": True,
        "return_dict_in_generate": True,
        "output_logits": sampling.logprobs_mode == "raw",
        "output_scores": sampling.logprobs_mode == "processed",
    }
    if sampling.temperature > 0:
        settings |= {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}
        settings |= {"min_p": sampling.min_p or None}
    return GenerationConfig.from_dict(settings)


@contextmanager
def _without_defaults(model: Any) -> Iterator[None]:
    """Set the model's own generation_config aside.

    ``generate`` fills every None of a given configuration from it: another end token, whose padding would pass for
    sampled tokens, and penalties or filters, so that tokens come from another distribution than their
    log-probabilities.
    """
    kept, model.generation_config = model.generation_config, GenerationConfig.from_dict({})
    try:
        yield
    finally:
        model.generation_config = kept


def _left_padded(prompts: Sequence[Sequence[int]], pad_token_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(len(prompt) for prompt in prompts)
    inputs = torch.full((len(prompts), width), pad_token_id, dtype=torch.int64)
    mask = torch.zeros((len(prompts), width), dtype=torch.int64)
    for index, prompt in enumerate(prompts):
        inputs[index, width - len(prompt) :] = torch.tensor(list(prompt), dtype=torch.int64)
        mask[index, width - len(prompt) :] = 1
    return inputs, mask


def _sampled_logprobs(logits: Sequence[torch.Tensor], sampled_BG: torch.Tensor) -> NDArray[np.float32]:
    """log softmax of the logits at the sampled token, float32 ``[B, G]``; step by step, so [B, G, V] never
    exists."""
    columns = [
        torch.log_softmax(step_BV.float(), dim=-1).gather(-1, sampled_BG[:, at : at + 1].to(step_BV.device)).cpu()
        for at, step_BV in enumerate(logits)
    ]
    return np.ascontiguousarray(torch.cat(columns, dim=1).numpy())


def _kept(scores: Sequence[torch.Tensor] | None, index: int, length: int) -> list[Any] | None:
    """The ids of finite score at each step of one sequence; None where there are no scores."""
    if scores is None:
        return None
    return [torch.isfinite(step_BV[index]).nonzero()[:, 0].cpu().numpy() for step_BV in scores[:length]]


def _checked_forwards(tape: GateTape, *, rows: int, width: int, steps: int) -> list[NDArray[np.int32]]:
    forwards = tape.forwards()
    expected = [rows * width] + [rows] * (steps - 1)
    if [len(forward) for forward in forwards] != expected:
        raise CaptureError(
            f"expected one forward over {rows} x {width} prompt tokens and {steps - 1} over {rows} tokens, got "
            f"{[len(forward) for forward in forwards][:8]}: a chunked prefill or assisted decoding feeds otherwise",
            kind=ErrorKind.ROW_COUNT,
        )
    return forwards


def _generated_length(tokens_G: NDArray[np.int32], stops: Sequence[int]) -> int:
    ends = np.flatnonzero(np.isin(tokens_G, list(stops)))
    return int(ends[0]) + 1 if ends.size else len(tokens_G)


def _rows_of(forwards: Sequence[NDArray[Any]], index: int, *, prompt: int, width: int, generated: int) -> NDArray[Any]:
    """Rows of one sequence in token order: its unpadded part of the prefill, then one row per later forward."""
    start = index * width + width - prompt
    prefill = forwards[0][start : start + prompt]
    decoded = [forward[index : index + 1] for forward in forwards[1:generated]]
    return np.concatenate([prefill, *decoded])
