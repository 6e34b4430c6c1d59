"""The embedded engine against an independent full forward of the same weights: what comes, what is refused, what stays.

Tiny models of five families with random weights, float32; prompts of different lengths, so that some are left-padded.
Axes: N token rows of one forward, E experts, K top-k slots.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import GenerationConfig

from routeplane.capture import transformers as capture
from routeplane.capture.transformers import Sampling, taping
from routeplane.errors import CaptureError, ErrorKind, ReplayError, SpecError, UsageError
from routeplane.record.record import RouteRecord
from routeplane.record.spec import MISSING, RouteSpec
from tests.replay.tiny_models import EXPERTS, MAIN_FAMILIES, TOP_K, listed_gates, live_choice

QWEN3 = MAIN_FAMILIES[0]
PROMPTS = ((5, 6, 7), (9,), (4, 5, 6, 7, 8, 9))
TOLERANCE = 1e-5

FAMILIES = {family.name: family for family in MAIN_FAMILIES}
each_family = pytest.mark.parametrize("family", FAMILIES)


@cache
def model_of(family: str = QWEN3.name) -> Any:
    """A shared model in evaluation mode, whose own end token is 2; tests that change a model build their own."""
    return FAMILIES[family].build().eval()


def fresh() -> Any:
    """A Qwen3-MoE, dense in layer 0, that a test may change."""
    return QWEN3.build().eval()


def records_of(
    model: Any, *, spec: RouteSpec = QWEN3.spec, prompts: Any = PROMPTS, **options: Any
) -> list[RouteRecord]:
    """``records`` of 8 tokens, unless asked otherwise."""
    names = ("temperature", "top_p", "top_k", "min_p", "logprobs_mode", "eos_token_id", "pad_token_id")
    sampling = Sampling(**{name: options.pop(name) for name in names if name in options})
    return capture.records(model, prompts, spec=spec, sampling=sampling, **{"max_tokens": 8, **options})


@dataclass(frozen=True, kw_only=True)
class Reference:
    """What one full forward gives: ids by layer, sorted ``[N, K]``, and log-probabilities of all next tokens."""

    ids: dict[int, torch.Tensor]
    logprobs_NV: torch.Tensor


def full_forward(model: Any, token_ids: Any) -> Reference:
    """One forward over a whole sequence, unpadded and without a cache; routers restated by hand from their inputs."""
    chosen: dict[int, torch.Tensor] = {}
    family = next(each for each in MAIN_FAMILIES if each.config == type(model.config).__name__)

    def restate(layer: int) -> Callable[[Any, tuple[torch.Tensor, ...]], None]:
        def keep(router: Any, args: tuple[torch.Tensor, ...]) -> None:
            hidden = args[0].reshape(-1, args[0].shape[-1])
            bias = getattr(router, "bias", None)
            logits_NE = hidden @ router.weight.T + (0 if bias is None else bias)
            chosen[layer] = live_choice(family, router, logits_NE).sort().values

        return keep

    hooks = [router.register_forward_pre_hook(restate(gate.layer_id)) for gate, router in listed_gates(model)]
    with torch.no_grad():
        logits_NV = model(input_ids=torch.tensor([list(map(int, token_ids))]), use_cache=False).logits[0]
    for hook in hooks:
        hook.remove()
    return Reference(ids=chosen, logprobs_NV=torch.log_softmax(logits_NV, dim=-1))


def sampled(records: Sequence[RouteRecord]) -> list[list[int]]:
    """What was sampled, record by record."""
    return [record.token_ids[record.spans[0].stop :].tolist() for record in records]


# ---- rows and log-probabilities -------------------------------------------------------------------------------------


#: max_tokens and temperature
RUNS = {"plain": (8, 1.0), "cool": (3, 0.5), "greedy": (5, 0.0), "one_token": (1, 1.0)}


@cache
def ran(family: str, run: str) -> list[tuple[RouteRecord, int, Reference]]:
    """Each record of a run, the length of its prompt, and the full forward over its tokens."""
    model = model_of(family)
    max_tokens, temperature = RUNS[run]
    found = records_of(model, spec=FAMILIES[family].spec, max_tokens=max_tokens, temperature=temperature, seed=3)
    return [
        (record, len(prompt), full_forward(model, record.token_ids))
        for record, prompt in zip(found, PROMPTS, strict=True)
    ]


each_run = pytest.mark.parametrize("run", RUNS)


@each_family
@each_run
def test_rows_are_those_of_a_full_forward(family: str, run: str) -> None:
    """Every fed token has, in every layer, the set of ids that the whole sequence alone gives it."""
    spec = FAMILIES[family].spec
    for (record, size, reference), prompt in zip(ran(family, run), PROMPTS, strict=True):
        assert size + RUNS[run][0] == record.num_tokens
        assert list(prompt) == record.token_ids[:size].tolist()
        assert list(spec.layer_ids) == sorted(reference.ids)
        for slot, layer in enumerate(spec.layer_ids):
            assert reference.ids[layer][:-1].tolist() == np.sort(record.routes[:-1, slot]).tolist(), record.sample_id
        assert (record.routes[-1] == MISSING).all()


@each_family
@each_run
def test_logprobs_are_the_raw_log_softmax_of_a_full_forward(family: str, run: str) -> None:
    """Whatever the temperature, ``logprobs[t]`` is log softmax at t-1, picked at token t; prompts have none."""
    for record, size, reference in ran(family, run):
        assert record.logprobs is not None
        assert np.isnan(record.logprobs[:size]).all()
        tokens = torch.from_numpy(record.token_ids[size:].astype(np.int64))
        expected = reference.logprobs_NV[size - 1 : -1].gather(1, tokens[:, None])[:, 0]
        np.testing.assert_allclose(record.logprobs[size:], expected.numpy(), rtol=0, atol=TOLERANCE)
        assert "raw" == record.attributes["logprobs_mode"]


@each_family
def test_temperature_zero_takes_the_best_token(family: str) -> None:
    """Every token of a greedy run is the argmax of a full forward over those before it."""
    for record, size, reference in ran(family, "greedy"):
        assert reference.logprobs_NV.argmax(dim=-1)[size - 1 : -1].tolist() == record.token_ids[size:].tolist()


def test_neighbours_and_padding_change_nothing() -> None:
    """A prompt among longer ones gets the tokens and the rows that it gets alone, whatever pads it."""
    model = model_of()
    together = records_of(model, temperature=0.0, pad_token_id=17)
    for record, prompt in zip(together, PROMPTS, strict=True):
        (alone,) = records_of(model, prompts=[prompt], temperature=0.0)
        assert alone.token_ids.tolist() == record.token_ids.tolist()
        assert np.sort(alone.routes).tolist() == np.sort(record.routes).tolist()


def test_sampling_follows_the_softmax() -> None:
    """Over many draws of one token, frequencies are the model's probabilities: nothing cuts or sharpens them."""
    model = model_of()
    draws = 2_048
    calls = capture.calls(model, [(5,)] * draws, spec=QWEN3.spec, max_tokens=1)
    expected_V = full_forward(model, [5]).logprobs_NV[0].exp().numpy()
    found_V = np.bincount([call.generation_ids[0] for call in calls], minlength=len(expected_V)) / draws
    # half the sum of differences is the total variation: 64 tokens, 2,048 draws give some 0.06
    assert 0.5 * np.abs(expected_V - found_V).sum() < 0.1


