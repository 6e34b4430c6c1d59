"""Replay on Hugging Face Transformers models: finds the gates of a live model and attaches a handle to them.

Gates are found by what they do (``routeplane.capture.gates``): the model is probed once, and a gate whose selection
obeys is accepted, whatever its class. Gates of multi-token-prediction layers are left out; others can be left live by
name. The package is not imported, so a model of any release, or of a user's own code, can be attached to. The auxiliary
(load-balancing) loss follows the forced choice (``AuxiliaryHook``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from routeplane.capture.gates import find_gates as probe_gates
from routeplane.capture.gates import left_as_it_was, probe_tokens
from routeplane.capture.selection import Gate, selection
from routeplane.capture.weights import WeightSite, find_weights
from routeplane.errors import ErrorKind, ReplayError, check_type, refused
from routeplane.record.spec import RouteSpec
from routeplane.replay.binding import GateHook, LiveHook, Wiring
from routeplane.replay.gate import ForcedTopK, GateRows, GateSite, spec_of_gates
from routeplane.replay.handle import (
    DEFAULT_LIMITS,
    AuxChoice,
    Mode,
    ReplayBatch,
    ReplayHandle,
    ReplayLimits,
    ReplayPolicy,
    WeightsChoice,
)

__all__ = ["AuxiliaryHook", "Probe", "ReplayLimits", "attach", "checkpoint_sites", "find_gates", "record"]

#: Instance attributes that hold a checkpoint function: Transformers' layers, and torch's CheckpointWrapper.
_CHECKPOINT_ATTRIBUTES = ("_gradient_checkpointing_func", "checkpoint_fn")
#: least tokens of each sequence in the forwards that look for mixing
_PACKED_LENGTH = 8
#: Relative change of the output that is mixing. Models that mix change by 0.37 to 1.6; those that do not by 1e-6 in
#: float32 and 0.017 in bfloat16, where a near-tied choice of experts may fall otherwise (65 families, tiny weights).
_MIXED_SHARE = 0.1
_PROVEN_CALL = "a forward that tells packed sequences apart (batch.model_inputs())"
#: ``input_ids`` and ``position_ids``, each ``[1, T]`` -> the model's output
PackedForward = Callable[[torch.Tensor, torch.Tensor], object]


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """How gates are looked for.

    ``leave_live``: module paths of routers that do not follow (hash layers, frozen gates, a second router in a layer),
    or patterns as of ``fnmatch``. ``forward``: runs one forward of the model over at least two different tokens;
    default: the model is called with ``input_ids`` of 7 tokens. ``packed``: runs one forward over the ``input_ids`` and
    ``position_ids`` of packed sequences, each ``[1, T]``, as the training loop does, and returns its output; default:
    the model is called with both and ``use_cache=False``, as with ``RouteBatch.model_inputs``.
    """

    leave_live: tuple[str, ...] = ()
    forward: Callable[[], object] | None = None
    packed: Callable[[torch.Tensor, torch.Tensor], object] | None = None


def attach(
    model: nn.Module,
    spec: RouteSpec,
    *,
    on_missing: Literal["live", "raise"] = "live",
    aux: AuxChoice = "live",
    weights: WeightsChoice = "live",
    mode: Mode | Literal["compiled"] = "force",
    limits: ReplayLimits = DEFAULT_LIMITS,
    probe: Probe = Probe(),
) -> ReplayHandle:
    """Attach to a model's gates; the handle is a context manager that detaches on leaving.

    ``spec`` must name exactly the model's gates (for a pipeline stage: ``spec.select(its layers)``).
    ``on_missing="raise"`` refuses batches with fed tokens that have no row; ``"live"`` leaves these to the gate.
    ``aux="forced"`` has the load-balancing loss (``output_router_logits=True``) count the ids that gates used;
    ``"live"`` leaves it what the model makes of its logits. ``weights="recorded"`` gives the chosen experts the weights
    of the batch's column ``route_weights`` instead of those of the live scores: **the router then has no gradient from
    these rows**, except by the auxiliary loss, and ``report()`` counts them (``weighted_rows``); rows without weights
    are MISSING ones, and ``on_missing`` says what becomes of them. Entering looks at every value, and so waits for the
    device. ``mode="compiled"`` serves a model, or blocks of it, under torch.compile without a graph break and without a
    recompilation for each batch; ``mode="observe"`` forces nothing and counts what forcing would change. ``limits``:
    shares of missing and flipped rows above which a batch is refused.

    The model is probed with two short forwards (under FSDP2 on every rank) and left as it was. It stays the caller's;
    only its gate instances and checkpoint attributes are touched, until ``detach()``. A copy made of it meanwhile is
    not attached. The first packed batch makes three more forwards: ``replaying`` refuses packed batches, ReplayError
    (PACKING), where a sequence's output depends on the sequence before it.

    Raises ReplayError (NO_SEAM) for a model without gates, with a gate that does not obey or whose weights cannot be
    told (``weights="recorded"``), or without the loss that ``aux="forced"`` is about, and (SPEC_MISMATCH) where spec
    and model differ, UsageError where a handle is attached already.

    >>> from transformers import MixtralConfig, MixtralForCausalLM
    >>> sizes = dict(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    >>> model = MixtralForCausalLM(MixtralConfig(**sizes, num_key_value_heads=2, num_local_experts=4))
    >>> with attach(model, RouteSpec.from_model(model), mode="observe") as handle:
    ...     print(len(handle.report().gates))
    1
    """
    policy = ReplayPolicy(
        mode="force" if mode == "compiled" else mode,
        on_missing=on_missing,
        aux=aux,
        limits=limits,
        weights=weights,
        leave_live=probe.leave_live,
    )
    _refuse_attached(model)
    gates = find_gates(model, probe=probe)
    return _attached(model, spec, gates, policy=policy, compiled=mode == "compiled", probe=probe)


def record(
    model: nn.Module, *, aux: AuxChoice = "live", compiled: bool = False, probe: Probe = Probe()
) -> ReplayHandle:
    """Attach without records: for ``handle.recording``, and for replaying what that recorded (R2).

    The geometry is what the model's gates have. Raises as ``attach`` does, and ReplayError (NO_SEAM) for gates of
    different K.
    """
    _refuse_attached(model)
    gates = find_gates(model, probe=probe)
    spec = spec_of_gates([gate for gate, _ in gates], model="")
    policy = ReplayPolicy(aux=aux, leave_live=probe.leave_live)
    return _attached(model, spec, gates, policy=policy, compiled=compiled, probe=probe)


def find_gates(model: nn.Module, /, *, probe: Probe = Probe()) -> list[tuple[Gate, nn.Module]]:
    """Probe the model for its gates, in module order, MTP left out. Raises ReplayError (NO_SEAM) as ``attach`` does."""
    check_type(model, nn.Module, expected="a model (torch.nn.Module)")
    return probe_gates(model, leave_live=probe.leave_live, probe=probe.forward)


def _refuse_attached(model: nn.Module) -> None:
    check_type(model, nn.Module, expected="a model (torch.nn.Module)")
    taken = [path for path, module in model.named_modules() if GateHook.on(module) is not None]
    if taken:
        raise refused(
            "a model that no handle is attached to",
            f"one on gate {taken[0]} and {len(taken) - 1} others: detach() the first",
        )


def _attached(
    model: nn.Module,
    spec: RouteSpec,
    gates: list[tuple[Gate, nn.Module]],
    *,
    policy: ReplayPolicy,
    compiled: bool,
    probe: Probe,
) -> ReplayHandle:
    if compiled:
        _refuse_uncompilable(policy, [gate for gate, _ in gates])
    found: Sequence[WeightSite | None] = [None] * len(gates)
    if policy.weights == "recorded":
        found = find_weights(model, gates, probe=probe.forward)
    sites = [
        GateSite(gate=gate, module=module, force=ForcedTopK, traced=compiled, weights=site)
        for (gate, module), site in zip(gates, found, strict=True)
    ]
    losses = _aux_modules(model) if policy.aux == "forced" else []
    wiring, hooks = Wiring(), list[AuxiliaryHook]()
    check = PackingCheck(model, probe.packed)

    def undo() -> None:
        check.remove()
        for hook in hooks:
            hook.remove()

    handle = ReplayHandle(
        spec,
        sites,
        wiring=wiring,
        policy=policy,
        checkpoint_sites=partial(checkpoint_sites, model),
        row_order=check,
        undo=undo,
        root=model,
    )
    check.watch(wiring)
    hooks += [AuxiliaryHook(module, wiring=wiring) for module in losses]
    return handle


class PackingCheck(LiveHook):
    """Refuses packed batches for a model that mixes packed sequences, as seen once: see ``packing_fault``.

    A model keeps sequences apart only in the call that was tried: with ``position_ids``, no mask and no cache. After
    ``watch``, forwards of several packed sequences that are called otherwise are refused, where ``packed`` shows no
    other call. On an accelerator, positions that run on are refused when the next batch comes, without a wait.
    """

    def __init__(self, model: nn.Module, packed: PackedForward | None) -> None:
        self.model = model
        self.packed = packed
        self.wiring: Wiring | None = None
        self._observed: str | None = None
        #: where sequences but the first begin, int64 ``[B-1]``, while a batch of several packed ones is replayed
        self._starts: torch.Tensor | None = None
        self._runs_on: torch.Tensor | None = None

    def watch(self, wiring: Wiring) -> None:
        """Look at the calls of the model's forwards under a binding, until ``remove``."""
        self.wiring = wiring
        if self.packed is None:
            self._installed = (self.model.register_forward_pre_hook(self._compare, with_kwargs=True),)

    def __call__(self, batch: ReplayBatch) -> None:
        """Raise ReplayError (PACKING). Collective under FSDP2, at the first packed batch of every rank."""
        is_shard = getattr(getattr(batch, "plan", None), "is_shard", False)  # its model attends over other ranks
        is_packed = getattr(batch, "layout", None) == "packed" and not is_shard
        starts = getattr(batch, "cu_seqlens_padded", None)
        self._starts = starts[1:-1].long() if is_packed and starts is not None and len(starts) > 2 else None
        self._settle()
        if not is_packed:
            return
        if self._observed is None:
            longest = int(getattr(batch, "lengths", torch.tensor([0])).max())
            self._observed = packing_fault(self.model, self.packed, length=min(longest, batch.num_rows // 2))
        if self._observed:
            raise _mixes("a model that keeps packed sequences apart", self._observed, self.model)

    def _compare(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        bound = self.wiring is not None and self.wiring.here() is not None
        if not bound or self._starts is None or module is not self.model or torch.compiler.is_compiling():
            return
        if len(args) > 1 or _is_own_way(kwargs):
            return
        if fault := _call_fault(module, kwargs):
            raise _mixes(_PROVEN_CALL, fault, module)
        positions_3T = kwargs["position_ids"].reshape(-1, kwargs["position_ids"].shape[-1])
        starts = self._starts.to(positions_3T.device, non_blocking=True)
        runs_on = (positions_3T[:, starts] == positions_3T[:, starts - 1] + 1).any()
        self._runs_on = runs_on if self._runs_on is None else self._runs_on | runs_on
        if positions_3T.device.type == "cpu":
            self._settle()

    def _settle(self) -> None:
        runs_on, self._runs_on = self._runs_on, None
        if runs_on is not None and bool(runs_on):
            raise _mixes(_PROVEN_CALL, "position_ids that run on where a sequence begins", self.model)


def _mixes(expected: str, got: str, model: nn.Module) -> ReplayError:
    return ReplayError(
        f"expected {expected}, got {got}: use layout='padded', or give Probe(packed=), a forward that tells the model "
        f"where sequences begin @ {type(model).__name__}",
        kind=ErrorKind.PACKING,
    )


def _is_own_way(kwargs: Mapping[str, Any]) -> bool:
    """Whether a loop tells sequences apart itself: by a mask of three and more axes, or lengths for a kernel."""
    mask = kwargs.get("attention_mask")
    own_mask = mask is not None and (not isinstance(mask, torch.Tensor) or mask.dim() > 2)
    return own_mask or any("seq" in name for name, value in kwargs.items() if value is not None)


def _call_fault(model: nn.Module, kwargs: Mapping[str, Any]) -> str:
    """Why a forward of Transformers does not look at positions, or has none; empty where it looks.

    ``create_causal_mask`` looks at positions only without a mask and without a cache.
    """
    mask = kwargs.get("attention_mask")
    if kwargs.get("position_ids") is None:
        return "no position_ids"
    if mask is not None:
        return f"an attention_mask of shape {list(mask.shape)}, beside which positions are not looked at"
    if _uses_cache(model, kwargs.get("use_cache")):
        return "a cache (use_cache is not False), beside which positions are not looked at"
    return ""


def _uses_cache(model: nn.Module, given: bool | None) -> bool:
    """Whether Transformers will make a cache: as it is told, else as configured; never where it checkpoints."""
    if given is None:
        configs = (getattr(each, "config", None) for each in model.modules())
        given = getattr(next((each for each in configs if each is not None), None), "use_cache", False)
    training = model.training and torch.is_grad_enabled()
    return bool(given) and not (
        training and any(getattr(each, "gradient_checkpointing", 0) for each in model.modules())
    )


def packing_fault(model: nn.Module, packed: PackedForward | None = None, /, *, length: int = 0) -> str:
    """What a packed forward of two sequences does that it must not; empty where it keeps them apart.

    The second sequence's output must be the same whatever tokens stand before it, and what it is alone. The model is
    run three times in evaluation mode, without gradients, and left as it was. ``length``: tokens of a sequence; what
    selects or compresses keys does so from some length on.
    """
    run = packed or (lambda ids, positions: model(input_ids=ids, position_ids=positions, use_cache=False))
    usable = probe_tokens(model, 512)
    drawn = torch.randint(len(usable), (3, max(length, _PACKED_LENGTH)), generator=torch.Generator().manual_seed(0))
    first, other, second = usable[drawn.to(usable.device)]
    with left_as_it_was(model), torch.no_grad():
        try:
            alone, behind = _last_output(run, second), _last_output(run, first, second)
            behind_other = _last_output(run, other, second)
        except (RuntimeError, TypeError, ValueError, KeyError, AttributeError, IndexError, AssertionError) as error:
            return f"a packed forward that raises {type(error).__name__}: {error}"
    for apart, how in (
        (_apart(behind, behind_other), "with the tokens of the sequence before"),
        (_apart(alone, behind), "when another sequence stands before"),
    ):
        if apart > _MIXED_SHARE:
            return f"an output that changes by {apart:.1%} {how}"
    return ""


def _last_output(run: PackedForward, *sequences: torch.Tensor) -> torch.Tensor:
    """The output of the last sequence, ``[S, V]``; of a wide one some 256 columns."""
    positions = torch.cat([torch.arange(len(each), device=each.device) for each in sequences])
    output: Any = run(torch.cat(sequences)[None], positions[None])
    found = getattr(output, "logits", output)
    logits: torch.Tensor = found[0] if isinstance(found, tuple) else found
    logits_TV = logits.reshape(len(positions), -1)
    return logits_TV[-len(sequences[-1]) :, :: max(1, logits_TV.shape[1] // 256)].clone()


def _apart(expected_SV: torch.Tensor, found_SV: torch.Tensor) -> float:
    """The relative difference of rows: the mean of all, or of the first eight where a convolution reaches back."""
    expected_SV, found_SV = expected_SV.float(), found_SV.float()
    rows_S = (expected_SV - found_SV).norm(dim=-1) / expected_SV.norm(dim=-1).clamp_min(1e-30)
    return float(torch.maximum(rows_S.mean(), rows_S[:8].mean()))


def _refuse_uncompilable(policy: ReplayPolicy, gates: list[Gate]) -> None:
    if policy.aux == "forced":
        raise refused("aux='live' for a compiled model", "aux='forced', which no graph can follow")
    if policy.weights == "recorded":
        raise refused("weights='live' for a compiled model", "weights='recorded', which stands outside of its graphs")
    for gate in gates:
        if gate.rounds or gate.axes != 2 or gate.firings > 1:
            raise ReplayError(
                f"expected one selection by topk over [N, E] in a forward for a compiled model, got another @ {gate}",
                kind=ErrorKind.NO_SEAM,
            )


def _aux_modules(model: nn.Module) -> list[nn.Module]:
    """The modules whose forward adds the load-balancing loss: they keep its coefficient."""
    found = [module for module in model.modules() if hasattr(module, "router_aux_loss_coef")]
    if not found:
        raise ReplayError(
            "expected a model with a load-balancing loss (aux='forced'), got none with a router_aux_loss_coef "
            f"@ {type(model).__name__}",
            kind=ErrorKind.NO_SEAM,
        )
    return found


def checkpoint_sites(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Modules with a checkpoint function of their own, and the attribute's name; they change when it is enabled."""
    check_type(model, nn.Module, expected="a model (torch.nn.Module)")
    for module in model.modules():
        for name in _CHECKPOINT_ATTRIBUTES:
            if callable(vars(module).get(name)):
                yield module, name


class AuxiliaryHook(LiveHook):
    """The two hooks of the module whose forward computes the loss: they answer its selections under a binding."""

    def __init__(self, module: nn.Module, *, wiring: Wiring) -> None:
        self.module = module
        self.wiring = wiring
        self._installed = (
            module.register_forward_pre_hook(self._enter),
            module.register_forward_hook(self._leave, prepend=True, always_call=True),
        )

    def _enter(self, module: nn.Module, args: object) -> None:
        binding = self.wiring.here()
        if module is not self.module or binding is None:
            return
        mode = _ForcedAuxiliary([binding.rows[layer] for layer in sorted(binding.rows)], wiring=self.wiring)
        mode.__enter__()  # type: ignore[no-untyped-call]
        self.wiring.thread.around.append((module, mode))

    def _leave(self, module: nn.Module, args: object, output: object) -> None:
        around = self.wiring.thread.around
        if module is not self.module or not around or around[-1][0] is not module:
            return
        mode = around.pop()[1]
        mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        if output is not None and isinstance(mode, _ForcedAuxiliary):
            mode.require_whole()


class _ForcedAuxiliary(TorchFunctionMode):
    """Answers every ``topk`` over ``[N, E]``, or over all gates' ``[L*N, E]``, of no gate's own forward."""

    def __init__(self, rows: Sequence[GateRows], *, wiring: Wiring) -> None:
        super().__init__()
        self.rows = rows
        self.wiring = wiring
        self.answered = 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Every torch call of the model comes by here; all but those selections go on unchanged."""
        kwargs = kwargs or {}
        if self.wiring.thread.open:
            return func(*args, **kwargs)  # a gate's own selection, whose forcing has seen it
        rows = self.rows[self.answered % len(self.rows)]
        scores = selection(rows.gate, func, args=args, kwargs=kwargs)
        if scores is None:
            return func(*args, **kwargs)
        ids = self._ids(rows, scores)
        return torch.return_types.topk((scores.gather(-1, ids), ids))

    def _ids(self, rows: GateRows, scores: torch.Tensor) -> torch.Tensor:
        chosen_NK = rows.chosen_NK
        if len(scores) == len(chosen_NK):
            self.answered += 1
            return chosen_NK.to(scores.device)
        joined = torch.cat([each.chosen_NK.to(scores.device) for each in self.rows])
        if len(scores) != len(joined):
            raise ReplayError(
                f"expected an auxiliary loss over {len(chosen_NK)} rows of one gate or {len(joined)} of all, "
                f"got {len(scores)} @ {rows.gate}",
                kind=ErrorKind.ROW_COUNT,
            )
        self.answered += len(self.rows)
        return joined

    def require_whole(self) -> None:
        """Raise ReplayError (GATE_FIRED) where the loss counted some gates and not the others."""
        if self.answered % len(self.rows):
            raise ReplayError(
                f"expected an auxiliary loss over {len(self.rows)} gates, got {self.answered} selections "
                f"@ {self.rows[self.answered % len(self.rows)].gate}",
                kind=ErrorKind.GATE_FIRED,
            )
