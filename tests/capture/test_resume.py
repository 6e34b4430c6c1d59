"""The embedded engine on recorded routes: a record that was cut ends with the bits of the one that was not.

The reference for forced rows is a training forward under ``replay``, which shares only the gate's rule with the engine.
Tiny models, float32. Axes: S token positions, L captured layers, K slots.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from routeplane.batch import collate
from routeplane.capture import transformers as capture
from routeplane.capture.transformers import Sampling
from routeplane.errors import DataError, RouteplaneError, SpecError, UsageError
from routeplane.record.record import RouteRecord
from routeplane.record.spec import MISSING
from routeplane.replay import transformers as gates
from tests.replay.tiny_models import MAIN_FAMILIES

QWEN3 = MAIN_FAMILIES[0]
FAMILIES = {family.name: family for family in MAIN_FAMILIES}
PROMPTS = ((5, 6, 7), (9,), (4, 5, 6, 7, 8, 9))
WHOLE = 12
PROCESSED = Sampling(temperature=0.8, top_p=0.9, logprobs_mode="processed")


@cache
def model_of(family: str = QWEN3.name) -> Any:
    """A shared model in evaluation mode."""
    return FAMILIES[family].build().eval()


def run(prompts: Any = PROMPTS, *, family: str = QWEN3.name, max_tokens: int = WHOLE, **options: Any) -> Any:
    """``records`` of one family under seed 3."""
    settings = {"spec": FAMILIES[family].spec, "seed": 3, **options}
    return capture.records(model_of(family), prompts, max_tokens=max_tokens, **settings)


def bits(values: NDArray[Any] | None) -> list[int]:
    """Of float32 numbers; equal numbers of other bits differ."""
    assert values is not None
    found: list[int] = np.ascontiguousarray(values).view(np.int32).tolist()
    return found


def assert_same_content(one: RouteRecord, other: RouteRecord) -> None:
    """Tokens, rows in the order of their slots, log-probabilities and masks, to the last bit."""
    assert one.token_ids.tolist() == other.token_ids.tolist()
    assert one.routes.tolist() == other.routes.tolist()
    assert bits(one.logprobs) == bits(other.logprobs)
    assert {name: column.tolist() for name, column in one.columns.items()} == {
        name: column.tolist() for name, column in other.columns.items()
    }


def other_routes(record: RouteRecord) -> RouteRecord:
    """The record with every expert renamed to the next: rows that no router here chose."""
    routes_SLK = np.where(record.routes == MISSING, MISSING, (record.routes + 1) % record.spec.num_experts)
    return replace(record, routes=routes_SLK, logprobs=None, checksum=None)


def replayed_logprobs(record: RouteRecord, family: str) -> NDArray[np.float32]:
    """Of each sampled token, by a training forward that follows the record's routes."""
    model = model_of(family)
    batch = collate([record], record.spec)
    with gates.attach(model, record.spec) as replay, torch.no_grad(), replay.replaying(batch):
        logits = model(**batch.model_inputs()).logits
    logprobs = torch.log_softmax(logits[0, :-1].float(), dim=-1)
    picked = logprobs.gather(-1, torch.tensor(record.token_ids[1:, None], dtype=torch.int64))[:, 0].numpy()
    return np.concatenate([[np.nan], picked]).astype(np.float32)


# ---- resuming -------------------------------------------------------------------------------------------------------


HOWS = {"plain": Sampling(), "greedy": Sampling(temperature=0.0), "cut": PROCESSED}
RUNS = [*((QWEN3.name, how) for how in HOWS), *((name, "plain") for name in FAMILIES if name != QWEN3.name)]


@pytest.mark.parametrize(("family", "how"), RUNS)
def test_an_aborted_rollout_ends_with_the_bits_of_the_uninterrupted_one(family: str, how: str) -> None:
    """Tokens, rows, log-probabilities and masks; the counts say how many rows were followed."""
    sampling = HOWS[how]
    whole = run(family=family, sampling=sampling)
    aborted = run(family=family, sampling=sampling, max_tokens=5)
    resumed = run(aborted, family=family, sampling=sampling)
    for one, other, before in zip(whole, resumed, aborted, strict=True):
        assert_same_content(one, other)
        layers = len(one.spec.layer_ids)
        fed_before = before.num_tokens - 1
        assert str(fed_before * layers) == other.attributes["forced_rows"]
        assert str((other.num_tokens - 1 - fed_before) * layers) == other.attributes["live_rows"]
        assert other.key == before.key


