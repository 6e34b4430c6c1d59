"""Batches as a real model reads them: every layout gives each token what its sequence alone would give it.

A tiny Qwen3-MoE with random weights, float32. Axes: B sequences, S positions, N output rows, V vocabulary.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from routeplane.batch import BatchOptions, RouteBatch, collate, token_logprobs
from routeplane.errors import ErrorKind, UsageError
from routeplane.record.record import RouteRecord
from routeplane.testing.builders import watermarked_record, watermarked_spec
from tests.batch.laid_out import laid_out

SPEC = watermarked_spec(layers=(0, 1), top_k=2)
VOCABULARY = 64
TOLERANCE = 1e-5
#: a sequence of one token between longer ones: packing must not join it to a neighbour
LENGTHS = (7, 1, 1, 12, 5)

LAYOUTS: dict[str, dict[str, Any]] = {
    "right": {"layout": "padded"},
    "left": {"layout": "padded", "padding_side": "left"},
    "right_to_length": {"layout": "padded", "seq_len": 20},
    "left_to_multiple": {"layout": "padded", "padding_side": "left", "pad_to_multiple_of": 8},
    "packed": {"layout": "packed"},
    "packed_to_multiple": {"layout": "packed", "pad_to_multiple_of": 4},
}
layouts = pytest.mark.parametrize("options", LAYOUTS.values(), ids=LAYOUTS)
kernels = pytest.mark.parametrize("attention", ["eager", "sdpa"])


@cache
def model(attention: str) -> Any:
    """A Qwen3-MoE of two layers, in evaluation mode, with the cache that its configuration turns on by default."""
    options: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "head_dim": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 32,
        "moe_intermediate_size": 16,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "initializer_range": 0.3,
        "max_position_embeddings": 64,
        "use_cache": True,
    }
    torch.manual_seed(0)
    build: Any = transformers.AutoModelForCausalLM.from_config
    return build(transformers.Qwen3MoeConfig(**options), attn_implementation=attention).eval()


@cache
def records() -> tuple[RouteRecord, ...]:
    """One record per length, of random tokens."""
    rng = np.random.default_rng(0)
    return tuple(
        watermarked_record(sample, num_tokens=length, spec=SPEC, token_ids=rng.integers(1, VOCABULARY, length).tolist())
        for sample, length in enumerate(LENGTHS)
    )


@cache
def alone(attention: str) -> list[torch.Tensor]:
    """Logits ``[length, V]`` of every sequence by itself, with nothing but its token ids."""
    with torch.no_grad():
        return [
            model(attention)(input_ids=torch.tensor([record.token_ids.tolist()]), use_cache=False).logits[0]
            for record in records()
        ]


def answer(batch: RouteBatch, attention: str) -> torch.Tensor:
    """The model's logits of a batch."""
    with torch.no_grad():
        logits: torch.Tensor = model(attention)(**batch.model_inputs()).logits
    return logits


def real_rows(values: torch.Tensor, batch: RouteBatch) -> torch.Tensor:
    """Rows ``[tokens, ...]`` that hold a token, sequence after sequence."""
    return values.reshape(batch.num_rows, -1)[~batch.pad_mask.view(-1)]


def plain_logprobs(logits_NV: torch.Tensor, token_ids: list[int]) -> list[float]:
    """Log-probabilities of one sequence, token by token."""
    scores_NV = torch.log_softmax(logits_NV.double(), dim=-1)
    return [np.nan, *(float(scores_NV[t - 1, token_ids[t]]) for t in range(1, len(token_ids)))]


# ----------------------------------------------------------------------------------------------------------------------
# Inputs
# ----------------------------------------------------------------------------------------------------------------------


@kernels
@layouts
def test_each_token_sees_its_own_sequence_alone(options: dict[str, Any], attention: str) -> None:
    """Logits of real tokens are those of the unpadded single sequences; no neighbour and no padding leaks in."""
    batch = collate(records(), SPEC, **laid_out(options, pad_token_id=3))

    torch.testing.assert_close(
        real_rows(answer(batch, attention), batch), torch.cat(alone(attention)), rtol=0, atol=TOLERANCE
    )


@kernels
def test_the_comparison_would_see_a_leak(attention: str) -> None:
    """Positions that do not restart let packed sequences attend to each other, far beyond the tolerance."""
    batch = collate(records(), SPEC, layout="packed")
    inputs = {**batch.model_inputs(), "position_ids": torch.arange(batch.num_rows)[None]}
    with torch.no_grad():
        leaked = model(attention)(**inputs).logits

    assert (real_rows(leaked, batch) - torch.cat(alone(attention))).abs().max() > 1_000 * TOLERANCE


def test_a_cache_would_join_packed_sequences() -> None:
    """Why ``use_cache=False`` is among the inputs: with the configured cache the restarting positions go unheeded."""
    batch = collate(records(), SPEC, layout="packed")
    inputs = {name: value for name, value in batch.model_inputs().items() if name != "use_cache"}
    with torch.no_grad():
        joined = model("sdpa")(**inputs).logits

    assert (real_rows(joined, batch) - torch.cat(alone("sdpa"))).abs().max() > 1_000 * TOLERANCE


