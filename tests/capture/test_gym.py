"""Results of NeMo Gym to records: the conformance facts of its post-processing, and what is refused.

The facts (C-0xx) are statements of what NeMo RL was seen to do; where this library differs on purpose, a test says
which fact and why.

Axes: S tokens, D decoder layers, L captured layers, K top-k slots.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from routeplane.capture.http.gym import GymRollout
from routeplane.capture.wire import encode
from routeplane.errors import CaptureError, DataError, ErrorKind, RouteplaneError, SpecError
from routeplane.record.record import RouteRecord
from routeplane.record.spec import MISSING, RouteSpec
from routeplane.testing.strategies import Rollout, rollouts
from tests.capture.reading import gym_calls, gym_rollout
from tests.capture.test_openai import leaves, values

#: two layers, both with routers, so that NeMo's worked examples can be written down as they are
SPEC = RouteSpec(num_experts=64, top_k=2, layer_ids=(0, 1), model="gym")
FILLER = [[0, 1], [0, 1]]


def row(first: int) -> list[list[int]]:
    """A row that says which it is."""
    return [[first, first + 1], [first + 1, first]]


def item(prompt: list[int], generation: list[int], routes: Any, **fields: Any) -> dict[str, Any]:
    """An output item of one model call."""
    return {
        "type": "message",
        "prompt_token_ids": prompt,
        "generation_token_ids": generation,
        "generation_log_probs": [-0.5] * len(generation),
        **({} if routes is None else {"routed_experts": routes}),
        **fields,
    }


#: section 2.1's worked example: turn 1 of three tokens, its last row made up; turn 2 of seven
TURN_1 = [row(2), row(4), FILLER]
TURN_2 = [row(10), row(12), row(30), row(14), row(16), row(18), FILLER]
TWO_TURNS = [item([1, 2], [3], TURN_1), item([1, 2, 3, 4, 5], [6, 7], TURN_2)]


def rollout(items: list[Any], **options: Any) -> GymRollout:
    """A rollout's records."""
    given: dict[str, Any] = {"sample_id": "s", "weights_version": 4, "cached": 0}
    return gym_rollout({"output": items}, SPEC, **{**given, **options})


def only(items: list[Any], **options: Any) -> RouteRecord:
    """The one record of a rollout."""
    [record] = rollout(items, **options).records
    return record


# ----------------------------------------------------------------------------------------------------------------------
# Facts of NeMo RL
# ----------------------------------------------------------------------------------------------------------------------


def test_c031_the_last_row_of_a_turn_comes_from_the_next_prompt() -> None:
    """Tokens [1,2],[3],[4,5],[6,7]; rows r0 r1, then q2 for token 3, q3 q4, q5. The very last row is MISSING and no
    dummy: nothing fed that token."""
    record = only(TWO_TURNS)

    expected = [row(2), row(4), row(30), row(14), row(16), row(18), [[MISSING] * 2] * 2]
    assert expected == record.routes.tolist()
    assert [
        (0, 2, "prompt", "user", None),
        (2, 3, "generation", "assistant", 4),
        (3, 5, "prompt", "user", None),
        (5, 7, "generation", "assistant", 4),
    ] == [(one.start, one.stop, one.kind, one.role, one.weights_version) for one in record.spans]


def test_c032_an_item_without_routes_is_refused() -> None:
    """Where routes are required, an item with tokens and without rows is an error that names the item."""
    with pytest.raises(CaptureError, match="output item 1") as caught:
        rollout([TWO_TURNS[0], item([1, 2, 3, 4], [5], None)])
    assert ErrorKind.CAPTURE_OFF == caught.value.kind


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32"])
def test_c033_the_carry_dtype_changes_nothing(dtype: Any) -> None:
    """Whatever type an envelope has, the record is the same; upstream casts to the configured type."""
    items = [
        {**one, "routed_experts": encode(np.asarray(one["routed_experts"]), dtype=dtype, form="nrlre1")}
        for one in TWO_TURNS
    ]

    assert only(TWO_TURNS).checksum == only(items).checksum


def test_c034_a_single_turn_has_no_last_row() -> None:
    """Upstream leaves the dummy row of the last turn in place; here it is MISSING by its place, and declared not
    fed."""
    record = only(TWO_TURNS[:1])

    assert [row(2), row(4), [[MISSING] * 2] * 2] == record.routes.tolist()
    assert (2, 1) == (record.coverage().count("captured"), record.coverage().count("not_fed"))