@pytest.mark.parametrize("family", [QWEN3.name, MAIN_FAMILIES[-1].name])
def test_a_rollout_on_routes_and_tokens_of_another_ends_with_its_bits_too(family: str) -> None:
    """Neither its first tokens nor their rows are what seed and router would give, so both must be followed."""
    given = [other_routes(record) for record in run(family=family, max_tokens=5, seed=4)]
    whole = run(given, family=family)
    cut = [replace(record.slice(0, record.num_tokens - 5), logprobs=None, checksum=None) for record in whole]
    for one, other, before in zip(whole, run(cut, family=family), given, strict=True):
        assert_same_content(one, other)
        assert before.token_ids.tolist() == other.token_ids[: before.num_tokens].tolist()


def test_log_probabilities_of_tokens_that_were_fed_again_are_computed_alike() -> None:
    """They are kept, not computed, where the record has them: without them the same bits come from this pass."""
    whole = run()
    blank = [replace(record, logprobs=None, checksum=None) for record in run(max_tokens=5)]
    for one, other in zip(whole, run(blank), strict=True):
        assert bits(one.logprobs) == bits(other.logprobs)


def test_records_cut_at_different_lengths_and_a_new_prompt_share_a_batch() -> None:
    """Also twice: the trailing generations of a record are fed token by token, whatever calls brought them."""
    whole = run()
    cut = [whole[0].slice(0, 3 + 2), PROMPTS[1], whole[2].slice(0, 6 + 7)]
    half = run(cut, max_tokens=9)
    assert [14 - 2, 1 + 9, 6 + 9] == [record.num_tokens for record in half]
    for one, other in zip(whole, run(half), strict=True):
        assert_same_content(one, other)
        assert "slice" not in other.attributes


def test_what_is_new_has_its_own_call_and_version() -> None:
    """What was there before keeps who sampled and who captured it."""
    (aborted,) = run(PROMPTS[:1], max_tokens=4, weights_version=7)
    (resumed,) = run([aborted], max_tokens=6, weights_version=8)
    assert [(0, 3, None), (3, 7, 7), (7, 9, 8)] == [
        (span.start, span.stop, span.weights_version) for span in resumed.spans
    ]
    assert [(0, 6, "captured", 7), (6, 8, "captured", 8), (8, 9, "not_fed", None)] == [
        (each.start, each.stop, each.state, each.weights_version) for each in resumed.captures
    ]
    assert resumed.spans[2].call not in {span.call for span in aborted.spans}
    assert bits(aborted.logprobs) == bits(resumed.logprobs[:7])


# ---- rows that are not the router's own -----------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_gates_follow_rows_that_they_would_not_choose(family: str) -> None:
    """Log-probabilities are those of a replayed forward under these rows, and far from those of the live routes."""
    whole = run(family=family)
    forced = [other_routes(record.slice(0, record.num_tokens - 4)) for record in whole]
    scored = run(forced, family=family)
    for record, before, live in zip(scored, forced, whole, strict=True):
        sampled = slice(before.spans[0].stop, record.num_tokens)
        expected, size = replayed_logprobs(record, family), before.num_tokens
        assert before.routes[: size - 1].tolist() == record.routes[: size - 1].tolist()
        apart = np.abs(record.logprobs[sampled] - expected[sampled]).max()
        assert apart < 1e-5
        again = slice(before.spans[0].stop, size)
        assert np.abs(record.logprobs[again] - live.logprobs[again]).max() > 100 * max(apart, 1e-7)


