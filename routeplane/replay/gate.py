"""The rule of replay: forced ids replace a gate's selection, and nothing else of the gate changes.

A gate selects over a dense ``[N, E]`` matrix of scores (``routeplane.capture.gates`` finds where). ``ForcedTopK``
answers that one selection with the recorded ids and with ``scores.gather(-1, ids)``: weights, normalisation, scaling
and gradients stay the family's own code, computed on live scores. A MISSING row keeps the live selection.

Where the selection goes through an object on the gate (Megatron-Core's replay seam), a ``StandIn`` takes that object's
place while a handle is attached.

``TracedGate`` is the rule inside graphs that torch.compile traces: one graph for every batch of a size, none of its
state in Python. ``RecordedRoutes`` are the routes that a model's own gates chose in one forward, to be replayed in
another (R2).

Knows torch and a gate's geometry. Knows no model library, no hooks and no checkpointing: ``handle`` decides when a gate
is forced, and with which rows.

Axes: N token rows of one gate call (``b*S + s`` padded, or packed), E experts, K top-k slots.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from routeplane.capture.selection import COPIES, Gate, SelectionMode, selection
from routeplane.errors import ErrorKind, ReplayError, UsageError
from routeplane.record.spec import MISSING, RouteSpec

if TYPE_CHECKING:
    from torch import nn

    from routeplane.batch.batch import RouteBatch
    from routeplane.capture.weights import WeightSite


__all__ = [
    "SEAM",
    "ForcedTopK",
    "Forcing",
    "ForwardStandIn",
    "Gate",
    "GateRows",
    "GateSite",
    "RecordedRoutes",
    "RecordedRows",
    "SeamForcing",
    "StandIn",
    "TracedGate",
    "TracedRows",
    "install",
    "spec_of_gates",
    "uninstaller",
    "without_replay",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class GateSite:
    """A gate in a live model: its module, and how its selection is reached while the module's forward runs.

    ``force`` is called for every forward of the module that has rows, recomputations included. ``traced``: the module
    may be part of a compiled graph, where ``compiled.TracedGate`` forces a selection that is a ``torch.topk``.
    ``weights``: where the gate's routing weights stand, where recorded ones replace them.
    """

    gate: Gate
    module: nn.Module
    force: Callable[[GateRows], Forcing]
    traced: bool = False
    weights: WeightSite | None = None


class TracedRows:
    """One binding's rows of one gate: ``routes_NK`` int16 and ``tally`` int64 ``[3]`` on the gate's device, both owned.

    The first forward writes its choice into ``routes_NK``. ``tally`` counts forced rows, flipped rows and forwards.
    """

    __slots__ = ("routes_NK", "tally")

    def __init__(self, routes_NK: torch.Tensor, /, *, device: torch.device) -> None:
        self.routes_NK = routes_NK.to(device, copy=True)
        self.tally = torch.zeros(3, dtype=torch.int64, device=device)


class GateRows:
    """What one gate gets in one binding: its rows, what became of them, and how often it came for them.

    ``routes_NK`` is int16 ``[N, K]`` on any device and stays the batch's; it is read at the first firing and then let
    go. What is kept is the resolved choice, int64 ``[N, K]`` on the gate's device: a MISSING row is decided by the live
    scores of the *first* firing, and every later firing repeats that decision. A recomputation that decided again would
    flip near ties, and the gradient would be that of another forward.
    """

    __slots__ = (
        "_chosen_NK",
        "_routes_NK",
        "forward_calls",
        "gate",
        "num_rows",
        "observe",
        "outside_calls",
        "outside_reruns",
        "tally",
        "traced",
        "weight_site",
        "weights_NK",
    )

    def __init__(self, gate: Gate, routes_NK: torch.Tensor | None, /, *, observe: bool = False) -> None:
        self.gate = gate
        #: count what forcing would change, and leave the gate its own ids
        self.observe = observe
        #: N, which a gate's call must show; None where the first call decides
        self.num_rows = None if routes_NK is None else int(routes_NK.shape[0])
        self._routes_NK = routes_NK
        self._chosen_NK: torch.Tensor | None = None
        #: int64 [2]: forced rows, and forced rows whose set differs from the live one. Never read during a forward.
        self.tally: torch.Tensor | None = None
        self.forward_calls = 0
        #: the same rows for a gate that may be compiled
        self.traced: TracedRows | None = None
        #: forward calls and recomputations that no captured checkpoint frame surrounded
        self.outside_calls = 0
        self.outside_reruns = 0
        #: recorded weights as the gate gives them, NaN in rows that have none; and where they go in its answer
        self.weights_NK: torch.Tensor | None = None
        self.weight_site: WeightSite | None = None

    def weigh(self, output: Any) -> Any:
        """The gate's answer with the recorded weights, and its own in rows without; None where there are none.

        No gradient goes from recorded weights to the router.
        """
        site, weights_NK = self.weight_site, self.weights_NK
        if site is None or weights_NK is None:
            return None
        live_NK = site.read(output, self.chosen_NK)
        with torch.inference_mode(False), torch.no_grad():
            self.weights_NK = recorded_NK = weights_NK.to(live_NK.device, live_NK.dtype, non_blocking=True)
        found_NK = torch.where(recorded_NK.isnan(), live_NK, recorded_NK)
        return site.write(output, self.chosen_NK, weights_NK=found_NK)

    def choose(self, scores_NE: torch.Tensor, live: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The ids to use, int64 ``[N, K]``. ``live`` gives the gate's own ids, ``[N, K]``; it is asked at most once.

        Of ``scores_NE`` only the number of rows and the device are read. The answer is kept for recomputations: copy
        it before writing into it. Raises ReplayError (ROW_COUNT) where the gate sees another number of rows than the
        batch holds.
        """
        if self.num_rows is not None and scores_NE.shape[0] != self.num_rows:
            raise ReplayError(
                f"expected {self.num_rows} token rows, as the batch holds, got {scores_NE.shape[0]} @ {self.gate}",
                kind=ErrorKind.ROW_COUNT,
            )
        if self._chosen_NK is None:
            # a first firing under inference_mode must not leave tensors that a later one cannot save for backward
            with torch.inference_mode(False), torch.no_grad():
                self._chosen_NK = self._resolve(scores_NE.device, live())
        return self._chosen_NK

    def settle_traced(self, calls: int, /) -> None:
        """Take over what a compiled forward decided and counted: it was called ``calls`` times, this gate never."""
        if self.traced is not None and calls and not self.forward_calls:
            self.forward_calls = calls
            self._chosen_NK = self.traced.routes_NK.to(torch.int64)
            self.tally = self.traced.tally[:2]
            self.num_rows = len(self._chosen_NK)

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
        return live_NK.detach().to(torch.int64, copy=True) if self.observe else chosen_NK

    @property
    def chosen_NK(self) -> torch.Tensor:
        """The resolved choice, int64 ``[N, K]``. Raises ReplayError (GATE_NOT_CONSUMED) before the first firing."""
        if self._chosen_NK is None:
            raise ReplayError(
                f"expected a gate that has selected, got none yet @ {self.gate}", kind=ErrorKind.GATE_NOT_CONSUMED
            )
        return self._chosen_NK


