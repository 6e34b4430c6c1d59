"""Statistics: every table is what counting token by token gives, and merging is blind to how the data was cut."""

from __future__ import annotations

import math
import pickle
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from routeplane.errors import ErrorKind, SpecError, UsageError
from routeplane.inspect import statistics as measures
from routeplane.inspect import statistics as tally
from routeplane.inspect.statistics import MAX_WORST, POSITION_BIN, Collector, RouteStatistics, collect
from routeplane.record.record import RouteRecord
from routeplane.record.spans import Capture, Span
from routeplane.record.spec import MISSING, RouteSpec
from routeplane.testing import strategies
from routeplane.testing.builders import watermarked_record, watermarked_spec
from tests.inspect.plain_statistics import count_plainly

SPEC = RouteSpec(num_experts=6, top_k=2, layer_ids=(1, 3), model="small")


@st.composite
def runs_of_records(draw: st.DrawFn) -> list[RouteRecord]:
    """Some records of one spec."""
    spec = draw(strategies.specs(max_experts=24))
    return draw(st.lists(strategies.records(spec=spec), min_size=1, max_size=3))


def record_of(rows: list[list[list[int]]], *, sample: str = "a", versions: tuple[int, ...] = ()) -> RouteRecord:
    """A record with these rows ``[S][L][K]``, all generated, one version for each token (default 1)."""
    routes = np.asarray(rows, dtype=np.int16)
    count = len(routes)
    given_versions = versions or (1,) * count
    return RouteRecord(
        sample_id=sample,
        token_ids=np.arange(count),
        routes=routes,
        spans=(Span(start=0, stop=count, kind="generation", call="c", weights_version=1),),
        captures=tuple(
            Capture(
                start=token,
                stop=token + 1,
                call="c",
                weights_version=version if routes[token].max() != MISSING else None,
                state="captured" if routes[token].max() != MISSING else "lost",
            )
            for token, version in enumerate(given_versions)
        ),
        spec=SPEC,
    )


def equal(left: RouteStatistics, right: RouteStatistics) -> bool:
    """Whether all counts are the same."""
    tables = ("shared_L", "neighbours_L", "runs_H", "positions_P2")
    same = all((getattr(left, name) == getattr(right, name)).all() for name in tables)
    loads = {key: table.tolist() for key, table in left.load.items()}
    return (
        same
        and loads == {key: table.tolist() for key, table in right.load.items()}
        and left.to_dict() == right.to_dict()
        and left.worst == right.worst
    )


# ----------------------------------------------------------------------------------------------------------------------
# Against counting token by token
# ----------------------------------------------------------------------------------------------------------------------


@given(records=runs_of_records())
def test_every_table_is_what_counting_by_hand_gives(records: list[RouteRecord]) -> None:
    """Loads, overlaps, runs, states and positions of any records, MISSING rows and prefixes included."""
    found = collect(records, records[0].spec)
    plain = count_plainly(records, position_bin=POSITION_BIN)
    load = Counter(
        {
            (kind, version, int(layer), int(expert)): int(table[layer, expert])
            for (kind, version), table in found.load.items()
            for layer, expert in np.argwhere(table)
        }
    )
    assert plain.load == load
    layers = range(records[0].spec.num_layers)
    assert [plain.neighbours[layer] for layer in layers] == found.neighbours_L.tolist()
    assert [plain.shared[layer] for layer in layers] == found.shared_L.tolist()
    assert plain.states == Counter(
        {(kind, state): count for kind, counts in found.states.items() for state, count in counts.items()}
    )
    runs = Counter({int(math.log2(length)): 0 for length in plain.runs})
    for length, count in plain.runs.items():
        runs[int(math.log2(length))] += count
    assert +runs == +Counter(dict(enumerate(found.runs_H.tolist())))
    longest = max((length for length, count in plain.runs.items() if count), default=0)
    assert longest == (found.longest_run.length if found.longest_run else 0)
    here = {
        (int(place), column == 0): int(found.positions_P2[place, column])
        for place, column in np.argwhere(found.positions_P2)
    }
    assert plain.positions == here


