"""A gate and its selection: the one call that chooses K of E experts for each token.

A gate calls ``topk`` over a dense ``[N, E]`` matrix of scores, or takes the best expert K times with ``max`` (a sparse
mixer). ``SelectionMode`` meets that call while the gate's forward runs, and may answer it with other ids. ``gates``
finds gates in a live model, capture reads their choices here, and replay forces them. Knows torch.
Axes: N token rows of one gate call, E experts, K top-k slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["COPIES", "Choose", "Gate", "SelectionMode", "largest", "ranked", "selection"]

COPIES = frozenset({torch.Tensor.masked_fill, torch.masked_fill})  # they mask scores before the selection
_TOP_KS = frozenset({torch.topk, torch.Tensor.topk})
_MAXES = frozenset({torch.max, torch.Tensor.max})


@dataclass(frozen=True, kw_only=True, slots=True)
class Gate:
    """One gate: ``name`` is its module path, ``layer_id`` its decoder layer, E and K its live geometry.

    ``rounds``: how many calls of ``max`` make one choice of a sparse mixer; 0 where the choice is one ``topk``.
    ``axes``: 2 where scores are ``[N, E]``, 3 where they are ``[B, S, E]``. ``firing`` of ``firings``: a looped layer
    calls its gate several times in a forward; each firing is a gate of its own, with the layer that it would be in the
    unrolled model.
    """

    name: str
    layer_id: int
    num_experts: int
    top_k: int
    rounds: int = 0
    axes: int = 2
    firing: int = 0
    firings: int = 1

    def __str__(self) -> str:
        looped = f", firing {self.firing + 1} of {self.firings}" if self.firings > 1 else ""
        return f"gate {self.name} (layer {self.layer_id}{looped})"


def selection(
    gate: Gate, func: Callable[..., Any], /, *, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> torch.Tensor | None:
    """The dense scores ``[..., E]`` where this call is the gate's ``topk``, else None."""
    found = ranked(func, args, kwargs=kwargs)
    if found is None or found[1] != gate.top_k:
        return None
    scores = found[0]
    return scores if scores.dim() == gate.axes and scores.shape[-1] == gate.num_experts else None


def ranked(
    func: Callable[..., Any], args: tuple[Any, ...], *, kwargs: Mapping[str, Any]
) -> tuple[torch.Tensor, int] | None:
    """Scores and k of a ``topk`` for the largest along the last axis of ``[N, E]`` or ``[B, S, E]``."""
    if func not in _TOP_KS:
        return None
    given = dict(zip(("input", "k", "dim", "largest"), args, strict=False)) | dict(kwargs)
    scores, k = given.get("input"), given.get("k")
    if not isinstance(scores, torch.Tensor) or scores.dim() not in (2, 3) or not isinstance(k, int):
        return None
    if given.get("dim", -1) not in (-1, scores.dim() - 1) or not given.get("largest", True):
        return None
    return scores, k


def largest(func: Callable[..., Any], args: tuple[Any, ...], *, kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """Scores of a ``max`` along the last axis of a matrix."""
    if func not in _MAXES:
        return None
    given = dict(zip(("input", "dim"), args, strict=False)) | dict(kwargs)
    scores, dim = given.get("input"), given.get("dim")
    if not isinstance(scores, torch.Tensor) or scores.dim() != 2 or not isinstance(dim, int) or dim not in (-1, 1):
        return None
    return scores


#: Dense scores ``[N, E]`` and what gives the gate's own ids -> the ids to use, or None for its own.
Choose = Callable[[torch.Tensor, Callable[[], torch.Tensor]], torch.Tensor | None]


class SelectionMode(TorchFunctionMode):
    """Meets the one selection of a gate's call and answers it with ``choose``.

    ``choose(scores_NE, live)`` returns int64 ``[N, K]``, or None to leave the gate's own answer; ``live()`` gives the
    gate's own ids and is computed once. What the gate gets back are the scores of the chosen ids. Where the scores were
    masked (group-limited routing), they are read from before the mask: some families take their weights from them, and
    a forced expert may stand in any group.
    """

    def __init__(self, gate: Gate, choose: Choose) -> None:
        super().__init__()
        self.gate = gate
        self.choose = choose
        self._masked: tuple[torch.Tensor, torch.Tensor] | None = None
        self._mixed: torch.Tensor | None = None
        self._round = 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Every torch call of the gate comes by here; all but the selection go on unchanged."""
        kwargs = kwargs or {}
        if self.gate.rounds:
            scores_NE = largest(func, args, kwargs=kwargs)
            if scores_NE is not None and scores_NE.shape[-1] == self.gate.num_experts:
                return self._mix(scores_NE, partial(func, *args, **kwargs))
            return func(*args, **kwargs)
        scores_NE = selection(self.gate, func, args=args, kwargs=kwargs)
        if scores_NE is None:
            result = func(*args, **kwargs)
            if func in COPIES and args:
                self._masked = result, args[0]
            return result
        return self._force(scores_NE, partial(func, *args, **kwargs))

    # Traced by torch.compile (2.13), the live selection came back as the forced one: right weights, no flip counted.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _force(self, scores_NE: torch.Tensor, live: Callable[[], Any]) -> Any:
        shape = scores_NE.shape[:-1]
        flat_NE = scores_NE if scores_NE.dim() == 2 else scores_NE.flatten(0, -2)
        own = cache(live)
        chosen_NK = self.choose(flat_NE, lambda: own()[1].reshape(-1, self.gate.top_k))
        if chosen_NK is None:
            return own()
        chosen_NK = chosen_NK.reshape(*shape, self.gate.top_k)
        if self._masked is not None and self._masked[0] is scores_NE:
            scores_NE = self._masked[1]
        return torch.return_types.topk((scores_NE.gather(-1, chosen_NK), chosen_NK))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _mix(self, scores_NE: torch.Tensor, live: Callable[[], Any]) -> Any:
        at = self._round % self.gate.rounds
        self._round += 1
        if at == 0:
            self._mixed = self.choose(scores_NE, cache(lambda: torch.topk(scores_NE, self.gate.rounds).indices))
        if self._mixed is None:
            return live()
        ids_N1 = self._mixed[:, at : at + 1]
        values_N1 = scores_NE.gather(-1, ids_N1)
        wide = live().values.dim() == 2
        return torch.return_types.max((values_N1, ids_N1) if wide else (values_N1[:, 0], ids_N1[:, 0]))
