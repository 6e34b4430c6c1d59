"""NeMo RL's facts about what its server returns of a call (C-001 to C-018), as what becomes of it here.

The inputs are those of the facts; where the outcome differs on purpose, the test says so and why. Upstream fills a
table to a padded length and marks nothing; a record has a row per token, and MISSING is the only filler.

Axes: R rows, S tokens, L captured layers, K top-k slots.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from routeplane.capture.wire import encode
from routeplane.errors import CaptureError, DataError, ErrorKind
from routeplane.record.assembly import assemble
from routeplane.record.record import RouteRecord
from routeplane.record.spec import MISSING, RouteSpec
from tests.capture.reading import response_calls


def spec_of(layers: int, top_k: int, experts: int = 64) -> RouteSpec:
    """Every decoder layer has a router."""
    return RouteSpec(num_experts=experts, top_k=top_k, layer_ids=tuple(range(layers)))


def answered(prompt: int, generated: int, rows: Any, **fields: Any) -> dict[str, Any]:
    """A chat response with ids beside the message, and rows as nested lists (None: none)."""
    made = None if rows is None else encode(np.asarray(rows, dtype=np.int64), form="lists")
    choice = {"index": 0, "finish_reason": "stop", "token_ids": list(range(generated)), "routed_experts": made}
    return {"id": "r", "prompt_token_ids": list(range(prompt)), "choices": [{**choice, **fields}]}


def record(response: dict[str, Any], spec: RouteSpec, **options: Any) -> RouteRecord:
    """The one record of a response."""
    [call] = response_calls(response, spec, weights_version=1, cached=0, **options)
    [made] = assemble([call], spec, sample_id="s").records
    return made


def test_c001_rows_are_copied_and_the_rest_is_missing() -> None:
    """Five rows of six tokens: as they came, then MISSING. Upstream has [0,1] there, and in two rows of padding, which
    a record does not have."""
    rows = np.arange(30).reshape(5, 3, 2)
    made = record(answered(4, 2, rows), spec_of(3, 2))

    assert rows.tolist() == made.routes[:5].tolist()
    assert (made.routes[5] == MISSING).all()
    assert ("captured", "not_fed") == tuple(capture.state for capture in made.captures)


def test_c002_c004_a_row_of_the_last_token_needs_a_word() -> None:
    """As many rows as tokens: upstream drops the last one silently. Here the caller says whether it is the engine's or
    a harness's; unsaid, it is refused, since it may as well mean that all rows are off by one."""
    rows = [[[1, 2]]] * 2 + [[[2, 3]]] * 2 + [[[9, 8]]]
    response, spec = answered(2, 3, rows), spec_of(1, 2)

    with pytest.raises(DataError) as caught:
        record(response, spec)
    assert ErrorKind.ROW_COUNT == caught.value.kind
    as_filler, as_captured = record(response, spec, final_row="filler"), record(response, spec, final_row="captured")
    assert [*rows[:4], [[MISSING, MISSING]]] == as_filler.routes.tolist()
    assert rows == as_captured.routes.tolist()


def test_c003_a_row_has_its_own_width() -> None:
    """Three experts of a row, two layers: as they came; upstream's [0,1,2] behind them is MISSING."""
    rows = [[[4, 5, 6], [7, 8, 9]], [[1, 2, 3], [10, 11, 12]]]

    assert [*rows, [[MISSING] * 3] * 2] == record(answered(2, 1, rows), spec_of(2, 3)).routes.tolist()


def test_c004_a_row_of_zeros_for_the_last_token_is_refused() -> None:
    """The same with a third row of zeros: upstream ignores it unseen. Here a harness's row is left out by its place,
    and a row said to be captured is refused: no router chooses one expert three times."""
    rows = [[[4, 5, 6], [7, 8, 9]], [[1, 2, 3], [10, 11, 12]], [[0, 0, 0]] * 2]
    response, spec = answered(2, 1, rows), spec_of(2, 3)

    assert [*rows[:2], [[MISSING] * 3] * 2] == record(response, spec, final_row="filler").routes.tolist()
    with pytest.raises(CaptureError) as caught:
        record(response, spec, final_row="captured")
    assert ErrorKind.UNCAPTURED_SLOT == caught.value.kind


def test_c005_c006_missing_rows_are_an_error_unless_something_explains_them() -> None:
    """Two rows of five: upstream writes -1 and warns once, or raises where no caller asks it to; here absent rows
    need a reason that the server gave."""
    rows = np.ones((2, 1, 2), int) * [[[1, 2]]]
    for reason in ("stop", "length"):
        with pytest.raises(DataError) as caught:
            record(answered(4, 2, rows, finish_reason=reason), spec_of(1, 2))
        assert ErrorKind.ROW_COUNT == caught.value.kind
    made = record(answered(4, 2, rows, finish_reason="abort"), spec_of(1, 2))
    assert [("captured", 0, 2), ("aborted", 2, 5), ("not_fed", 5, 6)] == [
        (one.state, one.start, one.stop) for one in made.captures
    ]


@pytest.mark.parametrize("rows", [4, 5, 9])
def test_c007_surplus_rows_are_refused(rows: int) -> None:
    """Two rows more than were fed, or any number: an error, as upstream's strict mode; upstream allows one."""
    with pytest.raises(DataError) as caught:
        record(answered(2, 1, np.tile([[[1, 2]]], (rows, 1, 1))), spec_of(1, 2))
    assert ErrorKind.ROW_COUNT == caught.value.kind