def test_missing_rows_are_live_and_captured() -> None:
    """One layer of one row, all layers of another: the gates decide, the record gets what they chose."""
    (whole,) = run(PROMPTS[2:])
    routes_SLK = whole.routes.copy()
    routes_SLK[2, 0] = MISSING
    routes_SLK[7] = MISSING
    captures = (
        replace(whole.captures[0], stop=2),
        replace(whole.captures[0], start=2, stop=3, state="partial"),
        replace(whole.captures[0], start=3, stop=7),
        replace(whole.captures[0], start=7, stop=8, state="lost", weights_version=None),
        replace(whole.captures[0], start=8),
        whole.captures[1],
    )
    holed = replace(whole, routes=routes_SLK, captures=captures, checksum=None)
    (filled,) = run([holed])
    assert whole.routes.tolist() == filled.routes.tolist()
    layers = len(whole.spec.layer_ids)
    assert str(1 + layers) == filled.attributes["live_rows"]
    assert str((whole.num_tokens - 2) * layers - 1) == filled.attributes["forced_rows"]
    assert filled.coverage().missing == 0
    own = [each for each in filled.captures if "#" in each.call and each.state == "captured"]
    assert [(2, 3, None), (7, 8, 0)] == [(each.start, each.stop, each.weights_version) for each in own]


def test_a_prompt_of_tokens_alone_stays_what_it_was() -> None:
    """Beside a record that is followed, a live request has the tokens and rows that it has alone, and no counts."""
    (alone,) = run(PROMPTS[1:2], sampling=Sampling(temperature=0.0))
    (record,) = run(PROMPTS[:1], max_tokens=5, sampling=Sampling(temperature=0.0))
    _, beside = run([other_routes(record), PROMPTS[1]], sampling=Sampling(temperature=0.0))
    assert alone.token_ids.tolist() == beside.token_ids.tolist()
    assert np.sort(alone.routes).tolist() == np.sort(beside.routes).tolist()
    assert "forced_rows" not in beside.attributes


def test_taping_follows_rows_of_the_callers_own_forward() -> None:
    """Forward by forward; rows of another number of tokens are refused."""
    model, spec = model_of(), QWEN3.spec
    ids = torch.tensor([[5, 6, 7, 8]])
    with capture.taping(model, spec) as tape, torch.no_grad():
        model(input_ids=ids)
    rows = (tape.forwards()[0] + 1) % spec.num_experts
    with capture.taping(model, spec, follow=[rows]) as tape, torch.no_grad():
        model(input_ids=ids)
    assert rows.tolist() == tape.forwards()[0].tolist()
    with capture.taping(model, spec, follow=[rows[:3]]), pytest.raises(RouteplaneError, match="3 token rows"):
        model(input_ids=ids)


# ---- what is refused ------------------------------------------------------------------------------------------------


def test_records_that_cannot_be_gone_on_with_are_refused() -> None:
    """Each with what was expected of it."""
    (record,) = run(PROMPTS[:1], max_tokens=4, weights_version=7)
    last = int(record.token_ids[-1])
    cases: dict[str, tuple[type[Exception], Any, dict[str, Any]]] = {
        "not ended": (UsageError, record, {"sampling": Sampling(eos_token_id=last), "weights_version": 7}),
        "weights up to 6": (UsageError, record, {"weights_version": 6}),
        "at least 4": (UsageError, record, {"max_tokens": 3, "weights_version": 7}),
        "from the first on": (UsageError, record.slice(1, 6), {"weights_version": 7}),
        "with a prompt": (UsageError, record.slice(0, 7), {"weights_version": 7, "as_generated": True}),
        "columns that new tokens": (
            UsageError,
            record.attach_columns({"advantages": np.zeros(7, np.float32)}),
            {"weights_version": 7},
        ),
        "logprobs_mode 'processed'": (UsageError, record, {"sampling": PROCESSED, "weights_version": 7}),
        "geometry": (SpecError, record.select([QWEN3.spec.layer_ids[-1]]), {"weights_version": 7}),
    }
    for message, (kind, given, options) in cases.items():
        if options.pop("as_generated", False):
            given = replace(given, spans=(replace(given.spans[1], start=0),), checksum=None)
        with pytest.raises(kind, match=message):
            run([given], **options)
    with pytest.raises(DataError):
        run([replace(record, checksum=record.checksum ^ 1)], weights_version=7)
