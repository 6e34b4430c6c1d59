"""NeMo RL's facts about what its server returns of a call (C-001 to C-018), as what becomes of it here.

The inputs are those of the facts; where the outcome differs on purpose, the test says so and why. Upstream fills a
table to a padded length and marks nothing; a record has a row per token, and MISSING is the only filler.

Axes: R rows, S tokens, L captured layers, K top-k slots.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from routeplane.assembly import assemble
from routeplane.capture.envelopes import encode_lists, encode_nrlre1
from routeplane.capture.openai import calls_from_response
from routeplane.errors import CaptureError, DataError, ErrorKind
from routeplane.record import RouteRecord
from routeplane.spec import MISSING, RouteSpec


def spec_of(layers: int, top_k: int, experts: int = 64) -> RouteSpec:
    """Every decoder layer has a router."""
    return RouteSpec(num_experts=experts, top_k=top_k, layer_ids=tuple(range(layers)))


def answered(prompt: int, generated: int, rows: Any, **fields: Any) -> dict[str, Any]:
    """A chat response with ids beside the message, and rows as nested lists (None: none)."""
    made = None if rows is None else encode_lists(np.asarray(rows, dtype=np.int64))
    choice = {"index": 0, "finish_reason": "stop", "token_ids": list(range(generated)), "routed_experts": made}
    return {"id": "r", "prompt_token_ids": list(range(prompt)), "choices": [{**choice, **fields}]}


def record(response: dict[str, Any], spec: RouteSpec, **options: Any) -> RouteRecord:
    """The one record of a response."""
    [call] = calls_from_response(response, spec, weights_version=1, cached=0, **options)
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


def test_c005_missing_rows_are_an_error_unless_something_explains_them() -> None:
    """Two rows of five: upstream writes -1 and warns once; here absent rows need a reason that the server gave."""
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


@pytest.mark.parametrize(("dtype", "value"), [("int16", 200), ("int16", 255), ("int32", 40_000)])
def test_c015_c018_no_id_becomes_another_or_missing(dtype: Any, value: int) -> None:
    """Ids of 200 and 255 under an int8 carry: upstream refuses the first tensor of a process and wraps all later ones,
    255 to "missing". Here an id that the router does not have is refused each time."""
    response = answered(2, 1, None, routed_experts=encode_nrlre1(np.full((2, 1, 2), value), dtype=dtype))
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