def test_the_inputs_of_each_layout() -> None:
    """Padded batches carry a mask, packed ones none and a leading axis of one."""
    padded = collate(records(), SPEC).model_inputs()
    packed = collate(records(), SPEC, layout="packed").model_inputs()

    assert ["attention_mask", "input_ids", "position_ids", "use_cache"] == sorted(padded)
    assert ["input_ids", "position_ids", "use_cache"] == sorted(packed)
    assert list(LENGTHS) == torch.as_tensor(padded["attention_mask"]).sum(dim=1).tolist()
    assert {(1, sum(LENGTHS))} == {tuple(value.shape) for value in packed.values() if isinstance(value, torch.Tensor)}


# ----------------------------------------------------------------------------------------------------------------------
# Log-probabilities
# ----------------------------------------------------------------------------------------------------------------------


@layouts
def test_token_logprobs_are_those_of_single_sequences(options: dict[str, Any]) -> None:
    """Each token has its log-probability given its own sequence's tokens before; first tokens and padding have NaN."""
    batch = collate(records(), SPEC, **laid_out(options))
    found = token_logprobs(answer(batch, "sdpa"), batch)
    expected = [
        score
        for record, logits_NV in zip(records(), alone("sdpa"), strict=True)
        for score in plain_logprobs(logits_NV, record.token_ids.tolist())
    ]

    assert (batch.token_ids.shape, torch.float32) == (found.shape, found.dtype)
    np.testing.assert_allclose(real_rows(found, batch)[:, 0].numpy(), expected, rtol=0, atol=TOLERANCE)
    assert found[batch.pad_mask].isnan().all()


def test_token_logprobs_do_not_depend_on_the_step() -> None:
    """More rows than are widened at a time, and a type narrower than float32, give the same."""
    record = watermarked_record(0, num_tokens=5_000, spec=SPEC, token_ids=[1, 2, 3, 4, 5] * 1_000)
    batch = collate([record], SPEC, layout="packed")
    logits = torch.randn((1, 5_000, 6), generator=torch.Generator().manual_seed(0)).bfloat16()

    np.testing.assert_allclose(
        token_logprobs(logits, batch).numpy(),
        plain_logprobs(logits[0], batch.token_ids.tolist()),
        rtol=0,
        atol=TOLERANCE,
    )


def test_token_logprobs_have_gradients_for_what_they_used() -> None:
    """The gradient of a masked sum is finite, and zero for logits that govern no chosen token."""
    batch = collate(records(), SPEC, options=BatchOptions(padding_side="left"))
    logits = torch.randn((*batch.token_ids.shape, VOCABULARY), generator=torch.Generator().manual_seed(0))
    logits.requires_grad_()

    token_logprobs(logits, batch)[batch.generation_mask].sum().backward()  # type: ignore[no-untyped-call]
    governs = torch.zeros_like(batch.pad_mask)
    governs[:, :-1] = batch.generation_mask[:, 1:]

    assert logits.grad is not None
    assert governs.tolist() == (logits.grad.abs().sum(dim=-1) > 0).tolist()
    assert logits.grad.isfinite().all()


def test_token_logprobs_of_single_tokens_are_nan() -> None:
    """Where no token has one before it there is nothing to score."""
    batch = collate(records()[1:3], SPEC, layout="packed")

    assert [True, True] == token_logprobs(torch.zeros((1, 2, VOCABULARY)), batch).isnan().tolist()


def test_a_token_whose_predecessor_was_cut_off_is_nan() -> None:
    """The engine scored it; here the logits that predict it are missing, be it a token that the policy sampled."""
    record = max(records(), key=lambda each: each.num_tokens)
    batch = collate([record], SPEC, layout="packed", options=BatchOptions(max_length=3, truncate="left"))
    scores = token_logprobs(torch.zeros((1, 3, VOCABULARY)), batch)

    assert batch.generation_mask.all()
    assert [True, False, False] == scores.isnan().tolist()


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((1, 25, VOCABULARY), r"logits of 26 rows, .*got shape \[1, 25, 64\]"),
        ((26,), r"logits of 26 rows, .*got shape \[26\]"),
        ((26, 4), "logits over more than"),
    ],
    ids=["rows", "rank", "vocabulary"],
)
def test_logits_that_do_not_fit_are_refused(shape: tuple[int, ...], message: str) -> None:
    """Other rows than the batch's, or a vocabulary that lacks one of its tokens, is a UsageError."""
    batch = collate(records(), SPEC, layout="packed")

    with pytest.raises(UsageError, match=message) as caught:
        token_logprobs(torch.zeros(shape), batch)

    assert ErrorKind.ARGUMENT == caught.value.kind
