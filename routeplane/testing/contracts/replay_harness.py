"""What a replay adapter tells its contract: how to build, run and look into one tiny model.

``ReplayHarness`` is the list of hooks; ``replay.ReplayContract`` adds the properties. Also here: a batch with the four
attributes that replay asks for, rows drawn for it, and the mark that says which feature a property shows.

Axes: N token rows, L captured layers, E experts, K top-k slots. N is in the *batch's* order throughout: an adapter
whose gates see tokens in another order puts what it reports back.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np
import torch

if TYPE_CHECKING:
    from torch import nn

    from routeplane.record.spec import RouteSpec
    from routeplane.replay.handle import ReplayBatch, ReplayHandle

__all__ = ["Firing", "ReplayHarness", "RowsBatch", "feature", "rows_batch", "unlike_rows"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


def feature(name: str, /) -> Callable[[_Function], _Function]:
    """Mark a test as showing a feature; ``test.replay_feature`` is read by the table of results."""

    def mark(function: _Function) -> _Function:
        function.replay_feature = name  # type: ignore[attr-defined]
        return function

    return mark


@dataclass(frozen=True, kw_only=True)
class Firing:
    """What one call of a router computed: its logits ``[N, E]``, the weights and ids ``[N, K]`` that it handed on."""

    logits_NE: torch.Tensor
    weights_NK: torch.Tensor
    ids_NK: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class RowsBatch:
    """int16 routes ``[N, L, K]`` under a spec: what replay asks of a batch, and nothing else."""

    spec: RouteSpec
    routes_NLK: torch.Tensor
    unexplained_missing: int = 0

    @property
    def num_rows(self) -> int:
        """N."""
        return int(self.routes_NLK.shape[0])

    def layer(self, layer_id: int) -> torch.Tensor:
        """The rows of one layer, int16 ``[N, K]``, a view."""
        return self.routes_NLK[:, self.spec.slot(layer_id)]


def rows_batch(spec: RouteSpec, rows: Mapping[int, torch.Tensor], /) -> RowsBatch:
    """A batch from ids ``[N, K]`` by layer."""
    stacked_NLK = torch.stack([rows[layer] for layer in spec.layer_ids], dim=1)
    return RowsBatch(spec=spec, routes_NLK=stacked_NLK.to(torch.int16))


def unlike_rows(spec: RouteSpec, num_rows: int, *, seed: int, missing: float = 0.0) -> RowsBatch:
    """Legal rows drawn uniformly, every layer for itself; a share of them MISSING. Far from what any gate chooses."""
    rng = np.random.default_rng(seed)
    rows = {}
    for layer, width in zip(spec.layer_ids, spec.experts_per_layer, strict=True):
        ids_NK = np.stack([rng.permutation(width)[: spec.top_k] for _ in range(num_rows)])
        ids_NK[rng.random(num_rows) < missing] = -1
        rows[layer] = torch.from_numpy(ids_NK)
    return rows_batch(spec, rows)


class ReplayHarness:
    """The hooks of ``ReplayContract``: a subclass overrides those that raise, and others where its framework differs.

    Everything is deterministic: the same arguments build the same model and inputs, without dropout. Routers have
    random weights, large enough that other experts mean other outputs.
    """

    #: names in the table of ``docs/reference/replay.md``
    adapter: ClassVar[str]
    family: ClassVar[str]

    #: ways in which ``enable_recompute`` can have the framework recompute gates in backward; at least one
    recompute_variants: ClassVar[tuple[str, ...]]
    #: whether the output bits of equal choices are equal; where not, what ``torch.testing.assert_close`` allows
    tolerances: ClassVar[Mapping[str, Any]] = {"rtol": 0.0, "atol": 0.0}
    #: of gradients that are the same but for the order of sums
    gradient_tolerances: ClassVar[Mapping[str, Any]] = {"rtol": 1e-5, "atol": 1e-7}
    #: step along a random direction (of unit variance) of a router's weight, and the relative error that it may leave
    difference_step: ClassVar[float] = 1e-3
    difference_rtol: ClassVar[float] = 0.02

    # ---- the model ------------------------------------------------------------------------------------------------

    @property
    def spec(self) -> RouteSpec:
        """The model's geometry, written down by hand."""
        raise NotImplementedError

    @property
    def num_rows(self) -> int:
        """N of every ``make_inputs``; at least 8."""
        raise NotImplementedError

    def make_model(self, *, seed: int = 0) -> nn.Module:
        """A tiny model in training mode."""
        raise NotImplementedError

    def copy_model(self, model: nn.Module) -> nn.Module:
        """A deep copy, as a reference model is made; for frameworks whose models hold what cannot be copied."""
        return copy.deepcopy(model)

    def make_difference_model(self) -> nn.Module:
        """The model for finite differences: where the family can, in double precision."""
        return self.make_model()

    def make_inputs(self, *, seed: int) -> Any:
        """What ``forward`` takes besides the model."""
        raise NotImplementedError

    def forward(self, model: nn.Module, inputs: Any) -> torch.Tensor:
        """The model's output, with gradients."""
        raise NotImplementedError

    def loss(self, model: nn.Module, inputs: Any) -> torch.Tensor:
        """A scalar that every router's weight moves."""
        return self.forward(model, inputs).square().mean()

    def attach(self, model: nn.Module, spec: RouteSpec, **options: Any) -> ReplayHandle:
        """The adapter's ``attach``."""
        raise NotImplementedError

    def make_batch(self, rows: RowsBatch, *, inputs: Any) -> ReplayBatch:
        """The batch to replay ``rows`` on ``inputs``, for adapters that ask more of it than four attributes."""
        return rows

    # ---- its gates ------------------------------------------------------------------------------------------------

    def gate_names(self, model: nn.Module) -> Mapping[int, str]:
        """Layer -> the gate's name, as errors and reports have it."""
        raise NotImplementedError

    def weights(self, model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
        """Every trained weight, under a name that ``enable_recompute`` does not change."""
        return model.named_parameters()

    def gate_weight(self, model: nn.Module, layer_id: int) -> nn.Parameter:
        """The weight from which a gate computes its logits."""
        raise NotImplementedError

    def observe(self, model: nn.Module) -> AbstractContextManager[Mapping[int, list[Firing]]]:
        """Every complete router call inside the ``with``, recomputations too, by layer; read from what it returns."""
        raise NotImplementedError

    def expected_weights(self, firing: Firing, ids_NK: torch.Tensor) -> torch.Tensor:
        """The weights ``[N, K]`` of given ids by the family's rule, restated from the live logits."""
        raise NotImplementedError

    def live_ids(self, model: nn.Module, *, layer_id: int, logits_NE: torch.Tensor) -> torch.Tensor:
        """The gate's own choice ``[N, K]``, restated; in any order."""
        return logits_NE.topk(self.spec.top_k, dim=-1).indices

    def skip_gate(self, model: nn.Module, layer_id: int) -> None:
        """Make the layer's forward go around its gate."""
        raise NotImplementedError

    def fire_gate(self, model: nn.Module, layer_id: int, *, num_rows: int) -> None:
        """Call one gate alone on any ``num_rows`` rows."""
        raise NotImplementedError

    # ---- what the framework can -----------------------------------------------------------------------------------

    def enable_recompute(self, model: nn.Module, variant: str) -> None:
        """Have gates recomputed in backward, before ``attach``."""
        raise NotImplementedError

    def aux_loss(self, model: nn.Module, inputs: Any) -> torch.Tensor | None:
        """The auxiliary loss of one forward; None where the framework has none for this family."""
        return None

    def aux_live_ids(self, model: nn.Module, *, layer_id: int, logits_NE: torch.Tensor) -> torch.Tensor:
        """What the auxiliary loss counts without replay; some frameworks leave a bias for the choice out of it."""
        return self.live_ids(model, layer_id=layer_id, logits_NE=logits_NE)

    def expected_aux(self, firings: Mapping[int, Firing], ids: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """The auxiliary loss restated: of live logits, and of the ids ``[N, K]`` that it counts."""
        raise NotImplementedError

    def traces(self, model: nn.Module) -> Iterator[tuple[str, object]]:
        """What ``detach`` must restore: names and identities of hooks and instance attributes."""
        for name, module in model.named_modules():
            yield f"{name} pre-hooks", tuple(module._forward_pre_hooks)
            yield f"{name} hooks", (tuple(module._forward_hooks), tuple(module._forward_hooks_always_called))
            for key, value in vars(module).items():
                yield f"{name}.{key}", id(value)