@pytest.mark.parametrize("surplus", [1, 2, 9])
def test_c035_c036_no_surplus_row_is_accepted(surplus: int) -> None:
    """Upstream ignores one row too many (C-035), once any number of them: a row too many means that rows and tokens are
    not the same request's, so any is refused (C-036)."""
    with pytest.raises(DataError, match="output item 0") as caught:
        rollout([item([1, 2], [3], TURN_1 + [row(50)] * surplus)])
    assert ErrorKind.ROW_COUNT == caught.value.kind


@pytest.mark.parametrize("prompt", [[1, 2, 9, 4, 5], [1, 2], [9]])
def test_c037_a_prompt_that_does_not_go_on_is_a_context_break(prompt: list[int]) -> None:
    """Upstream asserts, and so lets it pass under -O; here it is an error of its kind, or a new segment by choice."""
    items = [TWO_TURNS[0], item(prompt, [6], [row(2 * at) for at in range(len(prompt) + 1)])]

    with pytest.raises(DataError) as caught:
        rollout(items)
    assert ErrorKind.CONTEXT_BREAK == caught.value.kind
    split = rollout(items, on_break="split")
    assert [0, 1] == [record.segment for record in split.records]
    assert 1 == split.report.breaks
    assert [3, len(prompt) + 1] == [record.num_tokens for record in split.records]


@pytest.mark.parametrize("rows", [0, 1])
def test_c038_too_few_rows_are_refused(rows: int) -> None:
    """Fewer rows than were fed are never padded."""
    with pytest.raises(DataError) as caught:
        rollout([item([1, 2], [3], TURN_1[:rows])])
    assert ErrorKind.ROW_COUNT == caught.value.kind


def test_an_engines_own_count_of_rows_is_right_where_it_is_said() -> None:
    """Upstream wants a row per token; the rows that an engine has are one fewer, and mean the same. Unsaid, a row less
    is one that was lost on the way."""
    bare = [item([1, 2], [3], TURN_1[:-1]), item([1, 2, 3, 4, 5], [6, 7], TURN_2[:-1])]

    assert only(TWO_TURNS).checksum == only(bare, final_row="absent").checksum
    with pytest.raises(DataError, match="final_row='absent'"):
        only(bare)


def test_c039_a_turn_without_routes_is_counted() -> None:
    """Where routes are not required, a second turn without them leaves its rows missing and in the report; upstream
    records nothing of it."""
    made = rollout([TWO_TURNS[0], item([1, 2, 3, 4, 5], [6, 7], None)], absent="not_captured")

    [record] = made.records
    assert [row(2), row(4), *[[[MISSING] * 2] * 2] * 5] == record.routes.tolist()
    assert 4 == made.report.coverage.count("not_captured")


def test_c040_a_later_turn_brings_the_rows_of_the_first() -> None:
    """A first turn without routes is filled by the second, which fed those tokens too; upstream leaves it
    route-less."""
    record = only([item([1, 2], [3], None), TWO_TURNS[1]], absent="not_captured")

    assert TURN_2[:-1] == record.routes[:-1].tolist()


def test_c041_an_empty_generation_is_passed_over() -> None:
    """An item that generated nothing between two turns: the third item's rows repair the first turn's last one."""
    empty = item([1, 2, 3, 4], [], None)
    made = rollout([TWO_TURNS[0], empty, {"type": "function_call_output", "output": "7"}, TWO_TURNS[1]])

    assert only(TWO_TURNS).routes.tolist() == made.records[0].routes.tolist()
    assert 2 == made.skipped


def test_c042_a_turn_that_adds_no_prompt_is_joined() -> None:
    """Generation on generation: no token between them, nothing turned into floats, and the repair takes place."""
    record = only([TWO_TURNS[0], item([1, 2, 3], [4], [row(10), row(12), row(30), FILLER])])

    assert [row(2), row(4), row(30)] == record.routes[:-1].tolist()
    assert [("prompt", 0, 2), ("generation", 2, 3), ("generation", 3, 4)] == [
        (one.kind, one.start, one.stop) for one in record.spans
    ]
    assert np.dtype(np.int32) == record.token_ids.dtype


