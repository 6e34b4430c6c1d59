"""assemble against a plain reference over the truth of drawn rollouts, and its policies and refusals one by one."""

from __future__ import annotations

import json
import tracemalloc
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routeplane.errors import ChecksumError, DataError, ErrorKind, UsageError
from routeplane.record.assembly import Assembly, AssemblyReport, UnfedTokens, assemble
from routeplane.record.calls import ModelCall, merge_layers
from routeplane.record.record import RecordKey
from routeplane.record.spans import Coverage
from routeplane.record.spec import MISSING, RouteSpec
from routeplane.testing.builders import watermarked_spec
from routeplane.testing.strategies import Rollout, rollouts
from tests.plain_assembly import plain_record, plain_segment
from tests.turns import SPEC, turn, watermarks

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

Overlap = Literal["keep_first", "keep_last"]

# ----------------------------------------------------------------------------------------------------------------------
# Any rollout
# ----------------------------------------------------------------------------------------------------------------------


@settings(max_examples=2 * settings().max_examples)
@given(rollouts(), st.sampled_from(["keep_first", "keep_last"]))
def test_assembled_records_are_the_plain_ones(rollout: Rollout, overlap: Overlap) -> None:
    """Every token has its own row, capture, span, log-probability and columns; everything decided is counted."""
    made = assemble(rollout.calls, rollout.spec, sample_id="s", overlap=overlap, on_break="split")
    counts: Counter[str] = Counter()
    coverage = Coverage()

    assert len(rollout.token_ids) == len(made.records)
    for index, record in enumerate(made.records):
        expected = plain_segment(rollout, index, keep_last=overlap == "keep_last")
        counts.update(expected.counts)
        coverage = coverage.merge(record.coverage())
        expected.counts.clear()
        assert expected == plain_record(record)
        assert ("s", 0, index) == record.key
        assert record.verify() is record
    report = made.report
    expected_counts = (len(rollout.turns), len(rollout.token_ids), len(rollout.token_ids) - 1)
    assert expected_counts == (report.calls, report.records, report.breaks)
    names = ("overlap_rows", "drift_rows", "boundary_tokens", "replaced_rows", "stale_kv_rows")
    assert [counts[name] for name in names] == [getattr(report, name) for name in names]
    assert coverage == report.coverage


@given(rollout=rollouts(), count=st.integers(1, 4), role=st.sampled_from([None, "tool"]))
def test_tokens_that_were_not_fed_stand_behind_the_last_segment(rollout: Rollout, count: int, role: str | None) -> None:
    """They have no row, no version and no log-probability, and what the calls brought is as without them.

    Where nothing was sampled, all but the last are marked as rows of the last call that did not come.
    """
    last = rollout.calls[-1]
    sampled = any(len(turn.call.generation_ids) for turn in rollout.segment(len(rollout.token_ids) - 1))
    given_columns = {name: column.take(np.arange(count) % len(column)) for name, column in last.columns.items()}
    tail = UnfedTokens(token_ids=np.arange(count) + 7, role=role, call_id="seen", columns=given_columns)
    bare = assemble(rollout.calls, rollout.spec, sample_id="s", on_break="split")
    made = assemble([*rollout.calls, tail], rollout.spec, sample_id="s", on_break="split")
    expected, found = plain_record(bare.records[-1]), plain_record(made.records[-1])
    expected.token_ids += [token + 7 for token in range(count)]
    expected.rows += [[[MISSING] * rollout.spec.top_k] * rollout.spec.num_layers] * count
    state = "not_fed" if sampled else last.loss or "not_captured"
    expected.captures += [(state, "seen", None)] * (count - 1) + [("not_fed", "seen", None)]
    expected.spans += [("prompt", "seen", None)] * count
    if expected.logprobs is not None:
        expected.logprobs += [repr(np.float32("nan"))] * count
    for name, column in given_columns.items():
        expected.columns[name] += [repr(value) for value in column]

    assert expected == found
    assert list(map(plain_record, bare.records[:-1])) == list(map(plain_record, made.records[:-1]))
    assert role == made.records[-1].spans[-1].role
    assert replace(bare.report, coverage=made.report.coverage) == made.report