class RecordedRows(GateRows):
    """Rows that the gate's first firing decides by itself: what it chose is in ``chosen_NK``."""

    __slots__ = ()

    def __init__(self, gate: Gate) -> None:
        super().__init__(gate, None)

    def _resolve(self, device: torch.device, live_NK: torch.Tensor) -> torch.Tensor:
        self.num_rows = int(live_NK.shape[0])
        self.tally = torch.zeros(2, dtype=torch.int64, device=device)
        return live_NK.detach().to(torch.int64, copy=True)


class Forcing(ABC):
    """Active during one call of one gate's forward: answers its selection, once, from the rows it is given.

    Each framework reaches the selection in its own way; what is common is here. ``open`` is called just before the
    forward and ``close`` just after it, also where it raised. What meets the selection calls ``answer``.
    """

    def __init__(self, rows: GateRows, /) -> None:
        self.rows = rows
        self.hits = 0

    @abstractmethod
    def open(self) -> None:
        """Reach the selection; undone by ``close``."""

    @abstractmethod
    def close(self) -> None:
        """Undo ``open``. Nothing that was opened later may still be open."""

    def answer(self, scores_NE: torch.Tensor, live: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The ids to use instead of ``live()``, int64 ``[N, K]``; see ``GateRows.choose``.

        Raises ReplayError (GATE_FIRED) at a second selection in one call, and (ROW_COUNT) for other rows.
        """
        if self.hits:
            gate = self.rows.gate
            raise ReplayError(
                f"expected one selection over [N, {gate.num_experts}] per call, got a second one @ {gate}",
                kind=ErrorKind.GATE_FIRED,
            )
        self.hits = 1
        return self.rows.choose(scores_NE, live)

    def require_hit(self) -> None:
        """Raise ReplayError (NO_SEAM) where the gate returned without a selection that could be forced."""
        if not self.hits:
            gate = self.rows.gate
            raise ReplayError(
                f"expected one selection over [N, {gate.num_experts}] with k={gate.top_k} per call, got none: it "
                f"selects in another way (a fused kernel, or another version of the model's code) @ {gate}",
                kind=ErrorKind.NO_SEAM,
            )


class ForcedTopK(SelectionMode, Forcing):
    """Reaches a selection that is a call of ``torch.topk``, or K calls of ``torch.max``, anywhere in the forward."""

    def __init__(self, rows: GateRows, /) -> None:
        SelectionMode.__init__(self, rows.gate, self._answer)
        Forcing.__init__(self, rows)

    def _answer(self, scores_NE: torch.Tensor, live: Callable[[], torch.Tensor]) -> torch.Tensor | None:
        chosen_NK = self.answer(scores_NE, live)
        return None if self.rows.observe else chosen_NK

    def open(self) -> None:
        """Push onto torch's stack of modes; for hooks, which cannot hold a ``with`` open."""
        self.__enter__()  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Pop what ``open`` pushed; nothing that was pushed later may be left."""
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]


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


def spec_of_gates(gates: Iterable[Gate], /, *, model: str) -> RouteSpec:
    """The geometry that a live model's gates have. Raises ReplayError (NO_SEAM) for gates of different K."""
    found = sorted((gate.layer_id, gate.num_experts, gate.top_k) for gate in gates)
    layer_ids, widths, top_ks = zip(*found, strict=True)
    if len(set(top_ks)) > 1:
        raise ReplayError(
            f"expected gates of one top-k, got {top_ks} in layers {layer_ids} @ {model}", kind=ErrorKind.NO_SEAM
        )
    num_experts = widths[0] if len(set(widths)) == 1 else widths
    return RouteSpec(num_experts=num_experts, top_k=top_ks[0], layer_ids=layer_ids, model=model)


class RecordedRoutes:
    """One forward's routes; ``replaying`` takes it as a batch. Complete once ``recording`` was left in order.

    The tensors stay on the gates' devices and belong to this object. Reading it before it is complete raises
    UsageError (CLOSED).

    Example::

        with replay.recording() as routes:
            model(input_ids)
        with replay.replaying(routes):
            model(input_ids).loss.backward()
    """

    def __init__(self, spec: RouteSpec, order_N: torch.Tensor | None, /) -> None:
        self.spec = spec
        self.unexplained_missing = 0
        self._order_N = order_N
        self._rows: Mapping[int, torch.Tensor] = {}

    def settle(self, chosen: Mapping[int, torch.Tensor], /) -> None:
        """Take the ids ``[N, K]`` of each layer, in the gates' order; copies them as int16."""
        self._rows = {layer_id: ids_NK.to(torch.int16) for layer_id, ids_NK in chosen.items()}

    @property
    def num_rows(self) -> int:
        """N, padding included."""
        return int(self.layer(self.spec.layer_ids[0]).shape[0])

    def layer(self, layer_id: int) -> torch.Tensor:
        """int16 ``[N, K]`` in the order in which the gate saw the tokens."""
        if not self._rows:
            raise UsageError("expected recording() to be left first, got it open", kind=ErrorKind.CLOSED)
        return self._rows[layer_id]

    def routes_NLK(self) -> torch.Tensor:
        """int16 ``[N, L, K]`` in the batch's order, on the device of the first gate; a copy."""
        first = self.layer(self.spec.layer_ids[0])
        stacked = torch.stack([self.layer(layer).to(first.device) for layer in self.spec.layer_ids], dim=1)
        if self._order_N is None:
            return stacked
        found = torch.empty_like(stacked)
        found[self._order_N.to(first.device)] = stacked
        return found

    def into(self, batch: RouteBatch, /) -> RouteBatch:
        """The batch with these routes in place of its own: see ``RouteBatch.with_routes``."""
        return batch.with_routes(self.routes_NLK())


class ForwardStandIn:
    """Stands in for one gate's ``forward``; an instance attribute, until ``remove``. Copies of the gate have their own.

    A subclass answers ``__call__``; ``original`` is what was there.
    """

    def __init__(self, module: nn.Module, /) -> None:
        self.module = module
        self.original: Callable[..., Any] = module.forward
        #: whether ``forward`` was the class's own
        self._plain = "forward" not in vars(module)
        module.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The gate's forward."""
        raise NotImplementedError

    def remove(self) -> None:
        """Put the forward back. Idempotent."""
        if vars(self.module).get("forward") is self:
            if self._plain:
                del self.module.forward
            else:
                self.module.forward = self.original

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        # a copied model (a teacher) gets its own gate's forward
        copied = memo.get(id(self.module))
        if not self._plain:
            forward: Callable[..., Any] = copy.deepcopy(self.original, memo)
            return forward
        return self if copied is None else _own_forward(copied)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return (_own_forward, (self.module,)) if self._plain else (without_replay, (self.original,))


def _own_forward(module: nn.Module) -> Callable[..., Any]:
    return MethodType(type(module).forward, module)


def without_replay(original: Any, /) -> Any:
    """What stands, in a pickled copy of an attached model, where replay stood: ``original`` itself."""
    return original


class TracedGate(ForwardStandIn):
    """Stands in for one gate's ``forward`` and follows rows inside compiled graphs."""

    def __init__(self, gate: Gate, module: nn.Module, /) -> None:
        super().__init__(module)
        self.gate = gate
        #: what is seated: None where the gate is live
        self.routes_NK: torch.Tensor | None = None
        self.tally: torch.Tensor | None = None
        #: whether a forward saw another number of rows than were seated, and stayed live
        self.refused = False

    @property
    def device(self) -> torch.device:
        """Where the gate computes."""
        return next(iter(self.module.parameters())).device

    def seat(self, rows: TracedRows | None, *, rerun: bool) -> None:
        """The rows for the forwards that come; what a recomputation counts is dropped."""
        self.routes_NK = None if rows is None else rows.routes_NK
        self.tally = None if rows is None else torch.zeros_like(rows.tally) if rerun else rows.tally

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
            if func in COPIES and args:
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