# ---- where a sequence ends ------------------------------------------------------------------------------------------


CUTS: dict[str, dict[str, Any]] = {
    "top_p": {"temperature": 0.8, "top_p": 0.9},
    "top_k": {"temperature": 1.3, "top_k": 5},
    "min_p": {"temperature": 1.0, "min_p": 0.05},
    "all": {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "min_p": 0.01},
    "nothing": {"temperature": 0.8},
}


@pytest.mark.parametrize(
    ("family", "cut"),
    [*((QWEN3.name, cut) for cut in CUTS), *((name, "all") for name in FAMILIES if name != QWEN3.name)],
)
def test_masks_are_what_was_drawn_from(family: str, cut: str) -> None:
    """A full forward at the temperature, restricted to the mask, gives the recorded values; the mask is top_p's etc."""
    how = CUTS[cut]
    spec = FAMILIES[family].spec
    for record in records_of(model_of(family), spec=spec, **how, logprobs_mode="processed", eos_token_id=2, seed=5):
        size = record.spans[0].stop
        wanted = (how.get("temperature"), how.get("top_p", 1.0), how.get("top_k", 0), how.get("min_p", 0.0))
        said = record.spans[1].sampling
        assert said is not None
        assert (*wanted, "processed") == (said.temperature, said.top_p, said.top_k, said.min_p, said.logprobs_mode)
        assert "processed" == record.attributes["logprobs_mode"]
        scores_NV = full_forward(model_of(family), record.token_ids).logprobs_NV / how["temperature"]
        lists, states = record.columns["sampling_mask"].tolist(), record.columns["sampling_mask_state"].tolist()
        assert [0] * size == states[:size]
        for at in range(size, record.num_tokens):
            row_V = scores_NV[at - 1].log_softmax(-1)
            assert (2 if cut == "nothing" else 1) == states[at]
            ids = lists[at] if states[at] == 1 else list(range(len(row_V)))
            # the kept ids are the likeliest ones
            assert sorted(row_V.argsort(descending=True)[: len(ids)].tolist()) == ids
            expected = row_V[int(record.token_ids[at])] - row_V[ids].logsumexp(0)
            assert record.logprobs is not None
            assert abs(float(expected) - record.logprobs[at]) < TOLERANCE
        if cut == "top_k":
            assert {5} == {len(ids) for ids in lists[size:]}


