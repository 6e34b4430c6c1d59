"""One attached model: enter a batch's rows for a forward, see that every gate came for them, count, take it all off.

The handle is the only state there is, and the caller owns it. It touches instances alone: two hooks on each gate, and a
stand-in on each instance attribute that holds a checkpoint function; ``detach()`` removes both.

Knows batches by four attributes. Knows no model library: the framework's module finds gates and checkpoint functions;
``binding`` decides which rows a firing gate gets.

Axes: N token rows of one gate call, K top-k slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, Self

import torch

from routeplane.errors import DataError, ErrorKind, Problem, ReplayError, SpecError, UsageError
from routeplane.replay.binding import Binding, CapturingCheckpoint, GateHook, Wiring
from routeplane.replay.gate import Gate, GateRows

if TYPE_CHECKING:
    from types import TracebackType

    from torch import nn

    from routeplane.spec import RouteSpec

__all__ = ["CheckpointSites", "GateReport", "ReplayBatch", "ReplayHandle", "ReplayReport"]

#: Walks the live model for (module, name of the instance attribute that holds its checkpoint function).
CheckpointSites = Callable[[], Iterable[tuple["nn.Module", str]]]


class ReplayBatch(Protocol):
    """What replay asks of a batch; ``routeplane.batch.RouteBatch`` answers."""

    @property
    def spec(self) -> RouteSpec:
        """The geometry of the rows."""

    @property
    def num_rows(self) -> int:
        """N, the token rows that each gate sees: B*S padded, T packed."""

    @property
    def unexplained_missing(self) -> int:
        """Tokens that were fed and yet have a MISSING row."""

    def layer(self, layer_id: int, /) -> torch.Tensor:
        """int16 ``[N, K]``, on any device, owned by the batch."""


class ReplayHandle:
    """Forces batches' rows onto the gates of one model. Made by a framework's ``attach``; leaving ``with`` detaches.

    One ``replaying`` at a time: microbatches in flight together each have had their own, one after the other, and
    their backward passes may come in any order, inside it or later. Raises SpecError (SPEC_MISMATCH) where the spec and
    the gates differ in layers, E or K, and UsageError where another handle is attached.
    """

    def __init__(
        self,
        spec: RouteSpec,
        gates: Sequence[tuple[Gate, nn.Module]],
        *,
        checkpoint_sites: CheckpointSites,
        on_missing: Literal["live", "raise"],
    ) -> None:
        if on_missing not in ("live", "raise"):
            raise UsageError(f"expected on_missing 'live' or 'raise', got {on_missing!r}", kind=ErrorKind.ARGUMENT)
        _check_geometry(spec, [gate for gate, _ in gates])
        taken = [str(gate) for gate, module in gates if GateHook.on(module) is not None]
        if taken:
            raise UsageError(
                f"expected a model that no handle is attached to, got one on {taken[0]} and {len(taken) - 1} others: "
                "detach() the first",
                kind=ErrorKind.ARGUMENT,
            )
        self.spec = spec
        self.on_missing = on_missing
        self._sites = checkpoint_sites
        self._wiring = Wiring()
        self._captured: dict[tuple[int, str], CapturingCheckpoint] = {}
        self._hooks = [GateHook(gate, module, wiring=self._wiring) for gate, module in gates]
        self._totals = {gate.layer_id: _Totals() for gate, _ in gates}
        self._microbatches = 0
        # a live forward before the first replaying() must be captured as live, or its recomputation is anyone's
        self._capture_checkpoints()

    @contextmanager
    def replaying(self, batch: ReplayBatch) -> Iterator[None]:
        """Force the batch's rows on every forward inside; on leaving, check that each gate consumed them.

        A MISSING row is decided by the gate's first forward inside and keeps that choice. Nothing here waits for the
        device. Enable activation checkpointing before entering.

        Raises, on entering: ReplayError (DETACHED; SHAPE, DTYPE), SpecError (SPEC_MISMATCH), DataError
        (ROUTES_MISSING, where ``on_missing="raise"`` and a fed token has no row), UsageError where another
        ``replaying`` of this handle is open. From inside a forward: ReplayError (ROW_COUNT, NO_SEAM, GATE_FIRED). On
        leaving without another exception: ReplayError (GATE_NOT_CONSUMED, GATE_FIRED).
        """
        self._refuse_unusable()
        binding = self._bind(batch)
        self._capture_checkpoints()  # enabling checkpointing after attach() put the plain functions back
        with self._wiring.binding(binding):
            yield
        _check_consumed(binding)
        self._count(binding)

    def report(self) -> ReplayReport:
        """Counts so far, over each ``replaying`` that was left without an exception. Waits for the device.

        Answers after ``detach()`` too.
        """
        gates = tuple(
            self._totals[hook.gate.layer_id].report(hook.gate)
            for hook in sorted(self._hooks, key=lambda hook: hook.gate.layer_id)
        )
        return ReplayReport(gates=gates, microbatches=self._microbatches)

    def detach(self) -> None:
        """Take hooks and stand-ins off. Idempotent. Call it when every backward pass is done.

        A recomputation that comes later raises ReplayError (DETACHED) rather than running live. Raises ReplayError
        inside an open ``replaying``.
        """
        if self._wiring.current is not None:
            raise ReplayError("expected replaying() to be left before detach(), got it open", kind=ErrorKind.DETACHED)
        for hook in self._hooks:
            hook.remove()
        for (_, name), stand_in in self._captured.items():
            # what the user has put there since is not ours to undo
            if getattr(stand_in.module, name) is stand_in:
                setattr(stand_in.module, name, stand_in.original)
        self._captured.clear()
        self._wiring.detached = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.detach()

    def _refuse_unusable(self) -> None:
        if self._wiring.detached:
            raise ReplayError("expected an attached handle, got one after detach()", kind=ErrorKind.DETACHED)
        if self._wiring.current is not None:
            raise UsageError(
                "expected one replaying() at a time, got a second inside the first: a gate can follow one batch",
                kind=ErrorKind.ARGUMENT,
            )

    def _bind(self, batch: ReplayBatch) -> Binding:
        self.spec.require_same_geometry(batch.spec, where="replaying")
        missing = batch.unexplained_missing if self.on_missing == "raise" else 0
        if missing:
            raise DataError(
                f"expected a row for every token that was fed, got {missing} without one (on_missing='raise')",
                kind=ErrorKind.ROUTES_MISSING,
            )
        rows = {}
        for hook in self._hooks:
            routes_NK = batch.layer(hook.gate.layer_id)
            _check_rows(hook.gate, routes_NK, batch.num_rows)
            rows[hook.gate.layer_id] = GateRows(hook.gate, routes_NK)
        return Binding(rows=rows)

    def _capture_checkpoints(self) -> None:
        for module, name in self._sites():
            found = getattr(module, name)
            if isinstance(found, CapturingCheckpoint):
                if found.module is module:
                    continue
                found = found.original  # came along with a copied model
            stand_in = CapturingCheckpoint(found, module=module, wiring=self._wiring)
            setattr(module, name, stand_in)
            self._captured[id(module), name] = stand_in

    def _count(self, binding: Binding) -> None:
        self._microbatches += 1
        for layer_id, rows in binding.rows.items():
            self._totals[layer_id].add(rows)


def _check_geometry(spec: RouteSpec, gates: Sequence[Gate]) -> None:
    """The spec's layers are the model's gates, one for one, with equal E and K."""
    wanted = list(zip(spec.layer_ids, spec.experts_per_layer, [spec.top_k] * spec.num_layers, strict=True))
    found = sorted((gate.layer_id, gate.num_experts, gate.top_k) for gate in gates)
    if wanted != found:
        raise SpecError(
            f"expected the gates of {spec.model or 'the spec'}, {_listed(wanted)}, got those of the model, "
            f"{_listed(found)}; apart: {_listed(sorted(set(wanted) ^ set(found)))}",
            kind=ErrorKind.SPEC_MISMATCH,
        )


def _listed(gates: Sequence[tuple[int, int, int]]) -> str:
    groups: dict[tuple[int, int], list[int]] = {}
    for layer_id, num_experts, top_k in gates:
        groups.setdefault((num_experts, top_k), []).append(layer_id)
    return " and ".join(f"layers {layers} with E={width}, K={k}" for (width, k), layers in groups.items()) or "none"


def _check_rows(gate: Gate, routes_NK: torch.Tensor, num_rows: int) -> None:
    expected = (num_rows, gate.top_k)
    if tuple(routes_NK.shape) != expected:
        raise ReplayError(
            f"expected rows of shape {expected}, got {tuple(routes_NK.shape)} @ {gate}", kind=ErrorKind.SHAPE
        )
    if routes_NK.dtype != torch.int16:
        raise ReplayError(f"expected rows of torch.int16, got {routes_NK.dtype} @ {gate}", kind=ErrorKind.DTYPE)


def _check_consumed(binding: Binding) -> None:
    """Every gate came for its rows, and all came equally often; recomputations do not count."""
    calls = {rows.gate: rows.forward_calls for rows in binding.rows.values()}
    most = max(calls.values())
    for kind, wrong in (
        (ErrorKind.GATE_NOT_CONSUMED, [gate for gate, count in calls.items() if count == 0]),
        (ErrorKind.GATE_FIRED, [gate for gate, count in calls.items() if count != most]),
    ):
        if wrong:
            raise ReplayError.from_problems(
                (
                    Problem(
                        kind=kind,
                        message=f"expected {max(most, 1)} forward calls, got {calls[gate]} of {gate.name}",
                        layer=gate.layer_id,
                    )
                    for gate in wrong
                ),
                what=f"replaying left with {len(wrong)} of {len(calls)} gates that did not consume their rows",
            )


class _Totals:
    """Running counts of one gate; those that a forward makes stay on its device until somebody asks."""

    def __init__(self) -> None:
        self.rows = 0
        self.calls = 0
        self.tally: torch.Tensor | None = None

    def add(self, rows: GateRows) -> None:
        self.rows += rows.num_rows
        self.calls += rows.forward_calls
        if rows.tally is not None:
            self.tally = rows.tally if self.tally is None else self.tally.to(rows.tally.device) + rows.tally

    def report(self, gate: Gate) -> GateReport:
        forced, flipped = (0, 0) if self.tally is None else self.tally.tolist()
        return GateReport(
            name=gate.name,
            layer_id=gate.layer_id,
            forced_rows=forced,
            live_rows=self.rows - forced,
            flipped_rows=flipped,
            consumed=self.calls,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class GateReport:
    """What replay did to one gate. Rows count once per ``replaying``; ``consumed`` counts forward calls.

    ``flipped_rows`` are forced rows whose set of experts differs from what the gate would have chosen: the flips that
    replay took out. ``live_rows`` are MISSING rows, padding included.
    """

    name: str
    layer_id: int
    forced_rows: int
    live_rows: int
    flipped_rows: int
    consumed: int

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

    def _total(self) -> GateReport:
        total = GateReport(name="all", layer_id=-1, forced_rows=0, live_rows=0, flipped_rows=0, consumed=0)
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
            gates=tuple(gates[key] for key in sorted(gates)), microbatches=self.microbatches + other.microbatches
        )

    def scalars(self, *, prefix: str = "routeplane/") -> dict[str, float]:
        """A flat dict with stable names for a metrics logger; rows are summed over gates."""
        total = self._total()
        return {
            f"{prefix}replay_microbatches": float(self.microbatches),
            f"{prefix}replay_gate_calls": float(total.consumed),
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
        return "\n".join([head, *(f"  {gate}" for gate in self.gates)])
