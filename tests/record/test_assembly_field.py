"""Reports from the field that assembling answers, each with the smallest input of its kind."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from routeplane.errors import DataError, ErrorKind
from routeplane.record.assembly import assemble
from routeplane.record.spec import MISSING, RouteSpec
from routeplane.testing.builders import watermarked_spec
from tests.turns import SPEC, turn, watermarks

if TYPE_CHECKING:
    from routeplane.record.record import RouteRecord


def captures_of(record: RouteRecord) -> list[tuple[int, int, str, str]]:
    """Captures as plain tuples."""
    return [(capture.start, capture.stop, capture.state, capture.call) for capture in record.captures]


# ----------------------------------------------------------------------------------------------------------------------
# A. Missing rows, off by one
# ----------------------------------------------------------------------------------------------------------------------


def test_a_prefill_has_a_row_for_every_token() -> None:
    """Kind of report 1: a prefill-only call of 5 tokens fed all 5; an engine that cuts one is found out."""
    (whole,) = assemble([turn(0, 5, 0)], SPEC, sample_id="s").records
    with pytest.raises(DataError, match="fed all"):
        turn(0, 5, 0, routes=watermarks(4))
    short = turn(0, 5, 0, routes=watermarks(4), loss="not_captured")
    (cut,) = assemble([short], SPEC, sample_id="s").records

    assert [(0, 5, "captured", "call-0")] == captures_of(whole)
    assert [(0, 4, "captured", "call-0"), (4, 5, "not_captured", "call-0")] == captures_of(cut)
    with pytest.raises(DataError, match=r"tokens \[4, 5\).*not_captured @ call call-0"):
        assemble([short], SPEC, sample_id="s", on_missing="raise")


def test_the_last_sampled_token_is_missing_and_never_zero() -> None:
    """Kind of reports 3, 9: prompt 3 + 2 generated bring 4 rows; row 4 is MISSING, not fed, and no loss to count."""
    made = assemble([turn(0, 3, 2)], SPEC, sample_id="s", on_missing="raise")
    (record,) = made.records

    assert [(0, 4, "captured", "call-0"), (4, 5, "not_fed", "call-0")] == captures_of(record)
    assert (record.routes[4] == MISSING).all()
    assert 0.0 == made.report.coverage.missing_share


def test_a_row_padded_by_the_engine_is_refused() -> None:
    """Kind of reports 3, 9: n rows are those of other tokens, or padded, where only n - 1 tokens were fed."""
    for last in (SPEC.missing_rows(1), watermarks(1, first=4)):
        with pytest.raises(DataError, match='rows="all"'):
            turn(0, 3, 2, routes=np.concatenate([watermarks(4), last]))


def test_a_last_token_that_was_fed_keeps_its_row() -> None:
    """Kind of report 14: P + G rows are taken where the reader says that all tokens were fed; the last is captured."""
    (record,) = assemble([turn(0, 3, 2, rows="all")], SPEC, sample_id="s").records

    assert [(0, 5, "captured", "call-0")] == captures_of(record)


def test_cumulative_snapshots_do_not_add_up() -> None:
    """Kind of report 7: rows that come again, cumulative with each piece, take one place; the overlap counts."""
    pieces = [turn(0, 1, 1, rows="all"), turn(1, 2, 1, rows="all")]
    made = assemble(pieces, SPEC, sample_id="s")

    assert watermarks(3).tolist() == made.records[0].routes.tolist()
    assert (4, 0) == (made.report.overlap_rows, made.report.drift_rows)


# ----------------------------------------------------------------------------------------------------------------------
# B. Turns
# ----------------------------------------------------------------------------------------------------------------------


def test_the_boundary_row_comes_from_the_next_turn() -> None:
    """Kind of report 15: turn 1 of tokens 0..3 lacks row 3; turn 2 of tokens 0..6 brings it; row 6 stays missing."""
    made = assemble([turn(0, 3, 1), turn(1, 5, 2, first_row=3, routes=watermarks(3, first=3))], SPEC, sample_id="s")
    (record,) = made.records

    assert np.concatenate([watermarks(6), SPEC.missing_rows(1)]).tolist() == record.routes.tolist()
    expected = [(0, 3, "captured", "call-0"), (3, 6, "captured", "call-1"), (6, 7, "not_fed", "call-1")]
    assert expected == captures_of(record)
    assert 1 == made.report.boundary_tokens
    assert 1.0 == made.report.scalars()["routeplane/assembly_boundary_tokens"]


def test_a_turn_without_routes_is_missing_by_name() -> None:
    """Kind of report 17: rows of the turn that brought none, its boundary row too, are MISSING: no crash, no zeros."""
    (record,) = assemble([turn(0, 3, 1), turn(1, 5, 2, routes=None)], SPEC, sample_id="s").records
    (aborted,) = assemble([turn(0, 3, 1), turn(1, 5, 2, routes=None, loss="aborted")], SPEC, sample_id="s").records
    (recovered,) = assemble(
        [turn(0, 3, 1, routes=None), turn(1, 5, 2)], SPEC, sample_id="s", on_missing="raise"
    ).records

    expected = [(0, 3, "captured", "call-0"), (3, 6, "not_captured", "call-1"), (6, 7, "not_fed", "call-1")]
    assert expected == captures_of(record)
    assert "aborted" == aborted.captures[1].state
    assert (record.routes[3:] == MISSING).all()
    assert [(0, 6, "captured", "call-1"), (6, 7, "not_fed", "call-1")] == captures_of(recovered)


def test_rows_go_by_token_identity() -> None:
    """Kind of report 18: B = [1, 2, 4] does not extend A = [1, 2, 3]; its rows never land in A's record."""
    branch_a = turn(0, 2, 1, prompt_ids=np.asarray([1, 2]), generation_ids=np.asarray([3]))
    branch_b = turn(
        1, 3, 1, prompt_ids=np.asarray([1, 2, 4]), generation_ids=np.asarray([5]), routes=watermarks(3, sample=1)
    )
    with pytest.raises(DataError, match="expected token 3 at position 2 as call call-0 left it, got 4"):
        assemble([branch_a, branch_b], SPEC, sample_id="s")
    first, second = assemble([branch_a, branch_b], SPEC, sample_id="s", on_break="split").records

    assert watermarks(2).tolist() == first.routes[:2].tolist()
    assert MISSING == first.routes[2].max()
    assert watermarks(3, sample=1).tolist() == second.routes[:3].tolist()
    assert [[1, 2, 3], [1, 2, 4, 5]] == [first.token_ids.tolist(), second.token_ids.tolist()]


