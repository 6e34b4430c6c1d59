"""Sampling masks from vLLM: the support of processed log-probabilities on the real CPU engine, and its own field.

The conditions under which vLLM returns masks itself are asked of vLLM's own code and compared with ours.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm import RequestOutput, SamplingParams
from vllm.config import VllmConfig
from vllm.outputs import SamplingMask
from vllm.v1.engine.input_processor import InputProcessor

from routeplane.batch import BatchOptions, RouteBatch, collate, label_logprobs
from routeplane.capture import vllm as capture
from routeplane.capture.vllm import OutputOptions, options_of
from routeplane.errors import DataError, UsageError
from routeplane.replay import transformers as gates
from tests.capture.vllm_engine import SHORT, SPEC, VOCABULARY, Engine, running_engine

pytestmark = pytest.mark.vllm

CUT: dict[str, Any] = {"temperature": 0.8, "top_p": 0.6, "top_k": 100, "min_p": 0.002}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """One engine with processed log-probabilities of any number of ids."""
    options: dict[str, Any] = {"logprobs_mode": "processed_logprobs", "max_logprobs": -1}
    with running_engine(tmp_path_factory.mktemp("qwen3_moe"), **options) as running:
        yield running


def params(**sampling: Any) -> SamplingParams:
    """The parameters of ``Engine.ask``."""
    options: dict[str, Any] = {"max_tokens": 12, "seed": 7, "logprobs": -1, "ignore_eos": True, "detokenize": False}
    return SamplingParams(**{**options, **sampling})


def ask(engine: Engine, **sampling: Any) -> tuple[RequestOutput, SamplingParams]:
    """One answer for SHORT, and what was asked."""
    how = params(**sampling)
    [output] = engine.llm.generate([{"prompt_token_ids": SHORT}], how, use_tqdm=False)
    return output, how


def reference(engine: Engine, token_ids: Any, *, temperature: float, kept: list[list[int]]) -> list[float]:
    """log p of the last ``len(kept)`` tokens by Transformers: temperature, then the softmax over the kept ids alone."""
    ids = torch.tensor([list(map(int, token_ids))])
    with torch.no_grad():
        logits_SV = engine.model(ids).logits[0].double() / temperature
    found = []
    for at, allowed in enumerate(kept):
        place = ids.shape[1] - len(kept) + at
        row_V = logits_SV[place - 1]
        found.append(float(row_V[ids[0, place]] - row_V[allowed].logsumexp(0)))
    return found


@pytest.mark.parametrize("logprobs", [-1, 110])
def test_the_support_is_the_mask(engine: Engine, logprobs: int) -> None:
    """Ids of finite log-probability are all there are: their mass is 1, and they alone give the engine's values."""
    output, how = ask(engine, **CUT, logprobs=logprobs)
    [record] = capture.records(
        output, SPEC, sample_id="s", weights_version=1, options=options_of(engine.llm, how, masks=True)
    )
    assert [1] * 12 == record.columns["sampling_mask_state"].tolist()[len(SHORT) :]
    assert "processed" == record.attributes["logprobs_mode"]
    kept = record.columns["sampling_mask"].tolist()[len(SHORT) :]
    assert all(1 <= len(ids) < 100 for ids in kept)
    for ids, position in zip(kept, output.outputs[0].logprobs, strict=True):
        assert abs(1 - sum(np.exp(position[token].logprob) for token in ids)) < 1e-5
    expected = reference(engine, record.token_ids, temperature=0.8, kept=kept)
    assert record.logprobs is not None
    assert np.abs(np.asarray(expected) - record.logprobs[len(SHORT) :]).max() < 1e-4
    said = record.spans[-1].sampling
    assert said is not None
    assert (0.8, 0.6, 100, 0.002) == (said.temperature, said.top_p, said.top_k, said.min_p)
    assert ("processed", (), 1.0) == (said.logprobs_mode, said.processors, said.repetition_penalty)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scored:
    """A batch of vLLM's records, Transformers' logits of it under vLLM's routes, and the same without temperature."""

    batch: RouteBatch
    logits: torch.Tensor

    def k3(self, scores: torch.Tensor) -> float:
        """k3 of the sampled tokens."""
        difference = self.differences(scores)
        return float((difference.exp() - 1 - difference).mean())

    def differences(self, scores: torch.Tensor) -> torch.Tensor:
        """Trainer minus engine of the sampled tokens."""
        columns = self.batch.columns
        return (scores - columns["label_logprobs"])[columns["label_mask"]].double()


