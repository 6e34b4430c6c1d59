"""Replay never waits for the device inside a forward or backward: reads of device values are counted.

Axes: N token rows, L captured layers.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from routeplane.batch import RouteBatch
from routeplane.replay import transformers as gates
from routeplane.replay.handle import AuxChoice
from tests.replay.plain_batch import random_routes
from tests.replay.reads import reads_of
from tests.replay.tiny_models import BY_NAME, NUM_ROWS, checkpoint_layers, token_ids


@pytest.mark.parametrize("checkpointed", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.parametrize(("name", "aux"), [("qwen3_moe", "forced"), ("deepseek_v3", "live")])
def test_a_replayed_step_reads_no_more_than_a_live_one(name: str, aux: AuxChoice, checkpointed: bool) -> None:
    """Entering, forward, recomputation, backward, leaving: the counts are those of the model without replay."""
    family = BY_NAME[name]
    model = family.build()
    model.set_experts_implementation("batched_mm")  # eager experts read for themselves
    if checkpointed:
        checkpoint_layers(model, reentrant=False)

    def step() -> None:
        torch.autograd.backward(model(input_ids=token_ids(1)).logits.square().mean())

    live = reads_of(step)
    rows = random_routes(family.spec, NUM_ROWS, seed=5, missing=0.3)
    routes = torch.stack([rows.layer(layer) for layer in family.spec.layer_ids], dim=1)
    # checked here; a batch of another class is checked, and read, on entering
    batch = RouteBatch.from_tensors(routes, token_ids(1).reshape(-1), spec=family.spec, cu_seqlens=[0, NUM_ROWS])
    with gates.attach(model, family.spec, aux=aux) as handle:

        def replayed() -> None:
            with handle.replaying(batch):
                step()

        replayed()  # the first packed batch of a handle has the model looked at
        # the tokens, which lie on the host here; on an accelerator they are compared there
        assert {**live, "aten.equal.default": 1} == reads_of(replayed)
        recording: list[Any] = []

        def recorded() -> None:
            with handle.recording(batch) as own:
                step()
            recording.append(own)

        assert live == reads_of(recorded)
        # asked afterwards, once for each gate
        assert {"tolist": len(family.layer_ids)} == reads_of(handle.report)


def test_a_read_would_be_counted() -> None:
    """The probe sees each way to read."""
    values = torch.arange(4)
    assert 0 == sum(reads_of(lambda: values + 1).values())
    for read in (
        lambda: values[2].item(),
        lambda: values.tolist(),
        lambda: bool(values[1] > 0),
        lambda: values.nonzero(),
        lambda: values[values > 1],
        lambda: torch.equal(values, values),
        lambda: values.masked_select(values > 1),
    ):
        assert 1 <= sum(reads_of(read).values())
