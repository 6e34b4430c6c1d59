"""Replay on Hugging Face Transformers models: finds the gates of a live model and attaches a handle to them.

Gates are found by walking the modules that are there, never by the order in which something was built, and named by
their module paths. A family is known when its router selects with one ``topk`` inside its own ``forward`` (see
``gate``); a model with any other router is refused by name. Gates of multi-token-prediction layers are left out.

Reads class names and attributes only and does not import the package, so a model of any release can be walked. Up to
5.12 the routers of DeepSeek-V3 and GLM-4 do not select (their MoE block does), and are refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from typing import Literal

from torch import nn

from routeplane.errors import ErrorKind, ReplayError, refused
from routeplane.record.spec import RouteSpec
from routeplane.replay.aux_loss import AuxiliaryHook
from routeplane.replay.binding import Wiring
from routeplane.replay.gate import ForcedTopK, Gate, GateSite
from routeplane.replay.handle import AuxChoice, ReplayHandle
from routeplane.replay.recording import spec_of_gates

__all__ = ["KNOWN_ROUTERS", "attach", "checkpoint_sites", "find_gates", "record"]

#: Router classes that select with one topk over [N, E] inside ``forward`` and carry E and K as attributes.
KNOWN_ROUTERS = frozenset(
    {
        "DeepseekV2TopkRouter",
        "DeepseekV3TopkRouter",
        "Ernie4_5_MoeTopKRouter",
        "Glm4MoeTopkRouter",
        "GptOssTopKRouter",
        "MiniMaxM2TopKRouter",
        "MiniMaxTopKRouter",
        "MixtralTopKRouter",
        "OlmoeTopKRouter",
        "Qwen2MoeTopKRouter",
        "Qwen3MoeTopKRouter",
        "Qwen3NextTopKRouter",
    }
)

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)(?=\.)")
_MTP_NAME = re.compile(r"(?:^|\.)(?:mtp|nextn)[^.]*(?=\.|$)", re.IGNORECASE)
_MTP_CLASS = re.compile(r"Mtp|MTP|NextN")
#: Blocks whose class name or parts say that they route; each must have a known router inside.
_MOE_CLASS = re.compile(r"(?:MoE|Moe|MoeBlock|MoEBlock|MOE)$")
_ROUTER_CLASS = re.compile(r"(?:Router|Gate)$")
#: Instance attributes that hold a checkpoint function: Transformers' layers, and torch's CheckpointWrapper.
_CHECKPOINT_ATTRIBUTES = ("_gradient_checkpointing_func", "checkpoint_fn")


def attach(
    model: nn.Module,
    spec: RouteSpec,
    *,
    on_missing: Literal["live", "raise"] = "live",
    aux: AuxChoice = "live",
    compiled: bool = False,
) -> ReplayHandle:
    """Attach to a model's gates; the handle is a context manager that detaches on leaving.

    ``spec`` must name exactly the model's gates (for a pipeline stage: ``spec.select(its layers)``).
    ``on_missing="raise"`` refuses batches with fed tokens that have no row; ``"live"`` leaves these to the gate.
    ``aux="forced"`` has the load-balancing loss (``output_router_logits=True``) count the ids that gates used;
    ``"live"`` leaves it what the model makes of its logits. ``compiled=True`` serves a model, or blocks of it, under
    torch.compile without a graph break and without a recompilation for each batch. The
    model stays the caller's; only its gate instances and checkpoint attributes are touched, until ``detach()``. A copy
    made of it meanwhile is not attached.

    Raises ReplayError (NO_SEAM) for a model without gates, with a router that is not known, or without the loss that
    ``aux="forced"`` is about, and
    (SPEC_MISMATCH) where spec and model differ, UsageError where a handle is attached already.
    """
    sites = [
        GateSite(gate=gate, module=module, force=ForcedTopK, traced=compiled) for gate, module in find_gates(model)
    ]
    if compiled and aux == "forced":
        raise refused("aux='live' for a compiled model", "aux='forced', which no graph can follow")
    losses = _aux_modules(model) if aux == "forced" else []
    wiring, hooks = Wiring(), list[AuxiliaryHook]()

    def undo() -> None:
        for hook in hooks:
            hook.remove()

    handle = ReplayHandle(
        spec,
        sites,
        wiring=wiring,
        on_missing=on_missing,
        aux=aux,
        checkpoint_sites=partial(checkpoint_sites, model),
        undo=undo,
    )
    hooks += [AuxiliaryHook(module, wiring=wiring) for module in losses]
    return handle


def record(model: nn.Module, *, aux: AuxChoice = "live", compiled: bool = False) -> ReplayHandle:
    """Attach without anybody's records: for ``handle.recording``, and for replaying what that recorded (R2).

    The geometry is what the model's gates have. Raises as ``attach`` does, and ReplayError (NO_SEAM) for gates of
    different K.
    """
    spec = spec_of_gates([gate for gate, _ in find_gates(model)], model=type(model).__name__)
    return attach(model, spec, aux=aux, compiled=compiled)


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


def find_gates(model: nn.Module) -> list[tuple[Gate, nn.Module]]:
    """The model's gates in module order, MTP left out. Raises ReplayError (NO_SEAM) as ``attach`` does."""
    modules = dict(_without_mtp(model))
    gates = [(_gate(path, module), module) for path, module in modules.items() if _is_known(module)]
    _refuse_unknown(modules, [gate.name for gate, _ in gates])
    if not gates:
        raise ReplayError(
            f"expected a mixture-of-experts model, got {type(model).__name__} without a single gate",
            kind=ErrorKind.NO_SEAM,
        )
    return gates


