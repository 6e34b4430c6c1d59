"""Recording a trainer's own forward (R2): what comes out, for which batch, and when it may be read.

Axes: N token rows, L captured layers, K top-k slots.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from routeplane.batch import RouteBatch, collate
from routeplane.errors import ErrorKind, ReplayError, UsageError
from routeplane.record.record import RouteRecord
from routeplane.record.spans import Capture, Span
from routeplane.replay import transformers as gates
from tests.replay.plain_batch import random_routes
from tests.replay.tiny_models import BY_NAME, NUM_ROWS, checkpoint_layers, listed_gates, logits_of, recorded

if TYPE_CHECKING:
    from torch import nn

    from routeplane.replay.handle import ReplayHandle

QWEN3 = BY_NAME["qwen3_moe"]


def record_of(num_tokens: int) -> RouteRecord:
    """One finished sequence with legal rows, the final token's included."""
    return RouteRecord(
        sample_id=f"of {num_tokens}",
        token_ids=np.arange(3, 3 + num_tokens, dtype=np.int32),
        routes=random_routes(QWEN3.spec, num_tokens, seed=num_tokens).routes_NLK.numpy(),
        spans=(Span(start=0, stop=num_tokens, kind="prompt", call="a", weights_version=0),),
        captures=(Capture(start=0, stop=num_tokens, call="a", weights_version=0, state="captured"),),
        spec=QWEN3.spec,
    )


def padded_batch() -> RouteBatch:
    """Two sequences of unlike length, with routes that no gate chose."""
    return collate([record_of(6), record_of(4)], QWEN3.spec, layout="padded")


def test_a_recorded_batch_holds_what_the_routers_chose() -> None:
    """Every token's row is its router's, padding stays MISSING, and all of it counts as captured."""
    model, batch = QWEN3.build(), padded_batch()
    with gates.record(model) as handle, torch.no_grad():
        with handle.recording(batch) as own, recorded(model) as seen:
            expected = model(**batch.model_inputs()).logits
        again = own.into(batch)
        with handle.replaying(again):
            assert torch.equal(expected[~batch.pad_mask], model(**batch.model_inputs()).logits[~batch.pad_mask])
    pads_N = batch.pad_mask.view(-1)
    for layer, (firing,) in seen.items():
        assert torch.equal(firing.ids_NK[~pads_N], again.layer(layer)[~pads_N].long())
        assert torch.equal(torch.full((2, 3), -1, dtype=torch.int16), again.layer(layer)[pads_N])
    assert {"captured": 10} == {state: count for state, count in again.coverage().rows.items() if count}
    assert (0, 2) == (again.unexplained_missing, again.coverage().records)
    report = handle.report()
    assert (1, [10, 10], [0, 0]) == (
        report.microbatches,
        [gate.forced_rows for gate in report.gates],
        [gate.flipped_rows for gate in report.gates],
    )


def test_the_batch_that_was_recorded_keeps_its_routes() -> None:
    """``into`` copies; a second batch of another size is refused."""
    model, batch = QWEN3.build(), padded_batch()
    before = batch.routes.clone()
    with gates.record(model) as handle, handle.recording(batch) as own, torch.no_grad():
        model(**batch.model_inputs())
    own.into(batch).routes.zero_()
    assert torch.equal(before, batch.routes)
    assert torch.equal(own.layer(1), own.routes_NLK()[:, 0])
    with pytest.raises(UsageError, match=r"int16 routes \[6, 2, 3\], got torch.int16 \[12, 2, 3\]"):
        own.into(collate([record_of(6)], QWEN3.spec, layout="padded"))


def test_the_geometry_is_read_from_the_model() -> None:
    """``record`` needs no spec; its rows fit a spec that was written down."""
    model = QWEN3.build()
    with gates.record(model) as handle:
        assert [] == QWEN3.spec.differences(handle.spec)
        with handle.recording(None) as own, torch.no_grad():
            logits_of(model)
    assert (NUM_ROWS, (NUM_ROWS, 3), torch.int16) == (own.num_rows, tuple(own.layer(2).shape), own.layer(2).dtype)


def test_gates_of_unlike_top_k_are_refused() -> None:
    """A row has one width."""
    model = QWEN3.build()
    model.model.layers[2].mlp.gate.top_k = 2
    with pytest.raises(ReplayError, match=r"got \(3, 2\) in layers \(1, 2\)") as caught:
        gates.record(model)
    assert ErrorKind.NO_SEAM == caught.value.kind


def test_one_recording_is_one_forward() -> None:
    """Which of two forwards the rows belong to is not for replay to guess."""
    model = QWEN3.build()
    with gates.record(model) as handle, pytest.raises(ReplayError, match="expected 1 forward calls, got 2") as caught:
        _record_twice(handle, model)
    assert ErrorKind.GATE_FIRED == caught.value.kind


def _record_twice(handle: ReplayHandle, model: nn.Module) -> None:
    with handle.recording(None):
        logits_of(model)
        logits_of(model)


def test_an_unfinished_recording_cannot_be_read() -> None:
    """Neither inside the ``with``, nor after an exception left it."""
    model = QWEN3.build()
    with gates.record(model) as handle:
        recording = handle.recording(None)
        own = recording.__enter__()
        logits_of(model)
        with pytest.raises(UsageError, match="got it open"):
            own.layer(1)
        recording.__exit__(ZeroDivisionError, ZeroDivisionError(), None)
        with pytest.raises(UsageError, match="got it open") as caught, handle.replaying(own):
            pytest.fail("the body must not run")
    assert ErrorKind.CLOSED == caught.value.kind


def test_a_recorded_forward_may_train() -> None:
    """Recording under checkpointing, with gradients: recomputation repeats the choice that was recorded."""
    model = QWEN3.build()
    checkpoint_layers(model, reentrant=False)
    with gates.record(model) as handle, recorded(model) as seen:
        with handle.recording(None) as own:
            loss = logits_of(model).square().mean()
        for _, router in listed_gates(model):
            router.get_parameter("weight").data.neg_()
        torch.autograd.backward(loss)
    for layer, (_, again) in seen.items():
        assert torch.equal(own.layer(layer).long(), again.ids_NK)
