"""Which rows a firing gate gets: the binding of the forward it belongs to, also when autograd recomputes it.

Three places know a binding. ``Wiring.current`` is that of the open ``replaying``. A *frame* is a checkpointed region:
it captures the current binding, or that there is none, when it first runs, and puts it back for each recomputation,
whatever is current by then. A gate that fires inside a backward pass and outside every frame is recomputed by a
checkpoint that was not captured; it gets the current binding only where it must be the right one, else ReplayError.

Where layers are looped, a gate fires several times in a forward, and the order of the probing forward says which layer
each firing is: a forward in another order is refused. A frame keeps the layers of its first run for recomputations.

Knows gates and rows, hooks and checkpoint functions. Knows no batch and no model library.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import torch

from routeplane.capture.selection import Gate
from routeplane.errors import ErrorKind, ReplayError
from routeplane.replay.gate import (
    Forcing,
    ForwardStandIn,
    GateRows,
    GateSite,
    TracedGate,
    TracedRows,
    without_replay,
)

if TYPE_CHECKING:
    from torch import nn
    from torch.overrides import TorchFunctionMode
    from torch.utils.hooks import RemovableHandle

__all__ = ["Binding", "CapturingCheckpoint", "GateHook", "InertHook", "LiveHook", "TokenHook", "Wiring", "in_backward"]


@dataclass(kw_only=True, slots=True)
class Progress:
    """How far a forward of looped layers has come: the number of gate calls, and whether the root's forward runs."""

    fired: int = 0
    inside: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Binding:
    """The rows of one ``replaying``, by decoder layer. Lives as long as the autograd graphs that may recompute."""

    rows: Mapping[int, GateRows]
    progress: Progress = field(default_factory=Progress)
    #: what the model must be given, where the batch knows it
    token_ids: torch.Tensor | None = None
    is_shard: bool = False


@dataclass(kw_only=True, slots=True)
class _Frame:
    binding: Binding | None
    rerun: bool
    #: layers of the region's gate calls, in order; None where they are not kept
    layers: list[int] | None = None
    #: how many of them a repeated run has come by; None in the first run, which adds to them
    repeated: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class _OpenGate:
    hook: GateHook
    forcing: Forcing
    rerun: bool


class _Thread(threading.local):
    # autograd recomputes on one thread per device: frames of two devices may be open at once
    def __init__(self) -> None:
        self.frames: list[_Frame] = []
        self.open: list[_OpenGate] = []
        #: modes around the whole forward of a module, gates included
        self.around: list[tuple[nn.Module, TorchFunctionMode]] = []
        #: the gate whose hooks have just run, and whose forward comes next
        self.entered: GateHook | None = None