@pytest.mark.parametrize("rows", [0, 1, 2])
def test_tokens_behind_a_call_that_was_aborted_before_its_first(rows: int) -> None:
    """A prefill that was aborted, and a turn of the environment behind it: marked and counted, or refused."""
    spec = RouteSpec(num_experts=8, top_k=2, layer_ids=(0,))
    routes = np.tile(np.asarray([[[3, 1]]], dtype=np.int16), (rows, 1, 1))
    call = ModelCall(
        prompt_ids=np.asarray([5, 6]),
        generation_ids=np.arange(0),
        routes=routes,
        weights_version=1,
        call_id="c",
        loss="aborted",
    )
    tail = UnfedTokens(token_ids=np.asarray([7, 8, 9]), role="tool", call_id="seen")
    [record] = assemble([call, tail], spec, sample_id="s").records

    assert [5, 6, 7, 8, 9] == record.token_ids.tolist()
    coverage = record.coverage()
    assert (rows, 4 - rows, 1) == (coverage.count("captured"), coverage.count("aborted"), coverage.count("not_fed"))
    with pytest.raises(DataError) as caught:
        assemble([call, tail], spec, sample_id="s", on_missing="raise")
    assert ErrorKind.ROUTES_MISSING == caught.value.kind


@given(rollouts(breaks=False))
def test_without_drift_every_row_is_the_true_one(rollout: Rollout) -> None:
    """Rows that are there are those of the first forward, at their absolute position, whichever call brought them."""
    true_SLK = rollout.true_rows(0)
    steady = []
    for each in rollout.turns:
        call = each.call
        if call.routes is not None:
            slots = [rollout.spec.slot(layer) for layer in call.layer_ids or rollout.spec.layer_ids]
            true_RLK = true_SLK[call.first_row : call.rows_stop, slots]
            call = replace(call, routes=np.where(call.routes == MISSING, call.routes, true_RLK), checksum=None)
        steady.append(call)
    made = assemble(steady, rollout.spec, sample_id="s")
    (record,) = made.records
    there_SL1 = record.routes[:, :, :1] != MISSING

    np.testing.assert_array_equal(np.where(there_SL1, true_SLK, MISSING), record.routes)
    assert 0 == made.report.drift_rows


@given(rollouts())
def test_a_break_raises_unless_it_may_split(rollout: Rollout) -> None:
    """By default a prompt that does not extend what came before is an error that names the call."""
    if len(rollout.token_ids) == 1:
        assert 1 == len(assemble(rollout.calls, rollout.spec, sample_id="s").records)
        return
    (first, *_) = [each.call.call_id for each in rollout.turns if each.segment == 1]
    with pytest.raises(DataError, match=rf"expected .*, got .* @ call {first}, sample s$") as caught:
        assemble(rollout.calls, rollout.spec, sample_id="s")

    assert ErrorKind.CONTEXT_BREAK == caught.value.kind


@given(rollouts())
def test_missing_rows_raise_where_asked(rollout: Rollout) -> None:
    """``on_missing="raise"`` refuses exactly the rollouts that would be marked, naming state, call and sample."""
    marked = assemble(rollout.calls, rollout.spec, sample_id="s", on_break="split")
    absent = [
        capture
        for record in marked.records
        for capture in record.captures
        if capture.state not in ("captured", "cached", "not_fed")
    ]
    if not absent:
        again = assemble(rollout.calls, rollout.spec, sample_id="s", on_break="split", on_missing="raise")
        assert all(ours.equals(theirs) for ours, theirs in zip(marked.records, again.records, strict=True))
        return
    where = rf"\[{absent[0].start}, {absent[0].stop}\).*{absent[0].state} @ call {absent[0].call}, sample s"
    with pytest.raises(DataError, match=where) as caught:
        assemble(rollout.calls, rollout.spec, sample_id="s", on_break="split", on_missing="raise")

    assert ErrorKind.ROUTES_MISSING == caught.value.kind


@given(rollouts())
def test_records_own_their_arrays(rollout: Rollout) -> None:
    """Nothing of a record is memory of a call."""
    for record in assemble(rollout.calls, rollout.spec, sample_id="s", on_break="split").records:
        ours = [record.token_ids, record.routes, record.logprobs, *record.columns.values()]
        for call in rollout.calls:
            theirs = [call.prompt_ids, call.generation_ids, call.routes, call.logprobs, *call.columns.values()]
            assert not any(np.shares_memory(a, b) for a in ours for b in theirs if a is not None and b is not None)