def test_c043_a_missing_row_repairs_nothing() -> None:
    """A row of -1 for the previous turn's last token stays missing and is counted; upstream writes it over the
    dummy."""
    rows = [row(10), row(12), [[-1, -1]] * 2, row(14), row(16), row(18), FILLER]
    made = rollout([TWO_TURNS[0], item([1, 2, 3, 4, 5], [6, 7], rows)])

    assert [[MISSING] * 2] * 2 == made.records[0].routes[2].tolist()
    assert 1 == made.report.coverage.count("not_captured")


def test_c044_turns_of_other_geometry_are_refused() -> None:
    """Another number of layers, and one expert per row where there are two, which upstream broadcasts."""
    for rows, kind in (([one[:1] for one in TURN_2], ErrorKind.LAYERS), ([[[3], [4]]] * 7, ErrorKind.SHAPE)):
        with pytest.raises(SpecError, match="output item 1") as caught:
            rollout([TWO_TURNS[0], item([1, 2, 3, 4, 5], [6, 7], rows)])
        assert kind == caught.value.kind


def test_c045_an_id_is_never_wrapped() -> None:
    """Upstream turns an id of 200 into -56 where int8 is configured; here it is read as 200, and refused where the
    router has 64 experts."""
    wide = RouteSpec(num_experts=256, top_k=2, layer_ids=(0, 1))
    envelope = encode(np.asarray([[[200, 1], [200, 1]], row(2), FILLER]), form="nrlre1")
    items = [item([1, 2], [3], envelope)]

    [call] = gym_calls(items, wide, weights_version=1)
    assert [200, 1] == call.routes[0, 0].tolist()  # type: ignore[index]
    with pytest.raises(DataError, match="output item 0") as caught:
        rollout(items)
    assert ErrorKind.ID_OUT_OF_RANGE == caught.value.kind


# ----------------------------------------------------------------------------------------------------------------------
# Forms and places
# ----------------------------------------------------------------------------------------------------------------------

