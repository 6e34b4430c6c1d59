"""What a mismatch is due to: Shapley values against a plain walk over all orders, and what is refused or left open."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import combinations, permutations
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from routeplane import new_stream
from routeplane.cli.main import main
from routeplane.errors import UsageError
from routeplane.inspect.overview import FACTORS, Attribution, survey, treatment_column
from routeplane.testing.builders import watermarked_record, watermarked_spec

if TYPE_CHECKING:
    from pathlib import Path

    from routeplane.record.record import RouteRecord

SPEC = watermarked_spec(layers=(1, 2), top_k=2)


def scored(factors: tuple[str, ...], lengths: list[int], seed: int) -> tuple[list[RouteRecord], list[RouteRecord]]:
    """Records of an engine, and of a trainer that scored every combination of factors, with a gap of its own each."""
    rng = np.random.default_rng(seed)
    left, right = [], []
    for at, length in enumerate(lengths):
        record = watermarked_record(at, num_tokens=length, prompt_tokens=2, spec=SPEC)
        engine = -rng.uniform(1, 4, length).astype(np.float32)
        cells = [cell for size in range(len(factors) + 1) for cell in combinations(factors, size)]
        own = {cell: engine + rng.uniform(-0.9, 0.9, length).astype(np.float32) for cell in cells}
        engine[length - 1 :: 5] = np.nan
        columns = {treatment_column(cell): values for cell, values in own.items() if cell}
        left.append(replace(record, logprobs=engine, checksum=None))
        right.append(replace(record, logprobs=own[()], columns=columns, checksum=None))
    return left, right


def attributed(left: list[RouteRecord], right: list[RouteRecord]) -> Attribution:
    """The attribution of a survey."""
    found = survey([("step", left)], SPEC, against=right, attribute=True).attribution
    assert found is not None
    return found


def k3_of(left: list[RouteRecord], right: list[RouteRecord], cell: tuple[str, ...]) -> list[list[float]]:
    """Of each record, k3 of its sampled tokens that both sides scored."""
    found = []
    for mine, other in zip(left, right, strict=True):
        assert mine.logprobs is not None
        theirs: Any = other.columns[treatment_column(cell)] if cell else other.logprobs
        gaps = [float(theirs[token]) - float(mine.logprobs[token]) for token in range(2, mine.num_tokens)]
        found.append([np.exp(gap) - 1 - gap for gap in gaps if not np.isnan(gap)])
    return found


def mean_of(values: list[list[float]]) -> float:
    """Over all tokens."""
    return float(np.mean([each for part in values for each in part]))


@given(
    factors=st.sets(st.sampled_from(FACTORS), min_size=1, max_size=4),
    lengths=st.lists(st.integers(4, 12), min_size=2, max_size=4),
    seed=st.integers(0, 2**32),
)
def test_effects_are_those_of_all_orders(factors: set[str], lengths: list[int], seed: int) -> None:
    """Each effect is the mean over all orders of what the factor removes; with the residual they sum to the total."""
    named = tuple(factor for factor in FACTORS if factor in factors)
    left, right = scored(named, lengths, seed)
    found = attributed(left, right)

    orders = list(permutations(named))
    expected = dict.fromkeys(named, 0.0)
    for order in orders:
        for at, factor in enumerate(order):
            before, after = (tuple(each for each in named if each in order[:stop]) for stop in (at, at + 1))
            expected[factor] += mean_of(k3_of(left, right, before)) - mean_of(k3_of(left, right, after))
    for factor, effect in found.effects.items():
        assert effect.mean == pytest.approx(expected[factor] / len(orders), abs=1e-9)
    assert found.total.mean == pytest.approx(mean_of(k3_of(left, right, ())), rel=1e-9)
    assert found.residual.mean == pytest.approx(mean_of(k3_of(left, right, named)), rel=1e-9)
    parts = sum(effect.mean for effect in found.effects.values()) + found.residual.mean
    assert parts == pytest.approx(found.total.mean, abs=1e-9)
    assert (len(left), sum(len(part) for part in k3_of(left, right, ()))) == (found.samples, found.tokens)


def test_the_interval_is_over_samples() -> None:
    """1.96 standard errors of a ratio of sums, each sample one observation."""
    left, right = scored(("routes",), [6, 9, 12, 7], 3)
    found = attributed(left, right).total

    sums = np.asarray([[sum(part), len(part)] for part in k3_of(left, right, ())])
    mean = sums[:, 0].sum() / sums[:, 1].sum()
    error = np.sqrt(((sums[:, 0] - mean * sums[:, 1]) ** 2).sum() * 4 / 3) / sums[:, 1].sum()
    assert (found.low, found.high) == pytest.approx((mean - 1.96 * error, mean + 1.96 * error))


def test_a_factor_without_effect_has_none_and_corrections_stand_beside() -> None:
    """Routes that change nothing get 0, masks that repair all get all of it; TIS and IcePop touch nothing then."""
    left, right = scored(("routes", "masks"), [9, 9], 1)
    same = []
    for mine, other in zip(left, right, strict=True):
        assert mine.logprobs is not None
        engine = np.nan_to_num(mine.logprobs, nan=-1.0)
        off = engine + np.where(np.arange(9) % 2, 0.99, -0.99).astype(np.float32)
        cells = {"logprobs_routes": off, "logprobs_masks": engine, "logprobs_routes_masks": engine}
        same.append(replace(other, logprobs=off, columns=cells, checksum=None))
    found = attributed(left, same)

    assert 0.0 == found.effects["routes"].mean == found.residual.mean
    assert found.total.mean == found.effects["masks"].mean > 0.3
    (tis, tis_after), (icepop, icepop_after) = found.touched["TIS"], found.touched["IcePop"]
    assert 0.5 == tis == icepop  # ratios of e**0.99 are cut, those of e**-0.99 are left out
    assert 0.0 == tis_after == icepop_after


def test_what_cannot_be_identified_is_said() -> None:
    """Staleness takes the weights that sampled, numerics takes everything else; absent masks have no effect."""
    found = attributed(*scored(("routes",), [8, 8], 2))
    assert ["masks", "weights", "staleness", "numerics"] == list(found.unknown)
    assert "no sampling masks" in found.unknown["masks"]
    assert "logprobs_versions" in found.unknown["staleness"]
    assert "(versions)" in found.unknown["numerics"]

    whole = attributed(*scored(("routes", "versions"), [8, 8], 2))
    assert ["masks", "weights"] == list(whole.unknown)


def test_what_was_not_scored_is_refused() -> None:
    """No other side, no factor, a combination too few, an engine without log-probabilities, and no token."""
    left, right = scored(("routes", "masks"), [8, 8], 2)

    def without(name: str) -> list[RouteRecord]:
        kept = ({column: values for column, values in each.columns.items() if column != name} for each in right)
        return [replace(each, columns=columns, checksum=None) for each, columns in zip(right, kept, strict=True)]

    bare = [replace(record, columns={}, checksum=None) for record in right]
    for one, other, message in (
        (left, without("logprobs_masks"), "every combination of routes, masks .* none in logprobs_masks"),
        (left, without("logprobs_routes_masks"), "none in logprobs_routes_masks"),
        (left, bare, "every combination of routes, masks, weights"),
        (left, [right[0], bare[1]], "every combination of"),
        ([replace(record, logprobs=None, checksum=None) for record in left], right, "none of the engine"),
    ):
        with pytest.raises(UsageError, match=message):
            attributed(one, other)
    with pytest.raises(UsageError, match="against"):
        survey([("step", left)], SPEC, attribute=True)
    blank = [replace(record, logprobs=np.full(8, np.nan, dtype=np.float32), checksum=None) for record in left]
    with pytest.raises(UsageError, match="sampled tokens"):
        attributed(blank, right)


def test_the_command_prints_and_keeps_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The numbers on stdout, in the JSON document and in the page are one another's."""
    for name, records in zip(("engine", "trainer"), scored(("routes", "masks"), [9, 7], 4), strict=True):
        with new_stream(str(tmp_path / f"{name}.arrows"), SPEC) as sink:
            for record in records:
                sink.write(record)
    page = tmp_path / "page.html"
    command = ["report", str(tmp_path / "engine.arrows"), "--against", str(tmp_path / "trainer.arrows")]
    command += ["--attribute", "--out", str(page)]

    assert 0 == main(arguments=command)
    lines = capsys.readouterr().out.splitlines()
    assert 0 == main(arguments=[*command, "--json"])
    document = json.loads(capsys.readouterr().out)["attribution"]

    assert {"routes", "masks"} == set(document["effects"])
    line = next(each for each in lines if each.startswith("  routes"))
    assert f"{document['effects']['routes']['mean']:.3e}" in line
    assert line.strip() in page.read_text(encoding="utf-8")
    assert 2 == main(arguments=["report", str(tmp_path / "engine.arrows"), "--attribute", "--out", str(page)])
    assert "expected --against with --attribute" in capsys.readouterr().err
