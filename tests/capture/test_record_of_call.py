"""record_of_call against assemble, over every call of drawn rollouts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from routeplane.capture.recorder import record_of_call
from routeplane.errors import DataError, ErrorKind
from routeplane.record.assembly import assemble
from routeplane.record.calls import ModelCall
from routeplane.record.record import RecordKey
from routeplane.record.spec import RouteSpec
from routeplane.testing.strategies import Rollout, rollouts

SPEC = RouteSpec(num_experts=8, top_k=2, layer_ids=(0, 3))


@given(rollouts(), st.booleans())
def test_a_record_of_one_call_is_the_assembled_one(rollout: Rollout, named: bool) -> None:
    """Whatever call: same content, same checksum, in memory of its own."""
    attributes = {"a": "b"} if named else None
    for call in rollout.calls:
        expected = assemble(
            [call], rollout.spec, sample_id=RecordKey("s", 2, 0), group="g", attributes=attributes
        ).records[0]
        made = record_of_call(call, rollout.spec, sample_id="s", attempt=2, group="g", attributes=attributes)

        assert (expected.checksum, expected.spans, expected.captures) == (made.checksum, made.spans, made.captures)
        assert made.equals(expected)
        assert call.routes is None or not np.shares_memory(made.routes, call.routes)


CALL = ModelCall(
    prompt_ids=np.arange(4),
    generation_ids=np.arange(3),
    routes=np.tile(np.array([[1, 2], [3, 4]]), (6, 1, 1)),
    weights_version=7,
    call_id="c",
)


@given(
    st.integers(0, 6),
    st.integers(0, 6),
    st.integers(0, 7),
    st.sampled_from([None, "aborted", "lost", "not_captured"]),
)
def test_every_way_of_being_incomplete_is_assembled_alike(first_row: int, rows: int, cached: int, loss: object) -> None:
    """Trimmed, cut short, cached in part, with and without a reason: as assemble says, or refused as by it."""
    try:
        call = replace(
            CALL,
            routes=CALL.routes[:rows],  # type: ignore[index]  # there are some
            first_row=first_row,
            cached=cached,
            loss=loss,  # type: ignore[arg-type]  # drawn from its values
            checksum=None,
        )
    except DataError:
        return  # no such call exists
    [expected] = assemble([call], SPEC, sample_id="s").records

    assert expected.checksum == record_of_call(call, SPEC, sample_id="s").checksum


def test_illegal_rows_are_refused() -> None:
    """An id that the router does not have, as in assemble."""
    call = replace(CALL, routes=CALL.routes + np.int16(5), checksum=None)  # type: ignore[operator]  # there are some

    with pytest.raises(DataError) as caught:
        record_of_call(call, SPEC, sample_id="s")
    assert ErrorKind.ID_OUT_OF_RANGE == caught.value.kind


@pytest.mark.parametrize("shape", [(1, 2), (2, 1), (1, 1), (3, 2), (2, 3)])
def test_rows_of_another_shape_are_never_broadcast(shape: tuple[int, int]) -> None:
    """One layer for two, one expert for a row of two, more of either: refused as by assemble."""
    ids = np.arange(6 * shape[0] * shape[1], dtype=np.int16).reshape(6, *shape) % 4
    call = replace(CALL, routes=ids, checksum=None)

    with pytest.raises(DataError) as joined:
        assemble([call], SPEC, sample_id="s")
    with pytest.raises(DataError) as direct:
        record_of_call(call, SPEC, sample_id="s")
    assert {ErrorKind.SHAPE} == {joined.value.kind, direct.value.kind}
