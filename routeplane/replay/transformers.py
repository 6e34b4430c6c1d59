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
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from routeplane.capture.gates import Gate, selection
from routeplane.capture.gates import find_gates as probe_gates
from routeplane.errors import ErrorKind, ReplayError, UsageError, refused
from routeplane.record.spec import RouteSpec
from routeplane.replay.binding import GateHook, Wiring
from routeplane.replay.gate import ForcedTopK, GateRows, GateSite, spec_of_gates
from routeplane.replay.handle import DEFAULT_LIMITS, AuxChoice, Mode, ReplayHandle, ReplayLimits, ReplayPolicy

if TYPE_CHECKING:
    from torch import nn

    from routeplane.replay.binding import Wiring

__all__ = ["AuxiliaryHook", "Probe", "ReplayLimits", "attach", "checkpoint_sites", "find_gates", "record"]

#: Instance attributes that hold a checkpoint function: Transformers' layers, and torch's CheckpointWrapper.
_CHECKPOINT_ATTRIBUTES = ("_gradient_checkpointing_func", "checkpoint_fn")


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """How gates are looked for.

    ``leave_live``: module paths of routers that do not follow (hash layers, frozen gates, a second router in a layer),
    or patterns as of ``fnmatch``. ``forward``: runs one forward of the model over at least two different tokens;
    default: the model is called with ``input_ids`` of 7 tokens.
    """

    leave_live: tuple[str, ...] = ()
    forward: Callable[[], object] | None = None


def attach(
    model: nn.Module,
    spec: RouteSpec,
    *,
    on_missing: Literal["live", "raise"] = "live",
    aux: AuxChoice = "live",
    compiled: bool = False,
    mode: Mode = "force",
    limits: ReplayLimits = DEFAULT_LIMITS,
    probe: Probe = Probe(),
) -> ReplayHandle:
    """Attach to a model's gates; the handle is a context manager that detaches on leaving.

    ``spec`` must name exactly the model's gates (for a pipeline stage: ``spec.select(its layers)``).
    ``on_missing="raise"`` refuses batches with fed tokens that have no row; ``"live"`` leaves these to the gate.
    ``aux="forced"`` has the load-balancing loss (``output_router_logits=True``) count the ids that gates used;
    ``"live"`` leaves it what the model makes of its logits. ``compiled=True`` serves a model, or blocks of it, under
    torch.compile without a graph break and without a recompilation for each batch. ``mode="observe"`` forces nothing
    and counts what forcing would change. ``limits``: shares of missing and flipped rows above which a batch is refused.

    The model is probed with two short forwards (under FSDP2 on every rank) and left as it was. It stays the caller's;
    only its gate instances and checkpoint attributes are touched, until ``detach()``. A copy made of it meanwhile is
    not attached.

    Raises ReplayError (NO_SEAM) for a model without gates, with a gate that does not obey, or without the loss that
    ``aux="forced"`` is about, and (SPEC_MISMATCH) where spec and model differ, UsageError where a handle is attached
    already.

    >>> from transformers import MixtralConfig, MixtralForCausalLM
    >>> sizes = dict(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    >>> model = MixtralForCausalLM(MixtralConfig(**sizes, num_key_value_heads=2, num_local_experts=4))
    >>> with attach(model, RouteSpec.from_model(model), mode="observe") as handle:
    ...     print(len(handle.report().gates))
    1
    """
    policy = ReplayPolicy(mode=mode, on_missing=on_missing, aux=aux, limits=limits, leave_live=probe.leave_live)
    _refuse_attached(model)
    return _attached(model, spec, find_gates(model, probe=probe), policy=policy, compiled=compiled)


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
    return _attached(model, spec, gates, policy=policy, compiled=compiled)


def find_gates(model: nn.Module, /, *, probe: Probe = Probe()) -> list[tuple[Gate, nn.Module]]:
    """Probe the model for its gates, in module order, MTP left out. Raises ReplayError (NO_SEAM) as ``attach`` does."""
    return probe_gates(model, leave_live=probe.leave_live, probe=probe.forward)


def _refuse_attached(model: nn.Module) -> None:
    taken = [path for path, module in model.named_modules() if GateHook.on(module) is not None]
    if taken:
        raise UsageError(
            f"expected a model that no handle is attached to, got one on gate {taken[0]} and {len(taken) - 1} others: "
            "detach() the first",
            kind=ErrorKind.ARGUMENT,
        )


def _attached(
    model: nn.Module,
    spec: RouteSpec,
    gates: list[tuple[Gate, nn.Module]],
    *,
    policy: ReplayPolicy,
    compiled: bool,
) -> ReplayHandle:
    sites = [GateSite(gate=gate, module=module, force=ForcedTopK, traced=compiled) for gate, module in gates]
    if compiled:
        _refuse_uncompilable(policy, [gate for gate, _ in gates])
    losses = _aux_modules(model) if policy.aux == "forced" else []
    wiring, hooks = Wiring(), list[AuxiliaryHook]()

    def undo() -> None:
        for hook in hooks:
            hook.remove()

    handle = ReplayHandle(
        spec,
        sites,
        wiring=wiring,
        policy=policy,
        checkpoint_sites=partial(checkpoint_sites, model),
        undo=undo,
        root=model,
    )
    hooks += [AuxiliaryHook(module, wiring=wiring) for module in losses]
    return handle


def _refuse_uncompilable(policy: ReplayPolicy, gates: list[Gate]) -> None:
    if policy.aux == "forced":
        raise refused("aux='live' for a compiled model", "aux='forced', which no graph can follow")
    if policy.mode == "observe":
        raise refused("mode='force' for a compiled model", "mode='observe'")
    for gate in gates:
        if gate.rounds or gate.axes != 2:
            raise ReplayError(
                f"expected a selection by topk over [N, E] for compiled=True, got another @ {gate}",
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
    for module in model.modules():
        for name in _CHECKPOINT_ATTRIBUTES:
            if callable(vars(module).get(name)):
                yield module, name


class AuxiliaryHook:
    """The two hooks of the module whose forward computes the loss: they answer its selections under a binding."""

    def __init__(self, module: nn.Module, *, wiring: Wiring) -> None:
        self.module = module
        self.wiring = wiring
        self._installed = (
            module.register_forward_pre_hook(self._enter),
            module.register_forward_hook(self._leave, prepend=True, always_call=True),
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # A copied model (a teacher) carries the same hook, which is inert there: its module is another.
        return self

    def remove(self) -> None:
        """Take both hooks off. Idempotent."""
        for handle in self._installed:
            handle.remove()

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
