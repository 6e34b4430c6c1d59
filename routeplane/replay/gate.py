"""The rule of replay: forced ids replace a gate's selection, and nothing else of the gate changes.

A gate selects with one ``topk`` over a dense ``[N, E]`` matrix of scores. ``ForcedTopK`` answers that one call with the
recorded ids and with ``scores.gather(-1, ids)``: weights, normalisation, scaling and gradients stay the family's own
code, computed on live scores. A MISSING row keeps the live selection. Group selection (``topk`` over ``[N, G, E/G]`` or
``[N, G]``) has another shape and passes through.

Knows torch and a gate's geometry. Knows no model library, no hooks and no checkpointing: ``handle`` decides when a gate
is forced, and with which rows.

Axes: N token rows of one gate call (``b*S + s`` padded, or packed), E experts, K top-k slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from routeplane.errors import ErrorKind, ReplayError
from routeplane.spec import MISSING

__all__ = ["ForcedTopK", "Gate", "GateRows"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Gate:
    """One gate: ``name`` is its module path, ``layer_id`` its decoder layer, E and K its live geometry."""

    name: str
    layer_id: int
    num_experts: int
    top_k: int

    def __str__(self) -> str:
        return f"gate {self.name} (layer {self.layer_id})"


class GateRows:
    """What one gate gets in one binding: its rows, what became of them, and how often it came for them.

    ``routes_NK`` is int16 ``[N, K]`` on any device and stays the batch's; it is read at the first firing and then let
    go. What is kept is the resolved choice, int64 ``[N, K]`` on the gate's device: a MISSING row is decided by the live
    scores of the *first* firing, and every later firing repeats that decision. A recomputation that decided anew would
    flip near ties, and the gradient would be that of another forward.
    """

    __slots__ = (
        "_chosen_NK",
        "_routes_NK",
        "forward_calls",
        "gate",
        "num_rows",
        "outside_calls",
        "outside_reruns",
        "tally",
    )

    def __init__(self, gate: Gate, routes_NK: torch.Tensor) -> None:
        self.gate = gate
        self.num_rows = int(routes_NK.shape[0])
        self._routes_NK: torch.Tensor | None = routes_NK
        self._chosen_NK: torch.Tensor | None = None
        #: int64 [2]: forced rows, and forced rows whose set differs from the live one. Never read during a forward.
        self.tally: torch.Tensor | None = None
        self.forward_calls = 0
        #: forward calls and recomputations that no captured checkpoint frame surrounded
        self.outside_calls = 0
        self.outside_reruns = 0

    def choose(self, scores_NE: torch.Tensor, live: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The ids to use, int64 ``[N, K]``. ``live`` gives the gate's own selection; it is asked at most once.

        Raises ReplayError where the gate sees another number of rows than the batch holds.
        """
        if scores_NE.shape[0] != self.num_rows:
            raise ReplayError(
                f"expected {self.num_rows} token rows, as the batch holds, got {scores_NE.shape[0]} @ {self.gate}",
                kind=ErrorKind.ROW_COUNT,
            )
        if self._chosen_NK is None:
            # a first firing under inference_mode must not leave tensors that a later one cannot save for backward
            with torch.inference_mode(False), torch.no_grad():
                self._chosen_NK = self._resolve(scores_NE.device, live())
        return self._chosen_NK

    def _resolve(self, device: torch.device, live_NK: torch.Tensor) -> torch.Tensor:
        if self._routes_NK is None:
            raise ReplayError(
                f"expected rows that were not resolved yet, got none @ {self.gate}", kind=ErrorKind.GATE_FIRED
            )
        routes_NK = self._routes_NK.to(device, non_blocking=True).to(torch.int64)
        forced_NK = routes_NK != MISSING
        chosen_NK = torch.where(forced_NK, routes_NK, live_NK)
        # sets, not rows: an engine and a trainer may order the same experts differently
        flipped_N = (chosen_NK.sort(dim=-1).values != live_NK.sort(dim=-1).values).any(dim=-1)
        self.tally = torch.stack((forced_NK[:, 0].sum(), flipped_N.sum()))
        self._routes_NK = None
        return chosen_NK


class ForcedTopK(TorchFunctionMode):
    """Active during one call of one gate: answers the gate's selection, once, with the rows it is given.

    Raises ReplayError at a second selection (GATE_FIRED); ``require_hit`` raises where there was none (NO_SEAM).
    """

    def __init__(self, rows: GateRows) -> None:
        super().__init__()
        self.rows = rows
        self.hits = 0

    def open(self) -> None:
        """Push onto torch's stack of modes; for hooks, which cannot hold a ``with`` open."""
        self.__enter__()  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Pop what ``open`` pushed; nothing that was pushed later may be left."""
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Every torch call of the gate comes by here; all but the one selection go on unchanged."""
        kwargs = kwargs or {}
        scores_NE = _selection(self.rows.gate, func, args, kwargs)
        if scores_NE is None:
            return func(*args, **kwargs)
        return self._force(scores_NE, partial(func, *args, **kwargs))

    # Traced by torch.compile (2.13), the live selection came back as the forced one: right weights, no flip counted.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _force(self, scores_NE: torch.Tensor, live: Callable[[], Any]) -> Any:
        if self.hits:
            gate = self.rows.gate
            raise ReplayError(
                f"expected one topk over [N, {gate.num_experts}] per call, got a second one @ {gate}",
                kind=ErrorKind.GATE_FIRED,
            )
        self.hits = 1
        chosen_NK = self.rows.choose(scores_NE, lambda: live()[1])
        return torch.return_types.topk((scores_NE.gather(-1, chosen_NK), chosen_NK))

    def require_hit(self) -> None:
        """Raise ReplayError where the gate returned without a selection that could be forced."""
        if not self.hits:
            gate = self.rows.gate
            raise ReplayError(
                f"expected one topk over [N, {gate.num_experts}] with k={gate.top_k} per call, got none: this gate "
                f"selects in another way (a fused kernel, or another version of the model's code) @ {gate}",
                kind=ErrorKind.NO_SEAM,
            )


def _selection(
    gate: Gate, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> torch.Tensor | None:
    """The dense scores ``[N, E]`` where this call is the gate's selection, else None."""
    if func is not torch.topk and func is not torch.Tensor.topk:
        return None
    given = dict(zip(("input", "k", "dim", "largest"), args, strict=False)) | dict(kwargs)
    scores = given.get("input")
    if not isinstance(scores, torch.Tensor) or scores.dim() != 2 or scores.shape[-1] != gate.num_experts:
        return None
    if given.get("k") != gate.top_k or given.get("dim", -1) not in (-1, 1) or not given.get("largest", True):
        return None
    return scores