@given(records=runs_of_records(), cut=st.integers(0, 3))
def test_merging_gives_what_one_pass_gives(records: list[RouteRecord], cut: int) -> None:
    """Any two parts, either way round, after a trip through pickle (as between processes)."""
    spec = records[0].spec
    whole = collect(records, spec)
    parts = [pickle.loads(pickle.dumps(collect(part, spec))) for part in (records[:cut], records[cut:])]
    assert equal(whole, parts[0].merge(parts[1]))
    assert equal(whole, parts[1].merge(parts[0]))


@given(data=st.data())
def test_compiled_loops_count_what_numpy_counts(data: st.DataObject) -> None:
    """The kernels and their numpy twins, on rows with MISSING ones among them, across block bounds."""
    spec = data.draw(strategies.specs(max_experts=20))
    few_SLK: NDArray[np.int16] = data.draw(strategies.routes(spec=spec))
    routes_SLK = np.tile(few_SLK, (data.draw(st.sampled_from([1, 2, 300])), 1, 1))
    width, layers = max(spec.experts_per_layer), spec.num_layers

    def tables() -> tuple[NDArray[np.int64], ...]:
        return tuple(np.zeros(shape, dtype=np.int64) for shape in ((layers, width), (layers,)))

    compiled, plain = tables(), tables()
    tally.count_load(routes_SLK, compiled[0], rows_L=compiled[1])
    tally.plain_load(routes_SLK, plain[0], rows_L=plain[1])
    overlaps = []
    first, every = data.draw(st.integers(0, 3)), data.draw(st.integers(1, 4))
    for count in (tally.count_overlap, tally.plain_overlap):
        shared_L, neighbours_L = np.zeros(layers, np.int64), np.zeros(layers, np.int64)
        repeats_S = np.zeros(len(routes_SLK), np.bool_)
        count(routes_SLK, shared_L=shared_L, neighbours_L=neighbours_L, repeats_S=repeats_S, first=first, every=every)
        overlaps.append((shared_L, neighbours_L, repeats_S))
    for mine, theirs in zip((*compiled, *overlaps[0]), (*plain, *overlaps[1]), strict=True):
        np.testing.assert_array_equal(theirs, mine)


# ----------------------------------------------------------------------------------------------------------------------
# What the counts say
# ----------------------------------------------------------------------------------------------------------------------


def test_a_layer_says_how_its_load_lies() -> None:
    """Entropy, effective and dead experts, imbalance and Gini of a load worked out by hand."""
    load_LE = np.asarray([[4, 4, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0], [3, 1, 0, 0]])
    experts_L = np.asarray([4, 4, 4, 2])
    np.testing.assert_allclose([math.log(2), math.log(4), 0, 0.5623351446188083], measures.entropy(load_LE))
    np.testing.assert_allclose([2, 4, 0, math.exp(0.5623351446188083)], measures.effective_experts(load_LE))
    assert [2, 0, 0, 0] == measures.dead_experts(load_LE, experts_L).tolist()
    np.testing.assert_allclose([2, 1, 1, 1.5], measures.imbalance(load_LE, experts_L))
    np.testing.assert_allclose([0.5, 0, 0, 0.25], measures.gini(load_LE, experts_L))


@given(loads=st.lists(st.integers(0, 50), min_size=1, max_size=12))
def test_gini_is_the_mean_difference_over_twice_the_mean(loads: list[int]) -> None:
    """The definition by all pairs."""
    mean = sum(loads) / len(loads)
    pairs = sum(abs(one - other) for one in loads for other in loads)
    expected = pairs / (2 * len(loads) ** 2 * mean) if mean else 0.0
    np.testing.assert_allclose(
        [expected], measures.gini(np.asarray([loads]), np.asarray([len(loads)])), atol=1e-12, rtol=1e-9
    )


