"""Replay on Megatron-Core models: finds the routers of a live model chunk and attaches a handle to them.

Megatron's own replay keeps targets per router, and a list from which recomputations take the first: with two
microbatches in flight the order of backward passes decides what they get. Here each forward has its rows, and a
recomputation gets those of its forward (``RegionHooks``), in any order. Rows, MISSING ones and recomputation are
decided before Megatron's code sees ids, so its own checks, of which there are none, are not needed.

Routers are found by walking the modules that are there; ``moe_enable_routing_replay`` need not be set, and the list of
all routers of the process is neither read nor written. A router is what has ``num_experts``, ``topk`` and
``router_replay``, whatever its class; one of each kind runs alone on a few rows, with and without forced ids, and must
obey. A whole model is not probed: its forward takes what only the training loop knows, and its ranks' collectives.
Routers of multi-token prediction are left out. Does not import the package. Newer releases than 0.16.1 have the seam.

Axes: N token rows of one router call (``s*B + b`` padded, ``t`` packed), E experts, K top-k slots.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from routeplane.batch.slots import RankOf, Shard
from routeplane.capture.gates import left_as_it_was
from routeplane.capture.selection import Gate
from routeplane.errors import ErrorKind, Problem, ReplayError, UsageError, check_type
from routeplane.record.spec import MISSING, RouteSpec
from routeplane.replay.binding import Wiring, in_backward
from routeplane.replay.gate import SEAM, GateRows, GateSite, SeamForcing, StandIn, install, spec_of_gates, uninstaller
from routeplane.replay.handle import (
    DEFAULT_LIMITS,
    AuxChoice,
    Mode,
    ReplayBatch,
    ReplayHandle,
    ReplayLimits,
    ReplayPolicy,
    RowOrder,
)
from routeplane.replay.transformers import PackedForward, PackingCheck

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from routeplane.replay.binding import Binding

__all__ = ["RegionHooks", "attach", "check_setup", "find_gates", "local_spec", "rank_shard", "record", "row_order"]

#: token rows of a router's probing forward
_PROBE_ROWS = 7
_ROUTER_LIKE = re.compile(r"Router$")
_MOE_LAYER = re.compile(r"MoELayer$")
_MTP = re.compile(r"(?:^|\.)mtp[^.]*(?=\.|$)", re.IGNORECASE)
#: Scopes of CUDA graphs that hold a router: what it chose at capture is what a graph repeats.
_GRAPHED_ROUTERS = frozenset({"full", "full_iteration", "moe", "moe_router", "moe_preprocess"})


def attach(
    model: nn.Module,
    spec: RouteSpec,
    *,
    on_missing: Literal["live", "raise"] = "live",
    aux: AuxChoice = "live",
    mode: Mode = "force",
    limits: ReplayLimits = DEFAULT_LIMITS,
    packed: PackedForward | None = None,
) -> ReplayHandle:
    """Attach to the routers of one model chunk; the handle is a context manager that detaches on leaving.

    ``model``: one chunk, in its wrappers or without them. A virtual pipeline has several on a rank: attach to each of
    those that have routers, and enter the handle of the chunk that runs. ``spec`` must name exactly the chunk's
    routers: ``local_spec(model, spec)``. ``on_missing="raise"`` refuses batches with fed tokens that have no row;
    ``mode`` and ``limits`` as in ``routeplane.replay.transformers.attach``.
    ``aux``: which choice the load-balancing losses count; ``"live"`` is what Megatron does by itself.

    ``packed``: runs a forward of the whole model over packed ``input_ids`` and ``position_ids``, each ``[1, T]``, as
    the training loop does, and returns its logits. Where it is given, the first packed batch runs it three times, and
    packed batches are refused, ReplayError (PACKING), where a sequence's output depends on the sequence before it.

    A batch with ``token_ids`` of shape ``[B, S]`` is put into Megatron's order (``row_order``); any other must come in
    the order of the routers. Raises ReplayError: NO_SEAM for a model without routers, with one that is not known, or
    whose configuration bypasses the selection (``check_setup``), naming it, and for ``aux="forced"`` where there is no
    such loss; SPEC_MISMATCH where spec and model differ; and UsageError where a handle is attached already.
    """
    policy = ReplayPolicy(mode=mode, on_missing=on_missing, aux=aux, limits=limits)
    gates = find_gates(model)
    _verify_kinds(gates)
    if aux == "forced":
        _require_losses(gates)
    wiring = Wiring()
    regions = RegionHooks(wiring)
    stand_ins = [_RouterStandIn(module) for _, module in gates]
    uninstall = uninstaller(stand_ins)

    def undo() -> None:
        uninstall()
        regions.remove()

    handle = ReplayHandle(
        spec,
        [
            GateSite(gate=gate, module=module, force=_forcing(stand_in, aux))
            for (gate, module), stand_in in zip(gates, stand_ins, strict=True)
        ],
        wiring=wiring,
        policy=policy,
        row_order=row_order if packed is None else _checked_order(PackingCheck(model, packed)),
        undo=undo,
        root=model,
    )
    install(stand_ins)
    regions.install([*_layers(model), *(module for _, module in gates)])
    return handle


def record(model: nn.Module, *, aux: AuxChoice = "live") -> ReplayHandle:
    """Attach without anybody's records: for ``handle.recording``, and for replaying what that recorded (R2).

    The geometry is what the model's gates have. Raises as ``attach`` does, and ReplayError (NO_SEAM) for gates of
    different K.
    """
    spec = spec_of_gates([gate for gate, _ in find_gates(model)], model="")
    return attach(model, spec, aux=aux)


def find_gates(model: nn.Module) -> list[tuple[Gate, nn.Module]]:
    """The chunk's routers in module order, MTP left out; layers bear their numbers in the whole model, from 0.

    Raises ReplayError (NO_SEAM) as ``attach`` does.
    """
    check_type(model, nn.Module, expected="a model (torch.nn.Module)")
    modules = {path: module for path, module in model.named_modules() if not _MTP.search(path)}
    routers = {path: module for path, module in modules.items() if _is_router(module)}
    _refuse_unknown(modules, routers)
    if not routers:
        raise ReplayError(
            f"expected a chunk with routers, got {type(model).__name__} without one (a stage of dense layers needs no "
            "handle: local_spec() is None for it)",
            kind=ErrorKind.NO_SEAM,
        )
    gates = []
    for path, module in routers.items():
        gate = _gate(path, module)
        _refuse_bypassed(gate, module)
        gates.append((gate, module))
    return gates


def local_spec(model: nn.Module, spec: RouteSpec) -> RouteSpec | None:
    """The part of a whole model's spec that this chunk routes; None where it has no router.

    Raises SpecError (LAYERS) for a router whose layer the spec does not have.
    """
    layers = [
        _layer_id(path, module)
        for path, module in model.named_modules()
        if _is_router(module) and not _MTP.search(path)
    ]
    return spec.select(layers) if layers else None


def rank_shard(model: nn.Module, spec: RouteSpec) -> Shard:
    """What this rank's routers see of a batch of whole records, for ``collate(shard=)`` and ``batch.shard``.

    Context parallelism cuts each sequence into two chunks for each rank, as Megatron's own batches are cut; sequence
    parallelism then cuts what is left by the tensor-parallel rank, where the configuration has it on; layers are those
    of ``local_spec``. Reads the process groups of the chunk's first router. Raises ReplayError as ``find_gates`` does.
    """
    gates = find_gates(model)
    router: Any = gates[0][1]
    sequence = _rank_of(router.tp_group) if router.config.sequence_parallel else (0, 1)
    own = local_spec(model, spec)
    return Shard(
        context_parallel=_rank_of(router.cp_group),
        sequence_parallel=sequence,
        layers=None if own is None else own.layer_ids,
    )


def row_order(batch: ReplayBatch) -> torch.Tensor | None:
    """int64 ``[N]``: the batch's row at each place of Megatron's order, or None where the orders are one.

    Megatron's hidden states are ``[S, B, H]``: row ``b*S + s`` of a padded batch is its ``s*B + b``. Raises ReplayError
    (ROW_COUNT) for a batch whose rows are not those of its tokens.
    """
    tokens = getattr(batch, "token_ids", None)
    if not isinstance(tokens, torch.Tensor) or tokens.dim() != 2:
        return None
    if tokens.numel() != batch.num_rows:
        raise ReplayError(
            f"expected a row for each of {tokens.numel()} tokens, {list(tokens.shape)}, got {batch.num_rows}",
            kind=ErrorKind.ROW_COUNT,
        )
    return torch.arange(tokens.numel()).view(tokens.shape).t().reshape(-1)


def check_setup(config: object, *, engine: str = "vllm") -> None:
    """Refuse a configuration that cannot be replayed, before anything is loaded.

    ``config``: a TransformerConfig, or what it is made of: any object or mapping with its names. ``engine``: which one
    captures the routes. Raises UsageError (ARGUMENT) with every reason as a problem.
    """
    found = [*_bypasses(config), *([] if engine in _ENGINES else [f"engine {engine!r}, which returns no routes"])]
    if found:
        raise UsageError.from_problems(
            (Problem(kind=ErrorKind.ARGUMENT, message=f"expected a selection to replay, got {each}") for each in found),
            what=f"replay on Megatron-Core is refused for {len(found)} reasons",
        )


#: Engines whose routes ``routeplane.capture`` reads.
_ENGINES = ("sglang", "transformers", "vllm")


def _checked_order(check: PackingCheck) -> RowOrder:
    def order(batch: ReplayBatch) -> torch.Tensor | None:
        check(batch)
        return row_order(batch)

    return order


class _RouterStandIn(StandIn):
    """What ``topk_routing_with_score_function`` asks instead of selecting."""

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores and ids ``[N, K]``; ``scores`` is dense ``[N, E]``, and the default masks groups by itself."""
        if default_compute_topk is None:
            raise ReplayError("expected the router's own selection, got none", kind=ErrorKind.NO_SEAM)
        if self.forcing is None:
            ask = default_compute_topk if self.original is None else self.original.get_replay_topk
            more = () if self.original is None else (default_compute_topk,)
            found: tuple[torch.Tensor, torch.Tensor] = ask(scores, topk, num_groups, group_topk, *more)
            return found
        chosen_NK = self.forcing.answer(scores, lambda: default_compute_topk(scores, topk, num_groups, group_topk)[1])
        return scores.gather(1, chosen_NK), chosen_NK