@pytest.fixture(scope="module")
def scored(engine: Engine) -> Scored:
    """Six prompts of 40 sampled tokens each, float32 on both sides, gates replayed."""
    prompts = [[11 + (37 * at + 5 * start) % 480 for at in range(start, start + 9)] for start in range(6)]
    how = params(**CUT, logprobs=110, max_tokens=40)
    outputs = engine.llm.generate([{"prompt_token_ids": one} for one in prompts], how, use_tqdm=False)
    options = options_of(engine.llm, how, masks=True)
    records = [
        capture.records(output, SPEC, sample_id=f"s{at}", weights_version=1, options=options)[0]
        for at, output in enumerate(outputs)
    ]
    batch = collate(records, SPEC, layout="padded", options=BatchOptions(labels=True))
    with gates.attach(engine.model, SPEC) as replay, torch.no_grad(), replay.replaying(batch):
        logits = engine.model(**batch.model_inputs()).logits
    return Scored(batch=batch, logits=logits)


def test_both_sides_agree_on_every_sampled_token(scored: Scored) -> None:
    """float32, the same routes and masks: 1e-4 on each, none left out; each control raises k3 tenfold at least."""
    batch, logits = scored.batch, scored.logits
    assert (240, 0.0) == (batch.mask_counts().listed, batch.mask_counts().unmasked_share)
    right = label_logprobs(logits, batch, masks="apply")
    found = scored.differences(right)
    assert 240 == len(found)
    assert float(found.abs().max()) <= 1e-4

    late = batch.column_parts["label_sampling_mask"]
    assert late.offsets is not None
    columns = batch.columns
    ones = {**columns, "label_temperature": torch.ones_like(columns["label_temperature"])}
    offsets = torch.cat([late.offsets[:1], late.offsets[:1], late.offsets[1:-1]])
    shifted = dataclasses.replace(late, values=late.values[: int(offsets[-1])], offsets=offsets)
    moved = dataclasses.replace(batch, column_parts={**batch.column_parts, "label_sampling_mask": shifted})
    raw = torch.full_like(right, torch.nan)
    raw[:, :-1] = logits.log_softmax(-1)[:, :-1].gather(-1, batch.token_ids[:, 1:, None])[..., 0]
    controls = {
        "temperature ignored": label_logprobs(logits, dataclasses.replace(batch, columns=ones), masks="apply"),
        "raw under a mask": raw,
        "mask one position late": label_logprobs(logits, moved, masks="apply"),
    }
    for name, scores in controls.items():
        difference = scored.differences(scores)
        usable = difference[difference.isfinite()]
        k3 = float((usable.exp() - 1 - usable).mean()) if len(usable) else float("inf")
        assert k3 >= 10 * scored.k3(right), name


def test_a_penalty_that_is_ignored_shows(engine: Engine, scored: Scored) -> None:
    """Tokens under a penalty are counted and left out; scored all the same, without the penalty, k3 is far larger."""
    how = params(**CUT, logprobs=110, presence_penalty=1.5, max_tokens=40)
    [output] = engine.llm.generate([{"prompt_token_ids": SHORT}], how, use_tqdm=False)
    records = capture.records(output, SPEC, weights_version=1, options=options_of(engine.llm, how, masks=True))
    batch = collate(records, SPEC, options=BatchOptions(labels=True))
    assert (40, 40) == (batch.mask_counts().listed, batch.mask_counts().changed)
    with gates.attach(engine.model, SPEC) as replay, torch.no_grad(), replay.replaying(batch):
        logits = engine.model(**batch.model_inputs()).logits
    own = Scored(batch=batch, logits=logits)
    assert bool(own.differences(label_logprobs(logits, batch, masks="apply")).isnan().all())
    ignored = own.k3(label_logprobs(logits, batch, masks="apply", changed_logits="applied"))
    right = label_logprobs(scored.logits, scored.batch, masks="apply")
    assert ignored >= 10 * scored.k3(right)


