"""The auxiliary (load-balancing) loss of a whole model follows the forced choice.

Some frameworks compute it after the last layer, from all gates' logits, with a ``topk`` of its own for each gate or one
over all of them. ``AuxiliaryHook`` answers these with the ids that the gates used. Frameworks that compute it
inside the gate's forward need none of this.

Axes: N token rows of one gate, L gates, E experts, K top-k slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import torch
from torch.overrides import TorchFunctionMode

from routeplane.capture.gates import selection
from routeplane.errors import ErrorKind, ReplayError
from routeplane.replay.gate import GateRows

if TYPE_CHECKING:
    from torch import nn

    from routeplane.replay.binding import Wiring

__all__ = ["AuxiliaryHook"]


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