def up_to(tokens: list[int], ends: set[int]) -> list[int]:
    """The tokens up to the first that is an end, and that one."""
    last = next((at for at, token in enumerate(tokens) if token in ends), len(tokens) - 1)
    return tokens[: last + 1]


@pytest.mark.parametrize("several", [False, True], ids=["an_int", "a_list"])
def test_a_sequence_ends_with_its_end_token(several: bool) -> None:
    """It holds what was sampled up to the first end token, and no padding after it; its neighbours go on."""
    model = model_of()
    plain = sampled(records_of(model, seed=3))
    ends = {plain[1][2], plain[2][4]} if several else {plain[1][2]}
    expected = [up_to(tokens, ends) for tokens in plain]
    assert 3 == len(expected[1]) < max(map(len, expected))
    found = records_of(model, seed=3, eos_token_id=sorted(ends) if several else plain[1][2])
    assert expected == sampled(found)
    for record in found:
        reference = full_forward(model, record.token_ids)
        for slot, layer in enumerate(QWEN3.layer_ids):
            assert reference.ids[layer][:-1].tolist() == np.sort(record.routes[:-1, slot]).tolist()
        assert record.num_tokens - 1 == record.coverage().count("captured")


def test_an_end_token_in_the_prompt_ends_nothing() -> None:
    """Only what was sampled can end a sequence."""
    model = model_of()
    plain = records_of(model, prompts=[(5, 6, 7)])
    end = next(token for token in (5, 6, 7) if token not in sampled(plain)[0])
    assert sampled(plain) == sampled(records_of(model, prompts=[(5, 6, 7)], eos_token_id=end))


def test_all_sequences_may_end_early() -> None:
    """With every sequence ended at its first token there is no forward after the prefill."""
    model = model_of()
    firsts = sorted({tokens[0] for tokens in sampled(records_of(model, max_tokens=1))})
    found = records_of(model, eos_token_id=firsts)
    assert [len(prompt) + 1 for prompt in PROMPTS] == [record.num_tokens for record in found]


