"""Routing weights from end to end: recorded with the rows, carried, and given back to the gates.

The reference is the model itself: under its own recorded routes and weights it must compute the same bits.

Axes: B sequences, S tokens, N token rows, L captured layers, K top-k slots.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from routeplane.batch import BatchOptions, RouteBatch, collate, microbatches
from routeplane.capture import transformers as capture
from routeplane.capture.gates import find_gates
from routeplane.capture.weights import find_weights, meaning_of
from routeplane.errors import DataError, ErrorKind, ReplayError, UsageError
from routeplane.record.aligned import AlignedColumn
from routeplane.record.record import RouteRecord
from routeplane.record.spec import MISSING, RouteSpec
from routeplane.record.validate import WeightsMeaning, as_float32, illegal_weights
from routeplane.replay import transformers as gates
from routeplane.replay.handle import _illegal_weights
from routeplane.stream import new_stream, open_stream
from tests.replay import families
from tests.replay.tiny_models import BY_NAME, FAMILIES, checkpoint_layers

PLAIN = WeightsMeaning(score="softmax", renormalised=True, scaling="none", multiplied="after", dtype="float32")
MEANINGS = {
    "deepseek_v3": replace(PLAIN, score="sigmoid", scaling="in", factor=2.5),
    "llama4_text": replace(PLAIN, score="sigmoid", renormalised=False, multiplied="before"),
    "qwen3_moe": PLAIN,
    "mixtral": PLAIN,
}
PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12], [13, 14]]


def build(name: str, *, dtype: torch.dtype = torch.float32) -> Any:
    """A tiny model in evaluation mode; Llama 4 chooses one expert, as the released models do."""
    if name == "llama4_text":
        (case,) = [case for case in families.FAMILIES if case.name == name]
        model = families.build(replace(case, options={**case.options, "num_experts_per_tok": 1}))
        return model.to(dtype).eval()
    return BY_NAME[name].build(dtype=dtype).eval()


def recorded(model: Any, *, kept: Any = "float32", seed: int = 0) -> list[RouteRecord]:
    """Rollouts of the model with their routes and weights."""
    sampling = capture.Sampling(route_weights=kept)
    return capture.records(model, PROMPTS, spec=RouteSpec.from_model(model), max_tokens=6, seed=seed, sampling=sampling)


def forward(model: Any, batch: RouteBatch) -> torch.Tensor:
    """The logits of a batch's tokens."""
    with torch.no_grad():
        logits: torch.Tensor = model(**batch.model_inputs()).logits
    return logits


def replayed(model: Any, batch: RouteBatch, **options: Any) -> torch.Tensor:
    """The logits under the batch's routes and weights."""
    with gates.attach(model, batch.spec, weights="recorded", **options) as handle, handle.replaying(batch):
        return forward(model, batch)


def with_weights(batch: RouteBatch, weights: torch.Tensor) -> RouteBatch:
    """The batch with other weights."""
    return replace(batch, columns=MappingProxyType({**batch.columns, "route_weights": weights}))


def own_weights(model: Any, batch: RouteBatch) -> RouteBatch:
    """The batch with the routes and weights of the model's forward over it, whole sequences in one pass."""
    with capture.taping(model, batch.spec, weights=True) as tape:
        forward(model, batch)
    (routes,), (weights,) = tape.forwards(), tape.weights("float32")
    own = batch.with_routes(torch.from_numpy(routes.astype(np.int16)))
    weights_NLK = torch.from_numpy(weights.copy())
    weights_NLK[own.pad_mask.reshape(-1)] = torch.nan
    columns = MappingProxyType({"route_weights": weights_NLK.view(*own.pad_mask.shape, *own.spec.row_shape)})
    return replace(own, columns=columns, column_types=batch.column_types, weights_meaning=tape.weights_meaning)


