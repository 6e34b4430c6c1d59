"""Replay on NeMo Automodel models: finds the RouterReplay handles of a live model and attaches to them.

Automodel's own replay drives every handle of the process, in the order in which gates were built: a second model, or a
copy of one, is a count mismatch or not replayed at all, and -1 is an index. Here gates are found by walking the modules
that are there, named by their paths, and each call of a gate is answered from the rows of its own microbatch; MISSING
rows keep the live choice. The registry is neither read nor written.

Reads class names and attributes only and does not import the package. ``check_setup`` and ``with_replay`` come before
the model is built, ``attach`` after.

Axes: N token rows of one gate call (``b*S + s`` padded, ``t`` packed), E experts, K top-k slots.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from routeplane.batch.slots import RankOf, Shard
from routeplane.capture.gates import Gate
from routeplane.errors import ErrorKind, Problem, ReplayError, UsageError
from routeplane.replay.binding import Wiring
from routeplane.replay.gate import SEAM, GateRows, GateSite, SeamForcing, StandIn, install, spec_of_gates, uninstaller
from routeplane.replay.handle import DEFAULT_LIMITS, AuxChoice, Mode, ReplayHandle, ReplayLimits, ReplayPolicy
from routeplane.replay.transformers import checkpoint_sites

if TYPE_CHECKING:
    from routeplane.record.spec import RouteSpec

__all__ = ["ParallelSetup", "attach", "check_setup", "find_gates", "rank_shard", "record", "with_replay"]

#: Gate classes that ask their RouterReplay handle for the ids they use.
KNOWN_GATES = frozenset({"Gate", "Gemma4Gate"})
#: Those that do not, and what they do instead.
_BLIND_GATES = {
    "KimiK3Gate": "makes a handle and never asks it",
    "DeepseekV4VisionGate": "makes a handle and never asks it",
    "DeepseekV4HashGate": "selects by token id",
    "InklingGate": "has no handle",
    "FakeBalancedGate": "selects by position, for benchmarks",
}
#: Architectures that are built of such gates.
_BLIND_ARCHITECTURES = re.compile(r"^(?:KimiK3|DeepseekV4|DeepseekV41|Inkling)")
_GATE_LIKE = re.compile(r"(?<!SSM)(?:Gate|Router)$")
#: What wrappers for checkpointing and compiling put into paths.
_WRAPPER = re.compile(r"(?:_checkpoint_wrapped_module|_orig_mod)\.")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)(?=\.)")
_MTP = re.compile(r"(?:^|\.)mtp[^.]*(?=\.|$)", re.IGNORECASE)

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
) -> ReplayHandle:
    """Attach to the gates of one model or pipeline stage; the handle is a context manager that detaches on leaving.

    ``spec`` must name exactly the model's gates, by decoder layer (for a stage: ``spec.select(its layers)``).
    ``on_missing="raise"`` refuses batches with fed tokens that have no row; ``mode`` and ``limits`` as in
    ``routeplane.replay.transformers.attach``. ``aux``: which choice the load-balancing
    loss counts; ``"forced"`` is what Automodel does by itself.

    Raises ReplayError: NO_SEAM for a model without gates, with a gate that never asks its handle, or built without
    handles (``with_replay``), naming it, and for ``aux="forced"`` without such a loss; SPEC_MISMATCH where spec and
    model differ; and UsageError where a handle is attached already.
    """
    policy = ReplayPolicy(mode=mode, on_missing=on_missing, aux=aux, limits=limits)
    gates = find_gates(model)
    if aux == "forced":
        _require_losses(gates)
    stand_ins = [_GateStandIn(module) for _, module in gates]
    losses = [_LiveAux(stand_in) for stand_in in stand_ins if aux == "live" and _has_loss(stand_in.module)]
    uninstall = uninstaller(stand_ins)

    def undo() -> None:
        uninstall()
        for loss in losses:
            loss.remove()

    handle = ReplayHandle(
        spec,
        [
            GateSite(gate=gate, module=module, force=partial(_force, stand_in))
            for (gate, module), stand_in in zip(gates, stand_ins, strict=True)
        ],
        wiring=Wiring(),
        policy=policy,
        checkpoint_sites=partial(checkpoint_sites, model),
        undo=undo,
        root=model,
    )
    install(stand_ins)
    for loss in losses:
        loss.install()
    return handle


def record(model: nn.Module, *, aux: AuxChoice = "live") -> ReplayHandle:
    """Attach without anybody's records: for ``handle.recording``, and for replaying what that recorded (R2).

    The geometry is what the model's gates have. Raises as ``attach`` does, and ReplayError (NO_SEAM) for gates of
    different K.
    """
    spec = spec_of_gates([gate for gate, _ in find_gates(model)], model="")
    return attach(model, spec, aux=aux)


def find_gates(model: nn.Module) -> list[tuple[Gate, nn.Module]]:
    """The model's gates in module order, which is layer order; MTP left out.

    Raises ReplayError (NO_SEAM) as ``attach`` does.
    """
    found = []
    for path, module in model.named_modules():
        if not _MTP.search(path) and _selects(module):
            name = _WRAPPER.sub("", path)
            _refuse_blind(name, module)
            found.append((_gate(name, module), module))
    if not found:
        raise ReplayError(
            f"expected a mixture-of-experts model of Automodel's own, got {type(model).__name__} without a gate (one "
            "that was built with force_hf has the gates of Transformers: routeplane.replay.transformers)",
            kind=ErrorKind.NO_SEAM,
        )
    return found


def with_replay(arguments: Mapping[str, Any], /) -> dict[str, Any]:
    """The arguments that a model is built with, with routing replay switched on; a copy.

    Other ``moe_overrides`` stay as they are. Raises UsageError (ARGUMENT) beside a ``moe_config``, which Automodel does
    not take together with overrides: set ``enable_routing_replay=True`` in it.
    """
    if arguments.get("moe_config") is not None:
        raise UsageError(
            "expected moe_overrides or nothing, got moe_config: build it with enable_routing_replay=True instead",
            kind=ErrorKind.ARGUMENT,
        )
    overrides = {**(arguments.get("moe_overrides") or {}), "enable_routing_replay": True}
    return {**arguments, "moe_overrides": overrides}


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


class _GateStandIn(StandIn):
    """What ``replay_selection`` asks for the ids to use."""

    def __init__(self, module: nn.Module, /) -> None:
        super().__init__(module)
        #: of the call of the gate that is running, int64 ``[N, K]``
        self.live_NK: torch.Tensor | None = None

    def apply(self, indices: torch.Tensor) -> torch.Tensor:
        """Ids ``[N, K]`` for those that the gate has just selected."""
        if self.forcing is None:
            self.live_NK = None
            found: torch.Tensor = self.original.apply(indices)
            return found
        self.live_NK = indices
        return self.forcing.answer(indices, lambda: indices)


class _LiveAux:
    """Makes one gate's load-balancing loss count what the gate would have chosen."""

    def __init__(self, stand_in: _GateStandIn) -> None:
        self.stand_in = stand_in
        self.module: Any = stand_in.module
        self.original: Any = self.module._compute_aux_loss

    def __call__(
        self, scores_NE: torch.Tensor, load_E: torch.Tensor, token_mask_N: torch.Tensor, *more: Any
    ) -> torch.Tensor:
        live_NK = self.stand_in.live_NK
        if live_NK is not None:
            load_E = self.module._compute_expert_load(live_NK, token_mask_N)
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