class _ForcedAux(TorchFunctionMode):
    """Answers the second selection of a router's call, that of its load-balancing losses, with the first one's ids."""

    def __init__(self, forcing: SeamForcing) -> None:
        super().__init__()
        self.forcing = forcing

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """All calls go on unchanged but this one."""
        kwargs = kwargs or {}
        rows = self.forcing.rows
        if func is torch.topk and self.forcing.settled and kwargs.get("k") == rows.gate.top_k:
            scores = args[0] if args else kwargs["input"]
            if tuple(scores.shape) == (rows.num_rows, rows.gate.num_experts):
                return torch.return_types.topk((scores.gather(-1, rows.chosen_NK), rows.chosen_NK))
        return func(*args, **kwargs)


class _AuxForcing(SeamForcing):
    """As ``SeamForcing``, for the losses too."""

    def __init__(self, rows: GateRows, stand_in: StandIn, /) -> None:
        super().__init__(rows, stand_in)
        self._mode = _ForcedAux(self)

    def open(self) -> None:
        """Answer both questions."""
        super().open()
        self._mode.__enter__()  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Answer neither."""
        self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        super().close()


def _require_losses(gates: Iterable[tuple[Gate, nn.Module]]) -> None:
    for gate, router in gates:
        if not getattr(router, "is_aux_loss_enabled", lambda: False)():
            raise ReplayError(
                f"expected a load-balancing loss that can follow the forced ids (aux='forced'), got none @ {gate}",
                kind=ErrorKind.NO_SEAM,
            )


def _forcing(stand_in: StandIn, aux: AuxChoice) -> Callable[[GateRows], SeamForcing]:
    kind = _AuxForcing if aux == "forced" else SeamForcing
    return lambda rows: kind(rows, stand_in)


def _is_router(module: nn.Module) -> bool:
    """Whether a module says that it asks for its ids, whatever its class; ``attach`` sees whether it does."""
    counts = [getattr(module, name, None) for name in ("num_experts", "topk")]
    return hasattr(module, SEAM) and all(type(count) is int for count in counts)


def _verify_kinds(gates: Iterable[tuple[Gate, nn.Module]]) -> None:
    """Run one router of each kind alone, on a few rows; it is left as it was. Raises ReplayError (NO_SEAM)."""
    kinds = {(type(router), gate.num_experts, gate.top_k): (gate, router) for gate, router in reversed([*gates])}
    for gate, router in kinds.values():
        weight = next((each for each in router.parameters() if each.dim() == 2), None)
        if weight is None or hasattr(weight, "device_mesh") or not weight.untyped_storage().size():
            continue  # sharded: it is whole in a forward of the model alone, where a router that does not ask raises
        generator = torch.Generator().manual_seed(0)
        hidden_N1H = torch.randn(_PROBE_ROWS, 1, weight.shape[1], generator=generator).to(weight.device, weight.dtype)
        with left_as_it_was(router):
            try:
                observed = _observed(gate, router, hidden_N1H)
            except (RuntimeError, TypeError, ValueError, AttributeError, IndexError) as error:
                if isinstance(error, ReplayError):
                    raise
                observed = f"a forward that raises {type(error).__name__}: {error}"
        if observed:
            raise ReplayError(
                f"expected a router whose selection obeys, got {observed} ({_own_class(router)}) @ {gate}",
                kind=ErrorKind.NO_SEAM,
            )


def _observed(gate: Gate, router: nn.Module, hidden_N1H: torch.Tensor) -> str:
    """What a router does under forced ids that it must not; empty where it follows them."""
    nothing_NK = torch.full((_PROBE_ROWS, gate.top_k), MISSING, dtype=torch.int16)
    live_NE, _, gradient, own_NK = _routed(gate, router, hidden_N1H, nothing_NK)
    own_NE = torch.zeros_like(live_NE).scatter(1, own_NK, 1.0)
    other_NK = own_NE.argsort(dim=1, stable=True)[:, : gate.top_k]
    if not torch.allclose(live_NE, _routed(gate, router, hidden_N1H, own_NK)[0], rtol=2e-2, atol=1e-5):
        return "other weights when its own ids are forced"
    forced_NE, forced_map_NE, forced_gradient, _ = _routed(gate, router, hidden_N1H, other_NK)
    expected_NE = torch.zeros_like(forced_map_NE).scatter(1, other_NK, value=True)
    if not torch.equal(forced_map_NE, expected_NE):
        return "a choice that is not the forced ids"
    if bool(forced_NE[~expected_NE].any()):
        return "weights of experts that are not forced"
    return "weights of forced ids that no gradient reaches" if gradient > 1e-7 >= forced_gradient else ""


def _routed(
    gate: Gate, router: nn.Module, hidden_N1H: torch.Tensor, ids_NK: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, float, torch.Tensor]:
    """A router's weights and choice ``[N, E]`` under ids, the largest gradient of its input, and the ids ``[N, K]``."""
    stand_in = _RouterStandIn(router)
    forcing = SeamForcing(GateRows(gate, ids_NK.to(torch.int16)), stand_in)
    install([stand_in])
    forcing.open()
    try:
        with torch.enable_grad():
            hidden_N1H = hidden_N1H.detach().requires_grad_()
            weights_NE, map_NE = router.forward(hidden_N1H)
    finally:
        forcing.close()
        uninstaller([stand_in])()
    forcing.require_hit()
    if weights_NE.shape != (_PROBE_ROWS, gate.num_experts) or map_NE.shape != weights_NE.shape:
        raise TypeError(f"weights {list(weights_NE.shape)} and a choice {list(map_NE.shape)} instead of [N, E]")
    gradient = 0.0
    if weights_NE.requires_grad:
        direction_NE = torch.randn(weights_NE.shape, generator=torch.Generator().manual_seed(1)).to(weights_NE)
        (found,) = torch.autograd.grad(weights_NE, hidden_N1H, direction_NE, allow_unused=True)
        gradient = 0.0 if found is None else float(found.abs().max())
    return weights_NE.detach(), map_NE.bool(), gradient, forcing.rows.chosen_NK


