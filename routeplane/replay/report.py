"""What replay did, gate by gate: counts that ranks and steps merge.

``GateTotals`` runs along while gates fire and keeps on the device what was counted there; ``GateReport`` and
``ReplayReport`` are the finished values. Knows gates and their rows; knows no handle and no batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from routeplane.capture.gates import Gate
    from routeplane.replay.gate import GateRows

__all__ = ["GateReport", "GateTotals", "ReplayReport"]


class GateTotals:
    """Running counts of one gate; those that a forward makes stay on its device until somebody asks."""

    def __init__(self) -> None:
        self.rows = 0
        self.calls = 0
        self.unconsumed = 0
        self.tally: torch.Tensor | None = None

    def add(self, rows: GateRows) -> None:
        """Count the rows of a ``replaying`` that was left in order. Does not wait for the device."""
        self.rows += rows.num_rows or 0
        self.calls += rows.forward_calls
        if rows.tally is not None:
            self.tally = rows.tally if self.tally is None else self.tally.to(rows.tally.device) + rows.tally

    def report(self, gate: Gate) -> GateReport:
        """The counts so far. Waits for the device."""
        forced, flipped = (0, 0) if self.tally is None else self.tally.tolist()
        return GateReport(
            name=gate.name,
            layer_id=gate.layer_id,
            forced_rows=forced,
            live_rows=self.rows - forced,
            flipped_rows=flipped,
            consumed=self.calls,
            unconsumed=self.unconsumed,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class GateReport:
    """What replay did to one gate. Rows count once per ``replaying``; ``consumed`` counts forward calls.

    ``flipped_rows`` are forced rows whose set of experts differs from what the gate would have chosen: the flips that
    replay took out. ``live_rows`` are MISSING rows, padding included. ``unconsumed`` counts the uses of ``replaying``
    that were left, in order or by an exception, without this gate having come for its rows.
    """

    name: str
    layer_id: int
    forced_rows: int
    live_rows: int
    flipped_rows: int
    consumed: int
    unconsumed: int

    @property
    def flipped_share(self) -> float:
        """``flipped / forced``; 0.0 where nothing was forced."""
        return self.flipped_rows / self.forced_rows if self.forced_rows else 0.0

    def merge(self, other: GateReport) -> GateReport:
        """The counts of both, for one gate."""
        return GateReport(
            name=self.name,
            layer_id=self.layer_id,
            forced_rows=self.forced_rows + other.forced_rows,
            live_rows=self.live_rows + other.live_rows,
            flipped_rows=self.flipped_rows + other.flipped_rows,
            consumed=self.consumed + other.consumed,
            unconsumed=self.unconsumed + other.unconsumed,
        )

    def __str__(self) -> str:
        return (
            f"layer {self.layer_id}: {self.forced_rows} rows forced, {self.live_rows} live, "
            f"{self.flipped_rows} flipped ({self.flipped_share:.2%}), {self.consumed} calls of {self.name}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayReport:
    """What replay did, gate by gate in layer order, over ``microbatches`` uses of ``replaying``."""

    gates: tuple[GateReport, ...]
    microbatches: int
    #: module paths or patterns of routers that were left live by name
    left_live: tuple[str, ...] = ()

    def _total(self) -> GateReport:
        total = GateReport(
            name="all", layer_id=-1, forced_rows=0, live_rows=0, flipped_rows=0, consumed=0, unconsumed=0
        )
        for gate in self.gates:
            total = total.merge(gate)
        return total

    def merge(self, other: ReplayReport) -> ReplayReport:
        """The counts of both, over steps or ranks; gates that only one of them has (pipeline stages) are kept."""
        gates = {(gate.layer_id, gate.name): gate for gate in self.gates}
        for gate in other.gates:
            key = gate.layer_id, gate.name
            gates[key] = gates[key].merge(gate) if key in gates else gate
        return ReplayReport(
            gates=tuple(gates[key] for key in sorted(gates)),
            microbatches=self.microbatches + other.microbatches,
            left_live=tuple(sorted({*self.left_live, *other.left_live})),
        )

    def scalars(self, *, prefix: str = "routeplane/") -> dict[str, float]:
        """A flat dict with stable names for a metrics logger; rows are summed over gates."""
        total = self._total()
        return {
            f"{prefix}replay_microbatches": float(self.microbatches),
            f"{prefix}replay_gate_calls": float(total.consumed),
            f"{prefix}replay_not_consumed": float(total.unconsumed),
            f"{prefix}replay_rows_forced": float(total.forced_rows),
            f"{prefix}replay_rows_live": float(total.live_rows),
            f"{prefix}replay_rows_flipped": float(total.flipped_rows),
            f"{prefix}replay_flipped_share": total.flipped_share,
            f"{prefix}replay_flipped_share_max": max((gate.flipped_share for gate in self.gates), default=0.0),
        }

    def __str__(self) -> str:
        total = self._total()
        head = (
            f"replayed {self.microbatches} microbatches through {len(self.gates)} gates: {total.forced_rows} rows "
            f"forced, {total.live_rows} live, {total.flipped_rows} flipped ({total.flipped_share:.2%})"
        )
        left = [f"  left live: {', '.join(self.left_live)}"] if self.left_live else []
        return "\n".join([head, *(f"  {gate}" for gate in self.gates), *left])
