"""The rule inside graphs that torch.compile traces: one graph for every batch of a size, none of its state in Python.

Tracing cannot follow what eager hooks do (bindings, threads, counters). So a gate that may be compiled has a
``TracedGate`` in front of its forward. While tracing, it reads rows from a tensor that ``Wiring`` seats there before
each forward, decides MISSING rows into this very tensor, so that a recomputation finds them decided, and counts into
another one. Outside of tracing it is the gate's own forward.

Knows torch and a gate's geometry; what is seated when is ``binding``'s business.

Axes: N token rows, E experts, K top-k slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from routeplane.capture.gates import selection
from routeplane.replay.gate import TracedRows

if TYPE_CHECKING:
    from torch import nn

    from routeplane.capture.gates import Gate

__all__ = ["TracedGate"]


class TracedGate:
    """Stands in for one gate's ``forward``; an instance attribute, until ``remove``."""

    def __init__(self, gate: Gate, module: nn.Module, /) -> None:
        self.gate = gate
        self.module = module
        self.original: Callable[..., Any] = module.forward
        #: whether ``forward`` was the class's own
        self._plain = "forward" not in vars(module)
        #: what is seated: None where the gate is live
        self.routes_NK: torch.Tensor | None = None
        self.tally: torch.Tensor | None = None
        #: whether a forward saw another number of rows than were seated, and stayed live
        self.refused = False
        module.forward = self

    @property
    def device(self) -> torch.device:
        """Where the gate computes."""
        return next(iter(self.module.parameters())).device

    def remove(self) -> None:
        """Put the forward back. Idempotent."""
        if vars(self.module).get("forward") is self:
            if self._plain:
                del self.module.forward
            else:
                self.module.forward = self.original

    def seat(self, rows: TracedRows | None, *, rerun: bool) -> None:
        """The rows for the forwards that come; what a recomputation counts is dropped."""
        self.routes_NK = None if rows is None else rows.routes_NK
        self.tally = None if rows is None else torch.zeros_like(rows.tally) if rerun else rows.tally

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        # a copied model (a teacher) gets its own gate's forward
        copied = memo.get(id(self.module))
        return self if copied is None else type(copied).forward.__get__(copied)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The gate's forward; forced where it is traced and rows are seated."""
        if not torch.compiler.is_compiling() or self.routes_NK is None:
            return self.original(*args, **kwargs)
        with _TracedTopK(self):
            return self.original(*args, **kwargs)


class _TracedTopK(TorchFunctionMode):
    # As ForcedTopK with GateRows, in tensors alone. A second selection in one call is not seen here.
    def __init__(self, seat: TracedGate) -> None:
        super().__init__()
        self.seat = seat
        self.masked: tuple[torch.Tensor, torch.Tensor] | None = None

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        scores_NE = selection(self.seat.gate, func, args=args, kwargs=kwargs)
        result = func(*args, **kwargs)
        if scores_NE is None:
            if func in (torch.masked_fill, torch.Tensor.masked_fill) and args:
                self.masked = result, args[0]
            return result
        chosen_NK = _decide(self.seat, result[1])
        if self.masked is not None and self.masked[0] is scores_NE:
            scores_NE = self.masked[1]
        return torch.return_types.topk((scores_NE.gather(-1, chosen_NK), chosen_NK))


def _decide(seat: TracedGate, live_NK: torch.Tensor) -> torch.Tensor:
    routes_NK, tally = seat.routes_NK, seat.tally
    if routes_NK is None or tally is None or routes_NK.shape[0] != live_NK.shape[0]:
        seat.refused = True  # no graph can raise: the handle asks afterwards
        return live_NK
    wide_NK = routes_NK.to(torch.int64)
    forced_NK = wide_NK >= 0
    chosen_NK = torch.where(forced_NK, wide_NK, live_NK)
    flipped_N = (chosen_NK.sort(dim=-1).values != live_NK.sort(dim=-1).values).any(dim=-1)
    first = tally[2] == 0  # rows count once for each binding, however many forwards there are
    tally.add_(torch.stack((forced_NK[:, 0].sum() * first, flipped_N.sum() * first, torch.ones_like(tally[2]))))
    routes_NK.copy_(chosen_NK)
    return chosen_NK
