"""Diagnosis: planted faults are the first finding, with their exact place; healthy runs have notes at most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from routeplane.inspect.compare import compare
from routeplane.inspect.diagnose import Examiner, Finding, find_findings
from routeplane.inspect.statistics import collect
from routeplane.record.record import RouteRecord
from tests.inspect import runs
from tests.inspect.planted import FAULTS, SPEC, Planted, healthy, planted

#: Seeds of one fault: the bar asks for 20.
SEEDS = 20


def diagnosed(left: Sequence[RouteRecord], right: Sequence[RouteRecord]) -> list[Finding]:
    """What the report says of two sides."""
    examiner = Examiner(layer_ids=SPEC.layer_ids)
    diff = compare(left, right, specs=(SPEC, SPEC), watch=examiner.add)
    return find_findings(collect(left, SPEC), diff=diff, examiner=examiner)


def misses(run: Planted) -> str | None:
    """What the first finding says where it is not the planted fault; None where it is."""
    [first, *_] = diagnosed(run.left, run.right)
    place = run.place
    named = (first.kind, first.sample, first.token, first.layers if place.layers else ())
    whole = place.stop is None or place.stop == first.stop
    expected = (run.kind, place.sample, place.token, place.layers)
    return None if named == expected and whole else f"{expected}, stop {place.stop}: got {named}, stop {first.stop}"


# ----------------------------------------------------------------------------------------------------------------------
# Two sides
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FAULTS)
def test_a_planted_fault_is_the_first_finding_with_its_exact_place(kind: str) -> None:
    """From 64 tokens on, at places that the seed draws."""
    assert [] == [(seed, said) for seed in range(SEEDS) if (said := misses(planted(kind, seed))) is not None]


@pytest.mark.parametrize("length", [16, 24, 32])
def test_shorter_faults_are_found_too(length: int) -> None:
    """The power that the page states: 12 tokens; one fault of each kind, but for the order of slots."""
    kinds = [kind for kind in FAULTS if kind != "slot_order"]
    found = {kind: misses(planted(kind, 100, least=length, most=length)) for kind in kinds}
    assert dict.fromkeys(kinds) == found


@pytest.mark.parametrize("seed", range(12))
def test_a_healthy_run_has_neither_errors_nor_warnings(seed: int) -> None:
    """Near-ties are a note, however many flip."""
    assert {"note"} >= {finding.severity for finding in diagnosed(*healthy(seed))}


def test_a_finding_says_how_sure_it_is() -> None:
    """Agreement read so and as is, and the tokens that vote for it."""
    run = planted("token_late", 3)
    [first, *_] = diagnosed(run.left, run.right)
    assert first.agreement is not None
    assert first.votes is not None
    assert first.agreement[0] > 0.9 > 0.5 > first.agreement[1]
    assert "read so" in first.confidence
    assert first.to_dict()["where"].startswith("sample rollout-")


def test_flips_that_compound_gradually_are_not_a_drop() -> None:
    """Agreement that falls slowly along a sample is what kernels do."""
    left, right = healthy(5)
    rng = np.random.default_rng(5)
    worn = []
    for record in right:
        routes = record.routes.copy()
        share = np.linspace(0, 0.5, len(routes))[:, None]
        changed = (rng.random(routes.shape[:2]) < share) & (routes[:, :, 0] >= 0)
        for token, slot in np.argwhere(changed):
            row = set(routes[token, slot].tolist())
            routes[token, slot, -1] = next(e for e in rng.permutation(SPEC.num_experts).tolist() if e not in row)
        worn.append(replace(record, routes=routes, checksum=None))
    assert {"note"} >= {finding.severity for finding in diagnosed(left, worn)}


def test_a_prompt_that_samples_share_is_not_a_stale_buffer() -> None:
    """Equal tokens have equal rows honestly."""
    left, right = healthy(2)
    shared = min(record.num_tokens for record in left) - 60
    for side in (left, right):
        for index in range(1, len(side)):
            routes, tokens = side[index].routes.copy(), side[index].token_ids.copy()
            routes[:shared], tokens[:shared] = side[0].routes[:shared], side[0].token_ids[:shared]
            side[index] = replace(side[index], routes=routes, token_ids=tokens, checksum=None)
    assert {"note"} >= {finding.severity for finding in diagnosed(left, right)}


def test_differences_name_their_first_place() -> None:
    """Samples of one side, other tokens, flips."""
    records = runs.run(4)
    tokens = records[1].token_ids.copy()
    tokens[7] += 1
    right = [runs.flipped(records[0]), replace(records[1], token_ids=tokens, checksum=None), records[2]]
    diff = compare(records, right, specs=(runs.SPEC, runs.SPEC))
    found = find_findings(collect(records, runs.SPEC), diff=diff)
    wheres = {finding.kind: finding.where for finding in found if finding.severity != "note"}
    assert {"unmatched_samples": "sample step-0/3", "token_mismatch": "sample step-1/1, token 7"} == wheres


# ----------------------------------------------------------------------------------------------------------------------
# One side
# ----------------------------------------------------------------------------------------------------------------------


def test_missing_rows_come_first_with_their_place() -> None:
    """An error from one in a hundred on, named with the worst sample and its first tokens."""
    records = runs.run(lost=10)
    [first, *_] = find_findings(collect(records, runs.SPEC))
    assert ("error", "missing_rows", "sample step-0/0, tokens 20 to 29") == (first.severity, first.kind, first.where)
    [first, *_] = find_findings(collect(runs.run(200, lost=10), runs.SPEC))
    assert "warning" == first.severity


def test_nothing_recorded_is_an_error() -> None:
    """No record: that comes first."""
    assert "nothing_recorded" == find_findings(collect([], SPEC))[0].kind


def test_a_layer_that_always_chooses_the_same_is_an_error() -> None:
    """A kernel that writes one buffer."""
    records = []
    for record in runs.run(12):
        routes = record.routes.copy()
        routes[:, 2] = np.where(routes[:, 2] >= 0, np.arange(4), -1)
        records.append(replace(record, routes=routes, checksum=None))
    found = find_findings(collect(records, runs.SPEC))
    assert [(5,)] == [finding.layers for finding in found if finding.kind == "constant_layer"]


@pytest.mark.parametrize(("equal", "kinds"), [(False, ["repeated_rows"]), (True, [])], ids=["other", "equal"])
def test_equal_runs_are_a_warning_where_their_tokens_differ(equal: bool, kinds: list[str]) -> None:
    """A stale buffer over 40 tokens; a prompt of one repeated token has equal rows honestly."""
    record = runs.run(1)[0]
    routes, tokens = record.routes.copy(), record.token_ids.copy()
    routes[10:50] = routes[10]
    tokens[10:50] = 7 if equal else np.arange(40)
    found = find_findings(collect([replace(record, routes=routes, token_ids=tokens, checksum=None)], runs.SPEC))
    warned = [finding for finding in found if finding.severity == "warning"]
    assert kinds == [finding.kind for finding in warned]
    assert all((11, 50) == (finding.token, finding.stop) for finding in warned)


def test_versions_that_route_otherwise_are_a_note_with_their_layer() -> None:
    """The runs here draw another router for every version."""
    found = find_findings(collect(runs.run(60), runs.SPEC))
    [drift] = [finding for finding in found if finding.kind == "drift"]
    assert (1, "note") == (len(drift.layers), drift.severity)