# ---- the model's own settings ---------------------------------------------------------------------------------------

OWN_DEFAULTS: dict[str, dict[str, Any]] = {
    "filters": {"do_sample": True, "top_k": 1, "top_p": 0.1, "min_p": 0.9, "typical_p": 0.1, "epsilon_cutoff": 0.02},
    "temperature": {"do_sample": True, "temperature": 0.01},
    "penalties": {"repetition_penalty": 9.0, "no_repeat_ngram_size": 1, "sequence_bias": [[[7], 50.0]]},
    "bans": {"suppress_tokens": list(range(60)), "begin_suppress_tokens": list(range(60))},
    "ends": {"max_length": 3, "eos_token_id": [0, 1, 58], "forced_eos_token_id": 7},
    "beams": {"num_beams": 2},
    "no_cache": {"use_cache": False},
}


@cache
def _sampled_under(own: str | None, temperature: float) -> list[list[int]]:
    model = fresh()
    model.generation_config = GenerationConfig.from_dict({} if own is None else json.loads(own))
    return sampled(records_of(model, prompts=[(9,)], max_tokens=5, temperature=temperature))


@pytest.mark.parametrize("own", OWN_DEFAULTS.values(), ids=OWN_DEFAULTS)
@pytest.mark.parametrize("temperature", [1.0, 0.0], ids=["sampled", "greedy"])
def test_generation_defaults_of_a_checkpoint_change_no_sample(own: dict[str, Any], temperature: float) -> None:
    """A penalty, a filter or a beam in the model's generation_config would sample what the logprobs are not of."""
    assert _sampled_under(None, temperature) == _sampled_under(json.dumps(own), temperature)


def test_the_model_is_left_as_it_was() -> None:
    """No hook, no mode, no setting, no weight differs afterwards, whether generation ends well or not."""
    model = fresh()
    own = GenerationConfig.from_dict({"repetition_penalty": 1.5, "eos_token_id": 2, "pad_token_id": 0})
    model.generation_config = own
    before = _state(model)
    records_of(model)
    assert before == _state(model)
    with pytest.raises(IndexError):
        records_of(model, prompts=[(5, 6), (64,)])
    assert before == _state(model)
    assert own is model.generation_config


def _state(model: Any) -> dict[str, Any]:
    parts = list(model.named_modules())
    return {
        "hooks": [(name, len(part._forward_hooks), len(part._forward_pre_hooks)) for name, part in parts],
        "training": [part.training for _, part in parts],
        "generation": json.dumps(model.generation_config.to_dict(), sort_keys=True),
        "config": json.dumps(model.config.to_dict(), sort_keys=True, default=str),
        "weights": [(float(value.detach().sum()), value.requires_grad) for value in model.parameters()],
    }


# ---- randomness -----------------------------------------------------------------------------------------------------


def test_the_seed_alone_decides() -> None:
    """The same records twice, whatever was drawn in between; torch, numpy and Python draw on as if nothing happened."""
    model = model_of()
    first = records_of(model, seed=11)
    torch.rand(5)
    before = torch.get_rng_state(), random.getstate(), str(np.random.get_state())  # noqa: NPY002  the global one it is
    second, other = records_of(model, seed=11), records_of(model, seed=12)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (random.getstate(), str(np.random.get_state()))  # noqa: NPY002
    assert [record.checksum for record in first] == [record.checksum for record in second]
    assert sampled(first) != sampled(other)


# ---- calls and records ----------------------------------------------------------------------------------------------


