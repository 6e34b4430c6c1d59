"""One attached model: enter a batch's rows for a forward, see that every gate came for them, count, take it all off.

The handle is the only state there is, and the caller owns it. It touches instances alone: two hooks on each gate, a
stand-in on each instance attribute that holds a checkpoint function, and what a framework's module adds through
``undo``; ``detach()`` removes them all. ``ReplayReport`` says what replay did, gate by gate, in counts that ranks and
steps merge.

Knows batches by four attributes. Knows no model library: the framework's module finds gates and checkpoint functions;
``binding`` decides which rows a firing gate gets.

Axes: N token rows of one gate call, K top-k slots.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import reduce
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self

import torch

from routeplane.batch.batch import RouteBatch, check_rows
from routeplane.capture.selection import Gate
from routeplane.errors import DataError, ErrorKind, Problem, ReplayError, UsageError, refused
from routeplane.record.spec import MISSING
from routeplane.record.validate import WeightsMeaning
from routeplane.replay.binding import Binding, CapturingCheckpoint, GateHook, TokenHook, Wiring
from routeplane.replay.gate import GateRows, GateSite, RecordedRoutes, RecordedRows

if TYPE_CHECKING:
    from torch import nn

    from routeplane.record.spec import RouteSpec

__all__ = [
    "DEFAULT_LIMITS",
    "AuxChoice",
    "CheckpointSites",
    "GateReport",
    "GateTotals",
    "Mode",
    "NoReplay",
    "ReplayBatch",
    "ReplayHandle",
    "ReplayLimits",
    "ReplayPolicy",
    "ReplayReport",
    "RowOrder",
    "WeightsChoice",
]


class GateTotals:
    """Running counts of one gate; those that a forward makes stay on its device until somebody asks."""

    def __init__(self) -> None:
        self.rows = 0
        self.calls = 0
        self.unconsumed = 0
        self.tally: torch.Tensor | None = None
        self.weighted: torch.Tensor | None = None

    def add(self, rows: GateRows) -> None:
        """Count the rows of a ``replaying`` that was left in order. Does not wait for the device."""
        self.rows += rows.num_rows or 0
        self.calls += rows.forward_calls
        if rows.tally is not None:
            self.tally = rows.tally if self.tally is None else self.tally.to(rows.tally.device) + rows.tally
        if rows.weights_NK is not None:
            found = (~rows.weights_NK[:, 0].isnan()).sum()
            self.weighted = found if self.weighted is None else self.weighted.to(found.device) + found

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
            weighted_rows=0 if self.weighted is None else int(self.weighted),
        )


_GATE_COUNTS = ("forced_rows", "live_rows", "flipped_rows", "consumed", "unconsumed", "weighted_rows")


@dataclass(frozen=True, kw_only=True, slots=True)
class GateReport:
    """What replay did to one gate. Rows count once per ``replaying``; ``consumed`` counts forward calls.

    ``flipped_rows`` are forced rows whose set of experts differs from what the gate would have chosen: the flips that
    replay took out. ``live_rows`` are MISSING rows, padding included. ``unconsumed`` counts the uses of ``replaying``
    that were left, in order or by an exception, without this gate having come for its rows. ``weighted_rows`` are rows
    with recorded weights (``weights="recorded"``): the router has no gradient from them.

    >>> gate = GateReport(name="layers.0.mlp.gate", layer_id=0, forced_rows=8, flipped_rows=1, consumed=1)
    >>> gate.merge(gate).flipped_rows
    2
    """

    name: str
    layer_id: int
    forced_rows: int = 0
    live_rows: int = 0
    flipped_rows: int = 0
    consumed: int = 0
    unconsumed: int = 0
    weighted_rows: int = 0

    @property
    def flipped_share(self) -> float:
        """``flipped / forced``; 0.0 where nothing was forced."""
        return self.flipped_rows / self.forced_rows if self.forced_rows else 0.0

    def merge(self, other: GateReport) -> GateReport:
        """The counts of both, for one gate."""
        return self._combined(other, operator.add)

    def since(self, before: GateReport) -> GateReport:
        """The counts that came on top of an earlier report of this gate."""
        return self._combined(before, operator.sub)

    def _combined(self, other: GateReport, how: Callable[[int, int], int]) -> GateReport:
        counts: dict[str, Any] = {name: how(getattr(self, name), getattr(other, name)) for name in _GATE_COUNTS}
        return replace(self, **counts)

    def __str__(self) -> str:
        return (
            f"layer {self.layer_id}: {self.forced_rows} rows forced, {self.live_rows} live, "
            f"{self.flipped_rows} flipped ({self.flipped_share:.2%}), {self.consumed} calls of {self.name}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayReport:
    """What replay did, gate by gate in layer order, over ``microbatches`` uses of ``replaying``.

    >>> report = ReplayReport(gates=(), microbatches=3)
    >>> report.merge(report).microbatches
    6
    """

    gates: tuple[GateReport, ...]
    microbatches: int
    #: module paths or patterns of routers that were left live by name
    left_live: tuple[str, ...] = ()

    def _total(self) -> GateReport:
        return reduce(GateReport.merge, self.gates, GateReport(name="all", layer_id=-1))

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
            f"{prefix}replay_rows_weighted": float(total.weighted_rows),
            f"{prefix}replay_flipped_share": total.flipped_share,
            f"{prefix}replay_flipped_share_max": max((gate.flipped_share for gate in self.gates), default=0.0),
        }

    def __str__(self) -> str:
        total = self._total()
        head = (
            f"replayed {self.microbatches} microbatches through {len(self.gates)} gates: {total.forced_rows} rows "
            f"forced, {total.live_rows} live, {total.flipped_rows} flipped ({total.flipped_share:.2%})"
        )
        if total.weighted_rows:
            head += f"; recorded weights in {total.weighted_rows} rows, from which the router has no gradient"
        left = [f"  left live: {', '.join(self.left_live)}"] if self.left_live else []
        return "\n".join([head, *(f"  {gate}" for gate in self.gates), *left])


#: Walks the live model for (module, name of the instance attribute that holds its checkpoint function).
CheckpointSites = Callable[[], Iterable[tuple["nn.Module", str]]]

#: Which choice an auxiliary (load-balancing) loss counts: the forced ids, or those that the gates would have chosen.
AuxChoice = Literal["forced", "live"]


#: ``"force"``: gates use the recorded ids. ``"observe"``: they use their own, and what forcing would change is counted.
Mode = Literal["force", "observe"]

#: Which weights the chosen experts get: those of the gate's live scores, or those that the record holds.
WeightsChoice = Literal["live", "recorded"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayLimits:
    """What a microbatch may be like.

    ``max_live_share``: of the tokens that were fed, the share without a row; checked on entering ``replaying``.
    ``max_flipped_share``: of the forced rows of all gates, the share whose experts differ from the gate's own choice;
    checked on leaving, which waits for the device. None: not checked. Rows of another batch or shifted by one token
    show as 0.8 and more, an engine's own differences as less than 0.2.
    """

    max_live_share: float | None = 0.99
    max_flipped_share: float | None = None


DEFAULT_LIMITS = ReplayLimits()


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayPolicy:
    """What ``attach`` was asked for."""

    mode: Mode = "force"
    on_missing: Literal["live", "raise"] = "live"
    aux: AuxChoice = "live"
    limits: ReplayLimits = DEFAULT_LIMITS
    weights: WeightsChoice = "live"
    #: module paths or patterns of routers that do not follow
    leave_live: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Raise UsageError for a value that does not exist."""
        _check_choice("mode", self.mode, allowed=("force", "observe"))
        _check_choice("on_missing", self.on_missing, allowed=("live", "raise"))
        _check_choice("aux", self.aux, allowed=("live", "forced"))
        _check_choice("weights", self.weights, allowed=("live", "recorded"))
        if self.weights == "recorded" and self.mode == "observe":
            raise refused("weights='live' in mode 'observe', which forces nothing", "'recorded'")