def test_c008_c011_rows_go_to_their_own_choice() -> None:
    """Outputs 1 and 0, in this order, of one prompt: 10, 11, then 30 for choice 0, and 31, 32 for choice 1; the last
    token of each is MISSING, not 0. An output 1 alone is an answer that lacks its choice 0."""
    rows = {0: [10, 11, 30], 1: [10, 11, 31, 32]}
    choices = [
        {**answered(3, index + 1, np.reshape(rows[index], (-1, 1, 1)))["choices"][0], "index": index}
        for index in (1, 0)
    ]
    response, spec = {"id": "r", "prompt_token_ids": [1, 2, 3], "choices": choices}, spec_of(1, 1)
    calls = response_calls(response, spec, weights_version=1)

    for index, call in enumerate(calls):
        [made] = assemble([call], spec, sample_id="s").records
        assert [*rows[index], MISSING] == made.routes.ravel().tolist()
    with pytest.raises(DataError, match=r"got \[1\]"):
        response_calls({**response, "choices": choices[:1]}, spec, weights_version=1)


def test_c009_no_routes_are_an_error() -> None:
    """An output without routes, where upstream raises too."""
    with pytest.raises(CaptureError) as caught:
        record(answered(2, 1, None), spec_of(1, 2))
    assert ErrorKind.CAPTURE_OFF == caught.value.kind


def test_c010_declared_rows_of_minus_one_are_missing() -> None:
    """What upstream sends for short captures: 10, 11, -1, -1 and a dummy. The rows of -1 are MISSING and counted."""
    rows = np.asarray([10, 11, -1, -1, 0]).reshape(5, 1, 1)
    made = record(answered(3, 2, rows), spec_of(1, 1), final_row="filler")

    assert [10, 11, MISSING, MISSING, MISSING] == made.routes.ravel().tolist()
    assert (2, 2, 1) == tuple(made.coverage().count(state) for state in ("captured", "not_captured", "not_fed"))


@pytest.mark.parametrize("experts", [8, 128, 129, 256, 32_767])
def test_c012_the_type_of_a_record_is_one(experts: int) -> None:
    """Upstream picks int8, int16 or int32 by the expert count, in two places; a record is int16, for any count."""
    rows = np.full((3, 1, 1), experts - 1)
    made = record(answered(2, 2, rows), spec_of(1, 1, experts))

    assert (np.dtype(np.int16), experts - 1) == (made.routes.dtype, int(made.routes[0, 0, 0]))


def test_c014_narrow_rows_are_the_same_rows() -> None:
    """The rows of C-001 as int8."""
    rows = (np.arange(30) % 128).reshape(5, 3, 2)
    response = answered(4, 2, None, routed_experts=encode(rows, dtype="int8", form="nrlre1"))

    assert record(answered(4, 2, rows), spec_of(3, 2)).checksum == record(response, spec_of(3, 2)).checksum


@pytest.mark.parametrize(
    ("tokens", "rows", "kept"),
    [
        (0, 1, None),
        (1, 1, 0),
        (6, 3, None),
        (6, 5, None),
        (6, 6, 5),
        (3, 0, None),
        (4, 1, None),
        (4, 5, None),
        (4, 4, 3),
    ],
)
def test_c017_tokens_and_rows_agree_or_are_refused(tokens: int, rows: int, kept: int | None) -> None:
    """Section 1.1's table of tokens and rows: upstream cuts, and fills with dummies and -1; here a harness's row for
    the last token is left out, and any other difference is refused. Its rows of one id twice are no routes: here each
    has two."""
    sent = [[[5 + at, 6 + at]] for at in range(rows)]
    response, spec = answered(0, tokens, np.reshape(sent, (rows, 1, 2))), spec_of(1, 2)

    if kept is None:
        with pytest.raises(DataError):
            record(response, spec, final_row="filler")
        return
    assert [*sent[:kept], [[MISSING] * 2]] == record(response, spec, final_row="filler").routes.tolist()


@pytest.mark.parametrize(("dtype", "value"), [("int16", 200), ("int16", 255), ("int32", 40_000)])
def test_c015_c018_no_id_becomes_another_or_missing(dtype: Any, value: int) -> None:
    """Ids of 200 and 255 under an int8 carry: upstream refuses the first tensor of a process and wraps all later ones,
    255 to "missing". Here an id that the router does not have is refused each time."""
    response = answered(2, 1, None, routed_experts=encode(np.full((2, 1, 2), value), dtype=dtype, form="nrlre1"))
    for _ in range(2):
        with pytest.raises(DataError) as caught:
            record(response, spec_of(1, 2, 128))
        assert ErrorKind.ID_OUT_OF_RANGE == caught.value.kind


def test_c020_token_ids_are_found_on_the_message() -> None:
    """Ids on the message and routes on neither: replay is off, and the error says so."""
    message = {"prompt_token_ids": [1], "generation_token_ids": [2], "generation_log_probs": [-1.0]}
    response = {"choices": [{"index": 0, "finish_reason": "stop", "message": message, "routed_experts": None}]}

    with pytest.raises(CaptureError, match="--enable-return-routed-experts"):
        record(response, spec_of(1, 2))