def test_a_delta_is_placed_by_its_offset() -> None:
    """Kind of report 18: rows from ``first_row`` on are of the tokens from there on, whatever was held before."""
    made = assemble([turn(0, 2, 2, first_row=2, routes=watermarks(1, first=2))], SPEC, sample_id="s")
    (record,) = made.records

    assert [(0, 2, "not_captured"), (2, 3, "captured"), (3, 4, "not_fed")] == [
        entry[:3] for entry in captures_of(record)
    ]
    assert watermarks(1, first=2).tolist() == record.routes[2:3].tolist()


def test_earlier_rows_keep_their_policy() -> None:
    """Kind of report 20: a snapshot of all rows by a newer policy does not relabel what an older one captured."""
    older, newer = turn(1, 3, 1), turn(2, 5, 2, routes=watermarks(6, sample=3))
    made = assemble([older, newer], SPEC, sample_id="s")
    (record,) = made.records

    np.testing.assert_array_equal(watermarks(3), record.routes[:3])
    np.testing.assert_array_equal(watermarks(3, first=3, sample=3), record.routes[3:6])
    assert [(0, 3, 1), (3, 6, 2), (6, 7, None)] == [
        (capture.start, capture.stop, capture.weights_version) for capture in record.captures
    ]
    assert [("prompt", None), ("generation", 1), ("prompt", None), ("generation", 2)] == [
        (span.kind, span.weights_version) for span in record.spans
    ]
    assert (6, 6) == (made.report.overlap_rows, made.report.drift_rows)


def test_the_newest_rows_win_where_asked() -> None:
    """Kind of report 20: relabelling is a policy with a name and a count, and the labels go with the rows."""
    calls = [turn(1, 3, 1), turn(2, 5, 2, routes=watermarks(6, sample=3))]
    (record,) = assemble(calls, SPEC, sample_id="s", overlap="keep_last").records

    np.testing.assert_array_equal(watermarks(6, sample=3), record.routes[:6])
    assert [(0, 6, 2), (6, 7, None)] == [
        (capture.start, capture.stop, capture.weights_version) for capture in record.captures
    ]


def test_rows_of_a_prefix_cache_have_no_version() -> None:
    """Kind of report 20: cached rows may be of weights before an update; whole or partial, their version is unknown."""
    routes_RLK = watermarks(4)
    routes_RLK[1, 0] = MISSING
    (record,) = assemble([turn(7, 3, 2, routes=routes_RLK, cached=3)], SPEC, sample_id="s").records

    assert [
        (0, 1, "cached", None),
        (1, 2, "partial", None),
        (2, 3, "cached", None),
        (3, 4, "captured", 7),
        (4, 5, "not_fed", None),
    ] == [(each.start, each.stop, each.state, each.weights_version) for each in record.captures]


def test_unknown_columns_go_with_their_tokens() -> None:
    """Kind of report 21: a token column of the calls is in the record, each value from the call of its token."""
    calls = [turn(0, 2, 1, columns={"mask": np.arange(3)}), turn(1, 4, 1, columns={"mask": 10 + np.arange(5)})]
    (record,) = assemble(calls, SPEC, sample_id="s").records

    assert [0, 1, 2, 13, 14] == record.columns["mask"].tolist()