def _own_class(module: nn.Module) -> str:
    """The class name, past those that FSDP2 derives."""
    return next(base.__name__ for base in type(module).__mro__ if not base.__name__.startswith("FSDP"))


def _layers(model: nn.Module) -> Iterator[nn.Module]:
    """Where a fully recomputed region may begin: what stands in a list called ``layers``."""
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and path.rpartition(".")[2] == "layers" and not _MTP.search(path):
            yield from module


def _layer_id(path: str, module: nn.Module) -> int:
    number = getattr(module, "layer_number", None)
    if not isinstance(number, int) or number < 1:
        raise ReplayError(
            f"expected a router that knows its layer's number, from 1, got {number!r} @ {path}", kind=ErrorKind.NO_SEAM
        )
    return number - 1


def _gate(path: str, module: nn.Module) -> Gate:
    num_experts, top_k = int(module.num_experts), int(module.topk)  # type: ignore[arg-type]
    return Gate(name=path, layer_id=_layer_id(path, module), num_experts=num_experts, top_k=top_k)


def _refuse_unknown(modules: Mapping[str, nn.Module], routers: Mapping[str, nn.Module]) -> None:
    unknown = [path for path, module in modules.items() if _routes_unknown(path, module, routers)]
    # a router inside a layer says more than the layer
    inner = [path for path in unknown if not any(other.startswith(f"{path}.") for other in unknown)]
    if inner:
        raise ReplayError(
            f"expected routers with num_experts and topk that ask an object at {SEAM} for their ids, as those of "
            f"Megatron-Core 0.16 and later do, got {_own_class(modules[inner[0]])} @ {inner[0] or 'the model'}",
            kind=ErrorKind.NO_SEAM,
        )