# ----------------------------------------------------------------------------------------------------------------------
# What the probe says
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MEANINGS)
def test_meaning_is_observed(name: str) -> None:
    """Score function, normalisation, factor and the place of the product, written down by hand for four families."""
    model = build(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    sites = find_weights(model, find_gates(model))
    assert MEANINGS[name] == meaning_of(sites)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_are_those_restated_by_hand(family: Any, dtype: torch.dtype) -> None:
    """For every family with a restated rule, the tape holds the weights that the router returned, by its own ids."""
    model = family.build(dtype=dtype).eval()
    spec = RouteSpec.from_model(model)
    returned: list[torch.Tensor] = []
    sites = find_weights(model, find_gates(model))
    handle = sites[0].module.register_forward_hook(lambda module, args, output: returned.append(output[1].clone()))
    with capture.taping(model, spec, weights=True) as tape, torch.no_grad():
        returned.clear()
        model(input_ids=torch.arange(3, 15)[None])
    handle.remove()
    (weights,) = tape.weights("float32")
    expected = returned[-1].reshape(-1, spec.top_k)
    assert np.array_equal(expected.float().numpy(), as_float32(weights[:, 0]))
    assert (np.uint16 if expected.dtype == torch.bfloat16 else np.float32) == weights.dtype


def test_router_whose_weights_are_another_function_is_refused() -> None:
    """What the gate does is observed; a function that the declaration cannot name is not guessed at."""
    model = build("qwen3_moe")
    gate = next(module for name, module in model.named_modules() if name.endswith("mlp.gate"))

    def squared(module: nn.Module, args: object, output: Any) -> Any:
        return output[0], output[1] ** 2, output[2]

    original = gate.forward
    gate.forward = lambda *args: squared(gate, args, original(*args))
    with pytest.raises(ReplayError, match="no softmax and no sigmoid") as caught:
        find_weights(model, find_gates(model))
    assert ErrorKind.NO_SEAM is caught.value.kind


def test_factor_behind_the_gate_is_out() -> None:
    """A constant that the block multiplies its routed output by is observed where its attribute is doubled."""
    model = build("mixtral")
    for module in model.modules():
        if type(module).__name__ == "MixtralSparseMoeBlock":
            module.routed_scaling_factor = 3.0
            plain = module.experts.forward

            def scaled(*args: Any, block: Any = module, plain: Any = plain) -> Any:
                return plain(*args) * block.routed_scaling_factor

            module.experts.forward = scaled
    meaning = meaning_of(find_weights(model, find_gates(model)))
    assert replace(PLAIN, scaling="out", factor=3.0) == meaning


def test_layers_of_different_meaning_are_refused() -> None:
    """A record has one meaning."""
    model = build("qwen3_moe")
    routers = [module for module in model.modules() if type(module).__name__ == "Qwen3MoeTopKRouter"]
    routers[0].norm_topk_prob = False
    with pytest.raises(ReplayError, match="renormalised"):
        meaning_of(find_weights(model, find_gates(model)))


# ----------------------------------------------------------------------------------------------------------------------
# The forward under recorded weights
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("name", MEANINGS)
def test_own_recorded_weights_give_the_same_bits(name: str, layout: Any) -> None:
    """A forward under its own routes and weights is the live forward, bit by bit."""
    model = build(name)
    batch = own_weights(model, collate(recorded(model), RouteSpec.from_model(model), layout=layout))
    live = forward(model, batch)
    assert torch.equal(live, replayed(model, batch))
    assert torch.equal(live, forward(model, batch))


@pytest.mark.parametrize("name", MEANINGS)
def test_weights_of_a_rollout_stand_for_the_trainers_own(name: str) -> None:
    """With another router in every layer, recorded routes and weights give the rollout's log-probabilities."""
    model = build(name)
    spec = RouteSpec.from_model(model)
    batch = collate(recorded(model), spec, options=BatchOptions(labels=True))
    live = forward(model, batch)
    with torch.no_grad():
        for _, module in find_gates(model):
            for parameter in module.parameters():
                parameter.mul_(1.5)
    mask = batch.columns["label_mask"]
    fed = batch.states == 0
    with gates.attach(model, spec) as handle, handle.replaying(batch):
        routes_alone = forward(model, batch)
    recorded_too = replayed(model, batch)
    kept = (mask & fed)[..., None]
    near = ((recorded_too - live).abs() * kept).max()
    far = ((routes_alone - live).abs() * kept).max()
    assert near < 1e-4 < 1e-2 < far


@pytest.mark.parametrize("name", MEANINGS)
def test_weights_of_another_token_change_the_result(name: str) -> None:
    """The control: weights that are one row off, with the same routes, give another forward."""
    model = build(name)
    batch = own_weights(model, collate(recorded(model), RouteSpec.from_model(model), layout="packed"))
    live = forward(model, batch)
    shifted = with_weights(batch, batch.columns["route_weights"].roll(1, dims=0))
    assert (live - replayed(model, shifted)).abs().max() > 1e-3


def test_permuted_row_with_permuted_weights_is_the_same() -> None:
    """Weights are of slots: the order within a row has no meaning of its own."""
    model = build("qwen3_moe")
    batch = own_weights(model, collate(recorded(model), RouteSpec.from_model(model), layout="packed"))
    weights = batch.columns["route_weights"]
    turned = replace(with_weights(batch, weights.flip(-1)), routes=batch.routes.flip(-1).contiguous())
    assert torch.allclose(forward(model, batch), replayed(model, turned), atol=1e-5)
    apart = forward(model, batch) - replayed(model, with_weights(batch, weights.flip(-1)))
    assert apart.abs().max() > 1e-3


@pytest.mark.parametrize("kept", ["float32", "bfloat16"])
def test_bfloat16_models_store_bits(kept: Any) -> None:
    """A router that computes in bfloat16 is stored as bfloat16 bits, and gives them back."""
    model = build("qwen3_moe", dtype=torch.bfloat16)
    spec = RouteSpec.from_model(model)
    records = recorded(model, kept=kept)
    assert "bfloat16" == WeightsMeaning.from_text(records[0].attributes["weights_meaning"]).dtype
    assert all(record.columns["route_weights"].dtype == np.uint16 for record in records)
    batch = collate(records, spec, layout="packed")
    report = None
    with gates.attach(model, spec, weights="recorded") as handle:
        with handle.replaying(batch):
            forward(model, batch)
        report = handle.report()
    fed = int((batch.layer(spec.layer_ids[0])[:, 0] != MISSING).sum())
    assert {fed} == {gate.weighted_rows for gate in report.gates}


def test_float32_is_rounded_on_request_alone() -> None:
    """A router in float32 is stored as it is, unless bfloat16 is asked for: then in 2 bytes a weight."""
    model = build("mixtral")
    wide, narrow = recorded(model), recorded(model, kept="bfloat16")
    for one, other in zip(wide, narrow, strict=True):
        assert one.attributes == other.attributes
        assert (np.float32, np.uint16) == (one.columns["route_weights"].dtype, other.columns["route_weights"].dtype)
        assert one.columns["route_weights"].nbytes == 2 * other.columns["route_weights"].nbytes
        exact = torch.from_numpy(one.columns["route_weights"].values.copy()).to(torch.bfloat16)
        bits = torch.from_numpy(other.columns["route_weights"].values.view(np.int16).copy()).view(torch.bfloat16)
        assert torch.equal(exact.nan_to_num(nan=9.0), bits.nan_to_num(nan=9.0))
    with pytest.raises(UsageError, match="route_weights of"):
        capture.Sampling(route_weights="float16")  # type: ignore[arg-type]


def test_no_gradient_to_the_router() -> None:
    """Recorded weights are constants; rows without a record are live, and teach the router."""
    model = build("qwen3_moe")
    spec = RouteSpec.from_model(model)
    batch = own_weights(model, collate(recorded(model), spec, layout="packed"))
    routers: list[Any] = [module for _, module in find_gates(model)]

    def gradients(batch: RouteBatch, weights: Any) -> list[float]:
        model.zero_grad()
        with gates.attach(model, spec, weights=weights) as handle, handle.replaying(batch):
            model(**batch.model_inputs()).logits.square().mean().backward()
        return [float(router.weight.grad.abs().max()) for router in routers]

    assert {0.0} == set(gradients(batch, "recorded"))
    assert min(gradients(batch, "live")) > 0
    routes, weights = batch.routes.clone(), batch.columns["route_weights"].clone()
    routes[2], weights[2] = MISSING, torch.nan
    partly = replace(with_weights(batch, weights), routes=routes)
    assert min(gradients(partly, "recorded")) > 0


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_uses_the_same_weights(reentrant: bool) -> None:
    """Under activation checkpointing, expert gradients are those without it."""
    model = build("deepseek_v3").train()
    spec = RouteSpec.from_model(model)
    batch = collate(recorded(model.eval()), spec, layout="packed")
    model.train()

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        with gates.attach(model, spec, weights="recorded") as handle, handle.replaying(batch):
            model(**batch.model_inputs()).logits.square().mean().backward()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    plain = gradients()
    checkpoint_layers(model, reentrant=reentrant)
    for one, other in zip(plain, gradients(), strict=True):
        assert torch.allclose(one, other, atol=1e-7)


# ----------------------------------------------------------------------------------------------------------------------
# What is refused at the edge
# ----------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def qwen() -> tuple[Any, RouteBatch]:
    """A model and a batch of its own."""
    model = build("qwen3_moe")
    return model, collate(recorded(model), RouteSpec.from_model(model), layout="packed")


OTHER_MEANINGS = {
    "score": replace(PLAIN, score="sigmoid"),
    "multiplied": replace(PLAIN, multiplied="before"),
    "factor": replace(PLAIN, scaling="out", factor=2.5),
}


@pytest.mark.parametrize("name", OTHER_MEANINGS)
def test_another_meaning_is_refused(name: str, qwen: tuple[Any, RouteBatch]) -> None:
    """Weights of another function than the gate's are refused where no arithmetic leads to its own."""
    model, batch = qwen
    with pytest.raises(DataError, match=name) as caught:
        replayed(model, replace(batch, weights_meaning=OTHER_MEANINGS[name].to_text()))
    assert ErrorKind.TOKEN_COLUMN is caught.value.kind


def test_convertible_meaning_is_converted() -> None:
    """Weights without normalisation and factor become the gate's own."""
    model = build("deepseek_v3")
    batch = own_weights(model, collate(recorded(model), RouteSpec.from_model(model), layout="packed"))
    weights = batch.columns["route_weights"]
    out = replace(MEANINGS["deepseek_v3"], scaling="out")
    unscaled = replace(with_weights(batch, weights / 2.5), weights_meaning=out.to_text())
    plain = replace(with_weights(batch, weights / 10), weights_meaning=replace(out, renormalised=False).to_text())
    for other in (unscaled, plain):
        assert torch.allclose(forward(model, batch), replayed(model, other), atol=1e-5)


def nan_in_a_row(weights: torch.Tensor) -> torch.Tensor:
    """One weight of a row with routes is unknown."""
    weights[1, 0, 1] = torch.nan
    return weights


def number_without_a_row(weights: torch.Tensor) -> torch.Tensor:
    """A weight for a row that is MISSING."""
    weights[weights.isnan()] = 0.5
    return weights


def another_sum(weights: torch.Tensor) -> torch.Tensor:
    """A row of another sum than the meaning says."""
    weights[1, 0] *= 0.9
    return weights


def one_layer(weights: torch.Tensor) -> torch.Tensor:
    """Weights of some layers."""
    return weights[:, :1]


def double(weights: torch.Tensor) -> torch.Tensor:
    """Another type."""
    return weights.double()


@pytest.mark.parametrize("change", [nan_in_a_row, number_without_a_row, another_sum, one_layer, double])
def test_weights_that_contradict_rows_or_meaning(change: Any, qwen: tuple[Any, RouteBatch]) -> None:
    """Refused on entering, before any forward."""
    model, batch = qwen
    with pytest.raises(DataError, match="route_weights") as caught:
        replayed(model, with_weights(batch, change(batch.columns["route_weights"].clone())))
    assert ErrorKind.TOKEN_COLUMN is caught.value.kind


def test_batches_without_weights_and_modes_without_forcing(qwen: tuple[Any, RouteBatch]) -> None:
    """Asked for recorded weights, a batch without them is refused; so is a mode that forces nothing."""
    model, batch = qwen
    for other in (batch.with_routes(batch.routes.clone()), replace(batch, weights_meaning=None)):
        with pytest.raises(DataError, match="weights"):
            replayed(model, other)
    modes: tuple[Any, ...] = ("observe", "compiled")
    for mode in modes:
        with pytest.raises(UsageError, match="weights='live'"):
            gates.attach(model, batch.spec, weights="recorded", mode=mode)
    with pytest.raises(DataError, match=r"torch\.bfloat16"):
        replayed(build("qwen3_moe", dtype=torch.bfloat16), batch)


@pytest.mark.parametrize("meaning", MEANINGS.values(), ids=list(MEANINGS))
def test_the_check_on_a_device_is_that_of_records(meaning: WeightsMeaning) -> None:
    """One rule, written twice, gives one verdict, also next to its bounds."""
    rng = np.random.default_rng(0)
    weights = rng.random((4000, 2, 3)).astype(np.float32)
    weights[1000:] /= weights[1000:].sum(axis=2, keepdims=True)
    weights[2000:] *= np.float32(meaning.ceiling)
    weights[2500:3000] *= 1 + rng.normal(size=(500, 1, 1)).astype(np.float32) * 1e-4
    weights[3000:3200, 0, 1] = rng.choice([np.nan, np.inf, -np.inf, -0.1, -0.0], 200)
    missing = rng.random((4000, 2)) < 0.1
    weights[missing & (rng.random((4000, 2)) < 0.5)] = np.nan
    bits = torch.from_numpy(weights).to(torch.bfloat16)
    for stored, given in ((weights, torch.from_numpy(weights)), (bits.view(torch.int16).numpy().view(np.uint16), bits)):
        expected = illegal_weights(stored, missing, meaning=meaning)
        assert np.array_equal(expected, _illegal_weights(given, torch.from_numpy(missing), meaning).numpy())
        assert 0 < expected.mean() < 1


# ----------------------------------------------------------------------------------------------------------------------
# On the way
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["plain", "narrow"])
@pytest.mark.parametrize("kept", ["float32", "bfloat16"])
def test_weights_travel(encoding: Any, kept: Any) -> None:
    """Streams, slices and selections keep each weight with its row and layer."""
    model = build("mixtral")
    records = recorded(model, kept=kept)
    sink = io.BytesIO()
    with new_stream(sink, records[0].spec, encoding=encoding) as writer:
        for record in records:
            writer.write(record)
    for before, after in zip(records, open_stream(sink.getvalue()), strict=True):
        assert before.columns["route_weights"].equals(after.columns["route_weights"])
        layers = before.spec.layer_ids
        for cut in (after.slice(1, 5), after.select(layers[1:]), after.select([layers[0]]).slice(2, 6)):
            cut.verify()
            start = int(cut.attributes["slice"].split(":")[0]) if "slice" in cut.attributes else 0
            slots = [before.spec.slot(layer) for layer in cut.spec.layer_ids]
            column = before.columns["route_weights"].values[start : start + cut.num_tokens][:, slots]
            found = cut.columns["route_weights"].values
            assert np.array_equal(column, found, equal_nan=found.dtype.kind == "f")


