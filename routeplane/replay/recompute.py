"""Which forward a recomputation repeats, told by the tensor that goes in: for checkpoints that cannot be captured.

Megatron-Core calls its checkpoint function by a module's global name, so no instance attribute leads to it. But a
checkpoint keeps the tensors that its region was given, and gives the same storage to the region again. So each module
where a region may begin notes the storage of its input, with the binding of that moment; in a backward pass the note
that has this storage names the forward.

Why this is exact: a note holds a weak reference to the storage, whose identity is not reused while it is held; the
storage of a region that can still be recomputed is alive, since the checkpoint holds it; so no two such regions of one
module share a note, and a note whose storage has died is of no region any more. Later modules of the same region have
inputs of their own making; they follow the autograd node that runs the recomputation.

Notes are taken without gradients only, as reentrant checkpoints run their forward. What is not found is left to
``binding``, which refuses what it cannot tell.

Knows modules, bindings and autograd. Knows no model library.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from routeplane.replay.binding import in_backward

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.hooks import RemovableHandle

    from routeplane.replay.binding import Binding, Wiring

__all__ = ["RegionHooks"]


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
        self._drop_stale()
        if in_backward() and not self.wiring.thread.frames and not self._reopen(site, tensor):
            return  # not known: nothing to note either
        if not torch.is_grad_enabled():
            site.add(tensor, self.wiring.here())

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