class ReplayBatch(Protocol):
    """What replay asks of a batch; ``routeplane.batch.RouteBatch`` answers. Rows of any other class are checked."""

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


#: Where gates see tokens in another order than the batch has them: int64 ``[N]``, the batch's row at each place of the
#: gates' order (a permutation); None where the orders are one.
RowOrder = Callable[[ReplayBatch], torch.Tensor | None]


class ReplayHandle:
    """Forces batches' rows onto the gates of one model. Made by a framework's ``attach``; leaving ``with`` detaches.

    One ``replaying`` at a time: microbatches in flight together each have had their own, one after the other, and
    their backward passes may come in any order, inside it or later.

    ``policy.aux`` is the adapter's to act on (its ``force``, or ``wiring.here()`` in a hook of its own); ``row_order``
    is asked once for each batch; ``undo`` runs once, in ``detach()``, last. ``root``: the module whose forwards show
    the token ids, which are compared with the batch's where it has some. Raises ReplayError (SPEC_MISMATCH) where the
    spec and the gates differ in layers, E or K, and UsageError where another handle is attached.

    Example::

        with gates.attach(model, reader.spec) as replay:
            with replay.replaying(micro):
                model(**micro.model_inputs()).loss.backward()
            print(replay.report())
    """

    def __init__(
        self,
        spec: RouteSpec,
        sites: Sequence[GateSite],
        *,
        wiring: Wiring,
        policy: ReplayPolicy,
        checkpoint_sites: CheckpointSites = tuple,
        row_order: RowOrder = lambda batch: None,
        undo: Callable[[], None] = lambda: None,
        root: nn.Module | None = None,
    ) -> None:
        _check_geometry(spec, [site.gate for site in sites])
        taken = [str(site.gate) for site in sites if GateHook.on(site.module) is not None]
        if taken:
            raise refused(
                "a model that no handle is attached to",
                f"one on {taken[0]} and {len(taken) - 1} others: detach() the first",
            )
        self.spec = spec
        self.policy = policy
        self._sites = checkpoint_sites
        self._row_order = row_order
        self._undo = undo
        self._wiring = wiring
        self._captured: dict[tuple[int, str], CapturingCheckpoint] = {}
        by_module: dict[nn.Module, list[GateSite]] = {}
        for site in sorted(sites, key=lambda site: site.gate.layer_id):
            by_module.setdefault(site.module, []).append(site)
        hooks = {module: GateHook(found, wiring=wiring) for module, found in by_module.items()}
        wiring.follow(hooks.values())
        self._tokens = None if root is None else TokenHook(root, wiring=wiring)
        #: in layer order; the gate of a looped layer stands there once for each firing
        self._gates = [(site, hooks[site.module]) for site in sorted(sites, key=lambda site: site.gate.layer_id)]
        self._totals = {site.gate.layer_id: GateTotals() for site in sites}
        self._microbatches = 0
        # a live forward before the first replaying() must be captured as live, or its recomputation is anyone's
        self._capture_checkpoints()

    @contextmanager
    def replaying(self, batch: ReplayBatch) -> Iterator[None]:
        """Force the batch's rows on every forward inside; on leaving, check that each gate consumed them.

        A MISSING row is decided by the gate's first forward inside and keeps that choice. Nothing here waits for the
        device, except that the rows of a batch that is not a RouteBatch are checked on entering. Enable activation
        checkpointing before entering.

        Raises, on entering: ReplayError (DETACHED, SPEC_MISMATCH, SHAPE, DTYPE), DataError (ROUTES_MISSING, where
        ``on_missing="raise"`` and a fed token has no row; and an illegal row of a batch of the caller's own:
        ``RouteBatch.from_tensors`` makes one that is checked once), UsageError where another ``replaying`` or
        ``recording`` of this handle is open. From inside a forward: ReplayError (ROW_COUNT, NO_SEAM, GATE_FIRED). On
        leaving without another exception: ReplayError (GATE_NOT_CONSUMED, GATE_FIRED; ROW_COUNT of a compiled forward).
        """
        self._refuse_unusable()
        self._settle_tokens()
        binding = self._bind(batch)
        try:
            with self._bound(binding):
                yield
        finally:
            for layer_id, rows in binding.rows.items():
                self._totals[layer_id].unconsumed += rows.forward_calls == 0
        _check_consumed(binding)
        _check_flipped(binding, self.policy.limits.max_flipped_share)
        self._microbatches += 1
        for layer_id, rows in binding.rows.items():
            self._totals[layer_id].add(rows)

    @contextmanager
    def recording(self, batch: ReplayBatch | None, /) -> Iterator[RecordedRoutes]:
        """Record what the gates choose by themselves in the one forward inside, for ``replaying`` it later (R2).

        What is yielded can be replayed once this is left: as it is, or as ``into(batch)``. ``batch`` is the one of the
        forward: only its ``num_rows`` and, where the framework has tokens in another order, its layout are read; None
        leaves the number of rows to the forward. Nothing here waits for the device, and nothing is counted in
        ``report()``. Raises as ``replaying`` does, and ReplayError (GATE_FIRED) for a second forward.
        """
        self._refuse_unusable()
        if batch is not None:
            _check_is_batch(batch)
        order_N = None if batch is None else self._row_order(batch)
        binding = self._bind_recording(None if batch is None else batch.num_rows)
        recorded = RecordedRoutes(self.spec, order_N)
        with self._bound(binding):
            yield recorded
        _check_consumed(binding, most=1)
        recorded.settle({layer_id: rows.chosen_NK for layer_id, rows in binding.rows.items()})

    @contextmanager
    def _bound(self, binding: Binding) -> Iterator[None]:
        self._capture_checkpoints()  # enabling checkpointing after attach() put the plain functions back
        with self._wiring.binding(binding):
            yield
        self._require_served()
        _settle_traced(list(binding.rows.values()))

    def _require_served(self) -> None:
        unserved = [traced for traced in self._wiring.traced if traced.refused]
        if unserved:
            raise ReplayError(
                f"expected as many token rows as the batch has, got others in a compiled forward @ {unserved[0].gate}",
                kind=ErrorKind.ROW_COUNT,
            )

    def report(self, *, since: ReplayReport | None = None) -> ReplayReport:
        """Counts so far, over each ``replaying`` that was left without an exception. Waits for the device.

        ``since``: an earlier report of this handle; only what came on top of it is counted, as the metrics of one step.
        Answers after ``detach()`` too. Raises UsageError (ARGUMENT) for a report of other gates.
        """
        self._settle_tokens()
        gates = tuple(self._totals[site.gate.layer_id].report(site.gate) for site, _ in self._gates)
        report = ReplayReport(gates=gates, microbatches=self._microbatches, left_live=self.policy.leave_live)
        return report if since is None else _difference(report, since)

    def _settle_tokens(self) -> None:
        if self._tokens is not None:
            self._tokens.settle()

    def detach(self) -> None:
        """Take hooks and stand-ins off. Idempotent. Call it when every backward pass is done.

        A recomputation that comes later raises ReplayError (DETACHED) rather than running live. Raises ReplayError
        inside an open ``replaying``.
        """
        if self._wiring.current is not None:
            raise ReplayError("expected replaying() to be left before detach(), got it open", kind=ErrorKind.DETACHED)
        for _, hook in self._gates:
            hook.remove()
        if self._tokens is not None:
            self._tokens.remove()
        for (_, name), stand_in in self._captured.items():
            # what the user has put there since is not ours to undo
            if getattr(stand_in.module, name) is stand_in:
                setattr(stand_in.module, name, stand_in.original)
        self._captured.clear()
        if not self._wiring.detached:
            self._wiring.detached = True
            self._undo()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    def _refuse_unusable(self) -> None:
        if self._wiring.detached:
            raise ReplayError("expected an attached handle, got one after detach()", kind=ErrorKind.DETACHED)
        if self._wiring.current is not None:
            raise refused("one replaying() at a time", "a second inside the first: a gate can follow one batch")

    def _bind(self, batch: ReplayBatch) -> Binding:
        _check_is_batch(batch)
        _check_batch(self.spec, batch.spec, [site.gate for site, _ in self._gates])
        _check_live(batch, self.policy.limits.max_live_share)
        missing = batch.unexplained_missing if self.policy.on_missing == "raise" else 0
        if missing:
            raise DataError(
                f"expected a row for every token that was fed, got {missing} without one (on_missing='raise')",
                kind=ErrorKind.ROUTES_MISSING,
            )
        # what was recorded is in the gates' order already
        order_N = None if isinstance(batch, RecordedRoutes) else self._row_order(batch)
        # a RouteBatch was checked when it was made, and what was recorded are gates' own choices
        own = not isinstance(batch, RouteBatch | RecordedRoutes)
        weights = self._weights(batch)
        rows = {}
        for site, hook in self._gates:
            gate = site.gate
            routes_NK = batch.layer(gate.layer_id)
            _check_rows(gate, routes_NK, batch.num_rows)
            if own:
                check_rows(routes_NK[:, None], self.spec.select([gate.layer_id]))
            ordered_NK = routes_NK if order_N is None else routes_NK[order_N.to(routes_NK.device)]
            observe = self.policy.mode == "observe"
            rows[gate.layer_id] = found = GateRows(gate, ordered_NK, observe=observe)
            found.traced = hook.traced_rows(ordered_NK)
            if weights is not None:
                weights_NK = weights[gate.layer_id]
                found.weights_NK = weights_NK if order_N is None else weights_NK[order_N.to(weights_NK.device)]
                found.weight_site = site.weights
        is_shard = getattr(getattr(batch, "plan", None), "is_shard", False)
        return Binding(rows=rows, token_ids=getattr(batch, "token_ids", None), is_shard=is_shard)

    def _weights(self, batch: ReplayBatch) -> dict[int, torch.Tensor] | None:
        """The batch's weights by layer, float32 ``[N, K]``, as the gates give theirs; None where these are used."""
        if self.policy.weights == "live":
            return None
        weights_NLK, meaning = _recorded_weights(batch)
        found = {}
        for place, _ in self._gates:
            site, gate = place.weights, place.gate
            if site is None:
                raise ReplayError(f"expected a gate whose weights are known, got none @ {gate}", kind=ErrorKind.NO_SEAM)
            renormalise, factor = meaning.steps_to(site.meaning)
            stored = "bfloat16" if weights_NLK.dtype == torch.bfloat16 else meaning.dtype
            if site.dtype not in (torch.float32, getattr(torch, stored)):
                raise DataError(
                    f"expected weights that {site.dtype} holds, as the gate gives them, got {stored} @ {gate}",
                    kind=ErrorKind.TOKEN_COLUMN,
                )
            values_NK = weights_NLK[:, batch.spec.slot(gate.layer_id)].float()
            values_NK = values_NK / values_NK.sum(-1, keepdim=True) if renormalise else values_NK
            found[gate.layer_id] = values_NK if factor == 1.0 else values_NK * factor
        return found

    def _bind_recording(self, num_rows: int | None) -> Binding:
        rows = {}
        for site, hook in self._gates:
            rows[site.gate.layer_id] = found = RecordedRows(site.gate)
            if num_rows is not None:
                missing_NK = torch.full((num_rows, site.gate.top_k), MISSING, dtype=torch.int16)
                found.traced = hook.traced_rows(missing_NK)
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