def shards(batch: RouteBatch) -> Iterator[RouteBatch]:
    """Both halves of a batch's rows."""
    for rank in (0, 1):
        yield batch.shard(sequence_parallel=(rank, 2))


def test_batches_carry_weights_with_their_rows() -> None:
    """Padding, shards and batches of a budget: weights are numbers exactly where there is a row."""
    model = build("deepseek_v3")
    spec = RouteSpec.from_model(model)
    records = recorded(model)
    options = BatchOptions(pad_to_multiple_of=4)
    batches = list(microbatches(records, spec=spec, tokens=24, layout="packed", options=options))
    batches += [collate(records, spec, layout=layout, options=options) for layout in ("padded", "packed")]
    for whole in batches:
        for batch in (whole, *shards(whole)):
            weights = batch.columns["route_weights"]
            assert torch.equal(batch.routes == MISSING, weights.isnan())
            assert MEANINGS["deepseek_v3"].to_text() == batch.weights_meaning


def test_record_without_its_meaning_is_refused() -> None:
    """A call has weights and no place for their meaning: the record is not made without it."""
    model = build("mixtral")
    (record, *_) = recorded(model)
    column = record.columns["route_weights"]
    assert isinstance(column, AlignedColumn)
    with pytest.raises(DataError, match="weights_meaning"):
        replace(record, attributes={}, checksum=None)
