"""The contract of replay adapters: what every ``attach`` must do to a model of its framework.

A test module inherits ``ReplayContract`` once for each family, and answers the hooks of ``ReplayHarness``::

    class TestQwen3Moe(ReplayContract):
        adapter, family = "transformers", "qwen3_moe"
        ...

Knows torch and replay's own types. Knows no framework.

Axes: N token rows, L captured layers, E experts, K top-k slots.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np
import pytest
import torch

from routeplane.errors import ErrorKind, ReplayError

if TYPE_CHECKING:
    from torch import nn

    from routeplane.record.spec import RouteSpec
    from routeplane.replay.handle import ReplayBatch, ReplayHandle

__all__ = ["Firing", "ReplayContract", "ReplayHarness", "RowsBatch", "feature", "rows_batch", "unlike_rows"]

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


Gradients = dict[str, torch.Tensor]


def _named(name: str, text: str) -> str:
    return f"{name}: {text}"


class ReplayContract(ReplayHarness):
    """Inherit, answer the hooks, and pytest collects the properties.

    Example::

        class TestMyModel(ReplayContract):
            adapter, family = "transformers", "my_model"
            ...  # the hooks of ``ReplayHarness`` that raise
    """

    @classmethod
    def pytest_generate_tests(cls, metafunc: pytest.Metafunc) -> None:
        """One test for each way of recomputing."""
        if "recompute" in metafunc.fixturenames:
            metafunc.parametrize("recompute", cls.recompute_variants)

    # ---- shared steps ---------------------------------------------------------------------------------------------

    def _same(self, expected: torch.Tensor, found: torch.Tensor) -> None:
        torch.testing.assert_close(found, expected, **self.tolerances)

    def _rows(self, *, seed: int, missing: float = 0.0) -> RowsBatch:
        return unlike_rows(self.spec, self.num_rows, seed=seed, missing=missing)

    def _own_rows(self, model: nn.Module, inputs: Any) -> RowsBatch:
        with self.observe(model) as seen, torch.no_grad():
            self.forward(model, inputs)
        return rows_batch(self.spec, {layer: firings[0].ids_NK for layer, firings in seen.items()})

    def _replayed(self, model: nn.Module, rows: RowsBatch, inputs: Any, **options: Any) -> torch.Tensor:
        with self.attach(model, self.spec, **options) as handle:
            with handle.replaying(self.make_batch(rows, inputs=inputs)):
                return self.forward(model, inputs)

    def _watched(self, model: nn.Module, rows: RowsBatch, inputs: Any) -> tuple[torch.Tensor, Mapping[int, Any]]:
        """The output, and what gates computed; observed once attached, since attaching may probe the gates."""
        with self.attach(model, self.spec) as handle, self.observe(model) as seen:
            with handle.replaying(self.make_batch(rows, inputs=inputs)):
                return self.forward(model, inputs), seen

    def _steps(self, model: nn.Module, handle: ReplayHandle, *, order: tuple[int, ...] | None) -> Gradients:
        """Gradients of two microbatches; ``order`` None: each backward inside, else after both forwards."""
        losses = []
        for seed in (0, 1):
            inputs = self.make_inputs(seed=seed)
            with handle.replaying(self.make_batch(self._rows(seed=10 + seed, missing=0.2), inputs=inputs)):
                losses.append(self.loss(model, inputs))
                if order is None:
                    torch.autograd.backward(losses[-1])
        for index in order or ():
            torch.autograd.backward(losses[index])
        return {name: weight.grad for name, weight in self.weights(model) if weight.grad is not None}

    def _expected_steps(self) -> Gradients:
        model = self.make_model()
        with self.attach(model, self.spec) as handle:
            return self._steps(model, handle, order=None)

    def _same_gradients(self, expected: Gradients, found: Gradients) -> None:
        assert expected
        assert expected.keys() == found.keys()
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, **self.gradient_tolerances, msg=partial(_named, name))

    # ---- the gates follow -----------------------------------------------------------------------------------------

    @feature("self-replay")
    def test_own_routes_replay_bit_for_bit(self) -> None:
        """Forcing what the gates would choose anyway changes nothing, and counts every row and no flip."""
        model, inputs = self.make_model(), self.make_inputs(seed=1)
        expected = self.forward(model, inputs)
        rows = self._own_rows(model, inputs)
        with self.attach(model, self.spec) as handle:
            with handle.replaying(self.make_batch(rows, inputs=inputs)):
                self._same(expected, self.forward(model, inputs))
        assert [(self.num_rows, 0, 0, 1, 0)] * self.spec.num_layers == [
            (gate.forced_rows, gate.live_rows, gate.flipped_rows, gate.consumed, gate.unconsumed)
            for gate in handle.report().gates
        ]

    @feature("forced rows")
    def test_forced_ids_are_used_with_weights_from_live_scores(self) -> None:
        """Each router hands on the recorded ids, and the weights that the family's rule gives them from its logits."""
        model, inputs, rows = self.make_model(), self.make_inputs(seed=1), self._rows(seed=5)
        live = self.forward(model, inputs)
        found, seen = self._watched(model, rows, inputs)
        assert list(self.spec.layer_ids) == sorted(seen)
        for layer, (firing,) in seen.items():
            assert rows.layer(layer).sort().values.tolist() == firing.ids_NK.sort().values.tolist()
            expected_NK = self.expected_weights(firing, firing.ids_NK)
            torch.testing.assert_close(firing.weights_NK, expected_NK, rtol=1e-4, atol=1e-5)
        assert (found - live).abs().max() > 1e-3 * live.abs().max()

    @feature("missing rows")
    def test_all_missing_is_the_live_model(self) -> None:
        """A batch without a single row leaves the output as it is."""
        model, inputs = self.make_model(), self.make_inputs(seed=1)
        self._same(self.forward(model, inputs), self._replayed(model, self._rows(seed=5, missing=1.1), inputs))

    @feature("missing rows")
    def test_missing_rows_are_live_among_forced_ones(self) -> None:
        """Row by row: recorded ids where there are some, else what the same router chooses from the same logits."""
        model, inputs, rows = self.make_model(), self.make_inputs(seed=1), self._rows(seed=5, missing=0.5)
        _, seen = self._watched(model, rows, inputs)
        for layer, (firing,) in seen.items():
            live_NK = self.live_ids(model, layer_id=layer, logits_NE=firing.logits_NE)
            missing_N1 = (rows.layer(layer)[:, :1] == -1).to(live_NK.device)
            assert 0 < missing_N1.sum() < self.num_rows
            expected_NK = torch.where(missing_N1, live_NK, rows.layer(layer).long().to(live_NK.device))
            assert expected_NK.sort().values.tolist() == firing.ids_NK.sort().values.tolist()

    # ---- gradients ------------------------------------------------------------------------------------------------

    @feature("gradients")
    def test_gradients_reach_every_gate(self) -> None:
        """With all rows forced, each gate's weight still gets a gradient through its routing weights."""
        model, inputs = self.make_model(), self.make_inputs(seed=1)
        with self.attach(model, self.spec) as handle:
            with handle.replaying(self.make_batch(self._rows(seed=5), inputs=inputs)):
                torch.autograd.backward(self.loss(model, inputs))
        for layer in self.spec.layer_ids:
            gradient = self.gate_weight(model, layer).grad
            assert gradient is not None, f"layer {layer}"
            assert gradient.abs().max() > 1e-9, f"layer {layer}"

    @feature("gradients")
    def test_gate_gradients_match_finite_differences(self) -> None:
        """Along a random direction of each gate's weight, with all rows forced."""
        model, inputs = self.make_difference_model(), self.make_inputs(seed=1)
        batch = self.make_batch(self._rows(seed=5), inputs=inputs)
        with self.attach(model, self.spec) as handle:
            with handle.replaying(batch):
                torch.autograd.backward(self.loss(model, inputs))
            for layer in self.spec.layer_ids:
                weight = self.gate_weight(model, layer)
                assert weight.grad is not None
                direction = torch.randn(weight.shape, generator=torch.Generator().manual_seed(3)).to(weight)
                # with the gradient, so that the difference is far above rounding
                direction = direction + weight.grad / weight.grad.square().mean().sqrt()
                values = []
                with torch.no_grad():
                    start = weight.clone()
                    for step in (self.difference_step, -self.difference_step):
                        weight.copy_(start + step * direction)
                        with handle.replaying(batch):
                            values.append(self.loss(model, inputs).double())
                    weight.copy_(start)
                expected = (values[0] - values[1]) / (2 * self.difference_step)
                found = (weight.grad.double() * direction).sum()
                torch.testing.assert_close(found, expected, rtol=self.difference_rtol, atol=0.0)

    @feature("recompute")
    def test_recomputation_repeats_its_forward(self, recompute: str) -> None:
        """Backward of each microbatch inside its own ``replaying``: the gradients of no recomputation at all."""
        model = self.make_model()
        self.enable_recompute(model, recompute)
        with self.attach(model, self.spec) as handle, self.observe(model) as seen:
            self._same_gradients(self._expected_steps(), self._steps(model, handle, order=None))
        # else nothing was recomputed, and this shows nothing
        assert all(len(firings) > 2 for firings in seen.values())
        assert [2] * self.spec.num_layers == [gate.consumed for gate in handle.report().gates]

    @feature("two in flight")
    @pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["first-in-first-out", "last-in-first-out"])
    def test_two_microbatches_in_flight(self, recompute: str, order: tuple[int, ...]) -> None:
        """Both forwards first, both backward passes after, outside of any ``replaying``."""
        model = self.make_model()
        self.enable_recompute(model, recompute)
        with self.attach(model, self.spec) as handle:
            self._same_gradients(self._expected_steps(), self._steps(model, handle, order=order))

    # ---- consumption ----------------------------------------------------------------------------------------------

    @feature("consumption")
    def test_consumption_is_counted(self) -> None:
        """Forced, live and flipped rows per gate equal a count by sets against the gate's own choice."""
        model, inputs, rows = self.make_model(), self.make_inputs(seed=1), self._rows(seed=5, missing=0.4)
        with self.attach(model, self.spec) as handle, self.observe(model) as seen:
            with handle.replaying(self.make_batch(rows, inputs=inputs)):
                self.forward(model, inputs)
        names = self.gate_names(model)
        for gate in handle.report().gates:
            routes = rows.layer(gate.layer_id).tolist()
            live = self.live_ids(model, layer_id=gate.layer_id, logits_NE=seen[gate.layer_id][0].logits_NE).tolist()
            forced = [set(route) for route in routes if route[0] != -1]
            flipped = sum(
                route[0] != -1 and set(route) != set(choice) for route, choice in zip(routes, live, strict=True)
            )
            assert (names[gate.layer_id], len(forced), len(routes) - len(forced), flipped, 1, 0) == (
                gate.name,
                gate.forced_rows,
                gate.live_rows,
                gate.flipped_rows,
                gate.consumed,
                gate.unconsumed,
            )

    @feature("consumption")
    def test_a_gate_that_did_not_fire_is_named(self) -> None:
        """A layer that goes around its gate is an error on leaving, is counted, and names the gate."""
        model, inputs, layer = self.make_model(), self.make_inputs(seed=1), self.spec.layer_ids[-1]
        name = self.gate_names(model)[layer]
        with self.attach(model, self.spec) as handle:
            self.skip_gate(model, layer)
            with pytest.raises(ReplayError) as caught:
                with handle.replaying(self.make_batch(self._rows(seed=5), inputs=inputs)):
                    self.forward(model, inputs)
        assert ErrorKind.GATE_NOT_CONSUMED == caught.value.kind
        assert name in str(caught.value)
        assert [layer] == [problem.layer for problem in caught.value.problems]
        report = handle.report()
        assert 0 == report.microbatches
        assert [int(gate.layer_id == layer) for gate in report.gates] == [gate.unconsumed for gate in report.gates]

    @feature("consumption")
    def test_a_gate_that_fired_twice_is_named(self) -> None:
        """One gate called once more than the others is an error on leaving."""
        model, inputs, layer = self.make_model(), self.make_inputs(seed=1), self.spec.layer_ids[-1]
        with self.attach(model, self.spec) as handle:
            replaying = handle.replaying(self.make_batch(self._rows(seed=5), inputs=inputs))
            replaying.__enter__()
            self.forward(model, inputs)
            self.fire_gate(model, layer, num_rows=self.num_rows)
            with pytest.raises(ReplayError) as caught:
                replaying.__exit__(None, None, None)
        assert ErrorKind.GATE_FIRED == caught.value.kind
        assert self.spec.num_layers == 1 or self.gate_names(model)[self.spec.layer_ids[0]] in str(caught.value)

    # ---- refusals -------------------------------------------------------------------------------------------------

    @feature("refusals")
    def test_rows_of_another_count_are_refused(self) -> None:
        """Fewer or more rows than tokens never reach a selection; the gate is named."""
        model, inputs, layer = self.make_model(), self.make_inputs(seed=1), self.spec.layer_ids[0]
        batch = self.make_batch(self._rows(seed=5), inputs=inputs)
        with self.attach(model, self.spec) as handle:
            for num_rows in (self.num_rows - 1, self.num_rows + 1):
                with pytest.raises(ReplayError) as caught, handle.replaying(batch):
                    self.fire_gate(model, layer, num_rows=num_rows)
                assert ErrorKind.ROW_COUNT == caught.value.kind
                assert self.gate_names(model)[layer] in str(caught.value)

    @feature("refusals")
    def test_rows_of_another_type_are_refused(self) -> None:
        """Engine rows of a narrow unsigned type hold no MISSING; only int16 gets in."""
        rows = self._rows(seed=5)
        for dtype in (torch.uint8, torch.int8, torch.int32, torch.int64):
            self._refused_on_entering(replace(rows, routes_NLK=rows.routes_NLK.to(dtype)), ErrorKind.DTYPE)

    @feature("refusals")
    def test_rows_of_another_width_are_refused(self) -> None:
        """K of the rows is the gate's."""
        rows = self._rows(seed=5)
        self._refused_on_entering(replace(rows, routes_NLK=rows.routes_NLK[..., :-1]), ErrorKind.SHAPE)

    @feature("refusals")
    def test_a_batch_of_another_spec_is_refused(self) -> None:
        """Rows that were collated for another model do not enter."""
        wider = tuple(width + 1 for width in self.spec.experts_per_layer)
        other = replace(self.spec, num_experts=wider)
        self._refused_on_entering(replace(self._rows(seed=5), spec=other), ErrorKind.SPEC_MISMATCH)

    def _refused_on_entering(self, rows: RowsBatch, kind: ErrorKind) -> None:
        model = self.make_model()
        with self.attach(model, self.spec) as handle, pytest.raises(ReplayError) as caught:
            with handle.replaying(rows):
                pytest.fail("the body must not run")
        assert kind == caught.value.kind
        assert self.gate_names(model)[self.spec.layer_ids[0]] in str(caught.value)

    @feature("refusals")
    def test_a_spec_of_another_model_is_refused(self) -> None:
        """Layers, E and K are the model's, or ``attach`` raises, names a gate and leaves nothing behind."""
        first, *rest = self.spec.layer_ids
        changes: Mapping[str, Any] = {
            "layers": {"layer_ids": (*rest, self.spec.layer_ids[-1] + 1)},
            "experts": {"num_experts": tuple(width + 1 for width in self.spec.experts_per_layer)},
            "top-k": {"top_k": self.spec.top_k - 1},
        }
        model = self.make_model()
        before = dict(self.traces(model))
        for name, change in changes.items():
            with pytest.raises(ReplayError) as caught:
                self.attach(model, replace(self.spec, **change))
            assert ErrorKind.SPEC_MISMATCH == caught.value.kind, name
            assert self.gate_names(model)[first] in str(caught.value), name
        assert before == dict(self.traces(model))

    # ---- what is not attached -------------------------------------------------------------------------------------

    @feature("reference model")
    def test_another_model_is_untouched(self) -> None:
        """A copy of an attached model, and a second model, stay live while the first is replayed."""
        model, other, inputs = self.make_model(), self.make_model(seed=1), self.make_inputs(seed=1)
        live, other_live = self.forward(model, inputs), self.forward(other, inputs)
        before = dict(self.traces(other))
        with self.attach(model, self.spec) as handle:
            teacher = self.copy_model(model)
            with handle.replaying(self.make_batch(self._rows(seed=5), inputs=inputs)):
                self._same(live, self.forward(teacher, inputs))
                self._same(other_live, self.forward(other, inputs))
                assert not torch.equal(live, self.forward(model, inputs))
            assert before == dict(self.traces(other))

    @feature("detach")
    def test_detach_restores(self, recompute: str) -> None:
        """No hook, no instance attribute and no bit of the output differ; twice is once; the handle refuses use."""
        model, inputs = self.make_model(), self.make_inputs(seed=1)
        self.enable_recompute(model, recompute)
        before, expected = dict(self.traces(model)), self.forward(model, inputs)
        handle = self.attach(model, self.spec)
        batch = self.make_batch(self._rows(seed=5), inputs=inputs)
        with handle.replaying(batch):
            self.forward(model, inputs)
        handle.detach()
        handle.detach()
        assert before == dict(self.traces(model))
        self._same(expected, self.forward(model, inputs))
        with pytest.raises(ReplayError) as caught, handle.replaying(batch):
            pytest.fail("the body must not run")
        assert ErrorKind.DETACHED == caught.value.kind
        assert 1 == handle.report().microbatches

    # ---- recording, and the auxiliary loss ------------------------------------------------------------------------

    @feature("recording")
    def test_a_recorded_forward_is_replayed(self) -> None:
        """Routes of the old policy, recorded with the same handle, hold after an update that would flip them."""
        model, inputs = self.make_model(), self.make_inputs(seed=1)
        batch = self.make_batch(self._rows(seed=5), inputs=inputs)
        with self.attach(model, self.spec) as handle:
            with handle.recording(batch) as recorded, self.observe(model) as before, torch.no_grad():
                expected = self.forward(model, inputs)
            with handle.replaying(recorded):
                self._same(expected, self.forward(model, inputs))
            with torch.no_grad():
                for layer in self.spec.layer_ids:
                    self.gate_weight(model, layer).neg_()
            rows = RowsBatch(spec=self.spec, routes_NLK=recorded.routes_NLK().cpu())
            with handle.replaying(self.make_batch(rows, inputs=inputs)), self.observe(model) as after:
                self.forward(model, inputs)
        for layer, (firing,) in before.items():
            assert firing.ids_NK.sort().values.tolist() == after[layer][0].ids_NK.sort().values.tolist()
        assert all(gate.flipped_rows > 0 for gate in handle.report().gates)

    @feature("auxiliary loss")
    @pytest.mark.parametrize("choice", ["forced", "live"])
    def test_the_auxiliary_loss_follows_the_choice(
        self, choice: str, record_property: Callable[[str, object], None]
    ) -> None:
        """It counts the forced ids, or what the gates would have chosen; a family without one refuses ``forced``."""
        model, inputs, rows = self.make_model(), self.make_inputs(seed=1), self._rows(seed=5, missing=0.3)
        if self.aux_loss(model, inputs) is None:
            record_property("replay_outcome", "refused")
            self.attach(model, self.spec, aux="live").detach()
            with pytest.raises(ReplayError) as caught:
                self.attach(model, self.spec, aux="forced")
            assert ErrorKind.NO_SEAM == caught.value.kind
            return
        with self.attach(model, self.spec, aux=choice) as handle, self.observe(model) as seen:
            with handle.replaying(self.make_batch(rows, inputs=inputs)):
                found = self.aux_loss(model, inputs)
        firings = {layer: fired[-1] for layer, fired in seen.items()}
        ids = {
            layer: firing.ids_NK
            if choice == "forced"
            else self.aux_live_ids(model, layer_id=layer, logits_NE=firing.logits_NE)
            for layer, firing in firings.items()
        }
        assert found is not None
        torch.testing.assert_close(found.float(), self.expected_aux(firings, ids).float(), rtol=1e-4, atol=1e-5)