@given(rollouts(breaks=False), st.data())
def test_stages_may_be_merged_before(rollout: Rollout, data: st.DataObject) -> None:
    """A call captured by pipeline stages and merged assembles as the whole call does."""
    calls = []
    for call in rollout.calls:
        if call.routes is None or call.layer_ids is None:
            calls.append(call)
            continue
        parts = [
            replace(call, routes=call.routes[:, [slot]], layer_ids=(layer,), checksum=None)
            for slot, layer in enumerate(call.layer_ids)
        ]
        calls.append(merge_layers(data.draw(st.permutations(parts))))
    whole, merged = (assemble(each, rollout.spec, sample_id="s") for each in (rollout.calls, calls))

    assert whole.report == merged.report
    assert whole.records[0].equals(merged.records[0])


# ----------------------------------------------------------------------------------------------------------------------
# Policies
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["overlap", "on_break", "on_missing"])
@pytest.mark.parametrize("value", ["keep_all", "", None, True], ids=str)
def test_an_unknown_policy_is_refused(name: str, value: object) -> None:
    """A mistyped policy is an error before any call is looked at, never the default."""
    policy: dict[str, Any] = {name: value}
    with pytest.raises(UsageError, match=f"expected {name} of ") as caught:
        assemble([], SPEC, sample_id="s", **policy)

    assert ErrorKind.ARGUMENT == caught.value.kind


@pytest.mark.parametrize(("overlap", "kept"), [("keep_first", 0), ("keep_last", 1)])
def test_one_tokens_rows_come_from_one_call(overlap: Overlap, kept: int) -> None:
    """More layers win under both policies; between captures of equal reach the policy decides; layers never mix."""
    some = turn(0, 2, 1, layer_ids=(1,), routes=watermarks(2, sample=0)[:, :1])
    other = turn(1, 3, 1, layer_ids=(4,), routes=watermarks(3, sample=1)[:, 1:])
    whole = turn(2, 4, 1, first_row=1, routes=watermarks(3, first=1, sample=2))
    (record,) = assemble([some, other, whole], SPEC, sample_id="s", overlap=overlap).records
    expected_LK = watermarks(1, sample=kept)[0]
    expected_LK[1 - kept] = MISSING

    assert expected_LK.tolist() == record.routes[0].tolist()
    np.testing.assert_array_equal(watermarks(3, first=1, sample=2), record.routes[1:4])
    assert [("partial", f"call-{kept}"), ("captured", "call-2"), ("not_fed", "call-2")] == [
        (capture.state, capture.call) for capture in record.captures
    ]


def test_another_order_is_not_counted_as_drift() -> None:
    """Drift is counted in sets, layer by layer; the order of a kept row is that of the call it came from."""
    again = watermarks(4, sample=0)[:, :, ::-1].copy()
    again[2, 1] = watermarks(1, sample=5)[0, 1]
    calls = [turn(0, 2, 2, routes=watermarks(3, sample=0)), turn(1, 4, 1, routes=again)]
    first, last = (assemble(calls, SPEC, sample_id="s", overlap=each) for each in ("keep_first", "keep_last"))
    for made in (first, last):
        assert (6, 1, 1) == (made.report.overlap_rows, made.report.drift_rows, made.report.boundary_tokens)

    np.testing.assert_array_equal(watermarks(3, sample=0), first.records[0].routes[:3])
    np.testing.assert_array_equal(again, last.records[0].routes[:4])
    assert 1 / 6 == first.report.scalars()["routeplane/assembly_drift_share"]


def test_reports_merge() -> None:
    """Counts add up over rollouts, coverage too; names are stable; drift is 0 without overlap."""
    made = assemble([turn(0, 2, 2), turn(1, 4, 1, routes=watermarks(4, sample=3))], SPEC, sample_id="s").report
    twice = made.merge(made)

    assert made == AssemblyReport().merge(made)
    assert {name: 2 * value for name, value in made.scalars().items() if not name.endswith("_share")} == {
        name: value for name, value in twice.scalars().items() if not name.endswith("_share")
    }
    assert made.scalars()["routeplane/assembly_drift_share"] == twice.scalars()["routeplane/assembly_drift_share"] > 0
    assert 0.0 == AssemblyReport().scalars(prefix="")["assembly_drift_share"]