def test_records_say_who_sampled_and_who_captured() -> None:
    """One call per record: a prompt span and a generation span; captured rows, and a last token that was not fed."""
    found = records_of(model_of(), max_tokens=4, weights_version=7, sample_ids=["a", "b", "c"])
    assert [("a", 0, 0), ("b", 0, 0), ("c", 0, 0)] == [record.key for record in found]
    for record, prompt in zip(found, PROMPTS, strict=True):
        size = len(prompt)
        assert [(0, size, "prompt", None), (size, size + 4, "generation", 7)] == [
            (span.start, span.stop, span.kind, span.weights_version) for span in record.spans
        ]
        assert [(0, size + 3, "captured", 7), (size + 3, size + 4, "not_fed", None)] == [
            (capture.start, capture.stop, capture.state, capture.weights_version) for capture in record.captures
        ]
        assert QWEN3.spec == record.verify().spec
    assert ["sample-0", "sample-1", "sample-2"] == [r.sample_id for r in records_of(model_of(), max_tokens=1)]


def test_calls_carry_prompt_rows_and_layers() -> None:
    """Each call names its layers and brings P + G - 1 rows from the first token on."""
    calls = capture.calls(model_of(), PROMPTS, spec=QWEN3.spec, max_tokens=4, call_ids=["x", "y", "z"])
    for call, prompt, name in zip(calls, PROMPTS, ("x", "y", "z"), strict=True):
        assert (name, list(prompt), 4) == (call.call_id, call.prompt_ids.tolist(), len(call.generation_ids))
        assert (QWEN3.layer_ids, 0, len(prompt) + 3) == (call.layer_ids, call.first_row, call.rows_stop)
        assert call.checksum == call.compute_checksum()


# ---- taping any forward ---------------------------------------------------------------------------------------------


def test_a_tape_holds_every_forward_in_order() -> None:
    """One array ``[N, L, K]`` per forward, of the rows that these tokens have."""
    model = model_of()
    with taping(model, QWEN3.spec) as tape, torch.no_grad():
        for tokens in ((5, 6, 7), (9, 8)):
            model(input_ids=torch.tensor([tokens]), use_cache=False)
    model(input_ids=torch.tensor([[1, 2, 3, 4]]), use_cache=False)
    first, second = tape.forwards()
    for rows_NLK, tokens in ((first, (5, 6, 7)), (second, (9, 8))):
        reference = full_forward(model, tokens)
        assert (len(tokens), len(QWEN3.layer_ids), TOP_K) == rows_NLK.shape
        for slot, layer in enumerate(QWEN3.layer_ids):
            assert reference.ids[layer].tolist() == np.sort(rows_NLK[:, slot]).tolist()


