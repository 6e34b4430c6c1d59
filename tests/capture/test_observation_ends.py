"""Rollouts that end in an observation: what was never fed is not missing, whatever stack logged it; a lost row is."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from routeplane import RouteSpec, assemble, new_stream, open_stream
from routeplane.batch import RouteBatch, admit_step, from_layout, microbatches
from routeplane.capture.choices import CaptureOptions
from routeplane.capture.http import gym, messages
from routeplane.errors import DataError
from routeplane.record.spec import MISSING
from routeplane.testing.builders import watermark

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from routeplane.record.spans import Coverage

#: Three tokens of a prompt, four that were sampled, five of an observation behind them; the engine was fed six.
PROMPT, SAMPLED, BEHIND = 3, 4, 5
TOKENS, FED = PROMPT + SAMPLED + BEHIND, PROMPT + SAMPLED - 1
SPEC = RouteSpec(num_experts=64, top_k=2, layer_ids=(0, 1), model="observed")
MASK = np.arange(TOKENS - PROMPT) < SAMPLED


def row(token: int) -> NDArray[np.int16]:
    """The two layers' row of a token."""
    return np.asarray(watermark(0, token, layer=np.asarray([[0], [1]]), k=np.arange(2)) % 32 + [0, 32], dtype=np.int16)


def rows(filler: Any, count: int = TOKENS) -> NDArray[np.int16]:
    """A row per token: the engine's where it was fed, else what the stack writes."""
    return np.asarray([row(t) if t < FED else np.broadcast_to(filler, (2, 2)) for t in range(count)], dtype=np.int16)


def nemo_log(*, lost: int | None = None) -> list[dict[str, Any]]:
    """NeMo RL's own log of the rollout; ``lost``: a token whose row the engine did not return."""
    routes = rows([0, 1])
    if lost is not None:
        routes[lost] = MISSING
    edges = {"user": (0, PROMPT), "assistant": (PROMPT, PROMPT + SAMPLED), "environment": (PROMPT + SAMPLED, TOKENS)}
    return [
        {
            "role": role,
            "token_ids": torch.arange(start, stop),
            "routed_experts": torch.from_numpy(routes[start:stop]),
            "token_loss_mask": torch.full((stop - start,), int(role == "assistant")),
        }
        for role, (start, stop) in edges.items()
    ]


def verl_batch() -> dict[str, Any]:
    """verl's padded batch: prompts left, responses right, observations in the response, mask 0; zeros as filler."""
    return {
        "input_ids": torch.arange(TOKENS)[None],
        "attention_mask": torch.ones(1, TOKENS, dtype=torch.long),
        "response_mask": torch.from_numpy(MASK).long()[None],
        "routed_experts": torch.from_numpy(rows([0, 0]))[None],
        "uid": ["s"],
    }


def skyrl_batch() -> dict[str, Any]:
    """SkyRL's batch: left padded, arange as filler."""
    return {
        "sequences": torch.arange(TOKENS)[None],
        "attention_mask": torch.ones(1, TOKENS, dtype=torch.long),
        "loss_mask": torch.from_numpy(MASK).long()[None],
        "rollout_expert_indices": torch.from_numpy(rows([0, 1]).astype(np.uint8))[None],
        "router_padding_mask": torch.zeros(1, TOKENS, dtype=torch.bool),
    }


def own_batch(layout: str, batch: dict[str, Any]) -> RouteBatch:
    """The stack's batch as a batch of one's own, its lengths of capture told by the layout."""
    read = from_layout(batch, SPEC, layout=layout)
    return RouteBatch.from_tensors(
        torch.from_numpy(read.routes),
        torch.from_numpy(read.token_ids),
        spec=SPEC,
        cu_seqlens=read.offsets,
        generation_mask=torch.from_numpy(read.generated),
    )


def require_whole(coverage: Coverage) -> None:
    """All that was fed has rows, and what was not fed is named so."""
    found = (coverage.total, coverage.fed, coverage.count("not_fed"), coverage.missing_share)
    assert (TOKENS, FED, TOKENS - FED, 0.0) == found