def _routes_unknown(path: str, module: nn.Module, routers: Mapping[str, nn.Module]) -> bool:
    name = _own_class(module)
    if _ROUTER_LIKE.search(name):
        return path not in routers
    return bool(_MOE_LAYER.search(name)) and not any(each.startswith(f"{path}.") for each in routers)


def _refuse_bypassed(gate: Gate, module: nn.Module) -> None:
    found = _bypasses(getattr(module, "config", None))
    if found:
        raise ReplayError(
            f"expected a selection that ids can be forced on, got {'; '.join(found)} @ {gate}", kind=ErrorKind.NO_SEAM
        )


def _bypasses(config: object) -> list[str]:
    """What in a configuration keeps routers from asking for their ids, or two microbatches from being told apart."""

    def of(name: str) -> Any:
        return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)

    balancing = of("moe_router_load_balancing_type")
    found = []
    if of("moe_router_fusion"):
        found.append("moe_router_fusion, a kernel that selects by itself")
    if balancing == "sinkhorn" or (isinstance(balancing, list | tuple) and "sinkhorn" in balancing):
        found.append("moe_router_load_balancing_type 'sinkhorn', which selects by itself")
    if of("moe_router_force_load_balancing"):
        found.append("moe_router_force_load_balancing, which replaces the scores by random ones")
    if of("overlap_moe_expert_parallel_comm"):
        found.append("overlap_moe_expert_parallel_comm, which runs two microbatches in one forward")
    if of("moe_expert_capacity_factor") is not None:
        found.append("moe_expert_capacity_factor, which drops forced experts beyond it")
    if graphed := _graphed(of("cuda_graph_impl"), of("cuda_graph_scope")):
        found.append(f"CUDA graphs of {graphed}, which repeat the choice of their capture")
    return found


