"""Replay on NeMo Automodel models: finds the gates of a live model by what they do and attaches a handle to them.

Automodel's own replay drives every ``RouterReplay`` handle of the process, in the order in which gates were built: a
second model, or a copy of one, is a count mismatch or not replayed at all, -1 is an index, and some gates make a handle
and never ask it. Here gates are found by probing the model (``routeplane.capture.gates``), named by their paths, and
each call of a gate is answered from the rows of its own microbatch; MISSING rows keep the live choice. Automodel's
handles and their registry are neither read nor written, and a model needs none.

Knows no class by name and does not import the package. ``check_setup`` comes before the model is built, ``attach``
after.

Axes: N token rows of one gate call (``b*S + s`` padded, ``t`` packed), E experts, K top-k slots.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from routeplane.batch.slots import RankOf, Shard
from routeplane.capture.gates import find_gates as probe_gates
from routeplane.capture.selection import Gate
from routeplane.errors import ErrorKind, Problem, ReplayError, UsageError, check_type
from routeplane.replay.binding import Wiring
from routeplane.replay.gate import ForcedTopK, GateRows, GateSite, spec_of_gates
from routeplane.replay.handle import DEFAULT_LIMITS, AuxChoice, Mode, ReplayHandle, ReplayLimits, ReplayPolicy
from routeplane.replay.transformers import PackingCheck, Probe, checkpoint_sites

if TYPE_CHECKING:
    from routeplane.record.spec import RouteSpec

__all__ = ["ParallelSetup", "Probe", "attach", "check_setup", "find_gates", "rank_shard", "record"]

#: the model is called with ``input_ids``, and no router is left live
_WHOLE_MODEL = Probe()

#: Engines whose routes ``routeplane.capture`` reads.
_ENGINES = ("sglang", "transformers", "vllm")
#: Automodel's context-parallel layouts, and which cut of ``Shard`` is the same.
_CONTEXT_LAYOUTS: Mapping[str, Literal["zigzag", "contiguous"]] = {
    "round_robin": "zigzag",
    "thd": "zigzag",
    "contiguous": "contiguous",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelSetup:
    """How a run divides its batches.

    ``context``, ``tensor``: numbers of ranks. ``context_layout``: how batches are cut along the sequence
    (``"round_robin"``, ``"thd"``, ``"contiguous"``). ``sequence``: sequence parallelism over the tensor-parallel ranks.
    ``packing``: several sequences in one row.
    """

    context: int = 1
    context_layout: str = "round_robin"
    tensor: int = 1
    sequence: bool = False
    packing: bool = False


def attach(
    model: nn.Module,
    spec: RouteSpec,
    *,
    on_missing: Literal["live", "raise"] = "live",
    aux: AuxChoice = "live",
    mode: Mode = "force",
    limits: ReplayLimits = DEFAULT_LIMITS,
    probe: Probe = _WHOLE_MODEL,
) -> ReplayHandle:
    """Attach to the gates of one model or pipeline stage; the handle is a context manager that detaches on leaving.

    ``spec`` must name exactly the model's gates, by decoder layer (for a stage: ``spec.select(its layers)``).
    ``on_missing="raise"`` refuses batches with fed tokens that have no row; ``mode`` and ``limits`` as in
    ``routeplane.replay.transformers.attach``. ``aux``: which choice the load-balancing
    loss counts; ``"forced"`` is what Automodel does by itself. ``probe``: routers to leave live by name (hash layers),
    and how the model is run where a call with ``input_ids`` is not enough (a later pipeline stage).

    The model is probed with two short forwards (under FSDP2 on every rank), the first packed batch makes three more;
    the model is left as it was. Raises ReplayError: NO_SEAM for a model without gates, with a gate that does not obey,
    naming it and what was observed, and for ``aux="forced"`` without such a loss; SPEC_MISMATCH where spec and model
    differ; and UsageError where a handle is attached already.

    Example::

        with gates.attach(model, spec) as replay, replay.replaying(batch):
            loss = model(batch.token_ids, padding_mask=batch.pad_mask).logits.square().mean()
    """
    policy = ReplayPolicy(mode=mode, on_missing=on_missing, aux=aux, limits=limits, leave_live=probe.leave_live)
    return _attached(model, spec, find_gates(model, probe=probe), policy=policy, probe=probe)


def record(model: nn.Module, *, aux: AuxChoice = "live", probe: Probe = _WHOLE_MODEL) -> ReplayHandle:
    """Attach without anybody's records: for ``handle.recording``, and for replaying what that recorded (R2).

    The geometry is what the model's gates have. Raises as ``attach`` does, and ReplayError (NO_SEAM) for gates of
    different K.
    """
    gates = find_gates(model, probe=probe)
    spec = spec_of_gates([gate for gate, _ in gates], model="")
    return _attached(model, spec, gates, policy=ReplayPolicy(aux=aux, leave_live=probe.leave_live), probe=probe)


def find_gates(model: nn.Module, /, *, probe: Probe = _WHOLE_MODEL) -> list[tuple[Gate, nn.Module]]:
    """Probe the model for its gates, in module order, MTP left out. Raises ReplayError (NO_SEAM) as ``attach`` does."""
    check_type(model, nn.Module, expected="a model (torch.nn.Module)")
    return probe_gates(model, leave_live=probe.leave_live, probe=probe.forward)


def _attached(
    model: nn.Module, spec: RouteSpec, gates: list[tuple[Gate, nn.Module]], *, policy: ReplayPolicy, probe: Probe
) -> ReplayHandle:
    if policy.aux == "forced":
        _require_losses(gates)
    losses = {id(module): _LiveAux(module) for _, module in gates if policy.aux == "live" and _has_loss(module)}

    wiring = Wiring()
    check = PackingCheck(model, probe.packed)

    def undo() -> None:
        check.remove()
        for loss in losses.values():
            loss.remove()

    handle = ReplayHandle(
        spec,
        [GateSite(gate=gate, module=module, force=partial(_force, losses.get(id(module)))) for gate, module in gates],
        wiring=wiring,
        policy=policy,
        checkpoint_sites=partial(checkpoint_sites, model),
        row_order=check,
        undo=undo,
        root=model,
    )
    check.watch(wiring)
    for loss in losses.values():
        loss.install()
    return handle


def check_setup(
    *,
    engine: str,
    architectures: Sequence[str] = (),
    registry: Container[str] | None = None,
    force_hf: bool = False,
    parallel: ParallelSetup = ParallelSetup(),
    graphed_modules: Sequence[str] = (),
) -> None:
    """Refuse a configuration that cannot be replayed, before anything is loaded.

    ``engine``: which one captures the routes. ``architectures``: those of the model's configuration; the first is the
    one that is built. ``registry``: the names that Automodel builds itself,
    ``ModelRegistry.model_arch_name_to_cls``; None leaves it to ``attach``. ``graphed_modules``:
    ``backend.cuda_graph.modules``.

    Raises UsageError (ARGUMENT) with every reason as a problem. Packing, context and sequence parallelism align
    through ``rank_shard``.
    """
    reasons = [
        *_engine_reasons(engine),
        *_model_reasons(tuple(architectures), registry, force_hf=force_hf),
        *_parallel_reasons(parallel),
        *(["a CUDA graph of moe_router, which repeats its capture"] if "moe_router" in graphed_modules else []),
    ]
    if reasons:
        raise UsageError.from_problems(
            (Problem(kind=ErrorKind.ARGUMENT, message=f"got {each}") for each in reasons),
            what=f"replay on NeMo Automodel is refused for {len(reasons)} reasons",
        )


def rank_shard(
    *,
    context_parallel: RankOf = (0, 1),
    context_layout: str = "round_robin",
    tensor_parallel: RankOf = (0, 1),
    sequence_parallel: bool = False,
    layers: Sequence[int] | None = None,
) -> Shard:
    """What this rank's gates see of a batch of whole records, for ``collate(shard=)`` and ``batch.shard``.

    Ranks are ``(rank, world)`` of Automodel's device mesh. ``context_layout`` as in ``ParallelSetup``. Raises
    UsageError (ARGUMENT).
    """
    reasons = _parallel_reasons(
        ParallelSetup(
            context=context_parallel[1],
            context_layout=context_layout,
            tensor=tensor_parallel[1],
            sequence=sequence_parallel,
        )
    )
    if reasons:
        raise UsageError(f"expected a layout that aligns, got {'; '.join(reasons)}", kind=ErrorKind.ARGUMENT)
    return Shard(
        context_parallel=context_parallel,
        sequence_parallel=tensor_parallel if sequence_parallel else (0, 1),
        layers=None if layers is None else tuple(layers),
        context_layout=_CONTEXT_LAYOUTS[context_layout],
    )


class _LiveAux:
    """Makes one gate's load-balancing loss count what the gate would have chosen."""

    def __init__(self, module: nn.Module) -> None:
        self.module: Any = module
        self.original: Any = self.module._compute_aux_loss
        #: of the call of the gate that is running under rows, int64 ``[N, K]``
        self.live_NK: torch.Tensor | None = None

    def __call__(
        self, scores_NE: torch.Tensor, load_E: torch.Tensor, token_mask_N: torch.Tensor, *more: Any
    ) -> torch.Tensor:
        if self.live_NK is not None:
            load_E = self.module._compute_expert_load(self.live_NK, token_mask_N)
        found: torch.Tensor = self.original(scores_NE, load_E, token_mask_N, *more)
        return found

    def install(self) -> None:
        """Shadow the method on this instance."""
        self.module._compute_aux_loss = self

    def remove(self) -> None:
        """Let the class's method show again."""
        if vars(self.module).get("_compute_aux_loss") is self:
            del self.module._compute_aux_loss

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., torch.Tensor]:
        # in a copied gate the method of the copy
        return partial(type(self.module)._compute_aux_loss, memo[id(self.module)])