# ----------------------------------------------------------------------------------------------------------------------
# Nothing is missing
# ----------------------------------------------------------------------------------------------------------------------


def test_a_log_of_nemo_rl_passes_every_strict_reader() -> None:
    """As calls under ``on_missing="raise"``, as a stream and as batches under ``max_missing=0``."""
    made = messages.calls(nemo_log(), SPEC, weights_version=1)
    (record,) = assemble(made, SPEC, sample_id="s", on_missing="raise").records
    sink = io.BytesIO()
    with new_stream(sink, SPEC) as writer:
        writer.write(record)
    with open_stream(sink.getvalue(), max_missing=0.0) as reader:
        (batch,) = microbatches(reader, tokens=16)

    require_whole(record.coverage())
    require_whole(batch.coverage())
    verdict = admit_step([batch], SPEC, reduce=lambda value: value, max_missing=0.0)
    assert ("force", None) == (verdict.action, verdict.error)


@pytest.mark.parametrize(("layout", "build"), [("verl", verl_batch), ("skyrl", skyrl_batch)])
def test_batches_of_other_stacks(layout: str, build: Any) -> None:
    """Rows behind the last sampled token were never fed; the filler there is none of the engine's."""
    batch = own_batch(layout, build())
    require_whole(batch.coverage())
    verdict = admit_step([batch], SPEC, reduce=lambda value: value, max_missing=0.0)
    assert ("force", 0) == (verdict.action, batch.unexplained_missing)


def test_a_rollout_of_nemo_gym_ends_with_the_last_call() -> None:
    """Gym gives an observation no token ids: the record ends with the last sampled token, and nothing is missing."""
    item = {
        "prompt_token_ids": list(range(PROMPT)),
        "generation_token_ids": list(range(PROMPT, PROMPT + SAMPLED)),
        "routed_experts": rows([0, 1], PROMPT + SAMPLED).tolist(),
    }
    observation = {"type": "function_call_output", "call_id": "tool", "output": "42"}
    found = gym.records([item, observation], SPEC, sample_id="s", weights_version=1)
    (record,) = found.records

    assert (1, FED, 1, 0.0) == (
        found.skipped,
        record.coverage().fed,
        record.coverage().count("not_fed"),
        record.coverage().missing_share,
    )


# ----------------------------------------------------------------------------------------------------------------------
# What is lost is said
# ----------------------------------------------------------------------------------------------------------------------


def test_a_row_that_the_engine_lost_is_not_a_suffix() -> None:
    """The row of a token that was fed, and did not come, is missing in all of them."""
    lost = FED - 1
    options = CaptureOptions(absent="lost")
    (record,) = messages.records(nemo_log(lost=lost), SPEC, sample_id="s", weights_version=1, options=options)
    assert 1 == record.coverage().missing
    with pytest.raises(DataError, match=r"tokens \[5, 6\)"):
        assemble(
            messages.calls(nemo_log(lost=lost), SPEC, weights_version=1, options=options),
            SPEC,
            sample_id="s",
            on_missing="raise",
        )


def test_a_trimmed_call_that_lost_a_row_shows_it() -> None:
    """A token that a later call fed has a row behind it: it is lost, not a suffix, in an own batch too."""
    routes = torch.from_numpy(rows([0, 0]))
    routes[FED:] = MISSING
    mask = torch.from_numpy(np.concatenate([np.zeros(PROMPT, dtype=np.bool_), MASK]))[None]
    for fed_behind, missing in ((0, 0), (2, 2)):
        given = routes.clone()
        given[FED + 2 : FED + 2 + fed_behind] = torch.from_numpy(row(9))
        batch = RouteBatch.from_tensors(given[None], torch.arange(TOKENS)[None], spec=SPEC, generation_mask=mask)
        assert (missing, TOKENS - FED - missing - fed_behind) == (
            batch.coverage().count("lost"),
            batch.coverage().count("not_fed"),
        )