def test_scalars_have_stable_names() -> None:
    """Every count has its name, apart from those of a stream's report, seen or not."""
    own = (
        *("calls", "context_breaks", "overlap_rows", "drift_rows", "drift_share", "boundary_tokens", "drift_values"),
        *("replaced_rows", "stale_kv_rows"),
    )
    expected = {f"x/assembly_{name}" for name in own} | set(Coverage().scalars(prefix="x/assembly_"))

    assert expected == set(AssemblyReport().scalars(prefix="x/"))
    assert {name.replace("x/", "routeplane/") for name in expected} == set(AssemblyReport().scalars())


def test_identity_and_attributes_are_the_callers() -> None:
    """Sample, attempt, group and attributes stand in every record; media digests are added as JSON."""
    calls = [turn(0, 2, 2, media=("m",)), turn(1, 4, 1, media=("m", "ü")), turn(2, 1, 1)]
    records = assemble(
        calls, SPEC, sample_id=RecordKey("s", 2, 0), group="g", on_break="split", attributes={"logprobs_mode": "raw"}
    ).records

    assert [("s", 2, 0), ("s", 2, 1)] == [record.key for record in records]
    assert ["g", "g"] == [record.group for record in records]
    assert {"logprobs_mode": "raw"} == records[1].attributes
    assert ["m", "ü"] == json.loads(records[0].attributes["media"])
    assert "raw" == records[0].attributes["logprobs_mode"]


# ----------------------------------------------------------------------------------------------------------------------
# Refusals
# ----------------------------------------------------------------------------------------------------------------------

BREAKS: dict[str, tuple[dict[str, Any], str]] = {
    "edited": (
        {"prompt_ids": np.asarray([0, 9, 2, 3])},
        "expected token 1 at position 1 as call call-0 left it, got 9",
    ),
    "shorter": ({"prompt_ids": np.asarray([0, 1, 2])}, "expected a prompt of at least the 4 tokens so far, got 3"),
    "other_media": ({"media": ("n",)}, r"expected media that begin with \['m'\], got \['n'\]"),
    "media_gone": ({"media": ()}, r"expected media that begin with \['m'\], got \[\]"),
}


@pytest.mark.parametrize(("change", "message"), BREAKS.values(), ids=BREAKS)
def test_a_break_says_what_differs(change: dict[str, Any], message: str) -> None:
    """Tokens, length or media: the first difference is named with its position, and gives a second record."""
    second = {"media": ("m",), "routes": None, **change}
    calls = [turn(0, 2, 2, media=("m",)), turn(1, 4, 1, **second)]
    with pytest.raises(DataError, match=message) as caught:
        assemble(calls, SPEC, sample_id="s")

    assert ErrorKind.CONTEXT_BREAK == caught.value.kind
    assert [0, 1] == [record.segment for record in assemble(calls, SPEC, sample_id="s", on_break="split").records]


def _zeros(count: int) -> NDArray[np.int16]:
    return np.zeros((count, 2, 2), dtype=np.int16)


REFUSED: dict[str, tuple[Callable[[], list[ModelCall]], str, ErrorKind]] = {
    "no_calls": (list, "at least one call", ErrorKind.ROUTES_MISSING),
    "one_call_twice": (lambda: [turn(0, 2, 1)] * 2, "'call-0' twice", ErrorKind.DUPLICATE_KEY),
    "other_layer_count": (
        lambda: [turn(0, 2, 1, routes=np.repeat(_zeros(2), 2, axis=1))],
        r"\[tokens, 2 layers, 2 top-k\], got \[2, 4, 2\]",
        ErrorKind.SHAPE,
    ),
    "other_top_k": (
        lambda: [turn(0, 2, 1, routes=np.repeat(_zeros(2), 2, axis=2))],
        r"\[tokens, 2 layers, 2 top-k\], got \[2, 2, 4\]",
        ErrorKind.SHAPE,
    ),
    "layer_twice": (lambda: [turn(0, 2, 1, layer_ids=(4, 4))], r"each once, got \[4, 4\]", ErrorKind.LAYERS),
    "column_absent": (
        lambda: [turn(0, 2, 1, columns={"x": np.zeros(3)}), turn(1, 3, 1)],
        "@ call call-1",
        ErrorKind.TOKEN_COLUMN,
    ),
    "column_new": (
        lambda: [turn(0, 2, 1), turn(1, 3, 1, columns={"x": np.zeros(4)})],
        "@ call call-1",
        ErrorKind.TOKEN_COLUMN,
    ),
    "column_of_another_type": (
        lambda: [
            turn(0, 2, 1, columns={"x": np.zeros(3, dtype=np.int64)}),
            turn(1, 3, 1, columns={"x": np.zeros(4, dtype=np.uint64)}),
        ],
        "@ call call-1",
        ErrorKind.TOKEN_COLUMN,
    ),
}