def change_for_generation(model: Any, block: Any, forward: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replace a block's forward once the gates were probed."""
    generate = model.generate

    def changed(*args: Any, **options: Any) -> Any:
        block.forward = forward
        return generate(*args, **options)

    model.generate = changed


@pytest.mark.parametrize(("silent", "forward"), [({3}, 2), (set(range(1, 9)), 0)])
def test_a_gate_that_stays_silent_is_named(silent: set[int], forward: int) -> None:
    """A layer skipped in one forward would shift its later rows by a token; no array is made of the rest."""
    model = fresh()
    block = model.model.layers[2].mlp
    plain, calls = block.forward, itertools.count(1)
    change_for_generation(model, block, lambda hidden: hidden if next(calls) in silent else plain(hidden))
    with pytest.raises(CaptureError, match=rf"layers \[2\] in forward {forward}") as caught:
        records_of(model)
    assert ErrorKind.UNCAPTURED_SLOT == caught.value.kind


def test_a_gate_that_fires_twice_is_refused() -> None:
    """Silent once and twice later has the right count in all, and every row between in the wrong place."""
    model = fresh()
    block = model.model.layers[2].mlp
    plain, calls = block.forward, itertools.count(1)

    def uneven(hidden: torch.Tensor) -> torch.Tensor:
        number = next(calls)
        if number == 5:
            plain(hidden)
        return hidden if number == 3 else plain(hidden)

    change_for_generation(model, block, uneven)
    with pytest.raises(CaptureError, match=r"as often and in that order, got another firing @ layer 2") as caught:
        records_of(model)
    assert ErrorKind.GATE_FIRED == caught.value.kind


def test_a_gate_outside_the_model_it_was_taped_with_is_refused() -> None:
    """Rows of a forward of a part have no place among the model's forwards."""
    model = model_of()
    hidden = torch.zeros(1, 3, model.config.hidden_size)
    with taping(model, QWEN3.spec), torch.no_grad(), pytest.raises(CaptureError, match="as often and in that order"):
        model.model.layers[1].mlp(hidden)


def test_a_gate_that_hands_on_other_ids_is_refused() -> None:
    """What the gate selected would be recorded, and other experts used."""
    model = fresh()
    router = model.model.layers[1].mlp.gate
    router.register_forward_hook(lambda module, args, output: (*output[:2], (output[2] + 1) % EXPERTS))
    with pytest.raises(ReplayError, match=r"layers\.1\.mlp\.gate") as caught, taping(model, QWEN3.spec):
        pytest.fail("the body must not run")
    assert ErrorKind.NO_SEAM == caught.value.kind


# ---- what is refused ------------------------------------------------------------------------------------------------

OTHER_SPECS: dict[str, RouteSpec] = {
    "other_layers": replace(QWEN3.spec, layer_ids=(0, 1)),
    "fewer_layers": QWEN3.spec.select([1]),
    "wider": replace(QWEN3.spec, num_experts=EXPERTS + 1),
    "wider_in_one_layer": replace(QWEN3.spec, num_experts=(EXPERTS, EXPERTS + 1)),
    "other_top_k": replace(QWEN3.spec, top_k=TOP_K - 1),
}


@pytest.mark.parametrize("spec", OTHER_SPECS.values(), ids=OTHER_SPECS)
def test_a_spec_of_another_geometry_is_refused_before_any_token(spec: RouteSpec) -> None:
    """Layers, E and K are compared with the live gates; a stream of a wrong geometry is never begun."""
    model = fresh()
    model.generate = lambda *_, **__: pytest.fail("a token was sampled")
    with pytest.raises(SpecError) as caught:
        records_of(model, spec=spec)
    assert ErrorKind.SPEC_MISMATCH == caught.value.kind


def test_a_dense_model_is_refused() -> None:
    """A model without gates has no rows to give."""
    with pytest.raises(ReplayError) as caught:
        records_of(nn.Sequential(nn.Embedding(16, 4)).train(False))
    assert ErrorKind.NO_SEAM == caught.value.kind


def test_a_model_in_training_mode_is_refused() -> None:
    """Dropout would make rows and log-probabilities those of another model."""
    with pytest.raises(UsageError, match="evaluation mode"):
        records_of(fresh().train())


BAD_ARGUMENTS: dict[str, dict[str, Any]] = {
    "no_prompts": {"prompts": []},
    "an_empty_prompt": {"prompts": [(5,), ()]},
    "no_tokens_to_sample": {"max_tokens": 0},
    "a_negative_temperature": {"temperature": -1.0},
    "a_temperature_that_is_not_a_number": {"temperature": float("nan")},
    "fractional_token_ids": {"prompts": [(5.7, 6.2)]},
    "too_few_names": {"sample_ids": ["a", "b"]},
    "too_many_names": {"sample_ids": ["a", "b", "c", "d"]},
    "a_name_twice": {"sample_ids": ["a", "b", "a"]},
}


@pytest.mark.parametrize("options", BAD_ARGUMENTS.values(), ids=BAD_ARGUMENTS)
def test_arguments_that_cannot_be_served_are_refused(options: dict[str, Any]) -> None:
    """Each is a typed error before anything is generated, never a value that was quietly changed."""
    model = fresh()
    fired: list[int] = []
    model.model.layers[1].mlp.gate.register_forward_hook(lambda *_: fired.append(1))
    with pytest.raises(UsageError) as caught:
        records_of(model, **options)
    assert ErrorKind.ARGUMENT == caught.value.kind
    assert [] == fired
