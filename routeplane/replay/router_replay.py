"""Selections that go through an object on the gate: what stands in for it while a handle is attached.

NeMo Automodel and Megatron-Core ask an object at ``gate.router_replay`` for the experts to use. Their own object takes
its targets from a list that all models of the process share. A stand-in takes them from the forcing that is open, which
``handle`` opened for this very call; with none open it lets the original answer. Only this attribute of the instance is
touched.

Knows gates and their rows. Knows no model library: a framework's module adds the method that its gates call.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from routeplane.replay.gate import Forcing, GateRows

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["SEAM", "SeamForcing", "StandIn", "install", "uninstaller"]

#: The instance attribute that both frameworks ask.
SEAM = "router_replay"


class StandIn:
    """At ``module.router_replay``; ``original`` (None where the framework's own replay is off) comes back on detach.

    What it does not answer itself it leaves to the original, so that other holders of that object see no difference.
    """

    def __init__(self, module: nn.Module, /) -> None:
        self.module = module
        self.original: Any = getattr(module, SEAM)
        #: of the call of the gate that is running; None where the gate is live
        self.forcing: Forcing | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["original"], name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # the copy of an attached model (a teacher) is not attached: it gets what was here before
        return copy.deepcopy(self.original, memo)


class SeamForcing(Forcing):
    """Reaches a selection that the gate asks a stand-in for."""

    def __init__(self, rows: GateRows, stand_in: StandIn, /) -> None:
        super().__init__(rows)
        self.stand_in = stand_in
        #: whether the gate has its ids
        self.settled = False
        self._outer: Forcing | None = None

    def answer(self, scores_NE: torch.Tensor, live: Callable[[], torch.Tensor]) -> torch.Tensor:
        """As ``Forcing.answer``."""
        chosen_NK = super().answer(scores_NE, live)
        self.settled = True
        return chosen_NK

    def open(self) -> None:
        """Answer the gate's next question."""
        self._outer, self.stand_in.forcing = self.stand_in.forcing, self

    def close(self) -> None:
        """Restore the forcing that was open before."""
        self.stand_in.forcing = self._outer


def install(stand_ins: Sequence[StandIn], /) -> None:
    """Put them at their gates."""
    for stand_in in stand_ins:
        setattr(stand_in.module, SEAM, stand_in)


def uninstaller(stand_ins: Sequence[StandIn], /) -> Callable[[], None]:
    """What puts the originals back; an attribute that somebody else has set since is left alone."""

    def uninstall() -> None:
        for stand_in in stand_ins:
            if getattr(stand_in.module, SEAM) is stand_in:
                setattr(stand_in.module, SEAM, stand_in.original)

    return uninstall