@pytest.mark.parametrize("start", [500, 499, 0, 501], ids=["as_asked", "one_more", "all_again", "too_late"])
def test_a_server_that_omits_a_prefix_is_placed(start: int) -> None:
    """Kind of report 22: rows from where it was asked or from 0: none is doubled, a hole is named."""
    calls = [turn(0, 499, 2), turn(1, 510, 2, first_row=start, routes=watermarks(511 - start, first=start))]
    made = assemble(calls, SPEC, sample_id="s")
    (record,) = made.records
    hole = max(0, start - 500)

    np.testing.assert_array_equal(watermarks(500), record.routes[:500])
    np.testing.assert_array_equal(watermarks(511 - 500 - hole, first=500 + hole), record.routes[500 + hole : 511])
    assert {"captured": 511 - hole, "not_fed": 1, **({"lost": hole} if hole else {})} == {
        state: count for state, count in record.coverage().rows.items() if count
    }
    assert 2 * max(0, 500 - start) == made.report.overlap_rows


def test_an_empty_completion_assembles_and_lost_routes_are_counted() -> None:
    """Kind of report 23: zero generated tokens assemble; four of them without routes are a missing share of 1."""
    empty = assemble([turn(0, 5, 0)], SPEC, sample_id="s", on_missing="raise").report
    silent = assemble([turn(0, 5, 4, routes=None)], SPEC, sample_id="s").report

    assert 0.0 == empty.scalars()["routeplane/assembly_missing_share"]
    assert 1.0 == silent.scalars()["routeplane/assembly_missing_share"]
    assert 8.0 == silent.scalars()["routeplane/assembly_rows_not_captured"]
    with pytest.raises(DataError) as caught:
        assemble([turn(0, 5, 4, routes=None)], SPEC, sample_id="s", on_missing="raise")
    assert ErrorKind.ROUTES_MISSING == caught.value.kind


# ----------------------------------------------------------------------------------------------------------------------
# E. Layers
# ----------------------------------------------------------------------------------------------------------------------


def test_layers_are_placed_by_number() -> None:
    """Kind of reports 43, 58: rows named (5, 3) land on layers 5 and 3 of (3, 4, 5), whatever their order came as."""
    spec = watermarked_spec(layers=(3, 4, 5), top_k=2)
    true_SLK = watermarks(2, spec=spec)
    (record,) = assemble([turn(0, 2, 1, layer_ids=(5, 3), routes=true_SLK[:, [2, 0]])], spec, sample_id="s").records

    np.testing.assert_array_equal(true_SLK[:, [0, 2]], record.routes[:2, [0, 2]])
    assert (record.routes[:, 1] == MISSING).all()
    assert ["partial", "not_fed"] == [capture.state for capture in record.captures]


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ((0, 1, 2, 3, 4, 5), r"got \[0, 1, 2, 3, 4, 5\]"),
        ((3, 4, 5, 92), r"layers among \[3, 4, 5\], each once, got \[3, 4, 5, 92\]"),
    ],
    ids=["dense_layers_too", "one_mtp_layer"],
)
def test_a_layer_that_has_no_router_is_named(layers: tuple[int, ...], message: str) -> None:
    """Kind of reports 43, 47, 49: dense or MTP layers in the payload are an error that names both sets of layers."""
    spec = RouteSpec(num_experts=64, top_k=2, layer_ids=(3, 4, 5))
    routes_RLK = np.tile(np.asarray([1, 0], dtype=np.int16), (2, len(layers), 1))
    with pytest.raises(DataError, match=message) as caught:
        assemble([turn(0, 2, 1, layer_ids=layers, routes=routes_RLK)], spec, sample_id="s")

    assert ErrorKind.LAYERS == caught.value.kind


def test_an_absent_layer_shows() -> None:
    """Kind of report 48: a stage that recorded nothing leaves its layer MISSING and its tokens partial, or raises."""
    spec = watermarked_spec(layers=(1, 2, 3), top_k=2)
    calls = [turn(0, 2, 0, layer_ids=(1, 2), routes=watermarks(2, spec=spec)[:, :2])]
    (record,) = assemble(calls, spec, sample_id="s").records

    assert [(0, 2, "partial", "call-0")] == captures_of(record)
    assert 1.0 == record.coverage().missing_share
    assert [(0, 2, "captured", "call-0")] == captures_of(record.select([1, 2]))
    with pytest.raises(DataError, match="partial @ call call-0"):
        assemble(calls, spec, sample_id="s", on_missing="raise")


# ----------------------------------------------------------------------------------------------------------------------
# Log-probabilities
# ----------------------------------------------------------------------------------------------------------------------


def test_logprobs_stand_at_their_own_token() -> None:
    """``logprobs[t]`` is for token t: those of generated tokens stand there, NaN for prompts and calls without any."""
    calls = [
        turn(0, 2, 2, logprobs=np.asarray([-2.0, -3.0])),
        turn(1, 5, 1),
        turn(2, 6, 1, logprobs=np.asarray([-6.0])),
    ]
    (record,) = assemble(calls, SPEC, sample_id="s").records

    np.testing.assert_array_equal([np.nan, np.nan, -2, -3, np.nan, np.nan, -6], np.asarray(record.logprobs))
    assert assemble([turn(0, 2, 2)], SPEC, sample_id="s").records[0].logprobs is None
