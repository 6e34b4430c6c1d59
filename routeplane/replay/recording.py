"""Routes that a model's own gates chose in one forward, to be replayed in another (R2).

Knows specs and tensors. What fills it is ``handle``.

Axes: N token rows, L layers, K top-k slots.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch

from routeplane.errors import ErrorKind, ReplayError, UsageError
from routeplane.record.spec import RouteSpec

if TYPE_CHECKING:
    from routeplane.batch.batch import RouteBatch
    from routeplane.capture.gates import Gate

__all__ = ["RecordedRoutes", "spec_of_gates"]


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