def checkpoint_sites(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Modules with a checkpoint function of their own, and the attribute's name; they change when it is enabled."""
    for module in model.modules():
        for name in _CHECKPOINT_ATTRIBUTES:
            if callable(vars(module).get(name)):
                yield module, name


def _without_mtp(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    skipped: list[str] = []
    for path, module in model.named_modules():
        if any(path.startswith(f"{outer}.") for outer in skipped):
            continue
        if path and (_MTP_NAME.search(path) or _MTP_CLASS.search(type(module).__name__)):
            skipped.append(path)
            continue
        yield path, module


def _is_known(module: nn.Module) -> bool:
    # FSDP2 gives a module a class of its own that derives from the original
    return any(base.__name__ in KNOWN_ROUTERS for base in type(module).__mro__)


def _gate(path: str, module: nn.Module) -> Gate:
    layer = _LAYER.search(path)
    num_experts, top_k = getattr(module, "num_experts", None), getattr(module, "top_k", None)
    if layer is None or not isinstance(num_experts, int) or not isinstance(top_k, int):
        raise ReplayError(
            "expected a router under layers.<index> that selects by itself, with num_experts and top_k, got "
            f"num_experts={num_experts!r} and top_k={top_k!r} @ {path} ({type(module).__name__})",
            kind=ErrorKind.NO_SEAM,
        )
    return Gate(name=path, layer_id=int(layer.group(1)), num_experts=num_experts, top_k=top_k)


def _refuse_unknown(modules: dict[str, nn.Module], known: list[str]) -> None:
    unknown = [path for path, module in modules.items() if _routes_unknown(path, module, known)]
    # a router inside a refused block says more than the block
    inner = [path for path in unknown if not any(other.startswith(f"{path}.") for other in unknown)]
    if inner:
        listed = ", ".join(f"{path or 'the model'} ({type(modules[path]).__name__})" for path in inner[:4])
        raise ReplayError(
            f"expected routers of a known family ({', '.join(sorted(KNOWN_ROUTERS))}), got {len(inner)} others: "
            f"{listed}{', ...' if len(inner) > 4 else ''}",
            kind=ErrorKind.NO_SEAM,
        )


def _routes_unknown(path: str, module: nn.Module, known: list[str]) -> bool:
    name = type(module).__name__
    if _ROUTER_CLASS.search(name):
        routes = hasattr(module, "top_k") or hasattr(module, "num_experts")
        return routes and not _is_known(module)
    if _MOE_CLASS.search(name) or isinstance(getattr(module, "experts", None), nn.Module):
        return not any(gate.startswith(f"{path}.") for gate in known)
    return False