class NoReplay:
    """Stands for a ReplayHandle where replay is off: the training loop stays one, and gates choose by themselves.

    >>> on = False
    >>> with gates.attach(model, spec) if on else NoReplay() as replay:
    ...     with replay.replaying(None):
    ...         pass
    >>> replay.report().microbatches
    0
    """

    def replaying(self, batch: ReplayBatch | None) -> AbstractContextManager[None]:
        """Force nothing: forwards inside run live, whatever the batch."""
        return nullcontext()

    def report(self, *, since: ReplayReport | None = None) -> ReplayReport:
        """A report of no gates and no microbatches."""
        return ReplayReport(gates=(), microbatches=0)

    def detach(self) -> None:
        """Do nothing: nothing is attached."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()


def _difference(report: ReplayReport, before: ReplayReport) -> ReplayReport:
    ours, theirs = ([(gate.layer_id, gate.name) for gate in each.gates] for each in (report, before))
    if ours != theirs or before.microbatches > report.microbatches:
        raise UsageError(
            f"expected an earlier report of this handle, got one of {before.microbatches} microbatches through "
            f"{len(theirs)} gates: now there are {report.microbatches} through {len(ours)}",
            kind=ErrorKind.ARGUMENT,
        )
    gates = tuple(gate.since(earlier) for gate, earlier in zip(report.gates, before.gates, strict=True))
    return replace(report, gates=gates, microbatches=report.microbatches - before.microbatches)


def _recorded_weights(batch: ReplayBatch) -> tuple[torch.Tensor, WeightsMeaning]:
    """A batch's weights, float32 or bfloat16 ``[N, L, K]``, and what they are; looks at every value, on its device.

    Raises DataError where there are none, or where they are not what they declare, or of other rows than the routes.
    """
    values = getattr(batch, "columns", {}).get("route_weights")
    if values is None:
        raise DataError(
            "expected a batch with the column route_weights (weights='recorded'), got one without",
            kind=ErrorKind.TOKEN_COLUMN,
        )
    meaning = WeightsMeaning.from_text(getattr(batch, "weights_meaning", None))
    shape = (batch.num_rows, *batch.spec.row_shape)
    if values.dtype not in (torch.float32, torch.uint16) or values.numel() != torch.Size(shape).numel():
        raise DataError(
            f"expected route_weights {list(shape)} as float32, or as uint16 bits of bfloat16, got {values.dtype} "
            f"{list(values.shape)}",
            kind=ErrorKind.TOKEN_COLUMN,
        )
    weights_NLK = (values.view(torch.bfloat16) if values.dtype == torch.uint16 else values).reshape(shape)
    _check_weights(batch, weights_NLK, meaning)
    return weights_NLK, meaning


def _check_weights(batch: ReplayBatch, weights_NLK: torch.Tensor, meaning: WeightsMeaning) -> None:
    layers = [batch.layer(layer_id)[:, 0] for layer_id in batch.spec.layer_ids]
    missing_NL = torch.stack([ids_N.to(weights_NLK.device) for ids_N in layers], dim=1) == MISSING
    padding = getattr(batch, "pad_mask", None)
    if padding is not None:  # balanced ids stand there, with no weights
        missing_NL |= padding.reshape(-1, 1).to(weights_NLK.device)
    wrong_NL = _illegal_weights(weights_NLK, missing_NL, meaning)
    if bool(wrong_NL.any()):
        row, slot = wrong_NL.nonzero()[0].tolist()
        raise DataError(
            f"expected route_weights as {meaning.to_text()} says where there is a row, and NaN elsewhere, got "
            f"{weights_NLK[row, slot].tolist()} in {int(wrong_NL.sum())} rows @ row {row}, layer "
            f"{batch.spec.layer_ids[slot]}",
            kind=ErrorKind.TOKEN_COLUMN,
        )


def _illegal_weights(weights_NLK: torch.Tensor, missing_NL: torch.Tensor, meaning: WeightsMeaning) -> torch.Tensor:
    """As ``record.validate.illegal_weights``, on the device where the weights are: bool ``[N, L]``."""
    stored = "bfloat16" if weights_NLK.dtype == torch.bfloat16 else "float32"
    ceiling, tolerance = meaning.ceiling, meaning.tolerance(stored)
    values_NLK = weights_NLK.float()
    sum_NL = values_NLK.sum(-1)
    fits_NL = (values_NLK.amin(-1) >= 0) & (values_NLK.amax(-1) <= ceiling + tolerance)
    if meaning.renormalised or meaning.score == "softmax":
        fits_NL &= sum_NL <= ceiling + tolerance
    if meaning.renormalised:
        fits_NL &= sum_NL >= ceiling - tolerance
    return torch.where(missing_NL, ~values_NLK.isnan().all(-1), ~fits_NL)


def _check_live(batch: ReplayBatch, limit: float | None) -> None:
    if limit is None or not batch.unexplained_missing:
        return
    coverage = getattr(batch, "coverage", None)
    tokens = batch.num_rows
    if callable(coverage):  # padding is not among them
        rows = coverage()
        tokens = batch.unexplained_missing + sum(rows.count(state) for state in ("captured", "cached"))
    share = batch.unexplained_missing / max(tokens, 1)
    if share > limit:
        raise DataError(
            f"expected at most {limit:.0%} of the fed tokens without a row (max_live_share), got "
            f"{batch.unexplained_missing} of {tokens}",
            kind=ErrorKind.ROUTES_MISSING,
        )


def _check_flipped(binding: Binding, limit: float | None) -> None:
    if limit is None:
        return
    tallies = [rows.tally.cpu() for rows in binding.rows.values() if rows.tally is not None]
    forced, flipped = torch.stack(tallies).sum(0).tolist()[:2] if tallies else (0, 0)
    if flipped > limit * forced:
        raise ReplayError(
            f"expected at most {limit:.0%} of the forced rows to differ from the gates' own choice "
            f"(max_flipped_share), got {flipped} of {forced}: rows of other tokens or layers look like this",
            kind=ErrorKind.FLIPPED_SHARE,
        )


def _check_choice(name: str, value: object, *, allowed: tuple[str, str]) -> None:
    if value not in allowed:
        raise refused(f"{name} {' or '.join(map(repr, allowed))}", repr(value))


def _check_geometry(spec: RouteSpec, gates: Sequence[Gate]) -> None:
    """The spec's layers are the model's gates, one for one, with equal E and K."""
    wanted = set(zip(spec.layer_ids, spec.experts_per_layer, [spec.top_k] * spec.num_layers, strict=True))
    found = {(gate.layer_id, gate.num_experts, gate.top_k): gate for gate in gates}
    apart = sorted(wanted ^ set(found))
    if apart or len(found) != len(gates):
        named = [str(found[each]) for each in apart if each in found][:4]
        raise ReplayError(
            f"expected the gates of {spec.model or 'the spec'}, {_listed(sorted(wanted))}, got those of the model, "
            f"{_listed(sorted(found))}; apart: {_listed(apart)} @ {', '.join(named) or 'no gate'}",
            kind=ErrorKind.SPEC_MISMATCH,
        )


def _check_is_batch(batch: ReplayBatch) -> None:
    if not hasattr(batch, "num_rows"):
        raise refused("a batch (collate and microbatches make them of records)", type(batch).__name__)


def _check_batch(spec: RouteSpec, other: RouteSpec, gates: Sequence[Gate]) -> None:
    found = list(spec.differences(other))
    if spec.model and other.model and spec.model != other.model:
        found.append(f"model {other.model!r} instead of {spec.model!r} (the same spec on both sides says otherwise)")
    if found:
        raise ReplayError(
            f"expected a batch of {spec.model or 'this spec'}, got one of {other.model or 'another'}; "
            f"{'; '.join(found)} @ {gates[0]} and {len(gates) - 1} others",
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


def _settle_traced(rows: list[GateRows]) -> None:
    """One look at the device for all gates of a compiled forward; none where eager hooks saw every gate."""
    traced = [(each, each.traced) for each in rows if each.traced is not None and not each.forward_calls]
    if traced:
        device = traced[0][1].tally.device
        calls = torch.stack([tensors.tally[2].to(device) for _, tensors in traced]).tolist()
        for (each, _), count in zip(traced, calls, strict=True):
            each.settle_traced(count)


def _check_consumed(binding: Binding, *, most: int | None = None) -> None:
    """Every gate came for its rows, and all came equally often, or ``most`` times; recomputations do not count."""
    calls = {rows.gate: rows.forward_calls for rows in binding.rows.values()}
    most = max(calls.values()) if most is None else most
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