def test_nothing_cut_is_full_and_some_of_many_is_capped(engine: Engine) -> None:
    """All ids finite: full, no id stored. Five of them asked, all finite: there may be more, so the list is capped."""
    output, how = ask(engine, temperature=0.8)
    [call] = capture.calls(output, SPEC, weights_version=1, options=options_of(engine.llm, how, masks=True))
    assert [2] * 12 == call.columns["sampling_mask_state"].tolist()[len(SHORT) :]
    assert 0 == len(call.columns["sampling_mask"].values)

    output, how = ask(engine, temperature=0.8, top_k=100, logprobs=5)
    options = OutputOptions(
        sampling_params=how, masks=True, logprobs_mode="processed_logprobs", vocab_size=VOCABULARY, cached=0
    )
    [call] = capture.calls(output, SPEC, weights_version=1, options=options)
    assert [3] * 12 == call.columns["sampling_mask_state"].tolist()[len(SHORT) :]


def test_biases_and_penalties_are_told(engine: Engine) -> None:
    """They change kept logits, so the span names them: the bias by a digest of its content."""
    output, how = ask(
        engine, temperature=0.9, repetition_penalty=1.2, presence_penalty=0.5, logit_bias={7: 1.0, 3: -2.0}
    )
    [call] = capture.calls(output, SPEC, weights_version=1, options=options_of(engine.llm, how))
    other = options_of(engine.llm, params(temperature=0.9, logit_bias={7: 1.0, 3: -2.5}))
    [changed] = capture.calls(output, SPEC, weights_version=1, options=other)
    said, apart = call.sampling, changed.sampling
    assert said is not None
    assert apart is not None
    assert (1.2, 0.5, 0.0) == (said.repetition_penalty, said.presence_penalty, said.frequency_penalty)
    assert said.logit_bias is not None
    assert 16 == len(said.logit_bias)
    assert said.logit_bias != apart.logit_bias


# ---- vLLM's own field -----------------------------------------------------------------------------------------------


def test_the_field_of_an_output_is_the_mask(engine: Engine) -> None:
    """As the support gives it, also where it comes in pieces; without the request's parameters it is refused."""
    output, how = ask(engine, **CUT)
    own = options_of(engine.llm, how, masks=True)
    [plain] = capture.calls(output, SPEC, weights_version=1, options=own)
    kept = plain.columns["sampling_mask"].tolist()[len(SHORT) :]

    pieces = []
    for first, last in ((0, 5), (5, 12)):
        piece, choice = copy.copy(output), output.outputs[0]
        changes = {
            "token_ids": choice.token_ids[first:last],
            "logprobs": choice.logprobs[first:last],
            "sampling_mask": SamplingMask(kept[first:last]),
        }
        piece.outputs = [dataclasses.replace(choice, **changes)]
        pieces.append(piece)
    whole = capture.merge_deltas(pieces)
    [joined] = capture.calls(whole, SPEC, weights_version=1, options=options_of(engine.llm, how))
    assert plain.checksum == joined.checksum
    with pytest.raises(UsageError, match="a temperature above 0 in the sampling parameters beside masks, got none"):
        capture.calls(whole, SPEC, weights_version=1, options=OutputOptions(logprobs_mode="processed_logprobs"))
    short = copy.copy(whole)
    short.outputs = [dataclasses.replace(whole.outputs[0], token_ids=whole.outputs[0].token_ids[:7], logprobs=None)]
    with pytest.raises(DataError, match=r"expected \d+ rows"):
        capture.calls(short, SPEC, weights_version=1, options=own)