FORMS: dict[str, Callable[[Any, Any], Any]] = {
    "lists": lambda rows, tokens: encode(rows, form="lists"),
    "nrlre1": lambda rows, tokens: encode(rows, form="nrlre1"),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_record(form: str) -> None:
    """Nested lists, envelopes and inline text: one record."""
    items = [
        {
            **one,
            "routed_experts": FORMS[form](
                np.asarray(one["routed_experts"], np.int16), one["prompt_token_ids"] + one["generation_token_ids"]
            ),
        }
        for one in TWO_TURNS
    ]

    assert only(TWO_TURNS).checksum == only(items).checksum


def test_results_responses_and_lists_are_the_same() -> None:
    """A rollout's result, its response, JSON text of either, the bare items, objects with model_dump."""

    class Item:
        def __init__(self, content: Any) -> None:
            self.content = content

        def model_dump(self) -> Any:
            return self.content

    expected = only(TWO_TURNS).checksum
    response = {"id": "resp", "output": TWO_TURNS}
    for result in (
        {"reward": 1.0, "response": response},
        response,
        json.dumps({"response": response}),
        TWO_TURNS,
        [Item(one) for one in TWO_TURNS],
        {"output": TWO_TURNS, "response": None},
    ):
        [record] = gym_rollout(result, SPEC, sample_id="s", weights_version=4, cached=0).records
        assert expected == record.checksum


def test_a_result_without_tokens_is_refused() -> None:
    """A result without any generation is refused with what to check."""
    for items in ([], [{"type": "message"}], [item([1, 2], [], None)]):
        with pytest.raises(DataError, match="return_token_id_information") as caught:
            rollout(items)
        assert ErrorKind.ROUTES_MISSING == caught.value.kind


BAD: dict[str, tuple[dict[str, Any], ErrorKind]] = {
    "no prompt": ({"prompt_token_ids": None}, ErrorKind.DTYPE),
    "floats": ({"routed_experts": [[[1.0, 2.0], [3.0, 4.0]]] * 3}, ErrorKind.DTYPE),
    "text": ({"routed_experts": "AAAA"}, ErrorKind.ENCODING),
    "ragged": ({"routed_experts": [row(1), row(2)[:1], row(3)]}, ErrorKind.SHAPE),
    "an expert twice": ({"routed_experts": [[[5, 5], [3, 4]], row(2), FILLER]}, ErrorKind.DUPLICATE_ID),
    "partly missing": ({"routed_experts": [[[5, -1], [3, 4]], row(2), FILLER]}, ErrorKind.PARTIAL_ROW),
    "zeros": ({"routed_experts": [[[0, 0]] * 2] * 3}, ErrorKind.UNCAPTURED_SLOT),
    "log-probabilities of fewer": ({"generation_log_probs": []}, ErrorKind.SHAPE),
    "a log-probability above 0": ({"generation_log_probs": [0.5]}, ErrorKind.VALUE_RANGE),
    "one log-probability for all": ({"generation_log_probs": -0.5}, ErrorKind.DTYPE),
    "a log-probability below float32": ({"generation_log_probs": [-1e300]}, ErrorKind.VALUE_RANGE),
    "a log-probability below any float": ({"generation_log_probs": [-(10**400)]}, ErrorKind.VALUE_RANGE),
    "ids as an array": ({"generation_token_ids": np.asarray([3, 4])}, ErrorKind.DTYPE),
    "ids as no text": ({"generation_token_ids": ""}, ErrorKind.DTYPE),
    "ids as text": ({"generation_token_ids": ["3"]}, ErrorKind.DTYPE),
}


@pytest.mark.parametrize("name", BAD)
def test_invalid_items_are_refused(name: str) -> None:
    """Nothing is broadcast, truncated or turned into floats."""
    change, kind = BAD[name]

    with pytest.raises(RouteplaneError) as caught:
        rollout([item([1, 2], [3], TURN_1, **change)])
    assert kind == caught.value.kind
    assert name in ("an expert twice", "partly missing") or "output item 0" in str(caught.value)


# ----------------------------------------------------------------------------------------------------------------------
# Any rollout
# ----------------------------------------------------------------------------------------------------------------------


@given(st.sampled_from(sorted(TWO_TURNS[0])), values | st.lists(leaves, min_size=1, max_size=1))
def test_a_changed_field_of_an_item_is_refused_or_read(name: str, value: object) -> None:
    """Whatever stands in a field of an output item, reading raises a typed error or gives records."""
    with contextlib.suppress(RouteplaneError):
        rollout([{**TWO_TURNS[0], name: value}, TWO_TURNS[1]], absent="not_captured", on_break="split")


@given(rollouts(), st.sampled_from(["lists", "nrlre1"]), st.booleans())
def test_any_rollout_comes_through_gym(made: Rollout, form: Any, filler: bool) -> None:
    """Calls sent as Gym items (rows by position, -1 where none came, a made-up last row or none) give the records that
    the calls themselves give, in tokens and rows."""
    spec = made.spec
    items, kept = [], []
    for turn in made.turns:
        call = turn.call
        if len(call.generation_ids) == 0:
            continue
        tokens = call.num_tokens
        rows_SLK = np.where(turn.brought_SL[:, :, None], turn.rows_SLK, np.int16(MISSING))[: tokens - 1]
        if filler:
            rows_SLK = np.concatenate(
                [rows_SLK, np.tile(np.arange(spec.top_k, dtype=np.int16), (1, spec.num_layers, 1))]
            )
        # one row of a call of one token has no layers to send
        items.append(item(call.prompt_ids.tolist(), call.generation_ids.tolist(), encode(rows_SLK, form=form)))
        kept.append(rows_SLK[: tokens - 1])
    if not items:
        return
    # calls without any row too
    given: dict[str, Any] = {"axis": "captured", "cached": 0, "absent": "not_captured"}
    given["final_row"] = "filler" if filler else "absent"
    got = gym_rollout(items, spec, sample_id="s", weights_version=1, on_break="split", **given)
    plain: list[dict[int, Any]] = []
    tokens_so_far: list[int] = []
    for one, rows_SLK in zip(items, kept, strict=True):
        prompt = one["prompt_token_ids"]
        if not plain or prompt[: len(tokens_so_far)] != tokens_so_far:
            plain.append({})
        tokens_so_far = prompt + one["generation_token_ids"]
        for at, row_LK in enumerate(rows_SLK):
            known = plain[-1].get(at)
            # more layers replace fewer; otherwise the first one stays
            if known is None or (row_LK[:, 0] >= 0).all() > (known[:, 0] >= 0).all() or (known < 0).all():
                plain[-1][at] = row_LK
    assert len(plain) == len(got.records)
    for record, rows in zip(got.records, plain, strict=True):
        for at in range(record.num_tokens):
            expected = rows.get(at, np.full(spec.row_shape, MISSING))
            assert expected.tolist() == record.routes[at].tolist(), at