class Wiring:
    """The state that a handle, its hooks and its captured checkpoints share. One per handle."""

    def __init__(self) -> None:
        self.current: Binding | None = None
        self.detached = False
        self.thread = _Thread()
        #: gates that may be compiled: rows are seated there for each forward, on whatever thread it runs
        self.traced: list[TracedGate] = []
        #: layers and their gates in the order of a forward, where layers are looped; else empty
        self._order: list[tuple[int, GateHook]] = []

    @property
    def is_looped(self) -> bool:
        """Whether a gate fires several times in a forward."""
        return bool(self._order)

    def follow(self, hooks: Iterable[GateHook]) -> None:
        """Take the gates of the model, each with the layers of its firings."""
        order = [(layer_id, hook) for hook in hooks for layer_id in hook.layer_ids]
        if len({hook for _, hook in order}) < len(order):
            self._order = sorted(order, key=lambda pair: pair[0])

    @contextmanager
    def binding(self, binding: Binding) -> Iterator[None]:
        """Make a binding current for the forwards of a ``with`` body."""
        depth = self._depth()
        for traced in self.traced:
            traced.refused = False  # an exception may have left the last body before anyone asked
        self.current = binding
        self._seat(binding, rerun=False)
        try:
            yield
        finally:
            self.current = None
            self._seat(None, rerun=False)
            self._close(depth)

    def _seat(self, binding: Binding | None, *, rerun: bool) -> None:
        for traced in self.traced:
            traced.seat(None if binding is None else binding.rows[traced.gate.layer_id].traced, rerun=rerun)

    def capture(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A checkpointed region that runs under today's binding, now and in every recomputation."""
        binding = self.here()
        calls = 0
        layers: list[int] = []

        def region(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            frame = _Frame(binding=binding, rerun=calls > 1 or in_backward(), layers=layers)
            frame.repeated = 0 if calls > 1 else None
            with self._inside(frame):
                return function(*args, **kwargs)

        return region

    def here(self) -> Binding | None:
        """The binding that a forward run now gets: that of the innermost frame, else the current one."""
        frames = self.thread.frames
        return frames[-1].binding if frames else self.current

    @contextmanager
    def frame(self, binding: Binding | None, *, rerun: bool) -> Iterator[None]:
        """Run a region under a binding, or none, whatever is current; for frameworks that recompute by themselves.

        ``rerun`` says that it is a recomputation, whose gate calls are not counted. Raises ReplayError (DETACHED) for
        a binding whose handle is detached.
        """
        with self._inside(_Frame(binding=binding, rerun=rerun)):
            yield

    @contextmanager
    def _inside(self, frame: _Frame) -> Iterator[None]:
        if frame.binding is not None and self.detached:
            raise ReplayError(
                "expected the handle to stay attached until backward() is done, got a recomputation after detach()",
                kind=ErrorKind.DETACHED,
            )
        thread = self.thread
        depth = self._depth()
        thread.frames.append(frame)
        self._seat(frame.binding, rerun=frame.rerun)
        try:
            yield
        finally:
            thread.frames.pop()
            self._seat(self.here(), rerun=bool(thread.frames) and thread.frames[-1].rerun)
            self._close(depth)

    def _depth(self) -> tuple[int, int]:
        return len(self.thread.open), len(self.thread.around)

    def _close(self, depth: tuple[int, int]) -> None:
        # a module's always_call hooks do not run for KeyboardInterrupt; a scope that ends leaves no mode behind
        gates, around = depth
        while len(self.thread.open) > gates:
            self.thread.open.pop().forcing.close()
        while len(self.thread.around) > around:
            self.thread.around.pop()[1].__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def firing(self, hook: GateHook) -> tuple[GateRows, bool] | None:
        """The rows for a gate that fires now and whether this is a recomputation; None where it stays live."""
        if self.thread.frames:
            frame = self.thread.frames[-1]
            return None if frame.binding is None else (self._rows(hook, frame.binding), frame.rerun)
        if in_backward():
            return self._outside_rerun(hook)
        hook.last_bound = self.current is not None
        if self.current is None:
            return None
        rows = self._rows(hook, self.current)
        rows.outside_calls += 1
        hook.outstanding += torch.is_grad_enabled()
        return rows, False

    def _rows(self, hook: GateHook, binding: Binding) -> GateRows:
        """The rows of the layer that this firing of a gate is."""
        if not self._order:
            return binding.rows[hook.gate.layer_id]
        frames = self.thread.frames
        known = next((frame for frame in reversed(frames) if frame.repeated is not None), None)
        if known is not None:
            layer_id = self._repeated(hook, known)
        elif frames and frames[-1].rerun:
            raise _unbound(hook.gate)
        else:
            layer_id = self._next(hook, binding.progress)
        for frame in frames:
            if frame.layers is not None and frame.repeated is None:
                frame.layers.append(layer_id)
        return binding.rows[layer_id]

    @staticmethod
    def _repeated(hook: GateHook, frame: _Frame) -> int:
        layers, at = frame.layers or [], frame.repeated or 0
        if at >= len(layers) or layers[at] not in hook.layer_ids:
            raise _unbound(hook.gate)
        frame.repeated = at + 1
        return layers[at]

    def _next(self, hook: GateHook, progress: Progress) -> int:
        """The layer of a firing in a forward; a new forward begins with the first gate."""
        if not progress.inside and (progress.fired == len(self._order) or self._order[progress.fired][1] is not hook):
            progress.fired = 0  # what came before was left by an exception, or was whole
        if progress.fired == len(self._order) or self._order[progress.fired][1] is not hook:
            expected = [str(each.gate) for _, each in self._order[progress.fired :][:1]]
            raise ReplayError(
                f"expected a forward whose gates fire as in the probing forward, {len(self._order)} times, got "
                f"{hook.gate.name} instead of {expected or 'the end'} after {progress.fired} firings",
                kind=ErrorKind.GATE_FIRED,
            )
        layer_id = self._order[progress.fired][0]
        progress.fired += 1
        return layer_id

    def _outside_rerun(self, hook: GateHook) -> tuple[GateRows, bool] | None:
        """Rows for a gate that fires inside a backward pass and outside every frame.

        With a binding current, it is that forward's recomputation unless this gate did not fire in it, or was
        recomputed for it already: then it is another forward's. With none, it is a live forward's, unless the gate
        last fired under a binding, or did so with gradients and was not recomputed since. Cannot be told apart: a
        reentrant checkpoint written by hand runs its forward without gradients, as an evaluation does.
        """
        if self.current is None:
            if hook.last_bound or hook.outstanding:
                raise _unbound(hook.gate)
            return None
        rows = self.current.rows[hook.gate.layer_id]
        # of looped gates it cannot be told which firing is repeated
        if self._order or rows.outside_reruns >= rows.outside_calls:
            raise _unbound(hook.gate)
        rows.outside_reruns += 1
        hook.outstanding = max(hook.outstanding - 1, 0)
        return rows, True


class LiveHook:
    """Hooks on one live model, ``_installed``. A copy or a pickle of the model carries them without effect."""

    _installed: Sequence[RemovableHandle] = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # A copied model (a teacher) carries the same hook, which is inert there: its module is another.
        return self

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return InertHook, ()

    def remove(self) -> None:
        """Take the hooks off. Idempotent."""
        for handle in self._installed:
            handle.remove()


class GateHook(LiveHook):
    """The two hooks of one gate instance: enter its rows before its forward, count them after.

    ``sites``: one for each time that the gate fires in a forward, in order.
    """

    def __init__(self, sites: Sequence[GateSite], *, wiring: Wiring) -> None:
        self.site = site = sites[0]
        self.gate = site.gate
        self.layer_ids = tuple(each.gate.layer_id for each in sites)
        self.module = module = site.module
        self.wiring = wiring
        #: whether this gate's last forward outside every frame was under a binding
        self.last_bound = False
        #: bound forwards with gradients outside every frame, less their recomputations
        self.outstanding = 0
        self.traced = TracedGate(site.gate, module) if site.traced else None
        self._forward: ForwardStandIn = _EagerForward(self) if self.traced is None else self.traced
        if self.traced is not None:
            wiring.traced.append(self.traced)
        # nearest to the forward on both sides: what other hooks compute is not the gate's selection
        self._installed = (
            module.register_forward_pre_hook(self._enter),
            module.register_forward_hook(self._leave, prepend=True, always_call=True),
        )

    @classmethod
    def on(cls, module: nn.Module) -> Self | None:
        """The hook that this very module carries; the copied hooks of a copied module do not count."""
        for function in module._forward_pre_hooks.values():
            hook = getattr(function, "__self__", None)
            if isinstance(hook, cls) and hook.module is module:
                return hook
        return None

    def remove(self) -> None:
        """Take both hooks off, and the forward's stand-in. Idempotent."""
        super().remove()
        self._forward.remove()

    def call(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run the gate's forward under its rows, also where compiled code passed over the hooks."""
        if self.wiring.thread.entered is self:
            self.wiring.thread.entered = None
            return forward(*args, **kwargs)
        self._enter(self.module, args)
        self.wiring.thread.entered = None
        output = changed = None
        try:
            output = forward(*args, **kwargs)
        finally:
            changed = self._leave(self.module, args, output)
        return output if changed is None else changed

    def _enter(self, module: nn.Module, args: object) -> None:
        if module is not self.module or torch.compiler.is_compiling():
            return
        self.wiring.thread.entered = self
        found = self.wiring.firing(self)
        if found is None:
            return
        rows, rerun = found
        forcing = self.site.force(rows)
        forcing.open()
        self.wiring.thread.open.append(_OpenGate(hook=self, forcing=forcing, rerun=rerun))

    def _leave(self, module: nn.Module, args: object, output: object) -> Any:
        """What the gate answers instead; None for what its forward gave."""
        if torch.compiler.is_compiling():
            return None
        self.wiring.thread.entered = None
        opened = self.wiring.thread.open
        if not opened or opened[-1].hook is not self or module is not self.module:
            return None
        last = opened.pop()
        last.forcing.close()
        if output is None:
            return None  # the forward raised: an error that has its own message, or a recomputation that stops early
        last.forcing.require_hit()
        if not last.rerun:
            last.forcing.rows.forward_calls += 1
        return last.forcing.rows.weigh(output)

    def traced_rows(self, routes_NK: torch.Tensor) -> TracedRows | None:
        """The rows for compiled forwards; None where the gate is never compiled."""
        return None if self.traced is None else TracedRows(routes_NK, device=self.traced.device)


class _EagerForward(ForwardStandIn):
    """Keeps a gate out of compiled graphs: they break there, and the gate runs as it does elsewhere.

    Traced in parts, a gate's in-place arithmetic (``weights /= weights.sum()``) changes what the graph before it saved
    for its backward pass (torch 2.13).
    """

    def __init__(self, hook: GateHook, /) -> None:
        super().__init__(hook.module)
        self.hook = hook

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.hook.call(self.original, *args, **kwargs)


class InertHook:
    """What a pickled copy of an attached model has where the hooks were: it does nothing."""

    def _enter(self, *_: object) -> None:
        return

    _leave = _compare = _end = _enter


class TokenHook(LiveHook):
    """Compares the ``input_ids`` of a model's forwards with those of the batch that is replayed; says where they begin.

    On the host they are compared at once. On an accelerator the comparison stays there, and ``settle`` reads it.
    """

    def __init__(self, root: nn.Module, *, wiring: Wiring) -> None:
        self.root = root
        self.wiring = wiring
        self._differ: torch.Tensor | None = None
        ends = [root.register_forward_hook(self._end, always_call=True)] if wiring.is_looped else []
        self._installed = (root.register_forward_pre_hook(self._compare, with_kwargs=True), *ends)

    def settle(self) -> None:
        """Raise ReplayError (TOKEN_MISMATCH) for a forward since the last call that was given other tokens."""
        differ, self._differ = self._differ, None
        if differ is not None and bool(differ):
            raise _other_tokens("other ids")

    def _compare(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        binding = self.wiring.current
        if module is not self.root or binding is None or torch.compiler.is_compiling():
            return
        binding.progress.fired, binding.progress.inside = 0, True
        if binding.token_ids is None:
            return
        given = kwargs.get("input_ids", next(iter(args), None))
        if not isinstance(given, torch.Tensor) or given.is_floating_point():
            return
        expected = binding.token_ids
        if given.numel() != expected.numel():
            # under sequence parallelism a model is given the tokens of all ranks, and its gates the rank's rows
            if binding.is_shard and given.numel() % expected.numel() == 0:
                return
            raise _other_tokens(f"input_ids of shape {list(given.shape)}")
        given, expected = given.reshape(-1), expected.to(given.device, given.dtype, non_blocking=True).reshape(-1)
        if given.device.type == "cpu":
            if not torch.equal(given, expected):
                raise _other_tokens("other ids")
            return
        differ = (given != expected).any()
        self._differ = differ if self._differ is None else self._differ | differ

    def _end(self, module: nn.Module, *_: object) -> None:
        binding = self.wiring.current
        if module is self.root and binding is not None and not torch.compiler.is_compiling():
            binding.progress.inside = False


def _other_tokens(got: str) -> ReplayError:
    return ReplayError(
        f"expected a forward over the tokens of the batch that is replayed, got {got}", kind=ErrorKind.TOKEN_MISMATCH
    )


class CapturingCheckpoint:
    """Stands in for the checkpoint function that one module keeps in an instance attribute."""

    def __init__(self, original: Callable[..., Any], *, module: nn.Module, wiring: Wiring) -> None:
        self.original = original
        self.module = module
        self.wiring = wiring

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Checkpoint ``function`` as the original would, with the binding of this moment."""
        return self.original(self.wiring.capture(function), *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        # a copied model has its own function
        original: Callable[..., Any] = copy.deepcopy(self.original, memo)
        return original

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return without_replay, (self.original,)


def in_backward() -> bool:
    """Whether this thread runs a backward pass."""
    # torch's own checkpoint asks the same question; there is no public spelling
    return torch._C._current_graph_task_id() != -1


def _unbound(gate: Gate) -> ReplayError:
    return ReplayError(
        "expected every recomputation to be captured or inside its own replaying(), got a gate that fires in a "
        "backward pass whose forward is unknown. Use model.activation_checkpointing_enable() (or "
        "gradient_checkpointing_enable()) before replaying() is entered, which is captured, or call backward() once, "
        f"inside the replaying() of its forward @ {gate}",
        kind=ErrorKind.UNBOUND_RECOMPUTE,
    )