@pytest.mark.parametrize(("build", "message", "kind"), REFUSED.values(), ids=REFUSED)
def test_calls_that_do_not_fit_are_refused(build: Callable[[], list[ModelCall]], message: str, kind: ErrorKind) -> None:
    """Each misfit is a DataError of its kind that names the call."""
    with pytest.raises(DataError, match=message) as caught:
        assemble(iter(build()), SPEC, sample_id="s")

    assert kind == caught.value.kind


@pytest.mark.parametrize("layer_ids", [None, (1, 4), (4, 1)], ids=["by_spec", "named", "out_of_order"])
def test_illegal_rows_are_located_in_their_call(layer_ids: tuple[int, int] | None) -> None:
    """Call, absolute token and decoder layer of an illegal row are named, wherever the engine put the layer."""
    routes_RLK = watermarks(3, first=1)
    routes_RLK[1, (layer_ids or (1, 4)).index(4)] = 0
    with pytest.raises(DataError) as caught:
        assemble([turn(0, 4, 1, first_row=1, routes=routes_RLK, layer_ids=layer_ids)], SPEC, sample_id="s")

    assert [("s", 2, 4)] == [(problem.sample, problem.token, problem.layer) for problem in caught.value.problems]
    assert "call call-0" in str(caught.value)


def test_calls_are_verified_first() -> None:
    """A call whose content changed after capture assembles into nothing."""
    with pytest.raises(ChecksumError, match="@ call call-1"):
        assemble([turn(0, 2, 1), replace(turn(1, 3, 1), checksum=5)], SPEC, sample_id="s")


# ----------------------------------------------------------------------------------------------------------------------
# Cost
# ----------------------------------------------------------------------------------------------------------------------


class CountingSpec(RouteSpec):
    """A spec that counts the rows it was asked to allocate."""

    def missing_rows(self, count: int) -> NDArray[np.int16]:
        """As the base, and counted in ``asked``."""
        self.asked.append(count)
        return super().missing_rows(count)

    @property
    def asked(self) -> list[int]:
        """How many rows each time."""
        found: list[int] = self.__dict__.setdefault("counted", [])
        return found


@pytest.mark.parametrize("layer_ids", [None, (4, 1)], ids=["layers_in_place", "layers_to_move"])
def test_a_hundred_turns_cost_no_more_than_their_rows(layer_ids: tuple[int, ...] | None) -> None:
    """Kind of report 96: rows are placed once in one array of the final size; nothing grows and is copied per turn."""
    wide = watermarked_spec(layers=(1, 4), top_k=256)
    spec = CountingSpec(num_experts=wide.num_experts, top_k=256, layer_ids=(1, 4))
    calls = []
    for index in range(100):
        prompt, total = 10 * index + 5, 10 * index + 10
        fresh = watermarks(total - 1 - max(10 * index - 1, 0), first=max(10 * index - 1, 0), spec=wide)
        first = max(10 * index - 1, 0)
        calls.append(turn(index, prompt, total - prompt, first_row=first, routes=fresh, layer_ids=layer_ids))
    tracemalloc.start()
    made: Assembly = assemble(calls, spec, sample_id="s")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    (record,) = made.records
    size = record.nbytes

    assert 1_000 == max(spec.asked)
    assert sum(spec.asked) <= 1_000 + (0 if layer_ids is None else 1_000)
    # the record, and one validated block of it
    assert peak < 3 * size
    assert 999 == record.coverage().count("captured")