def _graphed(implementation: object, scope: object) -> str:
    """The scopes that hold a router, as text; empty where there are none."""
    if implementation in (None, "none"):
        return ""
    names = scope.split(",") if isinstance(scope, str) else scope if isinstance(scope, list | tuple) else [scope]
    scopes = [str(getattr(each, "name", each)) for each in names if each is not None]
    return ", ".join(each for each in scopes if each in _GRAPHED_ROUTERS) if scopes else "whole layers"


def _rank_of(group: Any) -> RankOf:
    """``(rank, world)`` of a process group; of none, (0, 1)."""
    return (0, 1) if group is None else (int(group.rank()), int(group.size()))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Note:
    """The binding (None: live) under which a module was given a storage."""

    storage: StorageWeakRef
    binding: Binding | None


@dataclass(kw_only=True, slots=True)
class _Site:
    """One module where a checkpointed region may begin, by the storage of its input."""

    module: nn.Module
    notes: dict[int, _Note] = field(default_factory=dict)
    hooks: tuple[RemovableHandle, ...] = ()

    def purge(self) -> None:
        self.notes = {key: note for key, note in self.notes.items() if not _dead(note)}

    def add(self, tensor: torch.Tensor, binding: Binding | None) -> None:
        self.purge()
        storage = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        self.notes[storage.cdata] = _Note(storage=storage, binding=binding)

    def find(self, tensor: torch.Tensor) -> _Note | None:
        note = self.notes.get(tensor.untyped_storage()._cdata)
        return None if note is None or _dead(note) else note

    def drop(self, note: _Note) -> None:
        self.notes.pop(note.storage.cdata, None)

    def remove(self) -> None:
        for hook in self.hooks:
            hook.remove()
        self.hooks = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class _OpenRegion:
    site: _Site
    task: int
    frame: AbstractContextManager[None]