class _ForcedBesideLive(ForcedTopK):
    """Forces a gate's selection, and hands the gate's own to the loss that counts it."""

    def __init__(self, rows: GateRows, loss: _LiveAux, /) -> None:
        super().__init__(rows)
        self.loss = loss

    def _answer(self, scores_NE: torch.Tensor, live: Callable[[], torch.Tensor]) -> torch.Tensor | None:
        self.loss.live_NK = live()
        return super()._answer(scores_NE, live)

    def close(self) -> None:
        """Pop the mode; the next call of the gate may be live."""
        super().close()
        self.loss.live_NK = None


def _force(loss: _LiveAux | None, rows: GateRows) -> ForcedTopK:
    return ForcedTopK(rows) if loss is None else _ForcedBesideLive(rows, loss)


def _has_loss(module: nn.Module) -> bool:
    return bool(getattr(module, "aux_loss_coeff", 0.0))


def _require_losses(gates: Sequence[tuple[Gate, nn.Module]]) -> None:
    for gate, module in gates:
        if not _has_loss(module):
            raise ReplayError(
                f"expected a load-balancing loss that can follow the forced ids (aux='forced'), got none @ {gate}",
                kind=ErrorKind.NO_SEAM,
            )


def _engine_reasons(engine: str) -> list[str]:
    return [] if engine in _ENGINES else [f"engine {engine!r}, whose routes no capture reads; {_ENGINES} have them"]


def _model_reasons(architectures: tuple[str, ...], registry: Container[str] | None, *, force_hf: bool) -> list[str]:
    if force_hf:
        return ["force_hf, whose gates are those of Transformers (routeplane.replay.transformers)"]
    if registry is not None and not architectures:
        return ["a model configuration without architectures"]
    if registry is not None and architectures[0] not in registry:
        return [f"architecture {architectures[0]}, which Automodel does not build itself"]
    return []


def _parallel_reasons(parallel: ParallelSetup) -> list[str]:
    world, layout = parallel.context, parallel.context_layout
    reasons = []
    if world > 1 and layout not in _CONTEXT_LAYOUTS:
        reasons.append(f"context-parallel layout {layout!r}; {tuple(_CONTEXT_LAYOUTS)} align")
    if world > 1 and parallel.packing and layout == "round_robin":
        reasons.append("packed sequences in layout 'round_robin', which cuts across them; 'thd' cuts each")
    if parallel.sequence and parallel.tensor == 1:
        reasons.append("sequence_parallel without tensor parallelism")
    return reasons