def test_divergence_runs_from_nothing_to_log_2() -> None:
    """Equal shares at any scale, disjoint ones, and a side without load."""
    left, right = np.asarray([[1, 1, 0], [1, 0, 0], [0, 0, 0]]), np.asarray([[5, 5, 0], [0, 7, 7], [1, 1, 1]])
    np.testing.assert_allclose([0, math.log(2), 0], measures.divergence(left, right), atol=1e-15)


def test_drift_follows_the_weights_versions() -> None:
    """A policy that moved one layer's load wholly shows there and then, and nowhere else."""
    records = [
        record_of([[[0, 1], [0, 1]]] * 2 + [[[0, 1], [2, 3]]] * 2 + [[[0, 1], [2, 3]]], versions=(1, 1, 2, 2, 5))
    ]
    found = collect(records, SPEC)
    assert (1, 2, 5) == found.versions
    drifts = found.drift()
    assert [(1, 2), (2, 5)] == [(drift.before, drift.after) for drift in drifts]
    np.testing.assert_allclose([0, math.log(2)], drifts[0].divergence_L, atol=1e-15)
    np.testing.assert_allclose([0, 0], drifts[1].divergence_L, atol=1e-15)


def test_the_longest_run_of_equal_rows_is_named_with_its_place() -> None:
    """As sets, in all layers; a run in one layer alone is none."""
    one, two = [[0, 1], [2, 3]], [[4, 5], [2, 3]]
    records = [record_of([one, two, one], sample="a"), record_of([two, one, [[1, 0], [3, 2]], one, two], sample="b")]
    found = collect(records, SPEC)
    assert found.longest_run is not None
    assert ("b", 1, 3) == (found.longest_run.sample, found.longest_run.token, found.longest_run.length)
    np.testing.assert_allclose([0, 1], found.overlap_L)  # of token 4, the one in four that is counted


def test_samples_with_the_most_missing_rows_are_named() -> None:
    """Most first, at most MAX_WORST, whatever the order of coming."""
    spec = watermarked_spec()
    records = [watermarked_record(index, num_tokens=40, spec=spec, missing=range(index)) for index in range(20)]
    found = collect(reversed(records), spec)
    assert [f"sample-{index}" for index in range(19, 19 - MAX_WORST, -1)] == [w.key.sample_id for w in found.worst]
    assert 19 == found.worst[0].missing


# ----------------------------------------------------------------------------------------------------------------------
# Bounds and refusals
# ----------------------------------------------------------------------------------------------------------------------


def test_statistics_of_nothing_are_zeros() -> None:
    """No record, no division by nothing."""
    found = collect([], SPEC)
    assert 0 == found.coverage.total
    assert [0, 0] == [layer["dead"] for layer in found.layers()]
    assert found.longest_run is None


def test_a_record_of_another_spec_is_refused() -> None:
    """Counts of two geometries never share a table."""
    collector = Collector(SPEC)
    with pytest.raises(SpecError, match="sample-0"):
        collector.add(watermarked_record(0, num_tokens=4, spec=watermarked_spec()))


def test_statistics_of_two_specs_do_not_merge() -> None:
    """Counts of two geometries never share a table."""
    with pytest.raises(UsageError) as caught:
        collect([], SPEC).merge(collect([], watermarked_spec()))
    assert ErrorKind.ARGUMENT == caught.value.kind


def test_results_are_read_only_and_stay_when_counting_goes_on() -> None:
    """A value taken in between does not change afterwards."""
    collector = Collector(SPEC)
    collector.add(record_of([[[0, 1], [2, 3]]]))
    first = collector.result()
    collector.add(record_of([[[0, 1], [2, 3]]], sample="b"))
    assert 2 == first.load_of()[0].sum()
    assert 4 == collector.result().load_of()[0].sum()
    with pytest.raises(ValueError, match="read-only"):
        first.shared_L[0] = 1