class _Thread(threading.local):
    def __init__(self) -> None:
        self.opened: list[_OpenRegion] = []


class RegionHooks:
    """Two hooks on each module where a checkpointed region may begin: a layer, a router. One instance per handle."""

    def __init__(self, wiring: Wiring) -> None:
        self.wiring = wiring
        self._sites: dict[int, _Site] = {}
        self._thread = _Thread()

    def install(self, modules: Iterable[nn.Module]) -> None:
        """Hook onto these modules, outside of hooks that are there already."""
        for module in modules:
            site = _Site(module=module)
            self._sites[id(module)] = site
            site.hooks = (
                module.register_forward_pre_hook(self._enter, with_kwargs=True, prepend=True),
                module.register_forward_hook(self._leave, always_call=True),
            )

    def remove(self) -> None:
        """Take the hooks off, but for modules whose forward under a binding may yet be recomputed.

        There they stay as guards, which raise ReplayError (DETACHED) for that recomputation, and go with the next
        forward once it cannot come any more.
        """
        for site in self._sites.values():
            self._retire(site)

    def _retire(self, site: _Site) -> None:
        site.purge()
        if all(note.binding is None for note in site.notes.values()):
            site.remove()

    def __deepcopy__(self, memo: dict[int, Any]) -> RegionHooks:
        # inert in a copied model: its modules are others
        return self

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        site = self._sites.get(id(module))
        if site is None or site.module is not module:
            return
        if self.wiring.detached and not in_backward():
            self._retire(site)
            return
        tensor = next(_tensors(args, kwargs), None)
        if tensor is None:
            return
        self._refuse_unturned(tensor)
        self._drop_stale()
        if in_backward() and not self.wiring.thread.frames and not self._reopen(site, tensor):
            return  # not known: nothing to note either
        if not torch.is_grad_enabled():
            site.add(tensor, self.wiring.here())

    def _refuse_unturned(self, hidden_SBH: torch.Tensor) -> None:
        binding = self.wiring.here()
        tokens = None if binding is None else binding.token_ids
        if tokens is not None and tokens.dim() == 1 and hidden_SBH.dim() == 3 and min(hidden_SBH.shape[:2]) > 1:
            raise ReplayError(
                f"expected hidden states [T, 1, H] for {len(tokens)} packed rows, got {list(hidden_SBH.shape)}: rows "
                "of a padded forward come with token_ids [B, S], and are put into the order of the routers",
                kind=ErrorKind.ROW_COUNT,
            )

    def _reopen(self, site: _Site, tensor: torch.Tensor) -> bool:
        """Open the frame of the forward that runs again; False where no note of it exists."""
        node: Any = torch._C._current_autograd_node()
        known = node is not None and self in node.metadata
        if known:
            binding = node.metadata[self]
        else:
            note = site.find(tensor)
            if note is None:
                return False
            binding = note.binding
            if node is not None:
                # kept there for a second pass over a retained graph; the note has served, and what Megatron's
                # dispatchers keep of the last microbatch must not keep it
                node.metadata[self] = binding
                site.drop(note)
        frame = self.wiring.frame(binding, rerun=True)
        frame.__enter__()
        self._thread.opened.append(_OpenRegion(site=site, task=torch._C._current_graph_task_id(), frame=frame))
        return True

    def _leave(self, module: nn.Module, args: object, output: object) -> None:
        opened = self._thread.opened
        if opened and opened[-1].site.module is module:
            opened.pop().frame.__exit__(None, None, None)

    def _drop_stale(self) -> None:
        # a KeyboardInterrupt in a recomputation runs no hooks; what it left open belongs to a pass that is over
        opened = self._thread.opened
        while opened and opened[-1].task != torch._C._current_graph_task_id():
            opened.pop().frame.__exit__(None, None, None)


def _dead(note: _Note) -> bool:
    expired: bool = note.storage.expired()  # type: ignore[no-untyped-call]
    return expired


def _tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """The tensors of a call, hidden states first: Megatron gives them by position or by this name."""
    for value in (*args, kwargs.get("hidden_states"), *kwargs.values()):
        if isinstance(value, torch.Tensor):
            yield value