def _force(stand_in: _GateStandIn, rows: GateRows) -> SeamForcing:
    return SeamForcing(rows, stand_in)


def _own_class(module: nn.Module) -> str:
    """The class name, past those that FSDP2 derives."""
    return next(base.__name__ for base in type(module).__mro__ if not base.__name__.startswith("FSDP"))


def _selects(module: nn.Module) -> bool:
    return hasattr(module, SEAM) or bool(_GATE_LIKE.search(_own_class(module)))


def _refuse_blind(path: str, module: nn.Module) -> None:
    name = _own_class(module)
    if name not in KNOWN_GATES:
        raise ReplayError(
            f"expected gates of {', '.join(sorted(KNOWN_GATES))}, got {name}, which "
            f"{_BLIND_GATES.get(name, 'is not known')} @ {path}",
            kind=ErrorKind.NO_SEAM,
        )
    if getattr(module, SEAM, None) is None:
        raise ReplayError(
            f"expected a gate with a RouterReplay handle, got one without @ {path}: build the model with "
            "routeplane.replay.automodel.with_replay(arguments)",
            kind=ErrorKind.NO_SEAM,
        )


def _gate(path: str, module: nn.Module) -> Gate:
    layer = _LAYER.search(path)
    num_experts = getattr(module, "n_experts", getattr(module, "num_experts", None))
    top_k = getattr(module, "topk", None)
    if layer is None or not isinstance(num_experts, int) or not isinstance(top_k, int):
        raise ReplayError(
            f"expected a gate under layers.<index> with experts and topk, got {num_experts!r} and {top_k!r} @ {path}",
            kind=ErrorKind.NO_SEAM,
        )
    return Gate(name=path, layer_id=int(layer.group(1)), num_experts=num_experts, top_k=top_k)


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
    if architectures and _BLIND_ARCHITECTURES.match(architectures[0]):
        return [f"architecture {architectures[0]}, whose gates never ask a handle"]
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
