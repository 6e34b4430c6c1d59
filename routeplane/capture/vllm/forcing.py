"""Gates of a vLLM worker: they follow the rows that requests carry, and say how they weigh what they choose.

``worker_extension_cls="routeplane.capture.vllm.forcing.FollowingWorker"``; ``collective_rpc("routeplane_follow")``
turns it on. Rows come with a request (``request_args(follow=record)``) and are placed by the request and the absolute
position of every token of a step, so that chunks, decoding, preemption and shared batches are all one case. A router
computes as it always does; then the ids of tokens with a row are replaced, and their weights are computed from the
router's own logits by the rule that its own answers follow, which is found out once for each router and refused where
none fits.

Tokens in cached KV blocks are not computed again: for each slot of the KV cache this remembers under which rows it was
filled.

``record_weights`` sends the weights of the chosen experts beside their ids, to a scheduler that asks for them
(``WriterConfig.route_weights``), and says what they are: by the same rule, the factor of the configuration, which must
be in the weights or on the output, and the place where the kernel multiplies. Hooks instances alone. Run on vLLM 0.30.

Axes: T tokens of a step, L captured layers, K top-k slots, E experts, N token rows of one router's call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

from routeplane.capture.recorder import FollowedRows
from routeplane.capture.vllm.interface import (
    FOLLOWING_NAMES,
    FOLLOWING_RUNNER,
    WEIGHTS_NAMES,
    WEIGHTS_RUNNER,
    RequestOptions,
    choice_of,
    require_running,
)
from routeplane.capture.weights import FACTOR_NAME
from routeplane.errors import CaptureError, DataError, ErrorKind, UsageError
from routeplane.record.spec import MISSING
from routeplane.record.validate import Scaling, WeightDtype, WeightsMeaning

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["FollowingWorker", "meaning_of", "record_weights", "require_plain", "routers_of", "weigher_of"]

#: Ended requests whose counts are kept until somebody asks for them.
_KEPT = 65_536
_PROBE_ROWS = 16


class FollowingWorker:
    """What vLLM adds to its worker class: two calls that ``collective_rpc`` reaches.

    Example::

        llm = LLM(..., worker_extension_cls="routeplane.capture.vllm.forcing.FollowingWorker", enforce_eager=True)
        llm.collective_rpc("routeplane_follow")
    """

    def routeplane_follow(self) -> dict[str, Any]:
        """Make the gates follow the rows of requests. Idempotent.

        Returns:
            The layers whose gates follow, their experts and slots. Raises CaptureError for an engine in which rows
            could not be followed.

        Example:
            ``llm.collective_rpc("routeplane_follow")``
        """
        found = vars(self).get("routeplane_routes")
        if found is None:
            found = vars(self)["routeplane_routes"] = _Following(self)
        return {"layer_ids": list(found.layer_ids), "top_k": found.top_k, "experts": list(found.experts)}

    def routeplane_follow_counts(self, request_ids: list[str]) -> dict[str, dict[str, Any]]:
        """Say what became of requests that carried rows, and forget the ended ones.

        Args:
            request_ids: As outputs name them.

        Returns:
            By request: ``forced`` and ``live`` rows that were computed (one token in one layer; again where a request
            was preempted), ``forced_at_fill`` rows that stood in KV blocks filled under the same rows, ``mixed`` rows
            that stood in blocks filled otherwise, and ``error``, which is empty where the rows were followed.

        Example:
            ``[counts] = llm.collective_rpc("routeplane_follow_counts", args=([output.request_id],))``
        """
        found = vars(self).get("routeplane_routes")
        return {} if found is None else found.take_counts(request_ids)


@dataclass(kw_only=True, slots=True)
class _Counts:
    forced: int = 0
    live: int = 0
    forced_at_fill: int = 0
    mixed: int = 0
    error: str = ""

    def add(self, other: _Counts) -> None:
        for name in ("forced", "live", "forced_at_fill", "mixed"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.error = self.error or other.error


@dataclass(kw_only=True, slots=True)
class _Request:
    """One running sequence: its rows ``[R, L, K]`` and how its KV blocks are marked; where its next token stands."""

    routes_RLK: NDArray[np.int16] | None = None
    mark: int = 0
    next: int = -1
    counts: _Counts = field(default_factory=_Counts)


class _Following:
    """The state of one worker: running requests, marks of KV slots, and the rows of the step that runs."""

    def __init__(self, worker: Any) -> None:
        require_running(FOLLOWING_NAMES)
        runner = worker.model_runner
        require_plain(worker.vllm_config, runner)
        routers = {layer: module.router for layer, module in routers_of(runner.model)}
        self.layer_ids = tuple(sorted(routers))
        self.experts = tuple(int(routers[layer].global_num_experts) for layer in self.layer_ids)
        self.top_k = int(routers[self.layer_ids[0]].top_k)
        self._runner = runner
        self._slots = {layer: slot for slot, layer in enumerate(self.layer_ids)}
        self._requests: dict[str, _Request] = {}
        self._ended: dict[str, _Counts] = {}
        cache = runner.kv_cache_config
        self._block_size = int(cache.kv_cache_groups[0].kv_cache_spec.block_size)
        # under which rows a slot was filled (0: none), and how many of its layers were forced
        self._marks = np.zeros(int(cache.num_blocks) * self._block_size, dtype=np.int64)
        self._forced = np.zeros(len(self._marks), dtype=np.int16)
        self._rows_TLK: torch.Tensor | None = None
        self._pending: set[int] = set()
        self._step: list[_Request] = []
        width = int(worker.vllm_config.model_config.get_hidden_size())
        weighers = {
            layer: weigher_of(router, layer, width=width, model=runner.model) for layer, router in routers.items()
        }
        for layer, router in routers.items():  # only now: a refusal leaves nothing hooked
            self._hook_router(router, layer, weighers[layer])
        self._hook_runner(runner)

    # ---- hooks ------------------------------------------------------------------------------------------------------

    def _hook_runner(self, runner: Any) -> None:
        own = runner._prepare_inputs

        def prepare(scheduler_output: Any, num_scheduled_tokens: Any) -> Any:
            self._begin(scheduler_output, num_scheduled_tokens)
            return own(scheduler_output, num_scheduled_tokens)

        runner._prepare_inputs = prepare

    def _hook_router(
        self, router: Any, layer: int, weigh: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    ) -> None:
        own = router._compute_routing

        def compute(hidden_states: Any, router_logits: torch.Tensor, indices_type: Any, **options: Any) -> Any:
            weights_NK, ids_NK = own(hidden_states, router_logits, indices_type, **options)
            rows_TK = self._take(layer, len(ids_NK))
            if rows_TK is None:
                return weights_NK, ids_NK
            count = len(rows_TK)
            forced_T1 = rows_TK[:, :1] != MISSING
            chosen_TK = torch.where(forced_T1, rows_TK, ids_NK[:count].to(torch.int64))
            made_TK = weigh(router_logits[:count], chosen_TK).to(weights_NK.dtype)
            weights_NK, ids_NK = weights_NK.clone(), ids_NK.clone()
            weights_NK[:count] = torch.where(forced_T1, made_TK, weights_NK[:count])
            ids_NK[:count] = chosen_TK.to(ids_NK.dtype)
            return weights_NK, ids_NK

        router._compute_routing = compute

    # ---- one step ---------------------------------------------------------------------------------------------------

    def _begin(self, scheduler_output: Any, num_scheduled_tokens: Any) -> None:
        """Place the rows of every token of the coming forward, in the order of the batch."""
        if self._pending:  # the last forward passed by a gate
            self._fail(f"expected every gate to run, got none in layers {sorted(self._pending)}")
        self._rows_TLK, self._pending, self._step = None, set(), []
        for request_id in scheduler_output.finished_req_ids:
            self._end(request_id)
        batch, at, placed = self._runner.input_batch, 0, []
        for index, request_id in enumerate(batch.req_ids):
            start, count = int(batch.num_computed_tokens_cpu[index]), int(num_scheduled_tokens[index])
            request = self._request_of(request_id)
            rows_NLK = self._place(request, self._runner.requests[request_id], start, count)
            if rows_NLK is not None:
                placed.append((at, rows_NLK))
                self._step.append(request)
            at += count
        if placed:
            rows_TLK = np.full((at, len(self.layer_ids), self.top_k), MISSING, dtype=np.int64)
            for where, rows_NLK in placed:
                rows_TLK[where : where + len(rows_NLK)] = rows_NLK
            self._rows_TLK = torch.from_numpy(rows_TLK).to(self._runner.device)
            self._pending = set(self.layer_ids)

    def _place(self, request: _Request, state: Any, start: int, count: int) -> NDArray[np.int16] | None:
        """A request's rows of tokens ``[start, start + count)``, None where all are live; marks their KV slots."""
        layers, counts = len(self.layer_ids), request.counts
        if start != request.next and start > 0 and request.mark:
            before = self._slots_of(state, 0, start)
            same = self._marks[before] == request.mark
            counts.mixed += int(np.count_nonzero(~same)) * layers
            counts.forced_at_fill += int(self._forced[before][same].sum())
        request.next = start + count
        where = self._slots_of(state, start, start + count)
        self._marks[where], self._forced[where] = request.mark, 0
        routes_RLK = request.routes_RLK
        if routes_RLK is None:
            return None
        rows_NLK = routes_RLK[start : start + count]
        forced_N = (rows_NLK[:, :, 0] != MISSING).sum(axis=1)
        self._forced[where[: len(rows_NLK)]] = forced_N
        forced = int(forced_N.sum())
        counts.forced += forced
        counts.live += count * layers - forced
        return rows_NLK if forced else None

    def _slots_of(self, state: Any, start: int, stop: int) -> NDArray[np.int64]:
        positions = np.arange(start, stop)
        blocks = np.asarray(state.block_ids[0], dtype=np.int64)
        return np.asarray(blocks[positions // self._block_size] * self._block_size + positions % self._block_size)

    def _take(self, layer: int, rows: int) -> torch.Tensor | None:
        """The rows ``[T, K]`` of one gate in this forward, once."""
        rows_TLK = self._rows_TLK
        if rows_TLK is None:
            return None
        if layer not in self._pending or rows < len(rows_TLK):
            self._fail(f"expected one call of each gate over {len(rows_TLK)} tokens, got {rows} in layer {layer}")
            return None
        self._pending.discard(layer)
        if not self._pending:
            self._rows_TLK = None
        return rows_TLK[:, self._slots[layer]]

    def _fail(self, message: str) -> None:
        for request in self._step:
            request.counts.error = request.counts.error or message

    # ---- requests ---------------------------------------------------------------------------------------------------

    def _request_of(self, request_id: str) -> _Request:
        found = self._requests.get(request_id)
        if found is None:
            found = self._requests[request_id] = self._read(self._runner.requests[request_id].sampling_params)
        return found

    def _read(self, sampling: Any) -> _Request:
        """What a request asks for. Rows that do not fit are not followed, and its counts say so."""
        try:
            document = None if sampling is None else RequestOptions.from_extra_args(sampling.extra_args).follow
            if document is None:
                return _Request()
            rows = FollowedRows.from_json(document)
        except (DataError, UsageError) as error:
            return _Request(counts=_Counts(error=str(error)))
        digits = rows.salt.rpartition(".")[2][:15]
        mark = int(digits, 16) if _is_hex(digits) else -1
        experts = rows.num_experts if isinstance(rows.num_experts, tuple) else (rows.num_experts,) * len(rows.layer_ids)
        theirs, ours = (rows.layer_ids, experts, rows.top_k), (self.layer_ids, self.experts, self.top_k)
        if theirs != ours:
            message = f"expected rows of layers, experts and slots {ours}, got {theirs}"
            return _Request(mark=mark, counts=_Counts(error=message))
        return _Request(routes_RLK=rows.routes, mark=mark)

    def _end(self, request_id: str) -> None:
        request = self._requests.pop(request_id, None)
        if request is None or (request.routes_RLK is None and not request.counts.error):
            return
        name = choice_of(request_id)[0]
        self._ended.setdefault(name, _Counts()).add(request.counts)
        while len(self._ended) > _KEPT:
            del self._ended[next(iter(self._ended))]

    def take_counts(self, request_ids: list[str]) -> dict[str, dict[str, Any]]:
        """As ``FollowingWorker.routeplane_follow_counts``."""
        if self._pending and self._rows_TLK is not None:
            self._fail(f"expected every gate to run, got none in layers {sorted(self._pending)}")
        found = {name: _Counts() for name in request_ids}
        for request_id, request in self._requests.items():
            name = choice_of(request_id)[0]
            if name in found and (request.routes_RLK is not None or request.counts.error):
                found[name].add(request.counts)
        for name, counts in found.items():
            counts.add(self._ended.pop(name, _Counts()))
        return {
            name: {key: getattr(counts, key) for key in ("forced", "live", "forced_at_fill", "mixed", "error")}
            for name, counts in found.items()
        }


def _is_hex(text: str) -> bool:
    return bool(text) and all(each in "0123456789abcdef" for each in text)


# ---- what is refused ------------------------------------------------------------------------------------------------


def require_plain(config: Any, runner: Any, *, names: Sequence[str] = FOLLOWING_RUNNER) -> None:
    """Raise CaptureError for an engine in which the rows of a gate could not be told to be those of its tokens.

    Args:
        config: The engine's ``VllmConfig``.
        runner: Its worker's model runner.
        names: What the runner must have.

    Example:
        ``require_plain(worker.vllm_config, worker.model_runner)``
    """
    if any(not hasattr(runner, name) for name in names):
        raise CaptureError(
            f"expected a model runner with {', '.join(names)}, got {type(runner).__name__}",
            kind=ErrorKind.CAPTURE_OFF,
        )
    parallel = config.parallel_config
    found = [
        reason
        for reason, there in (
            ("pipeline parallelism", parallel.pipeline_parallel_size > 1),
            ("data parallelism", parallel.data_parallel_size > 1),
            ("context parallelism", parallel.decode_context_parallel_size > 1),
            ("microbatches that overlap", bool(getattr(parallel, "use_ubatching", False))),
            ("speculative decoding", config.speculative_config is not None),
            ("prefill and decode apart (a KV connector)", config.kv_transfer_config is not None),
            ("compiled or captured graphs (enforce_eager=False)", not config.model_config.enforce_eager),
            ("several kinds of KV cache", len(runner.kv_cache_config.kv_cache_groups) != 1),
        )
        if there
    ]
    if found:
        raise CaptureError(
            f"expected an engine whose gates can be followed, got one with {', '.join(found)}",
            kind=ErrorKind.CAPTURE_OFF,
        )


def routers_of(model: Any) -> Iterator[tuple[int, Any]]:
    """Yield a model's layers with the modules that have a ``router``. Raises CaptureError where a kernel routes by
    itself, or no module has one.

    Example:
        ``routers = {layer: module.router for layer, module in routers_of(model)}``
    """
    found = [module for module in model.modules() if isinstance(module, MoERunner)]
    if not found:
        raise CaptureError("expected a model with routers, got none", kind=ErrorKind.CAPTURE_OFF)
    for module in found:
        if module.is_monolithic or not isinstance(module.router, BaseRouter):
            raise CaptureError(
                f"expected a kernel that asks a router, got one that routes by itself ({type(module.router).__name__}) "
                f"@ layer {module.layer_id}",
                kind=ErrorKind.CAPTURE_OFF,
            )
        yield int(module.layer_id), module


# ---- weights of ids that the router did not choose ------------------------------------------------------------------

_SCORES: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "softmax": lambda logits: torch.softmax(logits, dim=-1),
    "sigmoid": torch.sigmoid,
    "sqrtsoftplus": lambda logits: torch.nn.functional.softplus(logits).sqrt(),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Weigher:
    """Weights of chosen experts from a router's logits, float32 ``[N, K]``."""

    score: str
    renormalised: bool
    factor: float = 1.0

    def __call__(self, logits_NE: torch.Tensor, ids_NK: torch.Tensor) -> torch.Tensor:
        weights_NK = _SCORES[self.score](logits_NE.float()).gather(-1, ids_NK)
        if self.renormalised:
            weights_NK = weights_NK / weights_NK.sum(dim=-1, keepdim=True)
        return weights_NK * self.factor


def weigher_of(router: Any, layer: int, *, width: int, model: Any) -> _Weigher:
    """Find the rule by which a router weighs its own choices.

    Args:
        router: It is asked once, with random logits.
        layer: Its layer, for the message.
        width: Features of a hidden state.
        model: Says device and type.

    Returns:
        What gives the weights ``[N, K]`` of logits ``[N, E]`` at ids ``[N, K]``. Raises CaptureError where no known
        rule fits.

    Example:
        ``weigh = weigher_of(router, 3, width=4096, model=model)``
    """
    return _rules_of(router, layer, width=width, model=model)[1][0]


def _rules_of(router: Any, layer: int, *, width: int, model: Any) -> tuple[torch.Tensor, list[_Weigher]]:
    """The weights that a router gives to its choices of random logits, and every rule that they follow."""
    if getattr(router, "_hash_indices_table", None) is not None:
        raise _other_rule(router, layer)
    some = next(iter(model.parameters()))
    generator = torch.Generator().manual_seed(layer)
    logits_NE = 2 * torch.randn(_PROBE_ROWS, int(router.global_num_experts), generator=generator)
    logits_NE = logits_NE.to(some.device)
    hidden = torch.zeros(_PROBE_ROWS, width, dtype=some.dtype, device=some.device)
    found = []
    with torch.inference_mode():
        weights_NK, ids_NK = router._compute_routing(hidden, logits_NE, None)
    for score in _SCORES:
        for renormalised in (False, True):
            made = _Weigher(score=score, renormalised=renormalised)
            ratio = weights_NK.float() / made(logits_NE, ids_NK.to(torch.int64))
            factor = float(ratio.mean())
            if float((ratio - factor).abs().max()) < 1e-4 * abs(factor):
                said = float(getattr(router, "routed_scaling_factor", 1.0))
                exact = next((each for each in (1.0, said) if _equal(factor, each)), factor)
                found.append(_Weigher(score=score, renormalised=renormalised, factor=exact))
    if not found:
        raise _other_rule(router, layer)
    return weights_NK, found


def _other_rule(router: Any, layer: int) -> CaptureError:
    return CaptureError(
        f"expected a router that weighs its choices by one of {sorted(_SCORES)}, got {type(router).__name__} with "
        f"another rule @ layer {layer}",
        kind=ErrorKind.CAPTURE_OFF,
    )


def _equal(one: float, other: float) -> bool:
    return abs(one - other) < 1e-4 * abs(other)


# ---- weights that leave the worker ----------------------------------------------------------------------------------

_DTYPES: Mapping[torch.dtype, WeightDtype] = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}


def record_weights(worker: Any, kept: str) -> str:
    """Send the weights of the chosen experts to the scheduler, from the next forward on.

    They go where vLLM's own ids go: the buffer of the step has 2K slots for each token and layer, ids and then the bits
    of the weights, so that they are kept by the same slots of the KV cache and cached tokens have both. The weights are
    those that the experts get, after all that another hook did to them.

    Args:
        worker: The engine's, in its process; ``collective_rpc`` gives it.
        kept: ``float32``, or ``bfloat16`` in the lower half of a slot.

    Returns:
        What the weights are, ``WeightsMeaning.to_text``. Raises CaptureError for an engine in which that cannot be
        told, or whose gates may be passed by; then nothing is changed.

    Example:
        ``[meaning] = executor.collective_rpc(record_weights, args=("float32",))``
    """
    require_running({**FOLLOWING_NAMES, **WEIGHTS_NAMES})
    runner, config = worker.model_runner, worker.vllm_config.model_config
    require_plain(worker.vllm_config, runner, names=WEIGHTS_RUNNER)
    modules = dict(routers_of(runner.model))
    width = int(config.get_hidden_size())
    factors = _factors_of(config.hf_text_config)
    meanings = {
        layer: meaning_of(module, layer, width=width, model=runner.model, factors=factors)
        for layer, module in modules.items()
    }
    first = next(iter(meanings.values()))
    if other := next((layer for layer, meaning in meanings.items() if meaning != first), None):
        raise _untold(f"{first.to_text()} in one layer and {meanings[other].to_text()}", other)
    capturer = runner.routed_experts_capturer
    ids_TDK = capturer.device_buffer
    both_TDX = torch.zeros((*ids_TDK.shape[:2], 2 * ids_TDK.shape[2]), dtype=torch.int32, device=ids_TDK.device)
    capturer.device_buffer = both_TDX[..., : ids_TDK.shape[2]]
    capturer.get_device_buffer = lambda: both_TDX
    pinned = runner.routed_experts_cpu.is_pinned()
    runner.routed_experts_cpu = torch.empty(both_TDX.shape, dtype=torch.int32, pin_memory=pinned)
    for layer, module in modules.items():
        _hook_weights(module.router, both_TDX[:, layer, ids_TDK.shape[2] :], kept=kept, dtype=first.dtype)
    return first.to_text()


def _hook_weights(router: Any, bits_TK: torch.Tensor, *, kept: str, dtype: str) -> None:
    own = router._select_experts

    def select(*args: Any, **options: Any) -> Any:
        weights_NK, ids_NK = own(*args, **options)
        if _DTYPES.get(weights_NK.dtype) != dtype:
            raise CaptureError(f"expected weights as {dtype}, got {weights_NK.dtype}", kind=ErrorKind.CAPTURE_OFF)
        if kept == "float32":
            made_NK = weights_NK.float().view(torch.int32)
        else:
            made_NK = weights_NK.to(torch.bfloat16).view(torch.int16).to(torch.int32)
        bits_TK[: len(made_NK)] = made_NK
        return weights_NK, ids_NK

    router._select_experts = select


def _factors_of(config: Any) -> dict[str, float]:
    """Numbers other than 1 that a model's configuration holds under a factor's name."""
    return {
        name: float(value)
        for name, value in vars(config).items()
        if FACTOR_NAME.search(name) and type(value) in (int, float) and value not in (0, 1)
    }


def meaning_of(module: Any, layer: int, *, width: int, model: Any, factors: Mapping[str, float]) -> WeightsMeaning:
    """Say what the weights of one layer's router are.

    Args:
        module: Its runner (``routers_of``), which may scale the experts' output, and says where weights are multiplied.
        layer: Its layer, for the message.
        width: Features of a hidden state.
        model: Says device and type.
        factors: Constants of the model's configuration, by name. Each must be found: in the weights, or on the output.

    Returns:
        The meaning. Raises CaptureError for what no meaning can say, or what was seen does not decide.

    Example:
        ``meaning_of(module, 3, width=4096, model=model, factors={"routed_scaling_factor": 2.5})``
    """
    router = module.router
    if router.eplb_state is not None or module.moe_config.is_sequence_parallel:
        raise _untold("replicas of experts (EPLB) or sequence parallelism", layer)
    weights_NK, rules = _rules_of(router, layer, width=width, model=model)
    said = [f"{rule.factor:.6g} times {rule.score}, renormalised {rule.renormalised}" for rule in rules]
    if len(rules) != 1 or rules[0].score == "sqrtsoftplus" or weights_NK.shape[1] != router.top_k:
        raise _untold(f"{weights_NK.shape[1]} weights that are {said}", layer)
    [rule] = rules
    known = {1.0, *factors.values(), float(getattr(router, "routed_scaling_factor", 1.0))}
    inside = next((each for each in sorted(known) if _equal(rule.factor, each)), None)
    outside = float(module.routed_scaling_factor)
    applied = [each for each in (inside, outside) if each not in (None, 1.0)]
    if inside is None or len(applied) > 1 or {*factors.values()} - {*applied}:
        raise _untold(
            f"weights that are {said}, {outside:.6g} on the output, and a configuration with {dict(factors)}", layer
        )
    scaling: Scaling = "in" if inside != 1 else "out" if outside != 1 else "none"
    return WeightsMeaning(
        score="sigmoid" if rule.score == "sigmoid" else "softmax",
        renormalised=rule.renormalised,
        scaling=scaling,
        factor=inside if scaling == "in" else outside,
        multiplied="before" if module.routed_experts.apply_router_weight_on_input else "after",
        dtype=_DTYPES[weights_NK.dtype],
    )


def _untold(observed: str, layer: int) -> CaptureError:
    return CaptureError(
        f"expected a router whose weights can be told, got {observed} @ layer {layer}", kind=ErrorKind.CAPTURE_OFF
    )