# ---- conditions -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Condition:
    """One thing that vLLM asks for: what breaks it, what vLLM says, what we say (None: we do not need it)."""

    model: dict[str, Any] = dataclasses.field(default_factory=dict)
    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    sampling: dict[str, Any] = dataclasses.field(default_factory=dict)
    theirs: str | None
    ours: str | None


CONDITIONS = {
    "nothing broken": Condition(theirs=None, ours=None),
    "another runner": Condition(config={"use_v2_model_runner": False}, theirs="Model Runner V2", ours=None),
    "speculation": Condition(
        config={"speculative_config": SimpleNamespace()},
        theirs="does not support speculative decoding",
        ours="an engine without speculative decoding",
    ),
    "diffusion": Condition(model={"is_diffusion": True}, theirs="diffusion", ours="diffusion"),
    "custom processors": Condition(
        model={"logits_processors": ["a.B"]}, theirs="custom logits processors", ours="logits processors of its own"
    ),
    "raw log-probabilities": Condition(
        model={"logprobs_mode": "raw_logprobs"}, theirs="processed_logprobs", ours="processed_logprobs"
    ),
    "greedy": Condition(sampling={"temperature": 0.0}, theirs="temperature > 0", ours="a temperature above 0"),
    "no top_k": Condition(sampling={"top_k": 0}, theirs="top_k > 0", ours=None),
    "few log-probabilities": Condition(sampling={"logprobs": 5}, theirs=None, ours="logprobs of -1, or above top_k"),
}


def complaint(check: Callable[[], object]) -> str | None:
    """What is said against it."""
    try:
        check()
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize("name", CONDITIONS)
def test_conditions_are_those_of_vllm(engine: Engine, name: str) -> None:
    """vLLM's own two checks are run on the same configuration: whatever it needs for the values, we ask for too."""
    if not hasattr(VllmConfig, "_verify_sampling_replay_config"):
        pytest.fail("vLLM has no _verify_sampling_replay_config: read where its conditions are now")
    case = CONDITIONS[name]
    given: dict[str, Any] = {
        "logprobs_mode": "processed_logprobs",
        "logits_processors": None,
        "is_diffusion": False,
        "return_sampling_mask": True,
        "hf_config": None,
        "get_vocab_size": lambda: VOCABULARY,
    }
    model = SimpleNamespace(**{**given, **case.model})
    config = SimpleNamespace(
        **{"model_config": model, "use_v2_model_runner": True, "speculative_config": None, **case.config}
    )
    how = params(**{"temperature": 0.8, "top_k": 50, **case.sampling})
    processor: Any = engine.llm.llm_engine.input_processor
    request_model = copy.copy(processor.model_config)
    request_model.return_sampling_mask = True
    asked: Any = copy.copy(processor)
    asked.model_config = request_model

    def theirs() -> None:
        VllmConfig._verify_sampling_replay_config(config)
        InputProcessor._validate_params(asked, how, ("generate",))

    for said, expected in (
        (complaint(theirs), case.theirs),
        (complaint(lambda: options_of(config, how, masks=True)), case.ours),
    ):
        assert (expected is None) == (said is None), said
        assert expected is None or expected in (said or "")


def test_masks_beside_relaxed_acceptance_are_refused() -> None:
    """vLLM's synthetic rejection sampling accepts tokens that the target would not draw so often."""
    given: dict[str, Any] = {"hf_config": None, "logprobs_mode": "processed_logprobs", "logits_processors": None}
    model = SimpleNamespace(**given, return_sampling_mask=True, get_vocab_size=lambda: VOCABULARY)
    for method in ("standard", "synthetic"):
        draft = SimpleNamespace(rejection_sample_method=method)
        config = SimpleNamespace(model_config=model, speculative_config=draft)
        said = complaint(lambda asked=config: options_of(asked, params(temperature=0.8, top_k=50)))  # type: ignore[misc]
        assert (method == "standard") == (said is None)
        assert said is None or "accepts what the target draws" in said
